"""The checkpoints that a run is resumed from: written beside training, whole or not at all, healthy, and read back."""

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
    """Raised on all ranks at the same batch; the message is one sentence."""


def refuse_diverged_losses(
    trainer: L.Trainer, pl_module: L.LightningModule, losses: Mapping[int, float], root: Path
) -> None:
    """Called with losses by step that are on the host already, the same on all ranks: no step waits for this.

    Raises:
        DivergedError: naming the first step whose loss is none, and what is left from before.
    """
    step = next((step for step in sorted(losses) if not math.isfinite(losses[step])), None)
    if step is None:
        return
    if "16" in str(trainer.precision) and "bf16" not in str(trainer.precision) and _are_finite(trainer, pl_module):
        return  # the scaler leaves such a step out
    for callback in cast("Any", trainer).callbacks:
        if isinstance(callback, ResumeCheckpoint):
            callback.wait()  # the sentence names what is whole
    raise DivergedError(_message(f"the loss of step {step} is {losses[step]}", step, root))


def refuse_diverged_weights(trainer: L.Trainer, pl_module: L.LightningModule, step: int, root: Path) -> None:
    """Called by all ranks before weights are saved to go on from.

    Raises:
        DivergedError: where one of them is no number.
    """
    if not _are_finite(trainer, pl_module):
        raise DivergedError(_message(f"weights are not finite after step {step}", step, root))


def _are_finite(trainer: L.Trainer, pl_module: L.LightningModule) -> bool:
    local: list[Any] = [getattr(p, "to_local", lambda p=p: p)() for p in pl_module.parameters()]
    finite = torch.stack([weights.detach().isfinite().all() for weights in local]).all().float()
    return bool(trainer.strategy.reduce(finite, reduce_op="min"))


def _message(what: str, step: int, root: Path) -> str:
    # That the weights after a step are numbers is known from the loss of the next one.
    series = [step_folder(root, saved) for saved in saved_steps(root) if saved + 1 < step][-1:]
    resume = [step_folder(root / "resume", saved) for saved in saved_steps(root / "resume")][-1:]
    healthy = " and ".join(map(str, series + resume)) or "none"
    begin = f", in another root also with --model.init_from {series[0]}" if series else ""
    return (
        f"diverged: {what}; last healthy checkpoints: {healthy}; begin anew with a lower model.lr, a longer "
        f"model.warmup_steps or trainer.gradient_clip_val{begin}"
    )


# Exact resume: a run that was killed goes on as if it had not been. Everything random is a function of the step
# (`StepSeed`, `StepSampler`), and a resume checkpoint holds the rest: weights, optimizer, schedule, loop counters, and
# how far `metrics.jsonl` had come. It is another thing than the series: it is pruned, it is for this program, and it is
# written on a schedule of its own.

FOLDER, STATE, FACTS = "resume", "trainer.ckpt", "meta.json"
_Facts = with_config(schema.STRICT)(TypedDict("_Facts", {"step": Count, "sha256": str}))


class ResumeCheckpoint(L.Callback):
    """Writes `root/resume/step-000001000`, complete or not at all, and keeps the newest.

    Training waits while the state is copied to the CPU of rank 0, where sharded weights and moments are gathered; a
    thread of that rank writes and hashes it. The next checkpoint, the end of the run and its every way to stop wait for
    that, and raise on all ranks what went wrong.

    Reads such a checkpoint, too, where the trainer is given one as `ckpt_path`: that of the first rank, whatever
    the others were given, on any number of ranks.

    Written where a step is over with all that belongs to it (measuring, validation), every `every` steps, at the end,
    and when any rank is asked to stop (SIGTERM), which then ends the run with Lightning's `SIGTERMException`. The last
    callback of a run, so that it holds the others' states.

    Args:
        root: the run's folder.
        every: steps between two; None: only at the end and on SIGTERM.
        keep: how many of the newest stay.
    """

    def __init__(self, root: str | Path, *, every: int | None, keep: int = 2) -> None:
        schema.refuse_below_one(resume_every=every)
        self.folder, self.every, self.keep = Path(root) / FOLDER, every, keep
        self.paused_seconds = 0.0
        self._stopping = False  # set by SIGTERM
        self._ranks: OneProcess | Ranks = OneProcess()
        self._last_step = -1
        self._writer = ThreadPoolExecutor(1, "resume-checkpoint")
        self._writing: Future[None] | None = None  # on the first rank

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        # Lightning's own handler runs a collective wherever the signal finds the process: ranks that are inside another
        # one, or are signalled one after the other, then wait for each other for ever.
        self._stopping, connector = False, cast("Any", trainer)._signal_connector
        connector._sigterm_notifier_fn = self._note_signal
        strategy: Any = trainer.strategy
        strategy.load_checkpoint = functools.partial(_load, strategy)
        if shards_weights(strategy):
            strategy._save_distributed_checkpoint = False  # Lightning's index of shards is a pickle

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._ranks = ranks_of(trainer.world_size)
        self._last_step = axis_step(trainer)  # needs no checkpoint: a run starts there again by itself
        for optimizer in trainer.optimizers:  # whose groups a checkpoint has replaced
            options = optimizer.defaults.keys() - {"differentiable"}  # which torch adds as it loads
            if any(not options <= group.keys() for group in optimizer.param_groups):
                raise InputError(f"ckpt_path: it was saved with another optimizer than {type(optimizer).__name__}")
        if trainer.is_global_zero:  # whoever goes back to a step leaves the way that the run took from there
            for step in saved_steps(self.folder):
                if step > self._last_step:
                    shutil.rmtree(step_folder(self.folder, step))

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        # Here and not at the end of the batch before: its validation would be missing.
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
        """Return whether any rank was asked to stop: the same on all ranks, all of which call."""
        if isinstance(self._ranks, OneProcess):
            return self._stopping
        flag = torch.tensor([int(self._stopping)])
        distributed.all_reduce(flag, op=distributed.ReduceOp.MAX, group=self._ranks.group)
        return bool(flag)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._save(trainer)
        self.wait()

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        if self._writing is not None:  # what ends the run is said, not what follows from it
            self._writing.exception()

    def wait(self) -> None:
        """Return when what is being written is whole; every rank calls.

        Raises:
            InputError: where it could not be written.
        """
        writing, self._writing = self._writing, None
        self._ranks.from_first(lambda: None if writing is None else writing.result())

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        refuse_diverged_weights(trainer, pl_module, axis_step(trainer), self.folder.parent)  # after their losses
        checkpoint[SHARDED] = shards_weights(trainer.strategy)

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
        self.wait()
        connector: Any = trainer._checkpoint_connector
        state = connector.dump_checkpoint(weights_only=False)  # all ranks take part
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
    """Write tensors and plain values; the hash of the file."""
    with open(path, "wb") as file:
        try:
            torch.save(content, file)
        except RuntimeError as error:  # raised as the archive is closed, over what the operating system said
            if isinstance(error.__context__, OSError):
                raise error.__context__ from None
            raise
    sync(path)
    return _hash(path)


def _hash(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _cpu_copy(state: dict[str, Any]) -> dict[str, Any]:
    """Return a copy that training does not change; tensors that are one stay one."""
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
    """Where to go on: a whole resume checkpoint and its step."""

    step: int
    state: Path


def resume_point(root: Path, which: str, *, verify: bool = True) -> ResumePoint | None:
    """Return the checkpoint that `--resume` names: "last", or a step; None for the start of the run.

    "last" passes over corrupt ones, naming them, and means the start where there never was one. Without `verify`, it is
    what is there by its name: for the other ranks, as `ResumeCheckpoint` reads what the first one found whole.

    Raises:
        InputError: a step that is not there, or is corrupt; none that is whole.
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
    """Return a .ckpt that any Trainer saved.

    Raises:
        InputError: none there, or one that holds more than tensors and plain values.
    """
    return ResumePoint(read_lightning(file)["global_step"], file)


def _intact(folder: Path, verify: bool) -> ResumePoint:
    """The checkpoint, if its bytes are those that were written."""
    try:
        facts = schema.read(folder / FACTS, _Facts, "take another checkpoint")
        if verify and _hash(folder / STATE) != facts["sha256"]:
            raise InputError(f"resume: {folder / STATE} is corrupt (its hash differs from the one in {FACTS})")
        return ResumePoint(facts["step"], folder / STATE)
    except (OSError, ValueError) as error:
        raise InputError(f"resume: {folder} is no whole resume checkpoint ({error})") from error


def _load(strategy: Any, path: str | Path, weights_only: bool | None = True) -> dict[str, Any]:
    """Load the state in a checkpoint that the first rank names, as Lightning does.

    Weights saved by a sharded run go to any number of ranks, sharded or not. Those of an unsharded run are refused by
    a sharded one: Lightning would mix up the optimizer's moments, which it numbers in the model's order, an unsharded
    optimizer in the order of its groups.

    Raises:
        InputError: where a sharded run is to begin with such a state, or a file is no state of a training.
    """
    path = Path(strategy.broadcast(path))
    state = _read(path)
    if "optimizer_states" not in state:
        raise InputError(f"ckpt_path: {path} holds weights only: begin with them, by --model.init_from {path}")
    if shards_weights(strategy) and not state.get(SHARDED, False):
        raise InputError(
            f"resume: {path} was saved by a run without sharded weights; go on with the strategy of that run"
        )
    return type(strategy).load_checkpoint(strategy, path, weights_only=True)


def _read(path: Path) -> dict[str, Any]:
    with contextlib.suppress(pickle.UnpicklingError, EOFError, RuntimeError):  # which advise to trust the file
        if isinstance(state := torch.load(path, map_location="cpu", weights_only=True, mmap=True), dict):
            return state
    raise InputError(
        f"{path} is no state of a training, or holds more than tensors and plain values; take another checkpoint"
    )
