"""Models side by side: a metric over the layers or the depth, one line a model."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Unpack

import pandas as pd

from lit_layers.figures import profiles, tables
from lit_layers.figures.chart import Chart, Series
from lit_layers.figures.labels import tag_text, wrapped
from lit_layers.figures.theme import COLORS, DASHED, DEPTH_TITLE, SYMBOLS, Axis, layer_axis, rounded
from lit_layers.metrics import look_up

__all__ = ["model_profile", "models_in_rows"]

_DEPTHS = Axis(title=DEPTH_TITLE, labels={n: str(n) for n in (0, 25, 50, 75, 100)}, ends=(-3, 103))


def model_profile(
    frame: pd.DataFrame,
    metric: str,
    *,
    baselines: Sequence[str] = (),
    controls: Sequence[str] = (),
    num_layers: Mapping[str, int] | None = None,
    **chosen: Unpack[tables.Chosen],
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
    points, tags = tables.of_plainest([point for part in by_model.values() for point in part], chosen.get("tags"))
    if not any(map(tables.is_on_axes, points)):
        raise ValueError(f"metric {metric!r} has no values per layer of models without steps")
    number = profiles.numbered_by(points)
    table: Any = frame
    measured = table.groupby("run", sort=False)[["layer", "other_layer"]].max().max(axis=1)[list(by_model)].dropna()
    depths = measured.clip(lower=pd.Series(num_layers or {}, dtype=float).reindex(measured.index).fillna(0))
    is_share = number == "layer" and depths.nunique() > 1 and bool(depths.all())
    names = short_names(list(by_model))
    series: list[Series] = []

    def add(run: str, part: Iterable[tables.Point], text: str = "", **look: Any) -> None:
        """A model's points, in its colour; hovering tells the layer as the model counts it."""
        points = profiles.numbered(part, number)
        if points:
            line, numbers = profiles.unbroken(points, number)
            look |= {"name": ", ".join(filter(None, [names[run], text])), "color": color_of([*by_model].index(run))}
            look["texts"] = [f"layer {n} of {depths[run]:g}" if number == "layer" else f"{number} {n}" for n in numbers]
            at = [round(100 * n / depths[run], 4) for n in numbers] if is_share else numbers
            series.append(profiles.series_of(line, at, interval="", **look))

    for index, (run, part) in enumerate(by_model.items()):
        add(run, tables.matching(part, tags), width=2.0, mark=symbol_of(index), size=5.5, legend=True)
    numbers = [n for point in points if (n := point.number(number)) is not None]
    ends = [0, 100] if is_share else [min(numbers), max(numbers)]
    series += _references({run: tables.matching(part, tags) for run, part in by_model.items()}, names, ends)
    series += profiles.levels_of(metric, ends)
    for text, name, options in profiles.beside(metric, tags, baselines, controls, chosen):
        before = len(series)
        for run, part in _by_model(frame, name, **options).items():
            if run in names:
                add(run, [point for point in part if point.layer is not None], text, dash="dash", width=1.4)
        series += [_in_legend(one.x, text, "dash") for one in series[before : before + 1]]
    if len(series) < 2:
        series = [replace(one, legend=False) for one in series]
    axis = _DEPTHS if is_share else layer_axis(number)
    return profiles.log_if_wide(
        Chart(title=tables.title_of(metric, tags), x=axis, y=profiles.value_axis(metric), series=series, place="")
    )


def models_in_rows(frame: pd.DataFrame, metric: str, **chosen: Unpack[tables.Chosen]) -> Chart:
    """Return a metric of whole models at their last checkpoint, a row a model and its tags, with 95% intervals.

    Raises:
        InputError: for suspect models, unless they are allowed.
        ValueError: where no model has a value of this metric.
    """
    runs = [*tables.rows_of(frame, metric, chosen.get("analysis")).groupby("run", sort=False)]
    rows = []
    for run, part in runs:
        points = [point for point in tables.select(part, metric, **chosen) if point.layer is None]
        for point in (p for p in points if p.step == points[-1].step):
            tags = tag_text(dict(point.tags))
            rows.append((", ".join(filter(None, [run if len(runs) > 1 or not tags else "", tags])), point))
    if not rows:
        raise ValueError(f"metric {metric!r} has no values of whole models")
    texts, values = [wrapped(text) for text, _ in rows], Axis(title=look_up(metric).unit, log=look_up(metric).log)
    look: dict[str, Any] = {"mark": "circle", "size": 6.5, "color": COLORS[0], "interval": "bars"}
    dots = profiles.series_of([point for _, point in rows], range(len(rows)), **look)
    high = 100 + (26 if any("\n" in text for text in texts) else 16) * len(rows)
    return in_rows(tables.title_of(metric, {}), texts, values, [dots], height=high)


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


def _by_model(frame: pd.DataFrame, metric: str, **chosen: Unpack[tables.Chosen]) -> dict[str, list[tables.Point]]:
    """The points of each model that has any, without pairs and places in tables."""
    rows = tables.rows_of(frame, metric, chosen.get("analysis"))
    rows = rows[rows["step"].isna()]
    by_model = {}
    for run in rows["run"].unique():
        points = tables.select(rows[rows["run"] == run], metric, allow_suspect=chosen.get("allow_suspect", False))
        by_model[run] = tables.matching(profiles.plain(points), chosen.get("tags") or {})
    return {run: points for run, points in by_model.items() if points}


def _in_legend(x: Sequence[float], text: str, dash: str) -> Series:
    """Return what dashed lines in the colours of the models mean."""
    return Series(x=x[:1], y=[None], name=text, dash=dash, width=1.6, legend=True)


def _references(
    by_model: Mapping[str, Sequence[tables.Point]], names: Mapping[str, str], ends: Sequence[int]
) -> list[Series]:
    """Dashed levels: one where all models have the same, else one a model."""
    series = []
    kinds = profiles.references(point for part in by_model.values() for point in part)
    for number, (kind, these) in enumerate(kinds.items()):
        text, dash = tag_text({"reference": kind}), DASHED[number % len(DASHED)]
        if len({point.value for point in these}) == 1:
            series.append(profiles.level(ends, these[0].value, text, dash=dash))
            continue
        for index, (run, part) in enumerate(by_model.items()):
            look = {"color": color_of(index), "dash": dash, "legend": False}
            levels = [point for point in part if point.reference == kind]
            series += [profiles.level(ends, point.value, f"{names[run]}, {text}", **look) for point in levels]
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
