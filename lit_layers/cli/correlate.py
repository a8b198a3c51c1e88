"""`lit-layers correlate`: a metric of many models against their score, or metrics against scores over layers."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from lit_layers.cli.correlate_layers import OverLayers, plain_console, print_table, run
from lit_layers.cli.options import Names
from lit_layers.errors import InputError
from lit_layers.schema import MANY, Range, refuse_outside

if TYPE_CHECKING:
    from lit_layers.correlate import Findings, ModelTable


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
    from lit_layers.correlate.correlation_page import write_models

    table = _table(models, over_models, step)
    covariates = over_models.given or ()
    findings = correlate(table, given=covariates, group=over_models.group, resamples=resamples, seed=seed)
    paths = write_models(table, findings, out)
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
    from lit_layers.correlate.correlation_page import coefficient_table, covariate_table, influence_text

    console = plain_console()
    title = f"{table.title(table.metric)} against {table.title(table.score)}, {findings.n} models"
    print_table(console, coefficient_table(table, findings), title)
    if (covariates := covariate_table(findings)) is not None:
        print_table(console, covariates, "\nWhat explains it besides")
    console.print()
    if text := influence_text(findings):
        console.print(text)
    for text in findings.warnings:
        console.print(f"warning: {text}", style="yellow")
    for model, why in findings.left_out.items():
        console.print(f"left out: {model}: {why}", style="red")
