"""Jacobians of blocks between the tokens of a prompt: their coupling, and the influence of earlier tokens."""

import bisect
import itertools
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from lit_layers.analyses.base import Analysis, Rows, Values
from lit_layers.analyses.statistics import TagDict, Tags, missing_tag, summarize
from lit_layers.data.batches import Batches
from lit_layers.errors import InputError
from lit_layers.functional import coupling as functional
from lit_layers.functional.coupling import (
    Directions,
    Factors,
    Influence,
    cross_token_influence,
    excess_coupling,
    num_directions,
    singular_factors,
)
from lit_layers.functional.jacobian.block_jacobians import block_jacobian
from lit_layers.models.view import Batch, LayeredModel, Trajectory, evenly_spread
from lit_layers.records import Record


def same_token_jacobians(trajectory: Trajectory, layer: int, tokens: Sequence[int]) -> Tensor:
    """Return the Jacobians (tokens, dim, dim) of block `layer` from each of these tokens to itself.

    `tokens` are positions among the real tokens of a single prompt.
    """
    block, hidden = trajectory.block(layer), trajectory.hidden[layer - 1]
    return block_jacobian(block, hidden, out_tokens=list(tokens), mask=trajectory.mask)[0]


def finite_or_zero(jacobians: Tensor) -> tuple[Tensor, Tensor]:
    """Return the Jacobians (..., dim, dim), with zeros for those that are not finite, and a mask (...).

    The mask is True for undefined Jacobians, which are zero or not finite.
    """
    broken = ~jacobians.isfinite().all(-1).all(-1)
    finite = jacobians.masked_fill(broken[..., None, None], 0)
    return finite, (finite == 0).all(-1).all(-1)


def gap_records(gaps: Tensor, n: int, tags: Tags) -> Iterator[Record]:
    """Yield the records `min_gap` and `num_tied`, which tell how well leading directions are determined.

    `gaps` has one value of `functional.min_gap` per Jacobian. If it is empty, there are no records.
    """
    if gaps.numel():
        yield Record(metric="min_gap", value=float(gaps.min()), n=n, tags=dict(tags))
        yield Record(metric="num_tied", value=float((gaps < TIE).sum()), n=n, tags=dict(tags))


def check_pairs(name: str, pairs: Sequence[Sequence[int]], num_layers: int) -> None:
    """Check that the model has both blocks of each pair."""
    if any(len(pair) != 2 or not {*pair} <= {*range(1, num_layers + 1)} for pair in pairs):
        raise InputError(f"{name}: expected pairs of blocks 1..{num_layers}, got {[*map(list, pairs)]}")


def direction_counts(name: str, k: Sequence[Directions], model: LayeredModel) -> list[int]:
    """Return the distinct numbers of directions for the entries of the option `k`, in ascending order.

    An integer is a number of directions, and a float is a share of the model's width.

    Raises:
        InputError: if an entry of `k` does not fit the model.
    """
    try:
        return sorted({num_directions(each, model.dim) for each in k})
    except (TypeError, ValueError) as error:
        raise InputError(f"{name}: {error}; the model is {model.dim} wide: choose another k") from error


Table = Literal["token", "input_context", "output_context"]
TIE = 1e-4  # singular values with a smaller relative gap are tied: their directions are not well determined


@dataclass(kw_only=True)
class TokenCoupling(Analysis):
    """Coupling between a block and itself, or another block, across the tokens of a prompt, with a random baseline.

    `J[l][t, s]` = d f_l(X)[t] / d X[s] is the Jacobian from token s to token t of f_l, the residual branch of block l.
    Its leading singular vectors are its bases. Three tables, with one entry for each pair of tokens (t, t') or (s, s'),
    hold the coupling of these Jacobians:

    - `token`: `J[l][t, t]` in the bases of `J[l'][t', t']`.
    - `input_context`: `J[l][t, s]` in the bases of `J[l'][t', s]`, for an input s <= t, t'.
    - `output_context`: `J[l][t, s]` in the bases of `J[l'][t, s']`, for an output t >= s, s'.

    For each number K of directions (tag `k`), layer l and, if different, other_layer l': `token_coupling`,
    `input_context_coupling`, `output_context_coupling`. Each is the mean over pairs of different tokens (and over the
    input or output that a pair shares) per prompt, then over prompts. Each comes with `random_..` (expected for
    unrelated bases) and `excess_..` (0 if unrelated, 1 if shared). The entries of its table, averaged over prompts, are
    the records `.._pair`, with tags `token` (of l) and `other_token` (of l', which gives the bases). These tags are
    positions from 0 (the first token) to 100 (the last), in per cent of the prompt. Prompts of any length therefore
    share a table. `num_tokens` evenly spread tokens of each prompt are measured. A prompt with fewer tokens enters only
    the means, with all its tokens.

    Two more records tell how well the bases are determined. `min_gap` is the smallest gap between neighbours among the
    K + 1 largest singular values of a Jacobian, relative to the largest. `num_tied` counts the Jacobians whose gap is
    below 1e-4.

    Pairs with a zero or non-finite Jacobian are undefined. They are left out of the means over tokens and counted in
    the tag `num_undefined_pairs`. Prompts of one token have no pair; they are left out and counted in the tag
    `num_undefined`.

    `pairs` is "same" (each block with itself), "all", or a list of pairs (l, l'). `k`, `p` and `sign` are as in
    `lit_layers.functional.coupling`. The context tables are limited to s <= t, even in models without a causal mask.

    Cost: one Jacobian and its decomposition per pair of tokens. That is n (n + 1) / 2 for n tokens, or n for only the
    table `token`: 36 or 8 per block and prompt at 8 tokens. At width 768 one takes 0.15 s on a CPU core, so a prompt of
    12 blocks takes a minute, or 13 s for only `token`. `pairs="all"` holds the Jacobians of all blocks in memory, 1 GB
    with contexts.

    Source: Aubry et al., "Transformer block coupling and its correlation with generalization in LLMs", section 4.
    """

    LEAST: ClassVar = {"p": 1}

    batches: Batches
    name: str = "token_coupling"
    k: tuple[int | float, ...] = (0.1,)
    p: float = 2.0
    sign: Literal["signed", "absolute"] = "signed"
    pairs: Literal["same", "all"] | list[tuple[int, int]] = "same"
    tables: tuple[Table, ...] = get_args(Table)
    num_tokens: int = 8
    num_prompts: int = 4

    def check_options(self, model: LayeredModel) -> None:
        super().check_options(model)
        direction_counts(self.name, self.k, model)
        check_pairs(self.name, self._pairs(model), model.num_layers)

    def _pairs(self, model: LayeredModel) -> list[Any]:
        if not isinstance(self.pairs, str):
            return [(*pair,) for pair in self.pairs]
        blocks = range(1, model.num_layers + 1)
        return [(a, b) for a, b in itertools.product(blocks, blocks) if a == b or self.pairs == "all"]

    def reads(self, model: LayeredModel) -> dict[str, Rows]:
        return {"batches": Rows(self.batches, limit=self.num_prompts, at_once=1)}

    def update(self, seen: Trajectory, batch: Batch) -> Values:
        """Return the values of one prompt, and its number of measured tokens.

        A table holds the couplings between the Jacobians of two blocks l and l', with one entry per pair of tokens.
        There are three values for each pair of blocks and each table that the option `tables` names. The dimension K
        runs over the numbers of directions in the option `k`.

        - "means" (K, 3): mean coupling, random coupling and excess coupling; NaN for a prompt of one token.
        - "map" (K, tokens, tokens): the table; NaN for a prompt of fewer than `num_tokens` tokens.
        - "undefined": the number of pairs with a zero or non-finite Jacobian. Its key is a tuple with blocks and table.

        Two more values describe the Jacobians of all blocks l'. "gaps" (K, defined Jacobians) holds
        `functional.min_gap`. The key "undefined" alone is a mask (Jacobians,) of zero or non-finite Jacobians.
        """
        model = seen.model
        positions = evenly_spread(0, int(seen.mask.sum()) - 1, self.num_tokens)
        counts, pairs = direction_counts(self.name, self.k, model), self._pairs(model)
        nothing = torch.full((len(counts), 3, self.num_tokens, self.num_tokens), math.nan, dtype=torch.float64)
        values: Values = {"num_tokens": torch.tensor([len(positions)])}
        for pair, table in itertools.product(pairs, self.tables):
            values["means", *pair, table] = nothing[..., 0, 0]
            values["map", *pair, table] = nothing[:, 0]
            values["undefined", *pair, table] = torch.tensor(0)
        if len(positions) > 1:
            values |= self._prompt_values(seen, positions, counts, pairs)
        values = {key: value[..., None] if isinstance(key, tuple) else value for key, value in values.items()}
        return {"gaps": nothing[:, 0, 0, :0], "undefined": torch.zeros(0, dtype=torch.bool), **values}

    def _prompt_values(
        self, seen: Trajectory, positions: list[int], counts: list[int], pairs: list[tuple[int, int]]
    ) -> Values:
        model, context = seen.model, set(self.tables) != {"token"}
        most = min(counts[-1] + 1, model.dim)  # one direction more than the largest K, which min_gap needs
        last_use = {layer: i for i, pair in enumerate(pairs) for layer in pair}
        blocks: dict[int, _Layer] = {}
        gaps: dict[int, dict[str, Tensor]] = {}
        values = Values()
        for i, (layer, other) in enumerate(pairs):
            for each in {layer, other} - blocks.keys():
                blocks[each] = _Layer.read(seen, each, positions, most, context=context)
            if other not in gaps:  # gaps are needed only for the block whose singular vectors are the bases
                gaps[other] = blocks[other].gaps(counts)
            for table in self.tables:
                three, num_undefined = self._coupling_table(blocks[layer], blocks[other], table, counts)
                diagonal = torch.eye(three.shape[-1], dtype=torch.bool)
                values["means", layer, other, table] = three.masked_fill(diagonal, math.nan).nanmean((2, 3, 4))
                values["undefined", layer, other, table] = torch.tensor(num_undefined)
                if len(positions) == self.num_tokens:
                    values["map", layer, other, table] = three[:, 0].nanmean(1)
            for each in {layer, other}:
                if last_use[each] == i:
                    del blocks[each]  # free memory: 36 Jacobians of width 768 take 85 MB in float32
        for name in ("gaps", "undefined"):
            values[name] = torch.cat([of_block[name] for of_block in gaps.values()], -1)
        return values

    def compute(self, model: LayeredModel, batches: Values) -> Iterator[Record]:
        if not (batches["num_tokens"] > 1).any():
            raise InputError(f"{self.name}: coupling of tokens needs prompts of at least two tokens, all have one")
        pairs, num_prompts = self._pairs(model), len(batches["num_tokens"])
        for i, count in enumerate(direction_counts(self.name, self.k, model)):
            tags: Tags = {"k": count}
            for pair, table in itertools.product(pairs, self.tables):
                yield from self._table_records(batches, (*pair, table), i, tags)
            counted = {**tags, **missing_tag("jacobians", batches["undefined"])}
            yield from gap_records(batches["gaps"][i], num_prompts, counted)

    def _table_records(self, values: Values, key: tuple[int, int, Table], i: int, tags: Tags) -> Iterator[Record]:
        layer, other, table = key
        metric = f"{table}_coupling"
        fields: dict[str, Any] = {"layer": layer} if layer == other else {"layer": layer, "other_layer": other}
        counted = {**tags, **missing_tag("pairs", int(values["undefined", *key].sum()))}
        columns = values["means", *key][i]
        for name, column in zip((metric, f"random_{metric}", f"excess_{metric}"), columns, strict=True):
            yield from summarize(name, column, **fields, tags=counted)
        whole = values["num_tokens"] == self.num_tokens
        if not whole.any():
            return
        maps = values["map", *key][i][..., whole]  # (tokens, tokens, prompts)
        percents = [round(100 * i / (len(maps) - 1)) for i in range(len(maps))]
        for row, percent in zip(maps, percents, strict=True):
            for entries, other_percent in zip(row, percents, strict=True):
                at = {**tags, "token": percent, "other_token": other_percent}
                yield from summarize(f"{metric}_pair", entries, **fields, tags=at)

    def _coupling_table(self, first: "_Layer", second: "_Layer", table: Table, counts: list[int]) -> tuple[Tensor, int]:
        """Return one of the three tables for a prompt and two blocks, (counts, 3, fixed, tokens, tokens).

        The dimension of 3 is coupling, random and excess coupling. Each entry compares a Jacobian of the `first` block
        with the bases of a Jacobian of the `second` block. The last two dimensions are the tokens of these Jacobians.
        In the table `input_context`, both Jacobians have the same input token. In `output_context`, they have the same
        output token. The dimension `fixed` runs over this common token. It has size 1 in the table `token`, where each
        Jacobian maps a token to itself. An entry is NaN if a Jacobian is missing or undefined. The table is in float64
        on the CPU.

        Also return the number of undefined pairs of Jacobians at different tokens.
        """
        tokens = len(first.index)
        if table == "token":
            rows = first.index.diagonal()[None]
        else:
            rows = first.index.T if table == "input_context" else first.index
            rows = rows[(rows >= 0).sum(1) > 1]  # leave out tokens with a single Jacobian, which forms no pair
        miscoupling = torch.full((len(counts), len(rows), tokens, tokens), math.nan, dtype=torch.float64)
        random = torch.full((len(counts), len(rows), tokens), math.nan, dtype=torch.float64)
        options: dict[str, Any] = {"p": self.p, "sign": self.sign, "undefined": "nan"}
        num_undefined = 0
        for fixed, row in enumerate(rows):
            (present,) = (row >= 0).nonzero(as_tuple=True)
            chosen = row[present].to(first.jacobians.device)
            values = first.factors.values[chosen]
            bases = Factors(*(each[chosen] for each in second.factors))
            # miscoupling of each pair of Jacobians in this row, (counts, present, present)
            of_row = functional.miscoupling_of_factors(first.jacobians[chosen], values, bases, k=counts, **options)
            undefined = first.undefined[chosen][:, None] | second.undefined[chosen]
            num_undefined += int(undefined.sum() - undefined.diagonal().sum())
            miscoupling[:, fixed, present[:, None], present] = of_row.masked_fill(undefined, math.nan).double().cpu()
            for i, count in enumerate(counts):
                chance = functional.random_miscoupling_from_norms(
                    values[:, :count], first.norms[chosen], dim=first.jacobians.shape[-1], **options
                )
                random[i, fixed, present] = chance.cpu()
        coupling = 1 - miscoupling
        by_chance = (1 - random)[..., None].expand_as(coupling).masked_fill(coupling.isnan(), math.nan)
        return torch.stack([coupling, by_chance, excess_coupling(miscoupling, random)], 1), num_undefined


class _Layer(NamedTuple):
    """Jacobians of one block between chosen tokens of one prompt, and their leading directions."""

    index: Tensor  # (output tokens, input tokens): index into `jacobians`, -1 if there is none
    jacobians: Tensor  # (jacobians, dim, dim)
    factors: Factors
    norms: Tensor  # (jacobians,)
    undefined: Tensor  # (jacobians,)

    @classmethod
    def read(cls, trajectory: Trajectory, layer: int, positions: list[int], count: int, *, context: bool) -> "_Layer":
        tokens = len(positions)
        if context:
            block, before = trajectory.block(layer), trajectory.hidden[layer - 1]
            found = list[Tensor]()
            for row, out in enumerate(positions):
                how: Any = {"out_tokens": out, "in_tokens": positions[: row + 1], "mask": trajectory.mask}
                found.append(block_jacobian(block, before, **how)[0, 0])
            rows, columns = torch.tril_indices(tokens, tokens)
        else:
            found = [same_token_jacobians(trajectory, layer, positions)]
            rows = columns = torch.arange(tokens)
        jacobians, undefined = finite_or_zero(torch.cat(found))
        index = torch.full((tokens, tokens), -1)
        index[rows, columns] = torch.arange(len(jacobians))
        factors = singular_factors(jacobians, count)
        jacobians = jacobians.to(factors.left.dtype)
        return cls(index, jacobians, factors, torch.linalg.matrix_norm(jacobians), undefined)

    def gaps(self, counts: list[int]) -> dict[str, Tensor]:
        """Return two tensors by name, `gaps` and `undefined`.

        `gaps` (counts, defined Jacobians) is `functional.min_gap` of each defined Jacobian, for each number of
        directions in `counts`. `undefined` (jacobians,) is a mask of the Jacobians that are zero or not finite.
        """
        values = self.factors.values[~self.undefined].cpu()
        gaps = torch.stack([functional.min_gap(values, k=count) for count in counts])
        return {"gaps": gaps, "undefined": self.undefined.cpu()}


# The smallest distance in each group of distances. Each distance below 8 is a group of its own. From 8 on, there are
# two groups per doubling of the distance.
GROUPS = [*range(8), *(edge for octave in range(3, 24) for edge in (2**octave, 3 * 2 ** (octave - 1)))]
_ENTRIES = 2**25  # largest number of entries of Jacobians in memory: 128 MB in float32, 56 Jacobians of width 768


@dataclass(kw_only=True)
class CrossTokenInfluence(Analysis):
    """Size and rank of the Jacobians from tokens s <= t to the last real token t, per layer and distance t - s.

    The metrics are `influence_frobenius`, `influence_spectral`, `influence_participation_ratio` and
    `influence_entropy_rank`. Records with the tag `token_distance` are means over the tokens of a group within each
    prompt, then over prompts. The tag is the smallest distance of the group. Each distance from 0 to 7 is a group of
    its own, followed by 8-11, 12-15, 16-23, 24-31, and so on. Records without the tag are means over all measured
    s < t. Ranks of a zero Jacobian are undefined: they are left out and counted in the tag `num_undefined_tokens`.

    `num_inputs` is the largest number of input tokens per prompt, spread evenly over log(1 + distance). None means all
    tokens.

    Cost: one Jacobian and its singular values per layer, prompt and input token. At width 768 one takes 0.1 s on a CPU
    core, so 12 layers and 128 tokens take 2.6 min per prompt, and 32 of the tokens 40 s.

    Source: definitions and departures as in `lit_layers.functional.cross_token_influence`.
    """

    batches: Batches
    name: str = "cross_token_influence"
    num_prompts: int = 4
    num_inputs: int | None = None

    def reads(self, model: LayeredModel) -> dict[str, Rows]:
        return {"batches": Rows(self.batches, limit=self.num_prompts, at_once=1)}

    def update(self, seen: Trajectory, batch: Batch) -> Values:
        """Return the values of one prompt, keyed by layer and group of distances (see `_groups`), each (2, 4, 1).

        For each of the 4 metrics, they are the mean over the tokens of the group, and the number of tokens without a
        value.
        """
        distances, values = self._distances(int(seen.mask.sum()) - 1), Values()
        for layer in range(1, seen.num_layers + 1):
            influence = torch.stack(self._influence(seen, layer, distances))  # (metrics, distances)
            for group, indices in self._groups(distances).items():
                of_group = influence[:, indices]
                missing = of_group.isnan().sum(-1).double()
                values[layer, group] = torch.stack([of_group.nanmean(-1), missing])[..., None]
        return values

    def compute(self, model: LayeredModel, batches: Values) -> Iterator[Record]:
        for (layer, group), (means, missing) in batches.items():
            for name, of_prompts, undefined in zip(Influence._fields, means, missing, strict=True):
                tags: TagDict = {} if group is None else {"token_distance": group}
                tags |= missing_tag("tokens", int(undefined.sum()))
                yield from summarize(f"influence_{name}", of_prompts, layer=layer, tags=tags)

    def _distances(self, most: int) -> list[int]:
        """Return the distances to measure, from 0 to `most`, in ascending order.

        Both 0 and `most` are among them if `num_inputs` is at least 2 or None.
        """
        count = self.num_inputs
        if count is None or count > most:
            return list(range(most + 1))
        steps = [math.expm1(math.log1p(most) * i / max(count - 1, 1)) for i in range(count)]
        distances = [-1]
        for i, step in enumerate(steps):  # move apart distances that round to the same number
            distances.append(min(max(round(step), distances[-1] + 1), most - (count - 1 - i)))
        return distances[1:]

    def _groups(self, distances: list[int]) -> dict[int | None, list[int]]:
        """Return the indices of the distances in each group. The group None holds all distances above 0."""
        groups: dict[int | None, list[int]] = defaultdict(list)
        for i, distance in enumerate(distances):
            groups[GROUPS[bisect.bisect_right(GROUPS, distance) - 1]].append(i)
            if distance > 0:
                groups[None].append(i)
        return groups

    def _influence(self, trajectory: Trajectory, layer: int, distances: list[int]) -> Influence:
        """Return size and rank of the Jacobian at each distance, in float64 on the CPU.

        Only a few Jacobians are in memory at a time.
        """
        block, before = trajectory.block(layer), trajectory.hidden[layer - 1]
        size = max(1, _ENTRIES // trajectory.model.dim**2)
        found = []
        for start in range(0, len(distances), size):
            how: Any = {"in_tokens": [-1 - distance for distance in distances[start : start + size]]}
            jacobians = block_jacobian(block, before, mask=trajectory.mask, **how)[0, 0]  # (tokens, dim, dim)
            found.append(cross_token_influence(jacobians, undefined="nan"))
        return Influence(*(torch.cat(values).double().cpu() for values in zip(*found, strict=True)))
