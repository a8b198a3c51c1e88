"""Checkpoints are measured while somebody trains: whole ones, once, whoever dies, and training is as if alone."""

import contextlib
import io
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

import lightning as L
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger

from lit_layers import records
from lit_layers.cli.main import main
from lit_layers.errors import InputError
from lit_layers.files import run_lock
from lit_layers.measuring import follow as second_process
from lit_layers.measuring.follow import MeasuringAside, follow
from lit_layers.measuring.offline import analyze_series
from lit_layers.series import StepFolders
from lit_layers.training import EmergenceCallback, SeriesCheckpoint
from lit_layers.training.resuming import ResumeCheckpoint
from tests.support.listed_batches import Listed
from tests.support.measured_series import of_texts, sorted_lines, trained, two_groups
from tests.support.rounding import assert_same_numbers
from tests.support.runs import measurement
from tests.support.series_hub import make_series, template
from tests.support.tiny_training import fit

EVERY_SECOND = {"every": 2}


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    return trained(tmp_path_factory.mktemp("runs") / "run")


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[Callable[[], None]]:
    """Actions between two looks of `follow`, one after another; it waits for none, and fails if it never ends."""
    actions: list[Callable[[], None]] = []

    def sleep(_: float) -> None:
        assert len(looks) < 20, "endless"
        looks.append(actions.pop(0)() if actions else None)

    looks = []
    clock = SimpleNamespace(time=time.time, monotonic=time.monotonic, sleep=sleep)
    monkeypatch.setattr("lit_layers.measuring.follow.time", clock)
    return actions


def age(folder: Path) -> None:
    for path in folder.iterdir():
        os.utime(path, (10**9, 10**9))


def test_whole_checkpoints_are_measured_as_they_come_and_half_written_ones_wait(run, tmp_path, waits):
    """As the HF Trainer writes them: a folder first, then file after file."""
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
@pytest.mark.parametrize(("says", "wrong"), WRONG.items())
def test_what_cannot_be_measured_is_tried_again_and_ends_nothing(run, caplog, says, wrong):
    """Also where a trainer removed a checkpoint while it was hashed."""
    calls = []

    def measure(steps) -> None:
        calls.append(steps)
        if len(calls) == 1:
            raise wrong

    follow(run, measure, patience=0)
    assert calls == [[0, 2, 4]] * 2
    assert says in caplog.text.lower()


@pytest.mark.usefixtures("waits")
def test_what_can_never_be_measured_does_not_keep_it_for_ever_and_is_its_end(run, caplog):
    def measure(_) -> None:
        raise InputError("it fits no analysis")

    with pytest.raises(InputError, match="it fits no analysis"):
        follow(run, measure, patience=0)
    assert caplog.text.count("it fits no analysis") == 1


def test_a_checkpoint_that_is_removed_while_it_is_measured_ends_the_wait_as_nothing_new_does(run, tmp_path, waits):
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


def test_without_patience_it_waits_for_ever(run, waits):
    waits += [lambda: None] * 5

    def interrupt() -> None:
        raise KeyboardInterrupt

    waits.append(interrupt)
    with pytest.raises(KeyboardInterrupt):
        follow(run, lambda _: None)


def test_it_goes_on_while_training_does_and_ends_with_it(run, tmp_path, waits):
    root = tmp_path / "run"
    shutil.copytree(run, root)
    held, looks = contextlib.ExitStack(), []
    held.enter_context(run_lock.writing(root, part="training"))

    def measure(steps) -> None:
        looks.append(steps)
        analyze_series(StepFolders(root, steps), two_groups(), root=root, beside_training=True)

    waits += [lambda: None, lambda: shutil.copytree(root / "step-000000004", root / "step-000000006") and None]
    waits += [lambda: None, held.close]
    follow(root, measure)
    assert looks == [[0, 2, 4], [0, 2, 4, 6]]
    assert len(waits) == 0


def test_a_training_and_whoever_measures_it_share_a_folder_and_nobody_else(tmp_path):
    with run_lock.writing(tmp_path, part="training"):
        assert run_lock.is_training(tmp_path)
        with run_lock.writing(tmp_path, part="measuring"):
            pass
        with pytest.raises(InputError, match="is being written by"), run_lock.writing(tmp_path):
            pass
    assert not run_lock.is_training(tmp_path)
    with (
        run_lock.writing(tmp_path),
        pytest.raises(InputError, match="is being written by"),
        run_lock.writing(tmp_path, part="measuring"),
    ):
        pass


class Heard:
    """A watcher of the callback."""

    def __init__(self) -> None:
        self.measurements = []

    def measuring(self, step, analysis) -> None:
        pass

    def measured(self, measurement) -> None:
        self.measurements.append(measurement)


def callbacks(root: Path, how: str, **options) -> list:
    measured = EmergenceCallback(two_groups(), EVERY_SECOND, root, measure=how, **options)
    return [SeriesCheckpoint(EVERY_SECOND, root), measured]


class Later:
    """The second process, begun in this one when it is waited for: what it is told is what the real one is."""

    def __init__(self, command: list[str], *, stdin: IO[bytes], **_: Any) -> None:
        assert command[-1] == "lit_layers.measuring.follow"
        self.pid, self.told, self.code = os.getpid(), io.BytesIO(stdin.read()), None

    def poll(self) -> int | None:
        return self.code

    def wait(self, _: float) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "stdin", io.TextIOWrapper(self.told))
            patch.setattr(sys, "path", [*sys.path])
            patch.setattr(os, "nice", lambda _: 0)
            patch.setattr("lit_layers.measuring.follow.EVERY", 0.01)
            second_process.main()
        self.code = 0


def ended(callback: EmergenceCallback) -> None:
    callback._aside._process.wait(300)


@pytest.mark.slow
@pytest.mark.parametrize("started", [Later, pytest.param(None, marks=pytest.mark.soak)], ids=["later", "beside"])
def test_training_goes_on_with_the_same_weights_and_the_numbers_arrive(started, tmp_path, monkeypatch):
    if started is not None:
        monkeypatch.setattr("lit_layers.measuring.follow.subprocess", SimpleNamespace(Popen=started))
    roots = {how: tmp_path / how / "run" for how in ("sync", "async")}
    with_them, heard = callbacks(roots["async"], "async"), Heard()
    with_them[1].measurer.watchers.append(heard)
    models = [
        fit(roots["sync"], callbacks(roots["sync"], "sync"), steps=4)[1],
        fit(roots["async"], with_them, steps=4)[1],
    ]
    ours, theirs = (model.state_dict() for model in models)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    if started is Later:
        assert "3 of 3 saved steps are still being measured by process" in with_them[1].under_way
    ended(with_them[1])
    with_them[1]._hear(models[1].trainer)
    assert len(heard.measurements) == 9
    assert with_them[1].under_way is None
    sync, found = sorted_lines(roots["sync"]), sorted_lines(roots["async"])
    facts = [[(m.run, m.step, m.tokens, m.analysis) for m in each] for each in (sync, found)]
    assert facts[0] == facts[1]
    assert_same_numbers(found, sync)  # of weights in memory, and of the same out of a file
    assert (roots["async"] / "measuring.log").read_text() == ""


class Beside:
    """The second process, which measures in this one what is saved at each look of training's at it."""

    def __init__(self, command: list[str], *, stdin: IO[bytes], **_: Any) -> None:
        self.pid, self.root = os.getpid(), Path(json.loads(stdin.readline())["root"])

    def poll(self) -> None:
        analyze_series(StepFolders(self.root), two_groups(), root=self.root, beside_training=True)


class AtStep3(L.Callback):
    def __init__(self, measured: EmergenceCallback) -> None:
        self.measured = measured

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx) -> None:
        if trainer.global_step == 3:
            self.measured._aside._process.poll()


@pytest.mark.slow
def test_whoever_is_told_to_end_waits_for_no_numbers(tmp_path, monkeypatch):
    monkeypatch.setattr(second_process, "subprocess", SimpleNamespace(Popen=Beside))
    root = tmp_path / "run"
    both, resumable = callbacks(root, "async"), ResumeCheckpoint(root, every=None)
    saved, save = [], resumable._save

    def saved_and_told(trainer) -> None:
        saved.append(trainer.global_step)
        save(trainer)
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(resumable, "_save", saved_and_told)
    fit(root, [*both, AtStep3(both[1]), resumable], steps=4)
    assert saved == [4]
    assert resumable.has_heard_sigterm
    assert both[1].under_way.startswith("1 of 3 saved steps")


@pytest.mark.slow
def test_the_last_numbers_reach_loggers_where_they_come_soon(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(second_process, "subprocess", SimpleNamespace(Popen=Beside))
    root, logged = tmp_path / "run", CSVLogger(tmp_path)
    sent, heard, ends = set(), Heard(), []
    monkeypatch.setattr(logged, "log_metrics", lambda metrics, step: sent.update((step, name) for name in metrics))
    both = callbacks(root, "async", watchers=[heard])
    finish = both[1].measurer.finish
    monkeypatch.setattr(both[1].measurer, "finish", lambda: ends.append(len(heard.measurements)) or finish())
    fit(root, [*both, AtStep3(both[1])], steps=4, logger=logged)
    assert both[1].under_way is None
    assert sorted((each.step, each.analysis) for each in heard.measurements) == [
        (step, name) for step in (0, 2, 4) for name in ("coupling", "other", "trajectory")
    ]
    assert {(step, f"{name}/line_shape_score") for step in (0, 2, 4) for name in ("trajectory", "other")} <= sent
    assert ends == [9]  # trackers get their tables from all of it


class Process:
    """A second process that measures one analysis of step 2 at each look, `dies` or hangs."""

    pid = 1

    def __init__(self, file: Path, names: list[str], *, dies: bool = False) -> None:
        self.file, self.names, self.dies, self.looks = file, names, dies, 0

    def poll(self) -> int | None:
        self.looks += 1
        if self.names:
            records.append(self.file, measurement("run", 2, self.names.pop(0)))
        return 1 if self.dies and not self.names else None


@pytest.mark.parametrize(
    ("process", "expected", "said"),
    [
        ({"names": ["lens", "coupling"]}, ["lens", "coupling"], None),
        ({"names": ["lens"], "dies": True}, ["lens"], "1 of 2 saved steps are not measured, as the process"),
        ({"names": ["lens"]}, ["lens"], "1 of 2 saved steps are still being measured"),  # it hangs
    ],
)
def test_the_last_step_is_waited_for_half_a_minute(process, expected, said, tmp_path, monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(time, "sleep", lambda seconds: clock.append(clock.pop() + seconds))
    aside = MeasuringAside.__new__(MeasuringAside)
    aside.root, aside._offset = tmp_path, 0
    aside._names, aside._saved, aside._measured = {"lens", "coupling"}, {0, 2}, {0: {"lens", "coupling"}}
    aside._process = Process(tmp_path / "measurements.jsonl", **process)
    assert [each.analysis for each in aside.last(is_stopped=lambda: False)] == expected
    assert clock[0] <= 30.1  # of the pretended clock
    sentence = aside.under_way()
    assert sentence is None if said is None else sentence.startswith(said)


def test_nothing_left_is_not_waited_for(tmp_path):
    aside = MeasuringAside.__new__(MeasuringAside)
    aside._saved, aside._names, aside._measured = {1}, {"lens"}, {1: {"lens"}}
    assert [*aside.last(is_stopped=lambda: False)] == []


@pytest.mark.soak
def test_a_process_that_is_killed_harms_nothing_and_the_rest_is_measured_afterwards(tmp_path):
    root = tmp_path / "run"
    both = callbacks(root, "async")
    fit(root, both, steps=4)
    process = both[1]._aside._process
    while not (root / "measurements.jsonl").exists() and process.poll() is None:
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    both[1]._aside.arrived()
    if both[1].under_way is not None:
        assert "are not measured, as the process that did it has ended" in both[1].under_way
    alone = tmp_path / "alone" / "run"
    analyze_series(StepFolders(root), two_groups(), root=alone)
    analyze_series(StepFolders(root), two_groups(), root=root, beside_training=True)
    assert [(m.step, m.records) for m in sorted_lines(root)] == [(m.step, m.records) for m in sorted_lines(alone)]
    assert len(records.read(root / "measurements.jsonl")) == 9


def test_what_async_cannot_do_is_refused_before_the_first_step(tmp_path):
    root = tmp_path / "run"
    with pytest.raises(InputError, match="measure: async measures what SeriesCheckpoint saves in"):
        fit(root, [EmergenceCallback(two_groups(), EVERY_SECOND, root, measure="async")])
    with pytest.raises(InputError, match="budget: with measure async training waits for nothing, and 5% was given"):
        EmergenceCallback(two_groups(), EVERY_SECOND, root, measure="async", budget="5%")
    with pytest.raises(InputError, match="measure: expected sync or async, got 'later'"):
        EmergenceCallback(two_groups(), EVERY_SECOND, root, measure="later")


def test_an_analysis_that_cannot_be_sent_is_refused(tmp_path):
    root = tmp_path / "run"
    text = Listed({"input_ids": torch.ones(1, 4, dtype=torch.long)})
    text.unsendable = lambda: None
    both = [SeriesCheckpoint(EVERY_SECOND, root), EmergenceCallback(two_groups(), EVERY_SECOND, root, measure="async")]
    both[1].measurer.analyses[0].batches = text
    with pytest.raises(InputError, match="measure: async cannot send the analyses to a second process"):
        fit(root, both)


def hf_folder(tmp_path: Path, steps: tuple[int, ...]) -> tuple[Path, list[str]]:
    """Checkpoints of the HF Trainer, and the words of the command."""
    model, recipe = template(tmp_path / "model", vocab_size=300), of_texts(tmp_path)
    place = make_series(model, tmp_path / "trainer", steps, name="checkpoint-{}")
    shutil.rmtree(place / "main")
    for folder in place.iterdir():
        age(folder)
    return place, ["analyze", str(place), "--config", str(recipe)]


@pytest.mark.usefixtures("waits")
def test_the_command_writes_the_numbers_that_it_writes_without_follow(tmp_path, capsys):
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

    def of_share(index: int) -> list[int]:
        before = {m.step for m in records.read(place / "measurements.jsonl")}
        followed = [*words, "--follow", "--patience=0", "--shard", f"{index}/2"]
        assert main(followed) == 0, capsys.readouterr().err
        return sorted({m.step for m in records.read(place / "measurements.jsonl")} - before)

    first = of_share(0)
    assert 0 < len(first) < 4
    shutil.rmtree(place / f"checkpoint-{first[0]}")  # as a Trainer does that keeps its last ones
    assert of_share(1) == [step for step in (2, 4, 6, 8) if step not in first]
    assert of_share(0) == []
    assert len(records.read(place / "measurements.jsonl")) == 4


def test_shares_of_one_number_measure_beside_a_training_and_each_once(tmp_path):
    def refused(part: run_lock.Part, shard: tuple[int, int]) -> bool:
        with contextlib.suppress(InputError), run_lock.writing(tmp_path, shard=shard, part=part):
            return False
        return True

    with (
        run_lock.writing(tmp_path, part="training"),
        run_lock.writing(tmp_path, part="measuring", shard=(0, 2)),
        run_lock.writing(tmp_path, part="measuring", shard=(1, 2)),
    ):
        assert all(refused("measuring", shard) for shard in [(1, 2), (1, 3), (0, 1)])
        assert refused("all", (0, 1))
    with run_lock.writing(tmp_path, part="measuring", shard=(0, 2)):
        assert refused("all", (1, 2))


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["{}/nowhere"], "follow: expected a folder, without --steps and --plan, got"),
        (["{}", "--steps", "all"], "follow: expected a folder, without --steps and --plan"),
        (["{}", "--patience", "-1"], "patience: expected"),
        (["{}", "--metrics", "banana"], "metrics: unknown name 'banana'"),
    ],
)
def test_mistakes_are_one_sentence(words, sentence, tmp_path, capsys):
    assert main(["analyze", "--follow", *(word.format(tmp_path) for word in words)]) == 2
    assert sentence in capsys.readouterr().err


def test_an_analysis_of_the_script_itself_is_refused_before_a_process_starts(tmp_path):
    class Mine(type(two_groups()[0])):
        """As one that a user's own script defines."""

    Mine.__module__ = "__main__"
    (first, *_) = two_groups()
    mine = Mine(**{name: value for name, value in vars(first).items() if not name.startswith("_")})
    with pytest.raises(InputError, match="cannot import Mine of this script: put it into a module of its own"):
        MeasuringAside(tmp_path / "run", [mine])
    assert not (tmp_path / "run" / "measuring.log").exists()
