"""Axes: of training, log(1 + step) or log(1 + tokens) with the untrained model apart on the left, and of values."""

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from lit_layers.figures.labels import count

AxisName = Literal["step", "tokens"]
DEPTH_TITLE = "Depth (100 layer / number of layers)"  # of models that are not equally deep
DECADES = 4  # more tens than these have no room for numbers between them
TITLES = {"step": "Optimizer step", "tokens": "Tokens seen"}


@dataclass(frozen=True, kw_only=True)
class Axis:
    """What stands along a side: its title, labels at places (None: where Vega puts them), and its ends."""

    title: str = ""
    labels: Mapping[Any, str] | None = None
    ends: tuple[float, float] | None = None
    log: bool = False
    whole: bool = False  # ticks at whole numbers alone
    zero: bool = False  # 0 is in sight
    reverse: bool = False
    hidden: bool = False
    grid: bool = True
    keys: Sequence[Any] | None = None  # of cells of equal width, in order
    strong: Sequence[Any] = ()  # keys with bold labels
    divider: float | None = None  # where what stands apart ends


def layer_axis(number: str = "layer", **options: Any) -> Axis:
    title = {"layer": "Layer", "block": "Block"}.get(number, "Distance between the blocks")
    return Axis(title=title, whole=True, **options)


@dataclass(frozen=True)
class Training:
    """The checkpoints of a figure, in order; `tokens` is None where they are not known of every step."""

    steps: list[int]
    tokens: list[int] | None = field(default=None)

    @classmethod
    def of(cls, steps: Iterable[int], tokens_of: Mapping[int, int | None]) -> "Training":
        steps = sorted({*steps})
        tokens = [number for step in steps if (number := tokens_of.get(step)) is not None]
        return cls(steps, tokens if len(tokens) == len(steps) else None)

    @property
    def names(self) -> list[AxisName]:
        """The axes on which they have places."""
        return ["step", "tokens"] if self.tokens is not None else ["step"]

    def values(self, axis: AxisName) -> list[int]:
        """Steps, or tokens.

        Raises:
            ValueError: for the token axis where tokens are not known.
        """
        if axis == "step":
            return self.steps
        if self.tokens is None:
            raise ValueError("the token axis needs the tokens of every step; these records do not have them")
        return self.tokens

    def texts(self) -> list[str]:
        """Of each checkpoint the step and, where known, the tokens."""
        if self.tokens is None:
            return [f"step {step:,}" for step in self.steps]
        return [f"step {step:,} · {count(t)} tokens" for step, t in zip(self.steps, self.tokens, strict=True)]

    def places(self, axis: AxisName) -> list[float]:
        apart = _apart([place(value) for value in self.values(axis) if value > 0])
        return [place(value) if value > 0 else apart for value in self.values(axis)]

    def edges(self, axis: AxisName) -> list[float]:
        """Between the places halfway, at the ends as far beyond as within: of cells around the checkpoints."""
        places = self.places(axis)
        if len(places) < 2:
            return [places[0] - 0.5, places[0] + 0.5]
        inner = [round((left + right) / 2, 5) for left, right in itertools.pairwise(places)]
        return [round(2 * places[0] - inner[0], 5), *inner, round(2 * places[-1] - inner[-1], 5)]

    def axis(self, name: AxisName, *, cells: bool = False) -> Axis:
        values = self.values(name)
        positive = sorted({value for value in values if value > 0})
        has_zero = any(value <= 0 for value in values)
        places = [place(value) for value in positive]
        span = places[-1] - places[0] if places else 0.0
        apart = _apart(places)
        first, last = (apart if has_zero or not places else places[0]), (places[-1] if places else apart)
        pad = 0.03 * (last - first) or 0.5
        labels = _labels(positive, places)
        if has_zero:
            labels = {apart: "0"} | {at: text for at, text in labels.items() if at - apart > 0.1 * span}
        edges = self.edges(name)
        ends = (edges[0], edges[-1]) if cells else (round(first - pad, 5), round(last + pad, 5))
        divider = round((apart + places[0]) / 2, 5) if has_zero and places else None
        return Axis(title=TITLES[name], labels=labels, ends=ends, divider=divider)


def log_axis(axis: Axis, values: Sequence[float]) -> Axis:
    """Returns a log axis with labels at powers of ten, and at numbers between them where there is room."""
    low, high = axis.ends or (min(values, default=1.0), max(values, default=1.0))
    pad = 1.2 if high <= low else 1.0 if axis.ends else (high / low) ** 0.03
    low, high = low / pad, high * pad
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    every = max(1, math.ceil((last - first) / 6))
    factors = (1, 2, 5) if high / low < 200 else (1, 3) if high / low < 10**DECADES else (1,)
    if high / low < 10:
        factors = (1, 2, 3, 5, 7)
    ticks = [factor * 10.0**power for power in range(first, last + 1, every) for factor in factors]
    if high / low < 5:
        step = _round_step((high - low) / 5)
        ticks = [step * number for number in range(math.ceil(low / step), math.floor(high / step) + 1)]
    shown = {float(f"{tick:.6g}"): _plainly(tick) for tick in ticks if low <= tick <= high}
    return replace(axis, labels=shown, ends=(low, high))


def _round_step(least: float) -> float:
    """Returns 1, 2 or 5 times a power of ten, no less than that."""
    power = 10.0 ** math.floor(math.log10(least))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= least * (1 - 1e-9))


def _plainly(number: float) -> str:
    return f"{number:.3g}" if number < 1e-3 or number >= 1e5 else f"{number:,.6g}"


def place(value: float) -> float:
    """Returns log10(1 + value)."""
    return round(math.log10(1 + value), 5)


def _apart(places: Sequence[float]) -> float:
    """Where 0 stands: a gap before the first of the others."""
    return round(places[0] - (0.13 * (places[-1] - places[0]) or 1.0), 5) if places else 0.0


def _labels(values: list[int], places: list[float]) -> dict[float, str]:
    """Of some of the checkpoints, round numbers first, far enough apart for a narrow screen."""
    distance = (places[-1] - places[0]) / 6.5 if places else 0.0
    chosen: list[int] = []
    for index in sorted(range(len(values)), key=lambda i: (i not in (0, len(values) - 1), _roughness(values[i]), -i)):
        if all(abs(places[index] - places[other]) >= distance for other in chosen):
            chosen.append(index)
    return {places[index]: count(values[index]) for index in sorted(chosen)}


def _roughness(value: int) -> int:
    """0 for powers of two, else the digits of a label without its last zeros."""
    return 0 if value & (value - 1) == 0 else len(str(value).rstrip("0"))
