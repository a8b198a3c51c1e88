"""Call blocks with recorded arguments, replace their forwards, hook them, and detect what a call changes in a model."""

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
    """A block as a function from its input state to its output state, both (batch, tokens, dim).

    The block gets its other arguments (`args`, `kwargs`: masks, positions) from one recorded call.
    """

    module: nn.Module
    args: tuple
    kwargs: dict[str, Any]
    alignment: Alignment | None = None  # how padding was moved after the texts; None if it was not

    def __call__(self, hidden: Tensor) -> Tensor:
        if self.alignment is not None:
            return self.alignment.restore(self.aligned()(self.alignment.align(hidden)))
        with evaluating(self.module):
            return state_of(self.module(hidden, *self.args, **self.kwargs))

    def aligned(self) -> "BlockCall":
        """Return the call without `alignment`, for states in which padding has already been moved after the texts."""
        return replace(self, alignment=None)

    def rows(self, some: slice, batch_size: int) -> "BlockCall":
        """Return the call for the prompts `some` of the batch, with only their rows of the arguments."""
        alignment = None if self.alignment is None else self.alignment.select(some)
        args, kwargs = rows_of(self.args, some, batch_size), rows_of(self.kwargs, some, batch_size)
        return replace(self, args=args, kwargs=kwargs, alignment=alignment)


@contextmanager
def replaced(blocks: Sequence[nn.Module], forwards: Iterable[Callable[..., Any]]) -> Iterator[None]:
    """Inside the context, replace the `forward` of each block by the function at the same index in `forwards`."""
    before = [vars(block).get("forward") for block in blocks]
    try:
        for block, forward in zip(blocks, forwards, strict=True):
            block.forward = forward
        yield
    finally:
        for block, previous in zip(blocks, before, strict=True):
            if previous is None:
                vars(block).pop("forward", None)
            else:
                # Restore the `forward` that another tool had set, such as accelerate, which moves weights to devices.
                block.forward = previous


@contextmanager
def bypassed(blocks: Sequence[nn.Module], forwards: Iterable[Callable[..., Any]]) -> Iterator[None]:
    """Inside the context, replace the `forward` of each block and disable the hooks of the blocks.

    The new functions return states that were recorded in an earlier forward pass, after the hooks had run. The hooks
    must not change these states again.
    """
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
    """Return a function to replace a block's `forward`. It returns its input state, or the state `last` if given.

    The state is returned as a tensor if `num_values` is 0, otherwise in a tuple `(state, None, ...)` of that length.
    """

    def forward(*args: Any, **kwargs: Any) -> Any:
        state = split_state(args, kwargs)[0] if last is None else last
        return block_output(state, num_values)

    return forward


def block_output(state: Tensor, num_values: int) -> Any:
    """Return a state in the format of a block's output.

    This is the tuple `(state, None, ...)` of length `num_values`, or the state itself if `num_values` is 0.
    """
    return (state, *[None] * (num_values - 1)) if num_values else state


def num_values(output: Any) -> int:
    """Return the length of the tuple that a block returned; 0 if it returned a tensor."""
    return len(output) if isinstance(output, tuple | list) else 0


STATES = ("hidden_states", "x", "hidden", "inputs")  # names of the state argument in blocks that get it by keyword


def split_state(args: tuple, kwargs: dict[str, Any]) -> tuple[Tensor, tuple, dict[str, Any]]:
    """Split the arguments of a block call into the hidden states and the other arguments.

    Raises:
        StopIteration: if the block was called without hidden states.
    """
    if args:
        return args[0], args[1:], kwargs
    state = next(name for name in STATES if name in kwargs)
    return kwargs[state], (), {name: value for name, value in kwargs.items() if name != state}


@contextmanager
def clamped_masks(blocks: Iterable[nn.Module]) -> Iterator[None]:
    """Inside the context, clamp the additive float64 masks that the blocks receive at the minimum of float32.

    Some eager attention computes its softmax in float32, where the minimum of float64 becomes minus infinity. For a
    token that sees only padding, the softmax is then NaN, and the NaN spreads to other tokens.
    """

    def hook(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> Any:
        return tree_map(_clamped, (args, kwargs))

    with hooked([block.register_forward_pre_hook(hook, prepend=True, with_kwargs=True) for block in blocks]):
        yield


def _clamped(value: Any) -> Any:
    is_mask = isinstance(value, Tensor) and value.dtype == torch.float64 and value.ndim == 4
    return value.clamp(min=torch.finfo(torch.float32).min) if is_mask else value


def call_hooks(blocks: Iterable[nn.Module], note: Callable[[nn.Module, tuple, dict[str, Any], Any], None]) -> list:
    """Register hooks that call `note(module, args, kwargs, output)` after each block call; return their handles.

    `note` gets the arguments before any other hook changes them, and the output after all other hooks.
    """
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
    """Remove the hooks of these handles when the context ends, also after an error."""
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def now(device: torch.device) -> float:
    """Return the time in seconds after waiting for all pending work of a device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def state_of(output: Any) -> Tensor:
    """Return the hidden states in a block's output.

    The output is the states themselves, or a tuple with the states first, as in older versions of transformers.
    """
    return output[0] if isinstance(output, tuple | list) else output


def rows_of(value: Any, some: slice, batch_size: int) -> Any:
    """Return an argument of a block call, in which each tensor of `batch_size` rows is cut to the rows `some`.

    Arguments in `SHARED` keep all rows: their first dimension is not the batch, but may have the same size by chance.
    """
    if isinstance(value, Tensor):
        return value[some] if value.ndim and value.shape[0] == batch_size else value
    if isinstance(value, tuple | list):
        return type(value)(rows_of(item, some, batch_size) for item in value)
    if isinstance(value, dict):
        return {name: item if name in SHARED else rows_of(item, some, batch_size) for name, item in value.items()}
    return value


def mask_of(inputs: Mapping[str, Tensor], hidden: Tensor) -> Tensor:
    """Return the mask of real tokens (batch, tokens). It is True everywhere if `inputs` has no `attention_mask`."""
    mask = inputs.get("attention_mask")
    return hidden.new_ones(hidden.shape[:2], dtype=torch.bool) if mask is None else mask.bool()


def read_by_length(
    read: Callable[[dict[str, Tensor], Tensor], Tensor], mask: Tensor, columns: Mapping[str, Tensor], hidden: Tensor
) -> Tensor:
    """Call `read(columns, states)` once per text length, on all texts of that length without their padding.

    This is for heads that pool all tokens of a text, padding included. `columns` are the inputs by name, each (batch,
    tokens), and `hidden` the states (batch, tokens, dim) of the batch.

    Returns:
        The results, one row per text in the order of the batch.
    """
    lengths, texts, results = mask.sum(-1), [], []
    for length in lengths.unique().tolist():
        rows = (lengths == length).nonzero()[:, 0]
        states, *inputs = (each[rows][mask[rows]].unflatten(0, (-1, length)) for each in (hidden, *columns.values()))
        texts.append(rows)
        results.append(read(dict(zip(columns, inputs, strict=True)), states))
    return torch.cat(results)[torch.cat(texts).argsort()]


def stacked(states: list[Tensor]) -> Tensor:
    """Stack states like `torch.stack`, but replace each state in the list by an empty tensor once it is copied.

    This halves the peak memory, as the list and the stack are never complete at the same time.
    """
    dtype = functools.reduce(torch.promote_types, {state.dtype for state in states})
    whole = states[0].new_empty(len(states), *states[0].shape, dtype=dtype)
    for layer in range(len(states)):
        whole[layer], states[layer] = states[layer], whole[0, :0]
    return whole


# Detect what a call changes in a model: parameters, buffers and hooks.

HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


def fingerprints(model: nn.Module) -> dict[str, tuple]:
    """Return for each parameter and buffer a fingerprint, which changes if the tensor is written to or replaced.

    A fingerprint holds the id, the memory address and the version counter of autograd. For rotary frequencies
    (non-persistent 1-D buffers) it holds the values instead of the counter, because some models write the same values
    again at each call.
    """
    seen: set[int] = set()  # ids of the tensors so far, so that a tied tensor is listed only once
    prints: dict[str, tuple] = {}
    for module, path in _modules(model):
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is not None and tensor.is_meta:
                    # Compare only the shape of an offloaded tensor, because accelerate replaces it at each call.
                    prints[path + name] = "meta", tensor.shape
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
    """Return the ids of all hooks in a model, by the path of the module and the kind of hook."""
    return {path + kind: set(ids) for part, path in _modules(model) for kind in HOOKS if (ids := getattr(part, kind))}


def _modules(model: nn.Module) -> Iterable[tuple[nn.Module, str]]:
    """Return each module with the prefix of its parameters' names: its path and a dot, or "" for the model itself."""
    return ((module, f"{path}." if path else "") for path, module in model.named_modules())


def remove_new_hooks_(model: nn.Module, before: dict[str, set]) -> list[str]:
    """Remove the hooks that are not in `before`; return the paths of the modules that had them."""
    paths = []
    for module, path in _modules(model):
        for kind in HOOKS:
            hooks = getattr(module, kind)
            for key in set(hooks) - before.get(path + kind, set()):
                del hooks[key]
                paths.append(path.removesuffix(".") or type(model).__name__)
    return paths
