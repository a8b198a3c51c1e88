"""A metric as lines over layers, of a run or of models; over lists of values, distances, and sample sizes."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Unpack

import pandas as pd

from lit_layers.figures.chart import Bar, Chart, Series
from lit_layers.figures.labels import count, tag_text, wrapped
from lit_layers.figures.tables import (
    TRAIN_ROWS,
    Chosen,
    Point,
    drawable,
    grouped,
    is_on_axes,
    is_placed,
    matching,
    of_plainest,
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
    rounded,
    spread,
)
from lit_layers.metrics import look_up

__all__ = ["layer_profile", "list_profile", "model_profile", "models_in_rows", "sample_size_curves"]

FRAMES = 30  # places of a slider
_PROFILES = 16  # lines of one figure that can still be told apart
# of models that are not equally deep
_DEPTHS = Axis(
    title="Depth (100 layer / number of layers)", labels={n: str(n) for n in (0, 25, 50, 75, 100)}, ends=(-3, 103)
)
_BARS = 13  # lines of one figure whose error bars can still be told apart


def series_of(points: Iterable[Point | None], x: Sequence[Any], **look: Any) -> Series:
    """Return points as a series, with their intervals where they have any; it breaks where there is None."""
    shown = list(points)
    ends = {
        name: rounded(getattr(p, name) if p and math.isfinite(p.low + p.high) else None for p in shown)
        for name in ("low", "high")
    }
    ends = ends if any(end is not None for end in ends["low"]) else {}
    return Series(x=x, y=rounded(p.value if p else None for p in shown), **ends, **look)


def level(x: Sequence[Any], value: float, name: str, *, color: str = MUTED, dash: str = "dash", **look: Any) -> Series:
    """Return a value to compare with: a dashed line through all places."""
    look = {"width": 1.6, "legend": True, **look}
    return Series(x=x, y=rounded([value] * len(x)), name=name, color=color, dash=dash, **look)


def levels_of(metric: str, x: Sequence[Any], **look: Any) -> list[Series]:
    """Return the value to compare with that follows from a metric's definition, or nothing."""
    row = look_up(metric)
    return [] if row.level is None else [level(x, row.level, row.level_name, **look)]


def color_bar(
    title: str, stops: Sequence[str], numbers: Sequence[int], texts: Sequence[str] | None = None
) -> Bar | None:
    """Return a colour bar with labels at the first, the middle and the last number; None for one alone."""
    if len(numbers) < 2:
        return None
    shown = sorted({0, (len(numbers) - (texts is not None)) // 2, len(numbers) - 1})
    return Bar(title=title, stops=stops, labels={numbers[n]: texts[n] if texts else str(numbers[n]) for n in shown})


def value_axis(metric: str, *, log: bool | None = None, **options: Any) -> Axis:
    """Return the axis of a metric's values."""
    is_log = look_up(metric).log if log is None else log
    return Axis(title=look_up(metric).unit, log=is_log, whole=look_up(metric).whole, **options)


def log_if_wide(chart: Chart) -> Chart:
    """Return lines on a log axis where values and ends of intervals span more than three decades, all above 0."""
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
    intervals: bool = False,
    **chosen: Unpack[Chosen],
) -> Chart:
    """Return a metric over the layers (or over the tag `distance`), one line a checkpoint.

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
    number = numbered_by(points)
    by_step = grouped(numbered(points, number), lambda point: point.step)
    places = sorted({point.number(number) or 0 for part in by_step.values() for point in part})
    steps = spread(sorted(by_step), _PROFILES)
    series = []
    for step, color in zip(steps, colors_of(TIME, len(steps)), strict=True):
        by_place = {point.number(number): point for point in by_step[step]}
        last = step == steps[-1]
        look = {"name": f"step {step:,}", "color": color, "width": 2.6 if last else 1.4, "size": 6 if last else 3.5}
        look |= {"mark": "circle" if step > 0 else "diamond"}
        look["interval"] = "band" if intervals and step in (steps[0], steps[-1]) else ""
        series.append(series_of(map(by_place.get, places), places, **look))
    ends = [places[0], places[-1]]
    for index, (name, part) in enumerate(references(points).items()):
        last_one = max(part, key=lambda point: point.step)
        series.append(level(ends, last_one.value, tag_text({"reference": name}), dash=DASHED[index % len(DASHED)]))
    series += levels_of(metric, ends)
    for text, name, options in beside(metric, tags, baselines, controls, chosen):
        layered = [p for p in plain(select(frame, name, **options, over_steps=True)) if p.layer is not None]
        layered = [p for p in layered if p.reference is None and p.step == steps_of(layered)[-1]]
        dash = "dash" if name in baselines else DASHED[(len(series) - len(steps)) % len(DASHED)]
        if layered:
            look = {"color": MUTED, "width": 1.6, "legend": True, "interval": ""}
            series.append(series_of(*unbroken(layered, "layer"), name=text, dash=dash, **look))
    chart = Chart(
        title=title_of(metric, tags),
        x=layer_axis(number),
        y=value_axis(metric),
        series=series,
        bar=color_bar("Step", TIME, range(len(steps)), [count(step) for step in steps]),
        place=f"{number} {{x}}",
        height=340 if len(series) == len(steps) else 380,
    )
    return log_if_wide(chart)


def list_profile(frame: pd.DataFrame, metric: str, **chosen: Unpack[Chosen]) -> Chart:
    """Return lists of values, one line a layer, with a slider over the checkpoints.

    A list is over numbers (tag `index`, such as singular values, on a log axis) or over the distance between two tokens
    (tag `token_distance`). The axis of distances is log(1 + distance): 0, the token itself, has a place on it.

    Raises:
        ValueError: where the metric has no lists of values per layer.
    """
    is_listed = lambda point: not point.tags.keys().isdisjoint(_LISTS) and point.layer is not None  # noqa: E731
    points, tags = drawable(frame, metric, is_listed, "lists of values per layer", **chosen)
    ordinal = next(name for name in _LISTS if name in points[0].tags)
    points = [replace(p, low=math.nan, high=math.nan) for p in sorted(points, key=lambda p: p.tags[ordinal])]
    at, log, x = (lambda n: n), True, Axis(title="Number in the list", whole=True)
    if ordinal != "index":
        at, log = (lambda n: round(math.log2(1 + n), 4)), look_up(metric).log
        longest = points[-1].tags[ordinal]
        # labels at 0 and powers of two, far enough apart for a narrow screen
        shown = [0, *(2**power for power in range(longest.bit_length()))][:: 2 if longest > 64 else 1]
        labels = {at(n): str(n) for n in shown if n >= points[0].tags[ordinal]}
        x = Axis(title="Distance from the last token", labels=labels)
    ends = fixed_limits([p.value for p in points], log=log, zero=not log)
    chart = _by_slider(points, lambda p: at(p.tags[ordinal]), width=1.6, size=4, name=_LISTS[ordinal], of=ordinal)
    y = value_axis(metric, log=log, ends=ends)
    return replace(chart, title=title_of(metric, tags), x=x, y=y, place="", height=400)


def sample_size_curves(frame: pd.DataFrame, metric: str = "accuracy", **chosen: Unpack[Chosen]) -> Chart:
    """Return a metric over the number of training rows (tag `train_rows`, log axis), one line a layer.

    It has 95% intervals, where there are not too many lines for them, and a slider over the checkpoints.

    Raises:
        ValueError: where the metric has no values per layer and number of training rows.
    """
    has_rows = lambda point: TRAIN_ROWS in point.tags and point.layer is not None  # noqa: E731
    points, tags = drawable(frame, metric, has_rows, "values per layer and number of training rows", **chosen)
    points.sort(key=lambda point: (point.tags[TRAIN_ROWS], point.layer or 0))
    rows = sorted({point.tags[TRAIN_ROWS] for point in points})
    limits = fixed_limits(end for point in points for end in (point.value, point.low, point.high))
    many = len({point.layer for point in points}) > _BARS
    look = {"width": 1.8, "size": 5, "interval": "" if many else "bars"}
    chart = _by_slider(points, lambda point: point.tags[TRAIN_ROWS], **look)
    ends = fixed_limits([*map(float, rows)], log=True, pad=0.04)
    x = Axis(title="Training rows", labels={n: count(n) for n in rows}, log=True, ends=ends)
    y = Axis(title=look_up(metric).unit, ends=limits)
    return replace(chart, title=title_of(metric, tags), x=x, y=y, place="{x} rows", height=420)


_LISTS = {"index": "number", "token_distance": "distance"}


def _by_slider(
    points: Sequence[Point], at: Callable[[Point], Any], *, name: str = "", of: str = "", **look: Any
) -> Chart:
    """Return a line a layer, with the checkpoints as places of a slider; touching a point says its number `of`."""
    steps = spread(steps_of(points), FRAMES)
    by_layer = dict(sorted(grouped(framed(points, steps), lambda point: point.layer or 0).items()))
    series = []
    for (layer, part), color in zip(by_layer.items(), colors_of(DEPTH, len(by_layer)), strict=True):
        texts = [f"{name} {point.tags[of]}" for point in part] if of else ()
        style: dict[str, Any] = {"name": f"layer {layer}", "color": color, "mark": "circle", "texts": texts, **look}
        series.append(series_of(part, [*map(at, part)], frame=[steps.index(p.step) for p in part], **style))
    return Chart(title="", x=Axis(), y=Axis(), series=series, bar=color_bar("Layer", DEPTH, [*by_layer]), frames=steps)


# ------------------------------------------------------------------------------------------------ models side by side


def model_profile(
    frame: pd.DataFrame,
    metric: str,
    *,
    baselines: Sequence[str] = (),
    controls: Sequence[str] = (),
    num_layers: Mapping[str, int] | None = None,
    **chosen: Unpack[Chosen],
) -> Chart:
    """Return a metric over the layers (or over the tag `distance`), one line a model, of models that have no steps.

    Where the models are not equally deep, a layer lies at its depth in per cent, 100 l / L: 0 is the embedding, 100 the
    last layer, by `num_layers`, or else the last that was measured. Rows tagged `reference`, the metrics named in
    `baselines`, and the rows whose tag `control` is named in `controls` are dashed: in grey what is the same for all
    models, else in the model's colour. `tags` chooses a variant, as in `emergence_curves`.

    Raises:
        InputError: for suspect models, unless they are allowed.
        ValueError: where no model without steps has values of this metric per layer.
    """
    by_model = _by_model(frame, metric, **chosen)
    points, tags = of_plainest([point for part in by_model.values() for point in part], chosen.get("tags"))
    if not any(map(is_on_axes, points)):
        raise ValueError(f"metric {metric!r} has no values per layer of models without steps")
    number = numbered_by(points)
    table: Any = frame
    measured = table.groupby("run", sort=False)[["layer", "other_layer"]].max().max(axis=1)[list(by_model)].dropna()
    depths = measured.clip(lower=pd.Series(num_layers or {}, dtype=float).reindex(measured.index).fillna(0))
    is_share = number == "layer" and depths.nunique() > 1 and bool(depths.all())
    names = short_names(list(by_model))
    series: list[Series] = []

    def add(run: str, part: Iterable[Point], text: str = "", **look: Any) -> None:
        """A model's points, in its colour; hovering tells the layer as the model counts it."""
        points = numbered(part, number)
        if points:
            line, numbers = unbroken(points, number)
            look |= {"name": ", ".join(filter(None, [names[run], text])), "color": color_of([*by_model].index(run))}
            look["texts"] = [f"layer {n} of {depths[run]:g}" if number == "layer" else f"{number} {n}" for n in numbers]
            at = [round(100 * n / depths[run], 4) for n in numbers] if is_share else numbers
            series.append(series_of(line, at, interval="", **look))

    for index, (run, part) in enumerate(by_model.items()):
        add(run, matching(part, tags), width=2.0, mark=symbol_of(index), size=5.5, legend=True)
    numbers = [n for point in points if (n := point.number(number)) is not None]
    ends = [0, 100] if is_share else [min(numbers), max(numbers)]
    series += _references({run: matching(part, tags) for run, part in by_model.items()}, names, ends)
    series += levels_of(metric, ends)
    for text, name, options in beside(metric, tags, baselines, controls, chosen):
        before = len(series)
        for run, part in _by_model(frame, name, **options).items():
            if run in names:
                add(run, [point for point in part if point.layer is not None], text, dash="dash", width=1.4)
        series += [_in_legend(one.x, text, "dash") for one in series[before : before + 1]]
    if len(series) < 2:
        series = [replace(one, legend=False) for one in series]
    axis = _DEPTHS if is_share else layer_axis(number)
    return log_if_wide(Chart(title=title_of(metric, tags), x=axis, y=value_axis(metric), series=series, place=""))


def models_in_rows(frame: pd.DataFrame, metric: str, **chosen: Unpack[Chosen]) -> Chart:
    """Return a metric of whole models at their last checkpoint, a row a model and its tags, with 95% intervals.

    Raises:
        InputError: for suspect models, unless they are allowed.
        ValueError: where no model has a value of this metric.
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
    texts = [wrapped(text) for text, _ in rows]
    look: dict[str, Any] = {"mark": "circle", "size": 6.5, "color": COLORS[0], "interval": "bars"}
    dots = series_of([point for _, point in rows], range(len(rows)), **look)
    high = 100 + (26 if any("\n" in text for text in texts) else 16) * len(rows)
    return in_rows(title_of(metric, {}), texts, value_axis(metric), [dots], height=high)


def short_names(runs: Sequence[str]) -> dict[str, str]:
    """Return what each model is called in figures: the last part of its path or repository, unless two share it."""
    last = {run: run.rstrip("/").split("/")[-1] or run for run in runs}
    shared = {name for name in last.values() if list(last.values()).count(name) > 1}
    return {run: run if name in shared else name for run, name in last.items()}


def color_of(index: int) -> str:
    return COLORS[index % len(COLORS)]


def symbol_of(index: int) -> str:
    return SYMBOLS[index // len(COLORS) % len(SYMBOLS)]


def style_of_run(index: int, name: str, *, of: int, **more: Any) -> dict[str, Any]:
    """Return how the series of one of so many runs looks; one alone needs no name."""
    several = {"name": name, "legend": True} if of > 1 else {"name": "", "legend": False}
    return {"color": color_of(index), "mark": symbol_of(index), **several, **more}


def _by_model(frame: pd.DataFrame, metric: str, **chosen: Unpack[Chosen]) -> dict[str, list[Point]]:
    """The points of each model that has any, without pairs and places in tables."""
    rows = rows_of(frame, metric, chosen.get("analysis"))
    rows = rows[rows["step"].isna()]
    by_model = {}
    for run in rows["run"].unique():
        points = select(rows[rows["run"] == run], metric, allow_suspect=chosen.get("allow_suspect", False))
        by_model[run] = matching(plain(points), chosen.get("tags") or {})
    return {run: points for run, points in by_model.items() if points}


def _in_legend(x: Sequence[float], text: str, dash: str) -> Series:
    """Return what dashed lines in the colours of the models mean."""
    return Series(x=x[:1], y=[None], name=text, dash=dash, width=1.6, legend=True)


def _references(by_model: Mapping[str, Sequence[Point]], names: Mapping[str, str], ends: Sequence[int]) -> list[Series]:
    """Dashed levels: one where all models have the same, else one a model."""
    series = []
    kinds = references(point for part in by_model.values() for point in part)
    for number, (kind, these) in enumerate(kinds.items()):
        text, dash = tag_text({"reference": kind}), DASHED[number % len(DASHED)]
        if len({point.value for point in these}) == 1:
            series.append(level(ends, these[0].value, text, dash=dash))
            continue
        for index, (run, part) in enumerate(by_model.items()):
            look = {"color": color_of(index), "dash": dash, "legend": False}
            levels = [point for point in part if point.reference == kind]
            series += [level(ends, point.value, f"{names[run]}, {text}", **look) for point in levels]
        series.append(_in_legend(ends, text, dash))
    return series


# ------------------------------------------------------------------------------------------------ over depth


def depth_curves(title: str, models: Mapping[str, Sequence[float]]) -> Chart:
    """Return one quantity over the depth percentage, a line a model.

    `models` are their values at layers 0 to L, NaN where there is none.
    """
    series = []
    for index, (name, values) in enumerate(models.items()):
        depth = len(values) - 1
        look: dict[str, Any] = {"name": name, "color": color_of(index), "width": 2.0, "legend": len(models) > 1}
        look["mark"] = symbol_of(index)
        texts = [f"layer {n} of {depth}" for n in range(depth + 1)]
        series.append(Series(x=[100 * n / depth for n in range(depth + 1)], y=rounded(values), texts=texts, **look))
    return Chart(title=title, x=_DEPTHS, y=Axis(), series=series, place="", height=340)


def in_rows(title: str, texts: Sequence[str], values: Axis, series: Sequence[Series], *, height: int) -> Chart:
    """Return rows from the top down with their texts beside them; their values go across."""
    down = Axis(labels=dict(enumerate(texts)), ends=(-0.6, len(texts) - 0.4), reverse=True, grid=False)
    return Chart(title=title, x=down, y=values, series=series, horizontal=True, place="", height=height)


# ------------------------------------------------------------------------------------------------ parts


def framed(points: Sequence[Point], steps: Sequence[int]) -> list[Point]:
    """Return the points at places of the slider, one checkpoint after the other."""
    return sorted((p for p in points if p.step in {*steps}), key=lambda point: point.step)


def unbroken(points: Iterable[Point], number: str) -> tuple[list[Point | None], list[int]]:
    """Return points by whole numbers, and these from the first to the last; None where one is missing."""
    by_number = {point.number(number) or 0: point for point in points}
    numbers = [*range(min(by_number), max(by_number) + 1)]
    return [by_number.get(each) for each in numbers], numbers


def fixed_limits(
    values: Iterable[float], *, log: bool = False, zero: bool = False, pad: float = 0.05
) -> tuple[float, float] | None:
    """Return ends of an axis that are the same at every checkpoint, so that the slider shows what moves."""
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


def numbered_by(points: Iterable[Point]) -> str:
    """Return what numbers the places of points on an axis: layers, or distances where there are none."""
    return "layer" if any(point.layer is not None for point in points) else "distance"


def numbered(points: Iterable[Point], number: str) -> list[Point]:
    """Return the points that have a place, without those to compare with."""
    return [point for point in points if point.number(number) is not None and point.reference is None]


def references(points: Iterable[Point]) -> dict[Any, list[Point]]:
    return grouped((point for point in points if point.reference is not None), lambda point: point.reference)


def beside(
    metric: str, tags: Mapping[str, Any], baselines: Sequence[str], controls: Sequence[str], chosen: Chosen
) -> list[tuple[str, str, Chosen]]:
    """Return what a profile is compared with: a text, a metric and its options for each."""
    others: list[tuple[str, str, Chosen]] = [(look_up(name).title_beside, name, chosen) for name in baselines]
    for control in controls:
        options: Chosen = {**chosen, "tags": {**tags, "control": control}}
        others.append((tag_text({"control": control}), metric, options))
    return others
