"""Geometry of the states of one layer, and effect of a block on a state. All computed in float64.

Points are the rows of a set, for example tokens of many prompts at one layer.
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

MIN_RANKS = 3  # fewest eigenvalues to which `alpha_req` fits a slope
_EPS = torch.finfo(torch.float64).eps
# Rounding error of the distance between two points, relative to the norms of the points. The distance is the root of a
# difference of squares, so it has only half the digits.
_DIST_EPS = 8 * _EPS**0.5


def alpha_req(points: Points, *, fit_range: tuple[int, int] = (11, 100), undefined: Undefined = "raise") -> PerSet:
    """Return how fast the eigenvalues of the points' covariance fall: the alpha of lambda_i ~ i^-alpha.

    At least 0: 0 for a flat spectrum, larger if fewer directions carry the variance. It is minus the slope of log
    lambda_i against log i, by least squares with weights 1 / i, so that each octave of ranks counts equally. The fit
    takes the ranks i of `fit_range`, both ends included, up to the rank of the covariance. Unchanged by rotation,
    translation and scaling. Finite samples steepen the tail, so compare only sets with equally many points.

    Source: Agrawal et al. 2022 (alpha-ReQ), with ranks and weights of Stringer et al. 2019; over training: Li et al.,
    arXiv 2509.23024.

    Raises:
        ValueError: fewer than 3 ranks in the range, points that are not finite (NaN instead with `undefined="nan"`).
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
    if wide:  # n centred points have at most n - 1 positive eigenvalues
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
    """Return the intrinsic dimension of the set that the points lie on, from distances to their two nearest neighbours.

    Above 0. Let mu = r2 / r1 be the ratio of these distances for each point, and F its empirical distribution function.
    The value is the slope of -log(1 - F(mu)) against log mu, fitted by a line through (0, 0). The largest `discarded`
    share of mu is left out. Points that are equal up to rounding are merged into one. Unchanged by rotation,
    translation, scaling and the order of points. In high dimension the value is too low, especially for few points:
    compare only sets with equally many points.

    Source: Facco et al. 2017, equations 3 to 5.

    Raises:
        ValueError: fewer than 3 different points, all ratios 1, points that are not finite (NaN instead with
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
    """Return the distances between points after merging equal ones, and the index of each point among the merged ones.

    The diagonal is infinite. Two points are merged if rounding in the format `computed_in` can explain their
    difference. For example, if two prompts begin with the same tokens, the states of these tokens differ only by
    rounding. Ratios of such tiny distances say nothing about the dimension of the states.
    """
    # Centre first: |x - y|^2 = |x|^2 + |y|^2 - 2 x'y loses fewer digits for points near the origin.
    shifted = centered(points, points.new_ones(len(points), dtype=torch.bool))
    dist = torch.cdist(shifted, shifted, compute_mode="use_mm_for_euclid_dist")
    # The factor 32 allows for errors that accumulate over many blocks.
    rounding = 32 * torch.finfo(torch.promote_types(computed_in, torch.float32)).eps
    size = torch.maximum(points.norm(dim=-1), shifted.norm(dim=-1)) * max(rounding, _DIST_EPS)
    equal = (dist <= torch.maximum(size, size[:, None])).fill_diagonal_(True)
    first = equal.byte().argmax(-1)  # index of the earliest equal point
    # Equality up to rounding is not transitive, so `first` may name a point that equals a still earlier one. Follow
    # these indices until each names a point i with first[i] = i.
    while not torch.equal(first, first[first]):
        first = first[first]
    firsts, group = first.unique(return_inverse=True)
    return dist[firsts][:, firsts].fill_diagonal_(math.inf), group


def two_nn_of_distances(dist: Float[Tensor, "points points"], discarded: float = 0.1) -> Tensor:
    """Return `two_nn_dimension` from the distances between different points.

    NaN for fewer than 3 points, or if the two nearest neighbours of every point are equally far away.
    """
    if len(dist) < 3:
        return dist.new_full((), math.nan)
    nearest = dist.topk(2, largest=False).values
    ratios = (nearest[:, 1] / nearest[:, 0]).log().sort().values
    # Leave out at least the last point, where 1 - `share` would be 0 and have no logarithm.
    num = min(max(2, round(len(dist) * (1 - discarded))), len(dist) - 1)
    share = torch.arange(1, num + 1, device=dist.device, dtype=dist.dtype) / len(dist)
    x, y = ratios[:num], -(1 - share).log()
    return ((x * y).sum() / x.square().sum()).where(x.square().sum() > 0, math.nan)


def anisotropy(points: Points, *, undefined: Undefined = "raise") -> PerSet:
    """Return the mean cosine over pairs of different points: how far all points lie in one direction from the origin.

    Range [-1 / (points - 1), 1]: 0 in expectation if directions are uniform, 1 if all directions are the same.
    Unchanged by rotation and by positive scaling of single points.

    Source: Ethayarajh 2019, section 3.3.

    Raises:
        ValueError: fewer than 2 points, a point that is zero or not finite (NaN instead with `undefined="nan"`).
    """
    rows, problems = _directions(points)
    # |sum u_i|^2 = count + the sum of u_i'u_j over ordered pairs of different points, so no matrix of pairs is needed.
    total, count = rows.sum(-2).square().sum(-1), rows.shape[-2]
    return checked("anisotropy", (total - count) / max(1, count * (count - 1)), problems, undefined)


def uniformity(points: Points, *, undefined: Undefined = "raise") -> PerSet:
    """Return the log of the mean of exp(-2 d^2) over pairs of points, with d the distance between their directions.

    Range [-8, 0]: 0 if all directions are the same, -8 for two opposite directions. The value is lower if directions
    fill the sphere more evenly. For independent uniform directions it tends to -4 as the dimension grows. Unchanged by
    rotation, and by positive scaling of each point by its own factor.

    Source: Wang and Isola 2020, arXiv 2005.10242, section 4.1 (t = 2), over pairs of different points.

    Raises:
        ValueError: fewer than 2 points, a point that is zero or not finite (NaN instead with `undefined="nan"`).
    """
    rows, problems = _directions(points)
    count = rows.shape[-2]
    same = torch.eye(count, dtype=torch.bool, device=rows.device)
    exponents = (4 * (rows @ rows.mT) - 4).masked_fill(same, -torch.inf)  # d^2 = 2 - 2 cos
    values = exponents.logsumexp((-2, -1)) - math.log(max(1, count * (count - 1)))
    return checked("uniformity", values, problems, undefined)


def _directions(points: Points) -> tuple[Points, dict[str, Tensor]]:
    """Return the points scaled to norm 1, and masks of the sets of points whose metric is undefined.

    The masks are in a dict, whose keys are the reasons why the metric is undefined.
    """
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
    """Return the largest absolute entry of a prompt's states divided by the median absolute entry.

    At least 1. Unchanged by scaling and by the order of tokens and features, but not by rotation. Models with massive
    activations reach 1,000 and more. `normal_massive_activation` gives the value for normal entries.

    Source: Sun et al. 2024, arXiv 2402.17762. They call an entry massive if it is above 100 and above 1,000 times the
    median.

    Raises:
        ValueError: a mask that keeps no token, a median of 0, values that are not finite (NaN instead with
            `undefined="nan"`).
    """
    rows, real = real_rows(widened(tokens), mask)
    broken = not_finite(rows)
    sizes = zeroed(rows, broken).abs().masked_fill(~real[..., None], torch.nan).flatten(-2)
    if not sizes.shape[-1]:
        sizes = sizes.new_full((*sizes.shape[:-1], 1), torch.nan)
    median, top = sizes.nanquantile(0.5, dim=-1), sizes.masked_fill(sizes.isnan(), -1.0).amax(-1)
    problems = {
        "a value is not finite": broken,
        "there is no real token": ~real.any(-1),
        "its median is 0": median == 0,
    }
    return checked("massive_activation", top / median, problems, undefined)


def normal_massive_activation(count: Tensor) -> Tensor:
    """Return the `massive_activation` of `count` independent normal entries.

    This is the median of their largest absolute value divided by the median absolute value of a normal entry. The
    largest of n absolute values is below x with probability (2 Phi(x) - 1)^n, which is 1/2 at its median.
    """
    largest = torch.special.ndtri(torch.exp2(-1 / count.double()).add(1) / 2)
    return largest / torch.special.ndtri(torch.tensor(0.75, dtype=torch.float64, device=largest.device))


def block_influence(
    before: Float[Tensor, "*n dim"], after: Float[Tensor, "*n dim"], *, undefined: Undefined = "raise"
) -> Float[Tensor, "*n"]:
    """Return 1 - cosine of the state before and after a block, for each token.

    Range [0, 2]: 0 if a block keeps the direction, 1 if it returns an orthogonal state. Unchanged by a rotation of both
    states and by positive scaling of either.

    Source: Men et al., ShortGPT, arXiv 2403.03853, equation 1.

    Raises:
        ValueError: a state that is zero or not finite (NaN instead with `undefined="nan"`).
    """
    before, after = widened(before), widened(after)
    norms = [torch.linalg.vector_norm(state, dim=-1, keepdim=True) for state in (before, after)]
    sides = [state / norm.where(norm > 0, 1.0) for state, norm in zip((before, after), norms, strict=True)]
    problems = {
        "a state is not finite": ~(norms[0].isfinite() & norms[1].isfinite())[..., 0],
        "a state is zero": ((norms[0] == 0) | (norms[1] == 0))[..., 0],
    }
    # 1 - cos = |u - v|^2 / 2 for unit vectors. The right side is accurate near 0, where 1 - cos is only rounding.
    return checked("block_influence", (sides[0] - sides[1]).square().sum(-1) / 2, problems, undefined)


def step_ratio(
    before: Float[Tensor, "*n dim"], after: Float[Tensor, "*n dim"], *, undefined: Undefined = "raise"
) -> Float[Tensor, "*n"]:
    """Return the norm of a block's update divided by the norm of the state before the block, for each token.

    At least 0. Unchanged by a common rotation and by a common scaling of both states.

    Source: ours. Aubry et al., arXiv 2407.07810, study the states of a token over the layers. Sun et al.,
    arXiv 2502.05795, call the decrease of the ratio over the layers the curse of depth.

    Raises:
        ValueError: a zero state before the block, or a state that is not finite (NaN instead with `undefined="nan"`).
    """
    before, after = widened(before), widened(after)
    norm, step = (torch.linalg.vector_norm(state, dim=-1) for state in (before, after - before))
    problems = {"a state is not finite": ~(norm.isfinite() & step.isfinite()), "the state before is zero": norm == 0}
    return checked("step_ratio", step / norm.where(norm > 0, 1.0), problems, undefined)


def shuffled_features(points: Float[Tensor, "points dim"], seed: int = 0) -> Float[Tensor, "points dim"]:
    """Return the points with the values of each feature shuffled among the points.

    This keeps the distribution of each feature and removes the dependence between features.
    """
    generator = torch.Generator().manual_seed(seed)
    order = torch.rand(points.shape, generator=generator, dtype=torch.float64).argsort(0).to(points.device)
    return points.gather(0, order)
