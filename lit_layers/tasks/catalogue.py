"""The one catalogue of tasks, of whatever asks for labelled text, prompts, scores or embeddings.

Its rows are in `catalogue.yaml`, by use and name. The rows and metrics of GLUE are here as well.
"""

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, get_args

import numpy as np
import torch
import yaml

from lit_layers.errors import InputError, did_you_mean
from lit_layers.identity import sha16
from lit_layers.tasks.probe_task import ProbeTask
from lit_layers.tasks.task_files import Task, Use, local_copies

Domain = Literal["classification", "clustering", "pair_classification", "reranking", "sts"]
DOMAINS: tuple[Domain, ...] = get_args(Domain)
SUITE, LOCAL = "layerwise32", "local"


@dataclass(frozen=True)
class ScoredTask(Task):
    """A task of whatever asks for prompts, scores or embeddings; a linear probe's is a `ProbeTask`.

    Args:
        source: ORG/NAME[:CONFIG] of the Hub; of a benchmark its task file within lm-eval; mteb knows its own.
        domain: of MTEB.
        score: what MTEB judges it by; of GLUE it may be several.
        subset: the one of MTEB's that is scored.
        use: what asks for it: prompts to measure on, benchmark scores, fine-tuning on GLUE, MTEB.
        text: columns of its texts; of a benchmark all that a local copy needs.
        split: that is measured or scored.
        num_classes: of GLUE; None: a number is predicted.
        examples: worked ones that a benchmark's prompts begin with.
        settings: of lm-eval that are others for a local copy.
    """

    source: str = field(default="", kw_only=True)
    domain: Literal[Domain, ""] = ""
    score: str | tuple[str, ...] = ""
    subset: str = "default"
    _: KW_ONLY
    use: Use = "mteb"
    text: tuple[str, ...] = ()
    split: str = "test"
    num_classes: int | None = None
    examples: int = 0
    settings: Mapping[str, Any] = field(default_factory=dict, hash=False)

    @property
    def scores(self) -> tuple[str, ...]:
        return (self.score,) if isinstance(self.score, str) else self.score

    @property
    def has_files(self) -> bool:
        """Return whether all files of its local copy are there."""
        copy = self.copy
        return copy is not None and all(path.is_file() for split in self.splits for path in copy.paths(split))

    @property
    def splits(self) -> tuple[str, ...]:
        """Return the splits that are read; only some tasks need rows of `train`."""
        return ("train", self.split) if self.examples or self.domain == "classification" else (self.split,)

    def data_hash(self) -> str | None:
        """Return a hash of the files of a local copy and of what is read of them; None for data of the Hub.

        Raises:
            InputError: a file is missing.
        """
        return None if self.copy is None else self.copy.content_hash(self.splits)


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


def resolve(names: Sequence[str], folder: Path | None = None) -> list[ScoredTask]:
    """The tasks of MTEB that names stand for, each once: `layerwise32`, a domain of it, `local`, or single tasks.

    Args:
        names: of tasks or groups.
        folder: of local data, which tasks are read from that have all their files there; `local` is all of these.

    Raises:
        InputError: a name that is none, or nothing left.
    """
    tasks = tasks_of("mteb")
    groups: dict[str, list[str]] = {SUITE: [*tasks]}
    for task in LAYERWISE32:
        groups.setdefault(task.domain, []).append(task.name)
    for name, copy in ({} if folder is None else local_copies("mteb", folder)).items():
        if name not in tasks:
            raise unknown_task(name, tasks)
        if (task := tasks[name].use_copy(copy)).has_files:
            groups.setdefault(LOCAL, []).append(name)
            tasks[name] = task
    chosen = dict.fromkeys(each for name in names for each in groups.get(name, [name]))
    if unknown := [name for name in chosen if name not in tasks]:
        if unknown[0] == LOCAL:
            raise InputError("tasks: local means all tasks whose data lie in --folder, there are none")
        raise unknown_task(unknown[0], [SUITE, LOCAL, *tasks])
    return [tasks[name] for name in chosen]


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
GLUE: Mapping[str, ScoredTask] = MappingProxyType(tasks_of("glue"))
SPLITS = ("train", "validation")
_CORRELATIONS = ("pearson", "spearman")


# ------------------------------------------------------------------------------------------------ GLUE
# Source: Wang et al. 2018, GLUE, arXiv 1804.07461; metrics as in its table 1.


@dataclass(frozen=True, eq=False)
class GlueRows:
    """Rows of one split."""

    task: ScoredTask
    texts: tuple[tuple[str, ...], ...]  # one or two a row
    targets: tuple[float, ...]  # numbers of classes, or values

    def __len__(self) -> int:
        return len(self.targets)

    def take(self, number: int | None, *, seed: int) -> "GlueRows":
        """So many rows, drawn without replacement (fewer are the beginning of more); None, or more than there are:
        all, in their order."""
        if number is None or number >= len(self):
            return self
        order = torch.randperm(len(self), generator=torch.Generator().manual_seed(seed))[:number].tolist()
        return GlueRows(self.task, tuple(self.texts[row] for row in order), tuple(self.targets[row] for row in order))

    def content_hash(self) -> str:
        """Return sixteen hex digits over the texts, the targets, and how answers are scored."""
        content = [self.task.name, self.texts, self.targets, self.task.scores, self.task.num_classes]
        return sha16(json.dumps(content))


def read_rows(task: ScoredTask, split: str, folder: str | Path | None) -> GlueRows:
    """The rows of a split: of the files that the folder's `tasks.yaml` names, or with None of the Hub.

    Raises:
        InputError: a split, file or column is missing, the Hub does not answer, a folder that has no files of the task,
            a row without text, or a target that is none.
    """
    task = task.localized(folder)
    read = task.read([split], dict.fromkeys(task.text, "text") | {"label": "label"})
    texts = tuple(zip(*(read.values[column] for column in task.text), strict=True))
    for row, target in enumerate(read.values["label"]):
        if not _is_target(task, target):
            expected = "a finite number" if task.num_classes is None else f"a class from 0 to {task.num_classes - 1}"
            raise InputError(f"task {task.name}: row {row} of {read.origin} has {target!r}, expected {expected}")
    return GlueRows(task, texts, tuple(float(target) for target in read.values["label"]))


def _is_target(task: ScoredTask, target: Any) -> bool:
    if isinstance(target, bool) or not isinstance(target, int | float):
        return False
    return math.isfinite(target) if task.num_classes is None else target in range(task.num_classes)


def glue_metrics(
    task: ScoredTask, predictions: Sequence[float] | np.ndarray, targets: Sequence[float] | np.ndarray
) -> dict[str, float]:
    """The task's metrics by name, -1..1 (correlations) or 0..1, and `task_score`, their mean.

    Of a classifier that gives one class alone the Matthews correlation is 0 by its definition; correlations with
    predictions that do not vary are undefined and are not a number, and so is their mean. Nor are any metrics where a
    prediction is none.

    """
    predicted, true = np.asarray(predictions), np.asarray(targets)
    values: dict[str, float] = {}
    broken = bool(np.isnan(predicted).any())
    for name in task.scores:
        undefined = broken or (name in _CORRELATIONS and (np.ptp(predicted) == 0 or np.ptp(true) == 0))
        values[name] = math.nan if undefined else float(_metric(name, true, predicted))
    return {**values, "task_score": math.fsum(values.values()) / len(values)}


def _metric(name: str, targets: np.ndarray, predictions: np.ndarray) -> Any:
    from scipy import stats
    from sklearn import metrics

    if name in _CORRELATIONS:
        return getattr(stats, f"{name}r")(targets, predictions)[0]
    of_classes = {"accuracy": metrics.accuracy_score, "f1": metrics.f1_score, "matthews": metrics.matthews_corrcoef}
    return of_classes[name](targets, predictions)  # f1 is that of class 1
