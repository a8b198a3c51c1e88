"""A checkpoint that can be loaded, and a series of them in step order."""

import functools
import pickle
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lit_layers.errors import InputError
from lit_layers.foreign_weights import would_run_code
from lit_layers.schedule import Steps
from lit_layers.series.fingerprints import Memory
from lit_layers.series.grammar import StepName
from lit_layers.series.selection import choose
from lit_layers.series.sources import Source

if TYPE_CHECKING:
    import torch
    from torch import nn


@dataclass(frozen=True)
class Checkpoint:
    """One state of one model. Nothing is read before `fetch` or `load`; `step` is None outside a series of steps.

    `approximate` marks tokens that were read off a rounded name. `step` is what the name says; `optimizer_step` differs
    from it only where a series was renamed.
    """

    series: str
    name: str
    source: Source = field(repr=False)
    step: int | None = None
    tokens: int | None = None
    approximate: bool = False
    optimizer_step: int | None = None

    def fetch(self) -> Path:
        """A local folder with the model, downloaded now if need be: for a second thread, ahead of time."""
        return self.source.fetch()

    def load(self, *, dtype: "torch.dtype | None" = None) -> "nn.Module":
        """The model on the CPU in evaluation mode, float32 unless told otherwise; no code of the checkpoint runs.

        Raises:
            InputError: files that are missing or damaged, or a pickle that is more than tensors.
        """
        import torch

        from lit_layers.models.build import load

        folder = self.fetch()
        try:
            return load(folder, dtype=dtype or torch.float32)
        except InputError as error:
            if isinstance(error.__cause__, pickle.UnpicklingError):  # said of the place on this machine
                raise would_run_code(f"{self.series} {self.name}", error.__cause__) from error
            if error.__cause__ is None:
                raise
            said = " ".join(str(error.__cause__).split())[:300]
            raise InputError(f"{self.series} {self.name} cannot be loaded ({said}): get it again") from error.__cause__

    @property
    def is_of_a_series(self) -> bool:
        """Whether it stands beside others: one that stands alone bears the name of the folder of its results."""
        return True

    def place(self) -> dict[str, Any]:
        """Where the weights come from, as provenance says it: series, repository, revision and commit."""
        return {"series": self.series, **self.source.describe()}

    def provenance(self) -> dict[str, Any]:
        """Where the weights come from and what they are: its place, and the hash of every weight file."""
        found = {**self.place(), "weight_files": self.source.weights()}
        if self.approximate:
            found["tokens_approximate"] = True
        if self.optimizer_step is not None and self.optimizer_step != self.step:
            found["optimizer_step"] = self.optimizer_step
        return found


@dataclass(frozen=True)
class Defect:
    """What somebody reported about a series; `suspect` where hashes cannot show it."""

    says: str
    source: str
    steps: tuple[int, ...] = ()
    suspect: bool = False


@dataclass(frozen=True)
class Listing:
    """Everything that is there of a series, and what is known about what should be.

    `main` is what bears no step; `expected` are the steps that belong there; `strangers` look like steps and are not
    understood; steps up to `warm_up` may hold the same weights, because the first updates have a learning rate of 0.
    """

    checkpoints: tuple[Checkpoint, ...]
    main: Checkpoint | None = None
    main_is_last: bool | None = None
    expected: tuple[int, ...] | None = None
    strangers: tuple[str, ...] = ()
    doubles: tuple[tuple[str, ...], ...] = ()
    defects: tuple[Defect, ...] = ()
    warm_up: int = 1


class Series(ABC):
    """Checkpoints in step order. Cheap to construct: what is there is asked for on first use."""

    name: str
    steps: Steps = "all"
    is_alone = False  # one model, which there is nothing to audit against
    memory: Memory | None = None  # what was read of its weights, where it lies in a folder of its own

    @abstractmethod
    def find(self) -> Listing:
        """What is there, whatever `steps` says."""

    @functools.cached_property
    def listing(self) -> Listing:
        """What is there, asked for once."""
        return self.find()

    @functools.cached_property
    def checkpoints(self) -> tuple[Checkpoint, ...]:
        """Those that `steps` chooses.

        Raises:
            InputError: a step that is not there.
        """
        by_step = {found.step: found for found in self.listing.checkpoints if found.step is not None}
        if not by_step:
            return self.listing.checkpoints
        return tuple(by_step[step] for step in choose(list(by_step), self.steps, self.name))

    def tokenizer(self, checkpoint: Checkpoint) -> str | None:
        """The tokenizer of one of its checkpoints as recipes name it; None where it has none.

        Raises:
            InputError: it cannot be had.
        """
        return checkpoint.source.tokenizer()

    def __iter__(self) -> Iterator[Checkpoint]:
        return iter(self.checkpoints)

    def __len__(self) -> int:
        return len(self.checkpoints)


def ordered(said: list[StepName]) -> tuple[list[StepName], tuple[tuple[str, ...], ...]]:
    """One name a step, in step order, and the names that mean the same step; the longest of them is the one kept."""
    by_step: dict[int, list[StepName]] = {}
    for name in said:
        by_step.setdefault(name.step, []).append(name)
    kept = [max(by_step[step], key=lambda name: (len(name.name), name.name)) for step in sorted(by_step)]
    doubles = tuple(tuple(sorted(name.name for name in names)) for names in by_step.values() if len(names) > 1)
    return kept, doubles
