"""Making records from values per prompt, with one rule for undefined values.

An undefined value of a prompt, layer or pair is NaN and enters no mean. A mean over prompts, tokens or rows is taken
over the defined values, and a tag that begins with `num_undefined` counts the others. A mean over layers, blocks or
pairs would change its meaning if one were missing. A prompt therefore has this mean only if all of them are defined. If
no prompt has a value at a layer, the layer has no record. If no prompt has a value for the whole model, its record has
the value NaN, `n` 0 and the counts. An analysis fails only if nothing at all is defined.

Intervals of means come from a bootstrap over prompts. A number that is computed from a whole set of prompts gets its
interval from the spread over random halves of the set (delete-half jackknife). Resampling with replacement would repeat
rows, which lowers an entropy.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lit_layers.functional.curves import Statistic, bootstrap_interval
from lit_layers.identity import variant_of
from lit_layers.metrics import look_up
from lit_layers.records import Record

Tags = Mapping[str, str | int | float]
TagDict = dict[str, str | int | float]
Interval = tuple[float | None, float | None]
NO_INTERVAL: Interval = (None, None)
ROWS_AT_ONCE = 500  # samples resampled together: 500 x 2,000 resamples x 8 B = 8 MB, plus their sort order


class Sample(NamedTuple):
    """Values (prompts,) of one quantity to summarize, NaN where undefined.

    If the values belong to only some prompts of the data, the mask `rows` (all prompts,) is True for these.
    """

    metric: str
    values: Tensor
    layer: int | None = None
    other_layer: int | None = None
    tags: Tags | None = None
    statistic: Statistic = "mean"
    rows: Tensor | None = None


def summarize(metric: str, values: Tensor, *, intervals: bool = True, **fields: Any) -> list[Record]:
    """Return a list with one record: the mean over prompts or, with `statistic="median"`, the median.

    `values` (prompts,) is NaN where a prompt's value is undefined. `n` counts the defined values, and the tag
    `num_undefined` counts the others, if any. If no value is defined, the result depends on the field `layer`. If it is
    given, the list is empty. Without it, the values describe the whole model, and the record's value is NaN.

    `stderr` is the sample standard deviation over sqrt(n); `low` and `high` are a percentile bootstrap over prompts. A
    single prompt and an infinite mean have neither `stderr` nor an interval. A median has the tag `statistic="median"`
    and no `stderr`.

    Args:
        intervals: whether to compute `low` and `high`.
        fields: the other fields of `Sample`.
    """
    sample = Sample(metric, torch.as_tensor(values).detach().cpu().double(), **fields)
    defined, interval = sample.values[~sample.values.isnan()], NO_INTERVAL
    if intervals and len(defined) > 1 and defined.isfinite().all():
        low, high = bootstrap_interval(defined[:, None], statistic=sample.statistic)
        interval = low.item(), high.item()
    return _summarized(sample, interval)


def summarize_all(samples: Iterable[Sample | Record]) -> Iterator[Record]:
    """Summarize many samples in their order; records pass unchanged.

    This is ten times faster than one call of `summarize` per sample.
    """
    items = [
        each if isinstance(each, Record) else each._replace(values=torch.as_tensor(each.values).detach().cpu().double())
        for each in samples
    ]
    pending = [each for each in items if isinstance(each, Sample)]
    # Samples that are defined for the same prompts are resampled by one matrix product.
    bounds = [NO_INTERVAL] * len(pending)
    by_prompts: dict[tuple[Statistic, tuple[bool, ...]], list[int]] = {}
    for i, sample in enumerate(pending):
        defined = tuple((~sample.values.isnan()).tolist())
        if sum(defined) > 1 and not sample.values.isinf().any():
            by_prompts.setdefault((sample.statistic, defined), []).append(i)
    for (statistic, defined), alike in by_prompts.items():
        for start in range(0, len(alike), ROWS_AT_ONCE):
            indices = alike[start : start + ROWS_AT_ONCE]
            values = torch.stack([pending[i].values for i in indices])[:, list(defined)]
            ends = bootstrap_interval(values.T, statistic=statistic)
            for i, low, high in zip(indices, *(end.tolist() for end in ends), strict=True):
                bounds[i] = low, high
    following = iter(bounds)
    for each in items:
        yield from [each] if isinstance(each, Record) else _summarized(each, next(following))


def _summarized(sample: Sample, interval: Interval) -> list[Record]:
    values, layer, rows = sample.values, sample.layer, sample.rows
    undefined = values.isnan()
    defined = values[~undefined]
    tags = {**(sample.tags or {}), **missing_tag("", undefined)}
    tags |= {"statistic": "median"} if sample.statistic == "median" else {}
    if not (n := len(defined)):
        return [nan_record(sample.metric, tags=tags)] if layer is None else []
    value = (defined.mean() if sample.statistic == "mean" else median_of_defined(defined)).item()
    low, high = interval
    is_spread = sample.statistic == "mean" and n > 1 and bool(defined.isfinite().all())
    stderr = defined.std().item() / math.sqrt(n) if is_spread else None
    fields: dict[str, Any] = {"layer": layer, "other_layer": sample.other_layer}
    if sample.statistic == "mean":
        by_prompt = values if rows is None else values.new_full(rows.shape, math.nan).masked_scatter(rows.cpu(), values)
        fields["by_prompt"] = by_prompt.float().numpy()
    return [Record(metric=sample.metric, value=value, n=n, tags=tags, stderr=stderr, low=low, high=high, **fields)]


def summarize_layers(
    metric: str, values: Tensor, *, tags: Tags | None = None, counts: Mapping[str, Tensor] | None = None
) -> Iterator[Record]:
    """Yield the mean over prompts at each layer, and the mean over layers 1..L.

    `values` is (layers + 1, prompts). The mean over layers is taken within each prompt, then over the prompts that have
    a value at every layer. Its tag `num_undefined_layers` counts the layers at which no prompt has a value. `counts`
    (layers + 1, prompts) are summed over prompts and become tags.
    """
    values = values.detach().cpu().double()
    inner = values[1:]
    rows = torch.cat([values, inner.mean(0, keepdim=True)])
    samples = []
    for layer, row in zip([*range(len(values)), None], rows, strict=True):
        members = slice(1, None) if layer is None else layer
        totals = {name: int(count[members].sum()) for name, count in (counts or {}).items()}
        row_tags = {**(tags or {}), **{name: total for name, total in totals.items() if total}}
        row_tags |= missing_tag("layers", inner.isnan().all(-1)) if layer is None else {}
        samples.append(Sample(metric, row, layer, tags=row_tags))
    yield from summarize_all(samples)


def nan_record(metric: str, *, tags: Tags | None = None) -> Record:
    """Return a NaN record for an undefined value of the whole model."""
    return Record(metric=metric, value=math.nan, n=0, tags=dict(tags or {}))


def require_values(name: str, records: Iterable[Record]) -> list[Record]:
    """Return the records as a list if at least one has a value other than NaN.

    Raises:
        ValueError: if every value is NaN.
    """
    records = list(records)
    if all(math.isnan(record.value) for record in records):
        raise all_undefined(name)
    return records


def all_undefined(name: str) -> ValueError:
    """Return the error to raise if an analysis has not a single defined value."""
    return ValueError(
        f"{name} is undefined for every prompt at every layer: the states, or what is derived of them, are zero, "
        "constant, not finite or of too few tokens"
    )


def missing_tag(what: str, undefined: Tensor | int) -> dict[str, int]:
    """Return the tag `num_undefined_<what>` with the number of True in `undefined`; no tag for 0."""
    number = int(undefined.sum()) if isinstance(undefined, Tensor) else undefined
    return {f"num_undefined_{what}" if what else "num_undefined": number} if number else {}


def comparable(defined: Tensor) -> tuple[Tensor, Tensor]:
    """Return which layers and which prompts to compare, so that every layer is measured on the same prompts.

    `defined` (layers, prompts) is True where a prompt has a value at a layer. The first mask (layers,) selects the
    layers at which at least half of the prompts have a value. The second (prompts,) selects the prompts that have a
    value at all of these layers.
    """
    layers = 2 * defined.sum(-1) >= defined.shape[-1]
    return layers, defined[layers].all(0) & layers.any()


def mean_of_defined(values: Tensor, dim: int = -1) -> Tensor:
    """Return the mean of the values that are not NaN; NaN if all are NaN."""
    defined = ~values.isnan()
    return values.masked_fill(~defined, 0).sum(dim) / defined.sum(dim)


def median_of_defined(values: Tensor, dim: int = -1) -> Tensor:
    """Return the median of the values that are not NaN; NaN if all are NaN.

    If their number is even, the median is halfway between the middle two.
    """
    count = (~values.isnan()).sum(dim, keepdim=True)
    ordered = values.sort(dim).values  # NaN sorts last
    lower = ordered.gather(dim, (count - 1).clamp(min=0) // 2)
    upper = ordered.gather(dim, (count // 2).clamp(max=values.shape[dim] - 1))
    return torch.where(count > 0, (lower + upper) / 2, torch.nan).squeeze(dim)


def summarize_ratio(
    metric: str,
    sums: Tensor,
    counts: Tensor,
    *,
    layer: int | None = None,
    tags: Tags | None = None,
    counted: str | None = None,
    empty_is_undefined: bool = True,
) -> list[Record]:
    """Return the sum of `sums` over the sum of `counts`, (prompts,) each, as a record.

    Every token has equal weight, whichever prompt it belongs to.

    Tokens of one prompt are not independent, so `stderr` and the bootstrap interval are over prompts. Both are computed
    from one value per prompt, the linearised ratio R + (sum - R count) / mean count, where R is the returned ratio. If
    all counts are equal, this value is the prompt's own mean sum / count.

    `n` counts prompts. A prompt whose count is 0, or whose sum is not finite, is left out and counted in
    `num_undefined`. With `empty_is_undefined=False`, prompts whose count is 0 are left out too, but `num_undefined`
    does not include them. The tag named `counted` holds the sum of the counts. If no prompt is left, the list is empty
    for a `layer`, and has one record with the value NaN for the whole model (`layer=None`).
    """
    nonempty = counts > 0
    defined = nonempty & sums.isfinite()
    undefined = ~defined if empty_is_undefined else nonempty & ~defined
    sums, used = sums[defined].double(), counts[defined].double()
    tags = {**(tags or {}), **({counted: int(used.sum())} if counted else {}), **missing_tag("", undefined)}
    if not defined.any():
        return [nan_record(metric, tags=tags)] if layer is None else []
    ratio = sums.sum() / used.sum()
    values = ratio + (sums - ratio * used) / used.mean()
    interval = NO_INTERVAL
    if len(values) > 1 and values.isfinite().all():
        low, high = bootstrap_interval(values[:, None])
        interval = low.item(), high.item()
    (record,) = _summarized(Sample(metric, values.cpu(), layer=layer, tags=tags, rows=defined), interval)
    return [replace(record, value=ratio.item())]


def rounding_records(
    differences: Tensor, quantity: str, *, layer: int | None = None, tags: Tags | None = None
) -> Iterator[Record]:
    """Yield the mean and the largest absolute difference between values in bfloat16 and in float32.

    `differences` has one entry per prompt, text or row. Entries that are not finite are left out and counted. If no
    entry is finite, both records have the value NaN, so that the failed comparison is visible.
    """
    finite = differences.isfinite()
    sizes = differences[finite].abs().double()
    tags = {**variant_of(tags or {}), "dtype": "bfloat16", "of": quantity, **missing_tag("", ~finite)}
    if len(differences):
        ends = (sizes.mean(), sizes.max()) if len(sizes) else (torch.tensor(math.nan),) * 2
        for metric, value in zip(("bf16_difference", "bf16_largest_difference"), ends, strict=True):
            yield Record(metric=metric, value=value.item(), layer=layer, n=len(sizes), tags=tags)


def exponential(record: Record) -> Record:
    """Return exp of a mean and of its interval, as a record without values per prompt.

    The standard error is propagated to first order.
    """
    value = _exp(record.value)
    low, high = (None if end is None else _exp(end) for end in (record.low, record.high))
    stderr = None if record.stderr is None else value * record.stderr
    return replace(record, value=value, stderr=stderr, low=low, high=high, by_prompt=None)


def _exp(value: float) -> float:
    return torch.tensor(value, dtype=torch.float64).exp().item()  # inf where math.exp would raise


def random_halves(n: int, num_halves: int) -> list[Tensor]:
    """Return the prompt indices of `num_halves` random halves of `n` prompts; no half for fewer than four prompts."""
    if n < 4:
        return []
    return [torch.randperm(n, generator=torch.Generator().manual_seed(seed))[: n // 2] for seed in range(num_halves)]


def half_values(values_of: Callable[[Tensor], Tensor], pooled: Tensor, num_halves: int) -> Tensor | None:
    """Return the values (layers + 1, halves) of random halves of the prompts; None for too few prompts.

    `pooled` is (layers + 1, prompts, dim).
    """
    values = [values_of(pooled[:, rows]) for rows in random_halves(pooled.shape[1], num_halves)]
    return torch.stack(values, -1) if values else None


def layer_records(
    metric: str,
    values: Tensor,
    halves: Tensor | None,
    n: int,
    tags: Mapping[str, Any],
    counted: Mapping[str, Sequence[bool]] | None = None,
) -> Iterator[Record]:
    """Yield a record per layer, and one of the mean over layers 1..L.

    `values` is (layers + 1,) and `halves`, the values of random halves of the prompts, (layers + 1, halves). A layer
    whose value is NaN has no record. If a layer of 1..L is NaN, so is the mean, and the tag `num_undefined_layers` of
    the mean's record counts these layers. `counted` maps the name of a tag to one flag per layer. In each record, the
    tag counts the flagged layers that the record is computed from.
    """
    undefined = values.isnan()
    rows: list[Any] = [(layer, [layer]) for layer in (~undefined).nonzero()[:, 0].tolist()]
    if undefined[1:].any():
        yield nan_record(metric, tags={**tags, **missing_tag("layers", undefined[1:])})
    elif len(values) > 1:
        rows.append((None, [*range(1, len(values))]))
    for layer, members in rows:
        counts = {name: sum(flags[member] for member in members) for name, flags in (counted or {}).items()}
        spread = None if halves is None else halves[members].mean(0)
        if spread is not None:
            # Drop halves of the prompts without a value. They occur even if the set of all prompts has a value.
            spread = spread[~spread.isnan()]
        layer_tags = dict(tags) | {name: count for name, count in counts.items() if count}
        yield from half_records(metric, values[members].mean().item(), spread, n, n // 2, layer, layer_tags)


def half_records(
    metric: str,
    value: float,
    halves: Tensor | None,
    n: int,
    half_n: int | None = None,
    layer: int | None = None,
    tags: Tags | None = None,
) -> Iterator[Record]:
    """Yield the value over all prompts, and the mean of the values over random halves of the prompts, with intervals.

    `halves` (halves,) holds one value per half. Both intervals come from the spread of these values. If there are fewer
    than two, only the value over all prompts is yielded, without an interval.
    """
    fields: Any = {"layer": layer, "tags": dict(tags or {})}
    if halves is None or len(halves) < 2:
        yield Record(metric=metric, value=value, n=n, **fields)
        return
    mean, stderr = halves.mean().item(), halves.std().item()
    low, high = (bound - mean for bound in halves.quantile(halves.new_tensor([0.025, 0.975])).tolist())
    for name, center, count in ((metric, value, n), (f"{metric}_of_half", mean, half_n)):
        ends = dict(zip(("low", "high"), clip_interval(metric, center, center + low, center + high), strict=True))
        yield Record(metric=name, value=center, stderr=stderr, n=count, **ends, **fields)


def clip_interval(metric: str, value: float, low: float, high: float) -> tuple[float, float]:
    """Clip an interval to the metric's range, which is first widened until it includes `value`."""
    row = look_up(metric)
    return max(low, min(row.low, value)), min(high, max(row.high, value))
