"""Curves drawn given noisy values of one: Gaussian processes of many lengths and heights, alone and with steps.

A process alone is smooth everywhere alike; what emerges in training is flat, turns within a few checkpoints or at one
point, and is flat again. One or two steps beside it cover that, and a rise that falls again: each is a sigmoid, or a
rise that begins or ends in a corner. With one alone, the second change is left to the process, which then wanders
wherever the curve is flat, too.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.linalg.lapack import dtrtri, dtrtrs

Array = NDArray[np.floating[Any]]
TEMPER = 0.9  # power of evidence and prior: none is quite a training curve, and sure of one, intervals are too narrow
RARE, MOST_PAIRS = 5e-3, 100  # the share of processes, and the number of pairs, that count in means over resamples
SPLITS = 2  # how often steps are split
TRIED, LIKELY, MAX_DOUBLES = 36, 10.0, 600  # steps tried with any other; pairs that count: so near the best, so many
BATCH = 2**17  # numbers of an array (1 MB) that are worked on at a time
# Steps: sigmoids and rises with a corner, on a grid of places and widths, and pairs of them.
LOCATIONS, WIDTHS = 80, np.geomspace(0.001, 0.07, 5)  # of steps before any is split; widths as shares of the axis
SPLIT = 12  # how many of each shape are split: the likeliest
DECIMALS = 6  # decimals of a log-evidence: what differs by less stands in the order of its numbers


def _no_step(u: Array) -> Array:
    return np.zeros_like(u)


def _sigmoid(u: Array) -> Array:
    return 1 / (1 + np.exp(-np.clip(u, -50, 50)))


def _from_corner(u: Array) -> Array:
    return -np.expm1(-np.maximum(u, 0) / 2)


def _to_corner(u: Array) -> Array:
    return np.exp(np.minimum(u, 0) / 2)


# Of each rise the middle eight tenths are as wide.
SHAPES = (_no_step, _sigmoid, _from_corner, _to_corner)


class Steps(NamedTuple):
    """Steps by shape, place and width, the first one without a shape: no step.

    Each stands for a cell, `cell` wide in place and `ratio` in the logarithm of the width, as likely as that is large.
    """

    shape: NDArray[np.intp]
    loc: Array
    width: Array
    cell: Array
    ratio: Array
    log_prior: Array

    @classmethod
    def from_axis(cls, x: Array) -> "Steps":
        x, span = np.append(x[: -1 : max(1, round(len(x) / LOCATIONS))], x[-1]), x[-1] - x[0]
        per = max(1, LOCATIONS // len(x))
        cells = np.repeat(np.diff(x) / per, per)
        index = x[0] + cells.cumsum() - cells / 2
        shape, row, wide = (each.ravel() for each in np.indices((len(SHAPES) - 1, len(index), len(WIDTHS))))
        prior = np.log(cells[row] / span / len(WIDTHS) / (len(SHAPES) - 1))
        ratio = np.full(len(row), np.log(WIDTHS[1] / WIDTHS[0]))
        steps = cls(shape + 1, index[row], span * WIDTHS[wide], cells[row], ratio, prior)
        return _joined(cls(np.zeros(1, dtype=np.intp), x[:1], np.ones(1), *np.zeros((3, 1))), steps)

    def values(self, x: Array) -> Array:
        """Return the steps at some points, (points, steps)."""
        scaled = (x[:, None] - self.loc) / self.width
        for kind, shape in enumerate(SHAPES):
            mine = self.shape == kind
            scaled[:, mine] = shape(scaled[:, mine])
        return scaled

    def select(self, chosen: NDArray[Any]) -> "Steps":
        fields: list[Any] = [each[chosen] for each in self]
        return Steps(*fields)

    def split(self) -> "Steps":
        """Split each step into nine, by thirds of its cell."""
        parts = []
        for along, across in itertools.product((-1 / 3, 0, 1 / 3), repeat=2):
            loc, width = self.loc + along * self.cell, self.width * np.exp(across * self.ratio)
            parts.append(Steps(self.shape, loc, width, self.cell / 3, self.ratio / 3, self.log_prior - np.log(9)))
        return _joined(*parts)


def _joined(*steps: Steps) -> Steps:
    fields: list[Any] = [np.concatenate(parts) for parts in zip(*steps, strict=True)]
    return Steps(*fields)


@dataclass(frozen=True)
class Pairs:
    """Two steps each of some, by their numbers (2, pairs), of which no step may be one or both."""

    steps: Steps
    index: NDArray[np.intp]

    @cached_property
    def are_two(self) -> NDArray[np.bool_]:
        first, second = self.steps.shape[self.index] > 0
        return first & second

    @cached_property
    def log_prior(self) -> Array:
        """Return the log-prior: before any power, none, one and two steps are equally likely, in either order."""
        return self.steps.log_prior[self.index].sum(0) + np.log(2) * self.are_two

    def select(self, chosen: NDArray[Any]) -> "Pairs":
        index, used = self.index[:, chosen], np.zeros(len(self.steps.shape), dtype=bool)
        used[index] = True
        return Pairs(self.steps.select(used), (used.cumsum() - 1)[index])

    def concat(self, other: "Pairs") -> "Pairs":
        index = np.concatenate([self.index, other.index + len(self.steps.shape)], 1)
        return Pairs(_joined(self.steps, other.steps), index)

    def split(self, side: int) -> "Pairs":
        """Split each pair into nine by one of its steps, which then comes second."""
        parts = self.steps.select(self.index[side]).split()
        other = np.tile(self.index[1 - side], 9)
        return Pairs(_joined(self.steps, parts), np.stack([other, len(self.steps.shape) + np.arange(len(other))]))

    def likeliest(self, evidence: Array) -> NDArray[np.intp]:
        """Return which pairs to split: the `SPLIT` likeliest of each shape of the second step."""
        shape = self.steps.shape[self.index[1]]
        stacked = [np.flatnonzero(shape == kind) for kind in range(1, len(SHAPES))]
        return np.concatenate([mine[likeliest(evidence[mine], SPLIT)] for mine in stacked])


def likeliest(evidence: Array, count: int) -> NDArray[np.intp]:
    """Return the indices of the `count` largest evidences, the best last.

    Evidences that differ by rounding keep their order.

    Narrow steps between the same two checkpoints are one to the values: which of them is taken hangs on no machine.
    """
    rounded, count = np.round(evidence, DECIMALS), min(count, len(evidence))
    near = np.flatnonzero(rounded >= np.partition(rounded, -count)[-count])
    return near[np.argsort(rounded[near], kind="stable")[-count:]]


@dataclass(frozen=True)
class _Kernel:
    """Matern, of one length and height, on a level of no known place."""

    rough: bool
    length: float
    height: float
    level: float

    def correlation(self, distance: Array) -> Array:
        d = distance / self.length * (3**0.5 if self.rough else 5**0.5)
        return (1 + d if self.rough else 1 + d + d * d / 3) * np.exp(-d)

    def covariance(self, correlation: Array) -> Array:
        return self.height**2 * correlation + self.level**2


@dataclass(frozen=True)
class _Processes:
    """Gaussian processes, each on the values at n checkpoints.

    `triangles` (processes, n, n) are the lower ones of the covariances of the values, `whitening` their inverses and
    `log_size` (processes,) the logarithms of their determinants, `step_height` (processes,) that of steps beside them.
    """

    kernels: Sequence[_Kernel]
    triangles: Array
    whitening: Array
    log_size: Array
    step_height: Array

    def select(self, chosen: NDArray[np.intp]) -> "_Processes":
        kernels = [self.kernels[row] for row in chosen]
        arrays = (self.triangles, self.whitening, self.log_size, self.step_height)
        return _Processes(kernels, *(each[chosen] for each in arrays))

    def batches(self, columns: int) -> Iterator[slice]:
        """Yield slices of processes, so that what they leave of so many columns stays in the cache."""
        count, n, _ = self.whitening.shape
        size = max(1, BATCH // (n * columns))
        return (slice(start, start + size) for start in range(0, count, size))

    def whiten(self, columns: Array, rows: slice = slice(None)) -> Array:
        """Return what the processes leave of values or of the shapes of steps (n, any), (processes, n, any)."""
        n = len(columns)
        return (self.whitening[rows].reshape(-1, n) @ columns).reshape(-1, n, columns.shape[1])

    def base_evidence(self, white: Array, rows: slice = slice(None)) -> Array:
        """Return the log-evidence of values whose rest is given, (processes, sets)."""
        return -0.5 * _products(white, white) - self.log_size[rows, None]

    def evidence(self, x: Array, y: Array, pairs: Pairs) -> Array:
        """Return the log-evidence of values (n,) with each pair of steps, (processes, pairs)."""
        columns, num_pairs = pairs.steps.values(x), pairs.index.shape[1]
        evidence = np.empty((len(self.kernels), num_pairs))
        single = not pairs.steps.shape[pairs.index[0]].any()  # no step is the first of any
        for rows in self.batches(max(columns.shape[1], num_pairs)):
            white, ramps = self.whiten(y[:, None], rows), self.whiten(columns, rows)
            dot, prior = (white.transpose(0, 2, 1) @ ramps)[:, 0], self.step_height[rows, None] ** -2
            diag = prior + _products(ramps, ramps)
            if single:
                dot, diag = dot.take(pairs.index[1], 1), diag.take(pairs.index[1], 1)
                gain = dot * dot / diag - np.log(diag / prior)
            else:
                cross = _products(*(ramps.take(index, 2) for index in pairs.index))
                dots, diags = ([each.take(index, 1) for index in pairs.index] for each in (dot, diag))
                gain = _gain(dots, diags, cross, prior)
            evidence[rows] = 0.5 * gain + self.base_evidence(white, rows) + pairs.log_prior
        return evidence

    def most_evidence(self, x: Array, y: Array, steps: Steps, firsts: NDArray[np.intp]) -> Array:
        """Return the evidence of the best process with some steps and any other, (firsts, steps), before priors."""
        columns = steps.values(x)
        most = np.full((len(firsts), columns.shape[1]), -np.inf)
        for row, prior in enumerate(self.step_height**-2):
            rows = slice(row, row + 1)
            white, ramps = self.whiten(y[:, None], rows), self.whiten(columns, rows)[0]
            dot, diag = white[0, :, 0] @ ramps, prior + _products(ramps, ramps)
            dots, diags = ([each[firsts, None], each] for each in (dot, diag))
            gain = _gain(dots, diags, ramps[:, firsts].T @ ramps, prior)
            np.maximum(most, 0.5 * gain + self.base_evidence(white, rows), out=most)
        return most


def _products(first: Array, second: Array) -> Array:
    """Return the products of each column (..., n, columns) with that of the other, (..., columns)."""
    return np.einsum("...nc,...nc->...c", first, second)


def _schur(diag: Sequence[Array], cross: Array, prior: Any) -> tuple[Array, Array]:
    """Return the slope of the first of two steps' heights on the second, and the precision of the second.

    `own` are the precisions of each as if the other one were known. `together` is the product of what processes leave
    of the two, `least` the precision before any value.
    """
    slope = cross / diag[0]
    return slope, np.maximum(diag[1] - slope * cross, prior)


def _gain(dot: Sequence[Array], diag: Sequence[Array], cross: Array, prior: Any) -> Array:
    """Return twice what two steps add to the log-evidence; `toward` are products of the values' rest with theirs."""
    slope, schur = _schur(diag, cross, prior)
    return (dot[1] - slope * dot[0]) ** 2 / schur - np.log(schur * (diag[0] / prior**2)) + dot[0] ** 2 / diag[0]


def draw_curves(
    x: Array, y: Array, noises: Sequence[Array], grid: Array, draws: int, rng: np.random.Generator
) -> Array:
    """Draw curves on the grid, (draws, grid), from all processes in proportion to their likelihood given the values.

    Args:
        x: Where the values lie, increasing, (points,).
        y: The values, (points,).
        noises: Covariances of their errors, (points, points), as likely one as the other; one where it is known.
        grid: Where the curves are wanted, increasing, (grid,).
        draws: How many curves.
        rng: Of the draws.
    """
    level, y = y.mean(), y - y.mean()
    processes, pairs, evidence = _candidates(x, y, noises, SPLITS)
    weight = _weights(evidence, pairs)
    counts = rng.multinomial(draws, weight.ravel())
    owner, chosen = np.divmod(np.repeat(np.arange(counts.size), counts), weight.shape[1])
    pairs = pairs.select(chosen)  # of each draw
    used, starts = np.unique(owner, return_index=True)
    slices = {row: slice(*ends) for row, ends in zip(used, itertools.pairwise([*starts, draws]), strict=True)}
    curves, chances = np.empty((draws, len(grid))), np.empty((2, draws))
    for mine in slices.values():
        count = mine.stop - mine.start
        curves[mine] = rng.standard_normal((len(grid), count)).T
        chances[:, mine] = rng.standard_normal((2, count))
    heights, white = _drawn_heights(processes, pairs, owner, slices, x, y, chances)
    _condition_(curves, processes, slices, x, grid, white)
    on_grid = pairs.steps.values(grid).T
    for index, height in zip(pairs.index, heights, strict=True):
        curves += on_grid[index] * height[:, None]
    curves += level
    return curves


def _drawn_heights(
    processes: _Processes,
    pairs: Pairs,
    owner: NDArray[np.intp],
    slices: dict[int, slice],
    x: Array,
    y: Array,
    chances: Array,
) -> tuple[tuple[Array, Array], Array]:
    """Return the heights of both steps of each draw, by two normal numbers, and the values minus them (n, draws).

    `whose` is each draw's process; `chances` (2, draws) are for the second step and the first.
    """
    columns, white, ramps = pairs.steps.values(x), np.empty((len(x), len(owner))), np.empty((len(x), 2, len(owner)))
    for row, mine in slices.items():
        whitening, index = processes.whitening[row], pairs.index[:, mine]
        white[:, mine] = (whitening @ y)[:, None]
        ramps[..., mine] = (whitening @ columns[:, index.ravel()]).reshape(-1, *index.shape)
    first, second = ramps[:, 0], ramps[:, 1]
    prior = processes.step_height[owner] ** -2
    diag = prior + _products(first, first), prior + _products(second, second)
    slope, schur = _schur(diag, _products(first, second), prior)
    dot = _products(first, white), _products(second, white)
    late = (dot[1] - slope * dot[0]) / schur + chances[0] / np.sqrt(schur)
    early = dot[0] / diag[0] - slope * late + chances[1] / np.sqrt(diag[0])
    white -= first * early + second * late
    return (early, late), white


def _condition_(
    curves: Array, processes: _Processes, slices: dict[int, slice], x: Array, grid: Array, white: Array
) -> None:
    """Turn independent normal numbers (draws, grid) into the processes given the rest (n, draws) of the values."""
    to_values, to_itself = np.abs(x[:, None] - grid), np.abs(grid[:, None] - grid)
    groups: dict[Any, list[int]] = {}  # whose correlations are the same, whatever their height
    for row in slices:
        kernel = processes.kernels[row]
        groups.setdefault((kernel.rough, kernel.length), []).append(row)
    for alike in groups.values():
        at_values, at_grid = map(processes.kernels[alike[0]].correlation, (to_values, to_itself))
        for row in alike:
            kernel, mine = processes.kernels[row], slices[row]
            # Solved: of values without errors the inverse is not exact enough for what is left to be a covariance.
            known = dtrtrs(processes.triangles[row], kernel.covariance(at_values), lower=1)[0]
            cov = kernel.covariance(at_grid) - known.T @ known + 1e-7 * (kernel.level / 10) ** 2 * np.eye(len(grid))
            curves[mine] = curves[mine] @ np.linalg.cholesky(cov).T
            curves[mine] += white[:, mine].T @ known


def mean_curves(x: Array, values: Array, noise: Array, grid: Array) -> Array:
    """Return the mean of the curves that `draw_curves` draws from, for each of several sets of values, (sets, grid).

    The sets (sets, points) are a bootstrap's: processes and steps that the mean of all makes unlikely are left out.
    """
    level = values.mean(1, keepdims=True)
    values = (values - level).T
    processes, pairs, evidence = _candidates(x, values.mean(1), [noise], SPLITS - 1)
    share = _weights(evidence, pairs)
    most = likeliest(np.log(np.maximum(share.sum(0), 1e-300)), MOST_PAIRS)
    pairs = pairs.select(np.sort(most))
    processes = processes.select(np.flatnonzero(share.sum(1) > RARE))
    directions, constant, to_heights = _directions(processes, pairs, x)
    (count, _, both), sets = directions.shape, values.shape[1]
    num_pairs, white = both // 2, processes.whiten(values)
    along = directions.transpose(0, 2, 1) @ white  # (processes, both, sets)
    evidence = along[:, :num_pairs] ** 2 + along[:, num_pairs:] ** 2
    evidence += constant[..., None] + processes.base_evidence(white)[:, None]
    weight = _weights(evidence, pairs)
    along *= np.tile(weight, (1, 2, 1))
    left_over = white * weight.sum(1)[:, None] - 2 * (directions @ along)
    stacked = along.reshape(2 * count, num_pairs, sets).transpose(1, 0, 2)
    heights = (to_heights @ stacked).reshape(both, sets)
    curves = heights.T @ pairs.steps.values(grid)[:, pairs.index.T.ravel()].T
    distance = np.abs(x[:, None] - grid)
    for rows in processes.batches(len(grid)):
        known = np.stack([kernel.covariance(kernel.correlation(distance)) for kernel in processes.kernels[rows]])
        known = processes.whitening[rows] @ known
        curves += left_over[rows].reshape(-1, sets).T @ known.reshape(-1, len(grid))
    curves += level
    return curves


def _directions(processes: _Processes, pairs: Pairs, x: Array) -> tuple[Array, Array, Array]:
    """Return for each pair the rest of the first step and what it leaves of the second's: (processes, n, 2 x pairs).

    So long that the squares of products with the rest of values add up to what the steps add to the log-evidence, but
    for a constant (processes, pairs). Of these products, of all processes, a matrix of each pair makes the heights of
    the first step and of the second, (pairs, 2, processes x 2).
    """
    ramps, prior = processes.whiten(pairs.steps.values(x)), processes.step_height[:, None] ** -2
    first, second = (ramps.take(index, 2) for index in pairs.index)
    diag = prior + _products(first, first), prior + _products(second, second)
    slope, schur = _schur(diag, _products(first, second), prior)
    early, late = 1 / np.sqrt(2 * diag[0]), 1 / np.sqrt(2 * schur)
    second -= slope[:, None] * first
    constant = pairs.log_prior + np.log(2 * early * late * prior)
    to_heights = np.zeros((pairs.index.shape[1], 2, len(early), 2))
    to_heights[:, 0, :, 0], to_heights[:, 0, :, 1] = 2 * early.T, -2 * (slope * late).T
    to_heights[:, 1, :, 1] = 2 * late.T
    directions = np.concatenate([first * early[:, None], second * late[:, None]], 2)
    return directions, constant, to_heights.reshape(len(to_heights), 2, -1)


def _candidates(x: Array, y: Array, noises: Sequence[Array], splits: int) -> tuple[_Processes, Pairs, Array]:
    """Return processes, pairs of steps (those of two last), and the evidence of each with each, (processes, pairs).

    Small errors tell the width of a step to some percent: the likeliest steps are split until they are as close.
    """
    processes, steps = _processes(x, y, noises), Steps.from_axis(x)
    pairs = Pairs(steps, np.stack([np.zeros(len(steps.shape), dtype=np.intp), np.arange(len(steps.shape))]))
    evidence = processes.evidence(x, y, pairs)
    best = _best_by_height(processes.kernels, evidence.max(1))
    doubles = _two_steps(processes.select(best), steps, evidence[best].max(0), x, y, splits)
    for _ in range(splits):
        likely = pairs.likeliest(evidence.max(0))
        parts = pairs.select(likely).split(1)
        others = np.setdiff1d(np.arange(evidence.shape[1]), likely)
        evidence = np.concatenate([evidence[:, others], processes.evidence(x, y, parts)], 1)
        pairs = pairs.select(others).concat(parts)
    return processes, pairs.concat(doubles), np.concatenate([evidence, processes.evidence(x, y, doubles)], 1)


def _best_by_height(kernels: Sequence[_Kernel], evidence: Array) -> NDArray[np.intp]:
    """Return the likeliest process for each height."""
    return np.array([*{kernels[row].height: row for row in np.argsort(evidence)}.values()])


def _two_steps(processes: _Processes, steps: Steps, score: Array, x: Array, y: Array, splits: int) -> Pairs:
    """Return the likeliest pairs of steps: each likely step with any other, then each that did best with one of these.

    `score` is the evidence of each alone.
    """
    every, tried = np.arange(len(steps.shape)), steps.shape == 0
    firsts, evidence = np.zeros(0, dtype=np.intp), np.zeros((0, len(every)))
    for _ in range(2):
        more = likeliest(np.where(tried, -np.inf, score), TRIED)
        found = processes.most_evidence(x, y, steps, more)
        found += steps.log_prior[more, None] + steps.log_prior + np.log(2)
        again = tried | (np.isin(every, more) & (every <= more[:, None]))
        found[again] = -np.inf
        tried[more], score = True, found.max(0)
        firsts, evidence = np.append(firsts, more), np.concatenate([evidence, found])
    likely = np.flatnonzero(evidence > evidence.max() - LIKELY)
    evidence = evidence.ravel()[likely]
    order = likeliest(evidence, MAX_DOUBLES)
    first, second = np.divmod(likely[order], len(every))
    pairs, evidence = Pairs(steps, np.stack([firsts[first], second])), evidence[order]
    pairs = pairs.select(np.arange(len(order)))
    for _ in range(2 * splits):  # by the one step, and by the other
        order = likeliest(evidence, len(evidence))
        parts = pairs.select(order[-SPLIT:]).split(0)
        pairs = pairs.select(order[:-SPLIT]).concat(parts)
        evidence = np.append(evidence[order[:-SPLIT]], processes.evidence(x, y, parts).max(0))
    return pairs


def _weights(evidence: Array, pairs: Pairs) -> Array:
    """Return the shares of processes with pairs, those of two steps last, from their evidence (processes, pairs, ...).

    Half by the evidence of all, and half by that of one step at most. Two smooth steps leave next to nothing to the
    process, which then knows the peak between them better than anyone knows their shape; a process with one step at
    most wanders where two are flat. Neither is a training curve.
    """
    fewer = int((~pairs.are_two).sum())
    simple = _softmax_(evidence[:, :fewer].copy()) if fewer else None
    shares = _softmax_(evidence)
    if simple is not None:
        shares[:, :fewer] += simple
        shares /= 2
    return shares


def _softmax_(evidence: Array) -> Array:
    """Return the shares of processes with steps (processes, steps, ...) from their evidence, in place."""
    evidence -= evidence.max((0, 1))
    evidence *= TEMPER
    np.exp(evidence, out=evidence)
    evidence /= evidence.sum((0, 1))
    return evidence


def _processes(x: Array, y: Array, noises: Sequence[Array]) -> _Processes:
    span, distance, n = x[-1] - x[0], np.abs(x[:, None] - x), len(x)
    one_noise = len(noises) == 1
    lengths = np.geomspace(span / (2 * n), 2 * span, 7 if one_noise else 5)
    heights = (0.02, 0.06, 0.15, 0.4, 1.0, 2.5) if one_noise else (0.02, 0.15, 0.4, 1.0)
    forms = list(itertools.product(heights, (True, False)))
    kernels, scales = [], []
    whitening = np.empty((len(noises) * len(lengths), len(forms), n, n))
    every, log_size = np.empty_like(whitening), np.empty(whitening.shape[:2])
    for row, (noise, length) in enumerate(itertools.product(noises, lengths)):
        scale = max(float(np.ptp(y)), float(np.sqrt(np.diag(noise).mean())))
        some = [_Kernel(rough, float(length), height * scale, 10 * scale) for height, rough in forms]
        correlation = {kernel.rough: kernel.correlation(distance) for kernel in some[:2]}
        covariances = np.stack([kernel.covariance(correlation[kernel.rough]) for kernel in some])
        triangles = np.linalg.cholesky(covariances + (noise + 1e-10 * scale**2 * np.eye(n)))
        every[row] = triangles
        log_size[row] = np.log(np.diagonal(triangles, axis1=1, axis2=2)).sum(1)
        for form, triangle in enumerate(triangles):
            whitening[row, form] = dtrtri(triangle.T, lower=0)[0].T
        kernels.extend(some)
        scales.extend([scale] * len(some))
    return _Processes(kernels, every.reshape(-1, n, n), whitening.reshape(-1, n, n), log_size.ravel(), np.array(scales))
