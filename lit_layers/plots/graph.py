"""Coupling between blocks as a graph: blocks on a circle, lines where they are coupled."""

import math
from collections.abc import Mapping
from typing import Any

import pandas as pd
import plotly.graph_objects as go

from lit_layers.plots.sliders import FRAMES, add_slider, spread
from lit_layers.plots.tables import is_placed, of_plainest, select, title_of
from lit_layers.plots.theme import ACCENT, DEPTH, MUTED, colors_of, figure, rounded, translucent

_LEVELS = 6  # widths of a line that can be told apart
_SHARE = 0.2  # of the largest coupling of any checkpoint: below it no line is drawn unless told otherwise


def coupling_graph(
    frame: pd.DataFrame,
    metric: str = "coupling_pair",
    *,
    threshold: float | None = None,
    analysis: str | None = None,
    tags: Mapping[str, Any] | None = None,
    allow_suspect: bool = False,
) -> go.Figure:
    """Returns blocks on a circle, joined where they are coupled, with a slider over the checkpoints.

    The value of a line is the mean of both directions of a pair, so the graph is symmetric although the metric is not;
    a pair with one direction missing has no line. Width and opacity grow with it, in six steps that mean the same at
    every checkpoint, from `threshold` to the largest value of any; below `threshold` (None: a fifth of the largest)
    there is no line. Colours of blocks are by depth, clockwise from the top.

    Raises:
        ValueError: where the metric has no values per pair of different layers, or for a threshold that is not
            positive.
    """
    if threshold is not None and not threshold > 0:
        raise ValueError(f"expected a threshold above 0, got {threshold}")
    points = [
        point
        for point in select(frame, metric, analysis=analysis, tags=tags, allow_suspect=allow_suspect)
        if point.other_layer is not None and point.layer != point.other_layer and not is_placed(point)
    ]
    if not points:
        raise ValueError(f"metric {metric!r} has no values per pair of different layers")
    points, tags = of_plainest(points, tags)
    layers = sorted({n for point in points for n in (point.layer, point.other_layer) if n is not None})
    values = {(point.step, point.layer, point.other_layer): point.value for point in points}
    steps = spread(sorted({point.step for point in points}), FRAMES)
    edges = {step: _edges(values, step, layers) for step in steps}
    largest = max((value for step in steps for value in edges[step].values()), default=0.0)
    least = threshold if threshold is not None else max(_SHARE * largest, 1e-9)
    angle = {layer: 2 * math.pi * index / len(layers) for index, layer in enumerate(layers)}
    place = {layer: (math.sin(at), math.cos(at)) for layer, at in angle.items()}

    def data(step: int) -> list[dict[str, Any]]:
        parts: list[dict[str, Any]] = [{"type": "scatter", "x": [], "y": []} for _ in range(_LEVELS)]
        middles: dict[str, Any] = {"type": "scatter", "x": [], "y": [], "text": []}
        for (one, two), value in edges[step].items():
            if value < least:
                continue
            span = largest - least
            level = min(_LEVELS - 1, int(_LEVELS * (value - least) / span)) if span > 0 else _LEVELS - 1
            for axis, number in (("x", 0), ("y", 1)):
                ends = rounded([place[one][number], place[two][number]], 4)
                parts[level][axis] += [*ends, None]
                middles[axis] += rounded([sum(end or 0.0 for end in ends) / 2], 4)
            middles["text"].append(f"blocks {one} and {two}<br>{value:.3g}")
        return [*parts, middles]

    traces = [{**part, **_line(level)} for level, part in enumerate(data(steps[-1])[:-1])]
    traces.append(
        {
            **data(steps[-1])[-1],
            "mode": "markers",
            "marker": {"size": 14, "color": "rgba(0,0,0,0)"},
            "hovertemplate": "%{text}<extra></extra>",
            "showlegend": False,
        }
    )
    traces.append(_nodes(layers, place))
    hidden = {"visible": False, "range": [-1.18, 1.18], "constrain": "domain"}
    note = {
        "text": f"Lines: {least:.2g} to {largest:.2g}" if largest >= least else "No pair is coupled",
        "x": 0,
        "y": 0,
    }
    note |= {"xref": "paper", "yref": "paper", "xanchor": "left", "yanchor": "bottom", "showarrow": False}
    fig = figure(
        title_of(metric, tags),
        traces,
        xaxis=hidden,
        yaxis={**hidden, "scaleanchor": "x"},
        annotations=[{**note, "font": {"size": 11, "color": MUTED}}],
        height=450,
        margin={"t": 40, "l": 14, "b": 30},
    )
    add_slider(fig, steps, data)  # the last trace, the blocks, stays as it is
    return fig


def _edges(
    values: Mapping[tuple[int, int | None, int | None], float], step: int, layers: list[int]
) -> dict[tuple[int, int], float]:
    """The mean of both directions of each pair that has both, weakest first: strong lines lie on top."""
    found = {}
    for index, one in enumerate(layers):
        for two in layers[index + 1 :]:
            both = [values.get((step, *pair), math.nan) for pair in ((one, two), (two, one))]
            if all(map(math.isfinite, both)):
                found[one, two] = sum(both) / 2
    return dict(sorted(found.items(), key=lambda item: item[1]))


def _line(level: int) -> dict[str, Any]:
    strength = (level + 1) / _LEVELS
    line = {"width": 0.8 + 6 * strength**1.5, "color": translucent(ACCENT, 0.12 + 0.78 * strength)}
    return {"mode": "lines", "line": line, "hoverinfo": "skip", "showlegend": False}


def _nodes(layers: list[int], place: Mapping[int, tuple[float, float]]) -> dict[str, Any]:
    return {
        "x": [place[layer][0] for layer in layers],
        "y": [place[layer][1] for layer in layers],
        "text": [str(layer) for layer in layers],
        "mode": "markers+text",
        "marker": {"size": 25 if len(layers) <= 24 else 16, "color": colors_of(DEPTH, len(layers)), "opacity": 1},
        "textfont": {"color": "white", "size": 12 if len(layers) <= 24 else 9},
        "hovertemplate": "block %{text}<extra></extra>",
        "showlegend": False,
    }
