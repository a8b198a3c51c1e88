"""Random curves through noisy values of a curve: Gaussian processes of many length scales, with and without steps.

A Gaussian process is equally smooth everywhere. A metric that emerges in training is flat, changes within a few
checkpoints or has a sharp bend, and is flat again. One step (a sudden change in level), added to the process, models
that. Two steps model a rise and a fall. Each step is a sigmoid, or a rise that begins or ends in a corner. With only
one step, the process would have to follow the second change, and would then also wander wherever the curve is flat.

**The model.** y = g + sum_j h_j s_j + noise, with g a Gaussian process, s_j the shape of step j at the checkpoints and
h_j its height, normal with precision `prior`. Let L L' be the covariance of g + noise, r = L^-1 y and d_j = L^-1 s_j
the whitened values and shapes. Given y, the heights are normal with precision matrix D + `prior` I, D_ij = d_i'd_j, and
with right-hand side d_j'r. In the code `diag` and `cross` are the entries of this matrix and `dot` is its right-hand
side. The log-evidence is -|r|^2 / 2 - log det L plus half the gain of the steps:

    one step     dot^2 / diag - log(diag / prior)
    two steps    dot_1^2 / diag_1 + (dot_2 - slope dot_1)^2 / schur - log(diag_1 schur / prior^2)

with slope = cross / diag_1 and the Schur complement schur = diag_2 - slope cross.
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
# Evidence and prior are raised to this power. No model is exactly right for a training curve. With the full evidence,
# often a single model has nearly all of the weight, and its intervals are too narrow.
TEMPER = 0.9
# `mean_curves` leaves out Gaussian processes whose share of the total weight is at most RARE. It uses up to MOST_PAIRS
# pairs of steps.
RARE, MOST_PAIRS = 5e-3, 100
SPLITS = 2  # rounds of refinement: each likely step is replaced by nine with nearby locations and widths
# In each round, `_two_steps` pairs TRIED steps with all steps. It keeps pairs whose log-evidence is at most LIKELY
# below that of the best pair, and at most MAX_DOUBLES pairs.
TRIED, LIKELY, MAX_DOUBLES = 36, 10.0, 600
BATCH = 2**17  # largest number of entries of an array in one batch: 1 MB
# The steps (sudden changes in level) that are tried first: number of locations, and widths as shares of the length of
# the axis.
LOCATIONS, WIDTHS = 80, np.geomspace(0.001, 0.07, 5)
# Each round refines the SPLIT likeliest pairs of two steps, and the SPLIT likeliest single steps of each shape.
SPLIT = 12
DECIMALS = 6  # log-evidences are compared after rounding to this many decimals: smaller differences are rounding errors


def _no_step(u: Array) -> Array:
    return np.zeros_like(u)


def _sigmoid(u: Array) -> Array:
    return 1 / (1 + np.exp(-np.clip(u, -50, 50)))


def _from_corner(u: Array) -> Array:
    return -np.expm1(-np.maximum(u, 0) / 2)


def _to_corner(u: Array) -> Array:
    return np.exp(np.minimum(u, 0) / 2)


# All shapes rise from a tenth to nine tenths of their height while u = (x - loc) / width grows by 2 log 9. So `width`
# means the same for each shape.
SHAPES = (_no_step, _sigmoid, _from_corner, _to_corner)


class Steps(NamedTuple):
    """Steps (sudden changes in the level of a curve) by shape, location and width.

    The first one has shape 0 and means "no step". Every other step represents all steps near it: those in a range of
    locations of length `cell` and in a range of log widths of length `ratio`. Its prior probability is proportional to
    the size of this cell.
    """

    shape: NDArray[np.intp]
    loc: Array
    width: Array
    cell: Array
    ratio: Array
    log_prior: Array

    @classmethod
    def from_axis(cls, x: Array) -> "Steps":
        # Divide the intervals between checkpoints into cells, one step in each. So there are more steps where
        # checkpoints are dense: only there do the values distinguish between steps at close locations.
        x, span = np.append(x[: -1 : max(1, round(len(x) / LOCATIONS))], x[-1]), x[-1] - x[0]
        per = max(1, LOCATIONS // len(x))
        cells = np.repeat(np.diff(x) / per, per)
        locs = x[0] + cells.cumsum() - cells / 2
        shape, row, wide = (each.ravel() for each in np.indices((len(SHAPES) - 1, len(locs), len(WIDTHS))))
        prior = np.log(cells[row] / span / len(WIDTHS) / (len(SHAPES) - 1))
        ratio = np.full(len(row), np.log(WIDTHS[1] / WIDTHS[0]))
        steps = cls(shape + 1, locs[row], span * WIDTHS[wide], cells[row], ratio, prior)
        return _joined(cls(np.zeros(1, dtype=np.intp), x[:1], np.ones(1), *np.zeros((3, 1))), steps)

    def values(self, x: Array) -> Array:
        """Return each step, as a function of height 1, at the points `x`, (points, steps)."""
        scaled = (x[:, None] - self.loc) / self.width
        for kind, shape in enumerate(SHAPES):
            mine = self.shape == kind
            scaled[:, mine] = shape(scaled[:, mine])
        return scaled

    def select(self, chosen: NDArray[Any]) -> "Steps":
        fields: list[Any] = [each[chosen] for each in self]
        return Steps(*fields)

    def split(self) -> "Steps":
        """Return nine finer steps for each step, one for each part of its cell.

        The cell is the range of locations and log widths that the step represents. Both are divided into three parts.
        """
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
    """Pairs of steps that a curve may have, as indices (2, pairs) into the list `steps`.

    A step is a sudden change in the level of the curve. Either member of a pair may be "no step": a pair then
    represents a curve with one step, or with none.
    """

    steps: Steps
    index: NDArray[np.intp]

    @cached_property
    def are_two(self) -> NDArray[np.bool_]:
        first, second = self.steps.shape[self.index] > 0
        return first & second

    @cached_property
    def log_prior(self) -> Array:
        """Log of the prior probability of each pair of steps, before it is raised to the power `TEMPER`.

        A step is a sudden change of the curve, and one or both steps of a pair may be absent. Curves with no step, with
        one step and with two steps are equally likely. The probability of a pair of two steps
        is doubled, because only one of the two orders of its steps is in the list.
        """
        return self.steps.log_prior[self.index].sum(0) + np.log(2) * self.are_two

    def select(self, chosen: NDArray[Any]) -> "Pairs":
        index, used = self.index[:, chosen], np.zeros(len(self.steps.shape), dtype=bool)
        used[index] = True
        return Pairs(self.steps.select(used), (used.cumsum() - 1)[index])

    def concat(self, other: "Pairs") -> "Pairs":
        index = np.concatenate([self.index, other.index + len(self.steps.shape)], 1)
        return Pairs(_joined(self.steps, other.steps), index)

    def split(self, side: int) -> "Pairs":
        """Return nine pairs for each pair of steps: step `side` (0 or 1) is replaced by each of the nine parts of it.

        `Steps.split` makes the parts, which are steps with nearby locations and widths. In each new pair, the part is
        the second step, and the step that was not replaced is the first.
        """
        parts = self.steps.select(self.index[side]).split()
        other = np.tile(self.index[1 - side], 9)
        return Pairs(_joined(self.steps, parts), np.stack([other, len(self.steps.shape) + np.arange(len(other))]))

    def likeliest(self, evidence: Array) -> NDArray[np.intp]:
        """Return the indices of the likeliest pairs of steps: `SPLIT` pairs for each shape of the second step.

        The shapes are those in `SHAPES`, except "no step". `evidence` holds the log-evidence of each pair.
        """
        shape = self.steps.shape[self.index[1]]
        groups = [np.flatnonzero(shape == kind) for kind in range(1, len(SHAPES))]
        return np.concatenate([mine[likeliest(evidence[mine], SPLIT)] for mine in groups])


def likeliest(evidence: Array, count: int) -> NDArray[np.intp]:
    """Return the indices of the `count` largest evidences, the largest last.

    Evidences that differ only by rounding count as equal and stay in the order of their indices. This matters for
    narrow steps between the same two checkpoints. They have the same values at all checkpoints, so otherwise rounding,
    which depends on the machine, would decide between them.
    """
    rounded, count = np.round(evidence, DECIMALS), min(count, len(evidence))
    near = np.flatnonzero(rounded >= np.partition(rounded, -count)[-count])
    return near[np.argsort(rounded[near], kind="stable")[-count:]]


@dataclass(frozen=True)
class _Kernel:
    """A Matern kernel of one length and height, plus a constant level of large variance."""

    rough: bool
    length: float
    height: float
    level: float

    def correlation(self, distance: Array) -> Array:
        # Matern 3/2 (rough) has paths with one derivative, Matern 5/2 has paths with two.
        d = distance / self.length * (3**0.5 if self.rough else 5**0.5)
        return (1 + d if self.rough else 1 + d + d * d / 3) * np.exp(-d)

    def covariance(self, correlation: Array) -> Array:
        return self.height**2 * correlation + self.level**2  # an unknown level adds a constant


@dataclass(frozen=True)
class _Processes:
    """Gaussian processes at n checkpoints, including the errors of the values.

    `triangles` (processes, n, n) are the Cholesky factors L of the covariances of the values, `whitening` their
    inverses L^-1, and `log_size` (processes,) is log det L. `step_height` (processes,) is the prior standard deviation
    of the height of a step.
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
        """Return slices of the Gaussian processes, small enough for arrays of one slice to fit into the CPU cache.

        Such an array has `columns` whitened columns of n values for each process of the slice.
        """
        count, n, _ = self.whitening.shape
        size = max(1, BATCH // (n * columns))
        return (slice(start, start + size) for start in range(0, count, size))

    def whiten(self, columns: Array, rows: slice = slice(None)) -> Array:
        """Return L^-1 `columns` for the Cholesky factor L of each process in `rows`, (processes, n, any).

        `columns` (n, any) are curves or steps, with their values at the n checkpoints.
        """
        n = len(columns)
        return (self.whitening[rows].reshape(-1, n) @ columns).reshape(-1, n, columns.shape[1])

    def base_evidence(self, white: Array, rows: slice = slice(None)) -> Array:
        """Return the log-evidence of each Gaussian process without steps, (processes, columns).

        Each column of `white` (processes, n, columns) holds the whitened values of one curve.
        """
        # The density of the values without its factor (2 pi)^(-n / 2), which is the same for every model.
        return -0.5 * _products(white, white) - self.log_size[rows, None]

    def evidence(self, x: Array, y: Array, pairs: Pairs) -> Array:
        """Return the log-evidence of each model given the values `y` (n,), as an array (processes, pairs).

        A model is a Gaussian process plus a pair of steps (sudden changes in level). The log of the prior probability
        of the pair is added.
        """
        columns, num_pairs = pairs.steps.values(x), pairs.index.shape[1]
        evidence = np.empty((len(self.kernels), num_pairs))
        # If the first step of every pair is "no step", each curve has at most one step, the second of its pair.
        single = not pairs.steps.shape[pairs.index[0]].any()
        for rows in self.batches(max(columns.shape[1], num_pairs)):
            white, shapes = self.whiten(y[:, None], rows), self.whiten(columns, rows)
            dot, prior = (white.transpose(0, 2, 1) @ shapes)[:, 0], self.step_height[rows, None] ** -2
            diag = prior + _products(shapes, shapes)
            if single:
                dot, diag = dot.take(pairs.index[1], 1), diag.take(pairs.index[1], 1)
                gain = dot * dot / diag - np.log(diag / prior)
            else:
                cross = _products(*(shapes.take(index, 2) for index in pairs.index))
                dots, diags = ([each.take(index, 1) for index in pairs.index] for each in (dot, diag))
                gain = _gain(dots, diags, cross, prior)
            evidence[rows] = 0.5 * gain + self.base_evidence(white, rows) + pairs.log_prior
        return evidence

    def most_evidence(self, x: Array, y: Array, steps: Steps, firsts: NDArray[np.intp]) -> Array:
        """Return the largest log-evidence over the Gaussian processes for each pair of steps, (firsts, steps).

        `firsts` are the indices of the possible first steps. The second step is any of `steps`. The log of the prior
        probability of the pair is not added, unlike in `evidence`.
        """
        columns = steps.values(x)
        most = np.full((len(firsts), columns.shape[1]), -np.inf)
        for row, prior in enumerate(self.step_height**-2):
            rows = slice(row, row + 1)
            white, shapes = self.whiten(y[:, None], rows), self.whiten(columns, rows)[0]
            dot, diag = white[0, :, 0] @ shapes, prior + _products(shapes, shapes)
            dots, diags = ([each[firsts, None], each] for each in (dot, diag))
            # One matrix product gives the products of all pairs of steps. `evidence` would compute them pair by pair.
            gain = _gain(dots, diags, shapes[:, firsts].T @ shapes, prior)
            np.maximum(most, 0.5 * gain + self.base_evidence(white, rows), out=most)
        return most


def _products(first: Array, second: Array) -> Array:
    """Return the inner product of each column (..., n, columns) with the same column of the other array."""
    return np.einsum("...nc,...nc->...c", first, second)


def _schur(diag: Sequence[Array], cross: Array, prior: Any) -> tuple[Array, Array]:
    """Return slope = cross / diag_1 and the Schur complement diag_2 - slope cross, which is at least `prior`.

    A step is a sudden change of a curve's level, by its height. The heights of two steps have a precision matrix with
    the diagonal `diag` and the off-diagonal entry `cross`. `prior` is the prior precision of a height.
    """
    slope = cross / diag[0]
    # In exact arithmetic this is never below `prior`. For two nearly equal steps the difference is mostly rounding,
    # which could be negative.
    return slope, np.maximum(diag[1] - slope * cross, prior)


def _gain(dot: Sequence[Array], diag: Sequence[Array], cross: Array, prior: Any) -> Array:
    """Return twice the increase of the log-evidence if two steps (sudden changes of level) are added to the model.

    This is the formula for two steps in the module docstring, with the `dot`, `diag` and `cross` defined there. `prior`
    is the prior precision of a step's height.
    """
    slope, schur = _schur(diag, cross, prior)
    return (dot[1] - slope * dot[0]) ** 2 / schur - np.log(schur * (diag[0] / prior**2)) + dot[0] ** 2 / diag[0]


def draw_curves(
    x: Array, y: Array, noises: Sequence[Array], grid: Array, draws: int, rng: np.random.Generator
) -> Array:
    """Draw curves through noisy values, (draws, grid): from Gaussian processes with no, one or two sudden changes.

    Each draw takes one of these models at random, with the probabilities of `_weights`.

    Args:
        x: Positions of the values, increasing, (points,).
        y: The values, (points,).
        noises: Covariances of the errors of the values, (points, points), equally likely; a single one if it is known.
        grid: Positions at which curves are drawn, increasing, (grid,).
        draws: Number of curves.
        rng: Generator of all random numbers.
    """
    level, y = y.mean(), y - y.mean()
    processes, pairs, evidence = _candidates(x, y, noises, SPLITS)
    weight = _weights(evidence, pairs)
    counts = rng.multinomial(draws, weight.ravel())
    owner, chosen = np.divmod(np.repeat(np.arange(counts.size), counts), weight.shape[1])
    pairs = pairs.select(chosen)  # from here on, one pair for each draw
    used, starts = np.unique(owner, return_index=True)
    slices = {row: slice(*ends) for row, ends in zip(used, itertools.pairwise([*starts, draws]), strict=True)}
    # Draw all random numbers first, process by process. The products below then handle all draws together.
    curves, normals = np.empty((draws, len(grid))), np.empty((2, draws))
    for mine in slices.values():
        count = mine.stop - mine.start
        curves[mine] = rng.standard_normal((len(grid), count)).T
        normals[:, mine] = rng.standard_normal((2, count))
    heights, white = _drawn_heights(processes, pairs, owner, slices, x, y, normals)
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
    normals: Array,
) -> tuple[tuple[Array, Array], Array]:
    """Return random heights of the two steps of each drawn curve, and the values that remain without these steps.

    A step is a sudden change in the level of the curve. The heights of the first steps and those of the second steps
    are (draws,) each. The remaining values (n, draws) are the whitened values minus the whitened steps. `owner` is the
    index of the Gaussian process of each drawn curve. `normals` (2, draws) are the standard normal numbers to use:
    row 0 for the second step, row 1 for the first step.
    """
    columns, white, shapes = pairs.steps.values(x), np.empty((len(x), len(owner))), np.empty((len(x), 2, len(owner)))
    for row, mine in slices.items():
        whitening, index = processes.whitening[row], pairs.index[:, mine]
        white[:, mine] = (whitening @ y)[:, None]
        shapes[..., mine] = (whitening @ columns[:, index.ravel()]).reshape(-1, *index.shape)
    first, second = shapes[:, 0], shapes[:, 1]
    prior = processes.step_height[owner] ** -2
    diag = prior + _products(first, first), prior + _products(second, second)
    slope, schur = _schur(diag, _products(first, second), prior)
    dot = _products(first, white), _products(second, white)
    # Draw the second height from its marginal, then the first height given the second. Both distributions are normal.
    late = (dot[1] - slope * dot[0]) / schur + normals[0] / np.sqrt(schur)
    early = dot[0] / diag[0] - slope * late + normals[1] / np.sqrt(diag[0])
    white -= first * early + second * late
    return (early, late), white


def _condition_(
    curves: Array, processes: _Processes, slices: dict[int, slice], x: Array, grid: Array, white: Array
) -> None:
    """Turn independent normal numbers (draws, grid), in place, into draws of Gaussian processes given n values.

    Let L be the Cholesky factor of the covariance of the values. `white` (n, draws) is L^-1 (values - steps), with the
    steps (sudden changes in level) of each draw. K_g is the covariance between the values and the points of the grid,
    K_gg that between the points of the grid. With W = L^-1 K_g, the mean on the grid is W' white and the covariance is
    K_gg - W'W.
    """
    to_values, to_itself = np.abs(x[:, None] - grid), np.abs(grid[:, None] - grid)
    groups: dict[Any, list[int]] = {}  # processes with the same correlations
    for row in slices:
        kernel = processes.kernels[row]
        groups.setdefault((kernel.rough, kernel.length), []).append(row)
    for alike in groups.values():
        at_values, at_grid = map(processes.kernels[alike[0]].correlation, (to_values, to_itself))
        for row in alike:
            kernel, mine = processes.kernels[row], slices[row]
            # Solve with L instead of multiplying by its stored inverse. For values without errors the inverse is too
            # inexact, and K_gg - W'W would not be positive definite.
            known = dtrtrs(processes.triangles[row], kernel.covariance(at_values), lower=1)[0]
            cov = kernel.covariance(at_grid) - known.T @ known + 1e-7 * (kernel.level / 10) ** 2 * np.eye(len(grid))
            curves[mine] = curves[mine] @ np.linalg.cholesky(cov).T
            curves[mine] += white[:, mine].T @ known


def mean_curves(x: Array, values: Array, noise: Array, grid: Array) -> Array:
    """Return the mean of the curves that `draw_curves` would draw for each row of `values`, (samples, grid).

    Each row of `values` (samples, points) is the same curve in another bootstrap sample. Gaussian processes and steps
    that are unlikely given the mean of all rows are left out. This is accurate enough, because the results only decide
    the order of draws in `coupled_draws`.
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
    along = directions.transpose(0, 2, 1) @ white  # (processes, 2 x pairs, samples)
    evidence = along[:, :num_pairs] ** 2 + along[:, num_pairs:] ** 2
    evidence += constant[..., None] + processes.base_evidence(white)[:, None]
    weight = _weights(evidence, pairs)
    # Multiply every term by the weight of its model. The sums over models below are then weighted means.
    along *= np.tile(weight, (1, 2, 1))
    # Subtract the mean of the two steps from the whitened values r. Given r, this mean is the sum of 2 e (e'r) over the
    # directions e_1 and e_2 of the pair of steps. The factor 2 is there because each e contains 1 / sqrt(2).
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
    """Return the quantities in `mean_curves` that do not depend on the values of a curve.

    Symbols are those of the module docstring. With r the whitened values, two steps add to the log-evidence of a
    process (e_1'r)^2 + (e_2'r)^2 + constant.

    - Directions (processes, n, 2 x pairs): e_1 = d_1 / sqrt(2 diag_1) of all pairs, then
      e_2 = (d_2 - slope d_1) / sqrt(2 schur) of all pairs.
    - The constant, (processes, pairs): -log(diag_1 schur / prior^2) / 2 plus the log prior probability of the pair.
    - A matrix for each pair, (pairs, 2, processes x 2). Multiply e_1'r and e_2'r of each process by the weight of the
      process with this pair. The matrix maps these 2 x processes numbers to the mean heights of the two steps.
    """
    shapes, prior = processes.whiten(pairs.steps.values(x)), processes.step_height[:, None] ** -2
    first, second = (shapes.take(index, 2) for index in pairs.index)
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
    """Return Gaussian processes and pairs of steps that may explain a curve, and their log-evidence (processes, pairs).

    A model of the curve is one process plus one pair of steps (sudden changes in level). A pair may also stand for one
    step or for none. Pairs of two real steps come last. Values with small errors determine the width of a step to a few
    percent, more closely than the first grid of widths. In each of `splits` rounds, the likeliest steps are therefore
    replaced by steps with nearby locations and widths.
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
    """Return the index of the Gaussian process with the largest evidence, for each kernel height (standard deviation).

    `_two_steps` tries only these processes.
    """
    return np.array([*{kernels[row].height: row for row in np.argsort(evidence)}.values()])


def _two_steps(processes: _Processes, steps: Steps, score: Array, x: Array, y: Array, splits: int) -> Pairs:
    """Return the likeliest pairs of two steps (sudden changes in the level of a curve), after two rounds of search.

    The first round pairs the `TRIED` likeliest single steps with every step; `score` is the evidence of each single
    step. The second round pairs `TRIED` more steps with every step: those that did best as partners in the first round.
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
    # Each turn refines the first step of the likeliest pairs and swaps their two steps. So two turns refine both steps.
    for _ in range(2 * splits):
        order = likeliest(evidence, len(evidence))
        parts = pairs.select(order[-SPLIT:]).split(0)
        pairs = pairs.select(order[:-SPLIT]).concat(parts)
        evidence = np.append(evidence[order[:-SPLIT]], processes.evidence(x, y, parts).max(0))
    return pairs


def _weights(evidence: Array, pairs: Pairs) -> Array:
    """Return the weights of all models from their evidence (processes, pairs, ...).

    A model is a Gaussian process plus zero, one or two steps. Models with two steps must come last along the axis
    `pairs`. Half of the weight is divided among all models, the other half among the models with at most one step. Both
    are divided in proportion to the evidence to the power `TEMPER`.

    Neither half alone is right for a training curve. Two steps can explain nearly all of a curve, so that the process
    has almost no variance. Such a model is too certain of the shape of the peak between its steps. With at most one
    step, the process must follow the second change of a curve. Such a model is too uncertain where the curve is flat.
    """
    fewer = int((~pairs.are_two).sum())
    simple = _softmax_(evidence[:, :fewer].copy()) if fewer else None
    shares = _softmax_(evidence)
    if simple is not None:
        shares[:, :fewer] += simple
        shares /= 2
    return shares


def _softmax_(evidence: Array) -> Array:
    """Turn log-evidences of models (processes, pairs, ...) into weights, in place.

    The evidence is raised to the power `TEMPER`. The weights sum to 1 over the first two axes.
    """
    evidence -= evidence.max((0, 1))  # exp of a log-evidence of 1,000 would overflow
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
        # The small diagonal keeps the covariance of values without errors positive definite despite rounding.
        covariances = np.stack([kernel.covariance(correlation[kernel.rough]) for kernel in some])
        triangles = np.linalg.cholesky(covariances + (noise + 1e-10 * scale**2 * np.eye(n)))
        every[row] = triangles
        log_size[row] = np.log(np.diagonal(triangles, axis1=1, axis2=2)).sum(1)
        for form, triangle in enumerate(triangles):
            whitening[row, form] = dtrtri(triangle.T, lower=0)[0].T
        kernels.extend(some)
        scales.extend([scale] * len(some))
    return _Processes(kernels, every.reshape(-1, n, n), whitening.reshape(-1, n, n), log_size.ravel(), np.array(scales))
