"""Local text: `.txt`, `.jsonl` and `.parquet` files, or a folder of them."""

import hashlib
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lit_layers.data.corpora import SPLITS, Document, Documents, Source
from lit_layers.errors import InputError

SUFFIXES = (".txt", ".jsonl", ".parquet")
SEPARATOR = "<|endoftext|>"
LONGEST = 2**20  # bytes of a .txt document; a longer one is cut at a line end
OWN_SPLIT = re.compile(r"(train|training|validation|valid|val|dev|test)(?![a-z])", re.IGNORECASE)
SPLIT_NAMES = {"train": "train", "training": "train", "test": "test"}  # every other name is validation


class LocalText(Source):
    """The text files below a path, in the order of their names."""

    def __init__(self, path: Path, files: list[tuple[Path, str | None]], *, column: str, separator: str):
        self.path, self.files, self.column, self.separator = path, files, column, separator

    @classmethod
    def open(
        cls, path: Path, *, column: str | None = None, separator: str | None = None, validation: float | None = None
    ) -> "LocalText":
        """Lists the files; whether they are a train and a validation split can be seen from their names."""
        found = [path] if path.is_file() else sorted(p for p in path.rglob("*") if _is_text(p.relative_to(path)))
        found = [file for file in found if file.is_file() and file.suffix in SUFFIXES]
        if not found:
            raise InputError(f"{path} is or holds no {', '.join(SUFFIXES)} file: name another source")
        kinds = {file.suffix for file in found}
        if separator is not None and ".txt" not in kinds:
            raise InputError(f"separator ({separator!r}) is for .txt files and {path} has none: leave it out")
        if column is not None and kinds == {".txt"}:
            raise InputError(f"column ({column!r}) is for .parquet and .jsonl files and {path} has none: leave it out")
        own = _own_splits(path, found)
        if own and validation is not None:
            first = found[own.index("validation")]
            raise InputError(
                f"{path} brings its own validation split ({first.name}): leave validation out, or name one file"
            )
        files = list(zip(found, own or [None] * len(found), strict=True))
        source = cls(path, files, column=column or "text", separator=SEPARATOR if separator is None else separator)
        source.splits = SPLITS if own else (None,)
        source.validation = None if own else validation or 0.01
        return source

    def describe(self) -> dict[str, Any]:
        stats = [(file, file.stat()) for file, _ in self.files]
        names = (os.path.relpath(file, self.path) for file, _ in self.files)
        listing = "\n".join(f"{name} {s.st_size} {s.st_mtime_ns}" for name, (_, s) in zip(names, stats, strict=True))
        return {
            "kind": "files",
            "path": str(self.path.resolve()),
            "num_files": len(self.files),
            "bytes": self.size(),
            "fingerprint": hashlib.sha256(listing.encode()).hexdigest()[:16],
            "column": self.column,
            "separator": self.separator,
            "validation": self.validation,
        }

    def size(self) -> int:
        return sum(file.stat().st_size for file, _ in self.files)

    def read(self, split: str | None, position: Any = None) -> "_LocalDocuments":
        return _LocalDocuments(self, [file for file, own in self.files if own == split], position or [0, 0])


class _LocalDocuments(Documents):
    """`position` is [index of the file, place in it]: a byte offset, or a row of a parquet file."""

    def __init__(self, source: LocalText, files: list[Path], position: list[int]):
        self.source, self.files, self.position = source, files, position

    def __iter__(self) -> Iterator[Document]:
        first, place = self.position
        for index in range(first, len(self.files)):
            file = self.files[index]
            for start, text, after, share in self._read(file, place if index == first else 0):
                self.position, self.fraction = [index, after], (index + share) / len(self.files)
                yield Document(f"{file}:{start}", text)

    def _read(self, file: Path, place: int) -> Iterator[tuple[int, str, int, float]]:
        """Yields (where the document starts, its text, where the next one starts, share of the file read)."""
        if file.suffix == ".txt":
            return _read_txt(file, place, self.source.separator)
        if file.suffix == ".jsonl":
            return _read_jsonl(file, place, self.source.column)
        return _read_parquet(file, place, self.source.column)


def _read_txt(file: Path, place: int, separator: str) -> Iterator[tuple[int, str, int, float]]:
    total, mark = max(file.stat().st_size, 1), separator.encode()
    with file.open("rb") as lines:
        lines.seek(place)
        start, size, held = place, 0, []
        for line in lines:
            place += len(line)
            ends = line.strip() == mark
            if not ends:
                held.append(line)
                size += len(line)
            if ends or size >= LONGEST:
                yield start, _decode(held, file, start), place, place / total
                start, size, held = place, 0, []
        if held:
            yield start, _decode(held, file, start), place, 1.0


def _decode(lines: list[bytes], file: Path, start: int) -> str:
    try:
        return b"".join(lines).decode("utf-8").strip("\r\n")
    except UnicodeDecodeError as error:
        raise InputError(
            f"{file} is not UTF-8 (byte {start + error.start} is {error.object[error.start]:#x}): convert it first, "
            "for instance with iconv"
        ) from error


def _read_jsonl(file: Path, place: int, column: str) -> Iterator[tuple[int, str, int, float]]:
    total = max(file.stat().st_size, 1)
    with file.open("rb") as lines:
        lines.seek(place)
        for line in lines:
            start, place = place, place + len(line)
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise InputError(
                    f"{file} has no JSON object at byte {start} ({error}): mend or remove that line"
                ) from error
            if not isinstance(row, dict) or not isinstance(row.get(column), str):
                keys = ", ".join(sorted(row)) if isinstance(row, dict) else type(row).__name__
                raise InputError(
                    f"{file} has no text {column!r} at byte {start} (found: {keys}): name the column of the text"
                )
            text = row[column].encode("utf-8", "replace").decode("utf-8")  # JSON can hold half a surrogate pair
            yield start, text, place, place / total


def _read_parquet(file: Path, place: int, column: str) -> Iterator[tuple[int, str, int, float]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.ParquetFile(file)
    except pa.ArrowInvalid as error:
        raise InputError(f"{file} is no parquet file, or only a part of one ({error}): copy it again") from error
    with table:
        schema = table.schema_arrow
        if column not in schema.names:
            raise InputError(
                f"{file} has no column {column!r} (it has {', '.join(schema.names)}): name the column of the text"
            )
        if not (pa.types.is_string(schema.field(column).type) or pa.types.is_large_string(schema.field(column).type)):
            raise InputError(
                f"column {column!r} of {file} holds {schema.field(column).type}, not text: name another column"
            )
        total, row = max(table.metadata.num_rows, 1), 0
        for group in range(table.num_row_groups):
            rows = table.metadata.row_group(group).num_rows
            if row + rows <= place:
                row += rows
                continue
            try:
                for batch in table.iter_batches(batch_size=256, row_groups=[group], columns=[column]):
                    for text in batch.column(0).to_pylist():
                        row += 1
                        if row > place:
                            yield row - 1, text or "", row, row / total
            except (pa.ArrowInvalid, OSError) as error:
                raise InputError(f"{file} cannot be read at row {row} ({error}): copy it again") from error


def _is_text(path: Path) -> bool:
    return path.suffix in SUFFIXES and not any(part.startswith(".") for part in path.parts)


def _own_splits(root: Path, files: list[Path]) -> list[str] | None:
    """The split of each file where all are named or kept in folders named after one, with both needed ones there."""
    if root.is_file():
        return None
    splits = [_split_of(file.relative_to(root)) for file in files]
    return [s or "" for s in splits] if None not in splits and {"train", "validation"} <= set(splits) else None


def _split_of(path: Path) -> str | None:
    for part in path.parts:
        if named := OWN_SPLIT.match(part):
            return SPLIT_NAMES.get(named[1].lower(), "validation")
    return None
