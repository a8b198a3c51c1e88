"""The Jacobian lens: carries the states of earlier layers to the last one by the mean Jacobian between them."""

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from lit_layers.analyses.base import Analysis, Jobs
from lit_layers.analyses.base import Rows as RowsRead
from lit_layers.analyses.readouts.readout_scores import FullModel, Rows, check_head, rows_of
from lit_layers.analyses.states import real_tokens
from lit_layers.analyses.statistics import exponential, summarize, summarize_ratio, with_a_value
from lit_layers.data.batches import Batches
from lit_layers.errors import InputError
from lit_layers.functional.jacobian.block_attention import Expansion, record_attention, sum_heads
from lit_layers.functional.jacobian.block_call import Call, Unsupported, as_call, evaluating, pull_back
from lit_layers.functional.jacobian.block_jacobians import exact_arithmetic, warn_once
from lit_layers.functional.jacobian.linear_cut import CutBlock, Linear, Link, links_of
from lit_layers.models.view import Batch, LayeredModel, Trajectory
from lit_layers.records import Record

HALVES = "one half", "other half"

_Block = Callable[[Tensor], Tensor]  # (1, tokens, dim) to the same
_Key = tuple[str, int]  # a lens and a layer


@dataclass(kw_only=True)
class JacobianLens(Analysis):
    """The Jacobian lens and its controls: how near each layer's readout is to the model's own output.

    A lens carries the states of layer l to the last layer, whose norm and head then read them. The tag `lens` names it:
    `jacobian` uses the mean Jacobian J_l = E[d h_L / d h_l], fitted anew at each checkpoint. `logit` uses the states as
    they are. `shuffled` is the null of `jacobian`: the Jacobian lens of the same model with the entries of each weight
    matrix of its blocks in another order.

    Per layer 0 to L - 1, over tokens of held-out prompts from position `skip_first` on: `lens_kl` is KL(model, lens) in
    nats, 0 for the model's own output. `lens_rank` is the geometric mean of the rank of the true next token, 1 the
    first. `stderr` and the interval are over prompts. `num_undefined` and `num_undefined_fit_prompts` count prompts
    that are too short or not finite. For `jacobian` the tag `num_fit_stderr` is half the difference in `lens_kl`
    between lenses fitted on halves of the prompts. `jacobian_lens_halves` is the distance between the halves' matrices
    over the norm of the whole; 0 is no difference.

    The first `num_prompts` prompts fit the Jacobians, the rest is held out. The model runs in float32 or wider.

    Cost: about three quarters of `dim` backward passes through all blocks at the positions of the `num_prompts`. 8
    prompts x 111 positions of a model of width 1,024 with 302 M parameters in its blocks (Pythia 410M) take 3/4 x 2 x
    302e6 x 111 x 8 x 1,024 = 4.1e14 FLOP, and 4% more for the weights of the attention.

    Source: Gurnee et al., Verbalizable Representations Form a Global Workspace in Language Models, Transformer Circuits
    Thread 2026.

    Args:
        batches: prompts of equal length, or padded.
        num_prompts: prompts that the Jacobians are fitted on.
        skip_first: positions of each prompt that are left out, as the first tokens' states are unlike all others.
        lenses: which to measure.
        seed: of the order of the shuffled weights.
    """

    SEES = "text"
    NEXT_TOKEN = True
    LEAST: ClassVar = {"num_prompts": 1, "skip_first": 0}
    LISTS = ("lenses",)

    batches: Batches
    name: str = "jacobian_lens"
    num_prompts: int = 8
    skip_first: int = 16
    lenses: tuple[Literal["jacobian", "logit", "shuffled"], ...] = ("jacobian", "logit", "shuffled")
    seed: int = 0

    def check_options(self, model: LayeredModel) -> None:
        super().check_options(model)
        check_head(self.name, model)

    def check(self, model: LayeredModel) -> None:
        super().check(model)
        self._check_prompts()

    def _check_prompts(self) -> None:
        """Refuse prompts that are too few or too short to fit on and to compare on."""
        are_long = [is_long(prompt, self.skip_first) for prompt in one_by_one(self.batches)]
        fitting = are_long[: self.num_prompts]
        if self._fitted and not any(fitting):
            raise InputError(
                f"{self.name}: skip_first: none of the first {len(fitting)} prompts has a place from {self.skip_first} "
                "on that another token follows: give longer texts"
            )
        if not any(are_long[self.num_prompts :]):
            raise InputError(
                f"{self.name}: no prompt is left to compare on: give more than {self.num_prompts} that have a "
                f"place from {self.skip_first} on (skip_first), got {len(are_long)}"
            )

    @property
    def _fitted(self) -> list[str]:
        return [name for name in ("jacobian", "shuffled") if name in self.lenses]

    def reads(self, model: LayeredModel) -> dict[str, RowsRead]:
        """Return nothing: a lens is fitted on the first prompts before the others are read with it."""
        return {}

    def jobs(self, model: LayeredModel) -> Jobs:
        """Return a job for each lens."""
        self._check_prompts()
        jobs = [partial(self._of_lens, model, name) for name in self.lenses]
        return Jobs(jobs, lambda results: with_a_value(self.name, chain.from_iterable(results)))

    def _of_lens(self, model: LayeredModel, name: str) -> list[Record]:
        """Fit one lens and compare its readouts with the model's own on the held-out prompts."""
        prompts = [*one_by_one(self.batches)]
        fit = None if name == "logit" else self._fit(model, name, prompts[: self.num_prompts])
        lenses: dict[str, Tensor] = {}  # (layers, dim, dim) each
        if fit is not None:
            dtype = torch.promote_types(model.dtype, torch.float32)
            of_halves = zip(HALVES, fit.halves, strict=True) if name == "jacobian" else ()
            lenses = {key: each.to(model.device, dtype) for key, each in ((name, fit.jacobians), *of_halves)}
        keys = [(key, layer) for key in lenses or ["logit"] for layer in range(model.num_layers)]

        def compared(prompt: Batch) -> Tensor:
            """Return divergence, log rank and tokens (keys, 3) of a prompt; zeros if it is too short."""
            if not is_long(prompt, self.skip_first):
                return torch.zeros(len(keys), 3, dtype=torch.float64)
            trajectory = model.trajectory(prompt)
            every = rows_of(self.name, trajectory, prompt)
            chosen = torch.isin(every.place, positions_of(trajectory, self.skip_first))
            rows = Rows(every.prompt[chosen], every.place[chosen], every.target[chosen], True)
            full, results = FullModel(trajectory.logits_of(rows.index), rows), []
            for key, layer in keys:
                hidden = trajectory.hidden[layer][rows.index]
                with torch.no_grad():
                    logits = model.readout((hidden @ lenses[key][layer].T if lenses else hidden)[None])[0]
                results.append(torch.stack([full.compared(logits)[2].sum(), _log_rank(logits, rows)]))
            return torch.nn.functional.pad(torch.stack(results).cpu().double(), (0, 1), value=len(rows.place))

        sums = torch.stack([compared(prompt) for prompt in prompts[self.num_prompts :]], -1)
        return [*self._records(name, dict(zip(keys, sums, strict=True)), fit)]

    def _fit(self, model: LayeredModel, name: str, given: Sequence[Batch]) -> "FittedLens":
        view = LayeredModel(with_shuffled_weights(model, self.seed)) if name == "shuffled" else model
        prompts = [prompt for prompt in given if is_long(prompt, self.skip_first)]
        sums = [JacobianSum.over(view, prompts[half::2], self.skip_first) for half in range(2)]
        return FittedLens.mean(sums, self.num_prompts)

    def _records(self, name: str, sums: Mapping[_Key, Tensor], fit: "FittedLens | None") -> Iterator[Record]:
        """Yield the records from divergence, log rank and tokens (3, prompts) of each layer, and of the halves."""
        tags_of_fit: list[dict[str, Any]] = []
        if fit is not None and name == "jacobian":
            apart = (fit.halves[0] - fit.halves[1]).norm(dim=(-2, -1)) / fit.jacobians.norm(dim=(-2, -1))
            for layer, left_out in enumerate(fit.num_undefined.tolist()):
                tags: dict[str, Any] = {"num_fit_prompts": fit.num_prompts}
                tags |= {"num_undefined_fit_prompts": left_out} if left_out else {}
                yield from summarize("jacobian_lens_halves", apart[layer, None], layer=layer, tags=tags)
                one, other = ((sums[half, layer][0].sum() / sums[half, layer][2].sum()).item() for half in HALVES)
                error = {"num_fit_stderr": abs(one - other) / 2} if math.isfinite(one - other) else {}
                tags_of_fit.append(tags | error)
        for layer in (layer for lens, layer in sums if lens == name):
            tags = {"lens": name, **(tags_of_fit[layer] if tags_of_fit else {})}
            divergence, log_rank, tokens = sums[name, layer]
            about: dict[str, Any] = {"layer": layer, "tags": tags, "counted": "num_tokens"}
            yield from summarize_ratio("lens_kl", divergence, tokens, **about)
            yield from map(exponential, summarize_ratio("lens_rank", log_rank, tokens, **about))


def _log_rank(logits: Tensor, rows: Rows) -> Tensor:
    """Return the sum over tokens of log rank of the true token, 1 the first. Equal logits count half, NaN is NaN."""
    signs = (logits - logits.gather(1, rows.target[:, None])).sign_().sum(-1)  # how many more are above than below
    rank = (logits.shape[1] + 1 + signs) / 2
    defined = logits.amax(-1).isfinite() & logits.amin(-1).isfinite()
    return rank.where(defined, torch.nan).log().sum()


def one_by_one(batches: Iterable[Batch]) -> Iterator[Batch]:
    """Yield prompts, each in a batch of its own."""
    for batch in batches:
        for row in range(len(next(iter(batch.values())))):
            yield {name: column[row : row + 1] for name, column in batch.items()}


def is_long(prompt: Batch, skip_first: int) -> bool:
    """Whether a batch of one prompt has a position from the given one on that another token follows."""
    return len(real_tokens(prompt)[0]) > skip_first + 1


def positions_of(trajectory: Trajectory, skip_first: int) -> Tensor:
    """Positions of a prompt's real tokens from the given one on, without the last: no token follows it."""
    return trajectory.mask[0].nonzero()[:, 0][skip_first:-1]


def with_shuffled_weights(view: LayeredModel, seed: int) -> torch.nn.Module:
    """Return a copy of a model with the entries of each weight matrix of its blocks in another order."""
    model = copy.deepcopy(view.model)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for block in dict.fromkeys(LayeredModel(model).blocks):
            for weight in block.parameters():
                if weight.ndim > 1:
                    order = torch.randperm(weight.numel(), generator=generator).to(weight.device)
                    weight.copy_(weight.flatten()[order].view_as(weight))
    return model


# ------------------------------------------------------------------------------------------------------- the fit


class JacobianSum(NamedTuple):
    """The sum of some prompts' Jacobians where they are finite."""

    matrices: Tensor  # (layers, dim, dim), float64, on the CPU
    counts: Tensor  # (layers,) prompts whose Jacobian is finite
    num_prompts: int

    @classmethod
    def over(cls, view: LayeredModel, prompts: Sequence[Batch], skip_first: int) -> "JacobianSum":
        """Sum over prompts that are long enough, one by one."""
        matrices = torch.zeros(view.num_layers, view.dim, view.dim, dtype=torch.float64)
        counts = torch.zeros(view.num_layers, dtype=torch.long)
        for prompt in prompts:
            trajectory = view.trajectory(prompt)
            blocks = [trajectory.block(layer) for layer in range(1, view.num_layers + 1)]
            found = jacobians_to_last_layer(blocks, trajectory.hidden[0], positions_of(trajectory, skip_first))
            for layer, jacobian in enumerate(found.cpu()):  # a copy of all in float64 would be 0.2 GB
                if jacobian.isfinite().all():
                    matrices[layer] += jacobian
                    counts[layer] += 1
        return cls(matrices, counts, len(prompts))


class FittedLens(NamedTuple):
    """A lens and the lenses of both halves of its prompts, in float64; NaN if no prompt has a finite Jacobian."""

    jacobians: Tensor  # (layers, dim, dim), for layers 0 to L - 1
    halves: Tensor  # (2, layers, dim, dim)
    num_prompts: int
    num_undefined: Tensor  # (layers,) prompts that are left out: too short, or without a finite Jacobian

    @classmethod
    def mean(cls, sums: Sequence[JacobianSum], num_given: int) -> "FittedLens":
        """Make the lens from the sums over both halves of so many prompts, the short ones included."""
        counts = torch.stack([each.counts for each in sums])
        halves = torch.stack([each.matrices for each in sums])
        whole = halves.sum(0).div_(counts.sum(0)[:, None, None])
        halves /= counts[..., None, None]  # in place: 2 x 24 x 1,024² x 8 B = 0.4 GB
        return cls(whole, halves, sum(each.num_prompts for each in sums), num_given - counts.sum(0))


# -------------------------------------------------------------------------------------------------- the Jacobians
#
# Cotangents of all `dim` directions at every position of a prompt go down block by block. Three things make that
# cheaper than backward passes through the model, and leave it exact:
#
# - In a causal model no effect goes to an earlier position. So positions before the first that is asked for are
#   constants, as keys and values in a cache are, and positions after the last have no cotangent.
# - A block is cut at its linear maps (`CutBlock`), so that its positions are rows of products with their weights. Only
#   the attention stands between two positions, and its derivative is written out (`block_attention` has the formulas).
# - Two linear maps with an elementwise function between them, as in an MLP, are multiplied with one another once for
#   each position. All directions then go through one product of dim x dim.
#
# For GPT-2, in operations a block and position: 10 dim^3 through the MLP (8 for its product, 2 for the directions)
# where reverse mode by autograd has 16 dim^3, 8 dim^3 through the maps of the attention, 6 dim^2 tokens through its
# weights. Through an MLP with a gate, as in Llama, 12.7 dim^3 instead of 16.


def jacobians_to_last_layer(blocks: Sequence[_Block], hidden: Tensor, positions: Tensor) -> Tensor:
    """Return how the last layer's states move with those of layers 0..L-1 of one prompt, (layers, dim, dim).

    `J[l] @ h` carries h to the last layer: J[l] = 1/|V| sum over t in V and t' in V of d h_L[t'] / d h_l[t], where V
    are the `positions`. Effects on all of them are summed for each position that is moved, and averaged over these. In
    a causal model the terms with t' < t are 0. Exact, all `dim` directions, in the states' own dtype. A linear model
    h_L = A h_l at each token gives A; blocks that add nothing give the identity.

    The result is compared with one backward pass through the blocks themselves in a random direction. If it differs, a
    warning says so, and the result is computed by reverse mode over all tokens.

    Source: Gurnee et al., Verbalizable Representations Form a Global Workspace in Language Models, Transformer Circuits
    Thread 2026, and its reference implementation, which leaves out layer 0, the embedding.

    Args:
        blocks: 1..L, each from states (1, tokens, dim) to states, differentiable.
        hidden: (1, tokens, dim), the input of the first block.
        positions: different ones, at least one.
    """
    alignment = getattr(next(iter(blocks), None), "alignment", None)
    if alignment is not None:  # a text with padding before it
        blocks = [block.aligned() for block in blocks]  # pyright: ignore[reportFunctionMemberAccess]
        hidden, positions = alignment.moved(hidden), alignment.ranks[0, positions]
    with torch.inference_mode(False), torch.no_grad(), exact_arithmetic(hidden.device):
        states = [hidden.detach().clone()]
        for block in blocks[:-1]:
            states.append(block(states[-1]))
        live = torch.arange(int(positions.min()), int(positions.max()) + 1, device=hidden.device)
        jacobians = _carried_down(blocks, states, positions, live, _cut_or_whole)
        error = _disagreement(blocks, hidden, positions, jacobians)
        if error <= (1e-4 if hidden.dtype == torch.float32 else 1e-6):  # parts of some models are always in float32
            return jacobians
        if not math.isnan(error):  # the NaN of a model that has diverged shows nothing
            warn_once(getattr(blocks[-1], "module", blocks[-1]), f"they differ from its own derivative by {error:.1e}")
        every = torch.arange(hidden.shape[1], device=hidden.device)
        return _carried_down(blocks, states, positions, every, _Whole)


def _carried_down(
    blocks: Sequence[_Block], states: Sequence[Tensor], positions: Tensor, live: Tensor, prepare: Callable[..., Any]
) -> Tensor:
    """Carry cotangents from the last layer down to each layer, some rows of the Jacobians at a time."""
    dim, chosen = states[0].shape[-1], (live[:, None] == positions).any(1)  # (live,)
    # On a CPU 8,192 rows keep what a block makes of them near the cache, a GPU wants long products. With 128 positions
    # all directions wait together between two blocks up to a width of 1,448, 1 GB in float32, on a GPU to 2,896, 4 GB.
    on_cpu = live.device.type == "cpu"
    chunk = max(1, min(dim, (2**13 if on_cpu else 2**14) // len(live)))
    group = max(chunk, min(dim, (2**28 if on_cpu else 2**30) // (len(live) * dim)))
    result = states[0].new_empty(len(blocks), dim, dim)
    for start in range(0, dim, group):
        rows = range(dim)[start : start + group]
        cotangents = states[0].new_zeros(len(rows), len(live), dim)
        cotangents.diagonal(start, 0, 2)[:] = chosen[:, None].to(cotangents)
        for layer in reversed(range(len(blocks))):
            block = prepare(blocks[layer], states[layer], live, len(rows))
            for first in range(0, len(rows), chunk):
                part = cotangents[first : first + chunk]
                part.copy_(block.pulled(part))
                result[layer, start + first : start + first + len(part)] = part[:, chosen].mean(1)
    return result


def _disagreement(blocks: Sequence[_Block], hidden: Tensor, positions: Tensor, jacobians: Tensor) -> float:
    """Largest relative error over layers of a random combination of rows against the blocks' own derivative."""
    probe = torch.randn(hidden.shape[-1], generator=torch.Generator().manual_seed(0), dtype=hidden.dtype)
    probe = probe.to(hidden.device)
    with torch.enable_grad():
        states = [hidden.detach().clone().requires_grad_()]
        for block in blocks:
            states.append(block(states[-1]))
        moved = states[-1][0, positions].sum(0)
        if not moved.requires_grad:
            return 0.0 if not jacobians.any() else torch.inf
        own = torch.autograd.grad(moved, states[:-1], probe, allow_unused=True, materialize_grads=True)
    exact = torch.stack([grad[0, positions].mean(0) for grad in own])
    apart = (probe @ jacobians - exact).norm(dim=-1)
    return float(torch.where(apart > 0, apart / exact.norm(dim=-1), apart).max())


def _cut_or_whole(block: _Block, hidden: Tensor, live: Tensor, num_rows: int) -> "_Cut | _Whole":
    call = as_call(block)
    if call is not None and hidden.shape[1] > 1:
        try:
            return _Cut(call, hidden, live, num_rows)
        except torch.OutOfMemoryError:
            raise
        except (Unsupported, RuntimeError, ValueError, TypeError, IndexError, KeyError, AttributeError):
            pass  # a block of another kind, without attention for instance
    return _Whole(block, hidden, live, num_rows)


class _Whole:
    """A block by reverse mode over the whole prompt, with cotangents only at the positions `live`."""

    def __init__(self, block: _Block, hidden: Tensor, live: Tensor, num_rows: int) -> None:
        self.live = live
        with torch.enable_grad(), sdpa_kernel(SDPBackend.MATH):  # the fused kernels have no rule for vmap
            self.leaf = hidden.detach().clone().requires_grad_()
            self.output = block(self.leaf)[:, live]

    def pulled(self, cotangents: Tensor) -> Tensor:
        """Pull cotangents (rows, live, dim) of the output back to the input."""
        if not self.output.requires_grad:  # a block that detaches its input
            return torch.zeros_like(cotangents)
        with torch.enable_grad(), sdpa_kernel(SDPBackend.MATH):
            (grads,) = pull_back([self.output], [self.leaf], [cotangents[:, None]])
        return grads[:, 0, self.live]


class _Cut(CutBlock):
    """A block that is cut at its linear maps, at consecutive positions `live` of one prompt."""

    def __init__(self, call: Call, hidden: Tensor, live: Tensor, num_rows: int) -> None:
        with evaluating(call.module):
            attention = record_attention(call, hidden)
            heads, head_dim = attention.query.shape[1], attention.query.shape[3]
            size = max(1, 2**24 // (hidden.shape[1] * heads * head_dim))
            pieces = [(torch.zeros_like(each), each) for each in live.split(size)]
            expansions = [attention.expansion(*piece) for piece in pieces]
            expansion = Expansion(*(torch.cat(fields) for fields in zip(*expansions, strict=True)))
            weights = [[part[:, :, live] for part in attention.weights(*piece)] for piece in pieces]
            # (heads, out, in): from every live position to every other
            self.p, self.w = (torch.cat(parts).transpose(0, 1) for parts in zip(*weights, strict=True))
            alone = call.at(torch.zeros_like(live), live, hidden.shape[:2])
            super().__init__(alone, attention, expansion, hidden[0, live])
        self.before = sorted({link.leaf for end in self.ends for link in links_of(end, self.leaves)})
        self.joint = {leaf: made for leaf in range(1, len(self.leaves)) if (made := self._joint(leaf, num_rows))}

    def _joint(self, leaf: int, num_rows: int) -> tuple[int, Tensor] | None:
        """Return the joint product d output / d input of a linear map and the maps that feed it entry by entry.

        With it comes the leaf of one of the feeding maps, which all share an input. None if one map after the other
        takes fewer operations for so many rows.
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
        if len(terms) * out * inner * width + num_rows * out * width >= num_rows * inner * (out + len(terms) * width):
            return None
        product = node.weight.new_zeros(self.picked, out, width)
        size = 1 if product.device.type == "cpu" else max(1, 2**27 // (out * inner))
        for part in torch.arange(self.picked, device=product.device).split(size):
            for slopes, weight in terms:
                product[part] += (node.weight * slopes[part, None]) @ weight
        return links[0].leaf, product

    def _feeding(self, link: Link) -> Linear | None:
        """Return the linear map whose output the leaf of a link is."""
        return self.nodes[link.leaf - 1] if link.leaf else None

    def pulled(self, cotangents: Tensor) -> Tensor:
        """Pull cotangents (rows, live, dim) of the output back to the input."""
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
        """Add what comes through queries, keys and values, by the derivative in `block_attention`."""
        of, heads = self.expansion, self.expansion.out.shape[1]
        query, value, out = (each[:, :, 0].transpose(0, 1) for each in (of.query, of.value, of.out))
        into = cotangents.unflatten(-1, (heads, -1)).transpose(1, 2)  # (rows, heads, live, head_dim)
        slopes = self.w * (into @ value.mT - (into * out).sum(-1, keepdim=True))  # (rows, heads, out, in)
        to_query = torch.einsum("rhtj,thij->rthi", into, of.query_map)
        full = [to_query.reshape(len(into), *self.ends[0].shape)]
        for part, end in zip((slopes.mT @ query, self.p.mT @ into), self.ends[1:], strict=True):
            by_head = part.transpose(1, 2)[:, :, :, None]  # (rows, live, heads, 1, head_dim)
            full.append(sum_heads(by_head, end.shape[1]).reshape(len(into), *end.shape))
        grads = pull_back(self.ends, [self.leaves[leaf] for leaf in self.before], full)
        for leaf, grad in zip(self.before, grads, strict=True):
            grad = grad.reshape(len(grad), self.picked, -1)
            of_leaves[leaf] = of_leaves[leaf] + grad if leaf in of_leaves else grad
