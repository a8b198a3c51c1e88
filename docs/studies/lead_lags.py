"""Which metrics lead which: cross-correlation of their increments over half octaves of steps, over the study's seeds.

    python docs/studies/lead_lags.py     prints the table `lead lags` of four_papers.md

Increments are correlated instead of values, because any two trends correlate.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.stats import false_discovery_control
from study_data import DATA, QUANTITIES, Table, curves_by_group, loss_of_runs, markdown_table, seeds_of, unpack

from lit_layers.clock.step_curves import StepCurve, merge_seeds
from lit_layers.clock.times_and_order import emerged_curves, measure_times
from lit_layers.figures.labels import MINUS, p_text
from lit_layers.figures.labels import value as number_text

Array = NDArray[np.float64]
LOSS = "lens/logit_lens_loss"  # at the last layer, where it is the model's loss
LEVEL, LEAST = 0.05, 1e-3  # threshold for q-values, and the smallest q-value that is printed exactly
PER_OCTAVE = 2
MOST_LAG = 4  # half octaves
FEWEST_INCREMENTS = 8  # overlapping increments at a lag
FEWEST_MOVES = 2.0
WIDEST_GAP = 3.0  # octaves between two checkpoints: interpolation over more is meaningless
# Half octaves that share a random sign: 3 for one or two runs, which would have too few blocks of 8, otherwise 8.
BLOCKS = (3, 8)
FEWEST_RUNS = 3  # for an interval over runs
BATCHES = (199, 1800)  # draws; the second batch only if the first is not conclusive
_OPEN = 20  # draws as large as the data: with more of them p is above 0.1, and further draws are not needed
_RESAMPLES = 400
_LARGEST = 1 - 1e-9  # largest |r|, so that z is finite
_ROUNDING = 1e-10  # increments that vary by less than this share count as a straight line
_SAME = 1e-3  # a curve counts as equal to `given` if its residual is below this share


# ------------------------------------------------------------------------------------------------ the test


class LeadLag(NamedTuple):
    """Correlation between the increments of two curves at the best lag, see `lead_lags`.

    `lag` in octaves is positive if the first curve leads. `low` and `high` are its 95% interval, NaN if undefined.
    `moves` is the smaller number of moves of the two curves. `p_value` is NaN if it is below `FEWEST_MOVES`.
    """

    lag: float
    low: float
    high: float
    correlation: float
    p_value: float
    moves: float
    num_increments: int
    num_runs: int


def octave_range(steps: ArrayLike, values: ArrayLike) -> tuple[int, int]:
    """Return the first and last half octave of log2(1 + step) within a curve's longest stretch without a gap.

    A gap is more than 3 octaves between two values, as between token 0 and the first checkpoint after it. NaN values
    are ignored. `steps` and `values` are (checkpoints,). If the stretch contains no half octave, last < first.
    """
    x, _ = _finite(steps, values)
    if not len(x):
        return 0, -1
    stretch = max(np.split(x, np.flatnonzero(np.diff(x) > WIDEST_GAP) + 1), key=np.ptp)
    ends = PER_OCTAVE * stretch[0] - 1e-9, PER_OCTAVE * stretch[-1] + 1e-9
    return int(np.ceil(ends[0])), int(np.floor(ends[1]))


def octave_increments(steps: ArrayLike, values: ArrayLike, first: int, last: int) -> Array:
    """Return the increment of a curve in each half octave of log2(1 + step), from the half octave `first` to `last`.

    The curve is interpolated linearly over log2(1 + step). `steps` (checkpoints,) must increase. `values` are
    (..., checkpoints). A checkpoint where any row is NaN is ignored. Returns (..., last - first).

    Raises:
        ValueError: if the curve does not cover the half octaves, or if steps are negative or do not increase.
    """
    x, y = _finite(steps, values)
    grid = np.arange(first, last + 1) / PER_OCTAVE
    if not len(x) or grid[0] < x[0] - 1e-9 or grid[-1] > x[-1] + 1e-9:
        raise ValueError(f"expected half octaves within the curve's, {octave_range(steps, values)}, got {first, last}")
    after = np.clip(np.searchsorted(x, grid), 1, len(x) - 1)
    share = np.clip((grid - x[after - 1]) / (x[after] - x[after - 1]), 0, 1)
    return np.diff(y[..., after - 1] * (1 - share) + y[..., after] * share)


def _finite(steps: ArrayLike, values: ArrayLike) -> tuple[Array, Array]:
    at, y = np.asarray(steps, dtype=np.float64), np.asarray(values, dtype=np.float64)
    if at.ndim != 1 or y.shape[-1:] != at.shape:
        raise ValueError(f"expected a value for each step, got steps {at.shape} and values {y.shape}")
    if not (np.isfinite(at).all() and (np.diff(at) > 0).all() and (at >= 0).all()):
        raise ValueError(f"expected steps of 0 or more that increase, got {at.tolist()}")
    there = np.isfinite(y).reshape(-1, len(at)).all(0)
    return np.log2(1 + at[there]), y[..., there]


def num_moves(increments: ArrayLike) -> float:
    """Return how many times a curve moves: 1 for one smooth rise of any width, a fifth of the increments for noise.

    (sum d^2)^2 / sum d^4 estimates over how many increments the movement is spread. The sum over all lags of the
    squared autocorrelation estimates how many of them belong to one movement. The result is their quotient, where d are
    the increments (..., increments) minus their mean. Several runs are averaged. Invariant to affine maps of the curve.
    NaN for a straight line.
    """
    d = np.asarray(increments, dtype=np.float64)
    d = d - d.mean(-1, keepdims=True)
    power = np.abs(np.fft.rfft(d, 2 * d.shape[-1])) ** 2
    both = np.fft.irfft(power, 2 * d.shape[-1])  # the autocovariance at all positive and negative lags
    squares = (d**2).sum(-1)
    with np.errstate(invalid="ignore", divide="ignore"):
        return float(np.mean(squares**4 / (d**4).sum(-1) / (both**2).sum(-1)))


def lead_lags(
    firsts: ArrayLike,
    second: ArrayLike,
    given: ArrayLike | None = None,
    *,
    seed: int = 0,
) -> list[LeadLag]:
    """Measure how each of several curves leads or follows another curve, by their increments over half octaves.

    Preparation: each curve of increments is centred. With several runs, which must be seeds of one recipe, the mean
    over runs at each half octave is subtracted. This removes all effects that depend only on the step. Then `given` is
    regressed out of both curves, with one slope for all runs.

    For increments a and b, the correlation at lag k is Pearson's r between a(t) and b(t + k) over all t where both are
    defined. Several runs are combined as tanh of the mean over runs of Fisher's z. The reported lag has the largest |r|
    within 2 octaves, or within fewer if less than 8 increments would overlap. The first curve leads if the lag is
    positive.

    The p-value tests the largest |r| over lags. It is the larger p-value of two tests, which redraw b:

    - with random phases, which keep its autocorrelation but not when it moves;
    - with one random sign for every 3 neighbouring increments (8 from 3 runs on), which keeps when it moves.

    Each test on its own gives too many false positives: the first if all curves move in the same part of training, the
    second if they move in long waves. A curve that moves only once, such as one sigmoid, has no p-value, because no
    test can distinguish one coincidence from a relation.

    Source: random phases, Theiler et al. 1992, "Testing for nonlinearity in time series"; random signs, in blocks,
    after Shao 2010, "The dependent wild bootstrap".

    Args:
        firsts: (curves, runs, increments), or (curves, increments) for one run.
        second: (runs, increments), or (increments,).
        given: increments to regress out of both curves at the same half octave, in the shape of `second`.
        seed: seed of the redrawn curves.

    Raises:
        ValueError: if shapes do not match, if there are fewer than 8 increments, or if values are not finite.
    """
    a, b, rest = _checked(firsts, second, given)
    a, b = _residuals(a, rest), _residuals(b, rest)
    z = np.stack([at_lag[:, 0] for at_lag in _lag_correlations(a, b[None])], 1)  # (curves, lags, runs)
    size = np.abs(z.mean(-1))
    best, greatest, middle = size.argmax(1), size.max(1), (z.shape[1] - 1) // 2
    moves: Array = np.fmin(np.array([num_moves(each) for each in a]), num_moves(b))
    defined = np.asarray(a.any((1, 2)) & b.any())
    p, rng = np.full(len(a), np.nan), np.random.default_rng(seed)
    if (moving := defined & (moves >= FEWEST_MOVES)).any():
        p[moving] = np.max(
            [_p_values(a[moving], b, rest, greatest[moving], null, rng) for null in (_phases, _flips)], 0
        )
    ends = np.stack([best, *_ends(z, rng)], 1) - middle
    lags = np.where(defined[:, None], ends / PER_OCTAVE, np.nan)
    r = np.where(defined, np.tanh(np.take_along_axis(z.mean(-1), best[:, None], 1)[:, 0]), np.nan)
    return [
        LeadLag(*map(float, (*lags[i], r[i], p[i], moves[i])), num_increments=a.shape[2], num_runs=a.shape[1])
        for i in range(len(a))
    ]


def _checked(firsts: ArrayLike, second: ArrayLike, given: ArrayLike | None) -> tuple[Array, Array, Array | None]:
    a, b = np.asarray(firsts, dtype=np.float64), np.asarray(second, dtype=np.float64)
    rest = None if given is None else np.asarray(given, dtype=np.float64)
    if b.ndim == 1:
        a, b, rest = a[:, None] if a.ndim == 2 else a, b[None], None if rest is None else rest[None]
    if a.ndim != 3 or b.ndim != 2 or a.shape[1:] != b.shape or (rest is not None and rest.shape != b.shape):
        shapes = ", ".join(str(np.shape(each)) for each in (firsts, second, given) if each is not None)
        raise ValueError(f"expected (curves, runs, increments), (runs, increments) and given alike, got {shapes}")
    if b.shape[1] < FEWEST_INCREMENTS:
        raise ValueError(f"expected {FEWEST_INCREMENTS} increments or more, got {b.shape[1]}")
    if not all(np.isfinite(each).all() for each in (a, b, rest) if each is not None):
        raise ValueError("expected finite increments")
    return a, b, rest


def _residuals(x: Array, given: Array | None) -> Array:
    """Return increments (..., runs, increments) without their mean, without the mean over runs, and without `given`."""
    axes = (-2, -1)
    before = np.sqrt((x**2).sum(axes, keepdims=True))
    x = _centered(x)
    if given is not None:
        centred = _centered(given)
        square = (centred**2).sum(axes, keepdims=True)
        x = x - centred * ((x * centred).sum(axes, keepdims=True) / np.where(square > 0, square, 1))
    least = _ROUNDING if given is None else _SAME
    return np.where(np.sqrt((x**2).sum(axes, keepdims=True)) > least * before, x, 0.0)


def _centered(x: Array) -> Array:
    x = x - x.mean(-1, keepdims=True)
    return x if x.shape[-2] == 1 else x - x.mean(-2, keepdims=True)


def _lag_correlations(a: Array, b: Array) -> Iterator[Array]:
    """Yield for each lag Fisher's z of a (curves, runs, increments) and b (draws, runs, increments).

    Its shape is (curves, draws, runs).
    """
    n = a.shape[-1]
    most = min(MOST_LAG, n - FEWEST_INCREMENTS)
    for lag in range(-most, most + 1):
        u, v = _unit(a[..., max(0, -lag) : n - max(0, lag)]), _unit(b[..., max(0, lag) : n - max(0, -lag)])
        r = np.matmul(u.transpose(1, 0, 2), v.transpose(1, 2, 0))  # (runs, curves, draws)
        yield np.arctanh(np.clip(r, -_LARGEST, _LARGEST)).transpose(1, 2, 0)


def _unit(x: Array) -> Array:
    """Return x centred and scaled to length 1, or 0 if x is constant."""
    size = np.abs(x).max(-1, keepdims=True)
    x = x - x.mean(-1, keepdims=True)
    length = np.sqrt((x**2).sum(-1, keepdims=True))
    return np.where(length > _ROUNDING * size, x / np.where(length > 0, length, 1), 0.0)


def _p_values(
    a: Array, b: Array, given: Array | None, greatest: Array, null: Callable[..., Array], rng: np.random.Generator
) -> Array:
    """Return the share of redrawn b whose largest mean z over lags reaches that of the data."""
    reached, total = np.zeros(len(a)), 0
    for draws in BATCHES:
        redrawn = _residuals(null(b, draws, rng), given)
        largest = np.max([np.abs(z.mean(-1)) for z in _lag_correlations(a, redrawn)], 0)
        reached += (largest >= greatest[:, None] * (1 - 1e-9)).sum(1)
        total += draws
        if (reached > _OPEN).all():
            break
    return (1 + reached) / (1 + total)


def _phases(b: Array, draws: int, rng: np.random.Generator) -> Array:
    """Return draws (draws, runs, increments) of b (runs, increments) with a random phase at each frequency."""
    n = b.shape[-1]
    turned = np.abs(np.fft.rfft(b)) * np.exp(2j * np.pi * rng.random((draws, *b.shape[:-1], n // 2 + 1)))
    if n % 2 == 0:  # the highest frequency is real
        turned[..., -1] = np.abs(turned[..., -1]) * rng.choice([-1.0, 1.0], turned[..., -1].shape)
    return np.fft.irfft(turned, n)


def _flips(b: Array, draws: int, rng: np.random.Generator) -> Array:
    """Return draws (draws, runs, increments) of b (runs, increments) with random signs of blocks of random offset."""
    n, length = b.shape[-1], BLOCKS[len(b) >= FEWEST_RUNS]
    block = (np.arange(n) + rng.integers(length, size=(draws, 1, 1))) // length
    signs = rng.choice([-1.0, 1.0], (draws, len(b), n // length + 2))
    return b * np.take_along_axis(signs, np.broadcast_to(block, (draws, *b.shape)), -1)


def _ends(z: Array, rng: np.random.Generator) -> tuple[Array, Array]:
    """Return the 95% interval over runs for the index of the lag with the largest mean z (curves, lags, runs)."""
    curves, _, runs = z.shape
    if runs >= FEWEST_RUNS:
        resampled = z[..., rng.integers(runs, size=(_RESAMPLES, runs))].mean(-1)  # (curves, lags, draws)
    else:
        return np.full(curves, np.nan), np.full(curves, np.nan)
    low, high = np.quantile(np.abs(resampled).argmax(1), (0.025, 0.975), axis=1, method="inverted_cdf")
    return low, high


# ------------------------------------------------------------------------------------------------ of the study


def lead_lag_rows(seeds: Sequence[StepCurve], loss: str = LOSS, *, seed: int = 0) -> list[dict[str, Any]]:
    """Return a row for each pair of curves that emerge over the seeds. Curve `a` has the earlier half-way point.

    `lag` in octaves of 1 + step is positive if `a` leads. `q_value` adjusts the p-values over all pairs after Benjamini
    and Hochberg, with p = 1 for pairs without a p-value. Columns with the prefix `given_loss_` have the loss regressed
    out.
    """
    clock = measure_times(merge_seeds(seeds, "seeds"))
    curves = [curve for curve, _ in emerged_curves(clock, "seeds")]
    given = loss_of_runs(clock.curves, loss)["seeds"]
    rows: list[dict[str, Any]] = []
    for number, second in enumerate(curves):
        firsts = curves[:number]
        both = [_pair_lead_lags(firsts, second, each, seed) for each in (None, given)]
        for first, plain, residual in zip(firsts, *both, strict=True):
            row: dict[str, Any] = {"a": first.title, "b": second.title}
            rows.append(row | _numbers("", plain) | _numbers("given_loss_", residual))
    for prefix in ("", "given_loss_"):
        p = np.array([row[f"{prefix}p_value"] for row in rows])
        q = np.where(np.isfinite(p), false_discovery_control(np.where(np.isfinite(p), p, 1.0)), np.nan)
        for row, adjusted in zip(rows, q, strict=True):
            row[f"{prefix}q_value"] = adjusted
    return rows


def _pair_lead_lags(
    firsts: Sequence[StepCurve], second: StepCurve, loss: StepCurve | None, seed: int
) -> list[LeadLag | None]:
    """Return how each first curve leads the second, or None if they share too few half octaves."""
    by_range: dict[tuple[int, int], list[int]] = {}
    for number, first in enumerate(firsts):
        ranges = [
            octave_range(curve.at, _values(curve).mean(0)) for curve in (first, second, loss) if curve is not None
        ]
        start, end = max(start for start, _ in ranges), min(end for _, end in ranges)
        if end - start >= FEWEST_INCREMENTS:
            by_range.setdefault((start, end), []).append(number)
    results: list[LeadLag | None] = [None] * len(firsts)
    for (start, end), numbers in by_range.items():
        within = lambda curve: octave_increments(curve.at, _values(curve), start, end)  # noqa: B023, E731
        given = None if loss is None else within(loss)
        found = lead_lags([within(firsts[number]) for number in numbers], within(second), given, seed=seed)
        for number, result in zip(numbers, found, strict=True):
            results[number] = result
    return results


def _values(curve: StepCurve) -> Array:
    """Return the values of each seed (seeds, checkpoints), scaled to at most 1."""
    assert curve.seeds is not None
    return curve.seeds / np.abs(curve.seeds).max()


def _numbers(prefix: str, result: LeadLag | None) -> dict[str, float]:
    names = LeadLag._fields[:6]
    return {f"{prefix}{name}": np.nan if result is None else getattr(result, name) for name in names}


def lead_lag_table(curves: Mapping[str, Mapping[str, Sequence[StepCurve]]]) -> Table:
    """Yield the pairs of metrics that differ from chance, with or without the loss regressed out, on the real data."""
    yield ["of, one then the other", "octaves", "r", "p", "q", "given the loss: octaves", "r", "p", "q"]
    for group in ("GPT-2", "ViT"):
        rows = lead_lag_rows([curve for quantity in QUANTITIES for curve in seeds_of(curves[group], quantity)])
        surest = [row for row in rows if _least_q(row) <= LEVEL]
        for row in sorted(surest, key=lambda row: (_least_q(row), -abs(row["correlation"]))):
            a, b, side = (row["a"], row["b"], 1) if row["lag"] >= 0 else (row["b"], row["a"], -1)
            cells = [cell for prefix in ("", "given_loss_") for cell in _cells(row, prefix, side)]
            yield [f"{group}: {a}, then {b}" if row["lag"] else f"{group}: {a} and {b}", *cells]
        tested = sum(np.isfinite(row["p_value"]) for row in rows)
        yield [f"{group}: {len(surest)} of {len(rows)} pairs; {tested} have a p-value", *[""] * 8]


def _least_q(row: Mapping[str, float]) -> float:
    return float(np.fmin(row["q_value"], row["given_loss_q_value"]))


def _cells(row: Mapping[str, float], prefix: str, side: int) -> list[str]:
    """Return lag, r, p and q as text, from the side of the one that leads."""
    if np.isnan(row[f"{prefix}lag"]):
        return [""] * 4
    low, high = sorted(side * row[f"{prefix}{end}"] for end in ("low", "high"))
    lag = f"{side * row[f'{prefix}lag'] + 0:g} ({low + 0:g} to {high + 0:g})".replace("-", MINUS)
    p, q = (p_text(row[f"{prefix}{name}"], LEAST) for name in ("p_value", "q_value"))
    return [lag, number_text(row[f"{prefix}correlation"]), p, q]


if __name__ == "__main__":
    print(markdown_table(lead_lag_table(curves_by_group(unpack(DATA)))))
