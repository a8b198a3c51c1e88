"""Figures of the scores that a model has with a changed order of its blocks.

They show the scores over the number of changed middle blocks, over the number of loops, and over the index of a single
changed block. In a figure of several models, each model has one line.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, Unpack

import pandas as pd

from lit_layers.figures.chart import Chart, Series
from lit_layers.figures.labels import tag_text
from lit_layers.figures.maps import colored, frame_grids, key_axis, slider_map
from lit_layers.figures.profiles import (
    FRAMES,
    color_of,
    fixed_limits,
    framed,
    level,
    series_of,
    short_names,
    symbol_of,
    value_axis,
)
from lit_layers.figures.tables import (
    Chosen,
    Point,
    grouped,
    is_tabular,
    rows_of,
    select,
    steps_of,
    title_of,
    usual_loops,
)
from lit_layers.figures.theme import COLORS, INK, MISSING, Axis, layer_axis, rounded, spread
from lit_layers.functional.block_schedules import BLOCK_NAMES, CUSTOM, MIDDLE_NAMES
from lit_layers.metrics import is_in, look_up

__all__ = ["loop_map", "models_by_middle", "variant_curves"]

BASELINE, LOOPED = "baseline", "looped_parallel"
_SHARES = Axis(title="Middle blocks changed, per cent of all (100 M / T)", ends=(0, 100))
# Colour and mark of a variant, the same in all figures.
LOOKS = {
    BASELINE: (INK, "line-ew"),
    "middle_repeat": (COLORS[3], "square"),
    "skip": (COLORS[1], "circle"),
    "parallel": (COLORS[2], "diamond"),
    "reverse": ("#6a3d9a", "triangle-up"),
    "random": (COLORS[4], "triangle-down"),
    LOOPED: ("#1f78d1", "triangle-left"),
    "skip_one": ("#00798c", "cross"),
    "switch": ("#d1495b", "triangle-right"),
    "repeat_one": ("#8d6b2f", "wedge"),
    CUSTOM: (COLORS[6], "arrow"),
}
# Tags that define an order of blocks. All other tags are conditions of a measurement; a figure shows one condition.
_OWN = ("variant", "middle", "loops", "schedule", "seed", "task")


def variant_curves(frame: pd.DataFrame, metric: str, *, blocks: bool = False, **chosen: Unpack[Chosen]) -> Chart:
    """Return a metric over the number M of changed middle blocks, with one line per variant and a slider over steps.

    A variant is an order of blocks, such as skip or reverse. The mean over random orders is drawn with a band for its
    interval. The variant `looped_parallel` is drawn for three loops, or for the nearest measured number. The dashed
    line shows the full model, the dotted line the score of guessing.

    Args:
        tags: selects the conditions, e.g. `{"training": "full"}`.
        blocks: draw over the index of a single block, which is skipped, repeated, or switched with the next one.

    Raises:
        InputError: for checkpoints that an audit found suspect, unless `allow_suspect`.
        ValueError: the variants have no values, or have them under several conditions and `tags` selects none.
    """
    number, variants = ("layer", BLOCK_NAMES) if blocks else ("middle", MIDDLE_NAMES)
    points = variant_points(frame, metric, **chosen)
    steps = spread(steps_of(p for p in points if not blocks or p.layer is not None), FRAMES)
    points = framed(points, steps)

    lines, full = lines_of(points, variants, number), full_model(points)
    if not lines:
        what = "single blocks that are skipped, switched or repeated" if blocks else "variants of the middle"
        raise ValueError(f"metric {metric!r} has no values of {what}")
    series, places = [], sorted(set[Any](p.index(number) for part in lines.values() for p in part))
    for name, part in lines.items():
        color, mark = LOOKS[variant := part[0].tags["variant"]]
        look = {"width": 2.0, "mark": mark, "interval": "band" if variant == "random" else "", "legend": True}
        at = [steps.index(p.step) for p in part]
        numbers = [p.index(number) for p in part]
        series.append(series_of(part, numbers, frame=at, name=name, color=color, size=7, **look))
    ends = [places[0], places[-1]]
    if full:
        by_step = {p.step: p.value for p in full}
        y, at = rounded(by_step.get(step) for step in steps for _ in ends), [n for n in range(len(steps)) for _ in ends]
        look = {"name": "Full model", "color": INK, "dash": "dash", "width": 1.6, "legend": True}
        series.append(Series(x=ends * len(steps), y=y, frame=at, **look))
    if not blocks and (guess := _random_level(frame, metric, chosen.get("analysis"))) is not None:
        series.append(level(ends, guess, "Guessing", dash="dot"))
    drawn = [end for each in series for part in (each.y, each.low, each.high) for end in part if end is not None]
    limits = fixed_limits(drawn, log=look_up(metric).log) if len(steps) > 1 else None
    return Chart(
        title=title_of(metric, chosen.get("tags") or {}),
        x=layer_axis("block") if blocks else _middle_axis(places),
        y=value_axis(metric, ends=limits),
        series=series,
        frames=steps,
        hover="block {x}" if blocks else "at {x}",
        height=420,
    )


def loop_map(frame: pd.DataFrame, metric: str, **chosen: Unpack[Chosen]) -> Chart:
    """Return a heat map of a metric over the number M of middle blocks (horizontal) and the number of loops (vertical).

    A slider selects the checkpoint. Values for one loop are those of the variant `parallel`, which runs the middle
    blocks in parallel once. Dots mark the best number of loops for each M. Bright is better; grey was not measured.

    Raises:
        InputError: as in `variant_curves`.
        ValueError: as in `variant_curves`.
    """
    points = [p for p in variant_points(frame, metric, **chosen) if "middle" in p.tags]
    steps = {p.step for p in points if p.tags["variant"] == LOOPED and "loops" in p.tags}
    points = [p for p in points if p.step in steps and (p.tags["variant"] == "parallel" or "loops" in p.tags)]
    if not points:
        raise ValueError("there are no values of looped_parallel over its numbers of loops")

    def cell(point: Point) -> tuple[int, int]:
        return point.tags.get("loops", 1), point.tags["middle"]

    loops, middles = (sorted({*side}) for side in zip(*map(cell, points), strict=True))
    values = frame_grids(points, cell, loops, middles, digits=6)
    sign, dots = 1 if look_up(metric).higher_is_better else -1, list[tuple[int, int, int]]()
    for number, rows in enumerate(values.values()):
        for middle, column in zip(middles, zip(*rows, strict=True), strict=True):
            known = {k: sign * value for k, value in zip(loops, column, strict=True) if value is not None}
            dots += [(number, middle, max(known, key=known.__getitem__))] if known else []
    frames, x, y = zip(*dots, strict=True)
    best = Series(x=x, y=y, frame=frames, mark="circle-open", size=9, color="black", hover=False)
    look = colored(metric, [row for rows in values.values() for row in rows], reverse=sign < 0)
    look |= {"rows": loops, "hover": "M = {x}, {y} loops"}
    across = key_axis("Number of middle blocks in the loop (M)", middles, most=12)
    up = replace(key_axis("Loops", loops, most=20), keys=[*reversed(loops)])
    title = f"{title_of(metric, chosen.get('tags') or {})} over loops"
    return slider_map(title, values, across, up, look, series=[best], height=380, background=MISSING)


def models_by_middle(frame: pd.DataFrame, metric: str, *, variant: str, **chosen: Unpack[Chosen]) -> Chart:
    """Return a metric of one variant (kind of change to the blocks), with one line per model.

    The x axis is the number M of changed middle blocks. It is the block index for `skip_one`, `switch` and
    `repeat_one`. If models differ in depth, the x axis is the share of changed blocks, 100 M / T. This needs the number
    of blocks T of each model, which is known if single blocks were also measured. A dashed line in a model's colour
    shows the value of that model without changes. Each model is shown at its last checkpoint.

    Source: Sun et al., Transformer Layers as Painters, arXiv 2407.09298, appendix A.1 (models of 7 B to 70 B).

    Raises:
        InputError: as in `variant_curves`.
        ValueError: as in `variant_curves`.
    """
    rows, series = rows_of(frame, metric, chosen.get("analysis")), list[Series]()
    number = "layer" if variant in BLOCK_NAMES else "middle"
    points = {run: last_of(variant_points(rows[rows["run"] == run], metric, **chosen)) for run in rows["run"].unique()}
    # The largest index of a changed block is T, the number of blocks. For `switch` it is T - 1, because a block is
    # exchanged with the next one.
    depths = {
        run: max((p.layer + (p.tags["variant"] == "switch") for p in part if p.layer), default=0)
        for run, part in points.items()
    }
    is_share = number == "middle" and len({*depths.values()}) > 1 and all(depths.values())
    for index, (run, name) in enumerate(short_names([*points]).items()):
        color, of = color_of(index), f" of {depths[run]}" if is_share else ""
        for part in lines_of(points[run], [variant], number).values():
            numbers = [p.index(number) or 0 for p in part]
            at = [round(100 * n / depths[run], 4) for n in numbers] if is_share else numbers
            texts = [f"{'M =' if number == 'middle' else 'block'} {n}{of}" for n in numbers]
            look = {"width": 2.0, "mark": symbol_of(index), "size": 6, "interval": "", "legend": True}
            series.append(series_of(part, at, name=name, color=color, texts=texts, **look))
            for full in full_model(points[run])[:1]:
                text = f"{name}, full model"
                series.append(level([min(at), max(at)], full.value, text, color=color, legend=False))
    if not series:
        raise ValueError(f"metric {metric!r} has no values of the variant {variant!r}")
    axis = layer_axis("block") if number == "layer" else _middle_axis(sorted({x for each in series for x in each.x}))
    title, axis = f"{look_up(metric).unit_title}, {variant_name(variant)}", _SHARES if is_share else axis
    return Chart(title=title, x=axis, y=value_axis(metric), series=series, hover="", height=400)


# ------------------------------------------------------------------------------------------------ parts


def variant_name(variant: str) -> str:
    text = tag_text({"variant": variant})
    return text[:1].upper() + text[1:]


def variant_points(frame: pd.DataFrame, metric: str, **chosen: Unpack[Chosen]) -> list[Point]:
    """Return the points of a metric for each order of the blocks.

    Of random orders, only the mean over their seeds is returned. Medians over tokens are left out unless they are
    chosen by tags.

    Raises:
        InputError: for checkpoints that an audit found suspect, unless `allow_suspect`.
        ValueError: there are no points, or they belong to several analyses, runs or conditions.
    """
    tags, points = chosen.get("tags") or {}, select(frame, metric, **chosen)
    points = [p for p in points if "variant" in p.tags and p.other_layer is None and not is_tabular(p)]
    points = [p for p in points if "statistic" in tags or "statistic" not in p.tags]
    if not points:
        raise ValueError(f"metric {metric!r} has no values of variants (tag variant) but single random orders")
    kept = (*_OWN, *tags)
    # The full model is left out of this check, because it may be the same under all conditions.
    others = [p for p in points if p.tags["variant"] != BASELINE]
    kinds = {tag_text({name: p.tags[name] for name in sorted(p.tags) if name not in kept}): None for p in others}
    if len(kinds) > 1:
        raise ValueError(f"metric {metric!r} was measured in several ways, choose one by tags: {'; '.join(kinds)}")
    return points


def last_of(points: Sequence[Point]) -> list[Point]:
    """Return the points of the last checkpoint."""
    last = max(point.step for point in points)
    return [point for point in points if point.step == last]


def full_model(points: Iterable[Point]) -> list[Point]:
    return [point for point in points if point.tags["variant"] == BASELINE]


def _random_level(frame: pd.DataFrame, metric: str, analysis: str | None) -> float | None:
    """Return the score of guessing, or None if it is neither recorded nor implied by the metric."""
    if not is_in(metric, "above guessing"):
        return look_up(metric).level
    values = set(rows_of(frame, "random_score", analysis)["value"].dropna())
    return values.pop() if len(values) == 1 else None


def lines_of(points: Iterable[Point], variants: Sequence[str], number: str) -> dict[str, list[Point]]:
    """Return the points of these variants (orders of blocks) as one line per variant, by the name of the line.

    `number` is the tag on the x axis: "middle" (number of changed middle blocks) or "layer". Points without this tag
    are left out. The variant `looped_parallel` shows only one number of loops: three, or the nearest measured number.
    """
    kept = [p for p in points if p.tags["variant"] in variants and p.index(number) is not None]
    loops = usual_loops(p.tags for p in kept)
    kept = [p for p in kept if p.tags.get("loops", loops) == loops]
    kept.sort(key=lambda p: [*LOOKS].index(p.tags["variant"]))

    def name(point: Point) -> str:
        more = [tag_text({"loops": point.tags["loops"]})] if "loops" in point.tags else []
        return ", ".join([variant_name(point.tags["variant"]), *more])

    by_name = grouped(kept, name)
    return {name: sorted(part, key=lambda p: (p.step, p.index(number))) for name, part in by_name.items()}


def _middle_axis(middles: Sequence[int]) -> Axis:
    """Return the axis of the number M of changed middle blocks, with labels only at measured numbers."""
    return Axis(title="Number of middle blocks changed (M)", labels={m: str(m) for m in spread(middles, 12)})
