"""Fitting and scoring linear probes, with one job per layer."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any, ClassVar, Literal, NamedTuple, cast

import torch
from torch import Tensor

from lit_layers.analyses.base import Analysis, Jobs
from lit_layers.analyses.statistics import TagDict, Tags, nan_record, summarize
from lit_layers.functional import curves
from lit_layers.functional.probes.logistic import LogisticProbes, fit_logistic_probes, fit_watching_probes, macro_f1
from lit_layers.functional.probes.regression import RidgeProbes, fit_ridge_probes
from lit_layers.metrics import look_up
from lit_layers.models.view import LayeredModel
from lit_layers.records import Record
from lit_layers.tasks.text_features import permuted

MAX_SENT = 1e9  # largest number of bytes of states that ranks may send: 25,000 rows of all layers of GPT-2 small


def vector_bytes(model: LayeredModel, rows: int) -> int:
    """Return how many bytes the vectors of `rows` rows at all layers take, in float32 or a wider dtype of the model."""
    return max(torch.finfo(model.dtype).bits // 8, 4) * rows * model.dim * (model.num_layers + 1)


# "logistic" finds the optimum for the penalty that the option `c` sets. "watch" tunes the penalty of each layer
# (`fit_watching_probes`).
Estimator = Literal["logistic", "watch"]


@dataclass(frozen=True)
class ProbeOptions:
    c: float = 1.0
    penalty: float = 1.0
    tolerance: float = 1e-6
    max_iterations: int = 1000
    estimator: Estimator = "logistic"


Fitted = LogisticProbes | RidgeProbes


def fit_labellings(
    features: Tensor,
    labellings: Sequence[Tensor],
    options: "ProbeOptions | ProbeAnalysis",
    *,
    num_classes: int | None,
    groups: Tensor | None = None,
    device: torch.device | None = None,
) -> Sequence[Fitted]:
    """Return one layer's probe for each labelling of its features (rows, dim).

    Probes are logistic, or ridge if `num_classes` is None. `groups` (rows,) is for the estimator "watch", which chooses
    its penalty on held-out rows. Rows with the same group id are held out together.
    """
    layer = features[None]
    if num_classes is None:
        penalty = getattr(options, "penalty", 1.0) if options.estimator == "logistic" else None
        return [fit_ridge_probes(layer, targets, penalty=penalty) for targets in labellings]
    how: dict[str, Any] = {"num_classes": num_classes, "device": device}
    if options.estimator == "watch":  # one call, because it decomposes the features once for all labellings
        return fit_watching_probes(layer, labellings, groups=groups, **how)
    how |= {"c": options.c, "tolerance": options.tolerance, "max_iterations": options.max_iterations}
    return [fit_logistic_probes(layer, targets, **how) for targets in labellings]


def fit_layer(
    features: Tensor, targets: Tensor, options: "ProbeOptions | ProbeAnalysis", *, num_classes: int | None
) -> Fitted:
    """Return one layer's probe on features (rows, dim): logistic for classes, ridge if `num_classes` is None."""
    return fit_labellings(features, [targets], options, num_classes=num_classes)[0]


@dataclass(kw_only=True)
class ProbeAnalysis(Analysis):
    """Linear probes of every layer.

    With `estimator="logistic"`, each probe is optimal for the penalty that the option `c` sets. With "watch", `c` is
    not used. The penalty of each layer's logistic probe is tuned on held-out rows, and a few steps of optimization
    bring the probe close to the optimum (`fit_watching_probes`). This takes a fraction of the time.
    """

    LEAST: ClassVar = {"tolerance": 1e-12, "max_iterations": 1}

    c: float = 1.0
    tolerance: float = 1e-6
    max_iterations: int = 1000
    seed: int = 0
    estimator: Estimator = "logistic"


class Fitting(NamedTuple):
    """Features and labels to which one probe per layer is fitted, and how to score the probes.

    The mask `layers` (layers + 1,) is True for the layers that have features.
    """

    features: Tensor  # (layers, rows, dim)
    labels: Tensor  # (rows,) class indices
    test: Tensor  # (layers, test rows, dim)
    layers: Tensor
    num_classes: int
    tags: TagDict
    scores: Callable[[Tensor, TagDict, int], Iterable[Record]]  # makes records from (log-probabilities, tags, layer)
    groups: Tensor | None = None  # (rows,) group ids, as in `fit_labellings`


def probe_jobs(
    model: LayeredModel,
    references: list[Record],
    fittings: Sequence[Fitting],
    options: ProbeAnalysis,
    control_seed: int | None,
) -> Jobs:
    """Return one job per layer that fits logistic probes to the labels and, with `control_seed`, to permuted labels.

    The records `references` come before the records of the jobs.

    If the option `estimator` is "watch", the inverse penalty c is tuned for each layer (`fit_watching_probes`). The
    record `probe_c` reports this c, and its `n` is the number of training rows.
    """
    device = torch.device("cpu") if model.device.type == "mps" else model.device  # not MPS, as it has no float64

    def layer_records(fitting: Fitting, row: int, layer: int) -> list[Record]:
        found = list[Record]()
        controls, labellings = [dict(fitting.tags)], [fitting.labels]
        if control_seed is not None:
            controls.append({**fitting.tags, "control": "random_labels"})
            labellings.append(permuted(fitting.labels, control_seed))
        how: dict[str, Any] = {"num_classes": fitting.num_classes, "groups": fitting.groups, "device": device}
        probes = fit_labellings(fitting.features[row], labellings, options, **how)
        for probe, tags in zip(cast("Sequence[LogisticProbes]", probes), controls, strict=True):
            flag = {} if probe.converged.all() else {"num_not_converged": 1}
            found += fitting.scores(probe.log_proba(fitting.test[[row]])[0], {**tags, **flag}, layer)
            if options.estimator == "watch":
                about: dict[str, Any] = {"layer": layer, "n": len(fitting.labels), "tags": tags}
                found.append(Record(metric="probe_c", value=probe.c.item(), **about))
        return found

    jobs = [
        partial(layer_records, fitting, row, layer)
        for fitting in fittings
        for row, layer in enumerate(fitting.layers.nonzero()[:, 0].tolist())
    ]
    return Jobs(jobs, lambda of_layers: chain(references, *of_layers))


RULES: dict[str, curves.Rule] = {"plateau_layer": "plateau", "best_layer": "best"}
PLATEAU = 0.01  # gains of at most this from one layer to the next are ignored: a point of accuracy, or 0.01 nats


@dataclass(frozen=True, eq=False)
class RowScores:
    """A probe's score on each row. For a regression, `losses` are squared errors and the other fields are None."""

    losses: Tensor  # (rows,) nats, infinite for a class without training rows; or squared errors
    hits: Tensor | None = None  # (rows,) True if the predicted class is right
    predicted: Tensor | None = None  # (rows,) predicted classes

    def row_values(self, metric: str) -> Tensor:
        """Return the values per row of a metric that is a mean over rows."""
        return cast("Tensor", self.hits).double() if metric == "accuracy" else self.losses


def score_rows(probe: Fitted, features: Tensor, targets: Tensor) -> RowScores:
    """Score a probe on features (rows, dim) with their true classes or values."""
    if isinstance(probe, LogisticProbes):
        return score_log_proba(probe.log_proba(features[None])[0], targets)
    return RowScores((probe.predict(features[None])[0].double() - targets).square())


def score_log_proba(log_proba: Tensor, targets: Tensor) -> RowScores:
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
    """Yield the scores of one split.

    Args:
        scores: scores of the rows.
        targets: true classes or values.
        tags: tags of the records.
        layer: layer of the records.
        baseline: squared errors of predicting the training mean, for R^2.
        intervals: whether to compute bootstrap intervals over rows. The accuracy always has Wilson's interval.
        rows: mask (rows of the split,) of the scored rows. None means all rows.

    The log-loss is over the rows whose class occurs in training. For the accuracy, all other rows count as errors.
    """
    rows = torch.ones(len(targets), dtype=torch.bool) if rows is None else rows
    fields: dict[str, Any] = {"layer": layer, "rows": rows}
    if scores.hits is None or scores.predicted is None:
        yield from summarize("mean_squared_error", scores.losses, **fields, tags=tags, intervals=intervals)
        if (mean := cast("Tensor", baseline).mean()) > 0:
            value = float(1 - scores.losses.mean() / mean)
            yield Record(metric="r_squared", value=value, layer=layer, n=len(targets), tags={**tags})
        return
    (accuracy,) = summarize("accuracy", scores.hits, **fields, tags=tags, intervals=False)
    low, high = curves.wilson_interval(int(scores.hits.sum()), len(targets))
    yield replace(accuracy, low=low, high=high)
    low, high = curves.macro_f1_interval(targets, scores.predicted) if intervals and len(targets) > 1 else (None, None)
    value = macro_f1(targets, scores.predicted)
    yield Record(metric="macro_f1", value=value, layer=layer, n=len(targets), tags={**tags}, low=low, high=high)
    finite = scores.losses.isfinite()
    if finite.any():
        counted = {**tags, **({"num_unseen": unseen} if (unseen := int((~finite).sum())) else {})}
        fields["rows"] = rows.masked_scatter(rows, finite)
        yield from summarize("log_loss", scores.losses[finite], **fields, tags=counted, intervals=intervals)


def curve_records(curve: Sequence[RowScores], tags: Tags, *, metric: str) -> Iterator[Record]:
    """Yield records of how a score rises over layers 1 to L, with intervals over test rows.

    `curve` holds the scores of the layers from 1 on. The records are the monotonicity, `plateau_layer`, `best_layer`,
    and `inflection_layer`, which has no interval. After `plateau_layer`, the score never gains more than `PLATEAU` from
    one layer to the next. `best_layer` is the first of the best layers. The intervals of the plateau layer and the best
    layer show how much their choice depends on the test rows. All values are NaN if `tags` contains
    `num_undefined_layers`, because the score of a layer is then missing.
    """
    if "num_undefined_layers" in tags:
        names = (*(f"monotonicity_{name}" for name in curves.Monotonicity._fields), *RULES, "inflection_layer")
        yield from (nan_record(name, tags={**tags, "of": metric}) for name in names)
        return
    rows = torch.stack([scores.row_values(metric) for scores in curve])  # (L, rows)
    rows = rows[:, rows.isfinite().all(0)]
    if len(rows) < 3 or rows.shape[1] < 2:
        return
    better, values = look_up(metric).higher_is_better, rows.mean(1).tolist()
    rise = curves.monotonicity(values, higher_is_better=better)
    low, high = curves.monotonicity_interval(rows, higher_is_better=better)
    all_tags: dict[str, Any] = {**tags, "of": metric}
    for name in rise._fields:
        value = getattr(rise, name)
        if not math.isnan(value):
            lo, hi = _widened(getattr(low, name), value, getattr(high, name))
            yield Record(metric=f"monotonicity_{name}", value=value, low=lo, high=hi, n=rows.shape[1], tags=all_tags)
    for name, rule in RULES.items():
        layer = curves.choose_layer(values, rule=rule, tolerance=PLATEAU, higher_is_better=better)
        shares = curves.choice_distribution(rows, rule=rule, tolerance=PLATEAU, higher_is_better=better)
        lo, hi = curves.choice_interval(shares)
        yield Record(metric=name, value=layer, low=lo, high=hi, n=rows.shape[1], tags=all_tags)
    if (inflection := curves.inflection_layer(values)) is not None:
        yield Record(metric="inflection_layer", value=inflection, n=rows.shape[1], tags=all_tags)


def _widened(low: float, value: float, high: float) -> tuple[float | None, float | None]:
    """Return the bootstrap interval of a monotonicity, widened to contain its value.

    The value may lie outside, because curves of resampled rows are rougher than their mean.
    """
    return (None, None) if math.isnan(low) or math.isnan(high) else (min(low, value), max(high, value))
