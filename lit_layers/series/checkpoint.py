"""A checkpoint that can be loaded, and a series of them in step order: their names, and which steps are chosen."""

import functools
import json
import math
import os
import re
import threading
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lit_layers.errors import InputError
from lit_layers.schedule import Schedule, Steps
from lit_layers.schema import MANY, Range, refuse_outside
from lit_layers.series.checkpoint_sources import Memory, Source

if TYPE_CHECKING:  # inside functions, torch: it takes seconds to import, and what only lists files needs none of it
    import torch
    from torch import nn

    from lit_layers.models.offload import Offload


PATTERNS = {
    "step": r"step[-_]?(?P<step>\d+)",
    "stages": r"(stage1-)?step(?P<step>\d+)(-tokens(?P<billions>\d+[BT]))?",  # later ones count from 0 again
    "continued": r"stage\d+-step-(?P<step>\d+)",  # through all stages
    "checkpoint": r"(checkpoint|ckpt|iter|global_step)[-_]?(?P<step>\d+)",
}


@dataclass(frozen=True)
class StepName:
    """A name that was understood. `billions` of tokens are rounded by whoever named the branch."""

    name: str
    step: int
    billions: int | None = None

    def tokens(self, tokens_per_step: int | None, first: int = 0, before: int = 0) -> int | None:
        """Tokens seen at this step, of which `before` up to the step `first`.

        From the name, good to a billion, only where a step's tokens are unknown.
        """
        if tokens_per_step is not None:
            return before + (self.step - first) * tokens_per_step
        return None if self.billions is None else self.billions * 10**9


class Grammar:
    """How a series names its steps: a key of `PATTERNS`, or a template such as `iter_{step}`, where * is any text.

    Raises:
        InputError: for anything else.
    """

    def __init__(self, spelling: str) -> None:
        self.spelling = spelling
        pattern = PATTERNS.get(spelling)
        if pattern is None:
            parts = spelling.split("{step}")
            if len(parts) != 2:
                raise InputError(
                    f"grammar: expected auto, {', '.join(PATTERNS)} or a template as iter_{{step}}, got {spelling!r}"
                )
            pattern = r"(?P<step>\d+)".join(re.escape(part).replace(r"\*", ".*") for part in parts)
        self._pattern = re.compile(pattern)

    def parse(self, name: str) -> StepName | None:
        """What a name says, or None where it is no step of this grammar."""
        match = self._pattern.fullmatch(name)
        if match is None:
            return None
        numbers = {key: _number(text) for key, text in match.groupdict().items() if text is not None}
        return StepName(name, **numbers)


def _number(text: str) -> int:
    """210B are 210 billions, 15T are 15,000."""
    return int(text.rstrip("BT")) * (1000 if text.endswith("T") else 1)


def recognize(names: Collection[str]) -> Grammar | None:
    """The known grammar that understands most of the names; None where none understands any."""
    grammars = [Grammar(spelling) for spelling in PATTERNS]
    counts = [sum(grammar.parse(name) is not None for name in names) for grammar in grammars]
    return grammars[counts.index(max(counts))] if any(counts) else None


ALL = "all"


def choose(listed: Sequence[int], steps: Steps, where: str) -> list[int]:
    """The steps that were asked for, in order.

    `all`; a list; `{log_spaced: N}` for the first, the last and those nearest to N on a logarithmic axis; or a schedule
    of training (`pythia`, `{every: 1000}`, ...), which takes what is there of it, and the last step.

    Raises:
        InputError: a step that is not there, an unknown form, nothing left.
    """
    if steps == ALL:
        return sorted(listed)
    if isinstance(steps, Mapping) and set(steps) == {"log_spaced"}:
        return _log_spaced(sorted(listed), steps["log_spaced"])
    schedule = Schedule(steps)
    if not isinstance(steps, str | Mapping):
        if missing := [step for step in steps if step not in listed]:
            near = sorted(sorted(listed, key=lambda step: abs(step - missing[0]))[:2])
            raise InputError(
                f"steps: {where} has no step {missing[0]}; it has {len(listed)} steps from {min(listed)} to "
                f"{max(listed)}, the nearest {' and '.join(map(str, near))}"
            )
        return sorted(set(steps))
    last = max(listed)
    return [step for step in sorted(listed) if step in schedule or step == last]


def _log_spaced(listed: list[int], count: Any) -> list[int]:
    refuse_outside("steps.", {"log_spaced": Range(2, MANY, whole=True)}, {"log_spaced": count})
    if count >= len(listed):
        return listed
    logs = [math.log1p(step) for step in listed]
    width = (logs[-1] - logs[0]) / (count - 1)
    goals = [logs[0] + index * width for index in range(count)]
    return sorted({min(zip(logs, listed, strict=True), key=lambda pair: abs(pair[0] - goal))[1] for goal in goals})


@dataclass(frozen=True)
class Checkpoint:
    """One state of one model. Nothing is read before `fetch` or `load`; `step` is None outside a series of steps.

    `step` is what the name says.
    """

    series: str
    name: str
    source: Source = field(repr=False)
    step: int | None = None
    tokens: int | None = None
    has_series: bool = True  # one that stands alone bears the name of the folder of its results
    run: str | None = None  # or this name, wherever its results are

    def fetch(self) -> Path:
        """A local folder with the model, downloaded now if need be: for a second thread, ahead of time."""
        return self.source.fetch()

    def load(self, *, dtype: "torch.dtype | None" = None, offload: "Offload | None" = None) -> "nn.Module":
        """The model on the CPU in evaluation mode, float32 by default; no code of the checkpoint runs.

        With `offload` its blocks stay on the disk.

        Raises:
            InputError: files that are missing or damaged, or a pickle that is more than tensors.
        """
        import torch

        return self.source.load(self.fetch(), dtype or torch.float32, offload)

    def config(self) -> dict[str, Any]:
        """What config.json says; nothing where it is damaged, which loading the model refuses."""
        try:
            config = json.loads(self.source.read("config.json"))
        except (ValueError, LookupError, OSError):
            return {}
        return config if isinstance(config, dict) else {}

    def origin(self) -> dict[str, Any]:
        """Where the weights come from, as provenance says it: series, repository, revision and commit."""
        about = self.source.describe()
        about["checkpoint"] = os.fspath(about["checkpoint"])
        return ({"series": self.series} if self.has_series else {}) | about

    def provenance(self) -> dict[str, Any]:
        """Where the weights come from and what they are: its place, and the hash of every weight file."""
        if not self.has_series:
            return self.origin()
        return {**self.origin(), "weight_files": self.source.weights()}

    @property
    def label(self) -> str:
        """What a sentence calls it: its step, or its name where it has none."""
        return self.name if self.step is None else f"step {self.step}"


@dataclass(frozen=True)
class Listing:
    """Everything that is there of a series, and what is known about what should be.

    `main` is what bears no step; `expected` are the steps that belong there; steps up to `warm_up` may hold the same
    weights, because the first updates have a learning rate of 0. `suspect` says why steps are wrong that no hash shows.
    """

    checkpoints: tuple[Checkpoint, ...]
    main: Checkpoint | None = None
    main_is_last: bool | None = None
    expected: tuple[int, ...] | None = None
    warm_up: int = 1
    suspect: Mapping[int, str] = field(default_factory=dict)

    @property
    def last(self) -> Checkpoint | None:
        """The last step; None where there are no steps."""
        return None if self.checkpoints[-1].step is None else self.checkpoints[-1]


class Series(ABC):
    """Checkpoints in step order. Cheap to construct: what is there is asked for on first use."""

    name: str
    steps: Steps = "all"
    is_single = False  # one model, which there is nothing to audit against
    untrained: int | None = None  # the seed of new weights in place of its own
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
        by_step = {one.step: one for one in self.listing.checkpoints if one.step is not None}
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


def ordered(names: Iterable[str], grammar: Grammar | None) -> list[StepName]:
    """One name a step, in step order; of names of one step the longest."""
    parsed = (grammar.parse(name) for name in sorted(names, key=lambda name: (len(name), name)) if grammar is not None)
    by_step = {name.step: name for name in parsed if name is not None}
    return [by_step[step] for step in sorted(by_step)]


THREAD = "prefetch"


class _Download(Future[Path]):
    """A download by a daemon thread, which ends with the process: the thread of an executor would be waited for."""

    def __init__(self, checkpoint: Checkpoint, after: Sequence[Future[Path]]) -> None:
        super().__init__()
        threading.Thread(target=self._run, args=(checkpoint, after), name=THREAD, daemon=True).start()

    def _run(self, checkpoint: Checkpoint, after: Sequence[Future[Path]]) -> None:
        wait(after)
        try:
            self.set_result(checkpoint.fetch())
        except BaseException as error:  # raised where the result is asked for
            self.set_exception(error)

    def result(self, timeout: float | None = None) -> Path:
        """Wait a second at a time: a Ctrl-C just before a wait begins is only raised when that wait ends."""
        while timeout is None and not self.done():
            wait([self], 1)
        return super().result(timeout)


def prefetch(checkpoints: Sequence[Checkpoint]) -> Iterator[tuple[Checkpoint, "Future[Path]"]]:
    """Yield each checkpoint and its download; the next download begins when this one is complete."""
    ahead: list[Future[Path]] = []
    for number, checkpoint in enumerate(checkpoints):
        for each in checkpoints[number + len(ahead) : number + 2]:
            ahead.append(_Download(each, ahead[-1:]))
        yield checkpoint, ahead.pop(0)
