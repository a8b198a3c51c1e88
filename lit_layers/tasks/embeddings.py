"""Text embeddings at every layer, and the settings of sentence encoders: pooling, prompts and similarity.

One forward pass gives the embeddings of all layers, and no text is passed twice. Code in the files of an encoder is
never run. mteb is optional and takes seconds to import, so only the functions that need it import it.
"""

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from pydantic import with_config
from typing_extensions import TypedDict

from lit_layers import schema
from lit_layers.data.batches import encode_texts
from lit_layers.data.tokenization import TextTokenizer
from lit_layers.errors import InputError
from lit_layers.models.view import LayeredModel, States
from lit_layers.tasks.text_features import LayerFeatures, TextPooling, text_features

if TYPE_CHECKING:
    from mteb.models.model_meta import ModelMeta

MODULES = "modules.json"
_ADVICE = "with --modules none pooled states are taken as they are"
_REMEDY = f"download or save the model again; {_ADVICE}"
# Pooling names in the config file of an encoder, and in this package. New files name one as `pooling_mode`. Older files
# have a boolean switch for each. The default is the mean.
_POOLINGS: Mapping[str, TextPooling] = {"mean": "mean", "cls": "cls", "lasttoken": "last"}
_SWITCHES: Mapping[str, TextPooling] = {
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "cls",
    "pooling_mode_lasttoken": "last",
}
_UNLIMITED = 10**9  # a limit of this or more means no limit: tokenizers without one store int(1e30)


@with_config(schema.OPEN)
class _Module(TypedDict):
    path: str
    type: str


@dataclass(frozen=True)
class SentenceEncoder:
    """The settings of a sentence encoder, as in modules.json and the files next to it.

    Args:
        pooling: Pooling of the hidden states after the last block and the final norm.
        normalizes: Whether embeddings are divided by their length.
        similarity: Similarity that embeddings are compared by.
        max_tokens: Maximum number of tokens of a text, including special tokens. If None, the model's limit applies.
        lowercases: Whether texts are lowercased before tokenization.
        prompts: Pairs of a name and the prompt put before a text. A name is a task, a type of task, `query` or
            `document`.
        default_prompt: Name of the prompt for texts that no other prompt applies to.
    """

    pooling: TextPooling
    normalizes: bool = False
    similarity: Literal["cosine", "dot"] = "cosine"
    max_tokens: int | None = None
    lowercases: bool = False
    prompts: tuple[tuple[str, str], ...] = ()
    default_prompt: str | None = None

    def __str__(self) -> str:
        parts = {"normalized": self.normalizes, "dot product": self.similarity == "dot", "prompts": self.prompts}
        return " + ".join([self.pooling, *(name for name, holds in parts.items() if holds)])

    @property
    def prompt_map(self) -> dict[str, str]:
        """Return the prompts by name. `query` and `document` are always present, by default as empty prompts."""
        return {"query": "", "document": "", **dict(self.prompts)}

    def text(self, text: str, prompt_name: str | None) -> str:
        """Return the text as the model reads it, after the prompt with this name or, if None, the default prompt."""
        whole = self.prompt_map.get(prompt_name or self.default_prompt or "", "") + text
        return whole.lower() if self.lowercases else whole

    def facts(self, follows: bool) -> dict[str, Any]:
        """Return what a layer's result file says about the encoder.

        `follows` tells whether the layer uses the encoder's pooling, normalisation and similarity.
        """
        pooled = {"pooling": self.pooling} if follows else {}
        how = {"normalized": follows and self.normalizes, "similarity": self.similarity if follows else "cosine"}
        return pooled | how | {"prompts": dict(self.prompts)}


def sentence_encoder(read: Callable[[str], bytes]) -> SentenceEncoder | None:
    """Return the sentence-encoder settings of a model, or None if it has no modules.json.

    Args:
        read: Function that returns the content of a file of the model. For a missing file it raises FileNotFoundError,
            KeyError, or an InputError caused by FileNotFoundError.

    Raises:
        InputError: A module is not Transformer, Pooling or Normalize, the pooling is not by mean, first or last token,
            or a file is damaged.
    """
    modules = _read(read, MODULES, list[_Module])
    if modules is None:
        return None
    kinds = [module["type"].rpartition(".")[2] for module in modules]
    usual = all(module["type"].startswith("sentence_transformers.") for module in modules)
    if not usual or kinds[:2] != ["Transformer", "Pooling"] or kinds[2:] not in ([], ["Normalize"]):
        types = ", ".join(module["type"] for module in modules) or "nothing"
        raise _mismatch(MODULES, "sentence_transformers' Transformer, Pooling, and perhaps Normalize", types)
    about = _read(read, "config_sentence_transformers.json") or {}
    prompts = {name: prompt for name, prompt in about.get("prompts", {}).items() if prompt}
    similarity = about.get("similarity_fn_name") or "cosine"
    if similarity not in ("cosine", "dot"):
        raise _mismatch("similarity_fn_name", "cosine or dot", similarity)
    transformer = _read(read, "sentence_bert_config.json") or {}
    # An encoder that has no limit of its own has the limit of its tokenizer.
    if (limit := transformer.get("max_seq_length")) is None:
        limit = (_read(read, "tokenizer_config.json") or {}).get("model_max_length")
    return SentenceEncoder(
        pooling=_pooling(read, f"{modules[1]['path']}/config.json"),
        normalizes=len(kinds) == 3,
        similarity=similarity,
        max_tokens=limit if isinstance(limit, int) and 0 < limit < _UNLIMITED else None,
        lowercases=transformer.get("do_lower_case", False),
        prompts=tuple(sorted(prompts.items())),
        default_prompt=about.get("default_prompt_name"),
    )


def _pooling(read: Callable[[str], bytes], path: str) -> TextPooling:
    """Return the pooling of a sentence encoder, read from `path`, the config file of its Pooling module."""
    if (config := _read(read, path)) is None:
        raise InputError(f"{MODULES} names {path}, which is not there: {_REMEDY}")
    switched = [name for name, on in config.items() if name.startswith("pooling_mode_") and on]
    modes = config.get("pooling_mode", switched or "mean")
    modes = [modes] if isinstance(modes, str) else modes
    known: dict[str, TextPooling] = {**_POOLINGS, **_SWITCHES}
    if len(modes) != 1 or modes[0] not in known:
        raise _mismatch(path, f"pooling by one of {', '.join(_POOLINGS)}", " and ".join(modes) or "nothing")
    if config.get("include_prompt") is False:
        raise _mismatch(path, "pooling that includes the prompt", "include_prompt: false")
    return known[modes[0]]


def _read(read: Callable[[str], bytes], path: str, kind: Any = dict[str, Any]) -> Any:
    """Return the parsed JSON file at `path` of an encoder, or None if it is missing.

    A file that cannot be downloaded because HF_HUB_OFFLINE is set counts as missing.
    """
    from huggingface_hub.errors import OfflineModeIsEnabled

    try:
        return schema.parse(read(path), kind, path, _REMEDY)
    except (FileNotFoundError, KeyError):
        return None
    except InputError as error:
        cause: BaseException | None = error
        # Only the exact type means that the file is missing. Without a network, the Hub client raises a subclass.
        if type(error.__cause__) is FileNotFoundError:
            return None
        while cause is not None and not isinstance(cause, OfflineModeIsEnabled):
            cause = cause.__cause__
        if cause is None:
            raise
        # HF_HUB_OFFLINE is set and the file is not cached, so it is unknown whether the model has it. Return None, as
        # if it were missing, because most models have no modules.json, and warn.
        if path == MODULES:
            warnings.warn(f"{path} is not in the cache, and the Hub is not asked: taken as not there", stacklevel=4)
        return None


def _mismatch(where: str, expected: Any, got: Any) -> InputError:
    return InputError(f"{where}: expected {expected}, got {got}: {_ADVICE}")


CHUNK = 8192  # texts per file of features: 8,192 x 25 layers x 1,024 x 4 B = 0.8 GB
_MIN_NORM = 1e-12  # embeddings are divided by their length or, if it is smaller, by this value


class NotFiniteError(InputError):
    """The embedding of a text at a layer is not finite."""


@dataclass(eq=False)
class TaskEmbeddings:
    """The embeddings of a task's texts at all layers, computed on the first request for a text and then cached.

    `last_pooling` is the pooling of the last layer. None means `pooling`, as at the other layers. `num_cut` counts
    truncated texts. `num_empty` counts blank texts that give no token. In place of such a text, the end-of-text token
    is embedded.
    """

    view: LayeredModel
    _: KW_ONLY
    tokenizer: TextTokenizer
    max_tokens: int
    pooling: TextPooling
    states: States
    last_pooling: TextPooling | None = None
    num_cut: int = 0
    num_empty: int = 0
    # Maps a text to the place of its features: the index in `_chunks` and the row in that chunk.
    _rows: dict[str, tuple[int, int]] = field(default_factory=dict, repr=False)
    _chunks: list[LayerFeatures] = field(default_factory=list, repr=False)

    @property
    def num_texts(self) -> int:
        """Return the number of distinct texts embedded so far."""
        return len(self._rows)

    def embed(self, texts: Sequence[str], layer: int) -> np.ndarray:
        """Return the embeddings (texts, dim) at one layer in float32, in the order of the texts.

        Raises:
            NotFiniteError: The embedding of a text at this layer is not finite.
        """
        missing = list(dict.fromkeys(text for text in texts if text not in self._rows))
        for start in range(0, len(missing), CHUNK):
            self._add(missing[start : start + CHUNK])
        rows = np.array([self._rows[text] for text in texts], dtype=np.int64).reshape(-1, 2)
        vectors = np.empty((len(texts), self.view.dim), dtype=np.float32)
        for chunk in np.unique(rows[:, 0]).tolist():
            here = rows[:, 0] == chunk
            vectors[here] = self._chunks[chunk].layer(layer, rows[here, 1])
        finite = np.isfinite(vectors).all(1)
        if not finite.all():
            raise NotFiniteError(f"the features of text {finite.argmin()} at layer {layer} are not finite")
        return vectors

    def _add(self, texts: list[str]) -> None:
        tokenizer, end = self.tokenizer.tokenizer, self.tokenizer.end_of_text
        empty = [not text.strip() and not tokenizer.encode(text).ids for text in texts]
        filled = [end if is_empty else text for text, is_empty in zip(texts, empty, strict=True)]
        encoded = encode_texts(self.tokenizer, filled, max_tokens=self.max_tokens)
        how: Any = {name: getattr(self, name) for name in ("pooling", "states", "last_pooling")}
        self._chunks.append(text_features(self.view, encoded, undefined="nan", **how))
        self._rows |= {text: (len(self._chunks) - 1, row) for row, text in enumerate(texts)}
        self.num_cut += encoded.num_cut
        self.num_empty += sum(empty)


class LayerEncoder:
    """The embeddings of one layer in float32, with the interface of mteb's `EncoderProtocol`.

    Args:
        embeddings: The embeddings of the task's texts.
        layer: The layer, 0 to L.
        encoder: The sentence-encoder settings, whose prompts are put before texts. None means no prompts.
        follows: Whether this layer uses the encoder's normalisation and similarity. If not, pooled vectors are not
            normalised and are compared by their cosine.
    """

    def __init__(
        self, embeddings: TaskEmbeddings, layer: int, encoder: SentenceEncoder | None = None, *, follows: bool = True
    ) -> None:
        self.embeddings, self.layer = embeddings, layer
        self.encoder, self.followed = encoder, encoder if follows else None
        self._dot = self.followed is not None and self.followed.similarity == "dot"

    def encode(self, inputs: Any, *, task_metadata: Any = None, prompt_type: Any = None, **_: Any) -> np.ndarray:
        """Return the embeddings (texts, dim) of the batches of texts that mteb passes."""
        from mteb.models.abs_encoder import get_prompt_name

        texts = [text for batch in inputs for text in batch["text"]]
        if self.encoder is not None:
            name = get_prompt_name(self.encoder.prompt_map, task_metadata, prompt_type)
            texts = [self.encoder.text(text, name) for text in texts]
        vectors = self.embeddings.embed(texts, self.layer)
        if self.followed is None or not self.followed.normalizes:
            return vectors
        return vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), _MIN_NORM)

    def similarity(self, embeddings1: Any, embeddings2: Any) -> Any:
        """Return the similarity of each of the first embeddings with each of the second, (first, second).

        It is the similarity that the encoder defines, or by default the cosine.
        """
        from mteb.similarity_functions import cos_sim, dot_score

        return (dot_score if self._dot else cos_sim)(embeddings1, embeddings2)

    def similarity_pairwise(self, embeddings1: Any, embeddings2: Any) -> Any:
        """Return the similarity of row i of the first embeddings with row i of the second, (rows,)."""
        from mteb.similarity_functions import pairwise_cos_sim, pairwise_dot_score

        return (pairwise_dot_score if self._dot else pairwise_cos_sim)(embeddings1, embeddings2)

    @property
    def mteb_model_meta(self) -> "ModelMeta":
        from mteb.models.model_meta import ModelMeta

        return ModelMeta.create_empty({"name": f"lit_layers/layer_{self.layer:03d}", "revision": "no_revision"})
