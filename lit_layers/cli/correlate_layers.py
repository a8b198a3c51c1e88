"""`lit-layers correlate --metrics ... --scores ...`: metrics against task scores over the layers of each model."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from lit_layers.errors import InputError

if TYPE_CHECKING:
    from rich.console import Console

    from lit_layers.correlate import LayerFindings, LayerTables
    from lit_layers.correlate.correlation_page import Table


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
    from lit_layers.correlate.correlation_page import write_layers
    from lit_layers.correlate.run_models import split

    tables = read_layers(
        models,
        metrics=split(options.metrics if isinstance(options.metrics, str) else ",".join(options.metrics)),
        scores=options.scores,
        metrics_file=options.metrics_file,
        step=step,
        with_layer_0=options.with_layer_0,
    )
    findings = correlate_layers(tables, resamples=resamples, seed=seed)
    paths = write_layers(tables, findings, out)
    _show(tables, findings)
    print(*paths, sep="\n")
    return 0


def _show(tables: "LayerTables", findings: "LayerFindings") -> None:
    from lit_layers.correlate.correlation_page import choice_table, correlation_table, missing_tasks

    console = plain_console()
    title = f"Metrics against {tables.score_title.lower()} over layers"
    print_table(console, correlation_table(tables, findings), title)
    title = "\nLayers chosen without labels (* chosen on held-out models or tasks)"
    print_table(console, choice_table(tables, findings), title)
    console.print()
    for model, metric, tasks, why in missing_tasks(tables, findings):
        console.print(f"{model}, {metric}: left out {tasks}: {why}", style="dim")
    for model in findings.models:
        for note in model.notes:
            console.print(f"{model.model}: {note}", style="dim")
    console.print(findings.basis)
    console.print("Best single and best per task are chosen on the test scores themselves.")
    for name, why in findings.left_out.items():
        console.print(f"left out: {name}: {why}", style="red")


def plain_console() -> "Console":
    from rich.console import Console

    return Console(highlight=False, markup=False)


def print_table(console: "Console", table: "Table", title: str) -> None:
    """Prints a table as the page has it: what stands small there in brackets, a strong row with a star."""
    from rich.table import Table as Shown

    shown = Shown(title=title, title_justify="left", box=None, pad_edge=False)
    for number, name in enumerate(table.columns):
        shown.add_column(name, justify="right" if number else "left")
    for group in table.groups:
        if group.heading:
            console_text = f"{group.heading}{f': {group.note}' if group.note else ''}"
            shown.add_row(console_text, style="bold")
        for row in group.rows:
            cells = [f"{text} ({small})" if small else text for text, small in row.cells]
            shown.add_row(f"{'* ' if row.strong else ''}{cells[0]}", *cells[1:])
    console.print(shown)
