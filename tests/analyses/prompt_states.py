"""Hidden states of single prompts without padding, caught by hooks: an independent look at what analyses measure."""

import numpy as np
import torch
from torch import Tensor, nn


def states_of_each_prompt(model: nn.Module, batches: list[dict[str, Tensor]], *, final_norm=False) -> list[np.ndarray]:
    """One array (layers + 1, real tokens, dim) for each prompt, which a GPT-2 model sees alone; in float64."""
    found = []
    for batch in batches:
        masks = batch.get("attention_mask", torch.ones_like(batch["input_ids"]))
        for ids, mask in zip(batch["input_ids"], masks, strict=True):
            found.append(_states(model, ids[mask.bool()][None], final_norm))
    return found


def _states(model: nn.Module, ids: Tensor, final_norm: bool) -> np.ndarray:
    caught = []
    blocks = model.transformer.h
    handles = [blocks[0].register_forward_pre_hook(lambda module, args: caught.append(args[0]))]
    for block in blocks:
        handles.append(block.register_forward_hook(lambda module, args, out: caught.append(first(out))))
    with torch.no_grad():
        model(input_ids=ids, use_cache=False)
        for handle in handles:
            handle.remove()
        if final_norm:
            caught[-1] = model.transformer.ln_f(caught[-1])
    return np.stack([state[0].double().numpy() for state in caught])


def first(output):
    return output[0] if isinstance(output, tuple) else output
