"""From one value per prompt to records, and what happens to values that are undefined.

One rule for all analyses. A value that is undefined (of a prompt, a layer, a pair) is NaN and enters no mean. A mean
over prompts, tokens or rows is over those that have a value, and a tag that begins with `num_undefined` counts the
others. A mean over layers, blocks or pairs of them is another quantity without one of them: a prompt has it only if the
set is complete. What no prompt has is a gap: at a layer there is no record; of the whole model the record says so, with
NaN for its value, `n` 0 and the counts. An analysis fails only if nothing at all is defined.

Intervals are bootstrap over prompts. What is one number for a whole set of prompts has its interval from random halves
of the set, whose spread estimates that of the whole (delete-half jackknife): resampling with replacement would repeat
rows and lower an entropy.
"""

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lit_layers.errors import InputError
from lit_layers.functional.curves import Statistic, bootstrap_interval
from lit_layers.records import Record

Tags = Mapping[str, str | int | float]


def summarize(
    metric: str,
    values: Tensor,
    *,
    layer: int | None = None,
    other_layer: int | None = None,
    tags: Tags | None = None,
    median: bool = False,
) -> list[Record]:
    """The mean over prompts as a record; with `median` a second one, tagged `statistic="median"`.

    `values` (prompts,) holds NaN where a prompt's value is undefined: those are left out, `n` counts the rest and the
    tag `num_undefined` the left out, where there are any. `stderr` is the sample deviation over sqrt(n); `low` and
    `high` a percentile bootstrap over prompts. One prompt has neither, nor has a mean that is infinite. Where no value
    is defined there is no record of a layer, and of the whole model one whose value is NaN.
    """
    defined, tags = _defined(metric, values, tags)
    records = [_record(metric, defined, "mean", layer, other_layer, tags)] if len(defined) or layer is None else []
    if median:
        records += summarize_median(metric, values, layer=layer, other_layer=other_layer, tags=tags)
    return records


def summarize_median(
    metric: str,
    values: Tensor,
    *,
    layer: int | None = None,
    other_layer: int | None = None,
    tags: Tags | None = None,
) -> list[Record]:
    """The median over prompts as a record tagged `statistic="median"`, otherwise as `summarize`; without stderr."""
    defined, tags = _defined(metric, values, tags)
    if not len(defined) and layer is not None:
        return []
    return [_record(metric, defined, "median", layer, other_layer, {**tags, "statistic": "median"})]


def summarize_over_layers(metric: str, values: Tensor, *, tags: Tags | None = None) -> list[Record]:
    """The mean over layers (layers, prompts) within each prompt, then over the prompts that have all of them.

    The tag `num_undefined_layers` counts layers that no prompt has.
    """
    return summarize(metric, values.mean(0), tags={**(tags or {}), **left_out("layers", values.isnan().all(-1))})


def summarize_layers(metric: str, values: Tensor, *, tags: Tags | None = None) -> list[Record]:
    """The mean over prompts of each layer's values (layers + 1, prompts), and that over layers 1..L."""
    layers = [summarize(metric, row, layer=layer, tags=tags) for layer, row in enumerate(values)]
    return [*itertools.chain(*layers), *summarize_over_layers(metric, values[1:], tags=tags)]


def gap(metric: str, *, tags: Tags | None = None) -> Record:
    """A value of the whole model that is undefined, as a record."""
    return Record(metric=metric, value=math.nan, n=0, tags=dict(tags or {}))


def with_a_value(name: str, records: Iterable[Record]) -> list[Record]:
    """The records, all of them made now.

    Raises:
        ValueError: none has a value that is defined.
    """
    records = list(records)
    if all(math.isnan(record.value) for record in records):
        raise nothing_defined(name)
    return records


def nothing_defined(name: str) -> ValueError:
    """The failure of an analysis none of whose values is defined."""
    return ValueError(
        f"{name} is undefined for every prompt at every layer: the states, or what is derived of them, are zero, "
        "constant, not finite or of too few tokens"
    )


def left_out(what: str, undefined: Tensor | int) -> dict[str, int]:
    """The tag `num_undefined_<what>` with the number of True in `undefined`; none where that is 0."""
    number = int(undefined.sum()) if isinstance(undefined, Tensor) else undefined
    return {f"num_undefined_{what}" if what else "num_undefined": number} if number else {}


def complete(defined: Tensor) -> tuple[Tensor, Tensor]:
    """Which layers, and which prompts, of what is to be compared on the same prompts at every layer.

    Of `defined` (layers, prompts): the layers (layers,) at which at least half of the prompts have a value, and the
    prompts (prompts,) that have one at each of these. The other layers are gaps, the other prompts are left out.
    """
    layers = 2 * defined.sum(-1) >= defined.shape[-1]
    return layers, defined[layers].all(0) & layers.any()


def mean_of_defined(values: Tensor, dim: int = -1) -> Tensor:
    """Mean of the values that are not NaN; NaN where there is none."""
    defined = ~values.isnan()
    return values.masked_fill(~defined, 0).sum(dim) / defined.sum(dim)


def median_of_defined(values: Tensor, dim: int = -1) -> Tensor:
    """Median of the values that are not NaN, halfway between the middle two of an even number; NaN where none is."""
    count = (~values.isnan()).sum(dim, keepdim=True)
    ordered = values.sort(dim).values  # NaN last
    lower = ordered.gather(dim, (count - 1).clamp(min=0) // 2)
    upper = ordered.gather(dim, (count // 2).clamp(max=values.shape[dim] - 1))
    return torch.where(count > 0, (lower + upper) / 2, torch.nan).squeeze(dim)


def _defined(metric: str, values: Tensor, tags: Tags | None) -> tuple[Tensor, dict]:
    values = torch.as_tensor(values).detach().cpu().double()
    if values.ndim != 1:
        raise ValueError(f"expected one value per prompt of {metric}, got shape {tuple(values.shape)}")
    return values[~values.isnan()], {**(tags or {}), **left_out("", values.isnan())}


def _record(
    metric: str, values: Tensor, statistic: Statistic, layer: int | None, other_layer: int | None, tags: dict
) -> Record:
    n = len(values)
    if not n:
        return gap(metric, tags=tags)
    low = high = stderr = None
    if n > 1 and values.isfinite().all():
        low, high = (bound.item() for bound in bootstrap_interval(values, statistic=statistic))
        stderr = values.std().item() / math.sqrt(n) if statistic == "mean" else None
    value = values.mean() if statistic == "mean" else median_of_defined(values)
    return Record(
        metric=metric,
        value=value.item(),
        layer=layer,
        other_layer=other_layer,
        stderr=stderr,
        low=low,
        high=high,
        n=n,
        tags=tags,
    )


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


def random_halves(n: int, num_halves: int) -> list[Tensor]:
    """Row numbers of random halves; none of fewer than four prompts."""
    if n < 4:
        return []
    return [torch.randperm(n, generator=torch.Generator().manual_seed(seed))[: n // 2] for seed in range(num_halves)]


def records_of_layers(
    metric: str,
    values: Tensor,
    of_halves: Tensor | None,
    n: int,
    tags: Mapping[str, Any],
    counted: Mapping[str, Sequence[bool]] | None = None,
) -> Iterator[Record]:
    """Of (layers + 1,) values and the (layers + 1, halves) of halves: records of each layer, and of the mean over 1..L.

    A layer whose value is NaN has no record, and where one of 1..L has none the mean is NaN and counts these in the tag
    `num_undefined_layers`. `counted` says of each layer what tags count.
    """
    undefined = values.isnan()
    defined = [layer for layer, missing in enumerate(undefined.tolist()) if not missing]
    inner = range(1, len(values))
    if undefined[1:].any():
        yield gap(metric, tags={**tags, **left_out("layers", undefined[1:])})
    means = [(None, [*inner])] if inner and not undefined[1:].any() else []
    for layer, members in [*((layer, [layer]) for layer in defined), *means]:
        counts = {name: sum(flags[member] for member in members) for name, flags in (counted or {}).items()}
        spread = None if of_halves is None else of_halves[members].mean(0)
        if spread is not None:
            spread = spread[~spread.isnan()]  # a half may lack what the whole has
        layer_tags = dict(tags) | {name: count for name, count in counts.items() if count}
        yield from _with_halves(metric, values[members].mean(), n, spread, layer, layer_tags)


def _with_halves(
    metric: str, value: Tensor, n: int, of_halves: Tensor | None, layer: int | None, tags: dict[str, Any]
) -> Iterator[Record]:
    """The value of all `n` prompts and the mean over halves of them, with intervals from the spread of the halves."""
    options = {"layer": layer, "tags": tags}
    if of_halves is None or len(of_halves) < 2:
        yield Record(metric=metric, value=value.item(), n=n, **options)
        return
    mean, stderr = of_halves.mean().item(), of_halves.std().item()
    low, high = (bound - mean for bound in of_halves.quantile(of_halves.new_tensor([0.025, 0.975])).tolist())
    for name, center, count in ((metric, value.item(), n), (f"{metric}_of_half", mean, n // 2)):
        yield Record(metric=name, value=center, stderr=stderr, low=center + low, high=center + high, n=count, **options)


def check_num_halves(name: str, num_halves: int) -> None:
    """Refuses a number of halves that has no spread."""
    if num_halves < 0 or num_halves == 1:
        raise InputError(f"{name}: expected num_halves to be 0 or at least 2, got {num_halves}")
