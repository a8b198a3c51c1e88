"""The callbacks in a user's own Lightning project: only one process writes to a run."""

import copy
import gc
import pickle
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

import lit_layers
from lit_layers import records
from lit_layers.analyses.base import Analysis
from lit_layers.errors import InputError
from lit_layers.files import run_lock
from lit_layers.files.run_lock import writing
from lit_layers.integrations import EmergenceTrainerCallback
from lit_layers.records import Record
from lit_layers.training import EmergenceCallback, SeriesCheckpoint
from tests.support.forked import run_forked, run_ranks
from tests.support.tiny_models import tiny
from tests.support.tiny_training import RandomBlocks, fit

REFUSED = 42


@dataclass(kw_only=True)
class One(Analysis):
    name: str = "one"

    def compute(self, model):
        yield Record(metric="one", value=1.0)


def watch(root: Path, **options) -> list[SeriesCheckpoint | EmergenceCallback]:
    return [SeriesCheckpoint([1], root), EmergenceCallback([One()], [1], root, **options)]


def train(root: Path, *others: L.Callback, if_exists: Any = "refuse", **options) -> int:
    fit(root.parent, [*watch(root, if_exists=if_exists), *others], steps=1, **options)
    return 0


def refused(root: Path, **options) -> int:
    """Return REFUSED if the training is refused because another process writes to the root."""
    try:
        return train(root, Never(), **options)
    except InputError as error:
        said = str(error)
        return REFUSED if said.startswith(f"root: {root} is being written by process ") and " on host " in said else 1


class Never(L.Callback):
    def on_train_start(self, *_):
        raise AssertionError("training has begun")


class Meanwhile(L.Callback):
    """A callback that runs an action after each batch."""

    def __init__(self, action) -> None:
        self.action = action

    def on_train_batch_end(self, *_):
        self.action()


def steps(root: Path) -> list[int | None]:
    return [measurement.step for measurement in records.read(root / "measurements.jsonl")]


def test_a_second_training_at_the_same_time_is_refused_and_changes_nothing(tmp_path):
    root = tmp_path / "run"
    in_progress = root / ".tmp-step-000000007"
    codes = []

    def another() -> None:
        in_progress.mkdir()
        codes.append(run_forked(lambda: refused(root)))
        in_progress.rmdir()  # fails if the second training removed it

    train(root, Meanwhile(another))
    assert codes == [REFUSED]
    assert steps(root) == [0, 1]
    assert not list(root.glob(".*"))
    train(root, if_exists="resume")  # the same process again, with weights that are measured already
    assert steps(root) == [0, 1, 0, 1], "step 0 says that the training went back"
    assert len({m.seconds for m in records.read(root / "measurements.jsonl")}) == 3


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt])
def test_a_failed_training_releases_the_lock_and_its_callbacks_can_be_reused(error, tmp_path):
    root = tmp_path / "run"
    callbacks = watch(root, if_exists="overwrite")

    def fail() -> None:
        assert run_lock.is_held(root)
        raise error

    with pytest.raises((ZeroDivisionError, SystemExit)):
        fit(tmp_path, [*callbacks, Meanwhile(fail)], steps=2)
    assert not run_lock.is_held(root)
    assert not list(root.glob(".writer*"))
    fit(tmp_path, [*callbacks], steps=1)
    assert steps(root) == [0, 1]


class Interrupting(TrainerCallback):
    def on_step_end(self, args, state, control, **_):
        raise KeyboardInterrupt


def test_a_failed_transformers_trainer_keeps_the_lock_and_can_train_again(tmp_path):
    root, rows = tmp_path / "run", [{"input_ids": ids, "labels": ids} for ids in RandomBlocks(4).tokens]
    arguments = TrainingArguments(
        str(tmp_path / "hf"), max_steps=2, report_to=[], use_cpu=True, disable_tqdm=True, save_strategy="no"
    )
    watched, failing = EmergenceTrainerCallback([One()], [1], root, if_exists="overwrite"), Interrupting()
    trainer = Trainer(tiny("gpt2"), arguments, train_dataset=rows, callbacks=[watched, failing])
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert run_lock.is_held(root)
    trainer.remove_callback(failing)
    trainer.train()
    assert not run_lock.is_held(root)
    assert not list(root.glob(".writer*"))
    assert max(steps(root)) == 2


@pytest.mark.soak
def test_a_transformers_trainer_that_restarts_its_loop_keeps_the_lock(tmp_path):
    """`auto_find_batch_size` calls the training loop again in this way."""
    root = tmp_path / "run"
    watched, state = EmergenceTrainerCallback([One()], [1], root), TrainerState(global_step=0, max_steps=1)
    arguments = SimpleNamespace(report_to=[], load_best_model_at_end=False, auto_find_batch_size=True)
    for _ in range(2):
        watched.on_train_begin(arguments, state, TrainerControl(), model=tiny("gpt2"))
        gc.collect()
        assert run_lock.is_held(root)
    assert run_forked(lambda: refused(root)) == REFUSED
    watched.on_train_end(arguments, state, TrainerControl())
    assert not run_lock.is_held(root)


def test_a_loop_that_runs_again_after_a_failure_holds_the_lock_until_it_ends(tmp_path):
    root = tmp_path / "run"
    watched = lit_layers.watch(tiny("gpt2"), [One()], steps=[1], root=root)  # then an exception, in a notebook
    watched = lit_layers.watch(tiny("gpt2"), [One()], steps=[1], root=root, if_exists="overwrite")
    gc.collect()
    assert run_lock.is_held(root)
    assert run_forked(lambda: refused(root)) == REFUSED
    watched.close()
    assert not run_lock.is_held(root)


def test_two_watches_over_one_run_hold_the_lock_until_both_are_closed(tmp_path):
    root, model = tmp_path / "run", tiny("gpt2")
    often = lit_layers.watch(model, [One()], steps={"every": 1}, root=root)
    seldom = lit_layers.watch(model, [One(name="two")], steps={"every": 2}, root=root)
    often.close()
    assert run_lock.is_held(root)
    seldom.close()
    assert not run_lock.is_held(root)


def test_a_training_refused_by_another_callback_leaves_no_lock_and_no_folder(tmp_path):
    class Refusing(L.Callback):
        def setup(self, trainer, pl_module, stage):
            raise InputError("not like this")

    with pytest.raises(InputError, match="not like this"):
        train(tmp_path / "run", Refusing())
    assert list(tmp_path.iterdir()) == []


def test_callbacks_can_be_pickled_and_copied(tmp_path):
    for callback in watch(tmp_path):
        for travelled in (pickle.loads(pickle.dumps(callback)), copy.deepcopy(callback)):
            assert travelled.root == tmp_path


@pytest.mark.soak
@pytest.mark.slow
def test_two_ranks_share_the_lock_and_are_refused_together(tmp_path):
    root = tmp_path / "run"
    ranks = {"devices": 2, "strategy": "ddp"}
    assert run_ranks(lambda: train(root, **ranks)) == [0, 0]
    assert steps(root) == [0, 1]
    with writing(root):
        assert run_ranks(lambda: refused(root, **ranks)) == [REFUSED, REFUSED]
