"""A tiny watched run on some ranks, for forked processes of a test."""

import datetime
import time
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning as L
from torch import distributed

from lit_layers.analyses import Coupling, Lens, NextTokenProbe, Trajectory
from lit_layers.analyses.base import Analysis
from lit_layers.records import Record
from lit_layers.training import EmergenceCallback, SeriesCheckpoint, watching
from lit_layers.training.run_log import RunLog
from tests.support.collectives import watch_collectives
from tests.support.random_text import RandomText
from tests.support.tiny_training import fit, module


@dataclass(kw_only=True)
class Failing(Analysis):
    name: str = "failing"

    def compute(self, model):
        raise RuntimeError("no numbers")


@dataclass(kw_only=True)
class Slow(Analysis):
    """Takes longer than the ranks wait for each other in training's own collectives."""

    name: str = "slow"
    slept: bool = field(default=False, init=False)

    def compute(self, model):
        if distributed.is_initialized() and not self.slept:
            self.slept = True
            time.sleep(6)
        yield Record(metric="patience", value=1.0)


class Impatient(L.Callback):
    """Lets training's own collectives fail after four seconds."""

    def on_train_start(self, trainer, pl_module):
        if trainer.world_size > 1:
            patience = datetime.timedelta(seconds=4)
            distributed.distributed_c10d._set_pg_timeout(patience, distributed.group.WORLD)


def run(root: Path, ranks: int) -> int:
    wrong = watch_collectives()
    warnings.simplefilter("ignore")  # of Lightning and torch among themselves
    hash_weights = watching.weights_hash

    def on_first_rank(model: Any) -> str:
        if distributed.get_rank() if distributed.is_initialized() else 0:
            wrong.append("the same weights are hashed on another rank than the first")
        return hash_weights(model)

    watching.weights_hash = on_first_rank
    text = RandomText()
    run_log = RunLog(root)
    # the first goes to rank 0: the other could go on to the next step without it
    watched = {"num_classes": 5, "min_context": 2, "estimator": "watch"}
    analyses = [
        Slow(),
        Failing(),
        Trajectory(batches=text),
        Lens(batches=text),
        Coupling(batches=text, k=(2,)),
        NextTokenProbe(train=RandomText(8), test=RandomText(3), **watched),
    ]
    watch = EmergenceCallback(analyses, [1], root, watchers=[run_log])
    fit(
        root,
        [Impatient(), run_log, SeriesCheckpoint([1], root), watch],
        steps=3,
        module=module(dropout=0.0),
        devices=ranks,
        strategy="ddp" if ranks > 1 else "auto",
        log_every_n_steps=1,
    )
    assert not wrong, "\n".join(wrong)
    return 0
