"""Metrics over the layers, over lists of values, and over the distance between tokens."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from lit_layers.metrics import look_up
from lit_layers.plots.axes import whole_ticks
from lit_layers.plots.labels import count, escape, tag_text
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
    controls: Sequence[str] = (),
    intervals: bool = False,
    allow_suspect: bool = False,
) -> go.Figure:
    """Returns a metric over the layers (or over the tag `distance`), one line a checkpoint.

    Colours run from the first checkpoint to the last; of many checkpoints, some that are spread evenly are drawn. With
    `intervals` the first and the last have their 95% intervals around them, where they have any. Rows tagged
    `reference`, the metrics named in `baselines` where they are per layer, and the rows whose tag `control` is named in
    `controls` are dashed lines, at the last checkpoint. `tags` chooses a variant, as in `emergence_curves`.

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
        if intervals and step in (steps[0], steps[-1]):
            traces += _band(part, number, color)
        traces.append(_profile(_with_gaps(part, number, places), color, number=number, last=step == steps[-1]))
    if len(steps) > 1:
        shown = sorted({0, (len(steps) - 1) // 2, len(steps) - 1})
        traces.append(bar_trace("Step", TIME, {index: count(steps[index]) for index in shown}))
    ends = [min(places), max(places)]
    compared = _levels([point for point in points if point.reference is not None], ends)
    if (level := look_up(metric).level) is not None:
        compared.append(_fixed_level(level, look_up(metric).level_name, ends))
    for name in baselines:
        text = look_up(name).title_beside
        compared += _dashed_profile(_plain(select(frame, name, **chosen)), text, DASHES[0])
    for index, control in enumerate(controls, start=len(compared)):
        own = _plain(select(frame, metric, **{**chosen, "tags": {**tags, "control": control}}))
        own = [point for point in own if point.reference is None]
        compared += _dashed_profile(own, tag_text({"control": control}), DASHES[index % len(DASHES)])
    traces += compared
    title = "Layer" if number == "layer" else "Distance between the blocks"
    return figure(
        title_of(metric, tags or {}),
        traces,
        unit=look_up(metric).unit,
        log=look_up(metric).log,
        xaxis={"title": {"text": title}, **whole_ticks(*ends)},
        **(_legend_below(reverses=intervals) if compared else {}),
    )


def _legend_below(*, reverses: bool) -> dict[str, Any]:
    """Below the plot; in order, which filled areas would turn around."""
    legend = LEGEND_BELOW["legend"] | ({"traceorder": "normal"} if reverses else {})
    return {**LEGEND_BELOW, "legend": legend}


def residual_profile(
    frame: pd.DataFrame,
    metric: str = "prediction_residual",
    *,
    analysis: str | None = None,
    tags: Mapping[str, Any] | None = None,
    controls: Sequence[str] = (),
    allow_suspect: bool = False,
) -> go.Figure:
    """Returns a residual over the layers on a log axis, as `layer_profile` with intervals, and its exponential fit.

    The fit of the first and of the last checkpoint, dotted in their colours, is the least-squares line through the
    logarithms of layers 1 to L: its slope is that of rho^l, and hovering tells rho. Layer 0 is not in it.

    Raises:
        ValueError: where the metric has no values per layer.
    """
    chosen: dict[str, Any] = {"analysis": analysis, "tags": tags, "allow_suspect": allow_suspect}
    fig = layer_profile(frame, metric, controls=controls, intervals=True, **chosen)
    points = [p for p in _plain(select(frame, metric, over_steps=True, **chosen)) if p.layer is not None]
    points, _ = of_plainest(points, tags)
    by_step = grouped((p for p in points if p.layer and p.value > 0 and p.reference is None), lambda p: p.step)
    steps = spread(steps_of(points), _PROFILES)
    for step, color in zip(steps, colors_of(TIME, len(steps)), strict=True):
        if step in (steps[0], steps[-1]) and len(by_step.get(step, [])) >= 3:
            fig.add_trace(_fit(by_step[step], color, in_legend=step == steps[-1]))
    return fig.update_layout(**_legend_below(reverses=True))


def _fit(points: list[Point], color: str, *, in_legend: bool) -> dict[str, Any]:
    layers = [float(point.layer or 0) for point in points]
    slope, start = np.polyfit(layers, [math.log10(point.value) for point in points], 1)
    ends = [min(layers), max(layers)]
    return {
        "type": "scatter",
        "x": ends,
        "y": rounded(10 ** (start + slope * layer) for layer in ends),
        "mode": "lines",
        "name": "exponential fit",
        "showlegend": in_legend,
        "line": {"color": color, "width": 1.6, "dash": DASHES[1]},
        "hovertemplate": f"rho {10**slope:.4g}<extra>exponential fit, step {points[0].step:,}</extra>",
    }


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
    is_log = ordinal == "index" or look_up(metric).log

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
        unit=look_up(metric).unit,
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


def _with_gaps(points: list[Point], number: str, places: Iterable[int]) -> dict[int, Point | None]:
    """One checkpoint's points by place, None where others have one: a line breaks off there."""
    own = {point.number(number): point for point in points}
    return {place: own.get(place) for place in sorted(set(places))}


def _profile(points: Mapping[int, Point | None], color: str, *, number: str, last: bool) -> dict[str, Any]:
    """One checkpoint: its points in order, the last checkpoint's as a stronger line."""
    step = next(point.step for point in points.values() if point is not None)
    texts = ["" if point is None else interval_text(point) for point in points.values()]
    return {
        "x": list(points),
        "y": rounded(None if point is None else point.value for point in points.values()),
        **({"text": texts} if any(texts) else {}),
        "mode": "lines+markers",
        "line": {"color": color, "width": 2.6 if last else 1.4},
        "marker": {"size": 6 if last else 3.5, "symbol": "circle" if step > 0 else "diamond"},
        "showlegend": False,
        "hovertemplate": f"%{{y:.4g}}{'%{text}' if any(texts) else ''}<br>{number} %{{x}}<extra>step {step:,}</extra>",
    }


def interval_text(point: Point) -> str:
    """Returns a line about a point's 95% interval for hovering; an empty string where there is none."""
    known = math.isfinite(point.low) and math.isfinite(point.high)
    return f"<br>95% interval {point.low:.4g} to {point.high:.4g}" if known else ""


def _band(points: list[Point], number: str, color: str) -> list[dict[str, Any]]:
    """The 95% interval of those of a line's points that have one; `color` as plotly samples it, `rgb(...)`."""
    known = [point for point in points if interval_text(point)]
    edge = {"x": [point.number(number) for point in known], "mode": "lines", "line": {"width": 0}}
    edge |= {"hoverinfo": "skip", "showlegend": False}
    fill = {"fill": "tonexty", "fillcolor": color.replace("rgb(", "rgba(").replace(")", ", 0.13)")}
    low, high = rounded(point.low for point in known), rounded(point.high for point in known)
    return [{**edge, "y": low}, {**edge, "y": high, **fill}] if known else []


def _dashed_profile(points: list[Point], text: str, dash: str) -> list[dict[str, Any]]:
    """Something to compare with over the layers, at the last checkpoint."""
    own = [point for point in points if point.layer is not None]
    if not own:
        return []
    last = max(point.step for point in own)
    part = sorted((point for point in own if point.step == last), key=lambda point: point.layer or 0)
    text = escape(text)
    line = {"color": MUTED, "width": 1.6, "dash": dash}
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
