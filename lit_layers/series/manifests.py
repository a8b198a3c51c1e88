"""What is known of published series: which steps, how many tokens each, and what was reported wrong."""

import fnmatch
import itertools
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Required

from pydantic import Field, with_config
from typing_extensions import TypedDict

from lit_layers import schema
from lit_layers.schedule import Schedule, Steps
from lit_layers.schema import Count, Expected, Step
from lit_layers.series.checkpoint import Defect

_INSTALLED, _CHECKOUT = Path(__file__).parent / "manifests", Path(__file__).parents[2] / "checkpoints"
FOLDER = _INSTALLED if _INSTALLED.is_dir() else _CHECKOUT
_Every = Annotated[int, Field(ge=1, le=10**8), Expected("a whole number of at least 1")]


@with_config(schema.STRICT)
class _Defect(TypedDict, total=False):
    says: Required[str]
    source: Required[str]
    repository: str
    steps: list[Step]
    suspect: bool


@with_config(schema.STRICT)
class _Entry(TypedDict, total=False):
    names: Required[Annotated[str | list[str], Expected("a name, or a list of names")]]
    grammar: str | None
    steps: Annotated[str | list[Step] | dict[str, int], Expected("pythia, a list of steps, or {every: N}")]
    ranges: list[Annotated[tuple[Step, Step, _Every], Field(strict=False), Expected("[first, last, every]")]]
    first_step: Step
    last_step: Step | None
    tokens_per_step: Count | None
    labels_per_optimizer_step: _Every
    main_is_last: bool | None
    warm_up: Count
    defects: list[_Defect]


@with_config(schema.STRICT)
class _Content(TypedDict):
    repositories: list[_Entry]


@dataclass(frozen=True)
class Facts:
    """What a manifest says of one repository; None is unknown. Two labels per optimizer step: steps were renamed."""

    grammar: str | None = None
    steps: Steps | None = None
    ranges: tuple[tuple[int, int, int], ...] = ()
    first_step: int = 0
    last_step: int | None = None
    tokens_per_step: int | None = None
    labels_per_optimizer_step: int = 1
    main_is_last: bool | None = None
    warm_up: int = 1
    defects: tuple[Defect, ...] = ()

    def expected(self) -> tuple[int, ...] | None:
        """The steps that belong to the series, where they are known."""
        if self.ranges:
            every = {step for first, last, by in self.ranges for step in range(first, last + 1, by)}
        elif self.steps is not None and self.last_step is not None:
            every = set(Schedule(self.steps).until(self.last_step))
        else:
            return None
        return tuple(step for step in sorted(every) if step >= self.first_step)


class Manifest:
    """A YAML file about some repositories; the first of its entries that names a repository describes it.

    Raises:
        InputError: a file that is missing, no YAML, or holds unknown fields or wrong values.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._entries = schema.read_yaml(self.path, _Content, "see checkpoints/pythia.yaml")["repositories"]
        for entry in self._entries:
            if "steps" in entry:
                Schedule(entry["steps"])

    def names(self) -> list[str]:
        """The repositories that are named in full."""
        every = (name for entry in self._entries for name in _patterns(entry))
        return list(dict.fromkeys(name for name in every if not re.search(r"[*?\[]", name)))

    def facts(self, repo: str) -> Facts | None:
        """What is known of a repository, or None."""
        for entry in self._entries:
            if any(fnmatch.fnmatchcase(repo, name) for name in _patterns(entry)):
                given: Any = {key: value for key, value in entry.items() if key not in ("names", "defects")}
                reported = (d for d in entry.get("defects", []) if _is_about(d, repo))
                return Facts(**given, defects=tuple(_defect(d) for d in reported))
        return None


def known_facts(repo: str) -> Facts:
    """What the manifests that come with the package say of a repository; nothing where none knows it."""
    for path in sorted(FOLDER.glob("*.yaml")):
        if (facts := Manifest(path).facts(repo)) is not None:
            return facts
    return Facts()


def expand(name: str) -> list[str]:
    """`a-{b,c}-{1..3}` written out, as a shell does it."""
    parts = re.split(r"\{([^{}]*)\}", name)
    choices = [part.split(",") if index % 2 else [part] for index, part in enumerate(parts)]
    ranges = [[number for choice in group for number in _numbers(choice)] for group in choices]
    return ["".join(words) for words in itertools.product(*ranges)]


def _numbers(choice: str) -> list[str]:
    found = re.fullmatch(r"(\d+)\.\.(\d+)", choice)
    return [str(number) for number in range(int(found[1]), int(found[2]) + 1)] if found else [choice]


def _patterns(entry: _Entry) -> list[str]:
    names = entry["names"]
    return [name for spelling in ([names] if isinstance(names, str) else names) for name in expand(spelling)]


def _is_about(defect: _Defect, repo: str) -> bool:
    about = defect.get("repository")
    return about is None or repo in expand(about)


def _defect(given: _Defect) -> Defect:
    return Defect(
        says=given["says"],
        source=given["source"],
        steps=tuple(given.get("steps", ())),
        suspect=given.get("suspect", False),
    )
