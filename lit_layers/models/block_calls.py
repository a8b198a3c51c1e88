"""How blocks are called: a block with the other arguments of one call, and what blocks take and give."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from lit_layers.functional.jacobian.block_call import SHARED, Alignment, evaluating


@dataclass(frozen=True, eq=False)
class BlockCall:
    """A block together with the other arguments of one call: hidden states to hidden states."""

    module: nn.Module
    args: tuple
    kwargs: dict[str, Any]
    alignment: Alignment | None = None  # of the batch with the arguments, where it was given otherwise

    def __call__(self, hidden: Tensor) -> Tensor:
        if self.alignment is not None:
            return self.alignment.given_back(self.aligned()(self.alignment.moved(hidden)))
        with evaluating(self.module):
            return first(self.module(hidden, *self.args, **self.kwargs))

    def aligned(self) -> "BlockCall":
        """The call with states of the batch as the model was called with it."""
        return replace(self, alignment=None)

    def cut(self, index: int, batch_size: int) -> "BlockCall":
        """The same call for one prompt: every tensor that has a row per prompt keeps that row."""
        alignment = None if self.alignment is None else self.alignment.of_prompt(index)
        return BlockCall(self.module, cut(self.args, index, batch_size), cut(self.kwargs, index, batch_size), alignment)


@contextmanager
def replaced(blocks: Sequence[nn.Module], forwards: Iterable[Callable[..., Any]]) -> Iterator[None]:
    """Inside, each of the blocks is called as the function in its place."""
    before = [vars(block).get("forward") for block in blocks]
    try:
        for block, forward in zip(blocks, forwards, strict=True):
            block.forward = forward
        yield
    finally:
        for block, previous in zip(blocks, before, strict=True):
            if previous is None:
                vars(block).pop("forward", None)
            else:  # another tool's, such as one that moves weights between devices
                block.forward = previous


def hand_on(num_values: int, last: Tensor | None = None) -> Callable[..., Any]:
    """A block's forward that returns the state it is given, or this one in its stead: at the head of a tuple of so many
    values, or (0) by itself."""

    def forward(*args: Any, **kwargs: Any) -> Any:
        state = split_arguments(args, kwargs)[0] if last is None else last
        return in_place_of(state, num_values)

    return forward


def in_place_of(state: Tensor, num_values: int) -> Any:
    """A state as a block returns it that returns so many values in a tuple, or (0) the state alone."""
    return (state, *[None] * (num_values - 1)) if num_values else state


def num_values(output: Any) -> int:
    """How many values a block returns in a tuple; 0 where it returns the state alone."""
    return len(output) if isinstance(output, tuple | list) else 0


STATES = ("hidden_states", "x", "hidden", "inputs")  # what blocks call their state where it is passed by name


def split_arguments(args: tuple, kwargs: dict[str, Any]) -> tuple[Tensor, tuple, dict[str, Any]]:
    """The hidden states a block was called with, and its other arguments."""
    if args:
        return args[0], args[1:], kwargs
    state = next(name for name in STATES if name in kwargs)
    return kwargs[state], (), {name: value for name, value in kwargs.items() if name != state}


def softened(value: Any, masks: dict[int, tuple[Tensor, Tensor]]) -> Any:
    """`value` with the additive masks of float64 in it cut off where float32 ends.

    Some eager attention takes its softmax in float32, where less is minus infinity: a token that may see nothing but
    padding becomes NaN, and then all that meets it. `masks` keeps what was cut, by identity.
    """
    if isinstance(value, tuple | list):
        return type(value)(softened(item, masks) for item in value)
    if isinstance(value, dict):
        return {name: softened(item, masks) for name, item in value.items()}
    least = torch.finfo(torch.float32).min
    if not isinstance(value, Tensor) or value.dtype != torch.float64 or value.ndim != 4:
        return value
    if id(value) not in masks:
        masks[id(value)] = value, value.clamp(min=least) if bool((value < least).any()) else value
    return masks[id(value)][1]


def is_cache(value: Any) -> bool:
    # By name: timm's blocks need no transformers.
    return any(base.__name__ == "Cache" for base in type(value).__mro__)


def first(output: Any) -> Tensor:
    """The hidden states in what a block returns: a tensor, or (in older releases) a tuple that begins with it."""
    return output[0] if isinstance(output, tuple | list) else output


def cut(value: Any, index: int, batch_size: int) -> Any:
    """`value` with row `index` of every tensor in it whose first dimension is the batch."""
    if isinstance(value, Tensor):
        return value[index : index + 1] if value.ndim and value.shape[0] == batch_size else value
    if isinstance(value, tuple | list):
        return type(value)(cut(item, index, batch_size) for item in value)
    if isinstance(value, dict):
        return {name: item if name in SHARED else cut(item, index, batch_size) for name, item in value.items()}
    return value
