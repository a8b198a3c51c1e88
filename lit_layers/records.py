"""The files of numbers: `measurements.jsonl` for analyses, `metrics.jsonl` for the scalars of training.

Both files have one JSON object per line. Lines are only appended. The one exception: a resumed training truncates
`metrics.jsonl`. Other processes may read a file while one process writes it. If the writer is killed, at most the last
line is lost. A last line that does not parse and has no newline is incomplete: readers skip it, and the next writer
removes it. Any other line that does not parse is refused with its file name and number.

`lit_layers.identity` explains which lines repeat a measurement, and which numbers form a curve.

The values of single prompts are in `values/step-000001000/ANALYSIS-DIGEST.safetensors`, one file for each step,
analysis and settings (options and data of the analysis). These files may be deleted. Comparisons of curves then do not
use the values of single prompts.
"""

# pyright: strict, reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportMissingTypeStubs=false, reportUnnecessaryIsInstance=false

import fcntl
import json
import logging
import math
import mmap
import os
import re
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from itertools import groupby
from pathlib import Path
from typing import Any, BinaryIO, NotRequired, TypeVar, cast

import numpy as np
import pandas as pd
from pydantic import with_config
from pydantic_core import from_json
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save
from typing_extensions import TypedDict

from lit_layers import schema
from lit_layers.errors import InputError, first_line, refused
from lit_layers.files.durable import export as export
from lit_layers.files.durable import replace_file, sync
from lit_layers.files.durable import write_files as write_files
from lit_layers.identity import AXES as AXES
from lit_layers.identity import (
    NO_CURVE,
    ByPrompt,
    Lineage,
    Settings,
    drop_abandoned,
    keep,
    settings_name,
    settings_of,
    sha16,
    shown,
    variant_of,
)
from lit_layers.identity import Measurement as Measurement
from lit_layers.identity import Record as Record
from lit_layers.identity import latest as latest
from lit_layers.schema import Count, Scalar

logger = logging.getLogger(__name__)
T = TypeVar("T")

RESTORE = "restore the file from a copy, or delete that line to go on without it"
_RUN_COLUMNS = {"run": "str", "step": "Int64", "tokens": "Int64", "analysis": "str"}
_NUMBERS = {
    "metric": "str",
    **dict.fromkeys(("layer", "other_layer"), "Int64"),
    **dict.fromkeys(("value", "stderr", "low", "high"), "float64"),
    "n": "Int64",
}
_TAG_TYPES = {bool: "boolean", int: "Int64", float: "Float64", str: "str"}
COLUMNS = (*_RUN_COLUMNS, *_NUMBERS, "settings")
AUDIT = "audit"  # name of the verdict in the provenance, and of its column in tables with suspect checkpoints
FAILED = "failed"  # the metric of a record whose computation failed; `Store.is_done` then asks for another attempt


def append(path: str | Path, measurement: Measurement) -> None:
    """Append a measurement to a file, and return once it is on the disk.

    Raises:
        InputError: the file cannot be written.
    """
    line = {item.name: getattr(measurement, item.name) for item in fields(Measurement)}
    line["records"] = [  # empty fields are left out, to save space
        {name: value for name, value in vars(record).items() if value is not None and value != {}}
        for record in drop_values(measurement).records
    ]
    with locked_for_append(Path(path)) as file:
        write_line(file, line)
        os.fsync(file.fileno())


def read(path: str | Path) -> list[Measurement]:
    """Return the measurements of a file, in order; an empty list if there is no file.

    Raises:
        InputError: a line is not a valid measurement.
    """
    return list(lines_of(Path(path), Measurement))


def lineage_in(root: str | Path) -> Lineage | None:
    """Return the run in a folder, the id of its training, and the steps at which the training was resumed.

    The facts come from run.json. Return None if run.json names no run or no id.

    Raises:
        InputError: run.json is damaged.
    """
    facts = schema.run_facts(Path(root))
    if "run" not in facts or "id" not in facts:
        return None
    resumed = tuple(each["step"] for each in facts.get("resumed", ()) if each["back"])
    return Lineage(facts["run"], facts["id"], resumed)


class Store:
    """The measurements of one file, including those added since it was read; iterating yields them.

    If a number was measured twice, only the last measurement is kept (see `lit_layers.identity`). If a training was
    resumed at an earlier step, its older measurements of later steps are left out.

    Args:
        path: the file; it need not exist yet.
        measurements: the content of the file, if it was read before.
        lineage: the training to record in new measurements of the same run; None: the training that the measurements
            in the file record, if there is one.
    """

    def __init__(
        self, path: str | Path, measurements: Iterable[Measurement] | None = None, *, lineage: Lineage | None = None
    ) -> None:
        self.path, self.lineage = Path(path), lineage
        self._last: dict[tuple[Any, ...], Measurement] = {}
        for measurement in drop_abandoned(read(path) if measurements is None else measurements, lineage):
            keep(self._last, measurement)
        trained = [m for m in self._last.values() if m.step is not None]
        if lineage is None and trained:  # measurements of a series, or of a training whose run.json was removed
            last = max(trained, key=lambda m: len(m.resumed))
            self.lineage = Lineage(last.run, last.training, last.resumed)

    def __iter__(self) -> Iterator[Measurement]:
        """Iterate over the measurements in the order of their lines."""
        return iter([*self._last.values()])

    def add(self, measurement: Measurement) -> Measurement:
        """Write a measurement and its `by_prompt` values to the disk; return the measurement without these values.

        Raises:
            InputError: the training in the folder is no longer the one that this store records.
        """
        if (mine := self.lineage) is not None and mine.run == measurement.run and measurement.step is not None:
            now = lineage_in(self.path.parent)
            if now is not None and now.training != mine.training:
                raise InputError(f"root: another training has begun in {self.path.parent}: this is measured for none")
            measurement = replace(measurement, training=mine.training, resumed=[*mine.resumed])
        write_values(self.path.parent, measurement)  # first, so that each line in the file has its values
        measurement = drop_values(measurement)
        append(self.path, measurement)
        keep(self._last, measurement)
        return measurement

    def last(self, run: str, step: int | None, analysis: Any) -> Measurement | None:
        """Return the last measurement of a step with the options and data of this analysis; None if there is none.

        A measurement that failed before its options and data were known is also returned.
        """
        settings = settings_name(analysis.config_hash(), analysis.data_hash())
        entry = run, step, analysis.name
        return self._last.get((*entry, settings)) or self._last.get((*entry, None))

    def is_done(self, run: str, step: int | None, analysis: Any, **facts: Any) -> bool:
        """Return whether the analysis completed before, with the same options, data and weights.

        The provenance of the stored measurement must contain all `facts`. These are `weights_hash` or, before the
        weights are loaded, `weight_files` and `dtype`.
        """
        last = self.last(run, step, analysis)
        if last is None or last.error is not None or any(record.metric == FAILED for record in last.records):
            return False
        return all(name in last.provenance and last.provenance[name] == value for name, value in facts.items())


class UnwrittenStore(Store):
    """A store that does not write to the file: it keeps new measurements in memory, with their `by_prompt` values."""

    def add(self, measurement: Measurement) -> Measurement:
        keep(self._last, measurement)
        return measurement


def is_suspect(measurement: Measurement) -> bool:
    """Return whether an audit found that the checkpoint's weights may not be those of its step."""
    return str(measurement.provenance.get(AUDIT, "")).startswith("suspect")


def null_folder(root: str | Path, null: str) -> Path:
    """Return the folder with the measurements of one kind of null: "blocks", "all" or "labels"."""
    return Path(root) / f"null-{null}"


def read_nulls(root: str | Path) -> list[Measurement]:
    """Return the measurements of the nulls in a folder, of the last step for each kind, run, analysis and settings.

    A null is the run's last model with random weights, or a probe with permuted labels. It is a baseline
    for the run's curves. The field `null` of the provenance holds its kind.
    """
    last: dict[tuple[Any, ...], Measurement] = {}
    for kind in ("blocks", "all", "labels"):
        store = Store(null_folder(root, kind) / "measurements.jsonl", lineage=lineage_in(root))
        for m in sorted(store, key=lambda m: m.step or 0):
            if m.error is None:
                last[kind, m.run, m.analysis, settings_of(m)] = m
    return [*last.values()]


def add_nulls(measurements: Iterable[Measurement], nulls: Iterable[Measurement]) -> list[Measurement]:
    """Return the measurements with the values of their nulls added, as records with the tag `reference`.

    A null belongs to the measurements of the same run, analysis and settings. Values that form no curve over steps are
    left out.
    """
    added: dict[tuple[str, str, str], list[Record]] = {}
    for null in nulls:
        tag = {"reference": f"null_{null.provenance['null']['kind']}"}
        added.setdefault((null.run, null.analysis, settings_of(null)), []).extend(
            replace(record, tags={**record.tags, **tag})
            for record in null.records
            if record.other_layer is None and not (NO_CURVE | {"variant"}) & record.tags.keys()
        )
    return [replace(m, records=[*m.records, *added.get((m.run, m.analysis, settings_of(m)), ())]) for m in measurements]


def frame(
    measurements: Iterable[Measurement] | Measurement | str | Path | Sequence[str | Path],
    *,
    settings: Settings = (),
) -> pd.DataFrame:
    """Return the tidy table of measurements: one row per number, one column per tag.

    Failed measurements give no rows. A tag with the name of another column becomes `tag_<name>`. If an audit found a
    checkpoint suspect, a last column `audit` has the verdicts. Figures refuse a table with several settings of an
    analysis. They also refuse rows of suspect checkpoints, unless an option allows these.

    Args:
        measurements: measurements, a file of them, the folder of a run, or a list of files and folders; a list adds a
            first column `root`.
        settings: which settings (options and data of an analysis) to take, by name. `last` takes those measured last,
            `all` takes all; the default is explained in `lit_layers.identity`.

    Raises:
        InputError: a file does not exist or has a corrupt line, or no analysis has these settings.
    """
    given = [measurements] if isinstance(measurements, Measurement | str | Path) else [*measurements]
    paths = [each for each in given if not isinstance(each, Measurement)]
    files = [Path(path) / "measurements.jsonl" if Path(path).is_dir() else Path(path) for path in paths]
    for file, path in zip(files, paths, strict=True):
        if not file.is_file():
            raise InputError(f"expected a file of measurements, or a folder with measurements.jsonl, {path} is none")
    roots = [] if isinstance(measurements, str | Path) else [str(path) for path in paths]
    runs: Iterable[Any] = map(read, files) if paths else [given]
    pairs: list[tuple[Measurement, Record]] = []
    root_of_pair: list[str] = []
    for file, run, root in zip(files or [None], runs, roots or [""], strict=True):
        drawn = add_nulls(shown(run, settings), read_nulls(file.parent) if file else ())
        of_run = [(m, record) for m in drawn if m.error is None for record in m.records]
        pairs += of_run
        root_of_pair += [root] * len(of_run)
    table: dict[str, Any] = {"root": pd.array(root_of_pair, dtype="str")} if roots else {}
    for name, kind in _RUN_COLUMNS.items():
        table[name] = pd.Series([getattr(m, name) for m, _ in pairs], dtype=kind)
    for name, kind in _NUMBERS.items():
        table[name] = pd.Series([getattr(record, name) for _, record in pairs], dtype=kind)
    table["settings"] = pd.array([settings_of(m) for m, _ in pairs], dtype="str")
    for name, values in _tag_columns(pairs).items():
        table[f"tag_{name}" if name in table or name == AUDIT else name] = values
    if any(is_suspect(m) for m, _ in pairs):
        table[AUDIT] = pd.array([m.provenance.get(AUDIT) for m, _ in pairs], dtype="str")
    return pd.DataFrame(table)


def key(analysis: str, record: Record) -> str:
    """Return the name of a curve over steps that a record belongs to: `trajectory/line_shape_score/layer_03`."""
    texts = {name: f"{tag:g}" if isinstance(tag, float) else tag for name, tag in variant_of(record.tags).items()}
    tags = [f"{name}={text}" for name, text in sorted(texts.items())]
    layers = [] if record.layer is None else [f"layer_{record.layer:02d}"]
    others = [] if record.other_layer is None else [f"other_layer_{record.other_layer:02d}"]
    return "/".join([analysis, record.metric, *tags, *layers, *others])


class ScalarLog:
    """The scalars of training in `metrics.jsonl`, one row per step.

    `log` collects the values of a step in memory and writes them as a row when the next step is logged. `close` writes
    the row of the current step and returns when all rows are on the disk. A checkpoint can then store `offset`, and a
    resumed run can `truncate` the file to it.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._row: dict[str, float] = {}
        self._step: int | None = None
        self._ready = False

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        """Add values to the row of `step`; a value replaces an earlier one of the same name.

        Raises:
            ValueError: the file has a later step (`truncate` it first), or a scalar is named `step`.
        """
        self._prepare()
        if "step" in scalars:
            raise ValueError("a scalar cannot be named 'step', the name of the row's own step")
        if self._step is not None and step < self._step:
            raise ValueError(f"{self.path} has step {self._step} already, got {step}: truncate it before going back")
        if step != self._step:
            self._write_row()
        self._step = int(step)
        self._row |= {name: int(value) if isinstance(value, int) else float(value) for name, value in scalars.items()}

    def close(self, *, durably: bool = True) -> None:
        """Write the values collected for the current step to the file.

        With `durably`, also wait until every row is on the disk. Without it, no row is lost if the process is killed,
        but a power failure may lose the rows written since the last durable close.
        """
        self._write_row()
        if durably and self.path.exists():
            with refused(f"cannot write {self.path}"), open(self.path, "ab") as file:
                os.fsync(file.fileno())

    @property
    def offset(self) -> int:
        """Size of the file in bytes. The values that `log` collects for the current step are not in the file yet."""
        self._prepare()
        return self.path.stat().st_size if self.path.exists() else 0

    def truncate(self, offset: int) -> None:
        """Drop the values not yet written, and all rows after byte `offset`.

        The argument is an earlier value of the property `offset`. A file that was deleted is not created again.

        Raises:
            InputError: the file is shorter than `offset`, or no row ends there.
        """
        self._row, self._step, self._ready = {}, None, False
        if not self.path.exists():
            return
        with refused(f"cannot write {self.path}"), open(self.path, "r+b") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(offset - 1, 0))
            if offset > size or (offset and file.read(1) != b"\n"):
                raise InputError(f"{self.path} has no row that ends at byte {offset}: restore it, or move it away")
            file.truncate(offset)
            os.fsync(file.fileno())

    def _prepare(self) -> None:
        """Repair the file after an interrupted write, and find the step of its last complete row, on the first call."""
        if self._ready:
            return
        if self.path.exists():
            with locked_for_append(self.path):
                pass
            self._step = next((int(row["step"]) for row in reversed(rows(self.path))), None)
        self._ready = True

    def _write_row(self) -> None:
        if self._row:
            with locked_for_append(self.path) as file:
                write_line(file, {"step": self._step, **self._row})
            self._row = {}


@with_config(schema.OPEN)
class _Row(TypedDict, extra_items=Scalar):
    step: Count
    tokens: NotRequired[Count]


def rows(path: str | Path) -> list[dict[str, float]]:
    """Return the rows of a `metrics.jsonl`, one per step: `{"step": ..., name: value}`; empty if there is no file.

    Raises:
        InputError: a line is not a valid row.
    """
    # A step has two lines if the log was closed between its values. They are merged into one row.
    lines = groupby(lines_of(Path(path), _Row), key=lambda part: part["step"])
    return [
        {name: value for part in parts for name, value in cast("dict[str, float]", part).items()} for _, parts in lines
    ]


def _tag_columns(pairs: list[tuple[Measurement, Record]]) -> dict[str, pd.Series]:
    """Return a column per tag, for the table of `frame`.

    If all values of a tag have one type, the column has this type. Otherwise it holds Python objects.
    """
    columns = {}
    for name in dict.fromkeys(name for _, record in pairs for name in record.tags):
        values = [record.tags.get(name) for _, record in pairs]
        kinds = {type(value) for value in values if value is not None}
        columns[name] = pd.Series(values, dtype=_TAG_TYPES.get(kinds.pop(), object) if len(kinds) == 1 else object)
    return columns


# ------------------------------------------------------------------------------------------------ values of prompts

_ROUNDING = 1e-5  # limit of the relative rounding error of a mean of many numbers in float32


def write_values(root: Path, measurement: Measurement) -> None:
    """Write the `by_prompt` values of a measurement's records, and their `states`, to the file at `values_path`.

    The `states` of layer L are named `layer-L`. Values are written for numbers that form curves, not for matrices,
    maps, or scores on the rows that a probe was fitted to. If the file cannot be written, this only warns, because the
    records hold the means of these values.
    """
    tensors = {f"layer-{record.layer}": record.states for record in measurement.records if record.states is not None}
    for record in measurement.records:
        if record.by_prompt is not None and _makes_a_curve(record) and _is_mean(record.by_prompt, record.value):
            tensors[key(measurement.analysis, record)] = record.by_prompt
    if not tensors:
        return
    path = values_path(root, measurement)
    rows = {name: np.ascontiguousarray(values, np.float32) for name, values in tensors.items()}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, save(rows, _weights_of(measurement)))
    except OSError as error:
        logger.warning("the values of prompts cannot be written to %s: %s", path, error.strerror or error)


def read_values(root: Path, measurement: Measurement) -> dict[str, ByPrompt]:
    """Return the stored `by_prompt` values, (prompts,) each, of a measurement's records, by the records' `key`.

    The result is empty if there is no file, if the file belongs to other weights, or if it is damaged. A damaged file
    is reported as a warning.
    """
    path = values_path(root, measurement)
    names = {key(measurement.analysis, record) for record in measurement.records}
    try:
        with safe_open(path, "numpy") as file:
            if file.metadata() != _weights_of(measurement):
                return {}
            return {name: file.get_tensor(name) for name in names.intersection(file.keys())}
    except FileNotFoundError:
        return {}
    except (SafetensorError, OSError) as error:
        logger.warning("%s is damaged, and curves are compared without it: %s", path, first_line(error))
        return {}


def values_path(root: Path, measurement: Measurement) -> Path:
    """Return the path of the file with the `by_prompt` values of a measurement.

    There is one file for each training, run, step, analysis and settings.
    """
    digest = sha16(json.dumps([measurement.training, measurement.run, measurement.analysis, settings_of(measurement)]))
    step = "no-step" if measurement.step is None else f"step-{measurement.step:09d}"
    name = re.sub(r"[^\w.-]", "_", measurement.analysis)[:80]
    return root / "values" / step / f"{name}-{digest}.safetensors"


def drop_values(measurement: Measurement) -> Measurement:
    """Return the measurement as it is in `measurements.jsonl`: without `by_prompt` and `states` of its records."""
    return replace(measurement, records=[replace(each, by_prompt=None, states=None) for each in measurement.records])


def _weights_of(measurement: Measurement) -> dict[str, str]:
    return {"weights_hash": str(measurement.provenance.get("weights_hash"))}


def _makes_a_curve(record: Record) -> bool:
    return record.other_layer is None and record.tags.keys().isdisjoint(AXES) and record.tags.get("split") != "train"


def _is_mean(values: ByPrompt, value: float) -> bool:
    """Return whether two or more prompts have a value, and `value` is the mean of these."""
    defined = values[~np.isnan(values)].astype(np.float64)
    if len(defined) < 2 or not np.isfinite(defined).all():
        return False
    return bool(abs(defined.mean() - value) <= _ROUNDING * max(np.abs(defined).max(), 1e-30))


# ------------------------------------------------------------------------------------------------ lines of JSON


@contextmanager
def locked_for_append(path: Path) -> Generator[BinaryIO, None, None]:
    """Open a file for appending, lock out other writers on this machine, and repair its last line."""
    with refused(f"cannot write {path}"):
        path.parent.mkdir(parents=True, exist_ok=True)
        is_new = not path.exists()
        # Unbuffered, so that each line is one write: a killed process may leave part of a line, but lines never mix.
        with open(path, "a+b", buffering=0) as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            _repair(file)
            file.seek(0, os.SEEK_END)
            yield cast("BinaryIO", file)
        if is_new:
            sync(path.parent)


def _repair(file: Any) -> None:
    """Repair the end of a file after an interrupted write: add a missing newline, or remove an incomplete line."""
    size = file.seek(0, os.SEEK_END)
    if size == 0:
        return
    with mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ) as content:
        torn = content[content.rfind(b"\n") + 1 :]
    try:
        if torn:
            from_json(torn)
            file.write(b"\n")
    except ValueError:
        file.truncate(size - len(torn))


def write_line(file: BinaryIO, line: Mapping[str, Any]) -> None:
    text = json.dumps(_plain(line), allow_nan=False, ensure_ascii=False, separators=(",", ":"))
    content = text.encode("utf-8", "replace") + b"\n"  # file names may have lone surrogates, which UTF-8 cannot encode
    written = file.write(content)
    # A signal or a full disk can cut a write short. If the disk is full, the next write raises.
    while written < len(content):
        written += file.write(content[written:])


def lines_of(path: Path, kind: type[T]) -> Iterator[T]:
    """Yield each complete line, parsed as `kind`.

    Raises:
        InputError: a line is not a valid `kind`.
    """
    if not path.exists():
        return
    with open(path, "rb") as file:
        left = os.fstat(file.fileno()).st_size  # later lines are not read: a writer may append faster than this reads
        for number, line in enumerate(file, start=1):
            left -= len(line)
            if left < 0:
                return
            if not line.strip():
                continue
            try:
                yield schema.parse(line, kind, f"{path}, line {number}", RESTORE)
            except schema.NotJson:
                if not line.endswith(b"\n"):
                    return  # the last line is incomplete: its writer was killed, or is still writing
                raise


def _plain(value: Any) -> Any:
    """Return `value` as JSON data, with infinite floats and NaN as the strings inf, -inf and nan."""
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else str(float(value))
    if value is None or isinstance(value, str | int):
        return value
    if isinstance(value, Mapping):
        return {str(name): _plain(item) for name, item in value.items()}
    if isinstance(value, Sequence):
        return [_plain(item) for item in value]
    if callable(getattr(value, "item", None)):  # a scalar of NumPy or torch
        return _plain(value.item())
    return str(value)
