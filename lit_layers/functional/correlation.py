"""Correlation over models: coefficients, their intervals, and what is left of them once something else is held fixed.

All in float64. The rows are models (or tasks), never layers of one model: those are alike, and no p-value would hold.
"""

import math
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Values = Sequence[float] | NDArray[np.float64]
Statistic = Callable[[NDArray[np.intp]], float]  # of the rows with these numbers

_RELATIVE = 1e-10  # what is left of a column by less than this is rounding


class UndefinedError(ValueError):
    """A coefficient that these rows do not define: a constant column, or too few rows."""


class Correlation(NamedTuple):
    """A coefficient in [-1, 1], its two-sided p-value against independence, and what it rests on.

    `df` are the degrees of freedom left: rows, less one for each mean, covariate and slope that was fitted.
    """

    value: float
    p: float
    n: int
    df: int


class Interval(NamedTuple):
    """A percentile interval, and in how many resamples the statistic was undefined and so left out."""

    low: float
    high: float
    num_undefined: int


class LeaveOneOut(NamedTuple):
    """How far one row decides a coefficient: each row's value without it, and the row whose removal changes it most."""

    values: list[float]
    index: int  # pyright: ignore[reportIncompatibleMethodOverride] - a name as old as the published tables
    change: float


class Line(NamedTuple):
    """A least-squares line; `error` is the residual standard deviation (df = n - 2)."""

    slope: float
    intercept: float
    error: float
    center: float
    spread: float  # sum of squares of x about its mean
    n: int


def pearson(x: Values, y: Values) -> Correlation:
    """Return Pearson's r. Increasing affine maps of either side do not change it; its square is the R² of a line.

    Raises:
        UndefinedError: fewer than 3 rows, or a constant column.
        ValueError: columns of unequal length, or a value that is not finite.
    """
    x, y = _columns(x, y)
    return _tested(_cosine(_centered("x", x), _centered("y", y)), len(x), len(x) - 2)


def p_value(r: float, df: int) -> float:
    """Return the two-sided p of a (partial) correlation by Student's t.

    With `df` degrees of freedom, t² = df r² / (1 - r²).
    """
    from scipy.special import betainc

    return float(betainc(df / 2, 0.5, 1 - r * r))


def spearman(x: Values, y: Values) -> Correlation:
    """Return Spearman's rho: Pearson's r of the ranks, with mean ranks for ties.

    Increasing maps do not change it. Its p is that of the t test, but at least 2 / n!, the share of the two orders that
    agree most: at rho = 1 Student's t gives none.

    Raises: as `pearson`.
    """
    x, y = _varying_columns(x, y)
    of_ranks = pearson(_ranks(x), _ranks(y))
    return of_ranks._replace(p=max(of_ranks.p, math.exp(math.log(2) - math.lgamma(of_ranks.n + 1))))


def kendall(x: Values, y: Values) -> Correlation:
    """Return Kendall's tau-b.

    Increasing maps do not change it. Its p is exact for few rows without ties, otherwise normal, as in scipy.

    Raises: as `pearson`.
    """
    from scipy.stats import kendalltau  # a quarter of a second to import

    x, y = _varying_columns(x, y)
    result: Any = kendalltau(x, y)
    return Correlation(float(result.statistic), float(result.pvalue), len(x), len(x) - 2)


def distance_correlation(x: Values, y: Values) -> float:
    """Return Székely's distance correlation, in [0, 1]: the root of the biased V-statistic.

    0 in the limit of many rows if and only if independent; 1 for any exact affine relation. Unchanged by affine maps of
    either side. Its null is far from 0 (about .28 for 37 independent Gaussian pairs): see `distance_null`.

    Raises:
        UndefinedError: fewer than 4 rows (two always give 1), or a constant column.
        ValueError: columns of unequal length, or a value that is not finite.
    """
    x, y = _varying_columns(x, y, fewest=4)
    return float(distance_correlations(x, y))


def distance_null(x: Values, y: Values, *, permutations: int = 1000, seed: int = 0) -> tuple[float, float]:
    """Return the mean distance correlation of shuffled rows, and the share of shuffles that reach the data's.

    Raises: as `distance_correlation`.
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
    left = [_residual(name, _centered(name, column), basis) for name, column in (("x", x), ("y", y))]
    return _tested(_cosine(*left), len(x), df)


def within_group_correlation(x: Values, y: Values, groups: Sequence[Hashable]) -> Correlation:
    """Return Pearson's r of both columns centred within their groups, with df = n - groups - 1.

    The same as the partial correlation given an indicator of each group. A group of one row adds nothing.

    Raises:
        UndefinedError: no df left, or a column that is constant within every group.
        ValueError: columns of unequal length, or a value that is not finite.
    """
    x, y = _columns(x, y)
    numbers = list(dict.fromkeys(groups))
    places = np.array([numbers.index(group) for group in groups])
    df = len(x) - len(numbers) - 1
    if df < 1:
        raise UndefinedError(f"{len(x)} rows in {len(numbers)} groups leave nothing to compare within a group")
    left = []
    for name, column in (("x", x), ("y", y)):
        centered = _centered(name, column)
        means = np.bincount(places, centered) / np.bincount(places)
        left.append(_kept(name, centered - means[places], centered, "is constant within every group"))
    return _tested(_cosine(*left), len(x), df)


def leave_one_out(x: Values, y: Values) -> LeaveOneOut:
    """Return Pearson's r without each row in turn, and the row whose removal changes it most.

    A value is NaN where the rest has a constant column; such a row counts as the most influential.

    Raises:
        UndefinedError: fewer than 4 rows, or a constant column.
    """
    x, y = _columns(x, y, fewest=4)
    whole, values = pearson(x, y).value, []
    for row in range(len(x)):
        try:
            values.append(pearson(np.delete(x, row), np.delete(y, row)).value)
        except UndefinedError:
            values.append(math.nan)
    changes = [math.inf if math.isnan(value) else abs(value - whole) for value in values]
    index = int(np.argmax(changes))
    return LeaveOneOut(values, index, values[index] - whole)


def bootstrap_rows(statistic: Statistic, n: int, *, resamples: int = 2000, seed: int = 0) -> Interval:
    """Return the 95% bootstrap interval of a statistic of n rows, which is given the indices of the drawn rows.

    Resamples in which it is undefined (all rows alike, say) are left out and counted.

    Raises:
        UndefinedError: undefined in more than half of the resamples.
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
    """Return the low and high ends of the mean of y at some x: a 95% band around the line, by the t distribution."""
    from scipy.special import stdtrit

    at = np.asarray(at, dtype=np.float64)
    middle = line.intercept + line.slope * at
    factor = float(stdtrit(line.n - 2, 0.975)) * line.error
    half = factor * np.sqrt(1 / line.n + (at - line.center) ** 2 / line.spread)
    return middle - half, middle + half


def residuals(x: Values, given: Sequence[Values]) -> NDArray[np.float64]:
    """Return what is left of a column after regressing it, with an intercept, on the others.

    Raises:
        UndefinedError: a constant column, or one that the others determine.
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
        _centered(name, column)  # refuses a constant one
    return x, y


def _centered(name: str, column: NDArray[np.float64]) -> NDArray[np.float64]:
    if (column == column[0]).all():
        raise UndefinedError(f"a correlation is undefined: {name} is {column[0]:g} in every row")
    # First by a value of its own: a mean of large numbers is rounded.
    shifted = column - column[0]
    return shifted - shifted.mean()


def _cosine(x: NDArray[np.float64], y: NDArray[np.float64]) -> float:
    return float(np.clip((x / np.linalg.norm(x)) @ (y / np.linalg.norm(y)), -1, 1))


def _tested(value: float, n: int, df: int) -> Correlation:
    return Correlation(value, p_value(value, df), n, df)


def _ranks(column: NDArray[np.float64]) -> NDArray[np.float64]:
    _, places, counts = np.unique(column, return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts - 1) / 2)[places]


def distance_correlations(x: NDArray[np.float64], y: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return `distance_correlation` (*n) of columns (*n, rows) that are not constant."""
    return _table_cosines(_centered_distances(x), _centered_distances(y))


def _centered_distances(columns: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the doubly centred distances (*n, rows, rows) between the rows of columns (*n, rows)."""
    table = np.abs(columns[..., :, None] - columns[..., None, :])
    means = table.mean(-1, keepdims=True)
    return table - means - means.swapaxes(-2, -1) + table.mean((-2, -1), keepdims=True)


def _table_cosines(first: NDArray[np.float64], second: NDArray[np.float64]) -> NDArray[np.float64]:
    product, *squares = ((a * b).sum((-2, -1)) for a, b in ((first, second), (first, first), (second, second)))
    return np.sqrt(np.clip(product, 0, None) / np.sqrt(squares[0] * squares[1])).clip(0, 1)


def _basis(columns: Sequence[NDArray[np.float64]], n: int) -> NDArray[np.float64]:
    """Return orthonormal directions of what the columns span apart from a constant."""
    centered = [column - column[0] - (column - column[0]).mean() for column in columns if (column != column[0]).any()]
    if not centered:
        return np.zeros((n, 0))
    scaled = np.stack([column / np.linalg.norm(column) for column in centered], axis=1)
    left, sizes, _ = np.linalg.svd(scaled, full_matrices=False)
    return left[:, sizes > _RELATIVE * sizes[0]]


def _residual(name: str, centered: NDArray[np.float64], basis: NDArray[np.float64]) -> NDArray[np.float64]:
    left = centered - basis @ (basis.T @ centered)
    return _kept(name, left, centered, "is determined by the covariates")


def _kept(name: str, left: NDArray[np.float64], whole: NDArray[np.float64], otherwise: str) -> NDArray[np.float64]:
    if np.linalg.norm(left) <= _RELATIVE * np.linalg.norm(whole):
        raise UndefinedError(f"a correlation is undefined: {name} {otherwise}")
    return left
