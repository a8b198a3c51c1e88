"""Scores of a model whose blocks run otherwise, as lines: over the middle, over loops and over single blocks."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Unpack

import numpy as np
import pandas as pd

from lit_layers.figures.labels import tag_text
from lit_layers.figures.tables import Chosen, Point, is_placed, select, usual_loops
from lit_layers.figures.theme import COLORS, INK
from lit_layers.functional.block_schedules import CUSTOM, OF_BLOCKS
from lit_layers.metrics import is_in, look_up

BASELINE, LOOPED = "baseline", "looped_parallel"
# The same colour and mark in every figure.
LOOKS = {
    BASELINE: (INK, "line-ew"),
    "middle_repeat": (COLORS[3], "square"),
    "skip": (COLORS[1], "circle"),
    "parallel": (COLORS[2], "diamond"),
    "reverse": ("#6a3d9a", "triangle-up"),
    "random": (COLORS[4], "triangle-down"),
    LOOPED: ("#1f78d1", "star"),
    "skip_one": ("#00798c", "cross"),
    "switch": ("#d1495b", "x"),
    "repeat_one": ("#8d6b2f", "hexagram"),
    CUSTOM: (COLORS[6], "hexagon"),
}
# What a variant is; all other tags tell of the circumstances, of which a figure shows one.
_CELL = ("variant", "middle", "loops", "schedule")
_OWN = (*_CELL, "seed", "task")


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


def random_level(frame: pd.DataFrame, metric: str, analysis: str | None) -> float | None:
    """Returns what guessing scores on a task, where that is recorded or follows from the metric."""
    if not is_in(metric, "above guessing"):
        return look_up(metric).level
    table: Any = frame
    rows = table[table["metric"] == "random_score"]
    rows = rows if analysis is None else rows[rows["analysis"] == analysis]
    values = {float(value) for value in rows["value"] if math.isfinite(value)}
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


def depth_of(points: Iterable[Point]) -> int | None:
    """Returns how many blocks a model has, where single blocks tell: not every M of the middle need be measured."""
    of_blocks = [point for point in points if point.tags["variant"] in OF_BLOCKS and point.layer is not None]
    # switched is a block with the next one
    return max(((point.layer or 0) + (point.tags["variant"] == "switch") for point in of_blocks), default=None)


def middles_of(points: Iterable[Point]) -> list[int]:
    """Returns the numbers of middle blocks that were changed, in order."""
    return sorted({middle for point in points if (middle := middle_of(point)) is not None})


def shares_of_full_model(points: Sequence[Point]) -> list[Point]:
    """Returns values over the full model's at the same checkpoint; NaN where that is 0 or missing.

    Intervals are gone: those of the variant and of the full model belong to the same texts.
    """
    full = {p.step: p.value for p in full_model(points)}
    return [
        replace(p, value=p.value / full[p.step] if full.get(p.step) else math.nan, low=math.nan, high=math.nan)
        for p in points
    ]


def pareto(costs: Sequence[float], qualities: Sequence[float], *, higher: bool = True) -> list[bool]:
    """Returns which points no other beats: none costs as little or less and is as good or better, one of it strictly.

    Points without a finite cost and quality are beaten.
    """
    table = pd.DataFrame({"cost": costs, "quality": qualities}, dtype=float)
    table["quality"] *= 1 if higher else -1
    finite: Any = np.isfinite(table).all(axis=1)
    best: Any = table[finite].groupby("cost")["quality"].max()
    front = best[best > best.cummax().shift(fill_value=-math.inf)]
    return (finite & (table["quality"] == table["cost"].map(front))).tolist()


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
