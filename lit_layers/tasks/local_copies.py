"""Local copies of data sets: where a folder of data has each task, by the file `tasks.yaml` in it."""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, get_args

from lit_layers.errors import InputError
from lit_layers.tasks.catalogue import Use
from lit_layers.tasks.files import PATTERN, Columns, read_columns

MAPPING = "tasks.yaml"


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
            known = ", ".join(self.files)
            raise InputError(f"{self.folder / MAPPING}: expected files of the split {split!r}, got {known}")
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
        wanted = here | dict.fromkeys(self.where, "where")
        parts = [read_columns(str(path), [split], wanted, None) for path in self.paths(split)]
        values = {name: [value for part in parts for value in part.values[name]] for name in wanted}
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
        known = ", ".join(copies) or "none"
        raise InputError(
            f"folder: {Path(folder) / MAPPING} has no {use} {name!r}, it has {known}: add it, or leave the "
            "folder out to read the data set of the Hub"
        )
    return copies[name]


@functools.lru_cache(maxsize=8)
def _entries(path: Path, changed: int) -> dict[str, dict[str, LocalCopy]]:
    """By use and name."""
    import yaml

    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise InputError(f"folder: {path} is no YAML that can be read ({' '.join(str(error).split())})") from error
    known = {each.name for each in fields(LocalCopy)} - {"folder"}
    if not isinstance(content, dict) or set(content) - set(get_args(Use)):
        raise InputError(f"folder: expected {', '.join(get_args(Use))} in {path}, got {str(content)[:80]}")
    found: dict[str, dict[str, LocalCopy]] = {}
    for use, entries in content.items():
        found[use] = {}
        if not isinstance(entries or {}, dict):
            raise InputError(f"folder: {path}: {use}: expected a path for each task, got {entries!r}")
        for name, entry in (entries or {}).items():
            entry: Any = {"files": entry} if isinstance(entry, str) else entry
            files = entry.get("files") if isinstance(entry, dict) else None
            if set(entry if isinstance(entry, dict) else ()) - known or not isinstance(files, str | dict) or not files:
                raise InputError(
                    f"folder: {path}: {use}: {name}: expected files, and where they differ {', '.join(sorted(known))}; "
                    f"got {entry!r}"
                )
            found[use][str(name)] = copy = LocalCopy(folder=path.parent, **entry)
            for file in copy.names():
                if not isinstance(file, str) or Path(file).is_absolute() or ".." in Path(file).parts:
                    raise InputError(f"folder: {path}: {use}: {name}: expected paths within the folder, got {file!r}")
    return found
