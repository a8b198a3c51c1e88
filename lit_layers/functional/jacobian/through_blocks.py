"""Jacobians through all blocks of a model at once: what a Jacobian lens is made of.

Cotangents of all `dim` directions at every place of a prompt go down block by block. Three things make that cheaper
than backward passes through the model, and leave it exact:

- Of a causal model nothing goes to a later place. So places in front of the first that is asked for are constants, as
  keys and values in a cache are, and those behind the last have no cotangent.
- A block is cut at its linear maps (`linear_cut.CutBlock`), and its places are rows of products with their weights.
  Between two places stands the attention alone, whose derivative is written out (`block_attention`'s formulas).
- Two linear maps with a function entry by entry between them, as in an MLP, are multiplied with one another once for
  each place; all directions then go through one product of dim x dim.

For GPT-2, in operations a block and place: 10 dim^3 through the MLP (8 for its product, 2 for the directions) where
reverse mode by autograd has 16 dim^3, 8 dim^3 through the maps of the attention, 6 dim^2 tokens through its weights.
Of an MLP with a gate, as Llama has, 12.7 dim^3 instead of 16.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from lit_layers.functional._checks import check_option
from lit_layers.functional.jacobian.block_attention import Expansion, record_attention, sum_heads
from lit_layers.functional.jacobian.block_call import Call, Unsupported, as_call, evaluating, pull_back
from lit_layers.functional.jacobian.block_jacobians import exact_arithmetic, warn_once
from lit_layers.functional.jacobian.linear_cut import CutBlock, Linear, Link, links_of


def rows_at_a_time(places: int, dim: int, device: torch.device) -> tuple[int, int]:
    """Directions that go through a block at a time, and how many wait together between two blocks.

    On a CPU 8,192 rows keep what a block makes of them near the cache, a GPU wants long products. Of 128 places all
    directions wait together up to a width of 1,448, 1 GB in float32, on a GPU to 2,896, 4 GB; of wider models an MLP's
    maps are multiplied with cotangents one after the other, which then is less.
    """
    on_cpu = device.type == "cpu"
    chunk = max(1, min(dim, (2**13 if on_cpu else 2**14) // places))
    return chunk, max(chunk, min(dim, (2**28 if on_cpu else 2**30) // (places * dim)))


def jacobians_to_last_layer(
    blocks: Sequence[Callable[[Tensor], Tensor]],
    hidden: Float[Tensor, "1 tokens dim"],
    places: Int[Tensor, "places"],
    *,
    chunk_size: int | None = None,
    route: str = "auto",
) -> Float[Tensor, "layers dim dim"]:
    """How the last layer's states move with those of layers 0..L-1 of one prompt: `J[l] @ h` carries h there.

    J[l] = 1/|V| sum over t in V and t' in V of d h_L[t'] / d h_l[t], V being `places`: effects on all of them are
    summed for each place that is moved, and averaged over these. In a causal model those with t' < t are 0, so that
    this is the estimator of the Jacobian lens. Exact, all `dim` directions, in the states' own dtype. A linear model
    h_L = A h_l at each token gives A; blocks that add nothing give the identity.

    Modules that attend are cut, others go by reverse mode. The result is held against one backward pass through the
    blocks themselves in a random direction; where it differs, or with `route="plain"`, it is by reverse mode over all
    tokens (after a warning that says so).

    Source: Gurnee et al., Verbalizable Representations Form a Global Workspace in Language Models, Transformer Circuits
    Thread 2026, and its reference implementation. That leaves layer 0, the embedding, and L, where it is the identity,
    out.

    Args:
        blocks: 1..L, each from states (1, tokens, dim) to states, differentiable.
        hidden: the input of the first of them.
        chunk_size: rows of the Jacobians that are held at a time.

    Raises:
        ValueError: no places, places outside the prompt or twice, states of more than one prompt.
    """
    if hidden.ndim != 3 or len(hidden) != 1:
        raise ValueError(f"expected the states of one prompt, (1, tokens, dim), got shape {tuple(hidden.shape)}")
    tokens = hidden.shape[1]
    if not len(places) or len(places.unique()) < len(places) or places.min() < 0 or places.max() >= tokens:
        raise ValueError(f"expected different places of 0..{tokens - 1}, at least one, got {places.tolist()}")
    check_option("route", route, "auto", "plain")
    alignment = getattr(next(iter(blocks), None), "alignment", None)
    if alignment is not None:  # of a text with padding before it
        blocks = [block.aligned() for block in blocks]  # pyright: ignore[reportFunctionMemberAccess]
        hidden, places = alignment.moved(hidden), alignment.ranks[0, places]
    with torch.inference_mode(False), torch.no_grad(), exact_arithmetic(hidden.device):
        states = [hidden.detach().clone()]
        for block in blocks[:-1]:
            states.append(block(states[-1]))
        if route == "auto":
            live = torch.arange(int(places.min()), int(places.max()) + 1, device=hidden.device)
            jacobians = _through(blocks, states, places, live, chunk_size, _Cut.or_whole)
            error = _disagreement(blocks, hidden, places, jacobians)
            if error <= (1e-4 if hidden.dtype == torch.float32 else 1e-6):  # parts of some models are float32 always
                return jacobians
            if error == error:  # NaN of a model that has diverged shows nothing
                warn_once(
                    getattr(blocks[-1], "module", blocks[-1]), f"they differ from its own derivative by {error:.1e}"
                )
        return _through(blocks, states, places, torch.arange(tokens, device=hidden.device), chunk_size, _Whole)


class _Pulled(Protocol):
    """A block at some places of a prompt that cotangents are pulled back through, (rows, places, dim)."""

    def pulled(self, cotangents: Tensor) -> Tensor: ...


def _through(
    blocks: Sequence[Callable[[Tensor], Tensor]],
    states: Sequence[Tensor],
    places: Tensor,
    live: Tensor,
    chunk_size: int | None,
    prepared: Callable[[Callable[[Tensor], Tensor], Tensor, Tensor, int], _Pulled],
) -> Tensor:
    dim = states[0].shape[-1]
    chosen = (live[:, None] == places).any(1)  # (live,)
    of_chunk, of_group = rows_at_a_time(len(live), dim, live.device)
    chunk, group = chunk_size or of_chunk, max(chunk_size or 0, of_group)
    result = states[0].new_empty(len(blocks), dim, dim)
    for start in range(0, dim, group):
        rows = range(dim)[start : start + group]
        cotangents = states[0].new_zeros(len(rows), len(live), dim)
        cotangents.diagonal(start, 0, 2)[:] = chosen[:, None].to(cotangents)
        for layer in reversed(range(len(blocks))):
            block = prepared(blocks[layer], states[layer], live, len(rows))
            for first in range(0, len(rows), chunk):
                part = cotangents[first : first + chunk]
                part.copy_(block.pulled(part))
                result[layer, start + first : start + first + len(part)] = part[:, chosen].mean(1)
    return result


def _disagreement(
    blocks: Sequence[Callable[[Tensor], Tensor]], hidden: Tensor, places: Tensor, jacobians: Tensor
) -> float:
    """Largest relative error over layers of a random combination of rows against the blocks' own derivative."""
    probe = torch.randn(hidden.shape[-1], generator=torch.Generator().manual_seed(0), dtype=hidden.dtype)
    probe = probe.to(hidden.device)
    with torch.enable_grad():
        states = [hidden.detach().clone().requires_grad_()]
        for block in blocks:
            states.append(block(states[-1]))
        moved = states[-1][0, places].sum(0)
        if not moved.requires_grad:
            return 0.0 if not jacobians.any() else torch.inf
        own = torch.autograd.grad(moved, states[:-1], probe, allow_unused=True, materialize_grads=True)
    exact = torch.stack([grad[0, places].mean(0) for grad in own])
    apart = (probe @ jacobians - exact).norm(dim=-1)
    return float(torch.where(apart > 0, apart / exact.norm(dim=-1), apart).max())


class _Whole:
    """A block by reverse mode over the whole prompt, with cotangents at the places `live` alone."""

    def __init__(self, block: Callable[[Tensor], Tensor], hidden: Tensor, live: Tensor, rows: int) -> None:
        self.live = live
        with torch.enable_grad(), sdpa_kernel(SDPBackend.MATH):  # the fused kernels have no rule for vmap
            self.leaf = hidden.detach().clone().requires_grad_()
            self.output = block(self.leaf)[:, live]

    def pulled(self, cotangents: Tensor) -> Tensor:
        if not self.output.requires_grad:  # a block that detaches its input
            return torch.zeros_like(cotangents)
        with torch.enable_grad(), sdpa_kernel(SDPBackend.MATH):
            (grads,) = pull_back([self.output], [self.leaf], [cotangents[:, None]])
        return grads[:, 0, self.live]


class _Cut(CutBlock):
    """A block that is cut at its linear maps, at the places `live` of one prompt, which follow one another."""

    def __init__(self, call: Call, hidden: Tensor, live: Tensor, rows: int) -> None:
        with evaluating(call.module):
            attention = record_attention(call, hidden)
            heads, head_dim = attention.query.shape[1], attention.query.shape[3]
            size = max(1, 2**24 // (hidden.shape[1] * heads * head_dim))
            pieces = [(torch.zeros_like(each), each) for each in live.split(size)]
            expansions = [attention.expansion(*piece) for piece in pieces]
            expansion = Expansion(*(torch.cat(fields) for fields in zip(*expansions, strict=True)))
            weights = [[part[:, :, live] for part in attention.weights(*piece)] for piece in pieces]
            # (heads, out, in): of every live place to every other
            self.p, self.w = (torch.cat(parts).transpose(0, 1) for parts in zip(*weights, strict=True))
            super().__init__(
                call.at(pieces[0][0].new_zeros(len(live)), live, hidden.shape[:2]),
                attention,
                expansion,
                hidden[0, live],
            )
        self.before = sorted({link.leaf for end in self.ends for link in links_of(end, self.leaves)})
        self.joint = {leaf: joint for leaf in range(1, len(self.leaves)) if (joint := self._joint(leaf, rows))}

    @classmethod
    def or_whole(cls, block: Callable[[Tensor], Tensor], hidden: Tensor, live: Tensor, rows: int) -> "_Pulled":
        call = as_call(block)
        if call is not None and hidden.shape[1] > 1:
            try:
                return cls(call, hidden, live, rows)
            except torch.OutOfMemoryError:
                raise
            except (Unsupported, RuntimeError, ValueError, TypeError, IndexError, KeyError, AttributeError):
                pass  # by what it is made of: no attention, say
        return _Whole(block, hidden, live, rows)

    def _joint(self, leaf: int, rows: int) -> tuple[int, Tensor] | None:
        """Of a map fed entry by entry by others that share an input: one of these, and d output / d that input.

        None where so many rows are done in fewer operations by one map after the other.
        """
        node, terms, links = self.nodes[leaf - 1], list[tuple[Tensor, Tensor]](), self.links[leaf]
        shared = self._feeding(links[0]) if links else None
        if node is None or shared is None:
            return None
        for link in links:
            feeding = self._feeding(link)
            if feeding is None or link.slopes is None or feeding.input is not shared.input:
                return None
            terms.append((link.slopes, feeding.weight))
        out, inner, width = *node.weight.shape, shared.weight.shape[1]
        if len(terms) * out * inner * width + rows * out * width >= rows * inner * (out + len(terms) * width):
            return None
        product = node.weight.new_zeros(self.picked, out, width)
        size = 1 if product.device.type == "cpu" else max(1, 2**27 // (out * inner))
        for part in torch.arange(self.picked, device=product.device).split(size):
            for slopes, weight in terms:
                product[part] += (node.weight * slopes[part, None]) @ weight
        return links[0].leaf, product

    def _feeding(self, link: Link) -> Linear | None:
        """The linear map whose output the leaf of a link is."""
        return self.nodes[link.leaf - 1] if link.leaf else None

    def pulled(self, cotangents: Tensor) -> Tensor:
        """From cotangents (rows, picked, dim) of the output to those of the input."""
        of_leaves: dict[int, Tensor] = {}
        with torch.enable_grad():
            self._push(of_leaves, self.output, self.links[0], cotangents)
            for leaf in range(len(self.nodes), 0, -1):
                node, rest = self.nodes[leaf - 1], of_leaves.pop(leaf, None)
                if rest is None:
                    continue
                if node is None:
                    self._push_attention(of_leaves, rest)
                elif leaf in self.joint:
                    first, product = self.joint[leaf]
                    feeding = self.nodes[first - 1]
                    assert feeding is not None
                    carried = (rest.transpose(0, 1) @ product).transpose(0, 1)
                    self._push(of_leaves, feeding.input, self.links[first], carried)
                else:
                    carried = (rest.flatten(0, 1) @ node.weight).unflatten(0, rest.shape[:2])
                    self._push(of_leaves, node.input, self.links[leaf], carried)
        return of_leaves.get(0, torch.zeros_like(cotangents))

    def _push_attention(self, of_leaves: dict[int, Tensor], cotangents: Tensor) -> None:
        """Adds what comes through queries, keys and values, by the derivative of `block_attention`."""
        of, heads = self.expansion, self.expansion.out.shape[1]
        query, value, out = (each[:, :, 0].transpose(0, 1) for each in (of.query, of.value, of.out))
        into = cotangents.unflatten(-1, (heads, -1)).transpose(1, 2)  # (rows, heads, picked, head_dim)
        slopes = self.w * (into @ value.mT - (into * out).sum(-1, keepdim=True))  # (rows, heads, out, in)
        to_query = torch.einsum("rhtj,thij->rthi", into, of.query_map)
        full = [to_query.reshape(len(into), *self.ends[0].shape)]
        for part, end in zip((slopes.mT @ query, self.p.mT @ into), self.ends[1:], strict=True):
            by_head = part.transpose(1, 2)[:, :, :, None]  # (rows, picked, heads, 1, head_dim)
            full.append(sum_heads(by_head, end.shape[1]).reshape(len(into), *end.shape))
        grads = pull_back(self.ends, [self.leaves[leaf] for leaf in self.before], full)
        for leaf, grad in zip(self.before, grads, strict=True):
            grad = grad.reshape(len(grad), self.picked, -1)
            of_leaves[leaf] = of_leaves[leaf] + grad if leaf in of_leaves else grad
