"""What a frozen model still predicts when its blocks are skipped, repeated, turned around or run side by side."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import groupby

import torch
from torch import Tensor

from lit_layers.analyses.base import DividedAnalysis
from lit_layers.analyses.ratios import summarize_ratio
from lit_layers.analyses.readout_rows import MAX_LOGITS, FullModel, Sums, check_head, rows_of
from lit_layers.analyses.summary import Tags
from lit_layers.data.batches import Batches
from lit_layers.errors import InputError
from lit_layers.functional.block_schedules import (
    LOOPS,
    SEEDS,
    VARIANTS,
    Variant,
    baseline,
    kendall_distance,
    start_of,
    variants,
)
from lit_layers.models.shared_prefixes import SharedPrefixes
from lit_layers.models.view import Batch, LayeredModel
from lit_layers.records import Record


@dataclass(kw_only=True)
class Interventions(DividedAnalysis):
    """Layers as painters: loss, accuracy and divergence of a model whose blocks run in other orders.

    Of a model that generates, per variant over all predicted tokens (every real one but a text's first):
    `variant_loss` (nats per token), `variant_accuracy` (top-1) and `kl_to_full` = KL(full model || variant) in nats. Of
    other models (classifiers, encoders, ViTs) `kl_to_full` over prompts, or over real tokens where the head acts on
    tokens, and loss and accuracy against the batch's `labels` where it has them (-100 for none).

    The tag `variant` names the order, `middle` counts the blocks in question, `loops` those of looped_parallel; of
    skip_one and switch the record's layer is the block. Random orders have records for each `seed`, with the
    `schedule` and its `kendall_distance` (pairs of blocks that stand the other way round), and one of the mean over
    seeds, taken within each prompt; there `num_identical` counts orders that left everything in place. The full model
    is `baseline`, at a divergence of 0.

    Values weigh every token alike; `stderr`, the interval and `n` are over prompts, and `num_tokens` counts tokens (or,
    of a pooling head, prompts). A prompt with a value that is not finite is left out and counted in `num_undefined`; if
    that is every prompt, the value is NaN, or that of a block is left out. log-softmax in float32 or wider; the model
    runs in its own precision.

    What several orders begin with in common is run once for each batch.
    Source: Sun et al., Transformer Layers as Painters, arXiv 2407.09298.

    Args:
        batches: what is measured on.
        variants: which orders.
        middles: numbers of middle blocks; None: all that there are.
        seeds: of random orders.
        loops: of looped_parallel.
        custom: further orders, written as `1 2 (3,4,5) 6`.
    """

    batches: Batches
    name: str = "interventions"
    variants: tuple[str, ...] = VARIANTS
    middles: tuple[int, ...] | None = None
    seeds: tuple[int, ...] = SEEDS
    loops: tuple[int, ...] = LOOPS
    custom: tuple[str, ...] = ()

    def check(self, model: LayeredModel) -> None:
        super().check(model)
        check_head(self.name, model)
        self.chosen(model)

    def prepared(self, model: LayeredModel) -> LayeredModel:
        return model  # as it would be used; what a rounding costs is little beside what a block in another place does

    def chosen(self, model: LayeredModel) -> list[Variant]:
        """The variants of this model, the full one first.

        Raises:
            InputError: options that do not fit the model.
        """
        if model.num_layers < 2:
            raise InputError(f"{self.name}: an order needs at least two blocks, the model has {model.num_layers}")
        try:
            return variants(
                model.num_layers,
                self.variants,
                middles=self.middles,
                seeds=self.seeds,
                loops=self.loops,
                custom=self.custom,
            )
        except ValueError as error:
            raise InputError(f"{self.name}: {error}") from error

    def parts(self, model: LayeredModel) -> Iterable[Batch]:
        check_head(self.name, model)
        self.chosen(model)
        return self.batches

    @torch.no_grad()
    def of_part(self, model: LayeredModel, part: Batch) -> Sums:
        trajectory = model.trajectory(part)
        rows, num_prompts = rows_of(self.name, model, trajectory, part), len(trajectory.mask)
        size = max(1, MAX_LOGITS // trajectory.logits.shape[-1])
        full = [FullModel(trajectory.logits[chunk.index], chunk) for chunk in rows.chunks(size)]
        # Large, and `full` has what is needed of it: no more is held than one batch's logits and a chunk's.
        trajectory = replace(trajectory, logits=trajectory.logits.new_empty(0))
        chosen = self.chosen(model)
        found: list[Tensor] = [torch.zeros(3, len(rows.prompt), dtype=torch.float64)] * len(chosen)
        if full:  # a batch may predict nothing
            orders = SharedPrefixes([variant.schedule for variant in chosen], model.num_layers)
            for indices, hidden in orders.states(trajectory):
                whole = 0 in indices  # by the model's own logits, so that its divergence is 0 exactly
                values = torch.cat(
                    [each.own if whole else each.compared(model.readout(hidden[each.rows.index])) for each in full],
                    dim=-1,
                )
                for index in indices:
                    found[index] = values
        return Sums.of(torch.stack(found, dim=1), rows, num_prompts)

    def combine(self, model: LayeredModel, found: list[Sums]) -> Iterable[Record]:
        sums = Sums.joined(self.name, found)
        chosen = enumerate(self.chosen(model))
        for (name, middle), group in groupby(chosen, key=lambda item: (item[1].name, item[1].middle)):
            members = list(group)
            for index, variant in members:
                yield from _records(sums, [index], variant.tags, variant.block)
                if name == "random":
                    yield _distance(variant, model.num_layers)
            if name == "random":
                whole = baseline(model.num_layers)
                tags = {
                    "variant": name,
                    "middle": middle,
                    "num_seeds": len(members),
                    "num_identical": sum(variant.schedule == whole for _, variant in members),
                }
                yield from _records(sums, [index for index, _ in members], tags)


def _records(sums: Sums, indices: list[int], tags: Tags, layer: int | None = None) -> Iterator[Record]:
    """Of one variant, or the mean of several: within each prompt, as the spread of interest is that over prompts."""
    kinds = [("variant_loss", sums.loss, sums.num_labels), ("variant_accuracy", sums.hits, sums.num_labels)]
    for metric, values, counts in (*kinds, ("kl_to_full", sums.divergence, sums.num_rows)):
        if counts.any():
            yield from summarize_ratio(
                metric, values[indices].mean(0), counts, layer=layer, tags=tags, counted="num_tokens"
            )


def _distance(variant: Variant, num_blocks: int) -> Record:
    assert variant.middle is not None
    start = start_of(num_blocks, variant.middle)
    order = [step for step in variant.schedule[start + 1 : num_blocks - start] if isinstance(step, int)]
    return Record(metric="kendall_distance", value=float(kendall_distance(order)), tags=dict(variant.tags))
