"""Forecasts of models that were held out whole: ridge regression with jackknife+ intervals. All in float64."""

import math
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[np.float64]
PENALTIES = 10.0 ** np.arange(4, -10.1, -0.5)  # the strongest first, added to a sum over models
_ROUNDING = 1e-12  # a feature that varies by less than this share of its size is constant


class HeldOutForecasts(NamedTuple):
    """Of each model the forecast by the others, and the ends of its interval, each (models,)."""

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
    """Each model's target by ridge regression on the models of all other groups, with a jackknife+ interval.

    With mu_-S the regression that has not seen the groups S, g(i) the group of model i and n that of the training
    models, the forecast is mu_-g(i)(x_i), and the interval goes from the lower to the upper quantile of

        mu_-{g(i), g(j)}(x_i) -+ |y_j - mu_-{g(i), g(j)}(x_j)|    over the training models j,

    at the level `confidence` (1 + 1 / groups in training), a group weighing as much as any other. A target is thus in
    no fit, no scale, no penalty and no residual behind its own forecast. Features are standardised over the training
    models; the penalty is that of the lowest error of these, each left out in closed form.

    The guarantee: of exchangeable groups (without groups: models) at least 2 `confidence` - 1 of the intervals hold,
    0.6 for 0.8, whatever the distribution; for a regression that is stable about `confidence` of them do. Models of
    very different sizes are not exchangeable: nothing is guaranteed of the smallest and the largest.

    Source: Barber et al. 2021, "Predictive inference with the jackknife+", equation 1.3 and theorem 1; of groups Lee,
    Barber & Willett, arXiv 2306.06342.

    Args:
        features: (models, dim), at least one.
        targets: (models,).
        groups: Of each model what it is held out with, as the same size or recipe; without any each stands alone.
        confidence: Of the intervals, in (0, 1).

    Raises:
        ValueError: fewer groups than the interval needs (5 for 0.8), shapes that do not fit, values that are not
            finite, a confidence outside (0, 1).
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
    of, count = np.array([numbers[name] for name in names]), len(numbers)
    if count < fewest:
        raise ValueError(f"expected at least {fewest} groups of models for {confidence:g} intervals, got {count}")
    # By powers of two, which change no forecast, no square overflows or vanishes.
    x = np.ldexp(x, -np.frexp(np.abs(x).max(0))[1])
    y = np.ldexp(y, -(unit := int(np.frexp(np.abs(y).max())[1])))
    left, right = np.triu_indices(count)
    table = np.empty((count, count, len(y)))  # what the regression without two groups says of all models
    table[left, right] = table[right, left] = _ridge((of != left[:, None]) & (of != right[:, None]), x, y)
    ends = []
    for i, mine in enumerate(of):
        others = np.flatnonzero(of != mine)
        residuals = np.abs(y[others] - table[mine, of[others], others])
        weights, level = 1 / np.bincount(of)[of[others]] / (count - 1), confidence * count / (count - 1)
        center = table[mine, of[others], i]
        ends.append((-_quantile(residuals - center, weights, level), _quantile(center + residuals, weights, level)))
    return HeldOutForecasts(*np.ldexp([table[of, of, np.arange(len(y))], *np.array(ends).T], unit))


def fewest_groups(confidence: float) -> int:
    """Returns how many groups of models an interval needs, one of them held out: 5 for 0.8.

    Raises:
        ValueError: a confidence outside (0, 1).
    """
    if not 0 < confidence < 1:
        raise ValueError(f"expected a confidence between 0 and 1, got {confidence}")
    return max(4, 1 + math.ceil(confidence / (1 - confidence) - 1e-9))


def _ridge(training: NDArray[np.bool_], x: Array, y: Array) -> Array:
    """What regressions on some of the models (fits, models) say of all of them (fits, models)."""
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
    """The smallest value at or below which there is so much of the weight."""
    order = values.argsort()
    return float(values[order][min(np.searchsorted(weights[order].cumsum(), level - 1e-9), len(values) - 1)])
