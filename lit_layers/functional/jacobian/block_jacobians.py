"""Block Jacobians: the derivative of a block's update of one token with respect to the block's input at a token.

Reverse mode through the block on whole prompts gives one row of J for each backward pass. That is dim passes, each
over every token of the prompt.

Only attention mixes tokens, which allows a faster route that is also exact. The route calls the block only on the
requested tokens and replaces the attention output by its first-order expansion (formulas in `block_call.py`). The other
tokens of the prompt then cost nothing. Next, it splits this call at its linear maps. From the output back to the input,
it multiplies their weights with the derivatives of the operations between them (`linear_cut.CutBlock`). Each matrix
product computes all rows of J for all requested tokens.

The route has no list of known block classes, so a block may break its assumptions. Its result is therefore compared
with a derivative of the block itself before it is used. If the two differ, `route="auto"` falls back to reverse mode.
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

from lit_layers.functional.jacobian.block_call import (
    Alignment,
    Attention,
    Call,
    Done,
    Replay,
    Unsupported,
    evaluating,
    expand_heads,
    jacobians_by_reverse_mode,
    pull_back,
    record_attention,
    sum_heads,
    to_call,
)
from lit_layers.functional.jacobian.linear_cut import CutBlock

Block = Callable[[Tensor], Tensor]
Route = Literal["auto", "cut", "plain"]


def block_jacobian(
    block: Block,
    hidden: Float[Tensor, "batch tokens dim"],
    *,
    out_tokens: int | Sequence[int] = -1,
    in_tokens: int | Sequence[int] | Literal["same"] = "same",
    mask: Bool[Tensor, "batch tokens"] | None = None,
    residual: bool = True,
    route: Route = "auto",
) -> Tensor:
    """Return the Jacobians of a block's residual branch between tokens: rows are outputs, columns are inputs.

    `J = d f(X)[t_out] / d X[t_in]` with `block(X) = X + f(X)`, or with `block = f` for `residual=False`. The identity
    is subtracted only if `t_in` is `t_out`, because only then does the skip connect the two tokens.

    Shapes: `(batch, dim, dim)` if both tokens are single (an int, or "same" for `in_tokens`); `(batch, out, dim, dim)`
    for several output tokens with "same"; `(batch, out, in, dim, dim)` otherwise.

    Computed in the precision of `hidden`, under any gradient mode. Parameters get no gradients, and the result has no
    graph. The fast route works for a module, or for a block of a trajectory (an object with `module`, `args` and
    `kwargs`). It calls the block on single tokens, with its attention to the prompt replaced by a first-order
    expansion. The first derivatives are still exact, and their cost does not grow with the length of the prompt. The
    result is checked against the block's own derivative for each new layout of inputs and for new weights. If the check
    fails, one warning is issued, and reverse mode on whole prompts computes the Jacobian. For any other callable only
    reverse mode is used.

    Args:
        block: Maps hidden states to hidden states of the same shape. It must treat prompts independently and be in
            evaluation mode.
        hidden: The input of the block, in float32 or float64.
        out_tokens: Positions among the real tokens of each prompt; 0 is the first, -1 the last.
        in_tokens: Positions as for `out_tokens`, or "same" for the output token itself.
        mask: True for real tokens; None if there is no padding.
        residual: Whether `block` includes its skip connection.
        route: "auto" and "cut" use the fast route. If it fails, "auto" uses reverse mode, and "cut" raises an error.
            "plain" uses only reverse mode.

    Source: Aubry et al., "Transformer block coupling and its correlation with generalization in LLMs", eq. 4. There the
    identity is subtracted for every pair of tokens.

    Raises:
        ValueError: a token position that a prompt does not have, a prompt without real tokens, half precision.
    """
    if hidden.dtype not in (torch.float32, torch.float64):
        raise ValueError(
            f"expected hidden states in float32 or float64, got {hidden.dtype}: the identity added in half precision "
            "hides the Jacobian, so convert the model with .float()"
        )
    alignment: Alignment | None = getattr(block, "alignment", None)
    if alignment is not None:  # padding comes before the texts
        return block_jacobian(
            block.aligned(),  # pyright: ignore[reportFunctionMemberAccess]
            alignment.align(hidden),
            out_tokens=out_tokens,
            in_tokens=in_tokens,
            mask=alignment.mask,
            residual=residual,
            route=route,
        )
    # Inference tensors cannot enter an autograd graph, so all tensors are created outside inference mode.
    with torch.inference_mode(False), torch.no_grad():
        mask = torch.ones(hidden.shape[:2]).bool() if mask is None else mask.bool()
        mask = mask.to(hidden.device)
        outs = token_positions(out_tokens, mask, "out_tokens")  # (batch, out)
        ins = outs[..., None]  # (batch, out, in)
        if in_tokens != "same":
            ins = token_positions(in_tokens, mask, "in_tokens")[:, None].expand(-1, outs.shape[1], -1)
        with exact_arithmetic(hidden.device):
            jacobians = _compute(block, hidden, outs, ins, route)  # (batch, out, in, dim, dim)
        if residual:
            # d block(X)[t_out] / d X[t_in] = delta(t_out, t_in) I + J. So I is subtracted only if t_out equals t_in.
            skip = (outs[..., None] == ins)[..., None]
            jacobians.diagonal(dim1=-2, dim2=-1).sub_(skip.to(jacobians.dtype))
    if in_tokens == "same":
        jacobians = jacobians[:, :, 0]
        return jacobians[:, 0] if isinstance(out_tokens, int) else jacobians
    if isinstance(out_tokens, int) and isinstance(in_tokens, int):
        return jacobians[:, 0, 0]
    return jacobians


def token_positions(
    tokens: int | Sequence[int], mask: Bool[Tensor, "batch tokens"], name: str = "tokens"
) -> Int[Tensor, "batch picked"]:
    """Return the positions of some tokens of each prompt in the padded batch.

    `tokens` are their indices among the real tokens of a prompt; negative indices count from the last real token.
    """
    picked = [tokens] if isinstance(tokens, int) else list(tokens)
    real = mask.sum(1)
    indices = torch.tensor(picked, device=mask.device)
    index = torch.where(indices < 0, indices + real[:, None], indices)
    wrong = ((index < 0) | (index >= real[:, None])).nonzero()
    if len(wrong):
        prompt, item = wrong[0].tolist()
        raise ValueError(
            f"expected {name} among real tokens, got {picked[item]} for prompt {prompt} of {int(real[prompt])} tokens"
        )
    # A stable descending sort of the mask lists the positions of real tokens first, in order.
    order = torch.argsort(mask.to(torch.int8), dim=1, descending=True, stable=True)
    return torch.gather(order, 1, index)


def _compute(block: Block, hidden: Tensor, outs: Tensor, ins: Tensor, route: Route) -> Tensor:
    """Return d block(X)[out] / d X[in], (batch, out, in, dim, dim), by the route that `route` names.

    "auto" tries the fast route, and uses reverse mode if the fast route cannot handle the block.
    """
    call = None if route == "plain" else to_call(block)
    if call is not None and hidden.shape[1] > 1:
        try:
            return _verified_jacobians(call, hidden, outs, ins)
        except Unsupported as error:
            if route == "cut":
                raise ValueError(f"no route 'cut' for {type(call.module).__name__}: {error}") from error
            warn_once(call.module, str(error))
    return jacobians_by_reverse_mode(block, hidden, outs, ins)


def _verified_jacobians(call: Call, hidden: Tensor, outs: Tensor, ins: Tensor) -> Tensor:
    """Return Jacobians by the fast route, after a check against the block's own derivative.

    The check is skipped if the same weights, layout of the inputs and positions have passed it before.
    """
    checks = _verified.setdefault(call.module, {})
    layout = (hidden.shape[1:], hidden.dtype, hidden.device, _layout(call.args), _layout(call.kwargs))
    # Pairs of different tokens take another code path, and the fast route may be right at one position and wrong at
    # another. So a check is stored together with the positions that it was made for.
    layout = (*layout, bool((outs[..., None] == ins).all()), tuple(outs[0].tolist()))
    # Jacobians of a branch whose weights are still zero pass any check, so the check is repeated when weights change.
    weights = _weights_of(call.module)
    checked, reason = checks.get(layout, (None, ""))
    if checked == weights and reason:
        raise Unsupported(reason)
    try:
        jacobians = _jacobians_of_tokens(call, hidden, outs, ins)
        if checked != weights:
            error = _disagreement(call, hidden, outs, ins, jacobians)
            # The tolerance in float64 is 1e-6 and not 1e-12, because some models compute RMSNorm or rotary tables in
            # float32.
            tolerance = 1e-4 if hidden.dtype == torch.float32 else 1e-6
            if math.isnan(error):
                return jacobians  # the model has diverged: no check is possible
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
    """Return a value that changes when a weight is written or replaced.

    It combines the memory addresses of all parameters and buffers, and how often they were written in place.
    """
    tensors = [tensor for tensor in (*module.parameters(), *module.buffers()) if not tensor.is_inference()]
    return len(tensors), sum(tensor._version for tensor in tensors), hash(tuple(t.data_ptr() for t in tensors))


# For each module and layout of inputs: the weights at the last check, and the reason why it failed ("" if it passed).
_verified: weakref.WeakKeyDictionary[nn.Module, dict[tuple[Any, ...], tuple[tuple[int, ...], str]]] = (
    weakref.WeakKeyDictionary()
)
_warned: set[tuple[str, str]] = set()


def _layout(value: Any) -> Any:
    """Return the types and shapes of the arguments of a block, without the values of tensors.

    They determine how `_select` reduces the arguments to single tokens.
    """
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
    """Switch off autocast and TF32 inside the context, even if the surrounding training uses them."""
    precision = torch.get_float32_matmul_precision()
    with torch.autocast(device.type, enabled=False):
        try:
            torch.set_float32_matmul_precision("highest")
            yield
        finally:
            torch.set_float32_matmul_precision(precision)


# The fast route. A transformer block mixes tokens only in its attention. So the block itself is called on single
# tokens, and its attention is replaced by a first-order expansion around the whole prompt. Value and derivative of the
# expansion are exact at that point, so the Jacobian is exact. Parallel and post-norm blocks need no special case.

_ROWS = 2048  # most tokens, or cotangents, in a chunk: the fastest number measured at dim 128 and 768 on CPU


def _jacobians_of_tokens(call: Call, hidden: Tensor, outs: Tensor, ins: Tensor) -> Tensor:
    """Return the Jacobians d block(X)[out] / d X[in], (batch, out, in, dim, dim), from calls on single tokens.

    In these calls, a first-order expansion around the whole prompt replaces the attention of the block.

    Raises:
        Unsupported: the block has no attention of a known kind, or its result for a token differs if it is called on
            this token alone.
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
        # Limit the memory of a chunk of pairs of output and input tokens. Each pair needs cotangents of `dim` numbers
        # each, and the keys and values of its prompt (heads x tokens x head_dim).
        size = max(1, min(_ROWS, 2**24 // max(dim, tokens * attention.query.shape[1] * attention.query.shape[3])))
        for route, chosen in ((_same_token, same), (_cross_token, ~same)):
            for where in chosen.nonzero()[:, 0].split(size):
                if len(where):
                    flat[where] = route(call, attention, hidden, pairs[:, where])
    return result


def _disagreement(call: Call, hidden: Tensor, outs: Tensor, ins: Tensor, jacobians: Tensor) -> float:
    """Return the largest relative error of `jacobians` against the block's own derivative.

    With r a random vector, r' J is computed for each input token from `jacobians` and by backpropagation through the
    block. The error is the norm of the difference, minus the part that rounding explains. It is divided by the norm of
    r' J with or without the skip connection, whichever is smaller. Otherwise the identity in J could hide errors of a
    block with small derivatives.

    The cost is one forward pass on the first prompt, and one backward pass each for its first and last output token.
    The result is NaN if the block's own derivative is not finite.
    """
    batch, tokens, dim = hidden.shape
    first = torch.zeros(1, dtype=torch.int64, device=hidden.device)
    prompt = call.select(first, None, (batch, tokens))
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
            # The error of a small J is small relative to |probe' (I + J)| and would go unnoticed. So the error is
            # divided by the smaller of |probe' (I + J)| and |probe' J|, after `rounding` has been subtracted from it.
            skip = (outs[0, item] == ins[0, item])[:, None] * probe
            size = torch.minimum(exact.norm(dim=-1), (exact - skip).norm(dim=-1))
            rounding = 16 * torch.finfo(hidden.dtype).eps * exact.norm(dim=-1)
            combined = torch.stack([probe @ jacobian.double() for jacobian in jacobians[0, item]])
            difference = ((combined - exact).norm(dim=-1).nan_to_num(math.inf) - rounding).clamp(min=0)
            errors.append(torch.where(difference > 0, difference / size, 0.0).max())
    return float(torch.stack(errors).max())


def _same_token(call: Call, attention: Attention, hidden: Tensor, pairs: Tensor) -> Tensor:
    """Return the Jacobians (pairs, dim, dim) of output tokens with respect to the input tokens at the same positions.

    `pairs` (3, pairs) has a prompt, an output position and an equal input position in each column.
    """
    return _cut_block(call, attention, hidden, *pairs[:2]).jacobians()


def _cut_block(call: Call, attention: Attention, hidden: Tensor, prompts: Tensor, pos: Tensor) -> CutBlock:
    expansion = attention.expansion(prompts, pos)
    return CutBlock(call.select(prompts, pos, hidden.shape[:2]), attention, expansion, hidden[prompts, pos])


def _cross_token(call: Call, attention: Attention, hidden: Tensor, pairs: Tensor) -> Tensor:
    """Return the Jacobians (pairs, dim, dim) of output tokens with respect to input tokens at other positions.

    `pairs` (3, pairs) has a prompt, an output position and an input position in each column. The input token affects
    the output token only through its key and its value.
    """
    prompts, outs, ins = pairs
    shape, dim = hidden.shape[:2], hidden.shape[2]
    # J = [d out_t / d a] [w_s (v_s - a) (q dk_s) + p_s dv_s]. Here a is the attention output, p_s is the softmax weight
    # of input token s, and w_s = p_s c'(q k_s) with the function c that scales and caps scores (see `block_call.py`).
    # The first factor is the same for all input tokens s of one output token t, so it is computed once for each t.
    tokens, which = torch.unique(torch.stack([prompts, outs]), dim=1, return_inverse=True)
    cut = _cut_block(call, attention, hidden, *tokens)
    expansion = cut.expansion
    heads, head_dim = expansion.out.shape[1], expansion.out.shape[3]
    after = cut.from_attention()
    after = after.expand(-1, -1, heads * head_dim).unflatten(2, (heads, 1, head_dim))[which]

    p, w = (part[which] for part in attention.weights(tokens[0], tokens[1]))
    index = torch.arange(len(ins), device=ins.device)
    p, w = (part[index, :, ins][:, None, :, None, None] for part in (p, w))  # (pairs, 1, heads, 1, 1)
    value = expand_heads(attention.value[prompts], heads)[index, :, ins][:, :, None]
    # Cotangents of k_s and v_s: the transposes of the two terms above, applied to the rows of `after` (d out_t / d a).
    aligned = (after * (value - expansion.out[which])[:, None]).sum(-1, keepdim=True)
    for_key = w * aligned * expansion.query[which][:, None]  # (pairs, dim, heads, 1, head_dim)
    for_value = p * after

    taken: list[Tensor] = []

    def take(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        taken.extend((key, value))
        raise Done

    # The last factor is d(k_s, v_s) / d x_s: call the block on token s up to its attention, then pull cotangents back.
    with torch.enable_grad():
        leaf = hidden[prompts, ins].detach().requires_grad_()
        with contextlib.suppress(Done), Replay(attention, take):
            call.select(prompts, ins, shape)(leaf[:, None])
        cotangents = [sum_heads(part, taken[0].shape[1]).movedim(1, 0) for part in (for_key, for_value)]
        chunk = max(1, min(dim, _ROWS // len(ins)))
        parts = zip(*(rows.split(chunk) for rows in cotangents), strict=True)
        grads = [pull_back(taken, [leaf], part)[0] for part in parts]
    return torch.cat(grads).movedim(0, 1)
