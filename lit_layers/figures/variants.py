"""What is left of a model whose blocks run otherwise: over the middle, loops, blocks, training, and its cost."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Unpack

import pandas as pd

from lit_layers.figures.chart import Chart, Series
from lit_layers.figures.labels import in_sentence, tag_text, wrapped
from lit_layers.figures.maps import as_matrix, colored, key_axis, slider_map
from lit_layers.figures.models import color_of, in_rows, short_names, symbol_of
from lit_layers.figures.profiles import FRAMES, fixed_limits, framed, level, series_of, value_axis
from lit_layers.figures.tables import (
    Chosen,
    Point,
    grouped,
    is_placed,
    rows_of,
    select,
    steps_of,
    title_of,
    usual_loops,
)
from lit_layers.figures.theme import COLORS, INK, MISSING, Axis, AxisName, layer_axis, rounded, spread
from lit_layers.figures.training import Curves
from lit_layers.functional.block_schedules import CUSTOM, OF_BLOCKS, OF_MIDDLES
from lit_layers.metrics import is_in, look_up

__all__ = ["loop_map", "models_by_middle", "quality_front", "schedule_scores", "variant_curves"]
__all__ += ["variants_over_training"]

MIDDLE = "Number of middle blocks changed (M)"
_TICKS = 12
_SHARES = Axis(title="Middle blocks changed, per cent of all (100 M / T)", ends=(0, 100))
BASELINE, LOOPED = "baseline", "looped_parallel"
# The same colour and mark in every figure.
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
# What a variant is; all other tags tell of the circumstances, of which a figure shows one.
_CELL = ("variant", "middle", "loops", "schedule")
_OWN = (*_CELL, "seed", "task")


def variant_curves(
    frame: pd.DataFrame,
    metric: str,
    *,
    blocks: bool = False,
    split: str | None = None,
    best_loops: bool = False,
    **chosen: Unpack[Chosen],
) -> Chart:
    """Returns a metric over the number M of middle blocks that are changed, one line a variant, a slider over steps.

    The mean over random orders has its interval shaded. looped_parallel is drawn at three loops, or the nearest number
    that was measured. Dashed is the full model, dotted what guessing scores.

    Args:
        tags: chooses among what is not the variant itself, such as `{"training": "full"}`.
        blocks: over single blocks, each skipped, repeated, or switched with the next one.
        split: a tag such as `when`: a line for each of its values, the last one strong and the others dashed.
        best_loops: adds a line of looped_parallel at the number of loops that is best for each M.

    Raises:
        InputError: for suspect checkpoints, unless they are allowed.
        ValueError: where no such variant has values, or in several ways between which `tags` must choose.
    """
    points = variant_points(frame, metric, split=split, **chosen)
    steps = spread(steps_of(filter(_is_of_block, points) if blocks else points), FRAMES)
    points = framed(points, steps)
    at, variants = (_block_of, OF_BLOCKS) if blocks else (middle_of, OF_MIDDLES)

    kind_of = lambda point: tag_text({split: point.tags[split]}) if split in point.tags else ""  # noqa: E731
    lines = list[Line]()
    for kind in [*dict.fromkeys(filter(None, map(kind_of, points)))] or [""]:
        lines += lines_of([p for p in points if kind_of(p) in ("", kind)], variants, at, kind=kind)
    if best_loops and split is None and len({p.tags.get("loops") for p in points if p.tags["variant"] == LOOPED}) > 1:
        lines.append(Line(LOOPED, best_looped(points, metric)))
    places = sorted({n for p in points if (n := at(p)) is not None})
    if not lines or not places:
        what = "single blocks that are skipped, switched or repeated" if blocks else "variants of the middle"
        raise ValueError(f"metric {metric!r} has no values of {what}")
    series = []
    for line in sorted(lines, key=lambda line: [*LOOKS].index(line.variant)):
        faint = line.is_best or line.kind != lines[-1].kind
        band = line.variant == "random" and split is None
        series.append(_line(line, at, steps, faint=faint, band=band))
    by_kind = grouped(full_model(points), kind_of)
    for kind, part in by_kind.items():
        name = f"Full model, {kind}" if len(by_kind) > 1 else "Full model"
        series.append(_full_model(places, part, steps, name, "dash" if kind == [*by_kind][-1] else "dashdot"))
    guess = None if blocks else _random_level(frame, metric, chosen.get("analysis"))
    if guess is not None:
        series.append(level([places[0], places[-1]], guess, "Guessing", dash="dot"))
    drawn = [p for part in (*(line.points for line in lines), full_model(points)) for p in part]
    ends = [end for p in drawn for end in (p.value, p.low, p.high)] + [guess] * (guess is not None)
    ends = fixed_limits(ends, log=look_up(metric).log) if len(steps) > 1 else None  # the same at every checkpoint
    return Chart(
        title=title_of(metric, chosen.get("tags") or {}),
        x=layer_axis("block") if blocks else _middle_axis(places),
        y=value_axis(metric, ends=ends),
        series=series,
        frames=steps,
        place="block {x}" if blocks else "at {x}",
        height=400 if blocks else 430,
    )


def loop_map(frame: pd.DataFrame, metric: str, **chosen: Unpack[Chosen]) -> Chart:
    """Returns a metric over the number M of middle blocks (across) and of loops (up), with a slider over the steps.

    One loop is `parallel`. Dots mark the best number of loops of each M; bright is better; grey was not measured.

    Raises: as `variant_curves`.
    """
    points = variant_points(frame, metric, **chosen)
    if not any(p.tags["variant"] == LOOPED for p in last_of(points)):
        raise ValueError("there are no values of looped_parallel over its numbers of loops")
    steps = spread(steps_of(p for p in points if p.tags["variant"] == LOOPED), FRAMES)
    last = {(loops_of(p), middle_of(p) or 0): p.value for p in looped(last_of(points))}
    loops, middles = (sorted({*side}) for side in zip(*last, strict=True))
    by_step = {step: {(loops_of(p), middle_of(p)): p.value for p in looped(points) if p.step == step} for step in steps}
    values = {step: as_matrix(part, loops, middles, 4) for step, part in by_step.items()}
    best = best_looped(framed(points, steps), metric)
    dots = {"frame": [steps.index(p.step) for p in best], "mark": "circle-open", "size": 9, "color": "black"}
    dotted = [Series(x=[middle_of(p) for p in best], y=[loops_of(p) for p in best], hover=False, **dots)]
    look = colored(metric, [[*last.values()]], reverse=not look_up(metric).higher_is_better)
    look |= {"rows": loops, "hover": "M = {x}, {y} loops"}
    x = key_axis("Number of middle blocks in the loop (M)", middles, most=12)
    y = replace(key_axis("Loops", loops, most=20), keys=[*reversed(loops)])
    title = f"{title_of(metric, chosen.get('tags') or {})} over loops"
    return slider_map(title, values, x, y, look, series=dotted, height=380, background=MISSING)


def variants_over_training(
    frame: pd.DataFrame,
    metric: str,
    *,
    middle: int,
    kept: bool = False,
    axis: AxisName = "step",
    **chosen: Unpack[Chosen],
) -> Chart:
    """Returns a metric over training, one line a variant of so many middle blocks; the untrained model stands apart.

    Dashed is the full model. With `kept` values are shares of the full model's at the same step.

    Raises: as `variant_curves`.
    """
    table: Any = frame
    points = variant_points(table[table["step"].notna()], metric, **chosen)
    recorded = middles_of(points)
    if middle not in recorded:
        raise ValueError(
            f"metric {metric!r} has no variant of {middle} middle blocks; it has: {', '.join(map(str, recorded))}"
        )
    if kept:  # without intervals: those of the variant and of the full model belong to the same texts
        full = {p.step: p.value for p in full_model(points)}
        shares = [p.value / full[p.step] if full.get(p.step) else math.nan for p in points]
        points = [replace(p, value=v, low=math.nan, high=math.nan) for p, v in zip(points, shares, strict=True)]
    curves = Curves(points)
    shown = [p for p in points if p.tags.get("middle") == middle or p.tags["variant"] == BASELINE]
    for line in lines_of(shown, [*LOOKS], lambda point: 0):
        color, symbol = LOOKS[line.variant]
        is_full = line.variant == BASELINE
        look: dict[str, Any] = {"color": color, "width": 2.0, "dash": "dash" if is_full else "", "interval": ""}
        look |= {"mark": "" if is_full and len(curves.training.steps) > 1 else symbol, "apart": symbol}
        name = variant_name(BASELINE) if is_full else line.name
        curves.along(line.points, name=name, size=9 if is_full else 6, legend=True, **look)
    unit = "share of the full model's" if kept else look_up(metric).unit
    title = f"{look_up(metric).title}{' kept' if kept else ''}, M = {middle}"
    return curves.chart(title, Axis(title=unit, log=look_up(metric).log), axis, height=400)


def quality_front(
    frame: pd.DataFrame,
    metric: str,
    *,
    cost: str = "relative_latency",
    cost_analysis: str = "intervene/speed",
    cost_tags: Mapping[str, Any] | None = None,
    **chosen: Unpack[Chosen],
) -> Chart:
    """Returns the quality of each variant over what it costs, at the last checkpoint; the line is the Pareto front.

    On the front are the variants that no other beats: none is as good or better and costs as little or less, one of the
    two strictly. A diamond is the full model. Variants without both numbers are left out.

    Raises: as `variant_curves`.
    """
    costs = variant_points(frame, cost, **{**chosen, "analysis": cost_analysis, "tags": cost_tags})
    cost_of = {cell_of(point): point.value for point in last_of(costs)}
    points = [point for point in last_of(variant_points(frame, metric, **chosen)) if cell_of(point) in cost_of]
    if not points:
        raise ValueError("no variant has both this quality and this cost")
    at = {cell_of(p): (cost_of[cell_of(p)], p.value) for p in points}
    sign = -1 if look_up(metric).higher_is_better else 1
    front = dict[float, float]()  # cost: quality
    for price, worst in sorted((price, sign * value) for price, value in at.values() if math.isfinite(price + value)):
        if worst < min((sign * value for value in front.values()), default=math.inf):
            front[price] = sign * worst
    x, y = rounded(front), rounded(front.values())
    series = [Series(x=x, y=y, name="Pareto front", dash="dot", width=1.6, steps=True, legend=True, hover=False)]
    by_variant = grouped(points, lambda p: p.tags["variant"])
    for variant in filter(by_variant.get, reversed(LOOKS)):  # the full model above what lies at its place
        part, is_full = by_variant[variant], variant == BASELINE
        names, x = [cell_names(p) for p in part], [at[cell_of(p)][0] for p in part]
        hover = [f"{p.value:.4g} at {c:.4g}\n{name}" for p, c, (name, _) in zip(part, x, names, strict=True)]
        labels = [short if front.get(c) == p.value else "" for p, c, (_, short) in zip(part, x, names, strict=True)]
        look = {"color": LOOKS[variant][0], "mark": "diamond" if is_full else "circle", "size": 13 if is_full else 8}
        look |= {"texts": hover, "tells_texts": True, "labels": labels, "sides": [(0, 1)] * len(part), "legend": True}
        series.append(Series(x=rounded(x), y=rounded(p.value for p in part), name=variant_name(variant), **look))
    return Chart(
        title=f"{title_of(metric, chosen.get('tags') or {})} against {in_sentence(look_up(cost).title)}",
        x=Axis(title=look_up(cost).with_unit),
        y=Axis(title=look_up(metric).with_unit, log=look_up(metric).log),
        series=series,
        height=460,
    )


def models_by_middle(frame: pd.DataFrame, metric: str, *, variant: str, **chosen: Unpack[Chosen]) -> Chart:
    """Returns a metric of one variant over the number M of middle blocks (or over blocks), a line for each model.

    Models that are not equally deep are drawn over the share of their blocks, 100 M / T, where the number T is known of
    each, as single blocks tell it that were measured beside. Dashed in a model's colour is the full model. Each model's
    last checkpoint is drawn.

    Source: Sun et al., Transformer Layers as Painters, arXiv 2407.09298, appendix A.1 (models of 7 B to 70 B).

    Raises: as `variant_curves`.
    """
    rows = rows_of(frame, metric, chosen.get("analysis"))
    of_blocks = variant in OF_BLOCKS
    at, axis = (_block_of, layer_axis("block")) if of_blocks else (middle_of, None)
    points = {run: last_of(variant_points(rows[rows["run"] == run], metric, **chosen)) for run in rows["run"].unique()}
    # a block is switched with the next one
    depths = {
        run: max((p.layer + (p.tags["variant"] == "switch") for p in part if _is_of_block(p) and p.layer), default=None)
        for run, part in points.items()
    }
    is_share = not of_blocks and len({*depths.values()}) > 1 and None not in depths.values()
    series: list[Series] = []
    for index, (run, name) in enumerate(short_names([*points]).items()):
        for line in lines_of(points[run], [variant], at):
            look: dict[str, Any] = {"name": name, "color": color_of(index), "legend": True, "interval": ""}
            numbers, k = [at(p) or 0 for p in line.points], "" if line.loops is None else f", k = {line.loops}"
            places = [round(100 * n / (depths[run] or 1), 4) for n in numbers] if is_share else numbers
            of_depth = f" of {depths[run]}" if is_share else ""
            texts = [f"{'block' if of_blocks else 'M ='} {n}{of_depth}{k}" for n in numbers]
            look |= {"width": 2.0, "mark": symbol_of(index), "size": 6, "texts": texts}
            series.append(series_of(line.points, places, **look))
            for full in full_model(points[run])[:1]:
                look = {"color": color_of(index), "legend": False}
                series.append(level([min(places), max(places)], full.value, f"{name}, full model", **look))
    if not series:
        raise ValueError(f"metric {metric!r} has no values of the variant {variant!r}")
    if axis is None:
        axis = _SHARES if is_share else _middle_axis(sorted({x for each in series for x in each.x}))
    title = f"{look_up(metric).with_unit}, {variant_name(variant)}"
    return Chart(title=title, x=axis, y=value_axis(metric), series=series, place="", height=400)


def schedule_scores(frame: pd.DataFrame, metric: str, **chosen: Unpack[Chosen]) -> Chart:
    """Returns a metric of schedules of one's own as dots, a row each, with 95% intervals, at the last checkpoint.

    Raises: as `variant_curves`.
    """
    points = last_of(variant_points(frame, metric, **chosen))
    schedules = [p for p in points if "schedule" in p.tags]
    if not schedules:
        raise ValueError(f"metric {metric!r} has no values of schedules of one's own")
    names = [f"{number}. {p.tags['schedule']}" for number, p in enumerate(schedules, 1)]
    full, rows = full_model(points)[:1], range(len(schedules))
    look = {"name": "Schedule", "mark": "circle", "size": 8, "color": LOOKS["custom"][0], "interval": "bars"}
    series = [series_of(schedules, rows, legend=bool(full), texts=names, **look)]
    series += [level(rows, p.value, "Full model", color=INK, mark="line-ns", size=14) for p in full]
    values = Axis(title=look_up(metric).with_unit, log=look_up(metric).log)
    texts = [wrapped(name, 46) for name in names]
    return in_rows(title_of(metric, chosen.get("tags") or {}), texts, values, series, height=140 + 26 * len(names))


# ------------------------------------------------------------------------------------------------ parts


@dataclass(frozen=True)
class Line:
    """Points of one variant, in the order of the checkpoints and of their places."""

    variant: str
    points: Sequence[Point]
    loops: int | None = None  # of looped_parallel; None there: the best of each middle
    kind: str = ""  # what the line is one of, such as before or after

    @property
    def name(self) -> str:
        name = variant_name(self.variant)
        if self.variant == LOOPED:
            name += ", best k" if self.loops is None else f", k = {self.loops}"
        return f"{name}, {self.kind}" if self.kind else name

    @property
    def is_best(self) -> bool:
        return self.variant == LOOPED and self.loops is None


def variant_name(variant: str) -> str:
    text = tag_text({"variant": variant})
    return text[:1].upper() + text[1:]


def variant_points(
    frame: pd.DataFrame, metric: str, *, split: str | None = None, **chosen: Unpack[Chosen]
) -> list[Point]:
    """Returns the points of a metric that tell of a variant; single random orders and medians are left out.

    Args:
        tags: chooses among what is not the variant itself, such as `{"when": "after"}`.
        split: a tag of which all values are kept, such as `when`.

    Raises:
        InputError: for suspect checkpoints, unless they are allowed.
        ValueError: where there are none, of more than one analysis or run, or under several circumstances.
    """
    table: Any = frame
    table = table[table["metric"] == metric]
    tags = chosen.get("tags") or {}
    points = [
        point
        for point in select(table if len(table) else frame, metric, **chosen)
        if "variant" in point.tags
        and point.other_layer is None
        and not is_placed(point)
        # what was measured beside the mean, unless it is asked for
        and (point.tags.get("statistic") is None or "statistic" in tags)
    ]
    if not points:
        raise ValueError(f"metric {metric!r} has no values of variants (tag variant) but single random orders")
    kept = (*_OWN, *([split] if split else []), *tags)
    others = [p for p in points if p.tags["variant"] != BASELINE]  # the full model may be the same in all of them
    kinds = {tag_text({name: p.tags[name] for name in sorted(p.tags) if name not in kept}): None for p in others}
    if len(kinds) > 1:
        raise ValueError(f"metric {metric!r} was measured in several ways, choose one by tags: {'; '.join(kinds)}")
    return points


def last_of(points: Sequence[Point]) -> list[Point]:
    """Returns those of the last checkpoint."""
    last = max(point.step for point in points)
    return [point for point in points if point.step == last]


def full_model(points: Iterable[Point]) -> list[Point]:
    """Returns the full model's points."""
    return [point for point in points if point.tags["variant"] == BASELINE]


def _random_level(frame: pd.DataFrame, metric: str, analysis: str | None) -> float | None:
    """Return what guessing scores on a task, where that is recorded or follows from the metric."""
    if not is_in(metric, "above guessing"):
        return look_up(metric).level
    values = set(rows_of(frame, "random_score", analysis)["value"].dropna())
    return values.pop() if len(values) == 1 else None


def lines_of(
    points: Sequence[Point], variants: Sequence[str], at: Callable[[Point], int | None], *, kind: str = ""
) -> list[Line]:
    """Returns a line for each of these variants that has points with a place, `looped_parallel` at one number of loops.

    That is 3, or the nearest to it that was measured.
    """
    loops = usual_loops(p.tags for p in points if p.tags["variant"] == LOOPED)
    lines = []
    for name in variants:
        members = [p for p in points if p.tags["variant"] == name and at(p) is not None]
        members = [p for p in members if name != LOOPED or p.tags.get("loops") == loops]
        if members:
            members.sort(key=lambda p: (p.step, at(p)))
            lines.append(Line(name, members, loops if name == LOOPED else None, kind))
    return lines


def best_looped(points: Sequence[Point], metric: str) -> list[Point]:
    """Returns at each checkpoint the looped point of each middle that is best, its number of loops as a tag.

    Of equal ones that of the fewest loops; one loop is `parallel`. Middles without a finite value have none.
    """
    sign = 1 if look_up(metric).higher_is_better else -1
    best: dict[tuple[int, int], Point] = {}
    for point in sorted(looped(points), key=lambda p: (p.step, middle_of(p) or 0, loops_of(p))):
        key = point.step, middle_of(point) or 0
        if math.isfinite(point.value) and (key not in best or sign * point.value > sign * best[key].value):
            best[key] = point
    return [replace(point, tags={**point.tags, "loops": loops_of(point)}) for point in best.values()]


def looped(points: Iterable[Point]) -> list[Point]:
    """Returns the points that belong in a table over loops and middles: those of looped_parallel and of `parallel`."""
    points = [p for p in points if middle_of(p) is not None]
    return [p for p in points if p.tags["variant"] == "parallel" or (p.tags["variant"] == LOOPED and "loops" in p.tags)]


def loops_of(point: Point) -> int:
    return int(point.tags.get("loops", 1))


def middle_of(point: Point) -> int | None:
    """Returns the number of middle blocks that were changed; None of a variant of other blocks."""
    return int(point.tags["middle"]) if "middle" in point.tags else None


def middles_of(points: Iterable[Point]) -> list[int]:
    """Returns the numbers of middle blocks that were changed, in order."""
    return sorted({middle for point in points if (middle := middle_of(point)) is not None})


def cell_of(point: Point) -> tuple[Any, ...]:
    """Returns what tells a variant from all others of its model."""
    return (*(point.tags.get(name) for name in _CELL), point.layer)


def cell_names(point: Point) -> tuple[str, str]:
    """Returns what a variant is called in full, and beside a mark."""
    tags = {name: point.tags[name] for name in _CELL if name in point.tags}
    text, short = tag_text(tags), f"M={tags['middle']}" if "middle" in tags else ""
    if point.layer is not None:
        text, short = f"{text}, block {point.layer}", short or f"block {point.layer}"
    return text[:1].upper() + text[1:], short


def _block_of(point: Point) -> int | None:
    return point.layer


def _is_of_block(point: Point) -> bool:
    return point.tags["variant"] in OF_BLOCKS and point.layer is not None


def _line(
    line: Line, at: Callable[[Point], Any], steps: Sequence[int], *, faint: bool = False, band: bool = False
) -> Series:
    """A variant at all places of the slider."""
    color, symbol = LOOKS[line.variant]
    look: dict[str, Any] = {"frame": [steps.index(p.step) for p in line.points], "interval": "band" if band else ""}
    look |= {"width": 1.4, "dash": "dot", "mark": f"{symbol}-open"} if faint else {"width": 2.0, "mark": symbol}
    look["texts"] = [f"k = {point.tags['loops']}" for point in line.points] if line.is_best else ()
    look |= {"size": 7, "legend": True}
    return series_of(line.points, [at(point) for point in line.points], name=line.name, color=color, **look)


def _full_model(
    places: Sequence[int], points: Sequence[Point], steps: Sequence[int], name: str = "Full model", dash: str = "dash"
) -> Series:
    """The full model's value at each place of the slider."""
    ends = [places[0], places[-1]]
    by_step = {point.step: point.value for point in reversed(points)}
    values = rounded(by_step.get(step, math.nan) for step in steps for _ in ends)
    look = {"frame": [number for number in range(len(steps)) for _ in ends], "color": INK, "dash": dash}
    return Series(x=ends * len(steps), y=values, name=name, width=1.6, legend=True, **look)


def _middle_axis(middles: Sequence[int]) -> Axis:
    """Labels at numbers that were measured: models of an even number of blocks have odd middles only."""
    return Axis(title=MIDDLE, labels={m: str(m) for m in spread(middles, _TICKS)})
