"""The HTML page of a run, or of models side by side; its figures can also be written as pictures."""

import shlex
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd

from lit_layers import records, run_data
from lit_layers.errors import InputError
from lit_layers.figures import vega
from lit_layers.figures.chart import Chart
from lit_layers.figures.labels import listing, number_text
from lit_layers.figures.tables import add_task_means, add_task_medians, change_table, grouped, model_table
from lit_layers.identity import Settings
from lit_layers.metrics import look_up, sentence
from lit_layers.report import emergence, sections
from lit_layers.report.template import charts_in, fill


def render(run: run_data.RunData, *, allow_suspect: bool = False) -> str:
    """Return the HTML page of a run, or of models side by side.

    Suspect checkpoints are left out unless `allow_suspect`.
    """
    comparing = run.compares_models
    frame, shown = sections_of(run, allow_suspect=allow_suspect)
    training = sections.training(run)
    runs = list(dict.fromkeys(frame["run"])) if comparing else []
    return fill(
        "run.html.jinja",
        title=run.name,
        run=run,
        facts=run_data.summary(run),
        changes=[] if comparing else change_table(frame).to_dict("records"),
        results=_results(model_table(frame)) if comparing else [],
        runs=runs,
        look_up=look_up,
        number=number_text,
        suspects=run_data.suspects(run),
        listing=listing,
        allow_suspect=allow_suspect,
        others=run_data.other_settings(run),
        command=f"lit-layers report {shlex.quote(str(run.root))}",
        emergence=_emergence(run, allow_suspect=allow_suspect),
        first=[*training[:1], *sections.first_surface(frame)],
        training=training[1:],
        sections=shown,
        cost=run_data.cost(run) if any(each.seconds for each in run.measurements) else [],
        provenance=run_data.provenance(run),
        data=run_data,
        title_of=sentence,
        without_step=0 if comparing else sum(m.step is None for m in run.measurements),
    )


def _emergence(run: run_data.RunData, *, allow_suspect: bool) -> dict[str, Any] | None:
    """Return the section of the page that says when metrics emerge.

    Returns None for models side by side, or if no curve is long enough.
    """
    drawn = [m for m in run.measurements if allow_suspect or not records.is_suspect(m)]
    try:
        return None if run.compares_models else emergence.run_summary(run.name, drawn, run.root)
    except Exception as error:  # show the reason instead: the rest of the page is still useful
        reason = f"The times at which metrics emerge could not be computed: {type(error).__name__}: {error}"
        return {"sentences": [], "still": [], "notes": [reason], "blocks": []}


def sections_of(run: run_data.RunData, *, allow_suspect: bool = False) -> tuple[pd.DataFrame, list[dict[str, Any]]]:
    """Return the records to draw, including means over tasks, and the figure sections of the page."""
    comparing = run.compares_models
    drawable = [m for m in run.measurements if comparing or m.step is not None]
    drawable = [m for m in drawable if allow_suspect or not records.is_suspect(m)]
    # Suspect rows are only left if `allow_suspect`. Figures refuse rows with a suspect verdict, so drop the column of
    # verdicts.
    means = add_task_means(records.frame(drawable).drop(columns=records.AUDIT, errors="ignore"))
    medians = add_task_medians(means.frame)
    frame = medians.frame
    depths = {m.run: m.provenance["depth"] for m in drawable if type(m.provenance.get("depth")) is int}
    shown = sections.sections(frame[~sections.is_intervention(frame)], comparing=comparing, num_layers=depths)
    for section in shown:
        section["note"] = " ".join(filter(None, [section["note"], means.notes.get(section["name"])]))
    shown += sections.intervention_sections(frame, medians.notes)
    return frame, shown


def _results(table: Any) -> list[dict[str, Any]]:
    """Return the rows of the model comparison: one metric per row, with the value and interval of each model."""
    key = lambda row: (row["analysis"], row["metric"], row["variant"], row["layer"] == row["layer"])  # noqa: E731
    rows = grouped(table.to_dict("records"), key)
    shown = [{**part[0], "is_last": key[-1], "cells": {row["run"]: row for row in part}} for key, part in rows.items()]
    order = list(dict.fromkeys(row["analysis"] for row in shown))
    return sorted(shown, key=lambda row: order.index(row["analysis"]))


# ------------------------------------------------------------------------------------------------ pictures


def write_pictures(
    root: str | Path, folder: str | Path, *, allow_suspect: bool = False, settings: Settings = ()
) -> list[Path]:
    """Write every figure of the page of a run, or of models side by side, as PNG, SVG and PDF; return the paths.

    A file name consists of the section, the figure's title, the entry chosen in the figure's menu, and the caption. A
    figure with a slider shows the last checkpoint.

    The folder is created if needed; other files in it are not touched. Suspect checkpoints are left out unless
    `allow_suspect`. `settings` selects one of several settings of an analysis, as in `write_report`.

    Raises:
        InputError: `root` is not a run folder or has no figures, or a picture cannot be written.
    """
    charts = [*_named_charts(run_data.read_run(root, settings=settings), allow_suspect=allow_suspect)]
    if not charts:
        raise InputError(f"{root} has nothing to draw as pictures")
    return vega.write_pictures(charts, Path(folder))


def _named_charts(run: run_data.RunData, *, allow_suspect: bool) -> Iterator[tuple[str, Chart]]:
    """Yield each chart of the page with its file name; the title of the section is put before the chart's title."""
    frame, shown = sections_of(run, allow_suspect=allow_suspect)
    emerges = (_emergence(run, allow_suspect=allow_suspect) or {}).get("blocks", [])
    head = [*sections.training(run), *sections.first_surface(frame)]
    first = [("emergence", "", emerges), ("training", "Training", head)]
    named = [
        *first,
        *((each["name"], each["title"], [*each["metrics"], *each.get("diagnostics", ())]) for each in shown),
    ]
    for name, title, blocks in named:
        for text, chart in charts_in(name, blocks):
            titles = [title if title not in chart.title else "", chart.title]
            yield text, replace(chart, title=": ".join(filter(None, titles)))
