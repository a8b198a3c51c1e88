"""A block with the other arguments of one call, and the same call for single tokens."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

_CACHES = ("past_key_values", "past_key_value", "layer_past")
SHARED = ("position_bias",)  # MPT's ALiBi: a row for each head, and as many prompts may come


class Unsupported(Exception):
    """The block does something that the one-token route does not know; the message says what."""


class Call(NamedTuple):
    """A block with the other arguments of one call."""

    module: nn.Module
    args: tuple
    kwargs: dict[str, Any]

    def __call__(self, hidden: Tensor) -> Tensor:
        # `forward`: hooks and gradient checkpointing are not part of the function
        output = self.module.forward(hidden, *self.args, **self.kwargs)
        return output[0] if isinstance(output, tuple | list) else output

    def at(self, prompts: Tensor, places: Tensor | None, shape: tuple[int, ...]) -> "Call":
        """The call for single tokens as prompts of their own, or (`places` None) for a choice of whole prompts."""
        kwargs = {name: None if name in _CACHES else value for name, value in self.kwargs.items()}
        return Call(self.module, _cut(self.args, prompts, places, shape), _cut(kwargs, prompts, places, shape))


def as_call(block: Callable[[Tensor], Tensor]) -> Call | None:
    """The module behind a block: itself, or with the arguments that a block of a trajectory carries."""
    if isinstance(block, nn.Module):
        return Call(block, (), {})
    module, args, kwargs = (getattr(block, name, None) for name in ("module", "args", "kwargs"))
    if isinstance(module, nn.Module) and isinstance(args, tuple) and isinstance(kwargs, dict):
        return Call(module, args, kwargs)
    return None


@contextlib.contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Dropout and the like are off inside; afterwards every submodule is in the mode it was in."""
    training = [part for part in module.modules() if part.training]
    for part in training:
        part.training = False
    try:
        yield
    finally:
        for part in training:
            part.training = True


def _cut(value: Any, prompts: Tensor, places: Tensor | None, shape: tuple[int, ...]) -> Any:
    """Arguments for single tokens: every tensor with a row per prompt or per token keeps the rows of these."""
    if isinstance(value, tuple | list):
        return type(value)(_cut(item, prompts, places, shape) for item in value)
    if isinstance(value, dict):
        return {name: item if name in SHARED else _cut(item, prompts, places, shape) for name, item in value.items()}
    if not isinstance(value, Tensor) or value.ndim < 2 or value.shape[0] not in (1, shape[0]):
        return value
    rows = prompts if value.shape[0] == shape[0] else torch.zeros_like(prompts)
    if places is not None and shape[1] > 1:
        if value.ndim == 4 and value.shape[2] == shape[1]:  # a mask: the row of each token's query
            return value[rows, :, places][:, :, None]
        if value.ndim in (2, 3) and value.shape[1] == shape[1]:  # positions, rotary tables
            return value[rows, places][:, None]
    return value[rows] if value.shape[0] == shape[0] else value
