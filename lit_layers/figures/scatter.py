"""Points in a plane: paths of tokens, models against each other."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Unpack

import numpy as np
import pandas as pd

from lit_layers.figures import tables
from lit_layers.figures.chart import Chart, Series
from lit_layers.figures.profiles import FRAMES, color_bar
from lit_layers.figures.theme import ACCENT, COLORS, DEPTH, MUTED, Axis, colors_of, rounded, spread
from lit_layers.functional.correlation import UndefinedError, fit_line, line_band
from lit_layers.metrics import look_up

__all__ = ["Scatter", "paths_in_plane", "scatter_plot"]


def paths_in_plane(frame: pd.DataFrame, metric: str = "path", **chosen: Unpack[tables.Chosen]) -> Chart:
    """Return paths (tags `token` and `axis`, 1 across and 2 up) as lines with a dot a layer, one line a token.

    Dots are coloured by layer; a slider goes over the checkpoints. Each has axes of its own, and in the corner the
    shares of variance along them. `tags` chooses a prompt (`{"prompt": 2}`); without it the first is drawn.

    Raises:
        ValueError: where the metric has no paths.
    """
    points = [point for point in tables.select(frame, metric, **chosen) if {"axis", "token"} <= point.tags.keys()]
    if not points:
        raise ValueError(f"metric {metric!r} has no paths of tokens in a plane")
    variant = tables.variants_of(points)[0]
    points = tables.matching(points, variant)
    shares = _shares(frame, metric, variant, {**chosen, "tags": None})
    values = {(p.step, p.tags["token"], p.layer, p.tags["axis"]): p.value for p in points}
    tokens = sorted({point.tags["token"] for point in points})
    layers = sorted({point.layer for point in points if point.layer is not None})
    steps = spread(tables.steps_of(points), FRAMES)
    keys = [(n, step, token) for n, step in enumerate(steps) for token in tokens]
    # a gap behind each path, so that one series holds them all
    across, up = (
        rounded((v for _, step, t in keys for v in [*(values.get((step, t, n, axis)) for n in layers), None]), 4)
        for axis in (1, 2)
    )
    look = {
        "frame": [number for number, _, _ in keys for _ in range(len(layers) + 1)],
        "colors": [*colors_of(DEPTH, len(layers)), None] * len(keys),
        "texts": [text for _, _, t in keys for text in [*(f"token {t}, layer {n}" for n in layers), ""]],
    }
    paths = Series(x=across, y=up, color="rgba(91,103,116,0.35)", width=1.0, mark="circle", tells_texts=True, **look)
    return Chart(
        title=", ".join(filter(None, [tables.title_of(metric, {}), tables.variant_text(variant)])),
        x=Axis(title="Axis 1"),
        y=Axis(title="Axis 2"),
        series=[paths],
        bar=color_bar("Layer", DEPTH, layers),
        frames=steps,
        notes=_notes(shares, steps),
        height=450,
    )


def _shares(
    frame: pd.DataFrame, metric: str, variant: Mapping[str, Any], chosen: tables.Chosen
) -> dict[tuple[int, int], float]:
    """The share of variance along each axis, by step and axis, where it is recorded."""
    table: Any = frame
    name = look_up(metric).baseline
    if not (table["metric"] == name).any():
        return {}
    points: list[tables.Point] = tables.matching(tables.select(frame, name, **chosen), variant)
    by_place = tables.grouped(points, lambda point: (point.step, point.tags["axis"]))
    return {place: part[0].value for place, part in by_place.items()}


def _notes(shares: Mapping[tuple[int, int], float], steps: Sequence[int]) -> list[str]:
    """Return for each checkpoint how much of the variance lies along the axes."""
    if not shares:
        return []
    by_step = [[(axis, shares.get((step, axis))) for axis in (1, 2)] for step in steps]
    return [", ".join(f"axis {axis}: {share:.0%}" for axis, share in each if share is not None) for each in by_step]


# ------------------------------------------------------------------------------------------------ points with names

_LISTED = 7  # groups that a legend names
_PAD = 0.07  # of the range, around the points
_LINE_POINTS = 60
# Where a label may stand, in steps of its half width and its height; the first that is free is taken.
_SIDES = ((0, 1), (0, -1), (1, 0), (-1, 0), (1, 1), (1, -1), (-1, 1), (-1, -1))


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
        """Return whether the groups are numbers, which lie on a scale of colours."""
        kinds = self.kinds()
        return len(kinds) > 1 and all(_is_number(kind) for kind in kinds)

    def colors(self) -> list[str]:
        """The colour of each point."""
        kinds = self.kinds()
        if not kinds:
            return [ACCENT] * len(self.x)
        palette = colors_of(DEPTH, len(kinds)) if self.is_scaled() else COLORS
        return [MUTED if group is None else palette[kinds.index(group)] for group in self.groups or ()]

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


def scatter_plot(content: Scatter, *, width: int = 660, height: int = 440) -> Chart:
    """Return the chart; as many names as have room beside their points at this size, others on touch."""
    places = label_places(content, width - 80, height - 110, size=10.5)
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
        members = [index for index, group in enumerate(groups) if group == kind]
        if members:
            texts = ["\n".join([content.names[n], *(content.hover[n] if content.hover else [])]) for n in members]
            marks = Series(
                x=[content.x[n] for n in members],
                y=[content.y[n] for n in members],
                name="none" if kind is None else f"{kind:g}" if isinstance(kind, float) else str(kind),
                color=colors[members[0]],
                mark="circle",
                size=9,
                texts=texts,
                tells_texts=True,
                labels=[content.names[n] if places[n] else "" for n in members],
                sides=[places[n] or (0, 1) for n in members],
                legend=listed,
            )
            series.append(marks)
    bar = None
    if len(kinds) > _LISTED and content.is_scaled():
        texts = [f"{kind:,.4g}" if kind < 1e4 else f"{kind:g}" for kind in kinds]
        bar = color_bar(content.group_title, DEPTH, range(len(kinds)), texts)
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


def label_places(content: Scatter, width: float, height: float, *, size: float) -> list[tuple[int, int] | None]:
    """Return where each name may stand in a plot of so many pixels without touching a point, a name or the edge.

    None stands for a name without such a place. Crowded points choose first: the others have room in any case.
    """
    (left, right), (low, high) = content.limits()
    at = [
        ((x - left) / (right - left) * width, (y - low) / (high - low) * height)
        for x, y in zip(content.x, content.y, strict=True)
    ]
    crowd = [sum(math.dist(one, other) < 5 * size for other in at) for one in at]
    taken = {index: (x - 5, y - 5, x + 5, y + 5) for index, (x, y) in enumerate(at)}
    places: list[tuple[int, int] | None] = [None] * len(at)
    for index in sorted(range(len(at)), key=lambda n: -crowd[n]):
        half, tall = 0.29 * size * len(content.names[index]) + 1, 0.62 * size
        for across, up in _SIDES:
            gap = 5 if across and up else 7
            x, y = at[index][0] + across * (half + gap), at[index][1] + up * (tall + gap)
            box = (x - half, y - tall, x + half, y + tall)
            inside = box[0] >= 0 and box[1] >= 0 and box[2] <= width and box[3] <= height
            if inside and not any(_overlap(box, other) for n, other in taken.items() if n != index):
                places[index], taken[-1 - index] = (across, up), box
                break
    return places


def _overlap(one: tuple[float, ...], other: tuple[float, ...]) -> bool:
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]


def _padded(values: Sequence[float]) -> tuple[float, float]:
    low, high = min(values), max(values)
    room = _PAD * (high - low) or abs(low) * _PAD or 1.0
    return low - room, high + room


def _is_number(group: Any) -> bool:
    return isinstance(group, int | float) and not isinstance(group, bool)
