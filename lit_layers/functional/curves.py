"""Curves over layers, and intervals."""

import math
from collections.abc import Sequence
from functools import lru_cache
from statistics import NormalDist
from typing import Literal, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from lit_layers.functional._checks import check_option, widened
from lit_layers.functional.exponential import ExponentialLaw, exponential_law
from lit_layers.functional.layer_choice import (
    Rule,
    Turns,
    choice_distribution,
    choice_interval,
    choose_layer,
    resampled_curves,
    turns,
)

__all__ = [
    "ExponentialLaw",
    "Monotonicity",
    "Rule",
    "Statistic",
    "Turns",
    "bootstrap_interval",
    "choice_distribution",
    "choice_interval",
    "choose_layer",
    "exponential_law",
    "monotonicity",
    "monotonicity_interval",
    "resampled_curves",
    "turns",
    "wilson_interval",
]

Statistic = Literal["mean", "median"]


class Monotonicity(NamedTuple):
    """How steadily a curve rises over layers; see `monotonicity`."""

    fraction_increasing: float
    spearman: float
    largest_drop: float
    max_drawdown: float


def monotonicity(scores: Sequence[float], *, higher_is_better: bool = True) -> Monotonicity:
    """How steadily the scores of layers 1..L rise; losses (`higher_is_better=False`) are negated first.

    `fraction_increasing`, in [0, 1]: share of the L - 1 steps that go up. `spearman`, in [-1, 1]: rank correlation
    with depth, NaN for a constant curve, where it is undefined. `largest_drop` >= 0: the largest single step down.
    `max_drawdown` >= 0: the largest fall from any layer to any later one. The first two are unchanged by any
    increasing map of the scores.

    Raises:
        ValueError: fewer than 3 layers, or a score that is not finite.
    """
    values = torch.as_tensor(scores, dtype=torch.float64)
    if values.ndim != 1 or len(values) < 3:
        raise ValueError(f"expected the scores of at least 3 layers, got shape {tuple(values.shape)}")
    if not values.isfinite().all():
        raise ValueError(f"expected finite scores, got {values[~values.isfinite()][0].item()}")
    return Monotonicity(*(value.item() for value in _monotonicity(values, higher_is_better)))


def monotonicity_interval(
    row_scores: Float[Tensor, "layers rows"],
    *,
    higher_is_better: bool = True,
    resamples: int = 2000,
    seed: int = 0,
    confidence: float = 0.95,
) -> tuple[Monotonicity, Monotonicity]:
    """Percentile bootstrap interval, low and high, of each number of `monotonicity` of the layers' mean row scores.

    Test rows are resampled, for all layers together, never layers. A resample whose curve is constant has no rank
    correlation and is left out of that interval, which is NaN where none is left. With only few rows, resampled curves
    are rougher than the curve itself: then the interval may lie beside its value.

    Raises:
        ValueError: fewer than 3 layers or 2 rows, a score that is not finite, an option out of range.
    """
    _check_confidence(confidence)
    curves = resampled_curves(row_scores, resamples=resamples, seed=seed)
    if curves.shape[1] < 3:
        raise ValueError(f"expected the scores of at least 3 layers, got {curves.shape[1]}")
    low_and_high = torch.tensor([(1 - confidence) / 2, (1 + confidence) / 2], dtype=torch.float64)
    bounds = [values.nanquantile(low_and_high).tolist() for values in _monotonicity(curves, higher_is_better)]
    low, high = zip(*bounds, strict=True)
    return Monotonicity(*low), Monotonicity(*high)


def _monotonicity(values: Float[Tensor, "*n layers"], higher_is_better: bool) -> list[Tensor]:
    """The numbers of `Monotonicity`, each (*n), of several curves."""
    values = values if higher_is_better else -values
    steps = values.diff()
    return [
        (steps > 0).double().mean(-1),
        _correlation_with_depth(values),
        (-steps).amax(-1).clamp(min=0.0) + 0.0,  # not -0.0
        (values.cummax(-1).values - values).amax(-1),
    ]


def _correlation_with_depth(values: Float[Tensor, "*n layers"]) -> Tensor:
    """Spearman's, average ranks for ties; NaN for a constant curve. Ranks are halves: these sums have no rounding."""
    others = values[..., None, :]
    below, equal = (others < values[..., None]).sum(-1), (others == values[..., None]).sum(-1)
    middle = (values.shape[-1] + 1) / 2
    ranks = below.double() + (equal.double() + 1) / 2 - middle
    depth = torch.arange(1, values.shape[-1] + 1, dtype=torch.float64) - middle
    return (ranks * depth).sum(-1) / (ranks.square().sum(-1) * depth.square().sum()).sqrt()


def bootstrap_interval(
    values: Float[Tensor, "prompts *n"],
    *,
    statistic: Statistic = "mean",
    resamples: int = 2000,
    seed: int = 0,
    confidence: float = 0.95,
) -> tuple[Float[Tensor, "*n"], Float[Tensor, "*n"]]:
    """Percentile bootstrap interval, low and high, of the mean (or median) over the first dimension. In float64.

    Equal numbers of prompts are resampled alike for one seed, so that intervals are paired over layers and steps.

    Raises:
        ValueError: fewer than 2 prompts, a value that is not finite, an option out of range.
    """
    check_option("statistic", statistic, "mean", "median")
    values = widened("values", values).cpu()
    if values.ndim < 1 or len(values) < 2:
        raise ValueError(f"expected the values of at least 2 prompts, got shape {tuple(values.shape)}")
    if not values.isfinite().all():
        raise ValueError("expected finite values: leave undefined ones out first")
    if resamples < 1:
        raise ValueError(f"expected at least 1 resample, got {resamples}")
    _check_confidence(confidence)
    rows = _resampled_rows(len(values), resamples, seed)
    low_and_high = torch.tensor([(1 - confidence) / 2, (1 + confidence) / 2], dtype=torch.float64)
    columns = values.reshape(len(values), -1).unbind(1)  # one at a time: resamples x prompts numbers each
    bounds = [torch.quantile(_statistic(column[rows], statistic), low_and_high) for column in columns]
    low, high = torch.stack(bounds, dim=1)
    return low.reshape(values.shape[1:]), high.reshape(values.shape[1:])


def _statistic(samples: Tensor, statistic: Statistic) -> Tensor:
    return samples.mean(1) if statistic == "mean" else torch.quantile(samples, 0.5, dim=1)


@lru_cache(maxsize=4)
def _resampled_rows(num_rows: int, resamples: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(num_rows, (resamples, num_rows), generator=generator)


def wilson_interval(successes: int, n: int, confidence: float = 0.95) -> tuple[float, float]:
    """Wilson's score interval, low and high, of a share of `successes` among `n` trials. Never leaves [0, 1].

    Raises:
        ValueError: no trial, more successes than trials, or a confidence outside (0, 1).
    """
    if n < 1 or not 0 <= successes <= n:
        raise ValueError(f"expected 0 <= successes <= n and n >= 1, got successes={successes}, n={n}")
    _check_confidence(confidence)
    z2 = NormalDist().inv_cdf((1 + confidence) / 2) ** 2
    share = successes / n
    center = (share + z2 / (2 * n)) / (1 + z2 / n)
    half = math.sqrt(z2 * (share * (1 - share) / n + z2 / (4 * n * n))) / (1 + z2 / n)
    return max(0.0, center - half), min(1.0, center + half)


def _check_confidence(confidence: float) -> None:
    if not 0 < confidence < 1:
        raise ValueError(f"expected a confidence between 0 and 1, got {confidence}")
