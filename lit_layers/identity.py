"""Records, measurements, and the rules that decide which of them form one curve.

The identity of a measurement is (run, step, analysis, config hash, data hash). If several measurements have the same
identity, only the last one is used. Measurements of two training runs with the same run name are refused.
If a training run is resumed at an earlier step, it abandons the measurements of later steps that it made before. No
curve includes abandoned measurements.

The two hashes are the *settings* of a measurement: the options of the analysis and its data. A curve has numbers of the
same settings only. By default these are

- for a run over steps: the settings measured at the most steps, and among equals those measured first. Later
  experiments on some checkpoints then do not replace the curves of the training;
- for a model without steps: the settings measured last.

A reader can choose other settings by name, `CONFIG.DATA`, or by the beginning of each hash. `last` chooses for every
analysis the settings measured last, for example after its options were changed and all steps were measured again.
"""

# pyright: strict, reportUnknownVariableType=false

import contextlib
import functools
import hashlib
import importlib.metadata
import json
import logging
import math
import platform
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import GetPydanticSchema, with_config
from typing_extensions import TypedDict

from lit_layers import schema
from lit_layers.errors import InputError
from lit_layers.schema import Count, Real, Seconds, Tag

logger = logging.getLogger(__name__)
ALL, LAST, UNKNOWN = "all", "last", "unknown"  # all settings; the settings measured last; settings without a hash

Settings = str | Collection[str]
PACKAGES = ["lit_layers", "lightning", "transformers", "timm", "tokenizers", "safetensors", "numpy", "scipy", "mteb"]
# Tags that index a table: a matrix, a map over tokens or categories, a path, a list of training set sizes or of random
# orders of the blocks. A number with one of them is a cell of that table and is not drawn in a curve.
AXES = ("row", "column", "token", "other_token", "token_distance", "axis", "category", "head", "train_rows", "seed")
# Tags whose values are positions within a figure of the metric: the distance between two layers, or the index of a
# singular value. Numbers with such a tag, or with the tag `reference`, are not drawn in curves over layers and models.
ORDINALS = ("distance", "index")
NO_CURVE = {*AXES, *ORDINALS, "reference"}
ByPrompt = NDArray[np.float32]
_Unwritten = Annotated[ByPrompt | None, GetPydanticSchema(lambda _, of: of(type(None)))]


@dataclass(frozen=True, kw_only=True)
class Record:
    """One measured number.

    Args:
        metric: name of the metric.
        value: the number; NaN if it is undefined.
        layer, other_layer: the layer, or both layers of a pair, that the number belongs to; None: the whole model.
        stderr, n: standard error and sample size over prompts or test rows.
        low, high: ends of the 95% interval.
        tags: values that identify the number among those of its metric (`k`, `reference`, ...). Tags named `num_...`
            are counts, for example of left-out prompts, and do not identify it.
        by_prompt: (prompts,), one value per prompt, in the order of the data; NaN if a prompt has none. Their mean is
            `value`.
        states: (prompts, dim), the vectors that the number is computed from. `records.write_values` writes `by_prompt`
            and `states` to a file of their own.
    """

    __pydantic_config__ = schema.STRICT

    metric: str
    value: Real
    layer: Count | None = None
    other_layer: Count | None = None
    stderr: Real | None = None
    low: Real | None = None
    high: Real | None = None
    n: Count | None = None
    tags: dict[str, Tag] = field(default_factory=dict)
    by_prompt: _Unwritten = field(default=None, compare=False, repr=False)
    states: _Unwritten = field(default=None, compare=False, repr=False)


@with_config(schema.OPEN)
class _Provenance(TypedDict, total=False):
    """The fields of provenance that the package reads; other fields are only shown."""

    config_hash: str | None
    data_hash: str | None
    weights_hash: str | None
    audit: str | None
    versions: dict[str, str]


class Lineage(NamedTuple):
    """The training of a run: the training's id, and the steps at which it was resumed, in order of time."""

    run: str
    training: str
    resumed: Sequence[int] = ()


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """The result of one analysis on one checkpoint: one line of `measurements.jsonl`.

    `training` is the id of the run's training, or the name of the run if there was no training. `resumed` lists the
    steps at which this training had been resumed when the measurement was made.
    """

    __pydantic_config__ = schema.STRICT

    run: str
    training: str = ""
    resumed: list[Count] = field(default_factory=list)
    step: Count | None
    tokens: Count | None
    analysis: str
    records: list[Record]
    seconds: Seconds
    error: str | None = None
    provenance: Annotated[dict[str, Any], GetPydanticSchema(lambda _, of: of(_Provenance))] = field(
        default_factory=dict
    )

    def __post_init__(self) -> None:
        object.__setattr__(self, "training", self.training or self.run)


def variant_of(tags: Mapping[str, Tag], without: Collection[str] = ()) -> dict[str, Tag]:
    """Return the tags that identify a record among those of its metric: all but counts (`num_...`) and `without`."""
    return {name: value for name, value in tags.items() if not name.startswith("num_") and name not in without}


def same_tag(value: Any, asked: Any) -> bool:
    """Return whether a tag equals the requested value. Numbers are compared by value: "4" equals 4.0."""
    try:
        return math.isclose(float(value), float(asked), rel_tol=1e-9)
    except (TypeError, ValueError):
        return str(value) == str(asked)


def hash_of(config: Any) -> str:
    """Return a hash of JSON data, as sixteen hex digits."""
    return sha16(json.dumps(config, sort_keys=True))


def sha16(*parts: str | bytes | memoryview) -> str:
    """Return the first sixteen hex digits of the sha256 of the joined parts."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part.encode() if isinstance(part, str) else part)
    return digest.hexdigest()[:16]


def settings_name(config_hash: str | None, data_hash: str | None) -> str:
    """Return the name of settings (options and data of an analysis): `CONFIG.DATA`, or `CONFIG` without data."""
    return ".".join([str(config_hash or UNKNOWN), *([str(data_hash)] if data_hash else [])])


def settings_of(measurement: Measurement) -> str:
    """Return the name of a measurement's settings: the options of its analysis and the data."""
    return settings_name(measurement.provenance.get("config_hash"), measurement.provenance.get("data_hash"))


def short(settings: str) -> str:
    """Shorten each hash in a name of settings, which has the form `CONFIG.DATA`, to eight digits."""
    return ".".join(part[:8] for part in settings.split("."))


def drop_abandoned(measurements: Iterable[Measurement], known: Lineage | None = None) -> list[Measurement]:
    """Return the measurements without those that a training run abandoned when it was resumed.

    A training run that is resumed at a step abandons the measurements of later steps that it made before. A measurement
    records the steps at which its training run had been resumed until then. `known`, if given, has the complete list of
    these steps.

    Raises:
        InputError: measurements of two training runs have the same run name.
    """
    measurements = [*measurements]
    trainings: dict[str, str] = {}  # id of the training, by name of the run
    ways = {known.training: known.resumed} if known else {}  # training id -> all steps at which it was resumed
    for m in measurements:
        if m.step is not None and (training := trainings.setdefault(m.run, m.training)) != m.training:
            raise InputError(
                f"{m.run} has measurements of two trainings, {training} and {m.training}: measure each in a "
                "root of its own"
            )
        ways[m.training] = max(ways.get(m.training, ()), m.resumed, key=len)
    return [
        m for m in measurements if m.step is None or m.step <= min(ways[m.training][len(m.resumed) :], default=m.step)
    ]


def latest(measurements: Iterable[Measurement]) -> list[Measurement]:
    """Return the last measurement of each identity (run, step, analysis, settings), in the order of the file.

    Failed measurements are included. Measurements that a resumed training abandoned are not (see `drop_abandoned`).

    Raises:
        InputError: measurements of two training runs have the same run name.
    """
    last: dict[tuple[Any, ...], Measurement] = {}
    for measurement in drop_abandoned(measurements):
        keep(last, measurement)
    return list(last.values())


def keep(last: dict[tuple[Any, ...], Measurement], measurement: Measurement) -> str | None:
    """Store a measurement in `last`, in place of an earlier one with the same identity, and return its settings.

    The identity is (run, step, analysis, settings). A measurement that failed before its settings were known
    has settings None. Any later measurement of the same run, step and analysis replaces it.
    """
    entry = (measurement.run, measurement.step, measurement.analysis)
    failed_early = measurement.error is not None and measurement.provenance.get("config_hash") is None
    settings = None if failed_early else settings_of(measurement)
    last.pop((*entry, None), None)
    last.pop((*entry, settings), None)
    last[*entry, settings] = measurement
    return settings


def shown(measurements: Iterable[Measurement], settings: Settings = ()) -> list[Measurement]:
    """Return the measurements to plot: the last one of each run, analysis and step, for the chosen settings.

    A failed measurement is returned as well. Settings are the options and data of an analysis. By default, the rule in
    the docstring of this module chooses the settings of each analysis. `settings` names one or several to plot instead,
    for the analyses that were measured with them. `all` returns the measurements of all settings.

    Raises:
        InputError: no analysis has these settings, one analysis has several of them, or two training
            runs have the same name.
    """
    return split_shown(measurements, settings)[0]


def split_shown(
    measurements: Iterable[Measurement], settings: Settings = ()
) -> tuple[list[Measurement], list[Measurement]]:
    """Return two lists of measurements: those to plot (see `shown`), and those with other settings.

    Both lists have only the last measurement of each run, step, analysis and settings.
    """
    measurements, asked = drop_abandoned(measurements), [settings] if isinstance(settings, str) else [*settings]
    if ALL in asked:
        return latest(measurements), []
    # the steps that were measured, by (run, analysis) and then by settings, in order of time
    curves: dict[tuple[str, str], dict[str, set[int]]] = {}
    written_last: dict[tuple[str, str], str] = {}
    last: dict[tuple[Any, ...], Measurement] = {}
    for m in measurements:
        if (name := keep(last, m)) is not None:
            written_last[m.run, m.analysis] = name
            curves.setdefault((m.run, m.analysis), {}).setdefault(name, set())
    for (*_, name), m in last.items():
        if m.error is None and m.step is not None:
            curves[m.run, m.analysis][name].add(m.step)
    _refuse_unknown(asked, curves.values())
    chosen = {curve: _chosen(steps, asked, written_last[curve]) for curve, steps in curves.items()}
    parts: tuple[list[Measurement], list[Measurement]] = ([], [])
    for (*_, name), m in last.items():
        parts[name is not None and name != chosen[m.run, m.analysis]].append(m)
    return parts


@functools.cache
def versions() -> dict[str, str]:
    """Return the versions of Python and of each package that can change measured numbers or a training run.

    Packages that only provide files or texts are left out, because hashes of these files and texts are recorded.
    """
    import torch

    installed = {"python": platform.python_version(), "torch": torch.__version__}
    for package in PACKAGES:
        # An optional package may be missing, and lit_layers itself is not installed if it is used from a checkout.
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            installed[package] = importlib.metadata.version(package)
    return installed


def warn_of_other_versions(measured: Iterable[Measurement], run: str) -> None:
    """Warn once if a step of the run was measured with other versions of the packages."""
    for m in measured:
        theirs = m.provenance.get("versions", {})
        if m.run == run and m.step is not None and theirs and theirs != versions():
            old, new = _differing(theirs, versions())
            logger.warning("%s was measured with %s and goes on with %s: they may compute other numbers", run, old, new)
            return


def _differing(one: Mapping[str, Any], other: Mapping[str, Any]) -> tuple[str, str]:
    names = [name for name in {**one, **other} if one.get(name) != other.get(name)]
    first, second = (", ".join(f"{name} {each.get(name, UNKNOWN)}" for name in names) for each in (one, other))
    return first, second


def refuse_other_versions(theirs: Mapping[str, str], who: str) -> None:
    """Refuse to share work with a process that has other versions of the packages.

    Raises:
        InputError: the versions differ.
    """
    if theirs != versions():
        there, here = _differing(theirs, versions())
        raise InputError(f"{who} has {there}, and this command has {here}: install the same versions everywhere")


def plain_settings(measurements: Iterable[Measurement]) -> dict[tuple[str, str], str]:
    """Return, by run and analysis, the settings whose curves are logged under the analysis's name without a suffix.

    These are the settings that were measured first. They never change while a file grows, unlike the settings that
    `shown` chooses, so that a curve in W&B does not change its name.
    """
    plain: dict[tuple[str, str], str] = {}
    for m in measurements:
        if m.error is None:
            plain.setdefault((m.run, m.analysis), settings_of(m))
    return plain


def logged_name(measurement: Measurement, plain: dict[tuple[str, str], str]) -> str:
    """Return the name under which an analysis is logged: `coupling`, or `coupling@1a2b3c4d` for later settings.

    The first settings of an analysis get the name without a suffix and are added to `plain`.
    """
    settings = settings_of(measurement)
    if plain.setdefault((measurement.run, measurement.analysis), settings) == settings:
        return measurement.analysis
    return f"{measurement.analysis}@{short(settings)}"


def _chosen(steps: Mapping[str, set[int]], asked: Sequence[str], written_last: str) -> str:
    """Return the settings (options and data) for which the curves of an analysis are plotted.

    These are the settings that `asked` names. By default they are the settings with the most measured steps, or
    `written_last`, the settings measured last, if no measurement has a step. `steps` maps settings to measured steps.
    """
    named = dict.fromkeys(name for each in asked for name in steps if name == each or _is_named(name, each))
    named = {name: None for name in named if name in asked} or named
    if len(named) > 1:
        raise InputError(f"settings: one analysis has {', '.join(map(short, named))}: name one of them")
    if named:
        return next(iter(named))
    if LAST in asked or not any(steps.values()):
        return written_last
    return max(steps, key=lambda name: len(steps[name]))  # max returns the first of several equals


def _refuse_unknown(asked: Sequence[str], curves: Collection[Mapping[str, set[int]]]) -> None:
    for each in asked:
        if each != LAST and not any(_is_named(name, each) for steps in curves for name in steps):
            several = dict.fromkeys(short(name) for steps in curves if len(steps) > 1 for name in steps)
            there = f"say {LAST} or one of {', '.join(several)}" if several else "no analysis has more than one"
            raise InputError(f"settings: nothing was measured with {each!r}: {there}")


def _is_named(settings: str, asked: str) -> bool:
    """Return whether `asked` abbreviates `settings`, two hashes written as CONFIG.DATA.

    `asked` is the beginning of CONFIG, or the beginnings of both hashes with a dot between them.
    """
    hashes, beginnings = settings.split("."), asked.split(".")
    return len(asked) > 0 and len(beginnings) <= len(hashes) and all(map(str.startswith, hashes, beginnings))
