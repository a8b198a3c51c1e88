"""Texts that an analysis measures on, as they are read and not yet as token ids."""

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Literal

from torch import Tensor

from lit_layers.data.batches import Batches
from lit_layers.data.encoded_texts import EncodedTexts, encode_texts, padded, tokenizer_of
from lit_layers.data.text import EvalText
from lit_layers.data.tokenization import load_tokenizer
from lit_layers.errors import InputError
from lit_layers.tasks.catalogue import find_task
from lit_layers.tasks.labelled_rows import draw
from lit_layers.tasks.probe_task import ProbeTask


class Texts(ABC):
    """The same texts in the same order at every checkpoint. Constructors are cheap; data loads on first use."""

    @abstractmethod
    def texts(self) -> Sequence[str]:
        """The texts, none of them empty.

        Raises:
            InputError: data that is not there, or a text without a word.
        """

    def content_hash(self) -> str:
        """Sixteen hex digits over the texts."""
        return hashlib.sha256(json.dumps(list(self.texts())).encode()).hexdigest()[:16]


class GivenTexts(Texts):
    """Texts at hand. The config of an analysis holds their hash and not them.

    Raises:
        InputError: no text, or one without a word.
    """

    def __init__(self, texts: Sequence[str]) -> None:
        if isinstance(texts, str):
            raise InputError("texts: expected a list of texts, got one text")
        self._texts = checked(list(texts))
        self.hash = self.content_hash()

    def texts(self) -> Sequence[str]:
        return self._texts


@dataclass
class TaskTexts(Texts):
    """Texts of a downstream task, drawn without replacement.

    Args:
        task: A name of the catalogue, or a `ProbeTask`.
        folder: Local data, where the task's files lie; None: the Hub.
        part: `train`, `validation` or `test`.
        num_texts: Number of texts; of a part with fewer, all. None: all.
        seed: Decides which texts are drawn.
    """

    task: str | ProbeTask
    _: KW_ONLY
    folder: str | None = None
    part: Literal["train", "validation", "test"] = "test"
    num_texts: int | None = 1000
    seed: int = 0
    _texts: list[str] | None = field(default=None, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.part not in ("train", "validation", "test"):
            raise InputError(f"expected the part train, validation or test, not {self.part!r}")
        _check_counts(num_texts=self.num_texts)

    def texts(self) -> Sequence[str]:
        if self._texts is None:
            rows = list(getattr(find_task(self.task).load(self.folder), self.part).texts)
            if self.num_texts is not None and self.num_texts < len(rows):
                rows = [rows[row] for row in draw(rows, self.num_texts, seed=self.seed, purpose="texts")]
            self._texts = checked(rows)
        return self._texts


@dataclass
class CorpusTexts(Texts):
    """Windows of a prepared corpus, as `EvalText` draws them, turned back into text.

    Args:
        corpus, tokenizer, split, documents, seed: As of `EvalText`.
        num_texts: Number of windows.
        num_tokens: Tokens a window, of this tokenizer.
    """

    corpus: str
    tokenizer: str
    _: KW_ONLY
    split: str = "validation"
    documents: tuple[float, float] = (0.0, 1.0)
    num_texts: int = 1000
    num_tokens: int = 128
    seed: int = 0
    _texts: list[str] | None = field(default=None, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        _check_counts(num_texts=self.num_texts)
        self._windows()  # refuses what is out of range

    def texts(self) -> Sequence[str]:
        if self._texts is None:
            found = load_tokenizer(tokenizer_of(self.tokenizer, self.corpus)).tokenizer
            self._texts = checked(found.decode_batch(self._windows().windows().tolist()))
        return self._texts

    def _windows(self) -> EvalText:
        return EvalText(
            self.corpus,
            self.tokenizer,
            split=self.split,
            documents=self.documents,
            num_sequences=self.num_texts,
            num_tokens=self.num_tokens,
            seed=self.seed,
        )


@dataclass
class TextBatches(Batches):
    """Texts of differing lengths as padded batches, in their order.

    Args:
        texts: The texts.
        tokenizer: A local path, a name on the Hub, or `bpe:SIZE`.
        corpus: Which the tokenizer bpe:SIZE is trained on.
        max_tokens: A longer text loses its end. The model's own limit is for the user to keep.
        batch_size: Texts a batch; the last batch may be smaller.
    """

    texts: Texts
    tokenizer: str
    _: KW_ONLY
    corpus: str | None = None
    max_tokens: int = 512
    batch_size: int = 16
    _encoded: EncodedTexts | None = field(default=None, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        _check_counts(max_tokens=self.max_tokens, batch_size=self.batch_size)

    def encoded(self) -> EncodedTexts:
        if self._encoded is None:
            tokenizer = tokenizer_of(self.tokenizer, self.corpus)
            self._encoded = encode_texts(tokenizer, self.texts.texts(), max_tokens=self.max_tokens)
        return self._encoded

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        found = self.encoded()
        for start in range(0, len(found), self.batch_size):
            yield padded(found.ids[start : start + self.batch_size], found.filler)

    def __len__(self) -> int:
        return -(-len(self.encoded()) // self.batch_size)

    def content_hash(self) -> str:
        return hashlib.sha256(f"{self.encoded().content_hash()} {self.batch_size}".encode()).hexdigest()[:16]

    def tokenizer_hash(self) -> str | None:
        return self.encoded().tokenizer_hash


def checked(texts: list[str]) -> list[str]:
    """The texts.

    Raises:
        InputError: there is none, or one without a word.
    """
    if not texts:
        raise InputError("texts: expected at least one text, got none")
    for row, text in enumerate(texts):
        if not isinstance(text, str) or not text.strip():
            raise InputError(f"texts: expected a text with words, text {row} is {text!r}: leave it out")
    return texts


def _check_counts(**counts: int | None) -> None:
    for name, count in counts.items():
        if count is not None and count < 1:
            raise InputError(f"{name} must be at least 1, not {count}")
