"""Hidden states of single prompts without padding, captured by hooks as a reference for analyses."""

import numpy as np
import torch
from torch import Tensor, nn

from lit_layers.models.contributions import contributions
from lit_layers.models.view import LayeredModel
from tests.support.tiny_models import tiny_batch

BATCHES = [
    tiny_batch("gpt2", batch=3, tokens=9, padding="left", seed=1),
    tiny_batch("gpt2", batch=2, tokens=7, seed=2),
    tiny_batch("gpt2", batch=3, tokens=10, padding="right", seed=3),
]


def prompts_of(batches: list[dict[str, Tensor]]) -> list[Tensor]:
    """Return the token ids of each prompt without padding."""
    found = []
    for batch in batches:
        masks = batch.get("attention_mask", torch.ones_like(batch["input_ids"]))
        found += [ids[mask.bool()] for ids, mask in zip(batch["input_ids"], masks, strict=True)]
    return found


def states_of_each_prompt(model: nn.Module, batches: list[dict[str, Tensor]], *, final_norm=False) -> list[np.ndarray]:
    """Return a float64 array (layers + 1, real tokens, dim) per prompt, from separate calls of a GPT-2 model."""
    return [_states(model, ids[None], final_norm) for ids in prompts_of(batches)]


def _states(model: nn.Module, ids: Tensor, final_norm: bool) -> np.ndarray:
    captured = []
    blocks = model.transformer.h
    handles = [blocks[0].register_forward_pre_hook(lambda module, args: captured.append(args[0]))]
    for block in blocks:
        handles.append(block.register_forward_hook(lambda module, args, out: captured.append(first(out))))
    with torch.no_grad():
        model(input_ids=ids, use_cache=False)
        for handle in handles:
            handle.remove()
        if final_norm:
            captured[-1] = model.transformer.ln_f(captured[-1])
    return np.stack([state[0].double().numpy() for state in captured])


def first(output):
    return output[0] if isinstance(output, tuple) else output


def attention_of_each_prompt(model: nn.Module, batches: list[dict[str, Tensor]]) -> list[np.ndarray]:
    """Return what attention adds to the states of each prompt without padding, an array (layers, tokens, dim)."""
    seen = [LayeredModel(model).trajectory({"input_ids": ids[None]}) for ids in prompts_of(batches)]
    return [np.concatenate([contributions(each, n + 1)[0] for n in range(each.num_layers)]) for each in seen]
