"""How alike a block acts on the tokens of a prompt: coupling of Jacobians between tokens."""

import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from lit_layers.analyses.base import DividedAnalysis
from lit_layers.analyses.summary import Tags, left_out, summarize
from lit_layers.analyses.token_jacobians import (
    check_choice,
    check_counts,
    check_directions,
    check_pairs,
    evenly_spread,
    finite_or_zero,
    first_prompts,
    jacobians_from,
    num_real_tokens,
    own_jacobians,
)
from lit_layers.data.batches import Batches
from lit_layers.errors import InputError
from lit_layers.functional import coupling as functional
from lit_layers.functional.coupling import Factors, excess_coupling, singular_factors
from lit_layers.models.view import LayeredModel, Trajectory
from lit_layers.records import Record

Table = Literal["token", "input_context", "output_context"]
TABLES: tuple[Table, ...] = ("token", "input_context", "output_context")
TIE = 1e-4  # relative gap of singular values below which their directions are not well determined


@dataclass(kw_only=True)
class TokenCoupling(DividedAnalysis):
    """Coupling over the tokens of a prompt, of a block with itself or with another, with its random baseline.

    Three tables, each over pairs of tokens t, t', with J[l][t, s] = d f_l(X)[t] / d X[s]:
    `token`: J[l][t, t] in the bases of J[l'][t', t']; `input_context`: J[l][t, s] in those of J[l'][t', s] for an input
    s <= t, t'; `output_context`: J[l][t, s] in those of J[l'][t, s'] for an output t >= s, s'.

    Per K (tag `k`, a count), layer l and, where another, other_layer l': `token_coupling`, `input_context_coupling`,
    `output_context_coupling` (mean over the pairs of different tokens and over the fixed token, per prompt, then over
    prompts); each with its `random_..` (what unrelated bases would give) and `excess_..` (0 random, 1 shared), and as a
    table over tokens `.._pair`, with tags `token` (of J1) and `other_token` (of the bases): the place in the prompt in
    per cent, 0 its first token and 100 its last, so that prompts of any length share a table. A prompt with fewer than
    `num_tokens` tokens takes part with all of them, but in the means alone. For l != l' also `same_token_coupling` and
    its excess: the blocks at one token, meaned over tokens; and, where `pairs` is "all", that over all pairs of
    blocks, a record without a layer. Besides `min_gap`, `num_tied` (Jacobians whose leading directions are not well
    determined) and `error_estimate` (how far off any one pair's value likely is, as its singular vectors are inexact).

    Pairs of a zero or non-finite Jacobian are undefined: left out of the means over tokens, and counted in the tag
    `num_undefined_pairs`. The mean over all pairs of blocks is of the prompts that have every one.
    Prompts of one token have no pair; they are left out and counted in the tag `num_undefined`.

    `pairs`: "same" (each block with itself), "all", or pairs (l, l'). `tokens="patches"` takes an image's patches
    alone; with `pairs="all"` and `tables=["token"]`, `same_token_coupling` is then the coupling of blocks averaged over
    patches (the mean of the metric, not of the Jacobians). `k`, `p` and `sign` as in `lit_layers.functional.coupling`.
    Tables of contexts look at s <= t in models without a causal mask, too.

    Cost: a Jacobian and its decomposition for each pair of tokens, n (n + 1) / 2 of them for n tokens, n for the table
    `token` alone: 36 or 8 a block and prompt at 8 tokens. At width 768 one takes 0.15 s on a CPU core: a prompt of 12
    blocks takes a minute, or 13 s for `token` alone. `pairs="all"` holds those of all blocks at once: 1 GB with
    contexts. Source: Aubry et al., "Transformer block coupling and its correlation with generalization in LLMs",
    section 4.
    """

    batches: Batches
    name: str = "token_coupling"
    k: tuple[int | float, ...] = (0.1,)
    p: float = 2.0
    sign: Literal["signed", "absolute"] = "signed"
    pairs: Literal["same", "all"] | list[tuple[int, int]] = "same"
    tables: tuple[Table, ...] = TABLES
    tokens: Literal["spread", "patches"] = "spread"
    num_tokens: int = 8
    num_prompts: int = 4

    def check(self, model: LayeredModel) -> None:
        super().check(model)
        self._check_options(model)

    def _check_options(self, model: LayeredModel) -> list[int]:
        """The numbers of directions, once every option fits."""
        if not self.k:
            raise InputError(f"{self.name}: expected at least one k, got none")
        counts = sorted({check_directions(self.name, k, model.dim) for k in self.k})
        check_counts(self.name, num_prompts=self.num_prompts)
        if self.num_tokens < 2:
            raise InputError(
                f"{self.name}: expected num_tokens of at least 2, as one token makes no pair, got {self.num_tokens}"
            )
        check_choice(self.name, "sign", self.sign, ("signed", "absolute"))
        check_choice(self.name, "tokens", self.tokens, ("spread", "patches"))
        if not self.tables:
            raise InputError(f"{self.name}: expected at least one of the tables {list(TABLES)}, got none")
        for table in self.tables:
            check_choice(self.name, "tables", table, TABLES)
        if not self.p >= 1:
            raise InputError(f"{self.name}: expected p of at least 1, got {self.p}")
        if self.tokens == "patches" and not model.family.sees_images:
            kind = type(model.model).__name__
            raise InputError(f"{self.name}: {kind} has no patches: tokens='patches' is for models of images")
        if isinstance(self.pairs, str):
            check_choice(self.name, "pairs", self.pairs, ("same", "all"))
        else:
            check_pairs(self.name, self.pairs, model.num_layers)
        return counts

    def _pairs(self, model: LayeredModel) -> list[tuple[int, int]]:
        if not isinstance(self.pairs, str):
            return [(layer, other) for layer, other in self.pairs]
        blocks = range(1, model.num_layers + 1)
        return [(a, b) for a, b in itertools.product(blocks, blocks) if a == b or self.pairs == "all"]

    def parts(self, model: LayeredModel) -> Iterable[Trajectory]:
        self._check_options(model)
        return first_prompts(model, self.batches, self.num_prompts)

    def combine(self, model: LayeredModel, found: "list[_Found]") -> Iterable[Record]:
        together = _Found(self._check_options(model), self.p)
        for prompt in found:
            together.join(prompt)
        if not together.gaps:
            raise InputError(f"{self.name}: coupling of tokens needs prompts of at least two tokens, all have one")
        records = list(together.records(whole=self.pairs == "all"))
        if all(math.isnan(record.value) for record in records):
            raise ValueError(f"{self.name} is undefined: every Jacobian is zero or not finite")
        yield from records

    def of_part(self, model: LayeredModel, part: Trajectory) -> "_Found":
        trajectory, found, pairs = part, _Found(self._check_options(model), self.p), self._pairs(model)
        found.num_prompts += 1
        places = evenly_spread(self._first_token(model), num_real_tokens(trajectory) - 1, self.num_tokens)
        if len(places) < 2:
            return found
        most = min(found.counts[-1] + 1, model.dim)  # one direction more than K: min_gap looks at it
        context = set(self.tables) != {"token"}
        last_use = {layer: index for index, pair in enumerate(pairs) for layer in pair}
        known: dict[int, _Layer] = {}
        judged: set[int] = set()
        for index, (layer, other) in enumerate(pairs):
            for each in {layer, other} - known.keys():
                known[each] = _Layer.of(trajectory, each, places, most, context=context)
            if other not in judged:
                judged.add(other)
                found.add_accuracy(known[other])  # ties of J1 do not matter: it enters as a matrix
            for table in self.tables:
                pair = _couple(known[layer], known[other], table, found.counts, p=self.p, sign=self.sign)
                found.add(layer, other, table, pair, whole=len(places) == self.num_tokens)
            for each in {layer, other}:
                if last_use[each] == index:
                    del known[each]  # 36 Jacobians of width 768 are 85 MB in float32
        return found

    def _first_token(self, model: LayeredModel) -> int:
        return 0 if self.tokens == "spread" else model.num_prefix_tokens


class _Layer(NamedTuple):
    """The Jacobians of one block between chosen tokens of one prompt, and their leading directions."""

    place: Tensor  # (tokens, tokens): output, input -> number of the Jacobian, -1 where there is none
    jacobians: Tensor  # (number, dim, dim)
    factors: Factors
    norms: Tensor  # (number,)
    undefined: Tensor  # (number,)

    @classmethod
    def of(cls, trajectory: Trajectory, layer: int, places: list[int], count: int, *, context: bool) -> "_Layer":
        tokens = len(places)
        if context:
            parts = [jacobians_from(trajectory, layer, out, places[: row + 1]) for row, out in enumerate(places)]
            rows, columns = torch.tril_indices(tokens, tokens)
        else:
            parts = [own_jacobians(trajectory, layer, places)]
            rows = columns = torch.arange(tokens)
        jacobians, undefined = finite_or_zero(torch.cat(parts))
        place = torch.full((tokens, tokens), -1)
        place[rows, columns] = torch.arange(len(jacobians))
        factors = singular_factors(jacobians, count)
        jacobians = jacobians.to(factors.left.dtype)
        return cls(place, jacobians, factors, torch.linalg.matrix_norm(jacobians), undefined)


class _Pair(NamedTuple):
    """One table of one prompt, float64 on the CPU, NaN where there is no pair or it is undefined."""

    miscoupling: Tensor  # (k, fixed, tokens, tokens)
    random: Tensor  # (k, fixed, tokens)
    num_undefined: int


def _couple(
    first: _Layer, second: _Layer, table: Table, counts: list[int], *, p: float, sign: functional.Sign
) -> _Pair:
    tokens = len(first.place)
    if table == "token":
        rows = first.place.diagonal()[None]
    else:
        rows = first.place.T if table == "input_context" else first.place  # (fixed, tokens)
        rows = rows[(rows >= 0).sum(1) > 1]  # a single Jacobian makes no pair
    miscoupling = torch.full((len(counts), len(rows), tokens, tokens), math.nan, dtype=torch.float64)
    random = torch.full((len(counts), len(rows), tokens), math.nan, dtype=torch.float64)
    num_undefined = 0
    for fixed, row in enumerate(rows):
        (there,) = (row >= 0).nonzero(as_tuple=True)
        chosen = row[there].to(first.jacobians.device)
        values = first.factors.values[chosen]
        bases = Factors(*(part[chosen] for part in second.factors))
        found = functional.miscoupling_from_factors(
            first.jacobians[chosen], values, bases, k=counts, p=p, sign=sign, undefined="nan"
        )  # (k, there, there)
        undefined = first.undefined[chosen][:, None] | second.undefined[chosen]
        num_undefined += int(undefined.fill_diagonal_(False).sum())
        found = found.masked_fill(first.undefined[chosen][:, None] | second.undefined[chosen], math.nan)
        miscoupling[:, fixed, there[:, None], there] = found.double().cpu()
        dim = first.jacobians.shape[-1]
        for position, count in enumerate(counts):
            chance = functional.random_miscoupling_from_norms(
                values[:, :count], first.norms[chosen], dim=dim, p=p, sign=sign, undefined="nan"
            )
            random[position, fixed, there] = chance.cpu()
    return _Pair(miscoupling, random, num_undefined)


class _Found:
    """What the prompts gave so far, per K, pair of blocks and table."""

    def __init__(self, counts: list[int], p: float) -> None:
        self.counts, self.p = counts, p
        self.num_prompts = 0
        self.num_undefined = 0  # Jacobians
        self.means: dict[tuple[int, int, str], list[Tensor]] = defaultdict(list)  # each (k, 3)
        self.same: dict[tuple[int, int], list[Tensor]] = defaultdict(list)  # each (k, 2)
        self.maps: dict[tuple[int, int, str], list[Tensor]] = defaultdict(list)  # each (k, tokens, tokens)
        self.undefined: dict[tuple[int, int, str], int] = defaultdict(int)
        self.gaps: list[Tensor] = []  # each (k, number)
        self.estimates: list[Tensor] = []  # each (k,)

    def join(self, later: "_Found") -> None:
        """Adds what later prompts gave."""
        self.num_prompts += later.num_prompts
        self.num_undefined += later.num_undefined
        for key, values in later.means.items():
            self.means[key] += values
        for pair, values in later.same.items():
            self.same[pair] += values
        for key, values in later.maps.items():
            self.maps[key] += values
        for key, count in later.undefined.items():
            self.undefined[key] += count
        self.gaps += later.gaps
        self.estimates += later.estimates

    def add(self, layer: int, other: int, table: Table, pair: _Pair, *, whole: bool) -> None:
        key = layer, other, table
        coupling = 1 - pair.miscoupling
        random = (1 - pair.random)[..., None].expand_as(coupling).masked_fill(coupling.isnan(), math.nan)
        three = torch.stack([coupling, random, excess_coupling(pair.miscoupling, pair.random)], 1)
        diagonal = torch.eye(three.shape[-1], dtype=torch.bool)
        self.means[key].append(three.masked_fill(diagonal, math.nan).nanmean((2, 3, 4)))
        self.undefined[key] += pair.num_undefined
        if whole:
            self.maps[key].append(coupling.nanmean(1))
        if table == "token" and layer != other:
            self.same[layer, other].append(three[:, ::2, 0].diagonal(dim1=-2, dim2=-1).nanmean(-1))

    def add_accuracy(self, layer: _Layer) -> None:
        self.num_undefined += int(layer.undefined.sum())
        values, turns, norms = (
            each[~layer.undefined].double().cpu() for each in (layer.factors.values, layer.factors.turns, layer.norms)
        )
        self.gaps.append(torch.stack([functional.min_gap(values, k=count) for count in self.counts]))
        if len(turns):
            dim, dtype = layer.jacobians.shape[-1], layer.factors.left.dtype
            estimates = [
                functional.error_estimate(values[:, :count], norms, turns[:, count - 1], dim=dim, p=self.p, dtype=dtype)
                for count in self.counts
            ]
            self.estimates.append(torch.stack([each.max() for each in estimates]))

    def records(self, *, whole: bool) -> Iterator[Record]:
        """All of them; `whole`: with the mean over all pairs of blocks at one token."""
        for position, count in enumerate(self.counts):
            tags: Tags = {"k": count}
            for key in self.means:
                yield from self._of_table(key, position, tags)
            parts = {pair: torch.stack(values)[:, position] for pair, values in self.same.items()}  # (prompts, 2) each
            for (layer, other), part in parts.items():
                yield from self._of_same(part, tags, layer=layer, other_layer=other)
            if whole and parts:
                yield from self._of_same(torch.stack(list(parts.values())).mean(0), tags)
            yield from self._of_accuracy(position, tags)

    def _of_table(self, key: tuple[int, int, str], position: int, tags: Tags) -> Iterator[Record]:
        layer, other, table = key
        metric = f"{table}_coupling"
        place: dict[str, Any] = {"layer": layer} if layer == other else {"layer": layer, "other_layer": other}
        counted = {**tags, **left_out("pairs", self.undefined[key])}
        columns = self._with_short(torch.stack(self.means[key])[:, position]).T
        for name, column in zip((metric, f"random_{metric}", f"excess_{metric}"), columns, strict=True):
            yield from summarize(name, column, **place, tags=counted)
        if not self.maps[key]:
            return
        maps = torch.stack([one[position] for one in self.maps[key]], -1)  # (tokens, tokens, prompts)
        percents = [round(100 * index / (len(maps) - 1)) for index in range(len(maps))]
        for row, percent in zip(maps, percents, strict=True):
            for values, other_percent in zip(row, percents, strict=True):
                where = {**tags, "token": percent, "other_token": other_percent}
                yield from summarize(f"{metric}_pair", values, **place, tags=where)

    def _of_same(self, values: Tensor, tags: Tags, **place: Any) -> Iterator[Record]:
        names = "same_token_coupling", "excess_same_token_coupling"
        for name, column in zip(names, self._with_short(values).T, strict=True):
            yield from summarize(name, column, **place, tags=tags)

    def _with_short(self, values: Tensor) -> Tensor:
        """Rows of NaN added for the prompts of one token."""
        short = self.num_prompts - len(values)
        return torch.cat([values, values.new_full((short, values.shape[1]), math.nan)])

    def _of_accuracy(self, position: int, tags: Tags) -> Iterator[Record]:
        gaps = torch.cat(self.gaps, 1)[position]
        plain = {"n": self.num_prompts, "tags": {**tags, **left_out("jacobians", self.num_undefined)}}
        if len(gaps):
            yield Record(metric="min_gap", value=float(gaps.min()), **plain)
            estimate = max(float(estimates[position]) for estimates in self.estimates)
            yield Record(metric="error_estimate", value=estimate, **plain)
            yield Record(metric="num_tied", value=float((gaps < TIE).sum()), **plain)
