"""`lit-layers correlate`: a metric of many models against their score, or metrics against scores over layers."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from lit_layers.errors import InputError

if TYPE_CHECKING:
    from lit_layers.correlate import Findings, ModelTable
    from lit_layers.correlate.findings import Row


_OVER_MODELS = ("data", "metric", "tags", "layer", "score", "take", "given", "group", "baseline")
_OVER_LAYERS = ("metrics", "scores", "metrics_file", "with_layer_0")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise InputError(f"{message}; see `{self.prog} --help`")


def main(argv: list[str]) -> int:
    """Prints what a metric says of the models' scores, writes the page and the pictures, and returns 0."""
    options = _parser().parse_args(argv)
    if _is_over_layers(options):
        from lit_layers.cli.correlate_layers import run

        return run(options)
    _check(options)
    from lit_layers.correlate import correlate
    from lit_layers.correlate.writing import write

    table = _table(options)
    given = [name.strip() for name in (options.given or "").split(",") if name.strip()]
    findings = correlate(table, given=given, group=options.group, resamples=options.resamples, seed=options.seed)
    paths = write(table, findings, options.out)
    _show(table, findings)
    for path in paths:
        print(path)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="lit-layers correlate",
        description="Correlate a metric with a score over models, and tell what width alone would explain; or metrics "
        "with task scores over the layers of each model, and tell what choosing a layer by them is worth.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add(
        "models",
        nargs="*",
        type=Path,
        metavar="MODELS",
        help="run folders, comparisons of models, folders of such; or one .csv or .parquet file, a row a model",
    )
    add("--step", type=int, help="the checkpoint of training runs (default: the last that has the metric)")
    over_models = parser.add_argument_group("over models").add_argument
    over_models(
        "--data", choices=["published"], help="instead: coupling and leaderboard scores of 28 models, as published"
    )
    over_models("--metric", help="ANALYSIS/METRIC of the measurements, e.g. coupling/coupling; a column of the file")
    over_models(
        "--tags", metavar="NAME=VALUE,...", help="which variant of it, e.g. k=12; k=0.1 is a share of the width"
    )
    over_models("--layer", help="a layer's number, or last (default: the whole model's value, else the last layer's)")
    over_models(
        "--score",
        help="FILE.csv:COLUMN keyed by model; a scalar of training, as validation/accuracy; ANALYSIS/METRIC; a column",
    )
    over_models("--take", choices=["last", "highest", "lowest"], help="of a scalar of training (default: last)")
    over_models("--given", metavar="COLUMN,...", help="hold these fixed, alone and together; sizes enter as logarithms")
    over_models("--group", metavar="COLUMN", help="also correlate within groups of equal value, e.g. drop_path_rate")
    over_models(
        "--baseline", metavar="COLUMN", help="what the metric is by chance (default: random_METRIC, where known)"
    )
    over_layers = parser.add_argument_group("over layers").add_argument
    over_layers("--metrics", metavar="METRIC,...", help="NAME or ANALYSIS/NAME, with [tag=value,...] for a variant")
    over_layers("--scores", help="mteb; or FILE: model, task, layer, score")
    over_layers("--metrics-file", type=Path, metavar="FILE", help="of the metrics: model, task, layer, a column each")
    over_layers(
        "--with-layer-0",
        "--with_layer_0",
        action="store_true",
        help="the embedding, too (default: layers 1 to the last)",
    )
    add("--resamples", type=int, default=2000, help="of the models or tasks, for intervals (default: 2000)")
    add("--seed", type=int, default=0, help="of the resamples (default: 0)")
    add("--out", type=Path, metavar="FOLDER", help="default: correlation, over layers layer_correlation")
    return parser


def _is_over_layers(options: argparse.Namespace) -> bool:
    """Which of the two modes is meant; their options do not mix."""
    given = {name for name, value in vars(options).items() if value not in (None, False)}
    layers, models = [[name for name in names if name in given] for names in (_OVER_LAYERS, _OVER_MODELS)]
    if layers and models:
        raise InputError(
            f"{models[0]}: --{_option(models[0])} belongs to a correlation over models, --{_option(layers[0])} to one "
            f"over layers: leave one out"
        )
    return bool(layers)


def _option(name: str) -> str:
    return name.replace("_", "-")


def _check(options: argparse.Namespace) -> None:
    options.take = options.take or "last"
    options.out = options.out or Path("correlation")
    if bool(options.models) == bool(options.data):
        raise InputError("models: expected run folders or a file, or --data published, and not both")
    for name in ("metric", "score"):
        if not options.data and getattr(options, name) is None:
            raise InputError(f"{name}: expected --{name}; see `lit-layers correlate --help`")
        if options.data and getattr(options, name) is not None:
            raise InputError(f"{name}: the published table has one metric and one score: leave out --{name}")
    if options.data or _is_file(options.models):
        for name in ("tags", "layer", "step"):
            if getattr(options, name) is not None:
                raise InputError(f"{name}: a table has no {name}: leave out --{name}")
    if options.data and options.baseline is not None:
        raise InputError("baseline: the published table has its own: leave out --baseline")
    if options.resamples < 100:
        raise InputError(f"resamples: expected at least 100, got {options.resamples}")
    if options.out.exists() and not options.out.is_dir():
        raise InputError(f"out: expected a folder, {options.out} is a file")


def _is_file(paths: list[Path]) -> bool:
    files = [path for path in paths if path.suffix in (".csv", ".parquet")]
    if files and len(paths) > 1:
        raise InputError(f"models: expected one file alone, got {files[0]} and {len(paths) - 1} more")
    return bool(files)


def _table(options: argparse.Namespace) -> "ModelTable":
    from lit_layers.correlate import published, read_file, read_runs

    if options.data:
        return published()
    named = {"metric": options.metric, "score": options.score, "baseline": options.baseline}
    if _is_file(options.models):
        return read_file(options.models[0], **named)
    return read_runs(
        options.models,
        **named,
        tags=_tags(options.tags),
        layer=_layer(options.layer),
        step=options.step,
        take=options.take,
    )


def _tags(text: str | None) -> dict[str, str | int | float]:
    found = {}
    for part in (text or "").split(","):
        name, equals, value = part.strip().partition("=")
        if part.strip() and not (equals and name and value):
            raise InputError(f"tags: expected NAME=VALUE,..., got {part.strip()!r}")
        if equals:
            found[name.strip()] = _number(value.strip())
    return found


def _number(text: str) -> str | int | float:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _layer(text: str | None) -> int | str | None:
    if text is None or text == "last":
        return text
    if not text.isdigit():
        raise InputError(f"layer: expected a number or last, got {text!r}")
    return int(text)


def _show(table: "ModelTable", findings: "Findings") -> None:
    from rich.console import Console
    from rich.table import Table

    from lit_layers.correlate.page import influence_text

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
    from lit_layers.correlate.findings import p_text
    from lit_layers.plots.labels import value

    interval = "" if row.low is None or row.high is None else f"{value(row.low)} to {value(row.high)}"
    name = f"{row.name} ({row.note})" if row.note else row.name
    return [name, value(row.value), interval, p_text(row.p), str(row.n)]
