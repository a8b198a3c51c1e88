"""`lit-layers correlate`: correlate a metric with a score over models, or metrics with scores over layers."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from lit_layers.cli.options import Names, refuse_replacing
from lit_layers.correlate import correlate as correlate_models
from lit_layers.correlate import correlate_layers, published, read_layers
from lit_layers.correlate.findings import Findings, LayerFindings
from lit_layers.correlate.model_table import ModelTable, read_file, read_run_models, split, table_of_models
from lit_layers.correlate.pages import heading, write_layers, write_models
from lit_layers.errors import InputError
from lit_layers.figures.labels import mid_sentence, p_equation, value
from lit_layers.schema import COUNT_OR_NONE, SEED, Range

TABLES = (".csv", ".parquet")


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """Options for a correlation over models.

    Args:
        data: published: instead of models of your own, use the 28 language models of the coupling paper, with their
            coupling and leaderboard scores
        metric: the metric: ANALYSIS/METRIC of run folders, or a column if the models are the rows of a file. Append
            [tag=value,...] to choose a variant, e.g. coupling/coupling[k=12]; a k below 1, such as 0.1, is a share of
            the width
        layer: the layer at which the metric is read: its index, or last (default: the value of the whole model,
            otherwise that of the last layer)
        score: the score: FILE.csv:COLUMN with one row per model; a scalar of training, e.g. validation/accuracy;
            another ANALYSIS/METRIC; or a column if the models are the rows of a file
        given: also compute partial correlations that hold these columns fixed, one by one and all together; model sizes
            enter as logarithms
        group: also correlate within groups of models that share a value of this column, e.g. drop_path_rate
    """

    data: Literal["published"] | None = None
    metric: str | None = None
    layer: Annotated[int | Literal["last"] | None, COUNT_OR_NONE] = None
    score: str | None = None
    given: Names | None = None
    group: str | None = None


@dataclass(frozen=True, kw_only=True)
class LayerOptions:
    """Options for a correlation over layers.

    Args:
        metrics: the metrics, comma-separated: NAME or ANALYSIS/NAME; append [tag=value,...] to choose a variant
        scores: the scores of layers: mteb, another metric, or a file with the columns model, task, layer, score
        with_layer_0: also include layer 0, the embedding output
    """

    metrics: list[str] | str | None = None
    scores: str | None = None
    with_layer_0: bool = False


def correlate(
    models: list[Path],
    by_model: ModelOptions,
    by_layer: LayerOptions,
    *,
    step: int | None = None,
    resamples: Annotated[int, Range(100, 1_000_000, whole=True)] = 2000,
    seed: Annotated[int, SEED] = 0,
    root: Path | None = None,
) -> int:
    """Correlate a metric with a score over models, and show how much model width explains by itself.

    With --metrics and --scores: correlate metrics with task scores over the layers of each model. Also show the scores
    of the layers that the metrics would choose.

    Args:
        models: folders of runs or of model comparisons, or folders that contain these; or one .csv or .parquet file
            with one row per model
        step: which checkpoint of training runs (default: the last one with the metric)
        resamples: number of bootstrap resamples of the models or tasks, for confidence intervals
        seed: random seed of the resampling
        root: folder for the page and the pictures (default: correlation; over layers: layer_correlation)
    """
    is_layerwise = by_layer.metrics is not None or by_layer.scores is not None
    root = root or Path("layer_correlation" if is_layerwise else "correlation")
    files = [path for path in models if path.suffix in TABLES]
    read = [*files, (by_model.score or "").rpartition(":")[0], by_layer.scores]
    refuse_replacing(root, read, ("models", "correlation", "layers", "correlations", "selection", "curves"))
    options = {"resamples": resamples, "seed": seed}
    if is_layerwise:
        if by_layer.metrics is None or by_layer.scores is None:
            raise InputError("over layers: expected --metrics and --scores")
        return _run_layers(models, by_layer, step, options, root)
    _check(models, files, by_model, step)
    return _run_models(models, by_model, step, options, root)


def _check(models: list[Path], files: list[Path], options: ModelOptions, step: int | None) -> None:
    if bool(models) == bool(options.data):
        raise InputError("models: expected run folders or a file, or --data published, and not both")
    if not options.data and (options.metric is None or options.score is None):
        raise InputError("over models: expected --metric and --score")
    if files and len(models) > 1:
        raise InputError(f"models: expected one file, got {len(models)} places")
    if (options.data or files) and (options.layer is not None or step is not None):
        raise InputError("layer and step: a table has none: leave them out")


def _run_models(models: list[Path], options: ModelOptions, step: int | None, resampling: Any, root: Path) -> int:
    """Correlate over models, write page, tables and pictures, print R² and warnings, and return the exit code."""
    table = _table(models, options, step)
    findings = correlate_models(table, given=options.given or (), group=options.group, **resampling)
    paths = write_models(table, findings, root)
    r2 = next(row for row in findings.rows if row.name == "R²")
    title = f"{table.title(table.metric)} against {mid_sentence(table.title(table.score))}, {findings.n} models"
    print(f"{title}: R² = {value(r2.value)}, {p_equation(r2.p)}")
    for warning in findings.warnings:
        print(f"warning: {warning}")
    _show(findings, paths)
    return 0


def _table(models: list[Path], options: ModelOptions, step: int | None) -> ModelTable:
    if options.data is not None:
        return published()
    columns: Any = {"metric": options.metric, "score": options.score}
    if models[0].suffix in TABLES:
        return read_file(models[0], **columns)
    columns |= {"layer": options.layer, "step": step}
    return table_of_models(read_run_models(models), source=", ".join(map(str, models)), **columns)


def _run_layers(models: list[Path], options: LayerOptions, step: int | None, resampling: Any, root: Path) -> int:
    """Correlate over layers, write page, tables and pictures, print rank correlations, and return the exit code."""
    metrics = options.metrics if isinstance(options.metrics, list) else split(options.metrics or "")
    tables = read_layers(models, metrics, options.scores or "", step=step, with_layer_0=options.with_layer_0)
    findings = correlate_layers(tables, **resampling)
    paths = write_layers(tables, findings, root)
    for model in findings.models:
        for one in model.metrics:
            found = {(each.form, each.coefficient): each.estimate.value for each in one.correlations}
            rho = found.get(("per_task_mean", "spearman"))
            print(f"{heading(model)}: {tables.titles[one.metric]}: Spearman rho {value(rho)}, mean over tasks")
    _show(findings, paths)
    return 0


def _show(findings: Findings | LayerFindings, paths: list[Path]) -> None:
    for model, why in findings.left_out.items():
        print(f"left out: {model}: {why}")
    print(*paths, sep="\n")
