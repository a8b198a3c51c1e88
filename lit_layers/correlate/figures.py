"""Which scatter plots a table of models has: the metric, without what explains it besides, and against that."""

import math
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from lit_layers.correlate.findings import CONFOUNDED, Columns, Findings, lowered, p_equation
from lit_layers.correlate.table import ModelTable
from lit_layers.figures.labels import count, value
from lit_layers.figures.scatter import Scatter
from lit_layers.functional import correlation
from lit_layers.functional.correlation import UndefinedError


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
