"""Where a run begins on the axis of training, and where it stands there."""

import logging
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning as L

from lit_layers.data.tokenization import MAIN, load_tokenizer, tokenizer_hash
from lit_layers.errors import InputError
from lit_layers.series.checkpoint import Checkpoint
from lit_layers.series.checkpoint_sources import FolderSource
from lit_layers.series.opening import find_checkpoint
from lit_layers.training.checkpoint_io import step_folder
from lit_layers.training.environment import is_first_rank

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
    own = tokenizer_hash(load_tokenizer(str(folder / MAIN)).tokenizer)
    if own != used:
        raise InputError(
            f"tokenizer: {name} was trained with another one than {data.tokenizer} (hash {own}, not {used}); name its "
            "own with --tokenizer"
        )
