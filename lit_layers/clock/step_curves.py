"""Curves over training steps: of a run's measurements, of their means over seeds, and of statistics over the layers."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy import stats

from lit_layers import records
from lit_layers.errors import InputError
from lit_layers.figures.labels import tag_text
from lit_layers.figures.tables import grouped
from lit_layers.identity import NO_CURVE, UNKNOWN, ByPrompt, settings_of, short, variant_of
from lit_layers.metrics import look_up
from lit_layers.records import Measurement, Record

Array = NDArray[np.floating[Any]]
AxisName = Literal["step", "tokens"]
Tags = Mapping[str, Any]

MONOTONICITY = "monotonicity_spearman"
STATISTICS = (MONOTONICITY, "monotonicity_fraction_increasing", "monotonicity_largest_drop")
CHOICES = ("plateau_layer", "best_layer")  # only for metrics with a known better direction
LAYER_COLUMNS = ("run", "analysis", "metric", "tags", "step", "statistic", "value", "low", "high")
LAYER_COLUMNS = (*LAYER_COLUMNS, "num_layers", "num_undefined", "over")
STILL = 0.05  # share of the range over layers: `plateau_layer` ignores smaller gains from one layer to the next
_FEWEST, _DRAWS, _CONFIDENCE = 3, 1000, 0.95
_TAILS = ((1 - _CONFIDENCE) / 2, (1 + _CONFIDENCE) / 2)
NORMAL_95 = 3.92  # width of a 95% interval in standard errors


@dataclass(frozen=True, kw_only=True)
class StepCurve:
    """A curve over training: the values of one quantity at the checkpoints of a run.

    `at` holds the steps or tokens of the checkpoints in ascending order. `values` and `stderr` have one entry for each
    checkpoint. `stderr` is None if unknown. A curve over several seeds holds each seed's curve in `seeds`, (seeds,
    checkpoints), and their mean in `values`. `prompts` are the values of each prompt, (prompts, checkpoints), NaN where
    undefined. It is None if the run did not store them. Curves with equal `prompts_of` have the same prompts in the
    same order. `settings` names the options and data with which the curve was measured. `null` is a baseline, as a
    curve with one checkpoint: the value with random weights, or with permuted labels.
    """

    run: str
    analysis: str
    metric: str
    layer: int | None
    tags: Tags
    at: Array
    values: Array
    stderr: Array | None = None
    seeds: Array | None = None
    prompts: Array | None = None
    prompts_of: str = ""
    settings: str = UNKNOWN
    num_without_stderr: int = 0
    null: "StepCurve | None" = None
    null_kind: str = ""  # kind of null, if this curve is one: "blocks", "all" or "labels"

    @property
    def error_unit(self) -> str:
        """Source of the errors: "prompts" (or test rows), "seeds", or "" if errors are guessed from the curve."""
        by_prompts = self.stderr is not None or self.prompts is not None
        return "seeds" if self.seeds is not None else "prompts" if by_prompts else ""

    @property
    def key(self) -> tuple[str, str, int | None, str]:
        """Key that identifies the curve within its run; the same curve of another run has the same key."""
        return self.analysis, self.metric, self.layer, self.tag_text

    @property
    def tag_text(self) -> str:
        return text_of(dict(sorted(self.tags.items())))

    @property
    def title(self) -> str:
        """Name in figures, such as `Coupling, k = 12` or `Accuracy, layer 3`.

        The name of a task's score begins with the task.
        """
        row, tags = look_up(self.metric), dict(self.tags)
        name, kind = row.title if self.analysis or row.group else self.metric, ""
        if "of" in tags:  # the quantity comes first, as labels in a figure are cut at their end
            name, _, kind = name.partition(", ")
            name += f" {tag_text({'of': tags.pop('of')})}"
        parts = [name, tag_text(tags), kind, "" if self.layer is None else f"layer {self.layer}"]
        title = ", ".join(filter(None, parts))
        return title if row.group or not self.analysis else f"{self.analysis}: {title}"


def merge_seeds(curves: Iterable[StepCurve], name: str) -> list[StepCurve]:
    """Return the mean over seeds of each curve that all runs have, at the checkpoints that all of them have.

    Each run is one seed. Each merged curve also contains the curves of the runs, in `seeds`.

    Raises:
        InputError: if two runs have identical values, or were measured with different options or data
            (`refuse_odd_seeds`).
    """
    curves = list(curves)
    refuse_odd_seeds(curves)
    runs = len({curve.run for curve in curves})
    return [curve for curve in seed_means(curves, name) if curve.seeds is not None and len(curve.seeds) == runs]


def seed_means(curves: Iterable[StepCurve], name: str) -> list[StepCurve]:
    """Return the mean over runs of each curve that two runs or more share.

    Runs with identical values are not refused, unlike in `merge_seeds`: one metric can be identical in two runs.
    """
    groups = grouped(curves, lambda curve: curve.key)
    merged = []
    for group in groups.values():
        common, seeds = common_checkpoints(group)
        if len(group) < 2 or not len(common):
            continue
        own: dict[str, Any] = {"stderr": None, "prompts": None, "prompts_of": "", "num_without_stderr": 0}
        own["null"] = _seed_null([curve.null for curve in group], name)
        own |= {"run": name, "settings": UNKNOWN, "at": common, "values": seeds.mean(0), "seeds": seeds}
        merged.append(replace(group[0], **own))
    return merged


def _seed_null(nulls: Sequence[StepCurve | None], name: str) -> StepCurve | None:
    """Return the mean over seeds of their nulls, or None if a seed has no null or a null of another kind."""
    known = [null for null in nulls if null is not None]
    is_same = len(known) == len(nulls) and len({null.null_kind for null in known}) == 1
    return next(iter(seed_means(known, name)), None) if is_same else None


def common_checkpoints(curves: Sequence[StepCurve]) -> tuple[Array, Array]:
    """Return the checkpoints at which all curves are defined, and the values of the curves at these checkpoints.

    Shapes (checkpoints,) and (curves, checkpoints).
    """
    common = sorted(set.intersection(*(set(curve.at[np.isfinite(curve.values)].tolist()) for curve in curves)))
    return np.array(common), np.stack([curve.values[np.isin(curve.at, common)] for curve in curves])


def refuse_odd_seeds(seeds: Sequence[StepCurve]) -> None:
    """Check that the seeds are different runs, measured with the same settings.

    Raises:
        InputError: if two runs have identical values in all curves, or measured an analysis with different options
            or data. The message names the two runs.
    """
    seen: dict[frozenset[Any], str] = {}
    for run, curves in grouped(seeds, lambda curve: curve.run).items():
        numbers = frozenset((curve.key, curve.at.tobytes(), curve.values.tobytes()) for curve in curves)
        if (first := seen.setdefault(numbers, run)) != run:
            raise InputError(
                f"seeds: {first} and {run} have the same numbers at every checkpoint: expected runs of different "
                "model.init_seed or data.seed (seed_everything alone changes neither)"
            )
    for analysis, named in differing_settings((curve.run, curve) for curve in seeds).items():
        (one, (first, *_)), (other, (second, *_)), *_ = named.items()
        raise InputError(
            f"seeds: {first} and {second} measured {analysis} with other settings, {short(one)} and {short(other)}: "
            "expected the same; choose with --settings, or measure one again"
        )


def differing_settings(curves: Iterable[tuple[str, StepCurve]]) -> dict[str, dict[str, list[str]]]:
    """Return the analyses that have a curve measured with several settings (options and data).

    `curves` are pairs of a name, such as that of a run, and a curve. The result maps each of these analyses to its
    settings, and each of these settings to the names of the curves that were measured with it. Curves with unknown
    settings are ignored.
    """
    found: dict[str, dict[str, list[str]]] = {}
    known = ((name, curve) for name, curve in curves if not curve.settings.startswith(UNKNOWN))
    for (analysis, *_), pairs in grouped(known, lambda pair: pair[1].key).items():
        if len({curve.settings for _, curve in pairs}) > 1:
            named = found.setdefault(analysis, {})
            for name, curve in pairs:
                names = named.setdefault(curve.settings, [])
                names += [name] * (name not in names)
    return found


def is_selected(curve: StepCurve, metrics: Sequence[str]) -> bool:
    return not metrics or curve.metric in metrics or f"{curve.analysis}/{curve.metric}" in metrics


def text_of(tags: Tags) -> str:
    return ",".join(f"{name}={value}" for name, value in tags.items())


def add_prompts(
    curves: Sequence[StepCurve], root: Path, measurements: Sequence[Measurement], axis: AxisName = "step"
) -> list[StepCurve]:
    """Return the curves with their values per prompt and their nulls, both read from the run's folder `root`."""
    analyses, keys = {curve.analysis for curve in curves}, {curve.key for curve in curves}
    measured = [m for m in measurements if m.analysis in analyses and m.error is None and m.step is not None]
    rows: dict[Any, dict[int, ByPrompt]] = {}
    measured_on: dict[Any, str] = {}
    for m in measured:
        values = records.read_values(root, m)
        at: Any = m.step if axis == "step" else m.tokens
        about = m.provenance.get("data_hash") or f"{m.analysis} {m.provenance.get('config_hash')}"
        for record in m.records if values else ():
            key, by_prompt = _key(m.analysis, record), values.get(records.key(m.analysis, record))
            if key in keys and by_prompt is not None:
                measured_on.setdefault(key, f"{m.run} {about}")
                rows.setdefault(key, {})[at] = by_prompt
    whole = []
    for curve in curves:
        prompts = prompts_of_curve(curve.at, curve.values, rows.get(curve.key, {}))
        same = "" if prompts is None else f"{measured_on[curve.key]} {len(prompts)}"
        whole.append(replace(curve, prompts=prompts, prompts_of=same))
    return _add_nulls(whole, root)


def _add_nulls(curves: Sequence[StepCurve], root: Path) -> list[StepCurve]:
    """Return the curves with their nulls. Of several kinds, "blocks" is used first, then "all", then "labels"."""
    nulls: dict[Any, StepCurve] = {}
    for kind in ("labels", "all", "blocks"):
        for m in (m for m in records.read_nulls(root) if m.provenance["null"]["kind"] == kind):
            values = records.read_values(records.null_folder(root, kind), m)
            about = m.provenance.get("data_hash") or f"{m.analysis} {m.provenance.get('config_hash')}"
            for record in (record for record in m.records if not NO_CURVE & record.tags.keys()):
                key = _key(m.analysis, record)
                curve = curve_of_points(m.run, *key[:3], _tags(record), [(0.0, record.value, _stderr(record))])
                by_prompt = values.get(records.key(m.analysis, record))
                if by_prompt is not None:
                    same = f"{m.run} {about} {len(by_prompt)}"
                    curve = replace(curve, prompts=by_prompt[:, None], prompts_of=same)
                nulls[m.run, settings_of(m), *key] = replace(curve, null_kind=kind)
    return [replace(curve, null=nulls.get((curve.run, curve.settings, *curve.key))) for curve in curves]


def _key(analysis: str, record: Record) -> tuple[str, str, int | None, str]:
    """Return the `StepCurve.key` of the curve to which a record belongs."""
    return analysis, record.metric, record.layer, text_of(_tags(record))


def _tags(record: Record) -> Tags:
    return dict(sorted(variant_of(record.tags).items()))


def curves_in(
    run: str, measurements: Iterable[Measurement], *, axis: AxisName = "step", everything: bool = False
) -> list[StepCurve]:
    """Return the curves of a run's measurements.

    Only metrics that are shown in tables of results have a curve, unless `everything` is True.

    Raises:
        InputError: if the axis is tokens and a measurement does not report them, or a curve has two values at one step.
    """
    points: dict[tuple[Any, ...], tuple[Tags, dict[int, tuple[float, float]]]] = {}
    settings: dict[str, str] = {}  # settings of each analysis
    for m in records.latest(measurements):
        at = m.step if axis == "step" else m.tokens
        if m.error is not None or m.step is None:
            continue
        if at is None:
            raise InputError(f"axis: {run} does not say how many tokens step {m.step} has seen: expected step")
        settings.setdefault(m.analysis, settings_of(m))
        for record in m.records:
            row = look_up(record.metric)
            if record.other_layer is not None or NO_CURVE & record.tags.keys() or record.metric == records.FAILED:
                continue
            if not everything and (row.secondary or row.unlisted):
                continue
            _, curve = points.setdefault(_key(m.analysis, record), (_tags(record), {}))
            if at in curve:
                raise InputError(f"{run}: {m.analysis} has two values of {record.metric} at {axis} {at}: expected one")
            curve[at] = record.value, _stderr(record)
    curves = (
        curve_of_points(run, analysis, metric, layer, tags, [(at, *each[at]) for at in sorted(each)])
        for (analysis, metric, layer, _), (tags, each) in points.items()
    )
    return [replace(curve, settings=settings[curve.analysis]) for curve in curves]


def _stderr(record: Record) -> float:
    if record.stderr is not None:
        return record.stderr
    return np.nan if record.low is None or record.high is None else (record.high - record.low) / NORMAL_95


def curve_of_points(
    run: str, analysis: str, metric: str, layer: int | None, tags: Tags, points: Sequence[tuple[float, float, float]]
) -> StepCurve:
    """Return the curve through points (step, value, standard error); an unknown standard error is NaN.

    The curve has standard errors only if every value has one. If only some values have one, `num_without_stderr` is the
    number of values without a standard error.
    """
    at, values, stderr = np.array(points, dtype=np.float64).T
    has_error = np.isfinite(stderr[np.isfinite(values)])
    return StepCurve(
        run=run,
        analysis=analysis,
        metric=metric,
        layer=layer,
        tags=tags,
        at=at,
        values=values,
        stderr=stderr if has_error.all() else None,
        num_without_stderr=int((~has_error).sum()) if has_error.any() else 0,
    )


def prompts_of_curve(at: Array, values: Array, rows: Mapping[int, ByPrompt]) -> Array | None:
    """Return the values of single prompts at the checkpoints `at` of a curve, (prompts, checkpoints), or None.

    `values` is the curve, `rows` maps checkpoints to the stored values of the prompts. Undefined values are NaN. A
    prompt is complete if it has a value at every checkpoint where the curve has one. Return None if

    - a checkpoint where the curve has a value has no stored values of prompts;
    - the number of prompts differs between checkpoints;
    - fewer than two prompts are complete, or fewer than half of those with any value at these checkpoints.
    """
    known = np.isfinite(values)
    lengths = {len(rows[step]) if step in rows else 0 for step in at[known].tolist()}
    if len(lengths) != 1 or (count := lengths.pop()) < 2:
        return None
    nothing = np.full(count, np.nan, dtype=np.float32)
    prompts = np.stack([rows.get(step, nothing) for step in at.tolist()], axis=1)
    defined = np.isfinite(prompts[:, known])
    return prompts if defined.all(1).sum() >= max(2, defined.any(1).sum() / 2) else None


# ------------------------------------------------------------------------------------------------ over the layers


@dataclass(frozen=True, kw_only=True)
class LayerCurve:
    """A statistic of the values of `metric` at the layers 1 to L, as a curve over training.

    `curve` holds the values of the statistic, and `low` and `high` are the ends of its 95% interval (NaN if unknown).
    `num_undefined` is the number of layers at which the metric has no value. Each of these is (checkpoints,). The
    statistic is NaN at a checkpoint where fewer than 3 layers have a value.
    """

    metric: str
    tags: str
    curve: StepCurve
    low: Array
    high: Array
    num_layers: int
    num_undefined: NDArray[np.int64]

    @property
    def statistic(self) -> str:
        return self.curve.metric


def layer_curves(curves: Sequence[StepCurve], *, seed: int = 0) -> list[LayerCurve]:
    """Return the statistics over layers of each metric that is measured at 3 layers or more.

    The embedding does not count as a layer. A metric is left out if its analysis already measured such statistics. The
    results are in the order of `curves`.
    """
    measured = {(curve.run, curve.analysis, curve.metric) for curve in curves}
    layered = [curve for curve in curves if curve.layer and "of" not in curve.tags and not _is_statistic(curve.metric)]
    groups = grouped(layered, lambda curve: (curve.run, curve.analysis, curve.metric, curve.tag_text))
    statistics = []
    for (run, analysis, _, _), layers in groups.items():
        if len(layers) >= _FEWEST and (run, analysis, MONOTONICITY) not in measured:
            statistics += _layer_statistics(sorted(layers, key=lambda curve: curve.layer or 0), seed)
    return statistics


def merge_layer_seeds(curves: Sequence[LayerCurve], name: str) -> list[LayerCurve]:
    """Return the mean over seeds of each statistic that all seeds have, at the checkpoints that all of them have.

    The intervals are those of Student's t over seeds. They are clipped to the range of the statistic, which is -1 to 1
    for a rank correlation.
    """
    by_key = grouped(curves, lambda each: (each.metric, each.curve.key))
    num_seeds = len({each.curve.run for each in curves})
    merged = []
    for group in by_key.values():
        if len({each.curve.run for each in group}) < num_seeds:
            continue
        for curve in seed_means([each.curve for each in group], name):
            assert curve.seeds is not None
            n, first = len(curve.seeds), group[0]
            half = stats.t.ppf(_TAILS[1], n - 1) * curve.seeds.std(0, ddof=1) / math.sqrt(n)
            undefined = [each.num_undefined[np.isin(each.curve.at, curve.at)] for each in group]
            bounds = look_up(curve.metric).low, look_up(curve.metric).high
            low, high = ((curve.values + side * half).clip(*bounds) for side in (-1, 1))
            ends = {"low": low, "high": high, "num_undefined": np.max(undefined, 0)}
            merged.append(
                LayerCurve(metric=first.metric, tags=first.tags, curve=curve, num_layers=first.num_layers, **ends)
            )
    return merged


def layer_table(curves: Iterable[LayerCurve]) -> pd.DataFrame:
    """Return a table with a row per statistic, metric and checkpoint, and with the columns `LAYER_COLUMNS`."""
    rows = [
        (
            *(each.curve.run, each.curve.analysis, each.metric, each.tags, at, each.statistic, value, low, high),
            *(each.num_layers, undefined, each.curve.error_unit),
        )
        for each in curves
        for at, value, low, high, undefined in zip(
            *(each.curve.at, each.curve.values, each.low, each.high, each.num_undefined), strict=True
        )
    ]
    return pd.DataFrame(rows, columns=list(LAYER_COLUMNS)).astype({"step": "int64"})


def _is_statistic(metric: str) -> bool:
    return metric in (*STATISTICS, *CHOICES) or look_up(metric).whole


def _layer_statistics(layers: Sequence[StepCurve], seed: int) -> Iterator[LayerCurve]:
    first, at = layers[0], np.unique(np.concatenate([curve.at for curve in layers]))
    values, errors = np.full((2, len(at), len(layers)), np.nan)
    for i, curve in enumerate(layers):
        here = np.searchsorted(at, curve.at)
        values[here, i] = curve.values
        errors[here, i] = np.nan if curve.stderr is None else curve.stderr
    layer_numbers, better = [curve.layer or 0 for curve in layers], look_up(first.metric).better
    names = (*STATISTICS, *(CHOICES if better else ()))
    rng = np.random.default_rng(seed)
    results = np.full((3, len(names), len(at)), np.nan)  # value, low, high
    stderr = np.full((len(names), len(at)), np.nan)
    for step in range(len(at)):
        known = np.isfinite(values[step])
        if known.sum() < _FEWEST:
            continue
        has_errors = np.isfinite(errors[step, known]).all()
        noise = rng.standard_normal((_DRAWS if has_errors else 0, known.sum())) * errors[step, known]
        scores = values[step, known] + np.concatenate([np.zeros((1, known.sum())), noise])
        numbers = _statistics(scores, np.array(layer_numbers)[known], better)
        results[0, :, step] = numbers[0]
        defined = np.isfinite(numbers[1:]).any(0)  # False for the rank correlation of constant curves
        if has_errors:
            results[1:, defined, step] = np.nanquantile(numbers[1:, defined], _TAILS, axis=0)
            stderr[defined, step] = np.nanstd(numbers[1:, defined], axis=0)
    for i, name in enumerate(names):
        value, low, high = results[:, i]
        is_known = bool(np.isfinite(stderr[i][np.isfinite(value)]).all() and np.isfinite(value).any())
        curve = StepCurve(
            run=first.run,
            analysis=first.analysis,
            metric=name,
            layer=None,
            tags={**first.tags, "of": first.metric},
            at=at,
            values=value,
            stderr=stderr[i] if is_known else None,
        )
        undefined = (~np.isfinite(values)).sum(1)
        ends = {"low": low, "high": high, "num_layers": len(layers), "num_undefined": undefined}
        yield LayerCurve(metric=first.metric, tags=first.tag_text, curve=curve, **ends)


def _statistics(rows: Array, layers: NDArray[np.int64], better: str | None) -> Array:
    """Return statistics over layers, (curves, statistics), of `rows` (curves, layers): a metric's values at `layers`.

    The columns are Spearman's rho with depth, the share of rising layers and the largest drop. If `better` is "higher"
    or "lower", two layers follow: the first layer of the plateau, and the layer with the best value.
    """
    import torch

    # Imported here, because report pages import this module and should not wait for torch.
    from lit_layers.functional.curves import chosen_layers, monotonicities

    scores = torch.from_numpy(rows)
    higher = better != "lower"
    spearman, rising, drop = (monotonicities(scores, higher)[i] for i in (1, 0, 2))
    columns = [spearman.numpy(), rising.numpy(), drop.numpy()]
    if better is not None:
        least, most = scores.amin(-1, keepdim=True), scores.amax(-1, keepdim=True)
        shares = (scores - least) / (most - least).where(most > least, 1.0)
        for rule in ("plateau", "best"):
            columns.append(layers[chosen_layers(shares, rule, STILL, higher).numpy()])
    return np.stack([column.astype(np.float64) for column in columns], 1)
