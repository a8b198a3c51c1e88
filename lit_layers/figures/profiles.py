"""Line figures of a metric over layers, indices in a list of values, token distances, or numbers of training rows."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Unpack

import pandas as pd

from lit_layers.figures.chart import Bar, Chart, Series
from lit_layers.figures.labels import count, tag_text
from lit_layers.figures.tables import (
    TRAIN_ROWS,
    Chosen,
    Point,
    drawable,
    grouped,
    has_unit,
    is_on_axes,
    is_tabular,
    matching,
    plainest_points,
    rows_of,
    select,
    steps_of,
    title_of,
)
from lit_layers.figures.theme import (
    COLORS,
    DASHED,
    DEPTH,
    MUTED,
    SYMBOLS,
    TIME,
    Axis,
    colors_of,
    layer_axis,
    reference_look,
    rounded,
    spread,
)
from lit_layers.metrics import look_up

__all__ = ["layer_profile", "list_profile", "models_in_rows"]

FRAMES = 30  # largest number of slider positions
_PROFILES = 16  # largest number of lines: more cannot be distinguished
# The x-axis for models of different depth.
_DEPTHS = Axis(
    title="Depth (100 layer / number of layers)", labels={n: str(n) for n in (0, 25, 50, 75, 100)}, ends=(-3, 103)
)
_BARS = 13  # largest number of lines with error bars: more bars cannot be distinguished


def series_of(points: Iterable[Point | None], x: Sequence[Any], **look: Any) -> Series:
    """Return points as one series of a chart, with their intervals; None instead of a point breaks the line."""
    shown = list(points)
    ends = {
        name: rounded(getattr(p, name) if p and math.isfinite(p.low + p.high) else None for p in shown)
        for name in ("low", "high")
    }
    ends = ends if any(end is not None for end in ends["low"]) else {}
    return Series(x=x, y=rounded(p.value if p else None for p in shown), **ends, **look)


def level(x: Sequence[Any], value: float, name: str, *, color: str = MUTED, dash: str = "dash", **look: Any) -> Series:
    """Return a reference value as a dashed line over all of `x`."""
    look = {"width": 1.6, "legend": True, **look}
    return Series(x=x, y=rounded([value] * len(x)), name=name, color=color, dash=dash, **look)


def levels_of(metric: str, x: Sequence[Any], **look: Any) -> list[Series]:
    """Return a list with the reference line of a metric; empty if the metric has none.

    The line is at `Metric.level`, a value for comparison that follows from the metric's definition.
    """
    row = look_up(metric)
    return [] if row.level is None else [level(x, row.level, row.level_name, **look)]


def color_bar(
    title: str, stops: Sequence[str], numbers: Sequence[int], texts: Sequence[str] | None = None
) -> Bar | None:
    """Return a colour bar with labels at the first, middle and last number; None for fewer than two numbers."""
    if len(numbers) < 2:
        return None
    shown = sorted({0, (len(numbers) - (texts is not None)) // 2, len(numbers) - 1})
    return Bar(title=title, stops=stops, labels={numbers[n]: texts[n] if texts else str(numbers[n]) for n in shown})


def value_axis(metric: str, tags: Mapping[str, Any] | None = None, *, log: bool | None = None, **options: Any) -> Axis:
    row = look_up(metric)
    is_log = row.log if log is None else log
    return Axis(title=row.unit if has_unit(tags or {}) else "", log=is_log, whole=row.whole, **options)


def log_if_wide(chart: Chart) -> Chart:
    """Return the chart with a log axis if all values are positive and span more than three orders of magnitude."""
    values = [end for series in chart.series for part in (series.y, series.low, series.high) for end in part]
    numbers = [value for value in values if value is not None]
    if not numbers or chart.y.whole or min(numbers) <= 0 or max(numbers) <= 1e3 * min(numbers):
        return chart
    return replace(chart, y=replace(chart.y, log=True))


# ------------------------------------------------------------------------------------------------ over layers


def layer_profile(
    frame: pd.DataFrame,
    metric: str,
    *,
    baselines: Sequence[str] = (),
    controls: Sequence[str] = (),
    num_layers: Mapping[str, int] | None = None,
    **chosen: Unpack[Chosen],
) -> Chart:
    """Return a metric over the layers (or over the tag `distance`), with one line per checkpoint or per model.

    Colours run from the first checkpoint to the last. If there are many checkpoints, evenly spaced ones are drawn. The
    first and the last have 95% intervals, if recorded. Models of different depth are drawn over depth in per cent,
    100 l / L for layer l: 0 is the embedding, 100 the last layer. L is the model's entry in `num_layers`, or the last
    measured layer if that is larger.

    Dashed lines are values for comparison: rows tagged `reference`, metrics named in `baselines` that have values per
    layer, and rows whose tag `control` is named in `controls`. For a run, they are values of the last checkpoint. For
    several models, each model has its own dashed lines, in its colour. References that are equal for all models are
    one line. `tags` selects a variant, as in `emergence_curves`.

    Raises:
        InputError: for checkpoints or models that an audit found suspect, unless `allow_suspect`.
        ValueError: the metric has no values per layer.
    """
    of_models = bool(rows_of(frame, metric, chosen.get("analysis"))["step"].isna().all())
    parts = _parts(frame, metric, of_models, **chosen)
    points = [point for part in parts.values() for point in part]
    if not any(map(is_on_axes, points)):
        raise ValueError(f"metric {metric!r} has no values per layer")
    points, tags = plainest_points(points, chosen.get("tags"))
    number, parts = ordinal_of(points), {key: matching(part, tags) for key, part in parts.items()}
    depths = _depths(frame, parts, num_layers) if of_models and number == "layer" else {}
    is_share = len({*depths.values()}) > 1 and all(depths.values())
    places = sorted({point.index(number) or 0 for point in indexed(points, number)})
    ends = [0, 100] if is_share else [places[0], places[-1]]
    names: dict[Any, str] = short_names([*parts]) if of_models else {step: f"step {step:,}" for step in parts}
    looks = _looks([*parts], of_models)
    series, last = list[Series](), max(looks)

    def add(key: Any, part: Sequence[Point], **look: Any) -> None:
        """Add the line of a checkpoint or model; tooltips show the layer index even if the axis is in per cent."""
        by_number = {point.index(number) or 0: point for point in part}
        at = [*range(min(by_number), max(by_number) + 1)] if of_models else places  # a missing layer breaks the line
        look["texts"] = [f"layer {n} of {depths[key]:g}" if depths else f"{number} {n}" for n in at]
        shown = [round(100 * n / depths[key], 4) for n in at] if is_share else at
        series.append(series_of(map(by_number.get, at), shown, **look))

    for key, look in looks.items():
        if part := indexed(parts[key], number):
            add(key, part, name=names[key], **look)
    num_lines, compared = len(series), parts if of_models else {last: parts[last]}
    for kind in references(point for part in compared.values() for point in part):
        text, dash = tag_text({"reference": kind}), DASHED[(len(series) - num_lines) % len(DASHED)]
        of_kind = {key: [p for p in part if p.reference == kind] for key, part in compared.items()}
        if any(p.index(number) is not None for part in of_kind.values() for p in part):  # a null has values per layer
            for key, part in of_kind.items():
                own = {"name": f"{names[key]}, {text}" if of_models else text, "legend": len(of_kind) == 1}
                color, dash = reference_look(kind, 0)
                layered = [p for p in part if p.index(number) is not None]
                add(key, layered, color=color, width=1.6, dash=dash, interval="", **own)
            continue
        levels = {key: p.value for key, part in of_kind.items() for p in part}
        if len({*levels.values()}) == 1:
            series.append(level(ends, levels.popitem()[1], text, dash=dash))
            continue
        for key, at in levels.items():
            series.append(level(ends, at, f"{names[key]}, {text}", color=looks[key]["color"], dash=dash, legend=False))
        series.append(Series(x=ends[:1], y=[None], name=text, dash=dash, width=1.6, legend=True))
    series += levels_of(metric, ends)
    others: list[tuple[str, str, Chosen]] = [(look_up(name).compared, name, chosen) for name in baselines]
    for each in controls:
        others.append((tag_text({"control": each}), metric, {**chosen, "tags": {**tags, "control": each}}))
    for text, name, options in others:
        found, dash = _parts(frame, name, of_models, **options), "dash"
        if not of_models:
            found = {last: found[max(found)]} if found else {}
            dash = dash if name in baselines else DASHED[(len(series) - num_lines) % len(DASHED)]
        layered = {key: part for key in found if key in looks and (part := indexed(found[key], "layer"))}
        look: dict[str, Any] = {"dash": dash, "width": 1.6, "interval": ""}
        for key, part in layered.items():
            own = {"name": f"{names[key]}, {text}", "color": looks[key]["color"], "width": 1.4}
            add(key, part, **look | (own if of_models else {"name": text, "color": MUTED, "legend": True}))
        if of_models and layered:  # legend entry for the dashed lines
            series.append(Series(x=ends[:1], y=[None], name=text, legend=True, dash=dash, width=1.6))
    if len(series) < 2:
        series = [replace(one, legend=False) for one in series]
    steps = [] if of_models else [*looks]
    chart = Chart(
        title=title_of(metric, tags),
        x=_DEPTHS if is_share else layer_axis(number),
        y=value_axis(metric, tags),
        series=series,
        bar=color_bar("Step", TIME, range(len(steps)), [count(step) for step in steps]),
        hover="",
        height=340 if len(series) == num_lines else 380,
    )
    return log_if_wide(chart)


def _parts(frame: pd.DataFrame, metric: str, of_models: bool, **chosen: Unpack[Chosen]) -> dict[Any, list[Point]]:
    """Return a metric's points by checkpoint, or by model if `of_models`.

    Values of layer pairs, and entries of tables (e.g. over token pairs), are left out.
    """
    if not of_models:
        return dict(sorted(grouped(plain(select(frame, metric, **chosen, over_steps=True)), lambda p: p.step).items()))
    rows = rows_of(frame, metric, chosen.get("analysis"))
    by_run = {run: plain(select(part, metric, **chosen)) for run, part in rows.groupby("run", sort=False)}
    return {run: points for run, points in by_run.items() if points}


def _depths(frame: pd.DataFrame, runs: Iterable[str], num_layers: Mapping[str, int] | None) -> dict[str, float]:
    """Return the number of layers of each model: as in `num_layers`, or the last measured layer if that is larger."""
    table: Any = frame
    measured = table.groupby("run", sort=False)[["layer", "other_layer"]].max().max(axis=1)
    return {run: max(float(measured[run]), (num_layers or {}).get(run, 0)) for run in runs}


def _looks(keys: Sequence[Any], of_models: bool) -> dict[Any, dict[str, Any]]:
    """Return the line style of each model, or of each drawn checkpoint.

    At most `_PROFILES` checkpoints are drawn. They are evenly spaced.
    """
    look: dict[str, Any] = {"width": 2.0, "size": 5.5, "legend": True, "interval": ""}
    if of_models:
        return {key: {**look, "color": color_of(n), "mark": symbol_of(n)} for n, key in enumerate(keys)}
    steps = spread(keys, _PROFILES)
    looks = {}
    for step, color in zip(steps, colors_of(TIME, len(steps)), strict=True):
        last = step == steps[-1]
        looks[step] = {"color": color, "width": 2.6 if last else 1.4, "size": 6 if last else 3.5}
        looks[step] |= {"mark": "circle" if step > 0 else "diamond"}
        looks[step]["interval"] = "band" if step in (steps[0], steps[-1]) else ""
    return looks


_LISTS = {"index": "Number in the list", "token_distance": "Distance from the last token", TRAIN_ROWS: "Training rows"}


def list_profile(frame: pd.DataFrame, metric: str, **chosen: Unpack[Chosen]) -> Chart:
    """Return a chart of lists of values, with one line per layer and a slider over checkpoints.

    The values of a list differ in one of three tags:

    - `index`, e.g. of singular values; the axis of values is logarithmic.
    - `token_distance`, the distance between two tokens, drawn at log(1 + distance) so that distance 0 has a position.
    - `train_rows`, the number of training rows, on a log axis; with 95% intervals if there are few lines.

    Raises:
        ValueError: the metric has no lists of values per layer.
    """
    is_listed = lambda point: not point.tags.keys().isdisjoint(_LISTS) and point.layer is not None  # noqa: E731
    points, tags = drawable(frame, metric, is_listed, "lists of values per layer", **chosen)
    ordinal = next(name for name in _LISTS if name in points[0].tags)
    is_rows, is_index = ordinal == TRAIN_ROWS, ordinal == "index"
    at = (lambda n: round(math.log2(1 + n), 4)) if ordinal == "token_distance" else (lambda n: n)
    steps, numbers = spread(steps_of(points), FRAMES), sorted({point.tags[ordinal] for point in points})
    points = sorted(framed(points, steps), key=lambda point: (point.step, point.tags[ordinal]))
    by_layer = dict(sorted(grouped(points, lambda point: point.layer or 0).items()))
    look: dict[str, Any] = {"mark": "circle", "size": 4.5, "width": 1.7}
    look["interval"] = "bars" if is_rows and len(by_layer) <= _BARS else ""
    series = []
    for (layer, part), color in zip(by_layer.items(), colors_of(DEPTH, len(by_layer)), strict=True):
        frames, texts = [steps.index(p.step) for p in part], [f"{_LISTS[ordinal]}: {p.tags[ordinal]}" for p in part]
        look |= {"name": f"layer {layer}", "color": color, "frame": frames, "texts": texts}
        series.append(series_of(part, [at(p.tags[ordinal]) for p in part], **look))
    log = is_index or (look_up(metric).log and not is_rows)
    values = (end for p in points for end in ((p.value, p.low, p.high) if is_rows else (p.value,)))
    # Label distances at 0 and powers of two, or at every second one so that a narrow screen has room for them.
    powers = [0, *(2**power for power in range(numbers[-1].bit_length()))][:: 2 if numbers[-1] > 64 else 1]
    shown = numbers if is_rows else [n for n in powers if n >= numbers[0]]
    x = Axis(title=_LISTS[ordinal], whole=True)
    if not is_index:
        ends = fixed_limits(map(float, numbers), log=True, pad=0.04) if is_rows else None
        x = Axis(title=_LISTS[ordinal], labels={at(n): count(n) for n in shown}, log=is_rows, ends=ends)
    y = value_axis(metric, log=log, ends=fixed_limits(values, log=log, zero=not log and not is_rows))
    bar = color_bar("Layer", DEPTH, [*by_layer])
    return Chart(title=title_of(metric, tags), x=x, y=y, series=series, bar=bar, frames=steps, hover="", height=400)


# ------------------------------------------------------------------------------------------------ models side by side


def models_in_rows(frame: pd.DataFrame, metric: str, **chosen: Unpack[Chosen]) -> Chart:
    """Return a metric of whole models at their last checkpoint, with one row per model and variant, and 95% intervals.

    Raises:
        InputError: for models that an audit found suspect, unless `allow_suspect`.
        ValueError: no model has a value of this metric.
    """
    runs = [*rows_of(frame, metric, chosen.get("analysis")).groupby("run", sort=False)]
    rows = []
    for run, part in runs:
        points = [point for point in select(part, metric, **chosen) if point.layer is None]
        for point in (p for p in points if p.step == points[-1].step):
            tags = tag_text(dict(point.tags))
            rows.append((", ".join(filter(None, [run if len(runs) > 1 or not tags else "", tags])), point))
    if not rows:
        raise ValueError(f"metric {metric!r} has no values of whole models")
    look: dict[str, Any] = {"mark": "circle", "size": 6.5, "color": COLORS[0], "interval": "bars"}
    dots = series_of([point for _, point in rows], range(len(rows)), **look)
    return row_chart(
        title_of(metric, {}), [text for text, _ in rows], value_axis(metric), [dots], height=100 + 16 * len(rows)
    )


def short_names(runs: Sequence[str]) -> dict[str, str]:
    """Return the display names of models: the last component of the path, or all of it if two models share that."""
    last = {run: run.rstrip("/").split("/")[-1] or run for run in runs}
    shared = {name for name in last.values() if list(last.values()).count(name) > 1}
    return {run: run if name in shared else name for run, name in last.items()}


def color_of(index: int) -> str:
    return COLORS[index % len(COLORS)]


def symbol_of(index: int) -> str:
    return SYMBOLS[index // len(COLORS) % len(SYMBOLS)]


def style_of_run(index: int, name: str, *, of: int, **more: Any) -> dict[str, Any]:
    """Return the style of run `index` out of `of` runs; a single run gets no name and no legend."""
    several = {"name": name, "legend": True} if of > 1 else {"name": "", "legend": False}
    return {"color": color_of(index), "mark": symbol_of(index), **several, **more}


# ------------------------------------------------------------------------------------------------ over depth


def depth_curves(title: str, models: Mapping[str, Sequence[float]]) -> Chart:
    """Return a chart of a quantity over relative depth in per cent, with one line per model.

    `models` holds the values at layers 0 to L, NaN if missing.
    """
    series = []
    for index, (name, values) in enumerate(models.items()):
        depth = len(values) - 1
        look: dict[str, Any] = {"name": name, "color": color_of(index), "width": 2.0, "legend": len(models) > 1}
        look["mark"] = symbol_of(index)
        texts = [f"layer {n} of {depth}" for n in range(depth + 1)]
        series.append(Series(x=[100 * n / depth for n in range(depth + 1)], y=rounded(values), texts=texts, **look))
    return Chart(title=title, x=_DEPTHS, y=Axis(), series=series, hover="", height=340)


def row_chart(title: str, texts: Sequence[str], values: Axis, series: Sequence[Series], *, height: int) -> Chart:
    """Return a chart with labelled rows from top to bottom, and values on the horizontal axis."""
    down = Axis(labels=dict(enumerate(texts)), ends=(-0.6, len(texts) - 0.4), reverse=True, grid=False)
    return Chart(title=title, x=down, y=values, series=series, horizontal=True, hover="", height=height)


# ------------------------------------------------------------------------------------------------ parts


def framed(points: Sequence[Point], steps: Sequence[int]) -> list[Point]:
    """Return the points at the steps of a slider, sorted by step."""
    return sorted((p for p in points if p.step in {*steps}), key=lambda point: point.step)


def fixed_limits(
    values: Iterable[float], *, log: bool = False, zero: bool = False, pad: float = 0.05
) -> tuple[float, float] | None:
    """Return an axis range that fits the values of all checkpoints, so that the slider does not rescale the axis."""
    finite = [value for value in values if math.isfinite(value) and (value > 0 or not log)]
    finite = [math.log10(value) for value in finite] if log else [*finite, *([0.0] if zero else [])]
    if not finite:
        return None
    room = pad * (max(finite) - min(finite)) or (0.2 if log else 0.05)
    low, high = (min(finite) - (0 if zero and min(finite) == 0 else room)), max(finite) + room
    low, high = (10**low, 10**high) if log else (low, high)
    return float(f"{low:.4g}"), float(f"{high:.4g}")


def plain(points: Iterable[Point]) -> list[Point]:
    """Return the points that are neither values of layer pairs nor entries of tables (e.g. over token pairs)."""
    return [point for point in points if point.other_layer is None and not is_tabular(point)]


def ordinal_of(points: Iterable[Point]) -> str:
    """Return the name of the horizontal axis of these points: "layer", or "distance" if no point has a layer."""
    return "layer" if any(point.layer is not None for point in points) else "distance"


def indexed(points: Iterable[Point], number: str) -> list[Point]:
    """Return the points with a value of `number`: "layer", or a tag such as "distance". Leave out reference points."""
    return [point for point in points if point.index(number) is not None and point.reference is None]


def references(points: Iterable[Point]) -> dict[Any, list[Point]]:
    return grouped((point for point in points if point.reference is not None), lambda point: point.reference)
