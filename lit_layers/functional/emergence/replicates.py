"""Copies of a curve, one for each prompt, test row or seed: the errors of their mean, and resamples of them."""

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import stats
from scipy.linalg.lapack import dtrtrs

Array = NDArray[np.floating[Any]]
PRIOR_ROWS = 4  # by so many more the variance at one checkpoint is that of all: of few replicates it is rough
DRAWS = 1000


def bootstrap_counts(replicates: int, *, seed: int = 0) -> NDArray[np.int64]:
    """How often each of `DRAWS` bootstrap samples has each of so many replicates, (draws, replicates)."""
    rng = np.random.default_rng([seed, replicates])
    return rng.multinomial(replicates, np.full(replicates, 1 / replicates), size=DRAWS)


def drawn_together(draws: Array, estimates: Array, rng: np.random.Generator) -> Array:
    """The draws (draws,) of a time in an order that goes with its estimates from bootstrap samples, (draws,).

    What resampling moves is common to curves of the same samples, what it does not (how a curve runs between
    checkpoints, say) is a curve's own. So with w the share of the draws' variance that the estimates have, at most 1,
    the draws are placed by the ranks of w^1/2 z + (1 - w)^1/2 e: z are the normal scores of the estimates, e a normal
    number for each. Their distribution stays as it was.
    """
    width, moved = (np.subtract(*np.quantile(each, [0.84, 0.16])) for each in (draws, estimates))
    share = min(1.0, (moved / width) ** 2) if width > 0 else 1.0
    scores = stats.norm.ppf((stats.rankdata(estimates) - 0.5) / len(estimates))
    placed = share**0.5 * scores + (1 - share) ** 0.5 * rng.standard_normal(len(draws))
    return np.sort(draws)[np.argsort(np.argsort(placed))]


def freed(rows: Array) -> Array:
    """Rows without their own means over checkpoints, which move no time, and without the mean of all."""
    residuals = rows - rows.mean(1, keepdims=True)
    return residuals - residuals.mean(0)


def whole_rows(replicates: ArrayLike, there: NDArray[np.bool_]) -> tuple[NDArray[np.bool_], Array]:
    """Which replicates have a value wherever the curve has one, and these values."""
    rows = np.asarray(replicates, dtype=np.float64)
    if rows.ndim != 2 or rows.shape[1:] != there.shape:
        raise ValueError(f"expected replicates of shape (replicates, {len(there)}), got {rows.shape}")
    rows = rows[:, there]
    whole: Any = np.isfinite(rows).all(1)
    rows = rows[whole]
    if len(rows) < 2:
        raise ValueError(f"expected 2 replicates or more with a value wherever the curve has one, got {len(rows)}")
    return whole, rows


def covariance_of_mean(rows: Array, x: Array) -> Array:
    """Of the mean of rows, each freed of its own mean over checkpoints, which moves no time.

    Few rows tell little of how errors go together at n checkpoints: their correlations count as (rows - 1) against n
    of a smooth one (`_smooth_correlation`), as with an inverse Wishart prior; variances are drawn towards their mean,
    and all is wider by the square of Student's over the normal quantile, since the spread of few rows is a guess.
    """
    count, n = rows.shape
    residuals = freed(rows)
    squares = (residuals**2).sum(0)
    variance = (squares + PRIOR_ROWS * squares.mean() / (count - 1)) / (count - 1 + PRIOR_ROWS)
    if not variance.any():
        return np.zeros((n, n))
    scaled = residuals / np.sqrt(variance)
    smooth = _smooth_correlation(scaled, x)
    correlation = (scaled.T @ scaled + n * smooth) / (count - 1 + n)
    correlation = correlation / np.sqrt(np.outer(np.diag(correlation), np.diag(correlation)))
    wider = (stats.t.ppf(0.975, count - 1) / stats.norm.ppf(0.975)) ** 2
    return wider * correlation * np.sqrt(np.outer(variance, variance)) / count


def _smooth_correlation(residuals: Array, x: Array) -> Array:
    """The most likely correlation between checkpoints that falls with their distance to a share: Matern 1/2 or 3/2."""
    count, n = residuals.shape
    if count > n:  # of many rows the products alone count
        residuals = np.asarray(np.linalg.qr(residuals, mode="r"))
    span, distance = x[-1] - x[0], np.abs(x[:, None] - x)
    level, free = np.full((n, n), 100.0), np.eye(n) - 1 / n  # residuals have no level
    best, most = np.eye(n), -np.inf
    columns = np.asfortranarray(residuals.T)  # as LAPACK copies it; scipy's own checks cost more than it solves
    for length in np.geomspace(span / n, span, 6):
        rough = np.exp(-distance / length)
        for shape in (rough, rough * (1 + distance / length)):
            for share in (0.0, 0.25, 0.5, 0.75, 0.95):
                kernel = share * shape + (1 - share) * np.eye(n)
                factor = np.linalg.cholesky(kernel + level)
                spread = (dtrtrs(factor, columns, lower=1)[0] ** 2).sum()
                likely = -(count - 1) * ((n - 1) / 2 * np.log(spread) + np.log(np.diag(factor)).sum())
                if likely > most:
                    best, most = free @ kernel @ free, likely
    return best / np.sqrt(np.outer(np.diag(best), np.diag(best)))
