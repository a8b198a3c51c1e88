"""How similar states are: between layers, and of one layer when the blocks before it run in another order."""

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from lit_layers.analyses.base import Analysis, Values
from lit_layers.analyses.statistics import complete, gap, left_out, mean_of_defined, summarize
from lit_layers.data.batches import Batches
from lit_layers.errors import InputError
from lit_layers.functional._checks import widened
from lit_layers.functional.block_schedules import LOOPS, OF_MIDDLES, SEEDS, Schedule, Variant, start_of
from lit_layers.functional.geometry import cosine_similarity_matrix, layer_stages, linear_cka_matrix, pool
from lit_layers.models.running_order import SharedPrefixes, variants_of
from lit_layers.models.view import (
    Batch,
    LayeredModel,
    States,
    Trajectory,
    drop_first_tokens,
    evenly_spread,
    states_of_layers,
)
from lit_layers.records import Record

Mode = Literal["token", "flattened"]
SIZES = "num_beginning", "num_middle", "num_ending"


@dataclass(kw_only=True)
class LayerSimilarity(Analysis):
    """Similarity of every two layers, 0 to L, and the beginning, middle and ending that it divides the model into.

    `layer_cosine` (tag `mode`): the cosine of a token's states at two layers, averaged within each prompt, then over
    prompts ("token"), or that of all of a prompt's tokens as one vector, a mean weighted by norms ("flattened").
    `layer_cka`: linear centred kernel alignment. Both for `layer` and `other_layer` in either order.

    `num_beginning`, `num_middle`, `num_ending` and `block_contrast`: the contiguous division of layers 1..L (the
    embedding does not count) by `layer_stages`, of the similarity that the tag `of` names and its `mode`.

    A layer without a value has none with any other, and then there is no division (NaN). A prompt that is not finite at
    some layer is left out of the alignment, a layer at which most are not has none.

    Values are over prompts of equal weight, with intervals; those of `layer_cka` are over all rows together (tag
    `num_rows`), without. Padding never enters. A result of other than the default options says so in tags. The model
    runs in float32 or wider.
    Source: Sun et al., arXiv 2407.09298 (cosine); Kornblith et al. 2019 (CKA).

    Args:
        batches: what is measured on.
        rows: of the alignment: tokens, or one mean-pooled vector for each prompt.
        num_tokens: of each prompt, evenly spread, where tokens are the rows; None for all. All layers' rows are kept
            in memory: 128 prompts x 16 tokens x 13 layers x 768 x 4 B = 82 MB.
        debiased: the alignment that does not grow with width over rows, and may be below 0; it needs 4 rows.
        drop_first: how many first tokens are left out, mostly sinks, whose norm decides "flattened" and the alignment.
        states: which convention.
    """

    batches: Batches
    name: str = "layer_similarity"
    rows: Literal["tokens", "prompts"] = "tokens"
    num_tokens: int | None = 16
    debiased: bool = True
    drop_first: int = 0
    states: States = "resid"

    def update(self, seen: Trajectory, batch: Batch) -> Values:
        """Return the cosines of each prompt's layers, and the rows of the alignment (layers + 1, dim, rows)."""
        mask = drop_first_tokens(seen.mask, self.drop_first)
        left = mask.any(-1)
        hidden, mask = torch.stack([states[left] for states in states_of_layers(seen, self.states)]), mask[left]
        values = {mode: _cosines(hidden, mask, mode) for mode in get_args(Mode)}
        values["finite"] = (hidden.isfinite().all(-1) | ~mask).all(-1)
        rows, values["num_rows"] = self._rows(hidden, mask)
        return {key: value.cpu() for key, value in values.items()} | {"rows": rows.mT.cpu()}

    def compute(self, model: LayeredModel, batches: Values) -> Iterator[Record]:
        _, kept = complete(batches["finite"])  # (prompts,)
        rows = batches["rows"].mT[:, kept.repeat_interleave(batches["num_rows"])].contiguous()
        prompts = int(kept.sum())
        least = 4 if self.debiased else 2
        enough = rows.shape[1] >= least
        if not enough and kept.all():
            raise InputError(f"{self.name}: layer_cka needs {least} rows or more, got {rows.shape[1]}: give more texts")
        tags = self.tags_of("states", "drop_first")
        for mode in get_args(Mode):
            values = batches[mode].movedim(-1, 0).contiguous()  # (prompts, layers + 1, layers + 1)
            tags_of_mode = {"mode": mode, **tags}
            yield from _cosine_records(values, tags_of_mode)
            whole = values.isfinite().flatten(1).all(1)  # of the same prompts at every layer, unless a layer has none
            means = mean_of_defined(values[whole] if whole.any() else values, dim=0)
            tags_of_stages = {**tags_of_mode, **left_out("", ~whole)}
            yield from _stages("layer_cosine", means, int(whole.sum()), tags_of_stages)
        tags |= self.tags_of("rows") | ({} if self.debiased else {"debiased": "no"}) | left_out("", ~kept)
        alignment = torch.full((len(rows), len(rows)), math.nan)
        if enough:
            alignment = linear_cka_matrix(rows.to(model.device), debiased=self.debiased, undefined="nan").cpu()
        about: dict[str, Any] = {"metric": "layer_cka", "n": prompts, "tags": {**tags, "num_rows": rows.shape[1]}}
        for layer, other in (~alignment.isnan()).nonzero().tolist():
            yield Record(value=alignment[layer, other].item(), layer=layer, other_layer=other, **about)
        yield from _stages("layer_cka", alignment, prompts, tags)

    def _rows(self, hidden: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Return the rows of the alignment (layers + 1, rows, dim), and how many each prompt has (batch,)."""
        if self.rows == "prompts":
            return pool(hidden, mask.expand(hidden.shape[:-1]), undefined="nan"), mask.new_ones(len(mask)).long()
        kept = torch.zeros_like(mask)
        for prompt, real in enumerate(mask):
            places = real.nonzero()[:, 0]
            count = len(places) if self.num_tokens is None else self.num_tokens
            kept[prompt, places[evenly_spread(0, len(places) - 1, count)]] = True
        return hidden[:, kept], kept.sum(-1)


def _cosines(hidden: Tensor, mask: Tensor, mode: Mode) -> Tensor:
    """Return the matrices (layers + 1, layers + 1, prompts), in float64, NaN where a state is zero.

    Their mean over prompts is that of all, and so is its spread.
    """
    matrices = torch.zeros(len(hidden), len(hidden), len(mask), dtype=torch.float64)
    for row in range(len(mask)):
        matrices[..., row] = cosine_similarity_matrix(hidden[:, [row]], mask[[row]], mode=mode, undefined="nan")
    return matrices


def _cosine_records(values: Tensor, tags: dict[str, Any]) -> Iterator[Record]:
    for layer, other in itertools.combinations_with_replacement(range(values.shape[-1]), 2):
        records = summarize("layer_cosine", values[:, layer, other], layer=layer, other_layer=other, tags=tags)
        yield from records
        if other != layer:
            yield from (replace(record, layer=other, other_layer=layer) for record in records)


def _stages(of: str, matrix: Tensor, num_prompts: int, tags: dict[str, Any]) -> Iterator[Record]:
    missing = matrix[1:, 1:].diagonal().isnan()
    if missing.any() or not num_prompts:
        for metric in (*SIZES, "block_contrast"):
            yield gap(metric, tags={"of": of, **tags, **left_out("layers", missing)})
        return
    stages = layer_stages(matrix[1:, 1:])
    for metric in (*SIZES, "block_contrast"):
        value = float(getattr(stages, metric.removeprefix("block_")))
        yield Record(metric=metric, value=value, n=num_prompts, tags={"of": of, **tags})


@dataclass(kw_only=True)
class OrderStates(Analysis):
    """How far the states behind middle blocks that run otherwise are from those that the blocks behind are used to.

    Of T blocks a variant changes the middle M and leaves the last N as they are (`Interventions`). These are given the
    state x after the changed middle; in the full model it is y, that of layer T - N. `ending_input_cosine`: the cosine
    of x and y; `ending_input_norm_ratio`: |x| / |y|. Both of each real token, averaged within each prompt, then over
    prompts, with intervals; 1 of the full model. Where N = 0 these are the states that the readout is given. A prompt
    with a token without a value (a zero state, or one that is not finite) is left out and counted in `num_undefined`.

    Of random orders the mean over seeds, taken within each prompt. Tags are those of `Interventions`. Blocks run as
    `running_order` composes them, those that orders begin with in common once for each batch. The model runs in
    float32 or wider, the rest in float64.

    Source: Sun et al., Transformer Layers as Painters, arXiv 2407.09298, A.4, asks why repeating a middle block
    harms more than skipping the middle; these numbers are ours.

    Args:
        batches: what is measured on.
        variants: of `lit_layers.functional.block_schedules.OF_MIDDLES`.
        middles: numbers of middle blocks; None: all that there are.
        seeds: of random orders.
        loops: of looped_parallel.
        drop_first: how many first tokens are left out, mostly sinks, whose norm is unlike all others.
    """

    batches: Batches
    name: str = "interventions/states"
    variants: tuple[str, ...] = OF_MIDDLES
    middles: tuple[int, ...] | None = None
    seeds: tuple[int, ...] = SEEDS
    loops: tuple[int, ...] = LOOPS
    drop_first: int = 0

    def check_options(self, model: LayeredModel) -> None:
        super().check_options(model)
        if other := next((name for name in self.variants if name not in OF_MIDDLES), None):
            raise InputError(f"{self.name}: variants: expected some of {', '.join(OF_MIDDLES)}, got {other!r}")
        self._orders(model)

    def _orders(self, model: LayeredModel) -> list[tuple[Variant, Schedule, int]]:
        """Return each variant, its steps up to the end of the middle, and the layer at which the ending begins."""
        chosen = variants_of(self, model, f"{self.name}: ")
        orders = []
        for each in chosen:
            behind = 0 if each.middle is None else start_of(model.num_layers, each.middle)
            orders.append((each, each.schedule[: len(each.schedule) - behind], model.num_layers - behind))
        return orders

    @torch.no_grad()
    def update(self, seen: Trajectory, batch: Batch) -> Values:
        mask = drop_first_tokens(seen.mask, self.drop_first)
        orders = self._orders(seen.model)
        values = torch.zeros(2, len(orders), len(mask), dtype=torch.float64)
        shared = SharedPrefixes([order for _, order, _ in orders], seen.num_layers)
        for indices, hidden in shared.states(seen):
            for index in indices:
                usual = seen.hidden[orders[index][2]]
                values[:, index] = _against(widened(hidden), widened(usual), mask).cpu()
        return {"against": values[..., mask.any(-1).cpu()]}

    def compute(self, model: LayeredModel, batches: Values) -> Iterator[Record]:
        against = batches["against"]  # (2, orders, prompts)
        chosen = enumerate(variant for variant, _, _ in self._orders(model))
        for _, group in groupby(chosen, key=lambda item: (item[1].name, item[1].middle, item[1].loops)):
            members = dict(group)
            variant = next(iter(members.values()))
            tags = {name: tag for name, tag in variant.tags.items() if name not in ("seed", "schedule")}
            tags |= {"num_seeds": len(members)} if variant.name == "random" else {}
            tags |= self.tags_of("drop_first")
            cosine, ratio = against[:, [*members]].mean(1)
            yield from summarize("ending_input_cosine", cosine, tags=tags)
            yield from summarize("ending_input_norm_ratio", ratio, tags=tags)


def _against(states: Tensor, usual: Tensor, mask: Tensor) -> Tensor:
    """Return cosine and ratio of norms (2, batch), means over the tokens of the mask (batch, tokens).

    One undefined token makes the mean NaN.
    """
    mask = mask.to(states.device)  # where there is no float64, states are on the CPU
    norms, of_usual = states.norm(dim=-1), usual.norm(dim=-1)
    cosines = (states * usual).sum(-1) / (norms * of_usual)
    values = torch.stack([cosines.clamp(-1, 1), norms / of_usual])  # (2, batch, tokens)
    values = values.where(values.isfinite() & (norms > 0), torch.nan)
    return values.where(mask, 0).sum(-1) / mask.sum(-1)
