"""How far Ritz vectors of a symmetric matrix are from its eigenvectors at most."""

import math
from typing import NamedTuple

import torch
from torch import Tensor


class Ritz(NamedTuple):
    """Ritz pairs (n) of G = J'J in float64: orthonormal `vectors` (n, dim, q), `values` (n, q) descending.

    `residuals` = G V - V diag(values), (n, dim, q); `rounding` (n): the most, in spectral norm, by which G differs
    from the matrix that these numbers describe exactly.
    """

    values: Tensor
    vectors: Tensor
    residuals: Tensor
    rounding: Tensor


def rayleigh_ritz(gram: Tensor, basis: Tensor) -> Ritz:
    """Ritz pairs of `gram` (n, dim, dim) in the span of the orthonormal `basis`, all in float64."""
    images = gram @ basis
    values, turn = torch.linalg.eigh(basis.mT @ images)
    values, turn = values.flip(-1), turn.flip(-1)
    vectors, images = basis @ turn, images @ turn
    residuals = images - vectors * values[..., None, :]
    # what is not exactly orthogonal is measured; the rounding of products of length dim is bounded
    identity = torch.eye(vectors.shape[-1], dtype=vectors.dtype, device=vectors.device)
    defect = torch.linalg.matrix_norm(vectors.mT @ vectors - identity)
    leak = torch.linalg.matrix_norm(vectors.mT @ residuals)
    products = 2 * gram.shape[-1] * torch.finfo(gram.dtype).eps
    return Ritz(values, vectors, residuals, (products + 8 * defect) * values[..., 0] + 4 * leak)


def ceiling(ritz: Ritz, count: int) -> Tensor:
    """Where to split the spectrum (n): below the leading `count` values, amid the ones computed beside them."""
    return (ritz.values[..., count - 1] + ritz.values[..., -1]) / 2


def nothing_missed(gram: Tensor, ritz: Ritz, split: Tensor) -> Tensor:
    """Whether (n) all of `gram` outside the Ritz vectors above `split` is proven to lie below `split`.

    G = V T V' + R V' + V R' + C defines the remainder C, and a Cholesky factor of split - C exists only if C < split,
    up to the rounding that `vector_errors` adds.
    """
    vectors = ritz.vectors * (ritz.values > split[..., None])[..., None, :]
    half = ritz.residuals + vectors * (ritz.values / 2)[..., None, :]
    shifted = torch.baddbmm(gram, vectors, half.mT, beta=-1).baddbmm_(half, vectors.mT)
    shifted.diagonal(dim1=-2, dim2=-1).add_(split[..., None])
    info = torch.empty(shifted.shape[:-2], dtype=torch.int32, device=shifted.device)
    torch.linalg.cholesky_ex(shifted, out=(shifted, info))  # in place: at dim 8,192 a copy is 0.5 GB
    return (info == 0) & (split > 0)


def vector_errors(ritz: Ritz, split: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Most by which the leading `count` left and right vectors (n, count) may be off, if `nothing_missed`.

    An eigenvector to the i-th eigenvalue l, [a; b] in the basis of the Ritz vectors above the split mu and of the
    rest, has b = (l - C)^-1 R a and (l - t_j) a_j = R_j' b. With d = t_i - mu and r_j = |R_j| therefore

        |R a| <= r_i / (1 - sum_j r_j^2 / (d |l - t_j|)),  |b| <= |R a| / d,  |a_j| <= r_j |b| / |l - t_j|,

    sums over j other than i. And t_i <= l <= t_i + e for every e with sum_(j >= i) r_j^2 / (t_i - t_j + e) <= d (the
    inertia of the Schur complement). Neighbours thus enter with r^2 / (d gap), not with r / gap. The left vector is
    along J [a; b], and J stretches the Ritz vectors by sqrt(t_j), the rest by at most sqrt(mu). Rounding adds, by Davis
    and Kahan, its size over the gap.
    """
    dim = ritz.vectors.shape[-2]
    eps, tiny = torch.finfo(ritz.values.dtype).eps, torch.finfo(ritz.values.dtype).tiny
    values, rounding = ritz.values, ritz.rounding[..., None]
    leading = values[..., : count + 1]
    # a Cholesky factor in floating point proves C <= split + dim (dim + 1) u split (Rump)
    split = split[..., None]
    floor = split * (1 + dim * (dim + 1) * eps) + rounding
    kept = values > split
    squares = torch.where(kept, ritz.residuals.square().sum(-2), 0)  # (n, q)
    room = (leading - floor).clamp(min=0)
    below = leading[..., None] - values[..., None, :]  # (n, count + 1, q)
    position = torch.arange(values.shape[-1], device=values.device)
    before, same = position < position[: count + 1, None], position == position[: count + 1, None]

    later = torch.where(before, 0, squares[..., None, :])
    excess = later.sum(-1) / room + tiny
    for _ in range(6):  # each e is good and better than the last
        excess = excess * (later / (below.clamp(min=0) + excess[..., None])).sum(-1) / room + tiny
    upper = torch.where(kept[..., : count + 1], leading + excess, floor)

    gaps = torch.where(before, -below - excess[..., None], below)
    inverse = torch.where(gaps > 0, 1 / gaps, math.inf).masked_fill(same | ~kept[..., None, :], 0)
    leaning = squares[..., None, :] * inverse
    outside = squares[..., : count + 1].sqrt() / (1 - leaning.sum(-1) / room).clamp(min=0) / room  # |b|
    inside = leaning * inverse  # (|a_j| / |b|)^2
    right = outside * (1 + inside.sum(-1)).sqrt()
    left = outside * (((values + rounding)[..., None, :] * inside).sum(-1).sqrt() + floor.sqrt())

    first = (1, 0)
    above = torch.nn.functional.pad(values[..., : count - 1] - upper[..., 1:count], first, value=math.inf) - rounding
    under = values[..., :count] - upper[..., 1:] - rounding
    above, under = (torch.where(gap > 0, rounding / gap, math.inf) for gap in (above, under))
    right = right[..., :count] + torch.maximum(above, under)
    # s_j / |s_j^2 - s_i^2| is largest for the neighbours
    above = above * torch.nn.functional.pad(values[..., : count - 1], first).sqrt()
    under = under * (upper[..., 1:] + rounding).sqrt()
    images = dim * eps * upper[..., :1].sqrt()  # of J V / s
    left = (left[..., :count] + torch.maximum(above, under) + images) / (leading[..., :count] - rounding).sqrt()
    return _chord(left), _chord(right)


def miscoupling_bounds(left_errors: Tensor, right_errors: Tensor) -> Tensor:
    """Most that `miscoupling` in the leading 1, 2, .. directions may be off (n, count), for these |u - u'|, |v - v'|.

    `|A - A'|_F <= s_1(J1) (|U - U'|_F + |V - V'|_F)`, and `s_1(J1) <= |s_1,K|_2`.
    """
    return left_errors.square().cumsum(-1).sqrt() + right_errors.square().cumsum(-1).sqrt()


def _chord(sines: Tensor) -> Tensor:
    """|v - v'| of unit vectors at this sine, infinite from 1 on."""
    known = sines < 1
    sines = torch.where(known, sines, 0)
    return torch.where(known, sines * (2 / (1 + (1 - sines.square()).sqrt())).sqrt(), math.inf)
