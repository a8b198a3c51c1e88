"""A block with the other arguments of one call, and the same call for single tokens."""

import contextlib
from collections.abc import Callable, Generator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

_CACHES = ("past_key_values", "past_key_value", "layer_past")
SHARED = ("position_bias",)  # MPT's ALiBi: a row for each head, and as many prompts may come


class Unsupported(Exception):
    """The block does something that the one-token route does not know; the message says what."""


class Alignment(NamedTuple):
    """How a batch with padding before its texts is moved to have it behind, and what it gives moved back.

    Places that are padding hold a copy: of the text's first token before it, of its last one behind it.
    """

    places: Tensor  # (batch, tokens): where each token stands in the batch as it was given
    ranks: Tensor  # (batch, tokens): the number of each given place among the text's real tokens
    mask: Tensor  # (batch, tokens), of the moved batch
    given_mask: Tensor  # (batch, tokens), of the batch as it was given

    @classmethod
    def of(cls, mask: Tensor) -> "Alignment | None":
        """Of a mask (batch, tokens); None where all padding is behind the texts already."""
        real = mask.bool()
        moved = real.sort(dim=-1, descending=True, stable=True)
        if bool((moved.values == real).all()):
            return None
        first = moved.indices[:, :1].expand_as(moved.indices)
        ranks = (real.long().cumsum(-1) - 1).clamp(min=0)
        return cls(torch.where(moved.values, moved.indices, first), ranks, moved.values, real)

    def moved(self, values: Tensor) -> Tensor:
        """The batch (batch, tokens, *n) with its padding behind."""
        return _along_tokens(values, self.places)

    def given_back(self, values: Tensor) -> Tensor:
        """What was found of the moved batch (batch, tokens, *n), as the batch was given."""
        return _along_tokens(values, self.ranks)

    def of_prompt(self, index: int) -> "Alignment":
        """Of one prompt of the batch."""
        return Alignment(*(part[index : index + 1] for part in self))


class Call(NamedTuple):
    """A block with the other arguments of one call."""

    module: nn.Module
    args: tuple[Any, ...]
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
def evaluating(module: nn.Module) -> Generator[None, None, None]:
    """Dropout and the like are off inside; afterwards every submodule is in the mode it was in."""
    training = [part for part in module.modules() if part.training]
    for part in training:
        part.training = False
    try:
        yield
    finally:
        for part in training:
            part.training = True


def _along_tokens(values: Tensor, places: Tensor) -> Tensor:
    return values[torch.arange(len(places), device=places.device)[:, None], places]


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
