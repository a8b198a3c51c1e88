"""Tasks of GLUE: rows, how they become tokens, and the metrics.

Source: Wang et al. 2018, GLUE, arXiv 1804.07461; metrics as in its table 1.
"""

import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from scipy import stats
from sklearn import metrics as scores

from lit_layers.errors import InputError
from lit_layers.tasks.catalogue import ScoredTask, tasks_of

SPLITS = ("train", "validation")


GLUE: Mapping[str, ScoredTask] = MappingProxyType(tasks_of("glue"))


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
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]


def read_rows(task: ScoredTask, split: str, folder: str | Path | None) -> GlueRows:
    """The rows of a split: of the files that the folder's `tasks.yaml` names, or with None of the Hub.

    Raises:
        InputError: a split, file or column is missing, the Hub does not answer, a folder that has no files of the task,
            scores that are none of its targets, a row without text, or a target that is none.
    """
    if split not in SPLITS:
        raise InputError(f"split: expected train or validation, got {split!r}")
    try:
        task = task.in_folder(folder)
        _check_scores(task)
        read = task.read([split], dict.fromkeys(task.text, "text") | {"label": "label"})
    except InputError as error:
        raise InputError(f"task {task.name}: {error}") from error
    texts = tuple(zip(*(read.values[column] for column in task.text), strict=True))
    for row, (pair, target) in enumerate(zip(texts, read.values["label"], strict=True)):
        if not all(isinstance(text, str) and text.strip() for text in pair):
            raise InputError(f"task {task.name}: row {row} of {read.place} has no text: mend it or take it out")
        if not _is_target(task, target):
            expected = "a finite number" if task.num_classes is None else f"a class from 0 to {task.num_classes - 1}"
            raise InputError(f"task {task.name}: row {row} of {read.place} has {target!r}, expected {expected}")
    return GlueRows(task, texts, tuple(float(target) for target in read.values["label"]))


def _is_target(task: ScoredTask, target: Any) -> bool:
    if isinstance(target, bool) or not isinstance(target, int | float):
        return False
    return math.isfinite(target) if task.num_classes is None else target in range(task.num_classes)


_METRICS: dict[str, Callable[[np.ndarray, np.ndarray], Any]] = {
    "accuracy": scores.accuracy_score,
    "f1": scores.f1_score,  # of class 1
    "matthews": scores.matthews_corrcoef,
    "pearson": lambda targets, predictions: stats.pearsonr(targets, predictions)[0],
    "spearman": lambda targets, predictions: stats.spearmanr(targets, predictions)[0],
}
_CORRELATIONS = ("pearson", "spearman")


def _check_scores(task: ScoredTask) -> None:
    fit = [name for name in _METRICS if (name in _CORRELATIONS) == (task.num_classes is None)]
    if task.num_classes not in (None, 2):
        fit.remove("f1")
    if other := [name for name in task.scores if name not in fit]:
        targets = "values" if task.num_classes is None else f"{task.num_classes} classes"
        raise InputError(f"scores: expected some of {', '.join(fit)} of {targets}, got {other[0]!r}")


def glue_metrics(
    task: ScoredTask, predictions: Sequence[float] | np.ndarray, targets: Sequence[float] | np.ndarray
) -> dict[str, float]:
    """The task's metrics by name, -1..1 (correlations) or 0..1, and `task_score`, their mean.

    Of a classifier that gives one class alone the Matthews correlation is 0 by its definition; correlations with
    predictions that do not vary are undefined and are not a number, and so is their mean. Nor are any metrics where a
    prediction is none.

    Raises:
        ValueError: other numbers of predictions than of targets, or none.
    """
    predicted, true = np.asarray(predictions), np.asarray(targets)
    if predicted.shape != true.shape or predicted.ndim != 1 or not len(true):
        raise ValueError(f"expected a prediction for each target, got {predicted.shape} for {true.shape}")
    values: dict[str, float] = {}
    broken = bool(np.isnan(predicted).any())
    for name in task.scores:
        undefined = broken or (name in _CORRELATIONS and (np.ptp(predicted) == 0 or np.ptp(true) == 0))
        values[name] = math.nan if undefined else float(_METRICS[name](true, predicted))
    return {**values, "task_score": math.fsum(values.values()) / len(values)}
