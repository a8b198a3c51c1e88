"""Output of a correlation over models or over layers: page, figures and numbers."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pandas as pd

from lit_layers import records
from lit_layers.correlate.findings import Findings, LayerFindings, ModelFindings, Row
from lit_layers.correlate.layer_tables import LayerTables, ModelTables
from lit_layers.correlate.model_table import ModelTable
from lit_layers.figures.chart import Chart
from lit_layers.figures.labels import mid_sentence, p_equation, p_text, value
from lit_layers.figures.profiles import depth_curves
from lit_layers.figures.scatter import Scatter, scatter_plot
from lit_layers.figures.tables import grouped
from lit_layers.figures.vega import write_pictures
from lit_layers.functional import correlation
from lit_layers.functional.correlation import COEFFICIENTS, Estimate
from lit_layers.report.template import Cells, Group, Table, block, fill

COEFFICIENT_TITLES = {
    "distance_correlation": "Distance correlation",
    "spearman": "Spearman rho",
    "kendall": "Kendall tau",
}
FORM_TITLES = {"per_task_mean": "mean over tasks of the coefficient", "of_task_means": "coefficient of the mean curves"}


def _write(
    folder: Path,
    name: str,
    content: Mapping[str, Any],
    page: str,
    frames: Mapping[str, pd.DataFrame],
    charts: Iterable[tuple[str, Chart]],
) -> list[Path]:
    """Write the files of a correlation and return their paths, the page NAME.html first.

    The other files are NAME.json, a .csv file per table, and a .png, .svg and .pdf file per chart.
    """
    numbers = json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    tables = {f"{each}.csv": frame for each, frame in frames.items()}
    files = records.write_files(folder, {f"{name}.html": page, f"{name}.json": numbers, **tables})
    return [files[0], *write_pictures(charts, folder), *files[1:]]  # pictures are drawn last, because this may fail


def number_cell(row: Row | Estimate) -> tuple[str, str]:
    """Return a number and its 95% interval as the two texts of a table cell."""
    return value(row.value), "" if row.low is None or row.high is None else f"{value(row.low)} to {value(row.high)}"


# ------------------------------------------------------------------------------------------------ over models


def write_models(table: ModelTable, findings: Findings, folder: Path) -> list[Path]:
    """Write correlation.html, .json and .csv (one row per coefficient), models.csv and the pictures.

    Existing files with these names are replaced.

    Returns:
        The paths, the page first.

    Raises:
        InputError: The folder cannot be written.
    """
    parts = {table.metric: findings.rows + findings.groups, table.corrected: findings.corrected}
    rows = pd.DataFrame([{"of": of, **vars(row)} for of, rows in parts.items() for row in rows])
    plot = _scatter(table, findings)
    chart = scatter_plot(plot, width=720, height=500)
    title = f"{plot.y_title} against {mid_sentence(plot.x_title)}"
    note = f"{plot.title}. Line: least squares, with the 95% band."
    page = fill(
        "correlation.html.jinja",
        table=table,
        findings=findings,
        title=f"{plot.x_title} against {mid_sentence(plot.y_title)}",
        r2=next(row for row in findings.rows if row.name == "R²"),
        p_text=p_text,
        blocks=[block(title, note, [("", [("", chart)])], wide=True)],
        coefficients=coefficient_table(table, findings),
        covariates=covariate_table(findings),
    )
    content = asdict(findings) | {"source": table.source, "notes": table.notes}
    frames = {"correlation": rows, "models": table.frame}
    return _write(folder, "correlation", content, page, frames, [("scatter", chart)])


def coefficient_table(table: ModelTable, findings: Findings) -> Table:
    """Return the table of the correlation coefficients with the score.

    It has the coefficients of the metric, of the metric minus its baseline, partial ones, and those within groups.
    """
    partial = [row for row in findings.rows if row.name.startswith("Partial")]
    parts = {
        table.title(table.metric): [row for row in findings.rows if row not in partial],
        f"{table.title(str(table.corrected))}: the baseline taken off": findings.corrected,
        "With something else held fixed": partial,
        "Within groups": findings.groups,
    }
    cells = lambda row: Cells([(row.name, row.note), number_cell(row), (p_text(row.p), ""), (str(row.n), "")])  # noqa: E731
    groups = [Group(title, "", [*map(cells, rows)]) for title, rows in parts.items() if rows]
    return Table(("Coefficient", "Value, 95% interval", "p", "Models"), groups)


def covariate_table(findings: Findings) -> Table | None:
    """Return a table of how much each covariate explains the metric and the score, or None without covariates."""
    if not findings.covariates:
        return None
    cells = []
    for one in findings.covariates:
        shares = ((one.r2_metric, one.r_metric), (one.r2_score, one.r_score))
        cells.append(Cells([(one.name, ""), *((f"{r2:.2f}", f"r = {value(r)}") for r2, r in shares), (str(one.n), "")]))
    return Table(("", "R² of the metric", "R² of the score", "Models"), [Group("", "", cells)])


def _scatter(table: ModelTable, findings: Findings) -> Scatter:
    """Return the scatter plot of score against metric, with one point per model."""
    frame, group, hover = table.frame, findings.group, list[list[str]]()
    x, y = table.values(table.metric), table.values(table.score)
    r = correlation.pearson(x, y)
    order = dict.fromkeys([table.metric, table.score, *frame.columns.drop("model")])
    for row in frame.to_dict("records"):
        known = {table.title(name): row[name] for name in order if not pd.isna(row[name])}
        hover.append([f"{name}: {cell if isinstance(cell, str) else f'{cell:,.4g}'}" for name, cell in known.items()])
    return Scatter(
        x=x.tolist(),
        y=y.tolist(),
        names=frame["model"].tolist(),
        x_title=table.title(table.metric),
        y_title=table.title(table.score),
        title=f"r = {value(r.value)}, R² = {r.value**2:.2f}, {p_equation(r.p)}, {len(frame)} models",
        groups=[None if pd.isna(label) else label for label in frame[group].tolist()] if group else None,
        group_title=table.title(group) if group else "",
        hover=hover,
    )


# ------------------------------------------------------------------------------------------------ over layers


def write_layers(tables: LayerTables, findings: LayerFindings, folder: Path) -> list[Path]:
    """Write layers.html, layers.json, correlations.csv, selection.csv, curves.csv and the pictures to a folder.

    Existing files with these names are replaced.

    Returns:
        The paths, the page first.

    Raises:
        InputError: The folder cannot be written.
    """
    depth, blocks = depth_charts(tables), []
    charts = [(f"depth {key}", chart) for key, chart in zip(("score", *tables.titles), depth, strict=True)]
    for model, result in zip(tables.models, findings.models, strict=True):
        note = "One point per layer, joined in order. Metric and score are averaged over the same tasks."
        drawn = {one.metric: scatter_plot(_path(tables, one, model, result)) for one in result.metrics}
        charts += [(f"scatter {model.name} {key}", chart) for key, chart in drawn.items()]
        choices = [(f"{tables.titles[key]}: {chart.title}", [("", chart)]) for key, chart in drawn.items()]
        blocks.append(block(heading(result), note, choices, wide=True))
    page = fill(
        "layers.html.jinja",
        tables=tables,
        findings=findings,
        title=f"{', '.join(tables.titles.values())} against {mid_sentence(tables.score_title)} over layers",
        num_tasks=len({task for model in tables.models for task in model.scores.index}),
        missing=missing_tasks(tables, findings),
        depth=[block(chart.title, "", [("", [("", chart)])], wide=True) for chart in depth],
        scatters=blocks,
        coefficients=correlation_table(tables, findings),
        choices=choice_table(tables, findings),
    )
    content = asdict(findings) | {"source": tables.source, "states": tables.states, "titles": tables.titles}
    return _write(folder, "layers", content, page, _frames(tables, findings), charts)


def depth_charts(tables: LayerTables) -> list[Chart]:
    """Return charts over depth, one for the scores and one for each metric.

    Each chart has one curve per model, the mean over tasks.
    """
    curves = {f"{tables.score_title}, mean over tasks": {model.name: model.scores for model in tables.models}}
    for key, title in tables.titles.items():
        curves[title] = {m.name: m.metrics[key] for m in tables.models if key in m.metrics}
    return [
        depth_curves(title, {name: table.to_numpy().mean(0).tolist() for name, table in by_model.items()})
        for title, by_model in curves.items()
    ]


def _path(tables: LayerTables, one: Any, model: ModelTables, findings: ModelFindings) -> Scatter:
    """Return the scatter plot of scores against a metric for one model, with one point per layer.

    Scores and metric are averaged over the same tasks. A line connects the layers in their order.
    """
    _, metric, scores = model.tables(one.metric, tables.first_layer)
    layers = range(tables.first_layer, model.num_layers + 1)
    means = {c.coefficient: c.estimate.value for c in one.correlations if c.form == "of_task_means"}
    null = f"noise {findings.null.noise:.2f}, walks {findings.null.walk:.2f}"
    title = f"dCor {value(means['distance_correlation'])} ({null}); " if means else one.note
    title += f"rho {value(means['spearman'])}, tau {value(means['kendall'])}" if means else ""
    return Scatter(
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


def heading(model: ModelFindings) -> str:
    """Return the heading above the rows of a model in a table: its name, step and number of layers."""
    return f"{model.model}{f', step {model.step:,}' if model.step is not None else ''}, {model.num_layers} layers"


def correlation_table(tables: LayerTables, findings: LayerFindings) -> Table:
    """Return a table of the correlation coefficients over layers.

    Each model and metric has a row for the mean of the coefficients over tasks, and a row for the coefficients of the
    mean curves. A note for each model gives the distance correlation that unrelated curves would have.
    """
    groups = []
    for model in findings.models:
        null, rows = model.null, []
        note = (
            f"Distance correlation of unrelated layers: noise {null.noise:.2f} (95th percentile {null.noise_95:.2f}), "
            f"random walks {null.walk:.2f} ({null.walk_95:.2f})"
        )
        for one in model.metrics:
            title = tables.titles[one.metric]
            for form, group in grouped(one.correlations, lambda c: c.form).items():
                by_name = {c.coefficient: number_cell(c.estimate) for c in group}
                cells = [by_name[name] for name in COEFFICIENTS]
                rows.append(Cells([(title, FORM_TITLES[form]), *cells, (str(group[0].num_tasks), "")]))
            if one.note:
                rows.append(Cells([(title, one.note), *[("", "")] * 4]))
        groups.append(Group(heading(model), note, rows))
    return Table(("Metric", *COEFFICIENT_TITLES.values(), "Tasks"), groups)


ESTIMATES = {
    "score": "Score",
    "minus_last": "Above last layer",
    "minus_best": "Above best single",
    "last": "Last",
    "middle": "Middle",
    "random": "Random",
    "best": "Best single",
    "oracle": "Best per task",
}


def choice_table(tables: LayerTables, findings: LayerFindings) -> Table:
    """Return a table of the scores at chosen layers, with one row per model and rule that chooses layers.

    For each model and metric there are two rules. One chooses the layer with the smallest value of the metric, the
    other the layer with the largest. The rule with the higher mean score on the other models is bold. The rule that is
    chosen from all metrics is also bold.
    """
    groups = []
    for model in findings.models:
        rows = []
        for choice in model.choices:
            direction, _, key = choice.rule.partition(" ")
            way = f"{tables.titles[choice.metric or key]}: {'smallest' if direction == 'min' else 'largest'} value"
            name = (way, "" if choice.metric else "best of all metrics on other models")
            numbers = [number_cell(getattr(choice.result, each)) for each in ESTIMATES]
            rows.append(Cells([name, *numbers, (str(choice.result.num_tasks), "")], choice.is_chosen))
        groups.append(Group(heading(model), "", rows))
    return Table(("Layer of each task", *ESTIMATES.values(), "Tasks"), groups)


def missing_tasks(tables: LayerTables, findings: LayerFindings) -> list[tuple[str, str, str, str]]:
    """Return the tasks that were left out, as (model, metric, tasks, reason).

    Tasks of a model and metric that were left out for the same reason share one entry.
    """
    return [
        (model.model, tables.titles[one.metric], ", ".join(tasks), why)
        for model in findings.models
        for one in model.metrics
        for why, tasks in grouped(one.left_out, one.left_out.__getitem__).items()
    ]


def _frames(tables: LayerTables, findings: LayerFindings) -> dict[str, pd.DataFrame]:
    """Return the tables of the .csv files by name.

    `correlations` has one row per coefficient, `selection` one row per rule that chooses layers, and `curves` one row
    per model, task and layer.
    """
    correlations, choices, curves = [], [], []
    for model, result in zip(tables.models, findings.models, strict=True):
        key = {"model": model.name, "step": model.step}
        null = {"null_noise": result.null.noise, "null_walk": result.null.walk}
        for one in result.metrics:
            for c in one.correlations:
                row = key | {"metric": one.metric, "form": c.form, "coefficient": c.coefficient}
                row |= {**c.estimate._asdict(), "num_tasks": c.num_tasks}
                correlations.append(row | (null if c.coefficient == "distance_correlation" else {}))
        for choice in result.choices:
            row = key | {"metric": choice.metric, "rule": choice.rule, "is_chosen": choice.is_chosen}
            facts = vars(choice.result)
            row |= {name: facts[name] for name in ("num_tasks", "best_layer", "best_share", "middle_layer")}
            for name, estimate in facts.items():
                if isinstance(estimate, Estimate):
                    row |= {name: estimate.value, f"{name}_low": estimate.low, f"{name}_high": estimate.high}
            choices.append(row)
        scores = model.scores.stack()
        values = {"score": scores} | {key: table.stack().reindex(scores.index) for key, table in model.metrics.items()}
        curves.append(pd.DataFrame(values).reset_index(names=["task", "layer"]).assign(**key))
    frames = {"correlations": pd.DataFrame(correlations), "selection": pd.DataFrame(choices)}
    curve_table = pd.concat(curves, ignore_index=True)
    first = ["model", "step", "task", "layer"]
    return {**frames, "curves": curve_table[[*first, *(name for name in curve_table if name not in first)]]}
