"""What the tables say: how metrics and scores go together over layers, and what layers the metrics would choose."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lit_layers.correlate.layer_tables import LayerTables, ModelTables
from lit_layers.functional.correlation import UndefinedError
from lit_layers.functional.layer_selection import (
    DIRECTIONS,
    Direction,
    LayerCorrelation,
    Null,
    Selection,
    better_direction,
    better_rule,
    compared,
    cross_fitted,
    distance_null_over_layers,
    layer_correlations,
    scores_at,
    selection,
)

Table = NDArray[np.float64]
_FEWEST_HALVED = 4  # tasks


@dataclass(frozen=True, kw_only=True)
class Choice:
    """A way of choosing the layer of each task without labels, and what it is worth.

    `rule` is "min" or "max" of `metric`, "cross-fitted" where halves of the tasks choose between them, or what is
    chosen among all metrics (no `metric`). `is_chosen`: this direction is the better one on the other models.
    `shares`: how often each rule was chosen.
    """

    metric: str | None
    rule: str
    result: Selection
    is_chosen: bool = False
    shares: Mapping[str, float] | None = None


@dataclass(frozen=True, kw_only=True)
class MetricFindings:
    """Of one metric: its coefficients, the tasks they rest on, and which tasks are left out, with the reason."""

    metric: str
    correlations: list[LayerCorrelation]
    tasks: list[str]
    left_out: dict[str, str]
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class ModelFindings:
    """All that is said of one model."""

    model: str
    step: int | None
    num_layers: int
    null: Null
    metrics: list[MetricFindings]
    choices: list[Choice]
    notes: list[str]


@dataclass(frozen=True, kw_only=True)
class LayerFindings:
    """All that is said of the tables; `basis` tells on what directions and metrics were chosen."""

    models: list[ModelFindings]
    basis: str
    first_layer: int
    left_out: dict[str, str]

    def to_dict(self) -> dict[str, Any]:
        """As JSON data."""
        return asdict(self)


def correlate_layers(tables: LayerTables, *, resamples: int = 2000, repeats: int = 100, seed: int = 0) -> LayerFindings:
    """Returns how each metric follows the scores over the layers of each model, and what choosing by it is worth.

    With several models the direction (and the metric, where one is picked among all) is that which scores higher on
    the other models. With one, random halves of its tasks choose and the other halves are scored.
    """
    options = {"resamples": resamples, "seed": seed}
    many = len(tables.models) > 1
    found = []
    for number, model in enumerate(tables.models):
        others = [other for place, other in enumerate(tables.models) if place != number]
        keys = [key for key in tables.titles if key in model.metrics]
        choices = [
            choice for key in keys for choice in _choices(tables, model, others, key, repeats=repeats, **options)
        ]
        picked = _picked(tables, model, others, keys, repeats=repeats, **options)
        metrics = [_correlated(tables, model, key, **options) for key in keys]
        num_columns = model.num_layers + 1 - tables.first_layer
        found.append(
            ModelFindings(
                model=model.name,
                step=model.step,
                num_layers=model.num_layers,
                null=distance_null_over_layers(num_columns, seed=seed),
                metrics=metrics,
                choices=[*choices, *picked],
                notes=_notes(model, keys, many),
            )
        )
    basis = (
        "The direction for a model, and the metric where one is picked among all, is that which scores highest on "
        "average over the other models (leave one model out)."
        if many
        else f"With one model the direction, and the metric where one is picked among all, is chosen by random halves "
        f"of the tasks and scored on the other halves ({repeats} times, cross-fitted)."
    )
    return LayerFindings(models=found, basis=basis, first_layer=tables.first_layer, left_out=dict(tables.left_out))


def _correlated(tables: LayerTables, model: ModelTables, key: str, *, resamples: int, seed: int) -> MetricFindings:
    tasks, metric, scores = model.tables(key, tables.first_layer)
    left_out, note = dict(model.left_out.get(key, {})), ""
    try:
        found = layer_correlations(metric, scores, resamples=resamples, seed=seed)
    except UndefinedError as error:
        found, note = [], str(error)
    for row in found[0].undefined if found else ():
        left_out[tasks[row]] = "constant over the layers, in no mean of coefficients within tasks"
    return MetricFindings(metric=key, correlations=found, tasks=tasks, left_out=left_out, note=note)


def _choices(
    tables: LayerTables,
    model: ModelTables,
    others: Sequence[ModelTables],
    key: str,
    *,
    repeats: int,
    resamples: int,
    seed: int,
) -> list[Choice]:
    """Both directions of a metric; and what halves of the tasks would choose where there is no other model."""
    first = tables.first_layer
    tasks, metric, scores = model.tables(key, first)
    pairs = [other.tables(key, first)[1:] for other in others if key in other.metrics]
    better = better_direction(pairs) if pairs else None
    options: dict[str, Any] = {"first_layer": first, "resamples": resamples, "seed": seed}
    found = [
        Choice(
            metric=key,
            rule=direction,
            result=selection(metric, scores, direction, **options),
            is_chosen=direction == better,
        )
        for direction in DIRECTIONS
    ]
    if better is None and len(tasks) >= _FEWEST_HALVED:
        fitted = cross_fitted({key: metric}, scores, repeats=repeats, seed=seed)
        shares = {rule.split()[0]: share for rule, share in fitted.shares.items()}
        result = compared(fitted.scores, scores, **options)
        found.append(Choice(metric=key, rule="cross-fitted", result=result, is_chosen=True, shares=shares))
    return found


def _picked(
    tables: LayerTables,
    model: ModelTables,
    others: Sequence[ModelTables],
    keys: Sequence[str],
    *,
    repeats: int,
    resamples: int,
    seed: int,
) -> list[Choice]:
    """The metric and direction picked among all, on the tasks that all metrics have."""
    first = tables.first_layer
    options: dict[str, Any] = {"first_layer": first, "resamples": resamples, "seed": seed}
    if len(keys) < 2:
        return []
    usable = [other for other in others if all(key in other.metrics for key in keys)]
    own = _shared(model, keys, first)
    if own is None:
        return []
    metrics, scores = own
    if usable:
        pairs = [shared for other in usable if (shared := _shared(other, keys, first)) is not None]
        if not pairs:
            return []
        key, direction = better_rule(pairs)
        result = compared(scores_at(metrics[key], scores, direction), scores, **options)
        return [Choice(metric=None, rule=f"{direction} {key}", result=result, is_chosen=True)]
    if len(scores) < _FEWEST_HALVED:
        return []
    fitted = cross_fitted(metrics, scores, repeats=repeats, seed=seed)
    result = compared(fitted.scores, scores, **options)
    return [Choice(metric=None, rule="cross-fitted", result=result, is_chosen=True, shares=fitted.shares)]


def _shared(model: ModelTables, keys: Sequence[str], first: int) -> tuple[dict[str, Table], Table] | None:
    """Each metric's table and the scores' of the tasks that all these metrics have; None where there are none."""
    tasks = [task for task in model.scores if all(task in model.metrics[key] for key in keys)]
    if not tasks:
        return None
    metrics = {key: np.stack([model.metrics[key][task][first:] for task in tasks]) for key in keys}
    return metrics, np.stack([model.scores[task][first:] for task in tasks])


def _notes(model: ModelTables, keys: Sequence[str], many: bool) -> list[str]:
    found = []
    counts = {len(model.metrics[key]) for key in keys}
    if len(counts) > 1:
        found.append(
            f"The metrics have scores of {min(counts)} to {max(counts)} tasks: compare each with its own last layer."
        )
    if max(counts) < _FEWEST_HALVED and not many:
        found.append(f"{max(counts)} tasks are too few to choose a direction on half of them.")
    return found


def rule_text(choice: Choice, titles: Mapping[str, str]) -> str:
    """Returns what a way of choosing is called: `Smallest prompt entropy`."""
    names: dict[Direction, str] = {"min": "Smallest", "max": "Largest"}
    if choice.rule == "cross-fitted":
        return "Direction chosen on half of the tasks" if choice.metric else "Metric and direction chosen on half"
    direction, _, key = choice.rule.partition(" ")
    text = names["min" if direction == "min" else "max"]
    return f"{text} {lowered(titles[key])}, picked on other models" if key else f"{text} value"


def lowered(title: str) -> str:
    """Returns a title as it stands within a sentence."""
    return title if title[1:2].isupper() else title[:1].lower() + title[1:]
