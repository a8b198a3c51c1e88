"""Output of a correlation over models: its page, figures and numbers; and the tables that both kinds share."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from lit_layers import records
from lit_layers.correlate.findings import Findings, Row, confounders, correlate
from lit_layers.correlate.model_table import FEWEST, ModelTable, lowered, of_models
from lit_layers.correlate.run_models import RunModel
from lit_layers.errors import InputError
from lit_layers.figures import Panels, scatter_plot
from lit_layers.figures.axes import Axis
from lit_layers.figures.chart import Chart, Series
from lit_layers.figures.labels import MINUS, count, p_equation, p_text, tag_text, value
from lit_layers.figures.scatter import Scatter
from lit_layers.figures.theme import COLORS, rounded
from lit_layers.figures.vega import write_charts
from lit_layers.functional import correlation
from lit_layers.functional.correlation import UndefinedError
from lit_layers.metrics import look_up
from lit_layers.report.template import Block, Cells, Group, Table, block_of, figure, fill

HEADLINE = "Pearson r"


@dataclass(frozen=True, kw_only=True)
class OverTag:
    """The coefficients at each value of a tag, all over the same models: those that have the metric at every value."""

    tag: str
    values: Sequence[str | int | float]
    tables: Sequence[ModelTable]
    rows: Sequence[Sequence[Row]]  # of each value, of the metric
    corrected: Sequence[Sequence[Row]]  # of the metric with its baseline taken off, where it has one
    left_out: Mapping[str, str]

    def parts(self) -> list[tuple[str, Sequence[Sequence[Row]]]]:
        """The metric with its coefficients, and the corrected one with its own where there is one."""
        corrected = self.tables[0].corrected
        return [(self.tables[0].metric, self.rows), *([(corrected, self.corrected)] if corrected else [])]

    @property
    def frame(self) -> pd.DataFrame:
        """A row a value and coefficient: `tag`, `at`, `of`, `name`, `value`, `low`, `high`, `p` and `n`."""
        rows = []
        for of, parts in self.parts():
            for at, part in zip(self.values, parts, strict=True):
                facts = {"tag": self.tag, "at": at, "of": of}
                rows += [{**facts, **{k: v for k, v in vars(row).items() if k not in ("df", "note")}} for row in part]
        return pd.DataFrame(rows)

    def chart(self) -> Chart:
        """Pearson's r over the values, with its 95% interval over models: of the metric and of the corrected one."""
        numeric = all(isinstance(each, int | float) for each in self.values)
        x = list(self.values) if numeric else list(range(len(self.values)))
        labels = {place: str(each) for place, each in zip(x, self.values, strict=True)}
        table, series = self.tables[0], []
        for color, dash, (of, rows) in zip(COLORS, ("", "dash"), self.parts(), strict=False):
            headlines = [next((row for row in part if row.name == HEADLINE), None) for part in rows]
            if any(headlines):
                ends = {end: rounded([getattr(row, end, None) for row in headlines]) for end in ("low", "high")}
                values = rounded([row.value if row else None for row in headlines])
                look: dict[str, Any] = {"width": 2.0, "mark": "circle", "legend": True, "color": color, "dash": dash}
                series.append(Series(x=x, y=values, name=look_up(of).title, **ends, **look))
        axis = Axis(title=self.tag, labels=labels)
        title = f"Correlation with {lowered(table.title(table.score))} over {self.tag}, {len(table.frame)} models"
        return Chart(title=title, x=axis, y=Axis(title="r"), series=series, place="")


def over_tag(
    models: Sequence[RunModel],
    tag: str,
    values: Sequence[str | int | float],
    *,
    tags: Mapping[str, str | int | float],
    resamples: int,
    seed: int,
    **options: Any,
) -> OverTag:
    """Returns the coefficients at each of the values of a tag; `options` are those of `read_runs`.

    A model that lacks one of the values is left out of all, so that differences between values are not those of models.

    Raises:
        InputError: fewer than two values, or fewer than three models that have them all.
    """
    if len({*map(str, values)}) < 2:
        raise InputError(f"over: expected several values, as in {tag}=0.05,0.1,0.2, got {tag}={values[0]}")
    left_out: dict[str, str] = {}
    for each in values:
        for name, why in of_models(models, tags={**tags, tag: each}, **options).left_out.items():
            left_out.setdefault(name, f"{why} ({tag_text({tag: each})})")
    complete = [model for model in models if model.name not in left_out]
    if len(complete) < FEWEST:
        first = "; ".join(f"{name}: {why}" for name, why in list(left_out.items())[:3])
        raise InputError(
            f"over: expected at least {FEWEST} models with every value of {tag}, got {len(complete)} ({first})"
        )
    tables = [of_models(complete, tags={**tags, tag: each}, **options) for each in values]
    coefficients = [_correlated(table, resamples, seed) for table in tables]
    rows, corrected = [each[0] for each in coefficients], [each[1] for each in coefficients]
    return OverTag(tag=tag, values=values, tables=tables, rows=rows, corrected=corrected, left_out=left_out)


def _correlated(table: ModelTable, resamples: int, seed: int) -> tuple[list[Row], list[Row]]:
    """The coefficients of the metric and of the corrected one; none where the metric is the same for all models."""
    if len(set(table.values(table.metric).tolist())) < 2:
        return [], []
    findings = correlate(table, resamples=resamples, seed=seed)
    return [row for row in findings.rows if not row.name.startswith("Partial")], findings.corrected


_NARROW = 340  # pixels that a phone leaves a plot: few names have room


def interval_text(low: float | None, high: float | None) -> str:
    """Returns `0.12 to 0.34`, or an empty string where there is no interval."""
    return "" if low is None or high is None else f"{value(low)} to {value(high)}"


def write_files(
    folder: Path,
    name: str,
    content: Mapping[str, Any],
    frames: Mapping[str, pd.DataFrame],
    charts: Mapping[str, Chart | Panels],
    page: Callable[[], str],
) -> list[Path]:
    """Writes NAME.json, a .csv a table, a .png, .svg and .pdf a chart, and the page NAME.html; returns their paths.

    The page comes first.

    Raises:
        InputError: where the folder cannot be written.
    """
    numbers = json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    tables = {f"{each}.csv": frame for each, frame in frames.items()}
    files = records.write_files(folder, {f"{name}.json": numbers, **tables})
    pictures = write_charts({folder / each: chart for each, chart in charts.items()})  # may fail: after the numbers
    return [*records.write_files(folder, {f"{name}.html": page()}), *pictures, *files]


# ------------------------------------------------------------------------------------------------ over models


class Plot(NamedTuple):
    """A scatter plot, the name of its file, and its title and the sentence below that on the page."""

    name: str
    title: str
    content: Scatter
    note: str


def write_models(table: ModelTable, findings: Findings, folder: Path, *, over: OverTag | None = None) -> list[Path]:
    """Writes correlation.html, .json and .csv (a row a coefficient), models.csv and the pictures; over.csv of `over`.

    Returns their paths, the page first. Files of these names are replaced.

    Raises:
        InputError: where the folder cannot be written.
    """
    plots = plots_of(table, findings)
    rows = {"whole": findings.rows + findings.groups, "corrected": findings.corrected}
    of = {"whole": table.metric, "corrected": table.corrected}
    frames = {
        "correlation": pd.DataFrame([{"of": of[part], **vars(row)} for part in rows for row in rows[part]]),
        "models": table.frame,
    }
    content = findings.to_dict() | {"source": table.source, "notes": table.notes}
    charts = {plot.name: scatter_plot(plot.content, width=720, height=500) for plot in plots}
    if over is not None:
        frames["over"], charts["over"] = over.frame, over.chart()
    page = partial(render_models, table, findings, plots, over)
    return write_files(folder, "correlation", content, frames, charts, page)


def render_models(table: ModelTable, findings: Findings, plots: Sequence[Plot], over: OverTag | None = None) -> str:
    """Returns the page: warnings, coefficients, scatter plots and the table of the models."""
    beside = []
    if over is not None:
        note = "Pearson's r at each value, over the same models, with 95% intervals from resampling them."
        beside = [block_of(f"Correlation over {over.tag}", [("", over.chart())], note)]
    return fill(
        "correlation.html.jinja",
        table=table,
        findings=findings,
        title=f"{table.title(table.metric)} against {lowered(table.title(table.score))}",
        r2=next(row for row in findings.rows if row.name == "R²"),
        p_text=p_text,
        blocks=[*_plot_blocks(plots), *beside],
        over=None if over is None else over_table(over),
        coefficients=coefficient_table(table, findings),
        covariates=covariate_table(findings),
        influence=influence_text(findings),
        models=_models(table),
    )


def coefficient_table(table: ModelTable, findings: Findings) -> Table:
    """Returns all coefficients: whole, of the corrected metric, with something held fixed, and within groups."""
    partial = [row for row in findings.rows if row.name.startswith("Partial")]
    parts = {
        table.title(table.metric): [row for row in findings.rows if row not in partial],
        f"{table.title(str(table.corrected))}: the baseline taken off": findings.corrected,
        "With something else held fixed": partial,
        "Within groups": findings.groups,
    }
    groups = [Group(title, "", [_cells(row) for row in rows]) for title, rows in parts.items() if rows]
    return Table(("Coefficient", "Value, 95% interval", "p", "Models"), groups)


def _cells(row: Row) -> Cells:
    number = value(row.value), interval_text(row.low, row.high)
    return Cells([(row.name, row.note), number, (p_text(row.p), ""), (str(row.n), "")])


def covariate_table(findings: Findings) -> Table | None:
    """Returns what other columns explain of the metric and the score; None where none is known."""
    if not findings.covariates:
        return None
    cells = []
    for one in findings.covariates:
        shares = ((one.r2_metric, one.r_metric), (one.r2_score, one.r_score))
        cells.append(Cells([(one.name, ""), *((f"{r2:.2f}", f"r = {value(r)}") for r2, r in shares), (str(one.n), "")]))
    return Table(("", "R² of the metric", "R² of the score", "Models"), [Group("", "", cells)])


def over_table(over: OverTag) -> Table:
    """Returns the coefficients of the metric, and of the corrected one, at each value of a tag."""
    names, groups = list(dict.fromkeys(row.name for part in over.rows for row in part)), []
    for of, parts in over.parts():
        rows = []
        for at, part in zip(over.values, parts, strict=True):
            by_name = {row.name: row for row in part}
            in_order = [by_name.get(name) for name in names]
            cells = [(value(row.value), interval_text(row.low, row.high)) if row else ("", "") for row in in_order]
            rows.append(Cells([(f"{over.tag} = {at}", ""), *cells]))
        groups.append(Group(look_up(of).title, "", rows))
    return Table((over.tag, *names), groups)


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


def _models(table: ModelTable) -> Table:
    """All that is known of the models, by falling score."""
    first = ["model", table.score, table.metric]
    order = first + [name for name in table.frame.columns if name not in first]
    frame: Any = table.frame[order]
    sorted_rows = frame.sort_values(table.score, ascending=False).itertuples(index=False)
    rows = [Cells([(_cell(cell), "") for cell in row]) for row in sorted_rows]
    return Table([table.title(name) for name in order], [Group("", "", rows)])


def _cell(cell: Any) -> str:
    if isinstance(cell, str) or pd.isna(cell):
        return cell if isinstance(cell, str) else ""
    number = float(cell)
    return (count(number) if number.is_integer() else f"{number:.4g}").replace("-", MINUS, 1)


def plots_of(table: ModelTable, findings: Findings) -> list[Plot]:
    """Returns the scatter plots of a table, the headline first."""
    x, y = table.title(table.metric), table.title(table.score)
    columns = {name: table.values(name) for name in (table.metric, table.score)}
    metric, score = columns.values()
    against = f"{y} against {lowered(x)}"

    def plot(name: str, title: str, note: str, values: tuple[Any, Any], axes: tuple[str, str], fitted: int = 0) -> Plot:
        """Of values (models,), those that are not NaN."""
        there = ~np.isnan(values[0]) & ~np.isnan(values[1])
        return Plot(name, title, _scatter(table, findings, values, there, axes, fitted), note)

    plots = [plot("scatter", against, "Line: least squares, with the 95% band.", (metric, score), (x, y))]
    if table.corrected is not None:
        title = table.title(table.corrected)
        note = "The same with the baseline of each model taken off: 0 is what chance gives."
        axes = (title, y)
        plots.append(
            plot("corrected", f"{y} against {lowered(title)}", note, (table.values(table.corrected), score), axes)
        )
    confounder = next(iter(confounders(table)), None)
    if confounder is not None:
        at = table.values(confounder)
        there, title = ~np.isnan(at), table.covariate_title(confounder)
        left = [np.full(len(at), math.nan), np.full(len(at), math.nan)]
        try:
            for rest, column in zip(left, (metric, score), strict=True):
                rest[there] = correlation.residuals(column[there], [at[there]])
        except UndefinedError:
            left = None
        if left is not None:
            note = f"What is left of both once {lowered(title)} is regressed out: the partial correlation."
            axes = (f"{x}, residual", f"{y}, residual")
            plots.append(plot("partial", f"{against}, beyond {lowered(title)}", note, (left[0], left[1]), axes, 1))
        note = f"The closer to the line, the less the metric tells beyond {lowered(title)}."
        plots.append(plot("confounder", f"{x} against {lowered(title)}", note, (at, metric), (title, x)))
    return plots


def _scatter(
    table: ModelTable,
    findings: Findings,
    values: tuple[Any, Any],
    there: Any,
    axes: tuple[str, str],
    fitted: int,
) -> Scatter:
    """A plot of the models that are there; `fitted` degrees of freedom went to covariates."""
    frame: Any = table.frame[there]
    groups = None
    if findings.group:
        groups = [None if pd.isna(label) else label for label in frame[findings.group].tolist()]
    x, y = (side[there] for side in values)
    r = correlation.pearson(x, y)
    p = p_equation(correlation.p_value(r.value, r.df - fitted))
    return Scatter(
        x=x.tolist(),
        y=y.tolist(),
        names=frame["model"].tolist(),
        x_title=axes[0],
        y_title=axes[1],
        title=f"r = {value(r.value)}, R² = {r.value**2:.2f}, {p}, {len(x)} models",
        groups=groups,
        group_title=table.title(findings.group) if findings.group else "",
        hover=[_hover(table, row) for row in frame.to_dict("records")],
    )


def _hover(table: ModelTable, row: dict[str, Any]) -> list[str]:
    """What touching a point shows: the metric and the score first."""
    shown = {name: cell for name, cell in row.items() if name != "model" and not pd.isna(cell)}
    order = dict.fromkeys(name for name in (table.metric, table.score, *shown) if name in shown)
    return [f"{table.title(name)}: {_hover_text(shown[name])}" for name in order]


def _hover_text(cell: Any) -> str:
    if isinstance(cell, bool | str):
        return str(cell)
    if float(cell).is_integer():
        return count(cell) if abs(cell) >= 1e6 else f"{cell:g}"
    return value(cell) if math.isfinite(cell) else str(cell)


def _plot_blocks(plots: Sequence[Plot]) -> list[Block]:
    """A block a plot, drawn twice: with the names that have room on a wide page, and on a narrow one."""
    blocks = []
    for number, plot in enumerate(plots):
        wide = number == 0 or (number == len(plots) - 1 and number % 2 == 1)  # the last one of an odd number beside it
        sizes = {"wide-only": (1140 if wide else 560, 560 if number == 0 else 420), "narrow-only": (_NARROW, 400)}
        charts = {kind: scatter_plot(plot.content, width=size[0], height=size[1]) for kind, size in sizes.items()}
        figures = [figure(chart, kind=kind) for kind, chart in charts.items()]
        look = {"title": plot.title, "note": f"{plot.content.title}. {plot.note}", "wide": wide, "tall": True}
        blocks.append(Block(look, choices=[{"text": "", "figures": figures}]))
    return blocks
