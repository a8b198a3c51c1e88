"""Forecast final values and half-way points of held-out models from the beginning of their training.

python docs/studies/forecasts.py         prints the table `forecasts` of four_papers.md: a CPU minute
"""

import math
import re
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike, NDArray
from study_data import DATA, QUANTITIES, Table, curves_by_group, loss_of_runs, markdown_table, seeds_of, unpack

from lit_layers.clock.step_curves import StepCurve
from lit_layers.clock.times_and_order import Clock, measure_times
from lit_layers.figures.labels import value as number_text
from lit_layers.functional.correlation import UndefinedError, bootstrap_rows
from lit_layers.functional.emergence.curve_times import FEWEST_CHECKPOINTS, emergence_times

Array = NDArray[np.float64]
LOSS = "lens/logit_lens_loss"
LEVEL = 0.8
PENALTIES = 10.0 ** np.arange(4, -10.1, -0.5)  # strongest first; the loss that they are added to is a sum over models
_ROUNDING = 1e-12  # a feature that varies by less than this share of its size is constant
FEWEST_MODELS = 5  # for the intervals: see fewest_groups
MOST = 1e300  # largest value: a regression on larger ones would overflow
FITTED = {"curve": "early curve", "loss": "loss alone", "both": "both"}
METHODS = {**FITTED, "others": "others' median", "persistence": "persistence"}
TARGETS = {"final": "final value", "halfway": "half-way point"}
COLUMNS = ("run", "group", "held_out", "of", "analysis", "metric", "layer", "tags", "emerges", "until", "num_training")
COLUMNS = (*COLUMNS, "unit", "truth", *(f"{name}{end}" for name in FITTED for end in ("", "_low", "_high")))
COLUMNS = (*COLUMNS, "others", "persistence")
UNITS = {"final": "standard deviations over models", "halfway": "octaves"}
_BASELINE = {"final": "persistence", "halfway": "others"}
_SIZE = re.compile(r".*?(?<![\d.])\d+(\.\d+)?[mb](?![a-z0-9])", re.IGNORECASE)


# ------------------------------------------------------------------------------------------------ regression


class HeldOutForecasts(NamedTuple):
    """Forecast of each model by the others, and the ends of its interval, each (models,)."""

    values: Array
    low: Array
    high: Array


def forecast_held_out(
    features: ArrayLike,
    targets: ArrayLike,
    *,
    groups: Sequence[Hashable] | None = None,
    confidence: float = 0.8,
) -> HeldOutForecasts:
    """Forecast each model's target by ridge regression on the models of all other groups, with a jackknife+ interval.

    Let mu_-S be the regression that is trained without the groups S, and g(i) the group of model i. The forecast is
    mu_-g(i)(x_i). The interval goes from the lower quantile of the differences to the upper quantile of the sums

        mu_-{g(i), g(j)}(x_i) -+ |y_j - mu_-{g(i), g(j)}(x_j)|    over the training models j,

    at the level `confidence` (1 + 1 / groups in training). Each group has the same total weight. The target of a model
    enters no fit, scale, penalty or residual of its own forecast. Features are standardised over the training models.
    The penalty minimises the leave-one-out error of the training models, which has a closed form.

    Guarantee: if the groups (without groups: the models) are exchangeable, at least 2 `confidence` - 1 of the intervals
    contain the target (0.6 for 0.8) for any distribution. For a stable regression, about `confidence` of them do.
    Models of very different sizes are not exchangeable, so nothing is guaranteed for the smallest and the largest.

    Source: Barber et al. 2021, "Predictive inference with the jackknife+", equation 1.3 and theorem 1. For groups: Lee,
    Barber & Willett, arXiv 2306.06342.

    Args:
        features: (models, dim), at least one.
        targets: (models,).
        groups: group of each model, such as its size or recipe. A group is held out as a whole. By default each model
            is a group.
        confidence: nominal coverage of the intervals, in (0, 1).

    Raises:
        ValueError: if there are fewer groups than the interval needs (5 for 0.8), if shapes do not match, if values are
            not finite, or if the confidence is outside (0, 1).
    """
    x, y = np.asarray(features, dtype=np.float64), np.asarray(targets, dtype=np.float64)
    if x.ndim != 2 or not x.shape[1] or y.shape != x.shape[:1]:
        raise ValueError(f"expected features (models, dim) of targets (models,), got {x.shape} of {y.shape}")
    if not (np.isfinite(x).all() and np.isfinite(y).all()):
        raise ValueError("expected finite features and targets")
    fewest = fewest_groups(confidence)
    names = list(range(len(y))) if groups is None else list(groups)
    if len(names) != len(y):
        raise ValueError(f"expected a group for each of {len(y)} models, got {len(names)}")
    numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
    ids, count = np.array([numbers[name] for name in names]), len(numbers)
    if count < fewest:
        raise ValueError(f"expected at least {fewest} groups of models for {confidence:g} intervals, got {count}")
    # Scale by powers of two, so that no square overflows or underflows. This changes no forecast.
    x = np.ldexp(x, -np.frexp(np.abs(x).max(0))[1])
    y = np.ldexp(y, -(unit := int(np.frexp(np.abs(y).max())[1])))
    left, right = np.triu_indices(count)
    table = np.empty((count, count, len(y)))  # predictions of the regression without two groups for all models
    table[left, right] = table[right, left] = _ridge((ids != left[:, None]) & (ids != right[:, None]), x, y)
    ends = []
    for i, mine in enumerate(ids):
        others = np.flatnonzero(ids != mine)
        residuals = np.abs(y[others] - table[mine, ids[others], others])
        weights, level = 1 / np.bincount(ids)[ids[others]] / (count - 1), confidence * count / (count - 1)
        center = table[mine, ids[others], i]
        ends.append((-_quantile(residuals - center, weights, level), _quantile(center + residuals, weights, level)))
    return HeldOutForecasts(*np.ldexp([table[ids, ids, np.arange(len(y))], *np.array(ends).T], unit))


def fewest_groups(confidence: float) -> int:
    """Return how many groups of models an interval needs, including the held-out group: 5 for 0.8.

    Raises:
        ValueError: if the confidence is outside (0, 1).
    """
    if not 0 < confidence < 1:
        raise ValueError(f"expected a confidence between 0 and 1, got {confidence}")
    return max(4, 1 + math.ceil(confidence / (1 - confidence) - 1e-9))


def _ridge(training: NDArray[np.bool_], x: Array, y: Array) -> Array:
    """Return predictions (fits, models) for all models. `training` (fits, models) selects the models of each fit."""
    t = training.astype(np.float64)
    count = t.sum(1, keepdims=True)
    centered = x - (t @ x / count)[:, None]  # (fits, models, dim)
    scale = np.sqrt((t[..., None] * centered**2).sum(1) / count)[:, None]
    varies = scale > _ROUNDING * np.abs(x).max(0)
    z = np.where(varies, centered / np.where(varies, scale, 1.0), 0.0)
    mean = t @ y[:, None] / count
    residual = t * (y - mean)
    u, d, v = np.linalg.svd(z * t[..., None], full_matrices=False)
    along = np.einsum("fmr,fm->fr", u, residual)
    kept = d**2 / (d**2 + PENALTIES[:, None, None])  # (penalties, fits, rank)
    error = residual - np.einsum("fmr,pfr->pfm", u, kept * along)
    leverage = t / count + np.einsum("fmr,pfr->pfm", u**2, kept)
    errors = (t * (error / np.maximum(1 - leverage, _ROUNDING)) ** 2).sum(2)
    penalty = PENALTIES[errors.argmin(0)][:, None]
    weight: Any = np.einsum("frk,fr->fk", v, d / (d**2 + penalty) * along)
    return mean + np.einsum("fmk,fk->fm", z, weight)


def _quantile(values: Array, weights: Array, level: float) -> float:
    """Return the smallest value whose cumulative weight reaches `level`."""
    order = values.argsort()
    return float(values[order][min(np.searchsorted(weights[order].cumsum(), level - 1e-9), len(values) - 1)])


# ------------------------------------------------------------------------------------------------ early parts


@dataclass(frozen=True, kw_only=True)
class EarlyPart:
    """Early part of one curve in all models that have it.

    `features` and `losses` are level and slope of the early curve and of the early loss, (models, 2). `early` has the
    last early values and `final` the final values, (models,). `until` is the last early step.
    """

    curves: list[StepCurve]
    features: Array
    losses: Array | None
    early: Array
    final: Array
    until: float


@dataclass(frozen=True)
class EarlyParts:
    """Early part of each curve, up to a share of training. `left_out` counts the excluded curves by reason."""

    share: float
    parts: list[EarlyPart]
    left_out: dict[str, int]
    loss: str = ""


@dataclass(frozen=True)
class ModelForecasts:
    """Forecasts (`table`), errors of each method (`errors`), and how many curves emerge early, later and never."""

    early: EarlyParts
    table: pd.DataFrame
    errors: pd.DataFrame
    counts: dict[str, int]


def model_group(run: str) -> str:
    """Return the group of a model: its name up to its size (`pythia-1b` for `pythia-1b-deduped`)."""
    match = _SIZE.match(run)
    return match[0] if match else run


def early_parts(curves: Sequence[StepCurve], share: float, *, loss: str = "") -> EarlyParts:
    """Return the early part of each curve that at least 5 models have.

    Only checkpoints that all models of a curve have are used. A model is excluded if its training ends at another step
    than that of most models. Checkpoints up to `share` of the last step are early. The level is the last early value.
    The slope is the least-squares slope over log2(1 + step) in the last third of the early values (at least 3).

    Raises:
        ValueError: if the share is outside (0, 1), if there are fewer than 5 models, if no curve has 6 early
            checkpoints, or if there is no such loss.
    """
    if not 0 < share < 1:
        raise ValueError(f"forecast: expected a share of training above 0 and below 1, got {share:g}")
    curves = [curve for curve in curves if curve.seeds is None]
    bounded = [bool(curve.at.min(initial=0) >= 0 and not (np.abs(curve.values) > MOST).any()) for curve in curves]
    odd, curves = bounded.count(False), [curve for curve, is_bounded in zip(curves, bounded, strict=True) if is_bounded]
    if (runs := len({curve.run for curve in curves})) < FEWEST_MODELS:
        raise ValueError(f"forecast: expected {FEWEST_MODELS} models or more, of which one is held out, got {runs}")
    left_out = Counter({f"a step is below 0 or a value beyond {MOST:g}": odd})
    losses = _losses(curves, share, loss) if loss else {}
    groups: dict[Any, list[StepCurve]] = {}
    for curve in curves:
        if not loss or loss not in (curve.metric, f"{curve.analysis}/{curve.metric}"):
            groups.setdefault(curve.key, []).append(curve)
    parts = [part for group in groups.values() if (part := _part(group, share, losses, left_out)) is not None]
    if not parts:
        reason, _ = (+left_out or Counter({"there is none but the loss": 1})).most_common(1)[0]
        raise ValueError(f"forecast: no curve can be forecast: {reason}")
    return EarlyParts(share, parts, dict(+left_out), loss)


def _losses(curves: Sequence[StepCurve], share: float, loss: str) -> dict[str, Array]:
    """Return level and slope of the early loss of each run: the loss of the whole model, or else of its last layer."""
    part = _part(list(loss_of_runs(curves, loss).values()), share, {}, counts := Counter[str]())
    if part is None:
        reason = next(iter(+counts), "no run has such a curve")
        raise ValueError(f"loss: expected ANALYSIS/METRIC of a curve of {FEWEST_MODELS} models, got {loss}: {reason}")
    return {curve.run: row for curve, row in zip(part.curves, part.features, strict=True)}


def _part(
    group: Sequence[StepCurve], share: float, losses: Mapping[str, Array], left_out: Counter[str]
) -> EarlyPart | None:
    ends = [curve.at[np.isfinite(curve.values)].max(initial=0) for curve in group]
    last = max(ends, key=lambda end: (ends.count(end), end), default=0)
    kept = [curve for curve, end in zip(group, ends, strict=True) if end == last]
    left_out["the model ends at another step than most"] += len(group) - len(kept)
    if len(kept) < FEWEST_MODELS:
        left_out[f"fewer than {FEWEST_MODELS} models have it"] += len(kept)
        return None
    at = np.array(sorted(set.intersection(*({*curve.at[np.isfinite(curve.values)]} for curve in kept))))
    until = float(f"{share * last:.12g}")  # avoids rounding: 57% of 100 is 57
    x = np.log2(1 + at[at <= until])
    if len(x) < FEWEST_CHECKPOINTS:
        reason = f"expected {FEWEST_CHECKPOINTS} checkpoints that all models have in the first {100 * share:.3g}%"
        left_out[f"{reason} of training, got {len(x)}"] += len(kept)
        return None
    values = np.stack([curve.values[np.isin(curve.at, at)] for curve in kept]).astype(np.float64)
    early = values[:, : len(x)]
    count = max(3, len(x) // 3)
    centered = x[-count:] - x[-count:].mean()
    slope = early[:, -count:] @ centered / (centered @ centered)
    has_losses = losses and all(curve.run in losses for curve in kept)
    return EarlyPart(
        curves=kept,
        features=np.stack([early[:, -1], slope], 1),
        losses=np.stack([losses[curve.run] for curve in kept]) if has_losses else None,
        early=values[:, len(x) - 1],
        final=values[:, -1],
        until=until,
    )


# ------------------------------------------------------------------------------------------------ forecasts


def forecast_models(early: EarlyParts, clock: Clock, *, confidence: float = 0.95, seed: int = 0) -> ModelForecasts:
    """Forecast the final values and the half-way points of each model from the other models.

    One model is held out at a time. A whole group is also held out if `model_group` gives at least 5 groups and fewer
    groups than models. Half-way points are forecast only for curves that emerge after their early part, from the curves
    of other models with the same property. `emergence_times` at `confidence` decides what emerges. Three regressions on
    level and slope, `FITTED`, have 80% intervals (`forecast_held_out`). They are compared with persistence, which
    predicts the last early value, and with the median of the other models.
    """
    times = {(curve.run, curve.key): each for curve, each in zip(clock.curves, clock.times, strict=True)}
    rows, counts = [], Counter[str]()
    for part in early.parts:
        emergence = [times.get((curve.run, curve.key)) for curve in part.curves]
        is_timed = np.array([each is not None for each in emergence])
        emerges = np.array([each is not None and each.emerges for each in emergence])
        soon = np.array(
            [
                each is not None and _emerges_early(curve, part.until, confidence, seed)
                for each, curve in zip(emergence, part.curves, strict=True)
            ]
        )
        counts["emerge early"] += int(soon.sum())
        counts["emerge never"] += int((is_timed & ~soon & ~emerges).sum())
        counts["emerge later"] += int((later := ~soon & emerges).sum())
        halfway = np.array([each.halfway.value if each is not None and each.halfway else np.nan for each in emergence])
        for target, truth, chosen in (("final", part.final, np.ones_like(later)), ("halfway", halfway, later)):
            if chosen.sum() < FEWEST_MODELS:
                continue
            if np.ptp(truth[chosen]) <= 1e-9 * np.abs(truth[chosen]).max():
                counts[f"all models have the same {TARGETS[target]}"] += int(chosen.sum())
            else:
                rows += _forecasts(part, target, truth, np.flatnonzero(chosen), emerges)
    table: Any = pd.DataFrame(rows, columns=list(COLUMNS)).astype({"layer": "Int64"})
    return ModelForecasts(early, table, _errors(table), dict(counts))


def _emerges_early(curve: StepCurve, until: float, confidence: float, seed: int) -> bool:
    early = curve.at <= until
    stderr = None if curve.stderr is None else curve.stderr[early]
    return emergence_times(
        curve.at[early], curve.values[early], stderr=stderr, confidence=confidence, seed=seed
    ).emerges


def _forecasts(
    part: EarlyPart, target: str, truth: Array, chosen: NDArray[np.intp], emerges: NDArray[np.bool_]
) -> list[dict[str, Any]]:
    """Return a row for each way of holding out and each model."""
    runs = [part.curves[model].run for model in chosen]
    groups = [model_group(run) for run in runs]
    y = np.log2(1 + truth[chosen]) if target == "halfway" else truth[chosen]
    size = np.abs(y).max()  # above 0, because the true values differ
    inputs = {"curve": part.features[chosen]}
    if part.losses is not None:
        inputs |= {"loss": part.losses[chosen], "both": np.concatenate([part.features[chosen], part.losses[chosen]], 1)}
    rows = []
    for held_out, names in (("model", runs), ("group", groups)):
        if held_out == "group" and not FEWEST_MODELS <= len(set(names)) < len(runs):
            continue
        forecasts = {name: forecast_held_out(x, y, groups=names, confidence=LEVEL) for name, x in inputs.items()}
        for number, (model, run) in enumerate(zip(chosen, runs, strict=True)):
            others = y[[name != names[number] for name in names]]
            row: dict[str, Any] = {"truth": y[number], "others": float(np.median(others))}
            for name, each in forecasts.items():
                row |= {name: each.values[number], f"{name}_low": each.low[number], f"{name}_high": each.high[number]}
            if target == "halfway":
                row = {name: max(0.0, float(np.exp2(min(at, 1000)) - 1)) for name, at in row.items()}
            else:
                row["persistence"] = part.early[model]
            head = {"run": run, "group": groups[number], "held_out": held_out, "of": target}
            key = dict(zip(("analysis", "metric", "layer", "tags"), part.curves[model].key, strict=True))
            unit = float(size * (y / size).std()) if target == "final" else 1.0
            rest = {"emerges": bool(emerges[model]), "until": part.until, "num_training": len(others), "unit": unit}
            rows.append({**head, **key, **row, **rest})
    return rows


# ------------------------------------------------------------------------------------------------ errors


def _errors(table: Any) -> Any:
    """Return a row of errors per method, over all curves of a target (metric "") and for each metric."""
    columns = ["held_out", "of", "metric", "method", "error", "coverage", "width", "ratio", "ratio_low", "ratio_high"]
    columns += ["to_loss", "to_loss_low", "to_loss_high", "num_models", "num_groups", "num_curves", "num_forecasts"]
    rows = []
    for (held_out, target), part in table.groupby(["held_out", "of"], sort=False):
        metrics = part["metric"].unique()
        for metric in ("", *(metrics if len(metrics) > 1 else ())):
            mine = part[part["metric"] == metric] if metric else part
            scaled = {name: _scaled(mine, name, target) for name in METHODS if mine[name].notna().any()}
            sizes = {"num_models": mine["run"].nunique(), "num_groups": mine["group"].nunique()}
            sizes["num_curves"] = len(mine[["analysis", "metric", "layer", "tags"]].drop_duplicates())
            units = mine["group"] if sizes["num_groups"] >= FEWEST_MODELS else mine["run"]
            for name, error in scaled.items():
                row = {"held_out": held_out, "of": target, "metric": metric, "method": name, "error": np.nanmean(error)}
                if name in FITTED:
                    low, high = mine[f"{name}_low"], mine[f"{name}_high"]
                    row["coverage"] = ((low <= mine["truth"]) & (mine["truth"] <= high))[low.notna()].mean()
                    row["width"] = np.nanmean(_scaled(mine, f"{name}_low", target, f"{name}_high"))
                for column, baseline in (("ratio", _BASELINE[str(target)]), ("to_loss", "loss")):
                    if baseline in scaled and baseline != name:
                        ends = _ratio(error, scaled[baseline], units)
                        row |= dict(zip((column, f"{column}_low", f"{column}_high"), ends, strict=True))
                rows.append({**row, **sizes, "num_forecasts": int(np.isfinite(error).sum())})
    return pd.DataFrame(rows, columns=columns)


def _scaled(rows: Any, name: str, target: Any, other: str = "truth") -> Array:
    """Return the distance of two columns, in standard deviations over models of the final values, or in octaves."""
    a, b = (rows[column].to_numpy(dtype=np.float64) for column in (name, other))
    return np.abs(np.log2((1 + a) / (1 + b))) if target == "halfway" else np.abs(a - b) / rows["unit"].to_numpy()


def _ratio(error: Array, baseline: Array, units: Any) -> tuple[float, float, float]:
    """Return the ratio of paired mean errors, and its 95% bootstrap interval over held-out models or groups."""
    there = np.isfinite(error) & np.isfinite(baseline)
    names, unit = np.unique(np.asarray(units)[there], return_inverse=True)
    sums = np.stack([np.bincount(unit, weights=each[there]) for each in (error, baseline)], 1)

    def statistic(drawn: Any) -> float:
        errors, other = sums[drawn].sum(0)
        if other == 0:
            raise UndefinedError("the baseline has no error")
        return float(errors / other)

    try:
        interval = bootstrap_rows(statistic, len(names))
        return statistic(np.arange(len(names))), interval.low, interval.high
    except UndefinedError:
        return np.nan, np.nan, np.nan


# ------------------------------------------------------------------------------------------------ the table


def error_rows(forecasts: ModelForecasts) -> list[tuple[str, list[tuple[str, ...]]]]:
    """Return, for each target and way of holding out, a row of text for each method."""
    tables = []
    whole: Any = forecasts.errors[forecasts.errors["metric"] == ""]
    for (held_out, target), rows in whole.groupby(["held_out", "of"], sort=False):
        lines = []
        for row in rows.to_dict("records"):
            ratios = [_interval(row, column) if np.isfinite(row[column]) else "" for column in ("ratio", "to_loss")]
            holds = f"{row['coverage']:.0%}" if np.isfinite(row["coverage"]) else ""
            width = number_text(row["width"]) if holds else ""
            lines.append((METHODS[row["method"]], number_text(row["error"]), *ratios, holds, width))
        what = "a model" if held_out == "model" else "all models of a size"
        tables.append((f"{TARGETS[target].capitalize()}, {what} held out ({UNITS[target]})", lines))
    return tables


def _interval(row: Mapping[str, Any], column: str) -> str:
    return f"{row[column]:.2f} [{row[f'{column}_low']:.2f}, {row[f'{column}_high']:.2f}]"


def forecast_table(curves: Mapping[str, Mapping[str, Sequence[StepCurve]]]) -> Table:
    """Yield the errors of forecasts from the first tenth of training, each seed held out."""
    yield ["of, forecast by", "mean error", "of the baseline's", "of the loss's", "80% intervals that hold", "width"]
    for group in ("GPT-2", "ViT"):
        mine = [curve for quantity in QUANTITIES for curve in seeds_of(curves[group], quantity)]
        found = forecast_models(early_parts(mine, 0.1, loss=LOSS), measure_times(mine))
        for heading, rows in error_rows(found):
            yield from ([f"{group}: {heading.split(',')[0]}, {name}", *cells] for name, *cells in rows)


if __name__ == "__main__":
    print(markdown_table(forecast_table(curves_by_group(unpack(DATA)))))
