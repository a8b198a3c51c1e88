"""Correlation over models, and the choice of a layer by a metric instead of by task scores. All in float64.

The rows of a correlation are models (or tasks), never the layers of one model. Layers of one model are not independent,
so a p-value over them would be wrong.
"""

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from lit_layers.functional.curves import bootstrap_interval, choice_distribution, resampled_curves

Values = Sequence[float] | NDArray[np.float64]
Statistic = Callable[[NDArray[np.intp]], float]  # row indices -> statistic of these rows

_RELATIVE = 1e-10  # a residual below this share of its column's norm counts as rounding error


class UndefinedError(ValueError):
    """A coefficient is undefined for these rows: a constant column, or too few rows."""


class Correlation(NamedTuple):
    """A coefficient in [-1, 1], the two-sided p-value of the hypothesis of independence, and the number of rows.

    `df` are the degrees of freedom: the number of rows minus one for each fitted mean, covariate and slope.
    """

    value: float
    p: float
    n: int
    df: int


class Interval(NamedTuple):
    """A percentile interval, and the number of resamples that were left out because the statistic was undefined."""

    low: float
    high: float
    num_undefined: int


class Line(NamedTuple):
    """A least-squares line; `error` is the residual standard deviation (df = n - 2)."""

    slope: float
    intercept: float
    error: float
    center: float
    spread: float  # sum of squares of x about its mean
    n: int


def pearson(x: Values, y: Values) -> Correlation:
    """Return Pearson's r.

    Unchanged by increasing affine maps of either column. Its square is the R² of the least-squares line.

    Raises:
        UndefinedError: fewer than 3 rows, or a constant column.
        ValueError: columns of unequal length, or a value that is not finite.
    """
    x, y = _columns(x, y)
    return _tested(_cosine(_centered("x", x), _centered("y", y)), len(x), len(x) - 2)


def p_value(r: float, df: int) -> float:
    """Return the two-sided p-value of a (partial) correlation by Student's t.

    With `df` degrees of freedom, t² = df r² / (1 - r²).
    """
    from scipy.special import betainc

    return float(betainc(df / 2, 0.5, 1 - r * r))


def spearman(x: Values, y: Values) -> Correlation:
    """Return Spearman's rho: Pearson's r of the ranks, with mean ranks for ties.

    Unchanged by increasing maps of either column. The p-value is that of the t test, but at least 2 / n!, the
    probability of the two most extreme orders. The t test itself gives p = 0 at rho = 1.

    Raises: the errors of `pearson`.
    """
    x, y = _varying_columns(x, y)
    result = pearson(_ranks(x), _ranks(y))
    return result._replace(p=max(result.p, math.exp(math.log(2) - math.lgamma(result.n + 1))))


def kendall(x: Values, y: Values) -> Correlation:
    """Return Kendall's tau-b.

    Unchanged by increasing maps of either column. As in scipy, the p-value is exact for few rows without ties and
    otherwise comes from the normal approximation.

    Raises: the errors of `pearson`.
    """
    from scipy.stats import kendalltau  # imported here, because the import takes a quarter of a second

    x, y = _varying_columns(x, y)
    result: Any = kendalltau(x, y)
    return Correlation(float(result.statistic), float(result.pvalue), len(x), len(x) - 2)


def distance_correlation(x: Values, y: Values) -> float:
    """Return Székely's distance correlation, in [0, 1]: the root of the biased V-statistic.

    In the limit of many rows it is 0 if and only if x and y are independent. It is 1 for any exact affine relation.
    Unchanged by affine maps of either column. For independent columns of few rows it is far from 0: about .28 for 37
    rows of normal numbers. `distance_null` computes the value for independent columns.

    Raises:
        UndefinedError: fewer than 4 rows (two rows always give 1), or a constant column.
        ValueError: columns of unequal length, or a value that is not finite.
    """
    x, y = _varying_columns(x, y, fewest=4)
    return float(distance_correlations(x, y))


def distance_null(x: Values, y: Values, *, permutations: int = 1000, seed: int = 0) -> tuple[float, float]:
    """Return the mean distance correlation of x and a shuffled y, and the permutation p-value for x and y themselves.

    Raises: the errors of `distance_correlation`.
    """
    x, y = _varying_columns(x, y, fewest=4)
    first, second = _centered_distances(x), _centered_distances(y)
    rng = np.random.default_rng(seed)
    value = float(_table_cosines(first, second))
    orders = (rng.permutation(len(x)) for _ in range(permutations))
    shuffled = np.array([_table_cosines(first, second[np.ix_(order, order)]) for order in orders])
    return float(shuffled.mean()), (1 + int((shuffled >= value * (1 - 1e-12)).sum())) / (1 + permutations)


def partial_correlation(x: Values, y: Values, given: Sequence[Values]) -> Correlation:
    """Return Pearson's r of the residuals of both columns, each regressed with intercept on all columns of `given`.

    df = n - 2 - the number of linearly independent covariates. Unchanged by increasing affine maps of x and y, and by
    any invertible affine map of the covariates.

    Raises:
        UndefinedError: no df left, or a column that the covariates determine.
        ValueError: columns of unequal length, or a value that is not finite.
    """
    x, y = _columns(x, y)
    covariates = [_columns(x, column)[1] for column in given]
    basis = _basis(covariates, len(x))
    df = len(x) - 2 - basis.shape[1]
    if df < 1:
        raise UndefinedError(f"{len(x)} rows are too few for {basis.shape[1]} covariates: expected at least 3 more")
    rest = [_residual(name, _centered(name, column), basis) for name, column in (("x", x), ("y", y))]
    return _tested(_cosine(*rest), len(x), df)


def groupwise_correlation(x: Values, y: Values, groups: Sequence[Hashable]) -> Correlation:
    """Return the within-group correlation: Pearson's r after each column is centred within each group.

    df = n - groups - 1. Equal to the partial correlation given an indicator of each group. A group of one row has no
    influence.

    Raises:
        UndefinedError: no df left, or a column that is constant within every group.
        ValueError: columns of unequal length, or a value that is not finite.
    """
    x, y = _columns(x, y)
    keys = list(dict.fromkeys(groups))
    index = np.array([keys.index(group) for group in groups])
    df = len(x) - len(keys) - 1
    if df < 1:
        raise UndefinedError(f"{len(x)} rows in {len(keys)} groups leave nothing to compare within a group")
    rest = []
    for name, column in (("x", x), ("y", y)):
        centered = _centered(name, column)
        means = np.bincount(index, centered) / np.bincount(index)
        rest.append(_nonzero(name, centered - means[index], centered, "is constant within every group"))
    return _tested(_cosine(*rest), len(x), df)


def bootstrap_rows(statistic: Statistic, n: int, *, resamples: int = 2000, seed: int = 0) -> Interval:
    """Return the 95% bootstrap interval of a statistic of n rows; the statistic takes the indices of the drawn rows.

    Resamples in which the statistic is undefined (for example, all rows equal) are left out and counted.

    Raises:
        UndefinedError: the statistic is undefined in at least half of the resamples.
    """
    rng = np.random.default_rng(seed)
    drawn = []
    for _ in range(resamples):
        try:
            drawn.append(statistic(rng.integers(n, size=n)))
        except UndefinedError:
            continue
    if 2 * len(drawn) <= resamples:
        raise UndefinedError(f"undefined in {resamples - len(drawn)} of {resamples} resamples of {n} rows")
    low, high = np.quantile(drawn, [(1 - 0.95) / 2, (1 + 0.95) / 2])
    return Interval(float(low), float(high), resamples - len(drawn))


def fit_line(x: Values, y: Values) -> Line:
    """Return the least-squares line of y on x.

    Raises:
        UndefinedError: fewer than 3 rows, or a constant x.
    """
    x, y = _columns(x, y)
    centered = _centered("x", x)
    spread = float(centered @ centered)
    slope = float(centered @ (y - y.mean())) / spread
    residual = (y - y.mean()) - slope * centered
    error = math.sqrt(float(residual @ residual) / (len(x) - 2))
    return Line(slope, float(y.mean() - slope * x.mean()), error, float(x.mean()), spread, len(x))


def line_band(line: Line, at: Values) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the low and high ends of the 95% confidence band of the mean of y at each x in `at`, by Student's t."""
    from scipy.special import stdtrit

    at = np.asarray(at, dtype=np.float64)
    middle = line.intercept + line.slope * at
    factor = float(stdtrit(line.n - 2, 0.975)) * line.error
    half = factor * np.sqrt(1 / line.n + (at - line.center) ** 2 / line.spread)
    return middle - half, middle + half


def residuals(x: Values, given: Sequence[Values]) -> NDArray[np.float64]:
    """Return the residual of a column after regression, with an intercept, on the columns of `given`.

    Raises:
        UndefinedError: `x` is constant, or the columns of `given` determine it.
    """
    x = _columns(x, x)[0]
    basis = _basis([_columns(x, column)[1] for column in given], len(x))
    return _residual("x", _centered("x", x), basis)


def _columns(x: Values, y: Values, fewest: int = 3) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    x, y = np.asarray(x, dtype=np.float64), np.asarray(y, dtype=np.float64)
    if x.shape != y.shape or not (np.isfinite(x).all() and np.isfinite(y).all()):
        raise ValueError(f"expected finite columns of equal length, got shapes {x.shape} and {y.shape}")
    if len(x) < fewest:
        raise UndefinedError(f"expected at least {fewest} rows, got {len(x)}")
    return x, y


def _varying_columns(x: Values, y: Values, fewest: int = 3) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    x, y = _columns(x, y, fewest)
    for name, column in (("x", x), ("y", y)):
        _centered(name, column)  # raises UndefinedError if the column is constant
    return x, y


def _centered(name: str, column: NDArray[np.float64]) -> NDArray[np.float64]:
    if (column == column[0]).all():
        raise UndefinedError(f"a correlation is undefined: {name} is {column[0]:g} in every row")
    # Subtract the first value before the mean is computed: the mean of large numbers has a large rounding error.
    shifted = column - column[0]
    return shifted - shifted.mean()


def _cosine(x: NDArray[np.float64], y: NDArray[np.float64]) -> float:
    return float(np.clip((x / np.linalg.norm(x)) @ (y / np.linalg.norm(y)), -1, 1))


def _tested(value: float, n: int, df: int) -> Correlation:
    return Correlation(value, p_value(value, df), n, df)


def _ranks(column: NDArray[np.float64]) -> NDArray[np.float64]:
    _, index, counts = np.unique(column, return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts - 1) / 2)[index]


def distance_correlations(x: NDArray[np.float64], y: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the `distance_correlation` (*n) of columns x and y (*n, rows), none of which may be constant."""
    return _table_cosines(_centered_distances(x), _centered_distances(y))


def _centered_distances(columns: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the doubly centred matrix (*n, rows, rows) of distances between the values of each column (*n, rows)."""
    table = np.abs(columns[..., :, None] - columns[..., None, :])
    means = table.mean(-1, keepdims=True)
    return table - means - means.swapaxes(-2, -1) + table.mean((-2, -1), keepdims=True)


def _table_cosines(first: NDArray[np.float64], second: NDArray[np.float64]) -> NDArray[np.float64]:
    product, *squares = ((a * b).sum((-2, -1)) for a, b in ((first, second), (first, first), (second, second)))
    return np.sqrt(np.clip(product, 0, None) / np.sqrt(squares[0] * squares[1])).clip(0, 1)


def _basis(columns: Sequence[NDArray[np.float64]], n: int) -> NDArray[np.float64]:
    """Return an orthonormal basis (n, rank) of the span of the centred columns."""
    centered = [column - column[0] - (column - column[0]).mean() for column in columns if (column != column[0]).any()]
    if not centered:
        return np.zeros((n, 0))
    scaled = np.stack([column / np.linalg.norm(column) for column in centered], axis=1)
    left, sizes, _ = np.linalg.svd(scaled, full_matrices=False)
    return left[:, sizes > _RELATIVE * sizes[0]]


def _residual(name: str, centered: NDArray[np.float64], basis: NDArray[np.float64]) -> NDArray[np.float64]:
    rest = centered - basis @ (basis.T @ centered)
    return _nonzero(name, rest, centered, "is determined by the covariates")


def _nonzero(name: str, rest: NDArray[np.float64], whole: NDArray[np.float64], otherwise: str) -> NDArray[np.float64]:
    if np.linalg.norm(rest) <= _RELATIVE * np.linalg.norm(whole):
        raise UndefinedError(f"a correlation is undefined: {name} {otherwise}")
    return rest


# Choosing a layer without labels: how closely a metric follows task scores over layers, and how good the scores are at
# the layer where the metric is smallest or largest.
#
# Tables are (tasks, layers), with the same tasks and layers for metric and score. Intervals are over tasks. Layers of
# one model are not independent, so intervals or p-values over layers would be wrong.

Table = NDArray[np.float64]  # (tasks, layers)
Form = Literal["per_task_mean", "of_task_means"]
Coefficient = Literal["distance_correlation", "spearman", "kendall"]
Direction = Literal["min", "max"]
FORMS: tuple[Form, ...] = ("per_task_mean", "of_task_means")
COEFFICIENTS: tuple[Coefficient, ...] = ("distance_correlation", "spearman", "kendall")
DIRECTIONS: tuple[Direction, ...] = ("min", "max")
# Fewest layers for a correlation over layers. With fewer it says little: over two layers, the distance correlation of
# any two curves is 1.
FEWEST_LAYERS = 4
FEWEST_TASKS = 5  # fewest tasks for an interval: resamples of fewer tasks are mostly the same two or three tasks
_CHUNK = 2**20  # largest number of entries of layer-by-layer tables in memory at once: 8 MB


class Estimate(NamedTuple):
    """A number and its 95% bootstrap interval over tasks, which is None if there are too few tasks."""

    value: float
    low: float | None = None
    high: float | None = None


class LayerCorrelation(NamedTuple):
    """The correlation over layers of a metric and task scores, for all tasks together.

    `form` "per_task_mean" is the mean over tasks of one coefficient for each task. "of_task_means" is the coefficient
    of the mean metric and the mean score over tasks. `undefined` holds the indices of tasks whose metric or scores are
    equal at all layers. These tasks have no coefficient, and the mean leaves them out.
    """

    form: Form
    coefficient: Coefficient
    estimate: Estimate
    num_tasks: int
    undefined: tuple[int, ...]


class Null(NamedTuple):
    """Mean and 95th percentile (`_95`) of the distance correlation of two unrelated curves over layers.

    For `noise`, the values of each curve are independent. For `walk`, each curve is a random walk over the layers.
    """

    noise: float
    noise_95: float
    walk: float
    walk_95: float


@dataclass(frozen=True, kw_only=True)
class Selection:
    """Mean score over tasks at the layers that a rule chose, and at other layers for comparison.

    `best` is the score at `best_layer`, the single layer with the best mean over these tasks. `oracle` is the score if
    the best layer of each task is taken. Both choices use the scores themselves. `best_share` is the share of resamples
    of tasks in which `best_layer` is the best. `random` is the expected score if a layer is drawn uniformly for each
    task.
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
    """Return three coefficients of the correlation of a metric with scores over layers, each in two forms.

    The coefficients are distance correlation, Spearman's rho and Kendall's tau-b.

    The form `per_task_mean` is computed over the layers within each task, then averaged over tasks. A task whose metric
    or scores are equal at all layers has no coefficient. The mean leaves it out, and `undefined` lists it. The form
    `of_task_means` first averages the metric and the scores over all tasks. It is absent if one of these means is equal
    at all layers. All intervals of a form use the same resamples of tasks.

    Raises:
        UndefinedError: fewer than 4 layers, or in every task a metric or scores that are equal at all layers.
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
        options = {"resamples": resamples, "seed": seed}  # the same seed draws the same tasks for metric and scores
        curves = [resampled_curves(torch.from_numpy(np.array(t.T)), **options).numpy() for t in (metric, scores)]
        valid = (np.ptp(curves[0], axis=1) > 0) & (np.ptp(curves[1], axis=1) > 0)
        drawn = _coefficients(curves[0][valid], curves[1][valid])
    for column, name in enumerate(COEFFICIENTS):
        ends = (None, None) if drawn is None else map(float, np.quantile(drawn[:, column], [0.025, 0.975]))
        correlations.append(
            LayerCorrelation("of_task_means", name, Estimate(float(whole[column]), *ends), len(metric), ())
        )
    return correlations


@lru_cache(maxsize=64)
def distance_null_over_layers(num_layers: int, *, samples: int = 2000, seed: int = 0) -> Null:
    """Return the distance correlation of two unrelated curves over `num_layers` layers.

    The result has two cases: curves of Gaussian noise, and curves that are random walks. Neighbouring layers are
    similar, so real curves lie between the two cases, nearer to random walks. For 25 layers the mean distance
    correlation is 0.34 for noise and 0.54 for random walks.

    Raises:
        UndefinedError: fewer than 4 layers.
    """
    noise = np.random.default_rng(seed).standard_normal((2, samples, num_layers))
    drawn = [_coefficients(*pair)[:, 0] for pair in (noise, noise.cumsum(-1))]
    summaries = [(float(values.mean()), float(np.quantile(values, 0.95))) for values in drawn]
    return Null(*summaries[0], *summaries[1])


def extreme_layers(metric: Table, direction: Direction) -> NDArray[np.intp]:
    """Return, for each task, the column where its metric is smallest ("min") or largest ("max"); the first of ties."""
    metric = np.asarray(metric, dtype=np.float64)
    return metric.argmin(1) if direction == "min" else metric.argmax(1)


def scores_at(metric: Table, scores: Table, direction: Direction) -> NDArray[np.float64]:
    """Return the score (tasks,) of each task at the layer where the metric of this task is smallest or largest."""
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
    """Return the mean score at layers that the metric chooses, and at other layers for comparison.

    For each task, the chosen layer is the one with the smallest metric (`direction` "min") or the largest ("max").
    Choose the direction by `better_rule`, on models other than this one. The first column of both tables is layer
    `first_layer`.

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
    """Return the metric and direction ("min" or "max") that choose the layers with the best mean score.

    If several tie, the first is returned. Each entry of `models` has the tables (tasks, layers) of one model: a mapping
    from metrics to their tables, and the table of scores. Only metrics that all models have are compared. Scores are
    averaged over tasks, then over models, so each model has the same weight.
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
    """Return the mean over tasks of each column of a table (tasks, columns), with its interval."""
    values = columns.mean(0).tolist()
    if len(columns) < FEWEST_TASKS:
        return [Estimate(value) for value in values]
    low, high = bootstrap_interval(torch.from_numpy(np.array(columns)), resamples=resamples, seed=seed)
    return [Estimate(*row) for row in zip(values, low.tolist(), high.tolist(), strict=True)]


# The coefficients of many curves at once, such as 2,000 resamples.


def _coefficients(x: Table, y: Table) -> NDArray[np.float64]:
    """Return the correlation coefficients (curves, 3) of each row of x (curves, layers) with the same row of y.

    They are distance correlation, Spearman's rho and Kendall's tau-b. No row may be constant.
    """
    if x.shape[-1] < FEWEST_LAYERS:
        raise UndefinedError(f"expected at least {FEWEST_LAYERS} layers, got {x.shape[-1]}")
    size = max(1, _CHUNK // x.shape[-1] ** 2)
    parts = [(x[start : start + size], y[start : start + size]) for start in range(0, len(x), size)]
    return np.concatenate([np.stack([distance_correlations(*p), *_rank_correlations(*p)], axis=-1) for p in parts])


def _rank_correlations(x: Table, y: Table) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the values (curves,) of `spearman` and `kendall` for each row of x (curves, layers) and of y."""
    signs = [np.sign(side[..., :, None] - side[..., None, :]) for side in (x, y)]
    kendall = _cosines(*(sign.reshape(*sign.shape[:-2], -1) for sign in signs))
    spearman = _cosines(*(sign.sum(-1) for sign in signs))  # twice a rank's distance from the mean rank
    return spearman, kendall


def _cosines(x: NDArray[np.float64], y: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.clip((x * y).sum(-1) / np.sqrt((x * x).sum(-1) * (y * y).sum(-1)), -1, 1)
