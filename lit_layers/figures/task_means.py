"""Means and medians over tasks: an analysis that ran on several tasks becomes one, a section and not thirty."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from lit_layers.figures.labels import listing
from lit_layers.figures.tables import tags_of
from lit_layers.metrics import GROUPS
from lit_layers.records import AUDIT

MEAN = "mean_over_tasks"
MEDIAN = "intervene/median_over_tasks"
GLUE = "intervene/glue"
GLUE_MEAN = f"{GLUE}/{MEAN}"
BASES = tuple(group.name for group in GROUPS if group.over_tasks)
_DROPPED = ("task", "domain", "score")  # tags that tell the tasks of one mean apart


@dataclass(frozen=True)
class OverTasks:
    """A table with means or medians over tasks, and what each is over and leaves out: of an analysis, a sentence."""

    frame: pd.DataFrame
    notes: dict[str, str]


def with_task_means(frame: pd.DataFrame, bases: Sequence[str] = BASES) -> OverTasks:
    """Returns a table whose analyses `BASE/TASK` of several tasks have become one, `BASE/mean_over_tasks`.

    A mean is over the tasks that every checkpoint (or model) has at every layer, with equal weights; the others are in
    none and are named. `n` counts the tasks. Rows with a tag `domain` are means over the tasks of that domain alone,
    where there is more than one domain. Other rows stay as they are.
    """
    table: Any = frame
    _refuse_several_settings(table)
    means, notes, rest = [], {}, table
    for base in bases if len(table) else ():
        task = table["analysis"].str.partition("/")
        of_base = (task[0] == base) & (task[2] != "")
        if table.loc[of_base, "analysis"].nunique() > 1:
            analysis = f"{base}/{MEAN}"
            rest = rest[~of_base.reindex(rest.index)]
            parts, notes[analysis] = _means(table[of_base].assign(task=task.loc[of_base, 2]))
            means += [part.assign(analysis=analysis) for part in parts]
    return OverTasks(_joined(table, [*([rest] if len(rest) else []), *means]), notes) if means else OverTasks(frame, {})


def with_task_medians(frame: pd.DataFrame) -> OverTasks:
    """Returns the table and, of several tasks, the median of `normalized_score` (GLUE: the mean of `task_score`).

    They are of the analyses `intervene/median_over_tasks` and `intervene/glue/mean_over_tasks`: a number for each
    variant of each checkpoint (or model), over those tasks that have it for every variant that any task has there: a
    young model beats guessing on few of them. What one of them leaves undefined has none. `n` counts the tasks, and
    the note names them, step by step where they differ. One task alone makes neither.

    Source: Sun et al., Transformer Layers as Painters, arXiv 2407.09298 (the median over benchmarks; GLUE: the mean).
    """
    table: Any = frame
    _refuse_several_settings(table)
    if table.empty or "variant" not in table:
        return OverTasks(frame, {})
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
    return OverTasks(_joined(table, [table, *added]) if added else frame, notes)


def _refuse_several_settings(table: Any) -> None:
    """Keeps a mean over tasks from going through numbers of several settings.

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


def _over(rows: Any, by: Sequence[str], statistic: str) -> Any:
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
        kept, gone = _complete(part)
        missing = gone | missing
        if not kept:
            continue
        counts.append(len(kept))
        part = part[part["task"].isin(kept)]
        means.append(_over(part, by, "mean"))
        domains = sorted(part["domain"].dropna().unique()) if "domain" in part else []
        for domain in domains if len(domains) > 1 else ():
            means.append(_over(part[part["domain"] == domain], by, "mean").assign(domain=domain))
    return [part.drop(columns="count") for part in means], _note(counts, missing)


def _complete(part: Any) -> tuple[list[str], dict[str, str]]:
    """The tasks that every checkpoint has at as many layers as any task, and what the others lack."""
    sizes: Any = pd.crosstab([part["run"], part["step"].fillna(-1)], part["task"])
    lacks = sizes.lt(sizes.max(axis=1), axis=0)
    kept = [task for task in lacks if not lacks[task].any()]
    return kept, {task: _absent(lacks.index[lacks[task]]) for task in lacks if task not in kept}


def _absent(places: Any) -> str:
    steps = sorted(int(step) for _, step in places if step >= 0)
    if steps:
        return f"not at {listing('step', [f'{step:,}' for step in steps], most=4)}"
    return f"not of {listing('model', sorted({run for run, _ in places}), most=4)}"


def _note(counts: Sequence[int], missing: dict[str, str]) -> str:
    most, least = max(counts, default=0), min(counts, default=0)
    text = f"Mean over {most} tasks" if most == least else f"Mean over {least} to {most} tasks, by metric"
    if not missing:
        return f"{text}, the same everywhere."
    reasons = {why: [task for task in missing if missing[task] == why] for why in dict.fromkeys(missing.values())}
    lacking = "; ".join(f"{', '.join(tasks)} ({why})" for why, tasks in reasons.items())
    return f"{text}, those measured everywhere. In no mean: {lacking}."


# ------------------------------------------------------------------------------------------------ medians of variants


def _medians(rows: Any, statistic: str) -> tuple[Any, str]:
    """A row for each variant of each checkpoint or model, and over which tasks."""
    parts: list[Any] = []
    places: dict[str, list[str]] = {}
    for (run, step), part in rows.groupby(["run", "step"], dropna=False, sort=False):
        medians, sentence = _of_checkpoint(part, statistic)
        parts.append(medians)
        places.setdefault(sentence, []).append(run if pd.isna(step) else f"step {int(step):,}")
    sentences = [*places]
    if len(places) > 1:
        sentences = [f"{', '.join(dict.fromkeys(where))}: {sentence}" for sentence, where in places.items()]
    return pd.concat(parts, ignore_index=True), " ".join(sentences)


def _of_checkpoint(rows: Any, statistic: str) -> tuple[Any, str]:
    """Of one checkpoint or model a row for each cell, and which tasks enter and what is left out."""
    precision = rows["dtype"].fillna("float32") if "dtype" in rows else pd.Series("float32", index=rows.index)
    tasks = rows.groupby(precision)["task"].nunique().sort_index(ascending=False)
    usual = tasks.idxmax()  # of equally many float32, which is first
    others = [*rows.loc[precision != usual, "task"].unique()]  # no median is over scores of two precisions
    rows = rows[precision == usual]
    by = [*(name for name in tags_of(rows) if name not in ("task", "statistic", "seed")), "layer"]
    sizes = rows.groupby("task", sort=False).size()
    num_cells = len(_over(rows, by, statistic))
    kept, gone = ([*sizes.index[is_in]] for is_in in (sizes == num_cells, sizes != num_cells))
    lacking = f" In it are not, as they lack some variants: {', '.join(gone)}." if gone else ""
    lacking += f" Of another precision, and not in it: {', '.join(others)}." if others else ""
    if len(kept) < 2:
        return rows.iloc[:0], f"No {statistic} over tasks: fewer than two have every variant.{lacking}"
    table = _over(rows[rows["task"].isin(kept)], by, statistic)
    defined = table["value"].notna() & (table["count"] == table["n"])
    note = f"{statistic.capitalize()} over {listing('task', kept, most=20)}.{lacking}"
    if not defined.all():
        note += f" {(~defined).sum()} of {len(table)} numbers are left out, as a task's score is undefined there."
    return table[defined].drop(columns="count"), note
