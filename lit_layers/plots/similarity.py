"""How alike the layers are: their similarities as a heat map, and the stages that follow from them over training."""

import math
from collections.abc import Mapping
from typing import Any

import pandas as pd
import plotly.graph_objects as go

from lit_layers.metrics import look_up, names, sentence
from lit_layers.plots.axes import AxisName, Grid, on_axis
from lit_layers.plots.matrices import layer_matrix
from lit_layers.plots.surfaces import VIRIDIS
from lit_layers.plots.tables import Point, select, steps_of
from lit_layers.plots.theme import COLORS, figure, rounded

SIMILARITIES, STAGES = names("similarity"), names("stage")


def similarity_matrix(
    frame: pd.DataFrame,
    metric: str,
    *,
    analysis: str | None = None,
    tags: Mapping[str, Any] | None = None,
    allow_suspect: bool = False,
) -> go.Figure:
    """Returns similarities of pairs of layers as `layer_matrix`, in colours from the least of any checkpoint to 1.

    Similarities are far from 0: on colours around 0 all layers would look alike.

    Raises:
        InputError: for suspect checkpoints, unless they are allowed.
        ValueError: where the metric has no values per pair of layers.
    """
    fig = layer_matrix(frame, metric, analysis=analysis, tags=tags, allow_suspect=allow_suspect)
    maps = [fig.data[0], *(part.data[0] for part in fig.frames)]
    values = [value for one in maps for row in one.z for value in row if value is not None and math.isfinite(value)]
    low = min(values, default=0.0)
    for one in maps:
        one.update(zmin=low, zmax=max(1.0, low + 1e-3))
    stops = [[n / (len(VIRIDIS) - 1), color] for n, color in enumerate(VIRIDIS)]
    fig.data[0].update(colorscale=stops)
    return fig


def stages_over_training(
    frame: pd.DataFrame,
    *,
    analysis: str | None = None,
    tags: Mapping[str, Any] | None = None,
    axis: AxisName = "step",
    allow_suspect: bool = False,
) -> go.Figure:
    """Returns how many layers are beginning, middle and ending over training; the untrained model stands apart.

    Raises:
        InputError: for suspect checkpoints, unless they are allowed.
        ValueError: where none of them has values at a step.
    """
    options: dict[str, Any] = {"analysis": analysis, "tags": tags, "allow_suspect": allow_suspect, "over_steps": True}
    table: Any = frame
    known = [name for name in STAGES if (table["metric"] == name).any()]
    points: dict[str, list[Point]] = {name: select(frame, name, **options) for name in known or STAGES[:1]}
    every = [point for part in points.values() for point in part]
    tokens_of = {point.step: point.tokens for point in every}
    steps = steps_of(every)
    grids = [Grid.of(part, tokens_of) for part in ([s for s in steps if s > 0], [s for s in steps if s <= 0])]
    traces: list[dict[str, Any]] = []
    for index, (name, part) in enumerate(points.items()):
        by_step = {point.step: point.value for point in part}
        told = sentence(name.removeprefix("num_"))
        for number, grid in enumerate(grids):
            if grid.steps:
                look = {"color": COLORS[index], "width": 2, "shape": "hv"}
                mark = {"color": COLORS[index], "size": 6 if number == 0 else 8}
                mark |= {"symbol": "circle" if number == 0 else "diamond"}
                own = {"y": rounded(by_step.get(step, math.nan) for step in grid.steps), "meta": number, "name": told}
                own |= {"legendgroup": told, "showlegend": number == 0 or not grids[0].steps}
                own |= {"mode": "lines+markers" if number == 0 else "markers", "line": look, "marker": mark}
                hover = "%{y} layers<br>%{customdata[0]}<extra>" + told + "</extra>"
                traces.append({**own, "hovertemplate": hover})
    layout = on_axis(traces, grids, axis)
    unit = look_up("num_middle").unit
    return figure("Stages of the layers", traces, unit=unit, yaxis={"rangemode": "tozero"}, height=450, **layout)


def stage_text(frame: pd.DataFrame, *, tags: Mapping[str, Any] | None = None) -> str:
    """Returns the stages at the last checkpoint in words: `2 beginning, 8 middle and 2 ending layers`, or nothing."""
    table: Any = frame
    counts = {}
    for name in STAGES:
        if (table["metric"] == name).any():
            points = select(frame, name, tags=tags)
            counts[name] = max(points, key=lambda point: point.step).value
    if len(counts) < len(STAGES):
        return ""
    first, middle, last = (f"{counts[name]:g} {name.removeprefix('num_')}" for name in STAGES)
    return f"{first}, {middle} and {last} layers"
