"""Curves drawn given noisy values of one: Gaussian processes of many lengths and heights, with and without a step.

A process alone is smooth everywhere alike; what emerges in training is flat, turns within a few checkpoints, and is
flat again, which one sigmoid step beside it covers.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import solve_triangular

Array = NDArray[np.floating[Any]]
RARE = 1e-3  # share of the evidence below which nothing counts in a mean over resamples
TEMPER = 0.9  # power of the evidence: no process is quite a training curve, and sure of one, intervals are too narrow


@dataclass(frozen=True)
class _Process:
    """A Gaussian process given the values, alone and with one sigmoid step added.

    `whole` (checkpoints, checkpoints) is the lower triangle of the covariance of the values, `rest` what of the values
    it leaves, and `ramps` (checkpoints, steps) the same of each step's shape; `height` and `precision` (steps,) are the
    posterior of a step's height, `evidence` (1 + steps,) the log-evidence without and with each.
    """

    kernel: "_Kernel"
    whole: Array
    rest: Array
    ramps: Array
    height: Array
    precision: Array
    evidence: Array
    step_height: float

    def evidence_of(self, values: Array, steps: NDArray[np.intp], log_prior: Array) -> Array:
        """Of other values (checkpoints, sets), without and with each of some steps, (1 + steps, sets)."""
        rest = solve_triangular(self.whole, values, lower=True)
        precision = self.precision[steps, None]
        alone = -0.5 * (rest**2).sum(0) - np.log(np.diag(self.whole)).sum()
        gain = 0.5 * (self.ramps[:, steps].T @ rest) ** 2 / precision
        with_step = alone + gain - 0.5 * np.log(precision * self.step_height**2) + log_prior[steps, None]
        return np.concatenate([alone[None], with_step])


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
    shapes = _Steps.over(x)
    processes = list(_processes(x, y, noises, shapes))
    evidence = np.stack([process.evidence for process in processes])
    weight = np.exp(TEMPER * (evidence - evidence.max()))
    counts = rng.multinomial(draws, (weight / weight.sum()).ravel()).reshape(weight.shape)
    on_grid, parts = shapes.at(grid), []
    to_values, to_itself = np.abs(grid[:, None] - x), np.abs(grid[:, None] - grid)
    for process, count in zip(processes, counts, strict=True):
        if not count.any():
            continue
        seen = solve_triangular(process.whole, process.kernel(to_values).T, lower=True)
        left = process.kernel(to_itself) - seen.T @ seen
        jitter = 1e-7 * (process.kernel.level / 10) ** 2 * np.eye(len(grid))
        chosen = np.repeat(np.arange(len(count)), count) - 1  # -1: no step
        height = process.height[chosen] + rng.standard_normal(len(chosen)) / np.sqrt(process.precision[chosen])
        height[chosen < 0] = 0
        drawn = np.linalg.cholesky(left + jitter) @ rng.standard_normal((len(grid), len(chosen)))
        drawn += seen.T @ (process.rest[:, None] - process.ramps[:, chosen] * height) + on_grid[:, chosen] * height
        parts.append(drawn.T)
    return np.concatenate(parts) + level


def mean_curves(x: Array, values: Array, noise: Array, grid: Array) -> Array:
    """The mean of the curves that `draw_curves` draws from, for each of several sets of values, (sets, grid).

    The sets (sets, points) are a bootstrap's: processes and steps that the mean of all makes unlikely are left out.
    """
    level = values.mean(1, keepdims=True)
    values, shapes = (values - level).T, _Steps.over(x)
    processes = list(_processes(x, values.mean(1), [noise], shapes))
    evidence = np.stack([process.evidence for process in processes])
    share = np.exp(TEMPER * (evidence - evidence.max()))
    share /= share.sum()
    kept, steps = share.sum(1) > RARE, np.flatnonzero(share[:, 1:].sum(0) > RARE)
    likely = [process for process, is_kept in zip(processes, kept, strict=True) if is_kept]
    evidence = np.stack([process.evidence_of(values, steps, shapes.log_prior) for process in likely])
    weight = np.exp(TEMPER * (evidence - evidence.max((0, 1))))
    weight /= weight.sum((0, 1))
    curves, heights = np.zeros((len(grid), values.shape[1])), np.zeros((len(steps), values.shape[1]))
    for process, of_process in zip(likely, weight, strict=True):
        rest = solve_triangular(process.whole, values, lower=True)
        ramps = process.ramps[:, steps]
        height = of_process[1:] * (ramps.T @ rest) / process.precision[steps, None]
        seen = solve_triangular(process.whole, process.kernel(np.abs(grid[:, None] - x)).T, lower=True)
        curves += seen.T @ (rest * of_process.sum(0) - ramps @ height)
        heights += height
    return (curves + shapes.at(grid)[:, steps] @ heights).T + level


def _processes(x: Array, y: Array, noises: Sequence[Array], shapes: _Steps) -> Iterator[_Process]:
    span, distance, steps = x[-1] - x[0], np.abs(x[:, None] - x), shapes.at(x)
    one_noise = len(noises) == 1
    lengths = np.geomspace(span / (2 * len(x)), 2 * span, 7 if one_noise else 5)
    heights = (0.02, 0.06, 0.15, 0.4, 1.0, 2.5) if one_noise else (0.02, 0.15, 0.4, 1.0)
    for noise in noises:
        scale = max(float(np.ptp(y)), float(np.sqrt(np.diag(noise).mean())))
        noise = noise + 1e-10 * scale**2 * np.eye(len(x))
        for length, height, rough in itertools.product(lengths, heights, (True, False)):
            kernel = _Kernel(bool(rough), float(length), height * scale, 10 * scale)
            yield _process(kernel, kernel(distance) + noise, y, steps, shapes.log_prior, scale)


def _process(
    kernel: _Kernel, covariance: Array, y: Array, steps: Array, log_prior: Array, step_height: float
) -> _Process:
    whole = np.linalg.cholesky(covariance)
    rest = solve_triangular(whole, y, lower=True)
    ramps = solve_triangular(whole, steps, lower=True)
    precision = step_height**-2 + (ramps**2).sum(0)
    process = _Process(kernel, whole, rest, ramps, ramps.T @ rest / precision, precision, rest, step_height)
    evidence = process.evidence_of(y[:, None], np.arange(len(log_prior)), log_prior)[:, 0]  # a step or none: as likely
    return replace(process, evidence=evidence)
