"""Metrics over the layers, over lists of values, and over the distance between tokens."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import pandas as pd
import plotly.graph_objects as go

from lit_layers.plots.axes import whole_ticks
from lit_layers.plots.labels import BASELINES, LEVELS, LOG_SCALE, count, escape, label, tag_text
from lit_layers.plots.sliders import FRAMES, add_slider, spread
from lit_layers.plots.tables import Point, grouped, is_on_axes, is_placed, of_plainest, select, steps_of, title_of
from lit_layers.plots.theme import (
    DASHES,
    DEPTH,
    LEGEND_BELOW,
    MUTED,
    TIME,
    bar_trace,
    colors_of,
    figure,
    rounded,
)

_PROFILES = 16  # lines of one figure that can still be told apart


def layer_profile(
    frame: pd.DataFrame,
    metric: str,
    *,
    analysis: str | None = None,
    tags: Mapping[str, Any] | None = None,
    baselines: Sequence[str] = (),
    allow_suspect: bool = False,
) -> go.Figure:
    """Returns a metric over the layers (or over the tag `distance`), one line a checkpoint.

    Colours run from the first checkpoint to the last; of many checkpoints, some that are spread evenly are drawn.
    Rows tagged `reference`, and the metrics named in `baselines` where they are per layer, are dashed lines, at the
    last checkpoint. `tags` chooses a variant, as in `emergence_curves`.

    Raises:
        ValueError: where the metric has no values per layer.
    """
    chosen: dict[str, Any] = {"analysis": analysis, "tags": tags, "allow_suspect": allow_suspect, "over_steps": True}
    points = _plain(select(frame, metric, **chosen))
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
    compared = _levels([point for point in points if point.reference is not None], ends)
    compared += [_fixed_level(level, text, ends) for level, text in LEVELS.get(metric, {}).items()]
    for name in baselines:
        compared += _dashed_profile(_plain(select(frame, name, **chosen)), metric, name)
    traces += compared
    title = "Layer" if number == "layer" else "Distance between the blocks"
    return figure(
        title_of(metric, tags or {}),
        traces,
        unit=label(metric).unit,
        log=metric in LOG_SCALE,
        xaxis={"title": {"text": title}, **whole_ticks(*ends)},
        **(LEGEND_BELOW if compared else {}),
    )


def spectrum(
    frame: pd.DataFrame,
    metric: str = "singular_value",
    *,
    analysis: str | None = None,
    tags: Mapping[str, Any] | None = None,
    allow_suspect: bool = False,
) -> go.Figure:
    """Returns lists of values (tag `index`) on a log axis, one line a layer, with a slider over the checkpoints.

    Raises:
        ValueError: where the metric has no lists of values per layer.
    """
    return _lists(
        frame,
        metric,
        "index",
        "no lists of values per layer",
        analysis,
        tags,
        allow_suspect,
        lambda first, last: {"title": {"text": "Number in the list"}, **whole_ticks(first, last)},
    )


def distance_profile(
    frame: pd.DataFrame,
    metric: str,
    *,
    analysis: str | None = None,
    tags: Mapping[str, Any] | None = None,
    allow_suspect: bool = False,
) -> go.Figure:
    """Returns a metric over the distance between two tokens (tag `token_distance`), one line a layer, with a slider.

    The axis is log(1 + distance): 0, the token itself, has a place on it.

    Raises:
        ValueError: where the metric has no values per distance between tokens.
    """
    refusal = "no values per distance between tokens"
    return _lists(frame, metric, "token_distance", refusal, analysis, tags, allow_suspect, _distances)


def _lists(
    frame: pd.DataFrame,
    metric: str,
    ordinal: str,
    refusal: str,
    analysis: str | None,
    tags: Mapping[str, Any] | None,
    allow_suspect: bool,
    axis_of: Callable[[int, int], dict[str, Any]],
) -> go.Figure:
    """Values over a tag, one line a layer, with a slider over the checkpoints; on a log axis for a list of values."""
    found = select(frame, metric, analysis=analysis, tags=tags, allow_suspect=allow_suspect)
    points = [point for point in found if ordinal in point.tags and point.layer is not None]
    if not points:
        raise ValueError(f"metric {metric!r} has {refusal}")
    points, tags = of_plainest(points, tags)
    ordered = sorted(points, key=lambda point: point.tags[ordinal])
    parts = grouped(ordered, lambda point: (point.step, point.layer))
    layers = sorted({point.layer for point in points if point.layer is not None})
    is_log = ordinal == "index" or metric in LOG_SCALE

    def place(point: Point) -> float:
        number = point.tags[ordinal]
        return number if ordinal == "index" else round(math.log2(1 + number), 4)

    def data(step: int) -> list[dict[str, Any]]:
        lists = [parts.get((step, layer), []) for layer in layers]
        return [
            {
                "type": "scatter",
                "x": [place(point) for point in part],
                "y": rounded(point.value for point in part),
                "text": [str(point.tags[ordinal]) for point in part],
            }
            for part in lists
        ]

    steps = spread(steps_of(points), FRAMES)
    traces = []
    for trace, layer, color in zip(data(steps[-1]), layers, colors_of(DEPTH, len(layers)), strict=True):
        hover = "%{y:.4g}<br>" + ("number" if ordinal == "index" else "distance")
        hover += " %{text}<extra>" + f"layer {layer}</extra>"
        look = {"mode": "lines+markers", "line": {"color": color, "width": 1.6}, "marker": {"size": 4}}
        traces.append({**trace, **look, "showlegend": False, "hovertemplate": hover})
    if len(layers) > 1:
        shown = sorted({layers[0], layers[len(layers) // 2], layers[-1]})
        traces.append(bar_trace("Layer", DEPTH, {layer: str(layer) for layer in shown}))
    values = [point.value for point in points]
    fig = figure(
        title_of(metric, tags or {}),
        traces,
        unit=label(metric).unit,
        xaxis=axis_of(ordered[0].tags[ordinal], ordered[-1].tags[ordinal]),
        log=is_log,
        yaxis=_log_range(values) if is_log else _range(values),
        height=400,
    )
    add_slider(fig, steps, data)
    return fig


def _distances(first: int, last: int) -> dict[str, Any]:
    """An axis of log(1 + distance) with labels at 0 and powers of two, far enough apart for a narrow screen."""
    labels = [0, *(2**power for power in range(31))]
    every = 2 if last > 64 else 1
    shown = [number for index, number in enumerate(labels) if first <= number <= last and index % every == 0]
    title = {"text": "Distance from the last token"}
    return {"title": title, "tickvals": [round(math.log2(1 + n), 4) for n in shown], "ticktext": [*map(str, shown)]}


def _plain(points: Iterable[Point]) -> list[Point]:
    """The points that belong to a layer, a distance or the whole model, not to a pair or a place in a table."""
    return [point for point in points if point.other_layer is None and not is_placed(point)]


def _fixed_level(level: float, text: str, ends: list[int]) -> dict[str, Any]:
    line = {"color": MUTED, "width": 1.6, "dash": DASHES[0]}
    return {"x": ends, "y": [level] * 2, "mode": "lines", "name": text, "line": line, "hoverinfo": "name+y"}


def _dashed_profile(points: list[Point], metric: str, name: str) -> list[dict[str, Any]]:
    """A metric to compare with over the layers, at the last checkpoint."""
    own = [point for point in points if point.layer is not None]
    if not own:
        return []
    last = max(point.step for point in own)
    part = sorted((point for point in own if point.step == last), key=lambda point: point.layer or 0)
    text = escape(BASELINES.get(metric, {}).get(name, label(name).title))
    line = {"color": MUTED, "width": 1.6, "dash": DASHES[0]}
    places = {"x": [point.layer for point in part], "y": rounded(point.value for point in part)}
    return [
        {**places, "mode": "lines", "name": text, "line": line, "hovertemplate": "%{y:.4g}<extra>" + text + "</extra>"}
    ]


def _levels(references: list[Point], ends: list[int]) -> list[dict[str, Any]]:
    """A dashed line for each reference, at its last value."""
    traces = []
    for index, (name, part) in enumerate(grouped(references, lambda point: point.reference).items()):
        text, last = escape(tag_text({"reference": name})), max(part, key=lambda point: point.step)
        line = {"color": MUTED, "width": 1.6, "dash": DASHES[index % len(DASHES)]}
        level = {"x": ends, "y": rounded([last.value] * 2), "mode": "lines", "name": text, "line": line}
        traces.append({**level, "hovertemplate": "%{y:.4g}<extra>" + text + "</extra>"})
    return traces


def _log_range(values: Iterable[float]) -> dict[str, Any]:
    logs = [math.log10(value) for value in values if value > 0 and math.isfinite(value)]
    if not logs:
        return {}
    pad = 0.05 * (max(logs) - min(logs)) or 0.2
    return {"range": [min(logs) - pad, max(logs) + pad]}


def _range(values: Iterable[float]) -> dict[str, Any]:
    """The same at every checkpoint, with 0 in sight."""
    finite = [value for value in values if math.isfinite(value)]
    return {"range": [min(0.0, *finite), 1.05 * max(finite)]} if finite and max(finite) > 0 else {}
