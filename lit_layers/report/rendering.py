"""The page of a run, or of models side by side: its facts, tables and figures; and its figures as pictures."""

import math
import shlex
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd

from lit_layers import records, run_data
from lit_layers.errors import InputError
from lit_layers.figures import vega
from lit_layers.figures.chart import Chart
from lit_layers.figures.labels import listing, value, whole
from lit_layers.figures.tables import change_table, grouped, model_table, with_task_means, with_task_medians
from lit_layers.identity import Settings
from lit_layers.metrics import look_up, sentence
from lit_layers.report import emergence, sections
from lit_layers.report.template import Block, charts_in, fill


def render(run: run_data.RunData, *, allow_suspect: bool = False) -> str:
    """Return the page of a run, or of models side by side; without its suspect checkpoints unless they are allowed."""
    comparing = run.compares_models
    frame, shown = sections_of(run, allow_suspect=allow_suspect)
    emerges, training = _emergence(run, allow_suspect=allow_suspect), sections.training(run)
    for section in shown:
        blocks = section["metrics"]
        section["metrics"] = [block for block in blocks if not block.get("folded")]
        section["diagnostics"] = [block for block in blocks if block.get("folded")]  # which a reader opens
    suspects = run_data.suspects(run)
    runs = list(dict.fromkeys(frame["run"])) if comparing else []
    return fill(
        "run.html.jinja",
        title=run.name,
        run=run,
        facts=run_data.headline_facts(run),
        changes=[] if comparing else change_table(frame).to_dict("records"),
        results=_results(model_table(frame)) if comparing else [],
        runs=runs,
        look_up=look_up,
        number=_number,
        spark=_spark,
        suspects={
            verdict: listing("model" if comparing else "step", places, most=40) for verdict, places in suspects.items()
        },
        num_suspects=len({place for places in suspects.values() for place in places}),
        allow_suspect=allow_suspect,
        others=run_data.other_settings(run),
        command=f"lit-layers report {shlex.quote(str(run.root))}",
        emergence=emerges if any(emerges.values()) else None,
        first=sections.balanced([*training[:1], *_surface(run, frame)]),
        training=sections.balanced(training[1:]),
        sections=shown,
        cost=run_data.cost(run) if any(each.seconds for each in run.measurements) else [],
        provenance=run_data.provenance(run),
        data=run_data,
        title_of=sentence,
        without_step=0 if comparing else sum(m.step is None for m in run.measurements),
    )


def _surface(run: run_data.RunData, frame: pd.DataFrame) -> list[Block]:
    return [] if run.compares_models else sections.first_surface(frame[~sections.is_of_intervention(frame)])


def _emergence(run: run_data.RunData, *, allow_suspect: bool) -> dict[str, Any]:
    """When metrics emerge, in words and figures; empty where nothing can tell."""
    nothing = {"sentences": [], "still": [], "notes": [], "blocks": []}
    drawn = [m for m in run.measurements if allow_suspect or not records.is_suspect(m)]
    try:
        return (None if run.compares_models else emergence.of_one_run(run.name, drawn, run.root)) or nothing
    except Exception as error:  # the rest of the page is as good as before
        return {**nothing, "notes": [f"When metrics emerge could not be told: {type(error).__name__}: {error}"]}


def sections_of(run: run_data.RunData, *, allow_suspect: bool = False) -> tuple[pd.DataFrame, list[dict[str, Any]]]:
    """Return the table of what may be drawn of a run, with means over its tasks, and the sections of figures."""
    comparing = run.compares_models
    drawable = [m for m in run.measurements if comparing or m.step is not None]
    drawable = [m for m in drawable if allow_suspect or not records.is_suspect(m)]
    # Those that are left are to be drawn: without their verdicts no figure refuses them.
    means = with_task_means(records.frame(drawable).drop(columns=records.AUDIT, errors="ignore"))
    medians = with_task_medians(means.frame)
    frame = medians.frame
    depths = {m.run: m.provenance["depth"] for m in drawable if type(m.provenance.get("depth")) is int}
    shown = sections.sections(frame[~sections.is_of_intervention(frame)], comparing=comparing, num_layers=depths)
    for section in shown:
        section["note"] = " ".join(filter(None, [section["note"], means.notes.get(section["name"])]))
    shown += sections.intervention_sections(frame, medians.notes)
    return frame, shown


def _results(table: Any) -> list[dict[str, Any]]:
    """The rows of the table of models: a metric each, with the number and interval of each model."""
    key = lambda row: (row["analysis"], row["metric"], row["variant"], row["layer"] == row["layer"])  # noqa: E731
    rows = grouped(table.to_dict("records"), key)
    shown = [{**part[0], "is_last": key[-1], "cells": {row["run"]: row for row in part}} for key, part in rows.items()]
    order = list(dict.fromkeys(row["analysis"] for row in shown))
    return sorted(shown, key=lambda row: order.index(row["analysis"]))


def _number(metric: str) -> Callable[[float], str]:
    """Return how a metric's values are written."""
    return whole if look_up(metric).whole else value


def _spark(steps: list[int], values: list[float]) -> tuple[str, tuple[float, float]]:
    """The curve of a metric over log(1 + step) as an SVG path of 150 by 28, and its end; empty for a single point."""
    points = [(math.log1p(step), number) for step, number in zip(steps, values, strict=True) if math.isfinite(number)]
    if len(points) < 2:
        return "", (0, 0)
    (left, right), (low, high) = ((min(side), max(side)) for side in zip(*points, strict=True))
    across, up = 144 / (right - left), 22 / (high - low) if high > low else 0
    places = [(round(3 + (x - left) * across, 1), round(25 - (y - low) * up, 1)) for x, y in points]
    return "M" + "L".join(f"{x} {y}" for x, y in places), places[-1]


# ------------------------------------------------------------------------------------------------ pictures


def write_pictures(
    root: str | Path, folder: str | Path, *, allow_suspect: bool = False, settings: Settings = ()
) -> list[Path]:
    """Write every figure of a run's page, or of the page of models side by side, as PNG, SVG and PDF.

    A picture is named after its section, its title, its choice and what it is over, as on the page; of a figure with a
    slider it shows the last checkpoint. Returns their paths.

    The folder is made where there is none; other files in it stay. Checkpoints that an audit found suspect are left
    out, unless `allow_suspect`; `settings` chooses numbers of other settings, as for the page.

    Raises:
        InputError: where `root` is no run's folder, has nothing to draw, or a picture cannot be written.
    """
    charts = [*_named(run_data.read_run(root, settings=settings), allow_suspect=allow_suspect)]
    if not charts:
        raise InputError(f"{root} has nothing to draw as pictures: there is no figure on its page")
    return vega.write_pictures(charts, Path(folder))


def _named(run: run_data.RunData, *, allow_suspect: bool) -> Iterator[tuple[str, Chart]]:
    """Return what each picture is called after, and its chart, whose title names the section."""
    frame, shown = sections_of(run, allow_suspect=allow_suspect)
    emerges = _emergence(run, allow_suspect=allow_suspect)["blocks"]
    first = [{"name": "emergence", "title": "", "metrics": emerges}]
    first.append({"name": "training", "title": "Training", "metrics": [*sections.training(run), *_surface(run, frame)]})
    for section in [*first, *shown]:
        for text, chart in charts_in(section["name"], section["metrics"]):
            name = section["title"] if section["title"] not in chart.title else ""
            yield text, replace(chart, title=": ".join(filter(None, [name, chart.title])))
