"""Jacobians of the last layer in every earlier one, through all blocks between: what a Jacobian lens is made of."""

from collections.abc import Callable, Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from lit_layers.functional.jacobian.block_call import basis_rows, pull_back


def jacobians_to_last_layer(
    blocks: Sequence[Callable[[Tensor], Tensor]],
    hidden: Float[Tensor, "1 tokens dim"],
    places: Int[Tensor, "places"],
    *,
    chunk_size: int | None = None,
) -> Float[Tensor, "layers dim dim"]:
    """How the last layer's states move with those of layers 0..L-1 of one prompt: `J[l] @ h` carries h there.

    J[l] = 1/|V| sum over t in V and t' in V of d h_L[t'] / d h_l[t], V being `places`: effects on all of them are
    summed for each place that is moved, and averaged over these. In a causal model those with t' < t are 0, so that
    this is the estimator of the Jacobian lens. Exact: by reverse mode, all `dim` directions, in the states' own dtype.
    A linear model h_L = A h_l at each token gives A; blocks that add nothing give the identity.

    Cost: `dim` backward passes through the blocks in the activations alone, each of about one forward pass, and
    `chunk_size` rows of states of every layer held at a time.

    Source: Gurnee et al., Verbalizable Representations Form a Global Workspace in Language Models, Transformer Circuits
    Thread 2026, and its reference implementation. That leaves layer 0, the embedding, and L, where it is the identity,
    out.

    Args:
        blocks: 1..L, each from states (1, tokens, dim) to states, differentiable.
        hidden: the input of the first of them.

    Raises:
        ValueError: no places, places outside the prompt or twice, states of more than one prompt.
    """
    if hidden.ndim != 3 or len(hidden) != 1:
        raise ValueError(f"expected the states of one prompt, (1, tokens, dim), got shape {tuple(hidden.shape)}")
    _, tokens, dim = hidden.shape
    if not len(places) or len(places.unique()) < len(places) or places.min() < 0 or places.max() >= tokens:
        raise ValueError(f"expected different places of 0..{tokens - 1}, at least one, got {places.tolist()}")
    chunk = chunk_size or max(1, min(dim, 8192 // tokens))
    result = hidden.new_empty(len(blocks), dim, dim)
    with torch.enable_grad(), sdpa_kernel(SDPBackend.MATH):  # the fused kernels have no rule for vmap
        states = [hidden.detach().clone().requires_grad_()]
        for block in blocks:
            states.append(block(states[-1]))
        moved = states[-1][:, places].sum(1)  # (1, dim)
        if not moved.requires_grad:
            return result.zero_()
        for start in range(0, dim, chunk):
            rows = slice(start, min(start + chunk, dim))
            for layer, grads in enumerate(pull_back([moved], states[:-1], [basis_rows(moved, rows)])):
                result[layer, rows] = grads[:, 0, places].mean(1)  # grads (rows, 1, tokens, dim)
    return result
