"""Two columns of models against each other: a point a model, the least-squares line and its band."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import plotly.graph_objects as go

from lit_layers.functional.correlation import UndefinedError, fit_line, line_band
from lit_layers.plots.labels import escape
from lit_layers.plots.theme import ACCENT, COLORS, DEPTH, INK, MUTED, bar_trace, colors_of, figure, translucent

_LISTED = 7  # groups that a legend names
_PAD = 0.07  # of the range, around the points
_LINE_POINTS = 60
# Where a label may stand: plotly's words, and the same as steps of its half width and its height.
_PLACES = {
    "top center": (0, 1),
    "bottom center": (0, -1),
    "middle right": (1, 0),
    "middle left": (-1, 0),
    "top right": (1, 1),
    "bottom right": (1, -1),
    "top left": (-1, 1),
    "bottom left": (-1, -1),
}


@dataclass(frozen=True, kw_only=True)
class Scatter:
    """What a scatter plot shows, for a page or for a picture.

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
        known = dict.fromkeys(group for group in self.groups or () if group is not None)
        if all(map(_is_number, known)):
            return sorted(known)
        return sorted(known, key=str) if len(known) <= len(COLORS) else []

    def is_scaled(self) -> bool:
        """Whether the groups are numbers, which lie on a scale of colours."""
        kinds = self.kinds()
        return len(kinds) > 1 and all(_is_number(kind) for kind in kinds)

    def colors(self) -> list[str]:
        """The colour of each point."""
        kinds = self.kinds()
        if not kinds:
            return [ACCENT] * len(self.x)
        own = [_hex(color) for color in colors_of(DEPTH, len(kinds))] if self.is_scaled() else COLORS
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


def scatter_plot(content: Scatter, *, width: int = 660, height: int = 440, named: bool = True) -> go.Figure:
    """Returns the figure for a page; as many names as have room beside their points at this size, others on touch."""
    xlim, ylim = content.limits()
    places = label_places(content, width - 80, height - 110, size=10.5) if named else [None] * len(content.x)
    traces = []
    if (line := content.line()) is not None:
        at, middle, low, high = ([float(f"{v:.6g}") for v in side] for side in line)
        band = {"mode": "lines", "line": {"width": 0}, "hoverinfo": "skip", "showlegend": False}
        traces.append({**band, "x": at, "y": low})
        traces.append({**band, "x": at, "y": high, "fill": "tonexty", "fillcolor": translucent(ACCENT, 0.12)})
        look = {"mode": "lines", "line": {"color": ACCENT, "width": 1.8}, "hoverinfo": "skip", "showlegend": False}
        traces.append({**look, "x": at, "y": middle})
    if content.path:
        look = {"mode": "lines", "line": {"color": "#c4ccd4", "width": 1.4}, "hoverinfo": "skip", "showlegend": False}
        traces.append({**look, "x": list(content.x), "y": list(content.y)})
    colors, kinds = content.colors(), content.kinds()
    groups = list(content.groups) if kinds and content.groups is not None else [None] * len(content.x)
    listed = 1 < len(kinds) <= _LISTED
    for kind in [*kinds, None]:
        own = [index for index, group in enumerate(groups) if group == kind]
        if own:
            traces.append(_points(content, own, places, colors[own[0]], kind, listed))
    if len(kinds) > _LISTED and content.is_scaled():
        shown = sorted({0, (len(kinds) - 1) // 2, len(kinds) - 1})
        ticks = {index: f"{kinds[index]:,.4g}" if kinds[index] < 1e4 else f"{kinds[index]:g}" for index in shown}
        bar = bar_trace(escape(content.group_title), DEPTH, ticks)
        bar["marker"]["colorbar"]["x"] = 0.98  # at 1 the last tick's text leaves the figure
        traces.append(bar)
    return figure(
        content.title,
        traces,
        unit=content.y_title,
        xaxis={"title": {"text": escape(content.x_title)}, "range": list(xlim), "nticks": 9},
        yaxis={"range": list(ylim)},
        showlegend=listed,
        height=height,
        legend={"title": {"text": escape(content.group_title) if listed else "", "font": {"size": 11}}},
    )


def _points(
    content: Scatter,
    own: Sequence[int],
    places: Sequence[str | None],
    color: str,
    kind: Any,
    listed: bool,
) -> dict[str, Any]:
    text = "none" if kind is None else f"{kind:g}" if isinstance(kind, float) else str(kind)
    hover = [
        "<br>".join([f"<b>{escape(content.names[n])}</b>", *map(escape, content.hover[n] if content.hover else [])])
        for n in own
    ]
    return {
        "x": [content.x[n] for n in own],
        "y": [content.y[n] for n in own],
        "mode": "markers+text",
        "text": [escape(content.names[n]) if places[n] else "" for n in own],
        "textposition": [places[n] or "top center" for n in own],
        "textfont": {"size": 10.5, "color": INK},
        "customdata": hover,
        "hovertemplate": "%{customdata}<extra></extra>",
        "marker": {
            "color": color,
            "size": 9,
            "line": {"color": "white", "width": 1},
        },
        "cliponaxis": False,
        "name": escape(text),
        "showlegend": listed,
    }


def label_places(content: Scatter, width: float, height: float, *, size: float) -> list[str | None]:
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
    reach = size * 5
    crowd = [sum(math.dist(one, other) < reach for other in at) for one in at]
    dots = [(x - 5, y - 5, x + 5, y + 5) for x, y in at]
    taken: list[tuple[float, float, float, float]] = []
    found: list[str | None] = [None] * len(at)
    for index in sorted(range(len(at)), key=lambda n: -crowd[n]):
        x, y = at[index]
        half = 0.29 * size * len(content.names[index]) + 1
        others = [*taken, *(dot for number, dot in enumerate(dots) if number != index)]
        free = {}
        for name, (across, up) in _PLACES.items():
            gap = 5 if across and up else 7
            center = x + across * (half + gap), y + up * (0.62 * size + gap)
            box = (center[0] - half, center[1] - 0.62 * size, center[0] + half, center[1] + 0.62 * size)
            inside = box[0] >= 0 and box[1] >= 0 and box[2] <= width and box[3] <= height
            if inside and not any(_overlap(box, other) for other in others):
                free[name] = box
        if free:
            clear = (name for name, box in free.items() if not any(_overlap(box, point) for point in on_line))
            found[index] = next(clear, next(iter(free)))
            taken.append(free[found[index]])
    return found


def label_step(place: str) -> tuple[int, int]:
    """Where a label stands from its point: -1, 0 or 1 across and up."""
    return _PLACES[place]


def _overlap(one: tuple[float, ...], other: tuple[float, ...]) -> bool:
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]


def _padded(values: Sequence[float]) -> tuple[float, float]:
    low, high = min(values), max(values)
    room = _PAD * (high - low) or abs(low) * _PAD or 1.0
    return low - room, high + room


def _hex(color: str) -> str:
    """`rgb(68, 1, 84)` as `#440154`: plotly's own form is unknown to matplotlib."""
    return "#" + "".join(f"{round(float(part)):02x}" for part in color.removeprefix("rgb(").rstrip(")").split(","))


def _is_number(group: Any) -> bool:
    return isinstance(group, int | float) and not isinstance(group, bool)
