"""Metrics and scores over layers as one self-contained HTML page, in the look of a run's report."""

import base64
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lit_layers.correlate.over_layers import figures
from lit_layers.correlate.over_layers.findings import Choice, LayerFindings, MetricFindings, ModelFindings, rule_text
from lit_layers.correlate.over_layers.reading import LayerTables
from lit_layers.figures import scatter_plot
from lit_layers.figures.embed import Feed
from lit_layers.figures.labels import value
from lit_layers.figures.models import depth_curves
from lit_layers.functional.layer_selection import COEFFICIENTS, FORMS, Estimate
from lit_layers.report.template import fill, placed


def render(tables: LayerTables, findings: LayerFindings, pictures: Mapping[str, Path]) -> str:
    """Returns the page: what is left out, figures, coefficients with their null, and the choices of layers."""
    feed = Feed()
    panels = figures.depth_panels(tables)
    depth = [
        _block(panel.title, "", {"": depth_curves(panel)}, wide=number == 0 and len(panels) % 2 == 1)
        for number, panel in enumerate(panels)
    ]
    note = "A point a layer, joined in their order; metric and score are averaged over the same tasks."
    scatters = []
    for model, own in zip(tables.models, findings.models, strict=True):
        contents = figures.scatters(tables, own, model).items()
        charts = {
            f"{tables.titles[key]}: {content.title}": scatter_plot(content, width=560, height=420)
            for key, content in contents
        }
        told = f"{note} {next(iter(charts))}." if len(charts) == 1 else note
        scatters.append(_block(figures.heading(own), told, charts, wide=True))
    return fill(
        "layers.html.jinja",
        feed,
        title=f"{', '.join(tables.titles.values())} against {tables.score_title.lower()} over layers",
        facts=_facts(tables, findings),
        left_out=findings.left_out,
        missing=_missing(tables, findings),
        notes=_notes(tables, findings),
        depth=placed(depth, feed),
        scatters=placed(scatters, feed),
        coefficients=[
            (figures.heading(model), _null(model), _coefficient_rows(tables, model)) for model in findings.models
        ],
        titles=[figures.COEFFICIENT_TITLES[name] for name in COEFFICIENTS],
        choices=[
            (figures.heading(model), [_choice(tables, one) for one in model.choices]) for model in findings.models
        ],
        basis=findings.basis,
        pictures={name: _data_uri(path) for name, path in pictures.items() if name in ("correlations", "selection")},
        has_tokens=False,
    )


def _block(title: str, note: str, charts: Mapping[str, Any], *, wide: bool) -> dict[str, Any]:
    """A block with a chart for each choice; one alone needs no name."""
    several = len(charts) > 1
    choices = [
        {"text": text if several else "", "figures": [{"caption": "", "problem": "", "chart": chart}]}
        for text, chart in charts.items()
    ]
    return {"title": title, "note": note, "wide": wide, "choices": choices}


def interval_text(estimate: Estimate) -> str:
    """Returns `0.12 to 0.34`, or an empty string where there is no interval."""
    return "" if estimate.low is None else f"{value(estimate.low)} to {value(estimate.high)}"


def shares_text(choice: Choice, titles: Mapping[str, str]) -> str:
    """Returns how often each rule was chosen by halves of the tasks."""
    names = {"min": "smallest", "max": "largest"}
    found = []
    for rule, share in sorted((choice.shares or {}).items(), key=lambda pair: -pair[1]):
        direction, _, key = rule.partition(" ")
        found.append(f"{' '.join(filter(None, [names[direction], titles.get(key, key)]))} {share:.0%}")
    return ", ".join(found)


def _facts(tables: LayerTables, findings: LayerFindings) -> list[tuple[str, str]]:
    tasks = {task for model in tables.models for task in model.scores}
    found = [
        ("Models", str(len(findings.models))),
        ("Tasks", str(len(tasks))),
        ("Metrics", str(len(tables.titles))),
        ("Layers", "0 to L" if findings.first_layer == 0 else "1 to L, layer 0 apart"),
        ("States", tables.states or ""),
        ("Source", tables.source),
    ]
    return [(name, text) for name, text in found if text]


def _notes(tables: LayerTables, findings: LayerFindings) -> list[str]:
    found = [f"{model.model}: {note}" for model in findings.models for note in model.notes]
    if tables.common:
        names = ", ".join(tables.titles[key] for key in tables.common if key in tables.titles)
        found.append(f"Measured on texts common to all tasks, so that every task has the same curve: {names}.")
    if tables.states is None:
        found.append("The tables do not tell on which states metrics and scores were measured.")
    return found


def _missing(tables: LayerTables, findings: LayerFindings) -> list[tuple[str, str, list[tuple[str, str]]]]:
    """Of each model and metric the tasks that are left out: one line a reason."""
    found = []
    for model in findings.models:
        for one in model.metrics:
            reasons: dict[str, list[str]] = {}
            for task, why in one.left_out.items():
                reasons.setdefault(why, []).append(task)
            if reasons:
                found.append(
                    (model.model, tables.titles[one.metric], [(", ".join(t), why) for why, t in reasons.items()])
                )
    return found


def _null(model: ModelFindings) -> str:
    null = model.null
    return (
        f"Distance correlation of unrelated layers: noise {null.noise:.2f} (95th percentile {null.noise_95:.2f}), "
        f"random walks {null.walk:.2f} ({null.walk_95:.2f})"
    )


def _coefficient_rows(tables: LayerTables, model: ModelFindings) -> list[dict[str, Any]]:
    return [row for one in model.metrics for row in _forms(tables.titles[one.metric], one)]


def _forms(title: str, one: MetricFindings) -> list[dict[str, Any]]:
    rows = []
    for form in FORMS:
        own = {found.coefficient: found for found in one.correlations if found.form == form}
        if own:
            cells = [(value(own[name].estimate.value), interval_text(own[name].estimate)) for name in COEFFICIENTS]
            rows.append({"name": title, "form": form, "cells": cells, "n": next(iter(own.values())).num_tasks})
    return rows


def _choice(tables: LayerTables, choice: Choice) -> dict[str, Any]:
    found = choice.result
    return {
        "name": tables.titles.get(choice.metric or "", "All metrics"),
        "rule": rule_text(choice, tables.titles),
        "shares": shares_text(choice, tables.titles),
        "is_chosen": choice.is_chosen,
        "score": (value(found.score.value), interval_text(found.score)),
        "minus_last": (value(found.minus_last.value), interval_text(found.minus_last)),
        "minus_best": (value(found.minus_best.value), interval_text(found.minus_best)),
        "last": value(found.last.value),
        "best": value(found.best.value),
        "best_layer": found.best_layer,
        "best_share": "" if found.best_share is None else f"best in {found.best_share:.0%} of resamples",
        "oracle": value(found.oracle.value),
        "middle": value(found.middle.value),
        "middle_layer": found.middle_layer,
        "random": value(found.random.value),
        "n": found.num_tasks,
    }


def _data_uri(path: Path) -> str:
    return "data:image/png;base64," + base64.b64encode(path.read_bytes()).decode()
