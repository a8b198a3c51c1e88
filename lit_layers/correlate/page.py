"""A correlation as one self-contained HTML page, in the look of a run's report."""

from collections.abc import Sequence
from typing import Any

from lit_layers.correlate.figures import Plot
from lit_layers.correlate.findings import Findings, Row, lowered, p_text
from lit_layers.correlate.table import ModelTable
from lit_layers.figures import scatter_plot
from lit_layers.figures.embed import Feed
from lit_layers.figures.labels import MINUS, value
from lit_layers.report.template import fill, placed

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
