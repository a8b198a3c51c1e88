"""Steps beside a smooth curve: sigmoids and rises with a corner, on a grid of places and widths, and pairs of them."""

import itertools
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.floating[Any]]
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
        """(points, steps)"""
        scaled = (x[:, None] - self.place) / self.width
        for number, shape in enumerate(SHAPES):
            mine = self.shape == number
            scaled[:, mine] = shape(scaled[:, mine])
        return scaled

    def among(self, chosen: NDArray[Any]) -> "Steps":
        fields: list[Any] = [each[chosen] for each in self]
        return Steps(*fields)

    def split(self) -> "Steps":
        """Each into nine, by thirds of its cell."""
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
        """Before any power none, one and two steps are as likely; of two, either may stand first."""
        return self.steps.log_prior[self.places].sum(0) + np.log(2) * self.are_two

    def among(self, chosen: NDArray[Any]) -> "Pairs":
        places, used = self.places[:, chosen], np.zeros(len(self.steps.shape), dtype=bool)
        used[places] = True
        return Pairs(self.steps.among(used), (used.cumsum() - 1)[places])

    def and_of(self, other: "Pairs") -> "Pairs":
        places = np.concatenate([self.places, other.places + len(self.steps.shape)], 1)
        return Pairs(_joined(self.steps, other.steps), places)

    def split(self, side: int) -> "Pairs":
        """Each into nine by one of its steps, which then stands second."""
        parts = self.steps.among(self.places[side]).split()
        kept = np.tile(self.places[1 - side], 9)
        return Pairs(_joined(self.steps, parts), np.stack([kept, len(self.steps.shape) + np.arange(len(kept))]))

    def likeliest(self, evidence: Array) -> NDArray[np.intp]:
        """Which are split: `SPLIT` of each shape of the second step."""
        shape = self.steps.shape[self.places[1]]
        of_each = [np.flatnonzero(shape == number) for number in range(1, len(SHAPES))]
        return np.concatenate([mine[likeliest(evidence[mine], SPLIT)] for mine in of_each])


def likeliest(evidence: Array, count: int) -> NDArray[np.intp]:
    """The numbers of the so many of most evidence, the best last; those that differ by rounding stay as they stand.

    Narrow steps between the same two checkpoints are one to the values: which of them is taken hangs on no machine.
    """
    rounded, count = np.round(evidence, TIES), min(count, len(evidence))
    near = np.flatnonzero(rounded >= np.partition(rounded, -count)[-count])
    return near[np.argsort(rounded[near], kind="stable")[-count:]]
