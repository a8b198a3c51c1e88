"""A view of a model in which blocks multiply in bfloat16; the model itself is not changed."""

import copy
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from lit_layers.models.families import Network
from lit_layers.models.view import LayeredModel

MATRICES = ("Linear", "Conv1D", "Conv1d", "Conv2d")  # kinds whose weights autocast rounds whenever they are used


class BFloat16View(LayeredModel):
    """The layered view of a copy of a model, in whose blocks products of matrices and attention are of bfloat16.

    It is what torch's autocast makes of the blocks, and of them alone: norms, what blocks add to a state, the states
    that they hand on, embeddings, final norm and head are in float32. Weights of matrices are rounded once, not
    whenever they are used, and take half of their room besides; all others are those of the model, which nothing is
    written to. The copy's memory is free when the view is.
    """

    def __init__(self, exact: LayeredModel) -> None:
        super().__init__(_copy(exact.model))
        self.exact = exact
        for block in dict.fromkeys(self.blocks):
            for module in block.modules():
                _round_(module)
            block.forward = _in_bfloat16(block.forward, exact.device.type)

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32  # of the states, whatever the first matrix is in

    @property
    def precision(self) -> str:
        return "bfloat16"


def _copy(model: Network) -> Network:
    """The same tensors in modules of their own; of a float64 model in float32."""
    tensors: dict[int, Any] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        wide = tensor.dtype == torch.float64
        narrow = tensor.detach().float() if wide else tensor
        tensors[id(tensor)] = nn.Parameter(narrow, False) if wide and isinstance(tensor, nn.Parameter) else narrow
    return copy.deepcopy(model, tensors)


def _round_(module: nn.Module) -> None:
    """The matrix alone: a bias may be added outside of what autocast rounds."""
    weight = module._parameters.get("weight")
    if weight is not None and any(kind.__name__ in MATRICES for kind in type(module).__mro__):
        module._parameters["weight"] = nn.Parameter(weight.detach().to(torch.bfloat16), False)


def _in_bfloat16(forward: Callable[..., Any], device_type: str) -> Callable[..., Any]:
    method = weakref.WeakMethod(forward)  # a block that holds itself would outlive the view

    def run(*args: Any, **kwargs: Any) -> Any:
        bound: Any = method()
        with torch.autocast(device_type, torch.bfloat16):
            return bound(*args, **kwargs)

    return run
