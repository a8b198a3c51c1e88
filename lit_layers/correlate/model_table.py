"""The table that everything else reads: a row a model, with its metric, its score, and what else is known of it."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any

import pandas as pd

from lit_layers.correlate import model_runs
from lit_layers.correlate.model_runs import SIZES, Choice, RunModel, nearest
from lit_layers.errors import InputError
from lit_layers.figures.labels import tag_text
from lit_layers.figures.models import short_names
from lit_layers.metrics import METRICS, is_in, look_up, sentence
from lit_layers.records import Measurement

NAMES = ("model", "run", "name")  # of the column that names the models
FEWEST = 3


@dataclass(frozen=True, kw_only=True)
class ModelTable:
    """Models to correlate over: `frame` has a row a model, with the columns `model`, `metric` and `score` and all else.

    `baseline` is the column of what the metric would be by chance (or by width alone), `corrected` the metric with that
    taken off; None where there is none. `left_out` says of each model that lacks a value which one.
    """

    frame: pd.DataFrame
    metric: str
    score: str
    baseline: str | None = None
    corrected: str | None = None
    group: str | None = None
    left_out: dict[str, str] = field(default_factory=dict)
    p_is_1: bool = False  # the metric divides by a sum of singular values, which grows with their number
    source: str = ""
    titles: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def title(self, column: str) -> str:
        """What a column is called in figures and tables: columns of the user's own are called as there."""
        return self.titles.get(column) or (sentence(column) if column in (*SIZES, "model", "step", "layer") else column)


def published() -> ModelTable:
    """Returns the 28 language models of the coupling paper's figure, with what width alone predicts of them.

    `width_alone` is 1 - 1/sqrt(K), K = int(0.1 width): the coupling at p = 1 of blocks that share nothing, for a flat
    spectrum.
    """
    with files("lit_layers.correlate").joinpath("published.csv").open(encoding="utf-8") as file:
        frame: Any = pd.read_csv(file, comment="#")
    frame["width_alone"] = [1 - 1 / math.sqrt(int(0.1 * width)) for width in frame["width"]]
    return ModelTable(
        frame=frame,
        metric="coupling",
        score="score",
        baseline="width_alone",
        group="width",
        p_is_1=True,
        source="as published",
        titles={
            "coupling": "Published coupling",
            "score": "Leaderboard score",
            "width_alone": "Coupling by width alone",
            "width": "Width",
        },
        notes=[
            "Read off Fig. 1(a) of Aubry, Meng, Sugolov, Papyan, Transformer block coupling and its correlation with "
            "generalization in LLMs, ICLR 2025 (arXiv 2407.07810), to 0.0003. By width alone: 1 - 1/sqrt(K) with "
            "K = int(0.1 width), what blocks that share nothing score at p = 1. Leaderboard score: average of the Open "
            "LLM Leaderboard, version 1."
        ],
    )


def read_file(path: Path, *, metric: str, score: str, baseline: str | None = None) -> ModelTable:
    """Returns the models of a .csv or .parquet file, a row each.

    `baseline` and the corrected metric are by default the columns `random_<metric>` and `excess_<metric>`, or what the
    metric's row in `lit_layers.metrics` names instead, if they are there.

    Raises:
        InputError: for a file that cannot be read, a column that it lacks or that is no number, a model named twice.
    """
    frame = _read(path)
    name = _name_column(frame, path)
    columns = [column for column in frame.columns if column != name]
    _known(metric, columns, "metric", path)
    _known(score, columns, "score", path)
    if baseline is not None:
        _known(baseline, columns, "baseline", path)
    own: Any = frame.rename(columns={name: "model"})
    own["model"] = own["model"].astype(str)
    table = _finished(
        own,
        metric,
        score,
        baseline=baseline or _if_there(look_up(metric).baseline, columns),
        corrected=_if_there(look_up(metric).excess, columns),
        source=path.name,
        where=str(path),
    )
    titles = {column: look_up(column).title for column in columns if is_in(column, "coupling", "token_coupling")}
    return ModelTable(**{**vars(table), "titles": titles})


def read_runs(
    folders: Sequence[Path],
    *,
    metric: str,
    score: str,
    tags: Mapping[str, str | int | float] | None = None,
    layer: int | str | None = None,
    step: int | None = None,
    take: str = "last",
    baseline: str | None = None,
) -> ModelTable:
    """Returns the models of run folders and comparisons: of a training run the last checkpoint that has the metric.

    `score` is `FILE:COLUMN` of a table keyed by model, a scalar of the runs' own training (`take` "last", "highest" or
    "lowest", up to `step`), or another metric, `ANALYSIS/METRIC`. All columns of such a file are known of the models,
    and so are their sizes and the options of their recipes in which they differ.

    Raises:
        InputError: for a metric or score that no model has, or of which the options leave several values.
    """
    models = model_runs.read_run_models(folders)
    choice = Choice(tags or {}, layer)
    analysis, name = model_runs.metric_of(models, metric)
    rows, left_out = [], {}
    for model in models:
        measured = _measured(model, model.at(step, analysis), analysis, name, choice)
        if not measured:
            left_out[model.name] = _why(model, analysis, name, step, choice)
        rows.append({"model": model.name, **model_runs.sizes(model), **measured})
    score_column, titles = _add_scores(rows, models, score, take, choice)
    for row in rows:
        if isinstance(row.get("error"), str):  # a run of a sweep that broke off: its last numbers are not its end's
            left_out[row["model"]] = f"its run failed: {row['error']}"
            row.pop(score_column, None)
    _add_settings(rows, models)
    frame = pd.DataFrame(rows)
    if name not in frame.columns:
        reasons = "; ".join(f"{model}: {why}" for model, why in list(left_out.items())[:3])
        raise InputError(f"metric: no model has a value of {metric} ({reasons})")
    columns = list(frame.columns)
    if baseline is not None:
        _known(baseline, columns, "baseline", "these models")
    table = _finished(
        frame,
        name,
        score_column,
        baseline=baseline or _if_there(look_up(name).baseline, columns),
        corrected=_if_there(look_up(name).excess, columns),
        source=", ".join(str(folder) for folder in folders),
        where=", ".join(str(folder) for folder in folders),
        left_out=left_out,
    )
    variant = tag_text(dict(tags or {}))
    own = look_up(name)
    titles |= {name: f"{own.title}, {variant}" if variant else own.title}
    titles |= {column: METRICS[column].title for column in (own.baseline, own.excess) if column in METRICS}
    p_is_1 = any(model_runs.has_p_1(model, analysis) for model in models)
    return ModelTable(**{**vars(table), "titles": titles, "p_is_1": p_is_1})


def _measured(
    model: RunModel, found: Sequence[Measurement], analysis: str, name: str, choice: Choice
) -> dict[str, Any]:
    """A metric at one checkpoint, its tags, and what is known of its baseline; nothing where it was not measured."""
    record = model_runs.value_of(model, found, analysis, name, choice)
    if record is None:
        return {}
    tags = {tag: value for tag, value in record.tags.items() if not tag.startswith("num_")}
    ends = {f"{name}_low": record.low, f"{name}_high": record.high, "layer": record.layer, "step": found[0].step}
    row = {name: record.value, **tags, **{end: value for end, value in ends.items() if value is not None}}
    for other in (look_up(name).baseline, look_up(name).excess):
        beside = model_runs.value_of(model, found, analysis, other, Choice(tags, choice.layer))
        row |= {other: beside.value} if beside is not None else {}
    return row


def _why(model: RunModel, analysis: str, name: str, step: int | None, choice: Choice) -> str:
    if step is not None and not model.at(step):
        return f"no measurement at step {step}"
    if not model.measurements and model.num_suspect:
        return "all its checkpoints are suspect"
    told = ", ".join(
        filter(None, [tag_text(dict(choice.tags)), f"layer {choice.layer}" if choice.layer is not None else ""])
    )
    there = model_runs.tags_of([model], analysis, name)
    known = ", ".join(tag_text({tag: value}) for tag in choice.tags for value in there.get(tag, []))
    return f"no {analysis}/{name}{f' with {told}' if told else ''}{f', it has {known}' if known else ''}"


def _add_scores(
    rows: list[dict[str, Any]], models: list[RunModel], score: str, take: str, choice: Choice
) -> tuple[str, dict[str, str]]:
    """Puts the score into each model's row and returns its column, and what columns are called.

    Of a run it is that of the step whose metric stands in the row.
    """
    path, colon, column = score.rpartition(":")
    if colon and Path(path).suffix in (".csv", ".parquet"):
        _join(rows, _read(Path(path)), Path(path), column)
        return column, {}
    scalars = dict.fromkeys(name for model in models for scalars in model.scalars for name in scalars)
    if score in scalars:
        for row, model in zip(rows, models, strict=True):
            value = model_runs.scalar_of(model, score, row.get("step"), take)
            row |= {score: value} if value is not None else {}
        title = look_up(score).title if score in METRICS else sentence(score.replace("/", " "))
        return score, {score: title if take == "last" else f"{title}, {take}"}
    known = dict.fromkeys(f"{m.analysis}/{r.metric}" for model in models for m in model.measurements for r in m.records)
    if score not in known:
        names = [name for name in scalars if name not in ("step", "tokens")] + list(known)
        raise InputError(
            f"score: no model has {score!r}, neither as a scalar of training nor as ANALYSIS/METRIC, and it is no "
            f"FILE.csv:COLUMN{nearest(score, names)}"
        )
    analysis, name = model_runs.metric_of(models, score)
    own = model_runs.tags_of(models, analysis, name)
    choice = Choice({tag: value for tag, value in choice.tags.items() if tag in own})
    for row, model in zip(rows, models, strict=True):
        record = model_runs.value_of(model, model.at(row.get("step"), analysis), analysis, name, choice)
        row |= {score: record.value} if record is not None else {}
    return score, {score: look_up(name).title}


def _join(rows: list[dict[str, Any]], frame: pd.DataFrame, path: Path, column: str) -> None:
    """Adds the columns of a file to the models' rows, by the model's whole name or its last part."""
    table: Any = frame
    name = _name_column(table, path)
    _known(column, [other for other in table.columns if other != name], "score", path)
    if column in rows[0] or column in ("model", "metric"):
        raise InputError(f"score: column {column!r} of {path} is called like what is measured; rename it")
    keys = [str(key) for key in table[name]]
    for row in rows:
        own = row["model"]
        short = own.rstrip("/").split("/")[-1]
        places = [n for n, key in enumerate(keys) if key == own]
        places = places or [n for n, key in enumerate(keys) if key.rstrip("/").split("/")[-1] == short]
        if len(places) > 1:
            raise InputError(f"score: {path} has {len(places)} rows for {own}, expected one")
        for place in places:
            known = table.iloc[place].drop(name).dropna().to_dict()
            row |= {key: value for key, value in known.items() if key not in row}


def _add_settings(rows: list[dict[str, Any]], models: list[RunModel]) -> None:
    """Adds the options of the recipes in which the models differ."""
    found = [model_runs.settings(model) for model in models]
    for name in dict.fromkeys(name for own in found for name in own):
        if len({str(own.get(name)) for own in found}) > 1:
            for row, own in zip(rows, found, strict=True):
                if name in own and name not in row:
                    row[name] = own[name]


def _read(path: Path) -> pd.DataFrame:
    if not path.is_file():
        raise InputError(f"expected a .csv or .parquet file, {path} does not exist")
    try:
        frame = pd.read_parquet(path) if path.suffix == ".parquet" else pd.read_csv(path, comment="#")
    except (ValueError, OSError) as error:  # pandas' and pyarrow's errors of contents are ValueErrors
        raise InputError(f"cannot read {path}: {' '.join(str(error).split())}") from error
    if frame.empty:
        raise InputError(f"{path} has no rows")
    return frame


def _name_column(frame: pd.DataFrame, path: Path) -> Any:
    found = next((name for name in NAMES if name in frame.columns), None)
    if found is None:
        known = ", ".join(map(str, frame.columns))
        raise InputError(f"{path} has no column that names the models ({', '.join(NAMES)}); it has: {known}")
    return found


def _known(column: str, columns: Sequence[str], option: str, where: object) -> None:
    if column not in columns:
        raise InputError(f"{option}: {where} has no column {column!r}{nearest(column, map(str, columns))}")


def _if_there(column: str, columns: Sequence[str]) -> str | None:
    return column if column in columns else None


def _finished(
    frame: Any,
    metric: str,
    score: str,
    *,
    baseline: str | None,
    corrected: str | None,
    source: str,
    where: str,
    left_out: Mapping[str, str] | None = None,
) -> ModelTable:
    """The table of the models that have both values, with short names; the others are told."""
    if metric == score:
        raise InputError(f"expected a metric and another score, got {metric} twice")
    if frame["model"].duplicated().any():
        raise InputError(f"{where} has more than one row for {frame['model'][frame['model'].duplicated()].iloc[0]}")
    missing = dict(left_out or {})
    for column, what in ((metric, "metric"), (score, "score")):
        if column not in frame.columns:
            frame[column] = math.nan
        numbers: Any = pd.to_numeric(frame[column], errors="coerce")
        wrong = frame[column].notna() & numbers.isna()
        if wrong.any():
            raise InputError(
                f"{what}: expected numbers in column {column!r} of {where}, got {frame[column][wrong].iloc[0]!r} "
                f"for {frame['model'][wrong].iloc[0]}"
            )
        frame[column] = numbers.astype("float64")
        for name in frame["model"][~numbers.map(math.isfinite)]:
            missing.setdefault(name, f"no {column}")
    kept = frame[~frame["model"].isin(missing)].reset_index(drop=True)
    if len(kept) < FEWEST:
        told = [f"{name}: {why}" for name, why in missing.items()]
        reasons = f" ({'; '.join(told[:4])}{f' and {len(told) - 4} more' if len(told) > 4 else ''})" if told else ""
        raise InputError(f"expected at least {FEWEST} models with a metric and a score, got {len(kept)}{reasons}")
    kept["model"] = kept["model"].map(short_names(list(kept["model"])))
    kept = kept.dropna(axis=1, how="all")
    if baseline is not None and baseline not in kept.columns:
        baseline = None
    if corrected is not None and corrected not in kept.columns:
        corrected = None
    return ModelTable(
        frame=kept,
        metric=metric,
        score=score,
        baseline=baseline,
        corrected=corrected,
        left_out=missing,
        source=source,
    )
