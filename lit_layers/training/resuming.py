"""Checkpoints to resume a run from: written in a background thread, complete or not at all, with finite weights."""

import contextlib
import copy
import functools
import hashlib
import logging
import math
import pickle
import shutil
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, cast

import lightning as L
import torch
from lightning.pytorch.utilities.exceptions import SIGTERMException
from pydantic import with_config
from torch import Tensor, distributed
from torch.utils._pytree import tree_leaves
from typing_extensions import TypedDict

from lit_layers import schema
from lit_layers.errors import InputError
from lit_layers.files.durable import sync, write_json
from lit_layers.measuring.ranks import OneProcess, Ranks, ranks_of
from lit_layers.schema import Count
from lit_layers.series.local_series import read_lightning
from lit_layers.training.run_folder import axis_step, saved_steps, step_folder, write_folder
from lit_layers.training.sharding import SHARDED, shards_weights

logger = logging.getLogger(__name__)


class DivergedError(RuntimeError):
    """The loss or the weights are not finite. All ranks raise this error at the same batch."""


def refuse_diverged_losses(
    trainer: L.Trainer, pl_module: L.LightningModule, losses: Mapping[int, float], root: Path
) -> None:
    """Raise an error if a loss is not finite.

    Args:
        losses: losses by step, equal on all ranks. They are already on the host, so reading them does not wait for the
            device.

    Raises:
        DivergedError: if a loss is not finite. The message names the first such step and the last healthy checkpoints.
    """
    step = next((step for step in sorted(losses) if not math.isfinite(losses[step])), None)
    if step is None:
        return
    if "16" in str(trainer.precision) and "bf16" not in str(trainer.precision) and _are_finite(trainer, pl_module):
        return  # go on: in float16 a loss may overflow, and the loss scaler then skips the update of its step
    for callback in cast("Any", trainer).callbacks:
        if isinstance(callback, ResumeCheckpoint):
            callback.wait()  # finish the pending checkpoint, so that the message can list it
    raise DivergedError(_message(f"the loss of step {step} is {losses[step]}", step, root))


def refuse_diverged_weights(trainer: L.Trainer, pl_module: L.LightningModule, step: int, root: Path) -> None:
    """Raise an error if a weight is not finite. All ranks must call this before they save a resume checkpoint.

    Raises:
        DivergedError: if a weight is not finite. The message names the step and the last healthy checkpoints.
    """
    if not _are_finite(trainer, pl_module):
        raise DivergedError(_message(f"weights are not finite after step {step}", step, root))


def _are_finite(trainer: L.Trainer, pl_module: L.LightningModule) -> bool:
    local: list[Any] = [getattr(p, "to_local", lambda p=p: p)() for p in pl_module.parameters()]
    finite = torch.stack([weights.detach().isfinite().all() for weights in local]).all().float()
    return bool(trainer.strategy.reduce(finite, reduce_op="min"))


def _message(what: str, step: int, root: Path) -> str:
    # Checkpoints of the saved series are not checked for finite weights. One counts as healthy if the next step had a
    # finite loss, which shows that the weights were finite.
    series = [step_folder(root, saved) for saved in saved_steps(root) if saved + 1 < step][-1:]
    resume = [step_folder(root / "resume", saved) for saved in saved_steps(root / "resume")][-1:]
    healthy = " and ".join(map(str, series + resume)) or "none"
    begin = f", in another root also with --model.init_from {series[0]}" if series else ""
    return (
        f"diverged: {what}; last healthy checkpoints: {healthy}; begin anew with a lower model.lr, a longer "
        f"model.warmup_steps or trainer.gradient_clip_val{begin}"
    )


# Exact resume: a killed run continues bit for bit like an uninterrupted one. Everything random is a function of
# the step (`StepSeed`, `StepSampler`). A resume checkpoint holds everything else: weights, optimizer, schedule, loop
# counters, and the length of `metrics.jsonl`. Unlike the saved series, old resume checkpoints are deleted, only this
# package reads them, and they have their own schedule.

FOLDER, STATE, FACTS = "resume", "trainer.ckpt", "meta.json"
_Facts = with_config(schema.STRICT)(TypedDict("_Facts", {"step": Count, "sha256": str}))


class ResumeCheckpoint(L.Callback):
    """A callback that writes `root/resume/step-000001000`, complete or not at all, and deletes older ones.

    Training waits while the state is copied to the CPU of rank 0; sharded weights and moments are gathered there. A
    thread of that rank then writes and hashes the file. The next checkpoint and the end of the run wait for the thread
    and raise its error on all ranks.

    The callback also loads the checkpoint that the Trainer gets as `ckpt_path`. All ranks load the path of the first
    rank. The number of ranks may differ from the run that saved it.

    A checkpoint is written when a step is complete, including its measurements and validation. This happens every
    `every` steps, at the end, and after any rank received SIGTERM. SIGTERM then ends the run with Lightning's
    `SIGTERMException`. This must be the last callback, so that it saves the final states of all others.

    Args:
        root: the run's folder.
        every: steps between two checkpoints. With None, they are only written at the end and on SIGTERM.
        keep: number of newest checkpoints to keep.
    """

    def __init__(self, root: str | Path, *, every: int | None, keep: int = 2) -> None:
        schema.refuse_below_one(resume_every=every)
        self.folder, self.every, self.keep = Path(root) / FOLDER, every, keep
        self.paused_seconds = 0.0
        self._stopping = False  # set by SIGTERM
        self._ranks: OneProcess | Ranks = OneProcess()
        self._last_step = -1
        self._writer = ThreadPoolExecutor(1, "resume-checkpoint")
        self._writing: Future[None] | None = None  # the write in progress, only on the first rank

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        # Replace Lightning's handler of SIGTERM, which starts a collective operation as soon as the signal arrives. If
        # one rank is inside another collective operation, or the signal reaches the ranks at different times, the ranks
        # would wait for each other forever.
        self._stopping, connector = False, cast("Any", trainer)._signal_connector
        connector._sigterm_notifier_fn = self._note_signal
        strategy: Any = trainer.strategy
        strategy.load_checkpoint = functools.partial(_load, strategy)
        if shards_weights(strategy):
            # Save one file: Lightning's index of sharded files is a pickle, which can run code.
            strategy._save_distributed_checkpoint = False

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._ranks = ranks_of(trainer.world_size)
        # Write no checkpoint of this step, because the run started from its state.
        self._last_step = axis_step(trainer)
        # Loading a checkpoint has replaced the optimizer's parameter groups. If a loaded group lacks an option of
        # the optimizer, the checkpoint was saved with another optimizer.
        for optimizer in trainer.optimizers:
            options = optimizer.defaults.keys() - {"differentiable"}  # not compared, as torch adds it on loading
            if any(not options <= group.keys() for group in optimizer.param_groups):
                raise InputError(f"ckpt_path: it was saved with another optimizer than {type(optimizer).__name__}")
        # A run that goes back to an earlier step deletes its later checkpoints.
        if trainer.is_global_zero:
            for step in saved_steps(self.folder):
                if step > self._last_step:
                    shutil.rmtree(step_folder(self.folder, step))

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        # Saved here and not in `on_train_batch_end`, because the step's validation runs after that hook.
        if batch_idx % trainer.accumulate_grad_batches:
            return
        stop = self._any_stopping()
        if stop or (self.every is not None and axis_step(trainer) % self.every == 0):
            self._save(trainer)
        if stop:
            self.wait()
            raise SIGTERMException

    def _note_signal(self, *_: Any) -> None:
        self._stopping = True

    def _any_stopping(self) -> bool:
        """Return whether any rank received SIGTERM. All ranks must call this, and all get the same answer."""
        if isinstance(self._ranks, OneProcess):
            return self._stopping
        flag = torch.tensor([int(self._stopping)])
        distributed.all_reduce(flag, op=distributed.ReduceOp.MAX, group=self._ranks.group)
        return bool(flag)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._save(trainer)
        self.wait()

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        # Wait for the writer, and ignore its exception: the user sees the exception that ended the run.
        if self._writing is not None:
            self._writing.exception()

    def wait(self) -> None:
        """Wait until the pending checkpoint is complete. Every rank must call this.

        Raises:
            InputError: if the checkpoint could not be written.
        """
        writing, self._writing = self._writing, None
        self._ranks.from_first(lambda: None if writing is None else writing.result())

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        # Check the weights after the last step. The losses, which `RunLog.on_save_checkpoint` has checked, are those of
        # earlier weights.
        refuse_diverged_weights(trainer, pl_module, axis_step(trainer), self.folder.parent)
        checkpoint[SHARDED] = shards_weights(trainer.strategy)

    def on_load_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        # Recompute the number of batches so far, as this run may accumulate a different number of batches per step.
        # Otherwise, the first step could get too few batches.
        batches = checkpoint["global_step"] * trainer.accumulate_grad_batches
        progress = checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"]
        for counts in (progress["current"], progress["total"]):
            counts.update(ready=batches, started=batches, processed=batches, completed=batches)

    def _save(self, trainer: L.Trainer) -> None:
        step = axis_step(trainer)
        if step == self._last_step:
            return
        self._last_step, started = step, time.perf_counter()
        self.wait()
        connector: Any = trainer._checkpoint_connector
        # All ranks must call this: with sharded weights it is a collective operation.
        state = connector.dump_checkpoint(weights_only=False)
        if trainer.is_global_zero:
            self._writing = self._writer.submit(self._write, _cpu_copy(state), step)
        self.paused_seconds += time.perf_counter() - started

    def _write(self, state: dict[str, Any], step: int) -> None:
        def fill(draft: Path) -> None:
            write_json(draft / FACTS, {"sha256": _save(draft / STATE, state), "step": step})

        write_folder(step_folder(self.folder, step), fill)
        for old in saved_steps(self.folder)[: -self.keep]:
            shutil.rmtree(step_folder(self.folder, old))


def _save(path: Path, content: Any) -> str:
    """Write tensors and plain values to a file, and return its SHA-256 hash."""
    with open(path, "wb") as file:
        try:
            torch.save(content, file)
        # If writing fails (such as on a full disk), torch raises a RuntimeError while it closes the archive. The
        # OSError of the system is only the `__context__` of this RuntimeError.
        except RuntimeError as error:
            if isinstance(error.__context__, OSError):
                raise error.__context__ from None
            raise
    sync(path)
    return _hash(path)


def _hash(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _cpu_copy(state: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of the state on the CPU. Tensors that are equal views of the same memory are copied only once."""
    copies: dict[tuple, Tensor] = {}
    memo: dict[int, Any] = {}
    for leaf in tree_leaves(state):
        if isinstance(leaf, Tensor):
            key = leaf.device, leaf.data_ptr(), leaf.dtype, leaf.shape, leaf.stride()
            if key not in copies:
                copies[key] = leaf.detach().to("cpu", copy=True)
            memo[id(leaf)] = copies[key]
    return copy.deepcopy(state, memo)


class ResumePoint(NamedTuple):
    """A checkpoint to resume from: its step and the file of its state."""

    step: int
    state: Path


def resume_point(root: Path, which: str, *, verify: bool = True) -> ResumePoint | None:
    """Return the checkpoint that `--resume` names, or None for the start of the run.

    Args:
        which: a step, or "last" for the newest checkpoint. "last" skips corrupt checkpoints with a warning. If there
            are no checkpoints, "last" means the start of the run.
        verify: whether to check the hash of the file. Only the first rank needs to check it, because all ranks load the
            checkpoint that the first rank found.

    Raises:
        InputError: if the checkpoint of the step is missing or corrupt, or "last" finds only corrupt ones. Also if
            `which` is neither a step nor "last".
    """
    folder = root / FOLDER
    steps = saved_steps(folder)
    if which == "last":
        for step in reversed(steps):
            try:
                return _intact(step_folder(folder, step), verify)
            except InputError as error:
                logger.warning("%s; trying the one before", error)
        if steps:
            whole = [step_folder(root, step) for step in saved_steps(root)][-1:]
            begin = f"go on in another root with --model.init_from {whole[0]}" if whole else "train again"
            raise InputError(f"resume: none of the checkpoints in {folder} is whole; {begin}")
        return None
    if not which.isdecimal():
        raise InputError(f"resume: expected last or a step, got {which!r}; a .ckpt file is named by --ckpt_path")
    if int(which) not in steps:
        available = ", ".join(map(str, steps)) or "none"
        raise InputError(f"resume: no resume checkpoint of step {which} in {folder}; there are: {available}")
    return _intact(step_folder(folder, int(which)), verify)


def lightning_point(file: Path) -> ResumePoint:
    """Return a .ckpt file that any Trainer saved, with its step.

    Raises:
        InputError: if there is no such file, or it holds more than tensors and plain values.
    """
    return ResumePoint(read_lightning(file)["global_step"], file)


def _intact(folder: Path, verify: bool) -> ResumePoint:
    """Return the checkpoint in a folder. Raise an error if it is incomplete or, with `verify`, its hash is wrong."""
    try:
        facts = schema.read(folder / FACTS, _Facts, "take another checkpoint")
        if verify and _hash(folder / STATE) != facts["sha256"]:
            raise InputError(f"resume: {folder / STATE} is corrupt (its hash differs from the one in {FACTS})")
        return ResumePoint(facts["step"], folder / STATE)
    except (OSError, ValueError) as error:
        raise InputError(f"resume: {folder} is no whole resume checkpoint ({error})") from error


def _load(strategy: Any, path: str | Path, weights_only: bool | None = True) -> dict[str, Any]:
    """Load the state of a checkpoint through Lightning. All ranks load the path of the first rank.

    A state from a sharded run can be loaded on any number of ranks, sharded or not. A sharded run cannot load a state
    of an unsharded run.

    Raises:
        InputError: if a sharded run gets an unsharded state, or the file is not a training state.
    """
    path = Path(strategy.broadcast(path))
    state = _read(path)
    if "optimizer_states" not in state:
        raise InputError(f"ckpt_path: {path} holds weights only: begin with them, by --model.init_from {path}")
    # Lightning would mix up the optimizer's moments. Sharded states number them in the order of the model's parameters,
    # an unsharded optimizer in the order of its groups.
    if shards_weights(strategy) and not state.get(SHARDED, False):
        raise InputError(
            f"resume: {path} was saved by a run without sharded weights; go on with the strategy of that run"
        )
    return type(strategy).load_checkpoint(strategy, path, weights_only=True)


def _read(path: Path) -> dict[str, Any]:
    # Hide the original error: errors of `torch.load` advise the user to load the file with `weights_only=False`.
    with contextlib.suppress(pickle.UnpicklingError, EOFError, RuntimeError):
        if isinstance(state := torch.load(path, map_location="cpu", weights_only=True, mmap=True), dict):
            return state
    raise InputError(
        f"{path} is no state of a training, or holds more than tensors and plain values; take another checkpoint"
    )
