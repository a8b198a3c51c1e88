"""Scores of a model whose blocks run otherwise: over the middle, over loops, over single blocks, and over tasks."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Unpack

import pandas as pd

from lit_layers.figures.labels import listing, tag_text
from lit_layers.figures.tables import Chosen, Point, grouped, is_placed, refuse_several_settings, select
from lit_layers.figures.theme import COLORS, INK
from lit_layers.functional.block_schedules import CUSTOM, OF_BLOCKS, OF_MIDDLES
from lit_layers.metrics import is_in, look_up
from lit_layers.records import AUDIT, COLUMNS

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
    CUSTOM: (COLORS[6], "hexagon"),
}
_DEFAULT_LOOPS = 3
# What a variant is; all other tags tell of the circumstances, of which a figure shows one.
_OWN = ("variant", "middle", "loops", "schedule", "seed", "task")
_CELL = ("variant", "middle", "loops", "layer", "schedule")

MEDIAN = "intervene/median_over_tasks"
GLUE, GLUE_MEAN = "intervene/glue", "intervene/glue/mean_over_tasks"


@dataclass(frozen=True)
class Line:
    """Points of one variant in the order of their places (number of middle blocks, or block)."""

    variant: str
    points: Sequence[Point]
    loops: int | None = None  # of looped_parallel; None there: the best of each middle
    kind: str = ""  # what the line is one of, such as before or after

    @property
    def name(self) -> str:
        told = tag_text({"variant": self.variant})
        told = f"{told[:1].upper()}{told[1:]}"
        if self.variant == LOOPED:
            told += ", best k" if self.loops is None else f", k = {self.loops}"
        return f"{told}, {self.kind}" if self.kind else told

    @property
    def is_best(self) -> bool:
        return self.variant == LOOPED and self.loops is None


@dataclass(frozen=True)
class LoopTable:
    """Values by number of loops (rows; 1 is `parallel`) and of middle blocks (columns); NaN where there is none."""

    loops: Sequence[int]
    middles: Sequence[int]
    values: Sequence[Sequence[float]]

    def best(self, *, higher_is_better: bool) -> dict[int, int]:
        """The best number of loops of each middle that has any value; of equal ones the fewest."""
        sign = 1 if higher_is_better else -1
        found = {}
        for column, middle in enumerate(self.middles):
            scores = {k: sign * row[column] for k, row in zip(self.loops, self.values, strict=True)}
            known = {k: score for k, score in scores.items() if math.isfinite(score)}
            if known:
                found[middle] = max(known, key=lambda k: (known[k], -k))
        return found


def variant_points(
    frame: pd.DataFrame,
    metric: str,
    *,
    split: str | None = None,
    **chosen: Unpack[Chosen],
) -> list[Point]:
    """Returns the points of a metric that tell of a variant; single random orders and medians are left out.

    Where only a standard error is known, the 95% interval is 1.96 of it to either side.

    Args:
        tags: chooses among what is not the variant itself, such as `{"execution": "loop"}`.
        split: a tag of which all values are kept, such as `when`.

    Raises:
        InputError: for suspect checkpoints, unless they are allowed.
        ValueError: where there are none, of more than one analysis or run, or under several circumstances.
    """
    table: Any = frame
    table = table[table["metric"] == metric]
    if {"low", "high", "stderr"} <= {*table.columns}:
        reach = 1.96 * table["stderr"]
        table = table.assign(
            low=table["low"].fillna(table["value"] - reach), high=table["high"].fillna(table["value"] + reach)
        )
    found = select(table if len(table) else frame, metric, **chosen)
    tags = chosen.get("tags") or {}
    points = [
        point
        for point in found
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


def baseline_of(points: Iterable[Point]) -> Point | None:
    """Returns the full model's point of one checkpoint, where it was measured."""
    return next((point for point in points if point.tags["variant"] == BASELINE), None)


def random_level(frame: pd.DataFrame, metric: str, analysis: str | None) -> float | None:
    """Returns what guessing scores on a task, where that is recorded or follows from the metric."""
    if not is_in(metric, "above guessing"):
        return look_up(metric).level
    table: Any = frame
    rows = table[table["metric"] == "random_score"]
    rows = rows if analysis is None else rows[rows["analysis"] == analysis]
    values = {float(value) for value in rows["value"] if math.isfinite(value)}
    return values.pop() if len(values) == 1 else None


def default_loops(points: Iterable[Point]) -> int | None:
    """Returns the number of loops that stands for all: 3, or the nearest to it that was measured; None without any."""
    known = {int(p.tags["loops"]) for p in points if p.tags["variant"] == LOOPED and "loops" in p.tags}
    return min(known, key=lambda k: (abs(k - _DEFAULT_LOOPS), k), default=None)


def lines_by_middle(points: Sequence[Point], *, metric: str, best: bool = False, kind: str = "") -> list[Line]:
    """Returns a line for each variant of the middle at one checkpoint, looped_parallel by its default number of loops.

    With `best` looped_parallel has a second line, at the number of loops that is best for each middle (tag `loops`).
    """
    loops = default_loops(points)
    found = []
    for name in OF_MIDDLES:
        own = [p for p in points if p.tags["variant"] == name and "middle" in p.tags]
        chosen = sorted((p for p in own if name != LOOPED or p.tags.get("loops") == loops), key=middle_of)
        if chosen:
            found.append(Line(name, chosen, loops if name == LOOPED else None, kind))
    if best and len({p.tags.get("loops") for p in points if p.tags["variant"] == LOOPED}) > 1:
        winners = loop_table(points).best(higher_is_better=look_up(metric).higher_is_better)
        at = {(loops_of(p), middle_of(p)): p for p in points if is_looped(p)}
        chosen = [at[loops, middle] for middle, loops in sorted(winners.items())]
        found.append(Line(LOOPED, [replace(p, tags={**p.tags, "loops": loops_of(p)}) for p in chosen], None, kind))
    return found


def lines_by_block(points: Sequence[Point]) -> list[Line]:
    """Returns a line for each variant of single blocks at one checkpoint."""
    found = []
    for name in OF_BLOCKS:
        own = [p for p in points if p.tags["variant"] == name and p.layer is not None]
        if own:
            found.append(Line(name, sorted(own, key=lambda p: p.layer or 0)))
    return found


def loop_table(points: Sequence[Point]) -> LoopTable:
    """Returns values over loops and middles of one checkpoint; one loop is `parallel`.

    Raises:
        ValueError: where there is no looped_parallel.
    """
    own = {(loops_of(p), middle_of(p)): p.value for p in points if is_looped(p)}
    if not any(p.tags["variant"] == LOOPED for p in points):
        raise ValueError("there are no values of looped_parallel over its numbers of loops")
    loops, middles = (sorted({key[side] for key in own}) for side in (0, 1))
    return LoopTable(loops, middles, [[own.get((k, middle), math.nan) for middle in middles] for k in loops])


def is_looped(point: Point) -> bool:
    """Whether a point belongs in a table over loops."""
    name = point.tags["variant"]
    return "middle" in point.tags and (name == "parallel" or (name == LOOPED and "loops" in point.tags))


def loops_of(point: Point) -> int:
    return int(point.tags.get("loops", 1))


def middle_of(point: Point) -> int:
    return int(point.tags["middle"])


def middles_of(points: Iterable[Point]) -> list[int]:
    """Returns the numbers of middle blocks that were changed, in order."""
    return sorted({middle_of(point) for point in points if "middle" in point.tags})


def kept_of(points: Sequence[Point]) -> list[Point]:
    """Returns values over the full model's at the same checkpoint; NaN where that is 0 or missing.

    Intervals are gone: those of the variant and of the full model belong to the same texts.
    """
    full = {p.step: p.value for p in points if p.tags["variant"] == BASELINE}
    return [
        replace(p, value=p.value / full[p.step] if full.get(p.step) else math.nan, low=math.nan, high=math.nan)
        for p in points
    ]


# ------------------------------------------------------------------------------------------------ quality and cost


@dataclass(frozen=True)
class FrontPoint:
    """A variant's cost and quality; `name` tells which it is, and `is_best` that no other is as good and cheaper."""

    variant: str
    name: str
    short: str  # beside its mark
    cost: float
    quality: float
    is_best: bool


def pareto(costs: Sequence[float], qualities: Sequence[float], *, higher: bool = True) -> list[bool]:
    """Returns which points no other beats: none costs as little or less and is as good or better, one of it strictly.

    Points without a finite cost and quality are beaten.
    """
    sign = 1 if higher else -1
    order = sorted(
        (n for n in range(len(costs)) if math.isfinite(costs[n]) and math.isfinite(qualities[n])),
        key=lambda n: (costs[n], -sign * qualities[n]),
    )
    found = [False] * len(costs)
    best, at = -math.inf, math.nan
    for n in order:
        quality = sign * qualities[n]
        if quality > best or (quality == best and costs[n] == at):
            found[n], best, at = True, quality, costs[n]
    return found


def front_points(
    qualities: Sequence[Point], costs: Sequence[Point], *, higher: bool, names: Sequence[str] | None = None
) -> list[FrontPoint]:
    """Returns the variants that have both a quality and a cost, each of one checkpoint; the full model first.

    Raises:
        ValueError: where none has both.
    """
    cost_of = {cell_of(point): point.value for point in costs}
    both = [p for p in qualities if cell_of(p) in cost_of and (names is None or p.tags["variant"] in names)]
    both.sort(key=lambda p: p.tags["variant"] != BASELINE)
    if not both:
        raise ValueError("no variant has both this quality and this cost")
    best = pareto([cost_of[cell_of(p)] for p in both], [p.value for p in both], higher=higher)
    return [
        FrontPoint(p.tags["variant"], *point_names(p), cost_of[cell_of(p)], p.value, is_best)
        for p, is_best in zip(both, best, strict=True)
    ]


def cell_of(point: Point) -> tuple[Any, ...]:
    """Returns what tells a variant from all others of its model."""
    return (*(point.tags.get(name) for name in ("variant", "middle", "loops", "schedule")), point.layer)


def point_names(point: Point) -> tuple[str, str]:
    """Returns what a variant is called in full, and beside a mark."""
    tags = {name: point.tags[name] for name in ("variant", "middle", "loops", "schedule") if name in point.tags}
    told = tag_text(tags)
    if point.layer is not None:
        told += f", block {point.layer}"
    short = f"M={tags['middle']}" if "middle" in tags else f"block {point.layer}" if point.layer is not None else ""
    return told[:1].upper() + told[1:], short


# ------------------------------------------------------------------------------------------------ over tasks


@dataclass(frozen=True)
class OverTasks:
    """A table with medians and means over tasks among its rows, and what each is over: of an analysis, a sentence."""

    frame: pd.DataFrame
    notes: dict[str, str]


def with_task_medians(frame: pd.DataFrame) -> OverTasks:
    """Returns the table and, of several tasks, the median of `normalized_score` (GLUE: the mean of `task_score`).

    They are of the analyses `intervene/median_over_tasks` and `intervene/glue/mean_over_tasks`: a number for each
    variant of each checkpoint (or model), over those tasks that have it for every variant that any task has there: a
    young model beats guessing on few of them. What one of them leaves undefined has none. `n` counts the tasks, and
    the note names them, step by step where they differ. One task alone makes neither.

    Source: Sun et al., Transformer Layers as Painters, arXiv 2407.09298 (the median over benchmarks; GLUE: the mean).
    """
    table: Any = frame
    refuse_several_settings(frame)
    if table.empty or "variant" not in table:
        return OverTasks(frame, {})
    names = table["analysis"].str
    is_glue = names.startswith(f"{GLUE}/") & (table["analysis"] != GLUE_MEAN)
    is_task = names.startswith("intervene/") & ~names.startswith(GLUE) & (table["analysis"] != MEDIAN)
    added, notes = [], {}
    for rows, metric, statistic, analysis, prefix in (
        (table[is_task], "normalized_score", "median", MEDIAN, "intervene/"),
        (table[is_glue], "task_score", "mean", GLUE_MEAN, f"{GLUE}/"),
    ):
        rows = rows[(rows["metric"] == metric) & rows["variant"].notna()]
        for tag in ("seed", "statistic"):
            rows = rows[rows[tag].isna()] if tag in rows else rows
        if rows["analysis"].nunique() > 1:
            rows = rows.assign(task=rows["analysis"].str.removeprefix(prefix))
            found, notes[analysis] = _over_tasks(rows, statistic)
            added += [found.assign(analysis=analysis, metric=metric)] if len(found) else []
    if not added:
        return OverTasks(frame, notes)
    whole = pd.concat([table, *added], ignore_index=True)
    return OverTasks(whole.astype({name: table.dtypes[name] for name in table.columns}), notes)


def _over_tasks(rows: Any, statistic: str) -> tuple[Any, str]:
    """A row for each cell, and over which tasks."""
    parts, told = [], {}
    for (run, step), part in rows.groupby(["run", "step"], dropna=False, sort=False):
        found, tasks, gone, undefined = _of_checkpoint(part, statistic)
        parts.append(found)
        told.setdefault((tasks, gone, undefined), []).append(run if pd.isna(step) else f"step {int(step):,}")
    sentences = [_sentence(statistic, *over) for over in told]
    if len(told) > 1:
        sentences = [
            f"{', '.join(dict.fromkeys(where))}: {each}" for where, each in zip(told.values(), sentences, strict=True)
        ]
    found = pd.concat(parts, ignore_index=True)
    return found.assign(stderr=math.nan, low=math.nan, high=math.nan), " ".join(sentences)


def _of_checkpoint(rows: Any, statistic: str) -> tuple[Any, tuple[str, ...], tuple[str, ...], tuple[int, int]]:
    """Of one checkpoint or model: a row for each cell, the tasks that enter and those that do not, and how many numbers
    are left out of how many."""
    other = (*COLUMNS, AUDIT, "task", "statistic", "seed")
    tags = [n for n in rows.columns if n not in other and not n.startswith("num_") and rows[n].notna().any()]
    by = ["run", "step", "tokens", *tags, "layer", *([AUDIT] if AUDIT in rows else [])]
    cells = rows.groupby(by, dropna=False, sort=False)
    sizes = rows.groupby("task")["value"].size()
    kept = tuple(task for task in dict.fromkeys(rows["task"]) if sizes[task] == cells.ngroups)
    gone = tuple(task for task in dict.fromkeys(rows["task"]) if task not in kept)
    if len(kept) < 2:
        return rows.iloc[:0], kept, gone, (0, 0)
    own = rows[rows["task"].isin(kept)].groupby(by, dropna=False, sort=False)["value"]
    found = own.agg([statistic, "size", "count"]).reset_index().rename(columns={statistic: "value", "size": "n"})
    found["value"] = found["value"].where(found["count"] == found["n"])
    found = found.drop(columns="count")
    undefined = found["value"].isna()
    return found[~undefined], kept, gone, (int(undefined.sum()), len(found))


def _sentence(statistic: str, tasks: tuple[str, ...], gone: tuple[str, ...], left_out: tuple[int, int]) -> str:
    lacking = f" In it are not, as they lack some variants: {', '.join(gone)}." if gone else ""
    if len(tasks) < 2:
        return f"No {statistic} over tasks: fewer than two have every variant.{lacking}"
    note = f"{statistic.capitalize()} over {listing('task', tasks, most=20)}.{lacking}"
    if left_out[0]:
        note += f" {left_out[0]} of {left_out[1]} numbers are left out, as a task's score is undefined there."
    return note


def several(points: Sequence[Point], split: str) -> dict[str, list[Point]]:
    """Returns the points by the values of a tag; what lacks it, such as the full model, is with all of them."""
    own = grouped((p for p in points if split in p.tags), lambda p: str(p.tags[split]))
    beside = [p for p in points if split not in p.tags]
    return {kind: [*part, *beside] for kind, part in own.items()}
