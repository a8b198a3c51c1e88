"""Leading singular vectors of square matrices, each with a bound on what is left of error."""

import math
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

# Squares halve the digits: eigenvectors of J'J in float64 are good to 1e-16 (s_1 / s)^2 over the gap. That is enough
# but for tiny singular values, and is not relied on: how far they are off is measured on J itself.
MIN_DIM = 257  # narrower matrices are decomposed whole in the same time
EPS = torch.finfo(torch.float64).eps


class Factors(NamedTuple):
    """Leading singular triples (*n): `left` and `right` (.., dim, count), `values` (.., count) descending.

    `bounds` (.., count): how far `miscoupling` in the leading K = 1, 2, .. directions (p = 2) may be from its value
    with exact singular vectors of these very matrices, whatever the other matrix is; infinite where a tie leaves them
    undetermined. `turns` (.., count): how far the leading K vectors on both sides may be turned, as a root mean square.
    """

    left: Tensor
    values: Tensor
    right: Tensor
    bounds: Tensor
    turns: Tensor


def singular_factors(
    matrices: Float[Tensor, "*n dim dim"], count: int | None = None, *, tolerance: float = 1e-3
) -> Factors:
    """Leading `count` singular triples (all for None), with `bounds` of at most `tolerance` wherever float64 allows.

    For dim > 256 and count up to a third of dim, from the leading eigenvectors of J'J in float64. Otherwise, and for
    matrices whose bound that does not bring to `tolerance` (ties, tiny singular values), by the whole decomposition in
    float64. The same input gives the same output.

    `values` are off by less than `tolerance`^2 of themselves, which is not in `bounds`. Results are in float64 for dim
    <= 512, float64 input or a tolerance below 1e-5, which float32 vectors cannot hold; else in float32.

    The bounds take from LAPACK (on a GPU cuSOLVER, with torch's default drivers) that its decompositions are backward
    stable: which vectors are the leading ones is right but for an error of rounding. How far each is off is measured.

    Raises:
        ValueError: count outside 1..dim, a tolerance that is not positive.
    """
    matrices = widen(matrices)
    dim = matrices.shape[-1]
    if count is not None and not 1 <= count <= dim:
        raise ValueError(f"expected a count between 1 and the dimension {dim}, got {count}")
    if not tolerance > 0:
        raise ValueError(f"expected a tolerance above 0, got {tolerance}")
    dtype = torch.float64 if tolerance < 1e-5 else matrices.dtype
    count = count or dim
    flat = matrices.reshape(-1, dim, dim)
    number = torch.arange(1, count + 1, dtype=torch.float64, device=flat.device)
    rounding = torch.finfo(dtype).eps * (number.sqrt() + 2)  # of both bases and the values to `dtype`
    leading = dim >= MIN_DIM and 3 * count <= dim and len(flat) > 0
    # some 2 GB; a CPU gains nothing by more than one large matrix
    size = 1 if leading and flat.device.type == "cpu" else max(1, 2**31 // (60 * dim**2))
    parts = []
    for piece in flat.split(size):
        piece = piece.double()
        if not leading:
            parts.append(_whole(piece, count))
            continue
        factors = _leading(piece, count)
        failed = ~(factors.bounds[:, -1] + rounding[-1] <= tolerance)  # also where they are NaN
        if bool(failed.any()):
            for part, whole in zip(factors, _whole(piece[failed], count), strict=True):
                part[failed] = whole
        parts.append(factors)
    left, values, right, bounds, turns = (
        torch.cat(part).reshape(*matrices.shape[:-2], *part[0].shape[1:]) for part in zip(*parts, strict=True)
    )
    return Factors(left.to(dtype), values.to(dtype), right.to(dtype), bounds + rounding, turns)


def widen(matrices: Tensor) -> Tensor:
    """Float64 where the decomposition is small or float64 came in, else float32."""
    if matrices.ndim < 2 or matrices.shape[-1] != matrices.shape[-2]:
        raise ValueError(f"expected square matrices (*n, dim, dim), got {tuple(matrices.shape)}")
    if not matrices.is_floating_point():
        raise TypeError(f"expected floating-point Jacobians, got {matrices.dtype}")
    wide = matrices.dtype == torch.float64 or matrices.shape[-1] <= 512
    return matrices.detach().to(torch.float64 if wide else torch.float32)


def _leading(matrices: Tensor, count: int) -> Factors:
    """From the eigenvectors v of J'J, (n, dim, dim) in float64, and u = J v / s. NaN for a zero or overflowing norm."""
    sizes = torch.linalg.matrix_norm(matrices, keepdim=True)
    usable = sizes.isfinite() & (sizes > 0)
    scale = torch.where(usable, sizes, 1).log2().floor().exp2()  # a power of two: exact
    matrices = torch.where(usable, matrices / scale, 0)
    squares, right = _leading_eigenvectors(matrices.mT @ matrices, count)
    images = matrices @ right
    values = torch.linalg.vector_norm(images, dim=-2)
    left = images / values[:, None]
    # J'J is off by rounding; all further singular values lie below this by Weyl's inequality
    further = (squares[:, count].clamp(min=0) + matrices.shape[-1] * EPS * values[:, 0].square()).sqrt()
    errors = _vector_errors(values, _residuals(matrices, left, values, right), further)
    return _factors(left, values * scale[:, 0], right, errors)


def _leading_eigenvectors(gram: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Of symmetric matrices (n, dim, dim) the count + 1 largest eigenvalues, descending, and `count` eigenvectors."""
    if gram.device.type != "cpu":
        values, vectors = torch.linalg.eigh(gram)
        return values[:, -count - 1 :].flip(-1), vectors[..., -count:].flip(-1)
    from scipy.linalg import eigh  # torch has no driver for a part of the spectrum, which takes half the time

    last = gram.shape[-1] - 1
    # the transpose is in Fortran's order, so that LAPACK works in place
    pairs = [eigh(each.numpy().T, subset_by_index=(last - count, last), overwrite_a=True) for each in gram]
    values, vectors = (torch.stack([torch.from_numpy(part) for part in parts]) for parts in zip(*pairs, strict=True))
    return values.flip(-1), vectors[..., 1:].flip(-1)


def _whole(matrices: Tensor, count: int) -> Factors:
    left, values, right = torch.linalg.svd(matrices)
    residuals = _residuals(matrices, left, values, right.mT)
    errors = _vector_errors(values, residuals, residuals[:, -1])
    # copies: a view would keep the whole of both bases
    left, right = left[..., :count].clone(), right[..., :count, :].mT.clone()
    return _factors(left, values[:, :count], right, errors[:, :count])


def _residuals(matrices: Tensor, left: Tensor, values: Tensor, right: Tensor) -> Tensor:
    """Lengths (n, count) of [J v - s u; J'u - s v], 0 for exact triples, and what rounding may hide of them."""
    above = torch.linalg.vector_norm(matrices @ right - left * values[:, None], dim=-2)
    below = torch.linalg.vector_norm(matrices.mT @ left - right * values[:, None], dim=-2)
    return torch.hypot(above, below) + math.sqrt(matrices.shape[-1]) * EPS * values[:, :1]


def _vector_errors(values: Tensor, residuals: Tensor, further: Tensor) -> Tensor:
    """Most that each left and each right vector (n, count) may be off, by Davis and Kahan's theorem.

    For the symmetric [0 J'; J 0], whose eigenvalues are the singular values, their negatives and zero, and whose
    eigenvectors are [v; u]: a triple with this residual is turned from the exact one by an angle whose sine is at most
    the residual over the distance to the other singular values. Of those the computed ones are known up to residuals
    of their own, and the rest lie below `further` (n). As J is square, none of the negative ones is closer than zero.
    """
    steps = values[:, :-1] - values[:, 1:]
    under = torch.cat([steps - residuals[:, 1:], values[:, -1:] - further[:, None]], -1)
    above = torch.nn.functional.pad(steps - residuals[:, :-1], (1, 0), value=math.inf)
    gaps = torch.minimum(under, above).minimum(values - further[:, None])
    sines = torch.where(gaps > residuals, residuals / gaps, math.inf)
    return math.sqrt(2) * sines  # |v - v'| <= sqrt(2) sin for unit vectors of matching sign


def _factors(left: Tensor, values: Tensor, right: Tensor, errors: Tensor) -> Factors:
    """`|A - A'|_F <= s_1(J1) (|U - U'|_F + |V - V'|_F)` for A = U' J1 V, and `s_1(J1) <= |s_1,K|_2`."""
    squares = 2 * errors.square().cumsum(-1)
    number = torch.arange(1, errors.shape[-1] + 1, dtype=errors.dtype, device=errors.device)
    return Factors(left, values, right, (2 * squares).sqrt(), (squares / number).sqrt())
