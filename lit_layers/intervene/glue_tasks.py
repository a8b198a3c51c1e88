"""Tasks of GLUE: rows, how they become tokens, and the metrics.

Source: Wang et al. 2018, GLUE, arXiv 1804.07461; metrics as in its table 1.
"""

import difflib
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
from torch import Tensor

from lit_layers.data.task_files import read_columns
from lit_layers.data.tokenization import TextTokenizer, one_thread
from lit_layers.errors import InputError

HUB = "nyu-mll/glue"
SPLITS = ("train", "validation")


@dataclass(frozen=True, kw_only=True)
class GlueTask:
    """One task: which columns its texts stand in, what is predicted, and by what that is judged."""

    name: str
    texts: tuple[str, ...]  # columns: one of single texts, two of pairs
    num_classes: int | None  # None: a number is predicted
    metrics: tuple[str, ...]
    local: bool = True  # whether a folder of local data has files of it
    local_label: str = "label"

    @property
    def num_outputs(self) -> int:
        return self.num_classes or 1


def _task(name: str, texts: Sequence[str], metrics: Sequence[str], num_classes: int | None = 2, **options: Any):
    return GlueTask(name=name, texts=tuple(texts), metrics=tuple(metrics), num_classes=num_classes, **options)


_PAIR = ("sentence1", "sentence2")
GLUE: Mapping[str, GlueTask] = MappingProxyType(
    {
        task.name: task
        for task in (
            _task("cola", ["sentence"], ["matthews"]),
            _task("mrpc", _PAIR, ["accuracy", "f1"]),
            _task("qnli", ["question", "sentence"], ["accuracy"], local=False),
            _task("rte", _PAIR, ["accuracy"]),
            _task("sst2", ["sentence"], ["accuracy"]),
            _task("stsb", _PAIR, ["pearson", "spearman"], None, local_label="score"),
            _task("wnli", _PAIR, ["accuracy"], local=False),
        )
    }
)


def find_task(name: str) -> GlueTask:
    """The task of a name.

    Raises:
        InputError: there is none.
    """
    if name not in GLUE:
        close = difflib.get_close_matches(name, GLUE, n=1)
        hint = f" (did you mean {close[0]}?)" if close else ""
        raise InputError(f"task: GLUE has no {name!r} here{hint}; choose from {', '.join(GLUE)}")
    return GLUE[name]


@dataclass(frozen=True, eq=False)
class GlueRows:
    """Rows of one split."""

    task: GlueTask
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
        """Sixteen hex digits over texts and targets."""
        return hashlib.sha256(json.dumps([self.task.name, self.texts, self.targets]).encode()).hexdigest()[:16]


def read_rows(task: GlueTask, split: str, folder: str | Path | None) -> GlueRows:
    """The rows of a split: of the files `folder/glue/TASK_SPLIT.parquet`, or with None of the Hub.

    Raises:
        InputError: a split, file or column is missing, the Hub does not answer, a folder that has no files of the task,
            a row without text, or a target that is none.
    """
    if split not in SPLITS:
        raise InputError(f"split: expected train or validation, got {split!r}")
    if folder is not None and not task.local:
        raise InputError(f"task: {task.name} has no local files: leave the folder out to read it from the Hub")
    if folder is None:
        source, label = f"{HUB}:{task.name}", "label"
    else:
        source, label = str(Path(folder).expanduser() / "glue" / f"{task.name}_{{split}}.parquet"), task.local_label
    columns = dict.fromkeys(task.texts, "text") | {label: "label"}
    try:
        read = read_columns(source, [split], columns, None)
    except InputError as error:
        raise InputError(f"task {task.name}: {error}") from error
    texts = tuple(zip(*(read.values[column] for column in task.texts), strict=True))
    for row, (pair, target) in enumerate(zip(texts, read.values[label], strict=True)):
        if not all(isinstance(text, str) and text.strip() for text in pair):
            raise InputError(f"task {task.name}: row {row} of {read.place} has no text: mend it or take it out")
        if not _is_target(task, target):
            expected = "a finite number" if task.num_classes is None else f"a class from 0 to {task.num_classes - 1}"
            raise InputError(f"task {task.name}: row {row} of {read.place} has {target!r}, expected {expected}")
    return GlueRows(task, texts, tuple(float(target) for target in read.values[label]))


def _is_target(task: GlueTask, target: Any) -> bool:
    if isinstance(target, bool) or not isinstance(target, int | float):
        return False
    return math.isfinite(target) if task.num_classes is None else target in range(task.num_classes)


@dataclass(frozen=True, eq=False)
class EncodedRows:
    """Rows as token ids, each without padding."""

    ids: tuple[np.ndarray, ...]
    segments: tuple[np.ndarray, ...]  # which text of a pair a token is of: 0 or 1
    targets: Tensor  # int64 classes, or float32 values
    num_cut: int  # rows that lost tokens to the limit

    def __len__(self) -> int:
        return len(self.ids)

    def batch(self, rows: Sequence[int], filler: int) -> dict[str, Tensor]:
        """Some rows, filled up on the right to the longest of them."""
        width = max(len(self.ids[row]) for row in rows)
        ids = torch.full((len(rows), width), filler)
        segments, mask = torch.zeros_like(ids), torch.zeros_like(ids)
        for place, row in enumerate(rows):
            size = len(self.ids[row])
            ids[place, :size] = torch.from_numpy(self.ids[row])
            segments[place, :size] = torch.from_numpy(self.segments[row])
            mask[place, :size] = 1
        targets = self.targets[torch.tensor(rows)]
        return {"input_ids": ids, "attention_mask": mask, "token_type_ids": segments, "labels": targets}


def encode_rows(tokenizer: TextTokenizer, rows: GlueRows, *, max_tokens: int) -> EncodedRows:
    """Token ids with the tokenizer's special tokens; of a pair too long the longer text loses its end.

    Raises:
        InputError: a limit that leaves no room beside special tokens.
    """
    found, is_pair = tokenizer.tokenizer, len(rows.task.texts) == 2
    added = found.num_special_tokens_to_add(is_pair=is_pair)
    if max_tokens <= added + is_pair:
        raise InputError(
            f"max_tokens: expected more than {added + is_pair}, {added} of which are special tokens, got {max_tokens}"
        )
    found.enable_truncation(max_tokens, strategy="longest_first")
    try:
        with one_thread():
            encodings = found.encode_batch([pair if is_pair else pair[0] for pair in rows.texts])
    finally:
        found.no_truncation()
    kind = torch.float32 if rows.task.num_classes is None else torch.int64
    return EncodedRows(
        ids=tuple(np.array(each.ids, dtype=np.int64) for each in encodings),
        segments=tuple(np.array(each.type_ids, dtype=np.int64) for each in encodings),
        targets=torch.tensor(rows.targets).to(kind),
        num_cut=sum(bool(each.overflowing) for each in encodings),
    )


def _pearson(targets: np.ndarray, predictions: np.ndarray) -> float:
    found: Any = stats.pearsonr(targets, predictions)
    return found.statistic


def _spearman(targets: np.ndarray, predictions: np.ndarray) -> float:
    found: Any = stats.spearmanr(targets, predictions)
    return found.statistic


_METRICS: dict[str, Callable[[np.ndarray, np.ndarray], float]] = {
    "accuracy": scores.accuracy_score,
    "f1": scores.f1_score,  # of class 1
    "matthews": scores.matthews_corrcoef,
    "pearson": _pearson,
    "spearman": _spearman,
}
_CORRELATIONS = ("pearson", "spearman")


def glue_metrics(
    task: GlueTask, predictions: Sequence[float] | np.ndarray, targets: Sequence[float] | np.ndarray
) -> dict[str, float]:
    """The task's metrics by name, -1..1 (correlations) or 0..1, and `task_score`, their mean.

    Of a classifier that gives one class alone the Matthews correlation is 0 by its definition; correlations with
    predictions that do not vary are undefined and are not a number, and so is their mean.

    Raises:
        ValueError: other numbers of predictions than of targets, or none.
    """
    predicted, wanted = np.asarray(predictions), np.asarray(targets)
    if predicted.shape != wanted.shape or predicted.ndim != 1 or not len(wanted):
        raise ValueError(f"expected a prediction for each target, got {predicted.shape} for {wanted.shape}")
    found: dict[str, float] = {}
    for name in task.metrics:
        undefined = name in _CORRELATIONS and (np.ptp(predicted) == 0 or np.ptp(wanted) == 0)
        found[name] = math.nan if undefined else float(_METRICS[name](wanted, predicted))
    return {**found, "task_score": math.fsum(found.values()) / len(found)}
