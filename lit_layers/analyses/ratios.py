"""From sums and counts per prompt to a record: a mean over tokens or rows, uncertain over prompts."""

from dataclasses import replace

from torch import Tensor

from lit_layers.analyses.summary import Tags, gap, left_out, summarize
from lit_layers.records import Record


def summarize_ratio(
    metric: str,
    sums: Tensor,
    counts: Tensor,
    *,
    layer: int | None = None,
    tags: Tags | None = None,
    counted: str | None = None,
) -> list[Record]:
    """The sum of `sums` over the sum of `counts`, (prompts,) each: every token counts alike, whichever prompt it is in.

    Tokens of one prompt are not independent, so `stderr` and the bootstrap interval are over prompts: those of the mean
    of the linearised ratio R + (sum - R count) / mean count. With equal counts that is the mean of the prompts' means,
    and with one token each the mean of its values. `n` counts prompts; those that count nothing are left out, and so
    are those whose sum is not finite, which the tag `num_undefined` counts. The tag named `counted` is the sum of the
    counts. Where no prompt is left there is no record of a layer, and of the whole model one whose value is NaN.
    """
    there = counts > 0
    defined = there & sums.isfinite()
    sums, kept = sums[defined].double(), counts[defined].double()
    tags = {**(tags or {}), **({counted: int(kept.sum())} if counted else {}), **left_out("", there & ~defined)}
    if not defined.any():
        return [gap(metric, tags=tags)] if layer is None else []
    ratio = sums.sum() / kept.sum()
    (record,) = summarize(metric, ratio + (sums - ratio * kept) / kept.mean(), layer=layer, tags=tags)
    return [replace(record, value=ratio.item())]
