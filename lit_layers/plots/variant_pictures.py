"""Variants of a model's running order as PNG or SVG pictures, drawn by matplotlib: no browser, no network."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from lit_layers.metrics import look_up, sentence
from lit_layers.plots.axes import TITLES, Grid, on_axis, position
from lit_layers.plots.canvas import canvas, dress, legend_beside, plain_log, rgb, save, whole_layers
from lit_layers.plots.labels import tag_text
from lit_layers.plots.sliders import spread
from lit_layers.plots.surfaces import MISSING, VIRIDIS, color_norm
from lit_layers.plots.tables import Point, grouped, steps_of
from lit_layers.plots.theme import INK, MUTED
from lit_layers.plots.variant_figures import MIDDLE, labels_of, lines_over_steps, read_front
from lit_layers.plots.variant_scores import (
    BASELINE,
    LOOKS,
    Line,
    baseline_of,
    kept_of,
    lines_by_block,
    lines_by_middle,
    loop_table,
    middle_of,
    middles_of,
    random_level,
    several,
    variant_points,
)

_PANELS = 3


def write_variant_curves(
    frame: pd.DataFrame,
    path: Path,
    metric: str,
    *,
    analysis: str | None = None,
    tags: Mapping[str, Any] | None = None,
    split: str | None = None,
    best_loops: bool = False,
    allow_suspect: bool = False,
) -> None:
    """Writes `variant_curves` as a picture, a panel for each of up to three checkpoints. The suffix decides.

    Raises:
        InputError: for suspect checkpoints, unless they are allowed; where the picture cannot be written.
        ValueError: as `variant_curves`; another suffix than .png or .svg.
    """
    options: dict[str, Any] = {"analysis": analysis, "tags": tags, "split": split, "allow_suspect": allow_suspect}
    points = variant_points(frame, metric, **options)
    if not middles_of(points):
        raise ValueError(f"metric {metric!r} has no values of variants of the middle")
    every, steps = _panels(points)
    fig = every[0].figure
    guess = random_level(frame, metric, analysis)
    middles = middles_of(points)
    for axes, step in zip(every, steps, strict=True):
        own = [point for point in points if point.step == step]
        parts = {"": own} if split is None else several(own, split)
        for number, (kind, part) in enumerate(parts.items()):
            told = tag_text({split: kind}) if split is not None else ""
            for line in lines_by_middle(part, metric=metric, best=best_loops and split is None, kind=told):
                is_first = split is not None and number < len(parts) - 1
                _draw(axes, line, [middle_of(p) for p in line.points], faint=is_first or line.is_best)
            if (full := baseline_of(part)) is not None and (split is None or split in full.tags or number == 0):
                both = split is not None and split in full.tags
                axes.axhline(
                    full.value,
                    color=INK,
                    linewidth=1.2,
                    linestyle="-." if both and number < len(parts) - 1 else "--",
                    label=f"Full model, {told}" if both else "Full model",
                )
        if guess is not None:
            axes.axhline(guess, color=MUTED, linewidth=1.2, linestyle=":", label="Guessing")
        axes.set_xticks(spread(middles, 8))
        dress(
            axes, MIDDLE if len(every) == 1 else "M (middle blocks changed)", _unit(metric) if axes is every[0] else ""
        )
        _log_up(axes, metric)
        _name(axes, step, len(every))
    _legend(every)
    save(fig, path, _title(metric, tags, analysis))


def write_loop_map(
    frame: pd.DataFrame,
    path: Path,
    metric: str,
    *,
    analysis: str | None = None,
    tags: Mapping[str, Any] | None = None,
    allow_suspect: bool = False,
) -> None:
    """Writes `loop_map` as a picture, at the last checkpoint. The suffix decides.

    Raises:
        InputError: for suspect checkpoints, unless they are allowed; where the picture cannot be written.
        ValueError: as `loop_map`; another suffix than .png or .svg.
    """
    from matplotlib.colors import ListedColormap
    from numpy import array, ma

    points = variant_points(frame, metric, analysis=analysis, tags=tags, allow_suspect=allow_suspect)
    last = [step for step in steps_of(points) if any("loops" in p.tags for p in points if p.step == step)][-1:]
    table = loop_table([point for point in points if point.step in last])
    higher = look_up(metric).higher_is_better
    fig = canvas(2.4 + 0.42 * max(len(table.middles), 7), 1.6 + 0.3 * len(table.loops))
    axes = fig.add_subplot()
    axes.set_facecolor(MISSING)
    colors = ListedColormap(rgb(VIRIDIS if higher else VIRIDIS[::-1], 256))
    look = {"cmap": colors, "norm": color_norm(metric), "edgecolors": "white", "linewidth": 0.6}
    image = axes.pcolormesh(ma.masked_invalid(array(table.values)), **look)
    best = table.best(higher_is_better=higher)
    places = [(table.middles.index(m) + 0.5, table.loops.index(k) + 0.5) for m, k in best.items()]
    axes.scatter(
        [x for x, _ in places], [y for _, y in places], s=26, color="white", edgecolors="black", linewidths=0.8
    )
    shown = spread([*table.middles], 14)
    axes.set_xticks([table.middles.index(m) + 0.5 for m in shown], [str(m) for m in shown])
    axes.set_yticks([n + 0.5 for n in range(len(table.loops))], [str(k) for k in table.loops])
    dress(axes, "number of middle blocks in the loop (M)", "loops")
    axes.grid(False)
    bar = fig.colorbar(image, ax=axes, fraction=0.06, pad=0.02)
    bar.outline.set_visible(False)  # pyright: ignore[reportCallIssue]
    bar.ax.tick_params(labelsize=7, length=2, colors=MUTED)
    save(fig, path, f"{_title(metric, tags, analysis)}; dots: best number of loops")


def write_block_curves(
    frame: pd.DataFrame,
    path: Path,
    metric: str,
    *,
    analysis: str | None = None,
    tags: Mapping[str, Any] | None = None,
    allow_suspect: bool = False,
) -> None:
    """Writes `block_curves` as a picture, a panel for each of up to three checkpoints. The suffix decides.

    Raises:
        InputError: for suspect checkpoints, unless they are allowed; where the picture cannot be written.
        ValueError: as `block_curves`; another suffix than .png or .svg.
    """
    points = variant_points(frame, metric, analysis=analysis, tags=tags, allow_suspect=allow_suspect)
    kept = {p.step for p in points if lines_by_block([p])}
    points = [point for point in points if point.step in kept]
    if not points:
        raise ValueError(f"metric {metric!r} has no values of single blocks that are skipped or switched")
    every, steps = _panels(points)
    for axes, step in zip(every, steps, strict=True):
        own = [point for point in points if point.step == step]
        for line in lines_by_block(own):
            _draw(axes, line, [p.layer or 0 for p in line.points])
        if (full := baseline_of(own)) is not None:
            axes.axhline(full.value, color=INK, linewidth=1.2, linestyle="--", label="Full model")
        whole_layers(axes)
        dress(axes, "block", _unit(metric) if axes is every[0] else "")
        _log_up(axes, metric)
        _name(axes, step, len(every))
    _legend(every)
    save(every[0].figure, path, _title(metric, tags, analysis))


def write_variants_over_training(
    frame: pd.DataFrame,
    path: Path,
    metric: str,
    *,
    middle: int,
    kept: bool = False,
    analysis: str | None = None,
    tags: Mapping[str, Any] | None = None,
    allow_suspect: bool = False,
) -> None:
    """Writes `variants_over_training` as a picture. The suffix decides.

    Raises:
        InputError: for suspect checkpoints, unless they are allowed; where the picture cannot be written.
        ValueError: as `variants_over_training`; another suffix than .png or .svg.
    """
    points = variant_points(frame, metric, analysis=analysis, tags=tags, allow_suspect=allow_suspect)
    if middle not in middles_of(points):
        raise ValueError(f"metric {metric!r} has no variant of {middle} middle blocks")
    points = kept_of(points) if kept else points
    spec = on_axis([], [Grid.of(steps_of(points), {p.step: p.tokens for p in points})], "step")["meta"]["axes"]["step"]
    fig = canvas(7.2, 4.0)
    axes = fig.add_subplot()
    for line in lines_over_steps(points, middle):
        after = [point for point in line.points if point.step > 0]
        before = [point for point in line.points if point.step <= 0]
        color, _, marker = LOOKS[line.variant]
        dashed = "--" if line.variant == BASELINE else "-"
        mark = "" if line.variant == BASELINE else marker
        axes.plot(
            [position(p.step, spec["apart"]) for p in after],
            [p.value for p in after],
            color=color,
            linestyle=dashed,
            linewidth=1.5,
            marker=mark,
            markersize=4.5,
            label=line.name,
        )
        axes.plot([spec["apart"]] * len(before), [p.value for p in before], color=color, linestyle="", marker=marker)
    if spec["divider"] is not None:
        axes.axvline(spec["divider"], color="#e6eaee", linewidth=5)
    axes.set_xticks(spec["tickvals"], spec["ticktext"])
    axes.set_xlim(*spec["range"])
    _log_up(axes, metric)
    dress(axes, TITLES["step"], "share of the full model's" if kept else _unit(metric))
    legend_beside(axes)
    name = f"{_title(metric, tags, analysis)}{', kept' if kept else ''}, M = {middle}"
    save(fig, path, name)


def write_front(
    frame: pd.DataFrame,
    path: Path,
    metric: str,
    *,
    analysis: str | None = None,
    tags: Mapping[str, Any] | None = None,
    cost: str = "relative_latency",
    cost_analysis: str = "intervene/speed",
    cost_tags: Mapping[str, Any] | None = None,
    allow_suspect: bool = False,
) -> None:
    """Writes `quality_front` as a picture. The suffix decides.

    Raises:
        InputError: for suspect checkpoints, unless they are allowed; where the picture cannot be written.
        ValueError: as `quality_front`; another suffix than .png or .svg.
    """
    options: dict[str, Any] = {"analysis": analysis, "tags": tags, "allow_suspect": allow_suspect}
    found = read_front(frame, metric, cost=cost, cost_analysis=cost_analysis, cost_tags=cost_tags, **options)
    fig = canvas(7.2, 4.4)
    axes = fig.add_subplot()
    best = sorted((p for p in found if p.is_best), key=lambda p: p.cost)
    axes.step(
        [p.cost for p in best],
        [p.quality for p in best],
        where="post",
        color=MUTED,
        linestyle=":",
        linewidth=1.3,
        label="Pareto front",
        zorder=1,
    )
    order = [*LOOKS]
    for variant, part in sorted(grouped(found, lambda p: p.variant).items(), key=lambda pair: order.index(pair[0])):
        color, _, marker = LOOKS[variant]
        is_full = variant == BASELINE
        axes.scatter(
            [p.cost for p in part],
            [p.quality for p in part],
            s=110 if is_full else 30,
            marker="*" if is_full else "p" if marker == "*" else marker,
            color=color,
            edgecolors="white",
            linewidths=0.4,
            label="Full model" if is_full else Line(variant, [], 0).name.split(", k")[0],
            zorder=4 if is_full else 3,
        )
    for point in best:
        if text := labels_of(best, found).get(point.name):
            axes.annotate(
                text,
                (point.cost, point.quality),
                xytext=(0, 5),
                textcoords="offset points",
                ha="center",
                fontsize=7,
                color=INK,
            )
    _log_up(axes, metric)
    dress(axes, look_up(cost).with_unit, look_up(metric).with_unit)
    legend_beside(axes)
    told = tag_text(dict(cost_tags or {}))
    save(fig, path, ", ".join(filter(None, [f"{_title(metric, tags, analysis)} and cost", told])))


def _panels(points: Sequence[Point]) -> tuple[list[Any], list[int]]:
    """Axes side by side for some of the checkpoints."""
    steps = spread(steps_of(points), _PANELS)
    fig = canvas(2.6 + 3.2 * len(steps) if len(steps) > 1 else 7.2, 3.9)
    return list(fig.subplots(1, len(steps), sharey=True, squeeze=False)[0]), steps


def _name(axes: Any, step: int, panels: int) -> None:
    if panels > 1:
        axes.set_title(f"step {step:,}", loc="left", fontsize=9, color=MUTED)


def _draw(axes: Any, line: Line, places: Sequence[int], *, faint: bool = False) -> None:
    color, _, marker = LOOKS[line.variant]
    if line.variant == "random" and not faint and not line.kind:
        known = [(at, p) for at, p in zip(places, line.points, strict=True) if math.isfinite(p.low + p.high)]
        at = [place for place, _ in known]
        axes.fill_between(
            at, [p.low for _, p in known], [p.high for _, p in known], color=color, alpha=0.16, linewidth=0
        )
    axes.plot(
        places,
        [point.value for point in line.points],
        color=color,
        linewidth=1.1 if faint else 1.6,
        linestyle=":" if faint else "-",
        marker=marker,
        markersize=6 if marker == "*" else 4,
        markerfacecolor="white" if faint else color,
        label=line.name,
    )


def _legend(every: Sequence[Any]) -> None:
    """One for all panels: what any of them has, once."""
    found = {text: handle for axes in every for handle, text in zip(*axes.get_legend_handles_labels(), strict=True)}
    legend_beside(every[-1], [*found.values()], [*found])


def _log_up(axes: Any, metric: str) -> None:
    if look_up(metric).log:
        axes.set_yscale("log")
        plain_log(axes)


def _unit(metric: str) -> str:
    return look_up(metric).unit


def _title(metric: str, tags: Mapping[str, Any] | None, analysis: str | None) -> str:
    known = {name: value for name, value in (tags or {}).items() if value is not None}
    told = ", ".join(filter(None, [look_up(metric).with_unit, tag_text(known)]))
    return ": ".join(filter(None, [sentence(analysis or ""), told]))
