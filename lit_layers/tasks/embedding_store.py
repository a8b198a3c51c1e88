"""Embeddings of texts at every layer, on disk: one forward pass gives all layers, and no text is passed twice.

One folder for each model, way of embedding and task; in it a folder for each chunk of texts, named after them. The key
of the first is over all that decides the numbers, so that nothing of another model, pooling, convention or tokenizer is
ever found. A chunk that was broken off lacks its last file and is made again.
"""

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch
from filelock import FileLock, Timeout

from lit_layers.analyses.probes.task_features import LayerFeatures, StoreDtype, TextPooling, text_features
from lit_layers.analyses.states import States
from lit_layers.data.batches import EncodedTexts, encode_texts
from lit_layers.data.tokenization import TextTokenizer, tokenizer_hash
from lit_layers.errors import InputError, refused
from lit_layers.files.durable import write_json
from lit_layers.models.view import LayeredModel

STORE_DTYPES: tuple[StoreDtype, ...] = get_args(StoreDtype)
CHUNK = 8192  # texts: 8,192 x 25 layers x 1,024 x 4 B = 0.8 GB are lost to a kill at most
GB = 10**9
_WHOLE = "whole.json"  # of a chunk, written last
_LOCKS = "locks"
_OURS = ".embeddings"  # marks a folder that may be removed: another in the same place may be anything


class NotFiniteError(InputError):
    """A layer at which a text has no embedding."""


@dataclass(frozen=True)
class Embedding:
    """How a text becomes a vector of each layer."""

    tokenizer: TextTokenizer
    max_tokens: int
    pooling: TextPooling
    states: States
    last: TextPooling | None = None  # the pooling of the last layer, where that is another

    def facts(self) -> list[str | int]:
        facts = [tokenizer_hash(self.tokenizer.tokenizer), self.max_tokens, self.pooling, self.states]
        return facts + ([self.last] if self.last not in (None, self.pooling) else [])

    @property
    def how(self) -> dict[str, Any]:
        """Options of `text_features`."""
        return {"pooling": self.pooling, "states": self.states, "last": self.last}

    def encode(self, texts: Sequence[str]) -> tuple[EncodedTexts, int]:
        """Token ids, and of how many texts the tokenizer makes none: the end of a text stands for each of these."""
        plain = [text if text.strip() or self._has_tokens(text) else None for text in texts]
        encoded = encode_texts(
            self.tokenizer,
            [self.tokenizer.end_of_text if text is None else text for text in plain],
            max_tokens=self.max_tokens,
        )
        return encoded, plain.count(None)

    def _has_tokens(self, text: str) -> bool:
        return bool(self.tokenizer.tokenizer.encode(text).ids)


class Store:
    """A folder of embeddings of bounded size; what was used longest ago gives way, never what is in use.

    Args:
        folder: shared by as many processes as there are.
        dtype: of what is kept. float32 is what the model gives; the halves take half the room and change scores
            (docs/mteb.md says by how much).
        max_bytes: of all embeddings in the folder together.
    """

    def __init__(self, folder: Path, *, dtype: StoreDtype = "float32", max_bytes: float = 20 * GB) -> None:
        self.folder, self.max_bytes = folder, max_bytes
        self.dtype: StoreDtype = dtype

    @contextlib.contextmanager
    def opened(
        self, view: LayeredModel, embedding: Embedding, *, task: str, weights_hash: str
    ) -> Iterator["TaskEmbeddings"]:
        """The embeddings of one task; another process that asks for the same waits meanwhile."""
        name = f"{task}-{_key([weights_hash, *_way(view), *embedding.facts(), *_format(self.dtype)])}"
        with self._lock(name):
            folder = self.folder / name
            folder.mkdir(parents=True, exist_ok=True)
            (folder / _OURS).touch()
            os.utime(folder)
            yield TaskEmbeddings(view, embedding, self, folder)

    def make_room(self, size: int, *, used: Path) -> None:
        """Removes the embeddings of other tasks until there is room, those first that were used longest ago.

        Raises:
            InputError: there cannot be.
        """
        folders = [path for path in self.folder.iterdir() if (path / _OURS).is_file()]
        sizes = {path: _size(path) for path in folders}
        for path in sorted(folders, key=_last_used):
            if sum(sizes.values()) + size <= self.max_bytes:
                return
            if path != used and self._removed(path):
                del sizes[path]
        if (needed := sum(sizes.values()) + size) > self.max_bytes:
            raise InputError(
                f"cache_gb: the embeddings of {used.name.rpartition('-')[0]} and others in use take at least "
                f"{needed / GB:.3g} GB, more than the {self.max_bytes / GB:.3g} GB allowed: raise it, or take "
                "--store_dtype bfloat16"
            )

    def _removed(self, folder: Path) -> bool:
        """Whether a folder could be removed: it is not where another process uses it."""
        lock = self._lock(folder.name)
        try:
            with lock.acquire(timeout=0):
                shutil.rmtree(folder, ignore_errors=True)
        except Timeout:
            return False
        return not folder.exists()

    def _lock(self, name: str) -> FileLock:
        """Freed by the system when its process ends, however it ends; not beside what it protects, which may go."""
        place = self.folder / _LOCKS
        with refused(f"cannot write {self.folder}"):
            place.mkdir(parents=True, exist_ok=True)
        return FileLock(place / f"{name}.lock")


@dataclass(eq=False)
class TaskEmbeddings:
    """The embeddings of a task's texts: made when they are asked for, by whichever layer comes first.

    `num_passed` counts the texts that a forward pass was made for, `num_cut` and `num_empty` those that lost their end
    to the limit of tokens or have no token of their own.
    """

    view: LayeredModel
    embedding: Embedding
    store: Store
    folder: Path
    num_passed: int = 0
    num_cut: int = 0
    num_empty: int = 0
    _places: dict[str, tuple[int, int]] = field(default_factory=dict, repr=False)  # text: its chunk, its row there
    _chunks: list[LayerFeatures] = field(default_factory=list, repr=False)
    _read: dict[int, np.ndarray] = field(default_factory=dict, repr=False)  # chunks of one layer
    _layer: int | None = field(default=None, repr=False)

    @property
    def num_texts(self) -> int:
        """Distinct texts asked for so far."""
        return len(self._places)

    def of(self, texts: Sequence[str], layer: int) -> np.ndarray:
        """The embeddings (texts, dim) of one layer, float32, in the order of the texts.

        Raises:
            NotFiniteError: a text whose embedding there is not finite.
        """
        missing = list(dict.fromkeys(text for text in texts if text not in self._places))
        for start in range(0, len(missing), CHUNK):
            self._add(missing[start : start + CHUNK])
        if layer != self._layer:  # memory holds one layer at a time
            self._read, self._layer = {}, layer
        places = np.array([self._places[text] for text in texts], dtype=np.int64).reshape(-1, 2)
        vectors = np.empty((len(texts), self.view.dim), dtype=np.float32)
        for chunk in np.unique(places[:, 0]).tolist():
            if chunk not in self._read:
                self._read[chunk] = self._chunks[chunk].layer(layer).to(torch.float32).numpy()
            here = places[:, 0] == chunk
            vectors[here] = self._read[chunk][places[here, 1]]
        finite = np.isfinite(vectors).all(1)
        if not finite.all():
            raise NotFiniteError(f"the features of text {finite.argmin()} at layer {layer} are not finite")
        return vectors

    def features_of_first(self, most: int, view: LayeredModel) -> LayerFeatures:
        """Of the first texts that were asked for, by another view of the model."""
        encoded, _ = self.embedding.encode(list(self._places)[:most])
        return text_features(view, encoded, **self.embedding.how)

    def distances(self, exact: LayerFeatures, layer: int) -> list[float | None]:
        """How far the first texts' embeddings are from features of them, as a share of the length of these.

        None where a feature has no length.
        """
        rounded = self.of(list(self._places)[: exact.num_rows], layer)
        vectors = exact.layer(layer).double().numpy()
        norms = np.linalg.norm(vectors, axis=1).tolist()
        distances = np.linalg.norm(rounded - vectors, axis=1).tolist()
        return [distance / norm if norm else None for distance, norm in zip(distances, norms, strict=True)]

    def _add(self, texts: list[str]) -> None:
        encoded, num_empty = self.embedding.encode(texts)
        folder = self.folder / _key(texts)
        if not (folder / _WHOLE).is_file():
            shutil.rmtree(folder, ignore_errors=True)
            width = 2 if self.store.dtype != "float32" else 8 if self.view.dtype == torch.float64 else 4  # bytes
            size = len(texts) * (self.view.num_layers + 1) * self.view.dim * width
            self.store.make_room(size, used=self.folder)
        how: dict[str, Any] = {**self.embedding.how, "undefined": "nan", "store_dtype": self.store.dtype}
        self._chunks.append(text_features(self.view, encoded, cache=folder, **how))
        if not (folder / _WHOLE).is_file():
            self.num_passed += len(texts)
            write_json(folder / _WHOLE, {"num_texts": len(texts), "dtype": self.store.dtype})
        self._places |= {text: (len(self._chunks) - 1, row) for row, text in enumerate(texts)}
        self.num_cut += encoded.num_cut
        self.num_empty += num_empty


def _format(dtype: StoreDtype) -> list[str]:
    """Of what is kept; halves were files of another form before."""
    return [dtype] if dtype == "float32" else [dtype, "features"]


def _way(view: LayeredModel) -> list[str]:
    """How a model of these weights is run."""
    config = getattr(view.model, "config", None)
    described = config.to_json_string() if config is not None else ""
    return [type(view.model).__name__, view.attention, view.precision, view.device.type, described]


def _key(parts: Sequence[str | int]) -> str:
    return hashlib.sha256(json.dumps(list(parts)).encode()).hexdigest()[:16]


def _last_used(folder: Path) -> float:
    with contextlib.suppress(FileNotFoundError):
        return folder.stat().st_mtime
    return 0.0


def _size(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(FileNotFoundError):  # another process has removed it
            total += path.stat().st_size
    return total
