"""When a curve over training steps emerges: verdict, onset, half-way point, peak and plateau.

All in float64. Times lie on a continuous axis of steps: between two checkpoints a curve is not known, and an interval
says that, too. How often the intervals hold, and how often a flat curve is said to emerge, is measured in
docs/emergence_accuracy.md.
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

FEWEST_CHECKPOINTS, MOST_CHECKPOINTS = 6, 1000  # a thousand take a minute and 5 GB, ten thousand would hours and 500
EDGE = 0.1  # of the whole change: where a curve has left its first level, and where it has reached its last one
GRID = 300  # points at least on which a drawn curve is followed, more with more checkpoints
RETURNED = 0.25  # of the whole change: a curve that ends so near to its first level has come back
SEEN, OFTEN = 0.6, 0.1  # a level is seen that lasts for so much of the way to it, but in so many of the drawn curves
JUMP = 0.15  # of what a curve does in a gap: what it does at most in the gaps beside that where it jumps
FLAT_CURVES = 999  # with each kind of noise
CORRELATIONS = (0.0, 0.3, 0.7, 0.9)  # lag-1 ones of these kinds: AR(1)
CLIPPED = 3.0  # errors: no single value weighs more in the test of known errors
PRIOR_ROWS = 4  # by so many more the variance at one checkpoint is that of all: of few replicates it is rough
DRAWS = 1000


class Time(NamedTuple):
    """A step and the ends of its interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class EmergenceTimes:
    """When a curve changes; see `emergence_times`. `onset`, `halfway`, `peak` and `plateau` are None where it is flat.

    It `changes` but does not emerge if it comes back. `before` and `not_yet`: it moves at its first, at its last one.
    `num_checkpoints` is on how many checkpoints this rests, `num_gaps` how many had no value. `halfway_draws` (draws,)
    are the half-way points of the drawn curves, on the axis of steps; empty where the curve does not emerge.
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
    """Return when a curve over steps changes, or that it does not.

    The verdict is a test of "the curve is flat" at level 1 - `confidence`. With replicates: Student's t of each split
    and of each checkpoint against the others, over replicates, by the union bound; where coarse values of all rows
    happen to agree, there is no t, unless they agree everywhere (p is 0). Otherwise the curve is ranked among 999 flat
    curves with noise of each of eight kinds, AR(1) of correlation 0, .3, .7 and .9 over checkpoints with normal or t3
    shocks, and the largest p counts (0.001 at least). The statistics are those of `_of_changes`. A curve that wanders
    by more than its errors say is not flat, either, and its intervals are wide.

    The times are those of curves drawn from a Gaussian process given the values (Matern 3/2 and 5/2 over a grid of
    lengths and heights, alone and with one or two steps, each a sigmoid or a rise with a corner, of unknown place,
    height and width). Half of the curves are drawn by the evidence of all of these, half by that of one step at most,
    each to the power 0.9. With f the drawn curve, f_0 its first value, and C the largest
    difference of a checkpoint from it:

    - peak: where (f - f_0) / C is largest; on a plateau anywhere on it, which the interval shows.
    - halfway: where (f - f_0) / C last passes 1/2 before the peak.
    - onset: where it last passes 0.1 before `halfway`.
    - plateau: from where on f stays within 0.1 |C| of its last value.

    Values are medians over draws, intervals their quantiles. Where a draw jumps in a gap between two checkpoints, with
    at most 0.15 of that in the gaps beside it, its times in this gap are moved to a random place in the gap.

    A curve that ends within a quarter of C of f_0 changes, but does not emerge. `not_yet`: in more than a tenth of the
    draws, f has not stayed within 0.1 of its last level for 0.6 of the time that it took from half-way to there. Then
    the plateau is infinite, and if f is farthest at its end, so is the peak, and onset and half-way point have no upper
    end: C is not seen yet. `before`: the same at the first checkpoint, unless that is step 0. Then the onset is 0, and
    the intervals of onset, half-way point and plateau begin at 0.

    Args:
        steps: Increasing numbers, 0 or more: optimizer steps or tokens, (checkpoints,).
        values: The curve, (checkpoints,); NaN is a gap.
        stderr: Standard error of each value, (checkpoints,). What the interval is over is what these are over. One of 0
            beside others (an accuracy of 0 or 1) says that it was too small to see: it counts as the smallest of them.
        replicates: Copies of the curve of which `values` is the mean, a row for each prompt, test row or seed,
            (replicates, checkpoints), instead of `stderr`: the noise may then be alike at neighbouring checkpoints.
            A row with a gap where there is a value is left out.
        counts: How often each draw takes each replicate, (1000, replicates), as `bootstrap_counts` says. Curves of the
            same prompts that are given the same are compared draw by draw: `halfway_draws` stand in an order that goes
            with the half-way points of the bootstrap samples' curves (`coupled_draws`). Give each a seed of its own.
        confidence: Of the intervals and the verdict.
        seed: Of the draws; the same input gives the same numbers.

    Raises:
        ValueError: fewer than 6 values or more than 1,000, an infinite one, steps that do not increase or are negative,
            standard errors that are negative or not finite where there is a value, fewer than 2 whole replicates, a
            confidence outside (0, 1).
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
    # The same backwards from the last checkpoint: where the curve reaches its last level, and half-way to there.
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
    if not_yet and (ended > 1 - EDGE).mean() > OFTEN:  # its largest change is not seen yet
        times["peak"] = times["peak"]._replace(value=np.inf)
        times |= {name: times[name]._replace(high=np.inf) for name in ("onset", "halfway", "peak")}
    if resampled is not None:
        estimated = mean_curves(curve.x, resampled, curve.noises()[0], grid)
        half = coupled_draws(half, _landmarks(estimated, grid, at)[1], rng)
    emerges, counted = bool(np.median(ended) > RETURNED), (len(curve.x), curve.num_gaps)
    return EmergenceTimes(emerges, p_value, *times.values(), *counted, curve.step(half), before, not_yet)  # pyright: ignore


@dataclass(frozen=True)
class _Curve:
    """Checked values on the axis on which they are smooth, and the covariance of their errors (None: not known)."""

    x: Array
    y: Array
    covariance: Array | None
    rows: Array | None
    whole: NDArray[np.bool_] | None  # which of the replicates these are
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
        # By a power of two: exact, moves no time, and no square overflows or vanishes.
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
        """Return the checkpoints and as many points in each gap."""
        locate = max(2, GRID // len(self.x))
        parts = [np.linspace(a, b, locate, endpoint=False) for a, b in zip(self.x[:-1], self.x[1:], strict=True)]
        return np.concatenate([*parts, self.x[-1:]])

    def resampled(self, counts: ArrayLike) -> Array:
        """Return the means of the replicates that each draw takes, (draws, checkpoints)."""
        assert self.rows is not None
        taken = np.asarray(counts, dtype=np.float64)[:, self.whole]
        total = taken.sum(1, keepdims=True)  # 0: of few whole replicates among many a draw may have none
        return np.where(total > 0, taken @ self.rows / np.maximum(total, 1), self.rows.mean(0))

    def noises(self) -> list[Array]:
        """Return the covariances that the errors have or may have."""
        if self.covariance is not None:
            return [self.covariance]
        return [_robust_noise(self.y) * factor for factor in (0.25, 0.5, 1.0, 2.0, 4.0)]

    def p_value(self, rng: np.random.Generator) -> float:
        """Return the two-sided p of the hypothesis that the curve is flat."""
        if np.ptp(self.y) == 0:
            return 1.0
        if self.rows is not None:
            return _t_test(self.rows)
        variance = np.ones(len(self.y)) if self.covariance is None else np.diag(self.covariance)
        if not variance.any():  # values without errors that differ
            return 0.0
        return max(self._rank_among(noise * np.sqrt(variance), 1 / variance) for noise in _flat_noise(len(self.y)))

    def _rank_among(self, flat: Array, weight: Array) -> float:
        """Return the share of flat curves whose smallest rank among the statistics is no higher."""
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
    """Return the p of Student's t over rows, for each split and each checkpoint against the others (union bound)."""
    count, n = rows.shape
    after = np.tri(n, n, -1)[1:]  # row s: 1 after the first s + 1 checkpoints
    contrasts = np.concatenate([after, np.eye(n)])
    inside = contrasts.sum(1, keepdims=True)
    weights = contrasts / inside - (1 - contrasts) / (n - inside)
    each = rows @ weights.T
    error = each.std(0, ddof=1) / np.sqrt(count)
    differ = error > 1e-12 * np.abs(rows).max()
    if not differ.any():
        return 0.0
    t = np.abs(each.mean(0))[differ] / error[differ]
    return float(min(1.0, len(error) * 2 * stats.t.sf(t.max(), count - 1)))


def _gains(curves: Array, weight: Array) -> Array:
    """Return how much splitting each curve after its first 1, 2, ... values takes from the weighted sum of squares."""
    terms = np.stack([weight + 0 * curves, curves * weight])
    # From either end: differences of sums would lose what is light beside what is heavy.
    (below, sums), (above, rest) = terms.cumsum(2)[..., :-1], terms[..., ::-1].cumsum(2)[..., -2::-1]
    return (sums / below - rest / above) ** 2 * (below / (below + above)) * above


@functools.lru_cache(maxsize=4)
def _flat_noise(checkpoints: int) -> list[Array]:
    """Return noise of unit variance, (curves, checkpoints) of each kind.

    It is AR(1) of several correlations, with normal shocks and with Student's of 3 degrees of freedom.
    """
    rng, shape = np.random.default_rng(0), (FLAT_CURVES, checkpoints)
    shocks = [rng.standard_normal(shape), rng.standard_t(3, shape) / 3**0.5]
    first = np.arange(checkpoints) == 0
    scaled = [(rho, each * np.where(first, 1, (1 - rho**2) ** 0.5)) for rho in CORRELATIONS for each in shocks]
    return [signal.lfilter([1.0], [1.0, -rho], each) for rho, each in scaled]


def _change_statistics(curves: Array, weight: Array, known: bool) -> Array:
    """Return statistics (statistics, curves) that are large if a curve (curves, checkpoints) is not flat.

    The gain of the best split counts the less, the more its residuals go together at neighbouring checkpoints (their
    lag-1 correlation r): as if there were (1 - r) / (1 + r) of the checkpoints. With known errors the sum of squares
    stands beside it, each value clipped. Without, what noise there is has to be told from the curve: by the residuals,
    and by differences of neighbouring values, of which those at lag 2 are (1 + r) times as large in AR(1) noise.
    """
    gain = _gains(curves, weight)
    after = np.arange(curves.shape[1]) > gain.argmax(1)[:, None]
    gain, residuals = gain.max(1), np.zeros_like(curves)
    for side in (after, ~after):
        mean = (side * weight * curves).sum(1) / (side * weight).sum(1)
        residuals += side * (curves - mean[:, None]) * np.sqrt(weight)
    rest = (residuals**2).sum(1)
    rest = np.maximum(rest, 1e-12 * (gain + rest))
    independent = _independent((residuals[:, 1:] * residuals[:, :-1]).sum(1) / rest)
    if known:
        scaled = (curves - np.average(curves, axis=1, weights=weight)[:, None]) * np.sqrt(weight)
        return np.stack([gain * independent, np.minimum(scaled**2, CLIPPED**2).sum(1)])
    near, far = (np.square(curves[:, lag:] - curves[:, :-lag]).mean(1) for lag in (1, 2))
    return np.stack([gain / rest * independent, gain / near, gain / rest * _independent(far / near - 1)])


def _independent(correlation: Array) -> Array:
    """Return how many independent values are worth one of an AR(1) series with this lag-1 correlation."""
    correlation = correlation.clip(-0.5, 0.95)
    return (1 - correlation) / (1 + correlation)


def _robust_noise(y: Array) -> Array:
    """Return the covariance of errors that are equal everywhere, from second differences; a few may be large."""
    robust = np.median(np.abs(np.diff(y, 2))) / stats.norm.ppf(0.75) / 6**0.5
    return np.eye(len(y)) * max(robust, 1e-3 * np.ptp(y)) ** 2


def _levels(confidence: float) -> Array:
    return np.array([0.5, (1 - confidence) / 2, (1 + confidence) / 2])


def _spread_jumps(times: Sequence[Array], values: Array, x: Array, rng: np.random.Generator) -> list[Array]:
    """Return the times (draws,) of curves; a time in a jump is moved to a random place between the two checkpoints.

    A curve jumps that moves in one gap far more than in the gaps beside it. Its values at checkpoints (draws,
    checkpoints) do not say where in the gap, but drawn steps that are not narrow stay away from the ends.
    """
    moved, row = np.pad(np.abs(np.diff(values)), ((0, 0), (1, 1))), np.arange(len(values))
    share, found = rng.random(len(values)), []
    for each in times:
        gap = np.clip(np.searchsorted(x, each) - 1, 0, len(x) - 2)
        jumps = np.maximum(moved[row, gap], moved[row, gap + 2]) <= JUMP * moved[row, gap + 1]
        found.append(np.where(jumps, x[gap] + share * (x[gap + 1] - x[gap]), each))
    return found


def _landmarks(drawn: Array, grid: Array, checkpoints: NDArray[np.intp]) -> tuple[Array, ...]:
    """Return onset, halfway, peak and plateau of each curve on the axis of the grid, and its end, each (draws,)."""
    row, last = np.arange(len(drawn)), len(grid) - 1
    risen = drawn - drawn[:, :1]
    at_checkpoints = risen[:, checkpoints]  # between them a draw overshoots, the farther the wider the gap
    change = at_checkpoints[row, np.abs(at_checkpoints).argmax(1)]
    change = np.where(change == 0, 1e-300, change)
    risen /= change[:, None]
    peak = risen.argmax(1)

    def crossing(level: float, before: NDArray[np.intp]) -> NDArray[np.intp]:
        """Return the first grid point after the last one below a level, among those up to `before`."""
        below = (risen < level) & (np.arange(len(grid)) <= before[:, None])
        return np.minimum(last - below[:, ::-1].argmax(1) + 1, last)

    def locate(curves: Array, level: float, end: NDArray[np.intp]) -> Array:
        """Return where a curve passes a level in the gap before a grid point."""
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


# Copies of a curve: the errors of their mean, and resamples of them.


def bootstrap_counts(replicates: int, *, seed: int = 0) -> NDArray[np.int64]:
    """Return how often each of `DRAWS` bootstrap samples contains each replicate, (draws, replicates)."""
    rng = np.random.default_rng([seed, replicates])
    return rng.multinomial(replicates, np.full(replicates, 1 / replicates), size=DRAWS)


def coupled_draws(draws: Array, estimates: Array, rng: np.random.Generator) -> Array:
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


def centered(rows: Array) -> Array:
    """Return the rows minus their own means over checkpoints, which move no time, and minus the mean of all rows."""
    residuals = rows - rows.mean(1, keepdims=True)
    return residuals - residuals.mean(0)


def whole_rows(replicates: ArrayLike, valid: NDArray[np.bool_]) -> tuple[NDArray[np.bool_], Array]:
    """Return which replicates have a value wherever the curve has one, and these values."""
    rows = np.asarray(replicates, dtype=np.float64)[:, valid]
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
