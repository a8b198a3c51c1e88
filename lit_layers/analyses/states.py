"""The hidden states that analyses measure: of which convention, in which precision."""

import copy
from typing import Literal

import torch
from torch import Tensor

from lit_layers.models.families import trunk_of
from lit_layers.models.view import LayeredModel

# "resid": every layer as it leaves its block. "hf": the last one after the final norm, as in `hidden_states` of
# transformers and in much published code. "normed": every one after the final norm, as a model cut there would end.
States = Literal["resid", "hf", "normed"]
STATES: tuple[States, ...] = ("resid", "hf", "normed")


def final_norm(model: LayeredModel) -> torch.nn.Module | None:
    """The norm behind the last block; None where there is none (BERT)."""
    return None if model.family.norm is None else trunk_of(model.model).get_submodule(model.family.norm)


def in_convention(model: LayeredModel, states: States, layer: int, hidden: Tensor) -> Tensor:
    """The hidden states of a layer as the convention has them."""
    norm = final_norm(model)
    if states == "resid" or norm is None or (states == "hf" and layer < model.num_layers):
        return hidden
    with torch.no_grad():
        return norm(hidden)


def at_least_float32(model: LayeredModel) -> LayeredModel:
    """The model, or a float32 copy of one in half precision, whose rounding is as large as a late block's step.

    The copy is what loading the saved weights gives: what no checkpoint holds, such as rotary frequencies, is computed
    anew, as a cast has rounded it.
    """
    if model.dtype not in (torch.float16, torch.bfloat16):
        return model
    fresh = copy.deepcopy(model.model).float()
    for module in fresh.modules() if hasattr(fresh, "_init_weights") else ():
        if module._non_persistent_buffers_set:
            kept = [(parameter, parameter.detach().clone()) for parameter in module.parameters()]
            with torch.no_grad():
                fresh._init_weights(module)  # how from_pretrained gives buffers their values; and weights new ones
                for parameter, value in kept:
                    parameter.copy_(value)
    return LayeredModel(fresh)
