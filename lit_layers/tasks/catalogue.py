"""The catalogue of all tasks (linear probes, prompts, benchmarks, GLUE and MTEB), and the rows and metrics of GLUE.

`catalogue.yaml` lists the tasks by use (such as `probe` or `benchmark`), and then by name.
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
    """A task for prompts, benchmark scores, GLUE or MTEB. Tasks of linear probes are instances of `ProbeTask`.

    Args:
        source: The data set on the Hub, ORG/NAME[:CONFIG]. For a benchmark, this is the path of its task file within
            lm-eval. For MTEB it is empty, because mteb knows its data sets.
        domain: The kind of an MTEB task, such as reranking.
        score: Name of the main score of an MTEB task. For GLUE, this is the name of one metric or several names.
        subset: The MTEB subset to score.
        use: What the task is for: prompts to measure on, benchmark scores, fine-tuning on GLUE, or MTEB.
        text: The text columns. For a benchmark, all columns that a local copy needs.
        split: The split to measure or score.
        num_classes: Number of classes of a GLUE task. None means that it is a regression.
        examples: Number of few-shot examples at the start of a benchmark's prompts.
        settings: Entries of lm-eval's task file that are replaced if a local copy is used.
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
        """Return whether the task reads from a local copy and all files of this copy exist."""
        copy = self.copy
        return copy is not None and all(path.is_file() for split in self.splits for path in copy.paths(split))

    @property
    def splits(self) -> tuple[str, ...]:
        """Return the splits to read: the scored one, and `train` if the task needs training rows."""
        return ("train", self.split) if self.examples or self.domain == "classification" else (self.split,)

    def data_hash(self) -> str | None:
        """Return a hash of the files and options of the local copy of the data, or None for data on the Hub.

        Raises:
            InputError: A file is missing.
        """
        return None if self.copy is None else self.copy.content_hash(self.splits)


def tasks_of(use: Use) -> dict[str, ScoredTask]:
    """Return the tasks of the catalogue with the given use, by name, in the order of the catalogue.

    Tasks of linear probes are not returned. They are in `TASKS`.
    """
    return {row.name: row for row in CATALOGUE if isinstance(row, ScoredTask) and row.use == use}


def find(use: Use, name: str, instead: str = "") -> ScoredTask:
    """Return the task of the catalogue with the given use and name.

    Raises:
        InputError: There is no such task. The message ends with `instead`, an alternative for the user.
    """
    tasks = tasks_of(use)
    if name not in tasks:
        raise unknown_task(name, tasks, instead)
    return tasks[name]


def find_task(task: str | ProbeTask) -> ProbeTask:
    """Return the probe task with this name, or check and return a `ProbeTask`.

    Raises:
        InputError: The catalogue has no probe task of that name, or `ProbeTask.check` raises.
    """
    if isinstance(task, ProbeTask):
        task.check()
        return task
    if task not in TASKS:
        raise unknown_task(task, TASKS, "give a ProbeTask")
    return TASKS[task]


def resolve(names: Sequence[str], folder: Path | None = None) -> list[ScoredTask]:
    """Return the MTEB tasks that the names select, each once.

    Args:
        names: Names of tasks or groups. The groups are `layerwise32`, the domains of its tasks, and `local`.
        folder: A folder of local data. A task is read from this folder if all its files are in it. `local` selects
            these tasks.

    Raises:
        InputError: A name is unknown, or `local` selects no task.
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
    """Return the error for an unknown task name.

    The message suggests names similar to `name`, or the first names in `tasks` if none is similar. It ends with
    `instead`, an alternative for the user.
    """
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
# Source: Wang et al. 2018, GLUE, arXiv 1804.07461, with the metrics of table 1.


@dataclass(frozen=True, eq=False)
class GlueRows:
    task: ScoredTask
    texts: tuple[tuple[str, ...], ...]  # the one or two texts of each row
    targets: tuple[float, ...]  # class indices, or the values of a regression

    def __len__(self) -> int:
        return len(self.targets)

    def take(self, number: int | None, *, seed: int) -> "GlueRows":
        """Return `number` random rows, drawn without replacement. A larger draw begins with the rows of a smaller one.

        If `number` is None, or at least the number of rows, all rows are returned in their order.
        """
        if number is None or number >= len(self):
            return self
        order = torch.randperm(len(self), generator=torch.Generator().manual_seed(seed))[:number].tolist()
        return GlueRows(self.task, tuple(self.texts[row] for row in order), tuple(self.targets[row] for row in order))

    def content_hash(self) -> str:
        """Return a hash of the texts, the targets and the scoring, as 16 hex digits."""
        content = [self.task.name, self.texts, self.targets, self.task.scores, self.task.num_classes]
        return sha16(json.dumps(content))


def read_rows(task: ScoredTask, split: str, folder: str | Path | None) -> GlueRows:
    """Read the rows of a GLUE split from the files in the folder's `tasks.yaml`, or from the Hub if `folder` is None.

    Raises:
        InputError: A split, file or column is missing, the Hub does not answer, the folder has no files of the task, or
            a target is invalid.
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
    """Return the metrics of a GLUE task by name, and their mean as `task_score`.

    Correlations lie in [-1, 1], other metrics in [0, 1].

    The Matthews correlation of constant predictions is 0 by definition. Pearson and Spearman correlations with constant
    predictions or targets are undefined, so they and the mean are NaN. All metrics are NaN if a prediction is NaN.
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
    functions = {"accuracy": metrics.accuracy_score, "f1": metrics.f1_score, "matthews": metrics.matthews_corrcoef}
    return functions[name](targets, predictions)  # f1_score returns the F1 of class 1
