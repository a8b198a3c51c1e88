"""Curves drawn given noisy values of one: Gaussian processes of many lengths and heights, with and without a step.

A process alone is smooth everywhere alike; what emerges in training is flat, turns within a few checkpoints, and is
flat again, which one sigmoid step beside it covers.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import solve_triangular

Array = NDArray[np.floating[Any]]
TEMPER = 0.9  # power of the evidence: no process is quite a training curve, and sure of one, intervals are too narrow


@dataclass(frozen=True)
class _Process:
    """A Gaussian process given the values, alone and with one sigmoid step added.

    `noise` (checkpoints, checkpoints) is the covariance of the errors and `whole` the lower triangle of that of the
    values, `ramps` (checkpoints, steps) what it leaves of each step's shape; a step's height has the prior deviation
    `step_height` and the posterior `precision` (steps,); `evidence` (1 + steps,) is the log-evidence without and with
    each.
    """

    kernel: "_Kernel"
    noise: Array
    whole: Array
    ramps: Array
    step_height: float
    precision: Array
    evidence: Array


@dataclass(frozen=True)
class _Kernel:
    """Matern, of one length and height, on a level of no known place."""

    rough: bool
    length: float
    height: float
    level: float

    def __call__(self, distance: Array) -> Array:
        d = distance / self.length * (3**0.5 if self.rough else 5**0.5)
        return self.height**2 * (1 + d + (0 if self.rough else d * d / 3)) * np.exp(-d) + self.level**2


@dataclass(frozen=True)
class _Steps:
    """Sigmoid steps: a few places in each gap, each in several widths, as likely as the gap is wide."""

    place: Array
    width: Array
    log_prior: Array

    @classmethod
    def over(cls, x: Array) -> "_Steps":
        gaps, span, per = np.diff(x), x[-1] - x[0], max(1, 200 // len(x))
        inside = (np.arange(per) + 0.5) / per
        places = (x[:-1, None] + inside * gaps[:, None]).ravel()
        widths = span * np.array([0.001, 0.004, 0.012, 0.03, 0.07])
        prior = np.log(np.repeat(gaps, per) / per / span / len(widths))
        return cls(np.tile(places, len(widths)), np.repeat(widths, len(places)), np.tile(prior, len(widths)))

    def at(self, x: Array) -> Array:
        return 1 / (1 + np.exp(-np.clip((x[:, None] - self.place) / self.width, -50, 50)))


def draw_curves(
    x: Array,
    y: Array,
    noises: Sequence[Array],
    grid: Array,
    draws: int,
    rng: np.random.Generator,
    scores: Array | None = None,
) -> Array:
    """Curves on the grid, (draws, grid), from all processes as likely as the values make them.

    A draw is a curve f of the process, and what is expected of the rest y - f(x) - e with errors e drawn beside it
    (Matheron's rule): so the errors of a draw are known, and those of other curves can be drawn with them.

    Args:
        x: Where the values lie, increasing, (points,).
        y: The values, (points,).
        noises: Covariances of their errors, (points, points), as likely one as the other; one where it is known.
        grid: Where the curves are wanted, increasing, (grid,); the points of x are among them.
        draws: How many curves.
        rng: Of the draws.
        scores: What each draw's errors are in units of their covariance, (draws, points), instead of drawn ones.
    """
    level, y = y.mean(), y - y.mean()
    shapes = _Steps.over(x)
    processes = list(_processes(x, y, noises, shapes))
    evidence = np.stack([process.evidence for process in processes])
    weight = np.exp(TEMPER * (evidence - evidence.max()))
    counts = rng.multinomial(draws, (weight / weight.sum()).ravel()).reshape(weight.shape)
    on_grid = shapes.at(grid)
    scores = rng.standard_normal((draws, len(x))) if scores is None else scores
    places, drawn = rng.permutation(draws), np.empty((draws, len(grid)))
    for process, count in zip(processes, counts, strict=True):
        if not count.any():
            continue
        chosen = np.repeat(np.arange(len(count)), count) - 1  # -1: no step
        mine, places = places[: len(chosen)], places[len(chosen) :]
        steps = np.where(chosen < 0, 0, on_grid[:, chosen])
        drawn[mine] = _curves_given(process, x, y, scores[mine], grid, chosen, steps, rng).T
    return drawn + level


def _curves_given(
    process: "_Process",
    x: Array,
    y: Array,
    scores: Array,
    grid: Array,
    chosen: NDArray[np.intp],
    steps: Array,
    rng: np.random.Generator,
) -> Array:
    """Curves of one process on the grid, (grid, draws), each with the chosen step (-1: none), on the grid `steps`."""
    jitter = 1e-7 * (process.kernel.level / 10) ** 2 * np.eye(len(grid))
    to_itself = process.kernel(np.abs(grid[:, None] - grid)) + jitter
    curves = np.linalg.cholesky(to_itself) @ rng.standard_normal((len(grid), len(chosen)))
    curves += steps * process.step_height * rng.standard_normal(len(chosen))
    errors = _root(process.noise) @ scores.T
    rest = solve_triangular(process.whole, y[:, None] - curves[np.searchsorted(grid, x)] - errors, lower=True)
    ramps = np.where(chosen < 0, 0, process.ramps[:, chosen])
    height = (ramps * rest).sum(0) / process.precision[chosen]
    seen = solve_triangular(process.whole, process.kernel(np.abs(grid[:, None] - x)).T, lower=True)
    return curves + seen.T @ (rest - ramps * height) + steps * height


def _root(covariance: Array) -> Array:
    """The symmetric root: of what goes together in two curves, as much as can be does so in their errors."""
    size, directions = np.linalg.eigh(covariance)
    return directions * np.sqrt(np.maximum(size, 0)) @ directions.T


def _processes(x: Array, y: Array, noises: Sequence[Array], shapes: _Steps) -> Iterator[_Process]:
    span, distance, steps = x[-1] - x[0], np.abs(x[:, None] - x), shapes.at(x)
    known = len(noises) == 1
    lengths = np.geomspace(span / (2 * len(x)), 2 * span, 7 if known else 5)
    heights = (0.02, 0.06, 0.15, 0.4, 1.0, 2.5) if known else (0.02, 0.15, 0.4, 1.0)
    for noise in noises:
        scale = max(float(np.ptp(y)), float(np.sqrt(np.diag(noise).mean())))
        noise = noise + 1e-10 * scale**2 * np.eye(len(x))
        for length, height, rough in itertools.product(lengths, heights, (True, False)):
            kernel = _Kernel(bool(rough), float(length), height * scale, 10 * scale)
            yield _process(kernel, kernel(distance), noise, y, steps, shapes.log_prior, scale)


def _process(
    kernel: _Kernel, covariance: Array, noise: Array, y: Array, steps: Array, log_prior: Array, step_height: float
) -> _Process:
    whole = np.linalg.cholesky(covariance + noise)
    rest = solve_triangular(whole, y, lower=True)
    ramps = solve_triangular(whole, steps, lower=True)
    precision = step_height**-2 + (ramps**2).sum(0)
    slope = ramps.T @ rest
    alone = -0.5 * rest @ rest - np.log(np.diag(whole)).sum()
    with_step = alone + 0.5 * slope**2 / precision - 0.5 * np.log(precision * step_height**2) + log_prior
    evidence = np.append(alone, with_step)  # a step or none: as likely
    return _Process(kernel, noise, whole, ramps, step_height, precision, evidence)
