"""Embeddings of texts at every layer, on disk, and one layer of them as an encoder that mteb can evaluate.

One forward pass gives all layers, and no text is passed twice. A folder for each task and model holds the features that
`text_features` caches: their key is over all that decides the numbers. mteb is optional and takes seconds to import:
functions do, where they need it.
"""

import contextlib
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from filelock import FileLock

from lit_layers.analyses.probes.task_features import LayerFeatures, StoreDtype, TextPooling, text_features
from lit_layers.analyses.states import States
from lit_layers.data.batches import EncodedTexts, encode_texts
from lit_layers.data.tokenization import TextTokenizer
from lit_layers.errors import InputError, refused
from lit_layers.identity import hash_of
from lit_layers.models.view import LayeredModel
from lit_layers.tasks.sentence_encoder import SentenceEncoder

if TYPE_CHECKING:
    from mteb.models.model_meta import ModelMeta

CHUNK = 8192  # texts: 8,192 x 25 layers x 1,024 x 4 B = 0.8 GB are lost to a kill at most
_SHORTEST = 1e-12  # a vector that is shorter is divided by this, as torch.nn.functional.normalize does


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

    @property
    def how(self) -> dict[str, Any]:
        """Options of `text_features`."""
        return {"pooling": self.pooling, "states": self.states, "last": self.last}

    def encode(self, texts: Sequence[str]) -> tuple[EncodedTexts, int]:
        """Token ids, and of how many texts the tokenizer makes none: the end of a text stands for each of these."""
        tokenizer, end = self.tokenizer.tokenizer, self.tokenizer.end_of_text
        empty = [not text.strip() and not tokenizer.encode(text).ids for text in texts]
        filled = [end if is_empty else text for text, is_empty in zip(texts, empty, strict=True)]
        return encode_texts(self.tokenizer, filled, max_tokens=self.max_tokens), sum(empty)


class Store:
    """A folder of embeddings, those of a task until it is scored.

    Args:
        folder: shared by as many processes as there are.
        dtype: of what is kept. float32 is what the model gives; the halves take half the room and change scores
            (docs/mteb.md says by how much).
        keeps: whether the embeddings of a scored task stay.
    """

    def __init__(self, folder: Path, *, dtype: StoreDtype = "float32", keeps: bool = False) -> None:
        self.folder, self.keeps = folder, keeps
        self.dtype: StoreDtype = dtype

    @contextlib.contextmanager
    def opened(
        self, view: LayeredModel, embedding: Embedding, *, task: str, weights_hash: str
    ) -> Iterator["TaskEmbeddings"]:
        """The embeddings of one task; another process that asks for the same waits meanwhile."""
        name = f"{task}-{hash_of([weights_hash, view.precision, view.device.type])}"
        with refused(f"cannot write {self.folder}"):
            self.folder.mkdir(parents=True, exist_ok=True)
        with FileLock(self.folder / f".{name}.lock"):
            yield TaskEmbeddings(view, embedding, self.dtype, self.folder / name)
            if not self.keeps:
                shutil.rmtree(self.folder / name, ignore_errors=True)


@dataclass(eq=False)
class TaskEmbeddings:
    """The embeddings of a task's texts: made when they are asked for, by whichever layer comes first.

    `num_cut` and `num_empty` count the texts that lost their end to the limit of tokens or have no token of their own.
    """

    view: LayeredModel
    embedding: Embedding
    dtype: StoreDtype
    folder: Path
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
        how: dict[str, Any] = {**self.embedding.how, "undefined": "nan", "store_dtype": self.dtype}
        self._chunks.append(text_features(self.view, encoded, cache=self.folder, **how))
        self._places |= {text: (len(self._chunks) - 1, row) for row, text in enumerate(texts)}
        self.num_cut += encoded.num_cut
        self.num_empty += num_empty


class LayerEncoder:
    """What mteb's `EncoderProtocol` asks for: the embeddings of one layer, in float32.

    Args:
        encoder: what the model says of itself: its prompts stand before every text. None: the text goes in as it is.
        follows: whether vectors are normalised and compared as the encoder says; else they come out as they are pooled
            and are compared by their cosine.
    """

    def __init__(
        self, embeddings: TaskEmbeddings, layer: int, encoder: SentenceEncoder | None = None, *, follows: bool = True
    ) -> None:
        self.embeddings, self.layer = embeddings, layer
        self.encoder, self.followed = encoder, encoder if follows else None

    def encode(self, inputs: Any, *, task_metadata: Any = None, prompt_type: Any = None, **_: Any) -> np.ndarray:
        """The embeddings (texts, dim) of the texts that mteb hands over in batches."""
        from mteb.models.abs_encoder import get_prompt_name

        texts = [text for batch in inputs for text in batch["text"]]
        if self.encoder is not None:
            name = get_prompt_name(self.encoder.named, task_metadata, prompt_type)
            texts = [self.encoder.text(text, name) for text in texts]
        vectors = self.embeddings.of(texts, self.layer)
        if self.followed is None or not self.followed.normalizes:
            return vectors
        norms = np.linalg.norm(vectors, axis=1, keepdims=True)
        return vectors / np.maximum(norms, _SHORTEST)

    def similarity(self, embeddings1: Any, embeddings2: Any) -> Any:
        """Cosines (first, second), or what the encoder compares by."""
        from mteb.similarity_functions import cos_sim, dot_score

        return (dot_score if self._by_dot else cos_sim)(embeddings1, embeddings2)

    def similarity_pairwise(self, embeddings1: Any, embeddings2: Any) -> Any:
        """Cosines (pairs,), or what the encoder compares by."""
        from mteb.similarity_functions import pairwise_cos_sim, pairwise_dot_score

        return (pairwise_dot_score if self._by_dot else pairwise_cos_sim)(embeddings1, embeddings2)

    @property
    def _by_dot(self) -> bool:
        return self.followed is not None and self.followed.similarity == "dot"

    @property
    def mteb_model_meta(self) -> "ModelMeta":
        from mteb.models.model_meta import ModelMeta

        return ModelMeta.create_empty({"name": f"lit_layers/layer_{self.layer:03d}", "revision": "no_revision"})
