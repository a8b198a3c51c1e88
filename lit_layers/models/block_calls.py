"""How blocks are called: a block with the other arguments of one call, and what blocks take and give."""

import functools
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from torch.utils.hooks import RemovableHandle

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
            return self.alignment.restored(self.aligned()(self.alignment.moved(hidden)))
        with evaluating(self.module):
            return state_of(self.module(hidden, *self.args, **self.kwargs))

    def aligned(self) -> "BlockCall":
        """The call with states of the batch as the model was called with it."""
        return replace(self, alignment=None)

    def rows(self, some: slice, batch_size: int) -> "BlockCall":
        """The same call for some prompts: every tensor that has a row per prompt keeps their rows."""
        alignment = None if self.alignment is None else self.alignment.of_prompts(some)
        args, kwargs = rows_of(self.args, some, batch_size), rows_of(self.kwargs, some, batch_size)
        return replace(self, args=args, kwargs=kwargs, alignment=alignment)


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


@contextmanager
def bypassed(blocks: Sequence[nn.Module], forwards: Iterable[Callable[..., Any]]) -> Iterator[None]:
    """As `replaced`, without the blocks' hooks: a state that is handed on is already the one behind them."""
    hooks = ("_forward_pre_hooks", "_forward_hooks")
    saved = [(block, name, getattr(block, name)) for block in blocks for name in hooks]
    with replaced(blocks, forwards):
        for block, name, _ in saved:
            setattr(block, name, OrderedDict())
        try:
            yield
        finally:
            for block, name, before in saved:
                setattr(block, name, before)


def identity_forward(num_values: int, last: Tensor | None = None) -> Callable[..., Any]:
    """A block's forward that returns the state it is given, or this one in its stead: at the head of a tuple of so many
    values, or (0) by itself."""

    def forward(*args: Any, **kwargs: Any) -> Any:
        state = split_state(args, kwargs)[0] if last is None else last
        return block_output(state, num_values)

    return forward


def block_output(state: Tensor, num_values: int) -> Any:
    """A state as a block returns it that returns so many values in a tuple, or (0) the state alone."""
    return (state, *[None] * (num_values - 1)) if num_values else state


def num_values(output: Any) -> int:
    """How many values a block returns in a tuple; 0 where it returns the state alone."""
    return len(output) if isinstance(output, tuple | list) else 0


STATES = ("hidden_states", "x", "hidden", "inputs")  # what blocks call their state where it is passed by name


def split_state(args: tuple, kwargs: dict[str, Any]) -> tuple[Tensor, tuple, dict[str, Any]]:
    """The hidden states a block was called with, and its other arguments."""
    if args:
        return args[0], args[1:], kwargs
    state = next(name for name in STATES if name in kwargs)
    return kwargs[state], (), {name: value for name, value in kwargs.items() if name != state}


@contextmanager
def clamped_masks(blocks: Iterable[nn.Module]) -> Iterator[None]:
    """Inside, additive masks of float64 that blocks are called with are cut off where float32 ends.

    Some eager attention takes its softmax in float32, where less is minus infinity: a token that may see nothing but
    padding becomes NaN, and then all that meets it.
    """

    def hook(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> Any:
        return tree_map(_clamped, (args, kwargs))

    with hooked([block.register_forward_pre_hook(hook, prepend=True, with_kwargs=True) for block in blocks]):
        yield


def _clamped(value: Any) -> Any:
    is_mask = isinstance(value, Tensor) and value.dtype == torch.float64 and value.ndim == 4
    return value.clamp(min=torch.finfo(torch.float32).min) if is_mask else value


def call_hooks(blocks: Iterable[nn.Module], note: Callable[[nn.Module, tuple, dict[str, Any], Any], None]) -> list:
    """Return hooks by which `note` sees each call: the arguments before all other hooks, the output after them."""
    pending: list[tuple[tuple, dict[str, Any]]] = []

    def enter(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        pending.append((args, kwargs))

    def leave(module: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> None:
        note(module, *pending.pop(), output)

    return [
        handle
        for block in blocks
        for handle in (
            block.register_forward_pre_hook(enter, prepend=True, with_kwargs=True),
            block.register_forward_hook(leave, with_kwargs=True),
        )
    ]


@contextmanager
def hooked(handles: Iterable[RemovableHandle]) -> Iterator[None]:
    """Inside, the hooks of these handles act; afterwards they are gone, whatever happened."""
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def now(device: torch.device) -> float:
    """Seconds on the clock when a device has done all that it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def state_of(output: Any) -> Tensor:
    """The hidden states in what a block returns: a tensor, or (in older releases) a tuple that begins with it."""
    return output[0] if isinstance(output, tuple | list) else output


def rows_of(value: Any, some: slice, batch_size: int) -> Any:
    """`value` with some rows of every tensor in it whose first dimension is the batch."""
    if isinstance(value, Tensor):
        return value[some] if value.ndim and value.shape[0] == batch_size else value
    if isinstance(value, tuple | list):
        return type(value)(rows_of(item, some, batch_size) for item in value)
    if isinstance(value, dict):
        return {name: item if name in SHARED else rows_of(item, some, batch_size) for name, item in value.items()}
    return value


def mask_of(inputs: Mapping[str, Tensor], hidden: Tensor) -> Tensor:
    """Which tokens are real (batch, tokens)."""
    mask = inputs.get("attention_mask")
    return hidden.new_ones(hidden.shape[:2], dtype=torch.bool) if mask is None else mask.bool()


def read_by_length(
    read: Callable[[dict[str, Tensor], Tensor], Tensor], mask: Tensor, columns: Mapping[str, Tensor], hidden: Tensor
) -> Tensor:
    """What is read of each text's real tokens alone, of all texts of one length at once; in their order."""
    lengths, texts, results = mask.sum(-1), [], []
    for length in lengths.unique().tolist():
        rows = (lengths == length).nonzero()[:, 0]
        states, *inputs = (each[rows][mask[rows]].unflatten(0, (-1, length)) for each in (hidden, *columns.values()))
        texts.append(rows)
        results.append(read(dict(zip(columns, inputs, strict=True)), states))
    return torch.cat(results)[torch.cat(texts).argsort()]


def stacked(states: list[Tensor]) -> Tensor:
    """`torch.stack`, without holding both the list and the whole: each state is let go when it is copied."""
    dtype = functools.reduce(torch.promote_types, {state.dtype for state in states})
    whole = states[0].new_empty(len(states), *states[0].shape, dtype=dtype)
    for layer in range(len(states)):
        whole[layer], states[layer] = states[layer], whole[0, :0]
    return whole


# What tells that a model was written to, or hooked: of parameters, buffers and modules.

HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


def fingerprints(model: nn.Module) -> dict[str, tuple]:
    """For each parameter and buffer what changes when it is written to (version) or exchanged (identity, memory); of
    rotary frequencies, which some models write anew at each call, the values."""
    seen: set[int] = set()  # a tied one once
    prints: dict[str, tuple] = {}
    for module, path in _modules(model):
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is not None and tensor.is_meta:
                    prints[path + name] = "meta", tensor.shape  # accelerate exchanges it at each call
                elif tensor is not None and id(tensor) not in seen:
                    seen.add(id(tensor))
                    is_table = name in module._non_persistent_buffers_set and tensor.ndim == 1
                    prints[path + name] = id(tensor), tensor.data_ptr(), _version_of(tensor, is_table)
    return prints


def _version_of(tensor: Tensor, is_table: bool) -> int | bytes:
    if is_table:
        return tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()
    return 0 if tensor.is_inference() else tensor._version


def hook_ids(model: nn.Module) -> dict[str, set]:
    """Of the modules that bear hooks."""
    return {path + kind: set(of) for part, path in _modules(model) for kind in HOOKS if (of := getattr(part, kind))}


def _modules(model: nn.Module) -> Iterable[tuple[nn.Module, str]]:
    """Yield each module once with its path, which ends in a dot."""
    return ((module, f"{path}." if path else "") for path, module in model.named_modules())


def remove_new_hooks_(model: nn.Module, before: dict[str, set]) -> list[str]:
    """Take off the hooks that were not there before; the modules that bore them."""
    left = []
    for part, path in _modules(model):
        for kind in HOOKS:
            hooks = getattr(part, kind)
            for key in set(hooks) - before.get(path + kind, set()):
                del hooks[key]
                left.append(path.removesuffix(".") or type(model).__name__)
    return left
