"""Models that have no steps, side by side: a metric over the layers, one line a model."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd
import plotly.graph_objects as go

from lit_layers.metrics import look_up
from lit_layers.plots.axes import DEPTH_TITLE, whole_ticks
from lit_layers.plots.labels import escape, tag_text
from lit_layers.plots.tables import Point, grouped, is_on_axes, is_placed, matching, of_plainest, select, title_of
from lit_layers.plots.theme import COLORS, DASHES, MUTED, figure, rounded

_SYMBOLS = ("circle", "square", "diamond", "triangle-up")  # of the first models that there are colours for, the next...


def model_profile(
    frame: pd.DataFrame,
    metric: str,
    *,
    analysis: str | None = None,
    tags: Mapping[str, Any] | None = None,
    baselines: Sequence[str] = (),
    allow_suspect: bool = False,
) -> go.Figure:
    """Returns a metric over the layers (or over the tag `distance`), one line a model, of models that have no steps.

    Where the models are not equally deep, a layer lies at its depth in per cent, 100 l / L: 0 is the embedding, 100 the
    last layer. Rows tagged `reference`, and the metrics named in `baselines`, are dashed: in grey what is the same for
    all models, else in the model's colour. `tags` chooses a variant, as in `emergence_curves`.

    Raises:
        InputError: for suspect models, unless they are allowed.
        ValueError: where no model without steps has values of this metric per layer.
    """
    found = _by_model(frame, metric, analysis, tags, allow_suspect)
    points, tags = of_plainest([point for part in found.values() for point in part], tags)
    if not any(map(is_on_axes, points)):
        raise ValueError(f"metric {metric!r} has no values per layer of models without steps")
    found = {run: matching(part, tags) for run, part in found.items()}
    number = "layer" if any(point.layer is not None for point in points) else "distance"
    places = _Places(frame, number, list(found))
    names, traces = short_names(list(found)), []
    for index, (run, part) in enumerate(found.items()):
        own = [point for point in part if point.number(number) is not None and point.reference is None]
        if own:
            traces.append(_line(places, run, own, names[run], index))
    ends = places.ends(points)
    compared = list(_references(found, names, ends))
    if (level := look_up(metric).level) is not None:
        compared.append(_level(ends, level, escape(look_up(metric).level_name), MUTED, DASHES[0]))
    for name in baselines:
        text = look_up(name).title_beside
        others = _by_model(frame, name, analysis, tags, allow_suspect)
        compared += _baseline(places, others, list(found), names, text)
    return figure(
        title_of(metric, tags),
        [*traces, *compared],
        unit=look_up(metric).unit,
        log=look_up(metric).log,
        xaxis=places.axis(ends),
        showlegend=len(traces) + len(compared) > 1,
    )


def short_names(runs: Sequence[str]) -> dict[str, str]:
    """Returns what each model is called in figures: the last part of its path or repository, unless two share it."""
    last = {run: run.rstrip("/").split("/")[-1] or run for run in runs}
    shared = {name for name in last.values() if list(last.values()).count(name) > 1}
    return {run: run if name in shared else name for run, name in last.items()}


class _Places:
    """Where the layers of each model lie on the common axis."""

    def __init__(self, frame: pd.DataFrame, number: str, runs: Sequence[str]) -> None:
        table: Any = frame
        self.number = number
        layers = table.groupby("run", sort=False)[["layer", "other_layer"]].max().max(axis=1)
        self.depth = {run: int(layers[run]) for run in runs if pd.notna(layers[run])}
        self.is_share = number == "layer" and len(set(self.depth.values())) > 1 and all(self.depth.values())

    def at(self, run: str, points: Sequence[Point]) -> list[float]:
        numbers = [point.number(self.number) or 0 for point in points]
        return [round(100 * number / self.depth[run], 4) for number in numbers] if self.is_share else [*numbers]

    def texts(self, run: str, points: Sequence[Point]) -> list[str]:
        """What hovering says of each point: its interval, and the layer as the model counts it."""
        of = f" of {self.depth[run]}" if self.number == "layer" else ""
        return [
            (f"95% interval {p.low:.4g} to {p.high:.4g}<br>" if math.isfinite(p.low + p.high) else "")
            + f"{self.number} {p.number(self.number)}{of}"
            for p in points
        ]

    def ends(self, points: Sequence[Point]) -> list[int]:
        numbers = [number for point in points if (number := point.number(self.number)) is not None]
        return [0, 100] if self.is_share else [min(numbers), max(numbers)]

    def axis(self, ends: Sequence[int]) -> dict[str, Any]:
        if self.is_share:
            return {"title": {"text": DEPTH_TITLE}, "tick0": 0, "dtick": 25, "range": [-3, 103]}
        title = "Layer" if self.number == "layer" else "Distance between the blocks"
        return {"title": {"text": title}, **whole_ticks(*ends)}


def _by_model(
    frame: pd.DataFrame, metric: str, analysis: str | None, tags: Mapping[str, Any] | None, allow_suspect: bool
) -> dict[str, list[Point]]:
    """The points of each model that has any, without pairs and places in tables."""
    table: Any = frame
    rows = table[table["step"].isna() & (table["metric"] == metric)]
    if analysis is not None:
        rows = rows[rows["analysis"] == analysis]
    found = {}
    for run in rows["run"].unique():
        points = select(rows[rows["run"] == run], metric, allow_suspect=allow_suspect)
        points = [point for point in points if point.other_layer is None and not is_placed(point)]
        found[run] = matching(points, tags or {})
    return {run: points for run, points in found.items() if points}


def _color(index: int) -> str:
    return COLORS[index % len(COLORS)]


def _line(places: _Places, run: str, points: Sequence[Point], name: str, index: int) -> dict[str, Any]:
    points = sorted(points, key=lambda point: point.number(places.number) or 0)
    return {
        "x": places.at(run, points),
        "y": rounded(point.value for point in points),
        "text": places.texts(run, points),
        "name": escape(name),
        "legendgroup": escape(name),
        "mode": "lines+markers",
        "line": {"color": _color(index), "width": 2},
        "marker": {"size": 5.5, "symbol": _SYMBOLS[index // len(COLORS) % len(_SYMBOLS)]},
        "hovertemplate": "%{y:.4g}<br>%{text}<extra>" + escape(name) + "</extra>",
    }


def _level(ends: Sequence[int], value: float, text: str, color: str, dash: str) -> dict[str, Any]:
    line = {"color": color, "width": 1.6, "dash": dash}
    level = {"x": [*ends], "y": rounded([value] * 2), "mode": "lines", "name": text, "line": line}
    return {**level, "hovertemplate": "%{y:.4g}<extra>" + text + "</extra>"}


def _in_legend(text: str, dash: str) -> dict[str, Any]:
    """What dashed lines in the colours of the models mean."""
    return {
        "x": [None],
        "y": [None],
        "mode": "lines",
        "name": text,
        "line": {"color": MUTED, "width": 1.6, "dash": dash},
    }


def _references(
    found: Mapping[str, Sequence[Point]], names: Mapping[str, str], ends: Sequence[int]
) -> list[dict[str, Any]]:
    """Dashed levels: one where all models have the same, else one a model."""
    pairs = [
        (index, run, p) for index, (run, part) in enumerate(found.items()) for p in part if p.reference is not None
    ]
    traces = []
    for number, (reference, these) in enumerate(grouped(pairs, lambda pair: pair[2].reference).items()):
        text, dash = escape(tag_text({"reference": reference})), DASHES[number % len(DASHES)]
        if len({point.value for _, _, point in these}) == 1:
            traces.append(_level(ends, these[0][2].value, text, MUTED, dash))
            continue
        for index, run, point in these:
            own = _level(ends, point.value, f"{escape(names[run])}, {text}", _color(index), dash)
            traces.append({**own, "legendgroup": escape(names[run]), "showlegend": False})
        traces.append(_in_legend(text, dash))
    return traces


def _baseline(
    places: _Places, others: Mapping[str, Sequence[Point]], runs: Sequence[str], names: Mapping[str, str], text: str
) -> list[dict[str, Any]]:
    """A metric to compare with, per layer, in the colour of each model."""
    traces = []
    for run, part in others.items():
        own = [point for point in part if point.layer is not None and run in names]
        if own:
            line = _line(places, run, own, f"{names[run]}, {text}", runs.index(run))
            line |= {"mode": "lines", "legendgroup": escape(names[run]), "showlegend": False}
            traces.append({**line, "line": {**line["line"], "width": 1.4, "dash": DASHES[0]}})
    return [*traces, _in_legend(escape(text), DASHES[0])] if traces else []
