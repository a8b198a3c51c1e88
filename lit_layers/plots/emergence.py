"""Emergence curves: metrics over the steps of training."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import pandas as pd
import plotly.graph_objects as go

from lit_layers.metrics import look_up
from lit_layers.plots.axes import AxisName, Grid, on_axis, whole_ticks
from lit_layers.plots.labels import escape, tag_text
from lit_layers.plots.tables import (
    ORDINALS,
    Point,
    choice_text,
    grouped,
    is_on_axes,
    is_placed,
    matching,
    of_plainest,
    select,
    steps_of,
    title_of,
    variant_text,
    variants_of,
)
from lit_layers.plots.theme import (
    COLORS,
    DASHES,
    DEPTH,
    INK,
    LEGEND_BELOW,
    MUTED,
    bar_trace,
    colors_of,
    figure,
    rounded,
    translucent,
)

MARKED = 60  # more checkpoints than this are drawn as lines alone


def emergence_curves(
    frame: pd.DataFrame,
    metric: str,
    *,
    analysis: str | None = None,
    axis: AxisName = "step",
    tags: Mapping[str, Any] | None = None,
    baselines: Sequence[str] = (),
    allow_suspect: bool = False,
) -> go.Figure:
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
    chosen: dict[str, Any] = {"analysis": analysis, "tags": tags, "allow_suspect": allow_suspect, "over_steps": True}
    found = select(frame, metric, **chosen)
    points = [point for point in found if point.other_layer is None and not is_placed(point)]
    others = {name: _of_whole(select(frame, name, **chosen)) for name in baselines}
    others = {name: part for name, part in others.items() if part}
    if not points:
        raise ValueError(f"metric {metric!r} has values for pairs of layers or of tokens only")
    if any(map(is_on_axes, points)):
        points, tags = of_plainest(points, tags)
    own = [point for point in points if point.reference is None]
    references = grouped([point for point in points if point.reference is not None], lambda point: point.reference)

    drawing = _Drawing.of([*points, *(point for part in others.values() for point in part)])
    ordinal, lined = _ordinal(own)
    if ordinal is not None:
        _layers(drawing, lined, ordinal)
        own = [point for point in own if point.layer is None and point.number(ordinal) is None]
    in_legend = ordinal is not None or len(references) > 0 or len(others) > 0 or look_up(metric).level is not None
    colors = _whole_model(drawing, own, "Whole model" if ordinal else look_up(metric).title, in_legend)
    for index, (name, part) in enumerate(references.items()):
        drawing.dashed(part, tag_text({"reference": name}), MUTED, DASHES[index % len(DASHES)])
    for name, part in others.items():
        title = look_up(name).title_beside
        for text, variant in _variants(part):
            drawing.dashed(variant, f"{title}, {text}" if text else title, colors.get(text, MUTED), DASHES[0])
    if (level := look_up(metric).level) is not None:
        drawing.level(level, look_up(metric).level_name)
    layout = on_axis(drawing.traces, drawing.grids, axis)
    if ordinal is not None and len(drawing.named) > 1:
        layout |= LEGEND_BELOW
    if look_up(metric).whole:
        ends = [end for p in points for end in (p.value, p.low, p.high) if math.isfinite(end)]
        layout["yaxis"] = whole_ticks(math.floor(min(ends)), math.ceil(max(ends))) if ends else {}
    log = look_up(metric).log
    return figure(title_of(metric, tags or {}), drawing.traces, unit=look_up(metric).unit, log=log, **layout)


@dataclass(frozen=True)
class _Drawing:
    """Traces, and the checkpoints on their axis: those of training, and the untrained model apart."""

    trained: Grid
    untrained: Grid
    traces: list[dict[str, Any]] = field(default_factory=list)

    @classmethod
    def of(cls, points: Sequence[Point]) -> "_Drawing":
        tokens_of = {point.step: point.tokens for point in points}
        steps = steps_of(points)
        trained, untrained = [s for s in steps if s > 0], [s for s in steps if s <= 0]
        return cls(Grid.of(trained, tokens_of), Grid.of(untrained, tokens_of))

    @property
    def grids(self) -> list[Grid]:
        return [self.trained, self.untrained]

    @property
    def named(self) -> set[str]:
        """What the legend shows."""
        return {trace["name"] for trace in self.traces if trace.get("showlegend")}

    def line(self, points: Sequence[Point], name: str, color: str, *, strong: bool, in_legend: bool) -> None:
        """Adds points as a line over training, and a diamond for the untrained model."""
        line = _Line(points)
        for number, grid in enumerate(self.grids):
            if not grid.steps:
                continue
            trained = grid is self.trained
            size = (5.5 if trained else 8) if strong else (4 if trained else 7)
            trace = {
                "y": line.at(grid),
                "name": escape(name),
                "legendgroup": escape(name),
                "showlegend": in_legend and (trained or not self.trained.steps),
                "mode": "markers" if not trained else "lines" if len(grid.steps) > MARKED else "lines+markers",
                "line": {"color": color, "width": 2.4 if strong else 1.6},
                "marker": {"size": size, "color": color, "symbol": "circle" if trained else "diamond"},
                "hovertemplate": "%{y:.4g}<br>%{customdata[0]}<extra>" + escape(name) + "</extra>",
                "meta": number,
            }
            if line.has_interval and (strong or len(grid.steps) <= MARKED):
                trace["text"] = line.intervals(grid)
                trace["hovertemplate"] = trace["hovertemplate"].replace("<br>", "<br>95% interval %{text}<br>", 1)
            if line.has_interval and strong and not trained:
                trace["error_y"] = line.error_bars(grid)
            self.traces.append(trace)

    def band(self, points: Sequence[Point], name: str, color: str) -> None:
        """Adds the 95% interval of points that have one."""
        line = _Line(points)
        if not self.trained.steps or not line.has_interval:
            return
        edge = {"mode": "lines", "line": {"width": 0}, "hoverinfo": "skip", "showlegend": False, "meta": 0}
        edge |= {"legendgroup": escape(name)}
        self.traces.append({"y": line.at(self.trained, "low"), **edge})
        fill = {"fill": "tonexty", "fillcolor": translucent(color, 0.16)}
        self.traces.append({"y": line.at(self.trained, "high"), **fill, **edge})

    def dashed(self, points: Sequence[Point], name: str, color: str, dash: str) -> None:
        """Adds points to compare with: a dashed line, and a dash for the untrained model."""
        line = _Line(points)
        for number, grid in enumerate(self.grids):
            if not grid.steps:
                continue
            trace = {
                "y": line.at(grid),
                "name": escape(name),
                "legendgroup": escape(name),
                "showlegend": grid is self.trained or not self.trained.steps,
                "mode": "lines" if len(grid.steps) > 1 else "markers",
                "line": {"color": color, "width": 1.6, "dash": dash},
                "marker": {"size": 9, "symbol": "line-ew", "line": {"width": 2, "color": color}},
                "hovertemplate": "%{y:.4g}<br>%{customdata[0]}<extra>" + escape(name) + "</extra>",
                "meta": number,
            }
            self.traces.append(trace)

    def level(self, value: float, name: str) -> None:
        """Adds a value to compare with that is known beforehand: a dotted line through all checkpoints."""
        for number, grid in enumerate(self.grids):
            if grid.steps:
                trace = {
                    "y": [value] * len(grid.steps),
                    "name": escape(name),
                    "legendgroup": escape(name),
                    "meta": number,
                }
                trace |= {"showlegend": grid is self.trained or not self.trained.steps}
                trace |= {"mode": "lines" if len(grid.steps) > 1 else "markers"}
                trace |= {"line": {"color": MUTED, "width": 1.6, "dash": DASHES[1]}}
                trace |= {"marker": {"size": 9, "symbol": "line-ew", "line": {"width": 2, "color": MUTED}}}
                self.traces.append({**trace, "hovertemplate": "%{y:.4g}<extra>" + escape(name) + "</extra>"})


class _Line:
    """The values of one line by step."""

    def __init__(self, points: Sequence[Point]) -> None:
        self.by_step = {point.step: point for point in points}
        self.has_interval = any(math.isfinite(point.low) and math.isfinite(point.high) for point in points)

    def at(self, grid: Grid, name: Literal["value", "low", "high"] = "value") -> list[float | None]:
        """Its values at each checkpoint of a grid, None where it was not measured."""
        found = (self.by_step.get(step) for step in grid.steps)
        return rounded(None if point is None else getattr(point, name) for point in found)

    def intervals(self, grid: Grid) -> list[str]:
        ends = zip(self.at(grid, "low"), self.at(grid, "high"), strict=True)
        return ["unknown" if a is None or b is None else f"{a:.4g} to {b:.4g}" for a, b in ends]

    def error_bars(self, grid: Grid) -> dict[str, Any]:
        triples = zip(self.at(grid), self.at(grid, "low"), self.at(grid, "high"), strict=True)
        ends = [(0.0, 0.0) if v is None or a is None or b is None else (b - v, v - a) for v, a, b in triples]
        bars = {"array": [up for up, _ in ends], "arrayminus": [down for _, down in ends], "symmetric": False}
        return {**bars, "thickness": 1.2, "width": 3}


def _layers(drawing: _Drawing, points: Sequence[Point], ordinal: str) -> None:
    """One line a layer (or distance), coloured by depth, with a colour bar as the legend."""
    parts = grouped(points, lambda point: point.number(ordinal))
    numbers = sorted(parts)
    for number, color in zip(numbers, colors_of(DEPTH, len(numbers)), strict=True):
        drawing.line(parts[number], f"{ordinal} {number}", color, strong=False, in_legend=False)
    if len(numbers) > 1:
        shown = sorted({numbers[0], numbers[len(numbers) // 2], numbers[-1]})
        drawing.traces.append(bar_trace(ordinal.capitalize(), DEPTH, {number: str(number) for number in shown}))


def _whole_model(drawing: _Drawing, points: Sequence[Point], title: str, in_legend: bool) -> dict[str, str]:
    """One strong line a variant, in a colour of its own; returns the colours."""
    found = _variants(points)
    several = len(found) > 1
    colors = {}
    for index, (text, part) in enumerate(found):
        colors[text] = INK if title == "Whole model" else COLORS[index % len(COLORS)]
        name = (text or title) if several else title
        drawing.band(part, name, colors[text])
        drawing.line(part, name, colors[text], strong=True, in_legend=in_legend or several)
    return colors


def _ordinal(points: Sequence[Point]) -> tuple[str | None, Sequence[Point]]:
    """What numbers the lines (layers, distances, ...), and the points on them; of a list of values its first."""
    if lined := [point for point in points if point.layer is not None]:
        first = min((point.tags["index"] for point in lined if "index" in point.tags), default=None)
        return "layer", [point for point in lined if point.tags.get("index") == first]
    for name in ORDINALS:
        if lined := [point for point in points if name in point.tags]:
            return name, lined
    return None, []


def _of_whole(points: Sequence[Point]) -> list[Point]:
    return [point for point in points if point.layer is None]


def _variants(points: Sequence[Point]) -> list[tuple[str, list[Point]]]:
    found = variants_of(points)
    text = choice_text if len(found) > 1 else variant_text
    return [(text(tags), matching(points, tags)) for tags in found]
