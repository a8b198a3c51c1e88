"""From one value per prompt to records."""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

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
    `high` a percentile bootstrap over prompts. One prompt has neither, nor has a mean that is infinite.

    Raises:
        ValueError: no value is defined.
    """
    defined, tags = _defined(metric, values, layer, tags)
    records = [_record(metric, defined, "mean", layer, other_layer, tags)]
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
    defined, tags = _defined(metric, values, layer, tags)
    return [_record(metric, defined, "median", layer, other_layer, {**tags, "statistic": "median"})]


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


def _defined(metric: str, values: Tensor, layer: int | None, tags: Tags | None) -> tuple[Tensor, dict]:
    values = torch.as_tensor(values).detach().cpu().double()
    if values.ndim != 1:
        raise ValueError(f"expected one value per prompt of {metric}, got shape {tuple(values.shape)}")
    defined = values[~values.isnan()]
    if not len(defined):
        where = "" if layer is None else f" at layer {layer}"
        raise ValueError(f"{metric}{where} is undefined for every one of {len(values)} prompts")
    num_undefined = len(values) - len(defined)
    return defined, {**(tags or {}), **({"num_undefined": num_undefined} if num_undefined else {})}


def _record(
    metric: str, values: Tensor, statistic: Statistic, layer: int | None, other_layer: int | None, tags: dict
) -> Record:
    n = len(values)
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
