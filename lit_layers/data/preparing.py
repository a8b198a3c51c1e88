"""Corpus to token shards: streamed, on several cores, and resumed after an interruption.

The result depends on the corpus and the options alone: not on the number of threads, not on where a run was cut.
A preparation under way is a folder with `progress.json`; it says how far every file is good (the last closed part).
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

from filelock import FileLock

from lit_layers.data import tokenization
from lit_layers.data.shards import (
    FORMAT,
    HEADER,
    PROGRESS,
    TOKENIZER,
    VERSION,
    ShardWriter,
    TokenShards,
    finish,
    finish_names,
    token_dtype,
)
from lit_layers.data.text_sources import Document, Source, digest, in_share, open_source
from lit_layers.errors import InputError
from lit_layers.files.durable import sync, write_json
from lit_layers.identity import hash_of, sha16
from lit_layers.machine import processors
from lit_layers.schema import refuse_below_one

CHUNK_BYTES = 2**20  # of text, the work of one call of the tokenizer
PART_SECONDS = 5.0  # at most this much work, and a chunk, is done again after an interruption
BPE_BYTES = 10**8  # of text a tokenizer is trained on


def prepared(corpus: str, tokenizer: str, *, cache: str | Path | None = None) -> TokenShards:
    """The shards of a corpus: a folder made by `prepare`, or those in the cache, made now where they are missing.

    The cache is `$LIT_LAYERS_CACHE`, by default `~/.cache/lit_layers`.

    Raises:
        InputError: where `corpus` is a prepared folder and another tokenizer made it; else as `prepare`.
    """
    if (Path(corpus) / HEADER).exists() or (Path(corpus) / PROGRESS).exists():
        shards = TokenShards.open(corpus)
        _expect_tokenizer(shards, tokenizer)
        return shards
    folder = _cache_folder(corpus, tokenizer, cache)
    if (folder / HEADER).is_file():
        return TokenShards.open(folder)
    return prepare(corpus, tokenizer, folder, progress=sys.stderr.isatty())


def prepare(
    source: str,
    tokenizer: str,
    out: str | Path,
    *,
    column: str | None = None,
    separator: str | None = None,
    validation: float | None = None,
    max_documents: int | None = None,
    workers: int | None = None,
    progress: bool = False,
) -> TokenShards:
    """Writes the token shards of a corpus to the folder `out`, or goes on with what an interrupted run left there.

    Args:
        source: `python`, `openwebtext`, `wikitext`, a text file or folder of them, or a Hub data set
            `ORG/NAME[@REVISION][:CONFIG]`.
        tokenizer: A local path, a name on the Hub, or `bpe:SIZE` to train one on the training documents.
        out: A new or empty folder, or that of an interrupted run.
        column: The column of the text in parquet, JSON-lines and Hub data; `text` by default.
        separator: The line that ends a document in a `.txt` file; `<|endoftext|>` by default, "" for a blank line.
        validation: Share of the documents to hold out, where the source brings no validation split.
        max_documents: Read at most so many documents, of each split where the source brings its own.
        workers: Threads that tokenize; as many as cores by default.
        progress: Whether to show a bar.

    Raises:
        InputError: for options that do not fit, damaged text, an empty split, a folder that cannot be written.
    """
    refuse_below_one(workers=workers, max_documents=max_documents)
    folder = Path(out)
    corpus = open_source(source, column=column, separator=separator, validation=validation)
    loaded = None if tokenization.bpe_size(tokenizer) else tokenization.load_tokenizer(tokenizer)
    made_by = {"spec": tokenizer, "hash": loaded and tokenization.tokenizer_hash(loaded.tokenizer)}
    settings = {"source": corpus.describe(), "tokenizer": made_by, "max_documents": max_documents}
    with _claimed(folder):
        finish_names(folder)
        if (folder / HEADER).is_file():
            (folder / PROGRESS).unlink(missing_ok=True)
            shards = TokenShards.open(folder)
            expect_settings(folder, shards.header["settings"], settings, "holds shards")
            return shards
        state = begin(folder, settings)
        try:
            corpus.pin(state["revision"])
            state["revision"] = corpus.revision
            if loaded is None and progress:
                sys.stderr.write(f"training the tokenizer {tokenizer}\n")
            _place_tokenizer(folder, state, loaded, corpus)
            _fill(folder, state, corpus, workers or processors().at_once(), progress)
        except InputError:
            noted = folder / PROGRESS
            if noted.exists() and not json.loads(noted.read_text(encoding="utf-8"))["sizes"]:
                discard(folder)  # at fault from the start: nothing is left that would bind the next attempt to it
            raise
        (folder / PROGRESS).unlink()
    return TokenShards.open(folder)


@dataclass(frozen=True)
class _Chunk:
    texts: tokenization.Texts
    state: dict[str, Any]  # of the reading, once these texts are written
    share: float | None  # of the work, where it is known


def _place_tokenizer(
    folder: Path, state: dict[str, Any], loaded: tokenization.TextTokenizer | None, source: Source
) -> None:
    """Saves the tokenizer beside the shards, trained first where that was asked for."""
    if state["tokenizer"] is not None:
        return
    spec, limit = state["settings"]["tokenizer"]["spec"], state["settings"]["max_documents"]
    if loaded is None:
        loaded = tokenization.train_bpe(_training_texts(source, limit, BPE_BYTES), tokenization.bpe_size(spec) or 0)
    shutil.rmtree(folder / TOKENIZER, ignore_errors=True)
    tokenization.save_tokenizer(loaded, folder / TOKENIZER)
    for path in [*(folder / TOKENIZER).iterdir(), folder / TOKENIZER]:
        sync(path)
    state["tokenizer"] = {
        "spec": spec,
        "hash": tokenization.tokenizer_hash(loaded.tokenizer),
        "end_of_text": loaded.end_of_text,
        "end_of_text_id": loaded.end_of_text_id,
        "vocab_size": loaded.vocab_size,
    }
    write_json(folder / PROGRESS, state, sort_keys=True)


def _fill(folder: Path, state: dict[str, Any], source: Source, workers: int, progress: bool) -> None:
    """Encodes what is still to come, closing a part every few seconds, and finishes the folder."""
    made_by = state["tokenizer"]
    dtype = token_dtype(made_by["vocab_size"])
    writer = ShardWriter(folder, dtype, state["sizes"])
    chunks = tokenization.encoded(
        _chunks(source, state),
        lambda chunk: chunk.texts,
        workers=workers,
        tokenizer=folder / TOKENIZER / tokenization.MAIN,
        end=made_by["end_of_text_id"],
        dtype=dtype,
    )
    closed = time.monotonic()
    with contextlib.closing(writer), contextlib.closing(chunks), _bar(progress) as bar:
        task = bar.add_task("", total=None)
        for chunk, documents in chunks:
            for split, (ids, lengths) in documents.items():
                writer.append(split, ids, lengths)
            state = chunk.state
            tokens = sum(writer.count(split)[0] for split in documents) / 1e6
            name = f"{tokens:.1f} M tokens of {_name_of(state['settings'])}"
            bar.update(task, description=name, total=chunk.share and 1.0, completed=chunk.share or 0)
            if time.monotonic() - closed >= PART_SECONDS:
                write_json(folder / PROGRESS, {**state, "sizes": writer.sync()}, sort_keys=True)
                closed = time.monotonic()
        write_json(folder / PROGRESS, {**state, "sizes": writer.sync()}, sort_keys=True)
    _expect_documents(folder, writer, state)
    finish(folder, _header(writer, state, source))


def _chunks(source: Source, state: dict[str, Any]) -> Iterator[_Chunk]:
    """Reads on from `state`; each chunk carries the state behind it."""
    state = copy.deepcopy(state)
    limit = state["settings"]["max_documents"] or sys.maxsize
    for stage in range(state["stage"], len(source.splits)):
        part = source.splits[stage]
        texts, size, share = [], 0, None
        for document, split, value in _placed(source, part, limit, state["position"], state["read"]):
            state["read"] += 1
            if split in state["left_out"]:
                state["left_out"][split] += 1
            else:
                texts.append((split, document.text))
                size += _note(state, split, document.text, value)
            if part != "validation" and document.fraction is not None:
                share = max(document.fraction, state["read"] / limit)
            if size >= CHUNK_BYTES:
                state["position"] = document.position
                yield _Chunk(texts, copy.deepcopy(state), share)
                texts, size = [], 0
        state |= {"stage": stage + 1, "position": None, "read": 0}
        yield _Chunk(texts, copy.deepcopy(state), share)


def _placed(
    source: Source, part: str | None, limit: int, position: Any = None, start: int = 0
) -> Iterator[tuple[Document, str, int]]:
    """Documents with their split (`part` where the source says it), or why they are left out, and their hashes."""
    repeated = set()
    if part == "train":
        repeated = {digest(document.text) for document in islice(source.read("validation"), limit)}
    for document in islice(source.read(part, position), limit - start):
        value = digest(document.text)
        if not document.text.strip():
            yield document, "empty", value
        elif part == "train" and value in repeated:
            yield document, "duplicate", value
        else:
            yield document, part or ("validation" if in_share(value, source.validation or 0) else "train"), value


def _note(state: dict[str, Any], split: str, text: str, value: int) -> int:
    """Adds a document to the books; returns its bytes."""
    size = len(text.encode("utf-8"))
    state["bytes"][split] += size
    chain = f"{state['hashes'][split]}/{value}"  # a chain, since the state of a running hash cannot be stored
    state["hashes"][split] = hashlib.sha256(chain.encode()).hexdigest()
    return size


def _training_texts(source: Source, limit: int | None, size: int) -> Iterator[str]:
    """The first `size` characters, or some more, of the training documents."""
    part, total = "train" if "train" in source.splits else None, 0
    for document, split, _ in _placed(source, part, limit or sys.maxsize):
        if split == "train" and total < size:
            total += len(document.text)
            yield document.text
        elif total >= size:
            return


def _header(writer: ShardWriter, state: dict[str, Any], source: Source) -> dict[str, Any]:
    made_by = dict(state["tokenizer"])
    splits = {}
    for split, chain in state["hashes"].items():
        tokens, documents = writer.count(split)
        size = state["bytes"][split]
        splits[split] = {"tokens": tokens, "documents": documents, "bytes": size, "corpus_hash": chain[:16]}
    return {
        "format": FORMAT,
        "version": VERSION,
        "dtype": writer.dtype.name,
        "vocab_size": made_by.pop("vocab_size"),
        "end_of_text_id": made_by.pop("end_of_text_id"),
        "tokenizer": made_by,
        "corpus_hash": sha16("/".join(state["hashes"][split] for split in ("train", "validation"))),
        "revision": source.revision,
        "splits": splits,
        "left_out": state["left_out"],
        "settings": state["settings"],
    }


def _expect_documents(folder: Path, writer: ShardWriter, state: dict[str, Any]) -> None:
    counts = {split: writer.count(split)[1] for split in ("train", "validation")}
    for split, count in counts.items():
        if count == 0:
            discard(folder)
            raise InputError(
                f"the {split} split of {_name_of(state['settings'])} is empty "
                f"({sum(counts.values())} documents in all): give more documents (a .txt file is one unless a "
                'separator line, "" for a blank one, divides it), or another validation share'
            )


def _expect_tokenizer(shards: TokenShards, tokenizer: str) -> None:
    if tokenizer == shards.header["tokenizer"]["spec"]:
        return
    size = tokenization.bpe_size(tokenizer)
    hash_ = None if size else tokenization.tokenizer_hash(tokenization.load_tokenizer(tokenizer).tokenizer)
    if hash_ != shards.tokenizer_hash:
        made_by = shards.header["tokenizer"]
        raise InputError(
            f"{shards.folder} was made with the tokenizer {made_by['spec']!r} ({made_by['hash']}), not {tokenizer!r}"
            f"{f' ({hash_})' if hash_ else ''}: name {shards.tokenizer_path}, or prepare the corpus again"
        )


def _cache_folder(corpus: str, tokenizer: str, cache: str | Path | None) -> Path:
    root = Path(cache or os.environ.get("LIT_LAYERS_CACHE") or Path.home() / ".cache" / "lit_layers")
    made_by = tokenizer
    if tokenization.bpe_size(tokenizer) is None and Path(tokenizer).exists():
        made_by = tokenization.tokenizer_hash(tokenization.load_tokenizer(tokenizer).tokenizer)
    key = hash_of([VERSION, open_source(corpus).describe(), made_by])
    names = [re.sub(r"[^\w.]+", "-", Path(name).name) for name in (corpus, tokenizer)]
    return root / "text" / "-".join([*names, key])


LOCK = ".lock"


def begin(folder: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """The state to go on from: that of the interrupted run, or a new one, noted at once."""
    if (folder / PROGRESS).exists():
        try:
            state = json.loads((folder / PROGRESS).read_text(encoding="utf-8"))
        except ValueError as error:
            raise InputError(f"{folder / PROGRESS} is damaged ({error}): remove {folder} and start again") from error
        expect_settings(folder, state["settings"], settings, "holds an unfinished preparation")
        return state
    others = sorted(path.name for path in folder.iterdir() if not path.name.startswith((LOCK, f".{PROGRESS}.")))
    if others:
        raise InputError(f"{folder} is not empty (it holds {others[0]}) and no token shards: choose another folder")
    state = {
        "settings": settings,
        "revision": None,
        "tokenizer": None,
        "stage": 0,  # index into the source's splits
        "position": None,  # in that split
        "read": 0,  # documents of that split
        "left_out": {"empty": 0, "duplicate": 0},
        "bytes": {"train": 0, "validation": 0},
        "hashes": {"train": "", "validation": ""},
        "sizes": {},
    }
    write_json(folder / PROGRESS, state, sort_keys=True)
    return state


def expect_settings(folder: Path, there: dict[str, Any], asked: dict[str, Any], what: str) -> None:
    old, new = _flat(there), _flat(asked)
    same_tokenizer = old.get("tokenizer.hash") is not None and old["tokenizer.hash"] == new.get("tokenizer.hash")
    for key in sorted((old.keys() | new.keys()) - ({"tokenizer.spec"} if same_tokenizer else set())):
        if old.get(key) != new.get(key):
            raise InputError(
                f"{folder} {what} with {key} {old.get(key)!r}, and {new.get(key)!r} was asked for: "
                "choose another folder, or remove that one"
            )


def _flat(settings: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat = {}
    for key, value in settings.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat


def discard(folder: Path) -> None:
    """Removes what an unfinished preparation left, so that it does not stand in the way of another."""
    shutil.rmtree(folder / TOKENIZER, ignore_errors=True)
    for path in [*folder.glob("*.partial"), folder / PROGRESS]:
        path.unlink(missing_ok=True)


@contextlib.contextmanager
def _claimed(folder: Path) -> Iterator[None]:
    """Makes the folder, which one process prepares while others wait and find it done; a failing disk is a sentence."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(folder / LOCK):
            yield
    except OSError as error:
        raise InputError(
            f"cannot prepare {folder} ({error}): choose another folder, or run again to continue"
        ) from error


def _name_of(settings: dict[str, Any]) -> str:
    return settings["source"].get("path") or settings["source"].get("name") or "python"


def _bar(progress: bool) -> Any:
    from rich.console import Console  # a twentieth of a second, which reading prepared text need not wait for
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    return Progress(*columns, console=Console(stderr=True), disable=not progress)
