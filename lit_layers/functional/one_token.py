"""Block Jacobians from calls of the block on one token: the cost does not grow with the length of the prompt.

A block of a transformer mixes tokens in its attention only. So the block itself is called on single tokens, and where
it attends, the answer is attention's first-order expansion around the whole prompt. Value and derivative at that point
are exact, hence so is the Jacobian. With the weights p, the slopes w = p x d(score) / d(q k) and the output
a = sum_n p_n v_n of one head at output token t:

    a + M (dq)        M = sum_n w_n (v_n - a) k_n'       its own query
      + w_s (v_s - a) (q dk_s) + p_s dv_s                key and value of token s (s = t among them)

Works for any family through the module itself: fused attention or matmul-softmax-matmul, grouped heads, rotary tables,
masks, windows, ALiBi, soft-capping, parallel and post-norm blocks. What it cannot do raises `Unsupported`.
"""

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lit_layers.functional.reverse_mode import basis_rows, pull_back

_FUSED = F.scaled_dot_product_attention
_MATMULS = (torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__, torch.bmm, torch.Tensor.bmm)
_SOFTMAXES = (F.softmax, torch.softmax, torch.Tensor.softmax)
_CACHES = ("past_key_values", "past_key_value", "layer_past")
# 2,048 cotangents a chunk: measured best at dim 128 and 768 on CPU
ROWS = 2048


class Unsupported(Exception):
    """The block does something that the one-token route does not know; the message says what."""


class Call(NamedTuple):
    """A block with the other arguments of one call."""

    module: nn.Module
    args: tuple
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


def jacobians_by_one_token(
    call: Call, hidden: Tensor, outs: Tensor, ins: Tensor, chunk_size: int | None = None
) -> Tensor:
    """As `jacobians_by_reverse_mode`.

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
                    flat[where] = route(call, attention, hidden, pairs[:, where], chunk_size)
    return result


def disagreement(call: Call, hidden: Tensor, outs: Tensor, ins: Tensor, jacobians: Tensor) -> float:
    """Largest relative error of random row combinations of `jacobians` against the block's own derivative.

    One backward pass through the block on the first prompt, for each of its first output tokens up to two.
    """
    batch, tokens, dim = hidden.shape
    first = torch.zeros(1, dtype=torch.int64, device=hidden.device)
    prompt = call.at(first, None, (batch, tokens))
    generator = torch.Generator().manual_seed(0)
    errors = []
    with torch.enable_grad(), evaluating(call.module):
        leaf = hidden[:1].detach().clone().requires_grad_()
        output = prompt(leaf)
        for item in range(min(2, outs.shape[1])):
            probe = torch.randn(dim, generator=generator, dtype=hidden.dtype).to(hidden.device)
            (exact,) = torch.autograd.grad(output[0, outs[0, item]], leaf, probe, retain_graph=True)
            exact = exact[0, ins[0, item]]  # (in, dim)
            difference, size = (probe @ jacobians[0, item] - exact).norm(), exact.norm()
            errors.append(difference / size if size > 0 else torch.where(difference > 0, math.inf, 0.0))
    return float(torch.stack(errors).max())


@contextlib.contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Dropout and the like are off inside; afterwards every submodule is in the mode it was in."""
    training = [part for part in module.modules() if part.training]
    for part in training:
        part.training = False
    try:
        yield
    finally:
        for part in training:
            part.training = True


# ---------------------------------------------------------------------------------- the attention of whole prompts


@dataclass(frozen=True)
class Attention:
    """The attention of one block call on whole prompts: (batch, heads, tokens, head_dim) each."""

    query: Tensor
    key: Tensor
    value: Tensor
    weights: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]  # prompts, places -> p, w, each (picked, heads, tokens)
    matmuls: tuple[int, int] | None  # which products make the scores and the output; None: one fused call

    def expansion(self, prompts: Tensor, places: Tensor) -> "Expansion":
        p, w = self.weights(prompts, places)
        heads = p.shape[1]
        key, value = (_expand_heads(each[prompts], heads) for each in (self.key, self.value))  # (picked, heads, ..)
        out = p[:, :, None] @ value  # (picked, heads, 1, head_dim)
        own = torch.arange(len(places), device=places.device)
        return Expansion(
            out=out,
            query=self.query[prompts, :, places][:, :, None],
            key=key[own, :, places][:, :, None],
            value=value[own, :, places][:, :, None],
            p=p[own, :, places][:, :, None, None],
            w=w[own, :, places][:, :, None, None],
            query_map=(w[..., None] * key).mT @ (value - out),
        )


class Expansion(NamedTuple):
    """First-order expansion at the query token: (picked, heads, 1, head_dim); its own weights (picked, heads, 1, 1)."""

    out: Tensor
    query: Tensor
    key: Tensor
    value: Tensor
    p: Tensor
    w: Tensor
    query_map: Tensor  # (picked, heads, head_dim, head_dim)

    def __call__(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        heads, shape = self.query.shape[1], query.shape
        if query.numel() != self.query.numel():
            raise Unsupported("its attention takes other shapes for one token")
        query = query.reshape(self.query.shape)  # transformers folds grouped heads into the tokens where there is one
        _check_point(query, self.query)
        key, value = _expand_heads(key, heads), _expand_heads(value, heads)
        _check_point(key, self.key)
        _check_point(value, self.value)
        through_key = self.w * (self.value - self.out) * (self.query * (key - self.key)).sum(-1, keepdim=True)
        through_query = _PerHead.apply(query - self.query, self.query_map)
        return (self.out + through_query + through_key + self.p * (value - self.value)).reshape(shape)


class _PerHead(torch.autograd.Function):
    """x (picked, heads, 1, head_dim) @ maps (picked, heads, head_dim, head_dim).

    Its own rule for vmap makes rows of the cotangents; the general one would copy the maps for each of them.
    """

    @staticmethod
    def forward(x: Tensor, maps: Tensor) -> Tensor:
        return x @ maps

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(inputs[1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (maps,) = ctx.saved_tensors
        return _PerHead.apply(grad, maps.mT), None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int, None], x: Tensor, maps: Tensor) -> tuple[Tensor, int]:
        rows = x.movedim(in_dims[0], 3)[..., 0, :]  # (picked, heads, rows, head_dim)
        return (rows @ maps)[..., None, :], 2


def record_attention(call: Call, hidden: Tensor) -> Attention:
    """Runs the block on whole prompts until it has attended."""
    recorder = _Recorder()
    with contextlib.suppress(_Done), recorder:
        call(hidden)
    if recorder.found is None:
        raise Unsupported("no attention of a known kind was found in it")
    found = recorder.found
    if found.query.ndim != 4 or found.query.shape[2] != hidden.shape[1] or found.key.shape[2] != hidden.shape[1]:
        raise Unsupported("its attention is not over the tokens it is given")
    return found


class _Done(Exception):
    """The rest of the block is not needed."""


class _Recorder(TorchFunctionMode):
    """Watches a block on whole prompts and leaves it once its attention is known."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Attention | None = None
        self.products = 0
        self.scores: tuple[int, Tensor, Tensor, Tensor] | None = None
        self.softmax: tuple[Tensor, Tensor] | None = None

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is _FUSED:
            self.found = _fused_attention(**_named(args, kwargs))
            raise _Done
        if func in _MATMULS and args[0].ndim == 4 and args[1].ndim == 4:
            return self._product(func, args)
        if self.scores is None or self.softmax is not None:
            return func(*args, **kwargs)
        with torch.enable_grad():  # between scores and softmax: scaling, masks, soft-capping, all entry by entry
            output = func(*args, **kwargs)
        if func in _SOFTMAXES and output.shape == self.scores[3].shape:
            return self._weights(output, args[0])
        return output

    def _product(self, func, args):
        self.products += 1
        if self.softmax is not None and self.scores is not None:
            number, query, key, _ = self.scores
            p, w = (each.to(query.dtype) for each in self.softmax)  # some models take the softmax in float32
            self.found = Attention(query, key, args[1], lambda b, t: (p[b, :, t], w[b, :, t]), (number, self.products))
            raise _Done
        scores = func(*args).detach().requires_grad_()
        self.scores = (self.products, args[0], args[1].mT, scores)
        with torch.enable_grad():
            return scores.clone()  # a mask may be added to it in place

    def _weights(self, output: Tensor, before: Tensor) -> Tensor:
        assert self.scores is not None
        scores = self.scores[3]
        slope = None
        if before.requires_grad:
            with torch.enable_grad():
                (slope,) = torch.autograd.grad(before.sum(), scores, allow_unused=True)
        if slope is None:
            raise Unsupported("its softmax does not come from the product before it")
        p = output.detach()
        self.softmax = (p, p * slope)
        return p


def _named(args: tuple, kwargs: dict[str, Any]) -> dict[str, Any]:
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
    return dict(zip(names, args, strict=False)) | kwargs


def _fused_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Attention:
    if query.ndim != 4 or dropout_p:
        raise Unsupported("its attention has no heads, or drops at random")
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    heads, tokens = query.shape[1], key.shape[2]

    def weights(prompts: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
        keys = _expand_heads(key[prompts], heads)  # (picked, heads, tokens, head_dim)
        logits = scale * (keys @ query[prompts, :, places][..., None])[..., 0]  # (picked, heads, tokens)
        if is_causal:
            later = torch.arange(tokens, device=places.device) > places[:, None]
            logits = logits.masked_fill(later[:, None], -math.inf)
        if attn_mask is not None:
            mask = attn_mask.expand(query.shape[0], heads, query.shape[2], tokens)[prompts, :, places]
            logits = logits.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else logits + mask
        p = logits.softmax(-1)
        return p, scale * p

    return Attention(query, key, value, weights, None)


# ---------------------------------------------------------------------------------------- the block on single tokens


class _Replay(TorchFunctionMode):
    """Answers the one attention of a block that is called on single tokens."""

    def __init__(self, attention: Attention, answer: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.attention, self.answer = attention, answer
        self.products = self.answers = 0
        self.scored: tuple[Tensor, Tensor] | None = None

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is _FUSED:
            call = _named(args, kwargs)
            return self._attend(call["query"], call["key"], call["value"])
        if self.attention.matmuls and func in _MATMULS and args[0].ndim == 4 and args[1].ndim == 4:
            self.products += 1
            if self.products == self.attention.matmuls[0]:
                self.scored = args[0], args[1].mT
                return args[0].new_zeros(*args[0].shape[:3], 1)  # what comes of it is not looked at
            if self.products == self.attention.matmuls[1] and self.scored is not None:
                return self._attend(*self.scored, args[1])
        return func(*args, **kwargs)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        self.answers += 1
        if self.answers > 1:
            raise Unsupported("it attends more than once")
        return self.answer(query, key, value)


def _run(call: Call, attention: Attention, leaf: Tensor, answer: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Tensor:
    """Output (picked, dim) of a call for single tokens on their states `leaf` (picked, dim)."""
    replay = _Replay(attention, answer)
    with replay:
        output = call(leaf[:, None])
    if not replay.answers:
        raise Unsupported("it does not attend when it is called on one token")
    return output[:, 0]


def _same_token(call: Call, attention: Attention, hidden: Tensor, pairs: Tensor, chunk_size: int | None) -> Tensor:
    """For pairs (3, picked) of prompt, output place and the same input place: (picked, dim, dim)."""
    prompts, places, _ = pairs
    expansion = attention.expansion(prompts, places)
    with torch.enable_grad():
        leaf = hidden[prompts, places].detach().requires_grad_()
        output = _run(call.at(prompts, places, hidden.shape[:2]), attention, leaf, expansion)
        return _rows(output, leaf, chunk_size)


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


def _cross_token(call: Call, attention: Attention, hidden: Tensor, pairs: Tensor, chunk_size: int | None) -> Tensor:
    """For pairs of different tokens: the input's key and value alone reach the output, through its attention."""
    prompts, outs, ins = pairs
    shape, dim = hidden.shape[:2], hidden.shape[2]
    # the part after the attention is shared by all input tokens of an output token
    tokens, which = torch.unique(torch.stack([prompts, outs]), dim=1, return_inverse=True)
    expansion = attention.expansion(tokens[0], tokens[1])
    cut: list[Tensor] = []

    def answer(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        cut.append(expansion(query, key, value).detach().reshape(expansion.out.shape).requires_grad_())
        return cut[0].reshape(query.shape)

    with torch.enable_grad():
        states = hidden[tokens[0], tokens[1]].detach()
        output = _run(call.at(tokens[0], tokens[1], shape), attention, states, answer)
        after = _rows(output, cut[0], chunk_size)[which]  # (picked, dim, heads, 1, head_dim)

    heads = after.shape[2]
    p, w = (each[which] for each in attention.weights(tokens[0], tokens[1]))
    own = torch.arange(len(ins), device=ins.device)
    p, w = (each[own, :, ins][:, None, :, None, None] for each in (p, w))  # (picked, 1, heads, 1, 1)
    value = _expand_heads(attention.value[prompts], heads)[own, :, ins][:, :, None]
    aligned = (after * (value - expansion.out[which])[:, None]).sum(-1, keepdim=True)
    for_key = w * aligned * expansion.query[which][:, None]  # (picked, dim, heads, 1, head_dim)
    for_value = p * after

    taken: list[Tensor] = []

    def take(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        taken.extend((key, value))
        raise _Done

    with torch.enable_grad():
        leaf = hidden[prompts, ins].detach().requires_grad_()
        with contextlib.suppress(_Done):
            _run(call.at(prompts, ins, shape), attention, leaf, take)
        cotangents = [_sum_heads(each, taken[0].shape[1]).movedim(1, 0) for each in (for_key, for_value)]
        chunk = chunk_size or max(1, min(dim, ROWS // len(ins)))
        parts = zip(*(each.split(chunk) for each in cotangents), strict=True)
        grads = [pull_back(taken, [leaf], part)[0] for part in parts]
    return torch.cat(grads).movedim(0, 1)


def _expand_heads(grouped: Tensor, heads: int) -> Tensor:
    """Keys or values (picked, key_heads, ..) for every query head."""
    return grouped if grouped.shape[1] == heads else grouped.repeat_interleave(heads // grouped.shape[1], 1)


def _sum_heads(each: Tensor, heads: int) -> Tensor:
    """The transpose of `_expand_heads`, on (picked, dim, heads, 1, head_dim)."""
    return each if each.shape[2] == heads else each.unflatten(2, (heads, -1)).sum(3)


def _check_point(found: Tensor, expected: Tensor) -> None:
    """One token alone must come to its attention with what it had within its prompt."""
    tolerance = 1e-3 if found.dtype == torch.float32 else 1e-6
    if float((found.detach() - expected).norm()) > tolerance * float(expected.norm()):
        raise Unsupported("before its attention it does not treat a token alone as within its prompt")


def _cut(value: Any, prompts: Tensor, places: Tensor | None, shape: tuple[int, ...]) -> Any:
    """Arguments for single tokens: every tensor with a row per prompt or per token keeps the rows of these."""
    if isinstance(value, tuple | list):
        return type(value)(_cut(item, prompts, places, shape) for item in value)
    if isinstance(value, dict):
        return {name: _cut(item, prompts, places, shape) for name, item in value.items()}
    if not isinstance(value, Tensor) or value.ndim < 2 or value.shape[0] not in (1, shape[0]):
        return value
    rows = prompts if value.shape[0] == shape[0] else torch.zeros_like(prompts)
    if places is not None and shape[1] > 1:
        if value.ndim == 4 and value.shape[2] == shape[1]:  # a mask: the row of each token's query
            return value[rows, :, places][:, :, None]
        if value.ndim in (2, 3) and value.shape[1] == shape[1]:  # positions, rotary tables
            return value[rows, places][:, None]
    return value[rows] if value.shape[0] == shape[0] else value
