"""Checkpoints, series of checkpoints in step order, names of steps, and the choice of steps."""

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

if TYPE_CHECKING:  # torch is imported inside functions: it takes seconds, and listing files does not need it
    import torch
    from torch import nn

    from lit_layers.models.offload import Offload


PATTERNS = {
    "step": r"step[-_]?(?P<step>\d+)",
    "stages": r"(stage1-)?step(?P<step>\d+)(-tokens(?P<billions>\d+[BT]))?",  # stage 1: later stages count from 0 again
    "continued": r"stage\d+-step-(?P<step>\d+)",  # step numbers continue from one stage to the next
    "checkpoint": r"(checkpoint|ckpt|iter|global_step)[-_]?(?P<step>\d+)",
}


@dataclass(frozen=True)
class StepName:
    """The step in the name of a checkpoint, and the billions of training tokens, if the name has them."""

    name: str
    step: int
    billions: int | None = None

    def tokens(self, tokens_per_step: int | None, first: int = 0, before: int = 0) -> int | None:
        """Return the tokens seen up to this step, if the run began at step `first` after `before` tokens.

        The token count in the name is rounded to billions. It is used only if the tokens per step are unknown.
        """
        if tokens_per_step is not None:
            return before + (self.step - first) * tokens_per_step
        return None if self.billions is None else self.billions * 10**9


class Grammar:
    """The rule by which a series names its steps.

    `spelling` is a key of `PATTERNS`, or a template such as `iter_{step}`, in which * matches any text.

    Raises:
        InputError: `spelling` is neither.
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
        """Return the step in a name; None if the name does not match the grammar."""
        match = self._pattern.fullmatch(name)
        if match is None:
            return None
        numbers = {key: _number(text) for key, text in match.groupdict().items() if text is not None}
        return StepName(name, **numbers)


def _number(text: str) -> int:
    """Return the number in one part of a checkpoint's name: 7000 for 7000, 210 for 210B, 15,000 for 15T.

    The suffixes B and T mean billions and trillions of tokens. Such numbers are returned in billions.
    """
    return int(text.rstrip("BT")) * (1000 if text.endswith("T") else 1)


def recognize(names: Collection[str]) -> Grammar | None:
    """Return the known naming pattern that matches the largest number of names; None if none matches any name."""
    grammars = [Grammar(spelling) for spelling in PATTERNS]
    counts = [sum(grammar.parse(name) is not None for name in names) for grammar in grammars]
    return grammars[counts.index(max(counts))] if any(counts) else None


ALL = "all"


def choose(listed: Sequence[int], steps: Steps, where: str) -> list[int]:
    """Return the chosen steps among those listed, in order.

    `steps` is `all`, a list, `{log_spaced: N}` or a training schedule (`pythia`, `{every: 1000}`, ...).
    `{log_spaced: N}` chooses the steps nearest to N points evenly spaced in log(1 + step), with both ends. A schedule
    chooses those of its steps that are listed, and the last listed step.

    Raises:
        InputError: `steps` lists a step that is not in `listed`, or has another form.
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
    """One state of one model. No file is read before `fetch` or `load`.

    `step` comes from the name; it is None for a model outside a series of steps.
    """

    series: str
    name: str
    source: Source = field(repr=False)
    step: int | None = None
    tokens: int | None = None
    has_series: bool = True  # False: a single model, whose measurements get the run name of the run folder
    run: str | None = None  # name of the run; None: the run of the folder or, in a set of models, the model's name

    def fetch(self) -> Path:
        """Return a local folder with the model, downloaded if necessary. Several threads may call this at once."""
        return self.source.fetch()

    def load(self, *, dtype: "torch.dtype | None" = None, offload: "Offload | None" = None) -> "nn.Module":
        """Return the model on the CPU in evaluation mode, in float32 by default.

        No code of the checkpoint runs. With `offload` the blocks stay on the disk until they are used.

        Raises:
            InputError: files are missing or damaged, or a pickle holds more than tensors.
        """
        import torch

        return self.source.load(self.fetch(), dtype or torch.float32, offload)

    def config(self) -> dict[str, Any]:
        """Return the content of config.json, or an empty dictionary if the file is missing or damaged."""
        try:
            config = json.loads(self.source.read("config.json"))
        except (ValueError, LookupError, OSError):
            return {}
        return config if isinstance(config, dict) else {}

    def origin(self) -> dict[str, Any]:
        """Return where the weights come from, for provenance: series, repository, revision and commit."""
        about = self.source.describe()
        about["checkpoint"] = os.fspath(about["checkpoint"])
        return ({"series": self.series} if self.has_series else {}) | about

    def provenance(self) -> dict[str, Any]:
        """Return the origin and, for a checkpoint of a series, the hash of every weight file."""
        if not self.has_series:
            return self.origin()
        return {**self.origin(), "weight_files": self.source.weights()}

    @property
    def label(self) -> str:
        """Name of the checkpoint in messages: `step N`, or its name if it has no step."""
        return self.name if self.step is None else f"step {self.step}"


@dataclass(frozen=True)
class Listing:
    """The available checkpoints of a series, and what its manifest or run.json says about it.

    Args:
        checkpoints: all checkpoints, in step order.
        main: the branch `main`, which has no step.
        main_is_last: whether the weights of `main` should equal those of the last step; None: unknown.
        expected: all steps of the series; None: unknown.
        warm_up: steps up to this one may have equal weights, because the first learning rate may be 0.
        suspect: for each step known to be wrong although its file hashes do not show it, the reason in words.
    """

    checkpoints: tuple[Checkpoint, ...]
    main: Checkpoint | None = None
    main_is_last: bool | None = None
    expected: tuple[int, ...] | None = None
    warm_up: int = 1
    suspect: Mapping[int, str] = field(default_factory=dict)

    @property
    def last(self) -> Checkpoint | None:
        """Checkpoint of the last step; None if the checkpoints have no steps."""
        return None if self.checkpoints[-1].step is None else self.checkpoints[-1]


class Series(ABC):
    """Checkpoints in step order. They are listed on first use, so that construction is cheap."""

    name: str
    steps: Steps = "all"
    is_single = False  # True: one model, which is not audited, because there are no checkpoints to compare it with
    untrained: int | None = None  # seed of the random weights that replace the model's own; None: keep its own
    memory: Memory | None = None  # cached fingerprints of weights, if the series has a folder on this machine

    @abstractmethod
    def find(self) -> Listing:
        """List all available checkpoints, also those that `steps` does not choose."""

    @functools.cached_property
    def listing(self) -> Listing:
        """All available checkpoints. They are listed on first use and then kept."""
        return self.find()

    @functools.cached_property
    def checkpoints(self) -> tuple[Checkpoint, ...]:
        """Checkpoints that `steps` chooses.

        Raises:
            InputError: a chosen step does not exist.
        """
        by_step = {one.step: one for one in self.listing.checkpoints if one.step is not None}
        if not by_step:
            return self.listing.checkpoints
        return tuple(by_step[step] for step in choose(list(by_step), self.steps, self.name))

    def tokenizer(self, checkpoint: Checkpoint) -> str | None:
        """Return the tokenizer of a checkpoint, as a folder or `NAME[@COMMIT]` on the Hub; None if it has none.

        Raises:
            InputError: the tokenizer cannot be downloaded.
        """
        return checkpoint.source.tokenizer()

    def __iter__(self) -> Iterator[Checkpoint]:
        return iter(self.checkpoints)

    def __len__(self) -> int:
        return len(self.checkpoints)


def ordered(names: Iterable[str], grammar: Grammar | None) -> list[StepName]:
    """Return the names that match the grammar, in step order. If several have the same step, the longest is used."""
    parsed = (grammar.parse(name) for name in sorted(names, key=lambda name: (len(name), name)) if grammar is not None)
    by_step = {name.step: name for name in parsed if name is not None}
    return [by_step[step] for step in sorted(by_step)]


THREAD = "prefetch"


class _Download(Future[Path]):
    """A download of a checkpoint in a daemon thread, which starts when the downloads `after` are complete.

    The process can end before the download does. A ThreadPoolExecutor would wait for it.
    """

    def __init__(self, checkpoint: Checkpoint, after: Sequence[Future[Path]]) -> None:
        super().__init__()
        threading.Thread(target=self._run, args=(checkpoint, after), name=THREAD, daemon=True).start()

    def _run(self, checkpoint: Checkpoint, after: Sequence[Future[Path]]) -> None:
        wait(after)
        try:
            self.set_result(checkpoint.fetch())
        except BaseException as error:  # `result` raises it in the thread that waits
            self.set_exception(error)

    def result(self, timeout: float | None = None) -> Path:
        """Wait for the download, one second at a time, so that Ctrl-C is noticed.

        Ctrl-C just before a wait begins is raised only when that wait ends.
        """
        while timeout is None and not self.done():
            wait([self], 1)
        return super().result(timeout)


def prefetch(checkpoints: Sequence[Checkpoint]) -> Iterator[tuple[Checkpoint, "Future[Path]"]]:
    """Yield each checkpoint with its download. The download of the next checkpoint starts when this one is complete."""
    ahead: list[Future[Path]] = []
    for number, checkpoint in enumerate(checkpoints):
        for each in checkpoints[number + len(ahead) : number + 2]:
            ahead.append(_Download(each, ahead[-1:]))
        yield checkpoint, ahead.pop(0)
