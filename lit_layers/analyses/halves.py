"""Intervals of what is one number for a whole set of prompts: from random halves of the set.

The spread of the halves estimates that of the whole (delete-half jackknife). Resampling with replacement would repeat
rows and lower an entropy.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lit_layers.analyses.summary import gap, left_out
from lit_layers.errors import InputError
from lit_layers.records import Record


def halves(n: int, num_halves: int) -> list[Tensor]:
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
        told = dict(tags) | {name: count for name, count in counts.items() if count}
        yield from _records(metric, values[members].mean(), n, spread, layer, told)


def _records(
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
