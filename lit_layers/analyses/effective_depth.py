"""Effective depth: how skipping each block changes what later blocks add to the states."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from lit_layers.analyses.base import Analysis, Values
from lit_layers.analyses.statistics import Sample, median_of_defined, summarize, summarize_all, summarize_layers
from lit_layers.data.batches import Batches
from lit_layers.functional._checks import widened
from lit_layers.functional.state_geometry import step_ratio
from lit_layers.functional.trajectory import effective_depth
from lit_layers.models.view import Batch, LayeredModel, Trajectory
from lit_layers.records import Record


@dataclass(kw_only=True)
class EffectiveDepth(Analysis):
    """Number of blocks on which later blocks depend, computed from the effect of skipping each block.

    Block m adds c_m = h_m - h_(m-1) to a token's state. Let c_m^(-l) be what it adds if an earlier block l < m is
    skipped, that is, returns its input. For one prompt, with L blocks:

        later_effect_pair(l, m) = median over real tokens of |c_m^(-l) - c_m| / |c_m|
        later_effect(l)         = mean of later_effect_pair(l, m) over m = l+1..L
        later_effect(L)         = median over real tokens of |c_L| / |h_L|
        effective_depth         = (sum_l later_effect(l))^2 / sum_l later_effect(l)^2

    The last block has no later block: only the readout depends on it. Its effect is therefore the change of the last
    state if it is skipped. `effective_depth` is between 1 and L. It is 1 if no block reads what an earlier block adds,
    and L if all blocks have the same effect. Tokens to which a block adds almost nothing would dominate a mean over
    tokens, but not this median.

    Values are averaged over prompts, with intervals. In records of pairs, `layer` is the skipped block l and
    `other_layer` the later block m. The record of `later_effect` without `layer` is the mean over blocks. A prompt has
    no value, and is counted in `num_undefined`, if c_m is 0 or not finite at one of its tokens.

    Analyses share one forward pass. After it, only the blocks that follow a skipped one run again. This takes
    L (L - 1) / 2 block calls, as many as (L - 1) / 2 forward passes. The model runs in float32 or wider; changes are
    computed in float64.

    Source: Csordás et al., arXiv 2505.13898, who show the maximum over tokens and prompts; the single number is ours.

    Args:
        batches: the data to measure on.
    """

    batches: Batches
    name: str = "effective_depth"

    @torch.no_grad()
    def update(self, seen: Trajectory, batch: Batch) -> Values:
        """Return the effects of pairs of blocks (L, L, prompts), NaN unless l < m, and of the last block (prompts,)."""
        last, hidden = seen.num_layers, seen.hidden
        pairs = torch.full((last, last, len(seen.mask)), torch.nan, dtype=torch.float64)
        for skipped in range(1, last):
            before = hidden[skipped - 1]
            for later in range(skipped + 1, last + 1):
                after = seen.block(later)(before)
                usual = widened(hidden[later]) - widened(hidden[later - 1])
                pairs[skipped - 1, later - 1] = _median_change(widened(after) - widened(before), usual, seen.mask)
                before = after
        return {"pairs": pairs, "last": _median_change(hidden[-2], hidden[-1], seen.mask)}

    def compute(self, model: LayeredModel, batches: Values) -> Iterator[Record]:
        pairs, last = batches["pairs"], batches["last"]
        inner = [pairs[block, block + 1 :].mean(0) for block in range(len(pairs) - 1)]
        effects = torch.stack([*inner, last])  # (L, prompts)
        yield from summarize("effective_depth", effective_depth(effects, undefined="nan"))
        yield from summarize_layers("later_effect", torch.cat([torch.full_like(effects[:1], torch.nan), effects]))
        indices = torch.triu_indices(len(pairs), len(pairs), offset=1).T.tolist()
        yield from summarize_all(
            Sample("later_effect_pair", pairs[one, other], one + 1, other_layer=other + 1) for one, other in indices
        )


def _median_change(changed: Tensor, usual: Tensor, mask: Tensor) -> Tensor:
    """Return the median relative change (batch,) over the tokens in the mask; NaN if it is undefined at one of them."""
    changes = step_ratio(usual, changed, undefined="nan")  # |changed - usual| / |usual|
    mask = mask.to(changes.device)
    medians = median_of_defined(changes.masked_fill(~mask, torch.nan))
    return medians.masked_fill((changes.isnan() & mask).any(-1), torch.nan).cpu()
