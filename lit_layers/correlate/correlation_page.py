"""What a correlation leaves, over models or over layers: one page, its figures as pictures, and the numbers."""

import base64
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from lit_layers import records
from lit_layers.correlate.findings import (
    Choice,
    Findings,
    LayerFindings,
    MetricFindings,
    ModelFindings,
    Row,
    confounders,
    p_equation,
    p_text,
)
from lit_layers.correlate.layer_tables import LayerTables, ModelTables
from lit_layers.correlate.model_table import ModelTable, lowered
from lit_layers.durable import replace_file
from lit_layers.errors import InputError
from lit_layers.figures import Panels, scatter_plot
from lit_layers.figures.chart import Chart
from lit_layers.figures.labels import MINUS, count, value
from lit_layers.figures.models import DepthCurve, DepthPanel, IntervalRow, Mark, depth_curves, interval_rows
from lit_layers.figures.plane import Scatter
from lit_layers.figures.vega import write_charts
from lit_layers.functional import correlation
from lit_layers.functional.correlation import UndefinedError
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
_NARROW = 340  # pixels that a phone leaves a plot: few names have room


class Cells(NamedTuple):
    """A row of a table: each cell is a text and what stands small beside it; a strong row is one to look at."""

    cells: Sequence[tuple[str, str]]
    strong: bool = False


class Group(NamedTuple):
    """The rows of a table below one heading, with a note beside that."""

    heading: str
    note: str
    rows: Sequence[Cells]


class Table(NamedTuple):
    """A table as the page and the terminal show it; all columns but the first hold numbers."""

    columns: Sequence[str]
    groups: Sequence[Group]


def interval_text(low: float | None, high: float | None) -> str:
    """Returns `0.12 to 0.34`, or an empty string where there is no interval."""
    return "" if low is None or high is None else f"{value(low)} to {value(high)}"


def _write(
    folder: Path,
    name: str,
    content: Mapping[str, Any],
    frames: Mapping[str, pd.DataFrame],
    charts: Mapping[str, Chart | Panels],
    page: Callable[[Mapping[str, Path]], str],
) -> list[Path]:
    """Writes NAME.json, a .csv a table, a .png a chart, and the page NAME.html; returns their paths, the page first.

    Raises:
        InputError: where the folder cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        numbers = json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False)
        replace_file(folder / f"{name}.json", numbers + "\n")
        for each, frame in frames.items():
            records.export(frame, folder / f"{each}.csv")
        pictures = write_charts({folder / f"{each}.png": chart for each, chart in charts.items()})  # may fail: last
        replace_file(folder / f"{name}.html", page({path.stem: path for path in pictures}))
    except OSError as error:
        raise InputError(f"cannot write to {folder}: {(error.strerror or str(error)).lower()}") from error
    files = [f"{name}.json", *(f"{each}.csv" for each in frames)]
    return [folder / f"{name}.html", *pictures, *(folder / file for file in files)]


def _block(title: str, note: str, charts: Mapping[str, Any], **look: Any) -> dict[str, Any]:
    """A block of the page with a chart for each choice; one alone needs no name."""
    several = len(charts) > 1
    choices = [
        {"text": text if several else "", "figures": [{"caption": "", "problem": "", "chart": chart}]}
        for text, chart in charts.items()
    ]
    return {"title": title, "note": note, "choices": choices, **look}


# ------------------------------------------------------------------------------------------------ over models


class Plot(NamedTuple):
    """A scatter plot, the name of its file, and its title and the sentence below that on the page."""

    name: str
    title: str
    content: Scatter
    note: str


def write_models(table: ModelTable, findings: Findings, folder: Path) -> list[Path]:
    """Writes correlation.html, .json and .csv (a row a coefficient), models.csv and the pictures.

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
    return _write(folder, "correlation", content, frames, charts, lambda _: render_models(table, findings, plots))


def render_models(table: ModelTable, findings: Findings, plots: Sequence[Plot]) -> str:
    """Returns the page: warnings, coefficients, scatter plots and the table of the models."""
    feed = Feed()
    return fill(
        "correlation.html.jinja",
        feed,
        table=table,
        findings=findings,
        title=f"{table.title(table.metric)} against {lowered(table.title(table.score))}",
        r2=next(row for row in findings.rows if row.name == "R²"),
        p_text=p_text,
        blocks=placed(_plot_blocks(plots), feed),
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
    rows = [(one.name, f"{one.r2_metric:.2f}", f"{one.r2_score:.2f}", str(one.n)) for one in findings.covariates]
    cells = [Cells([(text, "") for text in row]) for row in rows]
    return Table(("", "R² of the metric", "R² of the score", "Models"), [Group("", "", cells)])


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
    return f"{number:.15g}" if number.is_integer() and abs(number) < 1e15 else f"{number:.4g}".replace("-", MINUS, 1)


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


def _plot_blocks(plots: Sequence[Plot]) -> list[dict[str, Any]]:
    """A block a plot, drawn twice: with the names that have room on a wide page, and on a narrow one."""
    blocks = []
    for number, plot in enumerate(plots):
        wide = number == 0 or (number == len(plots) - 1 and number % 2 == 1)  # the last one of an odd number beside it
        sizes = {"wide-only": (1140 if wide else 560, 560 if number == 0 else 420), "narrow-only": (_NARROW, 400)}
        charts = {kind: scatter_plot(plot.content, width=size[0], height=size[1]) for kind, size in sizes.items()}
        figures = [{"caption": "", "problem": "", "kind": kind, "chart": chart} for kind, chart in charts.items()]
        block = {"title": plot.title, "note": f"{plot.content.title}. {plot.note}", "wide": wide, "tall": True}
        blocks.append({**block, "choices": [{"text": "", "figures": figures}]})
    return blocks


# ------------------------------------------------------------------------------------------------ over layers


def write_layers(tables: LayerTables, findings: LayerFindings, folder: Path) -> list[Path]:
    """Writes layers.html, layers.json, correlations.csv, selection.csv, curves.csv and the pictures into a folder.

    Returns their paths, the page first. Files of these names are replaced.

    Raises:
        InputError: where the folder cannot be written.
    """
    content = findings.to_dict() | {"source": tables.source, "states": tables.states, "titles": tables.titles}
    panels = {"depth": Panels(title="Scores and metrics over depth", charts=[*map(depth_curves, depth_panels(tables))])}
    charts = interval_rows(
        correlation_rows(tables, findings), [*COEFFICIENT_TITLES.values()], kinds=[*FORM_TITLES.values(), *NULLS]
    )
    title = f"Metrics against {tables.score_title.lower()} over layers, 95% intervals over tasks"
    panels["correlations"] = Panels(title=title, charts=charts)
    above = [f"{tables.score_title} above that of the last layer"]
    charts = interval_rows(choice_rows(tables, findings), above, kinds=CHOICES)
    title = "Layers chosen without labels, 95% intervals over tasks"
    panels["selection"] = Panels(title=title, charts=charts, width=460)
    for model, found in zip(tables.models, findings.models, strict=True):
        charts = [scatter_plot(content, width=380, height=360) for content in scatters(tables, found, model).values()]
        name = re.sub(r"[^\w.-]+", "_", model.name)
        panels[f"scatter_{name}"] = Panels(title=f"{heading(found)}: means over tasks, a point a layer", charts=charts)
    return _write(
        folder,
        "layers",
        content,
        _frames(tables, findings),
        panels,
        lambda files: render_layers(tables, findings, files),
    )


def render_layers(tables: LayerTables, findings: LayerFindings, pictures: Mapping[str, Path]) -> str:
    """Returns the page: what is left out, figures, coefficients with their null, and the choices of layers."""
    feed = Feed()
    panels = depth_panels(tables)
    depth = [
        _block(panel.title, "", {"": depth_curves(panel)}, wide=number == 0 and len(panels) % 2 == 1)
        for number, panel in enumerate(panels)
    ]
    blocks = []
    for model, found in zip(tables.models, findings.models, strict=True):
        charts = {
            f"{tables.titles[key]}: {content.title}": scatter_plot(content, width=560, height=420)
            for key, content in scatters(tables, found, model).items()
        }
        note = "A point a layer, joined in their order; metric and score are averaged over the same tasks."
        note += f" {next(iter(charts))}." if len(charts) == 1 else ""
        blocks.append(_block(heading(found), note, charts, wide=True))
    shown = {name: pictures[name] for name in ("correlations", "selection") if name in pictures}
    return fill(
        "layers.html.jinja",
        feed,
        tables=tables,
        findings=findings,
        title=f"{', '.join(tables.titles.values())} against {tables.score_title.lower()} over layers",
        num_tasks=len({task for model in tables.models for task in model.scores.index}),
        missing=missing_tasks(tables, findings),
        depth=placed(depth, feed),
        scatters=placed(blocks, feed),
        coefficients=correlation_table(tables, findings),
        choices=choice_table(tables, findings),
        pictures={name: base64.b64encode(path.read_bytes()).decode() for name, path in shown.items()},
    )


def depth_panels(tables: LayerTables) -> list[DepthPanel]:
    """Returns the scores, then each metric, averaged over the tasks that a model has of it, over depth."""

    def curve(name: str, table: pd.DataFrame) -> DepthCurve:
        return DepthCurve(name, np.ascontiguousarray(table).mean(0).tolist())

    panels = [DepthPanel(f"{tables.score_title}, mean over tasks", [curve(m.name, m.scores) for m in tables.models])]
    for key, title in tables.titles.items():
        having = [model for model in tables.models if key in model.metrics]
        panels.append(DepthPanel(title, [curve(model.name, model.metrics[key]) for model in having]))
    return panels


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


def correlation_rows(tables: LayerTables, findings: LayerFindings) -> list[IntervalRow]:
    """Returns a row a metric of each model, with both forms of each coefficient and the null of the first."""
    rows = []
    for model in findings.models:
        rows.append(IntervalRow(heading(model)))
        null = [Mark(NULLS[0], model.null.noise), Mark(NULLS[1], model.null.walk)]
        for one in model.metrics:
            panels = [
                [Mark(FORM_TITLES[c.form], *c.estimate) for c in one.correlations if c.coefficient == name]
                for name in COEFFICIENTS
            ]
            panels[COEFFICIENTS.index("distance_correlation")] += null
            rows.append(IntervalRow(tables.titles[one.metric], panels, f"{len(one.tasks)} tasks"))
    return rows


def choice_rows(tables: LayerTables, findings: LayerFindings) -> list[IntervalRow]:
    """Returns a row a way of choosing: what it scores above the last layer, and what else does."""
    rows = []
    for model in findings.models:
        rows.append(IntervalRow(heading(model)))
        for choice in model.choices:
            found, last = choice.result, choice.result.last.value
            others = zip(CHOICES[2:], (found.middle, found.best, found.oracle), strict=True)
            marks = [Mark(CHOICES[1 if choice.is_chosen else 0], *found.minus_last)]
            marks += [Mark(kind, estimate.value - last) for kind, estimate in others]
            text = ": ".join(filter(None, [tables.titles.get(choice.metric or ""), rule_text(choice, tables.titles)]))
            note = f"{value(found.score.value)}, last {value(last)}, {found.num_tasks} tasks"
            rows.append(IntervalRow(text, [marks], note))
    return rows


def heading(model: ModelFindings) -> str:
    """Returns what a model is called above its rows."""
    return f"{model.model}{f', step {model.step:,}' if model.step is not None else ''}, {model.num_layers} layers"


def rule_text(choice: Choice, titles: Mapping[str, str]) -> str:
    """Returns what a way of choosing is called: `Smallest prompt entropy`."""
    if choice.rule == "cross-fitted":
        return "Direction chosen on half of the tasks" if choice.metric else "Metric and direction chosen on half"
    direction, _, key = choice.rule.partition(" ")
    text = "Smallest" if direction == "min" else "Largest"
    return f"{text} {lowered(titles[key])}, picked on other models" if key else f"{text} value"


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
                found = {c.coefficient: c for c in one.correlations if c.form == form}
                cells = [_estimate(found[name].estimate) for name in COEFFICIENTS if found]
                num_tasks = {c.num_tasks for c in found.values()}
                rows += [Cells([(tables.titles[one.metric], form), *cells, (f"{n}", "")]) for n in num_tasks]
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
            found, name = choice.result, tables.titles.get(choice.metric or "", "All metrics")
            share = "" if found.best_share is None else f", best in {found.best_share:.0%} of resamples"
            shares = shares_text(choice, tables.titles)
            cells = [
                (f"{name}: {lowered(rule_text(choice, tables.titles))}", shares),
                *(_estimate(each) for each in (found.score, found.minus_last, found.minus_best)),
                (value(found.last.value), ""),
                (value(found.middle.value), f"layer {found.middle_layer}"),
                (value(found.random.value), ""),
                (value(found.best.value), f"layer {found.best_layer}{share}"),
                (value(found.oracle.value), ""),
                (str(found.num_tasks), ""),
            ]
            rows.append(Cells(cells, choice.is_chosen))
        groups.append(Group(heading(model), "", rows))
    return Table((*columns, "Best single", "Best per task", "Tasks"), groups)


def _estimate(estimate: Estimate) -> tuple[str, str]:
    return value(estimate.value), interval_text(estimate.low, estimate.high)


def missing_tasks(tables: LayerTables, findings: LayerFindings) -> list[tuple[str, str, str, str]]:
    """Returns the tasks that are left out: model, metric, tasks and reason, one line a reason."""

    def lines(model: ModelFindings, one: MetricFindings) -> list[tuple[str, str, str, str]]:
        reasons: dict[str, list[str]] = {}
        for task, why in one.left_out.items():
            reasons.setdefault(why, []).append(task)
        return [(model.model, tables.titles[one.metric], ", ".join(tasks), why) for why, tasks in reasons.items()]

    return [line for model in findings.models for one in model.metrics for line in lines(model, one)]


def _frames(tables: LayerTables, findings: LayerFindings) -> dict[str, pd.DataFrame]:
    """A row a coefficient, a row a way of choosing, and a row a model, task and layer."""
    correlations, choices, curves = [], [], []
    for model, found in zip(tables.models, findings.models, strict=True):
        place = {"model": model.name, "step": model.step}
        null = {"null_noise": found.null.noise, "null_walk": found.null.walk}
        for one in found.metrics:
            for c in one.correlations:
                row = place | {"metric": one.metric, "form": c.form, "coefficient": c.coefficient}
                row |= {**c.estimate._asdict(), "num_tasks": c.num_tasks}
                correlations.append(row | (null if c.coefficient == "distance_correlation" else {}))
        for choice in found.choices:
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
