"""`lit-layers correlate`: a metric of many models against their score, or metrics against scores over layers."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from lit_layers.cli.console import show_table
from lit_layers.cli.options import Names, Pairs, given, refuse_beside, refuse_replacing, refuse_unwritable
from lit_layers.errors import InputError
from lit_layers.figures.labels import in_sentence
from lit_layers.schema import COUNT_OR_NONE, SEED, Range

if TYPE_CHECKING:
    from lit_layers.correlate.correlation_page import OverTag, Table
    from lit_layers.correlate.findings import Findings, LayerFindings
    from lit_layers.correlate.layer_tables import LayerTables
    from lit_layers.correlate.model_table import ModelTable

NONE = Pairs()
WRITTEN = {False: ("models", "correlation", "over"), True: ("layers", "correlations", "selection", "curves")}  # names


@dataclass(frozen=True, kw_only=True)
class OverModels:
    """Over models.

    Args:
        data: in place of models: coupling and leaderboard scores of 28 models, as published
        metric: the metric: ANALYSIS/METRIC of the measurements, e.g. coupling/coupling, or a column of the file
        tags: which variant of the metric: NAME=VALUE,... e.g. k=12; k=0.1 is a share of the width
        over: also correlate at each value of a tag: TAG=VALUE,VALUE,... e.g. k=0.05,0.1,0.2
        layer: at which layer: its number, or last (default: the whole model's value, else the last layer's)
        score: the score: FILE.csv:COLUMN with a row a model; a scalar of training, e.g. validation/accuracy; another
            ANALYSIS/METRIC; or a column of the file
        take: which value of a scalar of training (default: last)
        given: also correlate with these columns held fixed, alone and together; sizes enter as logarithms
        group: also correlate within groups of equal value of this column, e.g. drop_path_rate
        baseline: the column that says what the metric is by chance (default: random_METRIC, where known)
    """

    data: Literal["published"] | None = None
    metric: str | None = None
    tags: Pairs = NONE
    over: str | None = None
    layer: Annotated[int | Literal["last"] | None, COUNT_OR_NONE] = None
    score: str | None = None
    take: Literal["last", "highest", "lowest"] | None = None
    given: Names | None = None
    group: str | None = None
    baseline: str | None = None


@dataclass(frozen=True, kw_only=True)
class OverLayers:
    """Over layers.

    Args:
        metrics: the metrics: NAME or ANALYSIS/NAME, with [tag=value,...] for a variant; several with commas between
        scores: the scores of layers: mteb, or a file with the columns model, task, layer, score
        metrics_file: a file of the metrics, with the columns model, task, layer, and one for each metric
        with_layer_0: also take the embedding, not only layers 1 to the last
    """

    metrics: list[str] | str | None = None
    scores: str | None = None
    metrics_file: Path | None = None
    with_layer_0: bool = False


def correlate(
    models: list[Path],
    over_models: OverModels,
    over_layers: OverLayers,
    *,
    step: int | None = None,
    resamples: Annotated[int, Range(100, 1_000_000, whole=True)] = 2000,
    seed: Annotated[int, SEED] = 0,
    root: Path | None = None,
) -> int:
    """Correlate a metric with a score over models, and show what width alone would explain. Or correlate metrics with
    task scores over the layers of each model, and show what choosing a layer by them is worth.

    Args:
        models: run folders, comparisons of models, or folders of such; or one .csv or .parquet file with a row a model
        step: which checkpoint of training runs (default: the last that has the metric)
        resamples: how often models or tasks are resampled for intervals
        seed: seed of the resamples
        root: folder of the page and pictures (default: correlation, over layers layer_correlation)
    """
    models_given, layers_given = given(over_models), given(over_layers)
    if models_given and layers_given:
        first, second = next(iter(models_given)), next(iter(layers_given)).replace("_", "-")
        raise InputError(
            f"{first}: --{first} belongs to a correlation over models, --{second} to one over layers: leave one out"
        )
    root = root or Path("layer_correlation" if layers_given else "correlation")
    if not layers_given:
        _check(models, over_models, step)
    refuse_unwritable("root", root)
    read = [*models, (over_models.score or "").rpartition(":")[0], over_layers.scores, over_layers.metrics_file]
    refuse_replacing(root, read, WRITTEN[bool(layers_given)])
    if layers_given:
        return _over_layers(models, over_layers, step=step, resamples=resamples, seed=seed, root=root)
    from lit_layers.correlate import correlate
    from lit_layers.correlate.correlation_page import write_models

    options = {"resamples": resamples, "seed": seed}
    table, over = _tables(models, over_models, step, options)
    findings = correlate(table, given=over_models.given or (), group=over_models.group, **options)
    paths = write_models(table, findings, root, over=over)
    _show_models(table, findings)
    for model, why in over.left_out.items() if over is not None else ():
        print(f"left out over {over.tag}: {model}: {why}")  # pyright: ignore
    print(*paths, sep="\n")
    return 0


def _check(models: list[Path], options: OverModels, step: int | None) -> None:
    if bool(models) == bool(options.data):
        raise InputError("models: expected run folders or a file, or --data published, and not both")
    if missing := [name for name in ("metric", "score") if getattr(options, name) is None and not options.data]:
        raise InputError(f"{missing[0]}: expected --{missing[0]}; see `lit-layers correlate --help`")
    is_published = options.data is not None
    cases = [
        (("metric", "score", "baseline"), is_published, "the published table has its own"),
        (("tags", "over", "layer", "step"), is_published or _is_file(models), "a table has none"),
    ]
    refuse_beside([*given(options), *([] if step is None else ["step"])], cases)


def _is_file(paths: list[Path]) -> bool:
    files = [path for path in paths if path.suffix in (".csv", ".parquet")]
    if files and len(paths) > 1:
        raise InputError(f"models: expected one file alone, got {files[0]} and {len(paths) - 1} more")
    return bool(files)


def _tables(
    models: list[Path], options: OverModels, step: int | None, resampling: Mapping[str, int]
) -> "tuple[ModelTable, OverTag | None]":
    """The table of the models, and where it is asked for what the correlation is at each value of a tag."""
    from lit_layers.correlate import published
    from lit_layers.correlate.correlation_page import over_tag
    from lit_layers.correlate.model_table import read_file, table_of_models
    from lit_layers.correlate.run_models import read_run_models

    if options.metric is None or options.score is None:  # `_check` let this pass with --data alone
        return published(), None
    columns: Any = {"metric": options.metric, "score": options.score, "baseline": options.baseline}
    if _is_file(models):
        return read_file(models[0], **columns), None
    read, tags = read_run_models(models), {name: _number(value) for name, value in options.tags}
    columns |= {"layer": options.layer, "step": step, "take": options.take or "last"}
    columns["source"] = ", ".join(map(str, models))
    if options.over is None:
        return table_of_models(read, tags=tags, **columns), None
    tag, values = _values(options.over)
    over = over_tag(read, tag, values, tags=tags, **resampling, **columns)
    return table_of_models(read, tags={tag: values[0], **tags}, **columns), over


def _values(text: str) -> tuple[str, list[str | int | float]]:
    """A tag and its values, of `TAG=VALUE,VALUE,...`."""
    tag, equals, values = (part.strip() for part in text.partition("="))
    numbers = [_number(part.strip()) for part in values.split(",") if part.strip()]
    if not (tag and equals and numbers):
        raise InputError(f"over: expected TAG=VALUE,VALUE,... such as k=0.05,0.1,0.2, got {text!r}")
    return tag, numbers


def _number(text: str) -> str | int | float:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _show_models(table: "ModelTable", findings: "Findings") -> None:
    from lit_layers.correlate.correlation_page import coefficient_table, covariate_table, influence_text

    title = f"{table.title(table.metric)} against {table.title(table.score)}, {findings.n} models"
    show_table(_rows(coefficient_table(table, findings)), title)
    if (covariates := covariate_table(findings)) is not None:
        show_table(_rows(covariates), "\nOther explanations")
    print()
    if text := influence_text(findings):
        print(text)
    for warning in findings.warnings:
        print(f"warning: {warning}")
    for model, why in findings.left_out.items():
        print(f"left out: {model}: {why}")


def _rows(table: "Table", small_text: str = " ({})") -> Iterator[dict[str, str]]:
    """The rows of a table of the page: what stands small there in brackets, a strong row with a star."""
    for group in table.groups:
        if group.heading:
            yield {table.columns[0]: group.heading}
        for row in group.rows:
            name, *cells = [text + (small_text.format(small) if small else "") for text, small in row.cells]
            texts = [f"{'* ' if row.strong else ''}{name}", *cells]
            yield dict(zip(table.columns, texts, strict=False))


def _over_layers(
    models: list[Path], options: OverLayers, *, step: int | None, resamples: int, seed: int, root: Path
) -> int:
    """Prints coefficients and choices of layers, writes the page, the tables and the pictures, and returns 0."""
    if not options.metrics or not options.scores:
        name = "scores" if options.metrics else "metrics"
        raise InputError(f"{name}: expected --{name}; see `lit-layers correlate --help`")
    if files := [path for path in models if path.suffix in (".csv", ".parquet")]:
        raise InputError(f"models: expected run folders, got {files[0]}: give files as --scores and --metrics_file")
    from lit_layers.correlate import correlate_layers, read_layers
    from lit_layers.correlate.layer_page import write_layers
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
    paths = write_layers(tables, findings, root)
    _show_layers(tables, findings)
    print(*paths, sep="\n")
    return 0


def _show_layers(tables: "LayerTables", findings: "LayerFindings") -> None:
    from lit_layers.correlate.layer_page import choice_table, correlation_table, missing_tasks

    title = f"Metrics against {in_sentence(tables.score_title)} over layers"
    coefficients = correlation_table(tables, findings)
    show_table(_rows(coefficients, "\n{}"), title)
    for group in coefficients.groups:
        print(f"{group.heading}: {group.note}")
    title = "\nLayers chosen without labels (* chosen on held-out models or tasks)"
    show_table(_rows(choice_table(tables, findings), "\n{}"), title)  # ten columns share the line
    print()
    for model, metric, tasks, why in missing_tasks(tables, findings):
        print(f"{model}, {metric}: left out {tasks}: {why}")
    for model in findings.models:
        for note in model.notes:
            print(f"{model.model}: {note}")
    print(findings.basis)
    print("Best single and best per task are chosen on the test scores themselves.")
    for name, why in findings.left_out.items():
        print(f"left out: {name}: {why}")
