"""Files of one JSON object a line that only ever grow.

A killed process costs at most its last line, and anybody may read while somebody writes. A last line without its
newline is torn: readers pass over it, the next writer removes it. Any other line that does not parse is refused by name
and number.
"""

# pyright: strict, reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnnecessaryIsInstance=false

import json
import math
import mmap
import os
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, TypeVar, cast

from pydantic_core import from_json

from lit_layers import schema
from lit_layers.errors import refused
from lit_layers.files.durable import sync

T = TypeVar("T")
RESTORE = "restore the file from a copy, or delete that line to go on without it"

try:
    import fcntl
except ImportError:  # no advisory locks on Windows: one writer a file is then the user's care
    fcntl = None


@contextmanager
def locked_for_append(path: Path) -> Generator[BinaryIO, None, None]:
    """Opens a file at its end, its last line whole; other writers on this machine wait meanwhile."""
    with refused(f"cannot write {path}"):
        path.parent.mkdir(parents=True, exist_ok=True)
        is_new = not path.exists()
        # Unbuffered: one line is one write, so that a reader or a kill sees it whole or torn, never interleaved.
        with open(path, "a+b", buffering=0) as file:
            if fcntl is not None:
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
    """Yields each whole line as `kind`."""
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
