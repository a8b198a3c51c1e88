"""Select values from a data frame of records, tell variants of a metric apart, and make tables and means over tasks.

Variants of a metric differ in tags such as `statistic` or `split`.
"""

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

# Tags of records that are not drawn as curves over layers: relation of word pairs, training rows, attention head.
CATEGORY, TRAIN_ROWS, HEAD = "category", "train_rows", "head"
# Tags that do not distinguish variants of a metric. `task` is one of them, because an analysis has only one task.
_NOT_VARIANTS = (*NO_CURVE, "category_id", "group", "task")
_PLAINEST = {
    "statistic": None,
    "control": None,
    "drop_first": 0,
    "normalization": "raw",
    "split": "test",
    "of": "accuracy",
    "domain": None,
}
# For each of these tags: the display text of a variant without the tag.
_ABSENT = {
    "statistic": "mean",
    "control": "true labels",
    "domain": "all tasks",
}
MEAN = "mean_over_tasks"
MEDIAN = "intervene/median_over_tasks"
GLUE = "intervene/glue"
GLUE_MEAN = f"{GLUE}/{MEAN}"
BASES = tuple(group.name for group in GROUPS if group.over_tasks)
_DROPPED = ("task", "domain", "score")  # tags that a mean over tasks loses
_AVERAGED = {MEDIAN: "normalized_score", GLUE_MEAN: "task_score"}
_COLUMNS = ["analysis", "metric", "variant"]  # columns of an empty table of results

Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class Point:
    """One row of a frame of records: a value with its step, layer and tags.

    `low` and `high` are NaN if the value has no interval. `step` is 0 if the model has no training step. No figure
    shows this 0.
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
        """Return the layer if `ordinal` is "layer", else the value of the tag `ordinal` (e.g. `distance`), or None."""
        return self.layer if ordinal == "layer" else self.tags.get(ordinal)


class Chosen(TypedDict, total=False):
    """Keyword arguments that select rows: the analysis, the tags of a variant, and whether to allow suspect rows."""

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
    """Return the points of one metric that have these tags.

    Reference rows (values for comparison) are included even if they lack a tag. Rows without a step are left
    out if other rows have one, or if `over_steps`.

    Raises:
        InputError: for rows that an audit found suspect, unless `allow_suspect`.
        ValueError: there are no rows, or they belong to more than one analysis, run or settings (options and data).
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
    rows: Any = frame[frame["metric"] == metric]
    return rows if analysis is None else rows[rows["analysis"] == analysis]


def _refuse_suspects(rows: Any) -> None:
    """Raise InputError for rows that an audit found suspect. All figures and tables rely on this check."""
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
    """Return the points whose tags have these values; the value None selects points without the tag.

    Reference points (values for comparison) are also returned if they lack a tag, unless they are nulls.
    """

    def fits(p: Point, tag: str, value: Any) -> bool:
        is_shared = p.reference is not None and not p.reference.startswith("null_")
        return p.tags.get(tag) == value or (is_shared and tag not in p.tags)

    return [p for p in points if all(fits(p, *pair) for pair in tags.items())]


def variants(
    frame: pd.DataFrame, metric: str, *, analysis: str | None = None, allow_suspect: bool = False
) -> list[dict[str, Any]]:
    """Return the variants of a metric as tags, in the order of recording: `[{"k": 4}, {"k": 12}]`.

    A variant is a set of tags under which the metric was measured. A tag that only some variants have is None in the
    others; for example, the mean has no tag `statistic`.
    """
    return variants_of(select(frame, metric, analysis=analysis, allow_suspect=allow_suspect))


def variants_of(points: Sequence[Point]) -> list[dict[str, Any]]:
    """Return the variants (sets of tags) among points, as `variants` does.

    Reference points (values for comparison) are left out if there are others.
    """
    measured = [point for point in points if point.reference is None] or points
    distinct = {_identity(point.tags): point.tags for point in measured}
    names = dict.fromkeys(name for tags in distinct.values() for name in tags if name not in _NOT_VARIANTS)
    return [{name: tags.get(name) for name in names} for tags in distinct.values()]


def plainest_points(points: Sequence[Point], tags: Mapping[str, Any] | None) -> tuple[list[Point], dict[str, Any]]:
    """Return the points and the tags of one variant (set of tags).

    `plainest` chooses the variant among those with values per layer or per distance. If the points have a single
    variant, all are returned. `tags` are the tags that selected the points.
    """
    drawable = [variant for variant in variants_of(points) if any(map(is_on_axes, matching(points, variant)))]
    if len(variants_of(points)) < 2:
        return list(points), dict(tags or {})
    chosen = plainest(drawable)
    return matching(points, chosen), {**chosen, **(tags or {})}


def drawable(
    frame: pd.DataFrame, metric: str, keep: Callable[[Point], bool], missing: str, **chosen: Unpack[Chosen]
) -> tuple[list[Point], dict[str, Any]]:
    """Return the points of one variant of a metric for which `keep` is true, and the tags of the variant.

    `plainest_points` chooses the variant among these points.

    Raises:
        ValueError: there are no such points; `missing` names them in the message, e.g. `values per head`. `select`
            raises further errors.
    """
    points = [point for point in select(frame, metric, **chosen) if keep(point)]
    if not points:
        raise ValueError(f"metric {metric!r} has no {missing}")
    return plainest_points(points, chosen.get("tags"))


def is_tabular(point: Point) -> bool:
    """Return whether a point is an entry of a table (e.g. over token pairs), which curves and profiles do not show."""
    return not point.tags.keys().isdisjoint(AXES)


def is_pair(point: Point) -> bool:
    """Return whether a point is the only value of a pair of layers, and not an entry of the pair's matrix or list."""
    return point.other_layer is not None and not is_tabular(point)


def is_on_axes(point: Point) -> bool:
    """Return whether a point belongs to a layer, a pair of layers or a distance, and not to the whole model."""
    return point.layer is not None or "distance" in point.tags


def plainest(choices: Iterable[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Return the variant (set of tags) that differs from the default in the fewest tags, or the first of several.

    The default is a mean on test data, without normalization and without a control such as random labels.
    """
    return min(choices, key=lambda tags: sum(tags[name] != value for name, value in _PLAINEST.items() if name in tags))


def variant_text(tags: Mapping[str, Any]) -> str:
    """Return the tags of a variant as display text, e.g. `k = 12`; an empty string if all of them are None."""
    return tag_text({name: value for name, value in tags.items() if value is not None})


def choice_text(tags: Mapping[str, Any]) -> str:
    """Return the text of a variant in a menu or legend, e.g. `k = 12, median`.

    If all tags are None, the text is the name of the first tag's default, e.g. `mean` for the tag `statistic`.
    """
    text = variant_text(tags)
    if "domain" in tags and tags["domain"] is None:
        return ", ".join(filter(None, [text, _ABSENT["domain"]]))
    return text or next((_ABSENT.get(name, "plain") for name in tags), "")


def title_of(metric: str, tags: Mapping[str, Any]) -> str:
    """Return a metric's title with its unit and variant. A normalized entropy has no unit."""
    row = look_up(metric)
    return ", ".join(filter(None, [row.unit_title if has_unit(tags) else row.title, variant_text(tags)]))


def has_unit(tags: Mapping[str, Any]) -> bool:
    return tags.get("normalization") in (None, "raw")


def grouped(points: Iterable[Item], key: Callable[[Item], Any]) -> dict[Any, list[Item]]:
    """Return the items by key, in order of first appearance."""
    groups: dict[Any, list[Item]] = {}
    for point in points:
        groups.setdefault(key(point), []).append(point)
    return groups


def steps_of(points: Iterable[Point]) -> list[int]:
    return sorted({point.step for point in points})


def change_table(frame: pd.DataFrame, *, allow_suspect: bool = False) -> pd.DataFrame:
    """Return how far each main metric moved from the first checkpoint to the last.

    A metric that only has values of the whole model has one row per variant. A metric that describes another metric's
    curve (tag `of`) has one row. A metric with values per layer has one row, for the variant that `plainest` chooses,
    with the value of the whole model, or, if there is none, of the last layer. Secondary metrics, medians, layer pairs,
    reference rows, lists of values, categories, sample sizes and most interventions are left out.

    Columns: analysis, metric, variant (text), layer, first_step, first, first_low, first_high, last_step, last,
    last_low, last_high, and change, which is NaN for a single checkpoint.

    Raises:
        InputError: for checkpoints that an audit found suspect, unless `allow_suspect`.
    """
    table: Any = frame
    table = table[table["step"].notna()]
    rows = {name: look_up(name) for name in table["metric"].unique()}
    table = table[~table["metric"].isin([name for name, row in rows.items() if row.secondary or row.unlisted])]
    changes = [{**name, **_change(points)} for name, points in _headlines(table, allow_suspect)]
    return pd.DataFrame(changes, columns=None if changes else _COLUMNS)


def model_table(frame: pd.DataFrame, *, allow_suspect: bool = False) -> pd.DataFrame:
    """Return the main metrics of models that have no training step, with one row per metric and model.

    Rows are selected as in `change_table`. Secondary metrics are included if they have values of the whole model,
    because a page of models has no other figure for these values. Columns: analysis, metric, variant (text), run,
    layer, value, low, high.

    Raises:
        InputError: for models that an audit found suspect, unless `allow_suspect`.
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
    """Yield the rows of `change_table` and `model_table`: analysis, metric, variant, and a point per checkpoint."""
    table = table[table["other_layer"].isna()]
    for name, metric in _AVERAGED.items():
        if (table["analysis"] == name).any():  # show the mean or median instead of the tasks
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
    """Return the points of the full model, and of orders of the blocks that change about half of the middle blocks.

    Of the recorded numbers of changed middle blocks, only the median is kept. Of the numbers of loops, only the one
    nearest to three is kept. For accuracies and secondary metrics, only the full model is kept. Points without an order
    of the blocks are all kept.
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
    """Return the recorded number of loops nearest to 3, which Sun et al. (2024) use; None if there is none."""
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
    """Return the tags that at least one of these rows has."""
    tags = [name for name in rows.columns if name not in (*COLUMNS, AUDIT) and not name.startswith("num_")]
    return [name for name in tags if rows[name].notna().any()]


def _values(rows: Any, name: str) -> list[Any]:
    """Return a column as Python values, None if missing."""
    column = rows[name]
    return [None if missing else value for value, missing in zip(column.tolist(), column.isna().tolist(), strict=True)]


def _identity(tags: Mapping[str, Any]) -> tuple:
    return tuple(sorted((name, str(value)) for name, value in tags.items() if name not in _NOT_VARIANTS))


# ------------------------------------------------------------------------------------------------ means over tasks


@dataclass(frozen=True)
class TaskMeans:
    """A table with means or medians over tasks; `notes` says by analysis which tasks are used and left out."""

    frame: pd.DataFrame
    notes: dict[str, str]


def add_task_means(frame: pd.DataFrame) -> TaskMeans:
    """Return the table with the analyses of single tasks, `BASE/TASK`, replaced by `BASE/mean_over_tasks`.

    A mean is over the tasks that have values at every layer of every checkpoint (or model), with equal weights. The
    `notes` name the other tasks. The column `n` counts the tasks. If the tasks belong to several domains, there are
    also means over the tasks of one domain, in rows with a tag `domain`. Rows of other analyses are not changed.
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
    """Return the table with added rows: medians of `normalized_score` over tasks, and for GLUE means of `task_score`.

    The new analyses are `intervene/median_over_tasks` and `intervene/glue/mean_over_tasks`, with one value per variant
    and checkpoint (or model). They use only tasks that were measured for every variant at that checkpoint, and need two
    such tasks. Early in training there can be few: `normalized_score` exists only if the full model is above chance. A
    variant has no row if its value is NaN for one of the tasks. The column `n` counts the tasks. The `notes` name
    them, for each step if they differ.

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
    """Refuse a table where an analysis has several settings (options and data), which no mean may mix.

    Raises:
        ValueError: an analysis of a run has several settings.
    """
    if "settings" in table and not table.empty:
        counts = table.groupby(["run", "analysis"])["settings"].nunique()
        if (counts > 1).any():
            raise ValueError(f"analysis {counts[counts > 1].index[0][1]!r} is of more than one settings; choose one")


def _joined(table: Any, parts: Sequence[Any]) -> pd.DataFrame:
    whole = pd.concat(parts, ignore_index=True)
    return whole.astype({name: table.dtypes[name] for name in whole.columns if name in table.columns})


def _aggregate(rows: Any, by: Sequence[str], statistic: str) -> Any:
    """Return the mean or median over tasks for each value of the columns `by`, with the number of tasks `n`.

    The column with the audit's verdict is kept, so that figures can refuse suspect rows.
    """
    by = ["run", "step", "tokens", *by, *([AUDIT] if AUDIT in rows else [])]
    table = rows.groupby(by, dropna=False, sort=False)["value"].agg([statistic, "size", "count"]).reset_index()
    table = table.rename(columns={statistic: "value", "size": "n"})
    return table.assign(stderr=math.nan, low=math.nan, high=math.nan)


# ------------------------------------------------------------------------------------------------ means over layers


def _means(rows: Any) -> tuple[list[Any], str]:
    """Return tables with the means over the tasks of one analysis, and a text that names the tasks left out."""
    if "reference" in rows:  # the null of one task may have failed, so that its mean would be over other tasks
        rows = rows[~rows["reference"].astype(str).str.startswith("null_")]
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
    """Return the tasks with values at all layers of every checkpoint, and what is missing for the others."""
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
    text = f"Mean over {most if most == least else f'{least} to {most}'} tasks measured everywhere."
    return f"{text} Not included: {lacking}." if lacking else text


# ------------------------------------------------------------------------------------------------ medians of variants


def _medians(rows: Any, statistic: str) -> tuple[Any, str]:
    """Return each variant's median or mean over tasks, per checkpoint or model, and a text that names the tasks."""
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
    """Return each variant's median or mean over tasks at one checkpoint, and a text that names the tasks."""
    precision = rows["dtype"].fillna("float32") if "dtype" in rows else pd.Series("float32", index=rows.index)
    tasks = rows.groupby(precision)["task"].nunique().sort_index(ascending=False)
    usual = tasks.idxmax()  # the precision of most tasks; if counts are equal, float32, which comes first
    others = [*rows.loc[precision != usual, "task"].unique()]  # tasks of another precision are left out
    rows = rows[precision == usual]
    by = [*(name for name in tags_of(rows) if name not in ("task", "statistic", "seed")), "layer"]
    sizes = rows.groupby("task", sort=False).size()
    num_cells = len(_aggregate(rows, by, statistic))
    keep, gone = ([*sizes.index[is_in]] for is_in in (sizes == num_cells, sizes != num_cells))
    lacking = f" Not included, because some variants are missing: {', '.join(gone)}." if gone else ""
    lacking += f" Not included, because of another precision: {', '.join(others)}." if others else ""
    if len(keep) < 2:
        return rows.iloc[:0], f"No {statistic} over tasks: fewer than two have every variant.{lacking}"
    table = _aggregate(rows[rows["task"].isin(keep)], by, statistic)
    defined = table["value"].notna() & (table["count"] == table["n"])
    note = f"{statistic.capitalize()} over {listing('task', keep, most=20)}.{lacking}"
    if not defined.all():
        note += f" {(~defined).sum()} of {len(table)} numbers are left out, because a task's score is undefined."
    return table[defined].drop(columns="count"), note
