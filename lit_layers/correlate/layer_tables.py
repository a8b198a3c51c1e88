"""Metrics and scores over layers: what the user asks for, and the tables of it by model and task."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lit_layers.correlate.layer_sources import Curve, Curves, File, Runs, Source, Wanted
from lit_layers.correlate.model_runs import nearest, read_run_models
from lit_layers.errors import InputError
from lit_layers.figures.labels import listing, tag_text
from lit_layers.figures.models import short_names
from lit_layers.functional.layer_selection import FEWEST_LAYERS
from lit_layers.metrics import look_up

Values = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class ModelTables:
    """One model, or one checkpoint of a series: curves over layers 0..L by task; NaN where layer 0 has no value.

    `metrics` has, for each metric, the tasks that have it; `left_out` says why the others do not.
    """

    name: str
    step: int | None
    num_layers: int
    scores: dict[str, Values]
    domains: dict[str, str]
    metrics: dict[str, dict[str, Values]]
    left_out: dict[str, dict[str, str]]

    def tables(self, metric: str, first_layer: int) -> tuple[list[str], Values, Values]:
        """The tasks that have a metric, and their tables (tasks, layers) of the metric and the scores."""
        own = self.metrics[metric]
        return (
            list(own),
            np.stack([own[task][first_layer:] for task in own]),
            np.stack([self.scores[task][first_layer:] for task in own]),
        )


@dataclass(frozen=True, kw_only=True)
class LayerTables:
    """The models, what the metrics are called, and which models are left out, with the reason."""

    models: list[ModelTables]
    titles: dict[str, str]
    score_title: str
    first_layer: int
    left_out: dict[str, str] = field(default_factory=dict)
    common: list[str] = field(default_factory=list)  # metrics measured on texts common to all tasks
    states: str | None = None
    source: str = ""


def read_layers(
    folders: Sequence[Path],
    *,
    metrics: Sequence[str],
    scores: str,
    metrics_file: Path | None = None,
    step: int | None = None,
    with_layer_0: bool = False,
) -> LayerTables:
    """Returns metrics and scores over the layers of each model: of a series the last checkpoint that has both.

    `scores` is `mteb`, the `main_score` of the measurements `mteb/TASK`, or a file with the columns model, task, layer
    and score. A metric is `NAME` or `ANALYSIS/NAME`, with `[tag=value,...]` where it has variants: of the measurements
    on each task's own texts (`ANALYSIS/TASK`) or else of those on texts common to all.
    `metrics_file` has them in columns instead.

    Raises:
        InputError: for a metric that no model has, one of several variants, or one of other states than the scores.
    """
    wanted = [Wanted.of(text) for text in metrics]
    twice = [one.text for one in wanted if [other.text for other in wanted].count(one.text) > 1]
    if twice:
        raise InputError(f"metrics: expected every metric once, got {twice[0]} twice")
    models = read_run_models(folders) if folders else []
    score_path = Path(scores) if Path(scores).suffix in (".csv", ".parquet") else None
    if not folders and (score_path is None or metrics_file is None):
        raise InputError("models: expected run folders, or files of both the scores and the metrics")
    score_source: Source = File(score_path, "scores") if score_path else Runs(models, "scores")
    metric_source: Source = File(metrics_file, "metrics-file") if metrics_file else Runs(models, "metrics")
    if folders and score_path and metrics_file:
        raise InputError("models: the scores and the metrics are both in files: leave the run folders out")
    reader = _Reader(score_source, metric_source, _score_wanted(scores, score_path), wanted, with_layer_0)
    found, left_out = [], {}
    for model in reader.names():
        one = reader.read(model, step)
        if isinstance(one, str):
            left_out[model] = one
        else:
            found.append(one)
    if not found:
        raise InputError(reader.nothing(left_out, models))
    names = short_names([model.name for model in found])
    return LayerTables(
        models=[ModelTables(**{**vars(model), "name": names[model.name]}) for model in found],
        titles={key: title for key, title in reader.titles.items() if any(key in m.metrics for m in found)},
        score_title=reader.score_title,
        first_layer=0 if with_layer_0 else 1,
        left_out=left_out,
        common=[one.text for one in wanted if one.text in reader.common],
        states=reader.states,
        source=", ".join([str(path) for path in (*folders, score_path, metrics_file) if path is not None]),
    )


def _score_wanted(text: str, path: Path | None) -> Wanted:
    if path is not None:
        return Wanted(text="score", name="score")
    wanted = Wanted.of(text, "scores")
    if wanted.analysis is None:
        return Wanted(text=text, name="main_score", analysis=wanted.name, tags=wanted.tags)
    return wanted


@dataclass
class _Reader:
    score_source: Source
    metric_source: Source
    score: Wanted
    wanted: Sequence[Wanted]
    with_layer_0: bool
    titles: dict[str, str] = field(default_factory=dict)
    common: set[str] = field(default_factory=set)
    states: str | None = None
    score_title: str = "Score"

    def names(self) -> list[str]:
        """The models that have metrics, then those that have only scores."""
        known = [name for name in self.score_source.names if _same(name, self.metric_source.names) is None]
        return [*self.metric_source.names, *known]

    def read(self, model: str, step: int | None) -> ModelTables | str:
        """The tables of one model, or why there are none."""
        scored = _same(model, self.score_source.names)
        if scored is None:
            return "no scores"
        if model not in self.metric_source.names:
            return "no metrics"
        at = self._step(model, scored, step)
        if isinstance(at, str):
            return at
        own = self.score_source.curves(scored, at, self.score, tasks=None, states=None)
        if own is None:
            return f"no {self.score.text}"
        depth = max(layer for curve in own.by_task.values() for layer in curve)
        first = 0 if self.with_layer_0 else 1
        if depth + 1 - first < FEWEST_LAYERS:
            return f"{depth} layers, expected at least {FEWEST_LAYERS - (1 - first)}"
        self._know_score(own)
        scores = {str(task): _values(curve, depth) for task, curve in own.by_task.items()}
        gaps = {task: _gap(values, first, "score") for task, values in scores.items()}
        metrics, left_out = {}, {}
        for one in self.wanted:
            there, missing = self._metric(model, at, one, scores, gaps, own, first)
            left_out[one.text] = missing
            if there:
                metrics[one.text] = there
        if not metrics:
            told = "; ".join(f"{key}: {next(iter(why.values()))}" for key, why in left_out.items() if why)
            return f"no metric beside its scores ({told})" if told else "no metric beside its scores"
        return ModelTables(
            name=model,
            step=at,
            num_layers=depth,
            scores={task: values for task, values in scores.items() if not gaps[task]},
            domains=dict(own.domains),
            metrics=metrics,
            left_out={key: why for key, why in left_out.items() if why},
        )

    def nothing(self, left_out: Mapping[str, str], models: Sequence[Any]) -> str:
        reasons = "; ".join(f"{model}: {why}" for model, why in list(left_out.items())[:3])
        for option, source, asked in (
            ("scores", self.score_source, [self.score]),
            ("metrics", self.metric_source, list(self.wanted)),
        ):
            for one in asked if isinstance(source, Runs) else []:
                if not any(source.steps(name, one) for name in source.names):
                    known = dict.fromkeys(
                        _spelled(m.analysis, r)
                        for model in models
                        for m in model.measurements
                        for r in m.records
                        if r.layer is not None
                    )
                    return f"{option}: no model has {one.text!r} per layer{nearest(one.text, known)}"
        return f"expected a model with scores and metrics of the same tasks and layers, got none ({reasons})"

    def _step(self, model: str, scored: str, step: int | None) -> int | str | None:
        """The last checkpoint that has both, or the one asked for."""
        sides = [
            self.score_source.steps(scored, self.score),
            set().union(*(self.metric_source.steps(model, one) for one in self.wanted)),
        ]
        for side, what in zip(sides, (self.score.text, "metric asked for"), strict=True):
            if not side:
                return f"no {what}"
        stepped = [{at for at in side if at is not None} for side in sides if side != {None}]
        if not stepped:
            return None if step is None else f"it has no steps, --step {step} was asked for"
        known = set.intersection(*stepped)
        if step is not None:
            return step if step in known else f"no scores and metrics at step {step}"
        return max(known) if known else "no step has both scores and metrics"

    def _know_score(self, own: Curves) -> None:
        if self.states is not None and own.states is not None and own.states != self.states:
            raise InputError(
                f"scores: some models were scored on states {self.states}, others on {own.states}: results of two "
                f"conventions do not compare"
            )
        self.states = own.states or self.states
        if self.score.name != "score":
            self.score_title = ", ".join(filter(None, [look_up(self.score.name).title, tag_text(dict(own.variant))]))

    def _metric(
        self,
        model: str,
        step: int | None,
        wanted: Wanted,
        scores: Mapping[str, Values],
        gaps: Mapping[str, str],
        own: Curves,
        first: int,
    ) -> tuple[dict[str, Values], dict[str, str]]:
        """The metric of each task that has it and scores, and why the other tasks have none."""
        found = self.metric_source.curves(model, step, wanted, tasks=scores, states=own.states)
        if found is None:
            return {}, dict.fromkeys(scores, f"no {wanted.text}")
        if found.states is not None and own.states is not None and found.states != own.states:
            raise InputError(
                f"metrics: {wanted.text} was measured on states {found.states}, the scores of {model} on {own.states}: "
                f"measure both with the same `states`"
            )
        variant = tag_text(dict(found.variant))
        self.titles.setdefault(wanted.text, ", ".join(filter(None, [look_up(wanted.name).title, variant])))
        if None in found.by_task:
            self.common.add(wanted.text)
        kept, missing = {}, {}
        for task, values in scores.items():
            curve = found.by_task.get(task, found.by_task.get(None))
            depth = len(values) - 1
            if gaps[task]:
                missing[task] = gaps[task]
            elif curve is None:
                missing[task] = f"no {wanted.text}"
            elif max(curve) > depth:
                missing[task] = f"{wanted.text} has layers up to {max(curve)}, the score up to {depth}"
            elif why := _gap(_values(curve, depth), first, wanted.text):
                missing[task] = why
            else:
                kept[task] = _values(curve, depth)
        return kept, missing


def _values(curve: Curve, depth: int) -> Values:
    return np.array([curve.get(layer, np.nan) for layer in range(depth + 1)])


def _gap(values: Values, first: int, what: str) -> str:
    """Which layers have no value, as a reason; an empty string for none."""
    missing = [first + int(n) for n in np.flatnonzero(~np.isfinite(values[first:]))]
    return f"no {what} at {listing('layer', missing, most=5)}" if missing else ""


def _same(name: str, others: Sequence[str]) -> str | None:
    """What a model is called among others: by its whole name, or the last part of it."""
    if name in others:
        return name
    short = name.rstrip("/").split("/")[-1]
    fitting = [other for other in others if other.rstrip("/").split("/")[-1] == short]
    return fitting[0] if len(fitting) == 1 else None


def _spelled(analysis: str, record: Any) -> str:
    """As the option takes it: a task's own analysis by its first part."""
    return f"{analysis.partition('/')[0]}/{record.metric}"
