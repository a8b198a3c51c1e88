"""How a number changes over the layers, as curves over training: whether it rises, where it is best and settles."""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy import stats

from lit_layers.clock.step_curves import StepCurve, means_of_seeds
from lit_layers.figures.tables import grouped
from lit_layers.metrics import look_up

Array = NDArray[np.float64]
MONOTONICITY = "monotonicity_spearman"
STATISTICS = (MONOTONICITY, "monotonicity_fraction_increasing", "monotonicity_largest_drop")
CHOICES = ("plateau_layer", "best_layer")  # of scores alone: they need to know which values are better
COLUMNS = ("run", "analysis", "metric", "tags", "step", "statistic", "value", "low", "high")
COLUMNS = (*COLUMNS, "num_layers", "num_undefined", "over")
STILL = 0.05  # of the range over layers: a step that gains less is none
_FEWEST, _DRAWS, _CONFIDENCE = 3, 1000, 0.95
_TAILS = ((1 - _CONFIDENCE) / 2, (1 + _CONFIDENCE) / 2)


@dataclass(frozen=True, kw_only=True)
class LayerCurve:
    """A statistic over the layers 1 to L of `metric`, over training.

    `curve` is of the statistic, `low` and `high` are the ends of its 95% interval (NaN: none is known), `num_undefined`
    the layers without a value, each (checkpoints,). A checkpoint with fewer than 3 layers has no value.
    """

    metric: str
    tags: str
    curve: StepCurve
    low: Array
    high: Array
    num_layers: int
    num_undefined: NDArray[np.int64]

    @property
    def statistic(self) -> str:
        return self.curve.metric


def layer_curves(curves: Sequence[StepCurve], *, seed: int = 0) -> list[LayerCurve]:
    """Returns the statistics of each number that has 3 layers or more beside the embedding, in runs' own order.

    monotonicity_spearman, monotonicity_fraction_increasing and monotonicity_largest_drop are as `monotonicity` defines
    them (of numbers that are no score as though higher were better); plateau_layer is the first after which no step
    gains more than a twentieth of the range over layers, best_layer the first of the best. Layer 0 is left out. What an
    analysis has measured itself, on its rows, is not measured again.

    The interval is over what the layers' standard errors are over: each layer is drawn from its own, independently. As
    layers share prompts it is too wide rather than too narrow; and since drawn curves are rougher than the measured
    one, that may lie beside its middle.
    """
    measured = {(curve.run, curve.analysis, curve.metric) for curve in curves}
    layered = [curve for curve in curves if curve.layer and "of" not in curve.tags and not _is_statistic(curve.metric)]
    groups = grouped(layered, lambda curve: (curve.run, curve.analysis, curve.metric, curve.tag_text))
    statistics = []
    for (run, analysis, _, _), layers in groups.items():
        if len(layers) >= _FEWEST and (run, analysis, MONOTONICITY) not in measured:
            statistics += _of_layers(sorted(layers, key=lambda curve: curve.layer or 0), seed)
    return statistics


def over_the_seeds(curves: Sequence[LayerCurve], name: str) -> list[LayerCurve]:
    """Returns the statistics that all seeds have: means, with Student's intervals, at the checkpoints that all have.

    What of an interval lies outside the statistic's range, beyond a rank correlation of 1, is cut off.
    """
    by_key = grouped(curves, lambda each: (each.metric, each.curve.key))
    num_seeds = len({each.curve.run for each in curves})
    merged = []
    for group in by_key.values():
        if len({each.curve.run for each in group}) < num_seeds:
            continue
        for curve in means_of_seeds([each.curve for each in group], name):
            assert curve.seeds is not None
            n, first = len(curve.seeds), group[0]
            half = stats.t.ppf(_TAILS[1], n - 1) * curve.seeds.std(0, ddof=1) / math.sqrt(n)
            undefined = [each.num_undefined[np.isin(each.curve.at, curve.at)] for each in group]
            bounds = look_up(curve.metric).low, look_up(curve.metric).high
            low, high = ((curve.values + side * half).clip(*bounds) for side in (-1, 1))
            ends = {"low": low, "high": high, "num_undefined": np.max(undefined, 0)}
            merged.append(
                LayerCurve(metric=first.metric, tags=first.tags, curve=curve, num_layers=first.num_layers, **ends)
            )
    return merged


def layer_table(curves: Iterable[LayerCurve]) -> pd.DataFrame:
    """Returns a row for each statistic of each number at each checkpoint: the columns `COLUMNS`."""
    rows = [
        (
            *(each.curve.run, each.curve.analysis, each.metric, each.tags, at, each.statistic, value, low, high),
            *(each.num_layers, undefined, each.curve.over),
        )
        for each in curves
        for at, value, low, high, undefined in zip(
            *(each.curve.at, each.curve.values, each.low, each.high, each.num_undefined), strict=True
        )
    ]
    return pd.DataFrame(rows, columns=list(COLUMNS)).astype({"step": "int64"})


def _is_statistic(metric: str) -> bool:
    return metric in (*STATISTICS, *CHOICES) or look_up(metric).whole


def _of_layers(layers: Sequence[StepCurve], seed: int) -> Iterator[LayerCurve]:
    first, at = layers[0], np.unique(np.concatenate([curve.at for curve in layers]))
    values, errors = np.full((2, len(at), len(layers)), np.nan)
    for place, curve in enumerate(layers):
        here = np.searchsorted(at, curve.at)
        values[here, place] = curve.values
        errors[here, place] = np.nan if curve.stderr is None else curve.stderr
    layer_numbers, better = [curve.layer or 0 for curve in layers], look_up(first.metric).better
    names = (*STATISTICS, *(CHOICES if better else ()))
    rng = np.random.default_rng(seed)
    results = np.full((3, len(names), len(at)), np.nan)  # value, low, high
    stderr = np.full((len(names), len(at)), np.nan)
    for step in range(len(at)):
        there = np.isfinite(values[step])
        if there.sum() < _FEWEST:
            continue
        has_errors = np.isfinite(errors[step, there]).all()
        noise = rng.standard_normal((_DRAWS if has_errors else 0, there.sum())) * errors[step, there]
        scores = values[step, there] + np.concatenate([np.zeros((1, there.sum())), noise])
        numbers = _statistics(scores, np.array(layer_numbers)[there], better)
        results[0, :, step] = numbers[0]
        defined = np.isfinite(numbers[1:]).any(0)  # constant curves have no rank correlation
        if has_errors:
            results[1:, defined, step] = np.nanquantile(numbers[1:, defined], _TAILS, axis=0)
            stderr[defined, step] = np.nanstd(numbers[1:, defined], axis=0)
    for place, name in enumerate(names):
        value, low, high = results[:, place]
        is_known = bool(np.isfinite(stderr[place][np.isfinite(value)]).all() and np.isfinite(value).any())
        curve = StepCurve(
            run=first.run,
            analysis=first.analysis,
            metric=name,
            layer=None,
            tags={**first.tags, "of": first.metric},
            at=at,
            values=value,
            stderr=stderr[place] if is_known else None,
        )
        undefined = (~np.isfinite(values)).sum(1)
        ends = {"low": low, "high": high, "num_layers": len(layers), "num_undefined": undefined}
        yield LayerCurve(metric=first.metric, tags=first.tag_text, curve=curve, **ends)


def _statistics(rows: Array, layers: NDArray[np.int64], better: str | None) -> Array:
    """Of curves (curves, layers) the statistics (curves, statistics)."""
    import torch

    from lit_layers.functional.curves import chosen_layers, monotonicities  # torch: pages load this file without it

    scores = torch.from_numpy(rows)
    higher = better != "lower"
    spearman, rising, drop = (monotonicities(scores, higher)[place] for place in (1, 0, 2))
    columns = [spearman.numpy(), rising.numpy(), drop.numpy()]
    if better is not None:
        least, most = scores.amin(-1, keepdim=True), scores.amax(-1, keepdim=True)
        shares = (scores - least) / (most - least).where(most > least, 1.0)
        for rule in ("plateau", "best"):
            columns.append(layers[chosen_layers(shares, rule, STILL, higher).numpy()])
    return np.stack([column.astype(np.float64) for column in columns], 1)
