"""Embeddings of texts at every layer, and what a sentence encoder says of its own: its pooling, prompts and similarity.

One forward pass gives all layers, and no text is passed twice. An encoder's files are data.
mteb is optional and takes seconds to import: functions do, where they need it.
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
# By the mode of a file, and by the switches of older files; without any it is the mean.
_POOLINGS: Mapping[str, TextPooling] = {"mean": "mean", "cls": "cls", "lasttoken": "last"}
_SWITCHES: Mapping[str, TextPooling] = {
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "cls",
    "pooling_mode_lasttoken": "last",
}
_UNLIMITED = 10**9  # how a tokenizer says that it has no limit: int(1e30)


@with_config(schema.OPEN)
class _Module(TypedDict):
    path: str
    type: str


@dataclass(frozen=True)
class SentenceEncoder:
    """What modules.json and the files beside it say.

    Args:
        pooling: of the states after the last block and the final norm.
        normalizes: whether a vector has length 1.
        similarity: what vectors are compared by.
        max_tokens: of a text, the tokenizer's special ones included; None: as many as the model takes.
        lowercases: texts before they are read.
        prompts: what stands before a text, by the name of a task, of a kind of tasks, or query and document.
        default_prompt: the name of the one before a text for which there is no other.
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
        """The prompts by name: of questions and documents there always is one, if an empty one."""
        return {"query": "", "document": "", **dict(self.prompts)}

    def text(self, text: str, prompt_name: str | None) -> str:
        """What the model reads of a text with the prompt of a name; None: with the default one."""
        whole = self.prompt_map.get(prompt_name or self.default_prompt or "", "") + text
        return whole.lower() if self.lowercases else whole

    def facts(self, follows: bool) -> dict[str, Any]:
        """What a result says of a layer at which pooling, normalisation and similarity hold, or do not."""
        pooled = {"pooling": self.pooling} if follows else {}
        how = {"normalized": follows and self.normalizes, "similarity": self.similarity if follows else "cosine"}
        return pooled | how | {"prompts": dict(self.prompts)}


def sentence_encoder(read: Callable[[str], bytes]) -> SentenceEncoder | None:
    """What a model says of itself as an encoder of sentences; None where it has no modules.json.

    Args:
        read: the content of a file of the model; one that is not there is a FileNotFoundError, a KeyError, or an
            InputError because of one.

    Raises:
        InputError: a module that is not Transformer, Pooling or Normalize, a way of pooling that is not by the mean,
            the first or the last token, files that are damaged.
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
    if (limit := transformer.get("max_seq_length")) is None:  # the tokenizer's counts
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


def _pooling(read: Callable[[str], bytes], place: str) -> TextPooling:
    """The one way of pooling that its file names."""
    if (config := _read(read, place)) is None:
        raise InputError(f"{MODULES} names {place}, which is not there: {_REMEDY}")
    switched = [name for name, on in config.items() if name.startswith("pooling_mode_") and on]
    modes = config.get("pooling_mode", switched or "mean")
    modes = [modes] if isinstance(modes, str) else modes
    known: dict[str, TextPooling] = {**_POOLINGS, **_SWITCHES}
    if len(modes) != 1 or modes[0] not in known:
        raise _mismatch(place, f"pooling by one of {', '.join(_POOLINGS)}", " and ".join(modes) or "nothing")
    return known[modes[0]]


def _read(read: Callable[[str], bytes], path: str, kind: Any = dict[str, Any]) -> Any:
    """The content of a file; None where there is none, or HF_HUB_OFFLINE keeps it away."""
    from huggingface_hub.errors import OfflineModeIsEnabled

    try:
        return schema.parse(read(path), kind, path, _REMEDY)
    except (FileNotFoundError, KeyError):
        return None
    except InputError as error:
        cause: BaseException | None = error
        if type(error.__cause__) is FileNotFoundError:  # what the Hub's client raises without a network is one, too
            return None
        while cause is not None and not isinstance(cause, OfflineModeIsEnabled):
            cause = cause.__cause__
        if cause is None:
            raise
        if path == MODULES:  # a snapshot of a model that has none does not say so, and most models have none
            warnings.warn(f"{path} is not in the cache, and the Hub is not asked: taken as not there", stacklevel=4)
        return None


def _mismatch(place: str, expected: Any, got: Any) -> InputError:
    return InputError(f"{place}: expected {expected}, got {got}: {_ADVICE}")


CHUNK = 8192  # texts in a file: 8,192 x 25 layers x 1,024 x 4 B = 0.8 GB
_MIN_NORM = 1e-12  # a vector that is shorter is divided by this, as torch.nn.functional.normalize does


class NotFiniteError(InputError):
    """A layer at which a text has no embedding."""


@dataclass(eq=False)
class TaskEmbeddings:
    """The embeddings of a task's texts: made when they are asked for, by whichever layer comes first.

    `last` is the pooling of the last layer, where that is another. `num_cut` and `num_empty` count the texts that lost
    their end to the limit of tokens or have no token of their own: the end of a text stands for each of the latter.
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
    _rows: dict[str, tuple[int, int]] = field(default_factory=dict, repr=False)  # text: its chunk, its row there
    _chunks: list[LayerFeatures] = field(default_factory=list, repr=False)

    @property
    def num_texts(self) -> int:
        """Distinct texts asked for so far."""
        return len(self._rows)

    def embed(self, texts: Sequence[str], layer: int) -> np.ndarray:
        """The embeddings (texts, dim) of one layer, float32, in the order of the texts.

        Raises:
            NotFiniteError: a text whose embedding there is not finite.
        """
        missing = list(dict.fromkeys(text for text in texts if text not in self._rows))
        for start in range(0, len(missing), CHUNK):
            self._add(missing[start : start + CHUNK])
        places = np.array([self._rows[text] for text in texts], dtype=np.int64).reshape(-1, 2)
        vectors = np.empty((len(texts), self.view.dim), dtype=np.float32)
        for chunk in np.unique(places[:, 0]).tolist():
            here = places[:, 0] == chunk
            vectors[here] = self._chunks[chunk].layer(layer, places[here, 1])
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
        self._uses_dot = self.followed is not None and self.followed.similarity == "dot"

    def encode(self, inputs: Any, *, task_metadata: Any = None, prompt_type: Any = None, **_: Any) -> np.ndarray:
        """The embeddings (texts, dim) of the texts that mteb hands over in batches."""
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
        """Cosines (first, second), or what the encoder compares by."""
        from mteb.similarity_functions import cos_sim, dot_score

        return (dot_score if self._uses_dot else cos_sim)(embeddings1, embeddings2)

    def similarity_pairwise(self, embeddings1: Any, embeddings2: Any) -> Any:
        """Cosines (pairs,), or what the encoder compares by."""
        from mteb.similarity_functions import pairwise_cos_sim, pairwise_dot_score

        return (pairwise_dot_score if self._uses_dot else pairwise_cos_sim)(embeddings1, embeddings2)

    @property
    def mteb_model_meta(self) -> "ModelMeta":
        from mteb.models.model_meta import ModelMeta

        return ModelMeta.create_empty({"name": f"lit_layers/layer_{self.layer:03d}", "revision": "no_revision"})
