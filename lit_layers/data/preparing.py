"""Corpus to token shards, streamed; the result depends on the corpus and the options only, not on the threads.

A preparation under way is a hidden folder beside the one asked for, which gets that name once it is whole. Its note of
progress says how far its files are good: a run that was cut reads the corpus again and writes what they lack.
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
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock

from lit_layers.data import tokenization
from lit_layers.data.shards import FORMAT, HEADER, STARTS, STEMS, TOKENIZER, VERSION, TokenShards, finish, token_dtype
from lit_layers.data.text_sources import Source, digest, in_share, open_source
from lit_layers.errors import InputError
from lit_layers.files.durable import sync, write_json
from lit_layers.identity import hash_of, sha16
from lit_layers.schema import refuse_below_one

CHUNK_BYTES = 2**22  # of text, the work of one call of the tokenizer
PART_SECONDS = 10.0  # of work, at most, that an interruption loses
PROGRESS = "progress.json"
BPE_BYTES = 10**8  # of text a tokenizer is trained on


def prepared(corpus: str, tokenizer: str, *, cache: str | Path | None = None) -> TokenShards:
    """The shards of a corpus: a folder made by `prepare`, or those in the cache, made now where they are missing.

    The cache is `$LIT_LAYERS_CACHE`, by default `~/.cache/lit_layers`.

    Raises:
        InputError: where `corpus` is a prepared folder and another tokenizer made it; else as `prepare`.
    """
    if (Path(corpus) / HEADER).exists():
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
    progress: bool = False,
) -> TokenShards:
    """Write the token shards of a corpus to the folder `out`, go on where a run was cut, or open those that are there.

    Args:
        source: `python`, `openwebtext`, `wikitext`, a text file or folder of them, or a Hub data set
            `ORG/NAME[@REVISION][:CONFIG]`.
        tokenizer: A local path, a name on the Hub, or `bpe:SIZE` to train one on the training documents.
        out: A new or empty folder, or one that was prepared with the same options.
        column: The column of the text in parquet, JSON-lines and Hub data; `text` by default.
        separator: The line that ends a document in a `.txt` file; `<|endoftext|>` by default, "" for a blank line.
        validation: Share of the documents to hold out, where the source brings no validation split.
        max_documents: Read at most so many documents, of each split where the source brings its own.
        progress: Whether to count the tokens on standard error.

    Raises:
        InputError: for options that do not fit, damaged text, an empty split, a folder that cannot be written.
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
            if progress:
                sys.stderr.write(f"training the tokenizer {tokenizer}\n")
            texts = _training_texts(corpus, max_documents, BPE_BYTES)
            loaded = tokenization.train_bpe(texts, tokenization.bpe_size(tokenizer) or 0)
        tokenization.save_tokenizer(loaded, draft / TOKENIZER)
        dtype, hash_ = token_dtype(loaded.vocab_size), tokenization.tokenizer_hash(loaded.tokenizer)
        key = hash_of([settings, corpus.revision, hash_])
        counts = _written(draft, dtype, corpus, loaded, max_documents, progress, key)
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


def _written(
    draft: Path,
    dtype: np.dtype,
    source: Source,
    tokenizer: tokenization.TextTokenizer,
    limit: int | None,
    progress: bool,
    key: str,
) -> dict[str, Any]:
    """Write the tokens of all documents and where they start; return the counts and hashes of the text.

    `key` tells corpus, options and tokenizer from others.
    """
    encoder, end = copy.deepcopy(tokenizer.tokenizer), tokenizer.end_of_text_id
    encoder.encode_special_tokens = True  # "<|endoftext|>" in a document is text
    noted, names = draft / PROGRESS, [f"{stem}.{kind}" for stem in STEMS.values() for kind in ("bin", "idx")]
    state: dict[str, Any] = json.loads(noted.read_text()) if noted.is_file() else {"key": ""}
    if state["key"] != key:
        state = {"key": key, "read": 0, "chains": dict.fromkeys(STEMS, ""), "sizes": dict.fromkeys(names, 0)}
        state["splits"] = {split: {"tokens": 0, "documents": 0, "bytes": 0} for split in STEMS}
        state["left_out"] = {"empty": 0, "duplicate": 0}
    splits, left_out, chains = state["splits"], state["left_out"], state["chains"]
    waiting: list[tuple[str, str]] = []  # splits and texts

    def write() -> None:
        encodings = encoder.encode_batch_fast([text for _, text in waiting], add_special_tokens=False)
        for (split, _), encoding in zip(waiting, encodings, strict=True):
            of, (ids, starts) = splits[split], files[split]
            starts.write(np.array(of["tokens"], dtype=STARTS).tobytes())
            ids.write(np.array([*encoding.ids, end], dtype=dtype).tobytes())
            of["tokens"] += len(encoding.ids) + 1
            of["documents"] += 1
        waiting.clear()

    def note(read: int) -> None:
        for name, file in zip(names, opened, strict=True):
            file.flush()
            sync(draft / name)
            state["sizes"][name] = file.tell()
        write_json(noted, state | {"read": read})

    with contextlib.ExitStack() as stack:
        opened = [stack.enter_context((draft / name).open("ab")) for name in names]
        for name, file in zip(names, opened, strict=True):
            file.truncate(state["sizes"][name])  # of what was written behind the last note
        files = dict(zip(splits, zip(opened[::2], opened[1::2], strict=True), strict=True))
        stack.enter_context(tokenization.all_threads())
        size, closed = 0, time.monotonic()
        for read, (text, split, value) in enumerate(_placed(source, limit), start=1):
            if read <= state["read"]:
                continue
            if split in left_out:
                left_out[split] += 1
                continue
            waiting.append((split, text))
            length = len(text.encode("utf-8"))
            size, splits[split]["bytes"] = size + length, splits[split]["bytes"] + length
            chains[split] = hashlib.sha256(f"{chains[split]}/{value}".encode()).hexdigest()
            if size >= CHUNK_BYTES:
                write()
                if time.monotonic() - closed >= PART_SECONDS:
                    note(read)
                    closed = time.monotonic()
                size = 0
                if progress:
                    sys.stderr.write(f"\r{sum(of['tokens'] for of in splits.values()) / 1e6:.1f} M tokens")
        write()
    if progress:
        sys.stderr.write("\n")
    noted.unlink(missing_ok=True)
    for split, of in splits.items():
        of["corpus_hash"] = chains[split][:16]
        if not of["documents"]:
            raise InputError(
                f"the {split} split of {_name_of(source.describe())} is empty "
                f"({sum(of['documents'] for of in splits.values())} documents in all): give more documents (a .txt "
                'file is one unless a separator line, "" for a blank one, divides it), or another validation share'
            )
    corpus_hash = sha16("/".join(chains[split] for split in ("train", "validation")))
    return {"splits": splits, "left_out": left_out, "corpus_hash": corpus_hash}


def _placed(source: Source, limit: int | None) -> Iterator[tuple[str, str, int]]:
    """Texts with their split or why they are left out, and their hashes; those of validation first."""
    most, held_out = limit or sys.maxsize, set[int]()
    for part in source.splits:  # None: one stream
        for text in islice(source.read(part), most):
            value = digest(text)
            if not text.strip():
                yield text, "empty", value
            elif part == "train" and value in held_out:
                yield text, "duplicate", value
            else:
                held_out |= {value} if part == "validation" else set()
                yield text, part or ("validation" if in_share(value, source.validation or 0) else "train"), value


def _training_texts(source: Source, limit: int | None, size: int) -> Iterator[str]:
    """The first `size` characters, or some more, of the training documents."""
    total = 0
    for text, split, _ in _placed(source, limit):
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


def _expect_settings(folder: Path, there: dict[str, Any], asked: dict[str, Any]) -> None:
    old, new = ({**each["source"], **each["tokenizer"], "documents": each["max_documents"]} for each in (there, asked))
    same_tokenizer = old["hash"] is not None and old["hash"] == new["hash"]
    for key in sorted((old.keys() | new.keys()) - ({"spec"} if same_tokenizer else set())):
        if old.get(key) != new.get(key):
            raise InputError(
                f"{folder} holds shards with {key} {old.get(key)!r}, and {new.get(key)!r} was asked for: "
                "choose another folder, or remove that one"
            )


@contextlib.contextmanager
def _draft_of(folder: Path) -> Iterator[Path]:
    """A hidden folder, kept if a run is cut. One process prepares; others wait. A failing disk is a sentence."""
    draft = folder.with_name(f".{folder.name}.draft")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(folder.with_name(f".{folder.name}.lock")):
            noted = draft / PROGRESS
            draft.mkdir(exist_ok=True)
            try:
                yield draft
            except InputError:
                noted.unlink(missing_ok=True)
                raise
            finally:
                if not noted.is_file():
                    shutil.rmtree(draft, ignore_errors=True)
    except OSError as error:
        raise InputError(f"cannot prepare {folder} ({error}): choose another folder, or run again to go on") from error


def _name_of(source: dict[str, Any]) -> str:
    return source.get("path") or source.get("name") or "python"
