"""Checkpoints: folders that are complete or not there, and the one that a run begins with."""

import contextlib
import logging
import math
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning as L
from torch import nn

from lit_layers.data.tokenization import MAIN, load_tokenizer, tokenizer_hash
from lit_layers.errors import InputError
from lit_layers.files.durable import own_draft_of, sync
from lit_layers.models.build import save
from lit_layers.series.checkpoint import Checkpoint
from lit_layers.series.checkpoint_sources import FolderSource
from lit_layers.series.opening import find_checkpoint
from lit_layers.training.trainer import is_first_rank

logger = logging.getLogger(__name__)
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
    temporary = draft_of(folder)
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


def save_step(model: nn.Module, root: Path, step: int, tokenizer: str | Path | None) -> None:
    """Writes the model of a step as a Hugging Face folder, complete or not at all.

    A step that is there was saved with these weights: a training that goes back takes later ones out of its root.
    """
    folder = step_folder(root, step)
    if not folder.exists():
        write_folder(folder, lambda folder: save(model, folder, tokenizer))


def draft_of(folder: Path) -> Path:
    return folder.with_name(f".tmp-{folder.name}")


@contextlib.contextmanager
def explained(path: Path) -> Iterator[None]:
    """Turns the operating system's refusal to write a checkpoint into the user's sentence."""
    try:
        yield
    except OSError as error:
        reason = (getattr(error, "strerror", None) or str(error)).lower()
        raise InputError(
            f"cannot write {path}: {reason}; what was saved before is whole: mend it and go on with --resume last"
        ) from error


def writable_folder(folder: Path, field: str) -> Path:
    """Makes `folder`, or says in one sentence why it cannot be written.

    Raises:
        InputError: naming the field, the folder and the operating system's reason.
    """
    probe = own_draft_of(folder / "writable")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise InputError(f"{field}: cannot write to {folder} ({error.strerror}); choose another folder") from error
    return folder


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


def planned_steps(trainer: L.Trainer) -> int | None:
    """Optimizer steps of this run, by the Trainer's `max_steps` and `max_epochs`; None where neither ends it."""
    steps = trainer.estimated_stepping_batches
    return int(steps) if 0 < steps < math.inf else None


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
    used = getattr(getattr(data, "shards", None), "tokenizer_hash", None)
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
