"""What a block attends to, and what each of its heads writes, read off the block itself.

A block runs until it has attended; the weights follow from its own queries, keys and mask, whatever attention it is
made with. So a map costs the query, key and value projections of a block and no attention, feed-forward part or graph.
"""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from lit_layers.functional.jacobian.attention import (
    FUSED,
    MATMULS,
    Attention,
    Done,
    expand_heads,
    record_attention,
)
from lit_layers.functional.jacobian.block_call import Unsupported

Block = Callable[[Tensor], Tensor]  # (batch, tokens, dim) to the same


@dataclass(frozen=True)
class Heads:
    """The heads of a block on some prompts."""

    attention: Attention
    call: Block
    hidden: Tensor  # (batch, tokens, dim): what the block was given

    @property
    def num_heads(self) -> int:
        return self.attention.query.shape[1]

    def maps(self) -> Tensor:
        """The attention weights (batch, heads, queries, keys): each row of a real query sums to 1."""
        return torch.stack([self.attention.map_of(prompt) for prompt in range(len(self.hidden))])

    def written(self) -> Tensor:
        """What each head adds to a state that attends to one token alone: (batch, heads, tokens, dim).

        The token's value through the head's part of the output projection, without its bias and without the norm that
        some families put behind it.

        Raises:
            Unsupported: the output projection is not one linear map of the heads side by side.
        """
        weight = _output_weight(self.call, self.hidden, self.attention)  # (dim, heads x head_dim)
        value = expand_heads(self.attention.value, self.num_heads)
        return torch.einsum("bhtk,dhk->bhtd", value, weight.unflatten(1, (self.num_heads, -1)).to(value))


def read_heads(call: Block, hidden: Tensor) -> Heads:
    """The heads of a block that is given `hidden` (batch, tokens, dim).

    Raises:
        Unsupported: a block without attention of a known kind over the tokens it is given.
    """
    with torch.no_grad():
        attention = record_attention(call, hidden)
    if attention.query.shape[0] != len(hidden):
        raise Unsupported("its attention is not over the prompts it is given")
    return Heads(attention, call, hidden)


def _output_weight(call: Block, hidden: Tensor, attention: Attention) -> Tensor:
    watch = _Projection(attention)
    with torch.no_grad(), contextlib.suppress(Done), watch:
        call(hidden)
    if watch.weight is None:
        raise Unsupported("no output projection was found behind its attention")
    return watch.weight


class _Projection(TorchFunctionMode):
    """Watches a block for the first linear map behind its attention, and leaves it there."""

    def __init__(self, attention: Attention) -> None:
        super().__init__()
        self.matmuls = attention.matmuls
        self.products = 0
        self.attended: Tensor | None = None
        self.weight: Tensor | None = None

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self.attended is not None:
            if func is F.linear:
                self._take(args[0], args[1])
            elif func is torch.addmm:
                self._take(args[1], args[2].mT)
            elif func in MATMULS and args[1].ndim == 2:
                self._take(args[0], args[1].mT)
        output = func(*args, **kwargs)
        if func is FUSED:
            self.attended = output
        elif self.matmuls and func in MATMULS and args[0].ndim == 4 and args[1].ndim == 4:
            self.products += 1
            if self.products == self.matmuls[1]:
                self.attended = output
        return output

    def _take(self, given: Tensor, weight: Tensor) -> None:
        assert self.attended is not None
        side_by_side = self.attended.transpose(1, 2).flatten(2)  # (batch, tokens, heads x head_dim)
        if given.shape[-1] != side_by_side.shape[-1] or not torch.equal(
            given.reshape(side_by_side.shape), side_by_side
        ):
            raise Unsupported("its heads do not go into its output projection side by side")
        self.weight = weight
        raise Done
