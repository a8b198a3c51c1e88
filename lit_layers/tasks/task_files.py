"""Columns of data sets: of parquet, csv and jsonl files, of local copies that `tasks.yaml` names, and of the Hub.

Files are read by pyarrow and not by `datasets`, which takes the csv cells 000 and NA for a number and for nothing, and
on 10,000 rows 0.8 s of CPU time with a copy in its cache, or 2 s without one, where pyarrow takes 0.1 s. Both are
imported by the functions that need them: that takes 2 and 0.6 s.
"""

import functools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import yaml

from lit_layers.errors import InputError
from lit_layers.files.downloads import HUB_ERRORS, reason
from lit_layers.files.foreign_parquet import refuse_vast
from lit_layers.schema import beginning

Use = Literal["probe", "prompts", "benchmark", "glue", "mteb"]
SUFFIXES = (".parquet", ".csv", ".jsonl")
PATTERN = "{split}"
MAPPING = "tasks.yaml"


class Columns(NamedTuple):
    values: dict[str, list[Any]]  # every column as long as the others
    class_names: dict[str, tuple[str, ...]]  # of the integer columns whose classes the Hub names
    place: str  # for messages


def is_local(source: str) -> bool:
    """Whether a source names files of this machine, there or not; all else is a data set of the Hub."""
    return PATTERN in source or source.endswith(SUFFIXES) or source.startswith((".", "/", "~")) or Path(source).exists()


def is_one_file(source: str) -> bool:
    """Whether every split would be read from the same file."""
    return source.endswith(SUFFIXES) and PATTERN not in source


def read_columns(source: str, splits: Sequence[str], columns: Mapping[str, str]) -> Columns:
    """The columns of several splits, one after the other.

    `columns` says for each which option it is named by.

    Raises:
        InputError: a split, file or column is missing, a file is damaged, or the Hub does not answer.
    """
    read = _of_files if is_local(source) else _of_the_hub
    parts = [read(source, split, columns) for split in splits]
    values = {column: [value for part in parts for value in part.values[column]] for column in parts[0].values}
    return Columns(values, parts[0].class_names, " and ".join(part.place for part in parts))


def _of_the_hub(source: str, split: str, columns: Mapping[str, str]) -> Columns:
    import datasets

    path, _, config = source.partition(":")
    try:
        rows: Any = datasets.load_dataset(path, config or None, split=split)
    except (*HUB_ERRORS, RuntimeError) as error:
        raise InputError(
            f"source: the split {split!r} of {source!r} cannot be had from the Hub ({reason(error)}), and no local "
            "file has that name: check the names and the network, or read a local copy"
        ) from error
    place = f"the {split} split of {source}"
    _check_columns(place, columns, rows.column_names)
    names = {column: tuple(getattr(rows.features[column], "names", None) or ()) for column in columns}
    values = {column: rows[column][:] for column in columns}
    return Columns(values, {column: classes for column, classes in names.items() if classes}, place)


def _of_files(source: str, split: str, columns: Mapping[str, str]) -> Columns:
    path = _file_of(source, split)
    read = {".parquet": _read_parquet, ".csv": _read_csv, ".jsonl": _read_jsonl}.get(path.suffix)
    if read is None:
        raise InputError(f"source: expected a {', '.join(SUFFIXES)} file, got {path}")
    if not path.is_file():
        raise InputError(f"source: expected the split {split!r} in {path}, there is no such file")
    return Columns(read(path, columns), {}, str(path))


def _file_of(source: str, split: str) -> Path:
    path = Path(source.replace(PATTERN, split)).expanduser()
    if not path.is_dir():
        return path
    files = [path / f"{split}{suffix}" for suffix in SUFFIXES if (path / f"{split}{suffix}").is_file()]
    if len(files) != 1:
        held = ", ".join(sorted(each.name for each in path.iterdir() if each.suffix in SUFFIXES)) or "no data file"
        raise InputError(f"source: expected one file {split}{'|'.join(SUFFIXES)} in {path}, it has {held}")
    return files[0]


def _read_parquet(path: Path, columns: Mapping[str, str]) -> dict[str, list[Any]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            _check_columns(str(path), columns, file.schema_arrow.names)
            refuse_vast(path, len(columns))
            table = file.read(columns=list(columns))
    except (pa.ArrowInvalid, OSError) as error:
        raise InputError(f"{path} is no parquet file, or only a part of one ({error}): copy it again") from error
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
    return {name: _numbers_of(cells) if columns[name] == "label" else cells for name, cells in read.items()}


def _numbers_of(cells: list[str | None]) -> list[Any]:
    """Written labels as the integers or floats that they all are; as they are where one is a name, such as "01"."""
    filled = [cell for cell in cells if cell]
    for kind in (int, float):
        try:
            numbers = {cell: kind(cell) for cell in filled}
        except ValueError:
            continue
        if kind is float or all(str(number) == cell for cell, number in numbers.items()):
            return [numbers[cell] if cell else None for cell in cells]
        return [cell or None for cell in cells]
    return [cell or None for cell in cells]


def _read_jsonl(path: Path, columns: Mapping[str, str]) -> dict[str, list[Any]]:
    rows = list(_objects(path))
    _check_columns(str(path), columns, list(dict.fromkeys(key for row in rows for key in row)))
    return {column: [row.get(column) for row in rows] for column in columns}


def _objects(path: Path) -> Iterator[dict[str, Any]]:
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)  # which takes halves of characters, too
            except (ValueError, RecursionError) as error:  # also of bytes that are not UTF-8
                raise InputError(f"{path} has no JSON object in line {number} ({error}): mend or remove it") from error
            if not isinstance(row, dict):
                raise InputError(f"{path} has a {type(row).__name__}, no JSON object, in line {number}: mend it")
            yield row


def _check_columns(place: str, columns: Mapping[str, str], names: list[str]) -> None:
    if missing := [column for column in columns if column not in names]:
        held = ", ".join(names) or "none at all"
        raise InputError(f"{columns[missing[0]]}: {place} has no column {missing[0]!r}: it has {held}")


@dataclass(frozen=True, kw_only=True)
class LocalCopy:
    """One entry of `tasks.yaml`.

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

    def paths(self, split: str | None = None) -> list[Path]:
        """The files of a split; None: all that are listed."""
        return [self.folder / (name if split is None else name.replace(PATTERN, split)) for name in self.names(split)]

    def names(self, split: str | None = None) -> list[str]:
        """The files of a split as they are listed; None: all."""
        if isinstance(self.files, str):
            return [self.files]
        if split is not None and split not in self.files:
            splits = ", ".join(self.files)
            raise InputError(f"{self.folder / MAPPING}: expected files of the split {split!r}, got {splits}")
        chosen: list[Any] = list(self.files.values()) if split is None else [self.files[split]]
        return [name for value in chosen for name in (value if isinstance(value, list) else [value])]

    def missing(self) -> list[Path]:
        """Files that are listed and not there."""
        return [path for path in self.paths() if PATTERN not in path.name and not path.is_file()]

    def read(self, split: str, columns: Mapping[str, str]) -> Columns:
        """Columns of a split by the data set's own names; `columns` says which option each is named by.

        Raises:
            InputError: a file or column is missing, or a file is damaged.
        """
        here = {self.columns.get(name, name): use for name, use in columns.items()}
        here |= dict.fromkeys(self.where, "where")
        parts = [read_columns(str(path), [split], here) for path in self.paths(split)]
        values = {name: [value for part in parts for value in part.values[name]] for name in here}
        for name, kept in self.where.items():
            rows = [row for row, value in enumerate(values[name]) if value == kept]
            values = {each: [column[row] for row in rows] for each, column in values.items()}
        renamed = {name: values[self.columns.get(name, name)] for name in columns}
        return Columns(renamed, {}, " and ".join(part.place for part in parts))


def local_copies(use: Use, folder: str | Path) -> dict[str, LocalCopy]:
    """The tasks of a use that a folder of local data has, by name.

    Raises:
        InputError: no such folder, no `tasks.yaml` in it, or one that says something else.
    """
    folder = Path(folder).expanduser()
    if not folder.is_dir():
        raise InputError(f"folder: expected a folder of data, {folder} is none")
    path = folder / MAPPING
    if not path.is_file():
        raise InputError(
            f"folder: expected a file {MAPPING} in {folder} that says where its tasks lie, there is none: write one as "
            "docs/tasks.md shows"
        )
    return _entries(path, path.stat().st_mtime_ns).get(use, {})


def local_copy(use: Use, name: str, folder: str | Path) -> LocalCopy:
    """Where a folder of local data has a task.

    Raises:
        InputError: it does not say, or what `local_copies` refuses.
    """
    copies = local_copies(use, folder)
    if name not in copies:
        names = ", ".join(copies) or "none"
        raise InputError(
            f"folder: {Path(folder) / MAPPING} has no {use} {name!r}, it has {names}: add it, or leave the "
            "folder out to read the data set of the Hub"
        )
    return copies[name]


@functools.lru_cache(maxsize=8)
def _entries(path: Path, changed: int) -> dict[str, dict[str, LocalCopy]]:
    """By use and name."""
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise InputError(f"folder: {path} is no YAML that can be read ({' '.join(str(error).split())})") from error
    keys = {each.name for each in fields(LocalCopy)} - {"folder"}
    if not isinstance(content, dict) or set(content) - set(get_args(Use)):
        raise InputError(f"folder: expected {', '.join(get_args(Use))} in {path}, got {beginning(content)}")
    copies: dict[str, dict[str, LocalCopy]] = {}
    for use, entries in content.items():
        copies[use] = {}
        if not isinstance(entries or {}, dict):
            raise InputError(f"folder: {path}: {use}: expected a path for each task, got {beginning(entries)}")
        for name, entry in (entries or {}).items():
            entry: Any = {"files": entry} if isinstance(entry, str) else entry
            files = entry.get("files") if isinstance(entry, dict) else None
            if set(entry if isinstance(entry, dict) else ()) - keys or not isinstance(files, str | dict) or not files:
                raise InputError(
                    f"folder: {path}: {use}: {name}: expected files, and where they differ {', '.join(sorted(keys))}; "
                    f"got {beginning(entry)}"
                )
            copies[use][str(name)] = copy = LocalCopy(folder=path.parent, **entry)
            for file in copy.names():
                if not isinstance(file, str) or Path(file).is_absolute() or ".." in Path(file).parts:
                    raise InputError(
                        f"folder: {path}: {use}: {name}: expected paths within the folder, got {beginning(file)}"
                    )
    return copies
