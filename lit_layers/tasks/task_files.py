"""Tasks of the catalogue, and reading the columns of their data from files, a local copy, or the Hub.

A local copy is described by an entry of the `tasks.yaml` in a folder of local data.

pyarrow reads the files, because `datasets` would read the csv cell 000 as a number and NA as a missing value. On 10,000
rows, `datasets` takes 0.8 s of CPU time (2 s without a cached copy), and pyarrow takes 0.1 s. Both take seconds to
import, so only the functions that need them import them.
"""

import contextlib
import functools
import hashlib
import io
import json
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Required, Self

from pydantic import with_config
from typing_extensions import TypedDict

from lit_layers import schema
from lit_layers.errors import InputError, refused
from lit_layers.files.durable import on_disk
from lit_layers.files.hub import HUB_ERRORS, reason
from lit_layers.identity import hash_of

Use = Literal["probe", "prompts", "benchmark", "glue", "mteb"]
SUFFIXES = (".parquet", ".csv", ".jsonl")
PATTERN = "{split}"
MAPPING = "tasks.yaml"
_NAME = re.compile(r"(?!\.)[\w.-]{1,99}")  # allowed names of tasks; the folder of a task's results has the same name


def version_of(package: str) -> str:
    """Return the installed version of a package that scores tasks.

    Raises:
        InputError: The package is not installed.
    """
    try:
        return version(package)
    except PackageNotFoundError as error:
        raise InputError(f"{package} is needed to score tasks: pip install 'lit_layers[eval]'") from error


def read_result(path: Path) -> dict[str, Any] | None:
    """Read a result from a JSON file, or return None if it is missing or damaged."""
    with contextlib.suppress(FileNotFoundError, ValueError):
        return json.loads(path.read_text(encoding="utf-8"))
    return None


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Hide warnings, progress bars and all other output of Python on stdout and stderr within the context."""
    hidden = io.StringIO()
    with contextlib.redirect_stdout(hidden), contextlib.redirect_stderr(hidden), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


class Columns(NamedTuple):
    values: dict[str, list[Any]]  # column name -> the values of all rows
    class_names: dict[str, tuple[str, ...]]  # column of class indices -> class names on the Hub
    origin: str  # file or split, for error messages


def is_local(source: str) -> bool:
    """Return whether a source names local files, which need not exist. Any other source is a Hub data set."""
    return PATTERN in source or source.endswith(SUFFIXES) or source.startswith((".", "/", "~")) or Path(source).exists()


def is_one_file(source: str) -> bool:
    """Return whether a source is one file, so that every split would be read from it."""
    return source.endswith(SUFFIXES) and PATTERN not in source


def _joined(parts: Sequence[Columns]) -> Columns:
    """Concatenate the rows of several splits or files, column by column."""
    values = {column: [value for part in parts for value in part.values[column]] for column in parts[0].values}
    return Columns(values, parts[0].class_names, " and ".join(part.origin for part in parts))


def _read_hub(source: str, split: str, columns: Mapping[str, str]) -> Columns:
    import datasets

    path, _, config = source.partition(":")
    try:
        rows: Any = datasets.load_dataset(path, config or None, split=split)
    except (*HUB_ERRORS, RuntimeError) as error:
        what = f"source: the split {split!r} of {source!r} is no local file and cannot be had from the Hub"
        raise InputError(f"{what} ({reason(error)}): check the names and the network") from error
    origin = f"the {split} split of {source}"
    _check_columns(origin, columns, rows.column_names)
    names = {column: tuple(getattr(rows.features[column], "names", None) or ()) for column in columns}
    values = {column: rows[column][:] for column in columns}
    return Columns(values, {column: classes for column, classes in names.items() if classes}, origin)


def _read_path(path: Path, split: str, columns: Mapping[str, str]) -> Columns:
    path = _find_file(path, split)
    read = {".parquet": _read_parquet, ".csv": _read_csv, ".jsonl": _read_jsonl}.get(path.suffix)
    if read is None:
        raise InputError(f"source: expected a {', '.join(SUFFIXES)} file, got {path}")
    if not path.is_file():
        raise InputError(f"source: expected the split {split!r} in {path}, there is no such file")
    return Columns(read(path, columns), {}, str(path))


def _find_file(path: Path, split: str) -> Path:
    if not path.is_dir():
        return path
    files = [path / f"{split}{suffix}" for suffix in SUFFIXES if (path / f"{split}{suffix}").is_file()]
    if len(files) != 1:
        held = ", ".join(sorted(each.name for each in path.iterdir() if each.suffix in SUFFIXES)) or "no data file"
        raise InputError(f"source: expected one file {split}{'|'.join(SUFFIXES)} in {path}, it has {held}")
    return files[0]


@contextlib.contextmanager
def open_parquet(path: Path, columns: Mapping[str, str]) -> Iterator[Any]:
    """Open a parquet file and check that it has the columns that are the keys of `columns`."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            _check_columns(str(path), columns, file.schema_arrow.names)
            yield file
    except (pa.ArrowInvalid, OSError) as error:
        raise InputError(f"{path} is no parquet file, or only a part of one ({error}): copy it again") from error


def _read_parquet(path: Path, columns: Mapping[str, str]) -> dict[str, list[Any]]:
    with open_parquet(path, columns) as file:
        table = file.read(columns=list(columns))
    return {column: table[column].to_pylist() for column in columns}


def _read_csv(path: Path, columns: Mapping[str, str]) -> dict[str, list[Any]]:
    import pyarrow as pa
    import pyarrow.csv as pc

    # Read texts and labels as strings: the text "000" is not a number, and the label "01" differs from "1".
    written = {column: pa.string() for column, use in columns.items() if use in ("text", "label")}
    try:
        table = pc.read_csv(
            path,
            parse_options=pc.ParseOptions(newlines_in_values=True),
            convert_options=pc.ConvertOptions(column_types=written or None),
        )
    except (pa.ArrowInvalid, OSError) as error:
        raise InputError(f"{path} cannot be read as UTF-8 csv with a head line ({error}): mend it") from error
    _check_columns(str(path), columns, table.column_names)
    read = {column: table[column].to_pylist() for column in columns}
    return {name: _parse_labels(cells) if columns[name] == "label" else cells for name, cells in read.items()}


def _parse_labels(cells: list[str | None]) -> list[Any]:
    """Convert the labels of a csv file to integers or floats if all are numbers; otherwise leave all as strings.

    A label such as "01" does not count as a number.
    """
    filled = {cell for cell in cells if cell}
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            numbers = {cell: kind(cell) for cell in filled}
            if kind is float or all(str(number) == cell for cell, number in numbers.items()):
                return [numbers.get(cell or "") for cell in cells]
            break
    return [cell or None for cell in cells]


def _read_jsonl(path: Path, columns: Mapping[str, str]) -> dict[str, list[Any]]:
    rows = [*json_objects(path)]
    _check_columns(str(path), columns, list(dict.fromkeys(key for row in rows for key in row)))
    return {column: [row.get(column) for row in rows] for column in columns}


def json_objects(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the JSON object on each line of a file, skipping blank lines.

    Strings may contain a lone surrogate, which json accepts and UTF-8 cannot encode.

    Raises:
        InputError: A line is not a JSON object.
    """
    with path.open("rb") as lines:
        for lineno, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                row = dict(**json.loads(line))  # raises a TypeError for a JSON value that is not an object
            except (ValueError, TypeError) as error:  # a ValueError means bad JSON, or bytes that are not UTF-8
                raise InputError(f"{path}, line {lineno}: expected a JSON object ({error})") from error
            yield row


def _check_columns(origin: str, columns: Mapping[str, str], names: list[str]) -> None:
    if missing := [column for column in columns if names.count(column) != 1]:
        many = "several columns" if missing[0] in names else "no column"
        held = ", ".join(names) or "none at all"
        raise InputError(f"{columns[missing[0]]}: {origin} has {many} {missing[0]!r}: it has {held}")


@dataclass(frozen=True, kw_only=True)
class TaskFiles:
    """The local copy of a task: one entry of the `tasks.yaml` in a folder of local data.

    Args:
        folder: The folder of local data.
        files: A path within the folder, which contains {split} if there are several splits; or a mapping from each
            split to a path or a list of paths.
        columns: Maps column names of the official data set to column names in the files.
        where: Maps columns to the value that a row must have to be read.
        options: Options of the task that differ for this copy.
        difference: Description of how the copy differs from the official data, for the result files.
    """

    folder: Path
    files: str | Mapping[str, str | Sequence[str]]
    columns: Mapping[str, str] = field(default_factory=dict)
    where: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    difference: str = ""

    def paths(self, split: str) -> list[Path]:
        """Return the paths of the files of a split. The files need not exist.

        Raises:
            InputError: No files are listed for this split.
        """
        names = self.files if isinstance(self.files, str) else self.files.get(split)
        if names is None:
            splits = ", ".join(self.files)
            raise InputError(f"{self.folder / MAPPING}: expected files of the split {split!r}, got {splits}")
        return [self.folder / name.replace(PATTERN, split) for name in ([names] if isinstance(names, str) else names)]

    def content_hash(self, splits: Sequence[str]) -> str:
        """Return a hash of the files of some splits and of the fields `columns`, `where` and `options`.

        Raises:
            InputError: A file is missing.
        """
        with refused(f"cannot read data of {self.folder}"):
            digests = [_digest(path, *on_disk(path)) for split in splits for path in self.paths(split)]
        return hash_of([dict(self.columns), dict(self.where), dict(self.options), digests])

    def read(self, splits: Sequence[str], columns: Mapping[str, str]) -> Columns:
        """Read columns of some splits.

        Args:
            splits: The splits, which are concatenated.
            columns: Maps the official name of each column to an option. If the column is missing, the error message
                contains this option.

        Raises:
            InputError: A file or column is missing, or a file is damaged.
        """
        uses = {self.columns.get(name, name): use for name, use in columns.items()}
        uses |= dict.fromkeys(self.where.keys() - uses.keys(), "where")
        read = _joined([_read_path(path, split, uses) for split in splits for path in self.paths(split)])
        values = read.values
        for name, wanted in self.where.items():
            rows = [row for row, value in enumerate(values[name]) if value == wanted]
            values = {each: [column[row] for row in rows] for each, column in values.items()}
        return read._replace(values={name: values[self.columns.get(name, name)] for name in columns})


@functools.cache
def _digest(path: Path, *_: int) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@dataclass(frozen=True)
class Task:
    """A data set and what it is used for: an entry of the catalogue, or a task of the user.

    Args:
        name: Name of the task, unique among the tasks with the same `use`.
        source: ORG/NAME[:CONFIG] on the Hub, or files.
    """

    name: str
    source: str
    use: Use = field(default="probe", init=False)
    copy: TaskFiles | None = field(default=None, init=False, repr=False, compare=False)

    def refusal(self, option: str, sentence: str) -> InputError:
        """Return the error to raise for an option of this task. `sentence` says what is wrong with it."""
        return InputError(f"task {self.name}: {option}: {sentence}")

    def localized(self, folder: str | Path | None) -> Self:
        """Return a version of this task that reads from its local copy in `folder`.

        If `folder` is None, return this task unchanged.

        Raises:
            InputError: The folder's `tasks.yaml` is missing or invalid, or has no such task.
        """
        return self if folder is None else self.use_copy(local_copy(self.use, self.name, folder))

    def use_copy(self, copy: TaskFiles) -> Self:
        """Return a version of this task that reads from a local copy and has the options of that copy.

        Raises:
            InputError: The copy has an option that the task lacks, or a value has another type.
        """
        task = replace(self, **self.checked_options(copy.options, f"{copy.folder / MAPPING}: options"))
        object.__setattr__(task, "copy", copy)
        return task

    def checked_options(self, options: Mapping[str, Any], where: str) -> dict[str, Any]:
        """Return the options after checking them against the fields of this task's class.

        The fields `name`, `source` and `use` are not allowed as options.
        """
        kind = type(self)
        allowed = schema.some_of(kind, without=("name", "source", "use"))
        return schema.check(options, allowed, f"task {self.name}: {where}", f"see the options of {kind.__name__}")

    def read(self, splits: Sequence[str], columns: Mapping[str, str]) -> Columns:
        """Read columns of some splits from the local copy, local files or the Hub.

        Args:
            splits: The splits, which are concatenated.
            columns: Maps the name of each column to an option. If the column is missing, the error message contains
                this option.

        Raises:
            InputError: A split, file or column is missing, a file is damaged, or the Hub does not answer.
        """
        try:
            if self.copy is not None:
                return self.copy.read(splits, columns)
            if not is_local(self.source):
                return _joined([_read_hub(self.source, split, columns) for split in splits])
            paths = [(Path(self.source.replace(PATTERN, split)).expanduser(), split) for split in splits]
            return _joined([_read_path(path, split, columns) for path, split in paths])
        except InputError as error:
            raise InputError(f"task {self.name}: {error}") from error


@with_config(schema.STRICT)
class _Entry(TypedDict, total=False):
    files: Required[str | dict[str, str | list[str]]]
    columns: dict[str, str]
    where: dict[str, str | int | float | bool]
    options: dict[str, Any]
    difference: str


_ENTRY = "expected a path, or files and where they differ columns, difference, options, where"
_Content = dict[Use, dict[str, Annotated[str | _Entry, schema.Expected(_ENTRY)]] | None]


def local_copies(use: Use, folder: str | Path) -> dict[str, TaskFiles]:
    """Return the local copies, in a folder of local data, of all tasks with the use `use`, by task name.

    Raises:
        InputError: The folder or its `tasks.yaml` does not exist, or `tasks.yaml` is invalid.
    """
    folder = Path(folder).expanduser()
    if not folder.is_dir():
        raise InputError(f"folder: expected a folder of data, {folder} is none")
    path = folder / MAPPING
    if not path.is_file():
        raise InputError(f"folder: expected a file {MAPPING} in {folder}, there is none: docs/tasks.md shows one")
    return _entries(path, *on_disk(path)).get(use, {})


def local_copy(use: Use, name: str, folder: str | Path) -> TaskFiles:
    """Return the local copy of a task in a folder of local data.

    Raises:
        InputError: The folder has no copy of this task, or no valid `tasks.yaml`.
    """
    copies = local_copies(use, folder)
    if name not in copies:
        names = ", ".join(copies) or "none"
        raise InputError(f"folder: {Path(folder) / MAPPING} has no {use} {name!r}, it has {names}: add it")
    return copies[name]


@functools.lru_cache(maxsize=8)
def _entries(path: Path, *_: int) -> dict[str, dict[str, TaskFiles]]:
    """Return all local copies that a `tasks.yaml` lists, by use (such as `probe`) and then by task name."""
    content = schema.read_yaml(path, _Content, "write it as docs/tasks.md shows") or {}
    copies: dict[str, dict[str, TaskFiles]] = {}
    for use, entries in content.items():
        copies[use] = {}
        for name, entry in (entries or {}).items():
            if not _NAME.fullmatch(name):
                expected = "names of letters, digits, '_', '-' and '.'"
                raise InputError(f"folder: {path}: {use}: expected {expected}, got {schema.beginning(name)}")
            facts: Any = {"files": entry} if isinstance(entry, str) else entry
            copies[use][name] = TaskFiles(folder=path.parent, **facts)
    return copies
