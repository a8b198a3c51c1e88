"""Build a tiny distilled DeiT, which has two tokens before the patches and two heads, and read its states."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from lit_layers.models.build import vit
from lit_layers.models.families import Network

DIM, LAYERS, PREFIX, PATCHES, CLASSES = 32, 3, 2, 16, 7


def distilled(dtype: torch.dtype = torch.float64, **options) -> Network:
    """Return a tiny distilled DeiT with large weights and drop-path, in training mode.

    Large weights show non-linearities, as in `tests.support.tiny_models`. Analyses get the model in training mode.
    """
    size: dict[str, Any] = {
        "img_size": 16,
        "patch_size": 4,
        "embed_dim": DIM,
        "depth": LAYERS,
        "num_heads": 4,
        "num_classes": CLASSES,
    }
    model = vit("deit_tiny_distilled_patch16_224", **(size | {"drop_path_rate": 0.5} | options))
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        for parameter in model.parameters():
            parameter.mul_(8) if parameter.ndim > 1 else parameter.add_(0.3 * torch.randn_like(parameter))
    return model.to(dtype).train()


def states_of_each_image(model: Network, images: Tensor) -> list[np.ndarray]:
    """Return an array (layers + 1, tokens, dim) per image, each from its own pass without drop-path."""
    training = model.training
    model.eval()
    found = [_states(model, image[None].to(next(model.parameters()).dtype)) for image in images]
    model.train(training)
    return found


def _states(model: Network, image: Tensor) -> np.ndarray:
    caught: list[Tensor] = []
    handles = [model.blocks[0].register_forward_pre_hook(lambda module, args: caught.append(args[0]))]
    handles += [block.register_forward_hook(lambda module, args, out: caught.append(out)) for block in model.blocks]
    with torch.no_grad():
        model(image)
    for handle in handles:
        handle.remove()
    return torch.cat(caught).double().numpy()
