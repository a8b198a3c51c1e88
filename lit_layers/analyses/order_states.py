"""How similar the states after changed middle blocks are to the states of the full model."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from lit_layers.analyses.base import Analysis, Values
from lit_layers.analyses.statistics import summarize
from lit_layers.data.batches import Batches
from lit_layers.errors import InputError
from lit_layers.functional._checks import widened
from lit_layers.functional.block_schedules import LOOPS, MIDDLE_NAMES, SEEDS, Schedule, Variant, start_of
from lit_layers.models.running_order import SharedPrefixes, variants_of
from lit_layers.models.view import Batch, LayeredModel, Trajectory, drop_first_tokens
from lit_layers.records import Record


@dataclass(kw_only=True)
class OrderStates(Analysis):
    """Similarity of the states that the last blocks receive, with changed middle blocks and in the full model.

    A variant of the model changes its middle blocks, for example their order, and leaves the last N of its T blocks
    unchanged (see `Interventions`). In the variant, the last N blocks receive the state x. In the full model they
    receive y, the state at layer T - N. If N = 0, x and y are the states that the readout receives.

    `ending_input_cosine` is the cosine of x and y, and `ending_input_norm_ratio` is |x| / |y|. Both are averaged over
    each prompt's real tokens, then over prompts, with intervals. Both are 1 for the full model. A prompt is left out
    and counted in `num_undefined` if a token has a zero or non-finite state.

    For random orders, the mean over seeds is taken within each prompt. Tags are those of `Interventions`. Blocks run as
    in `running_order`. If several variants begin with the same blocks, these blocks run only once per batch. The model
    runs in float32 or wider; cosines and norms are in float64.

    Source: Sun et al., Transformer Layers as Painters, arXiv 2407.09298, A.4, asks why repeating a middle block harms
    more than skipping the middle; these numbers are ours.

    Args:
        batches: the data to measure on.
        variants: names in `lit_layers.functional.block_schedules.MIDDLE_NAMES`.
        middles: numbers of middle blocks. None means all that are possible.
        seeds: seeds of random orders.
        loops: numbers of loops of the variant looped_parallel.
        drop_first: number of first tokens of each prompt to leave out. They are mostly attention sinks, with a norm
            unlike all others.
    """

    batches: Batches
    name: str = "interventions/states"
    variants: tuple[str, ...] = MIDDLE_NAMES
    middles: tuple[int, ...] | None = None
    seeds: tuple[int, ...] = SEEDS
    loops: tuple[int, ...] = LOOPS
    drop_first: int = 0

    def check_options(self, model: LayeredModel) -> None:
        super().check_options(model)
        if other := next((name for name in self.variants if name not in MIDDLE_NAMES), None):
            raise InputError(f"{self.name}: variants: expected some of {', '.join(MIDDLE_NAMES)}, got {other!r}")
        self._orders(model)

    def _orders(self, model: LayeredModel) -> list[tuple[Variant, Schedule, int]]:
        """Return each variant, the part of its schedule before the last blocks, and the layer before these blocks.

        Here, the last blocks are those that the variant leaves in place at the end of the model. In the full model,
        their input is the state at the returned layer.
        """
        chosen = variants_of(self, model, f"{self.name}: ")
        orders = []
        for variant in chosen:
            num_last = 0 if variant.middle is None else start_of(model.num_layers, variant.middle)
            orders.append((variant, variant.schedule[: len(variant.schedule) - num_last], model.num_layers - num_last))
        return orders

    @torch.no_grad()
    def update(self, seen: Trajectory, batch: Batch) -> Values:
        mask = drop_first_tokens(seen.mask, self.drop_first)
        orders = self._orders(seen.model)
        values = torch.zeros(2, len(orders), len(mask), dtype=torch.float64)
        shared = SharedPrefixes([order for _, order, _ in orders], seen.num_layers)
        for indices, hidden in shared.states(seen):
            for i in indices:
                usual = seen.hidden[orders[i][2]]
                values[:, i] = _compare(widened(hidden), widened(usual), mask).cpu()
        return {"against": values[..., mask.any(-1).cpu()]}

    def compute(self, model: LayeredModel, batches: Values) -> Iterator[Record]:
        against = batches["against"]  # (2, orders, prompts): cosine and ratio of norms
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


def _compare(states: Tensor, usual: Tensor, mask: Tensor) -> Tensor:
    """Compare states of a variant with those of the full model (`usual`) at the same tokens.

    Return cosine and ratio of norms (2, batch), averaged over the tokens in the mask (batch, tokens). One undefined
    token makes the mean NaN.
    """
    mask = mask.to(states.device)  # the CPU, if the device of the model has no float64
    norms, usual_norms = states.norm(dim=-1), usual.norm(dim=-1)
    cosines = (states * usual).sum(-1) / (norms * usual_norms)
    values = torch.stack([cosines.clamp(-1, 1), norms / usual_norms])  # (2, batch, tokens)
    values = values.where(values.isfinite() & (norms > 0), torch.nan)
    return values.where(mask, 0).sum(-1) / mask.sum(-1)
