"""Curves over training steps, value and standard error: of a run's measurements, and over seeds."""

import logging
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from lit_layers import records
from lit_layers.errors import InputError
from lit_layers.figures.labels import tag_text
from lit_layers.figures.tables import grouped
from lit_layers.identity import BESIDE, UNKNOWN, settings_of, short, variant_of
from lit_layers.metrics import look_up
from lit_layers.prompt_values import ByPrompt, key_of, read_values
from lit_layers.records import Measurement, Record

logger = logging.getLogger(__name__)
Array = NDArray[np.floating[Any]]
AxisName = Literal["step", "tokens"]
Tags = Mapping[str, Any]

NORMAL_95 = 3.92  # standard errors that a 95% interval is wide


@dataclass(frozen=True, kw_only=True)
class StepCurve:
    """One number over the checkpoints of a run.

    `at` are steps or tokens, increasing, (checkpoints,); `values` and `stderr` (None: not known) belong to them.
    `over` says what the errors are over: "prompts" (or test rows), "seeds", or "" where they are guessed. Of several
    seeds `seeds` has the curve of each, (seeds, checkpoints), and `values` their mean. `prompts` are the values of each
    prompt, (prompts, checkpoints), NaN where there is none; None where a run does not keep them. Curves with the same
    `prompts_of` are of the same prompts in the same order. `settings` are those it was measured with.
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

    @property
    def over(self) -> str:
        by_prompts = self.stderr is not None or self.prompts is not None
        return "seeds" if self.seeds is not None else "prompts" if by_prompts else ""

    @property
    def key(self) -> tuple[str, str, int | None, str]:
        """What it is, in whichever run."""
        return self.analysis, self.metric, self.layer, self.tag_text

    @property
    def tag_text(self) -> str:
        return text_of(dict(sorted(self.tags.items())))

    @property
    def title(self) -> str:
        """As figures call it: `Coupling, k = 12`, `Accuracy, layer 3`; of a task's score the task comes first."""
        row, tags = look_up(self.metric), dict(self.tags)
        name, kind = row.title if self.analysis or row.group else self.metric, ""
        if "of" in tags:  # what it is of comes first: rows of a figure have few characters
            name, _, kind = name.partition(", ")
            name += f" {tag_text({'of': tags.pop('of')})}"
        parts = [name, tag_text(tags), kind, "" if self.layer is None else f"layer {self.layer}"]
        title = ", ".join(filter(None, parts))
        return title if row.group or not self.analysis else f"{self.analysis}: {title}"


def over_seeds(curves: Iterable[StepCurve], name: str) -> list[StepCurve]:
    """Returns the curves that all runs have, over those of their checkpoints that all have, with each run's own.

    Raises:
        InputError: two runs are the same, or were measured with other settings, as `refuse_odd_seeds` says.
    """
    curves = list(curves)
    refuse_odd_seeds(curves)
    runs = len({curve.run for curve in curves})
    return [curve for curve in means_of_seeds(curves, name) if curve.seeds is not None and len(curve.seeds) == runs]


def means_of_seeds(curves: Iterable[StepCurve], name: str) -> list[StepCurve]:
    """As `over_seeds`, of any curves: single numbers of different runs may be the same everywhere."""
    groups = grouped(curves, lambda curve: curve.key)
    merged = []
    for group in groups.values():
        common, seeds = at_common_checkpoints(group)
        if len(group) < 2 or not len(common):
            continue
        own: dict[str, Any] = {"stderr": None, "prompts": None, "prompts_of": "", "num_without_stderr": 0}
        own |= {"run": name, "settings": UNKNOWN, "at": common, "values": seeds.mean(0), "seeds": seeds}
        merged.append(replace(group[0], **own))
    return merged


def at_common_checkpoints(curves: Sequence[StepCurve]) -> tuple[Array, Array]:
    """Returns where all curves have a value, (checkpoints,), and their values there, (curves, checkpoints)."""
    common = sorted(set.intersection(*(set(curve.at[np.isfinite(curve.values)].tolist()) for curve in curves)))
    return np.array(common), np.stack([curve.values[np.isin(curve.at, common)] for curve in curves])


def refuse_odd_seeds(seeds: Sequence[StepCurve]) -> None:
    """Refuses seeds of which no mean is one number's, and no interval one over seeds.

    Raises:
        InputError: naming the first two runs that have the same numbers everywhere, or of which an analysis had other
            options or other data.
    """
    seen: dict[frozenset[Any], str] = {}
    for run, curves in grouped(seeds, lambda curve: curve.run).items():
        numbers = frozenset((curve.key, curve.at.tobytes(), curve.values.tobytes()) for curve in curves)
        if (first := seen.setdefault(numbers, run)) != run:
            raise InputError(
                f"seeds: {first} and {run} have the same numbers at every checkpoint: expected runs of different "
                "model.init_seed or data.seed (seed_everything alone changes neither)"
            )
    for analysis, named in settings_apart((curve.run, curve) for curve in seeds).items():
        (one, (first, *_)), (other, (second, *_)), *_ = named.items()
        raise InputError(
            f"seeds: {first} and {second} measured {analysis} with other settings, {short(one)} and {short(other)}: "
            "expected the same; choose with --settings, or measure one again"
        )


def settings_apart(curves: Iterable[tuple[str, StepCurve]]) -> dict[str, dict[str, list[str]]]:
    """Returns the analyses of which some number was measured with several settings: the names given, by settings.

    Curves whose settings are unknown are of none.
    """
    apart: dict[str, dict[str, list[str]]] = {}
    known = ((name, curve) for name, curve in curves if not curve.settings.startswith(UNKNOWN))
    for (analysis, *_), pairs in grouped(known, lambda pair: pair[1].key).items():
        if len({curve.settings for _, curve in pairs}) > 1:
            named = apart.setdefault(analysis, {})
            for name, curve in pairs:
                names = named.setdefault(curve.settings, [])
                names += [name] * (name not in names)
    return apart


def is_asked(curve: StepCurve, metrics: Sequence[str]) -> bool:
    return not metrics or curve.metric in metrics or f"{curve.analysis}/{curve.metric}" in metrics


def text_of(tags: Tags) -> str:
    return ",".join(f"{name}={value}" for name, value in tags.items())


def with_prompts(
    curves: Sequence[StepCurve], root: Path, measurements: Sequence[Measurement], axis: AxisName = "step"
) -> list[StepCurve]:
    """Returns the curves of a run's measurements with the values of prompts that its folder `root` keeps."""
    analyses = {curve.analysis for curve in curves}
    measured = [m for m in measurements if m.analysis in analyses]
    rows_by_curve = rows_of_curves(root, measured, {curve.key for curve in curves}, _key, axis=axis)
    whole = []
    for curve in curves:
        measured_on, rows = rows_by_curve.get(curve.key, ("", {}))
        prompts = prompts_of_curve(curve.at, curve.values, rows)
        same = "" if prompts is None else f"{measured_on} {len(prompts)}"
        whole.append(replace(curve, prompts=prompts, prompts_of=same))
    return whole


def _key(analysis: str, record: Record) -> tuple[str, str, int | None, str]:
    """Returns the key of the curve that a record is of."""
    return analysis, record.metric, record.layer, text_of(_tags(record))


def _tags(record: Record) -> Tags:
    return dict(sorted(variant_of(record.tags).items()))


def curves_in(
    run: str, measurements: Iterable[Measurement], *, axis: AxisName = "step", everything: bool = False
) -> list[StepCurve]:
    """Returns the curves of a run's measurements, those that tables of results show or `everything`.

    Raises:
        InputError: measurements that do not say how many tokens were seen, where these are the axis.
    """
    points: dict[tuple[Any, ...], tuple[Tags, dict[int, tuple[float, float]]]] = {}
    settings: dict[str, str] = {}  # of each analysis: a run's measurements are of one
    for m in records.latest(measurements):
        at = m.step if axis == "step" else m.tokens
        if m.error is not None or m.step is None:
            continue
        if at is None:
            raise InputError(f"axis: {run} does not say how many tokens step {m.step} has seen: expected step")
        settings.setdefault(m.analysis, settings_of(m))
        for record in m.records:
            row = look_up(record.metric)
            if record.other_layer is not None or BESIDE & record.tags.keys() or record.metric == records.FAILED:
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
    """Of points (step, value, standard error); errors count where every value has one; else they are counted."""
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


def rows_of_curves(
    root: Path,
    measurements: Sequence[Measurement],
    curves: Container[Any],
    curve_of: Callable[[str, Record], Any],
    *,
    axis: AxisName = "step",
) -> dict[Any, tuple[str, dict[int, ByPrompt]]]:
    """Returns for the named curves that have some what was measured on, and the values of prompts at each checkpoint.

    `curve_of` an analysis and a record says of which curve it is. What a folder holds in place of values is told in one
    warning.
    """
    measured = [m for m in measurements if m.error is None and m.step is not None]
    rows: dict[Any, tuple[str, dict[int, ByPrompt]]] = {}
    unread = []
    for m, values in zip(measured, read_values(root, measured), strict=True):
        if isinstance(values, str):
            unread.append(values)
            continue
        at: Any = m.step if axis == "step" else m.tokens
        about = m.provenance.get("data_hash") or f"{m.analysis} {m.provenance.get('config_hash')}"
        for record in m.records if values else ():
            key = curve_of(m.analysis, record)
            if key in curves and (by_prompt := values.get(key_of(record))) is not None:
                rows.setdefault(key, (f"{m.run} {about}", {}))[1][at] = by_prompt
    if unread:
        logger.warning(
            "%s: values of prompts are left out, and their curves compared without them: %s%s",
            *(root, unread[0], f"; and {len(unread) - 1} more" if len(unread) > 1 else ""),
        )
    return rows


def prompts_of_curve(at: Array, values: Array, rows: Mapping[int, ByPrompt]) -> Array | None:
    """Returns (prompts, checkpoints) of the same prompts wherever a curve has a value, NaN where a prompt has none.

    None where a checkpoint lacks them, or fewer than two prompts, or than half of those that have a value anywhere,
    have one everywhere.
    """
    there = np.isfinite(values)
    lengths = {len(rows[step]) if step in rows else 0 for step in at[there].tolist()}
    if len(lengths) != 1 or (count := lengths.pop()) < 2:
        return None
    nothing = np.full(count, np.nan, dtype=np.float32)
    prompts = np.stack([rows.get(step, nothing) for step in at.tolist()], axis=1)
    defined = np.isfinite(prompts[:, there])
    return prompts if defined.all(1).sum() >= max(2, defined.any(1).sum() / 2) else None
