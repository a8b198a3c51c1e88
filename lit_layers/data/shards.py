"""Tokens on disk: flat binary files that anything can read, and a header that says what is in them.

train.bin  val.bin      token ids, uint16 where the vocabulary allows it, else uint32; little-endian, nothing else
train.idx  val.idx      int64: where in the .bin file each document starts; a document ends with the end of text
tokenizer/              as `AutoTokenizer` opens it
meta.json               the header: written last, so a folder that has one is whole
"""

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lit_layers import schema
from lit_layers.errors import InputError, refused
from lit_layers.files.durable import sync, write_json

FORMAT, VERSION = "lit_layers token shards", 1
HEADER, PROGRESS, TOKENIZER = "meta.json", "progress.json", "tokenizer"
STEMS = {"train": "train", "validation": "val"}
_FILES = [stem + suffix for stem in STEMS.values() for suffix in (".bin", ".idx")]
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
        """Opens a prepared folder and checks its sizes.

        Raises:
            InputError: for a folder that is missing, unfinished, of another version, or damaged.
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


class ShardWriter:
    """Grows the files of a folder, as `NAME.partial` until they are whole; `sizes` say how far they were good."""

    def __init__(self, folder: Path, dtype: np.dtype, sizes: dict[str, int]):
        self.folder, self.dtype = folder, dtype
        self.sizes = {name: sizes.get(name, 0) for name in _FILES}
        self._files = {}
        for name, size in self.sizes.items():
            with refused(f"cannot write to {folder}"):
                file = self._files[name] = open(folder / f"{name}.partial", "ab")  # noqa: SIM115
            if file.tell() < size:
                raise InputError(f"{file.name} has {file.tell()} bytes of {size}: remove {folder} and prepare it again")
            file.truncate(size)  # what came after the last closed part is done again

    def append(self, split: str, ids: np.ndarray, lengths: np.ndarray) -> None:
        """Adds documents, given one after the other, and where they start."""
        stem = STEMS[split]
        first = self.sizes[f"{stem}.bin"] // self.dtype.itemsize
        starts = first + np.concatenate([[0], np.cumsum(lengths)[:-1]])
        for name, array in ((f"{stem}.bin", ids.astype(self.dtype)), (f"{stem}.idx", starts.astype(STARTS))):
            self._files[name].write(array.tobytes())
            self.sizes[name] += array.nbytes

    def sync(self) -> dict[str, int]:
        """Brings all that was appended to the disk and returns the sizes that are now safe."""
        for file in self._files.values():
            file.flush()
            os.fsync(file.fileno())
        return dict(self.sizes)

    def count(self, split: str) -> tuple[int, int]:
        """Tokens and documents so far."""
        stem = STEMS[split]
        return self.sizes[f"{stem}.bin"] // self.dtype.itemsize, self.sizes[f"{stem}.idx"] // STARTS.itemsize

    def close(self) -> None:
        for file in self._files.values():
            file.close()


def finish(folder: Path, header: dict[str, Any]) -> None:
    """Gives whole files their names, the header last: a folder with a header is complete, whatever happens here."""
    files = {name: _measure(folder / f"{name}.partial") for name in _FILES}
    files |= {f"{TOKENIZER}/{path.name}": _measure(path) for path in sorted((folder / TOKENIZER).iterdir())}
    listing = "\n".join(f"{name} {entry['sha256']}" for name, entry in sorted(files.items()))
    header = {**header, "files": files, "checksum": hashlib.sha256(listing.encode()).hexdigest()}
    write_json(folder / f"{HEADER}.partial", header, sort_keys=True)
    finish_names(folder)


def finish_names(folder: Path) -> None:
    """The last step of `finish`; begun again after an interruption it goes on where it stopped."""
    if not (folder / f"{HEADER}.partial").exists():
        return
    for partial in sorted(folder.glob("*.partial"), key=lambda path: path.stem == HEADER):
        sync(folder)
        partial.rename(partial.with_suffix(""))
    sync(folder)


def _read_header(folder: Path) -> dict[str, Any]:
    path = folder / HEADER
    if not path.is_file():
        if (folder / PROGRESS).exists():
            raise InputError(f"the preparation of {folder} was interrupted: run the same `lit-layers prepare` again")
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
