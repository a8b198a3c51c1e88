"""Emergence of a curve over training steps: verdict, onset, half-way point, peak and plateau.

All in float64. Times may lie between two checkpoints. The curve is not known there, and the intervals of the times
include this uncertainty. docs/emergence_accuracy.md measures how often the intervals contain the true time, and how
often a flat curve is reported to emerge.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import signal, stats
from scipy.linalg.lapack import dtrtrs

from lit_layers.functional.emergence.drawn_curves import draw_curves, mean_curves

Array = NDArray[np.floating[Any]]

# Limits of the number of checkpoints with a value. Memory grows with the square of this number: 1,000 checkpoints take
# a minute and 5 GB, 10,000 would take hours and 500 GB.
FEWEST_CHECKPOINTS, MOST_CHECKPOINTS = 6, 1000
# A curve has left its first level once it differs from this level by the share EDGE of its largest change. It has
# reached its last level once it stays within the same distance of the last level.
EDGE = 0.1
GRID = 300  # most points at which a random curve is computed; more if there must be 2 per interval between checkpoints
RETURNED = 0.25  # a curve that ends with at most this share of its largest change does not emerge
# Let t be the time that a random curve takes from its half-way point to its last level. The curve has settled if it
# stays at this level for at least SEEN times t. The last level counts as not reached if more than the share OFTEN of
# the random curves have not settled. The first level is judged in the same way.
SEEN, OFTEN = 0.6, 0.1
# A random curve has a jump in an interval between two checkpoints if its change in each neighbouring interval is at
# most JUMP times its change in this interval.
JUMP = 0.15
FLAT_CURVES = 999  # number of simulated flat curves for each kind of noise
CORRELATIONS = (0.0, 0.3, 0.7, 0.9)  # lag-1 correlations of the kinds of noise
CLIPPED = 3.0  # if errors are known, deviations larger than this many standard errors are clipped to it
# The variance of each checkpoint is inaccurate if there are few replicates. It is averaged with the mean variance of
# all checkpoints, which has the weight of PRIOR_ROWS replicates.
PRIOR_ROWS = 4
DRAWS = 1000


class Time(NamedTuple):
    """A time on the axis of the curve (optimizer steps or tokens), and the ends of its interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class EmergenceTimes:
    """Result of `emergence_times`: whether and when a curve changes.

    `onset`, `halfway`, `peak` and `plateau` are None if the curve is flat. If a curve changes and then returns to near
    its first value, `changes` is True but `emerges` is False. `before` is True if the curve may already be changing at
    its first checkpoint, `not_yet` if it may still be changing at its last checkpoint. `num_checkpoints` is the number
    of checkpoints with a value, `num_gaps` the number of checkpoints without a value. `halfway_draws` (draws,) are the
    half-way points, in steps, of random curves drawn through the values. It is empty if the curve is flat.
    """

    emerges: bool
    p_value: float
    onset: Time | None
    halfway: Time | None
    peak: Time | None
    plateau: Time | None
    num_checkpoints: int
    num_gaps: int
    halfway_draws: Array = field(default_factory=lambda: np.empty(0), repr=False, compare=False)
    before: bool = False
    not_yet: bool = False

    @property
    def changes(self) -> bool:
        return self.halfway is not None

    @property
    def open_ends(self) -> tuple[bool, bool]:
        """Whether the half-way point may lie before the first checkpoint, and whether after the last one."""
        return self.before, self.halfway is not None and bool(np.isinf(self.halfway.high))


def emergence_times(
    steps: ArrayLike,
    values: ArrayLike,
    *,
    stderr: ArrayLike | None = None,
    replicates: ArrayLike | None = None,
    counts: ArrayLike | None = None,
    confidence: float = 0.95,
    seed: int | Sequence[int] = 0,
) -> EmergenceTimes:
    """Return whether a curve over steps changes, and if so, when.

    **Verdict.** The hypothesis "the curve is flat" is tested at level 1 - `confidence`.

    With replicates, the test is Student's t over replicates, combined over contrasts by the union bound. Each split
    into earlier and later checkpoints is a contrast, and so is each checkpoint against all others. Contrasts without
    spread over replicates have no t and are left out. If all are left out, every replicate changes by exactly the same
    amounts, and p is 0.

    Without replicates, the curve is ranked among 999 flat curves with each of eight kinds of noise. These are AR(1)
    with lag-1 correlation 0, .3, .7 or .9, and with normal or t3 shocks. The largest of the eight p-values is used. It
    is at least 0.001. Curves are ranked by the statistics that `_change_statistics` describes. A curve that wanders
    more than its errors explain is also not flat. Its intervals are then wide.

    **Times.** They are the times of curves drawn from Gaussian processes given the values. The kernels are Matern 3/2
    and 5/2 over a grid of length scales and heights. Zero, one or two sudden changes in level are added to a process.
    Such a change is a sigmoid or a rise with a corner, of unknown location, height and width. On average, half of the
    curves are drawn from all these models, and half from the models with at most one sudden change. In each half, the
    probability of a model is proportional to its evidence to the power 0.9. With f a drawn curve, f_0 its first value,
    and C the largest difference of f from f_0 at a checkpoint:

    - peak: where (f - f_0) / C is largest. On a plateau that may be anywhere, which the interval shows.
    - halfway: where (f - f_0) / C last passes 1/2 before the peak.
    - onset: where (f - f_0) / C last passes 0.1 before `halfway`.
    - plateau: the time after which f stays within 0.1 |C| of its last value.

    Values are medians over draws, intervals are quantiles of the draws. A drawn curve jumps in an interval between two
    checkpoints if its change in each neighbouring interval is at most 0.15 times its change in this one. Its times in
    this interval are then moved to a random position between the two checkpoints.

    A curve changes, but does not emerge, if the median over draws of its last (f - f_0) / C is at most 1/4.

    `not_yet` is True if the curve may still be changing at its last checkpoint: f stays at its last level (within
    0.1 |C|) for less than 0.6 t in more than a tenth of the draws. Here t is the time from the half-way point of f
    until f reaches this level. The time of the plateau is then infinite. If (f - f_0) / C also ends above 0.9 in more
    than a tenth of the draws, C is not known yet. The time of the peak is then infinite, and the intervals of onset and
    half-way point have no upper end.

    `before` is True if the first checkpoint is not step 0 and the curve may already be changing there: f stays at its
    first level for less than 0.6 u in more than a tenth of the draws. Here u is the time from onset to half-way point.
    The onset is then 0, and the intervals of onset, half-way point and plateau begin at 0.

    Args:
        steps: Optimizer steps or tokens: increasing numbers that are not negative, (checkpoints,).
        values: The curve, (checkpoints,); NaN for a missing value.
        stderr: Standard error of each value, (checkpoints,). The intervals cover the same source of uncertainty as
            these errors, for example prompts or seeds. An error of 0 next to positive ones (an accuracy of 0 or 1) is
            taken as too small to observe. It counts as the smallest positive error.
        replicates: Copies of the curve whose mean is `values`, one row per prompt, test row or seed,
            (replicates, checkpoints). Pass them instead of `stderr` if errors may be correlated between checkpoints. A
            row with NaN where the curve has a value is left out.
        counts: How often each of 1000 bootstrap samples contains each replicate, (1000, replicates), from
            `bootstrap_counts`. Pass the same counts for all curves of the same prompts, and another seed for each
            curve. The `halfway_draws` of these curves can then be compared draw by draw: draw i of a curve
            correlates with the half-way point of this curve in bootstrap sample i.
        confidence: Level of the intervals and of the verdict.
        seed: Seed of the draws; the same input gives the same numbers.

    Raises:
        ValueError: fewer than 6 values or more than 1,000, or an infinite one. Steps that do not increase or are
            negative. Standard errors that are negative or not finite where there is a value. Fewer than 2 complete
            replicates. A confidence outside (0, 1).
    """
    curve = _Curve.checked(steps, values, stderr, replicates, confidence)
    rng = np.random.default_rng(seed)
    p_value = curve.p_value(rng)
    resampled = None if counts is None else curve.resampled(counts)
    if not p_value <= 1 - confidence:
        return EmergenceTimes(False, p_value, None, None, None, None, len(curve.x), curve.num_gaps)
    grid = curve.grid()
    at = np.searchsorted(grid, curve.x)
    drawn = draw_curves(curve.x, curve.y, curve.noises(), grid, DRAWS, rng)
    onset, half, peak, settled, ended = _landmarks(drawn, grid, at)
    # Compute the landmarks of the reversed curve: its onset is the time when the curve reaches its last level.
    reached, late_half, *_ = _landmarks(drawn[:, ::-1], grid[-1] - grid[::-1], len(grid) - 1 - at[::-1])
    before = bool(curve.x[0] > 0 and (onset - grid[0] < SEEN * (half - onset)).mean() > OFTEN)
    not_yet = bool((reached < SEEN * (late_half - reached)).mean() > OFTEN)
    onset, half, settled = _spread_jumps((onset, half, settled), drawn[:, at], curve.x, rng)
    positions = {"onset": onset, "halfway": half, "peak": peak, "plateau": settled}
    times = {name: curve.time(each, confidence) for name, each in positions.items()}
    if before:
        times["onset"] = times["onset"]._replace(value=0.0)
        times |= {name: times[name]._replace(low=0.0) for name in ("onset", "halfway", "plateau")}
    if not_yet:
        times["plateau"] = times["plateau"]._replace(value=np.inf, high=np.inf)
    if not_yet and (ended > 1 - EDGE).mean() > OFTEN:  # the largest change may still grow
        times["peak"] = times["peak"]._replace(value=np.inf)
        times |= {name: times[name]._replace(high=np.inf) for name in ("onset", "halfway", "peak")}
    if resampled is not None:
        estimated = mean_curves(curve.x, resampled, curve.noises()[0], grid)
        half = coupled_draws(half, _landmarks(estimated, grid, at)[1], rng)
    emerges, counted = bool(np.median(ended) > RETURNED), (len(curve.x), curve.num_gaps)
    return EmergenceTimes(emerges, p_value, *times.values(), *counted, curve.step(half), before, not_yet)  # pyright: ignore


@dataclass(frozen=True)
class _Curve:
    """Checked values on the axis log2(1 + step), and the covariance of their errors (None if unknown).

    The curve `y` and its replicates `rows` are scaled by the same power of 2. `covariance` is that of the scaled curve.
    """

    x: Array
    y: Array
    covariance: Array | None
    rows: Array | None
    whole: NDArray[np.bool_] | None  # which replicates are in `rows`
    num_gaps: int

    @classmethod
    def checked(
        cls,
        steps: ArrayLike,
        values: ArrayLike,
        stderr: ArrayLike | None,
        replicates: ArrayLike | None,
        confidence: float,
    ) -> "_Curve":
        at, y = np.asarray(steps, dtype=np.float64), np.asarray(values, dtype=np.float64)
        # On a logarithmic axis of steps, training curves are about equally smooth everywhere. log2(1 + step) keeps
        # step 0 on the axis.
        x = np.log2(1 + at.clip(0))
        if len(wrong := np.flatnonzero(~((at >= 0) & (np.diff(x, prepend=-1) > 0)))):
            got = " after ".join(f"{step:g}" for step in at[max(0, wrong[0] - 1) : wrong[0] + 1][::-1])
            raise ValueError(f"expected steps of 0 or more that increase, got {got}")
        if np.isinf(y).any():
            raise ValueError("expected finite values, or NaN for a gap, got an infinite one")
        if not 0 < confidence < 1:
            raise ValueError(f"expected a confidence between 0 and 1, got {confidence}")
        valid = np.isfinite(y)
        if valid.sum() < FEWEST_CHECKPOINTS:
            raise ValueError(f"expected values at {FEWEST_CHECKPOINTS} checkpoints or more, got {valid.sum()}")
        if valid.sum() > MOST_CHECKPOINTS:
            most = f"no more than {MOST_CHECKPOINTS:,} checkpoints (some of them, or means of neighbouring ones)"
            raise ValueError(f"expected values at {most}, got {valid.sum():,}")
        x, y = x[valid], y[valid]
        whole, rows = (None, None) if replicates is None else whole_rows(replicates, valid)
        # Scaling values by a power of two is exact and does not move the onset, half-way point, peak or plateau. After
        # scaling, no square overflows or underflows.
        unit = -int(np.frexp(max(np.abs(y).max(), 0 if rows is None else np.abs(rows).max()))[1])
        covariance, y = None, np.ldexp(y, unit)
        if stderr is not None:
            covariance = np.diag(_errors(stderr, valid, unit) ** 2)
        elif rows is not None:
            rows = np.ldexp(rows, unit)
            covariance = covariance_of_mean(rows, x)
        return cls(x, y, covariance, rows, whole, int((~valid).sum()))

    def step(self, x: Array) -> Array:
        return np.exp2(x) - 1

    def time(self, positions: Array, confidence: float) -> Time:
        return Time(*self.step(np.quantile(positions, _levels(confidence))).tolist())

    def grid(self) -> Array:
        """Return the points at which curves are drawn: the checkpoints, and equally many points in each interval."""
        num = max(2, GRID // len(self.x))
        parts = [np.linspace(a, b, num, endpoint=False) for a, b in zip(self.x[:-1], self.x[1:], strict=True)]
        return np.concatenate([*parts, self.x[-1:]])

    def resampled(self, counts: ArrayLike) -> Array:
        """Return the mean curve of the replicates in each bootstrap sample, (draws, checkpoints)."""
        assert self.rows is not None
        taken = np.asarray(counts, dtype=np.float64)[:, self.whole]
        total = taken.sum(1, keepdims=True)  # 0 if a bootstrap sample has only incomplete replicates
        return np.where(total > 0, taken @ self.rows / np.maximum(total, 1), self.rows.mean(0))

    def noises(self) -> list[Array]:
        """Return possible covariances of the errors: a single one if it is known, otherwise several candidates."""
        if self.covariance is not None:
            return [self.covariance]
        # Second differences overestimate the noise of a rough curve and underestimate correlated noise. The estimate is
        # therefore multiplied by several factors, and the evidence of the models decides between them.
        return [_robust_noise(self.y) * factor for factor in (0.25, 0.5, 1.0, 2.0, 4.0)]

    def p_value(self, rng: np.random.Generator) -> float:
        """Return the two-sided p-value of the hypothesis that the curve is flat."""
        if np.ptp(self.y) == 0:
            return 1.0
        if self.rows is not None:
            return _t_test(self.rows)
        variance = np.ones(len(self.y)) if self.covariance is None else np.diag(self.covariance)
        if not variance.any():  # the values differ and have no errors, so the curve is not flat
            return 0.0
        # The kind of noise is unknown, so the curve must stand out among flat curves with each kind of noise.
        return max(self._rank_among(noise * np.sqrt(variance), 1 / variance) for noise in _flat_noise(len(self.y)))

    def _rank_among(self, flat: Array, weight: Array) -> float:
        """Return the p-value of this curve among simulated flat curves, the rows of `flat`.

        All these curves, this one included, are ranked by each statistic of `_change_statistics`. The p-value is the
        share of curves whose best rank is at least as good as the best rank of this curve. It is valid although several
        statistics are tried, because the best rank is taken for every curve.
        """
        statistics = _change_statistics(np.concatenate([self.y[None], flat]), weight, self.covariance is not None)
        least = stats.rankdata(-np.round(statistics, 9), method="max", axis=1).min(0)
        return float((least <= least[0]).mean())


def _errors(stderr: ArrayLike, valid: NDArray[np.bool_], unit: int) -> Array:
    errors = np.asarray(stderr, dtype=np.float64)[valid]
    if len(wrong := errors[~(np.isfinite(errors) & (errors >= 0))]):
        raise ValueError(f"expected finite standard errors of 0 or more wherever there is a value, got {wrong[0]:g}")
    if not errors.any():
        return errors
    errors = np.where(errors == 0, errors[errors > 0].min(), errors)
    with np.errstate(over="ignore"):
        return np.ldexp(errors, unit).clip(1e-100, 1e100)


def _t_test(rows: Array) -> float:
    """Return the p-value of the hypothesis that a curve is flat, by Student's t over its replicates `rows`.

    A contrast is the difference of two means: over some checkpoints, and over all others. There is a contrast for each
    split into earlier and later checkpoints, and one for each checkpoint. The union bound combines their tests.
    """
    count, n = rows.shape
    early = np.tri(n, n, -1)[1:]  # row s: 1 at the first s + 1 checkpoints
    contrasts = np.concatenate([early, np.eye(n)])
    inside = contrasts.sum(1, keepdims=True)
    # Each contrast is a difference of two means over checkpoints, so a constant added to a row cancels.
    weights = contrasts / inside - (1 - contrasts) / (n - inside)
    each = rows @ weights.T
    error = each.std(0, ddof=1) / np.sqrt(count)
    # A contrast may have the same value in all replicates, for example if all values are 0 or 1. Its t would then be
    # infinite without being evidence of a change.
    differ = error > 1e-12 * np.abs(rows).max()
    if not differ.any():
        return 0.0
    t = np.abs(each.mean(0))[differ] / error[differ]
    return float(min(1.0, len(error) * 2 * stats.t.sf(t.max(), count - 1)))


def _gains(curves: Array, weight: Array) -> Array:
    """Return how much a separate mean before and after each split reduces the squared deviations of each curve.

    Split i is after the first i + 1 values. The weighted sum of squared deviations falls by
    (mean_1 - mean_2)^2 w_1 w_2 / (w_1 + w_2), where w_1 and w_2 are the sums of weights before and after the split.
    """
    terms = np.stack([weight + 0 * curves, curves * weight])
    # Sums are accumulated from both ends. `total - below` would lose the digits of a side with little weight.
    (below, sums), (above, rest) = terms.cumsum(2)[..., :-1], terms[..., ::-1].cumsum(2)[..., -2::-1]
    return (sums / below - rest / above) ** 2 * (below / (below + above)) * above


@functools.lru_cache(maxsize=4)
def _flat_noise(checkpoints: int) -> list[Array]:
    """Return simulated noise of unit variance: an array (curves, checkpoints) for each kind of noise.

    The kinds are AR(1) with each of `CORRELATIONS`, with normal shocks and with Student's t shocks of 3 degrees of
    freedom.
    """
    rng, shape = np.random.default_rng(0), (FLAT_CURVES, checkpoints)
    shocks = [rng.standard_normal(shape), rng.standard_t(3, shape) / 3**0.5]  # t3 has variance 3
    # z_t = rho z_(t-1) + (1 - rho^2)^1/2 e_t keeps variance 1 if the first value is e_0 itself.
    first = np.arange(checkpoints) == 0
    scaled = [(rho, each * np.where(first, 1, (1 - rho**2) ** 0.5)) for rho in CORRELATIONS for each in shocks]
    return [signal.lfilter([1.0], [1.0, -rho], each) for rho, each in scaled]


def _change_statistics(curves: Array, weight: Array, known: bool) -> Array:
    """Return statistics (statistics, curves) that are large if a curve (curves, checkpoints) is not flat.

    G is the gain of the best split (see `_gains`), R the sum of its squared residuals and r their lag-1 correlation.
    Correlated residuals contain less information than independent ones, hence the factor (1 - r) / (1 + r).

    Statistics if the errors of the values are known:

    1. G (1 - r) / (1 + r)
    2. the sum of squared deviations from the mean in standard errors, each square at most `CLIPPED`^2

    Statistics if they are unknown, with D the mean squared difference of neighbouring values:

    1. G / R (1 - r) / (1 + r)
    2. G / D
    3. the first statistic, with r estimated from differences of values
    """
    gain = _gains(curves, weight)
    after = np.arange(curves.shape[1]) > gain.argmax(1)[:, None]
    gain, residuals = gain.max(1), np.zeros_like(curves)
    for side in (after, ~after):
        mean = (side * weight * curves).sum(1) / (side * weight).sum(1)
        residuals += side * (curves - mean[:, None]) * np.sqrt(weight)
    rest = (residuals**2).sum(1)
    # A perfect split leaves only rounding errors in `rest`. Without this limit, gain / rest would depend on them.
    rest = np.maximum(rest, 1e-12 * (gain + rest))
    independent = _independent((residuals[:, 1:] * residuals[:, :-1]).sum(1) / rest)
    if known:
        scaled = (curves - np.average(curves, axis=1, weights=weight)[:, None]) * np.sqrt(weight)
        return np.stack([gain * independent, np.minimum(scaled**2, CLIPPED**2).sum(1)])
    # In AR(1) noise the mean squared difference at lag 2 is (1 + r) times that at lag 1: a second estimate of r, which
    # a split in the wrong position does not spoil.
    near, far = (np.square(curves[:, lag:] - curves[:, :-lag]).mean(1) for lag in (1, 2))
    return np.stack([gain / rest * independent, gain / near, gain / rest * _independent(far / near - 1)])


def _independent(correlation: Array) -> Array:
    """Return the number of independent values that one value of an AR(1) series with lag-1 correlation r is worth.

    The mean of n values of such a series with variance 1 has a variance of about (1 + r) / (1 - r) / n.
    """
    correlation = correlation.clip(-0.5, 0.95)
    return (1 - correlation) / (1 + correlation)


def _robust_noise(y: Array) -> Array:
    """Return the covariance of independent errors of equal variance, estimated from second differences."""
    # A second difference of independent errors of variance s^2 has the variance (1 + 4 + 1) s^2. The median of absolute
    # differences ignores a few large ones, such as those at a jump of the curve. For normal errors it is 0.6745
    # standard deviations.
    robust = np.median(np.abs(np.diff(y, 2))) / stats.norm.ppf(0.75) / 6**0.5
    return np.eye(len(y)) * max(robust, 1e-3 * np.ptp(y)) ** 2


def _levels(confidence: float) -> Array:
    return np.array([0.5, (1 - confidence) / 2, (1 + confidence) / 2])


def _spread_jumps(times: Sequence[Array], values: Array, x: Array, rng: np.random.Generator) -> list[Array]:
    """Return times (draws,) of drawn curves, with each time at a jump moved to a random position within the jump.

    A curve jumps if it changes far more between two checkpoints than in the neighbouring intervals. Its `values`
    (draws, checkpoints) do not determine where between the two checkpoints it jumps. But a drawn curve takes some time
    for its jump. If the jump were close to a checkpoint, the value at this checkpoint would change. Drawn jumps are
    therefore never close to checkpoints. This function makes all positions between the two checkpoints equally likely.
    """
    moved, row = np.pad(np.abs(np.diff(values)), ((0, 0), (1, 1))), np.arange(len(values))
    share, found = rng.random(len(values)), []
    for each in times:
        gap = np.clip(np.searchsorted(x, each) - 1, 0, len(x) - 2)
        jumps = np.maximum(moved[row, gap], moved[row, gap + 2]) <= JUMP * moved[row, gap + 1]
        found.append(np.where(jumps, x[gap] + share * (x[gap + 1] - x[gap]), each))
    return found


def _landmarks(drawn: Array, grid: Array, checkpoints: NDArray[np.intp]) -> tuple[Array, ...]:
    """Return onset, half-way point, peak, plateau and final change of each drawn curve, each (draws,).

    The first four are positions on the axis of `grid`. The final change is the difference between the last and the
    first point of the curve, divided by its largest change C (see `emergence_times`).
    """
    row, last = np.arange(len(drawn)), len(grid) - 1
    risen = drawn - drawn[:, :1]
    # C is the largest change at a checkpoint. Drawn curves overshoot in between, most of all in wide intervals.
    at_checkpoints = risen[:, checkpoints]
    change = at_checkpoints[row, np.abs(at_checkpoints).argmax(1)]
    change = np.where(change == 0, 1e-300, change)
    risen /= change[:, None]
    peak = risen.argmax(1)

    def crossing(level: float, before: NDArray[np.intp]) -> NDArray[np.intp]:
        """Return the first grid index from which each curve stays at or above a level until index `before`."""
        below = (risen < level) & (np.arange(len(grid)) <= before[:, None])
        return np.minimum(last - below[:, ::-1].argmax(1) + 1, last)

    def locate(curves: Array, level: float, end: NDArray[np.intp]) -> Array:
        """Return where a curve passes a level, by linear interpolation between the grid points `end - 1` and `end`."""
        end = np.maximum(end, 1)
        low, high = curves[row, end - 1], curves[row, end]
        share = np.where(high == low, 1.0, (level - low) / np.where(high == low, 1.0, high - low))
        return grid[end - 1] + np.clip(share, 0, 1) * (grid[end] - grid[end - 1])

    half = crossing(0.5, peak)
    off = np.abs(drawn - drawn[:, -1:]) / np.abs(change)[:, None]
    outside = off > EDGE
    settled = np.where(outside.any(1), last - outside[:, ::-1].argmax(1) + 1, 0)
    return (
        locate(risen, EDGE, crossing(EDGE, half)),
        locate(risen, 0.5, half),
        grid[peak],
        np.where(settled == 0, grid[0], locate(off, EDGE, settled)),
        risen[:, last],
    )


# Curves with several replicates: bootstrap samples of the replicates, and the covariance of their mean.


def bootstrap_counts(replicates: int, *, seed: int = 0) -> NDArray[np.int64]:
    """Return how often each of `DRAWS` bootstrap samples contains each replicate, (draws, replicates)."""
    rng = np.random.default_rng([seed, replicates])
    return rng.multinomial(replicates, np.full(replicates, 1 / replicates), size=DRAWS)


def coupled_draws(draws: Array, estimates: Array, rng: np.random.Generator) -> Array:
    """Reorder the draws (draws,) of an emergence time so that they correlate with its bootstrap estimates (draws,).

    Curves of the same prompts share their bootstrap samples, so their reordered draws correlate as well. Other
    uncertainty, such as the course of a curve between checkpoints, is independent between curves.

    Let w be the variance of the estimates divided by that of the draws, at most 1. The draws get the ranks of
    w^1/2 z + (1 - w)^1/2 e. Here z are the normal scores of the estimates and e are independent normal numbers. The
    distribution of the draws stays the same.
    """
    # Both variances come from the distance between the quantiles 0.16 and 0.84. For normal draws it is two standard
    # deviations, and outliers do not change it.
    width, moved = (np.subtract(*np.quantile(each, [0.84, 0.16])) for each in (draws, estimates))
    share = min(1.0, (moved / width) ** 2) if width > 0 else 1.0
    scores = stats.norm.ppf((stats.rankdata(estimates) - 0.5) / len(estimates))
    placed = share**0.5 * scores + (1 - share) ** 0.5 * rng.standard_normal(len(draws))
    return np.sort(draws)[np.argsort(np.argsort(placed))]


def centered(rows: Array) -> Array:
    """Return the rows minus their means over checkpoints, and minus the mean of all rows.

    A constant that is added to a row does not move its onset, half-way point, peak or plateau. The errors of the curve
    must therefore not include it.
    """
    residuals = rows - rows.mean(1, keepdims=True)
    return residuals - residuals.mean(0)


def whole_rows(replicates: ArrayLike, valid: NDArray[np.bool_]) -> tuple[NDArray[np.bool_], Array]:
    """Return which replicates have a value at every checkpoint where the curve has one, and their values there."""
    rows = np.asarray(replicates, dtype=np.float64)[:, valid]
    whole: Any = np.isfinite(rows).all(1)
    rows = rows[whole]
    if len(rows) < 2:
        raise ValueError(f"expected 2 replicates or more with a value wherever the curve has one, got {len(rows)}")
    return whole, rows


def covariance_of_mean(rows: Array, x: Array) -> Array:
    """Return the covariance of the mean of `rows`, after the mean over checkpoints is subtracted from each row.

    Each row is a replicate of the curve. A few rows hardly determine the correlations of errors at n checkpoints. Their
    correlation matrix is therefore averaged with a smooth one (`_smooth_correlation`) with weights rows - 1 and n, as
    under an inverse Wishart prior. Variances are shrunk towards their mean. The result is multiplied by the squared
    ratio of the t and normal quantiles, because the spread of few rows is itself uncertain.
    """
    count, n = rows.shape
    residuals = centered(rows)
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
    """Return the most likely smooth correlation matrix of the errors at checkpoints.

    A candidate is a weighted mean of a Matern 1/2 or 3/2 correlation and of the identity (independent errors).
    """
    count, n = residuals.shape
    # The likelihood depends on the residuals Z only through Z'Z. The R of Z = QR has R'R = Z'Z and fewer rows.
    if count > n:
        residuals = np.asarray(np.linalg.qr(residuals, mode="r"))
    span, distance = x[-1] - x[0], np.abs(x[:, None] - x)
    # Residuals have mean 0 over checkpoints. A constant level of variance 100 in the model makes the likelihood ignore
    # their mean. `free` removes the level from the correlation that is returned.
    level, free = np.full((n, n), 100.0), np.eye(n) - 1 / n
    best, most = np.eye(n), -np.inf
    # LAPACK is called directly, in its memory order: the checks of scipy's functions cost more than solving.
    columns = np.asfortranarray(residuals.T)
    for length in np.geomspace(span / n, span, 6):
        rough = np.exp(-distance / length)
        for shape in (rough, rough * (1 + distance / length)):
            for share in (0.0, 0.25, 0.5, 0.75, 0.95):
                kernel = share * shape + (1 - share) * np.eye(n)
                factor = np.linalg.cholesky(kernel + level)
                spread = (dtrtrs(factor, columns, lower=1)[0] ** 2).sum()
                # The variance of the residuals is set to its most likely value, spread / ((n - 1) (count - 1)).
                likely = -(count - 1) * ((n - 1) / 2 * np.log(spread) + np.log(np.diag(factor)).sum())
                if likely > most:
                    best, most = free @ kernel @ free, likely
    return best / np.sqrt(np.outer(np.diag(best), np.diag(best)))
