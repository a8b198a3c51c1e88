"""Which layer is enough: probes fitted on train, a layer chosen on validation, test scored once."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from lit_layers.analyses.probe_scores import Fitted, ProbeOptions, RowScores, fit_layer, of_log_proba, score_rows
from lit_layers.errors import InputError
from lit_layers.functional.curves import Rule, bootstrap_interval, choice_distribution, choose_layer, wilson_interval
from lit_layers.functional.probe import LogisticProbes
from lit_layers.metrics import look_up

Metric = Literal["accuracy", "mean_squared_error"]
Part = Literal["train", "validation", "test"]
Progress = Callable[[int, int, str], None]


class Features(Protocol):
    """Features of all layers, one of them in memory at a time."""

    @property
    def num_layers(self) -> int: ...

    def layer(self, layer: int) -> Tensor:
        """(rows, dim)"""
        ...


@dataclass(frozen=True)
class Score:
    """A mean over rows, with its 95% interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, eq=False)
class Choice:
    """A layer, and what it was chosen by."""

    layer: int
    num_layers: int
    metric: Metric
    rule: Rule
    tolerance: float
    validation: Mapping[int, Score]  # layers 0 to L
    baseline: float  # of the majority class, or the training mean, on the validation rows
    shares: Mapping[int, float]  # of bootstrap resamples of the validation rows that choose each layer 1 to L
    test: Mapping[int, Score]  # of the chosen layer and the last
    difference: Score  # on test, of the chosen layer to the last: paired over rows
    probe: Fitted  # of the chosen layer, fitted on train

    @property
    def higher_is_better(self) -> bool:
        return look_up(self.metric).higher_is_better


def choose(
    features: Callable[[Part], Features],
    targets: Mapping[Part, Tensor],
    *,
    num_classes: int | None,
    rule: Rule = "within_tolerance",
    tolerance: float = 0.01,
    options: ProbeOptions | None = None,
    progress: Progress | None = None,
) -> Choice:
    """The first layer that a rule takes, judged by the accuracy (or squared error) of its probe on validation rows.

    A probe is fitted on the training rows of each layer, 0 to L; the rule sees layers 1 to L. `features` is asked for
    "test" only when the layer has been chosen, and test is scored for that layer and the last alone. `num_classes` is
    None for a regression.

    Raises:
        InputError: a rule that does not fit the scores, too few rows or classes, a probe that has not converged, or no
            layer that is better than knowing no text at all.
    """
    options, tell = options or ProbeOptions(), progress or (lambda done, total, what: None)
    metric: Metric = "mean_squared_error" if num_classes is None else "accuracy"
    _check(targets, metric, rule, tolerance)
    train, held_out = features("train"), features("validation")
    num_layers = train.num_layers
    probes: dict[int, Fitted] = {}
    found: list[Tensor] = []
    for layer in range(num_layers + 1):
        tell(layer, num_layers + 1, f"probe of layer {layer}")
        probe = fit_layer(train.layer(layer), targets["train"], options, num_classes=num_classes)
        if isinstance(probe, LogisticProbes) and not probe.converged.all():
            raise InputError(
                f"max_iterations: the probe of layer {layer} has not converged in {options.max_iterations}: allow "
                "more, or give a smaller c"
            )
        probes[layer] = probe
        found.append(score_rows(probe, held_out.layer(layer), targets["validation"]).of_rows(metric))
    tell(num_layers + 1, num_layers + 1, "")
    rows = torch.stack(found)  # (layers + 1, validation rows)
    baseline = float(_baseline(targets, num_classes).of_rows(metric).mean())
    layer, shares = _chosen(rows[1:], metric, rule, tolerance, baseline)
    test = features("test")
    kept = {each: _test(probes[each], test, each, targets["test"], metric) for each in {layer, num_layers}}
    return Choice(
        layer=layer,
        num_layers=num_layers,
        metric=metric,
        rule=rule,
        tolerance=tolerance,
        validation={each: _score(values, metric) for each, values in enumerate(rows)},
        baseline=baseline,
        shares=dict(enumerate(shares.tolist(), start=1)),
        test={each: _score(values, metric) for each, values in kept.items()},
        difference=_score(kept[layer] - kept[num_layers], None),
        probe=probes[layer],
    )


def _check(targets: Mapping[Part, Tensor], metric: Metric, rule: Rule, tolerance: float) -> None:
    """What can be told before any feature is made."""
    for part, rows in targets.items():
        if len(rows) < 2:
            raise InputError(f"{part}: expected at least 2 rows, got {len(rows)}: give more")
    if metric == "accuracy" and len(targets["train"].unique()) < 2:
        raise InputError("train: all rows have one class, and a probe needs two: give other rows")
    _by_rule([1.0], metric, rule, tolerance)


def _by_rule(values: list[float], metric: Metric, rule: Rule, tolerance: float) -> int:
    try:
        return choose_layer(values, rule=rule, tolerance=tolerance, higher_is_better=look_up(metric).higher_is_better)
    except ValueError as error:
        raise InputError(f"rule: {rule} with tolerance {tolerance:g} chooses no layer here: {error}") from error


def _chosen(rows: Tensor, metric: Metric, rule: Rule, tolerance: float, baseline: float) -> tuple[int, Tensor]:
    """The layer and the shares of resamples, of the scores (L, rows) of layers 1 to L."""
    values, better = rows.mean(1).tolist(), look_up(metric).higher_is_better
    best = max(values) if better else min(values)
    if (best <= baseline) if better else (best >= baseline):
        what = "the majority class" if better else "the training mean"
        raise InputError(
            f"rule: no layer can be chosen: the best validation {metric} of a probe is {best:.4f}, and {what} alone "
            f"gives {baseline:.4f}"
        )
    layer = _by_rule(values, metric, rule, tolerance)
    return layer, choice_distribution(rows, rule=rule, tolerance=tolerance, higher_is_better=better)


def _test(probe: Fitted, features: Features, layer: int, targets: Tensor, metric: Metric) -> Tensor:
    return score_rows(probe, features.layer(layer), targets).of_rows(metric)


def _baseline(targets: Mapping[Part, Tensor], num_classes: int | None) -> RowScores:
    """What the training labels alone say of the validation rows."""
    train, held_out = targets["train"], targets["validation"]
    if num_classes is None:
        return RowScores((held_out - train.mean()).square())
    share = torch.bincount(train, minlength=num_classes).double() / len(train)
    return of_log_proba(share.log().expand(len(held_out), -1), held_out)


def _score(values: Tensor, metric: Metric | None) -> Score:
    if metric == "accuracy":
        return Score(float(values.mean()), *wilson_interval(int(values.sum()), len(values)))
    low, high = bootstrap_interval(values)
    return Score(float(values.mean()), float(low), float(high))
