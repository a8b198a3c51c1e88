"""What a table of records holds: the points of a metric, its variants, how far each came, and means over tasks."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict, TypeVar, Unpack

import pandas as pd

from lit_layers.errors import InputError
from lit_layers.figures.labels import listing, tag_text
from lit_layers.functional.block_schedules import PUBLISHED_LOOPS
from lit_layers.identity import NO_CURVE
from lit_layers.identity import ORDINALS as ORDINALS
from lit_layers.metrics import GROUPS, look_up
from lit_layers.records import AUDIT, AXES, COLUMNS

# Tags of points that maps and sample-size curves show: a relation of word pairs, a number of training rows.
CATEGORY, TRAIN_ROWS, HEAD = "category", "train_rows", "head"
# Tags that make no variants of a metric.
_NOT_VARIANTS = (*NO_CURVE, "category_id", "group", "task")  # an analysis has one task
_PLAINEST = {
    "statistic": None,
    "control": None,
    "drop_first": 0,
    "normalization": "raw",
    "split": "test",
    "of": "accuracy",
    "domain": None,
}
_ABSENT = {
    "statistic": "mean",
    "control": "true labels",
    "domain": "all tasks",
}  # what a variant is called for the tag it lacks
MEAN = "mean_over_tasks"
MEDIAN = "intervene/median_over_tasks"
GLUE = "intervene/glue"
GLUE_MEAN = f"{GLUE}/{MEAN}"
BASES = tuple(group.name for group in GROUPS if group.over_tasks)
_DROPPED = ("task", "domain", "score")  # tags that tell the tasks of one mean apart
_STAND_FOR = {MEDIAN: "normalized_score", GLUE_MEAN: "task_score"}
_COLUMNS = ["analysis", "metric", "variant"]  # of tables of results, at least

Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class Point:
    """One row of a table of records; `low` and `high` are NaN where there is no interval.

    A model without steps is one checkpoint: its `step` is 0, and no figure shows it.
    """

    step: int
    tokens: int | None
    layer: int | None
    other_layer: int | None
    value: float
    low: float
    high: float
    tags: Mapping[str, Any]

    @property
    def reference(self) -> str | None:
        return self.tags.get("reference")

    def index(self, ordinal: str) -> int | None:
        """Its layer, or its number in another order, as `distance`."""
        return self.layer if ordinal == "layer" else self.tags.get(ordinal)


class Chosen(TypedDict, total=False):
    """Which rows a figure shows: of one analysis, of one variant (None: the plainest), clean ones unless allowed."""

    analysis: str | None
    tags: Mapping[str, Any] | None
    allow_suspect: bool


def select(
    frame: pd.DataFrame,
    metric: str,
    *,
    analysis: str | None = None,
    tags: Mapping[str, Any] | None = None,
    allow_suspect: bool = False,
    over_steps: bool = False,
) -> list[Point]:
    """Return the points of one metric; reference rows that fit the tags included.

    Rows without a step are left out where there are others, or where only a way over steps can be shown.

    Raises:
        InputError: for rows that an audit found suspect, unless they are allowed.
        ValueError: where there are none, or they are of more than one analysis, run or settings.
    """
    rows = rows_of(frame, metric, analysis)
    if over_steps or rows["step"].notna().any():
        rows = rows[rows["step"].notna()]
    points = matching(_points(rows), tags or {})
    if not points:
        recorded = ", ".join(sorted(frame["metric"].unique())) or "none"
        where = "".join([f" of {analysis}" if analysis else "", f" with {tag_text(dict(tags))}" if tags else ""])
        where += " that have a step" if over_steps else ""
        raise ValueError(f"no rows of metric {metric!r}{where}; metrics in this table: {recorded}")
    if not allow_suspect:
        _refuse_suspects(rows)
    for column in ("analysis", "run", "settings"):
        values = sorted(rows[column].dropna().unique()) if column in rows else []
        if len(values) > 1:
            raise ValueError(f"metric {metric!r} is in more than one {column}: {', '.join(values)}; choose one")
    return points


def rows_of(frame: pd.DataFrame, metric: str, analysis: str | None = None) -> Any:
    """Return the rows of one metric, of one analysis where that is given."""
    rows: Any = frame[frame["metric"] == metric]
    return rows if analysis is None else rows[rows["analysis"] == analysis]


def _refuse_suspects(rows: Any) -> None:
    """The one place that keeps every figure and table from going through checkpoints of doubtful weights."""
    if AUDIT not in rows.columns:
        return
    suspects = rows[rows[AUDIT].str.startswith("suspect", na=False)]
    if suspects.empty:
        return
    steps = sorted(suspects["step"].dropna().unique())
    names = listing("step", [f"{step:,}" for step in steps]) if steps else listing("model", suspects["run"].unique())
    kinds = "; ".join(verdict.removeprefix("suspect: ") for verdict in suspects[AUDIT].unique())
    raise InputError(
        f"no curve is drawn through the suspect {names} ({kinds}): leave these rows out, or pass allow_suspect=True"
    )


def matching(points: Iterable[Point], tags: Mapping[str, Any]) -> list[Point]:
    """Return the points with these tags (None: without the tag); reference rows need not have them."""
    named = tags.items()
    return [
        p
        for p in points
        if all(p.tags.get(tag) == value or (p.reference and tag not in p.tags) for tag, value in named)
    ]


def variants(
    frame: pd.DataFrame, metric: str, *, analysis: str | None = None, allow_suspect: bool = False
) -> list[dict[str, Any]]:
    """Return the variants of a metric as tags, in the order they were recorded: `[{"k": 4}, {"k": 12}]`.

    A tag that only some variants have is None in the others: the mean is what has no `statistic`.
    """
    return variants_of(select(frame, metric, analysis=analysis, allow_suspect=allow_suspect))


def variants_of(points: Sequence[Point]) -> list[dict[str, Any]]:
    """Return the variants among points, as `variants` does; reference rows make none where there are others."""
    measured = [point for point in points if point.reference is None] or points
    distinct = {_identity(point.tags): point.tags for point in measured}
    names = dict.fromkeys(name for tags in distinct.values() for name in tags if name not in _NOT_VARIANTS)
    return [{name: tags.get(name) for name in names} for tags in distinct.values()]


def plainest_points(points: Sequence[Point], tags: Mapping[str, Any] | None) -> tuple[list[Point], dict[str, Any]]:
    """Return the points of the plainest variant that has points on axes, and its tags: lines show one variant.

    `tags` are those that chose the points so far. Where there is one variant the points stay as they are.
    """
    drawable = [variant for variant in variants_of(points) if any(map(is_on_axes, matching(points, variant)))]
    if len(variants_of(points)) < 2:
        return list(points), dict(tags or {})
    chosen = plainest(drawable)
    return matching(points, chosen), {**chosen, **(tags or {})}


def drawable(
    frame: pd.DataFrame, metric: str, keep: Callable[[Point], bool], missing: str, **chosen: Unpack[Chosen]
) -> tuple[list[Point], dict[str, Any]]:
    """Return the points of a metric's plainest variant that a figure can show, and its tags.

    Raises:
        ValueError: where there is none; `missing` says of what, such as `values per head`. Else as `select`.
    """
    points = [point for point in select(frame, metric, **chosen) if keep(point)]
    if not points:
        raise ValueError(f"metric {metric!r} has no {missing}")
    return plainest_points(points, chosen.get("tags"))


def is_in_table(point: Point) -> bool:
    """Return whether a point stands in a table of its own, which curves and profiles do not show."""
    return not point.tags.keys().isdisjoint(AXES)


def is_pair(point: Point) -> bool:
    """Return whether a point belongs to two layers, and to no place in a table of their own."""
    return point.other_layer is not None and not is_in_table(point)


def is_on_axes(point: Point) -> bool:
    """Return whether a point belongs to a layer, a pair or a distance, not to the whole model or a reference."""
    return point.layer is not None or "distance" in point.tags


def plainest(choices: Iterable[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Return the plainest of some variants: a mean over all tokens, raw; else the first recorded."""
    return min(choices, key=lambda tags: sum(tags[name] != value for name, value in _PLAINEST.items() if name in tags))


def variant_text(tags: Mapping[str, Any]) -> str:
    """Return what a variant is called on its own: `k = 12`; an empty string for one that only lacks others' tags."""
    return tag_text({name: value for name, value in tags.items() if value is not None})


def choice_text(tags: Mapping[str, Any]) -> str:
    """Return what a variant is called beside the others: one that only lacks their tags is told by that, `mean`."""
    text = variant_text(tags)
    if "domain" in tags and tags["domain"] is None:
        return ", ".join(filter(None, [text, _ABSENT["domain"]]))
    return text or next((_ABSENT.get(name, "plain") for name in tags), "")


def title_of(metric: str, tags: Mapping[str, Any]) -> str:
    """Return a metric's title with its unit and variant."""
    return ", ".join(filter(None, [look_up(metric).unit_title, variant_text(tags)]))


def grouped(points: Iterable[Item], key: Callable[[Item], Any]) -> dict[Any, list[Item]]:
    """Return the points (or what else there is) by key, in the order that keys first come."""
    groups: dict[Any, list[Item]] = {}
    for point in points:
        groups.setdefault(key(point), []).append(point)
    return groups


def steps_of(points: Iterable[Point]) -> list[int]:
    return sorted({point.step for point in points})


def change_table(frame: pd.DataFrame, *, allow_suspect: bool = False) -> pd.DataFrame:
    """Return how far each headline metric came from the first checkpoint to the last.

    A metric of the whole model alone is a row for each variant; one that tells of another metric's curve (tag `of`) is
    one row. One that is also, or only, per layer is one row in its plainest variant: that of the whole model where
    there is one, else that of the last layer. Medians, pairs, reference rows, lists of values, categories and sample
    sizes are left out, and of other running orders of the blocks all but a few. Columns: analysis, metric, variant
    (text), layer, first_step, first, first_low, first_high, last_step, last, last_low, last_high, and change, which is
    NaN where there is one checkpoint.

    Raises:
        InputError: for suspect checkpoints, unless they are allowed.
    """
    table: Any = frame
    table = table[table["step"].notna()]
    rows = {name: look_up(name) for name in table["metric"].unique()}
    table = table[~table["metric"].isin([name for name, row in rows.items() if row.secondary or row.unlisted])]
    changes = [{**name, **_change(points)} for name, points in _headlines(table, allow_suspect)]
    return pd.DataFrame(changes, columns=None if changes else _COLUMNS)


def model_table(frame: pd.DataFrame, *, allow_suspect: bool = False) -> pd.DataFrame:
    """Return the headline metrics of models that have no steps, a row a metric and model, chosen as in `change_table`.

    Metrics that `change_table` leaves to their figures are there, too, where they have values of the whole model alone:
    they have no profile over the layers. Columns: analysis, metric, variant (text), run, layer, value, low, high.

    Raises:
        InputError: for suspect models, unless they are allowed.
    """
    table: Any = frame
    unlisted = [name for name in table["metric"].unique() if look_up(name).unlisted]
    table = table[table["step"].isna() & ~table["metric"].isin(unlisted)]
    rows = []
    for run in table["run"].unique():
        for name, (point, *_) in _headlines(table[table["run"] == run], allow_suspect):
            if not look_up(name["metric"]).secondary or point.layer is None:
                numbers = {"layer": point.layer, "value": point.value, "low": point.low, "high": point.high}
                rows.append({**name, "run": run, **numbers})
    return pd.DataFrame(rows, columns=None if rows else _COLUMNS)


def _headlines(table: Any, allow_suspect: bool) -> Iterator[tuple[dict[str, Any], list[Point]]]:
    """Return what stands in a table of results: analysis, metric and variant, and its points, one a checkpoint."""
    table = table[table["other_layer"].isna()]
    for name, metric in _STAND_FOR.items():
        if (table["analysis"] == name).any():  # it stands for its tasks
            others = table["analysis"].str.startswith(f"{name.rpartition('/')[0]}/") & (table["analysis"] != name)
            table = table[(table["metric"] != metric) | ~others]
    for analysis, metric in dict.fromkeys(zip(table["analysis"], table["metric"], strict=True)):
        points = select(table, metric, analysis=analysis, allow_suspect=allow_suspect)
        points = [point for point in points if not point.tags.keys() & NO_CURVE]
        points = _few_orders(points, metric)
        whole = [point for point in points if point.layer is None]
        last_layer = max((point.layer for point in points if point.layer is not None), default=None)
        kinds = [tags for tags in variants_of(points) if tags.get("statistic") is None] if points else []
        if kinds and (last_layer is not None or "of" in kinds[0]):
            kinds = [plainest(kinds)]
        for tags in kinds:
            chosen = matching(whole or [point for point in points if point.layer == last_layer], tags)
            if chosen:
                yield {"analysis": analysis, "metric": metric, "variant": variant_text(tags)}, chosen


def _few_orders(points: list[Point], metric: str) -> list[Point]:
    """Return a few points of other running orders of the blocks: those of about half of the middle blocks.

    That is the middle one of the recorded numbers of changed blocks, with three loops or the nearest to it; of
    accuracies, which loss and normalized scores tell of, the full model alone.
    """
    if not any("variant" in point.tags for point in points):
        return points
    middles = sorted({point.tags["middle"] for point in points if "middle" in point.tags})
    row = look_up(metric)
    half = None if row.relative or row.secondary or not middles else middles[(len(middles) - 1) // 2]
    loops = (None, usual_loops(point.tags for point in points))
    return [
        point
        for point in points
        if "variant" not in point.tags
        or point.tags["variant"] == "baseline"
        or (half is not None and point.tags.get("middle") == half and point.tags.get("loops") in loops)
    ]


def usual_loops(tags: Iterable[Mapping[str, Any]]) -> int | None:
    """Return the published number of loops, or the nearest to it that any of these tags has."""
    loops = {int(each["loops"]) for each in tags if "loops" in each}
    return min(loops, key=lambda number: (abs(number - PUBLISHED_LOOPS), number), default=None)


def _change(points: list[Point]) -> dict[str, Any]:
    ordered = sorted(points, key=lambda point: point.step)
    ends = {"first": ordered[0], "last": ordered[-1]}
    row: dict[str, Any] = {"layer": ordered[-1].layer}
    for name, point in ends.items():
        row |= {f"{name}_step": point.step, name: point.value, f"{name}_low": point.low, f"{name}_high": point.high}
    row["change"] = ordered[-1].value - ordered[0].value if len(ordered) > 1 else math.nan
    return row


def _points(rows: Any) -> list[Point]:
    tags = tags_of(rows)
    columns = [_values(rows, name) for name in ("step", "tokens", "layer", "other_layer", *tags)]
    columns[4:4] = [rows[name].tolist() for name in ("value", "low", "high")]
    points = []
    for step, tokens, layer, other_layer, value, low, high, *values in zip(*columns, strict=True):
        present = {name: tag for name, tag in zip(tags, values, strict=True) if tag is not None}
        points.append(Point(step or 0, tokens, layer, other_layer, value, low, high, present))
    return points


def tags_of(rows: Any) -> list[str]:
    """Return the tags that any of these rows has."""
    tags = [name for name in rows.columns if name not in (*COLUMNS, AUDIT) and not name.startswith("num_")]
    return [name for name in tags if rows[name].notna().any()]


def _values(rows: Any, name: str) -> list[Any]:
    """A column as Python values, None where there is none."""
    column = rows[name]
    return [None if missing else value for value, missing in zip(column.tolist(), column.isna().tolist(), strict=True)]


def _identity(tags: Mapping[str, Any]) -> tuple:
    return tuple(sorted((name, str(value)) for name, value in tags.items() if name not in _NOT_VARIANTS))


# ------------------------------------------------------------------------------------------------ means over tasks


@dataclass(frozen=True)
class TaskMeans:
    """A table with means or medians over tasks, and what each is over and leaves out: of an analysis, a sentence."""

    frame: pd.DataFrame
    notes: dict[str, str]


def add_task_means(frame: pd.DataFrame) -> TaskMeans:
    """Return a table whose analyses `BASE/TASK` of several tasks have become one, `BASE/mean_over_tasks`.

    A mean is over the tasks that every checkpoint (or model) has at every layer, with equal weights; the others are in
    none and are named. `n` counts the tasks. Rows with a tag `domain` are means over the tasks of that domain alone,
    where there is more than one domain. Other rows stay as they are.
    """
    table: Any = frame
    _refuse_several_settings(table)
    means, notes, rest = [], {}, table
    for base in BASES if len(table) else ():
        task = table["analysis"].str.partition("/")
        of_base = (task[0] == base) & (task[2] != "")
        if table.loc[of_base, "analysis"].nunique() > 1:
            analysis = f"{base}/{MEAN}"
            rest = rest[~of_base.reindex(rest.index)]
            parts, notes[analysis] = _means(table[of_base].assign(task=task.loc[of_base, 2]))
            means += [part.assign(analysis=analysis) for part in parts]
    return TaskMeans(_joined(table, [*([rest] if len(rest) else []), *means]), notes) if means else TaskMeans(frame, {})


def add_task_medians(frame: pd.DataFrame) -> TaskMeans:
    """Return the table and, of several tasks, the median of `normalized_score` (GLUE: the mean of `task_score`).

    They are of the analyses `intervene/median_over_tasks` and `intervene/glue/mean_over_tasks`: a number for each
    variant of each checkpoint (or model), over those tasks that have it for every variant that any task has there: a
    young model beats guessing on few of them. What one of them leaves undefined has none. `n` counts the tasks, and
    the note names them, step by step where they differ. One task alone makes neither.

    Source: Sun et al., Transformer Layers as Painters, arXiv 2407.09298 (the median over benchmarks; GLUE: the mean).
    """
    table: Any = frame
    _refuse_several_settings(table)
    if table.empty or "variant" not in table:
        return TaskMeans(frame, {})
    names = table["analysis"].str
    is_glue = names.startswith(f"{GLUE}/") & (table["analysis"] != GLUE_MEAN)
    is_task = names.startswith("intervene/") & ~names.startswith(GLUE) & (table["analysis"] != MEDIAN)
    added, notes = [], {}
    for is_of_kind, metric, statistic, analysis, prefix in (
        (is_task, "normalized_score", "median", MEDIAN, "intervene/"),
        (is_glue, "task_score", "mean", GLUE_MEAN, f"{GLUE}/"),
    ):
        rows = table[is_of_kind & (table["metric"] == metric) & table["variant"].notna()]
        for tag in ("seed", "statistic"):
            rows = rows[rows[tag].isna()] if tag in rows else rows
        if rows["analysis"].nunique() > 1:
            rows = rows.assign(task=rows["analysis"].str.removeprefix(prefix))
            medians, notes[analysis] = _medians(rows, statistic)
            added += [medians.assign(analysis=analysis, metric=metric)] if len(medians) else []
    return TaskMeans(_joined(table, [table, *added]) if added else frame, notes)


def _refuse_several_settings(table: Any) -> None:
    """Keep a mean over tasks from going through numbers of several settings.

    Raises:
        ValueError: where an analysis of a run has them.
    """
    if "settings" in table and not table.empty:
        counts = table.groupby(["run", "analysis"])["settings"].nunique()
        if (counts > 1).any():
            raise ValueError(f"analysis {counts[counts > 1].index[0][1]!r} is of more than one settings; choose one")


def _joined(table: Any, parts: Sequence[Any]) -> pd.DataFrame:
    whole = pd.concat(parts, ignore_index=True)
    return whole.astype({name: table.dtypes[name] for name in whole.columns if name in table.columns})


def _aggregate(rows: Any, by: Sequence[str], statistic: str) -> Any:
    """A row for each group, `n` the number of tasks; the verdict of an audit stays, for figures to refuse."""
    by = ["run", "step", "tokens", *by, *([AUDIT] if AUDIT in rows else [])]
    table = rows.groupby(by, dropna=False, sort=False)["value"].agg([statistic, "size", "count"]).reset_index()
    table = table.rename(columns={statistic: "value", "size": "n"})
    return table.assign(stderr=math.nan, low=math.nan, high=math.nan)


# ------------------------------------------------------------------------------------------------ means over layers


def _means(rows: Any) -> tuple[list[Any], str]:
    """The means of one analysis, and what they leave out."""
    tags = [name for name in tags_of(rows) if name not in _DROPPED]
    by = ["metric", "layer", "other_layer", *tags]
    missing: dict[str, str] = {}
    counts, means = [], []
    for _, part in rows.groupby(["metric", *tags], dropna=False, sort=False):
        part = part[part["other_layer"].isna() & part["value"].map(math.isfinite)]
        keep, gone = _complete(part)
        missing = gone | missing
        if not keep:
            continue
        counts.append(len(keep))
        part = part[part["task"].isin(keep)]
        means.append(_aggregate(part, by, "mean"))
        domains = sorted(part["domain"].dropna().unique()) if "domain" in part else []
        for domain in domains if len(domains) > 1 else ():
            means.append(_aggregate(part[part["domain"] == domain], by, "mean").assign(domain=domain))
    return [part.drop(columns="count") for part in means], _note(counts, missing)


def _complete(part: Any) -> tuple[list[str], dict[str, str]]:
    """The tasks that every checkpoint has at as many layers as any task, and what the others lack."""
    sizes: Any = pd.crosstab([part["run"], part["step"].fillna(-1)], part["task"])
    lacks = sizes.lt(sizes.max(axis=1), axis=0)
    keep = [task for task in lacks if not lacks[task].any()]
    return keep, {task: _absent(lacks.index[lacks[task]]) for task in lacks if task not in keep}


def _absent(places: Any) -> str:
    steps = sorted(int(step) for _, step in places if step >= 0)
    if steps:
        return f"not at {listing('step', [f'{step:,}' for step in steps], most=4)}"
    return f"not of {listing('model', sorted({run for run, _ in places}), most=4)}"


def _note(counts: Sequence[int], missing: Mapping[str, str]) -> str:
    most, least = max(counts, default=0), min(counts, default=0)
    lacking = "; ".join(f"{', '.join(tasks)} ({why})" for why, tasks in grouped(missing, missing.get).items())
    text = f"Mean over {most if most == least else f'{least} to {most}'} tasks, those measured everywhere."
    return f"{text} In no mean: {lacking}." if lacking else text


# ------------------------------------------------------------------------------------------------ medians of variants


def _medians(rows: Any, statistic: str) -> tuple[Any, str]:
    """A row for each variant of each checkpoint or model, and over which tasks."""
    parts: list[Any] = []
    places: dict[str, list[str]] = {}
    for (run, step), part in rows.groupby(["run", "step"], dropna=False, sort=False):
        medians, sentence = _checkpoint_medians(part, statistic)
        parts.append(medians)
        places.setdefault(sentence, []).append(run if pd.isna(step) else f"step {int(step):,}")
    sentences = [*places]
    if len(places) > 1:
        sentences = [f"{', '.join(dict.fromkeys(where))}: {sentence}" for sentence, where in places.items()]
    return pd.concat(parts, ignore_index=True), " ".join(sentences)


def _checkpoint_medians(rows: Any, statistic: str) -> tuple[Any, str]:
    """Return a row for each cell of one checkpoint or model, which tasks enter, and what is left out."""
    precision = rows["dtype"].fillna("float32") if "dtype" in rows else pd.Series("float32", index=rows.index)
    tasks = rows.groupby(precision)["task"].nunique().sort_index(ascending=False)
    usual = tasks.idxmax()  # of equally many float32, which is first
    others = [*rows.loc[precision != usual, "task"].unique()]  # no median is over scores of two precisions
    rows = rows[precision == usual]
    by = [*(name for name in tags_of(rows) if name not in ("task", "statistic", "seed")), "layer"]
    sizes = rows.groupby("task", sort=False).size()
    num_cells = len(_aggregate(rows, by, statistic))
    keep, gone = ([*sizes.index[is_in]] for is_in in (sizes == num_cells, sizes != num_cells))
    lacking = f" In it are not, as they lack some variants: {', '.join(gone)}." if gone else ""
    lacking += f" Of another precision, and not in it: {', '.join(others)}." if others else ""
    if len(keep) < 2:
        return rows.iloc[:0], f"No {statistic} over tasks: fewer than two have every variant.{lacking}"
    table = _aggregate(rows[rows["task"].isin(keep)], by, statistic)
    defined = table["value"].notna() & (table["count"] == table["n"])
    note = f"{statistic.capitalize()} over {listing('task', keep, most=20)}.{lacking}"
    if not defined.all():
        note += f" {(~defined).sum()} of {len(table)} numbers are left out, as a task's score is undefined there."
    return table[defined].drop(columns="count"), note
