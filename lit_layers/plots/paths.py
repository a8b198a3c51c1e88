"""The paths of tokens through the layers as a picture, with a slider over the checkpoints."""

import math
from collections.abc import Mapping
from typing import Any

import pandas as pd
import plotly.graph_objects as go

from lit_layers.metrics import look_up
from lit_layers.plots.sliders import FRAMES, add_slider, spread
from lit_layers.plots.tables import Point, grouped, matching, select, steps_of, title_of, variant_text, variants_of
from lit_layers.plots.theme import DEPTH, MUTED, bar_trace, color_scale, figure, rounded, translucent


def paths_in_plane(
    frame: pd.DataFrame,
    metric: str = "path",
    *,
    analysis: str | None = None,
    tags: Mapping[str, Any] | None = None,
    allow_suspect: bool = False,
) -> go.Figure:
    """Returns paths (tags `token` and `axis`, 1 across and 2 up) as lines with a dot a layer, one line a token.

    Dots are coloured by layer, the first hollow and the last large; a slider goes over the checkpoints. Each has axes
    of its own, so their ranges and the shares of variance in their titles change with it. `tags` chooses a prompt
    (`{"prompt": 2}`); without it the first is drawn.

    Raises:
        ValueError: where the metric has no paths.
    """
    chosen: dict[str, Any] = {"analysis": analysis, "allow_suspect": allow_suspect}
    points = [point for point in select(frame, metric, tags=tags, **chosen) if {"axis", "token"} <= point.tags.keys()]
    if not points:
        raise ValueError(f"metric {metric!r} has no paths of tokens in a plane")
    variant = variants_of(points)[0]
    points = matching(points, variant)
    shares = _shares(frame, metric, variant, chosen)
    values = {(p.step, p.tags["token"], p.layer, p.tags["axis"]): p.value for p in points}
    tokens = sorted({point.tags["token"] for point in points})
    layers = sorted({point.layer for point in points if point.layer is not None})

    def data(step: int) -> list[dict[str, Any]]:
        across, up = (
            # a gap behind each path, so that one trace holds them all
            [number for t in tokens for number in [*(values.get((step, t, n, axis)) for n in layers), None]]
            for axis in (1, 2)
        )
        return [{"type": "scatter", "x": rounded(across, 4), "y": rounded(up, 4)}]

    def axes(step: int) -> dict[str, Any]:
        (trace,) = data(step)
        return {
            name: {"range": _range(trace[side]), "title": {"text": _title(axis, shares.get((step, axis)))}}
            for axis, name, side in ((1, "xaxis", "x"), (2, "yaxis", "y"))
        }

    steps = spread(steps_of(points), FRAMES)
    ends = {layers[0]: "circle-open"} if len(layers) > 1 else {}
    look = {
        "mode": "lines+markers",
        "line": {"color": translucent(MUTED, 0.35), "width": 1},
        "marker": {
            "color": [*layers, 0] * len(tokens),  # the last is that of the gap
            "colorscale": color_scale(DEPTH),
            "cmin": layers[0],
            "cmax": max(layers[-1], layers[0] + 1),
            "size": [*(8 if layer == layers[-1] else 5 for layer in layers), 0] * len(tokens),
            "symbol": [*(ends.get(layer, "circle") for layer in layers), "circle"] * len(tokens),
            "line": {"width": 0.8},
        },
        "text": [text for t in tokens for text in [*(f"token {t}, layer {layer}" for layer in layers), ""]],
        "hovertemplate": "%{text}<extra></extra>",
        "showlegend": False,
    }
    traces = [{**data(steps[-1])[0], **look}]
    if len(layers) > 1:
        shown = sorted({layers[0], layers[len(layers) // 2], layers[-1]})
        traces.append(bar_trace("Layer", DEPTH, {layer: str(layer) for layer in shown}))
    own = axes(steps[-1])
    title = ", ".join(filter(None, [title_of(metric, {}), variant_text(variant)]))
    fig = figure(title, traces, xaxis=own["xaxis"], yaxis=own["yaxis"], height=450)
    add_slider(fig, steps, data, axes)
    return fig


def _shares(
    frame: pd.DataFrame, metric: str, variant: Mapping[str, Any], chosen: dict[str, Any]
) -> dict[tuple[int, int], float]:
    """The share of variance along each axis, by step and axis, where it is recorded."""
    table: Any = frame
    shares = look_up(metric).baseline
    if not (table["metric"] == shares).any():
        return {}
    points: list[Point] = matching(select(frame, shares, **chosen), variant)
    by_place = grouped(points, lambda point: (point.step, point.tags["axis"]))
    return {place: part[0].value for place, part in by_place.items()}


def _title(axis: int, share: float | None) -> str:
    return f"Axis {axis}" + (f" ({share:.0%})" if share is not None else "")  # short: the slider's step is beside it


def _range(numbers: list[float | None]) -> list[float]:
    known = [number for number in numbers if number is not None and math.isfinite(number)]
    low, high = min(known, default=0.0), max(known, default=0.0)
    pad = 0.06 * (high - low) or 1.0
    return [float(f"{low - pad:.4g}"), float(f"{high + pad:.4g}")]
