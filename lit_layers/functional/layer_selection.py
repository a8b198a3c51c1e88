"""Choosing a layer without labels: how a metric follows task scores over the layers, and where its extreme lies.

Tables are (tasks, layers), one row a task, the same tasks and layers for metric and score; in float64. Intervals are
over tasks: layers of one model are alike, so that no p-value over them would hold.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from lit_layers.functional.correlation import UndefinedError, distance_correlations
from lit_layers.functional.curves import (
    bootstrap_interval,
    choice_distribution,
    resampled_curves,
)

Table = NDArray[np.float64]  # (tasks, layers)
Form = Literal["per_task_mean", "of_task_means"]
Coefficient = Literal["distance_correlation", "spearman", "kendall"]
Direction = Literal["min", "max"]
FORMS: tuple[Form, ...] = ("per_task_mean", "of_task_means")
COEFFICIENTS: tuple[Coefficient, ...] = ("distance_correlation", "spearman", "kendall")
DIRECTIONS: tuple[Direction, ...] = ("min", "max")
FEWEST_LAYERS = 4  # distance correlation is 1 for any two
FEWEST_TASKS = 5  # of fewer, resamples are mostly the same two or three tasks
_AT_ONCE = 2**20  # pairs of layers: 8 MB a table


class Estimate(NamedTuple):
    """A number and its 95% bootstrap interval over tasks, which is None where there are too few."""

    value: float
    low: float | None = None
    high: float | None = None


class LayerCorrelation(NamedTuple):
    """A coefficient over layers; `undefined` are the rows (tasks) that have none and so are in no mean."""

    form: Form
    coefficient: Coefficient
    estimate: Estimate
    num_tasks: int
    undefined: tuple[int, ...]


class Null(NamedTuple):
    """What distance correlation is of layers that have nothing to do with each other: mean and 95th percentile."""

    noise: float
    noise_95: float
    walk: float
    walk_95: float


@dataclass(frozen=True, kw_only=True)
class Selection:
    """The mean score over tasks at the layers that a rule chose, and at what it is to be compared with.

    `best` is the one layer that is best by the mean over these tasks, and `oracle` the best layer of each task: both
    are chosen on the scores themselves. `best_share` is how often resampled tasks have that same best layer. `random`
    is what a layer drawn evenly for each task has on average.
    """

    chosen: tuple[int, ...]
    best_layer: int
    best_share: float | None
    middle_layer: int
    score: Estimate
    last: Estimate
    best: Estimate
    oracle: Estimate
    middle: Estimate
    random: Estimate
    minus_last: Estimate
    minus_best: Estimate
    num_tasks: int


def layer_correlations(metric: Table, scores: Table, *, resamples: int = 2000, seed: int = 0) -> list[LayerCorrelation]:
    """Return distance correlation, Spearman's rho and Kendall's tau-b of a metric with scores, in both forms.

    `per_task_mean`: over the layers within each task, then the mean over tasks. `of_task_means`: of the two curves
    averaged over tasks. A task with a constant curve has no coefficient within it: it is left out of that mean and
    named. All intervals rest on the same resamples of tasks.

    Raises:
        UndefinedError: fewer than 4 layers, or nothing but constant curves.
        ValueError: tables of unequal shape, or a value that is not finite.
    """
    metric, scores = _tables(metric, scores)
    constant = (np.ptp(metric, axis=1) == 0) | (np.ptp(scores, axis=1) == 0)
    if constant.all():
        raise UndefinedError("a correlation is undefined: metric or score is constant over the layers of every task")
    undefined = tuple(int(row) for row in np.flatnonzero(constant))
    within = _coefficients(metric[~constant], scores[~constant])  # (tasks, 3)
    correlations = [
        LayerCorrelation("per_task_mean", name, estimate, len(within), undefined)
        for name, estimate in zip(COEFFICIENTS, _means(within, resamples, seed), strict=True)
    ]
    means = metric.mean(0), scores.mean(0)
    if any(np.ptp(mean) == 0 for mean in means):
        return correlations
    whole, drawn = _coefficients(means[0][None], means[1][None])[0], None
    if len(metric) >= FEWEST_TASKS:
        options = {"resamples": resamples, "seed": seed}  # of one seed the rows are the same
        curves = [resampled_curves(torch.from_numpy(np.array(t.T)), **options).numpy() for t in (metric, scores)]
        kept = (np.ptp(curves[0], axis=1) > 0) & (np.ptp(curves[1], axis=1) > 0)
        drawn = _coefficients(curves[0][kept], curves[1][kept])
    for number, name in enumerate(COEFFICIENTS):
        ends = (None, None) if drawn is None else map(float, np.quantile(drawn[:, number], [0.025, 0.975]))
        correlations.append(
            LayerCorrelation("of_task_means", name, Estimate(float(whole[number]), *ends), len(metric), ())
        )
    return correlations


@lru_cache(maxsize=64)
def distance_null_over_layers(num_layers: int, *, samples: int = 2000, seed: int = 0) -> Null:
    """Return the distance correlation of two unrelated curves over so many layers: Gaussian noise and random walks.

    Neighbouring layers are alike, so that a real curve lies between the two, nearer the walk. 25 layers: 0.34 and 0.54.

    Raises:
        UndefinedError: fewer than 4 layers.
    """
    noise = np.random.default_rng(seed).standard_normal((2, samples, num_layers))
    drawn = [_coefficients(*pair)[:, 0] for pair in (noise, noise.cumsum(-1))]
    summaries = [(float(values.mean()), float(np.quantile(values, 0.95))) for values in drawn]
    return Null(*summaries[0], *summaries[1])


def extreme_layers(metric: Table, direction: Direction) -> NDArray[np.intp]:
    """Return the column of each task where the metric is smallest ("min") or largest ("max"); the first if equal."""
    metric = np.asarray(metric, dtype=np.float64)
    return metric.argmin(1) if direction == "min" else metric.argmax(1)


def scores_at(metric: Table, scores: Table, direction: Direction) -> NDArray[np.float64]:
    """Return the score (tasks,) of each task at the layer where the metric on that task's texts is extreme."""
    return np.asarray(scores, dtype=np.float64)[np.arange(len(scores)), extreme_layers(metric, direction)]


def selection(
    metric: Table,
    scores: Table,
    direction: Direction,
    *,
    first_layer: int = 1,
    resamples: int = 2000,
    seed: int = 0,
) -> Selection:
    """Return what choosing the layer of each task by a metric's extreme is worth; the columns begin with `first_layer`.

    The direction is to be chosen on other models, as `better_rule` does.

    Raises:
        ValueError: tables of unequal shape, or a value that is not finite.
    """
    metric, scores = _tables(metric, scores)
    chosen = extreme_layers(metric, direction)
    at_chosen = scores[np.arange(len(scores)), chosen]
    last_layer = first_layer + scores.shape[1] - 1
    means = scores.mean(0)
    best, middle = int(means.argmax()), (last_layer + 1) // 2 - first_layer
    last, at_best = scores[:, -1], scores[:, best]
    columns = [at_chosen, last, at_best, scores.max(1), scores[:, middle], scores.mean(1)]
    columns += [at_chosen - last, at_chosen - at_best]
    names = ("score", "last", "best", "oracle", "middle", "random", "minus_last", "minus_best")
    estimates = dict(zip(names, _means(np.stack(columns, axis=1), resamples, seed), strict=True))
    share = None
    if len(scores) >= FEWEST_TASKS:
        by_layer = torch.from_numpy(np.array(scores.T))
        share = choice_distribution(by_layer, rule="best", resamples=resamples, seed=seed)[best].item()
    return Selection(
        chosen=tuple(int(column) + first_layer for column in chosen),
        best_layer=best + first_layer,
        best_share=share,
        middle_layer=middle + first_layer,
        num_tasks=len(scores),
        **estimates,
    )


def better_rule(models: Sequence[tuple[Mapping[str, Table], Table]]) -> tuple[str, Direction]:
    """Return the metric and direction that score highest over models, each with its metrics' tables and its scores.

    Each model counts alike: the mean over tasks, then over models. Of one model all metrics have the tasks of its
    scores. Of equal rules the first.

    """
    names = [name for name in models[0][0] if all(name in metrics for metrics, _ in models)]
    rules: list[tuple[str, Direction]] = [(name, direction) for name in names for direction in DIRECTIONS]
    values = [np.mean([scores_at(metrics[name], scores, d).mean() for metrics, scores in models]) for name, d in rules]
    return rules[int(np.argmax(values))]


def _tables(metric: Table, scores: Table) -> tuple[Table, Table]:
    metric, scores = np.asarray(metric, dtype=np.float64), np.asarray(scores, dtype=np.float64)
    if metric.shape != scores.shape or not (np.isfinite(metric).all() and np.isfinite(scores).all()):
        raise ValueError(f"expected finite tables (tasks, layers) alike, got {metric.shape} and {scores.shape}")
    return metric, scores


def _means(columns: NDArray[np.float64], resamples: int, seed: int) -> list[Estimate]:
    """Return the mean over tasks of each column (tasks, columns), with its interval."""
    values = columns.mean(0).tolist()
    if len(columns) < FEWEST_TASKS:
        return [Estimate(value) for value in values]
    low, high = bootstrap_interval(torch.from_numpy(np.array(columns)), resamples=resamples, seed=seed)
    return [Estimate(*row) for row in zip(values, low.tolist(), high.tolist(), strict=True)]


# ------------------------------------------------------------------------------- many curves at once: 2,000 resamples


def _coefficients(x: Table, y: Table) -> NDArray[np.float64]:
    """Return the coefficients (curves, 3) of each pair of rows (curves, layers) that are not constant."""
    if x.shape[-1] < FEWEST_LAYERS:
        raise UndefinedError(f"expected at least {FEWEST_LAYERS} layers, got {x.shape[-1]}")
    size = max(1, _AT_ONCE // x.shape[-1] ** 2)
    parts = [(x[start : start + size], y[start : start + size]) for start in range(0, len(x), size)]
    return np.concatenate([np.stack([distance_correlations(*p), *_rank_correlations(*p)], axis=-1) for p in parts])


def _rank_correlations(x: Table, y: Table) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return what `correlation.spearman` and `correlation.kendall` do."""
    signs = [np.sign(side[..., :, None] - side[..., None, :]) for side in (x, y)]
    kendall = _cosines(*(sign.reshape(*sign.shape[:-2], -1) for sign in signs))
    spearman = _cosines(*(sign.sum(-1) for sign in signs))  # twice a rank's distance from the mean rank
    return spearman, kendall


def _cosines(x: NDArray[np.float64], y: NDArray[np.float64]) -> NDArray[np.float64]:
    lengths = np.sqrt((x * x).sum(-1) * (y * y).sum(-1))
    return np.clip((x * y).sum(-1) / lengths, -1, 1)
