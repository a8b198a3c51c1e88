"""Measure checkpoints during training: complete ones, once each, even after a crash, without an effect on training."""

import contextlib
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import lightning as L
import pytest

from lit_layers import records
from lit_layers.cli.main import main
from lit_layers.errors import InputError
from lit_layers.files import run_lock
from lit_layers.measuring.offline import analyze_series, follow
from lit_layers.series import StepFolders
from lit_layers.training import EmergenceCallback, SeriesCheckpoint
from tests.support.measured_series import new_recipe, sorted_lines, trained, two_groups
from tests.support.series_hub import make_series, template
from tests.support.tiny_training import fit

EVERY_SECOND = {"every": 2}


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    return trained(tmp_path_factory.mktemp("runs") / "run")


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[Callable[[], None]]:
    """Run one action per wait of `follow` instead of waiting; fail if `follow` never ends."""
    actions: list[Callable[[], None]] = []

    def sleep(_: float) -> None:
        assert len(looks) < 20, "endless"
        looks.append(actions.pop(0)() if actions else None)

    looks = []
    clock = SimpleNamespace(time=time.time, monotonic=time.monotonic, sleep=sleep)
    monkeypatch.setattr("lit_layers.measuring.offline.time", clock)
    return actions


def age(folder: Path) -> None:
    for path in folder.iterdir():
        os.utime(path, (10**9, 10**9))


def test_complete_checkpoints_are_measured_as_they_appear_and_incomplete_ones_later(run, tmp_path, waits):
    """The HF Trainer writes a folder first, then one file after another."""
    place, looks = tmp_path / "trainer", []
    half = place / "checkpoint-2"
    shutil.copytree(run / "step-000000000", place / "checkpoint-1")
    age(place / "checkpoint-1")
    waits += [
        lambda: shutil.copytree(run / "step-000000002", half, ignore=shutil.ignore_patterns("*.safetensors")) and None,
        lambda: os.utime(half / "config.json"),
        lambda: shutil.copy(run / "step-000000002" / "model.safetensors", half) and None,
        lambda: os.utime(half / "config.json"),
        lambda: age(half),
    ]
    follow(place, looks.append, patience=0)
    assert looks == [[1], [1, 2]]


WRONG = {
    "is being written by another": InputError("root: is being written by another"),
    "no such file": FileNotFoundError(2, "No such file or directory", "checkpoint-20"),
}


@pytest.mark.usefixtures("waits")
def test_a_failed_checkpoint_is_retried_and_does_not_end_the_command(run, caplog):
    """This includes a checkpoint that the trainer removed while it was hashed."""
    for says, wrong in WRONG.items():
        calls = []

        def measure(steps, calls=calls, wrong=wrong) -> None:
            calls.append(steps)
            if len(calls) == 1:
                raise wrong

        follow(run, measure, patience=0)
        assert calls == [[0, 2, 4]] * 2
        assert says in caplog.text.lower()


@pytest.mark.usefixtures("waits")
def test_a_checkpoint_that_always_fails_ends_the_wait(run, caplog):
    def measure(_) -> None:
        raise InputError("it fits no analysis")

    with pytest.raises(InputError, match="it fits no analysis"):
        follow(run, measure, patience=0)
    assert caplog.text.count("it fits no analysis") == 1


def test_a_checkpoint_removed_during_its_measurement_counts_as_no_new_one(run, tmp_path, waits):
    shutil.copytree(run, tmp_path / "run")
    last, calls = max((tmp_path / "run").glob("step-*")), []
    shutil.move(last, tmp_path / "later")

    def measure(steps) -> None:
        calls.append(len(steps))
        if len(calls) == 2:
            shutil.rmtree(last)
            raise FileNotFoundError(2, "no such file", str(last))

    waits.append(lambda: shutil.move(tmp_path / "later", last) and None)
    follow(tmp_path / "run", measure, patience=0)
    assert calls == [2, 3]


def test_without_patience_it_waits_without_end(run, waits):
    waits += [lambda: None] * 5

    def interrupt() -> None:
        raise KeyboardInterrupt

    waits.append(interrupt)
    with pytest.raises(KeyboardInterrupt):
        follow(run, lambda _: None)


def test_it_follows_a_training_until_that_ends(run, tmp_path, waits):
    root = tmp_path / "run"
    shutil.copytree(run, root)
    held, looks = contextlib.ExitStack(), []
    held.enter_context(run_lock.writing(root, part="training"))

    def measure(steps) -> None:
        looks.append(steps)
        analyze_series(StepFolders(root, steps), two_groups(), root=root, during_training=True)

    waits += [lambda: None, lambda: shutil.copytree(root / "step-000000004", root / "step-000000006") and None]
    waits += [lambda: None, held.close]
    follow(root, measure)
    assert looks == [[0, 2, 4], [0, 2, 4, 6]]
    assert len(waits) == 0


class Follower(L.Callback):
    """A callback that measures in the folder of the training, as a second process would."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def on_train_batch_end(self, trainer, pl_module, *_) -> None:
        if trainer.global_step == 3:
            analyze_series(StepFolders(self.root), two_groups(), root=self.root, during_training=True)


def test_only_a_training_that_does_not_measure_is_measured_at_the_same_time(tmp_path):
    root = tmp_path / "run"
    fit(root, [SeriesCheckpoint(EVERY_SECOND, root), Follower(root)], steps=4)
    assert {each.step for each in records.read(root / "measurements.jsonl")} == {0, 2}
    root = tmp_path / "measured"
    both = [SeriesCheckpoint(EVERY_SECOND, root), EmergenceCallback(two_groups(), EVERY_SECOND, root)]
    with pytest.raises(InputError, match="is being written by"):
        fit(root, [*both, Follower(root)], steps=4)


def hf_folder(tmp_path: Path, steps: tuple[int, ...]) -> tuple[Path, list[str]]:
    """Write checkpoints of the HF Trainer; return the arguments of the command."""
    model, recipe = template(tmp_path / "model", vocab_size=300), new_recipe(tmp_path)
    place = make_series(model, tmp_path / "trainer", steps, name="checkpoint-{}")
    shutil.rmtree(place / "main")
    for folder in place.iterdir():
        age(folder)
    return place, ["analyze", str(place), "--config", str(recipe)]


@pytest.mark.usefixtures("waits")
def test_follow_writes_the_same_numbers_as_a_later_analyze(tmp_path, capsys):
    place, words = hf_folder(tmp_path, (2, 4))
    assert main([*words, "--follow", "--patience=0", "--root", str(tmp_path / "followed" / "run")]) == 0
    assert "2 measured, 0 were known" in capsys.readouterr().out
    assert main([*words, "--root", str(tmp_path / "alone" / "run")]) == 0
    followed, alone = (sorted_lines(tmp_path / name / "run") for name in ("followed", "alone"))
    assert [(m.step, m.records, m.provenance) for m in followed] == [(m.step, m.records, m.provenance) for m in alone]
    assert [m.step for m in followed] == [2, 4]
    assert not (place / "measurements.jsonl").exists()


@pytest.mark.usefixtures("waits")
def test_two_followers_share_a_folder_whose_checkpoints_come_and_go(tmp_path, capsys):
    place, words = hf_folder(tmp_path, (2, 4, 6, 8))

    def measure_shard(index: int) -> list[int]:
        before = {m.step for m in records.read(place / "measurements.jsonl")}
        followed = [*words, "--follow", "--patience=0", "--shard", f"{index}/2"]
        assert main(followed) == 0, capsys.readouterr().err
        return sorted({m.step for m in records.read(place / "measurements.jsonl")} - before)

    first = measure_shard(0)
    assert 0 < len(first) < 4
    shutil.rmtree(place / f"checkpoint-{first[0]}")  # as a Trainer with save_total_limit does
    assert measure_shard(1) == [step for step in (2, 4, 6, 8) if step not in first]
    assert measure_shard(0) == []
    assert len(records.read(place / "measurements.jsonl")) == 4
