"""What correlations over layers leave: figures, the page, the numbers."""

import base64
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from lit_layers import records
from lit_layers.correlate.layer_findings import Choice, LayerFindings, MetricFindings, ModelFindings, rule_text
from lit_layers.correlate.layer_tables import LayerTables, ModelTables
from lit_layers.durable import replace_file
from lit_layers.errors import InputError
from lit_layers.figures import Panels, scatter_plot
from lit_layers.figures.labels import value
from lit_layers.figures.models import DepthCurve, DepthPanel, IntervalRow, Mark, depth_curves, interval_rows
from lit_layers.figures.plane import Scatter
from lit_layers.figures.vega import write_charts
from lit_layers.functional.layer_selection import COEFFICIENTS, FORMS, Estimate
from lit_layers.report.template import Feed, fill, placed

COEFFICIENT_TITLES = {
    "distance_correlation": "Distance correlation",
    "spearman": "Spearman rho",
    "kendall": "Kendall tau",
}
FORM_TITLES = {"per_task_mean": "mean over tasks of the coefficient", "of_task_means": "coefficient of the mean curves"}
NULLS = ("independent noise, mean", "random walks, mean")
CHOICES = (
    "layer chosen by the metric",
    "chosen on other models or tasks",
    "middle layer",
    "best single layer",
    "best layer of each task",
)


def depth_panels(tables: LayerTables) -> list[DepthPanel]:
    """Returns the scores, then each metric, averaged over the tasks that a model has of it, over depth."""
    scores = [DepthCurve(model.name, _mean(model.scores)) for model in tables.models]
    found = [DepthPanel(f"{tables.score_title}, mean over tasks", scores)]
    for key, title in tables.titles.items():
        own = [DepthCurve(m.name, _mean(m.metrics[key])) for m in tables.models if key in m.metrics]
        found.append(DepthPanel(title, own))
    return found


def scatters(tables: LayerTables, findings: ModelFindings, model: ModelTables) -> dict[str, Scatter]:
    """Returns each metric against the scores, a point a layer, both averaged over the same tasks."""
    found = {}
    for one in findings.metrics:
        _, metric, scores = model.tables(one.metric, tables.first_layer)
        layers = range(tables.first_layer, model.num_layers + 1)
        found[one.metric] = Scatter(
            x=metric.mean(0).tolist(),
            y=scores.mean(0).tolist(),
            names=[str(layer) for layer in layers],
            x_title=tables.titles[one.metric],
            y_title=tables.score_title,
            title=_headline(one, findings),
            groups=list(layers),
            group_title="Layer",
            hover=[[f"layer {layer} of {model.num_layers}"] for layer in layers],
            path=True,
        )
    return found


def correlation_rows(tables: LayerTables, findings: LayerFindings) -> list[IntervalRow]:
    """Returns a row a metric of each model, with both forms of each coefficient and the null of the first."""
    rows = []
    for model in findings.models:
        rows.append(IntervalRow(heading(model)))
        for one in model.metrics:
            panels = []
            for coefficient in COEFFICIENTS:
                own = [c for c in one.correlations if c.coefficient == coefficient]
                marks = [Mark(FORM_TITLES[c.form], *c.estimate) for c in own]
                if coefficient == "distance_correlation":
                    marks += [Mark(NULLS[0], model.null.noise), Mark(NULLS[1], model.null.walk)]
                panels.append(marks)
            rows.append(IntervalRow(tables.titles[one.metric], panels, f"{len(one.tasks)} tasks"))
    return rows


def correlation_kinds() -> list[str]:
    """Returns what the marks of `correlation_rows` are, in the order of the legend."""
    return [*(FORM_TITLES[form] for form in FORMS), *NULLS]


def choice_rows(tables: LayerTables, findings: LayerFindings) -> list[IntervalRow]:
    """Returns a row a way of choosing: what it scores above the last layer, and what else does."""
    rows = []
    for model in findings.models:
        rows.append(IntervalRow(heading(model)))
        for choice in model.choices:
            found = choice.result
            above = found.last.value
            marks = [
                Mark(CHOICES[1 if choice.is_chosen else 0], *found.minus_last),
                Mark(CHOICES[2], found.middle.value - above),
                Mark(CHOICES[3], found.best.value - above),
                Mark(CHOICES[4], found.oracle.value - above),
            ]
            text = ": ".join(filter(None, [tables.titles.get(choice.metric or ""), rule_text(choice, tables.titles)]))
            note = f"{value(found.score.value)}, last {value(above)}, {found.num_tasks} tasks"
            rows.append(IntervalRow(text, [marks], note))
    return rows


def heading(model: ModelFindings) -> str:
    """Returns what a model is called above its rows."""
    return f"{model.model}{f', step {model.step:,}' if model.step is not None else ''}, {model.num_layers} layers"


def _headline(one: MetricFindings, model: ModelFindings) -> str:
    own = {c.coefficient: c.estimate.value for c in one.correlations if c.form == "of_task_means"}
    if not own:
        return one.note
    text = f"dCor {value(own['distance_correlation'])} (noise {model.null.noise:.2f}, walks {model.null.walk:.2f})"
    return f"{text}; rho {value(own['spearman'])}, tau {value(own['kendall'])}"


def _mean(curves: dict[str, np.ndarray]) -> list[float]:
    """Over tasks that all have a value; layer 0 may have none."""
    return np.stack(list(curves.values())).mean(0).tolist()


# ------------------------------------------------------------------------------------------------ the page


def render(tables: LayerTables, findings: LayerFindings, pictures: Mapping[str, Path]) -> str:
    """Returns the page: what is left out, figures, coefficients with their null, and the choices of layers."""
    feed = Feed()
    panels = depth_panels(tables)
    depth = [
        _block(panel.title, "", {"": depth_curves(panel)}, wide=number == 0 and len(panels) % 2 == 1)
        for number, panel in enumerate(panels)
    ]
    note = "A point a layer, joined in their order; metric and score are averaged over the same tasks."
    scatter_blocks = []
    for model, own in zip(tables.models, findings.models, strict=True):
        contents = scatters(tables, own, model).items()
        charts = {
            f"{tables.titles[key]}: {content.title}": scatter_plot(content, width=560, height=420)
            for key, content in contents
        }
        told = f"{note} {next(iter(charts))}." if len(charts) == 1 else note
        scatter_blocks.append(_block(heading(own), told, charts, wide=True))
    return fill(
        "layers.html.jinja",
        feed,
        title=f"{', '.join(tables.titles.values())} against {tables.score_title.lower()} over layers",
        facts=_facts(tables, findings),
        left_out=findings.left_out,
        missing=_missing(tables, findings),
        notes=_notes(tables, findings),
        depth=placed(depth, feed),
        scatters=placed(scatter_blocks, feed),
        coefficients=[(heading(model), _null(model), _coefficient_rows(tables, model)) for model in findings.models],
        titles=[COEFFICIENT_TITLES[name] for name in COEFFICIENTS],
        choices=[(heading(model), [_choice(tables, one) for one in model.choices]) for model in findings.models],
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


# ------------------------------------------------------------------------------------------------ the files

_ESTIMATES = ("score", "last", "best", "oracle", "middle", "random", "minus_last", "minus_best")


def write(tables: LayerTables, findings: LayerFindings, folder: Path) -> list[Path]:
    """Writes layers.html, layers.json, correlations.csv, selection.csv, curves.csv and the pictures into a folder.

    Returns their paths, the page first. Files of these names are replaced.

    Raises:
        InputError: where the folder cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"cannot write to {folder}: {(error.strerror or str(error)).lower()}") from error
    page, numbers = folder / "layers.html", folder / "layers.json"
    content = findings.to_dict() | {"source": tables.source, "states": tables.states, "titles": tables.titles}
    of_tables = {"correlations": correlation_table(findings), "selection": selection_table(findings)}
    of_tables["curves"] = curve_table(tables)
    try:
        replace_file(numbers, json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False) + "\n")
        for name, rows in of_tables.items():
            records.export(rows, folder / f"{name}.csv")
        pictures = write_pictures(tables, findings, folder)  # behind the numbers, as drawing may fail
        replace_file(page, render(tables, findings, {path.stem: path for path in pictures}))
    except OSError as error:
        raise InputError(f"cannot write to {folder}: {(error.strerror or str(error)).lower()}") from error
    return [page, *pictures, numbers, *(folder / f"{name}.csv" for name in of_tables)]


def write_pictures(tables: LayerTables, findings: LayerFindings, folder: Path) -> list[Path]:
    """Writes depth.png, correlations.png, selection.png and scatter_MODEL.png; returns their paths.

    Raises:
        InputError: where a picture cannot be written.
    """
    depth = [depth_curves(panel) for panel in depth_panels(tables)]
    panels = {"depth": Panels(title="Scores and metrics over depth", charts=depth)}
    titles = list(COEFFICIENT_TITLES.values())
    charts = interval_rows(correlation_rows(tables, findings), titles, kinds=correlation_kinds())
    title = f"Metrics against {tables.score_title.lower()} over layers, 95% intervals over tasks"
    panels["correlations"] = Panels(title=title, charts=charts)
    titles = [f"{tables.score_title} above that of the last layer"]
    charts = interval_rows(choice_rows(tables, findings), titles, kinds=CHOICES)
    title = "Layers chosen without labels, 95% intervals over tasks"
    panels["selection"] = Panels(title=title, charts=charts, width=460)
    for model, own in zip(tables.models, findings.models, strict=True):
        title = f"{heading(own)}: means over tasks, a point a layer"
        contents = scatters(tables, own, model).values()
        charts = [scatter_plot(content, width=380, height=360) for content in contents]
        name = re.sub(r"[^\w.-]+", "_", model.name)
        panels[f"scatter_{name}"] = Panels(title=title, charts=charts)
    return write_charts({folder / f"{name}.png": each for name, each in panels.items()})


def correlation_table(findings: LayerFindings) -> pd.DataFrame:
    """Returns a row a coefficient: model, step, metric, form, coefficient, value, low, high, tasks, and the null."""
    rows: list[dict[str, Any]] = []
    for model in findings.models:
        for one in model.metrics:
            for found in one.correlations:
                is_distance = found.coefficient == "distance_correlation"
                rows.append(
                    {
                        "model": model.model,
                        "step": model.step,
                        "metric": one.metric,
                        "form": found.form,
                        "coefficient": found.coefficient,
                        **found.estimate._asdict(),
                        "num_tasks": found.num_tasks,
                        "null_noise": model.null.noise if is_distance else None,
                        "null_walk": model.null.walk if is_distance else None,
                    }
                )
    return pd.DataFrame(rows)


def selection_table(findings: LayerFindings) -> pd.DataFrame:
    """Returns a row a way of choosing: its score, what it is compared with, and the paired differences."""
    rows: list[dict[str, Any]] = []
    for model in findings.models:
        for choice in model.choices:
            found = choice.result
            row = {"model": model.model, "step": model.step, "metric": choice.metric, "rule": choice.rule}
            row |= {"is_chosen": choice.is_chosen, "num_tasks": found.num_tasks}
            row |= {"best_layer": found.best_layer, "best_share": found.best_share, "middle_layer": found.middle_layer}
            for name in _ESTIMATES:
                estimate = getattr(found, name)
                row |= {name: estimate.value, f"{name}_low": estimate.low, f"{name}_high": estimate.high}
            rows.append(row)
    return pd.DataFrame(rows)


def curve_table(tables: LayerTables) -> pd.DataFrame:
    """Returns a row a model, task and layer, with the score and each metric."""
    rows: list[dict[str, Any]] = []
    for model in tables.models:
        for task, scores in model.scores.items():
            for layer in range(model.num_layers + 1):
                row = {"model": model.name, "step": model.step, "task": task, "domain": model.domains.get(task)}
                own = {key: metric[task][layer] for key, metric in model.metrics.items() if task in metric}
                rows.append({**row, "layer": layer, "score": scores[layer], **own})
    return pd.DataFrame(rows)
