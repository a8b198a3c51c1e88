"""The paths of tokens through the layers, seen in the plane that spreads the last layer most."""

from typing import Literal, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from lit_layers.functional._checks import check_option, widened


class PrincipalPaths(NamedTuple):
    """Where tokens are in a plane at every layer; see `principal_paths`."""

    places: Float[Tensor, "layers tokens 2"]
    explained_variance: Float[Tensor, " 2"]  # share of the last layer's variance along each axis, in [0, 1]


def principal_paths(
    states: Float[Tensor, "layers tokens dim"], *, undefined: Literal["raise", "nan"] = "raise"
) -> PrincipalPaths:
    """The states of every layer in the plane of the last layer's first two principal components. In float64.

    Mean and axes are those of the last layer's tokens; each axis points where its largest loading by size is positive.
    Unchanged by a translation of all states, and by rotation but for the axes' signs; scaling scales the places, and
    the order of tokens only orders them. Earlier layers need not lie in the plane: their places are a shadow.

    Source: Aubry et al., arXiv 2407.07810, whose axes have no fixed sign.

    Raises:
        ValueError: fewer than 3 tokens or 2 dimensions; a state that is not finite, or tokens of the last layer that
            lie on a line, where there is no second axis: all NaN there with `undefined="nan"`.
    """
    check_option("undefined", undefined, "raise", "nan")
    states = widened("states", states)
    if states.ndim != 3 or not len(states) or states.shape[1] < 3 or states.shape[2] < 2:
        raise ValueError(
            "expected states (layers, tokens, dim) of at least 3 tokens and 2 dimensions, "
            f"got shape {tuple(states.shape)}"
        )
    if not states.isfinite().all():
        return _nowhere(states, "a state is not finite", undefined)
    last = states[-1]
    mean = last.mean(0)
    _, sizes, axes = torch.linalg.svd(last - mean, full_matrices=False)
    # What subtracting the mean leaves of equal states is rounding, as large as the states are.
    rounding = max(last.shape) * torch.finfo(states.dtype).eps * torch.linalg.matrix_norm(last)
    if sizes[1] <= rounding:
        return _nowhere(states, "the last layer's tokens lie on a line and have no second axis", undefined)
    axes = axes[:2]
    axes = axes * axes.gather(1, axes.abs().argmax(1, keepdim=True)).sign()
    return PrincipalPaths((states - mean) @ axes.T, sizes[:2].square() / sizes.square().sum())


def _nowhere(states: Tensor, reason: str, undefined: str) -> PrincipalPaths:
    if undefined == "raise":
        raise ValueError(f"principal paths are undefined: {reason}")
    return PrincipalPaths(states.new_full((*states.shape[:2], 2), torch.nan), states.new_full((2,), torch.nan))
