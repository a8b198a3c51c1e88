"""Two CPU processes measure the same as one, and train on the same batches."""

import datetime
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from torch import distributed

import lit_layers
from lit_layers import records
from lit_layers.analyses import Coupling, Lens, NextTokenProbe, Trajectory
from lit_layers.analyses.base import Analysis
from lit_layers.records import Record
from lit_layers.training import EmergenceCallback, SeriesCheckpoint, watching
from lit_layers.training.resuming import ResumeCheckpoint
from lit_layers.training.run_folder import saved_steps
from lit_layers.training.run_log import RunLog
from tests.support.forked import run_ranks
from tests.support.random_text import RandomText
from tests.support.tiny_training import fit, module
from tests.training.test_callbacks import Failing

pytestmark = [pytest.mark.soak, pytest.mark.slow]
PACKAGE = str(Path(lit_layers.__file__).parent)
_OBJECT_CALLS = ("all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list")
_TENSOR_CALLS = ("all_reduce", "reduce", "broadcast", "all_gather", "gather", "scatter")


def watch_collectives() -> list[str]:
    """Collect from now on the collectives of the package that would fail or be slow with nccl, one sentence each.

    On GPUs the default group uses nccl: it sends objects through the device and refuses CPU tensors. So the package
    must send objects and CPU tensors through a gloo group.
    """
    wrong: list[str] = []
    for name in (*_OBJECT_CALLS, *_TENSOR_CALLS):
        setattr(distributed, name, _watched(getattr(distributed, name), wrong))
    return wrong


def _watched(collective: Callable, wrong: list[str]) -> Callable:
    def call(*args: Any, **kwargs: Any) -> Any:
        caller = sys._getframe(1).f_code.co_filename
        if caller.startswith(PACKAGE):
            group = kwargs.get("group")
            place = f"{Path(caller).name}: {collective.__name__}"
            if group is None or group is distributed.group.WORLD:
                wrong.append(f"{place} goes by training's group")
            elif distributed.get_backend(group) != "gloo":
                wrong.append(f"{place} goes by {distributed.get_backend(group)}")
            elif any(isinstance(each, torch.Tensor) and each.device.type != "cpu" for each in args):
                wrong.append(f"{place} sends a tensor of the device by gloo")
        return collective(*args, **kwargs)

    return call


@dataclass(kw_only=True)
class Slow(Analysis):
    """An analysis that takes longer than the timeout of training's collectives."""

    name: str = "slow"
    slept: bool = field(default=False, init=False)

    def compute(self, model):
        if distributed.is_initialized() and not self.slept:
            self.slept = True
            time.sleep(6)
        yield Record(metric="patience", value=1.0)


class Impatient(L.Callback):
    """A callback that sets the timeout of training's collectives to four seconds."""

    def on_train_start(self, trainer, pl_module):
        if trainer.world_size > 1:
            patience = datetime.timedelta(seconds=4)
            distributed.distributed_c10d._set_pg_timeout(patience, distributed.group.WORLD)


def watched_run(root: Path, ranks: int) -> int:
    """Train and measure on this rank, one of `ranks`."""
    wrong = watch_collectives()
    warnings.simplefilter("ignore")  # warnings between Lightning and torch
    hash_weights = watching.weights_hash

    def on_first_rank(model: Any) -> str:
        if distributed.get_rank() if distributed.is_initialized() else 0:
            wrong.append("the same weights are hashed on another rank than the first")
        return hash_weights(model)

    watching.weights_hash = on_first_rank
    text = RandomText()
    run_log = RunLog(root)
    # Rank 0 runs the first analysis. The other rank could go on to the next step without it.
    watched = {"num_classes": 5, "min_context": 2, "estimator": "watch"}
    probe = NextTokenProbe(train=RandomText(8), test=RandomText(3), **watched)
    analyses = [Slow(), Failing(), *(kind(batches=text) for kind in (Trajectory, Lens))]
    analyses += [Coupling(batches=text, k=(2,)), probe]
    watch = EmergenceCallback(analyses, [1], root, watchers=[run_log], null="blocks")
    callbacks = [Impatient(), run_log, SeriesCheckpoint([1], root), watch, ResumeCheckpoint(root, every=2)]
    options = {"devices": ranks, "strategy": "ddp" if ranks > 1 else "auto", "log_every_n_steps": 1}
    fit(root, callbacks, steps=3, module=module(dropout=0.0), **options)
    assert not wrong, "\n".join(wrong)
    return 0


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    roots = {}
    for ranks in (1, 2):
        roots[ranks] = tmp_path_factory.mktemp(f"ranks{ranks}")
        assert run_ranks(lambda ranks=ranks: watched_run(roots[ranks], ranks), ranks) == [0] * ranks
    return roots


def test_two_ranks_train_on_the_same_global_batches(runs):
    one, two = (records.rows(runs[ranks] / "metrics.jsonl") for ranks in (1, 2))
    assert [row["step"] for row in one] == [row["step"] for row in two] == [1, 2, 3]
    assert saved_steps(runs[2] / "resume") == [2, 3]
    for first, second in zip(one, two, strict=True):
        assert first["train/loss"] == pytest.approx(second["train/loss"], abs=1e-5)


def test_two_ranks_record_every_analysis_once_in_order_with_the_same_values(runs):
    one, two = (records.read(runs[ranks] / "measurements.jsonl") for ranks in (1, 2))
    assert [(m.step, m.analysis) for m in one] == [(m.step, m.analysis) for m in two]
    assert [m.error for m in two] == [None, "RuntimeError: no numbers", None, None, None, None] * 3
    # Before the first step the weights have the same bits, and so do the records.
    assert [m.records for m in one[:6]] == [m.records for m in two[:6]]
    assert all(m.records for m in one[2:6])
    for first, second in zip(one, two, strict=True):
        for a, b in zip(first.records, second.records, strict=True):
            assert (a.metric, a.layer, a.tags) == (b.metric, b.layer, b.tags)
            assert a.value == pytest.approx(b.value, rel=1e-3, abs=1e-4)


def test_two_ranks_measure_the_null_once_with_the_same_values(runs):
    one, two = (records.read_nulls(runs[ranks]) for ranks in (1, 2))
    assert [(m.step, m.analysis) for m in one] == [(m.step, m.analysis) for m in two]
    assert len(two) == 6 - 1  # one analysis always fails
    for first, second in zip(one, two, strict=True):
        values = [[record.value for record in m.records] for m in (first, second)]
        np.testing.assert_allclose(*values, rtol=0.05, atol=0.01)


def test_two_ranks_store_the_values_of_all_prompts_in_the_order_of_one_rank(runs):
    one, two = (
        [records.read_values(runs[ranks], m) for m in records.read(runs[ranks] / "measurements.jsonl")]
        for ranks in (1, 2)
    )
    assert sum(map(bool, one)) == 4 * 3  # analyses with values of prompts, times steps
    for place, (first, second) in enumerate(zip(one, two, strict=True)):
        assert first.keys() == second.keys()
        for key, values in first.items():
            tolerance = {} if place < 6 else {"rtol": 0.05, "atol": 0.01}  # then training differs by rounding
            np.testing.assert_allclose(second[key], values, **tolerance or {"rtol": 0, "atol": 0})
