"""Same-token Jacobians: the block runs on single tokens, with its autograd graph cut at the linear maps.

The outputs of all linear maps z = W u + b, and of the attention, become leaves of the graph. The operations between
the leaves are cheap (norms, activations, rotations, sums), and the Jacobian of a linear map is its weight. Let the
input x be leaf z_0. Node n computes z_n = W_n u_n + b_n from u_n = f_n(z_0, ..., z_(n-1)), so that

    dz_n/dx = W_n sum_(m < n) D_nm dz_m/dx,      D_nm = df_n/dz_m.

Reverse mode carries cotangents G_n = d(output)/dz_n from the last node to the first: G_m += (G_n W_n) D_nm. Most D_nm
are diagonal (an activation, a residual sum), so that multiplying by them takes one multiplication per entry. Autograd
applies the others (a norm). A linear map that ends the block has G_n = 1, so its product G_n W_n is its weight.
Attention is not a linear map. Its Jacobian J is first multiplied by the maps W that compute its queries, keys and
values, in forward mode. This is cheap, because J has only the few terms given in `block_call.py`. With G the cotangents
of the attention output, one product G (J W) then combines reverse mode and forward mode.

Cost for GPT-2 in operations, where a multiplication and an addition are two: 8 dim^3 for the first map of the MLP
(dim x 4 dim x dim; the second map ends the block), 2 dim^3 for the output projection and 2 dim^3 to join the attention.
That is 12 dim^3. Reverse mode by autograd takes 8 dim^3 for each map of the MLP, 2 dim^3 for the output projection and
6 dim^3 for queries, keys and values: 24 dim^3.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from lit_layers.functional.jacobian.block_call import (
    MATMULS,
    Attention,
    Call,
    Expansion,
    Replay,
    Unsupported,
    expect_single_tokens,
    pull_back,
)

_ADDMMS = (torch.addmm, torch.Tensor.addmm)
# Largest number of entries of an intermediate tensor. On a CPU, 8 MB fit into the cache. A GPU is faster with larger
# tensors.
_ENTRIES = {"cpu": 2**21}
_ENTRIES_ELSEWHERE = 2**27


class Linear(NamedTuple):
    """A linear map in a block that is called on `picked` tokens, each of them alone.

    The graph of autograd begins anew at the output of each map, which is therefore a leaf of the graph.
    """

    input: Tensor  # (picked, .., in), the map's input, a function of the leaves before it
    weight: Tensor  # (out, in)
    output: Tensor  # (picked, .., out), a leaf


class Link(NamedTuple):
    """Dependence of a tensor on one of the leaves at which autograd is cut; `leaf` is the index of the leaf.

    `slopes` are the diagonal entries of the Jacobian of the tensor with respect to the leaf. They are None if this
    Jacobian is not diagonal.
    """

    leaf: int
    slopes: Tensor | None  # (picked, width)
    identity: bool = False  # whether the Jacobian is the identity matrix


class _Replay(Replay):
    """Cuts autograd's graph of a block at its attention and at every linear map: their outputs become leaves."""

    def __init__(self, attention: Attention, expansion: Expansion, states: Tensor) -> None:
        super().__init__(attention, self._answer)
        self.expansion, self.states = expansion, states
        self.nodes: list[Linear | None] = []  # None for the attention
        self.ends: tuple[Tensor, Tensor, Tensor] | None = None  # query, key, value
        self.attended: Tensor | None = None

    def handle(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        output = super().handle(func, args, kwargs)
        if func is F.linear:
            named = dict(zip(("input", "weight", "bias"), args, strict=False)) | kwargs
            return self._linear(output, named["input"], named["weight"], named.get("bias"))
        if func in _ADDMMS and not kwargs:
            return self._linear(output, args[1], args[2].mT, args[0])
        if func in MATMULS and args[1].ndim == 2:
            return self._linear(output, args[0], args[1].mT, None).clone()  # Falcon adds to the result in place
        return output

    def _linear(self, output: Tensor, input_: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if not input_.requires_grad or not output.requires_grad:  # no gradient flows through this map
            return output
        if any(self._depends(constant) for constant in (weight, bias)):
            raise Unsupported("the weight or bias of a linear map depends on the input")
        if input_.numel() != len(self.expansion.out) * weight.shape[1]:
            raise Unsupported("a linear map does not take its tokens one by one")
        leaf = output.detach().requires_grad_()
        # Products with many tokens are faster if the rows of the weight are contiguous in memory.
        weight = weight.detach() if len(input_) == 1 else weight.detach().contiguous()
        self.nodes.append(Linear(input_, weight, leaf))
        return leaf

    def _depends(self, tensor: Tensor | None) -> bool:
        """Return whether a tensor depends on the input states or on the output of an earlier linear map."""
        if tensor is None or tensor.grad_fn is None:
            return False
        leaves = [self.states, *(node.output for node in self.nodes if node is not None)]
        leaves += [] if self.attended is None else [self.attended]
        return any(gradient is not None for gradient in _gradients(tensor.sum(), leaves))

    def _answer(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        self.expansion.check(query, key, value)
        self.ends = query, key, value
        self.attended = self.expansion.out.detach().reshape(query.shape).clone().requires_grad_()
        self.nodes.append(None)
        return self.attended


class CutBlock:
    """A block's call on single tokens (picked, dim), with the autograd graph cut into pieces between linear maps.

    `picked` is the number of tokens. The pieces are element-wise functions and norms, whose derivative for one token is
    cheap. The weights of the linear maps are the same for all tokens. So d output / d input follows from products of
    these derivatives and weights. A cotangent passes a linear map by one product with its weight, without autograd.

    Each piece starts from leaves of autograd. Leaf 0 is the input of the block. Leaf n > 0 is the output of the linear
    map `nodes[n - 1]`, or of the attention if `nodes[n - 1]` is None. Cotangents of leaves are (rows, picked, width),
    or (rows, 1, width) if they are the same for every token.

    Raises:
        Unsupported: the block cannot be cut in this way; the message says why.
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
            self.links = [links_of(self.output, self.leaves)]
            for before, node in enumerate(self.nodes, start=1):
                self.links.append([] if node is None else links_of(node.input, self.leaves[:before]))

    def jacobians(self) -> Tensor:
        """Return d block(x) / dx for each picked token x, (picked, dim, dim).

        Raises:
            Unsupported: the queries, keys or values of the block do not come from linear maps.
        """
        with torch.enable_grad():
            joined = self._joined()
            result = self.output.new_empty(self.picked, self.dim, self.dim)
            for rows in self._chunks():
                cotangents = self._cotangents(rows, joined)
                result[:, rows] = cotangents.expand(-1, self.picked, -1).transpose(0, 1)
        return result

    def from_attention(self) -> Tensor:
        """Return d block(x) / d attention output for each picked token x, (picked, dim, heads x head_dim)."""
        with torch.enable_grad():
            parts = [self._cotangents(rows, None) for rows in self._chunks()]
        return torch.cat(parts).expand(-1, self.picked, -1).transpose(0, 1)

    def _chunks(self) -> Iterator[slice]:
        width = max(leaf.numel() for leaf in self.leaves)  # entries of the largest leaf, all picked tokens together
        entries = _ENTRIES.get(self.output.device.type, _ENTRIES_ELSEWHERE)
        num = max(1, min(self.dim // 64, round(self.dim * width / entries)))
        size = math.ceil(self.dim / num)
        return (slice(start, min(start + size, self.dim)) for start in range(0, self.dim, size))

    def _joined(self) -> dict[int, Tensor]:
        """Return the Jacobians of the attention output with respect to the inputs of the query, key and value maps.

        The dict key of a map is the index of its output in `leaves`. The value is the Jacobian with respect to the
        input of the map, (picked, heads x head_dim, in), one for each of `picked` tokens. Maps with the same input have
        one entry, which is the sum of their Jacobians.
        """
        maps: dict[int, Tensor] = {}
        # In forward mode, the tangents of a map's output are the columns of its weight. They need no matrix product.
        # The maps of queries, keys and values mostly have the same input (`shared`). Their Jacobians are then added
        # here, so that `_push_attention` needs one matrix product instead of three.
        shared: dict[int, int] = {}
        pushes = self.expansion.push_query, self.expansion.push_key, self.expansion.push_value
        for end, push in zip(self.ends, pushes, strict=True):
            for link in links_of(end, self.leaves):
                node = self.nodes[link.leaf - 1] if link.leaf else None
                if node is None:
                    raise Unsupported("its attention is fed otherwise than by linear maps")
                leaf = shared.setdefault(id(node.input), link.leaf)
                maps[leaf] = _add(maps.get(leaf), push(_push_forward(node, end)))
        return maps

    def _cotangents(self, rows: slice, joined: dict[int, Tensor] | None) -> Tensor:
        """Return `rows` of the Jacobian of the block's output with respect to its input, (rows, picked, dim).

        Each of the `picked` tokens has its own Jacobian (dim, dim). `joined` is the result of `_joined`. If it is None,
        return rows of the Jacobian of the block's output with respect to the attention output instead.
        """
        pending: dict[int, Tensor] = {}
        slopes = {link.leaf: link.slopes[:, rows].T for link in self.links[0] if link.slopes is not None}
        others = [link for link in self.links[0] if link.slopes is None]
        if others:
            self._push(pending, self.output, others, self._basis(rows))
        # Leaves are in the order of their computation, and this loop goes backwards. So every tensor that depends on a
        # leaf has added its cotangent before the leaf itself is visited.
        for leaf in range(len(self.nodes), 0, -1):
            node, grad, slope = self.nodes[leaf - 1], pending.pop(leaf, None), slopes.get(leaf)
            if node is None:
                if slope is not None:  # d output / d attention output is diagonal
                    grad = _add(grad, slope[..., None] * self._basis(rows))
                if joined is None:
                    return self.output.new_zeros(len(range(self.dim)[rows]), 1, 1) if grad is None else grad
                if grad is not None:
                    self._push_attention(pending, joined, grad)
                continue
            carried = None if grad is None else (grad.flatten(0, 1) @ node.weight).unflatten(0, grad.shape[:2])
            # Where only an elementwise function lies between this map and the block's output, the cotangents are
            # diagonal. Their product with the weight is the weight with scaled rows.
            if slope is not None:
                carried = _add(carried, _scaled(node.weight[rows][:, None], slope[..., None]))
            if carried is not None:
                self._push(pending, node.input, self.links[leaf], carried)
        result = pending.get(0, self._basis(rows) * 0)
        if 0 in slopes:  # the skip connection: add to the diagonal only
            result = result.expand(-1, self.picked, -1).clone()
            result[:, :, rows].diagonal(dim1=0, dim2=2).add_(slopes[0].T)
        return result

    def _basis(self, rows: slice) -> Tensor:
        """Return `rows` of the identity matrix, as cotangents of the block's output, (rows, 1, dim)."""
        basis = self.output.new_zeros(rows.stop - rows.start, 1, self.dim)
        basis[:, 0, rows].fill_diagonal_(1)
        return basis

    def _push_attention(self, pending: dict[int, Tensor], joined: dict[int, Tensor], cotangents: Tensor) -> None:
        by_token = cotangents.expand(-1, self.picked, -1).transpose(0, 1)
        for leaf, jacobians in joined.items():
            node = self.nodes[leaf - 1]
            assert node is not None
            self._push(pending, node.input, self.links[leaf], (by_token @ jacobians).transpose(0, 1))

    def _push(self, pending: dict[int, Tensor], output: Tensor, links: Sequence[Link], cotangents: Tensor) -> None:
        """Add the product of the cotangents and d `output` / d leaf to `pending[leaf]`, for each leaf in `links`."""
        others = [link.leaf for link in links if link.slopes is None]
        for link in links:
            if link.slopes is not None:
                pending[link.leaf] = _add(
                    pending.get(link.leaf), cotangents if link.identity else cotangents * link.slopes
                )
        if others:
            full = cotangents.expand(-1, self.picked, -1).reshape(len(cotangents), *output.shape)
            grads = pull_back([output], [self.leaves[leaf] for leaf in others], [full])
            for leaf, grad in zip(others, grads, strict=True):
                pending[leaf] = _add(pending.get(leaf), grad.reshape(len(grad), self.picked, -1))


def links_of(output: Tensor, leaves: Sequence[Tensor]) -> list[Link]:
    """Return the leaves that a tensor depends on, with the Jacobian with respect to each if it is diagonal.

    The Jacobian J is taken as diagonal if J'r = r o J'1 for a random r, where o is the elementwise product.
    Off-diagonal entries pass this test only if they cancel by chance.
    """
    if not output.requires_grad:
        return []
    probe = torch.randn(output.shape, generator=torch.Generator().manual_seed(0), dtype=output.dtype)
    probe = probe.to(output.device)
    slopes = _gradients(output, leaves, torch.ones_like(output))
    probes = _gradients(output, leaves, probe)
    links = []
    for leaf, (leaf_slopes, leaf_probe) in enumerate(zip(slopes, probes, strict=True)):
        if leaf_slopes is None or leaf_probe is None:
            continue
        diagonal = None
        if leaf_slopes.numel() == output.numel():
            leaf_slopes, leaf_probe = (
                leaf_slopes.reshape(len(leaf_slopes), -1),
                leaf_probe.reshape(len(leaf_probe), -1),
            )
            # Two backward passes show whether J is diagonal. To form J and look at its off-diagonal entries would take
            # `width` passes.
            off_diagonal = (leaf_probe - probe.reshape(leaf_probe.shape) * leaf_slopes).norm()
            if float(off_diagonal) <= 8 * torch.finfo(leaf_slopes.dtype).eps * float(leaf_probe.norm()):
                diagonal = leaf_slopes
        links.append(Link(leaf, diagonal, diagonal is not None and bool((diagonal == 1).all())))
    return links


def _push_forward(linear: Linear, end: Tensor) -> Tensor:
    """Return the Jacobian of `end`, a query, key or value, with respect to the input of the linear map it comes from.

    Shape (*end.shape, in), with `in` the width of that input. This is forward mode by double backward: the pull-back is
    linear in its cotangent, so the pull-back of the pull-back carries tangents forward.
    """
    cotangent = torch.zeros_like(end, requires_grad=True)
    (back,) = torch.autograd.grad(end, linear.output, cotangent, create_graph=True)
    width = linear.weight.shape[1]
    tangents = linear.weight.mT[:, None].expand(-1, len(end), -1).reshape(width, *linear.output.shape)
    (forward,) = pull_back([back], [cotangent], [tangents])  # (in, *end.shape)
    return forward.movedim(0, -1)


def _scaled(cotangents: Tensor, slopes: Tensor) -> Tensor:
    return cotangents if bool((slopes == 1).all()) else cotangents * slopes


def _add(sum_: Tensor | None, term: Tensor) -> Tensor:
    return term if sum_ is None else sum_ + term


def _gradients(output: Tensor, leaves: Sequence[Tensor], cotangent: Tensor | None = None) -> tuple[Tensor | None, ...]:
    """Return the gradient of an output with respect to each leaf; None if the output does not depend on the leaf."""
    return torch.autograd.grad(output, leaves, cotangent, retain_graph=True, allow_unused=True)
