"""Checkpoints: folders that are complete or not there, the one a run begins with, the last healthy ones, and those that
a run is resumed from."""

import contextlib
import copy
import hashlib
import io
import logging
import math
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, cast

import lightning as L
import torch
from lightning.pytorch.utilities.exceptions import SIGTERMException
from pydantic import with_config
from safetensors import SafetensorError
from torch import Tensor
from torch.utils._pytree import tree_leaves
from typing_extensions import TypedDict

from lit_layers import run_lock, schema
from lit_layers.data.tokenization import MAIN, load_tokenizer, tokenizer_hash
from lit_layers.durable import sync, write_json
from lit_layers.errors import InputError
from lit_layers.schema import Count
from lit_layers.series.checkpoint import Checkpoint
from lit_layers.series.checkpoint_sources import FolderSource
from lit_layers.series.opening import find_checkpoint
from lit_layers.training.sharding import SHARDED, are_sharded, refuse_many_files
from lit_layers.training.trainer import Termination, is_first_rank

_NAME = re.compile(r"step-(\d{9,})")


def step_folder(root: Path, step: int) -> Path:
    """Returns `<root>/step-000001000`: names sort as steps do."""
    return root / f"step-{step:09d}"


def saved_steps(root: Path) -> list[int]:
    """Returns the steps whose folders are complete, in order."""
    return sorted(int(match[1]) for path in root.glob("step-*") if (match := _NAME.fullmatch(path.name)))


def write_folder(folder: Path, fill: Callable[[Path], None]) -> None:
    """Fills a hidden temporary folder, makes it durable and renames it: a kill leaves all of `folder` or nothing.

    Raises:
        InputError: where it cannot be written, as on a full disk.
    """
    run_lock.check(folder)
    temporary = folder.with_name(f".tmp-{folder.name}")
    with explained(folder):
        try:
            if temporary.exists():
                shutil.rmtree(temporary)
            temporary.mkdir(parents=True)
            fill(temporary)
            for path in [*temporary.rglob("*"), temporary]:
                sync(path)
            if folder.exists():
                shutil.rmtree(folder)
            temporary.rename(folder)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)  # on a full disk its place is wanted
            raise
        sync(folder.parent)
    run_lock.wrote(folder)


def remove_folder(folder: Path) -> None:
    """Removes what `write_folder` wrote."""
    run_lock.forget(folder)
    shutil.rmtree(folder)


@contextlib.contextmanager
def explained(path: Path) -> Iterator[None]:
    """Turns the operating system's refusal to write a checkpoint into the user's sentence."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        reason = (getattr(error, "strerror", None) or str(error)).lower()
        raise InputError(
            f"cannot write {path}: {reason}; what was saved before is whole: mend it and go on with --resume last"
        ) from error


def writable_folder(folder: Path, field: str) -> Path:
    """Makes `folder`, or says in one sentence why it cannot be written.

    Raises:
        InputError: naming the field, the folder and the operating system's reason.
    """
    probe = folder / f".writable-{os.getpid()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise InputError(f"{field}: cannot write to {folder} ({error.strerror}); choose another folder") from error
    return folder


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
    for callback in cast(Any, trainer).callbacks:
        if isinstance(callback, ResumeCheckpoint):
            callback.wait()  # the sentence names what is whole
    raise DivergedError(_sentence(f"the loss of step {step} is {losses[step]}", step, root))


def refuse_diverged_weights(trainer: L.Trainer, pl_module: L.LightningModule, step: int, root: Path) -> None:
    """Called by all ranks before weights are saved to go on from.

    Raises:
        DivergedError: where one of them is no number.
    """
    if not _are_finite(trainer, pl_module):
        raise DivergedError(_sentence(f"weights are not finite after step {step}", step, root))


def _are_finite(trainer: L.Trainer, pl_module: L.LightningModule) -> bool:
    local: list[Any] = [getattr(p, "to_local", lambda p=p: p)() for p in pl_module.parameters()]
    finite = torch.stack([weights.detach().isfinite().all() for weights in local]).all().float()
    return bool(trainer.strategy.reduce(finite, reduce_op="min"))


def _sentence(what: str, step: int, root: Path) -> str:
    # That the weights after a step are numbers is known from the loss of the next one.
    series = [step_folder(root, saved) for saved in saved_steps(root) if saved + 1 < step][-1:]
    resume = [step_folder(root / "resume", saved) for saved in saved_steps(root / "resume")][-1:]
    healthy = " and ".join(map(str, series + resume)) or "none"
    begin = f", in another root also with --model.init_from {series[0]}" if series else ""
    return (
        f"diverged: {what}; last healthy checkpoints: {healthy}; begin anew with a lower model.lr, a longer "
        f"model.warmup_steps or trainer.gradient_clip_val{begin}"
    )


logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Origin:
    """The steps and tokens that a model had been trained for before this run; None: tokens that nobody knows.

    `source` names the checkpoint: `init_from` and what provenance says of it.
    """

    step: int = 0
    tokens: int | None = 0
    source: dict[str, Any] = field(default_factory=dict)

    def tokens_at(self, step: int, tokens_per_step: int | None) -> int | None:
        """All tokens up to a step of the axis, where they are known."""
        if self.tokens is None or tokens_per_step is None:
            return None
        return self.tokens + (step - self.step) * tokens_per_step

    def describe(self) -> dict[str, Any]:
        """Plain JSON, for run.json."""
        return {"step": self.step, "tokens": self.tokens, **self.source}


def origin_of(trainer: L.Trainer) -> Origin:
    """That of the module in training; zero for a module that knows of none."""
    return getattr(trainer.lightning_module, "origin", None) or Origin()


def axis_step(trainer: L.Trainer) -> int:
    """The optimizer steps that the model has seen: those before this run and those of this run."""
    return origin_of(trainer).step + trainer.global_step


def published(name: str, *, allow_suspect: bool = False) -> tuple[Checkpoint, Origin]:
    """The checkpoint that `init_from` names, and what its step and tokens make of the axis.

    A checkpoint of no known step counts as the beginning: the axis then starts at 0.

    Raises:
        InputError: no such checkpoint, or one that the audit of its series finds suspect.
    """
    # One process asks for the files of all steps; the others take its word (`EmergenceCallback` sends it).
    checkpoint, verdict = find_checkpoint(name, audited=is_first_rank())
    if verdict.startswith("suspect") and not allow_suspect:
        raise InputError(
            f"model.init_from: {name} is {verdict} by the audit of its series; choose another step, or insist with "
            "--model.allow_suspect true"
        )
    source = {"init_from": name, **checkpoint.provenance(), "audit": verdict}
    if checkpoint.step is None:
        return checkpoint, Origin(source=source)
    return checkpoint, Origin(checkpoint.step, checkpoint.tokens, source)


def kept(root: Path, described: dict[str, Any]) -> tuple[Checkpoint, Origin] | None:
    """The same from the run's own folder, whose first step holds those weights; None where that step is gone."""
    source = {name: value for name, value in described.items() if name not in ("step", "tokens")}
    origin = Origin(described["step"], described["tokens"], source)
    folder = step_folder(root, origin.step)
    if not (folder / "config.json").is_file():
        return None
    return Checkpoint(root.name, folder.name, FolderSource(folder), step=origin.step, tokens=origin.tokens), origin


def refuse_another_tokenizer(folder: Path, data: Any, name: str | None) -> None:
    """Refuses token ids that mean other words to the model in `folder`.

    Raises:
        InputError: where the model carries a tokenizer and the text was made with another.
    """
    used = getattr(data.shards, "tokenizer_hash", None)
    if used is None:
        return
    if not (folder / MAIN).is_file():
        logger.warning("%s carries no %s: whether the text was made with its tokenizer is not checked", name, MAIN)
        return
    carried = tokenizer_hash(load_tokenizer(str(folder / MAIN)).tokenizer)
    if carried != used:
        raise InputError(
            f"tokenizer: {name} was trained with another one than {data.tokenizer} (hash {carried}, not {used}); name "
            "its own with --tokenizer"
        )


# Exact resume: a run that was killed goes on as if it had not been. Everything random is a function of the step
# (`StepSeed`, `StepSampler`), and a resume checkpoint holds the rest: weights, optimizer, schedule, loop counters, and
# how far `metrics.jsonl` had come. It is another thing than the series: it is pruned, it is for this program, and it is
# written on a schedule of its own.

FOLDER, STATE, FACTS = "resume", "trainer.ckpt", "meta.json"


class ResumeCheckpoint(L.Callback):
    """Writes `root/resume/step-000001000`, complete or not at all, and keeps the newest.

    Training waits while the state is copied to the CPU, into memory that is kept for the next copy; a thread of rank 0
    writes and hashes it. The next checkpoint, the end of the run and its every way to stop wait for that, and raise
    what went wrong there.

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
        self._writer = ThreadPoolExecutor(1, "resume-checkpoint")
        self._writing: Future[None] | None = None
        self._buffers: dict[int, Tensor] = {}

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        refuse_many_files(trainer.strategy)
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
            self.wait()
            trainer.strategy.barrier()
            raise SIGTERMException

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._save(trainer)
        self.wait()
        trainer.strategy.barrier()

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        if self._writing is not None:  # what ends the run is said, not what follows from it
            self._writing.exception()

    def wait(self) -> None:
        """Returns when what is being written is whole.

        Raises:
            InputError: where it could not be written.
        """
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

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
        self.wait()
        connector: Any = trainer._checkpoint_connector
        state = connector.dump_checkpoint(weights_only=False)  # all ranks take part
        if trainer.is_global_zero:
            # What was gathered from shards is large already: its copy goes when it is written.
            buffers = {} if state[SHARDED] else self._buffers
            self._writing = self._writer.submit(self._write, _on_cpu(state, buffers), step)
        self.paused_seconds += time.perf_counter() - started

    def _write(self, state: dict[str, Any], step: int) -> None:
        write_folder(step_folder(self.folder, step), lambda folder: _fill(folder, state, step))
        for old in saved_steps(self.folder)[: -self.keep]:
            remove_folder(step_folder(self.folder, old))


class _HashedFile(io.BufferedWriter):
    """Hashes what is written; the writer of `torch.save` only ever appends."""

    def __init__(self, path: Path) -> None:
        super().__init__(cast(Any, io.FileIO(path, "wb")))
        self.sha256 = hashlib.sha256()

    def write(self, data: Any) -> int:
        self.sha256.update(data)
        return super().write(data)


def _fill(folder: Path, state: dict[str, Any], step: int) -> None:
    with _HashedFile(folder / STATE) as file:
        try:
            torch.save(state, file)
        except RuntimeError as error:  # raised as the archive is closed, over what the operating system said
            if isinstance(error.__context__, OSError):
                raise error.__context__ from None
            raise
    write_json(folder / FACTS, {"step": step, "sha256": file.sha256.hexdigest()})


def _on_cpu(state: dict[str, Any], buffers: dict[int, Tensor]) -> dict[str, Any]:
    """A copy that training does not change; tensors that are one stay one.

    `buffers` are the tensors of the copy before, which are written over: fresh memory takes longer than the copying.
    """
    copies: dict[tuple, Tensor] = {}
    memo: dict[int, Any] = {}
    for leaf in tree_leaves(state):
        if isinstance(leaf, Tensor):
            place = (
                (leaf.device, leaf.data_ptr(), leaf.dtype, leaf.shape, leaf.stride()) if leaf.numel() else (id(leaf),)
            )
            if place not in copies:
                buffer = buffers.get(len(copies))
                if buffer is None or (buffer.dtype, buffer.shape) != (leaf.dtype, leaf.shape):
                    buffer = torch.empty_like(leaf, device="cpu", pin_memory=leaf.is_cuda, requires_grad=False)
                    buffers[len(copies)] = buffer
                copies[place] = buffer.copy_(leaf.detach(), non_blocking=leaf.is_cuda)
            memo[id(leaf)] = copies[place]
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return copy.deepcopy(state, memo)


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
        with open(folder / STATE, "rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        if digest != facts["sha256"]:
            raise InputError(f"resume: {folder / STATE} is corrupt (its hash differs from the one in {FACTS})")
        return ResumePoint(facts["step"], folder / STATE)
    except (OSError, ValueError) as error:
        raise InputError(f"resume: {folder} is no whole resume checkpoint ({error})") from error
