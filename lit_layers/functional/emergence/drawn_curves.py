"""Curves drawn given noisy values of one: Gaussian processes of many lengths and heights, with and without a step.

A process alone is smooth everywhere alike; what emerges in training is flat, turns within a few checkpoints or at one
point, and is flat again, which one step beside it covers: a sigmoid, or a rise that begins or ends in a corner.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.linalg.lapack import dtrtrs

Array = NDArray[np.floating[Any]]
TEMPER = 0.9  # power of the evidence: no process is quite a training curve, and sure of one, intervals are too narrow
RARE, MOST_STEPS = 5e-3, 100  # the share of processes, and the number of steps, that count in means over resamples
PLACES, WIDTHS = 80, np.geomspace(0.001, 0.07, 5)  # of steps before any is split; widths as shares of the axis
SPLITS, SPLIT = 2, 12  # how often steps are split, and how many of each shape: the likeliest


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


class _Steps(NamedTuple):
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
    def over(cls, x: Array) -> "_Steps":
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
        """(points, steps)"""
        scaled = (x[:, None] - self.place) / self.width
        for number, shape in enumerate(SHAPES):
            mine = self.shape == number
            scaled[:, mine] = shape(scaled[:, mine])
        return scaled

    def among(self, chosen: NDArray[Any]) -> "_Steps":
        fields: list[Any] = [each[chosen] for each in self]
        return _Steps(*fields)

    def likeliest(self, evidence: Array) -> NDArray[np.bool_]:
        """Which are split: `SPLIT` of each shape."""
        chosen = np.zeros(len(self.shape), dtype=bool)
        for number in range(1, len(SHAPES)):
            mine = np.flatnonzero(self.shape == number)
            chosen[mine[np.argsort(evidence[mine])[-SPLIT:]]] = True
        return chosen

    def split(self) -> "_Steps":
        """Each into nine, by thirds of its cell."""
        parts = []
        for along, across in itertools.product((-1 / 3, 0, 1 / 3), repeat=2):
            place, width = self.place + along * self.cell, self.width * np.exp(across * self.ratio)
            parts.append(_Steps(self.shape, place, width, self.cell / 3, self.ratio / 3, self.log_prior - np.log(9)))
        return _joined(*parts)


def _joined(*steps: _Steps) -> _Steps:
    fields: list[Any] = [np.concatenate(parts) for parts in zip(*steps, strict=True)]
    return _Steps(*fields)


@dataclass(frozen=True)
class _Kernel:
    """Matern, of one length and height, on a level of no known place."""

    rough: bool
    length: float
    height: float
    level: float

    def correlation(self, distance: Array) -> Array:
        d = distance / self.length * (3**0.5 if self.rough else 5**0.5)
        return (1 + d + (0 if self.rough else d * d / 3)) * np.exp(-d)

    def __call__(self, distance: Array) -> Array:
        return self.height**2 * self.correlation(distance) + self.level**2


@dataclass(frozen=True)
class _Process:
    """A Gaussian process: `whole` (checkpoints, checkpoints) is the lower triangle of the covariance of the values."""

    kernel: _Kernel
    whole: Array
    step_height: float

    def rest(self, columns: Array) -> Array:
        """What it leaves of values or of the shapes of steps, (checkpoints, any)."""
        return dtrtrs(self.whole, columns, lower=1)[0]  # scipy's own checks cost more than it solves

    def precision(self, ramps: Array) -> Array:
        """Of the height of steps, of whose shapes `ramps` is the rest, (steps,)."""
        return self.step_height**-2 + (ramps * ramps).sum(0)

    def evidence(self, values: Array, columns: Array, log_prior: Array) -> Array:
        """The log-evidence of values (checkpoints, sets) with each of some steps, (steps, sets)."""
        rest, ramps = self.rest(values), self.rest(columns)
        precision = self.precision(ramps)[:, None]
        gain = (ramps.T @ rest) ** 2 / precision - np.log(precision * self.step_height**2)
        alone = -0.5 * (rest**2).sum(0) - np.log(np.diag(self.whole)).sum()
        return alone + 0.5 * gain + log_prior[:, None]


def draw_curves(
    x: Array, y: Array, noises: Sequence[Array], grid: Array, draws: int, rng: np.random.Generator
) -> Array:
    """Curves on the grid, (draws, grid), from all processes as likely as the values make them.

    Args:
        x: Where the values lie, increasing, (points,).
        y: The values, (points,).
        noises: Covariances of their errors, (points, points), as likely one as the other; one where it is known.
        grid: Where the curves are wanted, increasing, (grid,).
        draws: How many curves.
        rng: Of the draws.
    """
    level, y = y.mean(), y - y.mean()
    processes, steps, evidence = _weighed(x, y, noises, SPLITS)
    weight = _shares(evidence)
    counts = rng.multinomial(draws, weight.ravel()).reshape(weight.shape)
    to_values, to_itself, parts = np.abs(grid[:, None] - x), np.abs(grid[:, None] - grid), []
    correlations: dict[Any, Array] = {}  # of each form, whatever its height
    for process, count in zip(processes, counts, strict=True):
        if not count.any():
            continue
        drawn_from = steps.among(count > 0)
        seen, ramps = process.rest(process.kernel(to_values).T), process.rest(drawn_from.at(x))
        kernel = process.kernel
        form = kernel.rough, kernel.length
        if form not in correlations:
            correlations[form] = kernel.correlation(to_itself)
        left = kernel.height**2 * correlations[form] + kernel.level**2 - seen.T @ seen
        np.fill_diagonal(left, left.diagonal() + 1e-7 * (kernel.level / 10) ** 2)
        chosen = np.repeat(np.arange(len(drawn_from.shape)), count[count > 0])
        precision, rest = process.precision(ramps), process.rest(y)
        height = (ramps.T @ rest / precision)[chosen] + rng.standard_normal(len(chosen)) / np.sqrt(precision)[chosen]
        drawn = np.linalg.cholesky(left) @ rng.standard_normal((len(grid), len(chosen)))
        drawn += seen.T @ (rest[:, None] - ramps[:, chosen] * height) + drawn_from.at(grid)[:, chosen] * height
        parts.append(drawn.T)
    return np.concatenate(parts) + level


def mean_curves(x: Array, values: Array, noise: Array, grid: Array) -> Array:
    """The mean of the curves that `draw_curves` draws from, for each of several sets of values, (sets, grid).

    The sets (sets, points) are a bootstrap's: processes and steps that the mean of all makes unlikely are left out.
    """
    level = values.mean(1, keepdims=True)
    values = (values - level).T
    processes, steps, evidence = _weighed(x, values.mean(1), [noise], SPLITS - 1)
    share = _shares(evidence)
    steps = steps.among(np.argsort(share.sum(0))[-MOST_STEPS:])
    likely = [process for process, kept in zip(processes, share.sum(1) > RARE, strict=True) if kept]
    columns = steps.at(x)
    weight = _shares(np.stack([process.evidence(values, columns, steps.log_prior) for process in likely]))
    curves, heights = np.zeros((len(grid), values.shape[1])), np.zeros((len(columns[0]), values.shape[1]))
    for process, of_process in zip(likely, weight, strict=True):
        rest, ramps = process.rest(values), process.rest(columns)
        height = of_process * (ramps.T @ rest) / process.precision(ramps)[:, None]
        seen = process.rest(process.kernel(np.abs(grid[:, None] - x)).T)
        curves += seen.T @ (rest * of_process.sum(0) - ramps @ height)
        heights += height
    return (curves + steps.at(grid) @ heights).T + level


def _weighed(x: Array, y: Array, noises: Sequence[Array], splits: int) -> tuple[list[_Process], _Steps, Array]:
    """Processes, steps, and the evidence of each with each, (processes, steps).

    Small errors tell the width of a step to some percent: the likeliest steps are split until they are as close.
    """
    processes, steps = list(_processes(x, y, noises)), _Steps.over(x)

    def evidence_with(steps: _Steps) -> Array:
        columns = steps.at(x)
        return np.stack([process.evidence(y[:, None], columns, steps.log_prior)[:, 0] for process in processes])

    evidence = evidence_with(steps)
    for _ in range(splits):
        likely = steps.likeliest(evidence.max(0))
        parts = steps.among(likely).split()
        steps = _joined(steps.among(~likely), parts)
        evidence = np.concatenate([evidence[:, ~likely], evidence_with(parts)], 1)
    return processes, steps, evidence


def _shares(evidence: Array) -> Array:
    """Of processes with steps (processes, steps, ...) by their evidence."""
    weight = evidence - evidence.max((0, 1))
    weight *= TEMPER
    np.exp(weight, out=weight)
    weight /= weight.sum((0, 1))
    return weight


def _processes(x: Array, y: Array, noises: Sequence[Array]) -> Iterator[_Process]:
    span, distance = x[-1] - x[0], np.abs(x[:, None] - x)
    one_noise = len(noises) == 1
    lengths = np.geomspace(span / (2 * len(x)), 2 * span, 7 if one_noise else 5)
    heights = (0.02, 0.06, 0.15, 0.4, 1.0, 2.5) if one_noise else (0.02, 0.15, 0.4, 1.0)
    for noise in noises:
        scale = max(float(np.ptp(y)), float(np.sqrt(np.diag(noise).mean())))
        noise = noise + 1e-10 * scale**2 * np.eye(len(x))
        for length, height, rough in itertools.product(lengths, heights, (True, False)):
            kernel = _Kernel(bool(rough), float(length), height * scale, 10 * scale)
            yield _Process(kernel, np.linalg.cholesky(kernel(distance) + noise), scale)
