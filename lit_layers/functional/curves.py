"""Curves over layers, the choice of a layer, and bootstrap intervals."""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist
from typing import Literal, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import one_hot

from lit_layers.functional._checks import Undefined, check_option, checked, widened

# Rules that choose a layer from a curve, the layer where the curve bends, and the uncertainty of the choice.

Rule = Literal["within_tolerance", "fraction_of_last", "plateau", "knee", "best"]
RULES = ("within_tolerance", "fraction_of_last", "plateau", "knee", "best")
DRAWN_AT_ONCE = 2**20  # largest number of row indices drawn at once: 8 MB
_CACHED = 2**23  # largest number of counts in a cached tensor: 2,000 resamples of 4,194 rows, 17 MB in int16
ENDS = torch.tensor([(1 - 0.95) / 2, (1 + 0.95) / 2], dtype=torch.float64)
# Comparisons of scores allow for rounding errors of this share of the largest score: in float64, 0.84 - 0.80 is
# slightly more than 0.04.
SLACK = 1e-12


def choose_layer(
    scores: Sequence[float],
    *,
    rule: Rule,
    tolerance: float = 0.01,
    higher_is_better: bool = True,
) -> int:
    """Return the layer, counted from 1, that a rule chooses; the earliest if several are equal.

    With scores s_1..s_L, where losses (`higher_is_better=False`) are negated first:

    - within_tolerance: the first layer l with s_l >= s_L - tolerance.
    - fraction_of_last: the first layer with s_l >= (1 - tolerance) s_L, for positive scores where higher is better.
    - plateau: the first layer after which no step to the next layer gains more than `tolerance`.
    - knee: the layer where s_l is farthest above the straight line from the first to the last point.
    - best: the layer with the largest s_l.

    A constant curve gives the first layer under every rule. Choose on validation scores, report test scores.

    Raises:
        ValueError: a score that is not finite, a tolerance below 0 (or a fraction not below 1), an unknown rule,
            fraction_of_last with losses or a last score that is not positive.
    """
    values = _checked(scores)
    _check_last(rule, values[-1].item(), tolerance, higher_is_better)
    return 1 + int(chosen_layers(values, rule, tolerance, higher_is_better))


def inflection_layer(scores: Sequence[float]) -> int | None:
    """Return the layer, counted from 1, at which the curve's bend first changes sign; None if it never does.

    The bend at an inner layer l is the second difference s_{l+1} - 2 s_l + s_{l-1}. The returned layer comes right
    after the last layer whose bend has the old sign. Second differences of rounding size count as 0.

    Raises:
        ValueError: fewer than 3 layers, or a score that is not finite.
    """
    values = _checked(scores, least=3)
    bends = values.diff(n=2)
    bends = bends.masked_fill(bends.abs() <= 4 * SLACK * values.abs().max(), 0.0)
    signs = bends.sign().tolist()
    curved = [index for index, sign in enumerate(signs) if sign]
    return next((left + 3 for left, right in itertools.pairwise(curved) if signs[left] != signs[right]), None)


def resampled_curves(
    row_scores: Float[Tensor, "layers rows"], *, resamples: int = 2000, seed: int = 0
) -> Float[Tensor, "resamples layers"]:
    """Return curves of the mean score of each layer over resampled test rows, the same rows for all layers.

    In float64. The same seed draws the same rows as in `bootstrap_interval`. 2,000 resamples of 10,000 rows and 25
    layers take a second.

    Raises:
        ValueError: fewer than 2 rows, a score that is not finite.
    """
    values = widened(row_scores).cpu()
    _check_rows(values.mT)
    num_rows = values.shape[1]
    return torch.cat([counts @ values.T / num_rows for counts in row_counts(num_rows, resamples, seed)])


def choice_distribution(
    row_scores: Float[Tensor, "layers rows"],
    *,
    rule: Rule,
    tolerance: float = 0.01,
    higher_is_better: bool = True,
    resamples: int = 2000,
    seed: int = 0,
) -> Float[Tensor, " layers"]:
    """Return the share of bootstrap resamples of the test rows in which `choose_layer` chooses each layer.

    The shares sum to 1. Rows are resampled for all layers together, as in `resampled_curves`. If the last layer scores
    0 in a resample, every layer is at least as good, so fraction_of_last chooses the first.

    Raises:
        ValueError: in the cases of `resampled_curves` and `choose_layer`.
    """
    _check_last(rule, row_scores[-1].double().mean().item(), tolerance, higher_is_better)
    curves = resampled_curves(row_scores, resamples=resamples, seed=seed)
    chosen = chosen_layers(curves, rule, tolerance, higher_is_better)
    return chosen.bincount(minlength=curves.shape[1]).double() / resamples


def choice_interval(shares: Float[Tensor, " layers"]) -> tuple[int, int]:
    """Return the lowest and highest layer of the 95% interval of a distribution from `choice_distribution`."""
    below = widened(shares).cpu().cumsum(0)
    return 1 + int(_first(below > ENDS[0] + SLACK)), 1 + int(_first(below >= ENDS[1] - SLACK))


def row_counts(num_rows: int, resamples: int, seed: int) -> Iterator[Float[Tensor, "resamples rows"]]:
    """Yield how often each resample draws each row, for several resamples at a time."""
    # All records of an analysis use the same resamples, so the counts are cached if they fit in `_CACHED`.
    if num_rows * resamples <= _CACHED and num_rows <= torch.iinfo(torch.int16).max:
        parts = _cached_counts(num_rows, resamples, seed).split(max(1, DRAWN_AT_ONCE // num_rows))
        yield from (part.double() for part in parts)
    else:
        yield from _drawn_counts(num_rows, resamples, seed)


@lru_cache(maxsize=4)
def _cached_counts(num_rows: int, resamples: int, seed: int) -> Tensor:
    return torch.cat([counts.short() for counts in _drawn_counts(num_rows, resamples, seed)])


def _drawn_counts(num_rows: int, resamples: int, seed: int) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    size = max(1, DRAWN_AT_ONCE // num_rows)
    for start in range(0, resamples, size):
        count = min(size, resamples - start)
        drawn = torch.randint(num_rows, (count, num_rows), generator=generator)
        drawn += num_rows * torch.arange(count)[:, None]
        yield drawn.flatten().bincount(minlength=count * num_rows).view(count, num_rows).double()


def chosen_layers(values: Float[Tensor, "*n layers"], rule: str, tolerance: float, higher_is_better: bool) -> Tensor:
    """Return the index (*n), counted from 0, of the layer that a rule of `choose_layer` chooses from each curve."""
    check_option("rule", rule, *RULES)
    if not tolerance >= 0:
        raise ValueError(f"expected a tolerance of at least 0, got {tolerance}")
    values = values if higher_is_better else -values
    slack = SLACK * values.abs().amax(-1, keepdim=True)
    last = values[..., -1:]
    if rule == "best":
        return values.argmax(-1)
    if rule == "within_tolerance":
        return _first(values >= last - tolerance - slack)
    if rule == "fraction_of_last":
        return _first(values >= (1 - tolerance) * last - slack)
    if rule == "plateau":
        rises = values.diff() > tolerance + slack
        # Mark each layer after which the curve still rises somewhere.
        later = torch.nn.functional.pad(rises.flip(-1).cummax(-1).values.flip(-1), (0, 1))
        return _first(~later)
    start, depth = values[..., :1], torch.linspace(0, 1, values.shape[-1], dtype=values.dtype)
    above = (values - start) - depth * (last - start)
    return _first(above >= above.amax(-1, keepdim=True) - slack)


def _check_last(rule: str, last: float, tolerance: float, higher_is_better: bool) -> None:
    if rule == "fraction_of_last" and not (higher_is_better and tolerance < 1 and last > 0):
        raise ValueError(
            "fraction_of_last expects positive scores where higher is better and a tolerance below 1, got "
            f"higher_is_better={higher_is_better}, tolerance={tolerance}, a last score of {last}"
        )


def _first(fits: Tensor) -> Tensor:
    return fits.int().argmax(-1)


def _checked(scores: Sequence[float], least: int = 1) -> Tensor:
    values = torch.as_tensor(scores, dtype=torch.float64)
    if len(values) < least or not values.isfinite().all():
        raise ValueError(f"expected finite scores of {least} layers or more, got {values.tolist()}")
    return values


def _check_rows(values: Tensor) -> None:
    if len(values) < 2 or not values.isfinite().all():
        raise ValueError(f"expected finite values of at least 2 rows, got shape {tuple(values.shape)}")


# The exponential law: whether a curve over layers is a geometric series, with the same factor for each block.

PerCurve = Float[Tensor, "*n"]


@dataclass(frozen=True, eq=False)
class ExponentialLaw:
    """The least-squares line through log10 of a curve; see `exponential_law`."""

    rho: PerCurve
    slope: PerCurve
    intercept: PerCurve
    pearson: PerCurve
    r_squared: PerCurve


def exponential_law(residuals: Float[Tensor, "*n layers"], *, undefined: Undefined = "raise") -> ExponentialLaw:
    """Fit a geometric series to a curve over layers: PR_l = rho^(l - 1) PR_1, with PR_l the residual of layer l.

    The fit is the least-squares line of log10 PR_l against l - 1 over the layers 1..L, without the embedding, in
    float64. `rho` = 10^slope is the factor by which the residual changes per block; below 1 the residual shrinks.
    `pearson`, in [-1, 1], is the correlation of log10 PR_l with depth: -1 for an exact falling geometric series.
    `r_squared` is its square: 1 for an exact geometric series. Both are NaN for a constant curve, whose rho is 1.
    Scaling the curve changes only the intercept.

    Source: He & Su, arXiv 2408.13442.

    Raises:
        ValueError: fewer than 3 layers; a residual that is not finite or not above 0 (NaN for that curve with
            `undefined="nan"`).
    """
    residuals = widened(residuals)
    if residuals.shape[-1] < 3:
        raise ValueError(f"expected the residuals of at least 3 layers, got shape {tuple(residuals.shape)}")
    allowed = residuals.isfinite() & (residuals > 0)
    logs = residuals.where(allowed, 1.0).log10()
    constant = (residuals == residuals[..., :1]).all(-1)
    depth = torch.arange(residuals.shape[-1], dtype=logs.dtype, device=logs.device)
    centered = depth - depth.mean()
    shifted = (logs - logs[..., :1]).masked_fill(constant[..., None], 0.0)
    shifted = shifted - shifted.mean(-1, keepdim=True)
    products, squares = (shifted * centered).sum(-1), shifted.square().sum(-1)
    slope = products / centered.square().sum()
    pearson = (products / (squares * centered.square().sum()).sqrt()).clamp(-1, 1)
    values = 10**slope, slope, logs.mean(-1) - slope * depth.mean(), pearson, pearson.square()
    problems = {"a residual is not a finite number above 0": ~allowed.all(-1)}
    return ExponentialLaw(*(checked("exponential_law", value, problems, undefined) for value in values))


Statistic = Literal["mean", "median"]


class Monotonicity(NamedTuple):
    """Statistics of how steadily a curve rises over layers; see `monotonicity`."""

    fraction_increasing: float
    spearman: float
    largest_drop: float
    max_drawdown: float


def monotonicity(scores: Sequence[float], *, higher_is_better: bool = True) -> Monotonicity:
    """Return how steadily the scores of layers 1..L rise; losses (`higher_is_better=False`) are negated first.

    - `fraction_increasing`, in [0, 1]: share of the L - 1 steps that go up.
    - `spearman`, in [-1, 1]: rank correlation with depth; NaN for a constant curve.
    - `largest_drop`, at least 0: the largest single step down.
    - `max_drawdown`, at least 0: the largest fall from any layer to any later one.

    The first two are unchanged by any increasing map of the scores.

    Raises:
        ValueError: fewer than 3 layers, or a score that is not finite.
    """
    values = _checked(scores, least=3)
    return Monotonicity(*(value.item() for value in monotonicities(values, higher_is_better)))


def monotonicity_interval(
    row_scores: Float[Tensor, "layers rows"],
    *,
    higher_is_better: bool = True,
    resamples: int = 2000,
    seed: int = 0,
) -> tuple[Monotonicity, Monotonicity]:
    """Return the low and the high ends of the 95% bootstrap intervals of all numbers of `monotonicity`.

    The curve is the mean row score of each layer. Test rows are resampled for all layers together, and layers are not
    resampled. A resample whose curve is constant has no rank correlation. The interval of `spearman` leaves it out, and
    is NaN if no resample remains. With few rows, resampled curves are rougher than the original curve, so an interval
    may not contain the original value.

    Raises:
        ValueError: fewer than 2 rows, a score that is not finite.
    """
    curves = resampled_curves(row_scores, resamples=resamples, seed=seed)
    bounds = [values.nanquantile(ENDS).tolist() for values in monotonicities(curves, higher_is_better)]
    low, high = zip(*bounds, strict=True)
    return Monotonicity(*low), Monotonicity(*high)


def monotonicities(values: Float[Tensor, "*n layers"], higher_is_better: bool) -> list[Tensor]:
    """Return the fields of `Monotonicity` for several curves, each (*n)."""
    values = values if higher_is_better else -values
    steps = values.diff()
    return [
        (steps > 0).double().mean(-1),
        _correlation_with_depth(values),
        (-steps).amax(-1).clamp(min=0.0) + 0.0,  # 0.0 instead of -0.0
        (values.cummax(-1).values - values).amax(-1),
    ]


def _correlation_with_depth(values: Tensor) -> Tensor:
    """Return Spearman's correlation with depth, with mean ranks for ties; NaN for a constant curve.

    All sums are of integers, so they have no rounding error.
    """
    ranks = (values[..., :, None] - values[..., None, :]).sign().sum(-1)  # twice a rank's distance from the mean rank
    depth = 2 * torch.arange(1, values.shape[-1] + 1, dtype=torch.float64) - (values.shape[-1] + 1)
    return (ranks * depth).sum(-1) / (ranks.square().sum(-1) * depth.square().sum()).sqrt()


def bootstrap_interval(
    values: Float[Tensor, "prompts *n"],
    *,
    statistic: Statistic = "mean",
    resamples: int = 2000,
    seed: int = 0,
) -> tuple[Float[Tensor, "*n"], Float[Tensor, "*n"]]:
    """Return the low and the high end of the percentile bootstrap interval of the mean (or median) over prompts.

    Two calls with the same seed and number of prompts draw the same prompts. So intervals of different layers or
    optimizer steps come from the same resamples. All resampled means come from one matrix product: counts (resamples,
    prompts) times values.

    Raises:
        ValueError: fewer than 2 prompts, a value that is not finite, an option out of range.
    """
    check_option("statistic", statistic, "mean", "median")
    values = widened(values).cpu()
    _check_rows(values)
    columns = values.reshape(len(values), -1)
    resampled = _medians if statistic == "median" else _means
    drawn = torch.cat([resampled(columns, counts) for counts in row_counts(len(values), resamples, seed)])
    low, high = drawn.mT.contiguous().quantile(ENDS, dim=1)
    return low.reshape(values.shape[1:]), high.reshape(values.shape[1:])


def _means(columns: Tensor, counts: Tensor) -> Tensor:
    return counts @ columns / len(columns)


def _medians(columns: Tensor, counts: Tensor) -> Tensor:
    """Return the median of the rows in each resample: the mean of the middle two if the number of rows is even."""
    medians = []
    for column in columns.unbind(1):
        ordered, order = column.sort()
        reached = counts[:, order].cumsum(1)
        middle = [(reached <= rank).sum(1) for rank in ((len(column) - 1) // 2, len(column) // 2)]
        medians.append((ordered[middle[0]] + ordered[middle[1]]) / 2)
    return torch.stack(medians, dim=1)


def wilson_interval(successes: float, n: float) -> tuple[float, float]:
    """Return the low and high end, in [0, 1], of Wilson's 95% score interval of `successes` among `n` trials."""
    z2 = NormalDist().inv_cdf(0.975) ** 2
    share = successes / n
    center = (share + z2 / (2 * n)) / (1 + z2 / n)
    half = math.sqrt(z2 * (share * (1 - share) / n + z2 / (4 * n * n))) / (1 + z2 / n)
    return max(0.0, center - half), min(1.0, center + half)


def macro_f1_interval(
    labels: Int[Tensor, " n"],
    predictions: Int[Tensor, " n"],
    *,
    resamples: int = 2000,
    seed: int = 0,
) -> tuple[float, float]:
    """Return the percentile bootstrap interval of `macro_f1` over rows: its low and its high end.

    The same seed draws the same rows as in `bootstrap_interval`. 10,000 rows of 77 classes take a few seconds.
    """
    classes, labels = labels.cpu().unique(return_inverse=True)
    predictions = predictions.cpu()
    is_known = classes[torch.searchsorted(classes, predictions).clamp(max=len(classes) - 1)] == predictions
    # All predictions of classes that are not in `labels` count as one extra class.
    predicted = torch.where(is_known, torch.searchsorted(classes, predictions), len(classes))
    is_class, is_predicted = (one_hot(each, len(classes) + 1).double() for each in (labels, predicted))
    sums = torch.cat([is_class * is_predicted, is_class, is_predicted], dim=1)  # (rows, 3 x (classes + 1))
    drawn = []
    for counts in row_counts(len(labels), resamples, seed):
        hits, labelled, predicted_as = (counts @ sums).chunk(3, dim=1)
        present = labelled[:, :-1] > 0
        scores = 2 * hits[:, :-1] / (labelled + predicted_as)[:, :-1].clamp(min=1)
        drawn.append((scores * present).sum(1) / present.sum(1))
    low, high = torch.cat(drawn).quantile(ENDS).tolist()
    return low, high
