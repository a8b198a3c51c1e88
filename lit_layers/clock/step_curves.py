"""Curves over training steps, value and standard error: of runs, of tables of scores, and over seeds."""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from lit_layers import records, run_data
from lit_layers.clock.prompt_curves import prompts_of_curve, rows_of_curves
from lit_layers.errors import InputError
from lit_layers.figures.labels import listing, tag_text
from lit_layers.figures.tables import ORDINALS, grouped
from lit_layers.identity import Settings
from lit_layers.metrics import look_up

Array = NDArray[np.floating[Any]]
AxisName = Literal["step", "tokens"]
Tags = Mapping[str, Any]

NORMAL_95 = 3.92  # standard errors that a 95% interval is wide
_NO_CURVE = {*records.PLACES, *ORDINALS, "reference"}
_TABLES: dict[str, Any] = {
    ".csv": pd.read_csv,
    ".parquet": pd.read_parquet,
    ".jsonl": lambda path: pd.read_json(path, lines=True),
}
_STEP = re.compile(r"step[-_=]?(\d{1,18})(?!\d)", re.IGNORECASE)
_NUMBER = re.compile(r"-?\d+(\.\d+)?")
_NO_NAME = re.compile(r"[\x00-\x1f\x7f]|.{201}")  # has no room in a figure, or no letter for it
# What a column of a table of scores is called, the first that is there.
_COLUMNS = {
    "run": ("run", "model"),
    "analysis": ("analysis", "task"),
    "metric": ("metric",),
    "value": ("value", "score"),
}


@dataclass(frozen=True, kw_only=True)
class StepCurve:
    """One number over the checkpoints of a run.

    `at` are steps or tokens, increasing, (checkpoints,); `values` and `stderr` (None: not known) belong to them.
    `over` says what the errors are over: "prompts" (or test rows), "seeds", or "" where they are guessed. Of several
    seeds `seeds` has the curve of each, (seeds, checkpoints), and `values` their mean. `prompts` are the values of each
    prompt, (prompts, checkpoints), NaN where there is none; None where a run does not keep them. Curves with the same
    `prompts_of` are of the same prompts in the same order.
    """

    run: str
    analysis: str
    metric: str
    layer: int | None
    tags: Tags
    at: Array
    values: Array
    stderr: Array | None = None
    seeds: Array | None = None
    prompts: Array | None = None
    prompts_of: str = ""

    @property
    def over(self) -> str:
        by_prompts = self.stderr is not None or self.prompts is not None
        return "seeds" if self.seeds is not None else "prompts" if by_prompts else ""

    @property
    def key(self) -> tuple[str, str, int | None, str]:
        """What it is, in whichever run."""
        return self.analysis, self.metric, self.layer, self.tag_text

    @property
    def tag_text(self) -> str:
        return _text(dict(sorted(self.tags.items())))

    @property
    def title(self) -> str:
        """As figures call it: `Coupling, k = 12`, `Accuracy, layer 3`; of a task's score the task comes first."""
        row, tags = look_up(self.metric), dict(self.tags)
        name, kind = row.title, ""
        if "of" in tags:  # what it is of comes first: rows of a figure have few characters
            name, _, kind = name.partition(", ")
            name += f" {tag_text({'of': tags.pop('of')})}"
        parts = [name, tag_text(tags), kind, "" if self.layer is None else f"layer {self.layer}"]
        title = ", ".join(filter(None, parts))
        return title if row.group or not self.analysis else f"{self.analysis}: {title}"


def curves_of(
    place: str | Path,
    *,
    metrics: Sequence[str] = (),
    where: Mapping[str, str] | None = None,
    axis: AxisName = "step",
    settings: Settings = (),
    allow_suspect: bool = False,
) -> list[StepCurve]:
    """Returns the curves of a run's folder, of a table of scores by step, or of a folder of results of lm-eval or MTEB.

    Args:
        place: a folder with measurements.jsonl; a .csv, .parquet or .jsonl file with a row a score and the columns
            `step` and `value` (or `score`), maybe `stderr`, `run` (or `model`), `analysis` (or `task`), `metric` and
            `layer`, any others being tags; a .json file of results, or a folder of these.
        metrics: these alone, `METRIC` or `ANALYSIS/METRIC`; without any, those that tables of results have.
        where: tags, or columns of a table, that curves must have.
        axis: what they are over.
        settings: of runs, as in `lit_layers.identity`.
        allow_suspect: also take checkpoints that an audit found suspect.

    Raises:
        InputError: nothing of that kind is there, two values at one step of a curve, suspect checkpoints.
    """
    place, run = Path(place), None
    if place.is_dir() and any((place / name).is_file() for name in ("measurements.jsonl", "metrics.jsonl")):
        run = _of_steps(place, settings, allow_suspect)
        curves = curves_in(run.name, run.measurements, axis=axis, everything=bool(metrics))
        with_tags = [curve for curve in curves if _has(curve.tags, where or {})]
        if curves and not with_tags:
            raise InputError(f"where: no curve of {place} has {_text(where or {})}")
        curves = with_tags
    else:
        if settings:
            raise InputError(f"settings: expected runs, which have some, got the table {place}")
        curves = _of_table(_table(place), place, axis, where or {})
    chosen = [curve for curve in curves if is_asked(curve, metrics)]
    if not chosen:
        there = listing("metric", sorted({f"{curve.analysis}/{curve.metric}".strip("/") for curve in curves}), most=8)
        raise InputError(
            f"metrics: {place} has no such curve over {axis}s: expected of {there}"
            if curves
            else f"{place}: no curve over {axis}s"
        )
    return chosen if run is None else with_prompts(chosen, place, run.measurements, axis)


def over_seeds(curves: Iterable[StepCurve], name: str) -> list[StepCurve]:
    """Returns the curves that all runs have, over those of their checkpoints that all have, with each run's own.

    Raises:
        InputError: two runs are the same, as `refuse_copies` says.
    """
    curves = list(curves)
    refuse_copies(curves)
    runs = len({curve.run for curve in curves})
    return [curve for curve in means_of_seeds(curves, name) if curve.seeds is not None and len(curve.seeds) == runs]


def means_of_seeds(curves: Iterable[StepCurve], name: str) -> list[StepCurve]:
    """As `over_seeds`, of any curves: single numbers of different runs may be the same everywhere."""
    groups = grouped(curves, lambda curve: curve.key)
    merged = []
    for group in groups.values():
        common, seeds = at_common_checkpoints(group)
        if len(group) < 2 or not len(common):
            continue
        first = group[0]
        merged.append(
            StepCurve(
                run=name,
                analysis=first.analysis,
                metric=first.metric,
                layer=first.layer,
                tags=first.tags,
                at=common,
                values=seeds.mean(0),
                seeds=seeds,
            )
        )
    return merged


def at_common_checkpoints(curves: Sequence[StepCurve]) -> tuple[Array, Array]:
    """Returns where all curves have a value, (checkpoints,), and their values there, (curves, checkpoints)."""
    common = sorted(set.intersection(*(set(curve.at[np.isfinite(curve.values)].tolist()) for curve in curves)))
    return np.array(common), np.stack([curve.values[np.isin(curve.at, common)] for curve in curves])


def refuse_copies(seeds: Iterable[StepCurve]) -> None:
    """Refuses runs with the same numbers everywhere: an interval over a run and its copy is no interval over seeds.

    Raises:
        InputError: naming the first two.
    """
    seen: dict[frozenset[Any], str] = {}
    for run, curves in grouped(seeds, lambda curve: curve.run).items():
        numbers = frozenset((curve.key, curve.at.tobytes(), curve.values.tobytes()) for curve in curves)
        if (first := seen.setdefault(numbers, run)) != run:
            raise InputError(
                f"seeds: {first} and {run} have the same numbers at every checkpoint: expected runs of different "
                "model.init_seed or data.seed (seed_everything alone changes neither)"
            )


def loss_curves(curves: Iterable[StepCurve], loss: str) -> dict[str, StepCurve]:
    """Returns of each run that has it the curve of a loss: the whole model's, else its last layer's.

    A perplexity counts by its log.

    Raises:
        InputError: several curves of one run.
    """
    of_run: dict[str, StepCurve] = {}
    for curve in (each for each in curves if is_asked(each, [loss])):
        other = of_run.setdefault(curve.run, curve)
        if curve is not other and curve.layer == other.layer:
            raise InputError(f"loss: {curve.run} has several curves of {loss}: expected one; choose with --where")
        if other.layer is not None and (curve.layer is None or curve.layer > other.layer):
            of_run[curve.run] = curve
    return {run: _log(curve) for run, curve in of_run.items()} if loss.endswith(("ppl", "perplexity")) else of_run


def _log(curve: StepCurve) -> StepCurve:
    with np.errstate(divide="ignore", invalid="ignore"):
        stderr = None if curve.stderr is None else curve.stderr / curve.values
        seeds = None if curve.seeds is None else np.log(curve.seeds)
        return replace(curve, values=np.log(curve.values), stderr=stderr, seeds=seeds)


def is_asked(curve: StepCurve, metrics: Sequence[str]) -> bool:
    return not metrics or curve.metric in metrics or f"{curve.analysis}/{curve.metric}" in metrics


def _text(tags: Tags) -> str:
    return ",".join(f"{name}={value}" for name, value in tags.items())


def _has(tags: Tags, asked: Mapping[str, str]) -> bool:
    return all(name in tags and str(tags[name]) == value for name, value in asked.items())


# ------------------------------------------------------------------------------------------------ runs


def _of_steps(root: Path, settings: Settings, allow_suspect: bool) -> run_data.RunData:
    run = run_data.read_run(root, settings=settings)
    if run.compares_models:
        raise InputError(f"{root}: expected a run over training steps, its models have none")
    if (suspect := run_data.suspects(run)) and not allow_suspect:
        steps = listing("step", [step for steps in suspect.values() for step in steps])
        raise InputError(
            f"{root}: {steps} are suspect ({next(iter(suspect))}): measure them anew, or say --allow-suspect"
        )
    return run


def with_prompts(
    curves: Sequence[StepCurve], root: Path, measurements: Sequence[records.Measurement], axis: AxisName = "step"
) -> list[StepCurve]:
    """Returns the curves of a run's measurements with the values of prompts that its folder `root` keeps."""
    analyses = {curve.analysis for curve in curves}
    measured = [m for m in measurements if m.analysis in analyses]
    rows_by_curve = rows_of_curves(root, measured, {curve.key for curve in curves}, _key, axis=axis)
    whole = []
    for curve in curves:
        measured_on, rows = rows_by_curve.get(curve.key, ("", {}))
        prompts = prompts_of_curve(curve.at, curve.values, rows)
        same = "" if prompts is None else f"{measured_on} {len(prompts)}"
        whole.append(replace(curve, prompts=prompts, prompts_of=same))
    return whole


def _key(analysis: str, record: records.Record) -> tuple[str, str, int | None, str]:
    """Returns the key of the curve that a record is of."""
    return analysis, record.metric, record.layer, _text(_tags(record))


def _tags(record: records.Record) -> Tags:
    return {name: record.tags[name] for name in sorted(record.tags) if not name.startswith("num_")}


def curves_in(
    run: str, measurements: Iterable[records.Measurement], *, axis: AxisName = "step", everything: bool = False
) -> list[StepCurve]:
    """Returns the curves of a run's measurements, those that tables of results show or `everything`.

    Raises:
        InputError: measurements that do not say how many tokens were seen, where these are the axis.
    """
    points: dict[tuple[Any, ...], tuple[Tags, dict[int, tuple[float, float]]]] = {}
    for m in measurements:
        at = m.step if axis == "step" else m.tokens
        if m.error is not None or m.step is None:
            continue
        if at is None:
            raise InputError(f"axis: {run} does not say how many tokens step {m.step} has seen: expected step")
        for record in m.records:
            row = look_up(record.metric)
            if record.other_layer is not None or _NO_CURVE & record.tags.keys() or record.metric == records.FAILED:
                continue
            if not everything and (row.secondary or row.unlisted):
                continue
            _, curve = points.setdefault(_key(m.analysis, record), (_tags(record), {}))
            if at in curve:
                raise InputError(f"{run}: {m.analysis} has two values of {record.metric} at {axis} {at}: expected one")
            curve[at] = record.value, _stderr(record)
    return [
        _curve(run, analysis, metric, layer, tags, [(at, *each[at]) for at in sorted(each)])
        for (analysis, metric, layer, _), (tags, each) in points.items()
    ]


def _stderr(record: records.Record) -> float:
    if record.stderr is not None:
        return record.stderr
    return np.nan if record.low is None or record.high is None else (record.high - record.low) / NORMAL_95


def _curve(
    run: str, analysis: str, metric: str, layer: int | None, tags: Tags, points: Sequence[tuple[float, float, float]]
) -> StepCurve:
    """Of points (step, value, standard error); errors count where every value has one."""
    at, values, stderr = np.array(points, dtype=np.float64).T
    is_known = bool(np.isfinite(stderr[np.isfinite(values)]).all())
    return StepCurve(
        run=run,
        analysis=analysis,
        metric=metric,
        layer=layer,
        tags=tags,
        at=at,
        values=values,
        stderr=stderr if is_known else None,
    )


# ------------------------------------------------------------------------------------------------ tables of scores


def _table(place: Path) -> Any:
    if place.is_dir():
        rows = [row for path in sorted(place.rglob("*.json")) for row in _results(path, of_folder=True)]
        if not rows:
            raise InputError(f"{place}: expected a run's folder, or results of lm-eval or MTEB, got neither")
        return pd.DataFrame(rows)
    if not place.is_file():
        raise InputError(f"expected a run's folder or a table of scores, {place} is not there")
    if place.suffix == ".json":
        return pd.DataFrame(_results(place, of_folder=False))
    if place.suffix not in _TABLES:
        raise InputError(f"{place}: expected a table that ends in {', '.join(_TABLES)} or .json, or a run's folder")
    try:
        return _TABLES[place.suffix](place)
    except (ValueError, OSError) as error:  # pandas' and pyarrow's are both
        raise InputError(f"{place} cannot be read as a table: {str(error).splitlines()[0]}") from error


def _results(path: Path, *, of_folder: bool) -> list[dict[str, Any]]:
    """Rows of a file of results of lm-eval or of MTEB, or of a list of rows; of a folder's other files none."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError, RecursionError) as error:
        raise InputError(f"{path} cannot be read as JSON: {error}") from error
    if isinstance(content, list) and all(isinstance(row, dict) for row in content) and not of_folder:
        return content
    content = _object(content)
    if isinstance(content.get("results"), dict):
        config = _object(content.get("config"))
        if isinstance(arguments := config.get("model_args"), str):
            arguments = {name: value for name, _, value in (part.partition("=") for part in arguments.split(","))}
        arguments = _object(arguments)
        name = str(arguments.get("pretrained") or content.get("model_name") or path.parent.name)
        revision = str(arguments.get("revision") or config.get("model_revision") or "")
        place = {"run": name, "step": _step_in(revision, name, path.name, path.parent.name, path=path)}
        return [
            {**place, "task": task, "metric": metric, "value": value, "stderr": _stderr_beside(scores, metric)}
            for task, scores in content["results"].items()
            if isinstance(scores, dict)
            for metric, value in scores.items()
            if _is_number(value) and "_stderr" not in metric
        ]
    if "task_name" in content and isinstance(content.get("scores"), dict):
        place = {"run": path.parent.parent.name, "task": str(content["task_name"]), "metric": "main_score"}
        place |= {"step": _step_in(path.parent.name, path.parent.parent.name, path=path)}
        return [
            {**place, "split": split, "subset": row.get("hf_subset", "default"), "value": row["main_score"]}
            for split, rows in content["scores"].items()
            if isinstance(rows, list)
            for row in rows
            if isinstance(row, dict) and "main_score" in row
        ]
    if of_folder:
        return []
    raise InputError(f"{path}: expected results of lm-eval (results), of MTEB (task_name, scores) or a list of rows")


def _object(content: Any) -> dict[str, Any]:
    return content if isinstance(content, dict) else {}


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _stderr_beside(scores: Mapping[str, Any], name: str) -> Any:
    metric, comma, filtered = name.partition(",")
    value = scores.get(f"{metric}_stderr{comma}{filtered}")
    return value if _is_number(value) else np.nan


def _step_in(*texts: str, path: Path) -> int:
    for text in texts:
        if match := _STEP.search(text):
            return int(match[1])
    raise InputError(f"{path}: expected the training step as `step1000` in its revision or in the name of its folder")


def _of_table(table: Any, place: Path, axis: AxisName, where: Mapping[str, str]) -> list[StepCurve]:
    if not len(table):
        raise InputError(f"{place}: expected scores by step, it has no rows")
    names = {role: next((each for each in among if each in table), "") for role, among in _COLUMNS.items()}
    for column, name in {axis: axis if axis in table else "", "value": names["value"]}.items():
        if not name:
            raise InputError(f"{place}: expected a column {column}, got {', '.join(map(str, table.columns))}")
    for column, value in where.items():
        if column not in table:
            raise InputError(f"where: expected a column of {', '.join(map(str, table.columns))}, got {column}")
        table = table[_equals(table[column], value)]
    if not len(table):
        raise InputError(f"where: no row of {place} has {_text(where)}")
    numbers = {axis, "stderr", names["value"], "step", "tokens"}
    for column in {*numbers, "layer"} & {*table.columns}:
        table = table.assign(**{column: _numeric(table[column], f"{place}, {column}")})
    if table[axis].isna().any():
        raise InputError(f"{place}: expected a number in each row of column {axis}, some have none")
    if "layer" in table:
        layers = table["layer"].dropna()
        if (odd := layers[~((layers % 1 == 0) & layers.between(0, 2**31))]).size:
            raise InputError(f"{place}: expected whole numbers of 0 or more in column layer, got {odd.iloc[0]:g}")
    roles = [name for role, name in names.items() if name and role != "value"]
    others = [name for name in table.columns if name not in {*numbers, *roles, "layer"}]
    table = table.assign(
        **{name: table[name].map(str, na_action="ignore") for name in (*roles, *others) if table[name].dtype == object}
    )
    varying = lambda rows, name: rows[name].nunique(dropna=False) > 1  # noqa: E731
    by_run = [rows for _, rows in table.groupby(names["run"], dropna=False)] if names["run"] else [table]
    tags = [name for name in others if any(varying(rows, name) for rows in by_run)]  # what is one a run tells nothing
    for name in (*roles, *tags):
        if odd := next((text for text in map(str, table[name].unique()) if _NO_NAME.search(text)), ""):
            raise InputError(
                f"{place}: expected names of a line and at most 200 characters in column {name}, got {odd[:60]!r}"
            )
    keys = [*roles, *(["layer"] if "layer" in table else []), *tags]
    if len(table) > 1 and tags and not table.duplicated(keys).any():
        raise InputError(
            f"{place}: each row would be a curve of its own by column {tags[-1]}: expected it to be left out"
        )
    curves = []
    groups = table.groupby(keys, dropna=False, sort=False) if keys else [((), table)]
    for values, rows in groups:
        of = dict(zip(keys, values, strict=True))
        rows = rows.sort_values(axis)
        if (twice := rows[axis][rows[axis].duplicated()]).size:
            named = ", ".join(f"{k} {v}" for k, v in of.items())
            raise InputError(
                f"{place}: two values at {axis} {twice.iloc[0]:g}{named and f' of {named}'}: "
                "expected one a curve; choose with --where, or give the table a column that tells them apart"
            )
        stderr = rows["stderr"] if "stderr" in rows else [np.nan] * len(rows)
        points = [*zip(rows[axis], rows[names["value"]], stderr, strict=True)]
        of = {name: each for name, each in of.items() if each == each}  # without what a row leaves open
        run, analysis, metric = (str(of.get(names[role], "")) for role in ("run", "analysis", "metric"))
        curves.append(
            _curve(
                run or place.stem,
                analysis,
                metric or names["value"],
                int(of["layer"]) if "layer" in of else None,
                {str(name): of[name] for name in tags if name in of},
                points,
            )
        )
    return curves


def _equals(column: Any, text: str) -> Any:
    """Where a column says so: 0 is 0.0, too, as which a column with gaps reads; blanks behind commas do not count."""
    same = column.astype(str).str.replace(", ", ",") == text.replace(", ", ",")
    return same | (column == float(text)) if _NUMBER.fullmatch(text) and column.dtype.kind in "if" else same


def _numeric(column: Any, name: str) -> Any:
    if column.dtype == bool or (column.dtype == object and column.map(type).eq(bool).any()):
        raise InputError(f"{name}: expected numbers, got true or false")
    try:
        return column.astype("float64")
    except (ValueError, TypeError, OverflowError) as error:
        raise InputError(f"{name}: expected numbers: {error}") from error
