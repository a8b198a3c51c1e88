"""How a cloud of states lies in its space, and what a block does to a state. All computed in float64.

Points are the rows of a set: tokens of many prompts at one layer.
"""

import math

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from lit_layers.functional._checks import (
    Undefined,
    centered,
    checked,
    not_finite,
    real_rows,
    unit_rows,
    widened,
    zeroed,
)
from lit_layers.functional.singular import eigenvalues, products

Points = Float[Tensor, "*n points dim"]
PerSet = Float[Tensor, "*n"]

MIN_RANKS = 3  # of a slope
_EPS = torch.finfo(torch.float64).eps
_DIST_EPS = 8 * _EPS**0.5  # to which part of the points' norms distances are known, being roots of differences


def alpha_req(points: Points, *, fit_range: tuple[int, int] = (11, 100), undefined: Undefined = "raise") -> PerSet:
    """Return how fast the eigenvalues of the points' covariance fall: the alpha of lambda_i ~ i^-alpha.

    At least 0, as they are in order: 0 for a spectrum that is flat, larger where fewer directions carry the variance.
    The slope of log lambda_i over log i by least squares with weights 1 / i, so that each octave of ranks counts alike,
    over the ranks `fit_range`, both ends included, as far as the covariance has rank. Unchanged by rotation,
    translation and scaling. Finite samples steepen the tail: compare sets of as many points.

    Source: Agrawal et al. 2022 (alpha-ReQ), with ranks and weights of Stringer et al. 2019; over training: Li et al.,
    arXiv 2509.23024.

    Raises:
        ValueError: fewer than 3 ranks in the range, points that are not finite (NaN there with `undefined="nan"`).
    """
    first, last = fit_range
    points = widened(points)
    broken = not_finite(points)
    points = centered(zeroed(points, broken), points.new_ones(points.shape[:-1], dtype=torch.bool))
    wide = points.shape[-2] <= points.shape[-1]
    values = eigenvalues(products(points if wide else points.mT)).flip(-1)  # the largest first
    floor = max(points.shape[-2:]) * _EPS * values[..., :1]
    ranks = torch.arange(1, values.shape[-1] + 1, device=values.device)
    fitted = (ranks >= first) & (ranks <= last) & (values > floor)
    if wide:  # of n centred points one eigenvalue is 0
        fitted = fitted & (ranks < points.shape[-2])
    weights = fitted / ranks
    x, y = ranks.double().log(), values.where(fitted, 1.0).log()
    total = weights.sum(-1).clamp(min=_EPS)
    x_mean, y_mean = (weights * x).sum(-1) / total, (weights * y).sum(-1) / total
    x_off = x - x_mean[..., None]
    slope = (weights * x_off * (y - y_mean[..., None])).sum(-1) / (weights * x_off.square()).sum(-1)
    problems = {
        "a value is not finite": broken,
        f"its covariance has fewer than {MIN_RANKS} ranks in {fit_range}": fitted.sum(-1) < MIN_RANKS,
    }
    return checked("alpha_req", -slope, problems, undefined)


def two_nn_dimension(points: Points, *, discarded: float = 0.1, undefined: Undefined = "raise") -> PerSet:
    """Return the intrinsic dimension of the set that the points lie on, by the ratio of their two nearest distances.

    Above 0. With mu = r2 / r1 of each point and F its share among the ordered ones, the slope through the origin of
    -log(1 - F) over log mu, without the largest `discarded` share of mu. Points that are equal up to rounding count
    once. Unchanged by rotation, translation, scaling and the order of points. In high dimension too low for so few
    points: compare sets of as many.

    Source: Facco et al. 2017, equations 3 to 5.

    Raises:
        ValueError: fewer than 3 different points, all ratios 1, points that are not finite (NaN there with
            `undefined="nan"`).
    """
    dtype, points = points.dtype, widened(points)
    broken = not_finite(points)
    sets = zeroed(points, broken).reshape(-1, *points.shape[-2:])
    values = [two_nn_of_distances(merged_distances(each, dtype)[0], discarded) for each in sets]
    values = torch.stack(values).reshape(points.shape[:-2])
    reason = "it has fewer than 3 different points, or all have two neighbours at one distance"
    problems = {"a value is not finite": broken, reason: values.isnan()}
    return checked("two_nn_dimension", values, problems, undefined)


def merged_distances(
    points: Float[Tensor, "points dim"], computed_in: torch.dtype
) -> tuple[Float[Tensor, "different different"], Int[Tensor, " points"]]:
    """Return the distances of points, infinite from a point to itself, and which row each point is in.

    Points that a rounding of the format `computed_in` may hold apart are one: the states of two prompts that begin
    alike differ by where they lie in memory, and the ratio of two such distances is of no dimension.
    """
    shifted = centered(points, points.new_ones(len(points), dtype=torch.bool))  # nearer to 0 less is lost in squares
    dist = torch.cdist(shifted, shifted, compute_mode="use_mm_for_euclid_dist")
    rounding = 32 * torch.finfo(torch.promote_types(computed_in, torch.float32)).eps  # of a model of many blocks
    size = torch.maximum(points.norm(dim=-1), shifted.norm(dim=-1)) * max(rounding, _DIST_EPS)
    equal = (dist <= torch.maximum(size, size[:, None])).fill_diagonal_(True)
    first = equal.byte().argmax(-1)  # the earliest of those that are equal
    while not torch.equal(first, first[first]):
        first = first[first]
    firsts, group = first.unique(return_inverse=True)
    return dist[firsts][:, firsts].fill_diagonal_(math.inf), group


def two_nn_of_distances(dist: Float[Tensor, "points points"], discarded: float = 0.1) -> Tensor:
    """Return `two_nn_dimension` from distances of points that all differ; NaN for fewer than 3 or equal ratios."""
    if len(dist) < 3:
        return dist.new_full((), math.nan)
    nearest = dist.topk(2, largest=False).values
    ratios = (nearest[:, 1] / nearest[:, 0]).log().sort().values
    num = min(max(2, round(len(dist) * (1 - discarded))), len(dist) - 1)  # the last share is 1, without a logarithm
    share = torch.arange(1, num + 1, device=dist.device, dtype=dist.dtype) / len(dist)
    x, y = ratios[:num], -(1 - share).log()
    return ((x * y).sum() / x.square().sum()).where(x.square().sum() > 0, math.nan)


def anisotropy(points: Points, *, undefined: Undefined = "raise") -> PerSet:
    """Return the mean cosine between two different points: how far the cloud lies to one side of the origin.

    Range [-1 / (points - 1), 1]: 0 in expectation where directions are uniform, 1 where all are the same. Unchanged by
    rotation and by positive scaling of single points.

    Source: Ethayarajh 2019, section 3.3.

    Raises:
        ValueError: fewer than 2 points, one that is zero or not finite (NaN there with `undefined="nan"`).
    """
    rows, problems = _directions(points)
    total, count = rows.sum(-2).square().sum(-1), rows.shape[-2]
    return checked("anisotropy", (total - count) / max(1, count * (count - 1)), problems, undefined)


def uniformity(points: Points, *, undefined: Undefined = "raise") -> PerSet:
    """Return the logarithm of the mean of exp(-2 d^2) over pairs of points, d the distance of their directions.

    Range [-8, 0]: 0 where all directions are the same, -8 for two that are opposite. The more evenly directions fill
    the sphere, the lower; independent uniform ones in many dimensions tend to -4. Unchanged by rotation and by positive
    scaling of single points.

    Source: Wang and Isola 2020, arXiv 2005.10242, section 4.1 (t = 2), over pairs of different points.

    Raises:
        ValueError: fewer than 2 points, one that is zero or not finite (NaN there with `undefined="nan"`).
    """
    rows, problems = _directions(points)
    count = rows.shape[-2]
    same = torch.eye(count, dtype=torch.bool, device=rows.device)
    exponents = (4 * (rows @ rows.mT) - 4).masked_fill(same, -torch.inf)  # d^2 = 2 - 2 cos
    values = exponents.logsumexp((-2, -1)) - math.log(max(1, count * (count - 1)))
    return checked("uniformity", values, problems, undefined)


def _directions(points: Points) -> tuple[Points, dict[str, Tensor]]:
    """Return the points at length 1, and what keeps pairs of them from having an angle."""
    points = widened(points)
    broken = not_finite(points)
    points = zeroed(points, broken)
    rows, zero = unit_rows(points, points.new_ones(points.shape[:-1], dtype=torch.bool))
    few = torch.tensor(points.shape[-2] < 2, device=points.device)
    return rows, {
        "a value is not finite": broken,
        "a point is zero": zero.any(-1),
        "it has fewer than 2 points": few,
    }


def massive_activation(
    tokens: Float[Tensor, "*n tokens dim"],
    mask: Bool[Tensor, "*n tokens"] | None = None,
    *,
    undefined: Undefined = "raise",
) -> PerSet:
    """Return the largest size of an entry of a prompt's states over the median size.

    At least 1. Unchanged by scaling, by the order of tokens and features; not by rotation. Where a model has massive
    activations it is 1,000 and more; `normal_massive_activation` says what normal entries give.

    Source: Sun et al. 2024, arXiv 2402.17762 (an entry is massive above 100 and above 1,000 medians).

    Raises:
        ValueError: no real token, a median of 0, values that are not finite (NaN there with `undefined="nan"`).
    """
    rows, real = real_rows(widened(tokens), mask)
    broken = not_finite(rows)
    sizes = zeroed(rows, broken).abs().masked_fill(~real[..., None], torch.nan).flatten(-2)
    if not sizes.shape[-1]:
        sizes = sizes.new_full((*sizes.shape[:-1], 1), torch.nan)
    lower, upper = sizes.nanquantile(0.5, dim=-1), sizes.masked_fill(sizes.isnan(), -1.0).amax(-1)
    problems = {
        "a value is not finite": broken,
        "there is no real token": ~real.any(-1),
        "its median is 0": lower == 0,
    }
    return checked("massive_activation", upper / lower, problems, undefined)


def normal_massive_activation(count: Tensor) -> Tensor:
    """Return `massive_activation` of independent normal entries: the median of their largest size over that of all.

    With n entries the largest is below x with probability (2 Phi(x) - 1)^n, which is 1/2 at the median.
    """
    largest = torch.special.ndtri(torch.exp2(-1 / count.double()).add(1) / 2)
    return largest / torch.special.ndtri(torch.tensor(0.75, dtype=torch.float64, device=largest.device))


def block_influence(
    before: Float[Tensor, "*n dim"], after: Float[Tensor, "*n dim"], *, undefined: Undefined = "raise"
) -> Float[Tensor, "*n"]:
    """Return 1 - cosine of the state a block takes and the state it gives, for each token.

    Range [0, 2]: 0 where a block leaves the direction, 1 where it gives one at right angles. Unchanged by a rotation of
    both and by positive scaling of either.

    Source: Men et al., ShortGPT, arXiv 2403.03853, equation 1.

    Raises:
        ValueError: a state that is zero or not finite (NaN there with `undefined="nan"`).
    """
    before, after = widened(before), widened(after)
    norms = [torch.linalg.vector_norm(state, dim=-1, keepdim=True) for state in (before, after)]
    sides = [state / norm.where(norm > 0, 1.0) for state, norm in zip((before, after), norms, strict=True)]
    problems = {
        "a state is not finite": ~(norms[0].isfinite() & norms[1].isfinite())[..., 0],
        "a state is zero": ((norms[0] == 0) | (norms[1] == 0))[..., 0],
    }
    # half the squared distance of the directions is exact near 0, where 1 - cos is rounding
    return checked("block_influence", (sides[0] - sides[1]).square().sum(-1) / 2, problems, undefined)


def step_ratio(
    before: Float[Tensor, "*n dim"], after: Float[Tensor, "*n dim"], *, undefined: Undefined = "raise"
) -> Float[Tensor, "*n"]:
    """Return the length of what a block adds to a state over the length of the state, for each token.

    At least 0. Unchanged by a rotation and by scaling of both.

    Source: ours, of the paths in Aubry et al., arXiv 2407.07810; what Sun et al., arXiv 2502.05795, call the curse of
    depth is its fall over the layers.

    Raises:
        ValueError: a state before that is zero, one that is not finite (NaN there with `undefined="nan"`).
    """
    before, after = widened(before), widened(after)
    norm, step = (torch.linalg.vector_norm(state, dim=-1) for state in (before, after - before))
    problems = {"a state is not finite": ~(norm.isfinite() & step.isfinite()), "the state before is zero": norm == 0}
    return checked("step_ratio", step / norm.where(norm > 0, 1.0), problems, undefined)


def shuffled_features(points: Float[Tensor, "points dim"], seed: int = 0) -> Float[Tensor, "points dim"]:
    """Return the points with the values of each feature shuffled among them, which leaves what single features say."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.rand(points.shape, generator=generator, dtype=torch.float64).argsort(0).to(points.device)
    return points.gather(0, order)
