"""`lit-layers correlate`: a metric of many models against their score, or metrics against scores over layers."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from lit_layers.cli.correlate_layers import OverLayers, run
from lit_layers.cli.options import Names
from lit_layers.errors import InputError
from lit_layers.schema import MANY, Range, refuse_outside

if TYPE_CHECKING:
    from lit_layers.correlate import Findings, ModelTable
    from lit_layers.correlate.model_findings import Row


@dataclass(frozen=True, kw_only=True)
class OverModels:
    """Over models.

    Args:
        data: instead: coupling and leaderboard scores of 28 models, as published
        metric: ANALYSIS/METRIC of the measurements, e.g. coupling/coupling; a column of the file
        tags: which variant of it, NAME=VALUE,... e.g. k=12; k=0.1 is a share of the width
        layer: a layer's number, or last (default: the whole model's value, else the last layer's)
        score: FILE.csv:COLUMN keyed by model; a scalar of training, as validation/accuracy;
            ANALYSIS/METRIC; a column
        take: of a scalar of training (default: last)
        given: hold these columns fixed, alone and together; sizes enter as logarithms
        group: also correlate within groups of equal value of this column, e.g. drop_path_rate
        baseline: the column of what the metric is by chance (default: random_METRIC, where known)
    """

    data: Literal["published"] | None = None
    metric: str | None = None
    tags: dict[str, str | int | float] | str | None = None
    layer: int | Literal["last"] | None = None
    score: str | None = None
    take: Literal["last", "highest", "lowest"] | None = None
    given: Names | None = None
    group: str | None = None
    baseline: str | None = None


def correlate(
    models: list[Path],
    over_models: OverModels,
    over_layers: OverLayers,
    *,
    step: int | None = None,
    resamples: int = 2000,
    seed: int = 0,
    out: Path | None = None,
) -> int:
    """Correlate a metric with a score over models, and tell what width alone would explain; or metrics with task scores
    over the layers of each model, and tell what choosing a layer by them is worth.

    Args:
        models: run folders, comparisons of models, folders of such; or one .csv or .parquet file, a row a model
        step: the checkpoint of training runs (default: the last that has the metric)
        resamples: of the models or tasks, for intervals
        seed: of the resamples
        out: folder of the page and pictures (default: correlation, over layers layer_correlation)
    """
    is_over_layers = _is_over_layers(over_models, over_layers)
    out = out or Path("layer_correlation" if is_over_layers else "correlation")
    if not is_over_layers:
        _check(models, over_models, step)
    refuse_outside("", {"resamples": Range(100, MANY, whole=True)}, {"resamples": resamples})
    if out.exists() and not out.is_dir():
        raise InputError(f"out: expected a folder, {out} is a file")
    if is_over_layers:
        return run(models, over_layers, step=step, resamples=resamples, seed=seed, out=out)
    from lit_layers.correlate import correlate
    from lit_layers.correlate.model_report import write

    table = _table(models, over_models, step)
    covariates = over_models.given or ()
    findings = correlate(table, given=covariates, group=over_models.group, resamples=resamples, seed=seed)
    paths = write(table, findings, out)
    _show(table, findings)
    print(*paths, sep="\n")
    return 0


def _is_over_layers(over_models: OverModels, over_layers: OverLayers) -> bool:
    """Which of the two modes is meant; their options do not mix."""
    models, layers = (
        [name for name, value in vars(options).items() if value is not None and value is not False]
        for options in (over_models, over_layers)
    )
    if layers and models:
        first, second = models[0], layers[0].replace("_", "-")
        raise InputError(
            f"{first}: --{first} belongs to a correlation over models, --{second} to one over layers: leave one out"
        )
    return bool(layers)


def _check(models: list[Path], options: OverModels, step: int | None) -> None:
    if bool(models) == bool(options.data):
        raise InputError("models: expected run folders or a file, or --data published, and not both")
    for name, value in {"metric": options.metric, "score": options.score}.items():
        if not options.data and value is None:
            raise InputError(f"{name}: expected --{name}; see `lit-layers correlate --help`")
        if options.data and value is not None:
            raise InputError(f"{name}: the published table has one metric and one score: leave out --{name}")
    if options.data or _is_file(models):
        for name, value in {"tags": options.tags, "layer": options.layer, "step": step}.items():
            if value is not None:
                raise InputError(f"{name}: a table has no {name}: leave out --{name}")
    if options.data and options.baseline is not None:
        raise InputError("baseline: the published table has its own: leave out --baseline")
    refuse_outside("", {"layer": Range(0, MANY)}, {"layer": None if options.layer == "last" else options.layer})


def _is_file(paths: list[Path]) -> bool:
    files = [path for path in paths if path.suffix in (".csv", ".parquet")]
    if files and len(paths) > 1:
        raise InputError(f"models: expected one file alone, got {files[0]} and {len(paths) - 1} more")
    return bool(files)


def _table(models: list[Path], options: OverModels, step: int | None) -> "ModelTable":
    from lit_layers.correlate import published, read_file, read_runs

    if options.metric is None or options.score is None:  # `_check` let this pass with --data alone
        return published()
    columns = {"metric": options.metric, "score": options.score, "baseline": options.baseline}
    if _is_file(models):
        return read_file(models[0], **columns)
    return read_runs(
        models,
        **columns,
        tags=_tags(options.tags),
        layer=options.layer,
        step=step,
        take=options.take or "last",
    )


def _tags(given: Mapping[str, str | int | float] | str | None) -> dict[str, str | int | float]:
    if isinstance(given, Mapping):
        return dict(given)
    tags = {}
    for part in (given or "").split(","):
        name, equals, value = part.strip().partition("=")
        if part.strip() and not (equals and name and value):
            raise InputError(f"tags: expected NAME=VALUE,..., got {part.strip()!r}")
        if equals:
            tags[name.strip()] = _number(value.strip())
    return tags


def _number(text: str) -> str | int | float:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _show(table: "ModelTable", findings: "Findings") -> None:
    from rich.console import Console
    from rich.table import Table

    from lit_layers.correlate.model_report import influence_text

    console = Console(highlight=False, markup=False)
    title = f"{table.title(table.metric)} against {table.title(table.score)}, {findings.n} models"
    shown = Table(title=title, title_justify="left", box=None, pad_edge=False)
    shown.add_column("")
    for column in ("value", "95% interval", "p", "models"):
        shown.add_column(column, justify="right", no_wrap=True)
    for row in [*findings.rows, *findings.groups]:
        shown.add_row(*_cells(row))
    if findings.corrected:
        shown.add_row("")
        shown.add_row(f"{table.title(str(table.corrected))}, the baseline taken off", style="bold")
        for row in findings.corrected:
            shown.add_row(*_cells(row))
    console.print(shown)
    if findings.covariates:
        besides = Table(title="\nWhat explains it besides", title_justify="left", box=None, pad_edge=False)
        besides.add_column("")
        for column in ("R² of the metric", "R² of the score"):
            besides.add_column(column, justify="right", no_wrap=True)
        for one in findings.covariates:
            besides.add_row(one.name, f"{one.r2_metric:.2f}", f"{one.r2_score:.2f}")
        console.print(besides)
    console.print()
    if text := influence_text(findings):
        console.print(text)
    for text in findings.warnings:
        console.print(f"warning: {text}", style="yellow")
    for model, why in findings.left_out.items():
        console.print(f"left out: {model}: {why}", style="red")


def _cells(row: "Row") -> list[Any]:
    from lit_layers.correlate.model_findings import p_text
    from lit_layers.figures.labels import value

    interval = "" if row.low is None or row.high is None else f"{value(row.low)} to {value(row.high)}"
    name = f"{row.name} ({row.note})" if row.note else row.name
    return [name, value(row.value), interval, p_text(row.p), str(row.n)]
