"""Exact resume: a run that was killed goes on as if it had not been.

Everything random is a function of the step (`StepSeed`, `StepSampler`), and a resume checkpoint holds the rest:
weights, optimizer, schedule, loop counters, and how far `metrics.jsonl` had come. It is another thing than the series:
it is pruned, it is for this program, and it is written on a schedule of its own.
"""

import hashlib
import logging
import random
import shutil
import time
from pathlib import Path
from typing import Any, NamedTuple

import lightning as L
import numpy as np
import torch
from lightning.pytorch.utilities.exceptions import SIGTERMException
from pydantic import with_config
from torch import distributed
from typing_extensions import TypedDict

from lit_layers import schema
from lit_layers.durable import write_json
from lit_layers.errors import InputError
from lit_layers.schema import Count
from lit_layers.training.checkpoints import (
    axis_step,
    explained,
    refuse_diverged_weights,
    remove_folder,
    saved_steps,
    step_folder,
    write_folder,
)
from lit_layers.training.sharding import SHARDED, are_sharded, refuse_many_files, refuse_unsharded_state


class Termination:
    """Whether any rank was asked to stop.

    Takes the place of Lightning's own handler, which runs a collective wherever the signal finds the process: ranks
    that are inside another collective, or are signalled one after the other, then wait for each other for ever.
    """

    def __init__(self) -> None:
        self._asked = False
        self._group: Any = None

    def listen(self, trainer: L.Trainer) -> None:
        """Has Lightning install a handler that only notes the signal: before it installs its own, in `setup`."""
        self._asked = False
        connector: Any = trainer._signal_connector
        connector._sigterm_notifier_fn = self._note

    def connect(self, trainer: L.Trainer) -> None:
        """Lets the ranks agree; called by every rank."""
        if trainer.world_size > 1:
            self._group = distributed.new_group(backend="gloo")

    def asked(self) -> bool:
        """The same on all ranks, all of which ask: some tenths of a millisecond between CPUs of one machine."""
        if self._group is None:
            return self._asked
        flag = torch.tensor([int(self._asked)])
        distributed.all_reduce(flag, op=distributed.ReduceOp.MAX, group=self._group)
        return bool(flag)

    def _note(self, *_: Any) -> None:
        self._asked = True


logger = logging.getLogger(__name__)

FOLDER, STATE, FACTS = "resume", "trainer.ckpt", "meta.json"


class StepSeed(L.Callback):
    """Makes the randomness of a micro-batch a function of (seed, step, micro-batch, rank).

    Dropout then neither depends on what was drawn before, nor needs a generator's state to be stored.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        micro = batch_idx % trainer.accumulate_grad_batches
        key = f"{self.seed}/{trainer.global_step}/{micro}/{trainer.global_rank}".encode()
        number = int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "big")
        torch.manual_seed(number)
        random.seed(number)
        np.random.seed(number % 2**32)  # noqa: NPY002 - what others draw from


class ResumeCheckpoint(L.Callback):
    """Writes `root/resume/step-000001000`, complete or not at all, and keeps the newest.

    Written where a step is over with all that belongs to it (measuring, validation), every `every` steps, at the end,
    and when any rank is asked to stop (SIGTERM), which then ends the run with Lightning's `SIGTERMException`. The last
    callback of a run, so that it holds the others' states.

    Args:
        root: the run's folder.
        every: steps between two; None: only at the end and on SIGTERM.
        keep: how many of the newest stay.
    """

    def __init__(self, root: str | Path, *, every: int | None, keep: int = 2) -> None:
        if every is not None and every < 1:
            raise InputError(f"resume_every: expected at least 1, got {every}")
        self.folder, self.every, self.keep = Path(root) / FOLDER, every, keep
        self.paused_seconds = 0.0
        self._termination = Termination()
        self._last_step = -1

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        refuse_many_files(trainer.strategy)
        refuse_unsharded_state(trainer.strategy, trainer.ckpt_path)
        self._termination.listen(trainer)
        if trainer.is_global_zero:
            for leftover in self.folder.glob(".tmp-step-*"):
                shutil.rmtree(leftover, ignore_errors=True)
            for leftover in self.folder.glob(".state-*"):
                leftover.unlink()

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._termination.connect(trainer)
        self._last_step = axis_step(trainer)  # needs no checkpoint: a run starts there again by itself
        if trainer.is_global_zero:  # whoever goes back to a step leaves the way that the run took from there
            for step in saved_steps(self.folder):
                if step > self._last_step:
                    remove_folder(step_folder(self.folder, step))

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        # Here and not at the end of the batch before: its validation would be missing.
        if batch_idx % trainer.accumulate_grad_batches:
            return
        asked = self._termination.asked()
        if asked or (self.every is not None and axis_step(trainer) % self.every == 0):
            self._save(trainer)
        if asked:
            raise SIGTERMException

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._save(trainer)

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        refuse_diverged_weights(trainer, pl_module, axis_step(trainer), self.folder.parent)  # after their losses
        checkpoint[SHARDED] = are_sharded(trainer.strategy)

    def on_load_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        # Counted in batches of the new accumulation: else the first step would be made of part of its batches.
        batches = checkpoint["global_step"] * trainer.accumulate_grad_batches
        progress = checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"]
        for counts in (progress["current"], progress["total"]):
            counts.update(ready=batches, started=batches, processed=batches, completed=batches)

    def _save(self, trainer: L.Trainer) -> None:
        step = axis_step(trainer)
        if step == self._last_step:
            return
        self._last_step, started = step, time.perf_counter()
        temporary = self.folder / f".state-{step}"
        with explained(temporary):
            trainer.save_checkpoint(temporary, weights_only=False)  # all ranks take part
        if trainer.is_global_zero:
            write_folder(step_folder(self.folder, step), lambda folder: _fill(folder, temporary, step))
            for old in saved_steps(self.folder)[: -self.keep]:
                remove_folder(step_folder(self.folder, old))
        trainer.strategy.barrier()
        self.paused_seconds += time.perf_counter() - started


def _fill(folder: Path, state: Path, step: int) -> None:
    state.rename(folder / STATE)
    facts = {"step": step, "sha256": _sha256(folder / STATE)}
    write_json(folder / FACTS, facts)


_Facts = with_config(schema.STRICT)(TypedDict("_Facts", {"step": Count, "sha256": str}))


class ResumePoint(NamedTuple):
    """Where to go on: a whole resume checkpoint and its step."""

    step: int
    state: Path


def resume_point(root: Path, which: str) -> ResumePoint | None:
    """Returns the checkpoint that `--resume` names: "last", a step, or a folder; None for the start of the run.

    "last" passes over corrupt ones, naming them, and means the start where there never was one.

    Raises:
        InputError: a step or folder that is not there, or is corrupt; none that is whole.
    """
    folder = root / FOLDER
    steps = saved_steps(folder)
    if which == "last":
        for step in reversed(steps):
            try:
                return _whole(step_folder(folder, step))
            except InputError as error:
                logger.warning("%s; trying the one before", error)
        if steps:
            raise InputError(f"resume: none of the checkpoints in {folder} is whole; --if_exists overwrite starts anew")
        return None
    if which.isdecimal():
        if int(which) not in steps:
            available = ", ".join(map(str, steps)) or "none"
            raise InputError(f"resume: no resume checkpoint of step {which} in {folder}; there are: {available}")
        return _whole(step_folder(folder, int(which)))
    if not (Path(which) / FACTS).is_file():
        raise InputError(
            f"resume: expected last, a step, or a folder {FOLDER}/step-... of a run, got {which!r}: no {FACTS} in it"
        )
    return _whole(Path(which))


def _whole(folder: Path) -> ResumePoint:
    """The checkpoint, if its bytes are those that were written."""
    try:
        facts = schema.read(folder / FACTS, _Facts, "take another checkpoint")
        if _sha256(folder / STATE) != facts["sha256"]:
            raise InputError(f"resume: {folder / STATE} is corrupt (its hash differs from the one in {FACTS})")
        return ResumePoint(facts["step"], folder / STATE)
    except (OSError, ValueError) as error:
        raise InputError(f"resume: {folder} is no whole resume checkpoint ({error})") from error


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
