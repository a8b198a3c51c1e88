"""The score of a probe against the number of its training rows."""

import math
from collections.abc import Iterable, Mapping
from typing import Any, Literal

import pandas as pd
import plotly.graph_objects as go

from lit_layers.metrics import look_up
from lit_layers.plots.axes import whole_ticks
from lit_layers.plots.labels import count
from lit_layers.plots.layers import interval_text
from lit_layers.plots.sliders import FRAMES, add_slider, spread
from lit_layers.plots.tables import TRAIN_ROWS, Point, grouped, of_plainest, select, steps_of, title_of
from lit_layers.plots.theme import DEPTH, MUTED, bar_trace, colors_of, figure, rounded

SIZES = ["#a6c4e4", "#5b92c9", "#1f5fa8", "#0a2f5c"]  # few rows to many
_BARS = 13  # lines of one figure whose error bars can still be told apart


def sample_size_curves(
    frame: pd.DataFrame,
    metric: str = "accuracy",
    *,
    over: Literal["rows", "layers"] = "rows",
    analysis: str | None = None,
    tags: Mapping[str, Any] | None = None,
    allow_suspect: bool = False,
) -> go.Figure:
    """Returns a metric over the number of training rows (tag `train_rows`, log axis), one line a layer.

    With `over="layers"` the same numbers over the layers, one line a number of rows. Both with 95% intervals, where
    there are not too many lines for them, and with a slider over the checkpoints.

    Raises:
        ValueError: where the metric has no values per layer and number of training rows.
    """
    points = sized_points(select(frame, metric, analysis=analysis, tags=tags, allow_suspect=allow_suspect))
    if not points:
        raise ValueError(f"metric {metric!r} has no values per layer and number of training rows")
    points, tags = of_plainest(points, tags)
    by_layer = over == "rows"
    parts = grouped(points, lambda point: (point.step, _line_of(point, by_layer)))
    lines = sorted({line for _, line in parts})

    def data(step: int) -> list[dict[str, Any]]:
        return [_trace(parts.get((step, line), []), by_layer, bars=len(lines) <= _BARS) for line in lines]

    steps, colors = spread(steps_of(points), FRAMES), DEPTH if by_layer else SIZES
    traces = [
        {**trace, **_look(line, color, by_layer)}
        for trace, line, color in zip(data(steps[-1]), lines, colors_of(colors, len(lines)), strict=True)
    ]
    if len(lines) > 1:
        shown = sorted({0, len(lines) // 2, len(lines) - 1})
        bar = bar_trace("Layer" if by_layer else "Training rows", colors, {n: count(lines[n]) for n in shown})
        bar["marker"]["colorbar"]["x"] = 0.96  # plotly leaves out a last number that reaches over the edge
        traces.append(bar)
    fig = figure(
        title_of(metric, tags),
        traces,
        unit=look_up(metric).unit,
        xaxis=_axis(points, by_layer),
        yaxis=_range(points),
        height=420,
    )
    add_slider(fig, steps, data)
    return fig


def sized_points(points: Iterable[Point]) -> list[Point]:
    """Returns the points per layer and number of training rows, in order of rows."""
    found = [point for point in points if TRAIN_ROWS in point.tags and point.layer is not None]
    return sorted(found, key=lambda point: (point.tags[TRAIN_ROWS], point.layer))


def _line_of(point: Point, by_layer: bool) -> int:
    return (point.layer or 0) if by_layer else point.tags[TRAIN_ROWS]


def _trace(points: list[Point], by_layer: bool, *, bars: bool) -> dict[str, Any]:
    trace: dict[str, Any] = {
        "type": "scatter",
        "x": [_line_of(point, not by_layer) for point in points],
        "y": rounded(point.value for point in points),
        "text": [interval_text(point) for point in points],
    }
    if bars and any(trace["text"]):
        ends = [(p.high - p.value, p.value - p.low) if interval_text(p) else (0.0, 0.0) for p in points]
        sides = {"array": rounded(up for up, _ in ends), "arrayminus": rounded(down for _, down in ends)}
        trace["error_y"] = {**sides, "symmetric": False, "thickness": 1, "width": 2}
    return trace


def _look(line: int, color: str, by_layer: bool) -> dict[str, Any]:
    name = f"layer {line}" if by_layer else f"{line:,} rows"
    place = "%{x:,} rows" if by_layer else "layer %{x}"
    return {
        "name": name,
        "mode": "lines+markers",
        "line": {"color": color, "width": 1.8},
        "marker": {"size": 5},
        "showlegend": False,
        "hovertemplate": "%{y:.4g}%{text}<br>" + place + f"<extra>{name}</extra>",
    }


def _axis(points: list[Point], by_layer: bool) -> dict[str, Any]:
    if not by_layer:
        layers = [point.layer or 0 for point in points]
        return {"title": {"text": "Layer"}, **whole_ticks(min(layers), max(layers))}
    rows = sorted({point.tags[TRAIN_ROWS] for point in points})
    places = {"tickvals": rows, "ticktext": [count(number) for number in rows], "tickangle": 0}
    ends = [math.log10(rows[0]), math.log10(rows[-1])]
    pad = 0.04 * (ends[1] - ends[0]) or 0.2
    title = {"text": "Training rows", "font": {"color": MUTED}}
    return {"title": title, "type": "log", "range": [ends[0] - pad, ends[1] + pad], **places}


def _range(points: list[Point]) -> dict[str, Any]:
    """The same at every checkpoint, so that the slider shows what moves."""
    values = [v for point in points for v in (point.value, point.low, point.high) if math.isfinite(v)]
    if not values:
        return {}
    pad = 0.05 * (max(values) - min(values)) or 0.05
    return {"range": [min(values) - pad, max(values) + pad]}
