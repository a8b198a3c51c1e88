"""Tables of metrics and scores by model, task and layer, read from run folders or files."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from lit_layers.correlate.model_table import (
    MetricQuery,
    RunModel,
    candidates,
    find_model,
    nearest,
    numeric,
    plainest_variant,
    read_run_models,
    read_table,
    refuse_unlike,
    resolve_k,
)
from lit_layers.errors import InputError
from lit_layers.figures.labels import listing, tag_text
from lit_layers.figures.profiles import short_names
from lit_layers.functional.correlation import FEWEST_LAYERS
from lit_layers.identity import variant_of
from lit_layers.metrics import look_up

Values = NDArray[np.float64]
_IGNORED = ("task", "domain", "score", "states")  # tags that do not tell two curves of a metric apart


@dataclass(frozen=True, kw_only=True)
class ModelTables:
    """Scores and metrics of one model or checkpoint, as tables with a row per task and a column per layer, 0 to L.

    `metrics` maps each metric to the table of the tasks that have it. `left_out` gives, by metric and then by task, the
    reason why another task is not in the table. Layer 0 may be NaN.
    """

    name: str
    step: int | None
    scores: pd.DataFrame
    metrics: dict[str, pd.DataFrame]
    left_out: dict[str, dict[str, str]]

    @property
    def num_layers(self) -> int:
        return self.scores.shape[1] - 1

    def tables(
        self, metric: str, first_layer: int, tasks: Sequence[str] | None = None
    ) -> tuple[list[str], Values, Values]:
        """Return the names of tasks, their values of a metric, (tasks, layers), and their scores, (tasks, layers).

        The layers start at `first_layer`. By default, all tasks that have the metric are used.
        """
        tasks = [*map(str, self.metrics[metric].index)] if tasks is None else [*tasks]
        values = [table.loc[tasks, first_layer:].to_numpy() for table in (self.metrics[metric], self.scores)]
        return tasks, np.ascontiguousarray(values[0]), np.ascontiguousarray(values[1])


@dataclass(kw_only=True)
class LayerTables:
    """The scores and metrics of all models, the titles of the metrics, and the models that are left out.

    `left_out` maps each model that is left out to the reason.
    """

    models: list[ModelTables] = field(default_factory=list)
    titles: dict[str, str] = field(default_factory=dict)
    score_title: str = "Score"
    first_layer: int = 1
    left_out: dict[str, str] = field(default_factory=dict)
    common: list[str] = field(default_factory=list)  # metrics measured on the same texts for all tasks
    states: str | None = None
    source: str = ""
    # The tags of the curves that were read, by (option, metric) and then by model.
    variants: dict[tuple[str, str], dict[str, Mapping[str, Any]]] = field(default_factory=dict)


def read_layers(
    folders: Sequence[Path],
    metrics: Sequence[str],
    scores: str,
    *,
    step: int | None = None,
    with_layer_0: bool = False,
) -> LayerTables:
    """Read metrics and scores over the layers of each model.

    Args:
        folders: Run folders, or folders that contain run folders.
        metrics: Metrics as `NAME` or `ANALYSIS/NAME`. If a metric has several curves, which differ in their tags,
            choose one by `[tag=value,...]`. Measurements on the texts of each task (`ANALYSIS/TASK`) take precedence
            over measurements on texts common to all tasks.
        scores: `mteb` for the `main_score` of the measurements `mteb/TASK`; another metric; or a file with the columns
            model, task, layer and score.
        step: The checkpoint of a series. If it is None, the last one that has both metrics and scores is read.
        with_layer_0: Whether correlations include layer 0, the embedding output. If so, a metric may also choose
            layer 0 as the best layer.

    Raises:
        InputError: No model has a metric, several curves of a metric remain, or a metric was measured on other hidden
            states than the scores (with or without the final norm).
    """
    if not folders:
        raise InputError("models: expected run folders")
    models = read_run_models(folders)
    sources = [_source(MetricQuery.parse(text), models, "metrics") for text in metrics]
    if Path(scores).suffix in (".csv", ".parquet"):
        table = _file_values(Path(scores))
        scored = _Source(MetricQuery(text="score", name="score"), "scores", [*table["model"].unique()], table)
    else:
        score = MetricQuery.parse(scores, "scores")
        score = score if score.analysis else replace(score, name="main_score", analysis=score.name)
        scored = _source(score, models, "scores")
    tables = LayerTables(first_layer=0 if with_layer_0 else 1, source=", ".join(map(str, [*folders, scores])))
    names, depths = sources[0].models, dict[str, int]()
    for model in models:
        measured = (each.provenance.get("depth") for each in model.measurements)
        depths[model.name] = max((depth for depth in measured if type(depth) is int), default=0)
    for name in [*names, *(name for name in scored.models if len(find_model(name, names)) != 1)]:
        try:
            tables.models.append(_model_tables(tables, name, scored, sources, step, depths.get(name, 0)))
        except _LeftOutError as reason:
            tables.left_out[name] = str(reason)
    if not tables.models:
        raise InputError(_no_models(tables, models, [scored, *sources]))
    short = short_names([model.name for model in tables.models])
    tables.models = [replace(model, name=short[model.name]) for model in tables.models]
    return tables


class _LeftOutError(Exception):
    """An error for a model that is left out; its message is the reason."""


def _model_tables(
    tables: LayerTables,
    name: str,
    scores: "_Source",
    metrics: Sequence["_Source"],
    step: int | None,
    num_layers: int,
) -> ModelTables:
    """Return the scores and metrics of one model.

    The titles of the metrics, the kind of hidden states and the tags of the curves are added to `tables`.

    Raises:
        _LeftOutError: The model has no scores or no metrics, or has them at too few layers.
    """
    matches, first = find_model(name, scores.models), tables.first_layer
    if len(matches) != 1:
        raise _LeftOutError("no scores")
    scored = scores.models[matches[0]]
    step = _step([scores.steps(scored), set().union(*(one.steps(name) for one in metrics))], scores.query.text, step)
    score_curves = scores.curves(scored, step)
    if score_curves is None:
        raise _LeftOutError(f"no {scores.query.text}")
    depth = max(layer for curve in score_curves.by_task.values() for layer in curve)
    if depth < num_layers:  # leave the model out, because its last layer has no score
        raise _LeftOutError(f"scores up to layer {depth} of {num_layers}")
    if depth + 1 - first < FEWEST_LAYERS:
        raise _LeftOutError(f"{depth} layers, expected at least {FEWEST_LAYERS - (1 - first)}")
    if None not in (tables.states, score_curves.states) and score_curves.states != tables.states:
        raise InputError(f"scores: models were scored on states {tables.states} and {score_curves.states}: take one")
    table = pd.DataFrame(score_curves.by_task, index=range(depth + 1), dtype="float64").T
    unscored = {str(task): why for task, row in table.iterrows() if (why := _missing(row, first, "score"))}
    found, left_out, curves = {}, {}, {scores: score_curves}
    for one in metrics:
        text, curve = one.query.text, one.curves(name, step, scored=score_curves)
        values, missing = _metric_table(text, curve, table, unscored, first)
        left_out |= {text: missing} if missing else {}
        if curve is not None and len(values):
            found[text], curves[one] = values, curve
            tables.titles.setdefault(text, _title(one.query, curve))
            tables.common += [text] if "" in curve.by_task and text not in tables.common else []
    if not found:
        reasons = "; ".join(f"{key}: {next(iter(why.values()))}" for key, why in left_out.items())
        raise _LeftOutError(f"no metric beside its scores{f' ({reasons})' if reasons else ''}")
    for one, curve in curves.items():
        variants = tables.variants.setdefault((one.option, one.query.text), {})
        variants[name] = curve.variant
        refuse_unlike(variants, one.query.text, one.option)
    tables.states = score_curves.states or tables.states
    tables.score_title = tables.score_title if scores.query.name == "score" else _title(scores.query, score_curves)
    return ModelTables(name=name, step=step, scores=table.drop(index=[*unscored]), metrics=found, left_out=left_out)


def _step(sides: Sequence[set[int | None]], score: str, step: int | None) -> int | None:
    """Return the step of the checkpoint to read: `step`, or if None the last one that has both scores and metrics.

    `sides` are the steps at which the model has scores and those at which it has metrics.

    Raises:
        _LeftOutError: The model has no scores, no metrics, or not both at the step.
    """
    for what, steps in zip((score, "metric asked for"), sides, strict=True):
        if not steps:
            raise _LeftOutError(f"no {what}")
    stepped: list[Any] = [{each for each in steps if each is not None} for steps in sides if steps != {None}]
    both: Any = set.intersection(*stepped) if stepped else {None}
    if step not in (None, *both):
        raise _LeftOutError(f"no scores and metrics at step {step}")
    if not both:
        raise _LeftOutError("no step has both scores and metrics")
    return step if step is not None or not stepped else max(both)


def _metric_table(
    text: str, curves: "_Curves | None", scores: pd.DataFrame, unscored: Mapping[str, str], first: int
) -> tuple[pd.DataFrame, dict[str, str]]:
    """Return the values of a metric of one model, (tasks, layers), and the tasks left out with the reasons.

    The table has the tasks that have both the metric and scores at all layers from `first` on.
    """
    by_task = {} if curves is None else curves.by_task
    per_task = {task: by_task.get(task, by_task.get("", {})) for task in scores.index}
    table = pd.DataFrame(per_task, index=scores.columns, dtype="float64").T
    depth: Any = scores.columns[-1]
    missing = dict(unscored)
    for task in scores.index.drop([*unscored]):
        if not per_task[task]:
            missing[task] = f"no {text}"
        elif max(per_task[task]) > depth:
            missing[task] = f"{text} has layers up to {max(per_task[task])}, the score up to {depth}"
        elif why := _missing(table.loc[task], first, text):
            missing[task] = why
    return table.drop(index=[*missing]), {task: missing[task] for task in scores.index if task in missing}


def _missing(values: Any, first: int, what: str) -> str:
    """Return a message that names the layers without a finite value, or an empty string if all have one.

    Layers below `first` are ignored. `what` says in the message which value is missing.
    """
    missing = values.index[~np.isfinite(values.to_numpy()) & (values.index >= first)]
    return f"no {what} at {listing('layer', missing, most=5)}" if len(missing) else ""


def _title(query: MetricQuery, curves: "_Curves") -> str:
    return ", ".join(filter(None, [look_up(query.name).title, tag_text(dict(curves.variant))]))


def _no_models(tables: LayerTables, models: Sequence[RunModel], sources: Sequence["_Source"]) -> str:
    """Return the error message for the case that all models are left out, with the reasons."""
    pairs = (pair for model in models for pair in model.pairs())
    there = dict.fromkeys(f"{analysis.partition('/')[0]}/{name}" for analysis, name in pairs)
    for source in sources:
        if source.values.empty:
            return f"{source.option}: no model has {source.query.text!r} per layer{nearest(source.query.text, there)}"
    reasons = "; ".join(f"{model}: {why}" for model, why in list(tables.left_out.items())[:3])
    return f"expected a model with scores and metrics of the same tasks and layers, got none ({reasons})"


# ------------------------------------------------------------------------------------------------ where curves are


class _Curves(NamedTuple):
    """The curves of one metric over the layers of one model at one checkpoint, one curve per task.

    `by_task` maps a task to its values by layer. The task "" has the values on texts that all tasks share. `states` is
    the kind of hidden states. `variant` contains the tags that distinguish these curves from others of the metric.
    """

    by_task: dict[str, dict[int, float]]
    states: str | None
    variant: Mapping[str, Any]


# Columns of `_Source.values`, which has one row per value at a layer. `task` is "" for values on texts that all tasks
# share. `states` (the kind of hidden states) is None if unknown. `variant` has the tags that distinguish curves.
_COLUMNS = ["model", "step", "analysis", "task", "layer", "value", "states", "variant"]


@dataclass(frozen=True, eq=False)
class _Source:
    """All values of one metric, or all scores, of all models at all steps and layers."""

    query: MetricQuery
    option: str
    models: list[str]
    values: Any  # a table with the columns `_COLUMNS` and dtype object

    def steps(self, model: str) -> set[int | None]:
        """Return the steps at which a model has values.

        The set is empty for a model without values. It is {None} for a model whose measurements have no step.
        """
        return {*self.values["step"][self.values["model"] == model]}

    def curves(self, model: str, step: int | None, scored: _Curves | None = None) -> _Curves | None:
        """Return a model's curves over layers at one checkpoint, or None if there are none.

        Without `scored`, the curves are those of scores. `scored` are the score curves of this model. If they are
        given, the result is the curves of a metric on the texts of each task in `scored`. If the metric was not
        measured on the texts of any task, its values on texts that belong to no task are read. The metric must be
        measured on the same kind of hidden states as `scored`, if that kind is known.
        """
        text, what = self.query.text, f"{self.query.text} of {model}"
        rows = self.values[self.values["model"] == model]
        rows = rows[(rows["step"] == step) | rows["step"].isna()]
        if len(analyses := rows["analysis"].unique()) > 1:
            listed = ", ".join(f"{analysis}/{self.query.name}" for analysis in analyses)
            raise InputError(f"{self.option}: {text} is in more than one analysis: {listed}")
        task_rows = rows[(rows["task"] != "") if scored is None else rows["task"].isin([*filter(None, scored.by_task)])]
        rows = task_rows if scored is None or len(task_rows) else rows[rows["task"] == ""]
        if rows.empty:
            return None
        states = scored.states if scored else None
        if states not in (conventions := rows["states"].unique().tolist()):
            other = plainest_variant(({"states": each} for each in conventions), what, self.option)["states"]
            if None not in (other, states):
                both = f"was measured on states {other}, the scores of {model} on {states}"
                raise InputError(f"metrics: {text} {both}: measure both with the same `states`")
            states = other
        rows = rows[[each == states for each in rows["states"]]]
        variant = plainest_variant(rows["variant"], what, self.option)
        plain = rows[[each == variant for each in rows["variant"]]].groupby("task", sort=False)
        by_task = {str(task): dict(zip(group["layer"], group["value"], strict=True)) for task, group in plain}
        return _Curves(by_task, states, variant)


def _source(query: MetricQuery, models: Sequence[RunModel], option: str) -> _Source:
    values = [row for model in models for row in _run_values(model, query)]
    table = pd.DataFrame(values, columns=_COLUMNS, dtype=object)
    return _Source(query, option, [model.name for model in models], table)


def _run_values(model: RunModel, query: MetricQuery) -> Iterable[tuple[Any, ...]]:
    """Yield a row, with the columns `_COLUMNS`, for each value of a metric in a run folder.

    Records omit the tags `states` and `normalization` if these have their defaults. A query may still name the
    defaults.
    """
    for m in model.measurements:
        analysis, _, task = m.analysis.partition("/")
        task = "" if m.analysis == query.analysis else task
        for _, record in candidates([m], query):
            states = "hf" if str(record.tags.get("preset")).startswith("released_code") else "resid"
            tags = {"states": states, "normalization": "raw", **record.tags}
            if record.layer is not None and resolve_k(query, model).fits(tags):
                key = (model.name, m.step, analysis, task, record.layer, record.value, str(tags["states"]))
                yield (*key, variant_of(record.tags, _IGNORED))


def _file_values(path: Path) -> Any:
    """Read the scores in a file with the columns model, task, layer and score, and optionally step."""
    rows: Any = read_table(path, "scores")
    for column in ("task", "layer", "score"):
        if column not in rows:
            there = ", ".join(map(str, rows.columns))
            raise InputError(f"scores: {path} has no column {column!r}; it has: {there}")
    expected = f"scores: expected numbers in {path}, got"
    values, layers = (numeric(rows[column], rows["model"], expected) for column in ("score", "layer"))
    if (wrong := layers.lt(0) | layers.mod(1).gt(0)).any():
        raise InputError(f"scores: expected layers in {path}, whole numbers from 0, got {layers[wrong].iloc[0]:g}")
    rows = rows.assign(value=values, layer=layers, analysis="").dropna(subset="layer").astype({"layer": int})
    rows = rows.reindex(columns=_COLUMNS).astype(object)
    rows = rows.where(rows.notna(), None).assign(variant=[{}] * len(rows))
    if (twice := rows.duplicated(["model", "step", "task", "layer"])).any():
        model, task, layer = rows[twice].iloc[0][["model", "task", "layer"]]
        raise InputError(f"scores: {path} has more than one score of {model}, {task}, layer {layer}")
    return rows
