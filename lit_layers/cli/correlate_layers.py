"""`lit-layers correlate --metrics ... --scores ...`: metrics against task scores over the layers of each model."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from lit_layers.errors import InputError

if TYPE_CHECKING:
    from rich.table import Table

    from lit_layers.correlate import LayerFindings, LayerTables
    from lit_layers.functional.layer_selection import Estimate


@dataclass(frozen=True, kw_only=True)
class OverLayers:
    """Over layers.

    Args:
        metrics: METRIC,... each NAME or ANALYSIS/NAME, with [tag=value,...] for a variant
        scores: mteb; or FILE: model, task, layer, score
        metrics_file: FILE of the metrics: model, task, layer, a column each
        with_layer_0: the embedding, too, not only layers 1 to the last
    """

    metrics: list[str] | str | None = None
    scores: str | None = None
    metrics_file: Path | None = None
    with_layer_0: bool = False


def run(models: list[Path], options: OverLayers, *, step: int | None, resamples: int, seed: int, out: Path) -> int:
    """Prints coefficients and choices of layers, writes the page, the tables and the pictures, and returns 0."""
    if not options.metrics or not options.scores:
        name = "scores" if options.metrics else "metrics"
        raise InputError(f"{name}: expected --{name}; see `lit-layers correlate --help`")
    if files := [path for path in models if path.suffix in (".csv", ".parquet")]:
        raise InputError(f"models: expected run folders, got {files[0]}: give files as --scores and --metrics-file")
    from lit_layers.correlate import correlate_layers, read_layers
    from lit_layers.correlate.layer_report import write
    from lit_layers.correlate.layer_sources import split

    tables = read_layers(
        models,
        metrics=split(options.metrics if isinstance(options.metrics, str) else ",".join(options.metrics)),
        scores=options.scores,
        metrics_file=options.metrics_file,
        step=step,
        with_layer_0=options.with_layer_0,
    )
    findings = correlate_layers(tables, resamples=resamples, seed=seed)
    paths = write(tables, findings, out)
    _show(tables, findings)
    print(*paths, sep="\n")
    return 0


def _show(tables: "LayerTables", findings: "LayerFindings") -> None:
    from rich.console import Console

    console = Console(highlight=False, markup=False)
    for model in findings.models:
        console.print(_correlations(tables, model))
        console.print(_choices(tables, model))
        for one in model.metrics:
            reasons: dict[str, list[str]] = {}
            for task, why in one.left_out.items():
                reasons.setdefault(why, []).append(task)
            for why, tasks in reasons.items():
                console.print(f"{tables.titles[one.metric]}: left out {', '.join(tasks)}: {why}", style="dim")
        for note in model.notes:
            console.print(note, style="dim")
        console.print()
    console.print(findings.basis)
    console.print("Best single and best per task are chosen on the test scores themselves.")
    for name, why in findings.left_out.items():
        console.print(f"left out: {name}: {why}", style="red")


def _correlations(tables: "LayerTables", model) -> "Table":
    from rich.table import Table

    from lit_layers.correlate.layer_report import COEFFICIENT_TITLES, heading
    from lit_layers.functional.layer_selection import FORMS

    null = model.null
    title = (
        f"{heading(model)}: metrics against {tables.score_title.lower()} over layers\n"
        f"distance correlation of unrelated layers: noise {null.noise:.2f} (95%: {null.noise_95:.2f}), "
        f"random walks {null.walk:.2f} ({null.walk_95:.2f})"
    )
    shown = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for column in ("metric", "form"):
        shown.add_column(column, no_wrap=True)
    for column in (*COEFFICIENT_TITLES.values(), "tasks"):
        shown.add_column(column, justify="right")
    for one in model.metrics:
        for form in FORMS:
            own = [found for found in one.correlations if found.form == form]
            if own:
                cells = [_cell(found.estimate) for found in own]
                shown.add_row(tables.titles[one.metric], form, *cells, str(own[0].num_tasks))
        if one.note:
            shown.add_row(tables.titles[one.metric], one.note)
    return shown


def _choices(tables: "LayerTables", model) -> "Table":
    from rich.table import Table

    from lit_layers.correlate.layer_findings import rule_text
    from lit_layers.correlate.layer_report import shares_text
    from lit_layers.figures.labels import value

    shown = Table(
        title="\nlayers chosen without labels (* chosen on held-out models or tasks)",
        title_justify="left",
        box=None,
        pad_edge=False,
    )
    shown.add_column("metric")
    for column in ("score", "above last", "above best", "last", "middle", "random", "best single", "best per task"):
        shown.add_column(column, justify="right")
    for choice in model.choices:
        found = choice.result
        name = tables.titles.get(choice.metric or "", "All metrics")
        text = f"{'* ' if choice.is_chosen else ''}{name}: {rule_text(choice, tables.titles).lower()}"
        if shares := shares_text(choice, tables.titles):
            text += f" ({shares})"
        shown.add_row(
            text,
            _cell(found.score),
            _cell(found.minus_last),
            _cell(found.minus_best),
            value(found.last.value),
            f"{value(found.middle.value)} ({found.middle_layer})",
            value(found.random.value),
            f"{value(found.best.value)} ({found.best_layer})",
            value(found.oracle.value),
        )
    return shown


def _cell(estimate: "Estimate") -> str:
    from lit_layers.figures.labels import value

    if estimate.low is None:
        return value(estimate.value)
    return f"{value(estimate.value)} [{value(estimate.low)}, {value(estimate.high)}]"
