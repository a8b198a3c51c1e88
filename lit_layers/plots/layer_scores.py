"""Metrics and task scores of the layers: over depth, against each other, and coefficients with their intervals."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import plotly.graph_objects as go

from lit_layers.plots.axes import DEPTH_TITLE
from lit_layers.plots.canvas import canvas, dress, rgb, save
from lit_layers.plots.labels import escape
from lit_layers.plots.scatter import Scatter, label_places, label_step
from lit_layers.plots.theme import COLORS, DEPTH, INK, MUTED, figure, rounded

_SYMBOLS = ("circle", "square", "diamond", "triangle-up")
_MARKERS = ("o", "s", "D", "^")
_SIDE = 3.1  # inches of a small scatter plot
_ACROSS = 3
_ROW = 0.21  # inches
_FILLED, _HOLLOW = "o", "d"


@dataclass(frozen=True)
class DepthCurve:
    """A model's values at layers 0..L; NaN where there is none."""

    name: str
    values: Sequence[float]

    @property
    def places(self) -> list[float]:
        """100 l / L of each layer."""
        depth = len(self.values) - 1
        return [100 * layer / depth for layer in range(depth + 1)]


@dataclass(frozen=True)
class DepthPanel:
    """One quantity of some models over depth."""

    title: str
    curves: Sequence[DepthCurve]


@dataclass(frozen=True)
class Mark:
    """A number with its interval, where it has one; of a kind that the legend explains."""

    kind: str
    value: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class IntervalRow:
    """A row of a picture of intervals: its marks in each panel, and a text behind them. Without marks a heading."""

    text: str
    panels: Sequence[Sequence[Mark]] = ()
    note: str = ""


def depth_curves(panel: DepthPanel, *, height: int = 340) -> go.Figure:
    """Returns one quantity over the depth percentage, a line a model; layer 0 stands apart as a hollow mark."""
    traces: list[dict[str, Any]] = []
    for number, curve in enumerate(panel.curves):
        color, symbol = COLORS[number % len(COLORS)], _SYMBOLS[number // len(COLORS) % len(_SYMBOLS)]
        texts = [f"layer {layer} of {len(curve.values) - 1}" for layer in range(len(curve.values))]
        own = {
            "text": texts[1:],
            "name": escape(curve.name),
            "legendgroup": escape(curve.name),
            "mode": "lines+markers",
            "line": {"color": color, "width": 2},
            "marker": {"size": 5, "symbol": symbol, "color": color},
            "hovertemplate": "%{y:.4g}<br>%{text}<extra>" + escape(curve.name) + "</extra>",
        }
        traces.append({**own, "x": rounded(curve.places[1:]), "y": rounded(curve.values[1:])})
        if math.isfinite(curve.values[0]):
            apart = {"size": 7, "symbol": f"{symbol}-open", "color": color}
            first = {"x": [0], "y": rounded(curve.values[:1]), "text": texts[:1], "mode": "markers", "marker": apart}
            traces.append({**own, **first, "showlegend": False})
    return figure(
        panel.title,
        traces,
        xaxis={"title": {"text": DEPTH_TITLE}, "range": [-3, 103], "tick0": 0, "dtick": 25},
        showlegend=len(panel.curves) > 1,
        height=height,
    )


def write_depth_curves(panels: Sequence[DepthPanel], path: Path, title: str) -> None:
    """Writes quantities over the depth percentage, a panel each, as `depth_curves`.

    Raises:
        InputError: where the picture cannot be written.
    """
    across = min(_ACROSS, len(panels))
    down = -(-len(panels) // across)
    fig = canvas(0.6 + 3.4 * across, 0.7 + 2.5 * down)
    every = fig.subplots(down, across, squeeze=False)
    flat = [axes for row in every for axes in row]
    for axes, panel in zip(flat, panels, strict=False):
        for number, curve in enumerate(panel.curves):
            color, marker = COLORS[number % len(COLORS)], _MARKERS[number // len(COLORS) % len(_MARKERS)]
            at = curve.places
            axes.plot(at[1:], curve.values[1:], color=color, linewidth=1.4, marker=marker, markersize=2.6)
            axes.plot(at[:1], curve.values[:1], marker=marker, markersize=4.5, color=color, markerfacecolor="white")
        last_row = flat.index(axes) + across >= len(panels)
        dress(axes, DEPTH_TITLE if last_row else "", "")
        axes.set_xticks([0, 25, 50, 75, 100])
        axes.set_title(panel.title, loc="left", fontsize=9, color=INK, parse_math=False)
    for axes in flat[len(panels) :]:
        axes.set_axis_off()
    names = list(dict.fromkeys(curve.name for panel in panels for curve in panel.curves))
    if len(names) > 1:
        _legend_below(fig, [(name, COLORS[n % len(COLORS)], "-") for n, name in enumerate(names)])
    save(fig, path, title)


def write_layer_scatters(contents: Sequence[Scatter], path: Path, title: str) -> None:
    """Writes small scatter plots side by side, a point a layer, joined in the order of the layers and labelled.

    Raises:
        InputError: where the picture cannot be written.
    """
    across = min(_ACROSS, len(contents))
    down = -(-len(contents) // across)
    fig = canvas(_SIDE * 1.12 * across, 0.5 + _SIDE * down)
    every = fig.subplots(down, across, squeeze=False)
    flat = [axes for row in every for axes in row]
    for axes, content in zip(flat, contents, strict=False):
        (left, right), (low, high) = content.limits()
        axes.set_xlim(left, right)
        axes.set_ylim(low, high)
        axes.plot(content.x, content.y, color="#c4ccd4", linewidth=0.9, zorder=1)
        colors = rgb(DEPTH, len(content.x))
        axes.scatter(content.x, content.y, s=16, c=colors, edgecolors="white", linewidths=0.4, zorder=3)
        places = label_places(content, 72 * (_SIDE - 0.9), 72 * (_SIDE - 0.9), size=6.5)
        for x, y, name, place in zip(content.x, content.y, content.names, places, strict=True):
            if place is not None:
                right_left, up_down = label_step(place)
                axes.annotate(
                    name,
                    (x, y),
                    xytext=(4 * right_left, 4 * up_down),
                    textcoords="offset points",
                    ha={-1: "right", 0: "center", 1: "left"}[right_left],
                    va={-1: "top", 0: "center", 1: "bottom"}[up_down],
                    fontsize=6.5,
                    color=INK,
                    parse_math=False,
                )
        dress(axes, content.x_title, content.y_title if axes in every[:, 0] else "")
        axes.set_title(content.title.replace("; ", "\n"), loc="left", fontsize=7.5, color=MUTED, parse_math=False)
    for axes in flat[len(contents) :]:
        axes.set_axis_off()
    save(fig, path, title)


def write_intervals(
    rows: Sequence[IntervalRow],
    panels: Sequence[str],
    path: Path,
    title: str,
    *,
    kinds: Sequence[str],
    zero: bool = True,
) -> None:
    """Writes a table as a picture: a row a line of text, marks with their 95% intervals in each panel.

    `kinds` are those of the marks, in the order of the legend: the first is filled, the second hollow, others are ticks
    that have no interval. `zero` draws a line there.

    Raises:
        InputError: where the picture cannot be written.
    """
    beside = 0.065 * (max(len(row.text) for row in rows) + max(len(row.note) for row in rows))  # inches of text
    fig = canvas(0.6 + 2.9 * len(panels) + beside, 1.3 + _ROW * len(rows))
    every = fig.subplots(1, len(panels), squeeze=False, sharey=True)[0]
    looks = _looks(kinds)
    for number, (axes, name) in enumerate(zip(every, panels, strict=True)):
        for place, row in enumerate(rows):
            for mark in row.panels[number] if row.panels else ():
                both = {mark.kind for mark in row.panels[number]} >= {*kinds[:2]}
                shift = 0.17 * (2 * list(kinds).index(mark.kind) - 1) if both and mark.kind in kinds[:2] else 0.0
                _draw(axes, mark, place + shift, looks[mark.kind])
        dress(axes, name, "")
        axes.grid(axis="y", visible=False)
        axes.set_ylim(len(rows) - 0.4, -0.6)
        axes.set_yticks(range(len(rows)), [row.text for row in rows])
        if zero:
            axes.axvline(0, color="#9aa5b0", linewidth=0.8, zorder=0)
    for text, row in zip(every[0].get_yticklabels(), rows, strict=True):
        text.set(fontsize=7.5, parse_math=False, fontweight="normal" if row.panels else "bold")
    notes = every[-1].secondary_yaxis("right")
    notes.set_yticks(range(len(rows)), [row.note for row in rows])
    notes.tick_params(length=0, labelsize=7.5, labelcolor=MUTED)
    notes.spines["right"].set_visible(False)
    _legend_below(fig, [(kind, looks[kind][1], looks[kind][0]) for kind in kinds])
    save(fig, path, title)


def _looks(kinds: Sequence[str]) -> dict[str, tuple[str, str]]:
    """Marker and colour of each kind."""
    ticks = ["|", "x", "1", "+"]
    colors = [COLORS[0], COLORS[1], MUTED, COLORS[2], COLORS[3], INK]
    return {
        kind: ((_FILLED, _HOLLOW)[n] if n < 2 else ticks[(n - 2) % len(ticks)], colors[n % len(colors)])
        for n, kind in enumerate(kinds)
    }


def _draw(axes: Any, mark: Mark, place: float, look: tuple[str, str]) -> None:
    marker, color = look
    if mark.low is not None and mark.high is not None:
        axes.plot([mark.low, mark.high], [place] * 2, color=color, linewidth=1.1, alpha=0.75, zorder=2)
    face = "white" if marker == _HOLLOW else color
    size = 4.2 if marker in (_FILLED, _HOLLOW) else 6.5
    axes.plot([mark.value], [place], marker=marker, markersize=size, color=color, markerfacecolor=face, zorder=3)


def _legend_below(fig: Any, entries: Sequence[tuple[str, str, str]]) -> None:
    """Name, colour and marker of each entry; `-` is a line."""
    from matplotlib.lines import Line2D

    handles = [
        Line2D(
            [],
            [],
            color=color,
            linestyle="-" if marker == "-" else "",
            marker="" if marker == "-" else marker,
            markerfacecolor="white" if marker == _HOLLOW else color,
            markersize=5,
            label=name,
        )
        for name, color, marker in entries
    ]
    longest = max(len(name) for name, _, _ in entries)
    across = max(1, min(len(handles), int(fig.get_figwidth() / (0.075 * longest + 0.5))))
    legend = fig.legend(
        handles=handles, loc="outside lower left", ncols=across, frameon=False, fontsize=8, labelcolor=INK
    )
    for text in legend.get_texts():
        text.set_parse_math(False)
