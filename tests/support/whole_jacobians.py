"""Jacobians between all tokens of a running model, by plain differentiation, row by row."""

import numpy as np
import torch
from torch import Tensor, nn


def whole_jacobians(model: nn.Module, blocks: nn.ModuleList, inputs: dict[str, Tensor]) -> tuple[np.ndarray, list]:
    """d f_l(X)[t] / d X[s] of one prompt as (layers, t, s, dim, dim), and its states, layer by layer."""
    states: list[Tensor] = []
    hooks = [blocks[0].register_forward_pre_hook(lambda module, args: states.append(args[0]))]
    hooks += [block.register_forward_hook(lambda module, args, output: states.append(output)) for block in blocks]
    model(**inputs) if "pixel_values" not in inputs else model(inputs["pixel_values"])
    for hook in hooks:
        hook.remove()
    tokens, dim = states[0].shape[1:]
    found = np.zeros((len(blocks), tokens, tokens, dim, dim))
    for layer in range(len(blocks)):
        for out in range(tokens):
            for row in range(dim):
                (grad,) = torch.autograd.grad(states[layer + 1][0, out, row], states[layer], retain_graph=True)
                found[layer, out, :, row] = grad[0].numpy()
            found[layer, out, out] -= np.eye(dim)
    return found, states
