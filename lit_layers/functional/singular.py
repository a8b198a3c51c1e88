"""Singular values of sets of rows and leading singular vectors of square matrices, from their Gram matrices in float64.

Each singular vector comes with a bound on its error.
"""

import math
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from lit_layers.functional._checks import finite_matrices, wide_matrices, zeroed

# If an eigenvalue of a Gram matrix is below this share of the largest eigenvalue, its root is not accurate enough and a
# singular value decomposition is used. Eigenvalues have an error of about EPS = 2.2e-16 times the largest one. The root
# of an eigenvalue is a singular value. If it is s times the largest singular value, its error is EPS / (2 s) times the
# largest one. The measured error is below 2e-13 if the singular values fall gradually to s = 1.7e-4. It is up to 6e-12
# if half of 1,000 values are at s = 1.7e-4 and the others at 1.
_MIN_SHARE = 3e-8
# Use this limit instead of _MIN_SHARE if only entropies and ranks are computed from the singular values. It may be
# lower, because a singular value s has the weight s or s^2 in them, and errors of small values change the result
# little. An error of EPS / (2 s) changes the entropy of n values by less than n log(1 / s) EPS / (2 s). On states of
# language models, the measured error of the entropy is below 4e-11.
ENTROPY_MIN_SHARE = 1e-12
_MIN_TRACE = 1e-200  # a Gram matrix with a smaller trace is not used, because squares of small values underflow


def singular_values(rows: Tensor, rank: Tensor | None = None, *, min_share: float = _MIN_SHARE) -> Tensor:
    """Return the singular values of each matrix (*n, rows, dim), the largest first.

    They are the roots of the eigenvalues of the smaller Gram matrix, which takes half the time of a singular value
    decomposition on a CPU. Errors are below 2e-13 of the largest value, or 6e-12 if many values are near the limit of
    `min_share`. A matrix with eigenvalues below this limit gets a singular value decomposition instead.

    Args:
        rows: The matrices.
        rank: Upper bound of the rank of each matrix, (*n); the singular values after this number are set to 0.
        min_share: Smallest eigenvalue, as a share of the largest, whose root is accurate enough.
    """
    # An SVD takes longer than eigenvalues, even more so on a GPU, where it decomposes one matrix after another.
    wide = rows.detach() if rows.shape[-2] <= rows.shape[-1] else rows.detach().mT
    if not wide.numel():
        return wide.new_zeros(wide.shape[:-1])
    gram, size = products(wide), wide.shape[-2]
    trace = gram.diagonal(dim1=-2, dim2=-1).sum(-1)
    good = (trace > _MIN_TRACE) & (trace < math.inf)
    values = eigenvalues(zeroed(gram, ~good)).flip(-1)
    ranks = torch.full_like(good, size, dtype=torch.long) if rank is None else rank.clamp(max=size)
    index = torch.arange(size, device=values.device) < ranks[..., None]
    good = good & (values >= min_share * values[..., :1]).logical_or(~index).all(-1)
    values = values.clamp(min=0.0).masked_fill(~index, 0.0).sqrt()
    if not good.all():
        tall = wide[~good].mT.cpu().numpy()  # three times faster in LAPACK than `wide`
        values[~good] = torch.from_numpy(np.linalg.svd(tall, compute_uv=False)).to(values.device)
    return values


def products(rows: Float[Tensor, "*n rows dim"]) -> Float[Tensor, "*n rows rows"]:
    """Return the Gram matrices of sets of rows."""
    if rows.device.type != "cpu":
        return rows @ rows.mT
    array = rows.detach().numpy()
    with np.errstate(over="ignore", invalid="ignore"):
        return torch.from_numpy(array @ array.swapaxes(-1, -2))  # numpy computes only one triangle, torch both


def eigenvalues(matrix: Float[Tensor, "*n size size"]) -> Float[Tensor, "*n size"]:
    """Return the eigenvalues of symmetric matrices, the smallest first."""
    if matrix.device.type != "cpu":
        return torch.linalg.eigvalsh(matrix)
    return torch.from_numpy(np.linalg.eigvalsh(matrix.detach().numpy()))  # up to a fifth faster than torch's


# Leading singular vectors.

# Squaring halves the precision: eigenvectors of J'J in float64 have an error of about 1e-16 (s_1 / s)^2 / gap, with s_1
# the largest singular value. That is accurate enough unless the singular value s is tiny. The code does not rely on
# this estimate: it measures the errors on J itself.
MIN_DIM = 64  # narrower matrices get a full decomposition, which is as fast for them
# For matrices up to the width NARROW, a full decomposition takes only twice the time of leading eigenvectors. It
# therefore replaces all results whose error bound exceeds TIGHT.
NARROW = 256
TIGHT = 1e-6
EPS = torch.finfo(torch.float64).eps


class Factors(NamedTuple):
    """Leading singular triples of matrices (.., dim, dim).

    `left` and `right` (.., dim, count) are the singular vectors, `values` (.., count) the singular values, the largest
    first.

    `bounds` (.., count) bound the error of `miscoupling(j1, j2, k=K, p=2)` for K = 1, 2, .. count, where `j2` is the
    decomposed matrix and `j1` any matrix. The error is the difference from the value with exact singular vectors. The
    bounds are infinite if a tie leaves the vectors undetermined.
    """

    left: Tensor
    values: Tensor
    right: Tensor
    bounds: Tensor


def singular_factors(
    matrices: Float[Tensor, "*n dim dim"], count: int | None = None, *, tolerance: float = 1e-3
) -> Factors:
    """Return the leading `count` singular triples, or all if it is None, with error bounds.

    `bounds` limit the error of `miscoupling` (see `Factors`). They are at most `tolerance` if float64 allows. For
    dim >= 64 and count up to a third of dim, the triples of a matrix J come from the leading eigenvectors of J'J in
    float64. All other matrices get a full singular value decomposition in float64. A matrix also gets one if its bounds
    from J'J are above `tolerance`, or above 1e-6 for dim <= 256. Ties and tiny singular values cause this. The same
    input gives the same output.

    The relative error of `values` is below `tolerance`^2 and not part of `bounds`. Vectors are in float64 for dim <=
    512, for float64 input, or for a tolerance below 1e-5, which float32 vectors cannot reach. Otherwise they are in
    float32.

    The bounds assume that the decompositions of LAPACK (on a GPU cuSOLVER, with torch's default drivers) are backward
    stable: only then is it certain that no larger singular value was missed. The error of each vector itself is
    computed from its residual.

    Raises:
        ValueError: a non-finite matrix.
    """
    matrices, _ = finite_matrices(wide_matrices(matrices), "raise")
    dim = matrices.shape[-1]
    dtype = torch.float64 if tolerance < 1e-5 else matrices.dtype
    count = count or dim
    flat = matrices.reshape(-1, dim, dim)
    number = torch.arange(1, count + 1, dtype=torch.float64, device=flat.device)
    rounding = torch.finfo(dtype).eps * (number.sqrt() + 2)  # bound on the rounding errors of bases and values
    leading = dim >= MIN_DIM and 3 * count <= dim and len(flat) > 0
    # Limit the matrices that are decomposed at once: to about 2 GB of memory. On a CPU, leading eigenvectors gain
    # nothing from batches larger than the cache, so there the limit is 1 MB, or one matrix.
    entries = 2**17 if leading and flat.device.type == "cpu" else 2**31 // 60
    size = max(1, entries // dim**2)
    goal = min(tolerance, TIGHT) if dim <= NARROW else tolerance
    parts = []
    for piece in flat.split(size):
        piece = piece.double()
        if not leading:
            parts.append(_full_svd(piece, count))
            continue
        factors = _top_svd(piece, count)
        failed = ~(factors.bounds[:, -1] + rounding[-1] <= goal)  # True also for NaN
        if bool(failed.any()):
            for part, whole in zip(factors, _full_svd(piece[failed], count), strict=True):
                part[failed] = whole
        parts.append(factors)
    joined = (torch.cat(part) for part in zip(*parts, strict=True))
    found = Factors(*(part.reshape(*matrices.shape[:-2], *part.shape[1:]) for part in joined))
    return found._replace(left=found.left.to(dtype), right=found.right.to(dtype), bounds=found.bounds + rounding)


def _top_svd(matrices: Tensor, count: int) -> Factors:
    """Return the leading singular triples (u, s, v) of matrices J (n, dim, dim), in float64.

    The v are eigenvectors of J'J, and u = J v / s. NaN for a matrix of zeros.
    """
    squares, right = _leading_eigenvectors(products(matrices.mT), count)
    images = matrices @ right
    values = torch.linalg.vector_norm(images, dim=-2)
    left = images / values[:, None]
    # By Weyl's inequality with the rounding error of J'J, all further singular values are below `further`.
    further = (squares[:, count].clamp(min=0) + matrices.shape[-1] * EPS * values[:, 0].square()).sqrt()
    bounds = _bounds(values, _residuals(matrices, left, values, right), further, count)
    return Factors(left, values, right, bounds)


def _leading_eigenvectors(gram: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the count + 1 largest eigenvalues of symmetric matrices (n, dim, dim), and `count` eigenvectors.

    In descending order. NaN if LAPACK does not converge, which can happen if many eigenvalues are equal.
    """
    if gram.device.type != "cpu":
        values, vectors = torch.linalg.eigh(gram)
        return values[:, -count - 1 :].flip(-1), vectors[..., -count:].flip(-1)
    from scipy.linalg import eigh  # torch and numpy only have full decompositions

    last = gram.shape[-1] - 1
    # For count = dim / 10, computing all vectors takes twice as long as computing `count` of them. For count = dim / 3
    # it takes only 0.7 times as long. For narrow matrices it never takes longer.
    is_part = last >= NARROW and 5 * count <= last
    pairs: list[Any] = []
    for each in gram:
        try:
            if is_part:  # the transpose has LAPACK's memory order: no copy
                pairs.append(eigh(each.numpy().T, subset_by_index=(last - count, last), overwrite_a=True))
            else:
                pairs.append([part[..., -count - 1 :] for part in np.linalg.eigh(each.numpy())])
        except np.linalg.LinAlgError:
            pairs.append((np.full(count + 1, np.nan), np.full((last + 1, count + 1), np.nan)))
    values, vectors = (torch.stack([torch.from_numpy(part) for part in parts]) for parts in zip(*pairs, strict=True))
    return values.flip(-1), vectors[..., 1:].flip(-1)


def _full_svd(matrices: Tensor, count: int) -> Factors:
    left, values, right = torch.linalg.svd(matrices)
    residuals = _residuals(matrices, left, values, right.mT)
    bounds = _bounds(values, residuals, residuals[:, -1], count)
    # Copy, because views would keep both complete bases in memory.
    return Factors(left[..., :count].clone(), values[:, :count], right[..., :count, :].mT.clone(), bounds)


def _residuals(matrices: Tensor, left: Tensor, values: Tensor, right: Tensor) -> Tensor:
    """Return the residual norms |[J v - s u; J'u - s v]| of computed singular triples (u, s, v), (n, triples).

    The error that rounding may hide in these norms is added.
    """
    above, below = matrices @ right - left * values[:, None], matrices.mT @ left - right * values[:, None]
    lengths = torch.linalg.vector_norm(torch.cat([above, below], -2), dim=-2)
    return lengths + math.sqrt(matrices.shape[-1]) * EPS * values[:, :1]


def _bounds(values: Tensor, residuals: Tensor, further: Tensor, count: int) -> Tensor:
    """Return bounds (n, count) on the error of `miscoupling` with the first 1, 2, .. count triples of n matrices J.

    They follow from the Davis-Kahan theorem for the symmetric matrix [0 J'; J 0]. Its eigenvalues are the singular
    values and their negatives, and its eigenvectors are [v; u]. The sine of the angle between a computed and an exact
    eigenvector is at most the residual divided by the distance to the other singular values. The computed singular
    values are known up to their own residuals. `further` (n,) is an upper bound on all other singular values. Negative
    eigenvalues are farther away than `further`.

    Let U, V be the K computed vectors and U*, V* the exact ones. For A = U' J1 V and A* = U*' J1 V* of any matrix J1,
    `|A - A*|_F <= s_1(J1) (|U - U*|_F + |V - V*|_F)`, with s_1(J1) the largest singular value of J1. The error of
    `miscoupling` is at most |A - A*|_F divided by the norm (s_1^2 + .. + s_K^2)^1/2, which is at least s_1(J1).
    """
    steps = values[:, :-1] - values[:, 1:]
    under = torch.cat([steps - residuals[:, 1:], values[:, -1:] - further[:, None]], -1)
    above = torch.nn.functional.pad(steps - residuals[:, :-1], (1, 0), value=math.inf)
    gaps = torch.minimum(under, above).minimum(values - further[:, None])
    sines = torch.where(gaps > residuals, residuals / gaps, math.inf)
    errors = math.sqrt(2) * sines[:, :count]  # |v - v*| <= sqrt(2) sin for unit vectors of equal sign
    # |U - U*|_F and |V - V*|_F of the K leading vectors are each at most the root of the sum of their squared errors.
    # The factor 2 is for the sum of both.
    return 2 * errors.square().cumsum(-1).sqrt()
