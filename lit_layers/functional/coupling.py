"""Coupling of blocks: how far two Jacobians share their leading singular directions, and what else they show."""

import math
from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from lit_layers.functional._checks import check_option, finite_matrices, wide_matrices

# Leading singular vectors of square matrices, each with a bound on its error.

# Squares halve the digits: eigenvectors of J'J in float64 are good to 1e-16 (s_1 / s)^2 over the gap. That is enough
# but for tiny singular values, and is not relied on: how far they are off is measured on J itself.
MIN_DIM = 257  # narrower matrices are decomposed whole in the same time
EPS = torch.finfo(torch.float64).eps


class Factors(NamedTuple):
    """Leading singular triples (*n): `left` and `right` (.., dim, count), `values` (.., count) descending.

    `bounds` (.., count): how far `miscoupling` in the leading K = 1, 2, .. directions (p = 2) may be from its value
    with exact singular vectors of these very matrices, whatever the other matrix is; infinite where a tie leaves them
    undetermined. `turns` (.., count): how far the leading K vectors on both sides are likely turned out of the space
    that they span, as a root mean square.
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
    matrices = wide_matrices(matrices)
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
    residuals = _residuals(matrices, left, values, right)
    errors = _vector_errors(values, residuals, further)
    return _factors(left, values * scale[:, 0], right, errors, residuals * scale[:, 0], matrices.shape[-1])


def _leading_eigenvectors(gram: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Of symmetric matrices (n, dim, dim) the count + 1 largest eigenvalues, descending, and `count` eigenvectors; NaN
    where LAPACK finds no part of a spectrum, as of one with many equal values."""
    if gram.device.type != "cpu":
        values, vectors = torch.linalg.eigh(gram)
        return values[:, -count - 1 :].flip(-1), vectors[..., -count:].flip(-1)
    from scipy.linalg import eigh  # torch has no driver for a part of the spectrum, which takes half the time

    last = gram.shape[-1] - 1
    # the transpose is in Fortran's order, so that LAPACK works in place
    pairs: list[Any] = []
    for each in gram:
        try:
            pairs.append(eigh(each.numpy().T, subset_by_index=(last - count, last), overwrite_a=True))
        except np.linalg.LinAlgError:
            pairs.append((np.full(count + 1, np.nan), np.full((last + 1, count + 1), np.nan)))
    values, vectors = (torch.stack([torch.from_numpy(part) for part in parts]) for parts in zip(*pairs, strict=True))
    return values.flip(-1), vectors[..., 1:].flip(-1)


def _whole(matrices: Tensor, count: int) -> Factors:
    left, values, right = torch.linalg.svd(matrices)
    residuals = _residuals(matrices, left, values, right.mT)
    errors = _vector_errors(values, residuals, residuals[:, -1])
    # copies: a view would keep the whole of both bases
    left, right = left[..., :count].clone(), right[..., :count, :].mT.clone()
    return _factors(left, values, right, errors[:, :count], residuals[:, :count], matrices.shape[-1])


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


def _factors(left: Tensor, values: Tensor, right: Tensor, errors: Tensor, residuals: Tensor, dim: int) -> Factors:
    """`|A - A'|_F <= s_1(J1) (|U - U'|_F + |V - V'|_F)` for A = U' J1 V, and `s_1(J1) <= |s_1,K|_2`."""
    # |U - U'|_F and |V - V'|_F of the K leading vectors are each at most the root of the sum of their squared errors
    bounds = 2 * errors.square().cumsum(-1).sqrt()  # of both sides
    return Factors(left, values[:, : errors.shape[-1]], right, bounds, _likely_turns(values, residuals, dim))


def _likely_turns(values: Tensor, residuals: Tensor, dim: int) -> Tensor:
    """How far the leading K = 1, 2, .. vectors on both sides are turned where it matters, as a root mean square.

    A residual r has parts of about r / (2 sqrt(dim)) along each other pair of vectors, towards which it turns this one
    by that over the gap. Turns out of the leading K directions count in full. Those among them keep |A|_F, and change
    tr(diag(s) A) by J1's gap there: by that of evenly spread values, as J1 need have no tie where J2 has one. Of
    `values` (n, some of dim) those that are not known are taken to fall evenly to zero.
    """
    count, rest = residuals.shape[-1], dim - values.shape[-1]
    values, residuals = values / values[:, :1], residuals / values[:, :1]  # whose squares are neither 0 nor infinite
    leading = values[:, :count]
    place = torch.arange(values.shape[-1], device=values.device)
    distance = (place[:count, None] - place).abs()
    parts = residuals.square()[..., None] / (4 * dim)
    apart = (leading[..., None] - values[:, None]).abs().masked_fill(distance == 0, math.inf)  # (n, count, known)
    # of the rest, m steps further down each, the sum over m of 1 / gap^2
    further = (leading - values[:, -1:] + values[:, -1:] / (2 * max(rest, 1))) * leading
    towards = torch.cat([parts / apart.square(), parts * max(rest - 0.5, 0) / further[..., None]], -1)
    outside = towards.cumsum(-2).flip(-1).cumsum(-1).flip(-1).diagonal(offset=1, dim1=-2, dim2=-1)
    even = distance[:, :count] * ((leading[:, 0] - leading[:, -1]) / max(count - 1, 1))[:, None, None]
    ratios = (even / apart[..., :count]).nan_to_num(math.inf, math.inf).clamp(min=1)
    squares = parts * ratios.masked_fill(distance[:, :count] == 0, 0).square()
    inside = squares.cumsum(-1).cumsum(-2).diagonal(dim1=-2, dim2=-1)
    turns = (2 * outside / (place[:count] + 1) + inside / leading.square().cumsum(-1)).sqrt()
    return turns.nan_to_num(math.inf, math.inf)  # of a matrix of zeros


# How two Jacobians compare in the leading singular bases of one.

Sign = Literal["signed", "absolute"]
Bases = Literal["uv", "vu"]
Undefined = Literal["raise", "nan"]
Directions = int | float


def miscoupling(
    j1: Float[Tensor, "*n dim dim"],
    j2: Float[Tensor, "*n dim dim"],
    *,
    k: Directions = 0.1,
    p: float = 2.0,
    sign: Sign = "signed",
    bases: Bases = "uv",
) -> Float[Tensor, "*n"]:
    """How far `j1` is from diagonal in the leading K singular bases of `j2`; coupling is 1 minus it.

    `m = |U2' J1 V2 - diag(s1)|_F / |s1|_p` over the first K directions: 0 where both share them, about 1 for unrelated
    blocks, at most 2 at p = 2 (sqrt(2) for `absolute`, which compares absolute entries and so calls blocks of opposite
    sign coupled). Not symmetric. Unchanged by common rotations, common transposition and positive scaling of either.
    Ill-posed where `j2` has ties among its first K + 1 singular values: see `min_gap`. `p = 1` grows with width.

    `k` counts directions where it is an int and is a share of `dim` where it is a float. `bases="vu"` swaps the bases
    and is then not 0 for equal blocks. In float64 for dim <= 512 or float64 input, else float32.

    Source: Aubry et al., "Transformer block coupling and its correlation with generalization in LLMs", eq. 6, signed as
    printed there and p = 2 where they take the nuclear norm.

    Raises:
        ValueError: `k` outside 1..dim, a non-finite matrix, or a `j1` of zeros.
    """
    pair = miscoupling_matrix(j1[..., None, :, :], j2[..., None, :, :], k=k, p=p, sign=sign, bases=bases)
    return pair[..., 0, 0]


def miscoupling_matrix(
    jacobians: Float[Tensor, "*n blocks dim dim"],
    others: Float[Tensor, "*n others dim dim"] | None = None,
    *,
    k: Directions | Sequence[Directions] = 0.1,
    p: float = 2.0,
    sign: Sign = "signed",
    bases: Bases = "uv",
    undefined: Undefined = "raise",
) -> Tensor:
    """`miscoupling` of every block (row) in the bases of every other (column): `(*n, blocks, others)`.

    A sequence of `k` gives a leading dimension, all from one product. With `undefined="nan"` rows of zero matrices and
    rows and columns of non-finite ones are NaN.

    Raises:
        ValueError: as `miscoupling`, naming the first undefined block.
    """
    others_given = others is not None
    jacobians, others = wide_matrices(jacobians), wide_matrices(others if others is not None else jacobians)
    jacobians, broken = finite_matrices(jacobians, undefined)
    others, others_broken = finite_matrices(others, undefined) if others_given else (jacobians, broken)
    count = max(_counts(k, jacobians.shape[-1]))
    factors = singular_factors(others, count)
    values = torch.linalg.svdvals(jacobians) if others_given else factors.values
    result = miscoupling_from_factors(
        jacobians, values[..., :count], factors, k=k, p=p, sign=sign, bases=bases, undefined=undefined
    )
    return result.masked_fill(broken[..., :, None] | others_broken[..., None, :], math.nan)


def miscoupling_from_factors(
    jacobians: Float[Tensor, "*n blocks dim dim"],
    values: Float[Tensor, "*n blocks count"],
    factors: Factors,
    *,
    k: Directions | Sequence[Directions] = 0.1,
    p: float = 2.0,
    sign: Sign = "signed",
    bases: Bases = "uv",
    undefined: Undefined = "raise",
) -> Tensor:
    """`miscoupling_matrix` where the decompositions are at hand: `values` are those of `jacobians`."""
    check_option("sign", sign, "signed", "absolute")
    counts = _counts(k, jacobians.shape[-1])
    count = max(counts)
    norms = torch.stack([_norm(values[..., :number], p) for number in counts])  # (k, *n, blocks)
    if undefined == "raise" and bool((norms == 0).any()):
        where = (norms == 0).nonzero()[0, 1:].tolist()
        raise ValueError(f"miscoupling is undefined for a zero Jacobian, got one at index {where}")
    rows = []
    for block, compressed in enumerate(compressions(jacobians, factors, count=count, bases=bases)):
        compared = compressed.abs() if sign == "absolute" else compressed
        errors = (compared - torch.diag_embed(values[..., block, None, :count])).square()  # (*n, others, K, K)
        rows.append(torch.stack([errors[..., :number, :number].sum((-2, -1)) for number in counts]).sqrt())
    result = torch.stack(rows, -2) / norms.masked_fill(norms == 0, math.nan)[..., None]  # (k, *n, blocks, others)
    return result if isinstance(k, Sequence) else result[0]


def compressions(
    jacobians: Float[Tensor, "*n blocks dim dim"], factors: Factors, *, count: int, bases: Bases = "uv"
) -> Iterator[Float[Tensor, "*n others count count"]]:
    """Yields, block by block, `A = U' J V` in the leading `count` directions of every other block."""
    check_option("bases", bases, "uv", "vu")
    left, right = factors.left[..., :count], factors.right[..., :count]
    if bases == "vu":
        left, right = right, left
    others = right.shape[-3]
    joined = right.movedim(-3, -2).flatten(-2)  # (*n, dim, others * count): one product serves every pair
    for block in range(jacobians.shape[-3]):
        images = (jacobians[..., block, :, :].to(joined.dtype) @ joined).unflatten(-1, (others, count)).movedim(-2, -3)
        yield left.mT @ images


def offdiagonal_ratio(
    j1: Float[Tensor, "*n dim dim"], j2: Float[Tensor, "*n dim dim"], *, k: Directions = 0.1, bases: Bases = "uv"
) -> Float[Tensor, "*n"]:
    """Share of the Frobenius norm of `A = U2' J1 V2` that lies off its diagonal, in [0, 1].

    Source: the first versions of Aubry et al.; it ignores the singular values, so use `miscoupling`.

    Raises:
        ValueError: `k` outside 1..dim, a non-finite matrix, or A = 0.
    """
    j1, _ = finite_matrices(wide_matrices(j1), "raise")
    j2, _ = finite_matrices(wide_matrices(j2), "raise")
    (count,) = _counts(k, j1.shape[-1])
    factors = singular_factors(j2[..., None, :, :], count)
    (compressed,) = compressions(j1[..., None, :, :], factors, count=count, bases=bases)
    compressed = compressed[..., 0, :, :]
    norm = torch.linalg.matrix_norm(compressed)
    if bool((norm == 0).any()):
        raise ValueError("the off-diagonal ratio is undefined where j1 vanishes on the leading directions of j2")
    return torch.linalg.matrix_norm(compressed - torch.diag_embed(compressed.diagonal(dim1=-2, dim2=-1))) / norm


def num_directions(k: Directions, dim: int) -> int:
    """Number of directions K that `k` stands for: itself if an int, floor(k dim) if a float.

    Raises:
        ValueError: K outside 1..dim, a share outside (0, 1].
    """
    if isinstance(k, bool) or not isinstance(k, int | float):
        raise TypeError(f"expected k to be an int (a count) or a float (a share of the dimension), got {k!r}")
    if isinstance(k, int):
        if not 1 <= k <= dim:
            raise ValueError(f"expected k between 1 and the dimension {dim}, got {k}")
        return k
    count = math.floor(k * dim + 1e-9) if 0 < k <= 1 else 0
    if count < 1:
        raise ValueError(f"expected a share k in (0, 1] with at least one of {dim} directions, got {k}")
    return count


def min_gap(values: Float[Tensor, "*n count"], *, k: int) -> Float[Tensor, "*n"]:
    """Least gap between neighbours among the first k + 1 singular values, over the largest: 0 is a tie.

    Below 1e-4 the bases, and so `miscoupling`, are not well determined. Values beyond the last given count as 0: pass
    k + 1 of them, or all.
    """
    padded = torch.nn.functional.pad(values, (0, 1))
    gaps = (padded[..., :k] - padded[..., 1 : k + 1]).amin(-1)
    largest = values[..., 0]
    return torch.where(largest > 0, gaps / largest, torch.zeros_like(largest))


def random_miscoupling(
    spectrum: Float[Tensor, "*n dim"] | int,
    *,
    k: Directions = 0.1,
    p: float = 2.0,
    sign: Sign = "signed",
    draws: int = 8,
    seed: int = 0,
) -> Float[Tensor, "*n"]:
    """Miscoupling that unrelated bases would give: the baseline beside every value.

    For all singular values of J1: the root mean square over independent Haar bases of J2, in closed form (`absolute`:
    entries taken as normal, within 0.004 for dim >= 48). For a dimension: the mean over `draws` seeded pairs of
    Gaussian matrices. Above 1 for `signed`; sqrt(2) for K = dim at p = 2.

    Raises:
        ValueError: `k` outside 1..dim, a spectrum of zeros.
    """
    check_option("sign", sign, "signed", "absolute")
    if isinstance(spectrum, int):
        if draws < 1:
            raise ValueError(f"expected at least one draw, got {draws}")
        generator = torch.Generator().manual_seed(seed)
        dtype = torch.float64 if spectrum <= 512 else torch.float32
        pairs = (torch.randn(2, spectrum, spectrum, generator=generator, dtype=dtype) for _ in range(draws))
        return torch.stack([miscoupling(*pair, k=k, p=p, sign=sign) for pair in pairs]).mean()
    dim = spectrum.shape[-1]
    count = num_directions(k, dim)
    return random_miscoupling_from_norms(spectrum[..., :count], _norm(spectrum, 2.0), dim=dim, p=p, sign=sign)


def random_miscoupling_from_norms(
    values: Float[Tensor, "*n k"],
    frobenius: Float[Tensor, "*n"],
    *,
    dim: int,
    p: float = 2.0,
    sign: Sign = "signed",
    undefined: Undefined = "raise",
) -> Float[Tensor, "*n"]:
    """`random_miscoupling` from the leading K singular values of J1 and its Frobenius norm, which suffice."""
    values, frobenius = values.double(), frobenius.double()
    zero = values[..., 0] == 0
    if undefined == "raise" and bool(zero.any()):
        raise ValueError("the random baseline is undefined for a spectrum of zeros")
    # |A - diag(s)|^2 = |s|^2 - 2 sum_i s_i A_ii + |A|^2. In bases that have nothing to do with J1 an entry of
    # A = U' J1 V has mean 0 and variance (|J1|_F / dim)^2: the middle term goes, the last is K^2 of those. An absolute
    # entry, taken as normal, has the mean sqrt(2 / pi) |J1|_F / dim, and the middle term stays.
    share = values.shape[-1] / dim
    square = _norm(values, 2.0) ** 2 + (share * frobenius) ** 2
    if sign == "absolute":
        square = square - 2 * math.sqrt(2 / math.pi) * frobenius * values.sum(-1) / dim
    return (square.sqrt() / _norm(values, p)).masked_fill(zero, math.nan)


def error_estimate(
    values: Float[Tensor, "*n k"],
    frobenius: Float[Tensor, "*n"],
    turns: Float[Tensor, "*n"],
    *,
    dim: int,
    p: float = 2.0,
    dtype: torch.dtype = torch.float64,
) -> Float[Tensor, "*n"]:
    """How far off `miscoupling` is likely to be, as a root mean square, where the bases of J2 are inexact by `turns`.

    From the leading K singular values of J1 and its Frobenius norm, and `Factors.turns` of J2 at this K. With vectors
    that are turned by e in directions which have nothing to do with J1, the entries of A = U' J1 V are off by
    e |J1|_F / dim each, and of these K^2 errors the norm |A - diag(s)| takes the part along itself, so that m is off
    by e |J1|_F / (dim |s|_p). `Factors.bounds` hold for the worst direction of each vector instead, all in step, which
    is sqrt(K) dim times that.

    It is never below the rounding of products, eps of `dtype` or sqrt(dim) eps of float64: errors that small are not
    told apart. Above that it is within ten times the largest real error of several pairs of Jacobians with spectra
    alike, of which J2 may have a tie. Where J1 has one in the same place, the real error is smaller.
    """
    turned = turns.double() * frobenius.double() / (dim * _norm(values.double(), p))
    return torch.hypot(turned, turned.new_tensor(max(torch.finfo(dtype).eps, math.sqrt(dim) * EPS)))


def excess_coupling(
    miscouplings: Float[Tensor, "*n blocks others"], random: Float[Tensor, "*n blocks"]
) -> Float[Tensor, "*n blocks others"]:
    """`1 - m / m_random` per pair, with the baseline of J1's own spectrum: 0 for random bases, 1 for shared ones.

    Does not depend on p.
    """
    return 1 - miscouplings / random[..., None]


def off_diagonal_mean(pairs: Float[Tensor, "*n blocks blocks"]) -> Float[Tensor, "*n"]:
    """Mean over the ordered pairs of different blocks, NaN pairs left out.

    Raises:
        ValueError: fewer than two blocks.
    """
    blocks = pairs.shape[-1]
    if blocks < 2:
        raise ValueError(f"expected at least two blocks for a mean over pairs, got {blocks}")
    diagonal = torch.eye(blocks, dtype=torch.bool, device=pairs.device)
    return pairs.masked_fill(diagonal, math.nan).nanmean((-2, -1))


def mean_by_distance(pairs: Float[Tensor, "*n blocks blocks"]) -> Float[Tensor, "*n blocks"]:
    """Mean over the pairs that lie 0, 1, .. blocks - 1 blocks apart, in either order, NaN pairs left out."""
    blocks = pairs.shape[-1]
    depth = torch.arange(blocks, device=pairs.device)
    distance = (depth[:, None] - depth).abs()
    return torch.stack([pairs[..., distance == apart].nanmean(-1) for apart in range(blocks)], -1)


def _counts(k: Directions | Sequence[Directions], dim: int) -> list[int]:
    if isinstance(k, Sequence) and not k:
        raise ValueError("expected at least one k, got an empty sequence")
    return [num_directions(item, dim) for item in (k if isinstance(k, Sequence) else [k])]


def _norm(values: Tensor, p: float) -> Tensor:
    if not p >= 1:
        raise ValueError(f"expected p of at least 1 (inf allowed), got {p}")
    return torch.linalg.vector_norm(values, ord=p, dim=-1)
