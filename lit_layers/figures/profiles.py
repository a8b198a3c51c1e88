"""A metric of a run as lines: over its layers, over lists of values, distances between tokens, and sample sizes."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, Unpack

import numpy as np
import pandas as pd

from lit_layers.figures.axes import Axis, layer_axis
from lit_layers.figures.chart import Bar, Chart, Series
from lit_layers.figures.labels import count, tag_text
from lit_layers.figures.tables import (
    TRAIN_ROWS,
    Chosen,
    Point,
    grouped,
    is_on_axes,
    is_placed,
    of_plainest,
    select,
    steps_of,
    title_of,
)
from lit_layers.figures.theme import DASHED, DEPTH, MUTED, SIZES, TIME, colors_of, rounded, spread
from lit_layers.metrics import look_up

FRAMES = 30  # places of a slider
_PROFILES = 16  # lines of one figure that can still be told apart
_BARS = 13  # lines of one figure whose error bars can still be told apart


def series_of(points: Iterable[Point | None], x: Sequence[Any], **look: Any) -> Series:
    """Returns points as a series, with their intervals where they have any; it breaks where there is None."""
    found = list(points)
    ends = {
        name: rounded(getattr(p, name) if p and math.isfinite(p.low + p.high) else None for p in found)
        for name in ("low", "high")
    }
    ends = ends if any(end is not None for end in ends["low"]) else {}
    return Series(x=x, y=rounded(p.value if p else None for p in found), **ends, **look)


def level(x: Sequence[Any], value: float, name: str, *, color: str = MUTED, dash: str = "dash", **look: Any) -> Series:
    """Returns a value to compare with: a dashed line through all places."""
    look = {"width": 1.6, "legend": True, **look}
    return Series(x=x, y=rounded([value] * len(x)), name=name, color=color, dash=dash, **look)


def levels_of(metric: str) -> list[tuple[float, str]]:
    """Returns the value to compare with that follows from a metric's definition, and what it is called; or nothing."""
    row = look_up(metric)
    return [] if row.level is None else [(row.level, row.level_name)]


def color_bar(
    title: str, stops: Sequence[str], numbers: Sequence[int], texts: Sequence[str] | None = None
) -> Bar | None:
    """Returns a colour bar with labels at the first, the middle and the last number; None for one alone."""
    if len(numbers) < 2:
        return None
    shown = sorted({0, len(numbers) // 2 if texts is None else (len(numbers) - 1) // 2, len(numbers) - 1})
    if texts is None:
        return Bar(title=title, stops=stops, labels={numbers[n]: str(numbers[n]) for n in shown})
    return Bar(title=title, stops=stops, labels={n: texts[n] for n in shown})


def value_axis(metric: str, *, log: bool | None = None, **options: Any) -> Axis:
    """Returns the axis of a metric's values."""
    is_log = look_up(metric).log if log is None else log
    return Axis(title=look_up(metric).unit, log=is_log, whole=look_up(metric).whole, **options)


# ------------------------------------------------------------------------------------------------ over layers


def layer_profile(
    frame: pd.DataFrame,
    metric: str,
    *,
    baselines: Sequence[str] = (),
    controls: Sequence[str] = (),
    intervals: bool = False,
    **chosen: Unpack[Chosen],
) -> Chart:
    """Returns a metric over the layers (or over the tag `distance`), one line a checkpoint.

    Colours run from the first checkpoint to the last; of many checkpoints, some that are spread evenly are drawn. With
    `intervals` the first and the last have their 95% intervals around them, where they have any. Rows tagged
    `reference`, the metrics named in `baselines` where they are per layer, and the rows whose tag `control` is named in
    `controls` are dashed lines, at the last checkpoint. `tags` chooses a variant, as in `emergence_curves`.

    Raises:
        ValueError: where the metric has no values per layer.
    """
    points = plain(select(frame, metric, **chosen, over_steps=True))
    if not any(map(is_on_axes, points)):
        raise ValueError(f"metric {metric!r} has no values per layer")
    points, tags = of_plainest(points, chosen.get("tags"))
    number = "layer" if any(point.layer is not None for point in points) else "distance"
    values = [point for point in points if point.number(number) is not None and point.reference is None]
    places = sorted({point.number(number) or 0 for point in values})
    by_step = grouped(values, lambda point: point.step)
    steps = spread(sorted(by_step), _PROFILES)
    series = []
    for step, color in zip(steps, colors_of(TIME, len(steps)), strict=True):
        by_place = {point.number(number): point for point in by_step[step]}
        last = step == steps[-1]
        look = {"name": f"step {step:,}", "color": color, "width": 2.6 if last else 1.4, "size": 6 if last else 3.5}
        look |= {"mark": "circle" if step > 0 else "diamond"}
        look["interval"] = "band" if intervals and step in (steps[0], steps[-1]) else ""
        series.append(series_of((by_place.get(place) for place in places), places, **look))
    ends = [places[0], places[-1]]
    for index, (name, part) in enumerate(_references(points).items()):
        last_one = max(part, key=lambda point: point.step)
        series.append(level(ends, last_one.value, tag_text({"reference": name}), dash=DASHED[index % len(DASHED)]))
    series += [level(ends, value, text) for value, text in levels_of(metric)]
    for name in baselines:
        text = look_up(name).title_beside
        series += _compared(plain(select(frame, name, **chosen, over_steps=True)), text, "dash")
    for index, control in enumerate(controls, start=len(series) - len(steps)):
        part = plain(select(frame, metric, **{**chosen, "tags": {**tags, "control": control}, "over_steps": True}))
        part = [point for point in part if point.reference is None]
        series += _compared(part, tag_text({"control": control}), DASHED[index % len(DASHED)])
    return Chart(
        title=title_of(metric, tags),
        x=layer_axis(number),
        y=value_axis(metric),
        series=series,
        bar=color_bar("Step", TIME, range(len(steps)), [count(step) for step in steps]),
        place=f"{number} {{x}}",
        height=340 if len(series) == len(steps) else 380,
    )


def residual_profile(
    frame: pd.DataFrame,
    metric: str = "prediction_residual",
    *,
    controls: Sequence[str] = (),
    **chosen: Unpack[Chosen],
) -> Chart:
    """Returns a residual over the layers on a log axis, as `layer_profile` with intervals, and its exponential fit.

    The fit of the first and of the last checkpoint, dotted in their colours, is the least-squares line through the
    logarithms of layers 1 to L: its slope is that of rho^l, and hovering tells rho. Layer 0 is not in it.

    Raises:
        ValueError: where the metric has no values per layer.
    """
    chart = layer_profile(frame, metric, controls=controls, intervals=True, **chosen)
    points = [p for p in plain(select(frame, metric, **chosen, over_steps=True)) if p.layer is not None]
    points, _ = of_plainest(points, chosen.get("tags"))
    by_step = grouped((p for p in points if p.layer and p.value > 0 and p.reference is None), lambda p: p.step)
    steps = spread(steps_of(points), _PROFILES)
    fits = [
        _fit(by_step[step], color, legend=step == steps[-1])
        for step, color in zip(steps, colors_of(TIME, len(steps)), strict=True)
        if step in (steps[0], steps[-1]) and len(by_step.get(step, [])) >= 3
    ]
    return replace(chart, series=[*chart.series, *fits], height=380)


def _fit(points: list[Point], color: str, *, legend: bool) -> Series:
    layers = [float(point.layer or 0) for point in points]
    slope, start = np.polyfit(layers, [math.log10(point.value) for point in points], 1)
    ends = [min(layers), max(layers)]
    name = "exponential fit" if legend else f"exponential fit, step {points[0].step:,}"
    told = [f"rho {10**slope:.4g}\nexponential fit, step {points[0].step:,}"] * 2
    values = rounded(10 ** (start + slope * layer) for layer in ends)
    look: dict[str, Any] = {"color": color, "dash": "dot", "width": 1.6, "legend": legend, "tells_texts": True}
    return Series(x=ends, y=values, name=name, texts=told, **look)


def spectrum(
    frame: pd.DataFrame,
    metric: str = "singular_value",
    **chosen: Unpack[Chosen],
) -> Chart:
    """Returns lists of values (tag `index`) on a log axis, one line a layer, with a slider over the checkpoints.

    Raises:
        ValueError: where the metric has no lists of values per layer.
    """
    refusal = "no lists of values per layer"
    axis = Axis(title="Number in the list", whole=True)
    return _lists(frame, metric, "index", refusal, lambda first, last: axis, lambda number: number, **chosen)


def distance_profile(
    frame: pd.DataFrame,
    metric: str,
    **chosen: Unpack[Chosen],
) -> Chart:
    """Returns a metric over the distance between two tokens (tag `token_distance`), one line a layer, with a slider.

    The axis is log(1 + distance): 0, the token itself, has a place on it.

    Raises:
        ValueError: where the metric has no values per distance between tokens.
    """

    def axis(first: int, last: int) -> Axis:
        """Labels at 0 and powers of two, far enough apart for a narrow screen."""
        numbers = [0, *(2**power for power in range(31))]
        shown = [n for index, n in enumerate(numbers) if first <= n <= last and index % (2 if last > 64 else 1) == 0]
        return Axis(title="Distance from the last token", labels={at(n): str(n) for n in shown})

    def at(number: int) -> float:
        return round(math.log2(1 + number), 4)

    refusal = "no values per distance between tokens"
    return _lists(frame, metric, "token_distance", refusal, axis, at, **chosen)


def _lists(
    frame: pd.DataFrame,
    metric: str,
    ordinal: str,
    refusal: str,
    axis: Callable[[int, int], Axis],
    at: Callable[[int], float],
    **chosen: Unpack[Chosen],
) -> Chart:
    """Values over a tag, one line a layer, with a slider over the checkpoints; on a log axis for a list of values."""
    points = [p for p in select(frame, metric, **chosen) if ordinal in p.tags and p.layer is not None]
    if not points:
        raise ValueError(f"metric {metric!r} has {refusal}")
    points, tags = of_plainest(points, chosen.get("tags"))
    points = sorted(points, key=lambda point: point.tags[ordinal])
    is_log = ordinal == "index" or look_up(metric).log
    layers = sorted({point.layer for point in points if point.layer is not None})
    steps = spread(steps_of(points), FRAMES)
    series = []
    for layer, color in zip(layers, colors_of(DEPTH, len(layers)), strict=True):
        part = framed([p for p in points if p.layer == layer], steps)
        texts = [f"{'number' if ordinal == 'index' else 'distance'} {p.tags[ordinal]}" for p in part]
        look = {"name": f"layer {layer}", "color": color, "width": 1.6, "mark": "circle", "size": 4, "texts": texts}
        x = [at(p.tags[ordinal]) for p in part]
        series.append(Series(x=x, y=rounded(p.value for p in part), frame=[steps.index(p.step) for p in part], **look))
    return Chart(
        title=title_of(metric, tags),
        x=axis(points[0].tags[ordinal], points[-1].tags[ordinal]),
        y=value_axis(metric, log=is_log, ends=fixed_ends([p.value for p in points], log=is_log, zero=not is_log)),
        series=series,
        bar=color_bar("Layer", DEPTH, layers),
        frames=steps,
        place="",
        height=400,
    )


def sample_size_curves(
    frame: pd.DataFrame,
    metric: str = "accuracy",
    *,
    over: Literal["rows", "layers"] = "rows",
    **chosen: Unpack[Chosen],
) -> Chart:
    """Returns a metric over the number of training rows (tag `train_rows`, log axis), one line a layer.

    With `over="layers"` the same numbers over the layers, one line a number of rows. Both with 95% intervals, where
    there are not too many lines for them, and with a slider over the checkpoints.

    Raises:
        ValueError: where the metric has no values per layer and number of training rows.
    """
    found = select(frame, metric, **chosen)
    points = sorted(
        (point for point in found if TRAIN_ROWS in point.tags and point.layer is not None),
        key=lambda point: (point.tags[TRAIN_ROWS], point.layer),
    )
    if not points:
        raise ValueError(f"metric {metric!r} has no values per layer and number of training rows")
    points, tags = of_plainest(points, chosen.get("tags"))
    by_layer = over == "rows"

    def line_of(point: Point, of_layer: bool = by_layer) -> int:
        return (point.layer or 0) if of_layer else point.tags[TRAIN_ROWS]

    lines, steps = sorted({line_of(point) for point in points}), spread(steps_of(points), FRAMES)
    series = []
    for line, color in zip(lines, colors_of(DEPTH if by_layer else SIZES, len(lines)), strict=True):
        part = framed([point for point in points if line_of(point) == line], steps)
        look: dict[str, Any] = {"name": f"layer {line}" if by_layer else f"{line:,} rows", "color": color, "width": 1.8}
        look |= {"mark": "circle", "size": 5, "interval": "bars" if len(lines) <= _BARS else ""}
        x = [line_of(point, not by_layer) for point in part]
        series.append(series_of(part, x, frame=[steps.index(point.step) for point in part], **look))
    rows = sorted({point.tags[TRAIN_ROWS] for point in points})
    ends = fixed_ends([*map(float, rows)], log=True, pad=0.04)
    of_rows = Axis(title="Training rows", labels={n: count(n) for n in rows}, log=True, ends=ends)
    every = [end for point in points for end in (point.value, point.low, point.high)]
    texts = [count(line) for line in lines]
    return Chart(
        title=title_of(metric, tags),
        x=of_rows if by_layer else layer_axis(),
        y=Axis(title=look_up(metric).unit, ends=fixed_ends(every)),
        series=series,
        bar=color_bar("Layer" if by_layer else "Training rows", DEPTH if by_layer else SIZES, range(len(lines)), texts),
        frames=steps,
        place="{x} rows" if by_layer else "layer {x}",
        height=420,
    )


# ------------------------------------------------------------------------------------------------ parts


def framed(points: Sequence[Point], steps: Sequence[int]) -> list[Point]:
    """Returns the points at places of the slider, one checkpoint after the other."""
    return sorted((p for p in points if p.step in {*steps}), key=lambda point: point.step)


def unbroken(by_number: Mapping[int, Point]) -> tuple[list[Point | None], list[int]]:
    """Returns points by whole numbers, and these from the first to the last; None where one is missing."""
    numbers = [*range(min(by_number), max(by_number) + 1)]
    return [by_number.get(number) for number in numbers], numbers


def fixed_ends(
    values: Iterable[float], *, log: bool = False, zero: bool = False, pad: float = 0.05
) -> tuple[float, float] | None:
    """Returns ends of an axis that are the same at every checkpoint, so that the slider shows what moves."""
    finite = [value for value in values if math.isfinite(value) and (value > 0 or not log)]
    finite = [math.log10(value) for value in finite] if log else [*finite, *([0.0] if zero else [])]
    if not finite:
        return None
    room = pad * (max(finite) - min(finite)) or (0.2 if log else 0.05)
    low, high = (min(finite) - (0 if zero and min(finite) == 0 else room)), max(finite) + room
    low, high = (10**low, 10**high) if log else (low, high)
    return float(f"{low:.4g}"), float(f"{high:.4g}")


def plain(points: Iterable[Point]) -> list[Point]:
    """The points that belong to a layer, a distance or the whole model, not to a pair or a place in a table."""
    return [point for point in points if point.other_layer is None and not is_placed(point)]


def _references(points: Sequence[Point]) -> dict[Any, list[Point]]:
    return grouped((point for point in points if point.reference is not None), lambda point: point.reference)


def _compared(points: list[Point], text: str, dash: str) -> list[Series]:
    """Something to compare with over the layers, at the last checkpoint."""
    layered = [point for point in points if point.layer is not None]
    if not layered:
        return []
    last = max(point.step for point in layered)
    by_layer, layers = unbroken({point.layer or 0: point for point in layered if point.step == last})
    look: dict[str, Any] = {"name": text, "color": MUTED, "dash": dash, "width": 1.6, "legend": True, "interval": ""}
    return [series_of(by_layer, layers, **look)]
