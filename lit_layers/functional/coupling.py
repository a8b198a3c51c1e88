"""Coupling of block Jacobians: shared leading singular directions, and the sizes and ranks of the Jacobians."""

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
    """Return how far the Jacobian `j1` is from diagonal in the bases of the K leading singular vectors of `j2`.

    `m = |U2' J1 V2 - diag(s1)|_F / |s1|_p`, where U2 and V2 are the first K singular vectors of `j2` and s1 are the
    first K singular values of `j1`. Coupling is 1 - m.

    With the 2-norm in the denominator (`p=2`) the range is [0, 2]: 0 if both blocks share the K directions, about 1 for
    unrelated blocks. With `sign="absolute"` the range is [0, sqrt(2)]. That form takes the absolute values of the
    entries of U2' J1 V2, so it also calls blocks of opposite sign coupled.

    Not symmetric in its arguments. Unchanged by common rotations, by common transposition and by positive scaling of
    either matrix. Ill-posed if `j2` has ties among its first K + 1 singular values (see `min_gap`). Values at `p=1`
    grow with the width of the model.

    Args:
        j1: The full Jacobians J1. Only the bases are cut to K directions.
        j2: Jacobians J2, which give the bases.
        k: Number of directions K if it is an int, share of `dim` if it is a float.
        p: Order of the norm of s1 in the denominator.
        sign: "signed" as in the paper's equation, or "absolute" as in its released code.

    Computed in float64 for dim <= 512 or float64 input, else in float32.

    Source: Aubry et al., "Transformer block coupling and its correlation with generalization in LLMs", eq. 6. The signs
    follow the printed equation. The default p = 2 is our choice. The paper takes the nuclear norm (p = 1).

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
    """Return `miscoupling` of each block (row) in the bases of each of `others` (column), `(*n, blocks, others)`.

    `others` are the same blocks by default. If `k` is a sequence, the result has a leading dimension with one entry for
    each of its values. This costs little, because one matrix product serves all values. With `undefined="nan"`, rows of
    zero matrices are NaN, and so are rows and columns of non-finite matrices.

    Raises:
        ValueError: in the cases of `miscoupling`; the message names the first undefined block.
    """
    others_given = others is not None
    # s1 comes from J1 and the bases come from J2. One decomposition serves both only if `others` are the same matrices.
    jacobians, others = wide_matrices(jacobians), wide_matrices(others if others is not None else jacobians)
    jacobians, broken = finite_matrices(jacobians, undefined)
    others, others_broken = finite_matrices(others, undefined) if others_given else (jacobians, broken)
    # U and V must come from one SVD. A pair (u_i, v_i) is unique up to a common sign, which does not change
    # A_ii = u_i' J1 v_i. Two separate eigenproblems of J J' and J' J would give unrelated signs.
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
    """Return `miscoupling_matrix` from decompositions that the caller has computed.

    Args:
        jacobians: The matrices J1.
        values: The leading singular values of `jacobians`.
        factors: The singular factors of the other blocks, J2.
        k: As in `miscoupling`, always a sequence here.
        p: As in `miscoupling`.
        sign: As in `miscoupling`.
        undefined: "raise", or "nan" for NaN in the rows of zero matrices.
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
    """Return the numerator |A - diag(s)|_F of `miscoupling` for one Jacobian J1 and each number K of directions.

    A = U2' J1 V2 is `compressed` (*n, others, K, K), with the leading singular vectors U2 and V2 of each of the other
    Jacobians. s are the leading singular values `values` of J1. The result is (counts, *n, others).
    """
    # The "absolute" form hides the sign of the coupling: J2 = -J1 has A = -diag(s), m = 2 signed, but 0 absolute.
    compared = compressed.abs() if sign == "absolute" else compressed
    values = values[..., None, : max(counts)].to(compared.dtype)
    # A of a smaller K is the top-left corner of A of the largest K, so one product serves every K.
    squares = (compared - torch.diag_embed(values)).square()  # (*n, others, K, K)
    return torch.stack([squares[..., :count, :count].sum((-2, -1)) for count in counts]).sqrt()


def compressions(
    jacobians: Float[Tensor, "*n blocks dim dim"], factors: Factors, *, count: int
) -> Iterator[Float[Tensor, "*n others count count"]]:
    """Yield `A = U' J V` for the Jacobian J of each block, with U and V of each matrix that `factors` decomposes.

    U and V are the leading `count` singular vectors."""
    left, right = factors.left[..., :count], factors.right[..., :count]
    others = right.shape[-3]
    joined = right.movedim(-3, -2).flatten(-2)  # (*n, dim, others * count): one product serves every pair
    for block in range(jacobians.shape[-3]):
        images = (jacobians[..., block, :, :].to(joined.dtype) @ joined).unflatten(-1, (others, count)).movedim(-2, -3)
        yield left.mT @ images


def num_directions(k: Directions, dim: int) -> int:
    """Return the number of directions K that `k` means: `k` itself if it is an int, floor(k dim) if it is a float.

    Raises:
        ValueError: K outside 1..dim, or a share outside (0, 1].
    """
    # Without the small term, 0.29 * 100 = 28.999999999999996 would be floored to 28 directions.
    count = k if isinstance(k, int) else math.floor(k * dim + 1e-9)
    if not 1 <= count <= dim:
        raise ValueError(f"expected k between 1 and the dimension {dim}, got {k if isinstance(k, int) else k * dim}")
    return count


def min_gap(values: Float[Tensor, "*n count"], *, k: int) -> Float[Tensor, "*n"]:
    """Return the smallest difference of neighbours among the first k + 1 singular values, divided by the largest value.

    0 means a tie. Below 1e-4 the singular bases are poorly determined, and so is `miscoupling`. The value after the
    last one in `values` is taken as 0, so pass at least k + 1 values, or all of them.
    """
    # The K leading vectors are well defined only if values K and K + 1 differ, so this difference also counts.
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
    """Return the miscoupling that unrelated singular bases would give: the baseline of `miscoupling`.

    This is the root mean square of the miscoupling over independent Haar-distributed bases of J2, in closed form. With
    `sign="signed"` and `p=2` it is above 1, and sqrt(2) if all directions are used (K = dim). With `sign="absolute"`
    the closed form assumes normal matrix entries. Its error is below 0.004 for dim >= 48.

    Args:
        spectrum: All singular values of J1.
        k: As in `miscoupling`.
        p: As in `miscoupling`.
        sign: As in `miscoupling`.

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
    """Return `random_miscoupling` from the leading K singular values of J1 and its Frobenius norm."""
    values, frobenius = values.double(), frobenius.double()
    # |A - diag(s)|^2 = |s|^2 - 2 sum_i s_i A_ii + |A|^2. In bases that are independent of J1, each entry of
    # A = U' J1 V has mean 0 and variance (|J1|_F / dim)^2. The middle term therefore vanishes on average, and |A|^2
    # is K^2 times this variance: E m^2 = (|s|^2 + (K / dim)^2 |J1|_F^2) / |s|_p^2. With `sign="absolute"`, |A_ii|
    # replaces A_ii. Its mean for normal entries is sqrt(2 / pi) |J1|_F / dim instead of 0, so the middle term stays.
    share = values.shape[-1] / dim
    square = values.square().sum(-1) + (share * frobenius) ** 2
    if sign == "absolute":
        square = square - 2 * math.sqrt(2 / math.pi) * frobenius * values.sum(-1) / dim
    zero = {"a spectrum is zero": values[..., 0] == 0}
    return checked("random_miscoupling", square.sqrt() / vector_norm(values, p, dim=-1), zero, undefined)


def excess_coupling(
    miscouplings: Float[Tensor, "*n blocks others"], random: Float[Tensor, "*n blocks"]
) -> Float[Tensor, "*n blocks others"]:
    """Return `1 - m / m_random` for each pair of blocks: the coupling in excess of unrelated bases.

    m is the `miscoupling` of the pair, and m_random (`random_miscoupling`) is the value for unrelated bases. About 0
    for unrelated bases, 1 for shared bases. Does not depend on the order p of the norm in `miscoupling`.
    """
    # The norm |s1|_p of the singular values divides both m and m_random, so it cancels. Models of different widths can
    # therefore be compared.
    return 1 - miscouplings / random[..., None]


def mean_off_diagonal(pairs: Float[Tensor, "*n blocks blocks"]) -> Float[Tensor, "*n"]:
    """Return the mean over the ordered pairs of different blocks; pairs that are NaN are left out."""
    # m(J, J) = 0, so a mean with the diagonal would give even uncoupled blocks a coupling of 1 / blocks.
    diagonal = torch.eye(pairs.shape[-1], dtype=torch.bool, device=pairs.device)
    return pairs.masked_fill(diagonal, math.nan).nanmean((-2, -1))


def mean_by_distance(pairs: Float[Tensor, "*n blocks blocks"]) -> Float[Tensor, "*n blocks"]:
    """Return the mean over the ordered pairs (i, j) of blocks at each distance |i - j| = 0, 1, .. blocks - 1.

    Pairs that are NaN are left out.
    """
    blocks = pairs.shape[-1]
    depth = torch.arange(blocks, device=pairs.device)
    distance = (depth[:, None] - depth).abs()
    return torch.stack([pairs[..., distance == lag].nanmean(-1) for lag in range(blocks)], -1)


def _counts(k: Directions | Sequence[Directions], dim: int) -> list[int]:
    return [num_directions(item, dim) for item in (k if isinstance(k, Sequence) else [k])]


# Single Jacobians: sizes and ranks, the norm over depth, and how linear the path through the blocks is.


class JacobianSpectrum(NamedTuple):
    """Leading singular values of each block's Jacobian, and a least-squares line over the block number.

    The line is fitted to 1 / s_1, the inverse of the largest singular value.
    """

    values: Tensor
    slope: Tensor
    intercept: Tensor
    r_squared: Tensor


class Influence(NamedTuple):
    """Two norms and two ranks of a Jacobian; see `cross_token_influence`."""

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
    """Return the `top` largest singular values of each block, and the least-squares line of 1 / s_1 against depth.

    s_1 is the largest singular value of a block, and depth is the number of the block. Unchanged by rotations.
    `r_squared` is 1 if 1 / s_1 is linear in depth.

    Args:
        jacobians: One Jacobian for each block.
        top: How many singular values to return; None for all.
        fit_from: First block of the fit, counted from 1. The fit ends at the last block.
        undefined: "raise", or "nan" for NaN instead of an error.

    Source: Aubry et al., linear growth of the inverse top singular value. Their code fits from block 10.

    Raises:
        ValueError: fewer than three blocks to fit, s_1 = 0, or the same 1 / s_1 in all blocks. In the last case only
            r_squared is undefined; the slope is 0.
    """
    jacobians, broken = finite_matrices(wide_matrices(jacobians), undefined)
    values = torch.linalg.svdvals(jacobians).masked_fill(broken[..., None], math.nan)
    return JacobianSpectrum(values[..., :top], *inverse_norm_line(values[..., 0], fit_from, undefined=undefined))


def inverse_norm_line(
    largest: Float[Tensor, "*n blocks"], fit_from: int = 1, *, undefined: Undefined = "raise"
) -> tuple[Tensor, Tensor, Tensor]:
    """Return slope, intercept and r_squared of the least-squares line of 1 / `largest` against the number of the block.

    `largest` is the largest singular value of each block's Jacobian. The fit begins at block `fit_from`, counted from
    1, and ends at the last block.
    """
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
    # r_squared = 1 - residual / total is 0 / 0 for a constant curve. Rounding leaves deviations of about 1e-16 of the
    # mean, so that a comparison of `total` with 0 would miss constant curves.
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
    """Return the cosine at each layer between a token's state x[l] and the state y[l] that the linearized blocks reach.

    `y[l] = (I + J[l]) y[l-1]`, starting from `y[0] = x[0]`. J[l] is the Jacobian of the token's output with respect to
    the same token's input. Cross-token terms and offsets are left out. The value therefore measures how linear the path
    is; y does not approximate the model's output. It is exactly 1 if every residual branch is linear and acts on single
    tokens.

    The last entry is the main result. Computed in float64.

    Args:
        jacobians: Same-token Jacobians of the residual branches.
        states: The token's states at all layers, the input of the first block first.
        skip_last: Leave out the factor of the last block, as the published code does.
        undefined: "raise", or "nan" for NaN instead of an error.

    Source: Aubry et al., "Transformer block coupling and its correlation with generalization in LLMs".

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
            # J is the Jacobian of the residual branch f, the block is X + f(X): hence the added identity.
            carried = carried + (jacobians[block].double() @ carried[..., None])[..., 0]
        state = states[block + 1]
        norms = vector_norm(carried, dim=-1) * vector_norm(state, dim=-1)
        cosines.append((carried * state).sum(-1) / norms)
    values = torch.stack(cosines)
    problems = {"a vector is zero or not finite": ~values.isfinite()}
    return checked("linearized_rollout", values.clamp(-1, 1), problems, undefined)


def cross_token_influence(jacobians: Float[Tensor, "*n dim dim"], *, undefined: Undefined = "raise") -> Influence:
    """Return the sizes (norms) and ranks of Jacobians of one token's output with respect to another token's input.

    With the singular values s: Frobenius norm |J|_F, spectral norm s_1, participation ratio (sum s)^2 / sum s^2, and
    entropy rank exp(-sum q log q) with q = s / sum s. `1 <= participation_ratio <= entropy_rank <= dim`. For a partial
    isometry of rank r both ranks are r. Rotations change nothing. Scaling changes only the norms.

    Raises:
        ValueError: a zero matrix, whose ranks are undefined, or a non-finite one.
    """
    jacobians, broken = finite_matrices(wide_matrices(jacobians), undefined)
    values = torch.linalg.svdvals(jacobians).double()
    zero = values[..., 0] == 0
    total, squares = values.sum(-1), values.square().sum(-1)
    # Here the shares are those of the singular values s. In `entropy.participation_ratio` they are those of s^2.
    ranks = total**2 / squares, torch.special.entr(values / total[..., None]).sum(-1).exp()
    ranks = [checked("rank", rank, {"a Jacobian is zero": zero}, undefined) for rank in ranks]
    norms = [norm.masked_fill(broken, math.nan) for norm in (squares.sqrt(), values[..., 0])]
    return Influence(*norms, *ranks)
