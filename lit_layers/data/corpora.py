"""Where text comes from: documents in a fixed order that can be taken up again at any of them."""

import contextlib
import hashlib
import json
import os
import platform
import re
import runpy
import sysconfig
import tokenize
from abc import ABC, abstractmethod
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from lit_layers.downloads import HUB_ERRORS, reason
from lit_layers.errors import InputError

SPLITS = ("validation", "train")  # validation first: a training document that repeats one of it can then be dropped


class Document(NamedTuple):
    id: str
    text: str


class Documents(ABC):
    """A walk over documents. `position` is plain JSON; a walk begun at it gives what follows the last document."""

    position: Any = None
    fraction: float | None = None  # share of the source read so far, where it is known

    @abstractmethod
    def __iter__(self) -> Iterator[Document]: ...


class Source(ABC):
    """A corpus that can be read in order.

    `splits` is `("validation", "train")` where the source says which document belongs where, and `(None,)` where it
    is one stream, of which the share `validation` is held out by a hash of each document's text. Equal documents then
    fall into one split, on every machine.
    """

    splits: tuple[str | None, ...] = (None,)
    validation: float | None = None
    revision: str | None = None  # the commit of a source that has one, fixed for the whole preparation

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """All that decides which documents come, as JSON: read without opening the documents or the network."""

    @abstractmethod
    def read(self, split: str | None, position: Any = None) -> Documents:
        """The documents of a split, from `position` on."""

    def size(self) -> int | None:
        """Bytes on disk, where that is known."""
        return None

    def pin(self, revision: str | None) -> None:  # noqa: B027 - most sources have nothing to fix
        """Fixes a source that may change to `revision`, or to what it is now."""


def digest(text: str) -> int:
    """64-bit content hash of a document."""
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8"), digest_size=8).digest(), "little")


def in_share(value: int, share: float) -> bool:
    """Whether a 64-bit hash falls into the first `share` of the range."""
    return value < share * 2**64


# Installed packages, tests, tables, and parts that distributions often leave out.
LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idle_test", "idlelib", "lib2to3", "encodings"}
LEFT_OUT |= {"turtledemo", "pydoc_data"}  # the topics of the latter are read one by one
MACHINE_MADE = "_sysconfigdata"  # written when Python was built: another file on every machine
TOPICS = Path("pydoc_data/topics.py")
ENOUGH = 1_000_000  # bytes


class PythonSources(Source):
    """Documents are files, and single topics of `pydoc_data.topics`; the split goes by a hash of the path."""

    splits = SPLITS

    def __init__(self, *, validation: float, root: Path | None = None):
        self.validation = validation
        self.root = Path(root or sysconfig.get_paths()["stdlib"])

    @cached_property
    def files(self) -> list[Path]:
        """Paths below the root, sorted; raises where this Python comes without sources."""
        files = []
        for folder, subfolders, names in os.walk(self.root):
            subfolders[:] = [name for name in subfolders if name not in LEFT_OUT and not name.startswith("config-")]
            kept = [name for name in names if name.endswith(".py") and not name.startswith(MACHINE_MADE)]
            files += [(Path(folder) / name).relative_to(self.root) for name in kept]
        files.sort()
        size = sum((self.root / path).stat().st_size for path in files)
        if size < ENOUGH:
            raise InputError(
                f"this Python ({self.root}) carries only {size} bytes of its standard library's source, "
                "too little for the corpus 'python': name another corpus, or use a Python with sources"
            )
        return files

    @cached_property
    def topics(self) -> dict[str, str]:
        """Name -> text of the help topics, where they are installed."""
        path = self.root / TOPICS
        return runpy.run_path(str(path))["topics"] if path.is_file() else {}

    def describe(self) -> dict[str, Any]:
        files = [*self.files, TOPICS] if (self.root / TOPICS).is_file() else self.files
        listing = [f"{path.as_posix()} {(self.root / path).stat().st_size}" for path in files]
        return {
            "kind": "python",
            "python": platform.python_version(),
            "fingerprint": hashlib.sha256("\n".join(listing).encode()).hexdigest()[:16],
            "validation": self.validation,
        }

    def size(self) -> int:
        return sum((self.root / path).stat().st_size for path in self.files)

    def read(self, split: str | None, position: Any = None) -> "_Files":
        return _Files(self, split, position or 0)


class _Files(Documents):
    def __init__(self, source: PythonSources, split: str | None, position: int):
        self.source, self.split, self.position = source, split, position

    def __iter__(self) -> Iterator[Document]:
        names = [path.as_posix() for path in self.source.files]
        topics = self.source.topics
        names += [f"pydoc_data/topics/{name}" for name in sorted(topics)]
        for index in range(self.position, len(names)):
            name = names[index]
            self.position, self.fraction = index + 1, (index + 1) / len(names)
            if (self.split == "validation") == in_share(digest(name), self.source.validation or 0):
                yield Document(name, topics[Path(name).name] if index >= len(self.source.files) else self._file(name))

    def _file(self, name: str) -> str:
        with tokenize.open(self.source.root / name) as file:  # minds the encoding a file declares
            return file.read()


TITLE = re.compile(r" = [^=].* = \n")  # the first line of an article; " = = Section = = \n" is none
BY_LINE = ("Salesforce/wikitext",)  # a row is a line there, and a document many rows


class HubText(Source):
    """A data set as `ORG/NAME` or `ORG/NAME:CONFIG`. Its own validation split is used where it has one."""

    def __init__(self, name: str, *, column: str = "text", validation: float | None = None):
        self.name, _, self.config = name.partition(":")
        self.column, self.asked = column, validation

    def describe(self) -> dict[str, Any]:
        return {
            "kind": "hub",
            "name": self.name,
            "config": self.config or None,
            "column": self.column,
            "validation": self.asked,
        }

    def pin(self, revision: str | None) -> None:
        """Opens the data set at `revision`, or at its newest commit."""
        from huggingface_hub import HfApi

        with _reaching(f"the data set {self.name!r} is no local path and cannot be had from the Hub"):
            self.revision = revision or HfApi().dataset_info(self.name).sha
            splits = set(self._open(None))
        has_both = {"train", "validation"} <= splits
        if has_both and self.asked is not None:
            raise InputError(f"{self.name} brings its own validation split: leave validation out")
        if "train" not in splits:
            raise InputError(f"{self.name} has no split 'train' (it has {', '.join(sorted(splits))}): name another one")
        self.splits = SPLITS if has_both else (None,)
        self.validation = None if has_both else self.asked or 0.01

    def read(self, split: str | None, position: Any = None) -> "_Rows":
        with _reaching(f"the data set {self.name!r} cannot be had from the Hub"):
            stream = self._open(split or "train")
        kind = _Articles if self.name in BY_LINE else _Rows
        return kind(self, stream, position or {"rows": 0, "stream": None})

    def _open(self, split: str | None) -> Any:
        import datasets

        return datasets.load_dataset(
            self.name, self.config or None, split=split, revision=self.revision, streaming=True
        )


@contextlib.contextmanager
def _reaching(what: str) -> Iterator[None]:
    """Turns the many ways in which the Hub can fail into one sentence."""
    try:
        yield
    except InputError:
        raise
    except HUB_ERRORS as error:
        raise InputError(f"{what} ({reason(error)}): check the name and the network, then run again") from error


class _Rows(Documents):
    """`position` holds the number of rows read and what `datasets` needs to go on from there."""

    def __init__(self, source: HubText, stream: Any, position: dict[str, Any]):
        self.source, self.stream = source, stream
        if position["stream"] is not None:
            stream.load_state_dict(position["stream"])
        self.count = position["rows"]

    @property
    def position(self) -> dict[str, Any]:
        return {"rows": self.count, "stream": self.stream.state_dict()}

    def rows(self) -> Iterator[str]:
        name, column = self.source.name, self.source.column
        rows = iter(self.stream)
        while True:
            with _reaching(f"{name} broke off after {self.count} rows"):
                row = next(rows, None)
            if row is None:
                return
            if column not in row:
                raise InputError(
                    f"{name} has no column {column!r} (it has {', '.join(row)}): name the column of the text"
                )
            if not isinstance(row[column], str | None):
                kind = type(row[column]).__name__
                raise InputError(f"column {column!r} of {name} holds {kind}, not text: name another column")
            self.count += 1
            yield row[column] or ""

    def __iter__(self) -> Iterator[Document]:
        for text in self.rows():
            yield Document(f"{self.source.name}:{self.count - 1}", text)


class _Articles(_Rows):
    """Rows that are lines, gathered into articles; the title line that ended the last one waits in `held`."""

    def __init__(self, source: HubText, stream: Any, position: dict[str, Any]):
        super().__init__(source, stream, position)
        self.held: list[str] = list(position.get("held", []))

    @property
    def position(self) -> dict[str, Any]:
        return {**super().position, "held": self.held}

    def __iter__(self) -> Iterator[Document]:
        lines, self.held = self.held, []
        for line in self.rows():
            if TITLE.fullmatch(line) and lines:
                self.held = [line]
                yield Document(f"{self.source.name}:{self.count - 1}", "".join(lines))
                lines, self.held = self.held, []
            else:
                lines.append(line)
        if lines:
            yield Document(f"{self.source.name}:{self.count}", "".join(lines))


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
        paths = [path] if path.is_file() else sorted(p for p in path.rglob("*") if _is_text(p.relative_to(path)))
        files = [file for file in paths if file.is_file() and file.suffix in SUFFIXES]
        if not files:
            raise InputError(f"{path} is or holds no {', '.join(SUFFIXES)} file: name another source")
        kinds = {file.suffix for file in files}
        if separator is not None and ".txt" not in kinds:
            raise InputError(f"separator ({separator!r}) is for .txt files and {path} has none: leave it out")
        if column is not None and kinds == {".txt"}:
            raise InputError(f"column ({column!r}) is for .parquet and .jsonl files and {path} has none: leave it out")
        splits = _splits_by_name(path, files)
        if splits and validation is not None:
            first = files[splits.index("validation")]
            raise InputError(
                f"{path} brings its own validation split ({first.name}): leave validation out, or name one file"
            )
        named = list(zip(files, splits or [None] * len(files), strict=True))
        source = cls(path, named, column=column or "text", separator=SEPARATOR if separator is None else separator)
        source.splits = SPLITS if splits else (None,)
        source.validation = None if splits else validation or 0.01
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
        return _LocalDocuments(self, [file for file, part in self.files if part == split], position or [0, 0])


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


def _splits_by_name(root: Path, files: list[Path]) -> list[str] | None:
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
