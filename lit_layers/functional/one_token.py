"""Block Jacobians from calls of the block on one token: the cost does not grow with the length of the prompt.

A block of a transformer mixes tokens in its attention only. So the block itself is called on single tokens, and where
it attends, the answer is attention's first-order expansion around the whole prompt (`attention`). Value and derivative
at that point are exact, hence so is the Jacobian. Parallel and post-norm blocks are nothing special.
"""

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from lit_layers.functional.attention import (
    Attention,
    Call,
    Done,
    Expansion,
    Replay,
    Unsupported,
    basis_rows,
    evaluating,
    expand_heads,
    expect_single_tokens,
    pull_back,
    record_attention,
    run_on_tokens,
    sum_heads,
)

# Same-token Jacobians from a call of the block on single tokens that is cut at its linear maps.
#
# The output of every linear map z = W u + b, and of the attention, is made a leaf of the graph. What is left between
# the leaves is cheap (norms, activations, rotations, sums), and the Jacobian of a linear map is its weight. Going
# backwards from the output, a linear map that ends the block costs no product, an activation one entry-by-entry
# product. The maps that make queries, keys and values are taken forwards through the attention's expansion, and joined
# by one product. For GPT-2 that makes 12 dim^3 floating-point operations where reverse mode through the token takes 24
# dim^3.

_ADDMMS = (torch.addmm, torch.Tensor.addmm)
# Entries of the widest intermediate held at a time: on a CPU 8 MB stay near the cache, a GPU wants long products.
_ENTRIES = {"cpu": 2**21}
_ENTRIES_ELSEWHERE = 2**27


class Linear(NamedTuple):
    """One linear map of a call on single tokens."""

    input: Tensor  # (picked, .., in), a function of earlier leaves
    weight: Tensor  # (out, in)
    output: Tensor  # (picked, .., out), a leaf


class Link(NamedTuple):
    """How one tensor depends on one leaf: entry by entry with these slopes, or (None) in some other way."""

    leaf: int
    slopes: Tensor | None  # (picked, width)


class _Replay(Replay):
    """Answers the attention and makes leaves of it and of every linear map."""

    def __init__(self, attention: Attention, expansion: Expansion, states: Tensor) -> None:
        super().__init__(attention, self._take)
        self.expansion, self.states = expansion, states
        self.nodes: list[Linear | None] = []  # None: the attention
        self.ends: tuple[Tensor, Tensor, Tensor] | None = None  # query, key, value
        self.attended: Tensor | None = None

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        output = super().__torch_function__(func, types, args, kwargs)
        if func is F.linear:
            named = dict(zip(("input", "weight", "bias"), args, strict=False)) | (kwargs or {})
            return self._linear(output, named["input"], named["weight"], named.get("bias"))
        if func in _ADDMMS and not kwargs:
            return self._linear(output, args[1], args[2].mT, args[0])
        return output

    def _linear(self, output: Tensor, given: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if not given.requires_grad or not output.requires_grad:  # a constant, or made without gradients
            return output
        if any(self._moves(constant) for constant in (weight, bias)):
            raise Unsupported("the weight or bias of a linear map depends on the input")
        if len(given) != len(self.expansion.out) or given.numel() != len(given) * weight.shape[1]:
            raise Unsupported("a linear map does not take its tokens one by one")
        leaf = output.detach().requires_grad_()
        # the products of many tokens want rows that lie together
        weight = weight.detach() if len(given) == 1 else weight.detach().contiguous()
        self.nodes.append(Linear(given, weight, leaf))
        return leaf

    def _moves(self, tensor: Tensor | None) -> bool:
        """Whether a tensor depends on the states; most have no history at all."""
        if tensor is None or tensor.grad_fn is None:
            return False
        leaves = [self.states, *(node.output for node in self.nodes if node is not None)]
        leaves += [] if self.attended is None else [self.attended]
        return any(gradient is not None for gradient in _gradients(tensor.sum(), leaves))

    def _take(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        self.expansion.check(query, key, value)
        self.ends = query, key, value
        self.attended = self.expansion.out.detach().reshape(query.shape).clone().requires_grad_()
        self.nodes.append(None)
        return self.attended


class CutBlock:
    """A block's call on single tokens (picked, dim), cut, with what each piece depends on.

    Between two linear maps of a block stand element-wise functions and norms, whose derivative for one token is cheap.
    The linear maps themselves are weights that all tokens share: d output / d input is a product of such pieces, and a
    cotangent passes a linear map by one product with its weight, without autograd.

    Leaf 0 is the input, leaf 1 + n the output of node n. Cotangents are (rows, picked, width); where they are the same
    for every token, (rows, 1, width).

    Raises:
        Unsupported: it does not attend, or has a linear map over something else than single tokens.
    """

    def __init__(self, call: Call, attention: Attention, expansion: Expansion, states: Tensor) -> None:
        self.picked, self.dim = states.shape
        with torch.enable_grad():
            leaf = states.detach().requires_grad_()
            replay = _Replay(attention, expansion, leaf)
            with replay:
                self.output = call(leaf[:, None])
            expect_single_tokens(self.output, states)
            if replay.ends is None or replay.attended is None:
                raise Unsupported("it does not attend when it is called on one token")
            self.expansion, self.nodes, self.ends = expansion, replay.nodes, replay.ends
            self.leaves = [leaf, *(replay.attended if node is None else node.output for node in self.nodes)]
            self.links = [_links(self.output, self.leaves)]
            for before, node in enumerate(self.nodes, start=1):
                self.links.append([] if node is None else _links(node.input, self.leaves[:before]))

    def jacobians(self, chunk_size: int | None = None) -> Tensor:
        """d block(x) / dx, (picked, dim, dim).

        Raises:
            Unsupported: its attention is fed otherwise than by linear maps.
        """
        with torch.enable_grad():
            joined = self._joined()
            result = self.output.new_empty(self.picked, self.dim, self.dim)
            for rows in self._chunks(chunk_size):
                found = self._cotangents(rows, joined)
                result[:, rows] = found.expand(-1, self.picked, -1).transpose(0, 1)
        return result

    def after_attention(self, chunk_size: int | None = None) -> Tensor:
        """d block(x) / d output of its attention, (picked, dim, heads x head_dim)."""
        with torch.enable_grad():
            parts = [self._cotangents(rows, None) for rows in self._chunks(chunk_size)]
        return torch.cat(parts).expand(-1, self.picked, -1).transpose(0, 1)

    def _chunks(self, chunk_size: int | None) -> Iterator[slice]:
        width = max(leaf.numel() for leaf in self.leaves)  # of all picked tokens
        entries = _ENTRIES.get(self.output.device.type, _ENTRIES_ELSEWHERE)
        num = max(1, min(self.dim // 64, round(self.dim * width / entries)))
        size = chunk_size or math.ceil(self.dim / num)
        return (slice(start, min(start + size, self.dim)) for start in range(0, self.dim, size))

    def _joined(self) -> dict[int, Tensor]:
        """Jacobians (picked, heads x head_dim, in) of the attention's output, by the linear map whose input it is."""
        maps: dict[int, Tensor] = {}
        # forwards, the tangents are the columns of the weights: no product before the attention itself
        shared: dict[int, int] = {}  # queries, keys and values are mostly made from one input
        pushes = self.expansion.push_query, self.expansion.push_key, self.expansion.push_value
        for end, push in zip(self.ends, pushes, strict=True):
            for link in _links(end, self.leaves):
                node = self.nodes[link.leaf - 1] if link.leaf else None
                if node is None:
                    raise Unsupported("its attention is fed otherwise than by linear maps")
                leaf = shared.setdefault(id(node.input), link.leaf)
                maps[leaf] = _add(maps.get(leaf), push(_push_forward(node, end)))
        return maps

    def _cotangents(self, rows: slice, joined: dict[int, Tensor] | None) -> Tensor:
        """Rows of the Jacobian at the input, (rows, picked, dim), or (`joined` None) at the attention's output."""
        found: dict[int, Tensor] = {}
        ends = {link.leaf: link.slopes[:, rows].T for link in self.links[0] if link.slopes is not None}
        others = [link for link in self.links[0] if link.slopes is None]
        if others:
            self._push(found, self.output, others, self._basis(rows))
        # Leaves stand in the order in which they were computed: going back, all that depends on one has been added up
        # when its turn comes.
        for leaf in range(len(self.nodes), 0, -1):
            node, rest, end = self.nodes[leaf - 1], found.pop(leaf, None), ends.get(leaf)
            if node is None:
                if end is not None:  # the output is a function of it entry by entry
                    rest = _add(rest, end[..., None] * self._basis(rows))
                if joined is None:
                    return self.output.new_zeros(len(range(self.dim)[rows]), 1, 1) if rest is None else rest
                if rest is not None:
                    self._through_attention(found, joined, rest)
                continue
            before = None if rest is None else (rest.flatten(0, 1) @ node.weight).unflatten(0, rest.shape[:2])
            if end is not None:  # the map ends the block: its weight, scaled
                before = _add(before, _scaled(node.weight[rows][:, None], end[..., None]))
            if before is not None:
                self._push(found, node.input, self.links[leaf], before)
        result = found.get(0, self._basis(rows) * 0)
        if 0 in ends:
            result = result.expand(-1, self.picked, -1).clone()
            result[:, :, rows].diagonal(dim1=0, dim2=2).add_(ends[0].T)
        return result

    def _basis(self, rows: slice) -> Tensor:
        """Unit vectors of the output as cotangents, (rows, 1, dim)."""
        basis = self.output.new_zeros(rows.stop - rows.start, 1, self.dim)
        basis[:, 0, rows].fill_diagonal_(1)
        return basis

    def _through_attention(self, found: dict[int, Tensor], joined: dict[int, Tensor], cotangents: Tensor) -> None:
        by_token = cotangents.expand(-1, self.picked, -1).transpose(0, 1)
        for leaf, jacobians in joined.items():
            node = self.nodes[leaf - 1]
            assert node is not None
            self._push(found, node.input, self.links[leaf], (by_token @ jacobians).transpose(0, 1))

    def _push(self, found: dict[int, Tensor], output: Tensor, links: Sequence[Link], cotangents: Tensor) -> None:
        """Adds to each leaf's cotangents what comes through `output`."""
        others = [link.leaf for link in links if link.slopes is None]
        for link in links:
            if link.slopes is not None:
                found[link.leaf] = _add(found.get(link.leaf), _scaled(cotangents, link.slopes))
        if others:
            full = cotangents.expand(-1, self.picked, -1).reshape(len(cotangents), *output.shape)
            grads = pull_back([output], [self.leaves[leaf] for leaf in others], [full])
            for leaf, grad in zip(others, grads, strict=True):
                found[leaf] = _add(found.get(leaf), grad.reshape(len(grad), self.picked, -1))


def _links(output: Tensor, leaves: Sequence[Tensor]) -> list[Link]:
    """The leaves that a tensor depends on.

    J is diagonal if J'r = r x J'1 for a random r: what lies off the diagonal would have to cancel by chance.
    """
    if not output.requires_grad:
        return []
    probe = torch.randn(output.shape, generator=torch.Generator().manual_seed(0), dtype=output.dtype)
    probe = probe.to(output.device)
    slopes = _gradients(output, leaves, torch.ones_like(output))
    probes = _gradients(output, leaves, probe)
    found = []
    for leaf, (ones, tried) in enumerate(zip(slopes, probes, strict=True)):
        if ones is None or tried is None:
            continue
        diagonal = None
        if ones.numel() == output.numel():
            ones, tried = ones.reshape(len(ones), -1), tried.reshape(len(tried), -1)
            # an entry-by-entry map has the same slopes under any cotangent, which only scales them
            rest = (tried - probe.reshape(tried.shape) * ones).norm()
            if float(rest) <= 8 * torch.finfo(ones.dtype).eps * float(tried.norm()):
                diagonal = ones
        found.append(Link(leaf, diagonal))
    return found


def _push_forward(linear: Linear, end: Tensor) -> Tensor:
    """d end / d input of a linear map that it depends on, (picked, *end, in).

    The pull-back is a linear function of its cotangent: its own pull-back carries tangents forward.
    """
    cotangent = torch.zeros_like(end, requires_grad=True)
    (back,) = torch.autograd.grad(end, linear.output, cotangent, create_graph=True)
    width = linear.weight.shape[1]
    tangents = linear.weight.mT[:, None].expand(-1, len(end), -1).reshape(width, *linear.output.shape)
    (forward,) = pull_back([back], [cotangent], [tangents])  # (in, picked, heads, 1, head_dim)
    return forward.movedim(0, -1)


def _scaled(cotangents: Tensor, slopes: Tensor) -> Tensor:
    return cotangents if bool((slopes == 1).all()) else cotangents * slopes


def _add(sum_: Tensor | None, term: Tensor) -> Tensor:
    return term if sum_ is None else sum_ + term


def _gradients(output: Tensor, leaves: Sequence[Tensor], cotangent: Tensor | None = None) -> tuple[Tensor | None, ...]:
    """Of one output by each leaf: None where it does not depend on it."""
    return torch.autograd.grad(output, leaves, cotangent, retain_graph=True, allow_unused=True)


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
            found = torch.stack([probe @ jacobian.double() for jacobian in jacobians[0, item]])
            difference = ((found - exact).norm(dim=-1).nan_to_num(math.inf) - rounding).clamp(min=0)
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

    p, w = (each[which] for each in attention.weights(tokens[0], tokens[1]))
    own = torch.arange(len(ins), device=ins.device)
    p, w = (each[own, :, ins][:, None, :, None, None] for each in (p, w))  # (picked, 1, heads, 1, 1)
    value = expand_heads(attention.value[prompts], heads)[own, :, ins][:, :, None]
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
        cotangents = [sum_heads(each, taken[0].shape[1]).movedim(1, 0) for each in (for_key, for_value)]
        chunk = chunk_size or max(1, min(dim, ROWS // len(ins)))
        parts = zip(*(each.split(chunk) for each in cotangents), strict=True)
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
