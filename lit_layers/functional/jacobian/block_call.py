"""Calls of a block on whole prompts and on single tokens, Jacobians by reverse mode, and the attention of a block."""

import contextlib
import math
import warnings
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from types import FunctionType
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

# Names of arguments that hold key-value caches as tuples in older releases of transformers. Newer caches are recognised
# by their class.
_CACHES = ("past_key_values", "past_key_value", "layer_past")
# Arguments that are the same for all prompts. The ALiBi of MPT has one row per head. With as many prompts as heads, its
# rows could be mistaken for prompts.
SHARED = ("position_bias",)


class Unsupported(Exception):
    """The fast route (see `block_jacobians.py`) cannot handle something that a block does; the message says what."""


class Alignment(NamedTuple):
    """Moves the padding of each text in a batch to its end, and moves the tokens of results back.

    The batch with all padding at the end is called aligned. Its padding is a copy of the text's first token. In a
    restored result, padding before a text has the value of the first token, padding after it that of the last token.
    """

    order: Tensor  # (batch, tokens): where each token was in the input, before padding was moved to the end
    inverse: Tensor  # (batch, tokens): where each token of the input is after padding was moved to the end
    mask: Tensor  # (batch, tokens): True for real tokens, after padding was moved to the end
    input_mask: Tensor  # (batch, tokens): True for real tokens of the input batch

    @classmethod
    def from_mask(cls, mask: Tensor) -> "Alignment | None":
        """Return the `Alignment` that moves the padding of each text to its end; None if all padding is there already.

        `mask` (batch, tokens) is True for real tokens.
        """
        real = mask.bool()
        packed = real.sort(dim=-1, descending=True, stable=True)
        if bool((packed.values == real).all()):
            return None
        first = packed.indices[:, :1].expand_as(packed.indices)
        inverse = (real.long().cumsum(-1) - 1).clamp(min=0)
        return cls(torch.where(packed.values, packed.indices, first), inverse, packed.values, real)

    def align(self, values: Tensor) -> Tensor:
        """Return `values` (batch, tokens, *n) with the padding of each text moved to its end."""
        return _take_tokens(values, self.order)

    def restore(self, values: Tensor) -> Tensor:
        """Return a result of the aligned batch (batch, tokens, *n) with each token back at its input position."""
        return _take_tokens(values, self.inverse)

    def select(self, some: slice) -> "Alignment":
        return Alignment(*(part[some] for part in self))


class Call(NamedTuple):
    """A block with all arguments of one call except the hidden states."""

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def __call__(self, hidden: Tensor) -> Tensor:
        # Call `forward`, not the module: hooks and gradient checkpointing are not part of the function.
        output = self.module.forward(hidden, *self.args, **self.kwargs)
        return output[0] if isinstance(output, tuple | list) else output

    def select(self, prompts: Tensor, pos: Tensor | None, shape: tuple[int, ...]) -> "Call":
        """Return the call for single tokens: each token at (prompts, pos) is a prompt of one token.

        If `pos` is None, return the call for the whole prompts with the indices `prompts`. Key-value caches are removed
        from the arguments. `shape` is (batch, tokens) of the original call.
        """
        args = tuple(None if is_cache(value) else value for value in self.args)
        kwargs = {name: None if name in _CACHES or is_cache(value) else value for name, value in self.kwargs.items()}
        return Call(self.module, _select(args, prompts, pos, shape), _select(kwargs, prompts, pos, shape))


def is_cache(value: Any) -> bool:
    # Compare class names instead of using isinstance, so that blocks of timm do not import transformers.
    return any(base.__name__ == "Cache" for base in type(value).__mro__)


def to_call(block: Callable[[Tensor], Tensor]) -> Call | None:
    """Return a `Call` with the module of a block and the arguments of its call.

    Return None if the block is not a module, or if the user has added hooks to it. A hook may depend on all tokens of
    the call, so its result could be wrong for single tokens.
    """
    if has_hooks(getattr(block, "module", block)):
        return None
    if isinstance(block, nn.Module):
        return Call(block, (), {})
    # Refuse modules whose states have other axes than (batch, tokens, dim): tokens could not be selected from them.
    if getattr(getattr(block, "layout", None), "axes", ()):
        return None
    module, args, kwargs = (getattr(block, name, None) for name in ("module", "args", "kwargs"))
    if isinstance(module, nn.Module) and isinstance(args, tuple) and isinstance(kwargs, dict):
        return Call(module, args, kwargs)
    return None


def has_hooks(module: Any) -> bool:
    """Return whether a module or one of its submodules has a forward hook that the user added."""
    return isinstance(module, nn.Module) and any(map(is_hooked, module.modules()))


def is_hooked(module: Any) -> bool:
    """Return whether this module itself has a forward hook that neither torch nor transformers added."""
    hooks = (*module._forward_pre_hooks.values(), *module._forward_hooks.values())
    return any(not getattr(hook, "__module__", "").startswith(("torch.", "transformers.")) for hook in hooks)


@contextlib.contextmanager
def evaluating(module: nn.Module) -> Generator[None, None, None]:
    """Put all submodules into evaluation mode inside the context, and restore the mode of each afterwards."""
    modes = [(part, part.training) for part in module.modules()]
    for part, training in modes:
        if training:
            part.training = False
    try:
        yield
    finally:
        for part, training in modes:
            if part.training != training:
                part.training = training


def _take_tokens(values: Tensor, pos: Tensor) -> Tensor:
    return values[torch.arange(len(pos), device=pos.device)[:, None], pos]


def _select(value: Any, prompts: Tensor, pos: Tensor | None, shape: tuple[int, ...]) -> Any:
    """Return the arguments of a call for single tokens, or for whole prompts if `pos` is None.

    Each tensor with a row per prompt or per token keeps the rows of the selected tokens. Other values are unchanged.
    """
    if isinstance(value, tuple | list):
        return type(value)(_select(item, prompts, pos, shape) for item in value)
    if isinstance(value, dict):
        return {name: item if name in SHARED else _select(item, prompts, pos, shape) for name, item in value.items()}
    if not isinstance(value, Tensor) or value.ndim < 2 or value.shape[0] not in (1, shape[0]):
        return value
    rows = prompts if value.shape[0] == shape[0] else torch.zeros_like(prompts)
    if pos is not None and shape[1] > 1:
        if value.ndim == 4 and value.shape[2] == shape[1]:  # a mask (batch, any, queries, keys)
            return value[rows, :, pos][:, :, None]
        if value.ndim in (2, 3) and value.shape[1] == shape[1]:  # positions, rotary tables
            return value[rows, pos][:, None]
    return value[rows] if value.shape[0] == shape[0] else value


# Vector-Jacobian products for many output coordinates at once, which give the Jacobian of any block.


# Largest number of rows times tokens in one chunk of the backward pass. With more, its buffers do not fit into the CPU
# cache. Measured as the fastest number at dim 128 and 768 on CPU.
ROWS = 8192


def jacobians_by_reverse_mode(block: Callable[[Tensor], Tensor], hidden: Tensor, outs: Tensor, ins: Tensor) -> Tensor:
    """Return the Jacobians d block(X)[out] / d X[in] at some positions, (batch, out, in, dim, dim).

    `outs` (batch, out) are positions of output tokens. `ins` (batch, out, in) are positions of input tokens.
    """
    batch, tokens, dim = hidden.shape
    chunk = max(1, min(dim, ROWS // (batch * tokens)))
    prompts = torch.arange(batch, device=hidden.device)
    result = hidden.new_empty(batch, outs.shape[1], ins.shape[2], dim, dim)
    # Run attention by the math kernel: `pull_back` vmaps the backward pass, and the fused kernels have no vmap rule.
    with torch.enable_grad(), sdpa_kernel(SDPBackend.MATH):
        leaf = hidden.detach().clone().requires_grad_()
        output = block(leaf)
        if not isinstance(output, Tensor) or output.shape != hidden.shape:
            got = tuple(output.shape) if isinstance(output, Tensor) else type(output).__name__
            raise ValueError(f"expected the block to return a tensor of shape {tuple(hidden.shape)}, got {got}")
        if not output.requires_grad:  # the block ignores or detaches its input
            return result.zero_()
        for item in range(outs.shape[1]):
            selected = output[prompts, outs[:, item]]  # (batch, dim)
            for start in range(0, dim, chunk):
                rows = slice(start, min(start + chunk, dim))
                (grads,) = pull_back([selected], [leaf], [basis_rows(selected, rows)])  # (rows, batch, tokens, dim)
                result[:, item, :, rows] = grads[:, prompts[:, None], ins[:, item]].permute(1, 2, 0, 3)
    return result


def basis_rows(output: Tensor, rows: slice) -> Tensor:
    """Return `rows` of the identity as cotangents of an output (batch, dim), the same for every prompt.

    Shape (rows, batch, dim).
    """
    basis = torch.eye(output.shape[-1], dtype=output.dtype, device=output.device)[rows]
    return basis[:, None].expand(-1, output.shape[0], -1)


def pull_back(outputs: Sequence[Tensor], leaves: Sequence[Tensor], cotangents: Sequence[Tensor]) -> list[Tensor]:
    """Return the gradient with respect to each leaf, (rows, *leaf), for several cotangents of the outputs at once.

    `cotangents` has one tensor (rows, *output) for each output. The gradients are summed over the outputs.
    """
    call = {"retain_graph": True, "allow_unused": True, "materialize_grads": True}
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="There is a performance drop")
            return list(torch.autograd.grad(outputs, leaves, cotangents, is_grads_batched=True, **call))
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        # A custom autograd function has no vmap rule: run one backward pass for each row.
        if "vmap" not in str(error) and "functorch" not in str(error):
            raise
        single = [torch.autograd.grad(outputs, leaves, rows, **call) for rows in zip(*cotangents, strict=True)]
        return [torch.stack(grads) for grads in zip(*single, strict=True)]


# The attention of a block: its first-order expansion for single tokens, and the attention pattern of its heads.
#
# For one head and output token t, let the scores be s_n = c(q k_n) for the tokens n to which t can attend. The function
# c scales, caps, and adds masks and position biases. The weights are p = softmax(s), the output is a = sum_n p_n v_n.
# From dp_n = p_n (ds_n - sum_m p_m ds_m) follows da = sum_n p_n (v_n - a) ds_n + sum_n p_n dv_n. The output a is
# subtracted because the weights always sum to 1. With ds_n = c'(q k_n) (dq k_n + q dk_n) and w_n = p_n c'(q k_n),
# the output is, to first order in a change of one of the following inputs:
#
#     the query of t                   a + dq M        M = sum_n w_n k_n (v_n - a)'
#     the key and value of token s     a + w_s (v_s - a) (q dk_s) + p_s dv_s
#
# The same-token Jacobian has all three terms, with s = t. All that it needs of the whole prompt are M, w_t, p_t and a.
# Their sizes do not depend on the length of the prompt, so a long prompt costs no more than a short one.
#
# The module itself is called, so the following need no code per model: fused attention or matmul-softmax-matmul,
# grouped heads, rotary tables, masks, windows, ALiBi, soft-capping. Anything else raises `Unsupported`.

FUSED = F.scaled_dot_product_attention
MATMULS = (torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__, torch.bmm, torch.Tensor.bmm)
_SOFTMAXES = (F.softmax, torch.softmax, torch.Tensor.softmax)
# torch.nn.MultiheadAttention calls this function, which first calls `has_torch_function`. If a TorchFunctionMode is
# active, the function passes only itself to the mode, so the mode never sees the attention inside. `_opened` is a copy
# of the function in which `has_torch_function` returns False. If a release of torch tests for a mode in another way,
# the attention stays hidden.
MODULE = F.multi_head_attention_forward
_IS_OPEN = "has_torch_function" in MODULE.__code__.co_names


def _false(tensors: Any) -> bool:
    return False


_opened = FunctionType(MODULE.__code__, {**vars(F), "has_torch_function": _false}, argdefs=MODULE.__defaults__)


@dataclass(frozen=True)
class Attention:
    """The attention of one block call on whole prompts.

    Query, key and value are (batch, heads, tokens, head_dim). Keys and values may have fewer heads than queries. In
    shapes, `picked` is the number of single tokens that a caller asks for.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    # From prompts and positions of query tokens, return the softmax weights p and w = p c' of the formulas above, each
    # (picked, heads, tokens).
    weights: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
    matmuls: tuple[int, int] | None  # which of the block's products give scores and output; None if fused
    pattern: Callable[[int], Tensor]  # softmax weights p of a prompt, given its index, (heads, queries, keys)

    def expansion(self, prompts: Tensor, pos: Tensor) -> "Expansion":
        p, w = self.weights(prompts, pos)
        heads = p.shape[1]
        key, value = (expand_heads(states[prompts], heads) for states in (self.key, self.value))
        out = p[:, :, None] @ value  # (picked, heads, 1, head_dim)
        index = torch.arange(len(pos), device=pos.device)
        # `query_map` is M = sum_n w_n k_n (v_n - a)' of the formulas above. It has `value - out` and not `value`: the
        # weights sum to 1, so a higher score of one token lowers the weights of all others.
        return Expansion(
            out=out,
            query=self.query[prompts, :, pos][:, :, None],
            key=key[index, :, pos][:, :, None],
            value=value[index, :, pos][:, :, None],
            p=p[index, :, pos][:, :, None, None],
            w=w[index, :, pos][:, :, None, None],
            query_map=(w[..., None] * key).mT @ (value - out),
        )


class Expansion(NamedTuple):
    """First-order expansions of the attention output at some query tokens; see the formulas above.

    In shapes, `picked` is the number of these tokens. Tensors are (picked, heads, 1, head_dim). `p` and `w`, the
    weights p_t and w_t of each query token for itself, are (picked, heads, 1, 1).
    """

    out: Tensor
    query: Tensor
    key: Tensor
    value: Tensor
    p: Tensor
    w: Tensor
    query_map: Tensor  # (picked, heads, head_dim, head_dim)

    def check(self, query: Tensor, key: Tensor, value: Tensor) -> None:
        """Raise `Unsupported` if the query, key or value of a token changes when the block runs on this token alone.

        The first-order expansion is valid only at the query, key and value around which it was computed.
        """
        heads = self.query.shape[1]
        if query.numel() != self.query.numel():
            raise Unsupported("its attention takes other shapes for one token")
        _check_point(query.reshape(self.query.shape), self.query)
        _check_point(expand_heads(key, heads), self.key)
        _check_point(expand_heads(value, heads), self.value)

    def push_query(self, tangents: Tensor) -> Tensor:
        """Return the changes of the attention output that follow from small changes of the queries.

        `tangents` (picked, heads x head_dim, num) holds `num` changes for each of `picked` tokens. The result has the
        same shape.
        """
        return (self.query_map.mT @ self._split_heads(tangents, self.query)).flatten(1, 2)

    def push_key(self, tangents: Tensor) -> Tensor:
        slopes = (self.w * (self.value - self.out)).mT  # (picked, heads, head_dim, 1)
        return (slopes * (self.query @ self._split_heads(tangents, self.key))).flatten(1, 2)

    def push_value(self, tangents: Tensor) -> Tensor:
        return (self.p * self._split_heads(tangents, self.value)).flatten(1, 2)

    @staticmethod
    def _split_heads(tangents: Tensor, reference: Tensor) -> Tensor:
        """Return tangents split into heads, with those of each key head repeated for each of its query heads.

        Each token has `num` tangents. For `picked` tokens, the shape (picked, key_heads x head_dim, num) becomes
        (picked, heads, head_dim, num). `reference` (picked, heads, 1, head_dim) gives the sizes.
        """
        picked, heads, _, head_dim = reference.shape
        return expand_heads(tangents.reshape(picked, -1, head_dim, tangents.shape[-1]), heads)


def record_attention(call: Callable[[Tensor], Tensor], hidden: Tensor) -> Attention:
    """Run a block on whole prompts, stop it after its attention, and return that attention.

    Raises:
        Unsupported: the block has no attention of a known kind, or its attention is over other tokens than those of
            `hidden`.
    """
    recorder = _Recorder()
    with contextlib.suppress(Done), recorder:
        call(hidden)
    attention = recorder.attention
    if attention is None:
        raise Unsupported("no attention of a known kind was found in it")
    if attention.query.ndim != 4 or {attention.query.shape[2], attention.key.shape[2]} != {hidden.shape[1]}:
        raise Unsupported("its attention is not over the tokens it is given")
    return attention


class Done(Exception):
    """Raised to stop a block whose remaining computation is not needed."""


class _Calls(TorchFunctionMode):
    """Passes each torch function that a block calls to `handle`, including those inside torch's attention module."""

    module_kwargs: ClassVar[dict[str, Any]] = {}  # arguments of torch's attention module to replace

    def __init__(self) -> None:
        super().__init__()
        self.products = 0

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is MODULE and _IS_OPEN:
            with self:
                return _opened(*args, **kwargs | self.module_kwargs)
        return self.handle(func, args, kwargs)

    def handle(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        raise NotImplementedError

    def is_head_product(self, func: Callable[..., Any], args: tuple[Any, ...]) -> bool:
        """Return whether a call is a matrix product of 4-dimensional tensors, as in attention, and count it if so."""
        is_product = func in MATMULS and args[0].ndim == 4 and args[1].ndim == 4
        self.products += is_product
        return is_product


class _Recorder(_Calls):
    """Records the attention of a block on whole prompts, and stops the block afterwards."""

    def __init__(self) -> None:
        super().__init__()
        self.attention: Attention | None = None
        self.scores: tuple[int, Tensor, Tensor, Tensor] | None = None
        self.softmax: tuple[Tensor, Tensor] | None = None

    def handle(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func is FUSED:
            self.attention = _fused_attention(**_named(args, kwargs))
            raise Done
        if self.is_head_product(func, args):
            return self._product(func, args)
        if self.scores is None or self.softmax is not None:
            return func(*args, **kwargs)
        # These calls come between scores and softmax: scaling, masks and soft-capping. They run with gradients, because
        # `_weights` differentiates them.
        with torch.enable_grad():
            output = func(*args, **kwargs)
        if func in _SOFTMAXES and output.shape == self.scores[3].shape:
            return self._weights(output, args[0])
        return output

    def _product(self, func: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        if self.softmax is not None and self.scores is not None:
            index, query, key, _ = self.scores
            p, w = (part.to(query.dtype) for part in self.softmax)  # softmax may be in float32
            self.attention = Attention(
                query, key, args[1], lambda b, t: (p[b, :, t], w[b, :, t]), (index, self.products), lambda b: p[b]
            )
            raise Done
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
                # The function c from `scores` to `before` acts entry by entry. So the gradient of the sum of c(scores)
                # is the derivative c' at each entry.
                (slope,) = torch.autograd.grad(before.sum(), scores, allow_unused=True)
        if slope is None:
            raise Unsupported("its softmax does not come from the product before it")
        p = output.detach()
        self.softmax = (p, p * slope)
        return p


def _named(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
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

    # Fused kernels return no weights, so p is recomputed from queries, keys and mask, but only for the requested rows.
    def shares(logits: Tensor, prompts: Tensor, pos: Tensor) -> Tensor:
        if is_causal:
            later = torch.arange(tokens, device=pos.device) > pos[:, None]
            logits = logits.masked_fill(later[:, None], -math.inf)
        if attn_mask is not None:
            mask = attn_mask.expand(query.shape[0], heads, query.shape[2], tokens)[prompts, :, pos]
            logits = logits.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else logits + mask
        return logits.softmax(-1)

    def weights(prompts: Tensor, pos: Tensor) -> tuple[Tensor, Tensor]:
        keys = expand_heads(key[prompts], heads)  # (picked, heads, tokens, head_dim)
        logits = scale * (keys @ query[prompts, :, pos][..., None])[..., 0]  # (picked, heads, tokens)
        p = shares(logits, prompts, pos)
        return p, scale * p

    def pattern(prompt: int) -> Tensor:
        logits = scale * (query[prompt] @ expand_heads(key[[prompt]], heads)[0].mT)  # (heads, queries, tokens)
        pos = torch.arange(query.shape[2], device=query.device)
        return shares(logits.movedim(1, 0), torch.full_like(pos, prompt), pos).movedim(0, 1)

    return Attention(query, key, value, weights, None, pattern)


class Replay(_Calls):
    """Replaces a block's attention output by `answer(query, key, value)` while the block runs on single tokens.

    Raises `Unsupported` if the block calls its attention a second time.
    """

    # Call torch's attention module without masks: the recorded attention weights already contain them, and a mask for
    # the whole prompt does not fit one token.
    module_kwargs: ClassVar = {"attn_mask": None, "key_padding_mask": None, "is_causal": False}

    def __init__(self, attention: Attention, answer: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.attention, self.answer = attention, answer
        self.answers = 0
        self.scored: tuple[Tensor, Tensor] | None = None

    def handle(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func is FUSED:
            call = _named(args, kwargs)
            return self._attend(call["query"], call["key"], call["value"])
        if self.attention.matmuls and self.is_head_product(func, args):
            if self.products == self.attention.matmuls[0]:
                self.scored = args[0], args[1].mT
                return args[0].new_zeros(*args[0].shape[:3], 1)  # dummy scores, never used
            if self.products == self.attention.matmuls[1] and self.scored is not None:
                return self._attend(*self.scored, args[1])
        return func(*args, **kwargs)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        self.answers += 1
        if self.answers > 1:
            raise Unsupported("it attends more than once")
        return self.answer(query, key, value)


def expect_single_tokens(output: Tensor, states: Tensor) -> None:
    """Raise `Unsupported` if the output of a block for prompts of one token is not one token for each prompt.

    For example, a block that adds embeddings of all positions returns more tokens.
    """
    if output.shape != (len(states), 1, states.shape[-1]):
        raise Unsupported("it does not make one token of one token")


def expand_heads(grouped: Tensor, heads: int) -> Tensor:
    """Return keys or values (any, key_heads, ..), repeated so that each of the `heads` query heads has its own."""
    return grouped if grouped.shape[1] == heads else grouped.repeat_interleave(heads // grouped.shape[1], 1)


def sum_heads(values: Tensor, heads: int) -> Tensor:
    """Return the values summed over the query heads that share a key head, for `heads` key heads.

    The shape (pairs, dim, query heads, 1, head_dim) becomes (pairs, dim, heads, 1, head_dim), for pairs of tokens. This
    is the transpose of `expand_heads`.
    """
    return values if values.shape[2] == heads else values.unflatten(2, (heads, -1)).sum(3)


def _check_point(single: Tensor, expected: Tensor) -> None:
    """Raise `Unsupported` if a query, key or value of a token alone (`single`) differs from that in its prompt."""
    tolerance = 1e-3 if single.dtype == torch.float32 else 1e-6
    if float((single.detach() - expected).norm()) > tolerance * float(expected.norm()):
        raise Unsupported("before its attention it does not treat a token alone as within its prompt")


# Attention patterns. The block stops after its attention, and the weights are computed from its queries, keys and mask.
# A pattern therefore costs the query, key and value projections of a block, but no MLP and no autograd graph.


def read_attention(call: Callable[[Tensor], Tensor], hidden: Tensor) -> Attention:
    """Return the attention of a block for the input `hidden` (batch, tokens, dim).

    In the result, padding follows the real tokens of each prompt.

    Raises:
        Unsupported: the block has no attention of a known kind, or its attention is over other tokens or prompts than
            those of `hidden`.
    """
    alignment = getattr(call, "alignment", None)
    if alignment is not None:  # padding comes before the texts
        call, hidden = call.aligned(), alignment.align(hidden)  # pyright: ignore[reportFunctionMemberAccess]
    with torch.no_grad():
        attention = record_attention(call, hidden)
    if attention.query.shape[0] != len(hidden):
        raise Unsupported("its attention is not over the prompts it is given")
    return attention
