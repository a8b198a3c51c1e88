"""Heat maps with a slider over the checkpoints: pairs of layers, pairs of tokens, one block in another's directions."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd
import plotly.graph_objects as go

from lit_layers.metrics import sentence
from lit_layers.plots.axes import whole_ticks
from lit_layers.plots.labels import pair_text
from lit_layers.plots.sliders import FRAMES, add_slider, spread
from lit_layers.plots.tables import Point, grouped, is_placed, of_plainest, select, title_of, variant_text
from lit_layers.plots.theme import DIVERGING, MUTED, figure, rounded


def layer_matrix(
    frame: pd.DataFrame,
    metric: str,
    *,
    analysis: str | None = None,
    tags: Mapping[str, Any] | None = None,
    allow_suspect: bool = False,
) -> go.Figure:
    """Returns a metric of pairs of layers as a heat map, with a slider over the checkpoints.

    The colours mean the same at every checkpoint. Their range is that of the pairs of different layers: what a layer
    has with itself may lie outside.

    Raises:
        ValueError: where the metric has no values per pair of layers.
    """
    points = [
        point
        for point in select(frame, metric, analysis=analysis, tags=tags, allow_suspect=allow_suspect)
        if point.other_layer is not None and not is_placed(point)
    ]
    if not points:
        raise ValueError(f"metric {metric!r} has no values per pair of layers")
    points, tags = of_plainest(points, tags)
    layers = sorted({n for point in points for n in (point.layer, point.other_layer) if n is not None})
    axes = _Axes(layers, layers, "Layer", "Other layer", "layer %{y}, other layer %{x}", layers)
    return _heat_map(title_of(metric, tags or {}), points, lambda p: (p.layer, p.other_layer), axes)


def token_map(
    frame: pd.DataFrame,
    metric: str = "token_coupling_pair",
    *,
    layer: int,
    other_layer: int | None = None,
    analysis: str | None = None,
    tags: Mapping[str, Any] | None = None,
    allow_suspect: bool = False,
) -> go.Figure:
    """Returns a metric of pairs of tokens (tags `token`, down, and `other_token`, across) as a heat map of one layer.

    With a slider over the checkpoints and colours as in `layer_matrix`. Places are in per cent of the prompt.

    Raises:
        ValueError: where the metric has no values per pair of tokens, or not for this layer.
    """
    points, tags = _of_layers(frame, metric, "token", layer, other_layer, analysis, tags, allow_suspect)
    places = sorted({point.tags[name] for point in points for name in ("token", "other_token")})
    texts = [f"{place}%" for place in places]
    hover = "token at %{y}, other token at %{x}"
    axes = _Axes(places, texts, "Place of the token", "Place of the other token", hover, None)
    title = f"{title_of(metric, tags)}, {pair_text(layer, other_layer)}"
    return _heat_map(title, points, lambda p: (p.tags["token"], p.tags["other_token"]), axes)


def compression_matrix(
    frame: pd.DataFrame,
    metric: str = "compression",
    *,
    layer: int,
    other_layer: int,
    analysis: str | None = None,
    tags: Mapping[str, Any] | None = None,
    allow_suspect: bool = False,
) -> go.Figure:
    """Returns one block's Jacobian in another's leading directions (tags `row`, `column`), with a slider over steps.

    Blue is positive, brown negative. Each checkpoint has colours of its own, as Jacobians grow by decades in training:
    half its largest entry is full colour, as a few entries tower over the others.

    Raises:
        ValueError: where the metric has no matrices, or none of these layers.
    """
    points, tags = _of_layers(frame, metric, "row", layer, other_layer, analysis, tags, allow_suspect)
    directions = sorted({point.tags[name] for point in points for name in ("row", "column")})
    hover = "row %{y}, column %{x}"
    left, right = "Left direction", "Right direction"
    axes = _Axes(directions, directions, left, right, hover, directions)
    title = ", ".join(filter(None, [sentence(pair_text(layer, other_layer)), variant_text(tags)]))
    return _heat_map(title, points, lambda p: (p.tags["row"], p.tags["column"]), axes, each_step=True)


@dataclass(frozen=True)
class _Axes:
    """What stands down and across, and how it is called."""

    keys: Sequence[int]
    texts: Sequence[Any]
    down: str
    across: str
    hover: str
    numbers: Sequence[int] | None  # where the axis counts


def _of_layers(
    frame: pd.DataFrame,
    metric: str,
    place: str,
    layer: int,
    other_layer: int | None,
    analysis: str | None,
    tags: Mapping[str, Any] | None,
    allow_suspect: bool,
) -> tuple[list[Point], dict[str, Any]]:
    """The points of one layer, or pair of layers, that have this tag, of one variant; and its tags."""
    placed = [
        point
        for point in select(frame, metric, analysis=analysis, tags=tags, allow_suspect=allow_suspect)
        if place in point.tags
    ]
    if not placed:
        raise ValueError(f"metric {metric!r} has no values with the tag {place!r}")
    points = [point for point in placed if (point.layer, point.other_layer) == (layer, other_layer)]
    if not points:
        known = sorted({pair_text(point.layer, point.other_layer) for point in placed})
        raise ValueError(f"metric {metric!r} has no {pair_text(layer, other_layer)}; it has: {', '.join(known)}")
    return of_plainest(points, tags)


def _heat_map(
    title: str,
    points: Sequence[Point],
    cell: Callable[[Point], tuple[Any, Any]],
    axes: _Axes,
    *,
    each_step: bool = False,
) -> go.Figure:
    """The map at the last checkpoint, with a frame for each.

    The largest entry off the diagonal of any checkpoint is full colour; with `each_step` half the largest of each.
    """
    by_step = grouped(points, lambda point: point.step)
    place = {key: index for index, key in enumerate(axes.keys)}
    bound = _largest(p for p in points if cell(p)[0] != cell(p)[1])

    def data(step: int) -> list[dict[str, Any]]:
        matrix: list[list[float | None]] = [[None] * len(axes.keys) for _ in axes.keys]
        for point in by_step[step]:
            down, across = cell(point)
            matrix[place[down]][place[across]] = point.value
        full = 0.5 * _largest(by_step[step]) if each_step else bound
        (full,) = rounded([full], 3)
        ends = {"zmin": -(full or 1.0), "zmax": full or 1.0}
        return [{"type": "heatmap", "z": [rounded(row, 3) for row in matrix], **ends}]

    steps = spread(sorted(by_step), FRAMES)
    bar = {"thickness": 9, "outlinewidth": 0, "tickfont": {"size": 10, "color": MUTED}, "x": 1.01, "xpad": 4}
    gap = 1 if len(axes.keys) <= 24 else 0
    look = {
        "x": list(axes.texts),
        "y": list(axes.texts),
        "colorscale": DIVERGING,
        "xgap": gap,
        "ygap": gap,
        "hovertemplate": "%{z:.3g}<br>" + axes.hover + "<extra></extra>",
        "colorbar": {**bar, "nticks": 5},
    }
    axis = {"constrain": "domain", "showgrid": False}
    axis |= (
        whole_ticks(axes.numbers[0], axes.numbers[-1])
        if axes.numbers
        else {"type": "category", "dtick": 1 + (len(axes.keys) - 1) // 8}
    )
    fig = figure(
        title,
        [{**data(steps[-1])[0], **look}],
        xaxis={"title": {"text": axes.across}, **axis},
        yaxis={
            "title": {"text": axes.down, "standoff": 12},
            "autorange": "reversed",
            "scaleanchor": "x",
            "constraintoward": "top",
            **axis,
        },
        height=450,
        margin={"t": 40},
    )
    add_slider(fig, steps, data)
    return fig


def _largest(points: Iterable[Point]) -> float:
    return max((abs(point.value) for point in points if math.isfinite(point.value)), default=0.0)
