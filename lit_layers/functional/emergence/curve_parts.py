"""Parts of drawn curves: steps beside a smooth curve, and copies of a curve for each prompt, test row or seed."""

import itertools
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import stats
from scipy.linalg.lapack import dtrtrs

Array = NDArray[np.floating[Any]]
# Steps: sigmoids and rises with a corner, on a grid of places and widths, and pairs of them.
PLACES, WIDTHS = 80, np.geomspace(0.001, 0.07, 5)  # of steps before any is split; widths as shares of the axis
SPLIT = 12  # how many of each shape are split: the likeliest
TIES = 6  # decimals of a log-evidence: what differs by less stands in the order of its numbers


def _nothing(u: Array) -> Array:
    return np.zeros_like(u)


def _sigmoid(u: Array) -> Array:
    return 1 / (1 + np.exp(-np.clip(u, -50, 50)))


def _from_a_corner(u: Array) -> Array:
    return -np.expm1(-np.maximum(u, 0) / 2)


def _into_a_corner(u: Array) -> Array:
    return np.exp(np.minimum(u, 0) / 2)


# Of each rise the middle eight tenths are as wide.
SHAPES = (_nothing, _sigmoid, _from_a_corner, _into_a_corner)


class Steps(NamedTuple):
    """Steps by shape, place and width, the first one without a shape: no step.

    Each stands for a cell, `cell` wide in place and `ratio` in the logarithm of the width, as likely as that is large.
    """

    shape: NDArray[np.intp]
    place: Array
    width: Array
    cell: Array
    ratio: Array
    log_prior: Array

    @classmethod
    def over(cls, x: Array) -> "Steps":
        x, span = np.append(x[: -1 : max(1, round(len(x) / PLACES))], x[-1]), x[-1] - x[0]
        per = max(1, PLACES // len(x))
        cells = np.repeat(np.diff(x) / per, per)
        places = x[0] + cells.cumsum() - cells / 2
        shape, at, wide = (each.ravel() for each in np.indices((len(SHAPES) - 1, len(places), len(WIDTHS))))
        prior = np.log(cells[at] / span / len(WIDTHS) / (len(SHAPES) - 1))
        ratio = np.full(len(at), np.log(WIDTHS[1] / WIDTHS[0]))
        steps = cls(shape + 1, places[at], span * WIDTHS[wide], cells[at], ratio, prior)
        return _joined(cls(np.zeros(1, dtype=np.intp), x[:1], np.ones(1), *np.zeros((3, 1))), steps)

    def at(self, x: Array) -> Array:
        """Return the steps at some points, (points, steps)."""
        scaled = (x[:, None] - self.place) / self.width
        for number, shape in enumerate(SHAPES):
            mine = self.shape == number
            scaled[:, mine] = shape(scaled[:, mine])
        return scaled

    def among(self, chosen: NDArray[Any]) -> "Steps":
        fields: list[Any] = [each[chosen] for each in self]
        return Steps(*fields)

    def split(self) -> "Steps":
        """Split each step into nine, by thirds of its cell."""
        parts = []
        for along, across in itertools.product((-1 / 3, 0, 1 / 3), repeat=2):
            place, width = self.place + along * self.cell, self.width * np.exp(across * self.ratio)
            parts.append(Steps(self.shape, place, width, self.cell / 3, self.ratio / 3, self.log_prior - np.log(9)))
        return _joined(*parts)


def _joined(*steps: Steps) -> Steps:
    fields: list[Any] = [np.concatenate(parts) for parts in zip(*steps, strict=True)]
    return Steps(*fields)


@dataclass(frozen=True)
class Pairs:
    """Two steps each of some, by their numbers (2, pairs), of which no step may be one or both."""

    steps: Steps
    places: NDArray[np.intp]

    @cached_property
    def are_two(self) -> NDArray[np.bool_]:
        first, second = self.steps.shape[self.places] > 0
        return first & second

    @cached_property
    def log_prior(self) -> Array:
        """Return the log-prior: before any power, none, one and two steps are equally likely, in either order."""
        return self.steps.log_prior[self.places].sum(0) + np.log(2) * self.are_two

    def among(self, chosen: NDArray[Any]) -> "Pairs":
        places, used = self.places[:, chosen], np.zeros(len(self.steps.shape), dtype=bool)
        used[places] = True
        return Pairs(self.steps.among(used), (used.cumsum() - 1)[places])

    def and_of(self, other: "Pairs") -> "Pairs":
        places = np.concatenate([self.places, other.places + len(self.steps.shape)], 1)
        return Pairs(_joined(self.steps, other.steps), places)

    def split(self, side: int) -> "Pairs":
        """Split each pair into nine by one of its steps, which then comes second."""
        parts = self.steps.among(self.places[side]).split()
        kept = np.tile(self.places[1 - side], 9)
        return Pairs(_joined(self.steps, parts), np.stack([kept, len(self.steps.shape) + np.arange(len(kept))]))

    def likeliest(self, evidence: Array) -> NDArray[np.intp]:
        """Return which pairs to split: the `SPLIT` likeliest of each shape of the second step."""
        shape = self.steps.shape[self.places[1]]
        of_each = [np.flatnonzero(shape == number) for number in range(1, len(SHAPES))]
        return np.concatenate([mine[likeliest(evidence[mine], SPLIT)] for mine in of_each])


def likeliest(evidence: Array, count: int) -> NDArray[np.intp]:
    """Return the indices of the `count` largest evidences, the best last.

    Evidences that differ by rounding keep their order.

    Narrow steps between the same two checkpoints are one to the values: which of them is taken hangs on no machine.
    """
    rounded, count = np.round(evidence, TIES), min(count, len(evidence))
    near = np.flatnonzero(rounded >= np.partition(rounded, -count)[-count])
    return near[np.argsort(rounded[near], kind="stable")[-count:]]


# Copies of a curve: the errors of their mean, and resamples of them.

PRIOR_ROWS = 4  # by so many more the variance at one checkpoint is that of all: of few replicates it is rough
DRAWS = 1000


def bootstrap_counts(replicates: int, *, seed: int = 0) -> NDArray[np.int64]:
    """Return how often each of `DRAWS` bootstrap samples contains each replicate, (draws, replicates)."""
    rng = np.random.default_rng([seed, replicates])
    return rng.multinomial(replicates, np.full(replicates, 1 / replicates), size=DRAWS)


def drawn_together(draws: Array, estimates: Array, rng: np.random.Generator) -> Array:
    """Return the draws (draws,) of a time, reordered like its estimates from bootstrap samples, (draws,).

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
    """Return the rows minus their own means over checkpoints, which move no time, and minus the mean of all rows."""
    residuals = rows - rows.mean(1, keepdims=True)
    return residuals - residuals.mean(0)


def whole_rows(replicates: ArrayLike, there: NDArray[np.bool_]) -> tuple[NDArray[np.bool_], Array]:
    """Return which replicates have a value wherever the curve has one, and these values."""
    rows = np.asarray(replicates, dtype=np.float64)[:, there]
    whole: Any = np.isfinite(rows).all(1)
    rows = rows[whole]
    if len(rows) < 2:
        raise ValueError(f"expected 2 replicates or more with a value wherever the curve has one, got {len(rows)}")
    return whole, rows


def covariance_of_mean(rows: Array, x: Array) -> Array:
    """Return the covariance of the mean of rows, each without its own mean over checkpoints, which moves no time.

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
    """Return the likeliest correlation of checkpoints that falls with their distance to a share: Matern 1/2 or 3/2."""
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
