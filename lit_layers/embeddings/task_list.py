"""The tasks that layers are scored on: the 32 of Skean et al. by domain, and those that lie in local data alone."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from lit_layers.errors import InputError
from lit_layers.tasks.catalogue import tasks_of, unknown_task

Domain = Literal["classification", "clustering", "pair_classification", "reranking", "sts"]
DOMAINS: tuple[Domain, ...] = get_args(Domain)
SUITE, LOCAL = "layerwise32", "local"


@dataclass(frozen=True)
class TaskSpec:
    """A task by its name, and what of it is scored: the test split of one subset, by one number."""

    name: str
    domain: Domain
    score: str
    subset: str = "default"
    official: bool = True  # of mteb; else its data is local data

    @property
    def analysis(self) -> str:
        """The name of its measurements."""
        return f"mteb/{self.name}"


TASKS: dict[str, TaskSpec] = {
    task.name: TaskSpec(task.name, score=task.scores[0], **task.options) for task in tasks_of("mteb").values()
}
LAYERWISE32: tuple[TaskSpec, ...] = tuple(spec for spec in TASKS.values() if spec.official)


def resolve(names: Sequence[str], *, domains: Sequence[str] | None = None, local: Iterable[str] = ()) -> list[TaskSpec]:
    """The tasks that names stand for, each once: `layerwise32`, `local` (those named in `local`), or single tasks.

    Raises:
        InputError: a name that is none, a domain that is none, or nothing left.
    """
    for domain in domains or ():
        if domain not in DOMAINS:
            raise InputError(f"domains: expected some of {', '.join(DOMAINS)}, got {domain!r}")
    local, found = set(local), dict[str, TaskSpec]()
    for name in names:
        if name == SUITE:
            found |= {spec.name: spec for spec in LAYERWISE32}
        elif name == LOCAL:
            found |= {spec.name: spec for spec in TASKS.values() if spec.name in local}
        elif name in TASKS:
            found[name] = TASKS[name]
        else:
            raise unknown_task(name, [SUITE, LOCAL, *TASKS])
    left = [spec for spec in found.values() if domains is None or spec.domain in domains]
    if not left:
        raise InputError(f"tasks: none is left of {', '.join(names) or 'no name'} in the domains and data given")
    return left
