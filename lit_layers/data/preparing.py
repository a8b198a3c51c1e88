"""Conversion of a corpus to token shards, streamed; the result depends only on the corpus and the options.

train.bin  val.bin      only token ids, little-endian: uint16 if the vocabulary allows it, else uint32
train.idx  val.idx      int64: index in the .bin file at which each document starts; a document ends with end of text
tokenizer/              a folder that `AutoTokenizer` opens
meta.json               the header

A preparation writes to a hidden folder next to the output folder, and renames it to the output folder once it is
complete. The file progress.json records how many documents were processed and the file sizes at that point. An
interrupted run reads the corpus again and continues after the last recorded document.
"""

import contextlib
import copy
import hashlib
import json
import os
import re
import shutil
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock
from tqdm import tqdm

from lit_layers import schema
from lit_layers.data import tokenization
from lit_layers.data.text_sources import Source, digest, is_held_out, open_source
from lit_layers.errors import InputError
from lit_layers.files.durable import sync, write_json
from lit_layers.identity import hash_of, sha16
from lit_layers.schema import refuse_below_one

FORMAT, VERSION = "lit_layers token shards", 1
HEADER, TOKENIZER = "meta.json", "tokenizer"
STEMS = {"train": "train", "validation": "val"}
STARTS = np.dtype("<i8")
_AGAIN = "remove the folder and run `lit-layers prepare` again"
CHUNK_BYTES = 2**22  # bytes of text per call of the tokenizer
# Seconds between two saves of the progress. An interruption loses about this much work.
SAVE_SECONDS = 10.0
PROGRESS = "progress.json"
BPE_BYTES = 10**8  # a BPE tokenizer is trained on this number of characters (not bytes)


def token_dtype(vocab_size: int) -> np.dtype:
    """Return the narrowest unsigned integer dtype for token ids below `vocab_size`."""
    return np.dtype("<u2" if vocab_size <= 2**16 else "<u4")


@dataclass(frozen=True)
class TokenShards:
    """A prepared corpus: a folder with the token ids of its splits.

    The files are memory-mapped on access, so an object of this class is small and cheap to pickle.
    """

    folder: Path
    header: dict[str, Any]

    @classmethod
    def open(cls, folder: str | Path) -> "TokenShards":
        """Open a folder that `prepare` wrote and check the sizes of its files.

        Raises:
            InputError: The folder is missing, has another version, or is damaged.
        """
        folder = Path(folder)
        shards = cls(folder, _read_header(folder))
        for name, expected in shards.header["files"].items():
            path = folder / name
            if not path.is_file() or path.stat().st_size != expected["bytes"]:
                raise InputError(f"{path} has not the {expected['bytes']} bytes that its header says: {_AGAIN}")
        return shards

    def tokens(self, split: str) -> np.ndarray:
        """Return all token ids of a split, memory-mapped."""
        return np.memmap(self._path(split, ".bin"), dtype=np.dtype(self.header["dtype"]), mode="r")

    def document_starts(self, split: str) -> np.ndarray:
        """Return the index in `tokens` of the first token of each document of a split, memory-mapped."""
        return np.memmap(self._path(split, ".idx"), dtype=STARTS, mode="r")

    def num_tokens(self, split: str) -> int:
        return self.header["splits"][split]["tokens"]

    def num_documents(self, split: str) -> int:
        return self.header["splits"][split]["documents"]

    @property
    def vocab_size(self) -> int:
        return self.header["vocab_size"]

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
        """Return a SHA-256 over the names and SHA-256 sums of all files. Equal folders have equal checksums."""
        return self.header["checksum"]

    def _path(self, split: str, suffix: str) -> Path:
        if split not in STEMS:
            raise InputError(f"split: expected train or validation, got {split!r}")
        return self.folder / (STEMS[split] + suffix)


def finish(draft: Path, folder: Path, header: dict[str, Any]) -> None:
    """Complete a preparation in the folder `draft`.

    The header is added, all files are flushed to disk, and `draft` is renamed to `folder`.
    """
    paths = [path for path in sorted(draft.rglob("*")) if path.is_file() and path.name != HEADER]
    files = {path.relative_to(draft).as_posix(): _entry(path) for path in paths}
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


def _entry(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def prepared(corpus: str, tokenizer: str, *, cache: str | Path | None = None) -> TokenShards:
    """Open the shards of a corpus, from a folder made by `prepare` or from the cache. Prepare them if they are missing.

    The cache is `$LIT_LAYERS_CACHE`, by default `~/.cache/lit_layers`.

    Raises:
        InputError: `corpus` is a folder that was prepared with another tokenizer, or `prepare` raises.
    """
    if (Path(corpus) / HEADER).exists():
        shards = TokenShards.open(corpus)
        _expect_tokenizer(shards, tokenizer)
        return shards
    folder = _cache_folder(corpus, tokenizer, cache)
    if (folder / HEADER).is_file():
        return TokenShards.open(folder)
    return prepare(corpus, tokenizer, folder, progress=True)


def prepare(
    source: str,
    tokenizer: str,
    out: str | Path,
    *,
    column: str | None = None,
    separator: str | None = None,
    validation: float | None = None,
    max_documents: int | None = None,
    progress: bool = False,
) -> TokenShards:
    """Write the token shards of a corpus to the folder `out`, or open it if it already holds them.

    An interrupted preparation is continued.

    Args:
        source: `python`, `openwebtext`, `wikitext`, a text file or folder of them, or a Hub data set
            `ORG/NAME[@REVISION][:CONFIG]`.
        tokenizer: A local path, a name on the Hub, or `bpe:SIZE` to train one on the training documents.
        out: A new or empty folder, or one that was prepared with the same options.
        column: The text column in parquet, JSON-lines and Hub data; `text` by default.
        separator: The line that ends a document in a `.txt` file: `<|endoftext|>` by default, "" for a blank line.
        validation: Share of the documents to hold out if the source has no validation split.
        max_documents: Largest number of documents to read, in each split if the source has its own splits.
        progress: Whether to show a progress bar on a terminal.

    Raises:
        InputError: Options that do not fit, damaged text, an empty split, or a folder that cannot be written.
    """
    refuse_below_one(max_documents=max_documents)
    folder = Path(os.path.abspath(out))
    corpus = open_source(source, column=column, separator=separator, validation=validation)
    loaded = None if tokenization.bpe_size(tokenizer) else tokenization.load_tokenizer(tokenizer)
    made_by = {"spec": tokenizer, "hash": loaded and tokenization.tokenizer_hash(loaded.tokenizer)}
    settings = {"source": corpus.describe(), "tokenizer": made_by, "max_documents": max_documents}
    with _draft_of(folder) as draft:
        if (folder / HEADER).is_file():
            shards = TokenShards.open(folder)
            _expect_settings(folder, shards.header["settings"], settings)
            return shards
        if folder.exists() and (others := sorted(path.name for path in folder.iterdir())):
            raise InputError(f"{folder} is not empty (it holds {others[0]}) and no token shards: choose another folder")
        corpus.pin()
        if loaded is None:
            texts = _training_texts(corpus, max_documents, BPE_BYTES)
            loaded = tokenization.train_bpe(texts, tokenization.bpe_size(tokenizer) or 0)
        tokenization.save_tokenizer(loaded, draft / TOKENIZER)
        dtype, hash_ = token_dtype(loaded.vocab_size), tokenization.tokenizer_hash(loaded.tokenizer)
        key = hash_of([settings, corpus.revision, hash_])
        counts = _write(draft, dtype, corpus, loaded, max_documents, progress, key)
        header = {
            "format": FORMAT,
            "version": VERSION,
            "dtype": dtype.name,
            "vocab_size": loaded.vocab_size,
            "end_of_text_id": loaded.end_of_text_id,
            "tokenizer": {"spec": tokenizer, "hash": hash_, "end_of_text": loaded.end_of_text},
            "revision": corpus.revision,
            "settings": settings,
        }
        finish(draft, folder, header | counts)
    return TokenShards.open(folder)


def _write(
    draft: Path,
    dtype: np.dtype,
    source: Source,
    tokenizer: tokenization.TextTokenizer,
    limit: int | None,
    progress: bool,
    key: str,
) -> dict[str, Any]:
    """Tokenize all documents of a corpus and write their tokens and start indices to the folder `draft`.

    Return the numbers of documents and tokens, and hashes of the text, for the header. `key` is a hash of corpus,
    options and tokenizer. Progress that was saved with another key is discarded.
    """
    encoder, end = copy.deepcopy(tokenizer.tokenizer), tokenizer.end_of_text_id
    # Tokenize "<|endoftext|>" in a document as ordinary text, not as the special token.
    encoder.encode_special_tokens = True
    saved, names = draft / PROGRESS, [f"{stem}.{kind}" for stem in STEMS.values() for kind in ("bin", "idx")]
    state: dict[str, Any] = json.loads(saved.read_text()) if saved.is_file() else {"key": ""}
    if state["key"] != key:
        state = {"key": key, "read": 0, "chains": dict.fromkeys(STEMS, ""), "sizes": dict.fromkeys(names, 0)}
        state["splits"] = {split: {"tokens": 0, "documents": 0, "bytes": 0} for split in STEMS}
        state["left_out"] = {"empty": 0, "duplicate": 0}
    splits, left_out, chains = state["splits"], state["left_out"], state["chains"]
    pending: list[tuple[str, str]] = []  # (split, text) of documents that are not tokenized yet

    def write() -> None:
        encodings = encoder.encode_batch_fast([text for _, text in pending], add_special_tokens=False)
        for (split, _), encoding in zip(pending, encodings, strict=True):
            counts, (ids, starts) = splits[split], files[split]
            starts.write(np.array(counts["tokens"], dtype=STARTS).tobytes())
            ids.write(np.array([*encoding.ids, end], dtype=dtype).tobytes())
            counts["tokens"] += len(encoding.ids) + 1
            counts["documents"] += 1
        pending.clear()

    def save(read: int) -> None:
        for name, file in zip(names, opened, strict=True):
            file.flush()
            sync(draft / name)
            state["sizes"][name] = file.tell()
        write_json(saved, state | {"read": read})

    with contextlib.ExitStack() as stack:
        opened = [stack.enter_context((draft / name).open("ab")) for name in names]
        for name, file in zip(names, opened, strict=True):
            file.truncate(state["sizes"][name])  # drop what an interrupted run wrote after it last saved its progress
        files = dict(zip(splits, zip(opened[::2], opened[1::2], strict=True), strict=True))
        stack.enter_context(tokenization.tokenizer_threads(every_core=True))
        size, saved_at = 0, time.monotonic()
        documents = tqdm(_assign(source, limit), disable=None if progress else True, unit=" documents")
        for read, (text, split, value) in enumerate(documents, start=1):
            if read <= state["read"]:
                continue
            if split in left_out:
                left_out[split] += 1
                continue
            pending.append((split, text))
            length = len(text.encode("utf-8"))
            size, splits[split]["bytes"] = size + length, splits[split]["bytes"] + length
            chains[split] = hashlib.sha256(f"{chains[split]}/{value}".encode()).hexdigest()
            if size >= CHUNK_BYTES:
                write()
                if time.monotonic() - saved_at >= SAVE_SECONDS:
                    save(read)
                    saved_at = time.monotonic()
                size = 0
        write()
    saved.unlink(missing_ok=True)
    for split, counts in splits.items():
        counts["corpus_hash"] = chains[split][:16]
        if not counts["documents"]:
            about = source.describe()
            what = f"the {split} split of {about.get('path') or about.get('name') or 'python'} is empty"
            why = f"{sum(counts['documents'] for counts in splits.values())} documents in all"
            remedy = 'give more (a .txt file is one unless a separator line, "" for a blank one, divides it)'
            raise InputError(f"{what} ({why}): {remedy}, or another validation share")
    corpus_hash = sha16("/".join(chains[split] for split in ("train", "validation")))
    return {"splits": splits, "left_out": left_out, "corpus_hash": corpus_hash}


def _assign(source: Source, limit: int | None) -> Iterator[tuple[str, str, int]]:
    """Yield (text, split, hash of the text) for each document of a corpus, in the order of the source's splits.

    A document that is left out has the reason, "empty" or "duplicate", in place of its split.
    """
    most, held_out = limit or sys.maxsize, set[int]()
    for split in source.splits:  # a split of None means that the source is one stream
        for text in islice(source.read(split), most):
            value = digest(text)
            if not text.strip():
                yield text, "empty", value
            elif split == "train" and value in held_out:
                yield text, "duplicate", value
            else:
                held_out |= {value} if split == "validation" else set()
                yield text, split or ("validation" if is_held_out(value, source.validation or 0) else "train"), value


def _training_texts(source: Source, limit: int | None, size: int) -> Iterator[str]:
    """Yield training documents, to train a tokenizer on, until they have at least `size` characters in all."""
    total = 0
    for text, split, _ in _assign(source, limit):
        if total >= size:
            return
        if split == "train":
            total += len(text)
            yield text


def _expect_tokenizer(shards: TokenShards, tokenizer: str) -> None:
    if tokenizer == shards.header["tokenizer"]["spec"]:
        return
    size = tokenization.bpe_size(tokenizer)
    hash_ = None if size else tokenization.tokenizer_hash(tokenization.load_tokenizer(tokenizer).tokenizer)
    if hash_ != shards.tokenizer_hash:
        made_by = shards.header["tokenizer"]
        what = f"{shards.folder} was made with the tokenizer {made_by['spec']!r}, not {tokenizer!r}"
        raise InputError(f"{what}: name {shards.tokenizer_path}, or prepare the corpus again")


def _cache_folder(corpus: str, tokenizer: str, cache: str | Path | None) -> Path:
    root = Path(cache or os.environ.get("LIT_LAYERS_CACHE") or Path.home() / ".cache" / "lit_layers")
    made_by = tokenizer
    if tokenization.bpe_size(tokenizer) is None and Path(tokenizer).exists():
        made_by = tokenization.tokenizer_hash(tokenization.load_tokenizer(tokenizer).tokenizer)
    key = hash_of([VERSION, open_source(corpus).describe(), made_by])
    names = [re.sub(r"[^\w.]+", "-", Path(name).name) for name in (corpus, tokenizer)]
    return root / "text" / "-".join([*names, key])


def _expect_settings(folder: Path, before: dict[str, Any], asked: dict[str, Any]) -> None:
    old, new = ({**each["source"], **each["tokenizer"], "documents": each["max_documents"]} for each in (before, asked))
    same_tokenizer = old["hash"] is not None and old["hash"] == new["hash"]
    for key in sorted((old.keys() | new.keys()) - ({"spec"} if same_tokenizer else set())):
        if old.get(key) != new.get(key):
            there = f"{folder} holds shards with {key} {old.get(key)!r}, and {new.get(key)!r} was asked for"
            raise InputError(f"{there}: choose another folder, or remove that one")


@contextlib.contextmanager
def _draft_of(folder: Path) -> Iterator[Path]:
    """Yield a hidden folder in which the shards for `folder` are prepared.

    If a preparation is interrupted after it saved its progress, the hidden folder remains for the next run. Otherwise
    it is removed. While one process prepares, a lock makes other processes wait. Disk errors become InputError.
    """
    draft = folder.with_name(f".{folder.name}.draft")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(folder.with_name(f".{folder.name}.lock")):
            saved = draft / PROGRESS
            draft.mkdir(exist_ok=True)
            try:
                yield draft
            except InputError:
                saved.unlink(missing_ok=True)
                raise
            finally:
                if not saved.is_file():
                    shutil.rmtree(draft, ignore_errors=True)
    except OSError as error:
        raise InputError(f"cannot prepare {folder} ({error}): choose another folder, or run again to go on") from error
