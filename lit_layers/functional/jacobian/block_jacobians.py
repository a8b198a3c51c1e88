"""Block Jacobians: how a block's update of one token answers to the input of another.

Reverse mode through the block on whole prompts gives a row of J for one backward pass, dim passes in all, each over
every token of the prompt. Two routes are faster and exact, as only attention mixes tokens:

- "one_token" calls the block on the asked tokens alone and answers attention's first-order expansion where it attends
  (`block_call.py` has the formulas); its backward passes cost nothing for the other tokens of the prompt.
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
    Attention,
    Call,
    Done,
    Expansion,
    Unsupported,
    as_call,
    basis_rows,
    evaluating,
    expand_heads,
    jacobians_by_reverse_mode,
    pull_back,
    record_attention,
    run_on_tokens,
    sum_heads,
)
from lit_layers.functional.jacobian.linear_cut import CutBlock

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
    route: Route = "auto",
) -> Tensor:
    """Return the Jacobians of a block's residual branch between tokens: rows are outputs, columns inputs.

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
    block on whole prompts. `route` forces a way.

    Source: Aubry et al., "Transformer block coupling and its correlation with generalization in LLMs", eq. 4; there
    the identity is subtracted as by `identity="always"`.

    Raises:
        ValueError: a token position that a prompt does not have, a prompt without real tokens, half precision.
    """
    if hidden.dtype not in (torch.float32, torch.float64):
        raise ValueError(
            f"expected hidden states in float32 or float64, got {hidden.dtype}: the identity added in half precision "
            "hides the Jacobian, so convert the model with .float()"
        )
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
            route=route,
        )
        return _of_all_places(jacobians, alignment) if in_tokens == "all" else jacobians
    check_option("identity", identity, "same_token", "always")
    # inference tensors cannot enter a graph, so everything is made outside that mode
    with torch.inference_mode(False), torch.no_grad():
        mask = torch.ones(hidden.shape[:2]).bool() if mask is None else mask.bool()
        mask = mask.to(hidden.device)
        outs = token_places(out_tokens, mask, "out_tokens")  # (batch, out)
        ins = _input_places(in_tokens, outs, mask)  # (batch, out, in)
        with exact_arithmetic(hidden.device):
            jacobians = _compute(block, hidden, outs, ins, route)  # (batch, out, in, dim, dim)
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
    """Return the positions of tokens that are counted among each prompt's real tokens, from the end if negative."""
    picked = [tokens] if isinstance(tokens, int) else list(tokens)
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
    """Return the Jacobians (batch, out, tokens, dim, dim) of a moved batch at the positions that it was given with."""
    jacobians = alignment.restored(jacobians.transpose(1, 2)).transpose(1, 2)
    return jacobians.masked_fill(~alignment.given_mask[:, None, :, None, None], 0)


def _input_places(in_tokens: int | Sequence[int] | Literal["same", "all"], outs: Tensor, mask: Tensor) -> Tensor:
    if in_tokens == "same":
        return outs[..., None]
    if in_tokens == "all":
        ins = torch.arange(mask.shape[1], device=mask.device).expand(mask.shape)
    else:
        ins = token_places(in_tokens, mask, "in_tokens")
    return ins[:, None].expand(-1, outs.shape[1], -1)


def _subtract_identity_(jacobians: Tensor, outs: Tensor, ins: Tensor, *, always: bool) -> None:
    skip = torch.ones_like(ins, dtype=torch.bool) if always else outs[..., None] == ins
    jacobians.diagonal(dim1=-2, dim2=-1).sub_(skip[..., None].to(jacobians.dtype))


def _compute(block: Block, hidden: Tensor, outs: Tensor, ins: Tensor, route: Route) -> Tensor:
    """Return d block(X)[out] / d X[in] by the fastest route that holds for this block, (batch, out, in, dim, dim)."""
    call = None if route == "plain" else as_call(block)
    if call is not None and hidden.shape[1] > 1:
        routes = ("cut", "one_token") if route == "auto" else (route,)
        reasons: dict[str, str] = {}
        for name in routes:
            try:
                return _verified_jacobians(call, hidden, outs, ins, cut=name == "cut")
            except Unsupported as error:
                if route != "auto":
                    raise ValueError(f"no route {name!r} for {type(call.module).__name__}: {error}") from error
                reasons[name] = str(error)
        warn_once(call.module, reasons["one_token"])
    elif route in ("cut", "one_token"):
        raise ValueError(f"route {route!r} needs a module, or a block of a trajectory, and more than one token")
    return jacobians_by_reverse_mode(block, hidden, outs, ins)


def _verified_jacobians(call: Call, hidden: Tensor, outs: Tensor, ins: Tensor, *, cut: bool) -> Tensor:
    """Return Jacobians by a fast route, checked against the block itself once for these weights and this layout."""
    checks = _verified.setdefault(call.module, {})
    layout = (hidden.shape[1:], hidden.dtype, hidden.device, _layout(call.args), _layout(call.kwargs))
    # pairs of two tokens take another path; what is right at one place may be wrong at another
    layout = (*layout, bool((outs[..., None] == ins).all()), tuple(outs[0].tolist()), cut)
    weights = _weights_of(call.module)  # a branch that is zero at first shows nothing
    checked, reason = checks.get(layout, (None, ""))
    if checked == weights and reason:
        raise Unsupported(reason)
    try:
        jacobians = _jacobians_by_one_token(call, hidden, outs, ins, cut=cut)
        if checked != weights:
            error = _disagreement(call, hidden, outs, ins, jacobians)
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
    """Return what changes when a weight does: where the weights lie in memory, and how often they were written to."""
    tensors = [tensor for tensor in (*module.parameters(), *module.buffers()) if not tensor.is_inference()]
    return len(tensors), sum(tensor._version for tensor in tensors), hash(tuple(t.data_ptr() for t in tensors))


# Per module and layout of inputs: the weights that were checked, and what was wrong with them ("" for nothing).
_verified: weakref.WeakKeyDictionary[nn.Module, dict[tuple[Any, ...], tuple[tuple[int, ...], str]]] = (
    weakref.WeakKeyDictionary()
)
_warned: set[tuple[str, str]] = set()


def _layout(value: Any) -> Any:
    """Return what decides how the arguments of a block are cut: their kinds and shapes, not their values."""
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
    """Switch off autocast and TF32, whatever the training around it uses."""
    precision = torch.get_float32_matmul_precision()
    with torch.autocast(device.type, enabled=False):
        try:
            torch.set_float32_matmul_precision("highest")
            yield
        finally:
            torch.set_float32_matmul_precision(precision)


# The fast routes. A block of a transformer mixes tokens in its attention only: so the block itself is called on single
# tokens, and where it attends, the answer is attention's first-order expansion around the whole prompt. Value and
# derivative at that point are exact, hence so is the Jacobian. Parallel and post-norm blocks are nothing special.

_ROWS = 2048  # cotangents a chunk: measured best at dim 128 and 768 on CPU


def _jacobians_by_one_token(call: Call, hidden: Tensor, outs: Tensor, ins: Tensor, *, cut: bool = True) -> Tensor:
    """Return what `jacobians_by_reverse_mode` does.

    With `cut`, work stops at the linear maps: half the work, see `CutBlock`.

    Raises:
        Unsupported: the block has no attention that is understood, or depends on its place in other ways.
    """
    _, tokens, dim = hidden.shape
    with torch.no_grad(), evaluating(call.module):
        attention = record_attention(call, hidden)
        result = hidden.new_zeros(*ins.shape, dim, dim)
        flat = result.view(-1, dim, dim)
        prompts, items, _ = torch.meshgrid(
            *(torch.arange(size, device=hidden.device) for size in ins.shape), indexing="ij"
        )
        pairs = torch.stack([prompts.flatten(), outs[prompts, items].flatten(), ins.flatten()])  # (prompt, out, in)
        same = pairs[1] == pairs[2]
        # per token: cotangents (dim x ..) and the slopes over the prompt (heads x tokens x head_dim)
        size = max(1, min(_ROWS, 2**24 // max(dim, tokens * attention.query.shape[1] * attention.query.shape[3])))
        for route, chosen in ((_same_token, same), (_cross_token, ~same)):
            for where in chosen.nonzero()[:, 0].split(size):
                if len(where):
                    flat[where] = route(call, attention, hidden, pairs[:, where], cut)
    return result


def _disagreement(call: Call, hidden: Tensor, outs: Tensor, ins: Tensor, jacobians: Tensor) -> float:
    """Return the largest relative error of random row combinations of `jacobians` against the block's own derivative.

    Of each input token, relative to what the block adds to its skip: a small branch must be right, too, up to what
    rounding leaves of it beside the skip. NaN where the block's own derivative is not finite. One backward pass through
    the block on the first prompt for its first and its last output token.
    """
    batch, tokens, dim = hidden.shape
    first = torch.zeros(1, dtype=torch.int64, device=hidden.device)
    prompt = call.at(first, None, (batch, tokens))
    generator = torch.Generator().manual_seed(0)
    errors = []
    with torch.enable_grad(), evaluating(call.module):
        leaf = hidden[:1].detach().clone().requires_grad_()
        output = prompt(leaf)
        for item in sorted({0, outs.shape[1] - 1}):
            probe = torch.randn(dim, generator=generator, dtype=hidden.dtype).to(hidden.device)
            (exact,) = torch.autograd.grad(output[0, outs[0, item]], leaf, probe, retain_graph=True)
            exact, probe = exact[0, ins[0, item]].double(), probe.double()  # (in, dim), (dim,)
            if not bool(exact.isfinite().all()):
                return math.nan
            skip = (outs[0, item] == ins[0, item])[:, None] * probe
            size = torch.minimum(exact.norm(dim=-1), (exact - skip).norm(dim=-1))
            rounding = 16 * torch.finfo(hidden.dtype).eps * exact.norm(dim=-1)
            combined = torch.stack([probe @ jacobian.double() for jacobian in jacobians[0, item]])
            difference = ((combined - exact).norm(dim=-1).nan_to_num(math.inf) - rounding).clamp(min=0)
            errors.append(torch.where(difference > 0, difference / size, 0.0).max())
    return float(torch.stack(errors).max())


def _same_token(call: Call, attention: Attention, hidden: Tensor, pairs: Tensor, cut: bool) -> Tensor:
    """Return (picked, dim, dim) for pairs (3, picked) of prompt, output position and the same input position."""
    prompts, places, _ = pairs
    expansion = attention.expansion(prompts, places)
    alone, states = call.at(prompts, places, hidden.shape[:2]), hidden[prompts, places]
    if cut:
        return CutBlock(alone, attention, expansion, states).jacobians()
    with torch.enable_grad():
        leaf = states.detach().requires_grad_()
        return _rows(run_on_tokens(alone, attention, leaf, expansion), leaf)


def _rows(output: Tensor, leaf: Tensor) -> Tensor:
    """Return d output / d leaf per token, (picked, dim, *leaf)."""
    picked, dim = output.shape
    chunk = max(1, min(dim, _ROWS // picked))
    result = leaf.new_empty(picked, dim, *leaf.shape[1:])
    for start in range(0, dim, chunk):
        rows = slice(start, min(start + chunk, dim))
        (grads,) = pull_back([output], [leaf], [basis_rows(output, rows)])
        result[:, rows] = grads.movedim(0, 1)
    return result


def _cross_token(call: Call, attention: Attention, hidden: Tensor, pairs: Tensor, cut: bool) -> Tensor:
    """Return the Jacobians of pairs of different tokens: the input reaches the output by its key and value only."""
    prompts, outs, ins = pairs
    shape, dim = hidden.shape[:2], hidden.shape[2]
    # the part after the attention is shared by all input tokens of an output token
    tokens, which = torch.unique(torch.stack([prompts, outs]), dim=1, return_inverse=True)
    expansion = attention.expansion(tokens[0], tokens[1])
    heads, head_dim = expansion.out.shape[1], expansion.out.shape[3]
    after = _after_attention(
        call.at(tokens[0], tokens[1], shape), attention, expansion, hidden[tokens[0], tokens[1]], cut
    )
    after = after.expand(-1, -1, heads * head_dim).unflatten(2, (heads, 1, head_dim))[which]

    p, w = (part[which] for part in attention.weights(tokens[0], tokens[1]))
    index = torch.arange(len(ins), device=ins.device)
    p, w = (part[index, :, ins][:, None, :, None, None] for part in (p, w))  # (picked, 1, heads, 1, 1)
    value = expand_heads(attention.value[prompts], heads)[index, :, ins][:, :, None]
    aligned = (after * (value - expansion.out[which])[:, None]).sum(-1, keepdim=True)
    for_key = w * aligned * expansion.query[which][:, None]  # (picked, dim, heads, 1, head_dim)
    for_value = p * after

    taken: list[Tensor] = []

    def take(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        taken.extend((key, value))
        raise Done

    with torch.enable_grad():
        leaf = hidden[prompts, ins].detach().requires_grad_()
        with contextlib.suppress(Done):
            run_on_tokens(call.at(prompts, ins, shape), attention, leaf, take)
        cotangents = [sum_heads(part, taken[0].shape[1]).movedim(1, 0) for part in (for_key, for_value)]
        chunk = max(1, min(dim, _ROWS // len(ins)))
        parts = zip(*(rows.split(chunk) for rows in cotangents), strict=True)
        grads = [pull_back(taken, [leaf], part)[0] for part in parts]
    return torch.cat(grads).movedim(0, 1)


def _after_attention(alone: Call, attention: Attention, expansion: Expansion, states: Tensor, cut: bool) -> Tensor:
    """Return d output / d output of the attention of single tokens, (picked, dim, heads x head_dim)."""
    if cut:
        return CutBlock(alone, attention, expansion, states).after_attention()
    attended: list[Tensor] = []

    def answer(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        attended.append(expansion(query, key, value).detach().reshape(expansion.out.shape).requires_grad_())
        return attended[0].reshape(query.shape)

    with torch.enable_grad():
        output = run_on_tokens(alone, attention, states.detach(), answer)
        return _rows(output, attended[0]).flatten(2)
