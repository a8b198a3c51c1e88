"""Output of a correlation over layers: its page, its figures as pictures, and the numbers."""

import re
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pandas as pd

from lit_layers.correlate.correlation_page import number_cell, write
from lit_layers.correlate.findings import Choice, LayerFindings, ModelFindings
from lit_layers.correlate.layer_tables import LayerTables, ModelTables
from lit_layers.figures.chart import Chart, Panels
from lit_layers.figures.labels import in_sentence, value
from lit_layers.figures.models import depth_curves
from lit_layers.figures.scatter import Scatter, scatter_plot
from lit_layers.figures.tables import grouped
from lit_layers.functional.layer_selection import COEFFICIENTS, FORMS, Estimate
from lit_layers.report.template import Cells, Group, Table, block_of, fill

COEFFICIENT_TITLES = {
    "distance_correlation": "Distance correlation",
    "spearman": "Spearman rho",
    "kendall": "Kendall tau",
}
FORM_TITLES = {"per_task_mean": "mean over tasks of the coefficient", "of_task_means": "coefficient of the mean curves"}


def write_layers(tables: LayerTables, findings: LayerFindings, folder: Path) -> list[Path]:
    """Writes layers.html, layers.json, correlations.csv, selection.csv, curves.csv and the pictures into a folder.

    Returns their paths, the page first. Files of these names are replaced.

    Raises:
        InputError: where the folder cannot be written.
    """
    depth = depth_charts(tables)
    panels = {"depth": Panels(title="Scores and metrics over depth", charts=depth)}
    blocks = []
    for model, result in zip(tables.models, findings.models, strict=True):
        plots, of_model = scatters(tables, result, model), heading(result)
        charts = [scatter_plot(content, width=380, height=360) for content in plots.values()]
        name = re.sub(r"[^\w.-]+", "_", model.name)
        panels[f"scatter_{name}"] = Panels(title=f"{of_model}: means over tasks, a point a layer", charts=charts)
        texts = [f"{tables.titles[key]}: {content.title}" for key, content in plots.items()]
        note = "A point a layer, joined in their order; metric and score are averaged over the same tasks."
        if len(texts) == 1:  # one alone needs no name to be chosen by
            note, texts = f"{note} {texts[0]}.", [""]
        drawn = [scatter_plot(content, width=560, height=420) for content in plots.values()]
        blocks.append(block_of(of_model, zip(texts, drawn, strict=True), note))
    wide = [index == 0 and len(depth) % 2 == 1 for index in range(len(depth))]
    page = fill(
        "layers.html.jinja",
        tables=tables,
        findings=findings,
        title=f"{', '.join(tables.titles.values())} against {in_sentence(tables.score_title)} over layers",
        num_tasks=len({task for model in tables.models for task in model.scores.index}),
        missing=missing_tasks(tables, findings),
        depth=[block_of(chart.title, [("", chart)], wide=each) for chart, each in zip(depth, wide, strict=True)],
        scatters=blocks,
        coefficients=correlation_table(tables, findings),
        choices=choice_table(tables, findings),
    )
    content = asdict(findings) | {"source": tables.source, "states": tables.states, "titles": tables.titles}
    return write(folder, "layers", content, page, _frames(tables, findings), panels)


def depth_charts(tables: LayerTables) -> list[Chart]:
    """Returns the scores, then each metric, averaged over the tasks that a model has of it, over depth."""
    curves = {f"{tables.score_title}, mean over tasks": {model.name: model.scores for model in tables.models}}
    charts = []
    for key in tables.titles:
        curves[key] = {m.name: m.metrics[key] for m in tables.models if key in m.metrics}
    for key, of_models in curves.items():
        means = {name: np.ascontiguousarray(table).mean(0).tolist() for name, table in of_models.items()}
        charts.append(depth_curves(tables.titles.get(key, key), means))
    return charts


def scatters(tables: LayerTables, findings: ModelFindings, model: ModelTables) -> dict[str, Scatter]:
    """Returns each metric against the scores, a point a layer, both averaged over the same tasks."""
    plots = {}
    for one in findings.metrics:
        _, metric, scores = model.tables(one.metric, tables.first_layer)
        layers = range(tables.first_layer, model.num_layers + 1)
        means = {c.coefficient: c.estimate.value for c in one.correlations if c.form == "of_task_means"}
        title = one.note
        if means:
            null = f"noise {findings.null.noise:.2f}, walks {findings.null.walk:.2f}"
            title = f"dCor {value(means['distance_correlation'])} ({null}); "
            title += f"rho {value(means['spearman'])}, tau {value(means['kendall'])}"
        plots[one.metric] = Scatter(
            x=metric.mean(0).tolist(),
            y=scores.mean(0).tolist(),
            names=[str(layer) for layer in layers],
            x_title=tables.titles[one.metric],
            y_title=tables.score_title,
            title=title,
            groups=list(layers),
            group_title="Layer",
            hover=[[f"layer {layer} of {model.num_layers}"] for layer in layers],
            path=True,
        )
    return plots


def heading(model: ModelFindings) -> str:
    """Returns what a model is called above its rows."""
    return f"{model.model}{f', step {model.step:,}' if model.step is not None else ''}, {model.num_layers} layers"


def rule_text(choice: Choice, titles: Mapping[str, str]) -> str:
    """Returns what a way of choosing is called: `Smallest prompt entropy`."""
    if choice.rule == "cross-fitted":
        return "Direction chosen on half of the tasks" if choice.metric else "Metric and direction chosen on half"
    direction, _, key = choice.rule.partition(" ")
    text = "Smallest" if direction == "min" else "Largest"
    return f"{text} {in_sentence(titles[key])}, picked on other models" if key else f"{text} value"


def shares_text(choice: Choice, titles: Mapping[str, str]) -> str:
    """Returns how often each rule was chosen by halves of the tasks."""
    shares = []
    for rule, share in sorted((choice.shares or {}).items(), key=lambda pair: -pair[1]):
        direction, _, key = rule.partition(" ")
        name = "smallest" if direction == "min" else "largest"
        shares.append(f"{' '.join(filter(None, [name, titles.get(key, key)]))} {share:.0%}")
    return ", ".join(shares)


def correlation_table(tables: LayerTables, findings: LayerFindings) -> Table:
    """Returns a row a metric and form of each model, beside the null."""
    groups = []
    for model in findings.models:
        null, rows = model.null, []
        note = (
            f"Distance correlation of unrelated layers: noise {null.noise:.2f} (95th percentile {null.noise_95:.2f}), "
            f"random walks {null.walk:.2f} ({null.walk_95:.2f})"
        )
        for one in model.metrics:
            for form in FORMS if one.correlations else []:
                by_name = {c.coefficient: c for c in one.correlations if c.form == form}
                cells = [number_cell(by_name[name].estimate) for name in COEFFICIENTS if by_name]
                num_tasks = {c.num_tasks for c in by_name.values()}
                rows += [
                    Cells([(tables.titles[one.metric], FORM_TITLES[form]), *cells, (f"{n}", "")]) for n in num_tasks
                ]
            if one.note:
                rows.append(Cells([(tables.titles[one.metric], one.note), *[("", "")] * 4]))
        groups.append(Group(heading(model), note, rows))
    return Table(("Metric", *COEFFICIENT_TITLES.values(), "Tasks"), groups)


def choice_table(tables: LayerTables, findings: LayerFindings) -> Table:
    """Returns a row a way of choosing of each model; strong are those chosen on other models or tasks."""
    columns = ("Layer of each task", "Score", "Above last layer", "Above best single", "Last", "Middle", "Random")
    groups = []
    for model in findings.models:
        rows = []
        for choice in model.choices:
            result, name = choice.result, tables.titles.get(choice.metric or "", "All metrics")
            share = "" if result.best_share is None else f" ({result.best_share:.0%} of resamples)"
            shares = shares_text(choice, tables.titles)
            cells = [
                (f"{name}: {in_sentence(rule_text(choice, tables.titles))}", shares),
                *(number_cell(each) for each in (result.score, result.minus_last, result.minus_best)),
                (value(result.last.value), ""),
                (value(result.middle.value), f"layer {result.middle_layer}"),
                (value(result.random.value), ""),
                (value(result.best.value), f"layer {result.best_layer}{share}"),
                (value(result.oracle.value), ""),
                (str(result.num_tasks), ""),
            ]
            rows.append(Cells(cells, choice.is_chosen))
        groups.append(Group(heading(model), "", rows))
    return Table((*columns, "Best single", "Best per task", "Tasks"), groups)


def missing_tasks(tables: LayerTables, findings: LayerFindings) -> list[tuple[str, str, str, str]]:
    """Returns the tasks that are left out: model, metric, tasks and reason, one line a reason."""
    lines = []
    for model in findings.models:
        for one in model.metrics:
            for why, tasks in grouped(one.left_out, one.left_out.__getitem__).items():
                lines.append((model.model, tables.titles[one.metric], ", ".join(tasks), why))
    return lines


def _frames(tables: LayerTables, findings: LayerFindings) -> dict[str, pd.DataFrame]:
    """A row a coefficient, a row a way of choosing, and a row a model, task and layer."""
    correlations, choices, curves = [], [], []
    for model, result in zip(tables.models, findings.models, strict=True):
        place = {"model": model.name, "step": model.step}
        null = {"null_noise": result.null.noise, "null_walk": result.null.walk}
        for one in result.metrics:
            for c in one.correlations:
                row = place | {"metric": one.metric, "form": c.form, "coefficient": c.coefficient}
                row |= {**c.estimate._asdict(), "num_tasks": c.num_tasks}
                correlations.append(row | (null if c.coefficient == "distance_correlation" else {}))
        for choice in result.choices:
            row = place | {"metric": choice.metric, "rule": choice.rule, "is_chosen": choice.is_chosen}
            facts = vars(choice.result)
            row |= {name: facts[name] for name in ("num_tasks", "best_layer", "best_share", "middle_layer")}
            for name, estimate in facts.items():
                if isinstance(estimate, Estimate):
                    row |= {name: estimate.value, f"{name}_low": estimate.low, f"{name}_high": estimate.high}
            choices.append(row)
        scores = model.scores.stack()
        values = {"score": scores} | {key: table.stack().reindex(scores.index) for key, table in model.metrics.items()}
        frame = pd.DataFrame(values).reset_index(names=["task", "layer"])
        frame.insert(1, "domain", [model.domains.get(task) for task in frame["task"]])
        curves.append(pd.DataFrame({**place, **{name: frame[name] for name in frame}}))
    tables_of = {"correlations": pd.DataFrame(correlations), "selection": pd.DataFrame(choices)}
    return {**tables_of, "curves": pd.concat(curves, ignore_index=True)}
