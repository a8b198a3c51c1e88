"""Points in a plane: paths of tokens, and scatter plots of named points."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Unpack

import numpy as np
import pandas as pd

from lit_layers.figures import tables
from lit_layers.figures.chart import Chart, Series
from lit_layers.figures.profiles import FRAMES, color_bar
from lit_layers.figures.theme import ACCENT, COLORS, DEPTH, MUTED, Axis, colors_of, rounded, spread

__all__ = ["Scatter", "paths_in_plane", "scatter_plot"]


def paths_in_plane(frame: pd.DataFrame, metric: str = "path", **chosen: Unpack[tables.Chosen]) -> Chart:
    """Return the paths of tokens through the layers, as lines in a plane with one dot per layer.

    The tag `token` names the token, and the tag `axis` the coordinate: 1 is horizontal, 2 is vertical. Dots are
    coloured by layer, and a slider selects the checkpoint. Each checkpoint has its own two axes. `tags` selects a
    prompt (`{"prompt": 2}`); the default is the first one.

    Raises:
        ValueError: the metric has no paths.
    """
    points = [point for point in tables.select(frame, metric, **chosen) if {"axis", "token"} <= point.tags.keys()]
    if not points:
        raise ValueError(f"metric {metric!r} has no paths of tokens in a plane")
    variant = tables.variants_of(points)[0]
    points = tables.matching(points, variant)
    values = {(p.step, p.tags["token"], p.layer, p.tags["axis"]): p.value for p in points}
    tokens = sorted({point.tags["token"] for point in points})
    layers = sorted({point.layer for point in points if point.layer is not None})
    steps = spread(tables.steps_of(points), FRAMES)
    keys = [(n, step, token) for n, step in enumerate(steps) for token in tokens]
    # None after each path breaks the line, so that one series holds all paths.
    across, up = (
        rounded((v for _, step, t in keys for v in [*(values.get((step, t, n, axis)) for n in layers), None]), 4)
        for axis in (1, 2)
    )
    look = {
        "frame": [number for number, _, _ in keys for _ in range(len(layers) + 1)],
        "colors": [*colors_of(DEPTH, len(layers)), None] * len(keys),
        "texts": [text for _, _, t in keys for text in [*(f"token {t}, layer {n}" for n in layers), ""]],
    }
    paths = Series(x=across, y=up, color="rgba(91,103,116,0.35)", width=1.0, mark="circle", texts_only=True, **look)
    return Chart(
        title=", ".join(filter(None, [tables.title_of(metric, {}), tables.variant_text(variant)])),
        x=Axis(title="Axis 1"),
        y=Axis(title="Axis 2"),
        series=[paths],
        bar=color_bar("Layer", DEPTH, layers),
        frames=steps,
        height=450,
    )


# ------------------------------------------------------------------------------------------------ points with names


@dataclass(frozen=True, kw_only=True)
class Scatter:
    """Content of a scatter plot.

    `groups` colours the points: along a scale if all groups are numbers, otherwise one colour per group. All points
    have one colour if there are more groups than colours. `hover` are tooltip lines below the name. `path` joins
    the points in order and omits the least-squares line: the layers of one model are not independent observations.
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
        """Return the distinct groups in order, or an empty list if the points are not coloured by group."""
        kinds = dict.fromkeys(group for group in self.groups or () if group is not None)
        if all(map(_is_number, kinds)):
            return sorted(kinds)
        return sorted(kinds, key=str) if len(kinds) <= len(COLORS) else []

    @property
    def is_scaled(self) -> bool:
        """Whether the groups are coloured along a scale, because their labels are two or more numbers."""
        kinds = self.kinds()
        return len(kinds) > 1 and all(map(_is_number, kinds))

    def colors(self) -> list[str]:
        if not (kinds := self.kinds()):
            return [ACCENT] * len(self.x)
        palette = colors_of(DEPTH, len(kinds)) if self.is_scaled else COLORS
        return [MUTED if group is None else palette[kinds.index(group)] for group in self.groups or ()]

    def limits(self) -> tuple[tuple[float, float], tuple[float, float]]:
        """Return the range of each axis, with margins for labels."""
        return _padded(self.x), _padded(self.y)

    def line(self) -> tuple[list[float], list[float], list[float], list[float]] | None:
        """Return the least-squares line and its 95% band as (x, y, low, high).

        None is returned if `path` joins the points, or if the line is undefined.
        """
        if self.path:
            return None
        from lit_layers.functional.correlation import UndefinedError, fit_line, line_band  # slow: loads torch

        try:
            fitted = fit_line(self.x, self.y)
        except UndefinedError:
            return None
        at = np.linspace(*self.limits()[0], 60)
        low, high = line_band(fitted, at)
        return at.tolist(), (fitted.intercept + fitted.slope * at).tolist(), low.tolist(), high.tolist()


def scatter_plot(content: Scatter, *, width: int = 660, height: int = 440) -> Chart:
    """Return the chart; points are labelled with their names where there is room, and all names are in the tooltips."""
    shown = labelled(content, width - 80, height - 110)
    series = []
    if (line := content.line()) is not None:
        at, middle, low, high = (rounded(side, 6) for side in line)
        look = {"name": "Least squares", "color": ACCENT, "width": 1.8, "hover": False}
        series.append(Series(x=at, y=middle, low=low, high=high, **look))
    if content.path:
        series.append(Series(x=content.x, y=content.y, name="Path", color="#c4ccd4", width=1.4, hover=False))
    colors, kinds = content.colors(), content.kinds()
    groups = list(content.groups) if kinds and content.groups is not None else [None] * len(content.x)
    listed = 1 < len(kinds) <= len(COLORS)
    for kind in [*kinds, None]:
        members = [index for index, group in enumerate(groups) if group == kind]
        if members:
            texts = ["\n".join([content.names[n], *(content.hover[n] if content.hover else [])]) for n in members]
            marks = Series(
                x=[content.x[n] for n in members],
                y=[content.y[n] for n in members],
                name=f"{kind:g}" if isinstance(kind, float) else str(kind or "none"),
                color=colors[members[0]],
                mark="circle",
                size=9,
                texts=texts,
                texts_only=True,
                labels=[content.names[n] if shown[n] else "" for n in members],
                legend=listed,
            )
            series.append(marks)
    bar = None
    if len(kinds) > len(COLORS) and content.is_scaled:
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


def labelled(content: Scatter, width: float, height: float) -> list[bool]:
    """Return for each point whether its name fits to its right without overlap, in a plot of this size in pixels.

    A letter is taken to be 6.5 pixels wide and 14 high. If two names overlap, only the first one is shown.
    """
    (left, right), (low, high) = content.limits()
    at = [
        ((x - left) / (right - left) * width, (y - low) / (high - low) * height)
        for x, y in zip(content.x, content.y, strict=True)
    ]
    shown: list[bool] = []
    for (x, y), name in zip(at, content.names, strict=True):
        end = x + 12 + 6.5 * len(name)
        is_free = not any(abs(y - b) < 12 and x < a < end for a, b in at)
        for (a, b), other, is_shown in zip(at, content.names, shown, strict=False):
            is_free &= not (is_shown and abs(y - b) < 14 and a < end and x < a + 12 + 6.5 * len(other))
        shown.append(is_free and end <= width)
    return shown


def _padded(values: Sequence[float]) -> tuple[float, float]:
    low, high = min(values), max(values)
    room = 0.07 * (high - low) or abs(low) * 0.07 or 1.0
    return low - room, high + room


def _is_number(group: Any) -> bool:
    return isinstance(group, int | float) and not isinstance(group, bool)
