"""The scalars of training over steps: losses, learning rate, speed."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import plotly.graph_objects as go

from lit_layers.metrics import look_up
from lit_layers.plots.axes import AxisName, Grid, on_axis
from lit_layers.plots.labels import escape
from lit_layers.plots.theme import COLORS, DASHES, MUTED, figure, rounded

_MARKED = 60  # curves of more points than this are drawn as lines alone
_BINS = 500  # points of a curve: about one a pixel


def training_curves(
    scalars: Iterable[Mapping[str, float]],
    names: Sequence[str] | None = None,
    *,
    axis: AxisName = "step",
    tokens_per_step: int | None = None,
    references: Mapping[str, float] | None = None,
) -> go.Figure:
    """Returns scalars of training over steps; without `names` those called loss, of training and of validation.

    Rows are those of `records.rows`. Long curves are averaged over steps that would share a pixel. `references` are
    drawn as dashed levels, e.g. `{"Unigram entropy": 5.9}`.

    Raises:
        ValueError: where no row has one of the names.
    """
    rows = list(scalars)
    known = dict.fromkeys(name for row in rows for name in row if name not in ("step", "tokens"))
    losses = [name for name in known if name.split("/")[-1] == "loss"]
    chosen = sorted(losses, key=lambda name: not name.startswith("train")) if names is None else list(names)
    points = {name: [row for row in rows if name in row and np.isfinite(row[name])] for name in chosen}
    if not any(points.values()):
        wanted, there = ", ".join(chosen) or "loss", ", ".join(known) or "none"
        raise ValueError(f"no values of {wanted} in these rows; they have: {there}")
    traces, grids = [], []
    for index, name in enumerate(chosen):
        color = COLORS[index % len(COLORS)]
        for part in ([p for p in points[name] if p["step"] > 0], [p for p in points[name] if p["step"] <= 0]):
            if part:
                trace, grid = _curve(part, name, color, tokens_per_step)
                traces.append({**trace, "meta": len(grids)})
                grids.append(grid)
    longest = max(range(len(grids)), key=lambda number: len(grids[number].steps))
    for index, (name, value) in enumerate((references or {}).items()):
        level = {"y": rounded([value] * len(grids[longest].steps)), "meta": longest, "mode": "lines"}
        level["line"] = {"color": MUTED, "width": 1.6, "dash": DASHES[index % len(DASHES)]}
        level["hovertemplate"] = "%{y:.4g}<extra>" + escape(name) + "</extra>"
        traces.append({**level, "name": escape(name)})
    layout = {**on_axis(traces, grids, axis), "showlegend": len(chosen) > 1 or bool(references)}
    title = "Loss (nats)" if names is None else look_up(chosen[0]).with_unit
    return figure(title, traces, unit=look_up(chosen[0]).unit, log=look_up(chosen[0]).log, **layout)


def _curve(
    points: list[Mapping[str, float]], name: str, color: str, tokens_per_step: int | None
) -> tuple[dict[str, Any], Grid]:
    """One scalar: a line over training, or a diamond for the untrained model; and where its points are."""
    steps, values, tokens = _binned(points, name, tokens_per_step)
    text = escape(look_up(name).title)
    untrained, sparse = steps[-1] <= 0, len(points) <= _MARKED
    trace = {
        "y": rounded(values),
        "name": text,
        "legendgroup": text,
        "showlegend": not untrained,
        "mode": "markers" if untrained else "lines+markers" if sparse else "lines",
        "line": {"color": color, "width": 2.2 if sparse else 1.6},
        "marker": {"size": 8 if untrained else 5, "symbol": "diamond" if untrained else "circle", "color": color},
        "hovertemplate": "%{y:.4g}<br>%{customdata[0]}<extra>" + text + "</extra>",
    }
    return trace, Grid.of(steps, tokens)


def _binned(
    points: list[Mapping[str, float]], name: str, tokens_per_step: int | None
) -> tuple[list[int], list[float], dict[int, int | None]]:
    """Means over bins of log(1 + step), each at the last step of its bin."""
    places = np.log1p([point["step"] for point in points])
    bins = np.floor((places - places[0]) / max(places[-1] - places[0], 1e-9) * _BINS).astype(int).clip(max=_BINS - 1)
    means = np.bincount(bins, [point[name] for point in points]) / np.maximum(np.bincount(bins), 1)
    last = {int(number): points[index] for index, number in enumerate(bins)}
    tokens: dict[int, int | None] = {}
    for point in last.values():
        step = int(point["step"])
        known = point.get("tokens", step * tokens_per_step if tokens_per_step is not None else None)
        tokens[step] = None if known is None else int(known)
    return list(tokens), [float(means[number]) for number in last], tokens
