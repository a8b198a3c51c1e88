"""Null models: models of the same architecture with random weights, which show what the architecture alone gives."""

import copy
from typing import Literal

import torch
from torch import nn

from lit_layers.errors import InputError
from lit_layers.models.build import TIMM_OPTIONS, plain_model, untrained
from lit_layers.models.families import Network
from lit_layers.models.structure import family_of

Null = Literal["blocks", "all", "labels"]
SEED = 2**31 - 1  # unlike the usual seeds of trainings: with the same seed, a model at step 0 would be its own null


def refuse_unknown_constructor(model: nn.Module) -> None:
    """Refuse a network that cannot be built again with new weights.

    Raises:
        InputError: if the model is of neither transformers nor timm.
    """
    model = plain_model(model)
    if not hasattr(model, "config") and getattr(model, TIMM_OPTIONS, None) is None:
        raise InputError(f"null: new weights are for models of transformers and timm, got {type(model).__name__}")


def null_model(model: nn.Module, null: Null, *, seed: int = SEED) -> nn.Module:
    """Return the null model of a trained model, in evaluation mode; `model` does not change.

    The new weights are those of `untrained`: the library draws them as for a model before training.

    Args:
        model: a transformers or timm model.
        null: which weights are new. "blocks": those of the blocks, except norms. Embedding, head and all norms are
            copies of the trained ones. "all": all weights. "labels": none, as only the labels of probes are permuted.
        seed: seed of the new weights.

    Raises:
        InputError: if the model is of neither transformers nor timm, or a weight matrix of a block would stay the same.
    """
    model = plain_model(model)
    if null == "labels":
        return model
    refuse_unknown_constructor(model)
    fresh: Network = untrained(model, seed=seed)
    if null == "all":
        return fresh
    mixed: Network = copy.deepcopy(model).eval()
    with torch.no_grad():
        for block, new in zip(family_of(mixed).block_list(mixed), family_of(fresh).block_list(fresh), strict=True):
            for own, drawn in zip(block.modules(), new.modules(), strict=True):
                if "Norm" not in type(own).__name__:
                    _copy_parameters(own, drawn)
    return mixed


def _copy_parameters(own: nn.Module, drawn: nn.Module) -> None:
    """Copy the parameters that belong to a module itself, and check that random ones differ from the old ones."""
    for name, parameter in own.named_parameters(recurse=False):
        new = drawn.get_parameter(name)
        # Biases may be equal: a new model has zeros there, like a model before its first step.
        if parameter.numel() > 1 and new.min() < new.max() and torch.equal(parameter, new):
            raise InputError(
                f"null: {name} of a {type(own).__name__} is not random: its new weights equal the old ones"
            )
        parameter.copy_(new)
