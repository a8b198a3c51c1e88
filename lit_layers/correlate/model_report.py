"""What a correlation over models leaves: scatter plots, the page, the numbers."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from lit_layers import records
from lit_layers.correlate.model_findings import CONFOUNDED, Columns, Findings, Row, lowered, p_equation, p_text
from lit_layers.correlate.model_table import ModelTable
from lit_layers.durable import replace_file
from lit_layers.errors import InputError
from lit_layers.figures import scatter_plot
from lit_layers.figures.labels import MINUS, count, value
from lit_layers.figures.plane import Scatter
from lit_layers.figures.vega import write_charts
from lit_layers.functional import correlation
from lit_layers.functional.correlation import UndefinedError
from lit_layers.report.template import Feed, fill, placed


class Plot(NamedTuple):
    """A scatter plot, the name of its file, and its title and the sentence below that on the page."""

    name: str
    title: str
    content: Scatter
    note: str


def plots_of(table: ModelTable, findings: Findings) -> list[Plot]:
    """Returns the scatter plots of a table, the headline first."""
    columns, frame = Columns(table), table.frame
    x, y = table.title(table.metric), table.title(table.score)
    whole = np.ones(len(frame), bool)
    own = columns.values(table.metric), columns.values(table.score)
    against, note = f"{y} against {lowered(x)}", "Line: least squares, with the 95% band."
    found = [Plot("scatter", against, _scatter(table, findings, own, whole, x, y), note)]
    if table.corrected is not None:
        corrected = columns.values(table.corrected)
        there = ~np.isnan(corrected)
        title = table.title(table.corrected)
        content = _scatter(table, findings, (corrected[there], own[1][there]), there, title, y)
        note = "The same with the baseline of each model taken off: 0 is what chance gives."
        found.append(Plot("corrected", f"{y} against {lowered(title)}", content, note))
    confounder = _confounder(columns, own[0])
    if confounder is not None:
        at = columns.values(confounder)
        there = ~np.isnan(at)
        title, lower = columns.title(confounder), columns.inner(confounder)
        try:
            left = [correlation.residuals(side[there], [at[there]]) for side in own]
        except UndefinedError:
            left = None
        if left is not None:
            axes = f"{x}, residual", f"{y}, residual"
            note = f"What is left of both once {lower} is regressed out: the partial correlation."
            content = _scatter(table, findings, (left[0], left[1]), there, *axes, fitted=1)
            found.append(Plot("partial", f"{against}, beyond {lower}", content, note))
        content = _scatter(table, findings, (at[there], own[0][there]), there, title, x)
        note = f"The closer to the line, the less the metric tells beyond {lower}."
        found.append(Plot("confounder", f"{x} against {lower}", content, note))
    return found


def _confounder(columns: Columns, x: Any) -> str | None:
    """The baseline, else the width, if the metric follows it."""
    for name in (columns.table.baseline, "width", "k"):
        if name is None or not columns.has(name):
            continue
        at = columns.values(name)
        there = ~np.isnan(at)
        try:
            if correlation.pearson(x[there], at[there]).value ** 2 > CONFOUNDED:
                return name
        except UndefinedError:
            continue
    return None


def _scatter(
    table: ModelTable,
    findings: Findings,
    values: tuple[Any, Any],
    there: Any,
    x_title: str,
    y_title: str,
    *,
    fitted: int = 0,
) -> Scatter:
    frame: Any = table.frame[there]
    groups = _groups(frame[findings.group]) if findings.group else None
    return Scatter(
        x=values[0].tolist(),
        y=values[1].tolist(),
        names=frame["model"].tolist(),
        x_title=x_title,
        y_title=y_title,
        title=_headline(values[0], values[1], fitted),
        groups=groups,
        group_title=table.title(findings.group) if findings.group else "",
        hover=[_hover(table, row) for row in frame.to_dict("records")],
    )


def _headline(x: Any, y: Any, fitted: int) -> str:
    """What the line says; with the degrees of freedom that covariates took."""
    r = correlation.pearson(x, y)
    p = correlation.p_value(r.value, r.df - fitted)
    return f"r = {value(r.value)}, R² = {r.value**2:.2f}, {p_equation(p)}, {len(x)} models"


def _groups(column: Any) -> list[Any]:
    return [None if pd.isna(one) else one for one in column.tolist()]


def _hover(table: ModelTable, row: dict[str, Any]) -> list[str]:
    shown = [name for name in row if name != "model" and not pd.isna(row[name])]
    first = [name for name in (table.metric, table.score) if name in shown]
    return [f"{table.title(name)}: {_text(row[name])}" for name in [*first, *(n for n in shown if n not in first)]]


def _text(one: Any) -> str:
    if isinstance(one, bool | str):
        return str(one)
    if float(one).is_integer():
        return count(one) if abs(one) >= 1e6 else f"{one:g}"
    return value(one) if math.isfinite(one) else str(one)


# ------------------------------------------------------------------------------------------------ the page

_NARROW = 340  # pixels that a phone leaves a plot: few names have room


def render(table: ModelTable, findings: Findings, plots: Sequence[Plot]) -> str:
    """Returns the page: warnings, coefficients, scatter plots and the table of the models."""
    feed = Feed()
    return fill(
        "correlation.html.jinja",
        feed,
        blocks=placed(_blocks(plots), feed),
        title=f"{table.title(table.metric)} against {lowered(table.title(table.score))}",
        facts=_facts(table, findings),
        warnings=findings.warnings,
        left_out=findings.left_out,
        parts=_parts(table, findings),
        covariates=[(one.name, f"{one.r2_metric:.2f}", f"{one.r2_score:.2f}", one.n) for one in findings.covariates],
        metric_title=table.title(table.metric),
        score_title=table.title(table.score),
        influence=influence_text(findings),
        models=_models(table),
        notes=table.notes,
        has_tokens=False,
    )


def _blocks(plots: Sequence[Plot]) -> list[dict[str, Any]]:
    """A block a plot, drawn twice: with the names that have room on a wide page, and on a narrow one."""
    blocks = []
    for number, plot in enumerate(plots):
        wide = number == 0 or (number == len(plots) - 1 and number % 2 == 1)  # the last one of an odd number beside it
        sizes = {"wide-only": (1140 if wide else 560, 560 if number == 0 else 420), "narrow-only": (_NARROW, 400)}
        figures = [
            {"caption": "", "problem": "", "kind": kind}
            | {"chart": scatter_plot(plot.content, width=width, height=height)}
            for kind, (width, height) in sizes.items()
        ]
        note = f"{plot.content.title}. {plot.note}"
        choices = [{"text": "", "figures": figures}]
        blocks.append({"title": plot.title, "note": note, "wide": wide, "tall": True, "choices": choices})
    return blocks


def _facts(table: ModelTable, findings: Findings) -> list[tuple[str, str]]:
    r2 = next(row for row in findings.rows if row.name == "R²")
    best = [
        ("R²", f"{r2.value:.2f}"),
        ("p", p_text(r2.p)),
        ("Models", str(findings.n)),
        ("Left out", str(len(findings.left_out)) if findings.left_out else ""),
        ("Source", table.source),
    ]
    return [(name, text) for name, text in best if text]


def _parts(table: ModelTable, findings: Findings) -> list[tuple[str, list[dict[str, Any]]]]:
    """The tables of coefficients: heading and rows."""
    partial = [row for row in findings.rows if row.name.startswith("Partial")]
    whole = [row for row in findings.rows if row not in partial]
    parts = [(table.title(table.metric), whole)]
    if findings.corrected:
        parts.append((f"{table.title(str(table.corrected))}: the baseline taken off", findings.corrected))
    parts += [("With something else held fixed", partial), ("Within groups", findings.groups)]
    return [(title, [_row(row) for row in rows]) for title, rows in parts if rows]


def _row(row: Row) -> dict[str, Any]:
    interval = "" if row.low is None or row.high is None else f"{value(row.low)} to {value(row.high)}"
    return {
        "name": row.name,
        "note": row.note,
        "value": value(row.value),
        "interval": interval,
        "p": p_text(row.p),
        "n": row.n,
    }


def influence_text(findings: Findings) -> str:
    """Returns how far one model decides the coefficient, as a sentence; empty for too few models."""
    found = findings.influence
    if found is None:
        return ""
    if found["without"] is None:
        return f"Without {found['model']} the correlation is undefined: all others are alike."
    return (
        f"Leaving out one model moves r to between {value(found['lowest'])} and {value(found['highest'])}; "
        f"{found['model']} counts most: without it r = {value(found['without'])}."
    )


def _models(table: ModelTable) -> dict[str, Any]:
    """The columns and rows of the table of models, by falling score."""
    names = list(table.frame.columns)
    first = ["model", table.score, table.metric]
    order = first + [name for name in names if name not in first]
    frame: Any = table.frame[order]
    frame = frame.sort_values(table.score, ascending=False)
    rows = [[_cell(one) for one in row] for row in frame.itertuples(index=False)]
    return {"columns": [table.title(name) for name in order], "rows": rows}


def _cell(one: Any) -> str:
    if isinstance(one, str):
        return one
    if one is None or one != one:
        return ""
    number = float(one)
    return f"{number:.15g}" if number.is_integer() and abs(number) < 1e15 else f"{number:.4g}".replace("-", MINUS, 1)


# ------------------------------------------------------------------------------------------------ the files


def write(table: ModelTable, findings: Findings, folder: Path) -> list[Path]:
    """Writes correlation.json, correlation.csv (a row a coefficient), models.csv, correlation.html and the pictures.

    Returns their paths, the page first. Files of these names are replaced.

    Raises:
        InputError: where the folder cannot be written.
    """
    plots = plots_of(table, findings)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        page = folder / "correlation.html"
        replace_file(page, render(table, findings, plots))
        numbers = folder / "correlation.json"
        content = findings.to_dict() | {"source": table.source, "notes": table.notes}
        replace_file(numbers, json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False) + "\n")
    except OSError as error:
        raise InputError(f"cannot write to {folder}: {(error.strerror or str(error)).lower()}") from error
    rows = [
        {"of": of, **vars(row)}
        for of, part in ((table.metric, findings.rows), (table.metric, findings.groups))
        for row in part
    ]
    rows += [{"of": table.corrected, **vars(row)} for row in findings.corrected]
    records.export(pd.DataFrame(rows), folder / "correlation.csv")
    records.export(table.frame, folder / "models.csv")
    charts = {folder / f"{plot.name}.png": scatter_plot(plot.content, width=720, height=500) for plot in plots}
    pictures = write_charts(charts)
    return [page, *pictures, folder / "correlation.csv", numbers, folder / "models.csv"]
