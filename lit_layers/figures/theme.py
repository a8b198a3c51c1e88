"""The look of all figures: dark text on white, a thin grid, colours for colour-blind readers, and axes."""

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lit_layers.figures.labels import count

INK, MUTED, GRID, EDGE = "#1c2530", "#5b6774", "#e6eaee", "#9aa5b0"
ACCENT, MISSING = "#1f5fa8", "#d5dae0"
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"
# Colours of Okabe and Ito; light ones are darkened to be readable on white.
COLORS = ["#0b62a4", "#c4510a", "#00805c", "#a83279", "#8a6100", "#3b3f99", "#4d5761"]
# Like viridis and plasma, without their light ends, which are invisible on white.
DEPTH = ["#440154", "#433d84", "#2f6b8e", "#1f958b", "#3fae5a", "#86bc25"]
TIME = ["#0d0887", "#5b01a5", "#9a179b", "#cb4678", "#e8704a", "#f0921f"]
DIVERGING = ["#a8480a", "#e3a46f", "#f7f7f5", "#7aaed6", "#0b4f8a"]
DASHES = {"": [1, 0], "dash": [6, 4], "dot": [2, 3], "dashdot": [7, 3, 2, 3]}
DASHED = ("dash", "dot", "dashdot")
SYMBOLS = ("circle", "square", "diamond", "triangle-up")  # when the colours repeat, the next symbol is used


# SVG paths of symbols that Vega lacks.
MARKS = {"line-ew": "M-1,-.14L1,-.14L1,.14L-1,.14Z"}

_AXIS = {"gridColor": GRID, "domainColor": EDGE, "tickColor": EDGE, "labelColor": INK, "titleColor": MUTED}
_AXIS |= {"titleFontWeight": "normal", "labelFontSize": 11, "titleFontSize": 12, "labelFlush": False}
CONFIG: dict[str, Any] = {
    "font": FONT,
    "background": "white",
    "aria": False,
    "view": {"stroke": None},
    "axis": _AXIS,
    "axisY": {"domain": False, "ticks": False, "labelPadding": 6, "titlePadding": 8},
    "axisX": {"grid": True, "tickSize": 4},
    "title": {"anchor": "start", "color": INK, "fontSize": 13, "fontWeight": 600, "offset": 8},
    "legend": {"labelColor": INK, "titleColor": MUTED, "titleFontWeight": "normal", "labelFontSize": 11}
    | {"titleFontSize": 11, "labelLimit": 320, "symbolStrokeWidth": 2, "gradientStrokeWidth": 0}
    | {"layout": {"top": {"anchor": "start", "direction": "horizontal"}, "bottom": {"anchor": "start"}}},
    "line": {"strokeCap": "round", "strokeJoin": "round"},
}


def colors_of(stops: Sequence[str], count: int) -> list[str]:
    """Return `count` colours along a colour scale, including both ends."""
    colors = []
    for index in range(count):
        position = index / max(count - 1, 1) * (len(stops) - 1)
        left = min(int(position), len(stops) - 2)
        pairs = zip(_rgb(stops[left]), _rgb(stops[left + 1]), strict=True)
        colors.append("#" + "".join(f"{round(a + (position - left) * (b - a)):02x}" for a, b in pairs))
    return colors


def reference_look(name: str, index: int) -> tuple[str, str]:
    """Return the colour and the dash of a reference line. The line of a null is grey and solid, others are dashed."""
    return (EDGE, "") if name.startswith("null_") else (MUTED, DASHED[index % len(DASHED)])


def rounded(numbers: Iterable[float | None], digits: int = 5) -> list[float | None]:
    """Return plain floats with this many significant digits, None for NaN and infinity; this keeps pages small."""
    return [float(f"{x:.{digits}g}") if x is not None and math.isfinite(x) else None for x in numbers]


def spread(numbers: Sequence[Any], most: int) -> list[Any]:
    """Return at most `most` of the numbers, evenly spaced, including the first and the last."""
    if len(numbers) <= most:
        return list(numbers)
    return [numbers[round(index * (len(numbers) - 1) / (most - 1))] for index in range(most)]


def _rgb(color: str) -> list[int]:
    return [int(color[at : at + 2], 16) for at in (1, 3, 5)]


# ------------------------------------------------------------------------------------------------ axes


@dataclass(frozen=True, kw_only=True)
class Axis:
    """Title, tick labels and range of an axis. `labels` maps positions to texts; None lets Vega choose the ticks."""

    title: str = ""
    labels: Mapping[Any, str] | None = None
    ends: tuple[float, float] | None = None
    log: bool = False
    whole: bool = False  # ticks only at whole numbers
    reverse: bool = False
    grid: bool = True
    keys: Sequence[Any] | None = None  # values of a discrete axis, one per heat map cell, in order; None: continuous
    divider: float | None = None  # position of the gap between step 0 and the trained checkpoints


def layer_axis(number: str = "layer") -> Axis:
    title = {"layer": "Layer", "block": "Block"}.get(number, "Distance between the blocks")
    return Axis(title=title, whole=True)


@dataclass(frozen=True)
class Training:
    """The steps of a figure's checkpoints, in order, and their numbers of training tokens if known."""

    steps: list[int]
    tokens: Mapping[int, int | None] = field(default_factory=dict)

    def texts(self) -> list[str]:
        """Return a text for each checkpoint: the step and, if known, the number of tokens."""
        tokens = {step: f" · {count(number)} tokens" for step, number in self.tokens.items() if number is not None}
        return [f"step {step:,}{tokens.get(step, '')}" for step in self.steps]

    @property
    def places(self) -> list[float]:
        trained = [log_step(step) for step in self.steps if step > 0]
        gap = 0.13 * (trained[-1] - trained[0]) or 1.0 if trained else 0.0
        return [log_step(step) if step > 0 else round(trained[0] - gap, 5) if trained else 0.0 for step in self.steps]

    @property
    def edges(self) -> list[float]:
        """Edges of heat map cells on the time axis: the midpoints between checkpoints.

        The first and the last checkpoint are in the middle of their cells.
        """
        places = self.places
        if len(places) < 2:
            return [places[0] - 0.5, places[0] + 0.5]
        inner = [round((left + right) / 2, 5) for left, right in itertools.pairwise(places)]
        return [round(2 * places[0] - inner[0], 5), *inner, round(2 * places[-1] - inner[-1], 5)]

    def axis(self, *, cells: bool = False) -> Axis:
        positive, places, edges = [step for step in self.steps if step > 0], self.places, self.edges
        first, last = (places[0], places[-1]) if places else (0.0, 0.0)
        pad, labels, divider = 0.03 * (last - first) or 0.5, log_labels(positive), None
        if len(positive) < len(places):
            room = 0.1 * (last - log_step(positive[0])) if positive else 0.0
            labels = {first: "0"} | {at: text for at, text in labels.items() if at - first > room}
            divider = round((first + log_step(positive[0])) / 2, 5) if positive else None
        ends = (edges[0], edges[-1]) if cells else (round(first - pad, 5), round(last + pad, 5))
        return Axis(title="Optimizer step", labels=labels, ends=ends, divider=divider)


def log_step(value: float) -> float:
    """Return log10(1 + value)."""
    return round(math.log10(1 + value), 5)


def log_labels(values: Sequence[int]) -> dict[float, str]:
    """Return tick labels for some of these steps, by position log10(1 + step), far enough apart for a narrow screen.

    The first and the last step have priority, then powers of two, then numbers with few digits before their zeros.
    """
    places, chosen = [*map(log_step, values)], list[int]()
    distance = (places[-1] - places[0]) / 6.5 if places else 0.0
    digits = lambda n: 0 if n & (n - 1) == 0 else len(str(n).rstrip("0"))  # noqa: E731
    ends = (0, len(values) - 1)
    for index in sorted(range(len(values)), key=lambda i: (i not in ends, digits(values[i]), -i)):
        if all(abs(places[index] - places[other]) >= distance for other in chosen):
            chosen.append(index)
    return {places[index]: count(values[index]) for index in sorted(chosen)}
