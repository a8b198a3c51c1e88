"""A metric over training: a line a layer or variant, the stages of the layers, and what training itself logged."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
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
from lit_layers.figures.theme import COLORS, DASHED, DEPTH, INK, MUTED, Axis, AxisName, Training, colors_of, rounded
from lit_layers.metrics import METRICS, look_up, scalar_row

__all__ = ["emergence_curves", "training_curves"]

_MARKED = 60  # curves of more points than this are drawn as lines alone
_BINS = 500  # points of a curve of training: about one a pixel


def emergence_curves(
    frame: pd.DataFrame,
    metric: str,
    *,
    axis: AxisName = "step",
    baselines: Sequence[str] = (),
    **chosen: Unpack[tables.Chosen],
) -> Chart:
    """Returns a metric over the steps of training, one line a layer, coloured by depth.

    Values of the whole model are drawn as strong lines with their 95% interval; rows tagged `reference`, and the
    metrics named in `baselines`, as dashed ones. Step 0, the untrained model, stands apart. Of a metric of the whole
    model alone all variants are drawn; lines per layer are those of one, which the title names.

    Args:
        tags: chooses a variant, e.g. `{"k": 12}`; None as a value means: without that tag. None: the plainest variant.
        baselines: metrics of the same analysis to compare with, e.g. `random_coupling`; their values per layer are left
            to `layer_profile`.
        allow_suspect: draws checkpoints, too, that an audit found suspect, as do all figures.

    Raises:
        InputError: for suspect checkpoints, unless they are allowed.
        ValueError: where there is no such metric or variant, or for the token axis where tokens are not known.
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
        points, tags = tables.of_plainest(points, tags)
    curves = Curves([*points, *(point for part in compared.values() for point in part)])
    values = [point for point in points if point.reference is None]
    ordinal, lined = _ordinal(values)
    bar = None
    if ordinal is not None:
        by_number = dict(sorted(tables.grouped(lined, lambda point: point.number(ordinal)).items()))
        for (number, part), color in zip(by_number.items(), colors_of(DEPTH, len(by_number)), strict=True):
            curves.line(part, f"{ordinal} {number}", color)
        bar = color_bar(ordinal.capitalize(), DEPTH, list(by_number))
        values = [point for point in values if point.layer is None and point.number(ordinal) is None]
    dashed = references(points)
    in_legend = ordinal is not None or bool(dashed or compared) or look_up(metric).level is not None
    colors = curves.whole(values, "Whole model" if ordinal else look_up(metric).title, in_legend=in_legend)
    for index, (name, part) in enumerate(dashed.items()):
        curves.dashed(part, tag_text({"reference": name}), dash=DASHED[index % len(DASHED)])
    for name, part in compared.items():
        title = look_up(name).title_beside
        for text, variant in _variants(part):
            curves.dashed(variant, f"{title}, {text}" if text else title, color=colors.get(text, MUTED))
    curves.series += levels_of(metric, curves.training.steps, dash="dot", **curves.dashed_marks)
    height = 370 if bar is not None and any(series.legend for series in curves.series) else 340
    return log_if_wide(curves.chart(tables.title_of(metric, tags), value_axis(metric), axis, bar=bar, height=height))


class Curves:
    """Lines over the checkpoints of some points; each breaks where it was not measured."""

    def __init__(self, points: Sequence[tables.Point]) -> None:
        self.training = Training.of((p.step for p in points), {p.step: p.tokens for p in points})
        trained = [step for step in self.training.steps if step > 0]
        self.is_long = len(trained) > _MARKED
        self.dashed_marks = {"mark": "" if len(trained) > 1 else "line-ew", "apart": "line-ew", "size": 9}
        self.series: list[Series] = []

    def line(
        self, points: Sequence[tables.Point], name: str, color: str, *, strong: bool = False, legend: bool = False
    ) -> None:
        look: dict[str, Any] = {"width": 2.4 if strong else 1.6, "size": 5.5 if strong else 4, "apart": "diamond"}
        look |= {"mark": "" if self.is_long else "circle", "interval": "band" if strong else ""}
        self.along(points, name=name, color=color, legend=legend, **look)

    def dashed(self, points: Sequence[tables.Point], name: str, *, color: str = MUTED, dash: str = "dash") -> None:
        """Adds points to compare with: a dashed line, and a dash for the untrained model."""
        look: dict[str, Any] = {"width": 1.6, "legend": True, "interval": "", **self.dashed_marks}
        self.along([replace(p, low=math.nan, high=math.nan) for p in points], name=name, color=color, dash=dash, **look)

    def whole(self, points: Sequence[tables.Point], title: str, *, in_legend: bool) -> dict[str, str]:
        """Adds one strong line a variant, in a colour of its own; returns the colours."""
        kinds = _variants(points)
        several = len(kinds) > 1
        colors = {}
        for index, (text, part) in enumerate(kinds):
            colors[text] = INK if title == "Whole model" else COLORS[index % len(COLORS)]
            name = (text or title) if several else title
            self.line(part, name, colors[text], strong=True, legend=in_legend or several)
        return colors

    def chart(self, title: str, values: Axis, axis: AxisName, **options: Any) -> Chart:
        options = {"training": self.training, "axis": axis, "series": self.series, **options}
        return Chart(title=title, x=Axis(), y=values, **options)

    def along(self, points: Sequence[tables.Point], **look: Any) -> None:
        """Adds points as a line, with a gap where a checkpoint lacks one."""
        by_step = {point.step: point for point in points}
        steps = self.training.steps
        self.series.append(series_of((by_step.get(step) for step in steps), steps, **look))


def training_curves(
    scalars: Iterable[Mapping[str, float]],
    names: Sequence[str] | None = None,
    *,
    axis: AxisName = "step",
    tokens_per_step: int | None = None,
    references: Mapping[str, float] | None = None,
) -> Chart:
    """Returns scalars of training over steps; without `names` those called loss, of training and of validation.

    Rows are those of `records.rows`. Long curves are averaged over steps that would share a pixel. `references` are
    drawn as dashed levels, e.g. `{"Unigram entropy": 5.9}`.

    Raises:
        ValueError: where no row has one of the names.
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
        seen: Any = part["tokens"].fillna(part["step"] * (math.nan if tokens_per_step is None else tokens_per_step))
        steps = [int(step) for step in part["step"]]
        tokens |= {step: None if math.isnan(n) else int(n) for step, n in zip(steps, seen, strict=True)}
        longest = max(longest, [step for step in steps if step > 0] or steps, key=len)
        title, color = scalar_row(name).title, COLORS[index % len(COLORS)]
        look: dict[str, Any] = {"name": title, "color": color, "apart": "diamond"}
        sparse = name not in points or (points[name]["step"] > 0).sum() <= _MARKED
        look |= {"mark": "circle" if sparse else "", "width": 2.2 if sparse else 1.6, "size": 5}
        series.append(Series(x=steps, y=rounded(part[name]), legend=len(chosen) > 1 or bool(references), **look))
    for index, (name, value) in enumerate((references or {}).items()):
        series.append(level(longest, value, name, dash=DASHED[index % len(DASHED)]))
    training = Training.of(tokens, tokens)
    row = scalar_row(chosen[0])
    title, y = "Loss (nats)" if names is None else row.with_unit, Axis(title=row.unit, log=row.log)
    return Chart(title=title, x=Axis(), y=y, series=series, training=training, axis=axis)


def _binned(points: Any, name: str) -> Any:
    """Means over bins of log(1 + step), each at the last step of its bin; the untrained model has one of its own."""
    places = np.log1p(points["step"])
    trained = places[places > 0]
    bins = (places - trained.min()) / max(trained.max() - trained.min(), 1e-9) * _BINS
    bins = np.floor(bins).clip(upper=_BINS - 1).where(places > 0, -1.0)
    return points.groupby(bins).agg({"step": "last", "tokens": "last", name: "mean"})


def _ordinal(points: Sequence[tables.Point]) -> tuple[str | None, Sequence[tables.Point]]:
    """What numbers the lines (layers, distances, ...), and the points on them; of a list of values its first."""
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
