"""What a task of the catalogue is, and the columns of its data set: of files, of a local copy, or of the Hub.

A local copy is what the `tasks.yaml` in a folder says of a task.

Files are read by pyarrow and not by `datasets`, which takes the csv cells 000 and NA for a number and for nothing, and
on 10,000 rows 0.8 s of CPU time with a copy in its cache, or 2 s without one, where pyarrow takes 0.1 s. Both are
imported by the functions that need them: that takes 2 and 0.6 s.
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
_NAME = re.compile(r"(?!\.)[\w.-]{1,99}")  # results and embeddings lie in folders of these names


def version_of(package: str) -> str:
    """Return the version of a package that scores tasks.

    Raises:
        InputError: it is not installed.
    """
    try:
        return version(package)
    except PackageNotFoundError as error:
        raise InputError(f"{package} is needed to score tasks: pip install 'lit_layers[eval]'") from error


def read_result(path: Path) -> dict[str, Any] | None:
    """Return a result that was written as JSON; None where there is none, or a damaged one."""
    with contextlib.suppress(FileNotFoundError, ValueError):
        return json.loads(path.read_text(encoding="utf-8"))
    return None


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Show neither bars nor warnings of a library that draws and prints on both streams."""
    hidden = io.StringIO()
    with contextlib.redirect_stdout(hidden), contextlib.redirect_stderr(hidden), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


class Columns(NamedTuple):
    values: dict[str, list[Any]]  # every column as long as the others
    class_names: dict[str, tuple[str, ...]]  # of the integer columns whose classes the Hub names
    origin: str  # for messages


def is_local(source: str) -> bool:
    """Whether a source names files of this machine, there or not; all else is a data set of the Hub."""
    return PATTERN in source or source.endswith(SUFFIXES) or source.startswith((".", "/", "~")) or Path(source).exists()


def is_one_file(source: str) -> bool:
    """Whether every split would be read from the same file."""
    return source.endswith(SUFFIXES) and PATTERN not in source


def _joined(parts: Sequence[Columns]) -> Columns:
    """Return the columns of several splits or files, one after the other."""
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
    place = f"the {split} split of {source}"
    _check_columns(place, columns, rows.column_names)
    names = {column: tuple(getattr(rows.features[column], "names", None) or ()) for column in columns}
    values = {column: rows[column][:] for column in columns}
    return Columns(values, {column: classes for column, classes in names.items() if classes}, place)


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
    """A parquet file that has these columns."""
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

    # Cells of texts and labels are taken as they are written: "000" is no number, and the label "01" is not "1".
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
    """Written labels as the integers or floats that they all are; as they are where one is a name, such as "01"."""
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
    """The object of each line that is not blank."""
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                row = dict(**json.loads(line))  # which takes halves of characters, too
            except (ValueError, TypeError) as error:  # also of bytes that are not UTF-8
                raise InputError(f"{path}, line {number}: expected a JSON object ({error})") from error
            yield row


def _check_columns(place: str, columns: Mapping[str, str], names: list[str]) -> None:
    if missing := [column for column in columns if names.count(column) != 1]:
        many = "several columns" if missing[0] in names else "no column"
        held = ", ".join(names) or "none at all"
        raise InputError(f"{columns[missing[0]]}: {place} has {many} {missing[0]!r}: it has {held}")


@dataclass(frozen=True, kw_only=True)
class TaskFiles:
    """Where a folder of local data has a task: one entry of its `tasks.yaml`.

    Args:
        files: a path within the folder, with {split} in it where there are several splits; or the path, or paths, of
            each split.
        columns: names of the data set's columns, and what they are called here.
        where: columns and the value of the rows to read.
        options: of the task that are others in this copy.
        difference: from the official data, for the results.
    """

    folder: Path
    files: str | Mapping[str, str | Sequence[str]]
    columns: Mapping[str, str] = field(default_factory=dict)
    where: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    difference: str = ""

    def paths(self, split: str) -> list[Path]:
        """Return the files of a split, there or not.

        Raises:
            InputError: none are listed.
        """
        names = self.files if isinstance(self.files, str) else self.files.get(split)
        if names is None:
            splits = ", ".join(self.files)
            raise InputError(f"{self.folder / MAPPING}: expected files of the split {split!r}, got {splits}")
        return [self.folder / name.replace(PATTERN, split) for name in ([names] if isinstance(names, str) else names)]

    def content_hash(self, splits: Sequence[str]) -> str:
        """Return a hash of the files of some splits and of what is read of them.

        Raises:
            InputError: a file is missing.
        """
        with refused(f"cannot read data of {self.folder}"):
            digests = [_digest(path, *on_disk(path)) for split in splits for path in self.paths(split)]
        return hash_of([dict(self.columns), dict(self.where), dict(self.options), digests])

    def read(self, splits: Sequence[str], columns: Mapping[str, str]) -> Columns:
        """Columns of some splits by the data set's own names; `columns` says which option each is named by.

        Raises:
            InputError: a file or column is missing, or a file is damaged.
        """
        here = {self.columns.get(name, name): use for name, use in columns.items()}
        here |= dict.fromkeys(self.where.keys() - here.keys(), "where")
        read = _joined([_read_path(path, split, here) for split in splits for path in self.paths(split)])
        values = read.values
        for name, kept in self.where.items():
            rows = [row for row, value in enumerate(values[name]) if value == kept]
            values = {each: [column[row] for row in rows] for each, column in values.items()}
        return read._replace(values={name: values[self.columns.get(name, name)] for name in columns})


@functools.cache
def _digest(path: Path, *_: int) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@dataclass(frozen=True)
class Task:
    """A data set and what is asked of it: a row of the catalogue, or one of the user's own.

    Args:
        name: unique within its use.
        source: ORG/NAME[:CONFIG] of the Hub, or files.
    """

    name: str
    source: str
    use: Use = field(default="probe", init=False)
    copy: TaskFiles | None = field(default=None, init=False, repr=False, compare=False)

    def refusal(self, option: str, sentence: str) -> InputError:
        """What is said of an option of this task."""
        return InputError(f"task {self.name}: {option}: {sentence}")

    def localized(self, folder: str | Path | None) -> Self:
        """The task as a folder of local data has it, whose `tasks.yaml` says where; with None that of the Hub.

        Raises:
            InputError: the folder does not say, or says something else.
        """
        return self if folder is None else self.use_copy(local_copy(self.use, self.name, folder))

    def use_copy(self, copy: TaskFiles) -> Self:
        """The task with the options that are others in a copy, which it is read from.

        Raises:
            InputError: an option that it does not have, or a value of another kind.
        """
        task = replace(self, **self.checked_options(copy.options, f"{copy.folder / MAPPING}: options"))
        object.__setattr__(task, "copy", copy)
        return task

    def checked_options(self, options: Mapping[str, Any], place: str) -> dict[str, Any]:
        """Options that are those of this kind of task; what it is called and where it is from are none."""
        kind = type(self)
        allowed = schema.some_of(kind, without=("name", "source", "use"))
        return schema.check(options, allowed, f"task {self.name}: {place}", f"see the options of {kind.__name__}")

    def read(self, splits: Sequence[str], columns: Mapping[str, str]) -> Columns:
        """The columns of some splits, one after the other; `columns` says for each which option it is named by.

        Raises:
            InputError: a split, file or column is missing, a file is damaged, or the Hub does not answer.
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
    """The tasks of a use that a folder of local data has, by name.

    Raises:
        InputError: no such folder, no `tasks.yaml` in it, or one that says something else.
    """
    folder = Path(folder).expanduser()
    if not folder.is_dir():
        raise InputError(f"folder: expected a folder of data, {folder} is none")
    path = folder / MAPPING
    if not path.is_file():
        raise InputError(f"folder: expected a file {MAPPING} in {folder}, there is none: docs/tasks.md shows one")
    return _entries(path, *on_disk(path)).get(use, {})


def local_copy(use: Use, name: str, folder: str | Path) -> TaskFiles:
    """Where a folder of local data has a task.

    Raises:
        InputError: it does not say, or what `local_copies` refuses.
    """
    copies = local_copies(use, folder)
    if name not in copies:
        names = ", ".join(copies) or "none"
        raise InputError(f"folder: {Path(folder) / MAPPING} has no {use} {name!r}, it has {names}: add it")
    return copies[name]


@functools.lru_cache(maxsize=8)
def _entries(path: Path, *_: int) -> dict[str, dict[str, TaskFiles]]:
    """By use and name."""
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
