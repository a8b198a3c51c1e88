"""A metric over training, with one line per layer or variant; and the scalars that training logged."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Unpack

import numpy as np
import pandas as pd

from lit_layers.figures import tables
from lit_layers.figures.chart import Chart, Series
from lit_layers.figures.labels import tag_text
from lit_layers.figures.profiles import (
    color_bar,
    level,
    levels_of,
    log_if_wide,
    plain,
    references,
    series_of,
    value_axis,
)
from lit_layers.figures.theme import (
    COLORS,
    DASHED,
    DEPTH,
    INK,
    MUTED,
    Axis,
    Training,
    colors_of,
    reference_look,
    rounded,
)
from lit_layers.metrics import METRICS, look_up, scalar_row

__all__ = ["emergence_curves", "training_curves"]

_MARKED = 60  # curves with more points are drawn without marks
_BINS = 500  # points per training curve: about one per pixel


def emergence_curves(
    frame: pd.DataFrame,
    metric: str,
    *,
    baselines: Sequence[str] = (),
    **chosen: Unpack[tables.Chosen],
) -> Chart:
    """Return a metric over the steps of training, with one line per layer, coloured by depth.

    Values of the whole model are thick lines with 95% intervals. Rows tagged `reference` and the metrics named in
    `baselines` are dashed lines. A gap separates step 0, the untrained model. Lines per layer show one variant, which
    the title names. If the metric has no values per layer, all variants are drawn.

    Args:
        tags: selects a variant, e.g. `{"k": 12}`; the value None selects points without the tag. By default, lines
            per layer show the mean on test data, without normalization and without a control such as random labels.
            If there is no such variant, they show the one that differs from it in the fewest tags.
        baselines: metrics of the same analysis to compare with, e.g. `random_coupling`. Only their values of the
            whole model are drawn; `layer_profile` draws their values per layer.
        allow_suspect: also draw checkpoints that an audit found suspect; all figures have this option.

    Raises:
        InputError: for checkpoints that an audit found suspect, unless `allow_suspect`.
        ValueError: there is no such metric or variant.
    """
    points = plain(tables.select(frame, metric, **chosen, over_steps=True))
    tags = dict(chosen.get("tags") or {})
    compared = {
        name: [p for p in tables.select(frame, name, **chosen, over_steps=True) if p.layer is None]
        for name in baselines
    }
    compared = {name: part for name, part in compared.items() if part}
    if not points:
        raise ValueError(f"metric {metric!r} has values for pairs of layers or of tokens only")
    if any(map(tables.is_on_axes, points)):
        points, tags = tables.plainest_points(points, tags)
    every = [*points, *(point for part in compared.values() for point in part)]
    training = Training(tables.steps_of(every), {p.step: p.tokens for p in every})
    steps, series = training.steps, list[Series]()
    trained = sum(step > 0 for step in steps)
    marks: dict[str, Any] = {"mark": "" if trained > 1 else "line-ew", "size": 9}  # a line of one point needs a mark
    dots: dict[str, Any] = {"mark": "" if trained > _MARKED else "circle"}

    def line(points: Sequence[tables.Point], name: str, color: str, **look: Any) -> None:
        """Add a line that breaks where a checkpoint has no point."""
        by_step = {point.step: point for point in points}
        series.append(series_of(map(by_step.get, steps), steps, name=name, color=color, **look))

    def dashed(points: Sequence[tables.Point], name: str, color: str, dash: str, *, is_named: bool = True) -> None:
        look = {**marks, "mark": marks["mark"] if dash else "line-ew"}  # the point at step 0 is a dash in any case
        line(points, name, color, dash=dash, width=1.6, legend=is_named, interval="", **look)

    values = [point for point in points if point.reference is None]
    ordinal, lined = _ordinal(values)
    bar = None
    if ordinal is not None:
        by_number = dict(sorted(tables.grouped(lined, lambda point: point.index(ordinal)).items()))
        for (number, part), color in zip(by_number.items(), colors_of(DEPTH, len(by_number)), strict=True):
            line(part, f"{ordinal} {number}", color, width=1.6, size=4, interval="", **dots)
        bar = color_bar(ordinal.capitalize(), DEPTH, list(by_number))
        values = [point for point in values if point.layer is None and point.index(ordinal) is None]
    references_of, kinds, colors = references(points), _variants(values), dict[str, str]()
    several = len(kinds) > 1
    in_legend = several or bool(ordinal or references_of or compared) or look_up(metric).level is not None
    for index, (text, part) in enumerate(kinds):
        colors[text] = INK if ordinal else COLORS[index % len(COLORS)]
        name = (text if several else "") or ("Whole model" if ordinal else look_up(metric).title)
        line(part, name, colors[text], width=2.4, size=5.5, legend=in_legend, **dots)
    for index, (name, part) in enumerate(references_of.items()):
        for text, variant in _variants(part):
            title = ", ".join(filter(None, [tag_text({"reference": name}), text if several else ""]))
            for number, of_layer in enumerate(tables.grouped(variant, lambda point: point.layer).values()):
                dashed(of_layer, title, *reference_look(name, index), is_named=number == 0)
    for name, part in compared.items():
        for text, variant in _variants(part):
            title = ", ".join(filter(None, [look_up(name).compared, text]))
            dashed(variant, title, colors.get(text, MUTED), "dash")
    series += levels_of(metric, steps, dash="dot", **marks)
    height = 370 if bar is not None and any(each.legend for each in series) else 340
    look: dict[str, Any] = {"title": tables.title_of(metric, tags), "x": Axis(), "y": value_axis(metric, tags)}
    return log_if_wide(Chart(series=series, training=training, bar=bar, height=height, **look))


def training_curves(
    scalars: Iterable[Mapping[str, float]],
    names: Sequence[str] | None = None,
    *,
    references: Mapping[str, float] | None = None,
) -> Chart:
    """Return scalars of training over steps; by default all losses, of training and validation.

    `scalars` are rows as returned by `records.rows`. Long curves are averaged over steps that would share a pixel.
    `references` are drawn as dashed horizontal lines, e.g. `{"Unigram entropy": 5.9}`.

    Raises:
        ValueError: no row has any of the names.
    """
    table: Any = pd.DataFrame(list(scalars))
    recorded = [name for name in table.columns if name not in ("step", "tokens")]
    losses = [name for name in recorded if name in METRICS and name.endswith("/loss")]
    chosen = sorted(losses, key=lambda name: not name.startswith("train")) if names is None else list(names)
    table["tokens"] = table.get("tokens", math.nan)
    points = {name: table[np.isfinite(table[name].astype(float))] for name in chosen if name in recorded}
    if not any(map(len, points.values())):
        expected, there = ", ".join(chosen) or "loss", ", ".join(recorded) or "none"
        raise ValueError(f"no values of {expected} in these rows; they have: {there}")
    tokens: dict[int, int | None] = {}
    series, longest = [], []
    for index, name in enumerate(chosen):
        part = _binned(points[name], name) if name in points else pd.DataFrame({"step": [], "tokens": [], name: []})
        steps = [int(step) for step in part["step"]]
        tokens |= {step: None if math.isnan(n) else int(n) for step, n in zip(steps, part["tokens"], strict=True)}
        longest = max(longest, [step for step in steps if step > 0] or steps, key=len)
        title, color = scalar_row(name).title, COLORS[index % len(COLORS)]
        look: dict[str, Any] = {"name": title, "color": color}
        sparse = name not in points or (points[name]["step"] > 0).sum() <= _MARKED
        look |= {"mark": "circle" if sparse else "", "width": 2.2 if sparse else 1.6, "size": 5}
        series.append(Series(x=steps, y=rounded(part[name]), legend=len(chosen) > 1 or bool(references), **look))
    for index, (name, value) in enumerate((references or {}).items()):
        series.append(level(longest, value, name, dash=DASHED[index % len(DASHED)]))
    training = Training(sorted(tokens), tokens)
    row = scalar_row(chosen[0])
    title, y = "Loss (nats)" if names is None else row.unit_title, Axis(title=row.unit, log=row.log)
    return Chart(title=title, x=Axis(), y=y, series=series, training=training)


def _binned(points: Any, name: str) -> Any:
    """Return a training curve averaged over bins of log(1 + step), each at its last step; step 0 has its own bin."""
    places = np.log1p(points["step"])
    trained = places[places > 0]
    bins = (places - trained.min()) / max(trained.max() - trained.min(), 1e-9) * _BINS
    bins = np.floor(bins).clip(upper=_BINS - 1).where(places > 0, -1.0)
    return points.groupby(bins).agg({"step": "last", "tokens": "last", name: "mean"})


def _ordinal(points: Sequence[tables.Point]) -> tuple[str | None, Sequence[tables.Point]]:
    """Return the quantity (layer, distance, ...) for which the figure draws one line per value, and the lines' points.

    The quantity is None if the figure has no such lines. If a layer has a list of values, such as singular values, only
    the first entry of the list is drawn.
    """
    if lined := [point for point in points if point.layer is not None]:
        first = min((point.tags["index"] for point in lined if "index" in point.tags), default=None)
        return "layer", [point for point in lined if point.tags.get("index") == first]
    for name in tables.ORDINALS:
        if lined := [point for point in points if name in point.tags]:
            return name, lined
    return None, []


def _variants(points: Sequence[tables.Point]) -> list[tuple[str, list[tables.Point]]]:
    kinds = tables.variants_of(points)
    text = tables.choice_text if len(kinds) > 1 else tables.variant_text
    return [(text(tags), tables.matching(points, tags)) for tags in kinds]
