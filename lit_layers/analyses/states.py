"""The hidden states that analyses measure: of which convention, in which precision."""

import copy
from typing import Literal

import torch
from torch import Tensor

from lit_layers.models.families import trunk_of
from lit_layers.models.view import Batch, LayeredModel

# "resid": every layer as it leaves its block. "hf": the last one after the final norm, as in `hidden_states` of
# transformers and in much published code.
States = Literal["resid", "hf"]


def layer_states(model: LayeredModel, batch: Batch, states: States) -> tuple[Tensor, Tensor]:
    """Hidden states (layers + 1, batch, tokens, dim) of one batch, and the mask (batch, tokens) of its real tokens."""
    trajectory = model.trajectory(batch)
    hidden = trajectory.hidden
    if states == "hf" and model.family.norm is not None:
        with torch.no_grad():
            hidden[-1] = trunk_of(model.model).get_submodule(model.family.norm)(hidden[-1])
    return hidden, trajectory.mask


def at_least_float32(model: LayeredModel) -> LayeredModel:
    """The model, or a float32 copy of one in half precision, whose rounding is as large as a late block's step."""
    if model.dtype not in (torch.float16, torch.bfloat16):
        return model
    return LayeredModel(copy.deepcopy(model.model).float())
