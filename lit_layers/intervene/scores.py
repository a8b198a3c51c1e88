"""Scores of a task from what a model made of each row: means with their errors, and the normalised score."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

SCORE, NORMED, FLEXIBLE, PERPLEXITY = "task_score", "task_score_norm", "task_score_flexible", "task_perplexity"
NORMALIZED = "normalized_score"


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
    num_cut: int = 0  # inputs that lost their beginning


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


def normalized_score(
    score: float,
    random_score: float,
    full_score: float,
    *,
    full_stderr: float = 0.0,
    undefined: Literal["raise", "nan"] = "raise",
) -> float:
    """(b - b_random) / (b_full - b_random): 0 is guessing, 1 the full model; it may leave [0, 1].

    Undefined where the full model is no further than its standard error from guessing. Unchanged by adding a number to
    all three scores, or by multiplying all three and the error by one.

    Source: Sun et al., Transformer Layers as Painters, arXiv 2407.09298, section 2 (there the error plays no part).

    Raises:
        ValueError: it is undefined, and `undefined` is "raise".
    """
    span = full_score - random_score
    if abs(span) > full_stderr:
        return (score - random_score) / span
    if undefined == "nan":
        return math.nan
    raise ValueError(
        f"the full model's score {full_score:g} is within its standard error {full_stderr:g} of guessing "
        f"({random_score:g}): a normalised score is not defined"
    )


def normalized_error(values: Sequence[float], full: Sequence[float], random_score: float) -> float | None:
    """The standard error of the normalised score of one set of rows, on which both models were scored; None for a row.

    To first order, with guessing as a constant: that of the mean of (x - b' y) / (b_full - b_random) over the rows,
    where x is the variant's score of a row and y the full model's.
    """
    own, whole = np.asarray(values, dtype=np.float64), np.asarray(full, dtype=np.float64)
    if len(own) < 2:
        return None
    span = whole.mean() - random_score
    rows = (own - (own.mean() - random_score) / span * whole) / span
    return float(rows.std(ddof=1) / math.sqrt(len(rows)))
