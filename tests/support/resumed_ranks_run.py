"""On two ranks, a whole run, and one in two parts, for forked processes of a test."""

import warnings
from pathlib import Path
from typing import Any

import torch

from lit_layers.training import SeriesCheckpoint
from lit_layers.training.resuming import ResumeCheckpoint, resume_point
from lit_layers.training.run_log import RunLog
from lit_layers.training.trainer import StepSeed
from tests.support.collectives import watch_collectives
from tests.support.tiny_training import fit, module


def part(root: Path, steps: int, *, resume: bool = False) -> None:
    torch.manual_seed(17 + steps)  # what was drawn before must not matter
    options: dict[str, Any] = {"devices": 2, "strategy": "ddp", "accumulate_grad_batches": 2, "log_every_n_steps": 1}
    if resume:
        point = resume_point(root, "last")
        assert point is not None
        options["resume_from"] = point.state
    callbacks = [
        StepSeed(1),
        RunLog(root, resume=resume),
        SeriesCheckpoint([0], root),
        ResumeCheckpoint(root, every=None),
    ]
    fit(root, callbacks, steps=steps, module=module(dropout=0.2, decay_steps=6), **options)


def run(folder: Path) -> int:
    wrong = watch_collectives()
    warnings.simplefilter("ignore")  # of Lightning and torch among themselves
    part(folder / "whole", 6)
    part(folder / "parts", 3)
    part(folder / "parts", 6, resume=True)
    assert not wrong, "\n".join(wrong)
    return 0
