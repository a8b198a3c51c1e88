"""Sources of curves: the folder of a run, a table of scores by step, results of lm-eval."""

import json
import logging
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from lit_layers import run_data
from lit_layers.clock.step_curves import (
    AxisName,
    StepCurve,
    add_prompts,
    curve_of_points,
    curves_in,
    is_selected,
    text_of,
)
from lit_layers.errors import InputError, first_line
from lit_layers.figures.labels import listing
from lit_layers.identity import Settings, same_tag

logger = logging.getLogger(__name__)
_TABLES: dict[str, Any] = {
    ".csv": pd.read_csv,
    ".parquet": pd.read_parquet,
    ".jsonl": lambda path: pd.read_json(path, lines=True),
}
_STEP = re.compile(r"step[-_=]?(\d{1,18})(?!\d)", re.IGNORECASE)
_ON_HUB = re.compile(r"\w[\w.-]*/[\w.-]+")  # a repository on the Hub: ORGANIZATION/NAME
_LONG = 100  # a curve of a training scalar with more points than this is averaged over bins
# The names that a table's columns may have, by their meaning; the first name that exists is used.
_COLUMNS = {
    "run": ("run", "model"),
    "analysis": ("analysis", "task"),
    "metric": ("metric",),
    "value": ("value", "score"),
}


def curves_of(
    source: str | Path,
    *,
    metrics: Sequence[str] = (),
    where: Mapping[str, str] | None = None,
    axis: AxisName = "step",
    settings: Settings = (),
    allow_suspect: bool = False,
) -> list[StepCurve]:
    """Return the curves of a run's folder, of a table of scores by step, or of a folder of lm-eval results.

    Args:
        source: a folder with measurements.jsonl, a table with a row per score (.csv, .parquet or .jsonl), or lm-eval
            results (a .json file, or a folder of these). A table has columns `step` and `value` (or `score`),
            optionally `stderr`, `run` (or `model`), `analysis` (or `task`), `metric` and `layer`; all other columns are
            tags.
        metrics: the metrics to return, as `METRIC` or `ANALYSIS/METRIC`. If empty, return the metrics of a run that are
            shown in tables of results, or all metrics of a table.
        where: values of tags, or of columns of a table, that the curves must have.
        axis: the axis of the curves, steps or tokens.
        settings: which settings (the options of an analysis and its data) to use if a run was measured with several:
            names, `last` or `all`, as in `lit_layers.identity`. A warning lists the settings that are left out.
        allow_suspect: also use checkpoints that an audit found suspect.

    Raises:
        InputError: if the source does not exist or has no such curve, a curve has two values at one step, or
            checkpoints are suspect.
    """
    source, run = Path(source), None
    if source.is_dir() and any((source / name).is_file() for name in ("measurements.jsonl", "metrics.jsonl")):
        run = _read_run(source, settings, allow_suspect)
        curves = curves_in(run.name, run.measurements, axis=axis, everything=bool(metrics))
        curves += _scalar_curves(run, axis) if metrics else []
        asked = {*(where or {}).items()}
        curves = [curve for curve in curves if asked <= {(name, str(tag)) for name, tag in curve.tags.items()}]
    else:
        curves = _table_curves(_read_table(source), source, axis, where or {})
    chosen = [curve for curve in curves if is_selected(curve, metrics)]
    if not curves:
        raise InputError(f"{source}: no curve over {axis}s{f' of {text_of(where)}' if where else ''}")
    if lacking := [name for name in metrics if not any(is_selected(curve, [name]) for curve in curves)]:
        there = listing("metric", sorted({f"{curve.analysis}/{curve.metric}".strip("/") for curve in curves}), most=8)
        sentence = f"metrics: {source} has no curve of {' and '.join(lacking)} over {axis}s: expected of {there}"
        if not chosen:
            raise InputError(sentence)
        logger.warning("%s", sentence)
    curves = chosen if run is None else add_prompts(chosen, source, run.measurements, axis)
    if lacking := [curve for curve in curves if curve.num_without_stderr and curve.prompts is None]:
        first, others = lacking[0], f", and {len(lacking) - 1} other curves have gaps" if len(lacking) > 1 else ""
        logger.warning(
            "%s: %s of %s has no standard error at %d of %d checkpoints%s: errors are guessed from the curve",
            *(source, first.title, first.run, first.num_without_stderr, len(first.at), others),
        )
    return curves


def _scalar_curves(run: run_data.RunData, axis: AxisName) -> list[StepCurve]:
    """Return the curves of all scalars that training logged, such as the loss.

    The points of a long curve are averaged within bins, which are equally wide on a logarithmic axis.
    """
    points: dict[str, list[tuple[float, float, float]]] = {}
    for row in run.scalars:
        for name in row.keys() - {"step", "tokens"} if axis in row else ():
            points.setdefault(name, []).append((row[axis], row[name], np.nan))
    curves = []
    for name, each in points.items():
        count = np.arange(1, len(each) + 1) if len(each) <= _LONG else np.geomspace(1, len(each), _LONG)
        bins = np.split(np.array(each), np.unique(count.astype(int))[:-1])
        means = [(each[-1, 0], each[:, 1].mean(), np.nan) for each in bins]
        curves.append(curve_of_points(run.name, "", name, None, {}, means))
    return curves


def _read_run(root: Path, settings: Settings, allow_suspect: bool) -> run_data.RunData:
    run = run_data.read_run(root, settings=settings)
    if run.compares_models:
        raise InputError(f"{root}: expected a run over training steps, its models have none")
    for sentence in run_data.other_settings(run):
        logger.warning("%s: other settings are left out: %s; choose with --settings", root, sentence)
    if (suspect := run_data.suspects(run)) and not allow_suspect:
        steps = [step for steps in suspect.values() for step in steps]
        are, them = ("is", "it") if len(steps) == 1 else ("are", "them")
        raise InputError(
            f"{root}: {listing('step', steps)} {are} suspect ({next(iter(suspect))}): measure {them} anew, or say "
            "--allow_suspect"
        )
    return run


# ------------------------------------------------------------------------------------------------ tables of scores


def _read_table(path: Path) -> Any:
    if path.is_dir() or path.suffix == ".json":
        files = [path] if path.is_file() else sorted(path.rglob("*.json"))
        if rows := [row for path in files for row in _read_results(path)]:
            return pd.DataFrame(rows)
        raise InputError(f"{path}: expected a run's folder, or results of lm-eval, got neither")
    if not path.is_file():
        on_hub = _ON_HUB.fullmatch(str(path)) and not path.parent.is_dir()
        hint = f": measure it first, by lit-layers analyze {path} --steps all" if on_hub else ""
        raise InputError(f"expected a run's folder or a table of scores, {path} is not there{hint}")
    if path.suffix not in _TABLES:
        raise InputError(f"{path}: expected a table that ends in {', '.join(_TABLES)} or .json, or a run's folder")
    try:
        return _TABLES[path.suffix](path)
    except (ValueError, OSError, NotImplementedError) as error:  # the errors that pandas and pyarrow raise
        raise InputError(f"{path} cannot be read as a table: {first_line(error)}") from error


def _read_results(path: Path) -> list[dict[str, Any]]:
    """Return a file of lm-eval results as rows of a table, one for each score.

    If the file is some other JSON file, return an empty list.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise InputError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(content, dict) or not isinstance(content.get("results"), dict):
        return []
    config = content.get("config") or {}
    arguments = config.get("model_args") or {}
    if isinstance(arguments, str):
        arguments = {name: value for name, _, value in (part.partition("=") for part in arguments.split(","))}
    name = str(arguments.get("pretrained") or content.get("model_name") or path.parent.name)
    revision = str(arguments.get("revision") or config.get("model_revision") or "")
    found = filter(None, map(_STEP.search, (revision, name, path.name, path.parent.name)))
    if (step := next(found, None)) is None:
        words = "expected the training step as `step1000` in its revision or in the name of its folder"
        raise InputError(f"{path}: {words}")
    fields = {"run": name, "step": int(step[1])}
    rows = []
    for task, scores in content["results"].items():
        for key in (key for key, value in scores.items() if isinstance(value, int | float) and "_stderr" not in key):
            metric, comma, filtered = key.partition(",")
            stderr = pd.to_numeric(scores.get(f"{metric}_stderr{comma}{filtered}"), errors="coerce")  # may be "N/A"
            # Shorten lm-eval's metric name `acc,none` to `acc`, as earlier versions of lm-eval wrote it. Write the name
            # of any other filter than `none` to a column.
            more = {} if filtered in ("", "none") else {"filter": filtered}
            rows.append({**fields, "task": task, "metric": metric, **more, "value": scores[key], "stderr": stderr})
    return rows


def _table_curves(table: Any, path: Path, axis: AxisName, where: Mapping[str, str]) -> list[StepCurve]:
    names = {role: next((each for each in among if each in table), "") for role, among in _COLUMNS.items()}
    for column, name in {axis: axis if axis in table else "", "value": names["value"]}.items():
        if not name:
            raise InputError(f"{path}: expected a column {column}, got {', '.join(map(str, table.columns))}")
    for column, value in where.items():
        if column not in table:
            raise InputError(f"where: expected a column of {', '.join(map(str, table.columns))}, got {column}")
        table = table.loc[[same_tag(cell, value) for cell in table[column]]]
    numbers = {axis, "stderr", names["value"], "step", "tokens"}
    for column in [each for each in table.columns if each in {*numbers, "layer"}]:
        table = table.assign(**{column: _numeric(table[column], f"{path}, {column}")})
    if "layer" in table and (table["layer"] % 1).any():
        raise InputError(f"{path}, layer: expected whole numbers")
    roles = [name for role, name in names.items() if name and role != "value"]
    others = [name for name in table.columns if name not in {*numbers, *roles, "layer"}]
    table = table.assign(
        **{name: table[name].map(str, na_action="ignore") for name in (*roles, *others) if table[name].dtype == object}
    )
    varying = lambda rows, name: rows[name].nunique(dropna=False) > 1  # noqa: E731
    by_run = [rows for _, rows in table.groupby(names["run"], dropna=False)] if names["run"] else [table]
    # A column that is constant within each run does not distinguish curves, so it does not become a tag.
    tags = [name for name in others if any(varying(rows, name) for rows in by_run)]
    keys = [*roles, *(["layer"] if "layer" in table else []), *tags]
    curves = []
    groups = table.groupby(keys, dropna=False, sort=False) if keys else [((), table)]
    for values, rows in groups:
        of = dict(zip(keys, values, strict=True))
        rows = rows.sort_values(axis)
        if (twice := rows[axis][rows[axis].duplicated()]).size:
            named = ", ".join(f"{k} {v}" for k, v in of.items())
            raise InputError(
                f"{path}: two values at {axis} {twice.iloc[0]:g}{named and f' of {named}'}: "
                "expected one a curve; choose with --where, or give the table a column that tells them apart"
            )
        stderr = rows["stderr"] if "stderr" in rows else [np.nan] * len(rows)
        points = [*zip(rows[axis], rows[names["value"]], stderr, strict=True)]
        of = {name: each for name, each in of.items() if each == each}  # drops NaN, which differs from itself
        run, analysis, metric = (str(of.get(names[role], "")) for role in ("run", "analysis", "metric"))
        curves.append(
            curve_of_points(
                run or path.stem,
                analysis,
                metric or names["value"],
                int(of["layer"]) if "layer" in of else None,
                {str(name): of[name] for name in tags if name in of},
                points,
            )
        )
    return curves


def _numeric(column: Any, name: str) -> Any:
    try:
        return column.astype("float64")
    except (ValueError, TypeError, OverflowError) as error:
        raise InputError(f"{name}: expected numbers: {error}") from error
