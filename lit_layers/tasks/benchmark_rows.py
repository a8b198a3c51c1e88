"""Rows of benchmarks in local files, and what a model made of each row.

Scores are means over rows with their errors; they are kept in one JSON file for each task and schedule, so that an
interrupted run goes on where it was.
"""

import contextlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from lit_layers.errors import InputError, refused
from lit_layers.files.durable import write_json
from lit_layers.functional.block_schedules import Step, format_schedule
from lit_layers.functional.curves import wilson_interval
from lit_layers.identity import sha16
from lit_layers.tasks.catalogue import find
from lit_layers.tasks.task_files import Columns, local_copy

SCORE, NORMED, FLEXIBLE, PERPLEXITY = "task_score", "task_score_norm", "task_score_flexible", "task_perplexity"
NORMALIZED = "normalized_score"
Row = dict[str, Any]
EXAMPLES = "train"  # the split that worked examples are drawn from


@dataclass(frozen=True)
class LocalRows:
    """The rows of a task by split, in the columns of the local files.

    `definition` is a task file within lm-eval, `settings` are what is written otherwise for these columns.
    """

    name: str
    split: str  # that is scored
    rows: Mapping[str, list[Row]]
    definition: str
    settings: Mapping[str, Any]
    difference: str = ""

    def content_hash(self) -> str:
        """Sixteen hex digits over every row, in their order, and what is done with them."""
        plain = [self.name, self.split, self.rows, self.settings]
        return sha16(json.dumps(plain, sort_keys=True, default=str))


def local_rows(task: str, folder: Path, limit: int | None = None, *, training: bool = False) -> LocalRows:
    """Return the first `limit` rows of a task of the catalogue in a folder of local data.

    With `training` also all its training rows.

    Raises:
        InputError: there is no such task, files or columns are missing, or a row is none of the task.
    """
    official = find("benchmark", task, "give a task file of lm-eval (yaml)")
    row, copy = official.in_folder(folder), local_copy("benchmark", task, folder)
    columns = dict.fromkeys(row.text, "columns")
    if training and copy.paths(EXAMPLES) == copy.paths(row.split):
        raise InputError(f"task {task}: {copy.paths(EXAMPLES)[0]} holds the rows that are scored: list files of train")
    try:
        rows = {row.split: _rows(task, row.read([row.split], columns), limit)}
        if row.examples or training:
            rows[EXAMPLES] = _rows(task, row.read([EXAMPLES], columns), None)
            if len(rows[EXAMPLES]) < row.examples:
                raise InputError(f"{row.examples} worked examples are needed, there are {len(rows[EXAMPLES])}")
    except InputError as error:
        raise InputError(f"task {task}: {error}") from error
    settings = {f"{each}_split": each if each in rows else None for each in ("training", "validation", "test")}
    settings |= {"training_split": EXAMPLES if EXAMPLES in rows else None, **row.settings}
    return LocalRows(task, row.split, rows, row.source, settings, copy.difference)


def _rows(task: str, read: Columns, limit: int | None) -> list[Row]:
    rows = [dict(zip(read.values, values, strict=True)) for values in zip(*read.values.values(), strict=True)][:limit]
    if not rows:
        raise InputError(f"{read.place} has no row: a score needs at least one")
    for number, row in enumerate(rows):
        choices = row.get("choices")
        if choices is not None and row["label"] not in range(len(choices)):
            why = f"{len(choices)} choices and the label {row['label']}"
            raise InputError(f"{read.place}: row {number} is no row of {task} ({why})")
    return rows


@dataclass(frozen=True, kw_only=True)
class TaskScores:
    """What a model made of the rows of a task, in their order.

    `values` holds one number a row for each metric; of `task_perplexity` it is the log-likelihood in nats.
    """

    values: dict[str, list[float]]
    log_likelihoods: list[list[float]]  # of each row's choices; none where texts were written
    texts: list[str]  # written by the model
    random_score: float  # what guessing scores on these rows
    rows_hash: str


def mean_and_error(metric: str, runs: Sequence[Sequence[float]]) -> tuple[float, float | None]:
    """A metric over the rows (runs, rows), averaged over runs, and its standard error over the rows; None of a single
    row.

    The perplexity of a run is exp of its mean negative log-likelihood; its error is linearised in each row.
    """
    rows = np.asarray(runs, dtype=np.float64)
    if metric != PERPLEXITY:
        return float(rows.mean()), _error(rows.mean(0))
    with np.errstate(over="ignore", invalid="ignore"):  # a broken model's may be infinite
        perplexities = np.exp(-rows.mean(1))
        moves = (perplexities[:, None] * (rows - rows.mean(1, keepdims=True))).mean(0)
    return float(perplexities.mean()), _error(moves) if np.isfinite(perplexities).all() else None


def _error(rows: np.ndarray) -> float | None:
    return float(rows.std(ddof=1) / math.sqrt(len(rows))) if len(rows) > 1 else None


def interval(metric: str, value: float, error: float | None, n: int) -> dict[str, Any]:
    """Return `low` and `high` of the 95% interval of a mean with this error over n rows.

    A perplexity's is symmetric on the log scale. A share's is Wilson's, which is no point at 0 or 1 either; a mean over
    several orders, whose error is smaller than that of one, counts as the more rows.
    """
    if error is None or math.isnan(value):
        return {}
    if metric == PERPLEXITY:
        times = math.exp(min(1.96 * error / value, 700))
        return {"low": value / times, "high": value * times}
    if not metric.startswith(SCORE) and not metric.endswith("accuracy"):
        return {"low": value - 1.96 * error, "high": value + 1.96 * error}
    rows = max(value * (1 - value) / error**2 * n / max(n - 1, 1), 1) if error else n
    low, high = wilson_interval(value * rows, rows)
    return {"low": low, "high": high}


def normalized_score(score: float, random_score: float, full_score: float) -> float:
    """(b - b_random) / (b_full - b_random): 0 is guessing, 1 the full model; it may leave [0, 1].

    Unchanged by adding a number to all three scores, or by multiplying all three by one.

    Source: Sun et al., Transformer Layers as Painters, arXiv 2407.09298, section 2.
    """
    return (score - random_score) / (full_score - random_score)


def normalized_error(values: Sequence[float], full: Sequence[float], random_score: float) -> float | None:
    """The standard error of the normalised score of one set of rows, on which both models were scored; None for a row.

    To first order, with guessing as a constant: that of the mean of (x - b' y) / (b_full - b_random) over the rows,
    where x is the variant's score of a row and y the full model's.
    """
    of_variant, of_full = np.asarray(values, dtype=np.float64), np.asarray(full, dtype=np.float64)
    if len(of_variant) < 2:
        return None
    span = of_full.mean() - random_score
    rows = (of_variant - (of_variant.mean() - random_score) / span * of_full) / span
    return float(rows.std(ddof=1) / math.sqrt(len(rows)))


@dataclass(frozen=True)
class ResultFolder:
    """The results of one task, of one model, under one set of options: all of it is in the folder's name."""

    folder: Path

    def file(self, schedule: Sequence[Step]) -> Path:
        """Named by a hash, as a schedule may be longer than a file's name; the file says which it is."""
        return self.folder / f"{sha16(format_schedule(schedule))}.json"

    def read(self, schedule: Sequence[Step]) -> TaskScores | None:
        """What was found of this schedule; None where there is nothing, or a damaged file."""
        damaged = (ValueError, KeyError, TypeError, AttributeError)
        with refused(f"results: cannot read {self.folder}"), contextlib.suppress(FileNotFoundError, *damaged):
            result = json.loads(self.file(schedule).read_text(encoding="utf-8"))
            if result["schedule"] != format_schedule(schedule):
                return None
            return TaskScores(**{each.name: result[each.name] for each in fields(TaskScores)})
        return None

    def write(self, schedule: Sequence[Step], scores: TaskScores, facts: dict[str, Any]) -> None:
        """Return when the file is on the disk. `facts` are for its readers.

        Raises:
            InputError: where it cannot be written.
        """
        summary = {metric: mean_and_error(metric, [values]) for metric, values in scores.values.items()}
        content = {
            **facts,
            "schedule": format_schedule(schedule),
            "n": len(next(iter(scores.values.values()))),
            "scores": {metric: {"value": value, "stderr": error} for metric, (value, error) in summary.items()},
            **vars(scores),
        }
        with refused(f"results: cannot write {self.folder}"):
            self.folder.mkdir(parents=True, exist_ok=True)
            write_json(self.file(schedule), content)
