"""One number, what one analysis found on one checkpoint, and which of that is the same number or makes one curve.

A number's identity is (training, step, analysis, config hash, data hash), and the last measurement of it counts. A run
has one training: of two that bear one name nothing is drawn. A training that went back to an earlier step has left what
it had measured behind that step, which is in no curve.

The two hashes are the *settings* of a number: the options of the analysis, and the data it looked at. One settings of
each run and analysis makes the curve, and numbers of others never enter it. Unless the reader names another it is

- over steps the settings that were measured at the most steps, of equally many those measured first: so a run keeps the
  curves that its training drew, whatever is tried on some of its checkpoints afterwards;
- of a model without steps the settings that were measured last.

A reader names another by its name, `CONFIG.DATA`, or the beginning of each hash; `last` means of every analysis those
that were measured last, such as an analysis whose options were changed and that was measured again at all steps.
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
ALL, LAST, UNKNOWN = "all", "last", "unknown"  # every settings; those measured last; those of lines without hashes

Settings = str | Collection[str]
PACKAGES = ["lit_layers", "lightning", "transformers", "timm", "tokenizers", "safetensors", "numpy", "scipy", "mteb"]
# Tags that index a table (a matrix, a map over tokens or categories, a path, a list of sizes or of random orders).
# A number with one of them is a cell of that table and makes no curve.
AXES = ("row", "column", "token", "other_token", "token_distance", "axis", "category", "head", "train_rows", "seed")
# Tags that index the lines of one figure. A number with one of them, or with `reference`, is drawn in its own figure,
# not among the curves over layers and models.
ORDINALS = ("distance", "index")
NO_CURVE = {*AXES, *ORDINALS, "reference"}
ByPrompt = NDArray[np.float32]
_Unwritten = Annotated[ByPrompt | None, GetPydanticSchema(lambda _, of: of(type(None)))]


@dataclass(frozen=True, kw_only=True)
class Record:
    """One number.

    `low` and `high` bound the 95% interval where one is defined; `stderr` and `n` count over prompts or test rows.
    Tags say which number it is (`k`, `reference`, ...), except those named `num_...`: they count what went into it.
    `by_prompt` (prompts,) are the values of which `value` is the mean, in the order of the data and NaN where a prompt
    has none. `states` (prompts, dim) are the vectors that the number is computed from. `records.write_values` writes
    both to a file of their own.
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
    """What is looked up in provenance; whatever else is there is shown."""

    config_hash: str | None
    data_hash: str | None
    weights_hash: str | None
    audit: str | None
    versions: dict[str, str]


class Lineage(NamedTuple):
    """The training of a run: its id, and the steps that it went back to, in the order in which that happened."""

    run: str
    training: str
    resumed: Sequence[int] = ()


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """What one analysis found on one checkpoint: one line of `measurements.jsonl`.

    `training` and `resumed` are those of `Lineage` when it was measured. A model that is measured outside a training
    has the name of its run as its training.
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
    """Return the tags that tell which number a record is: counts of what went into it do not."""
    return {name: value for name, value in tags.items() if not name.startswith("num_") and name not in without}


def same_tag(value: Any, asked: Any) -> bool:
    """Return whether a tag is the one asked for; numbers compare as numbers, however they are written."""
    try:
        return math.isclose(float(value), float(asked), rel_tol=1e-9)
    except (TypeError, ValueError):
        return str(value) == str(asked)


def hash_of(config: Any) -> str:
    """Return sixteen hex digits of plain JSON data."""
    return sha16(json.dumps(config, sort_keys=True))


def sha16(*parts: str | bytes | memoryview) -> str:
    """Return sixteen hex digits over parts that stand one after the other."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part.encode() if isinstance(part, str) else part)
    return digest.hexdigest()[:16]


def settings_name(config_hash: str | None, data_hash: str | None) -> str:
    """Return what settings are called: `CONFIG.DATA`; an analysis without data has no second part."""
    return ".".join([str(config_hash or UNKNOWN), *([str(data_hash)] if data_hash else [])])


def settings_of(measurement: Measurement) -> str:
    """Return the name of a measurement's settings."""
    return settings_name(measurement.provenance.get("config_hash"), measurement.provenance.get("data_hash"))


def short(settings: str) -> str:
    """Return eight digits of each hash, which are enough to name settings by."""
    return ".".join(part[:8] for part in settings.split("."))


def drop_abandoned(measurements: Iterable[Measurement], known: Lineage | None = None) -> list[Measurement]:
    """Return the measurements without those of the branches that their training has left.

    A training that is resumed at a step leaves the later steps that were measured before. `known` says where, beside
    what the measurements say.

    Raises:
        InputError: for one run of two trainings.
    """
    measurements = [*measurements]
    trainings: dict[str, str] = {}  # by run
    ways = {known.training: known.resumed} if known else {}  # by training, all steps at which it was resumed
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
    """Return the last measurement of each identity, failed ones too, in the order written.

    Raises:
        InputError: for one run of two trainings.
    """
    last: dict[tuple[Any, ...], Measurement] = {}
    for measurement in drop_abandoned(measurements):
        keep(last, measurement)
    return list(last.values())


def keep(last: dict[tuple[Any, ...], Measurement], measurement: Measurement) -> str | None:
    """Enters a measurement as the last of its identity: run, step, analysis and settings, which it returns.

    A run has one training.

    One that failed before its settings were known, None, stands until anything else is measured in its place.
    """
    entry = (measurement.run, measurement.step, measurement.analysis)
    failed_early = measurement.error is not None and measurement.provenance.get("config_hash") is None
    settings = None if failed_early else settings_of(measurement)
    last.pop((*entry, None), None)
    last.pop((*entry, settings), None)
    last[*entry, settings] = measurement
    return settings


def shown(measurements: Iterable[Measurement], settings: Settings = ()) -> list[Measurement]:
    """Return the latest measurements of the settings that make the curves, failed ones too.

    `settings` names others than the default, one or several, for the analyses that have them; `all`: all of them.

    Raises:
        InputError: for settings that no analysis has, or of which one has several; for one run of two trainings.
    """
    return split_shown(measurements, settings)[0]


def split_shown(
    measurements: Iterable[Measurement], settings: Settings = ()
) -> tuple[list[Measurement], list[Measurement]]:
    """Return what `shown` does, and the latest measurements of all other settings."""
    measurements, asked = drop_abandoned(measurements), [settings] if isinstance(settings, str) else [*settings]
    if ALL in asked:
        return latest(measurements), []
    curves: dict[tuple[str, str], dict[str, set[int]]] = {}  # by run and analysis: settings as first written, steps
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
    """Versions of Python and of the packages that numbers or training depend on.

    Packages that only bring files or texts are left out: what they brought is known by its hash.
    """
    import torch

    installed = {"python": platform.python_version(), "torch": torch.__version__}
    for package in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):  # a checkout that is not installed
            installed[package] = importlib.metadata.version(package)
    return installed


def warn_of_other_versions(measured: Iterable[Measurement], run: str) -> None:
    """Warn once if a step of a run was measured with other versions than this process has."""
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
    """Refuse what another process computes at the same time with other versions than this one has.

    Raises:
        InputError: naming both.
    """
    if theirs != versions():
        there, here = _differing(theirs, versions())
        raise InputError(f"{who} has {there}, and this command has {here}: install the same versions everywhere")


def plain_settings(measurements: Iterable[Measurement]) -> dict[tuple[str, str], str]:
    """Returns, by run and analysis, the settings that are logged under the analysis' own name: those measured first.

    Unlike those that are shown they never change while a file grows: what a logger has got stays one curve.
    """
    plain: dict[tuple[str, str], str] = {}
    for m in measurements:
        if m.error is None:
            plain.setdefault((m.run, m.analysis), settings_of(m))
    return plain


def logged_name(measurement: Measurement, plain: dict[tuple[str, str], str]) -> str:
    """Return what tells an analysis' curves apart by name: `coupling`, and of others than `plain` `coupling@1a2b3c4d`.

    Settings of an analysis that is new in `plain` are entered there.
    """
    settings = settings_of(measurement)
    if plain.setdefault((measurement.run, measurement.analysis), settings) == settings:
        return measurement.analysis
    return f"{measurement.analysis}@{short(settings)}"


def _chosen(steps: Mapping[str, set[int]], asked: Sequence[str], written_last: str) -> str:
    """The settings of one curve; `steps` are those that each was measured at."""
    named = dict.fromkeys(name for each in asked for name in steps if name == each or _is_named(name, each))
    named = {name: None for name in named if name in asked} or named
    if len(named) > 1:
        raise InputError(f"settings: one analysis has {', '.join(map(short, named))}: name one of them")
    if named:
        return next(iter(named))
    if LAST in asked or not any(steps.values()):
        return written_last
    return max(steps, key=lambda name: len(steps[name]))  # of equally many the first


def _refuse_unknown(asked: Sequence[str], curves: Collection[Mapping[str, set[int]]]) -> None:
    for each in asked:
        if each != LAST and not any(_is_named(name, each) for steps in curves for name in steps):
            several = dict.fromkeys(short(name) for steps in curves if len(steps) > 1 for name in steps)
            there = f"say {LAST} or one of {', '.join(several)}" if several else "no analysis has more than one"
            raise InputError(f"settings: nothing was measured with {each!r}: {there}")


def _is_named(settings: str, asked: str) -> bool:
    """Whether each hash begins as it is asked for."""
    hashes, beginnings = settings.split("."), asked.split(".")
    return len(asked) > 0 and len(beginnings) <= len(hashes) and all(map(str.startswith, hashes, beginnings))
