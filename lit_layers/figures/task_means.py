"""Means over tasks: an analysis that ran on several tasks becomes one, so that it is a section and not thirty."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from lit_layers.figures.labels import listing
from lit_layers.figures.tables import refuse_several_settings
from lit_layers.metrics import GROUPS
from lit_layers.records import AUDIT, COLUMNS

MEAN = "mean_over_tasks"
BASES = tuple(group.name for group in GROUPS if group.over_tasks)
_DROPPED = ("task", "domain", "score")  # tags that tell the tasks of one mean apart
_PLACE = ("run", "step")


@dataclass(frozen=True)
class TaskMeans:
    """A table in which means stand for the tasks, and what each mean leaves out: of an analysis, a sentence."""

    frame: pd.DataFrame
    notes: dict[str, str]


def with_task_means(frame: pd.DataFrame, bases: Sequence[str] = BASES) -> TaskMeans:
    """Returns a table whose analyses `BASE/TASK` of several tasks have become one, `BASE/mean_over_tasks`.

    A mean is over the tasks that every checkpoint (or model) has at every layer, with equal weights; the others are in
    none and are named. `n` counts the tasks. Rows with a tag `domain` are means over the tasks of that domain alone,
    where there is more than one domain. Other rows stay as they are.
    """
    table: Any = frame
    refuse_several_settings(frame)
    if table.empty:
        return TaskMeans(frame, {})
    split = table["analysis"].str.partition("/")
    means, notes, replaced = [], {}, pd.Series(False, index=table.index)
    for base in bases:
        own = (split[0] == base) & (split[2] != "")
        if table.loc[own, "analysis"].nunique() < 2:
            continue
        replaced |= own
        found, note = _means(table[own].assign(task=split.loc[own, 2]), f"{base}/{MEAN}")
        means += found
        notes[f"{base}/{MEAN}"] = note
    if not means:
        return TaskMeans(frame, {})
    rest, added = table[~replaced], pd.concat(means, ignore_index=True)
    whole = pd.concat([rest, added], ignore_index=True) if len(rest) else added
    whole = whole.astype({name: table.dtypes[name] for name in whole.columns if name in table.columns})
    return TaskMeans(whole, notes)


def _means(rows: Any, analysis: str) -> tuple[list[Any], str]:
    """The rows of the means of one analysis, and what they leave out."""
    other = (*COLUMNS, *_DROPPED, AUDIT)
    tags = [
        name for name in rows.columns if name not in other and not name.startswith("num_") and rows[name].notna().any()
    ]
    places, missing, counts = _places(rows), {}, []
    found = []
    for _, part in rows.groupby(["metric", *tags], dropna=False, sort=False):
        per_layer = part[part["other_layer"].isna() & part["value"].map(math.isfinite)]
        kept, gone = _complete(per_layer, places)
        missing |= {task: why for task, why in gone.items() if task not in missing}
        if not kept:
            continue
        counts.append(len(kept))
        complete = per_layer[per_layer["task"].isin(kept)]
        found.append(_averaged(complete, tags, analysis))
        domains = complete["domain"].dropna().unique() if "domain" in complete else []
        if len(domains) > 1:
            for domain in sorted(domains):
                own = complete[complete["domain"] == domain]
                found.append(_averaged(own, tags, analysis).assign(domain=domain))
    return found, _note(counts, missing)


def _places(rows: Any) -> set[tuple[Any, Any]]:
    """The checkpoints (run and step) that have any of it."""
    return {(run, None if pd.isna(step) else int(step)) for run, step in zip(rows["run"], rows["step"], strict=True)}


def _complete(part: Any, places: set[tuple[Any, Any]]) -> tuple[list[str], dict[str, str]]:
    """The tasks that every checkpoint has at as many layers as any task, and what the others lack."""
    sizes = part.groupby([*_PLACE, "task"], dropna=False).size()
    most: dict[tuple[Any, Any], int] = {}
    own: dict[str, dict[tuple[Any, Any], int]] = {}
    for (run, step, task), size in sizes.items():
        place = run, None if pd.isna(step) else int(step)
        own.setdefault(task, {})[place] = size
        most[place] = max(most.get(place, 0), size)
    places = {place for place in places if place in most}
    kept, gone = [], {}
    for task, known in own.items():
        absent = [place for place in places if known.get(place, 0) < most[place]]
        if not absent:
            kept.append(task)
            continue
        steps = sorted(step for _, step in absent if step is not None)
        where = listing("step", [f"{step:,}" for step in steps], most=4) if steps else None
        gone[task] = (
            f"not at {where}" if where else f"not of {listing('model', sorted({r for r, _ in absent}), most=4)}"
        )
    return kept, gone


def _averaged(rows: Any, tags: Sequence[str], analysis: str) -> Any:
    verdict = [AUDIT] if AUDIT in rows else []  # it stays, for figures to refuse
    by = ["run", "step", "tokens", "metric", "layer", "other_layer", *tags, *verdict]
    mean = rows.groupby(by, dropna=False, sort=False)["value"].agg(["mean", "size"]).reset_index()
    mean = mean.rename(columns={"mean": "value", "size": "n"})
    return mean.assign(analysis=analysis, stderr=math.nan, low=math.nan, high=math.nan)


def _note(counts: Sequence[int], missing: dict[str, str]) -> str:
    most, least = max(counts, default=0), min(counts, default=0)
    text = f"Mean over {most} tasks" if most == least else f"Mean over {least} to {most} tasks, by metric"
    if not missing:
        return f"{text}, the same everywhere."
    reasons: dict[str, list[str]] = {}
    for task, why in missing.items():
        reasons.setdefault(why, []).append(task)
    told = "; ".join(f"{', '.join(tasks)} ({why})" for why, tasks in reasons.items())
    return f"{text}, those measured everywhere. In no mean: {told}."
