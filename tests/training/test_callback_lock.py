"""The callbacks in a Lightning project of the user's own: one writer a run, there too."""

import copy
import pickle
import sys
from dataclasses import dataclass
from pathlib import Path

import lightning as L
import pytest

from lit_layers import records
from lit_layers.analyses.base import Analysis
from lit_layers.errors import InputError, RunLostError
from lit_layers.files import run_lock
from lit_layers.files.run_lock import writing
from lit_layers.records import Record
from lit_layers.training import EmergenceCallback, SeriesCheckpoint
from tests.support.forked import run_forked, run_ranks
from tests.support.tiny_training import fit

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="needs fork")
REFUSED = 42


@pytest.fixture(autouse=True)
def quick(monkeypatch) -> None:
    monkeypatch.setattr(run_lock, "HEARTBEAT", 0.1)
    monkeypatch.setattr(run_lock, "LOOK", 0.02)


@dataclass(kw_only=True)
class One(Analysis):
    name: str = "one"

    def run(self, model):
        yield Record(metric="one", value=1.0)


def watch(root: Path) -> list[SeriesCheckpoint | EmergenceCallback]:
    return [SeriesCheckpoint([1], root), EmergenceCallback([One()], [1], root)]


def train(root: Path, *others: L.Callback, **options) -> int:
    fit(root.parent, [*watch(root), *others], steps=1, **options)
    return 0


def refused(root: Path, **options) -> int:
    """What a training in another process comes to."""
    try:
        return train(root, Never(), **options)
    except InputError as error:
        said = str(error)
        return REFUSED if said.startswith(f"root: {root} is being written by `") and "(host " in said else 1


class Never(L.Callback):
    def on_train_start(self, *_):
        raise AssertionError("training has begun")


class Meanwhile(L.Callback):
    """Does something at the first step."""

    def __init__(self, action) -> None:
        self.action = action

    def on_train_batch_end(self, *_):
        self.action()


def steps(root: Path) -> list[int | None]:
    return [measurement.step for measurement in records.read(root / "measurements.jsonl")]


def test_a_second_training_is_refused_before_it_begins_and_harms_nothing_and_the_next_one_is_not(tmp_path):
    root = tmp_path / "run"
    in_progress = root / ".tmp-step-000000007"
    codes = []

    def another() -> None:
        in_progress.mkdir()
        codes.append(run_forked(lambda: refused(root)))
        in_progress.rmdir()  # where the second had not cleared it away

    train(root, Meanwhile(another))
    assert codes == [REFUSED]
    assert steps(root) == [0, 1]
    assert not list(root.glob(".*"))
    train(root)  # the same process again, with the weights that were measured already
    assert steps(root) == [0, 1]


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt])
def test_the_lock_ends_with_a_training_that_fails_and_the_callbacks_can_be_used_again(error, tmp_path):
    root = tmp_path / "run"
    callbacks = watch(root)

    def fail() -> None:
        assert run_lock.is_held(root)
        raise error

    with pytest.raises((ZeroDivisionError, SystemExit)):
        fit(tmp_path, [*callbacks, Meanwhile(fail)], steps=2)
    assert not run_lock.is_held(root)
    assert not list(root.glob(".writer*"))
    fit(tmp_path, [*callbacks], steps=1)
    assert steps(root)[-1] == 1


def test_a_training_that_is_refused_by_another_callback_leaves_no_lock_and_no_folder(tmp_path):
    class Refusing(L.Callback):
        def setup(self, trainer, pl_module, stage):
            raise InputError("not like this")

    with pytest.raises(InputError, match="not like this"):
        train(tmp_path / "run", Refusing())
    assert list(tmp_path.iterdir()) == []


def test_a_lock_that_the_process_holds_already_is_no_conflict_and_stays_its_own(tmp_path):
    root = tmp_path / "run"
    with writing(root):
        train(root)
        assert run_lock.is_held(root)
        assert run_forked(lambda: refused(root)) == REFUSED
    assert not run_lock.is_held(root)
    assert steps(root) == [0, 1]


def test_files_that_vanish_are_told_when_the_training_has_ended(tmp_path):
    root = tmp_path / "run"
    with pytest.raises(RunLostError, match=r"others removed or cut measurements.jsonl"):
        train(root, Meanwhile((root / "measurements.jsonl").unlink))


def test_callbacks_travel_to_processes_that_are_spawned(tmp_path):
    for callback in watch(tmp_path):
        for travelled in (pickle.loads(pickle.dumps(callback)), copy.deepcopy(callback)):
            assert travelled.root == tmp_path


@pytest.mark.slow
def test_two_ranks_hold_a_run_together_and_are_refused_together(tmp_path):
    root = tmp_path / "run"
    ranks = {"devices": 2, "strategy": "ddp"}
    assert run_ranks(lambda: train(root, **ranks)) == [0, 0]
    assert steps(root) == [0, 1]
    with writing(root):
        assert run_ranks(lambda: refused(root, **ranks)) == [REFUSED, REFUSED]
