"""Tokens on disk: flat binary files that anything can read, and a header that says what is in them.

train.bin  val.bin      token ids, uint16 where the vocabulary allows it, else uint32; little-endian, nothing else
train.idx  val.idx      int64: where in the .bin file each document starts; a document ends with the end of text
tokenizer/              as `AutoTokenizer` opens it
meta.json               the header
"""

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lit_layers import schema
from lit_layers.errors import InputError
from lit_layers.files.durable import sync, write_json

FORMAT, VERSION = "lit_layers token shards", 1
HEADER, TOKENIZER = "meta.json", "tokenizer"
STEMS = {"train": "train", "validation": "val"}
STARTS = np.dtype("<i8")
_AGAIN = "remove the folder and run `lit-layers prepare` again"


def token_dtype(vocab_size: int) -> np.dtype:
    """The narrowest unsigned type that holds every id."""
    return np.dtype("<u2" if vocab_size <= 2**16 else "<u4")


@dataclass(frozen=True)
class TokenShards:
    """A folder of prepared tokens. Files are mapped when asked for, so an object is small and can be sent anywhere."""

    folder: Path
    header: dict[str, Any]

    @classmethod
    def open(cls, folder: str | Path) -> "TokenShards":
        """Open a prepared folder and check its sizes.

        Raises:
            InputError: for a folder that is missing, of another version, or damaged.
        """
        folder = Path(folder)
        shards = cls(folder, _read_header(folder))
        for name, expected in shards.header["files"].items():
            _check(folder / name, expected["bytes"])
        return shards

    def tokens(self, split: str) -> np.ndarray:
        """All token ids of a split, memory-mapped."""
        return np.memmap(self._path(split, ".bin"), dtype=np.dtype(self.header["dtype"]), mode="r")

    def document_starts(self, split: str) -> np.ndarray:
        """Index of each document's first token."""
        return np.memmap(self._path(split, ".idx"), dtype=STARTS, mode="r")

    def num_tokens(self, split: str) -> int:
        return self.header["splits"][self._checked(split)]["tokens"]

    def num_documents(self, split: str) -> int:
        return self.header["splits"][self._checked(split)]["documents"]

    @property
    def vocab_size(self) -> int:
        return self.header["vocab_size"]

    @property
    def end_of_text_id(self) -> int:
        return self.header["end_of_text_id"]

    @property
    def tokenizer_path(self) -> Path:
        return self.folder / TOKENIZER

    @property
    def tokenizer_hash(self) -> str:
        return self.header["tokenizer"]["hash"]

    @property
    def corpus_hash(self) -> str:
        return self.header["corpus_hash"]

    @property
    def checksum(self) -> str:
        """SHA-256 over the checksums of all files: equal folders have equal ones."""
        return self.header["checksum"]

    def _checked(self, split: str) -> str:
        if split not in STEMS:
            raise InputError(f"expected the split train or validation, not {split!r}")
        return split

    def _path(self, split: str, suffix: str) -> Path:
        return self.folder / (STEMS[self._checked(split)] + suffix)


def finish(draft: Path, folder: Path, header: dict[str, Any]) -> None:
    """Write the header of the files in a folder, which then gets its name."""
    paths = [path for path in sorted(draft.rglob("*")) if path.is_file() and path.name != HEADER]
    files = {path.relative_to(draft).as_posix(): _measure(path) for path in paths}
    listing = "\n".join(f"{name} {entry['sha256']}" for name, entry in sorted(files.items()))
    header = {**header, "files": files, "checksum": hashlib.sha256(listing.encode()).hexdigest()}
    write_json(draft / HEADER, header, sort_keys=True)
    for path in [*paths, draft / TOKENIZER, draft]:
        sync(path)
    draft.rename(folder)
    sync(folder.parent)


def _read_header(folder: Path) -> dict[str, Any]:
    path = folder / HEADER
    if not path.is_file():
        raise InputError(f"{folder} holds no token shards ({HEADER} is missing): make them with `lit-layers prepare`")
    header = schema.read(path, dict[str, Any], _AGAIN)
    if (header.get("format"), header.get("version")) != (FORMAT, VERSION):
        raise InputError(f"{path}: expected {FORMAT} of version {VERSION}: {_AGAIN}")
    return header


def _check(path: Path, expected: int) -> None:
    if not path.is_file():
        raise InputError(f"{path} is missing: {_AGAIN}")
    if path.stat().st_size != expected:
        raise InputError(f"{path} has {path.stat().st_size} bytes where its header says {expected}: {_AGAIN}")


def _measure(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}
