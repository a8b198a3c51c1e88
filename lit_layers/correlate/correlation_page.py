"""Output of a correlation over models: its page, figures and numbers; and what both kinds write."""

import json
import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from lit_layers import records
from lit_layers.correlate.findings import Findings, Row, confounders
from lit_layers.correlate.model_table import ModelTable
from lit_layers.figures.chart import Chart, Panels
from lit_layers.figures.labels import MINUS, count, in_sentence, p_equation, p_text, value
from lit_layers.figures.scatter import Scatter, scatter_plot
from lit_layers.figures.vega import write_charts
from lit_layers.functional import correlation
from lit_layers.functional.correlation import UndefinedError
from lit_layers.functional.layer_selection import Estimate
from lit_layers.report.template import Cells, Group, Table, block_of, fill


def write(
    folder: Path,
    name: str,
    content: Mapping[str, Any],
    page: str,
    frames: Mapping[str, pd.DataFrame],
    charts: Mapping[str, Chart | Panels],
) -> list[Path]:
    """Writes NAME.json, a .csv a table, a .png, .svg and .pdf a chart, and the page NAME.html; returns their paths.

    The page comes first.
    """
    numbers = json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    tables = {f"{each}.csv": frame for each, frame in frames.items()}
    files = records.write_files(folder, {f"{name}.html": page, f"{name}.json": numbers, **tables})
    pictures = write_charts({folder / each: chart for each, chart in charts.items()})  # may fail: after the numbers
    return [files[0], *pictures, *files[1:]]


def write_models(table: ModelTable, findings: Findings, folder: Path) -> list[Path]:
    """Write correlation.html, .json and .csv (a row a coefficient), models.csv and the pictures.

    Return their paths, the page first. Files of these names are replaced.

    Raises:
        InputError: where the folder cannot be written.
    """
    plots = plots_of(table, findings)
    parts = {table.metric: findings.rows + findings.groups, table.corrected: findings.corrected}
    rows = pd.DataFrame([{"of": of, **vars(row)} for of, rows in parts.items() for row in rows])
    frames = {"correlation": rows, "models": table.frame}
    charts = {name: scatter_plot(plot, width=720, height=500) for name, (_, plot, _) in plots.items()}
    blocks = []
    for number, (title, plot, note) in enumerate(plots.values()):
        wide = number == 0 or (number == len(plots) - 1 and number % 2 == 1)  # the last one of an odd number beside it
        chart = scatter_plot(plot, width=1140 if wide else 560, height=420 if number else 560)
        blocks.append(block_of(title, [("", chart)], f"{plot.title}. {note}", wide=wide, tall=True))
    page = fill(
        "correlation.html.jinja",
        table=table,
        findings=findings,
        title=f"{table.title(table.metric)} against {in_sentence(table.title(table.score))}",
        r2=next(row for row in findings.rows if row.name == "R²"),
        p_text=p_text,
        blocks=blocks,
        coefficients=coefficient_table(table, findings),
        covariates=covariate_table(findings),
        influence=influence_text(findings),
    )
    content = asdict(findings) | {"source": table.source, "notes": table.notes}
    return write(folder, "correlation", content, page, frames, charts)


def coefficient_table(table: ModelTable, findings: Findings) -> Table:
    """Returns all coefficients: whole, of the corrected metric, with something held fixed, and within groups."""
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


def number_cell(row: Row | Estimate | None) -> tuple[str, str]:
    """A number and its interval, as a cell."""
    if row is None:
        return "", ""
    return value(row.value), "" if row.low is None or row.high is None else f"{value(row.low)} to {value(row.high)}"


def covariate_table(findings: Findings) -> Table | None:
    """Returns what other columns explain of the metric and the score; None where none is known."""
    if not findings.covariates:
        return None
    cells = []
    for one in findings.covariates:
        shares = ((one.r2_metric, one.r_metric), (one.r2_score, one.r_score))
        cells.append(Cells([(one.name, ""), *((f"{r2:.2f}", f"r = {value(r)}") for r2, r in shares), (str(one.n), "")]))
    return Table(("", "R² of the metric", "R² of the score", "Models"), [Group("", "", cells)])


def influence_text(findings: Findings) -> str:
    """Returns how far one model decides the coefficient, as a sentence; empty for too few models."""
    influence = findings.influence
    if influence is None:
        return ""
    if influence["without"] is None:
        return f"Without {influence['model']} the correlation is undefined: all others are alike."
    return (
        f"Leaving out one model moves r to between {value(influence['lowest'])} and {value(influence['highest'])}; "
        f"{influence['model']} counts most: without it r = {value(influence['without'])}."
    )


def _cell(cell: Any) -> str:
    if isinstance(cell, bool | str) or pd.isna(cell):
        return "" if pd.isna(cell) else str(cell)
    number = float(cell)
    return (count(number) if number.is_integer() else f"{number:.4g}").replace("-", MINUS, 1)


def plots_of(table: ModelTable, findings: Findings) -> dict[str, tuple[str, Scatter, str]]:
    """Returns the scatter plots of a table by the names of their files, the headline first.

    Each has a title and a sentence that stands below it on the page.
    """
    x, y = table.title(table.metric), table.title(table.score)
    metric, score = table.values(table.metric), table.values(table.score)
    against = f"{y} against {in_sentence(x)}"
    plots = {
        "scatter": (against, _scatter(table, findings, metric, score, x, y), "Line: least squares, with the 95% band.")
    }
    if table.corrected is not None:
        title, values = table.title(table.corrected), table.values(table.corrected)
        note = "The same with the baseline of each model taken off: 0 is what chance gives."
        plots["corrected"] = (
            f"{y} against {in_sentence(title)}",
            _scatter(table, findings, values, score, title, y),
            note,
        )
    for confounder in list(confounders(table))[:1]:
        at, title = table.values(confounder), table.covariate_title(confounder)
        there, left = ~np.isnan(at), np.full((2, len(at)), math.nan)
        with suppress(UndefinedError):
            for rest, column in zip(left, (metric, score), strict=True):
                rest[there] = correlation.residuals(column[there], [at[there]])
            note = f"What is left of both once {in_sentence(title)} is regressed out: the partial correlation."
            plot = _scatter(table, findings, left[0], left[1], f"{x}, residual", f"{y}, residual", fitted=1)
            plots["partial"] = f"{against}, beyond {in_sentence(title)}", plot, note
        note = f"The closer to the line, the less the metric tells beyond {in_sentence(title)}."
        plot = _scatter(table, findings, at, metric, title, x)
        plots["confounder"] = f"{x} against {in_sentence(title)}", plot, note
    return plots


def _scatter(
    table: ModelTable, findings: Findings, x: Any, y: Any, x_title: str, y_title: str, *, fitted: int = 0
) -> Scatter:
    """A plot of the models that have both values; `fitted` degrees of freedom went to covariates."""
    there = ~np.isnan(x) & ~np.isnan(y)
    frame: Any = table.frame[there]
    r = correlation.pearson(x[there], y[there])
    p = p_equation(correlation.p_value(r.value, r.df - fitted))
    group = findings.group
    order = dict.fromkeys([table.metric, table.score, *frame.columns.drop("model")])
    hover = [
        [f"{table.title(name)}: {_cell(row[name])}" for name in order if not pd.isna(row[name])]
        for row in frame.to_dict("records")
    ]
    return Scatter(
        x=x[there].tolist(),
        y=y[there].tolist(),
        names=frame["model"].tolist(),
        x_title=x_title,
        y_title=y_title,
        title=f"r = {value(r.value)}, R² = {r.value**2:.2f}, {p}, {len(frame)} models",
        groups=[None if pd.isna(label) else label for label in frame[group].tolist()] if group else None,
        group_title=table.title(group) if group else "",
        hover=hover,
    )
