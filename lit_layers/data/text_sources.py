"""Text corpora as streams of documents in a fixed order: the standard library, local files, the Hub."""

import hashlib
import itertools
import os
import platform
import re
import runpy
import sysconfig
import tokenize
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from lit_layers.errors import InputError
from lit_layers.files.hub import hub_errors
from lit_layers.identity import sha16
from lit_layers.tasks.task_files import json_objects, open_parquet

# The splits in the order in which they are read. Validation comes first, so that training documents that repeat a
# validation document can be dropped.
SPLITS = ("validation", "train")
CONVERTED = "refs/convert/parquet"
ALIASES = {
    "openwebtext": f"Skylion007/openwebtext@{CONVERTED}:plain_text",
    "wikitext": "Salesforce/wikitext:wikitext-103-raw-v1",
}


class Source(ABC):
    """A corpus that can be read in a fixed order.

    `splits` is `("validation", "train")` if the source has its own splits, and `(None,)` if it is one stream. In a
    stream, a hash of each document's text decides whether the document is held out. `validation` is the share held out.
    Equal documents fall into the same split on every machine.
    """

    splits: tuple[str | None, ...] = (None,)
    validation: float | None = None
    revision: str | None = None  # commit on the Hub, set by `pin` so that one preparation reads one commit

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """Return all options and file facts that decide which documents are read, as values that JSON can hold.

        The documents are not opened and the network is not used.
        """

    @abstractmethod
    def read(self, split: str | None) -> Iterator[str]:
        """Yield the texts of a split."""

    def pin(self) -> None:  # noqa: B027 - most sources have nothing to fix
        """Choose the commit to read if the source is on the Hub, where it may change."""


def open_source(
    spec: str, *, column: str | None = None, separator: str | None = None, validation: float | None = None
) -> Source:
    """Return the corpus that `spec` names.

    `spec` is `python`, `openwebtext`, `wikitext`, a path, or `ORG/NAME[@REVISION][:CONFIG]`.

    Raises:
        InputError: `spec` is none of these, or `validation` is not between 0 and 1.
    """
    if validation is not None and not 0 < validation < 1:
        raise InputError(f"validation must lie between 0 and 1 (a share of the documents), not {validation}")
    if spec != "python" and spec and Path(spec).exists():  # Path('') is the working directory, which exists
        return LocalText(Path(spec), column=column, separator=separator, validation=validation)
    if spec == "python":
        return PythonSources(validation=validation or 0.1)
    name = ALIASES.get(spec, spec)
    if not re.fullmatch(r"[\w.-]+/[\w.-]+(@[\w./-]+)?(:[\w.-]+)?", name) or Path(name).suffix in SUFFIXES:
        names = ", ".join(["python", *ALIASES, "an existing path"])
        raise InputError(f"no corpus {spec!r}: expected {names}, or ORG/NAME[@REVISION][:CONFIG] of the Hub")
    return HubText(name, column=column or "text", validation=validation)


def digest(text: str) -> int:
    """Return a 64-bit hash of a document's text."""
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8"), digest_size=8).digest(), "little")


def is_held_out(value: int, share: float) -> bool:
    """Return whether a document with this 64-bit hash belongs to validation, which is a `share` of all documents."""
    return value < share * 2**64


# Folders of the standard library that are not read: installed packages, tests, data tables, and packages that Linux
# distributions often omit.
LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idle_test", "idlelib", "lib2to3", "encodings"}
LEFT_OUT |= {"turtledemo", "pydoc_data"}  # `documents` reads the topics in pydoc_data one by one
# Files whose names start with this are not read: the build of Python writes them, so they differ between machines.
GENERATED = "_sysconfigdata"
TOPICS = Path("pydoc_data/topics.py")


class PythonSources(Source):
    """The standard library of Python: source files and the topics of `pydoc_data.topics`.

    A hash of the path decides the split of a document.
    """

    splits = SPLITS

    def __init__(self, *, validation: float, root: Path | None = None):
        self.validation = validation
        self.root = Path(root or sysconfig.get_paths()["stdlib"])

    @cached_property
    def files(self) -> list[Path]:
        """Return the sorted paths of the source files, relative to the root."""
        files = []
        for folder, subfolders, names in os.walk(self.root):
            subfolders[:] = [name for name in subfolders if name not in LEFT_OUT and not name.startswith("config-")]
            chosen = [name for name in names if name.endswith(".py") and not name.startswith(GENERATED)]
            files += [(Path(folder) / name).relative_to(self.root) for name in chosen]
        files.sort()
        return files

    def describe(self) -> dict[str, Any]:
        files = [*self.files, TOPICS] if (self.root / TOPICS).is_file() else self.files
        listing = [f"{path.as_posix()} {(self.root / path).stat().st_size}" for path in files]
        return {
            "kind": "python",
            "python": platform.python_version(),
            "fingerprint": sha16("\n".join(listing)),
            "validation": self.validation,
        }

    def read(self, split: str | None) -> Iterator[str]:
        return (text for _, text in self.documents(split))

    def documents(self, split: str | None) -> Iterator[tuple[str, str]]:
        """Yield the path and the text of each document of a split."""
        path = self.root / TOPICS
        texts = runpy.run_path(str(path))["topics"] if path.is_file() else {}
        topics = {f"{TOPICS.with_suffix('')}/{name}": texts[name] for name in sorted(texts)}
        names = [*(path.as_posix() for path in self.files), *topics]
        for name in names:
            if (split == "validation") == is_held_out(digest(name), self.validation or 0):
                if name not in topics:
                    with tokenize.open(self.root / name) as file:  # in the encoding that the file declares
                        topics[name] = file.read()
                yield name, topics.pop(name)


_AGAIN = "check the name and the network, then run again"
TITLE = re.compile(r" = [^=].* = \n")  # first line of an article in wikitext, not of a section
LINE_ROWS = ("Salesforce/wikitext",)  # data sets in which each row is one line of a document


class HubText(Source):
    """A data set of the Hub, `ORG/NAME[@REVISION][:CONFIG]`, with its own validation split if it has one.

    `datasets` cannot load data sets that need a loading script. The Hub has a parquet copy of many of them at the
    revision refs/convert/parquet, where each configuration is a folder.
    """

    def __init__(self, name: str, *, column: str = "text", validation: float | None = None):
        repo, _, self.config = name.partition(":")
        self.name, _, self.named_revision = repo.partition("@")
        self.column, self.share = column, validation

    def describe(self) -> dict[str, Any]:
        return {
            "kind": "hub",
            "name": self.name,
            "config": self.config or None,
            "column": self.column,
            "validation": self.share,
            **({"revision": self.named_revision} if self.named_revision else {}),
        }

    def pin(self) -> None:
        """Choose the commit of the named revision, or the newest commit, and find out which splits the data set has."""
        from huggingface_hub import HfApi

        absent = f"the data set {self.name!r} is no local path and cannot be had from the Hub"
        with hub_errors(absent, f"{_AGAIN}; of one that is a program name the revision @{CONVERTED}"):
            info = HfApi().dataset_info(self.name, revision=self.named_revision or None)
            self.revision = str(info.sha)
            splits = set(self._open(None))
        if any("/partial" in file.rfilename for file in info.siblings or ()):
            raise InputError(f"the Hub has converted only a part of {self.name} to parquet: name a local copy")
        has_both = {"train", "validation"} <= splits
        if has_both and self.share is not None:
            raise InputError(f"{self.name} brings its own validation split: leave validation out")
        if "train" not in splits:
            raise InputError(f"{self.name} has no split 'train' (it has {', '.join(sorted(splits))}): name another one")
        self.splits = SPLITS if has_both else (None,)
        self.validation = None if has_both else self.share or 0.01

    def read(self, split: str | None) -> Iterator[str]:
        lines: list[str] = []
        for text in self._rows(split or "train"):
            if lines and (self.name not in LINE_ROWS or TITLE.fullmatch(text)):
                yield "".join(lines)
                lines = []
            lines.append(text)
        if lines:
            yield "".join(lines)

    def _rows(self, split: str) -> Iterator[str]:
        with hub_errors(f"the data set {self.name!r} cannot be had from the Hub", _AGAIN):
            rows = iter(self._open(split))
        for count in itertools.count():
            with hub_errors(f"{self.name} broke off after {count} rows", _AGAIN):
                row = next(rows, None)
            if row is None:
                return
            yield _text_of(row, self.column, self.name)

    def _open(self, split: str | None) -> Any:
        import datasets  # the import takes seconds, and local corpora do not need it

        options: Any = {"data_dir" if self.named_revision == CONVERTED else "name": self.config or None}
        return datasets.load_dataset(self.name, split=split, revision=self.revision, streaming=True, **options)


SUFFIXES = (".txt", ".jsonl", ".parquet")
SEPARATOR = "<|endoftext|>"
LONGEST = 2**20  # maximum bytes of a .txt document; a longer document is split at a line end
SPLIT_NAME = re.compile(
    r"(?:(?P<train>train(?:ing)?)|(?P<test>test)|(?P<validation>valid(?:ation)?|val|dev))(?![a-z])", re.IGNORECASE
)


class LocalText(Source):
    """The text files at or below a path, sorted by name.

    File or folder names such as `train` and `dev` define splits. These splits are used only if every file belongs to
    one, and if there are both training files and validation files.
    """

    def __init__(
        self, path: Path, *, column: str | None = None, separator: str | None = None, validation: float | None = None
    ):
        paths = [path] if path.is_file() else sorted(path.rglob("*"))
        shown = [p for p in paths if p == path or not any(x.startswith(".") for x in p.relative_to(path).parts)]
        files = [file for file in shown if file.is_file() and file.suffix in SUFFIXES]
        if not files:
            raise InputError(f"{path} is or holds no {', '.join(SUFFIXES)} file: name another source")
        splits = [_split_of(file.relative_to(path)) for file in files]
        has_splits = path.is_dir() and None not in splits and {"train", "validation"} <= set(splits)
        if has_splits and validation is not None:
            first = files[splits.index("validation")]
            raise InputError(f"{path} brings its own validation split ({first.name}): leave validation out")
        self.path, self.column, self.separator = path, column or "text", SEPARATOR if separator is None else separator
        self.files = list(zip(files, splits if has_splits else [None] * len(files), strict=True))
        self.splits = SPLITS if has_splits else (None,)
        self.validation = None if has_splits else validation or 0.01

    def describe(self) -> dict[str, Any]:
        stats = [(os.path.relpath(file, self.path), file.stat()) for file, _ in self.files]
        listing = "\n".join(f"{name} {facts.st_size} {facts.st_mtime_ns}" for name, facts in stats)
        return {
            "kind": "files",
            "path": str(self.path.resolve()),
            "num_files": len(self.files),
            "bytes": sum(facts.st_size for _, facts in stats),
            "fingerprint": sha16(listing),
            "column": self.column,
            "separator": self.separator,
            "validation": self.validation,
        }

    def read(self, split: str | None) -> Iterator[str]:
        readers = {".txt": self._read_txt, ".jsonl": self._read_jsonl, ".parquet": self._read_parquet}
        for file in (file for file, each in self.files if each == split):
            yield from readers[file.suffix](file)

    def _read_txt(self, file: Path) -> Iterator[str]:
        with file.open("rb") as lines:
            start, size, document = 0, 0, []
            for line in lines:
                ends = line.strip() == self.separator.encode()
                document += [] if ends else [line]
                size += len(line)
                if ends or size >= LONGEST:
                    yield _decoded(document, file, start)
                    start, size, document = start + size, 0, []
            if document:
                yield _decoded(document, file, start)

    def _read_jsonl(self, file: Path) -> Iterator[str]:
        for row in json_objects(file):
            # Replace lone surrogates, which a JSON file can contain, by "?", because UTF-8 cannot encode them.
            yield _text_of(row, self.column, str(file)).encode("utf-8", "replace").decode()

    def _read_parquet(self, file: Path) -> Iterator[str]:
        with open_parquet(file, {self.column: "column"}) as table:
            for batch in table.iter_batches(256, columns=[self.column]):
                yield from (_text_of(row, self.column, str(file)) for row in batch.to_pylist())


def _text_of(row: Mapping[str, Any], column: str, origin: str) -> str:
    if column not in row:
        raise InputError(f"column: {origin} has no column {column!r}: it has {', '.join(row)}")
    if not isinstance(row[column], str | None):
        raise InputError(f"column {column!r} of {origin} holds {type(row[column]).__name__}, not text: name another")
    return row[column] or ""


def _decoded(lines: list[bytes], file: Path, start: int) -> str:
    try:
        return b"".join(lines).decode("utf-8" if start else "utf-8-sig").strip("\r\n")
    except UnicodeDecodeError as error:
        where = f"byte {start + error.start} is {error.object[error.start]:#x}"
        raise InputError(f"{file} is not UTF-8 ({where}): convert it first") from error


def _split_of(path: Path) -> str | None:
    return next((match.lastgroup for part in path.parts if (match := SPLIT_NAME.match(part))), None)
