"""Jacobians between all tokens of a running model by plain differentiation, and their coupling."""

import copy
from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor, nn


def whole_jacobians(
    model: nn.Module,
    blocks: nn.ModuleList,
    inputs: dict[str, Tensor],
    *,
    outputs: Iterable[int] | None = None,
    final_norm: nn.Module | None = None,
) -> tuple[np.ndarray, list[Tensor]]:
    """Return d f_l(X)[t] / d X[s] of one prompt as (layers, t, s, dim, dim), and its states by layer.

    If `outputs` is given, only these tokens t are differentiated.
    """
    states: list[Tensor] = []
    hooks = [blocks[0].register_forward_pre_hook(lambda module, args: states.append(args[0]))]
    hooks += [block.register_forward_hook(lambda module, args, output: states.append(output)) for block in blocks]
    model(**inputs) if "pixel_values" not in inputs else model(inputs["pixel_values"])
    for hook in hooks:
        hook.remove()
    if final_norm is not None:
        states[-1] = final_norm(states[-1])
    tokens, dim = states[0].shape[1:]
    found = np.zeros((len(blocks), tokens, tokens, dim, dim))
    for layer in range(len(blocks)):
        for out in range(tokens) if outputs is None else outputs:
            for row in range(dim):
                (grad,) = torch.autograd.grad(states[layer + 1][0, out, row], states[layer], retain_graph=True)
                found[layer, out, :, row] = grad[0].numpy()
            found[layer, out, out] -= np.eye(dim)
    return found, states


def coupling_by_loops(first: np.ndarray, second: np.ndarray, k: int, *, absolute: bool = False) -> tuple[float, float]:
    """Return the coupling of two Jacobians (dim, dim) by its definition, and the coupling of random bases."""
    u, _, vt = np.linalg.svd(second)
    compressed = u[:, :k].T @ first @ vt[:k].T
    spectrum = np.linalg.svd(first, compute_uv=False)
    norm = np.linalg.norm(spectrum[:k])
    compressed = np.abs(compressed) if absolute else compressed
    square = norm**2 + (k / len(first)) ** 2 * (spectrum**2).sum()
    if absolute:
        square -= 2 * np.sqrt(2 / np.pi) * np.linalg.norm(spectrum) * spectrum[:k].sum() / len(first)
    return 1 - np.linalg.norm(compressed - np.diag(spectrum[:k])) / norm, 1 - np.sqrt(square) / norm


def copy_without_block_2(model: nn.Module) -> nn.Module:
    """Return a copy of a GPT-2 whose second block adds nothing."""
    model = copy.deepcopy(model)
    for projection in (model.transformer.h[1].attn.c_proj, model.transformer.h[1].mlp.c_proj):
        torch.nn.init.zeros_(projection.weight)
    return model
