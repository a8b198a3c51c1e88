"""Series whose checkpoints are branches of a repository of the Hub, and what manifests say of published ones."""

import dataclasses
import fnmatch
import itertools
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import Field, with_config
from typing_extensions import TypedDict

from lit_layers import schema
from lit_layers.errors import InputError
from lit_layers.files.hub import Hub, Retry
from lit_layers.schedule import Schedule, Steps
from lit_layers.schema import Count, Expected, Step
from lit_layers.series.checkpoint import (
    Checkpoint,
    Defect,
    Grammar,
    Listing,
    Series,
    StepName,
    ordered,
    parsed_names,
    recognize,
)
from lit_layers.series.checkpoint_sources import HubSource

_INSTALLED, _CHECKOUT = Path(__file__).parent / "manifests", Path(__file__).parents[2] / "checkpoints"
FOLDER = _INSTALLED if _INSTALLED.is_dir() else _CHECKOUT
_LIST = Field(strict=False)  # YAML has no tuples
_Every = Annotated[int, Field(ge=1, le=10**8), Expected("a whole number of at least 1")]
_Tokens = Annotated[int, Field(ge=1, le=10**12), Expected("a whole number of at least 1")]
_Range = Annotated[tuple[Step, Step, _Every], _LIST, Expected("[first, last, every]")]


@dataclass(frozen=True)
class Facts:
    """What a manifest says of the repositories of these names; None is unknown.

    Where a series has two labels per optimizer step, its steps were renamed. `others` are branches that are no steps of
    it, such as a later training that counts from 0 again; `*`, `?` and `[...]` stand as in file names.
    """

    names: Annotated[str | list[str], Expected("a name, or a list of names")]
    grammar: str | None = None
    steps: Annotated[str | list[Step] | dict[str, int] | None, Expected("pythia, a list of steps, or {every: N}")] = (
        None
    )
    ranges: Annotated[tuple[_Range, ...], _LIST] = ()
    first_step: Step = 0
    last_step: Step | None = None
    tokens_per_step: _Tokens | None = None
    labels_per_optimizer_step: _Every = 1
    main_is_last: bool | None = None
    warm_up: Count = 1
    defects: Annotated[tuple[schema.mapping_of(Defect), ...], _LIST] = ()  # pyright: ignore[reportInvalidTypeForm]
    others: Annotated[tuple[str, ...], _LIST] = ()

    def expected(self) -> tuple[int, ...] | None:
        """The steps that belong to the series, where they are known."""
        if self.ranges:
            every = {step for first, last, by in self.ranges for step in range(first, last + 1, by)}
        elif self.steps is not None and self.last_step is not None:
            every = set(Schedule(self.steps).until(self.last_step))
        else:
            return None
        return tuple(step for step in sorted(every) if step >= self.first_step)

    def patterns(self) -> list[str]:
        """The names of repositories, with braces written out; `*`, `?` and `[...]` stand as in file names."""
        spellings = [self.names] if isinstance(self.names, str) else self.names
        return [name for spelling in spellings for name in expand(spelling)]


@with_config(schema.STRICT)
class _Content(TypedDict):
    repositories: list[schema.mapping_of(Facts)]  # pyright: ignore[reportInvalidTypeForm]


class Manifest:
    """A YAML file about some repositories; the first of its entries that names a repository describes it.

    Raises:
        InputError: a file that is missing, no YAML, or holds unknown fields or wrong values.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._entries = schema.read_yaml(self.path, _Content, "see checkpoints/pythia.yaml")["repositories"]
        self._patterns: list[dict[str, bool]] = []  # of each entry: its names, and which of them stand for others
        for number, entry in enumerate(self._entries):
            try:
                self._patterns.append({name: bool(re.search(r"[*?\[]", name)) for name in entry.patterns()})
                if entry.steps is not None:
                    Schedule(entry.steps)
                if entry.grammar is not None:
                    Grammar(entry.grammar)
            except InputError as error:
                raise InputError(f"{self.path}: repositories.{number}: {error}") from error

    def names(self) -> list[str]:
        """The repositories that are named in full."""
        every = (item for patterns in self._patterns for item in patterns.items())
        return list(dict.fromkeys(name for name, is_pattern in every if not is_pattern))

    def facts(self, repo: str) -> Facts | None:
        """What is known of a repository, or None."""
        if (entry := self._entry(repo)) is None:
            return None
        about = (each for each in entry.defects if each.repository is None or repo in expand(each.repository))
        return dataclasses.replace(entry, defects=tuple(about))

    def _entry(self, repo: str) -> Facts | None:
        for entry, patterns in zip(self._entries, self._patterns, strict=False):
            if repo in patterns or any(fnmatch.fnmatchcase(repo, name) for name, many in patterns.items() if many):
                return entry
        return None


def known_facts(repo: str) -> Facts:
    """What the manifests that come with the package say of a repository; nothing where none knows it."""
    for path in sorted(FOLDER.glob("*.yaml")):
        if (facts := Manifest(path).facts(repo)) is not None:
            return facts
    return Facts(repo)


def expand(name: str) -> list[str]:
    """`a-{b,c}-{1..3}` written out, as a shell does it.

    Raises:
        InputError: braces within braces or that do not close, a range that counts down.
    """
    parts = re.split(r"\{([^{}]*)\}", name)
    if re.search(r"[{}]", "".join(parts[::2])):
        raise InputError(f"expected braces that close, and none within others, got {name!r}")
    choices = [part.split(",") if index % 2 else [part] for index, part in enumerate(parts)]
    ranges = [[number for choice in group for number in _numbers(choice)] for group in choices]
    return ["".join(words) for words in itertools.product(*ranges)]


def _numbers(choice: str) -> list[str]:
    ends = re.fullmatch(r"(\d{1,99})\.\.(\d{1,99})", choice)
    if ends is None:
        return [choice]
    first, last = int(ends[1]), int(ends[2])
    if first > last:
        raise InputError(f"expected a range that counts up, got {{{choice}}}")
    return [str(number) for number in range(first, last + 1)]


MAIN = "main"


class HubRevisions(Series):
    """The branches of a repository that are steps: Pythia, OLMo, CRFM and others. Listing them takes one request.

    Args:
        repo: ORGANIZATION/NAME.
        steps: all, a list, {log_spaced: N}, or a schedule as in training (pythia, {every: 1000}, ...).
        grammar: how branches are named; auto finds out.
        stage: of a training in stages, whose later ones count from 0 again (OLMo).
        ingredient: which of the stage's sibling runs, where it has any.
        manifest: a file with tokens per step and known defects; one of ours is used where it knows the repository.
    """

    def __init__(
        self,
        repo: str,
        steps: Steps = "all",
        *,
        grammar: str = "auto",
        stage: int = 1,
        ingredient: int | None = None,
        manifest: str | Path | None = None,
        retry: Retry | None = None,
    ) -> None:
        self.repo, self.steps, self.stage, self.ingredient = repo, steps, stage, ingredient
        self.name = repo if stage == 1 else f"{repo} stage {stage}"
        if ingredient is not None:
            self.name += f" ingredient {ingredient}"
        self._grammar = None if grammar == "auto" else Grammar(grammar)
        self._manifest, self._retry = manifest, retry

    def find(self) -> Listing:
        facts, hub = self._facts(), Hub(self._retry)
        commits = hub.commits(self.repo)
        grammar = self._grammar or (Grammar(facts.grammar) if facts.grammar else recognize(commits))
        no_steps = (MAIN, *facts.others)
        names = [name for name in commits if not any(fnmatch.fnmatchcase(name, other) for other in no_steps)]
        steps, strangers = parsed_names(names, grammar)
        if not steps:
            first = ", ".join([*commits][:5]) + (", ..." if len(commits) > 5 else "")
            raise InputError(
                f"{self.repo} has no branch that is a step ({len(commits)} branches: {first}): name the grammar"
            )
        kept, doubles = ordered(self._in_stage(steps))

        def source(name: str) -> HubSource:
            return HubSource(hub, self.repo, name, commits[name])

        return Listing(
            checkpoints=tuple(self._checkpoint(name, source(name.name), facts) for name in kept),
            main=Checkpoint(self.name, MAIN, source(MAIN)) if MAIN in commits else None,
            main_is_last=facts.main_is_last if self.stage == 1 else None,
            expected=facts.expected() if self.stage == 1 else None,
            strangers=strangers,
            doubles=doubles,
            defects=tuple(each for each in facts.defects if self.stage == 1 or not each.steps),
            warm_up=facts.warm_up if self.stage == 1 else 0,
        )

    def _facts(self) -> Facts:
        if self._manifest is None:
            return known_facts(self.repo)
        facts = Manifest(self._manifest).facts(self.repo)
        if facts is None:
            raise InputError(f"manifest: {self._manifest} says nothing of {self.repo}: add an entry or leave it out")
        return facts

    def _in_stage(self, steps: list[StepName]) -> list[StepName]:
        stages = sorted({step.stage for step in steps})
        if self.stage not in stages:
            raise InputError(f"stage: {self.repo} has the stages {_listed(stages)}, no stage {self.stage}")
        steps = [step for step in steps if step.stage == self.stage]
        siblings = sorted({step.ingredient for step in steps if step.ingredient is not None})
        if self.ingredient is None and len(siblings) < 2:
            return steps
        if self.ingredient not in siblings:
            names = _listed(siblings) or "none"
            raise InputError(
                f"ingredient: stage {self.stage} of {self.repo} has the ingredients {names}, sibling runs of the same "
                f"steps; choose one, got {self.ingredient}"
            )
        return [step for step in steps if step.ingredient == self.ingredient]

    def _checkpoint(self, name: StepName, source: HubSource, facts: Facts) -> Checkpoint:
        return Checkpoint(
            self.name,
            name.name,
            source,
            step=name.step,
            tokens=name.tokens(facts.tokens_per_step),
            approximate=facts.tokens_per_step is None and name.billions is not None,
            optimizer_step=name.step // facts.labels_per_optimizer_step,
        )


def _listed(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers))
