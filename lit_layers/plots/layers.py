"""Metrics over the layers: profiles, matrices of pairs of layers, and spectra."""

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import pandas as pd
import plotly.graph_objects as go

from lit_layers.plots.labels import LOG_SCALE, count, escape, label, tag_text
from lit_layers.plots.tables import Point, grouped, is_on_axes, of_plainest, select, steps_of, title_of
from lit_layers.plots.theme import (
    ACCENT,
    DASHES,
    DEPTH,
    DIVERGING,
    INK,
    LEGEND_BELOW,
    MUTED,
    TIME,
    bar_trace,
    colors_of,
    figure,
    rounded,
)

_PROFILES = 16  # lines of one figure that can still be told apart
_FRAMES = 30  # places of a slider


def layer_profile(
    frame: pd.DataFrame, metric: str, *, analysis: str | None = None, tags: Mapping[str, Any] | None = None
) -> go.Figure:
    """Returns a metric over the layers (or over the tag `distance`), one line a checkpoint.

    Colours run from the first checkpoint to the last; of many checkpoints, some that are spread evenly are drawn.
    Rows tagged `reference` are dashed lines, at the last checkpoint. `tags` chooses a variant, as in
    `emergence_curves`.

    Raises:
        ValueError: where the metric has no values per layer.
    """
    points = [p for p in select(frame, metric, analysis=analysis, tags=tags) if p.other_layer is None]
    if not any(map(is_on_axes, points)):
        raise ValueError(f"metric {metric!r} has no values per layer")
    points, tags = of_plainest(points, tags)
    number = "layer" if any(point.layer is not None for point in points) else "distance"
    own = [point for point in points if point.number(number) is not None and point.reference is None]
    places = [point.number(number) or 0 for point in own]
    by_step = grouped(own, lambda point: point.step)
    steps = spread(sorted(by_step), _PROFILES)
    traces = []
    for step, color in zip(steps, colors_of(TIME, len(steps)), strict=True):
        part = sorted(by_step[step], key=lambda point: point.number(number) or 0)
        last = step == steps[-1]
        trace = {
            "x": [point.number(number) for point in part],
            "y": rounded(point.value for point in part),
            "mode": "lines+markers",
            "line": {"color": color, "width": 2.6 if last else 1.4},
            "marker": {"size": 6 if last else 3.5, "symbol": "circle" if step > 0 else "diamond"},
            "showlegend": False,
            "hovertemplate": "%{y:.4g}<br>" + number + " %{x}<extra>" + f"step {step:,}</extra>",
        }
        traces.append(trace)
    if len(steps) > 1:
        shown = sorted({0, (len(steps) - 1) // 2, len(steps) - 1})
        traces.append(bar_trace("Step", TIME, {index: count(steps[index]) for index in shown}))
    ends = [min(places), max(places)]
    traces += _levels([point for point in points if point.reference is not None], ends)
    title = "Layer" if number == "layer" else "Distance between the blocks"
    return figure(
        title_of(metric, tags or {}),
        traces,
        unit=label(metric).unit,
        log=metric in LOG_SCALE,
        xaxis={"title": {"text": title}, **_whole_ticks(*ends)},
        **(LEGEND_BELOW if len(own) < len(points) else {}),
    )


def layer_matrix(
    frame: pd.DataFrame, metric: str, *, analysis: str | None = None, tags: Mapping[str, Any] | None = None
) -> go.Figure:
    """Returns a metric of pairs of layers as a heat map, with a slider over the checkpoints.

    The colours mean the same at every checkpoint. Their range is that of the pairs of different layers: what a layer
    has with itself may lie outside.

    Raises:
        ValueError: where the metric has no values per pair of layers.
    """
    points = [p for p in select(frame, metric, analysis=analysis, tags=tags) if p.other_layer is not None]
    if not points:
        raise ValueError(f"metric {metric!r} has no values per pair of layers")
    points, tags = of_plainest(points, tags)
    by_step = grouped(points, lambda point: point.step)
    layers = sorted({n for point in points for n in (point.layer, point.other_layer) if n is not None})
    place: dict[int | None, int] = {layer: index for index, layer in enumerate(layers)}
    apart = [abs(p.value) for p in points if p.layer != p.other_layer and math.isfinite(p.value)]
    bound = max(apart, default=0.0) or 1.0

    def data(step: int) -> list[dict[str, Any]]:
        matrix: list[list[float | None]] = [[None] * len(layers) for _ in layers]
        for point in by_step[step]:
            matrix[place[point.layer]][place[point.other_layer]] = point.value
        return [{"type": "heatmap", "z": [rounded(row, 3) for row in matrix]}]

    steps = spread(sorted(by_step), _FRAMES)
    bar = {"thickness": 9, "outlinewidth": 0, "tickfont": {"size": 10, "color": MUTED}, "x": 1.01, "xpad": 4}
    look = {
        "x": layers,
        "y": layers,
        "zmin": -bound,
        "zmax": bound,
        "colorscale": DIVERGING,
        "xgap": 1,
        "ygap": 1,
        "hovertemplate": "%{z:.3g}<br>layer %{y}, other layer %{x}<extra></extra>",
        "colorbar": {**bar, "nticks": 5},
    }
    axis = {"constrain": "domain", "showgrid": False, **_whole_ticks(layers[0], layers[-1])}
    fig = figure(
        title_of(metric, tags or {}),
        [{**data(steps[-1])[0], **look}],
        xaxis={"title": {"text": "Other layer"}, **axis},
        yaxis={
            "title": {"text": "Layer"},
            "autorange": "reversed",
            "scaleanchor": "x",
            "constraintoward": "top",
            **axis,
        },
        height=450,
        margin={"t": 40},
    )
    _slider(fig, steps, data)
    return fig


def spectrum(
    frame: pd.DataFrame,
    metric: str = "singular_value",
    *,
    analysis: str | None = None,
    tags: Mapping[str, Any] | None = None,
) -> go.Figure:
    """Returns lists of values (tag `index`) on a log axis, one line a layer, with a slider over the checkpoints.

    Raises:
        ValueError: where the metric has no lists of values per layer.
    """
    points = [
        p for p in select(frame, metric, analysis=analysis, tags=tags) if "index" in p.tags and p.layer is not None
    ]
    if not points:
        raise ValueError(f"metric {metric!r} has no lists of values per layer")
    points, tags = of_plainest(points, tags)
    ordered = sorted(points, key=lambda point: point.tags["index"])
    parts = grouped(ordered, lambda point: (point.step, point.layer))
    layers = sorted({point.layer for point in points if point.layer is not None})

    def data(step: int) -> list[dict[str, Any]]:
        lists = [parts.get((step, layer), []) for layer in layers]
        return [
            {"type": "scatter", "x": [p.tags["index"] for p in part], "y": rounded(p.value for p in part)}
            for part in lists
        ]

    steps = spread(steps_of(points), _FRAMES)
    traces = []
    for trace, layer, color in zip(data(steps[-1]), layers, colors_of(DEPTH, len(layers)), strict=True):
        hover = "%{y:.4g}<br>number %{x}<extra>" + f"layer {layer}</extra>"
        look = {"mode": "lines+markers", "line": {"color": color, "width": 1.6}, "marker": {"size": 4}}
        traces.append({**trace, **look, "showlegend": False, "hovertemplate": hover})
    if len(layers) > 1:
        shown = sorted({layers[0], layers[len(layers) // 2], layers[-1]})
        traces.append(bar_trace("Layer", DEPTH, {layer: str(layer) for layer in shown}))
    fig = figure(
        title_of(metric, tags or {}),
        traces,
        unit=label(metric).unit,
        xaxis={"title": {"text": "Number in the list"}, **_whole_ticks(1, ordered[-1].tags["index"])},
        log=True,
        yaxis=_log_range(point.value for point in points),
        height=400,
    )
    _slider(fig, steps, data)
    return fig


def spread(numbers: list[int], most: int) -> list[int]:
    """Returns at most so many of the numbers, evenly spread, the first and the last among them."""
    if len(numbers) <= most:
        return numbers
    return [numbers[round(index * (len(numbers) - 1) / (most - 1))] for index in range(most)]


def _levels(references: list[Point], ends: list[int]) -> list[dict[str, Any]]:
    """A dashed line for each reference, at its last value."""
    traces = []
    for index, (name, part) in enumerate(grouped(references, lambda point: point.reference).items()):
        text, last = escape(tag_text({"reference": name})), max(part, key=lambda point: point.step)
        line = {"color": MUTED, "width": 1.6, "dash": DASHES[index % len(DASHES)]}
        level = {"x": ends, "y": rounded([last.value] * 2), "mode": "lines", "name": text, "line": line}
        traces.append({**level, "hovertemplate": "%{y:.4g}<extra>" + text + "</extra>"})
    return traces


def _whole_ticks(first: int, last: int) -> dict[str, Any]:
    """Whole numbers only, at most about nine of them."""
    step = next(size for size in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64, 128, 10**6) if (last - first) / size <= 9)
    return {"tick0": 0, "dtick": step}


def _log_range(values: Iterable[float]) -> dict[str, Any]:
    logs = [math.log10(value) for value in values if value > 0 and math.isfinite(value)]
    if not logs:
        return {}
    pad = 0.05 * (max(logs) - min(logs)) or 0.2
    return {"range": [min(logs) - pad, max(logs) + pad]}


def _slider(fig: go.Figure, steps: list[int], data: Callable[[int], list[dict[str, Any]]]) -> None:
    """A slider over checkpoints, at the last one to begin with."""
    if len(steps) < 2:
        return
    fig.frames = [{"name": str(step), "data": data(step)} for step in steps]
    moves = {"mode": "immediate", "frame": {"duration": 0, "redraw": True}, "transition": {"duration": 0}}
    slider = {
        "active": len(steps) - 1,
        "steps": [{"label": f"{step:,}", "method": "animate", "args": [[str(step)], moves]} for step in steps],
        "currentvalue": {"prefix": "Step ", "font": {"size": 13, "color": INK}, "xanchor": "left"},
        "font": {"size": 1, "color": "rgba(0,0,0,0)"},  # the labels would overlap; the current one is shown
        "ticklen": 0,
        "minorticklen": 0,
        "pad": {"t": 34, "b": 0, "l": 0, "r": 0},
        "len": 1.0,
        "x": 0,
        "bgcolor": "#b9cbe0",
        "activebgcolor": ACCENT,
        "bordercolor": "#b9cbe0",
        "borderwidth": 1,
    }
    fig.update_layout(sliders=[slider])
