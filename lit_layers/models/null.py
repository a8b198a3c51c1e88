"""Null models: copies of a trained model with new random weights.

Metrics have some value on them although nothing was learned. This value, the null, is a baseline for a curve over
training. A third kind of null needs no new weights: the values of probes that are fitted to permuted labels.
"""

import copy
from typing import Literal

import torch
from torch import nn

from lit_layers.errors import InputError
from lit_layers.models.build import TIMM_OPTIONS, plain_model, untrained
from lit_layers.models.families import Network
from lit_layers.models.structure import family_of

Null = Literal["blocks", "all", "labels"]
SEED = 2**31 - 1  # no usual seed of a training, because with the training's seed the model at step 0 is the null


def refuse_unknown_constructor(model: nn.Module) -> None:
    """Refuse a network that cannot be built again with new weights.

    Raises:
        InputError: if the model comes from neither transformers nor timm.
    """
    model = plain_model(model)
    if not hasattr(type(model), "_from_config") and getattr(model, TIMM_OPTIONS, None) is None:
        raise InputError(f"null: new weights are for models of transformers and timm, got {type(model).__name__}")


def null_model(model: nn.Module, null: Null, *, seed: int = SEED) -> nn.Module:
    """Return the null model of a trained model, in evaluation mode; `model` does not change.

    `untrained` draws the new weights, as transformers or timm does before training.

    Args:
        model: a transformers or timm model.
        null: which weights are new. "blocks": those of the blocks, except norms. Embedding, head and all norms are
            copies of the trained ones. "all": all weights. "labels": none; `model` itself is returned, because this
            null only permutes the labels of probes.
        seed: seed of the new weights.

    Raises:
        InputError: if the model comes from neither transformers nor timm, or a weight of a block would stay the same.
    """
    model = plain_model(model)
    if null == "labels":
        return model
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
    """Copy a module's own parameters, not those of submodules, and check that random ones differ from the old ones."""
    for name, parameter in own.named_parameters(recurse=False):
        new = drawn.get_parameter(name)
        # Constant parameters may be equal: new biases are 0, and so are those of a model before its first step.
        if parameter.numel() > 1 and new.min() < new.max() and torch.equal(parameter, new):
            raise InputError(
                f"null: {name} of a {type(own).__name__} is not random: its new weights equal the old ones"
            )
        parameter.copy_(new)
