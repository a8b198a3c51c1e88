"""What block Jacobians show: how far two share their leading singular directions, their sizes and ranks."""

import math
from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from torch.linalg import vector_norm

from lit_layers.functional._checks import Undefined, check_option, checked, finite_matrices, wide_matrices
from lit_layers.functional.singular import Factors, singular_factors

Sign = Literal["signed", "absolute"]
Directions = int | float


def miscoupling(
    j1: Float[Tensor, "*n dim dim"],
    j2: Float[Tensor, "*n dim dim"],
    *,
    k: Directions = 0.1,
    p: float = 2.0,
    sign: Sign = "signed",
) -> Float[Tensor, "*n"]:
    """Return how far `j1` is from diagonal in the leading K singular bases of `j2`. Coupling is 1 minus it.

    `m = |U2' J1 V2 - diag(s1)|_F / |s1|_p` over the first K directions: 0 where both share them, about 1 for unrelated
    blocks, at most 2 at p = 2 (sqrt(2) for `absolute`, which compares absolute entries and so calls blocks of opposite
    sign coupled). Not symmetric. Unchanged by common rotations, common transposition and positive scaling of either.
    Ill-posed where `j2` has ties among its first K + 1 singular values: see `min_gap`. `p = 1` grows with width.

    `k` counts directions where it is an int and is a share of `dim` where it is a float. In float64 for dim <= 512 or
    float64 input, else float32.

    Source: Aubry et al., "Transformer block coupling and its correlation with generalization in LLMs", eq. 6, signed as
    printed there and p = 2 where they take the nuclear norm.

    Raises:
        ValueError: `k` outside 1..dim, a non-finite matrix, or a `j1` of zeros.
    """
    pair = miscoupling_matrix(j1[..., None, :, :], j2[..., None, :, :], k=k, p=p, sign=sign)
    return pair[..., 0, 0]


def miscoupling_matrix(
    jacobians: Float[Tensor, "*n blocks dim dim"],
    others: Float[Tensor, "*n others dim dim"] | None = None,
    *,
    k: Directions | Sequence[Directions] = 0.1,
    p: float = 2.0,
    sign: Sign = "signed",
    undefined: Undefined = "raise",
) -> Tensor:
    """Return `miscoupling` of every block (row) in the bases of every other one (column), `(*n, blocks, others)`.

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
    options: Any = {"k": k if isinstance(k, Sequence) else [k], "p": p, "sign": sign, "undefined": undefined}
    result = miscoupling_of_factors(jacobians, values[..., :count], factors, **options).to(factors.left.dtype)
    result = result if isinstance(k, Sequence) else result[0]
    return result.masked_fill(broken[..., :, None] | others_broken[..., None, :], math.nan)


def miscoupling_of_factors(
    jacobians: Float[Tensor, "*n blocks dim dim"],
    values: Float[Tensor, "*n blocks count"],
    factors: Factors,
    *,
    k: Sequence[Directions],
    p: float = 2.0,
    sign: Sign = "signed",
    undefined: Undefined = "raise",
) -> Tensor:
    """Return `miscoupling_matrix` from given decompositions.

    `values` are those of `jacobians`.
    """
    check_option("sign", sign, "signed", "absolute")
    dim = jacobians.shape[-1]
    counts = _counts(k, dim)
    norms = torch.stack([vector_norm(values[..., :count], p, dim=-1) for count in counts])
    norms = checked("miscoupling", norms, {"a Jacobian is zero": norms == 0}, undefined)
    rows = [
        _norms(compressed, values[..., block, :], counts, sign)
        for block, compressed in enumerate(compressions(jacobians, factors, count=max(counts)))
    ]
    return torch.stack(rows, -2) / norms[..., None]


def _norms(compressed: Tensor, values: Tensor, counts: Sequence[int], sign: Sign) -> Tensor:
    """Return |A - diag(s)|_F of one block at every K, (k, *n, others)."""
    compared = compressed.abs() if sign == "absolute" else compressed
    values = values[..., None, : max(counts)].to(compared.dtype)
    squares = (compared - torch.diag_embed(values)).square()  # (*n, others, K, K)
    return torch.stack([squares[..., :count, :count].sum((-2, -1)) for count in counts]).sqrt()


def compressions(
    jacobians: Float[Tensor, "*n blocks dim dim"], factors: Factors, *, count: int
) -> Iterator[Float[Tensor, "*n others count count"]]:
    """Yield, block by block, `A = U' J V` in the leading `count` directions of every other block."""
    left, right = factors.left[..., :count], factors.right[..., :count]
    others = right.shape[-3]
    joined = right.movedim(-3, -2).flatten(-2)  # (*n, dim, others * count): one product serves every pair
    for block in range(jacobians.shape[-3]):
        images = (jacobians[..., block, :, :].to(joined.dtype) @ joined).unflatten(-1, (others, count)).movedim(-2, -3)
        yield left.mT @ images


def num_directions(k: Directions, dim: int) -> int:
    """Return the number of directions K that `k` stands for: `k` if it is an int, floor(k dim) if it is a float.

    Raises:
        ValueError: K outside 1..dim, a share outside (0, 1].
    """
    count = k if isinstance(k, int) else math.floor(k * dim + 1e-9)
    if not 1 <= count <= dim:
        raise ValueError(f"expected k between 1 and the dimension {dim}, got {k if isinstance(k, int) else k * dim}")
    return count


def min_gap(values: Float[Tensor, "*n count"], *, k: int) -> Float[Tensor, "*n"]:
    """Return the smallest gap between neighbours among the first k + 1 singular values, over the largest; 0 is a tie.

    Below 1e-4 the bases, and so `miscoupling`, are not well determined. Values beyond the last given count as 0: pass
    k + 1 of them, or all.
    """
    padded = torch.nn.functional.pad(values, (0, 1))
    gaps = (padded[..., :k] - padded[..., 1 : k + 1]).amin(-1)
    largest = values[..., 0]
    return torch.where(largest > 0, gaps / largest, torch.zeros_like(largest))


def random_miscoupling(
    spectrum: Float[Tensor, "*n dim"],
    *,
    k: Directions = 0.1,
    p: float = 2.0,
    sign: Sign = "signed",
) -> Float[Tensor, "*n"]:
    """Return the miscoupling that unrelated bases would give: the baseline of every value.

    For all singular values of J1: the root mean square over independent Haar bases of J2, in closed form (`absolute`:
    entries taken as normal, within 0.004 for dim >= 48). Above 1 for `signed`; sqrt(2) for K = dim at p = 2.

    Raises:
        ValueError: `k` outside 1..dim, a spectrum of zeros.
    """
    check_option("sign", sign, "signed", "absolute")
    dim = spectrum.shape[-1]
    count = num_directions(k, dim)
    return random_miscoupling_from_norms(spectrum[..., :count], vector_norm(spectrum, dim=-1), dim=dim, p=p, sign=sign)


def random_miscoupling_from_norms(
    values: Float[Tensor, "*n k"],
    frobenius: Float[Tensor, "*n"],
    *,
    dim: int,
    p: float = 2.0,
    sign: Sign = "signed",
    undefined: Undefined = "raise",
) -> Float[Tensor, "*n"]:
    """Return `random_miscoupling` from the leading K singular values of J1 and its Frobenius norm, which suffice."""
    values, frobenius = values.double(), frobenius.double()
    # |A - diag(s)|^2 = |s|^2 - 2 sum_i s_i A_ii + |A|^2. In bases that have nothing to do with J1 an entry of
    # A = U' J1 V has mean 0 and variance (|J1|_F / dim)^2: the middle term goes, the last is K^2 of those. An absolute
    # entry, taken as normal, has the mean sqrt(2 / pi) |J1|_F / dim, and the middle term stays.
    share = values.shape[-1] / dim
    square = values.square().sum(-1) + (share * frobenius) ** 2
    if sign == "absolute":
        square = square - 2 * math.sqrt(2 / math.pi) * frobenius * values.sum(-1) / dim
    zero = {"a spectrum is zero": values[..., 0] == 0}
    return checked("random_miscoupling", square.sqrt() / vector_norm(values, p, dim=-1), zero, undefined)


def excess_coupling(
    miscouplings: Float[Tensor, "*n blocks others"], random: Float[Tensor, "*n blocks"]
) -> Float[Tensor, "*n blocks others"]:
    """Return `1 - m / m_random` per pair, by the baseline of J1's own spectrum: 0 for random bases, 1 for shared.

    Does not depend on p.
    """
    return 1 - miscouplings / random[..., None]


def mean_off_diagonal(pairs: Float[Tensor, "*n blocks blocks"]) -> Float[Tensor, "*n"]:
    """Return the mean over the ordered pairs of different blocks, without NaN pairs."""
    diagonal = torch.eye(pairs.shape[-1], dtype=torch.bool, device=pairs.device)
    return pairs.masked_fill(diagonal, math.nan).nanmean((-2, -1))


def mean_by_distance(pairs: Float[Tensor, "*n blocks blocks"]) -> Float[Tensor, "*n blocks"]:
    """Return the mean over the pairs that lie 0, 1, .. blocks - 1 blocks apart, in either order, without NaN pairs."""
    blocks = pairs.shape[-1]
    depth = torch.arange(blocks, device=pairs.device)
    distance = (depth[:, None] - depth).abs()
    return torch.stack([pairs[..., distance == lag].nanmean(-1) for lag in range(blocks)], -1)


def _counts(k: Directions | Sequence[Directions], dim: int) -> list[int]:
    return [num_directions(item, dim) for item in (k if isinstance(k, Sequence) else [k])]


# What Jacobians show by themselves: sizes and ranks, the norm over depth, how linear the path through them is.


class JacobianSpectrum(NamedTuple):
    """Leading singular values per block, and the straight line through 1 / s_1 over depth."""

    values: Tensor
    slope: Tensor
    intercept: Tensor
    r_squared: Tensor


class Influence(NamedTuple):
    """Four sizes of a Jacobian: two of its scale, two of its rank."""

    frobenius: Tensor
    spectral: Tensor
    participation_ratio: Tensor
    entropy_rank: Tensor


def jacobian_spectrum(
    jacobians: Float[Tensor, "*n blocks dim dim"],
    *,
    top: int | None = 15,
    fit_from: int = 1,
    undefined: Undefined = "raise",
) -> JacobianSpectrum:
    """Return the leading `top` singular values per block (None: all), and the least-squares line of 1 / s_1 over depth.

    The line is fitted over the block numbers `fit_from`..L, counted from 1; `r_squared` is 1 where 1 / s_1 is linear in
    depth. Rotations leave all of it alone.

    Source: Aubry et al., the linear growth of the inverse top singular value; their code fits from block 10.

    Raises:
        ValueError: fewer than three blocks to fit, s_1 = 0, 1 / s_1 constant over depth (the slope is then 0 and
            r_squared undefined).
    """
    jacobians, broken = finite_matrices(wide_matrices(jacobians), undefined)
    values = torch.linalg.svdvals(jacobians).masked_fill(broken[..., None], math.nan)
    return JacobianSpectrum(values[..., :top], *inverse_norm_line(values[..., 0], fit_from, undefined=undefined))


def inverse_norm_line(
    largest: Float[Tensor, "*n blocks"], fit_from: int = 1, *, undefined: Undefined = "raise"
) -> tuple[Tensor, Tensor, Tensor]:
    """Return slope, intercept and r_squared of 1 / s_1 over the block numbers `fit_from`..L."""
    blocks = largest.shape[-1]
    if fit_from < 1 or blocks - fit_from + 1 < 3:
        raise ValueError(f"expected at least three blocks to fit a line to, got blocks {fit_from} to {blocks}")
    largest = largest[..., fit_from - 1 :].double()
    inverse = 1 / largest.masked_fill(largest == 0, math.nan)
    depth = torch.arange(fit_from, blocks + 1, dtype=inverse.dtype, device=inverse.device)
    offset = depth - depth.mean()
    mean = inverse.mean(-1)
    slope = (inverse * offset).sum(-1) / offset.square().sum()
    deviation = inverse - mean[..., None]
    total = deviation.square().sum(-1)
    # rounding alone leaves a deviation of some 1e-16 of the mean
    constant = total <= len(depth) * (1e-15 * mean.abs()) ** 2
    residual = (deviation - slope[..., None] * offset).square().sum(-1)
    problems = {"a Jacobian is zero": mean.isnan(), "1 / s_1 is constant over depth": constant}
    r_squared = checked("r_squared", 1 - residual / total, problems, undefined)
    return slope.masked_fill(constant, 0), mean - slope * depth.mean(), r_squared


def linearized_rollout(
    jacobians: Float[Tensor, "layers *n dim dim"],
    states: Float[Tensor, "layers_and_input *n dim"],
    *,
    skip_last: bool = False,
    undefined: Undefined = "raise",
) -> Float[Tensor, "layers *n"]:
    """Return the cosine, per layer, of a token's state and its input carried through the linearized blocks.

    `y[l] = (I + J[l]) y[l-1]` from `y[0] = x[0]`, with the token's own Jacobians: no cross-token terms and no offsets,
    so it scores linearity and does not approximate the model. Exactly 1 where every branch is linear and token-wise.
    `skip_last` leaves out the last block's factor, as published code does. The headline is the last entry. In float64.

    Raises:
        ValueError: a zero or non-finite vector.
    """
    blocks = jacobians.shape[0]
    if states.shape != (shape := (blocks + 1, *jacobians.shape[1:-1])):
        raise ValueError(f"expected states of shape {shape} for these Jacobians, got {tuple(states.shape)}")
    states = states.double()
    carried = states[0]
    cosines = []
    for block in range(blocks):
        if not (skip_last and block == blocks - 1):
            carried = carried + (jacobians[block].double() @ carried[..., None])[..., 0]
        state = states[block + 1]
        norms = vector_norm(carried, dim=-1) * vector_norm(state, dim=-1)
        cosines.append((carried * state).sum(-1) / norms)
    values = torch.stack(cosines)
    problems = {"a vector is zero or not finite": ~values.isfinite()}
    return checked("linearized_rollout", values.clamp(-1, 1), problems, undefined)


def cross_token_influence(jacobians: Float[Tensor, "*n dim dim"], *, undefined: Undefined = "raise") -> Influence:
    """Return size and rank of Jacobians between tokens: Frobenius and spectral norm, participation ratio, entropy rank.

    `1 <= participation_ratio <= entropy_rank <= dim`, both over the singular values themselves: a rank-r partial
    isometry gives r for both. Rotations change nothing, scaling only the norms.

    Raises:
        ValueError: a zero matrix, whose ranks are undefined, or a non-finite one.
    """
    jacobians, broken = finite_matrices(wide_matrices(jacobians), undefined)
    values = torch.linalg.svdvals(jacobians).double()
    zero = values[..., 0] == 0
    total, squares = values.sum(-1), values.square().sum(-1)
    ranks = total**2 / squares, torch.special.entr(values / total[..., None]).sum(-1).exp()
    ranks = [checked("rank", rank, {"a Jacobian is zero": zero}, undefined) for rank in ranks]
    norms = [norm.masked_fill(broken, math.nan) for norm in (squares.sqrt(), values[..., 0])]
    return Influence(*norms, *ranks)
