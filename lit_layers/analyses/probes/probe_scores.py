"""How probes are scored: on the rows of a split, and as a curve over layers."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from lit_layers.analyses.probes.probe_fits import Fitted
from lit_layers.analyses.statistics import Tags, by_prompt, gap, summarize
from lit_layers.functional.curves import (
    Monotonicity,
    Rule,
    choice_distribution,
    choice_interval,
    choose_layer,
    macro_f1_interval,
    monotonicity,
    monotonicity_interval,
    turns,
    wilson_interval,
)
from lit_layers.functional.probes.logistic import LogisticProbes, macro_f1
from lit_layers.metrics import look_up
from lit_layers.records import Record

RULES: dict[str, Rule] = {"plateau_layer": "plateau", "best_layer": "best"}
PLATEAU = 0.01  # gain of a single step that still counts as one: a point of accuracy, 0.01 nats


@dataclass(frozen=True, eq=False)
class RowScores:
    """What one probe makes of each row. Of a regression the losses are squared errors, and the rest is None."""

    losses: Tensor  # (rows,) nats, infinite for a class that no training row had; or squared errors
    hits: Tensor | None = None  # (rows,)
    predicted: Tensor | None = None  # (rows,)

    def of_rows(self, metric: str) -> Tensor:
        """The rows' shares in a metric that is a mean over rows."""
        if metric != "accuracy":
            return self.losses
        assert self.hits is not None, "accuracy is of classifications"
        return self.hits.double()


def score_rows(probe: Fitted, features: Tensor, targets: Tensor) -> RowScores:
    """Of features (rows, dim) and their true classes or values."""
    if isinstance(probe, LogisticProbes):
        return of_log_proba(probe.log_proba(features[None])[0], targets)
    return RowScores((probe.predict(features[None])[0].double() - targets).square())


def of_log_proba(log_proba: Tensor, targets: Tensor) -> RowScores:
    """Of log-probabilities (rows, classes)."""
    predicted = log_proba.argmax(-1)
    return RowScores(-log_proba.gather(1, targets[:, None])[:, 0].double(), predicted == targets, predicted)


def score_records(
    scores: RowScores,
    targets: Tensor,
    tags: Tags,
    *,
    layer: int | None,
    baseline: Tensor | None,
    intervals: bool,
    rows: Tensor | None = None,
) -> Iterator[Record]:
    """The scores of one part. `baseline`: the squared errors of predicting the training mean, for R^2.

    `rows` (rows of the part,) says which of them are scored; None: all.
    `intervals`: Wilson's for the accuracy, bootstrap over rows for the rest. Log-loss is over the rows whose class some
    training row had; the others count as errors.
    """
    rows = torch.ones(len(targets), dtype=torch.bool) if rows is None else rows
    if scores.hits is None:
        assert baseline is not None, "a regression has a baseline"
        yield _mean("mean_squared_error", scores.losses, layer, tags, intervals, rows)
        mean = baseline.mean()
        if mean > 0:
            yield Record(
                metric="r_squared",
                value=float(1 - scores.losses.mean() / mean),
                layer=layer,
                n=len(targets),
                tags={**tags},
            )
        return
    accuracy = _mean("accuracy", scores.hits.double(), layer, tags, False, rows)
    low, high = wilson_interval(int(scores.hits.sum()), len(targets))
    yield replace(accuracy, low=low, high=high)
    assert scores.predicted is not None, "a classification has predictions"
    bounds = macro_f1_interval(targets, scores.predicted) if intervals and len(targets) > 1 else (None, None)
    value = macro_f1(targets, scores.predicted)
    yield Record(
        metric="macro_f1", value=value, layer=layer, n=len(targets), tags={**tags}, low=bounds[0], high=bounds[1]
    )
    seen = scores.losses.isfinite()
    if seen.any():
        counted = {**tags, **({"num_unseen": unseen} if (unseen := int((~seen).sum())) else {})}
        yield _mean("log_loss", scores.losses[seen], layer, counted, intervals, rows.masked_scatter(rows, seen))


def curve_records(curve: Sequence[RowScores], tags: Tags, *, metric: str) -> Iterator[Record]:
    """How the score of layers 1 to L rises, with intervals over test rows: monotonicity, and where it ends to rise.

    `curve` holds the layers from 1 on. `plateau_layer` is the first after which no single step gains more than
    `PLATEAU`, `best_layer` the earliest best; their intervals say how far the choice depends on the test rows. All are
    NaN where a layer is missing, which the tag `num_undefined_layers` says.
    """
    if "num_undefined_layers" in tags:
        names = (*(f"monotonicity_{name}" for name in Monotonicity._fields), *RULES, "inflection_layer")
        yield from (gap(name, tags={**tags, "of": metric}) for name in names)
        return
    rows = torch.stack([scores.of_rows(metric) for scores in curve])  # (L, rows)
    rows = rows[:, rows.isfinite().all(0)]
    if len(rows) < 3 or rows.shape[1] < 2:
        return
    better, values = look_up(metric).higher_is_better, rows.mean(1).tolist()
    rise, (low, high) = (
        monotonicity(values, higher_is_better=better),
        monotonicity_interval(rows, higher_is_better=better),
    )
    of: dict[str, Any] = {**tags, "of": metric}
    for name in rise._fields:
        value = getattr(rise, name)
        if not math.isnan(value):
            bounds = _in_order(getattr(low, name), value, getattr(high, name))
            yield Record(
                metric=f"monotonicity_{name}", value=value, low=bounds[0], high=bounds[1], n=rows.shape[1], tags=of
            )
    for name, rule in RULES.items():
        layer = choose_layer(values, rule=rule, tolerance=PLATEAU, higher_is_better=better)
        shares = choice_distribution(rows, rule=rule, tolerance=PLATEAU, higher_is_better=better)
        first, last = choice_interval(shares)
        yield Record(metric=name, value=layer, low=first, high=last, n=rows.shape[1], tags=of)
    inflection = turns(values).inflection
    if inflection is not None:
        yield Record(metric="inflection_layer", value=inflection, n=rows.shape[1], tags=of)


def _in_order(low: float, value: float, high: float) -> tuple[float | None, float | None]:
    """An interval that holds its value: few rows give rougher curves than their mean, and an interval beside it."""
    return (None, None) if math.isnan(low) or math.isnan(high) else (min(low, value), max(high, value))


def _mean(metric: str, values: Tensor, layer: int | None, tags: Tags, intervals: bool, rows: Tensor) -> Record:
    """Of values of those rows that are True in `rows`."""
    if intervals:
        (record,) = summarize(metric, values, layer=layer, tags=tags, rows=rows)
        return record
    stderr = float(values.std() / math.sqrt(len(values))) if len(values) > 1 else None
    about: dict[str, Any] = {"layer": layer, "n": len(values), "tags": {**tags}, "by_prompt": by_prompt(values, rows)}
    return Record(metric=metric, value=float(values.mean()), stderr=stderr, **about)
