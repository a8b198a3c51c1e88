"""Write files and tables so that a kill or a power cut leaves the old or the new content; make temporary folders."""

import contextlib
import json
import os
import re
import secrets
import shutil
import tempfile
import weakref
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lit_layers.errors import InputError, refused

if TYPE_CHECKING:
    import pandas as pd

_OS_ERROR = re.compile(r"\(os error (\d+)\)")


def sync(path: Path) -> None:
    """Flush a file, or the entries of a folder, to the disk and return when that is done."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def on_disk(path: Path) -> list[int]:
    """Return size, times and inode of a file. They differ after a change, even by a copy that keeps the old times."""
    facts = path.stat()
    return [facts.st_size, facts.st_mtime_ns, facts.st_ctime_ns, facts.st_ino]


def draft_path(path: Path) -> Path:
    """Return a random path next to `path`, for a draft that will replace it.

    The name has no process id, because containers that share a folder can have equal process ids.
    """
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}.draft")


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Add the file name `path` to an OSError raised in the context, if the error names no file.

    If the error names a draft of `path` (see `draft_path`), `path` replaces this name. Libraries written in Rust raise
    IO errors of other types. These also become an OSError that names `path`.
    """
    try:
        yield
    except Exception as error:
        if not isinstance(error, OSError):
            number = _OS_ERROR.search(str(error))
            if number is None:
                raise
            raise OSError(int(number[1]), os.strerror(int(number[1])), str(path)) from error
        named = error.filename is not None and not os.path.basename(str(error.filename)).startswith(f".{path.name}.")
        if error.errno is not None and not named:
            error.filename = str(path)
        raise


def write_json(path: Path, content: Any, *, sort_keys: bool = False) -> None:
    """Write a JSON file atomically: readers see the old content or the new."""
    replace_file(path, json.dumps(content, indent=2, default=str, sort_keys=sort_keys) + "\n")


def replace_file(path: Path, content: str | bytes) -> None:
    """Write a file atomically. Several processes may write the same file at the same time."""
    draft = draft_path(path)
    try:
        with naming(path):
            draft.write_bytes(content.encode("utf-8") if isinstance(content, str) else content)
            sync(draft)
            draft.replace(path)
            sync(path.parent)
    finally:
        with contextlib.suppress(OSError):  # ignore a disk that became read-only
            draft.unlink(missing_ok=True)


class Scratch:
    """A temporary folder, which is removed by `remove`, with this object, or when the process ends."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="lit_layers-"))
        self.remove = weakref.finalize(self, shutil.rmtree, self.folder, ignore_errors=True)


# ------------------------------------------------------------------------------------------------ tables


def export(frame: "pd.DataFrame", path: str | Path) -> None:
    """Write a table as Parquet or CSV, atomically.

    Raises:
        InputError: the name ends neither in .parquet nor in .csv, or the file cannot be written.
    """
    path = Path(path)
    if path.suffix not in (".parquet", ".csv"):
        raise InputError(f"expected a file that ends in .parquet or .csv, got {path.name!r}")
    if path.suffix == ".csv":
        content = frame.to_csv(index=False)
    else:
        mixed = {name: "str" for name in frame.columns if frame[name].dtype == object}  # Parquet has no mixed types
        content = frame.astype(mixed).where(frame.notna(), None).to_parquet(index=False)
    with refused(f"cannot write {path}"):
        replace_file(path, content)


def write_files(folder: Path, files: Mapping[str, Any]) -> list[Path]:
    """Write files into a folder, each atomically, and return their paths. The folder is made if necessary.

    A table is written by `export`, a text as it is, and any other content as JSON.

    Raises:
        InputError: a file cannot be written.
    """
    with refused(f"cannot write to {folder}"):
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            if hasattr(content, "to_csv"):
                export(content, folder / name)
            elif isinstance(content, str):
                replace_file(folder / name, content)
            else:
                write_json(folder / name, content)
    return [folder / name for name in files]
