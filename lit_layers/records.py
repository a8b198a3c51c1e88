"""Numbers and where they are kept: `measurements.jsonl` for analyses, `metrics.jsonl` for the scalars of training.

Both files hold one JSON object a line and only ever grow. A killed process costs at most its last line, and anybody may
read while somebody writes. A last line without its newline is torn: readers pass over it, the next writer removes it.
Any other line that does not parse is refused by name and number.

A number's identity is (training, step, analysis, config hash, data hash), and the last line of it counts; which of them
make a curve is said in `lit_layers.identity`.

The values of single prompts behind the means lie in `values/step-000001000/ANALYSIS-DIGEST.safetensors` beside them, a
file for each step, analysis and settings. These files can be deleted: then curves are compared without them.
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
AUDIT = "audit"  # the column of verdicts, only in tables that hold a suspect checkpoint; also their name in provenance
FAILED = "failed"  # the metric of a part of a measurement that came to nothing; `Store.is_done` has it tried again


def append(path: str | Path, measurement: Measurement) -> None:
    """Add one line to a file of measurements and return when it is on the disk.

    Raises:
        InputError: where the file cannot be written.
    """
    line = {item.name: getattr(measurement, item.name) for item in fields(Measurement)}
    line["records"] = [  # without what a record leaves open
        {name: value for name, value in vars(record).items() if value is not None and value != {}}
        for record in drop_values(measurement).records
    ]
    with locked_for_append(Path(path)) as file:
        write_line(file, line)
        os.fsync(file.fileno())


def read(path: str | Path) -> list[Measurement]:
    """Return the measurements of a file in the order written; none where there is no file yet.

    Raises:
        InputError: for a line that is no measurement.
    """
    return list(lines_of(Path(path), Measurement))


def lineage_in(root: str | Path) -> Lineage | None:
    """Return what run.json says of the training in a folder; None where it says nothing.

    Raises:
        InputError: for a run.json that is damaged.
    """
    facts = schema.run_facts(Path(root))
    if "run" not in facts or "id" not in facts:
        return None
    resumed = tuple(each["step"] for each in facts.get("resumed", ()) if each["back"])
    return Lineage(facts["run"], facts["id"], resumed)


class Store:
    """The measurements of one file: the last of each identity, those that were there and those that are added.

    What a training has left as it went back to an earlier step is not among them.

    Args:
        path: the file; it need not exist yet.
        measurements: what it holds, where that was read already.
        lineage: the training that measurements of its run are added to; None: the one that is there, or the run itself.
    """

    def __init__(
        self, path: str | Path, measurements: Iterable[Measurement] | None = None, *, lineage: Lineage | None = None
    ) -> None:
        self.path, self.lineage = Path(path), lineage
        self._last: dict[tuple[Any, ...], Measurement] = {}
        for measurement in drop_abandoned(read(path) if measurements is None else measurements, lineage):
            keep(self._last, measurement)
        trained = [m for m in self._last.values() if m.step is not None]
        if lineage is None and trained:  # by a training whose run.json was removed, or a series
            last = max(trained, key=lambda m: len(m.resumed))
            self.lineage = Lineage(last.run, last.training, last.resumed)

    def __iter__(self) -> Iterator[Measurement]:
        """In the order of the lines that count."""
        return iter([*self._last.values()])

    def add(self, measurement: Measurement) -> Measurement:
        """Write a measurement and the values of its prompts, and return it without these when it is on the disk.

        Raises:
            InputError: where another training has taken the folder over, as while a second process measured the first.
        """
        if (mine := self.lineage) is not None and mine.run == measurement.run and measurement.step is not None:
            now = lineage_in(self.path.parent)
            if now is not None and now.training != mine.training:
                raise InputError(f"root: another training has begun in {self.path.parent}: this is measured for none")
            measurement = replace(measurement, training=mine.training, resumed=[*mine.resumed])
        write_values(self.path.parent, measurement)  # before the line that they belong to
        measurement = drop_values(measurement)
        append(self.path, measurement)
        keep(self._last, measurement)
        return measurement

    def last(self, run: str, step: int | None, analysis: Any) -> Measurement | None:
        """Return the last measurement of an analysis with these very options and data, or one that failed before."""
        settings = settings_name(analysis.config_hash(), analysis.data_hash())
        entry = run, step, analysis.name
        return self._last.get((*entry, settings)) or self._last.get((*entry, None))

    def is_done(self, run: str, step: int | None, analysis: Any, **facts: Any) -> bool:
        """Return whether an analysis need not run: it succeeded, whole, with these options, data and weights.

        `facts` must stand in its provenance: `weights_hash`, or, where no weights are loaded, `weight_files` with
        `dtype`.
        """
        last = self.last(run, step, analysis)
        if last is None or last.error is not None or any(record.metric == FAILED for record in last.records):
            return False
        return all(name in last.provenance and last.provenance[name] == value for name, value in facts.items())


class UnwrittenStore(Store):
    """The same where another process writes: what is added is kept in memory, and returned with all its values."""

    def add(self, measurement: Measurement) -> Measurement:
        keep(self._last, measurement)
        return measurement


def is_suspect(measurement: Measurement) -> bool:
    """Whether an audit of its series found that the checkpoint's weights may not be what its name says."""
    return str(measurement.provenance.get(AUDIT, "")).startswith("suspect")


def frame(
    measurements: Iterable[Measurement] | Measurement | str | Path | Sequence[str | Path],
    *,
    settings: Settings = (),
) -> pd.DataFrame:
    """Return the tidy table: one row a number, one column a tag.

    Measurements may be given by their file, the folder of a run, or several of these; then a first column `root` says
    which.

    The measurements are those that make the curves of a run, of the settings that `lit_layers.identity` says, or of
    others that `settings` names: `last`, `all`, names; one that failed gives no rows. A tag that is named like one of
    the other columns becomes `tag_<name>`. Where a checkpoint is suspect, a last column `audit` has the verdicts of
    all. Figures refuse suspect rows unless they are told otherwise, and rows of several settings.

    Raises:
        InputError: for a file that does not exist or holds a corrupt line; for settings that are not there.
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
    for run, root in zip(runs, roots or [""], strict=True):
        of_run = [(m, record) for m in shown(run, settings) if m.error is None for record in m.records]
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
    """Return the name of a number's curve: `trajectory/line_shape_score/layer_03`, `coupling/coupling/k=12`."""
    texts = {name: f"{tag:g}" if isinstance(tag, float) else tag for name, tag in variant_of(record.tags).items()}
    tags = [f"{name}={text}" for name, text in sorted(texts.items())]
    layers = [] if record.layer is None else [f"layer_{record.layer:02d}"]
    others = [] if record.other_layer is None else [f"other_layer_{record.other_layer:02d}"]
    return "/".join([analysis, record.metric, *tags, *layers, *others])


class ScalarLog:
    """The scalars of training on disk: one closed row a step.

    `log` gathers the values of a step in an open row; the next step closes it. `close` closes the open row too and
    returns when all rows are on the disk, so that a checkpoint may store `offset` and `truncate` to it on resume.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._row: dict[str, float] = {}
        self._step: int | None = None
        self._ready = False

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        """Add values to the row of `step`; a value logged twice keeps its last.

        Raises:
            ValueError: for a step before one that is in the file already: `truncate` first.
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
        """Close the open row, if any, and return when every row is in the file, `durably` on the disk: a kill takes
        no row either way, a power cut may take those since the last durable close."""
        self._write_row()
        if durably and self.path.exists():
            with refused(f"cannot write {self.path}"), open(self.path, "ab") as file:
                os.fsync(file.fileno())

    @property
    def offset(self) -> int:
        """Bytes of closed rows."""
        self._prepare()
        return self.path.stat().st_size if self.path.exists() else 0

    def truncate(self, offset: int) -> None:
        """Drop the open row and all rows behind `offset`, an `offset` of this file seen before.

        A file that is gone stays gone: it cannot bring back what it held.

        Raises:
            InputError: where the file is shorter, or no row ends there.
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
        """Repairs a torn last row and finds the step of the last whole one, once."""
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
    """Return the rows of a `metrics.jsonl`, one a step, each `{"step": ..., name: value}`; none without a file.

    Raises:
        InputError: for a line that is no row.
    """
    lines = groupby(lines_of(Path(path), _Row), key=lambda part: part["step"])  # several for a checkpoint
    return [
        {name: value for part in parts for name, value in cast("dict[str, float]", part).items()} for _, parts in lines
    ]


def _tag_columns(pairs: list[tuple[Measurement, Record]]) -> dict[str, pd.Series]:
    """Booleans, integers, numbers or text as such; a mixture stays Python objects."""
    columns = {}
    for name in dict.fromkeys(name for _, record in pairs for name in record.tags):
        values = [record.tags.get(name) for _, record in pairs]
        kinds = {type(value) for value in values if value is not None}
        columns[name] = pd.Series(values, dtype=_TAG_TYPES.get(kinds.pop(), object) if len(kinds) == 1 else object)
    return columns


# ------------------------------------------------------------------------------------------------ values of prompts

_ROUNDING = 1e-5  # relative, of a mean of many numbers in float32


def write_values(root: Path, measurement: Measurement) -> None:
    """Write the values of prompts behind a measurement's means, and its states as `layer-L`, whole or not at all.

    Values are written for numbers that make curves, not for matrices and maps, nor for the rows that a probe was fitted
    to. Where they cannot be written, a warning says so: the numbers themselves matter more.
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
    """Return the values (prompts,) behind a measurement's numbers by the names of their curves, as `key` says them.

    Nothing is returned where there is no file, or one of other weights. A damaged file is left out with a warning.
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
    """Return the file for the values of a measurement: one for each training, run, step, analysis and settings."""
    digest = sha16(json.dumps([measurement.training, measurement.run, measurement.analysis, settings_of(measurement)]))
    step = "no-step" if measurement.step is None else f"step-{measurement.step:09d}"
    name = re.sub(r"[^\w.-]", "_", measurement.analysis)[:80]
    return root / "values" / step / f"{name}-{digest}.safetensors"


def drop_values(measurement: Measurement) -> Measurement:
    """Return a measurement as it is in `measurements.jsonl`."""
    return replace(measurement, records=[replace(each, by_prompt=None, states=None) for each in measurement.records])


def _weights_of(measurement: Measurement) -> dict[str, str]:
    return {"weights_hash": str(measurement.provenance.get("weights_hash"))}


def _makes_a_curve(record: Record) -> bool:
    return record.other_layer is None and record.tags.keys().isdisjoint(AXES) and record.tags.get("split") != "train"


def _is_mean(values: ByPrompt, value: float) -> bool:
    """Whether the values are those of a mean over two prompts or more."""
    defined = values[~np.isnan(values)].astype(np.float64)
    if len(defined) < 2 or not np.isfinite(defined).all():
        return False
    return bool(abs(defined.mean() - value) <= _ROUNDING * max(np.abs(defined).max(), 1e-30))


# ------------------------------------------------------------------------------------------------ lines of JSON


@contextmanager
def locked_for_append(path: Path) -> Generator[BinaryIO, None, None]:
    """Open a file at its end, its last line whole; other writers on this machine wait meanwhile."""
    with refused(f"cannot write {path}"):
        path.parent.mkdir(parents=True, exist_ok=True)
        is_new = not path.exists()
        # Unbuffered: one line is one write, so that a reader or a kill sees it whole or torn, never interleaved.
        with open(path, "a+b", buffering=0) as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            _repair(file)
            file.seek(0, os.SEEK_END)
            yield cast("BinaryIO", file)
        if is_new:
            sync(path.parent)


def _repair(file: Any) -> None:
    """Completes a last line that only lacks its newline, removes one that is torn."""
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
    content = text.encode("utf-8", "replace") + b"\n"  # half a surrogate pair, of a file's name, is no text
    written = file.write(content)
    while written < len(content):  # a signal, or a full disk, which the next write then reports
        written += file.write(content[written:])


def lines_of(path: Path, kind: type[T]) -> Iterator[T]:
    """Yield each whole line as `kind`."""
    if not path.exists():
        return
    with open(path, "rb") as file:
        left = os.fstat(file.fileno()).st_size  # what is there now: a writer may add faster than this reads
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
                    return  # torn, or being written
                raise


def _plain(value: Any) -> Any:
    """`value` as JSON data; floats that JSON lacks become the strings inf, -inf and nan."""
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
