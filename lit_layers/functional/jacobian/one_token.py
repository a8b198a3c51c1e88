"""Block Jacobians from calls of the block on one token: the cost does not grow with the length of the prompt.

A block of a transformer mixes tokens in its attention only. So the block itself is called on single tokens, and where
it attends, the answer is attention's first-order expansion around the whole prompt (`block_attention.py`). Value and
derivative at that point are exact, hence so is the Jacobian. Parallel and post-norm blocks are nothing special.
"""

import contextlib
import math

import torch
from torch import Tensor

from lit_layers.functional.jacobian.block_attention import (
    Attention,
    Done,
    Expansion,
    expand_heads,
    record_attention,
    run_on_tokens,
    sum_heads,
)
from lit_layers.functional.jacobian.block_call import Call, basis_rows, evaluating, pull_back
from lit_layers.functional.jacobian.linear_cut import CutBlock

# 2,048 cotangents a chunk: measured best at dim 128 and 768 on CPU
ROWS = 2048


def jacobians_by_one_token(
    call: Call, hidden: Tensor, outs: Tensor, ins: Tensor, chunk_size: int | None = None, *, cut: bool = True
) -> Tensor:
    """As `jacobians_by_reverse_mode`. With `cut`, at the linear maps: half the work, see `CutBlock`.

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
        size = max(1, min(ROWS, 2**24 // max(dim, tokens * attention.query.shape[1] * attention.query.shape[3])))
        for route, chosen in ((_same_token, same), (_cross_token, ~same)):
            for where in chosen.nonzero()[:, 0].split(size):
                if len(where):
                    flat[where] = route(call, attention, hidden, pairs[:, where], chunk_size, cut)
    return result


def disagreement(call: Call, hidden: Tensor, outs: Tensor, ins: Tensor, jacobians: Tensor) -> float:
    """Largest relative error of random row combinations of `jacobians` against the block's own derivative.

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


def _same_token(
    call: Call, attention: Attention, hidden: Tensor, pairs: Tensor, chunk_size: int | None, cut: bool
) -> Tensor:
    """For pairs (3, picked) of prompt, output place and the same input place: (picked, dim, dim)."""
    prompts, places, _ = pairs
    expansion = attention.expansion(prompts, places)
    alone, states = call.at(prompts, places, hidden.shape[:2]), hidden[prompts, places]
    if cut:
        return CutBlock(alone, attention, expansion, states).jacobians(chunk_size)
    with torch.enable_grad():
        leaf = states.detach().requires_grad_()
        return _rows(run_on_tokens(alone, attention, leaf, expansion), leaf, chunk_size)


def _rows(output: Tensor, leaf: Tensor, chunk_size: int | None) -> Tensor:
    """d output / d leaf per token, (picked, dim, *leaf)."""
    picked, dim = output.shape
    chunk = chunk_size or max(1, min(dim, ROWS // picked))
    result = leaf.new_empty(picked, dim, *leaf.shape[1:])
    for start in range(0, dim, chunk):
        rows = slice(start, min(start + chunk, dim))
        (grads,) = pull_back([output], [leaf], [basis_rows(output, rows)])
        result[:, rows] = grads.movedim(0, 1)
    return result


def _cross_token(
    call: Call, attention: Attention, hidden: Tensor, pairs: Tensor, chunk_size: int | None, cut: bool
) -> Tensor:
    """For pairs of different tokens: the input's key and value alone reach the output, through its attention."""
    prompts, outs, ins = pairs
    shape, dim = hidden.shape[:2], hidden.shape[2]
    # the part after the attention is shared by all input tokens of an output token
    tokens, which = torch.unique(torch.stack([prompts, outs]), dim=1, return_inverse=True)
    expansion = attention.expansion(tokens[0], tokens[1])
    heads, head_dim = expansion.out.shape[1], expansion.out.shape[3]
    after = _after_attention(
        call.at(tokens[0], tokens[1], shape), attention, expansion, hidden[tokens[0], tokens[1]], chunk_size, cut
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
        chunk = chunk_size or max(1, min(dim, ROWS // len(ins)))
        parts = zip(*(rows.split(chunk) for rows in cotangents), strict=True)
        grads = [pull_back(taken, [leaf], part)[0] for part in parts]
    return torch.cat(grads).movedim(0, 1)


def _after_attention(
    alone: Call, attention: Attention, expansion: Expansion, states: Tensor, chunk_size: int | None, cut: bool
) -> Tensor:
    """d output / d output of the attention of single tokens, (picked, dim, heads x head_dim)."""
    if cut:
        return CutBlock(alone, attention, expansion, states).after_attention(chunk_size)
    attended: list[Tensor] = []

    def answer(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        attended.append(expansion(query, key, value).detach().reshape(expansion.out.shape).requires_grad_())
        return attended[0].reshape(query.shape)

    with torch.enable_grad():
        output = run_on_tokens(alone, attention, states.detach(), answer)
        return _rows(output, attended[0], chunk_size).flatten(2)
