"""The blocks of a parallel group as one batched computation: their weights stacked, one call for all of them."""

import copy
import functools
from collections.abc import Callable, Sequence
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from lit_layers.errors import InputError
from lit_layers.models.block_calls import first
from lit_layers.models.shared_pass import HOOKS

_COUNTED = ("layer_idx", "layer_id")  # a block's own number, by which it finds its slot in a cache
_USES_ITS_NUMBER = "scale_attn_by_inverse_layer_idx"  # of GPT-2: the number is then part of the computation
_POSITIONAL = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")  # of scaled_dot_product_attention
_OWN = ("training", "_parameters", "_buffers", "_modules", "_non_persistent_buffers_set", *HOOKS)
Call = tuple[tuple, dict[str, Any]]  # what a block is called with besides its state


class StackedBlocks:
    """Blocks of one class and shape, run side by side on one state by `torch.vmap` over their stacked weights.

    The stack is a copy of the group's weights. Where no gradient is wanted it is made once and kept until a weight is
    written to; where one is, each run stacks anew, so that gradients reach the blocks themselves. Fused attention knows
    no batching by `vmap`, which would call it once for each block: here its members are laid side by side in the batch
    and attend in one call. Dropout draws for each block, but not the numbers that it would draw block by block.

    Raises:
        InputError: blocks that differ in anything but the values of their weights, or that another tool or a hook
            watches: run those one after the other.
    """

    def __init__(self, blocks: Sequence[nn.Module], numbers: Sequence[int], kind: str) -> None:
        self.blocks, self.numbers, self.kind = list(blocks), list(numbers), kind
        for number, block in zip(self.numbers, self.blocks, strict=True):
            if (why := _watched(block)) is not None:
                raise self._refusal(f"block {number} {why}")
            if (what := _difference(self.blocks[0], block)) is not None:
                raise self._refusal(f"blocks {self.numbers[0]} and {number} differ in {what}")
        self.skeleton = _skeleton(self.blocks[0])
        self.stack: dict[str, Tensor] = {}
        self.made_of: list[tuple[int, int]] = []

    def __call__(self, hidden: Tensor, calls: Sequence[Call], shared: Callable[[Any], Any] = lambda value: value):
        """Outputs (members, batch, tokens, dim) of the blocks, each called with `calls`, which must be alike.

        `shared` is what is passed in place of each argument.
        """
        args, kwargs = calls[0]
        for number, other in zip(self.numbers[1:], calls[1:], strict=True):
            if not _alike((args, kwargs), other):
                raise self._refusal(f"blocks {self.numbers[0]} and {number} are called with other masks or positions")
        self._follow_modes()
        args, kwargs = tuple(map(shared, args)), {name: shared(value) for name, value in kwargs.items()}

        def member(weights: dict[str, Tensor], hidden: Tensor) -> Tensor:
            return first(functional_call(self.skeleton, weights, (hidden, *args), kwargs))

        with _SideBySide():
            return torch.vmap(member, in_dims=(0, None), randomness="different")(self._weights(), hidden)

    def _weights(self) -> dict[str, Tensor]:
        rows = [_tensors(block) for block in self.blocks]
        if torch.is_grad_enabled() and any(tensor.requires_grad for row in rows for tensor in row.values()):
            return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
        made_of = [(id(t), 0 if t.is_inference() else t._version) for row in rows for t in row.values()]
        if made_of != self.made_of:
            with torch.inference_mode(False), torch.no_grad():
                self.stack = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
            self.made_of = made_of
        return self.stack

    def _follow_modes(self) -> None:
        modes = [part.training for part in self.blocks[0].modules()]
        for number, block in zip(self.numbers, self.blocks, strict=True):
            if [part.training for part in block.modules()] != modes:
                raise self._refusal(f"of blocks {self.numbers[0]} and {number} one is in training mode")
        for part, training in zip(self.skeleton.modules(), modes, strict=True):
            part.training = training

    def _refusal(self, why: str) -> InputError:
        group = ",".join(map(str, self.numbers))
        return InputError(f'parallel: ({group}) of {self.kind} cannot be stacked: {why}; use parallel="loop"')


class _SideBySide(TorchFunctionMode):
    """Fused attention inside `vmap` in one call."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is F.scaled_dot_product_attention:
            options: dict[str, Any] = dict(zip(_POSITIONAL, args, strict=False)) | (kwargs or {})
            tensors = [options.pop(name) for name in _POSITIONAL[:3]]
            return _Attention.apply(*tensors, options.pop("attn_mask", None), options)
        return func(*args, **(kwargs or {}))


class _Attention(torch.autograd.Function):
    """`scaled_dot_product_attention` that knows `vmap`; derivatives are those of what the rule calls."""

    @staticmethod
    def forward(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, options: dict[str, Any]) -> Tensor:
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, **options)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        pass

    @staticmethod
    def vmap(info: Any, in_dims: tuple, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, options: Any):
        size = info.batch_size
        query, key, value = (
            _folded(states, dim, size) for states, dim in zip((query, key, value), in_dims, strict=False)
        )
        if mask is not None and (in_dims[3] is not None or (mask.ndim == query.ndim and len(mask) > 1)):
            mask = _folded(mask, in_dims[3], size)  # any other mask is one for all
        with torch._C.DisableTorchFunction():
            output = _Attention.forward(query, key, value, mask, options)
        return output.unflatten(0, (size, -1)), 0


def _folded(tensor: Tensor, dim: int | None, size: int) -> Tensor:
    """The members' rows as rows of one batch: (members x batch, ...)."""
    members = tensor.expand(size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)
    return members.flatten(0, 1)


def _tensors(block: nn.Module) -> dict[str, Tensor]:
    return {**dict(block.named_parameters()), **dict(block.named_buffers())}


def _skeleton(block: nn.Module) -> nn.Module:
    """A copy of a block without memory for weights: these are put in for each call."""
    memo: dict[int, Any] = {}
    for parameter in block.parameters():
        memo[id(parameter)] = nn.Parameter(parameter.detach().to("meta"), requires_grad=False)
    for buffer in block.buffers():
        memo[id(buffer)] = buffer.detach().to("meta")
    copied = copy.deepcopy(block, memo)
    copied.__dict__.pop("forward", None)
    for part in copied.modules():
        if hasattr(part, "gradient_checkpointing"):
            part.__dict__["gradient_checkpointing"] = (
                False  # as `forward` itself, which is what runs one after the other
            )
    return copied


def _watched(block: nn.Module) -> str | None:
    if "forward" in block.__dict__:
        return "has a forward of another tool"
    for name, part in block.named_modules():
        if any(getattr(part, kind) for kind in HOOKS):
            return f"has a hook{f' on {name}' if name else ''}"
    return None


def _difference(one: nn.Module, other: nn.Module) -> str | None:
    """What two blocks differ in besides the values of their weights and their numbers; None: in nothing."""
    parts, others = dict(one.named_modules()), dict(other.named_modules())
    if type(one) is not type(other) or parts.keys() != others.keys():
        return "their classes or parts"
    for name, part in parts.items():
        path = f"{name}." if name else ""
        if type(part) is not type(others[name]):
            return f"the class of {name}"
        mine, theirs = _attributes(part), _attributes(others[name])
        for key in mine.keys() | theirs.keys():
            if key in _COUNTED and not getattr(part, _USES_ITS_NUMBER, False):
                continue
            if key not in mine or key not in theirs or not _same(mine[key], theirs[key]):
                return path + key
    shapes, others_shapes = ({n: (t.shape, t.dtype, t.device) for n, t in _tensors(b).items()} for b in (one, other))
    if shapes != others_shapes:
        return "the shapes, precisions or devices of their weights"
    return None


def _attributes(part: nn.Module) -> dict[str, Any]:
    return {name: value for name, value in vars(part).items() if name not in _OWN}


def _same(one: Any, other: Any) -> bool:
    if one is other:
        return True
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return isinstance(one, Tensor) and isinstance(other, Tensor) and torch.equal(one, other)
    if isinstance(one, functools.partial) and isinstance(other, functools.partial):
        return (one.func, one.args, one.keywords) == (other.func, other.args, other.keywords)
    if isinstance(one, MethodType) and isinstance(other, MethodType) and isinstance(one.__self__, nn.Module):
        return one.__func__ is other.__func__  # of parts that are compared themselves
    return type(one) is type(other) and bool(one == other)


def _alike(one: Any, other: Any) -> bool:
    """Whether two blocks are called with the same things: one object, or equal values."""
    if isinstance(one, tuple | list) and isinstance(other, tuple | list):
        return len(one) == len(other) and all(map(_alike, one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_alike(one[name], other[name]) for name in one)
    if isinstance(one, Tensor) and isinstance(other, Tensor) and one is not other:
        return one.shape == other.shape and one.dtype == other.dtype and torch.equal(one, other)
    return _same(one, other)
