"""The one catalogue of tasks, of whatever asks for labelled text, prompts, scores or embeddings.

Its rows are in `catalogue.yaml`, by use and name.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, get_args

import yaml

from lit_layers.errors import InputError, did_you_mean
from lit_layers.schema import COUNT_OR_NONE, MANY, Range, beginning, refuse_outside
from lit_layers.tasks.probe_task import ProbeTask
from lit_layers.tasks.task_files import Task, Use

Domain = Literal["classification", "clustering", "pair_classification", "reranking", "sts"]
DOMAINS: tuple[Domain, ...] = get_args(Domain)
SUITE, LOCAL = "layerwise32", "local"
_OF_MTEB = ("domain", "official", "score", "scores", "subset")
_TEXTS: Mapping[Use, tuple[int, str]] = {"prompts": (1, "one column"), "glue": (2, "one or two columns")}  # at most
_CLASSES = Range(2, 10_000, whole=True)
_RANGES = dict.fromkeys(("examples", "sets", "set_size"), COUNT_OR_NONE) | {"num_classes": _CLASSES}


@dataclass(frozen=True)
class ScoredTask(Task):
    """A task of whatever asks for prompts, scores or embeddings; a linear probe's is a `ProbeTask`.

    Args:
        source: ORG/NAME[:CONFIG] of the Hub; of a benchmark its task file within lm-eval; mteb knows its own.
        domain: of MTEB.
        score: what it is judged by foremost.
        subset: the one of MTEB's that is scored.
        official: whether mteb has it; else its data is local data.
        use: what asks for it: prompts to measure on, benchmark scores, fine-tuning on GLUE, MTEB.
        text: columns of its texts; of a benchmark all that a local copy needs.
        split: that is measured or scored.
        num_classes: of GLUE; None: a number is predicted.
        scores: all that it is judged by, where that is more than `score`.
        examples: worked ones that a benchmark's prompts begin with.
        settings: of lm-eval that are others for a local copy.
        sets: of a clustering's local copy, how many sets are drawn of its rows; 0: the rows are one.
        set_size: rows of each set.
    """

    source: str = field(default="", kw_only=True)
    domain: Literal[Domain, ""] = ""
    score: str = ""
    subset: str = "default"
    official: bool = True
    _: KW_ONLY
    use: Use = "mteb"
    text: tuple[str, ...] = ()
    split: str = "test"
    num_classes: int | None = None
    scores: tuple[str, ...] = ()
    examples: int = 0
    settings: Mapping[str, Any] = field(default_factory=dict, hash=False)
    sets: int = 0
    set_size: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "scores", self.scores or ((self.score,) if self.score else ()))
        object.__setattr__(self, "score", "".join(self.scores[:1]))

    def checked_options(self, options: Mapping[str, Any], place: str) -> dict[str, Any]:
        """Options that are those of this kind of task, and fit its use; `score` is foremost among the scores."""
        chosen, place = super().checked_options(options, place), f"task {self.name}: {place}"
        if self.use == "mteb":
            fixed = _OF_MTEB if self.official else ("official",)
            if given := [name for name in fixed if name in chosen]:
                raise InputError(f"{place}: {given[0]}: mteb itself says it: leave it out")
        refuse_outside(f"{place}: ", _RANGES, chosen)
        sets, size = (chosen.get(name, getattr(self, name)) for name in ("sets", "set_size"))
        if bool(sets) != bool(size):
            raise InputError(f"{place}: sets: expected sets and set_size, both of at least 1, got {sets} and {size}")
        if sets and chosen.get("domain", self.domain) != "clustering":
            raise InputError(f"{place}: sets: are for tasks of the domain clustering: leave them out")
        most, number = _TEXTS.get(self.use, (MANY, "one column or more"))
        if "text" in chosen and not 1 <= len(chosen["text"]) <= most:
            raise InputError(f"{place}: text: expected {number}, got {beginning([*chosen['text']])}")
        if "score" in chosen:
            chosen["scores"] = tuple(dict.fromkeys((chosen["score"], *chosen.get("scores", ()))))
        return chosen

    @property
    def analysis(self) -> str:
        """The name of the measurements of one of MTEB."""
        return f"{self.use}/{self.name}"


def tasks_of(use: Use) -> dict[str, ScoredTask]:
    """The tasks of a use by name, in the catalogue's order; those of probes are `TASKS`."""
    return {row.name: row for row in CATALOGUE if isinstance(row, ScoredTask) and row.use == use}


def find(use: Use, name: str, instead: str = "") -> ScoredTask:
    """The task of a name.

    Raises:
        InputError: there is none; the sentence ends in what may be given `instead`.
    """
    tasks = tasks_of(use)
    if name not in tasks:
        raise unknown_task(name, tasks, instead)
    return tasks[name]


def find_task(task: str | ProbeTask) -> ProbeTask:
    """The task of linear probes of a name; a task itself is checked and returned.

    Raises:
        InputError: the catalogue has no task of that name, or `ProbeTask.check` refuses.
    """
    if isinstance(task, ProbeTask):
        task.check()
        return task
    if task not in TASKS:
        raise unknown_task(task, TASKS, "give a ProbeTask")
    return TASKS[task]


def resolve(
    names: Sequence[str],
    *,
    domains: Sequence[str] | None = None,
    local: Iterable[str] = (),
    own: Mapping[str, ScoredTask] = MappingProxyType({}),
) -> list[ScoredTask]:
    """The tasks of MTEB that names stand for, each once: `layerwise32`, `local` (those named in `local`), or single
    tasks; `own` are some that mteb does not have.

    Raises:
        InputError: a name that is none, a domain that is none, or nothing left.
    """
    for domain in domains or ():
        if domain not in DOMAINS:
            raise InputError(f"domains: expected some of {', '.join(DOMAINS)}, got {domain!r}")
    tasks, local = {**tasks_of("mteb"), **own}, set(local)
    of_name = {name: [task] for name, task in tasks.items()} | {SUITE: list(LAYERWISE32)}
    of_name[LOCAL] = [task for task in tasks.values() if task.name in local]
    if unknown := [name for name in names if name not in of_name]:
        raise unknown_task(unknown[0], [SUITE, LOCAL, *tasks])
    chosen = dict.fromkeys(task.name for name in names for task in of_name[name])
    left = [tasks[name] for name in chosen if domains is None or tasks[name].domain in domains]
    if not left:
        raise InputError(f"tasks: none is left of {', '.join(names) or 'no name'} in the domains and data given")
    return left


def unknown_task(name: str, tasks: Iterable[str], instead: str = "") -> InputError:
    """What is said of a name that none of the tasks has: the nearest ones, or the first."""
    names = list(tasks)
    remedy = did_you_mean(name, names, f"expected one such as {', '.join(names[:12])}")
    return InputError(f"task: there is no {name!r}; {remedy}{'; or ' if instead else ''}{instead}")


def _catalogue() -> Iterator[ScoredTask | ProbeTask]:
    text = Path(__file__).with_name("catalogue.yaml").read_text(encoding="utf-8")
    for use, tasks in yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader)).items():
        for name, row in tasks.items():
            options: Any = {key: tuple(value) if isinstance(value, list) else value for key, value in row.items()}
            yield ProbeTask(name, **options) if use == "probe" else ScoredTask(name, use=use, **options)


CATALOGUE = tuple(_catalogue())
TASKS: Mapping[str, ProbeTask] = MappingProxyType({row.name: row for row in CATALOGUE if isinstance(row, ProbeTask)})
LAYERWISE32: tuple[ScoredTask, ...] = tuple(tasks_of("mteb").values())
LOCAL_TASKS: Mapping[str, ScoredTask] = MappingProxyType(tasks_of("benchmark"))
