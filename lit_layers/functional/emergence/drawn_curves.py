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
from scipy import sparse
from scipy.linalg.lapack import dtrtrs

Array = NDArray[np.floating[Any]]
TEMPER = 0.9  # power of evidence and prior: none is quite a training curve, and sure of one, intervals are too narrow
RARE, MOST_PAIRS = 5e-3, 100  # the share of processes, and the number of pairs, that count in means over resamples
PLACES, WIDTHS = 80, np.geomspace(0.001, 0.07, 5)  # of steps before any is split; widths as shares of the axis
SPLITS, SPLIT = 2, 12  # how often steps are split, and how many of each shape: the likeliest
TRIED, LIKELY, KEPT = 36, 10.0, 600  # steps tried with any other; pairs of two that count: so near the best, so many


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
class _Pairs:
    """Two steps each of some, by their numbers (2, pairs), of which no step may be one or both; the first are few."""

    steps: _Steps
    places: NDArray[np.intp]

    @cached_property
    def few(self) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
        """The first steps, each once, and which of these is whose."""
        return np.unique(self.places[0], return_inverse=True)

    @cached_property
    def log_prior(self) -> Array:
        """Before the power `TEMPER` none, one and two steps are as likely; of two, either may stand first."""
        two = (self.steps.shape[self.places] > 0).all(0)
        return self.steps.log_prior[self.places].sum(0) + np.log(2) * two

    def among(self, chosen: NDArray[Any]) -> "_Pairs":
        used, places = np.unique(self.places[:, chosen], return_inverse=True)
        return _Pairs(self.steps.among(used), places.reshape(2, -1))

    def and_of(self, other: "_Pairs") -> "_Pairs":
        places = np.concatenate([self.places, other.places + len(self.steps.shape)], 1)
        return _Pairs(_joined(self.steps, other.steps), places)

    def split(self, side: int) -> "_Pairs":
        """Each into nine by one of its steps, which then stands second."""
        parts = self.steps.among(self.places[side]).split()
        kept = np.tile(self.places[1 - side], 9)
        return _Pairs(_joined(self.steps, parts), np.stack([kept, len(self.steps.shape) + np.arange(len(kept))]))

    def likeliest(self, evidence: Array) -> NDArray[np.intp]:
        """Which are split: `SPLIT` of each shape of the second step."""
        shape = self.steps.shape[self.places[1]]
        of_each = [np.flatnonzero(shape == number) for number in range(1, len(SHAPES))]
        return np.concatenate([mine[np.argsort(evidence[mine])[-SPLIT:]] for mine in of_each])


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

    def solved(self, rest: Array, ramps: Array, pairs: _Pairs) -> tuple[Array, Array, Array, Array, Array]:
        """Of the heights of pairs of steps, of which `ramps` is the rest, given the rest of values (checkpoints, sets).

        Returns the precision of the first height, that of the second whatever the first is, the slope of the first on
        the second, each (pairs,), and both heights in these terms, (pairs, sets): of the first as if the second were 0.
        """
        first, second = pairs.places
        toward, least = ramps.T @ rest, self.step_height**-2
        own = least + (ramps * ramps).sum(0)
        few, which = pairs.few
        slope = (ramps[:, few].T @ ramps)[which, second] / own[first]
        left = np.maximum(own[second] - slope**2 * own[first], least)
        later = (toward[second] - slope[:, None] * toward[first]) / left[:, None]
        return own[first], left, slope, toward[first] / own[first][:, None], later

    def evidence(self, values: Array, ramps: Array, pairs: _Pairs) -> Array:
        """The log-evidence of values (checkpoints, sets) with each pair of steps, `ramps` their rest, (pairs, sets)."""
        rest = self.rest(values)
        precision, left, _, early, late = self.solved(rest, ramps, pairs)
        gain = precision[:, None] * early**2 + left[:, None] * late**2
        gain -= np.log(precision * left * self.step_height**4)[:, None]
        alone = -0.5 * (rest**2).sum(0) - np.log(np.diag(self.whole)).sum()
        return alone + 0.5 * gain + pairs.log_prior[:, None]


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
    processes, pairs, evidence = _weighed(x, y, noises, SPLITS)
    weight = _pooled(evidence, pairs)
    counts = rng.multinomial(draws, weight.ravel()).reshape(weight.shape)
    to_values, to_itself, parts = np.abs(grid[:, None] - x), np.abs(grid[:, None] - grid), []
    correlations: dict[Any, Array] = {}  # of each form, whatever its height
    for process, count in zip(processes, counts, strict=True):
        if not count.any():
            continue
        drawn_from = pairs.among(np.repeat(np.arange(len(count)), count))
        seen, ramps = process.rest(process.kernel(to_values).T), process.rest(drawn_from.steps.at(x))
        kernel = process.kernel
        form = kernel.rough, kernel.length
        if form not in correlations:
            correlations[form] = kernel.correlation(to_itself)
        left = kernel.height**2 * correlations[form] + kernel.level**2 - seen.T @ seen
        np.fill_diagonal(left, left.diagonal() + 1e-7 * (kernel.level / 10) ** 2)
        drawn = np.linalg.cholesky(left) @ rng.standard_normal((len(grid), count.sum()))
        rest = process.rest(y)[:, None]
        precision, own, slope, early, late = process.solved(rest, ramps, drawn_from)
        second = late[:, 0] + rng.standard_normal(len(own)) / np.sqrt(own)
        first = early[:, 0] - slope * second + rng.standard_normal(len(own)) / np.sqrt(precision)
        heights = np.zeros((ramps.shape[1], len(own)))  # of all steps in each draw
        np.add.at(heights, (drawn_from.places, np.arange(len(own))), np.stack([first, second]))
        drawn += seen.T @ (rest - ramps @ heights) + drawn_from.steps.at(grid) @ heights
        parts.append(drawn.T)
    return np.concatenate(parts) + level


def mean_curves(x: Array, values: Array, noise: Array, grid: Array) -> Array:
    """The mean of the curves that `draw_curves` draws from, for each of several sets of values, (sets, grid).

    The sets (sets, points) are a bootstrap's: processes and steps that the mean of all makes unlikely are left out.
    """
    level = values.mean(1, keepdims=True)
    values = (values - level).T
    processes, pairs, evidence = _weighed(x, values.mean(1), [noise], SPLITS - 1)
    share = _pooled(evidence, pairs)
    pairs = pairs.among(np.argsort(share.sum(0))[-MOST_PAIRS:])
    likely = [process for process, kept in zip(processes, share.sum(1) > RARE, strict=True) if kept]
    columns = np.asfortranarray(pairs.steps.at(x))
    weight = _pooled(np.stack([each.evidence(values, each.rest(columns), pairs) for each in likely]), pairs)
    curves, heights = np.zeros((len(grid), values.shape[1])), np.zeros((columns.shape[1], values.shape[1]))
    both = np.arange(pairs.places.size)  # of each pair; a sparse sum takes a twentieth of the time of `np.add.at`
    whose = sparse.csr_array((np.ones(len(both)), (pairs.places.ravel(), both)), (len(heights), len(both)))
    for process, of_process in zip(likely, weight, strict=True):
        rest, ramps = process.rest(values), process.rest(columns)
        *_, slope, early, late = process.solved(rest, ramps, pairs)
        of_steps = whose @ np.concatenate([(early - slope[:, None] * late) * of_process, late * of_process])
        seen = process.rest(process.kernel(np.abs(grid[:, None] - x)).T)
        curves += seen.T @ (rest * of_process.sum(0) - ramps @ of_steps)
        heights += of_steps
    return (curves + pairs.steps.at(grid) @ heights).T + level


def _weighed(x: Array, y: Array, noises: Sequence[Array], splits: int) -> tuple[list[_Process], _Pairs, Array]:
    """Processes, pairs of steps, and the evidence of each with each, (processes, pairs).

    Small errors tell the width of a step to some percent: the likeliest steps are split until they are as close.
    """
    processes, steps = list(_processes(x, y, noises)), _Steps.over(x)
    pairs = _Pairs(steps, np.stack([np.zeros(len(steps.shape), dtype=np.intp), np.arange(len(steps.shape))]))
    evidence = _evidence(processes, pairs, x, y)
    of_two = _two_steps(_likeliest_of_heights(processes, evidence.max(1)), pairs, x, y, splits)
    for _ in range(splits):
        likely = pairs.likeliest(evidence.max(0))
        parts = pairs.among(likely).split(1)
        rest = np.setdiff1d(np.arange(evidence.shape[1]), likely)
        evidence = np.concatenate([evidence[:, rest], _evidence(processes, parts, x, y)], 1)
        pairs = pairs.among(rest).and_of(parts)
    return processes, pairs.and_of(of_two), np.concatenate([evidence, _evidence(processes, of_two, x, y)], 1)


def _evidence(processes: Sequence[_Process], pairs: _Pairs, x: Array, y: Array) -> Array:
    """Of each process with each pair, (processes, pairs)."""
    columns = np.asfortranarray(pairs.steps.at(x))  # as LAPACK copies it, once for all processes
    return np.stack([each.evidence(y[:, None], each.rest(columns), pairs)[:, 0] for each in processes])


def _likeliest_of_heights(processes: Sequence[_Process], evidence: Array) -> list[_Process]:
    """Of each height the likeliest process."""
    likeliest: dict[float, _Process] = {}
    for number in np.argsort(evidence):
        likeliest[processes[number].kernel.height] = processes[number]
    return [*likeliest.values()]


def _two_steps(processes: Sequence[_Process], one: _Pairs, x: Array, y: Array, splits: int) -> _Pairs:
    """The likeliest pairs of two steps: each likely one with any other, then each that went best with one of these."""
    steps, score = one.steps, _evidence(processes, one, x, y).max(0)
    second, tried = np.arange(1, len(steps.shape)), np.zeros(len(steps.shape), dtype=bool)
    pairs, evidence = _Pairs(steps, np.zeros((2, 0), dtype=np.intp)), np.zeros(0)
    tried[0] = True
    for _ in range(2):
        firsts = np.argsort(np.where(tried, -np.inf, score))[-TRIED:]
        places = np.stack([each.ravel() for each in np.meshgrid(firsts, second, indexing="ij")])
        again = tried[places[1]] | (np.isin(places[1], firsts) & (places[1] <= places[0]))
        more = _Pairs(steps, places[:, ~again])
        of_more = _evidence(processes, more, x, y).max(0)
        tried[firsts], score = True, np.full(len(score), -np.inf)
        np.maximum.at(score, more.places[1], of_more)
        pairs, evidence = _Pairs(steps, np.concatenate([pairs.places, more.places], 1)), np.append(evidence, of_more)
    likely = np.argsort(evidence)[-KEPT:]
    likely = likely[evidence[likely] > evidence.max() - LIKELY]
    pairs, evidence = pairs.among(likely), evidence[likely]
    for _ in range(2 * splits):  # by the one step, and by the other
        order = np.argsort(evidence)
        parts = pairs.among(order[-SPLIT:]).split(0)
        pairs = pairs.among(order[:-SPLIT]).and_of(parts)
        evidence = np.append(evidence[order[:-SPLIT]], _evidence(processes, parts, x, y).max(0))
    return pairs


def _pooled(evidence: Array, pairs: _Pairs) -> Array:
    """Half by the evidence of all, and half by that of one step at most.

    Two smooth steps leave next to nothing to the process, which then knows the peak between them better than anyone
    knows their shape; a process with one step at most wanders where two are flat. Neither is a training curve.
    """
    two = (pairs.steps.shape[pairs.places] > 0).all(0)
    if two.all():
        return _shares(evidence)
    fewer = np.where(two.reshape(-1, *[1] * (evidence.ndim - 2)), -np.inf, evidence)
    return (_shares(evidence) + _shares(fewer)) / 2


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
