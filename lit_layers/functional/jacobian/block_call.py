"""A block in one call, the same call for single tokens, and its Jacobians by reverse mode, whatever it does inside."""

import contextlib
import warnings
from collections.abc import Callable, Generator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

# Of tuples, as older releases have them; one of transformers is known by its class.
_CACHES = ("past_key_values", "past_key_value", "layer_past")
SHARED = ("position_bias",)  # MPT's ALiBi: a row for each head, and as many prompts may come


class Unsupported(Exception):
    """The block does something that the one-token route does not know; the message says what."""


class Alignment(NamedTuple):
    """How a batch with padding before its texts is moved to have it behind, and what it gives moved back.

    Places that are padding hold a copy: of the text's first token before it, of its last one after it.
    """

    places: Tensor  # (batch, tokens): where each token stands in the batch as it was given
    ranks: Tensor  # (batch, tokens): the number of each given place among the text's real tokens
    mask: Tensor  # (batch, tokens), of the moved batch
    given_mask: Tensor  # (batch, tokens), of the batch as it was given

    @classmethod
    def of(cls, mask: Tensor) -> "Alignment | None":
        """Return the layout of a mask (batch, tokens); None if all padding already comes after the texts."""
        real = mask.bool()
        moved = real.sort(dim=-1, descending=True, stable=True)
        if bool((moved.values == real).all()):
            return None
        first = moved.indices[:, :1].expand_as(moved.indices)
        ranks = (real.long().cumsum(-1) - 1).clamp(min=0)
        return cls(torch.where(moved.values, moved.indices, first), ranks, moved.values, real)

    def moved(self, values: Tensor) -> Tensor:
        """Return the batch (batch, tokens, *n) with its padding behind."""
        return _along_tokens(values, self.places)

    def restored(self, values: Tensor) -> Tensor:
        """Return a result of the moved batch (batch, tokens, *n) with each token back in its given position."""
        return _along_tokens(values, self.ranks)

    def of_prompts(self, some: slice) -> "Alignment":
        """Return the layout of some prompts of the batch."""
        return Alignment(*(part[some] for part in self))


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
        """Return the call for single tokens as prompts of their own, or for whole prompts if `places` is None."""
        args = tuple(None if is_cache(value) else value for value in self.args)
        kwargs = {name: None if name in _CACHES or is_cache(value) else value for name, value in self.kwargs.items()}
        return Call(self.module, _cut(args, prompts, places, shape), _cut(kwargs, prompts, places, shape))


def is_cache(value: Any) -> bool:
    # By name: timm's blocks need no transformers.
    return any(base.__name__ == "Cache" for base in type(value).__mro__)


def as_call(block: Callable[[Tensor], Tensor]) -> Call | None:
    """Return the module of a block: itself, or with the arguments that a block of a trajectory carries.

    None for a block with hooks of the user in it: what a hook does depends on all tokens of the call.
    """
    if has_hooks(getattr(block, "module", block)):
        return None
    if isinstance(block, nn.Module):
        return Call(block, (), {})
    if getattr(getattr(block, "layout", None), "axes", ()):  # its module holds states otherwise than it is called with
        return None
    module, args, kwargs = (getattr(block, name, None) for name in ("module", "args", "kwargs"))
    if isinstance(module, nn.Module) and isinstance(args, tuple) and isinstance(kwargs, dict):
        return Call(module, args, kwargs)
    return None


def has_hooks(module: Any) -> bool:
    """Whether a module or a part of it has a forward hook of the user: sharding and transformers add hooks as well."""
    return isinstance(module, nn.Module) and any(map(is_hooked, module.modules()))


def is_hooked(module: Any) -> bool:
    """Whether a module itself has a forward hook of the user."""
    hooks = (*module._forward_pre_hooks.values(), *module._forward_hooks.values())
    return any(not getattr(hook, "__module__", "").startswith(("torch.", "transformers.")) for hook in hooks)


@contextlib.contextmanager
def evaluating(module: nn.Module) -> Generator[None, None, None]:
    """Switch dropout and the like off inside, and put every submodule back into its mode afterwards."""
    # This is done at every block's call: `modules()` makes a generator for each level, and attributes are slow to set.
    parts, seen = [module], {module}
    for part in parts:
        for child in part._modules.values():  # pyright: ignore[reportPrivateUsage]
            if child is not None and child not in seen:
                seen.add(child)
                parts.append(child)
    modes = [(part, part.training) for part in parts]
    for part, training in modes:
        if training:
            part.training = False
    try:
        yield
    finally:
        for part, training in modes:
            if part.training != training:
                part.training = training


def _along_tokens(values: Tensor, places: Tensor) -> Tensor:
    return values[torch.arange(len(places), device=places.device)[:, None], places]


def _cut(value: Any, prompts: Tensor, places: Tensor | None, shape: tuple[int, ...]) -> Any:
    """Return arguments for single tokens: the rows of these in every tensor with a row per prompt or per token."""
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


# Vector-Jacobian products of many output coordinates at once, and with them Jacobians of any block.


def jacobians_by_reverse_mode(
    block: Callable[[Tensor], Tensor], hidden: Tensor, outs: Tensor, ins: Tensor, chunk_size: int | None = None
) -> Tensor:
    """Return d block(X)[out] / d X[in], (batch, out, in, dim, dim), for positions (batch, out) and (batch, out, in)."""
    batch, tokens, dim = hidden.shape
    # 8,192 rows a chunk keep the backward's buffers in cache: measured best at dim 128 and 768 on CPU
    chunk = chunk_size or max(1, min(dim, 8192 // (batch * tokens)))
    prompts = torch.arange(batch, device=hidden.device)
    result = hidden.new_empty(batch, outs.shape[1], ins.shape[2], dim, dim)
    # the fused attention kernels have no rule for vmap, the plain one has
    with torch.enable_grad(), sdpa_kernel(SDPBackend.MATH):
        leaf = hidden.detach().clone().requires_grad_()
        output = block(leaf)
        if not isinstance(output, Tensor) or output.shape != hidden.shape:
            got = tuple(output.shape) if isinstance(output, Tensor) else type(output).__name__
            raise ValueError(f"expected the block to return a tensor of shape {tuple(hidden.shape)}, got {got}")
        if not output.requires_grad:  # a constant block, or one that detaches its input
            return result.zero_()
        for item in range(outs.shape[1]):
            selected = output[prompts, outs[:, item]]  # (batch, dim)
            for start in range(0, dim, chunk):
                rows = slice(start, min(start + chunk, dim))
                (grads,) = pull_back([selected], [leaf], [basis_rows(selected, rows)])  # (rows, batch, tokens, dim)
                result[:, item, :, rows] = grads[:, prompts[:, None], ins[:, item]].permute(1, 2, 0, 3)
    return result


def basis_rows(output: Tensor, rows: slice) -> Tensor:
    """Return the chosen unit vectors as cotangents of an output (batch, dim): the same for every prompt."""
    basis = torch.eye(output.shape[-1], dtype=output.dtype, device=output.device)[rows]
    return basis[:, None].expand(-1, output.shape[0], -1)  # (rows, batch, dim)


def pull_back(outputs: Sequence[Tensor], leaves: Sequence[Tensor], cotangents: Sequence[Tensor]) -> list[Tensor]:
    """Return the gradients (rows, *leaf) at the leaves for cotangents (rows, *output), summed over outputs."""
    call = {"retain_graph": True, "allow_unused": True, "materialize_grads": True}
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="There is a performance drop")
            return list(torch.autograd.grad(outputs, leaves, cotangents, is_grads_batched=True, **call))
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:  # an autograd function of the block's own without a rule for vmap
        if "vmap" not in str(error) and "functorch" not in str(error):
            raise
        single = [torch.autograd.grad(outputs, leaves, rows, **call) for rows in zip(*cotangents, strict=True)]
        return [torch.stack(grads) for grads in zip(*single, strict=True)]
