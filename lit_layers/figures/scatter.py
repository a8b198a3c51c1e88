"""Points with names: two columns of models against each other, and the layers that could be enough."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from lit_layers.figures.axes import Axis
from lit_layers.figures.chart import Bar, Chart, Panels, Series
from lit_layers.figures.theme import ACCENT, COLORS, DEPTH, MUTED, colors_of, rounded
from lit_layers.functional.correlation import UndefinedError, fit_line, line_band

_LISTED = 7  # groups that a legend names
_PAD = 0.07  # of the range, around the points
_LINE_POINTS = 60
# Where a label may stand, in steps of its half width and its height; the first that is free is taken.
_SIDES = ((0, 1), (0, -1), (1, 0), (-1, 0), (1, 1), (1, -1), (-1, 1), (-1, -1))
_PICK = "#c2410c"
_NUMBERED = 13  # layers at most of which each has its number beside it


@dataclass(frozen=True, kw_only=True)
class Scatter:
    """What a scatter plot shows.

    `groups` colours the points: along a scale where all are numbers, else one colour a group, or all alike where there
    are more groups than colours. `hover` are the lines that touching a point shows below its name. A `path` joins the
    points in their order, in place of the least-squares line: points of one model's layers are no independent rows.
    """

    x: Sequence[float]
    y: Sequence[float]
    names: Sequence[str]
    x_title: str
    y_title: str
    title: str = ""
    groups: Sequence[Any] | None = None
    group_title: str = ""
    hover: Sequence[Sequence[str]] = field(default_factory=list)
    path: bool = False

    def kinds(self) -> list[Any]:
        """The groups that have a colour of their own, in order."""
        kinds = dict.fromkeys(group for group in self.groups or () if group is not None)
        if all(map(_is_number, kinds)):
            return sorted(kinds)
        return sorted(kinds, key=str) if len(kinds) <= len(COLORS) else []

    def is_scaled(self) -> bool:
        """Whether the groups are numbers, which lie on a scale of colours."""
        kinds = self.kinds()
        return len(kinds) > 1 and all(_is_number(kind) for kind in kinds)

    def colors(self) -> list[str]:
        """The colour of each point."""
        kinds = self.kinds()
        if not kinds:
            return [ACCENT] * len(self.x)
        own = colors_of(DEPTH, len(kinds)) if self.is_scaled() else COLORS
        return [MUTED if group is None else own[kinds.index(group)] for group in self.groups or ()]

    def limits(self) -> tuple[tuple[float, float], tuple[float, float]]:
        """The range of each axis, with room for labels."""
        return _padded(self.x), _padded(self.y)

    def line(self) -> tuple[list[float], list[float], list[float], list[float]] | None:
        """The least-squares line over the axis, with the 95% band of the mean: x, y, low, high; None without one."""
        if self.path:
            return None
        try:
            fitted = fit_line(self.x, self.y)
        except UndefinedError:
            return None
        at = np.linspace(*self.limits()[0], _LINE_POINTS)
        low, high = line_band(fitted, at)
        return at.tolist(), (fitted.intercept + fitted.slope * at).tolist(), low.tolist(), high.tolist()


def scatter_plot(content: Scatter, *, width: int = 660, height: int = 440, named: bool = True) -> Chart:
    """Returns the chart; as many names as have room beside their points at this size, others on touch."""
    places = label_places(content, width - 80, height - 110, size=10.5) if named else [None] * len(content.x)
    series = []
    if (line := content.line()) is not None:
        at, middle, low, high = (rounded(side, 6) for side in line)
        look = {"name": "Least squares", "color": ACCENT, "width": 1.8, "hover": False}
        series.append(Series(x=at, y=middle, low=low, high=high, **look))
    if content.path:
        series.append(Series(x=content.x, y=content.y, name="Path", color="#c4ccd4", width=1.4, hover=False))
    colors, kinds = content.colors(), content.kinds()
    groups = list(content.groups) if kinds and content.groups is not None else [None] * len(content.x)
    listed = 1 < len(kinds) <= _LISTED
    for kind in [*kinds, None]:
        own = [index for index, group in enumerate(groups) if group == kind]
        if own:
            series.append(_points(content, own, places, colors[own[0]], kind, listed))
    bar = None
    if len(kinds) > _LISTED and content.is_scaled():
        shown = sorted({0, (len(kinds) - 1) // 2, len(kinds) - 1})
        texts = {n: f"{kinds[n]:,.4g}" if kinds[n] < 1e4 else f"{kinds[n]:g}" for n in shown}
        bar = Bar(title=content.group_title, stops=DEPTH, labels=texts)
    xlim, ylim = content.limits()
    return Chart(
        title=content.title,
        x=Axis(title=content.x_title, ends=xlim),
        y=Axis(title=content.y_title, ends=ylim),
        series=series,
        bar=bar,
        legend_title=content.group_title if listed else "",
        height=height,
    )


def _points(
    content: Scatter, own: Sequence[int], places: Sequence[tuple[int, int] | None], color: str, kind: Any, listed: bool
) -> Series:
    told = ["\n".join([content.names[n], *(content.hover[n] if content.hover else [])]) for n in own]
    return Series(
        x=[content.x[n] for n in own],
        y=[content.y[n] for n in own],
        name="none" if kind is None else f"{kind:g}" if isinstance(kind, float) else str(kind),
        color=color,
        mark="circle",
        size=9,
        texts=told,
        tells_texts=True,
        labels=[content.names[n] if places[n] else "" for n in own],
        sides=[places[n] or (0, 1) for n in own],
        legend=listed,
    )


def label_places(content: Scatter, width: float, height: float, *, size: float) -> list[tuple[int, int] | None]:
    """Where each name may stand in a plot of so many pixels without touching a point, a name or the edge; else None.

    Off the line where that can be. Crowded points choose first: the others have room in any case.
    """
    (left, right), (low, high) = content.limits()

    def pixels(xs: Sequence[float], ys: Sequence[float]) -> list[tuple[float, float]]:
        across, up = width / (right - left), height / (high - low)
        return [((x - left) * across, (y - low) * up) for x, y in zip(xs, ys, strict=True)]

    at = pixels(content.x, content.y)
    line = content.line()
    on_line = [(x, y, x, y) for x, y in pixels(line[0], line[1])] if line is not None else []
    crowd = [sum(math.dist(one, other) < 5 * size for other in at) for one in at]
    dots = [(x - 5, y - 5, x + 5, y + 5) for x, y in at]
    taken: list[tuple[float, float, float, float]] = []
    places: list[tuple[int, int] | None] = [None] * len(at)
    for index in sorted(range(len(at)), key=lambda n: -crowd[n]):
        x, y = at[index]
        half = 0.29 * size * len(content.names[index]) + 1
        others = [*taken, *(dot for number, dot in enumerate(dots) if number != index)]
        free = {}
        for across, up in _SIDES:
            gap = 5 if across and up else 7
            center = x + across * (half + gap), y + up * (0.62 * size + gap)
            box = (center[0] - half, center[1] - 0.62 * size, center[0] + half, center[1] + 0.62 * size)
            inside = box[0] >= 0 and box[1] >= 0 and box[2] <= width and box[3] <= height
            if inside and not any(_overlap(box, other) for other in others):
                free[across, up] = box
        if free:
            clear = (side for side, box in free.items() if not any(_overlap(box, point) for point in on_line))
            places[index] = next(clear, next(iter(free)))
            taken.append(free[places[index]])
    return places


def _overlap(one: tuple[float, ...], other: tuple[float, ...]) -> bool:
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]


def _padded(values: Sequence[float]) -> tuple[float, float]:
    low, high = min(values), max(values)
    room = _PAD * (high - low) or abs(low) * _PAD or 1.0
    return low - room, high + room


def _is_number(group: Any) -> bool:
    return isinstance(group, int | float) and not isinstance(group, bool)


# ------------------------------------------------------------------------------------------------ which layer is enough


@dataclass(frozen=True, kw_only=True)
class LayerScores:
    """What is drawn: per layer a score with its interval, and seconds where they were measured."""

    title: str
    score: str  # name and part, such as "validation accuracy"
    values: Mapping[int, tuple[float, float, float]]  # layer -> value, low, high
    chosen: int
    baseline: float
    baseline_name: str
    shares: Mapping[int, float]  # of resamples that choose a layer
    seconds: Mapping[int, float] | None = None
    timed: str = "one input"  # what takes so long


def layer_choice(content: LayerScores) -> Panels:
    """Returns the score of each layer, over depth and, where it was measured, over the time it takes to get there."""
    share = content.shares.get(content.chosen)
    told = f"\u25cb layer {content.chosen}" + ("" if share is None else f", chosen in {share:.0%} of resamples")
    depth = _scores(content, {layer: float(layer) for layer in content.values}, told, Axis(title="layer", whole=True))
    charts = [depth]
    if content.seconds is not None:
        places = {layer: 1e3 * seconds for layer, seconds in content.seconds.items()}
        title = f"milliseconds to the layer, {content.timed}"
        axis = Axis(title=title, ends=(0, 1.06 * max(places.values())))
        charts.append(_scores(content, places, "shaded: 95% interval over the rows", axis, numbered=True))
    return Panels(title=content.title, charts=charts, columns=2, width=400)


def _scores(content: LayerScores, places: Mapping[int, float], title: str, x: Axis, *, numbered: bool = False) -> Chart:
    layers = sorted(content.values)
    value, low, high = (rounded(side) for side in zip(*(content.values[layer] for layer in layers), strict=True))
    shown = layers if len(layers) <= _NUMBERED else [layers[0], content.chosen, layers[-1]]
    labels = [str(layer) if numbered and layer in shown else "" for layer in layers]
    own: dict[str, Any] = {"color": ACCENT, "width": 1.5, "mark": "circle", "labels": labels, "label_color": MUTED}
    at = [places[layer] for layer in layers]
    chosen = {"mark": "ring", "size": 14, "color": _PICK}
    name = content.baseline_name
    line = {
        "name": name,
        "dash": "dash",
        "width": 1.0,
        "labels": [name, ""],
        "sides": [(1, -1)] * 2,
        "label_color": MUTED,
    }
    return Chart(
        title=title,
        x=x,
        y=Axis(title=content.score),
        series=[
            Series(x=at, y=value, low=low, high=high, name=content.score, sides=[(-1, 1)] * len(at), **own),
            Series(x=[min(at), max(at)], y=rounded([content.baseline] * 2), **line),
            Series(x=[places[content.chosen]], y=rounded([content.values[content.chosen][0]]), name="chosen", **chosen),
        ],
        height=380,
    )
