"""From sums and counts per prompt to a record: a mean over tokens or rows, uncertain over prompts."""

from dataclasses import replace

from torch import Tensor

from lit_layers.analyses.summary import Tags, summarize
from lit_layers.records import Record


def summarize_ratio(
    metric: str, sums: Tensor, counts: Tensor, *, layer: int | None = None, tags: Tags | None = None
) -> Record:
    """The sum of `sums` over the sum of `counts`, (prompts,) each: every token counts alike, whichever prompt it is in.

    Tokens of one prompt are not independent, so `stderr` and the bootstrap interval are over prompts: those of the mean
    of the linearised ratio R + (sum - R count) / mean count. With equal counts that is the mean of the prompts' means,
    and with one token each the mean of its values. `n` counts prompts; those that count nothing are left out.

    Raises:
        ValueError: no prompt counts anything.
    """
    counted = counts > 0
    if not counted.any():
        raise ValueError(f"{metric} is undefined: none of {len(counts)} prompts has anything to count")
    sums, counts = sums[counted].double(), counts[counted].double()
    ratio = sums.sum() / counts.sum()
    (record,) = summarize(metric, ratio + (sums - ratio * counts) / counts.mean(), layer=layer, tags=tags)
    return replace(record, value=ratio.item())
