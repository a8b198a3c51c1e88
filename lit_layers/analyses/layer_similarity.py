"""How similar the states of layers are."""

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from lit_layers.analyses.base import Analysis, Values
from lit_layers.analyses.statistics import complete, gap, left_out, mean_of_defined, summarize
from lit_layers.data.batches import Batches
from lit_layers.errors import InputError
from lit_layers.functional.geometry import cosine_similarity_matrix, layer_stages, linear_cka_matrix, pool
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
