"""The hidden states that analyses look at: in which convention and precision, and of which prompts and tokens."""

import copy
from collections.abc import Iterable, Iterator
from typing import Literal

import torch
from torch import Tensor

from lit_layers.models.view import Batch, LayeredModel, Trajectory

# "resid": every layer as it leaves its block. "hf": the last one after the final norm, as in `hidden_states` of
# transformers and in much published code. "normed": every one after the final norm, as a model cut there would end.
States = Literal["resid", "hf", "normed"]


def first_rows(batches: Iterable[Batch], count: int) -> Iterator[Batch]:
    """Yield the batches up to that many rows."""
    for batch in batches:
        rows = min(count, len(next(iter(batch.values()))))
        yield {name: values[:rows] for name, values in batch.items()}
        count -= rows
        if not count:
            return


def final_norm(model: LayeredModel) -> torch.nn.Module | None:
    """Return the norm after the last block; None without one (BERT)."""
    return model.family.final_norm(model.model)


def convert_states(model: LayeredModel, states: States, layer: int, hidden: Tensor) -> Tensor:
    """Return the hidden states of a layer in a convention."""
    norm = final_norm(model)
    if states == "resid" or norm is None or (states == "hf" and layer < model.num_layers):
        return hidden
    with torch.no_grad():
        return norm(hidden)


def states_of_layers(seen: Trajectory, states: States) -> Iterator[Tensor]:
    """Yield the hidden states of layers 0 to L in a convention."""
    return (convert_states(seen.model, states, layer, hidden) for layer, hidden in enumerate(seen.hidden))


def at_least_float32(model: LayeredModel) -> LayeredModel:
    """Return the model, or a float32 copy of one in half precision, whose rounding is as large as a late block's step.

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


def real_tokens(batch: Batch) -> list[Tensor]:
    """Return the token ids of each text, (tokens,), without padding."""
    ids = batch["input_ids"]
    mask = batch.get("attention_mask", torch.ones_like(ids)).bool()
    return [row[real] for row, real in zip(ids, mask, strict=True)]


def special_tokens(model: LayeredModel) -> set[int]:
    """Return the special tokens that a text model's config names, such as its `bos_token_id`."""
    given = [value for name, value in vars(model.model.config).items() if name.endswith("_token_id")]
    ids = {token for value in given for token in (value if isinstance(value, list | tuple) else [value])}
    return ids - {None}


def drop_first_tokens(mask: Tensor, count: int) -> Tensor:
    """Return a mask (batch, tokens) without the first real tokens of each text."""
    return mask & (mask.cumsum(-1) > count)


def evenly_spread(first: int, last: int, count: int) -> list[int]:
    """Return at most `count` whole numbers from `first` to `last`, including both; one number is `last`."""
    if count == 1 or first == last:
        return [last]
    count = min(count, last - first + 1)
    return [first + round(index * (last - first) / (count - 1)) for index in range(count)]
