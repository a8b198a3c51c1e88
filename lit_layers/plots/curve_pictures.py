"""Layers, sample sizes and categories as PNG or SVG pictures, drawn by matplotlib: no browser, no network."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from lit_layers.metrics import look_up, sentence
from lit_layers.plots.canvas import canvas, dress, legend_beside, plain_log, rgb, save, whole_layers
from lit_layers.plots.concepts import category_points, largest, layers_of, rows_of, table_of
from lit_layers.plots.labels import count, tag_text
from lit_layers.plots.models import short_names
from lit_layers.plots.sample_sizes import sized_points
from lit_layers.plots.sliders import spread
from lit_layers.plots.tables import (
    Point,
    grouped,
    is_placed,
    matching,
    plainest,
    select,
    title_of,
    variants_of,
)
from lit_layers.plots.theme import COLORS, DEPTH, DIVERGING, MUTED, TIME

_CURVES, _PANELS, _BANDS = 8, 3, 3
_LINES = ("--", ":", "-.")


@dataclass(frozen=True)
class _Checkpoint:
    """A checkpoint of a run, or a model, with what was recorded there of one metric."""

    name: str
    points: Sequence[Point]


@dataclass(frozen=True)
class _Curve:
    """A checkpoint's values over the layers, and what they are compared with: names, layers, values.

    `layers` are those of all checkpoints, up to this one's last.
    """

    name: str
    points: Sequence[Point]
    layers: Sequence[int]
    compared: Sequence[tuple[str, Sequence[int], Sequence[float]]]

    @property
    def depth(self) -> int:
        return self.points[-1].layer or 0


def write_layer_curves(
    frame: pd.DataFrame,
    path: Path,
    metric: str,
    *,
    analysis: str | None = None,
    tags: Mapping[str, Any] | None = None,
    controls: Sequence[str] = (),
    allow_suspect: bool = False,
) -> None:
    """Writes a metric over the layers, a line for each checkpoint of a run, or for each model where none has a step.

    Of many checkpoints eight are drawn, spread evenly. The 95% intervals are shaded, of more than three lines those of
    the first and the last. Dashed: rows tagged `reference`, and those whose tag `control` is in `controls`, of the last
    checkpoint, or of each model in its colour. Models that are not equally deep have their depth in per cent, 100 l /
    L, as their axis. A line breaks at a layer that only others have a value of. `tags` chooses a variant, as in
    `emergence_curves`. The suffix of `path` decides: .png or .svg.

    Raises:
        InputError: for suspect checkpoints, unless they are allowed; where the picture cannot be written.
        ValueError: where the metric has no values per layer; another suffix.
    """
    by_model, checkpoints = _checkpoints(frame, metric, analysis, allow_suspect)
    tags, curves = _curves(metric, checkpoints, tags, controls)
    curves = curves if by_model else [curves[n] for n in spread([*range(len(curves))], _CURVES)]
    colors = [COLORS[n % len(COLORS)] for n in range(len(curves))] if by_model else rgb(TIME, len(curves))
    is_share = by_model and len({curve.depth for curve in curves}) > 1
    fig = canvas(7.2, 4.0)
    axes = fig.add_subplot()
    levels: dict[str, list[tuple[str, list[float], Sequence[float], Any]]] = {}
    for number, (curve, color) in enumerate(zip(curves, colors, strict=True)):
        scale = 100 / (curve.depth or 1) if is_share else 1
        at = [layer * scale for layer in curve.layers]
        values, low, high = zip(*_with_gaps(curve.points, curve.layers), strict=True)
        if len(curves) <= _BANDS or number in (0, len(curves) - 1):
            axes.fill_between(at, low, high, color=color, alpha=0.15, linewidth=0)
        axes.plot(at, values, color=color, linewidth=1.6, marker="o", markersize=3.5, label=curve.name)
        for text, layers, compared in curve.compared if by_model or curve is curves[-1] else ():
            places = [layer * scale for layer in layers]
            levels.setdefault(text, []).append((curve.name, places, compared, color))
    for (text, found), style in zip(levels.items(), _LINES * 9, strict=False):
        alike = not by_model or len(found) == 1 or len({tuple(values) for _, _, values, _ in found}) == 1
        for _, places, values, color in found[:1] if alike else found:
            axes.plot(places, values, color=MUTED if alike else color, linewidth=1.1, linestyle=style)
        axes.plot([], [], color=MUTED, linewidth=1.1, linestyle=style, label=text)
    if look_up(metric).log:
        axes.set_yscale("log")
        plain_log(axes)
    dress(axes, "depth (100 layer / number of layers)" if is_share else "layer", look_up(metric).unit)
    if not is_share:
        whole_layers(axes)
    legend_beside(axes)
    save(fig, path, _title(metric, tags, analysis))


def write_sample_sizes(
    frame: pd.DataFrame,
    path: Path,
    metric: str = "accuracy",
    *,
    analysis: str | None = None,
    tags: Mapping[str, Any] | None = None,
    allow_suspect: bool = False,
) -> None:
    """Writes a metric over the number of training rows (log axis), one line a layer, with 95% intervals as bars.

    A panel for each of up to three checkpoints, or for each model where none has a step. Else as `write_layer_curves`.

    Raises:
        InputError: for suspect checkpoints, unless they are allowed; where the picture cannot be written.
        ValueError: where the metric has no values per layer and number of training rows; another suffix.
    """
    by_model, checkpoints = _checkpoints(frame, metric, analysis, allow_suspect, tags)
    panels = [_Checkpoint(each.name, sized_points(each.points)) for each in _few(checkpoints, by_model)]
    if not any(each.points for each in panels):
        raise ValueError(f"metric {metric!r} has no values per layer and number of training rows")
    layers = sorted({p.layer for each in panels for p in each.points if p.layer is not None})
    colors = dict(zip(layers, rgb(DEPTH, len(layers)), strict=True))
    fig = canvas(1.6 + 3.4 * len(panels), 3.8)
    every = fig.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    for axes, each in zip(every, panels, strict=True):
        for layer, part in grouped(each.points, lambda point: point.layer).items():
            bars = [[_gap(p.value, p.low) for p in part], [_gap(p.high, p.value) for p in part]]
            axes.errorbar(
                [p.tags["train_rows"] for p in part],
                [p.value for p in part],
                yerr=bars,
                color=colors[layer],
                linewidth=1.4,
                elinewidth=0.7,
                capsize=1.5,
                marker="o",
                markersize=3,
                label=f"layer {layer}" if layer in spread(layers, 9) else None,
            )
        axes.set_xscale("log")
        sizes = sorted({p.tags["train_rows"] for p in each.points})
        axes.set_xticks(sizes, [count(size) for size in sizes])
        axes.minorticks_off()
        dress(axes, "training rows", look_up(metric).unit if axes is every[0] else "")
        axes.set_title(each.name, loc="left", fontsize=9, color=MUTED, parse_math=False)
    handles = {text: handle for axes in every for handle, text in zip(*axes.get_legend_handles_labels(), strict=True)}
    shown = sorted(handles, key=lambda text: int(text.split()[-1]))
    legend_beside(every[-1], [handles[text] for text in shown], shown)
    save(fig, path, _title(metric, tags or {}, analysis))


def write_concept_map(
    frame: pd.DataFrame,
    path: Path,
    metric: str = "concept_alignment",
    *,
    analysis: str | None = None,
    tags: Mapping[str, Any] | None = None,
    allow_suspect: bool = False,
) -> None:
    """Writes a metric of categories per layer as heat maps that share their colours, as `plots.concept_map`.

    A panel for each of up to three checkpoints, or for each model where none has a step.

    Raises:
        InputError: for suspect checkpoints, unless they are allowed; where the picture cannot be written.
        ValueError: where the metric has no values per layer and category; another suffix.
    """
    from matplotlib.colors import LinearSegmentedColormap

    by_model, checkpoints = _checkpoints(frame, metric, analysis, allow_suspect, tags)
    panels = [_Checkpoint(each.name, category_points(each.points)) for each in _few(checkpoints, by_model)]
    panels = [each for each in panels if each.points]
    if not panels:
        raise ValueError(f"metric {metric!r} has no values per layer and category")
    everything = [point for each in panels for point in each.points]
    rows, full = rows_of(everything), largest(everything) or 1.0
    widths = [max(len(layers_of(each.points)), 4) for each in panels]
    fig = canvas(3.0 + sum(min(0.32 * width, 3.6) for width in widths), 1.3 + 0.165 * len(rows))
    every = fig.subplots(1, len(panels), squeeze=False, width_ratios=widths)[0]
    colors = LinearSegmentedColormap.from_list("diverging", [(place, color) for place, color in DIVERGING])
    image: Any = None
    for axes, each in zip(every, panels, strict=True):
        layers = layers_of(each.points)
        values = table_of(each.points, rows, layers, each.points[0].step)
        image = axes.pcolormesh(values, cmap=colors, vmin=-full, vmax=full, edgecolors="white", linewidth=0.5)
        axes.invert_yaxis()
        shown = spread(layers, 9)
        axes.set_xticks([layers.index(layer) + 0.5 for layer in shown], [str(layer) for layer in shown])
        axes.set_yticks([n + 0.5 for n in range(len(rows))], [row.text for row in rows] if axes is every[0] else [])
        dress(axes, "layer", "")
        axes.grid(False)
        axes.set_title(each.name, loc="left", fontsize=9, color=MUTED, parse_math=False)
    for text, row in zip(every[0].get_yticklabels(), rows, strict=True):
        text.set(fontsize=7, parse_math=False, fontweight="bold" if row.is_heading else "normal")
    bar = fig.colorbar(image, ax=list(every), fraction=0.05, pad=0.02, shrink=0.5)
    bar.outline.set_visible(False)  # pyright: ignore[reportCallIssue]
    bar.ax.tick_params(labelsize=7, length=2, colors=MUTED)
    save(fig, path, _title(metric, tags or {}, analysis))


def _checkpoints(
    frame: pd.DataFrame, metric: str, analysis: str | None, allow_suspect: bool, tags: Mapping[str, Any] | None = None
) -> tuple[bool, list[_Checkpoint]]:
    """Whether these are models without steps, and each with its points; of a run its checkpoints in order."""
    table: Any = frame
    rows = table[table["metric"] == metric]
    rows = rows if analysis is None else rows[rows["analysis"] == analysis]
    chosen: dict[str, Any] = {"analysis": analysis, "tags": tags, "allow_suspect": allow_suspect}
    if rows.empty or rows["step"].notna().any():
        by_step = grouped(select(frame, metric, over_steps=True, **chosen), lambda point: point.step)
        return False, [_Checkpoint(f"step {step:,}", by_step[step]) for step in sorted(by_step)]
    names = short_names([*rows["run"].unique()])
    return True, [_Checkpoint(name, select(rows[rows["run"] == run], metric, **chosen)) for run, name in names.items()]


def _curves(
    metric: str, checkpoints: Sequence[_Checkpoint], tags: Mapping[str, Any] | None, controls: Sequence[str]
) -> tuple[dict[str, Any], list[_Curve]]:
    """The variant that is drawn, and its curve at each checkpoint that has it."""
    plain = [[p for p in each.points if p.other_layer is None and not is_placed(p)] for each in checkpoints]
    found = matching([point for part in plain for point in part if point.layer is not None], tags or {})
    if not found:
        raise ValueError(f"metric {metric!r} has no values per layer{' with these tags' if tags else ''}")
    chosen = {**plainest(variants_of(found)), **(tags or {})}
    every = [_layered(matching(points, chosen)) for points in plain]
    places = sorted({point.layer or 0 for own in every for point in own})
    curves = []
    for each, points, own in zip(checkpoints, plain, every, strict=True):
        ends = [own[0].layer or 0, own[-1].layer or 0] if own else []
        levels = [point for point in matching(points, chosen) if point.reference is not None]
        compared: list[tuple[str, list[int], list[float]]] = [
            (tag_text({"reference": point.reference}), ends, [point.value] * 2) for point in levels
        ]
        for control in controls:
            part = _layered(matching(points, {**chosen, "control": control}))
            layers = places if part else []
            compared.append((tag_text({"control": control}), layers, [v for v, *_ in _with_gaps(part, layers)]))
        if own:
            layers = [layer for layer in places if layer <= ends[1]]
            curves.append(_Curve(each.name, own, layers, [line for line in compared if line[1]]))
    return chosen, curves


def _layered(points: Sequence[Point]) -> list[Point]:
    own = [point for point in points if point.layer is not None and point.reference is None]
    return sorted(own, key=lambda point: point.layer or 0)


def _with_gaps(points: Sequence[Point], layers: Sequence[int]) -> list[tuple[float, float, float]]:
    """Value and interval at each layer, NaN where there is no point: matplotlib draws nothing there."""
    values = {point.layer: (point.value, point.low, point.high) for point in points}
    return [values.get(layer, (math.nan,) * 3) for layer in layers]


def _few(checkpoints: Sequence[_Checkpoint], by_model: bool) -> list[_Checkpoint]:
    """All models; of a run's checkpoints as many as there are panels."""
    return list(checkpoints) if by_model else [checkpoints[n] for n in spread([*range(len(checkpoints))], _PANELS)]


def _title(metric: str, tags: Mapping[str, Any], analysis: str | None) -> str:
    name = sentence(analysis or "")
    return ": ".join(filter(None, [name if name != look_up(metric).title else "", title_of(metric, tags)]))


def _gap(high: float, low: float) -> float:
    return high - low if math.isfinite(high - low) else 0.0
