"""Block Jacobians: how a block's update of one token answers to the input of another.

Reverse mode through the block on whole prompts gives a row of J for one backward pass, dim passes in all, each over
every token of the prompt. Two routes are faster and exact, as only attention mixes tokens:

- "one_token" calls the block on the asked tokens alone and answers attention's first-order expansion where it attends
  (`block_attention.py` has the formulas); its backward passes cost nothing for the other tokens of the prompt.
- "cut" goes on from there: it cuts that call at its linear maps and multiplies their weights from the end to the
  beginning, in products of matrices that serve all rows and tokens at once (`linear_cut.CutBlock`).

Neither knows a block by name, so both may meet one that does something else. Each is therefore held against a
derivative of the block itself before it is believed, and "auto" falls back to the next: cut, one_token, reverse mode.
"""

import contextlib
import math
import warnings
import weakref
from collections.abc import Callable, Generator, Sequence
from typing import Any, Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from lit_layers.functional._checks import check_option
from lit_layers.functional.jacobian.block_call import (
    Alignment,
    Call,
    Unsupported,
    as_call,
    jacobians_by_reverse_mode,
)
from lit_layers.functional.jacobian.one_token import disagreement, jacobians_by_one_token

Block = Callable[[Tensor], Tensor]
Route = Literal["auto", "cut", "one_token", "plain"]


def block_jacobian(
    block: Block,
    hidden: Float[Tensor, "batch tokens dim"],
    *,
    out_tokens: int | Sequence[int] = -1,
    in_tokens: int | Sequence[int] | Literal["same", "all"] = "same",
    mask: Bool[Tensor, "batch tokens"] | None = None,
    residual: bool = True,
    identity: Literal["same_token", "always"] = "same_token",
    chunk_size: int | None = None,
    route: Route = "auto",
) -> Tensor:
    """Jacobians of a block's residual branch between tokens, rows = output coordinates, columns = input coordinates.

    `J = d f(X)[t_out] / d X[t_in]` with `block(X) = X + f(X)`, or `block = f` for `residual=False`. The identity is
    subtracted where `t_in` is `t_out`, because only there the skip connects the two; `identity="always"` subtracts it
    for every pair, as published code does. Token positions count among a prompt's real tokens (`mask`): 0 is the
    first, -1 the last. The block must treat prompts independently and be in evaluation mode.

    Shapes: `(batch, dim, dim)` when both tokens are single (an int, or "same" for `in_tokens`); `(batch, out, dim,
    dim)` for several output tokens with "same"; `(batch, out, in, dim, dim)` otherwise, where "all" are all `tokens`
    places of the input and padded ones give 0.

    Computed in the precision of `hidden` (float32 or float64), without gradients on parameters and without a graph,
    whatever gradient mode it is called in. A module, or a block of a trajectory (`module`, `args`, `kwargs`), is called
    on one token, its attention expanded around the prompt: exact, and the cost does not grow with the prompt's length.
    That route is held against the block's own derivative whenever a module meets a new layout of inputs, or has new
    weights; where it fails, a warning says so once. Then, and for any other callable, it is reverse mode through the
    block on whole prompts. `chunk_size` is how many output coordinates are taken at a time; `route` forces a way.

    Source: Aubry et al., "Transformer block coupling and its correlation with generalization in LLMs", eq. 4; there
    the identity is subtracted as by `identity="always"`.

    Raises:
        ValueError: a token position that a prompt does not have, a prompt without real tokens, half precision.
    """
    _check_hidden(block, hidden)
    alignment: Alignment | None = getattr(block, "alignment", None)
    if alignment is not None:  # of a trajectory of texts with padding before them
        jacobians = block_jacobian(
            block.aligned(),  # pyright: ignore[reportFunctionMemberAccess]
            alignment.moved(hidden),
            out_tokens=out_tokens,
            in_tokens=in_tokens,
            mask=alignment.mask,
            residual=residual,
            identity=identity,
            chunk_size=chunk_size,
            route=route,
        )
        return _of_all_places(jacobians, alignment) if in_tokens == "all" else jacobians
    check_option("identity", identity, "same_token", "always")
    check_option("route", route, "auto", "cut", "one_token", "plain")
    if chunk_size is not None and chunk_size < 1:
        raise ValueError(f"expected a chunk_size of at least 1, got {chunk_size}")
    # inference tensors cannot enter a graph, so everything is made outside that mode
    with torch.inference_mode(False), torch.no_grad():
        mask = _check_mask(mask, hidden)
        outs = token_places(out_tokens, mask, "out_tokens")  # (batch, out)
        ins = _input_places(in_tokens, outs, mask)  # (batch, out, in)
        with exact_arithmetic(hidden.device):
            jacobians = _compute(block, hidden, outs, ins, chunk_size, route)  # (batch, out, in, dim, dim)
        if residual:
            _subtract_identity_(jacobians, outs, ins, always=identity == "always")
        if in_tokens == "all":
            padded = ~torch.gather(mask[:, None].expand(-1, outs.shape[1], -1), 2, ins)
            jacobians.masked_fill_(padded[..., None, None], 0)
    if in_tokens == "same":
        jacobians = jacobians[:, :, 0]
        return jacobians[:, 0] if isinstance(out_tokens, int) else jacobians
    if isinstance(out_tokens, int) and isinstance(in_tokens, int):
        return jacobians[:, 0, 0]
    return jacobians


def token_places(
    tokens: int | Sequence[int], mask: Bool[Tensor, "batch tokens"], what: str = "tokens"
) -> Int[Tensor, "batch picked"]:
    """Places of tokens that are counted among each prompt's real tokens, from the end where negative."""
    picked = [tokens] if isinstance(tokens, int) else list(tokens)
    if not picked or not all(isinstance(token, int) and not isinstance(token, bool) for token in picked):
        raise TypeError(f"expected {what} to be an int or a non-empty sequence of ints, got {tokens!r}")
    real = mask.sum(1)
    if bool((real == 0).any()):
        raise ValueError(f"expected at least one real token in every prompt, prompt {int(real.argmin())} has none")
    numbers = torch.tensor(picked, device=mask.device)
    ranks = torch.where(numbers < 0, numbers + real[:, None], numbers)
    wrong = ((ranks < 0) | (ranks >= real[:, None])).nonzero()
    if len(wrong):
        prompt, item = wrong[0].tolist()
        raise ValueError(
            f"expected {what} among real tokens, got {picked[item]} for prompt {prompt} of {int(real[prompt])} tokens"
        )
    # a stable descending sort of the mask lists the real places first, in order
    order = torch.argsort(mask.to(torch.int8), dim=1, descending=True, stable=True)
    return torch.gather(order, 1, ranks)


def _of_all_places(jacobians: Tensor, alignment: Alignment) -> Tensor:
    """Jacobians (batch, out, tokens, dim, dim) of a moved batch at the places that it was given with."""
    jacobians = alignment.given_back(jacobians.transpose(1, 2)).transpose(1, 2)
    return jacobians.masked_fill(~alignment.given_mask[:, None, :, None, None], 0)


def _check_hidden(block: Block, hidden: Tensor) -> None:
    if not callable(block):
        raise TypeError(f"expected a callable block, got {type(block).__name__}")
    if hidden.ndim != 3:
        raise ValueError(f"expected hidden states of shape (batch, tokens, dim), got {tuple(hidden.shape)}")
    if hidden.dtype not in (torch.float32, torch.float64):
        raise ValueError(
            f"expected hidden states in float32 or float64, got {hidden.dtype}: the identity added in half precision "
            "hides the Jacobian, so convert the model with .float()"
        )


def _check_mask(mask: Tensor | None, hidden: Tensor) -> Tensor:
    if mask is None:
        return torch.ones(hidden.shape[:2], dtype=torch.bool, device=hidden.device)
    if mask.shape != hidden.shape[:2]:
        raise ValueError(f"expected a mask of shape {tuple(hidden.shape[:2])}, got {tuple(mask.shape)}")
    return mask.to(device=hidden.device, dtype=torch.bool)


def _input_places(in_tokens: int | Sequence[int] | str, outs: Tensor, mask: Tensor) -> Tensor:
    if in_tokens == "same":
        return outs[..., None]
    if in_tokens == "all":
        ins = torch.arange(mask.shape[1], device=mask.device).expand(mask.shape)
    elif isinstance(in_tokens, str):
        raise ValueError(f'expected in_tokens "same", "all", an int or a sequence of ints, got {in_tokens!r}')
    else:
        ins = token_places(in_tokens, mask, "in_tokens")
    return ins[:, None].expand(-1, outs.shape[1], -1)


def _subtract_identity_(jacobians: Tensor, outs: Tensor, ins: Tensor, *, always: bool) -> None:
    skip = torch.ones_like(ins, dtype=torch.bool) if always else outs[..., None] == ins
    jacobians.diagonal(dim1=-2, dim2=-1).sub_(skip[..., None].to(jacobians.dtype))


def _compute(block: Block, hidden: Tensor, outs: Tensor, ins: Tensor, chunk_size: int | None, route: Route) -> Tensor:
    """d block(X)[out] / d X[in] by the fastest route that holds for this block, (batch, out, in, dim, dim)."""
    call = None if route == "plain" else as_call(block)
    if call is not None and hidden.shape[1] > 1:
        routes = ("cut", "one_token") if route == "auto" else (route,)
        reasons: dict[str, str] = {}
        for name in routes:
            try:
                return _verified_jacobians(call, hidden, outs, ins, chunk_size, cut=name == "cut")
            except Unsupported as error:
                if route != "auto":
                    raise ValueError(f"no route {name!r} for {type(call.module).__name__}: {error}") from error
                reasons[name] = str(error)
        warn_once(call.module, reasons["one_token"])
    elif route in ("cut", "one_token"):
        raise ValueError(f"route {route!r} needs a module, or a block of a trajectory, and more than one token")
    return jacobians_by_reverse_mode(block, hidden, outs, ins, chunk_size)


def _verified_jacobians(
    call: Call, hidden: Tensor, outs: Tensor, ins: Tensor, chunk_size: int | None, *, cut: bool
) -> Tensor:
    """By a fast route, held against the block itself where that has not been done for these weights and layout."""
    checks = _verified.setdefault(call.module, {})
    layout = (hidden.shape[1:], hidden.dtype, hidden.device, _layout(call.args), _layout(call.kwargs))
    # pairs of two tokens take another path; what is right at one place may be wrong at another
    layout = (*layout, bool((outs[..., None] == ins).all()), tuple(outs[0].tolist()), cut)
    weights = _weights_of(call.module)  # a branch that is zero at first shows nothing
    checked, reason = checks.get(layout, (None, ""))
    if checked == weights and reason:
        raise Unsupported(reason)
    try:
        jacobians = jacobians_by_one_token(call, hidden, outs, ins, chunk_size, cut=cut)
        if checked != weights:
            error = disagreement(call, hidden, outs, ins, jacobians)
            tolerance = 1e-4 if hidden.dtype == torch.float32 else 1e-6  # parts of some models are float32 always
            if math.isnan(error):
                return jacobians  # nothing is shown by a model that has diverged
            if not error <= tolerance:
                raise Unsupported(f"it differs from the block's own derivative by {error:.1e}")
    except torch.OutOfMemoryError:
        raise
    except (Unsupported, RuntimeError, ValueError, TypeError, IndexError, KeyError, AttributeError) as error:
        reason = str(error) if isinstance(error, Unsupported) else f"{type(error).__name__}: {error}"
        checks[layout] = weights, reason
        raise Unsupported(reason) from error
    checks[layout] = weights, ""
    return jacobians


def _weights_of(module: nn.Module) -> tuple[int, ...]:
    """What changes when a weight does: where they lie, and how often they were written to."""
    tensors = [tensor for tensor in (*module.parameters(), *module.buffers()) if not tensor.is_inference()]
    return len(tensors), sum(tensor._version for tensor in tensors), hash(tuple(t.data_ptr() for t in tensors))


# Per module and layout of inputs: the weights that were checked, and what was wrong with them ("" for nothing).
_verified: weakref.WeakKeyDictionary[nn.Module, dict[tuple[Any, ...], tuple[tuple[int, ...], str]]] = (
    weakref.WeakKeyDictionary()
)
_warned: set[tuple[str, str]] = set()


def _layout(value: Any) -> Any:
    """What decides how the arguments of a block are cut: their kinds and shapes, not their values."""
    if isinstance(value, Tensor):
        return tuple(value.shape[1:]), value.dtype, value.shape[:1] == (1,)
    if isinstance(value, tuple | list):
        return tuple(_layout(item) for item in value)
    if isinstance(value, dict):
        return tuple((name, _layout(item)) for name, item in value.items())
    return value if isinstance(value, bool | int | float | str | None) else type(value)


def warn_once(block: Any, reason: str) -> None:
    kind = type(block).__name__
    if (kind, reason) not in _warned:
        _warned.add((kind, reason))
        warnings.warn(
            f"the Jacobians of {kind} are computed by plain reverse mode, exactly but slowly: {reason}",
            RuntimeWarning,
            stacklevel=5,
        )


@contextlib.contextmanager
def exact_arithmetic(device: torch.device) -> Generator[None, None, None]:
    """No autocast and no TF32, whatever the training around it uses."""
    precision = torch.get_float32_matmul_precision()
    with torch.autocast(device.type, enabled=False):
        try:
            torch.set_float32_matmul_precision("highest")
            yield
        finally:
            torch.set_float32_matmul_precision(precision)
