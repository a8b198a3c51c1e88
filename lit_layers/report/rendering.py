"""A run's page as text: the facts, tables and figures of a run put into the template."""

import math
import shlex
from collections.abc import Callable
from typing import Any

import pandas as pd

from lit_layers import records
from lit_layers.figures.labels import listing, value, whole
from lit_layers.figures.tables import change_table, model_table
from lit_layers.figures.task_means import with_task_means, with_task_medians
from lit_layers.metrics import look_up
from lit_layers.report import facts, probe_sections, sections, variant_sections
from lit_layers.report.template import Feed, fill, placed


def render(run: facts.RunData, *, allow_suspect: bool = False) -> str:
    """Returns the page of a run, or of models side by side; without its suspect checkpoints unless they are allowed."""
    comparing = run.compares_models
    frame, shown = sections_of(run, allow_suspect=allow_suspect)
    feed = Feed()
    training = placed(sections.training(run), feed)
    shown = [{**section, "metrics": placed(section["metrics"], feed)} for section in shown]
    return fill(
        "run.html.jinja",
        feed,
        title=run.name,
        run=run,
        facts=facts.headline_facts(run),
        changes=[] if comparing else _changes(change_table(frame)),
        results=_results(model_table(frame), list(dict.fromkeys(frame["run"]))) if comparing else [],
        compared=[run.models[name] for name in dict.fromkeys(frame["run"])] if comparing else [],
        suspects={verdict: _listed(run, places) for verdict, places in facts.suspects(run).items()},
        num_suspects=len({place for places in facts.suspects(run).values() for place in places}),
        allow_suspect=allow_suspect,
        others=facts.other_settings(run),
        settings_command=f"lit-layers report {shlex.quote(str(run.root))} --settings NAME",
        command=f"lit-layers report {shlex.quote(str(run.root))} --allow-suspect",
        training=training,
        sections=shown,
        cost=[_cost_row(row) for row in facts.cost(run)] if run.measurements else [],
        provenance=facts.provenance(run),
        flat=facts.flat,
        short=facts.shortened,
        is_suspect=lambda row: any(text.startswith("suspect") for text in row[1:]),
        title_of=facts.section_title,
        without_step=0 if comparing else sum(m.step is None for m in run.measurements),
        has_tokens=any("tokens" in figure for figure in feed.figures),
    )


def sections_of(run: facts.RunData, *, allow_suspect: bool = False) -> tuple[pd.DataFrame, list[dict[str, Any]]]:
    """Returns the table of what may be drawn of a run, with means over its tasks, and the sections of figures."""
    comparing = run.compares_models
    drawable = [m for m in run.measurements if (comparing or m.step is not None) and _may(m, allow_suspect)]
    # Those that are left are to be drawn: without their verdicts no figure refuses them.
    frame = records.frame(drawable).drop(columns=records.AUDIT, errors="ignore")
    means = with_task_means(frame)
    medians = with_task_medians(means.frame)
    frame = medians.frame
    others = variant_sections.without(frame)
    shown = (
        sections.sections(others, sections.profile_block)
        if comparing
        else sections.sections(others, sections.metric_block, probe_sections.section_blocks)
    )
    for section in shown:
        section["note"] = " ".join(filter(None, [section["note"], means.notes.get(section["name"])]))
    shown += variant_sections.sections(frame, medians.notes)
    if not comparing and (found := sections.surface_section(frame)) is not None:
        shown.append({**found, "metrics": sections.balanced(found["metrics"])})
    return frame, shown


def _may(measurement: records.Measurement, allow_suspect: bool) -> bool:
    return allow_suspect or not records.is_suspect(measurement)


def _listed(run: facts.RunData, places: list[str]) -> str:
    return listing("model" if run.compares_models else "step", places, most=40)


def _changes(table: Any) -> list[dict[str, Any]]:
    """The rows of the table of results, ready to be shown."""
    shown = []
    for row in table.to_dict("records"):
        layer = None if row["layer"] != row["layer"] or row["layer"] is None else int(row["layer"])
        details = [row["variant"], f"layer {layer}" if layer is not None else ""]
        several = row["first_step"] != row["last_step"]
        text = _number(row["metric"])
        path, end = _spark(row["steps"], row["values"])
        shown.append(
            {
                "title": look_up(row["metric"]).title,
                "unit": look_up(row["metric"]).unit,
                "analysis": facts.section_title(row["analysis"]),
                "details": ", ".join(filter(None, details)),
                "path": path,
                "end": end,
                "first": text(row["first"]) if several else "",
                "first_interval": _interval(row["first_low"], row["first_high"], text) if several else "",
                "first_step": f"{int(row['first_step']):,}",
                "last": text(row["last"]),
                "last_interval": _interval(row["last_low"], row["last_high"], text),
                "last_step": f"{int(row['last_step']):,}",
                "change": ("+" if row["change"] > 0 else "") + text(row["change"]) if several else "",
            }
        )
    return shown


def _results(table: Any, runs: list[str]) -> list[dict[str, Any]]:
    """The rows of the table of models, ready to be shown: a metric each, with a cell for each model."""
    shown: dict[tuple, dict[str, Any]] = {}
    for row in table.to_dict("records"):
        is_last = row["layer"] == row["layer"] and row["layer"] is not None
        key = row["analysis"], row["metric"], row["variant"], is_last
        text = _number(row["metric"])
        if key not in shown:
            shown[key] = {
                "title": look_up(row["metric"]).title,
                "unit": look_up(row["metric"]).unit,
                "analysis": facts.section_title(row["analysis"]),
                "details": ", ".join(filter(None, [row["variant"], "last layer" if is_last else ""])),
                "cells": dict.fromkeys(runs, ("", "")),
            }
        shown[key]["cells"][row["run"]] = text(row["value"]), _interval(row["low"], row["high"], text)
    order = list(dict.fromkeys(row["analysis"] for row in shown.values()))
    rows = sorted(shown.values(), key=lambda row: order.index(row["analysis"]))
    return [{**row, "cells": list(row["cells"].values())} for row in rows]


def _spark(steps: list[int], values: list[float]) -> tuple[str, tuple[float, float]]:
    """The curve of a metric over log(1 + step) as an SVG path of 150 by 28, and its end; empty for a single point."""
    points = [(math.log1p(step), number) for step, number in zip(steps, values, strict=True) if math.isfinite(number)]
    if len(points) < 2:
        return "", (0, 0)
    (left, right), (low, high) = ((min(side), max(side)) for side in zip(*points, strict=True))
    across, up = 144 / (right - left), 22 / (high - low) if high > low else 0
    places = [(round(3 + (x - left) * across, 1), round(25 - (y - low) * up, 1)) for x, y in points]
    return "M" + "L".join(f"{x} {y}" for x, y in places), places[-1]


def _interval(low: float, high: float, text: Callable[[float], str]) -> str:
    return f"{text(low)} to {text(high)}" if low == low and high == high else ""


def _number(metric: str) -> Callable[[float], str]:
    """How a metric's values are written."""
    return whole if look_up(metric).whole else value


def _cost_row(row: dict[str, Any]) -> dict[str, str]:
    return {
        "name": row["name"],
        "times": "" if row["times"] is None else f"{row['times']:,}",
        "seconds": facts.duration(row["seconds"]),
        "each": "" if not row["times"] else facts.duration(row["seconds"] / row["times"]),
        "share": "" if row["share"] is None else f"{row['share']:.1%}",
    }
