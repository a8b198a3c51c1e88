"""What Jacobians show by themselves: sizes and ranks, the norm over depth, and how linear the path through them is."""

import math
from typing import Literal, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from lit_layers.functional._checks import finite_matrices, first_index, wide_matrices

Undefined = Literal["raise", "nan"]


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
    """Leading `top` singular values per block (all for None), and the least-squares line of 1 / s_1 over depth.

    The line is fitted over the block numbers `fit_from`..L, counted from 1; `r_squared` is 1 where 1 / s_1 is linear in
    depth. Rotations leave all of it alone.

    Source: Aubry et al., the linear growth of the inverse top singular value; their code fits from block 10.

    Raises:
        ValueError: fewer than three blocks to fit, `top` above dim, s_1 = 0, 1 / s_1 constant over depth (the slope is
            then 0 and r_squared undefined).
    """
    jacobians, broken = finite_matrices(wide_matrices(jacobians), undefined)
    dim = jacobians.shape[-1]
    if top is not None and not 1 <= top <= dim:
        raise ValueError(f"expected top between 1 and the dimension {dim}, got {top}")
    values = torch.linalg.svdvals(jacobians).masked_fill(broken[..., None], math.nan)
    return JacobianSpectrum(values[..., :top], *inverse_norm_line(values[..., 0], fit_from, undefined=undefined))


def inverse_norm_line(
    largest: Float[Tensor, "*n blocks"], fit_from: int = 1, *, undefined: Undefined = "raise"
) -> tuple[Tensor, Tensor, Tensor]:
    """Slope, intercept and r_squared of 1 / s_1 over the block numbers `fit_from`..L."""
    blocks = largest.shape[-1]
    if fit_from < 1 or blocks - fit_from + 1 < 3:
        raise ValueError(f"expected at least three blocks to fit a line to, got blocks {fit_from} to {blocks}")
    if undefined == "raise" and bool((largest == 0).any()):
        raise ValueError(f"1 / s_1 is undefined for a zero Jacobian, got one at index {first_index(largest == 0)}")
    largest = largest[..., fit_from - 1 :].double()
    inverse = 1 / largest.masked_fill(largest == 0, math.nan)
    number = torch.arange(fit_from, blocks + 1, dtype=inverse.dtype, device=inverse.device)
    offset = number - number.mean()
    mean = inverse.mean(-1)
    slope = (inverse * offset).sum(-1) / offset.square().sum()
    deviation = inverse - mean[..., None]
    total = deviation.square().sum(-1)
    # rounding alone leaves a deviation of some 1e-16 of the mean
    constant = total <= len(number) * (1e-15 * mean.abs()) ** 2
    if undefined == "raise" and bool(constant.any()):
        raise ValueError(
            f"r_squared is undefined where 1 / s_1 is constant over depth, as at index {first_index(constant)}"
        )
    residual = (deviation - slope[..., None] * offset).square().sum(-1)
    r_squared = (1 - residual / total).masked_fill(constant, math.nan)
    return slope.masked_fill(constant, 0), mean - slope * number.mean(), r_squared


def linearized_rollout(
    jacobians: Float[Tensor, "layers *n dim dim"],
    states: Float[Tensor, "layers_and_input *n dim"],
    *,
    skip_last: bool = False,
    undefined: Undefined = "raise",
) -> Float[Tensor, "layers *n"]:
    """Cosine between a token's state and its input carried by the linearized blocks alone, per layer, in [-1, 1].

    `y[l] = (I + J[l]) y[l-1]` from `y[0] = x[0]`, with the token's own Jacobians: no cross-token terms and no offsets,
    so it scores linearity and does not approximate the model. Exactly 1 where every branch is linear and token-wise.
    `skip_last` leaves out the last block's factor, as published code does. The headline is the last entry. In float64.

    Raises:
        ValueError: a zero or non-finite vector, naming its layer.
    """
    blocks = jacobians.shape[0]
    if states.shape[0] != blocks + 1 or states.shape[1:] != jacobians.shape[1:-1]:
        raise ValueError(
            f"expected states of shape {(blocks + 1, *jacobians.shape[1:-1])} for these Jacobians, got "
            f"{tuple(states.shape)}"
        )
    states = states.double()
    carried = states[0]
    cosines = []
    for block in range(blocks):
        if not (skip_last and block == blocks - 1):
            carried = carried + (jacobians[block].double() @ carried[..., None])[..., 0]
        state = states[block + 1]
        norms = torch.linalg.vector_norm(carried, dim=-1) * torch.linalg.vector_norm(state, dim=-1)
        cosine = (carried * state).sum(-1) / norms.masked_fill(norms == 0, math.nan)
        cosine = torch.where(cosine.isfinite(), cosine.clamp(-1, 1), math.nan)
        if undefined == "raise" and bool(cosine.isnan().any()):
            raise ValueError(f"the rollout is undefined at layer {block + 1}: a vector there is zero or not finite")
        cosines.append(cosine)
    return torch.stack(cosines)


def cross_token_influence(
    jacobians: Float[Tensor, "*n dim dim"], *, eps: float = 0.0, undefined: Undefined = "raise"
) -> Influence:
    """Size and rank of Jacobians between tokens: Frobenius and spectral norm, participation ratio, entropy rank.

    `1 <= participation_ratio <= entropy_rank <= dim`, both over the singular values themselves: a rank-r partial
    isometry gives r for both. Rotations change nothing, scaling only the norms. `eps`, as published code has it, is
    added to both denominators, and shares up to it are dropped.

    Raises:
        ValueError: a zero matrix, whose ranks are undefined, or a non-finite one.
    """
    jacobians, broken = finite_matrices(wide_matrices(jacobians), undefined)
    values = torch.linalg.svdvals(jacobians).double()
    zero = values[..., 0] == 0
    if undefined == "raise" and bool(zero.any()):
        raise ValueError(f"the rank of a zero Jacobian is undefined, got one at index {first_index(zero)}")
    total, squares = values.sum(-1), values.square().sum(-1)
    shares = values / (total + eps)[..., None]
    kept = torch.where(shares > eps, shares, 1.0)  # 1 log 1 = 0
    ranks = total**2 / (squares + eps), torch.exp(-(kept * kept.log()).sum(-1))
    ranks = [rank.masked_fill(zero | broken, math.nan) for rank in ranks]
    return Influence(squares.sqrt().masked_fill(broken, math.nan), values[..., 0].masked_fill(broken, math.nan), *ranks)
