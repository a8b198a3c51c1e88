"""Fixed batches that an analysis measures on: windows of a corpus, texts as token ids, and what other projects have."""

import functools
import logging
import random
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from lit_layers.data.preparing import TokenShards, prepared
from lit_layers.data.tokenization import TextTokenizer, bpe_size, load_tokenizer, tokenizer_hash, tokenizer_threads
from lit_layers.errors import InputError
from lit_layers.identity import sha16
from lit_layers.schema import refuse_below_one

logger = logging.getLogger(__name__)


class Batches(ABC):
    """The same batches in the same order at every checkpoint.

    A text batch is `{"input_ids": (batch, tokens), "attention_mask": (batch, tokens)}` of int64, an image batch
    `{"pixel_values": (batch, channels, height, width)}`; labels, where there are any, stand under `"labels"`.
    Constructors are cheap; data loads on the first walk.
    """

    @abstractmethod
    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        """Walk the batches from the first, on the CPU."""

    @abstractmethod
    def __len__(self) -> int:
        """Number of batches."""

    @abstractmethod
    def content_hash(self) -> str:
        """Hash of the values of every batch: two objects of equal hash give equal numbers."""

    def tokenizer_hash(self) -> str | None:
        """Hash of the tokenizer that made the token ids; None where there is none, or nobody knows it."""
        return None

    def origins(self) -> Tensor | None:
        """For each text the number of the document it is from; None where it is unknown."""
        return None


BATCH_TOKENS = 8192  # of a batch of texts whose features are kept: 8,192 x 768 x 4 B = 25 MB for a state
_CHUNK = 1000  # texts: the tokenizer's own account of a token takes 140 bytes, ours 4


@dataclass(frozen=True, eq=False)
class EncodedTexts:
    """Token ids of texts, in their order, each without padding."""

    ids: Sequence[np.ndarray]  # (tokens,) each
    pad_id: int  # stands in padded places, where no model looks
    tokenizer_hash: str
    num_cut: int  # texts that lost their end to the limit

    def __len__(self) -> int:
        return len(self.ids)

    def content_hash(self) -> str:
        """Sixteen hex digits over the token ids."""
        return sha16(*(len(ids).to_bytes(4, "little") + np.asarray(ids, dtype="<i4").tobytes() for ids in self.ids))

    def split(self, batch_size: int) -> Iterator[dict[str, Tensor]]:
        """Yield so many texts a batch, the last may have fewer, in their order."""
        for start in range(0, len(self.ids), batch_size):
            yield padded(self.ids[start : start + batch_size], self.pad_id)

    def batches(self, max_tokens: int) -> Iterator[tuple[list[int], dict[str, Tensor]]]:
        """The longest texts first, so that texts of a batch are of about one length; with the numbers of its rows.

        A batch has at most `max_tokens` places, padding (on the right) included, and at least one text. Which texts
        come together depends on the texts alone.
        """
        order = sorted(range(len(self.ids)), key=lambda row: (-len(self.ids[row]), row))
        start = 0
        while start < len(order):
            width = len(self.ids[order[start]])
            rows = order[start : start + max(1, max_tokens // width)]
            start += len(rows)
            yield rows, padded([self.ids[row] for row in rows], self.pad_id)


def padded(texts: Sequence[Sequence[int] | np.ndarray], pad_id: int) -> dict[str, Tensor]:
    """Return a batch of texts, filled up to the longest on the right."""
    longest = max(map(len, texts))
    ids = torch.full((len(texts), longest), pad_id)
    mask = torch.zeros_like(ids)
    for row, text in enumerate(texts):
        ids[row, : len(text)], mask[row, : len(text)] = torch.as_tensor(np.asarray(text, dtype=np.int64)), 1
    return {"input_ids": ids, "attention_mask": mask}  # (batch, tokens of the longest)


def tokenizer_of(tokenizer: str, corpus: str | None) -> str:
    """Where a tokenizer is found: as it is named, or, of `bpe:SIZE`, where the tokens of its corpus are kept.

    Raises:
        InputError: `bpe:SIZE` without the corpus that it is trained on.
    """
    if bpe_size(tokenizer) is None:
        return tokenizer
    if corpus is None:
        raise InputError(f"tokenizer: {tokenizer} is trained on a corpus: name that as corpus")
    return str(prepared(corpus, tokenizer).tokenizer_path)


def encode_texts(tokenizer: str | TextTokenizer, texts: Sequence[str], *, max_tokens: int) -> EncodedTexts:
    """The first `max_tokens` tokens of each text, the special tokens included that the tokenizer adds to any text.

    A text that is cut keeps those: a [SEP] stays its last token.

    Raises:
        InputError: no such tokenizer, a limit that leaves no room beside special tokens, or a text of which it makes
            no token.
    """
    for row, text in enumerate(texts):
        if not text.isascii() and re.search("[\ud800-\udfff]", text):
            raise InputError(f"text {row}: expected letters, got half of a pair of UTF-16")
    loaded = load_tokenizer(tokenizer) if isinstance(tokenizer, str) else tokenizer
    added = loaded.tokenizer.num_special_tokens_to_add(is_pair=False)
    if max_tokens <= added:
        raise InputError(f"max_tokens: expected more than the {added} special tokens of every text, got {max_tokens}")
    ids, num_cut = [], 0
    loaded.tokenizer.enable_truncation(max_tokens)
    try:
        with tokenizer_threads():
            for start in range(0, len(texts), _CHUNK):
                encodings = loaded.tokenizer.encode_batch(list(texts[start : start + _CHUNK]))
                ids += [np.array(encoding.ids, dtype=np.int32) for encoding in encodings]
                num_cut += sum(bool(encoding.overflowing) for encoding in encodings)
    finally:
        loaded.tokenizer.no_truncation()
    if empty := [row for row, each in enumerate(ids) if not len(each)]:
        name = f" {tokenizer!r}" if isinstance(tokenizer, str) else ""
        raise InputError(f"the tokenizer{name} makes no token of text {empty[0]}: use another, or drop the text")
    return EncodedTexts(ids, loaded.end_of_text_id, tokenizer_hash(loaded.tokenizer), num_cut)


@dataclass
class EvalText(Batches):
    """Non-overlapping windows of a prepared corpus, drawn without replacement; no window crosses a document's end.

    Args:
        corpus: `python`, `openwebtext`, `wikitext`, a text file or folder, or a folder made by `lit-layers prepare`.
        tokenizer: A local path, a name on the Hub, or `bpe:SIZE`.
        split: `validation` or `train`.
        documents: The share of the split's documents, in their order, to draw from: sets with shares that do not
            overlap, such as (0, 0.7) and (0.7, 1), have no document in common.
        num_sequences: Number of windows. A larger set begins with the windows of a smaller one.
        min_sequences: Of a corpus that has fewer than `num_sequences`, all are taken if they are at least so many, and
            the log says how many; None: fewer are refused. The number depends on the corpus and tokenizer alone.
        num_tokens: Tokens a window.
        batch_size: Windows a batch; the last batch may be smaller.
        seed: Decides which windows are drawn, and their order.

    Raises:
        InputError: for options out of range, and on the first walk for a corpus with too few windows.
    """

    corpus: str
    tokenizer: str
    _: KW_ONLY
    split: str = "validation"
    documents: tuple[float, float] = (0.0, 1.0)
    num_sequences: int = 64
    min_sequences: int | None = None
    num_tokens: int = 128
    batch_size: int = 16
    seed: int = 0

    def __post_init__(self) -> None:
        first, last = self.documents
        self.documents = (first, last)  # a recipe brings a list
        if not 0 <= first < last <= 1:
            raise InputError(f"documents: expected a share such as (0.0, 0.5), got {self.documents}")
        refuse_below_one(num_sequences=self.num_sequences, num_tokens=self.num_tokens, batch_size=self.batch_size)

    def windows(self) -> Tensor:
        """All token ids, int64; loads or prepares the corpus on the first call."""
        return self._loaded[0]  # (sequences, num_tokens)

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        for ids in self.windows().split(self.batch_size):
            yield {"input_ids": ids.clone(), "attention_mask": torch.ones_like(ids)}  # (batch, num_tokens)

    def __len__(self) -> int:
        number = self.num_sequences if self.min_sequences is None else len(self.windows())
        return -(-number // self.batch_size)

    def content_hash(self) -> str:
        """Sixteen hex digits over the token ids and how they are cut into batches."""
        ids = self.windows().numpy().astype("<i8")
        return sha16(f"{ids.shape} {self.batch_size}", ids.tobytes())

    def tokenizer_hash(self) -> str | None:
        """As the shards say that the windows are cut from; loads or prepares the corpus on the first call."""
        return self._loaded[1]

    def origins(self) -> Tensor:
        return self._loaded[2]  # (sequences,)

    @functools.cached_property
    def _loaded(self) -> tuple[Tensor, str, Tensor]:
        shards = prepared(self.corpus, self.tokenizer)
        starts, counts = self._count(shards)
        total = int(counts.sum())
        self._check(total)
        before = np.cumsum(counts) - counts
        windows = np.array(draw_indices(total, min(total, self.num_sequences), self.seed))
        document = np.searchsorted(before, windows, side="right") - 1
        begin = starts[document] + (windows - before[document]) * self.num_tokens
        tokens = shards.tokens(self.split)
        chosen = np.stack([tokens[i : i + self.num_tokens].astype(np.int64) for i in begin])
        return torch.from_numpy(chosen), shards.tokenizer_hash, torch.from_numpy(document)

    def _check(self, total: int) -> None:
        """Refuse a corpus that holds too few windows, and say where it holds fewer than were asked for."""
        name = "num_sequences" if self.min_sequences is None else "min_sequences"
        there = f"{self.corpus!r} has {total} windows of {self.num_tokens} tokens in {self.documents} of {self.split}"
        if total < (least := getattr(self, name)):
            raise InputError(f"{there}, and {name} is {least}: ask for fewer or shorter ones")
        if total < self.num_sequences:
            logger.warning("%s: all are taken, num_sequences asks for %d", there, self.num_sequences)

    def _count(self, shards: TokenShards) -> tuple[np.ndarray, np.ndarray]:
        """Where each document of the share starts and how many windows it holds, the end of text left out."""
        starts = shards.document_starts(self.split)
        ends = np.append(starts[1:], shards.num_tokens(self.split))
        first, last = (int(share * len(starts)) for share in self.documents)
        counts = (ends[first:last] - starts[first:last] - 1) // self.num_tokens
        long_enough = np.flatnonzero(counts)
        return np.asarray(starts[first:last])[long_enough], counts[long_enough]


def draw_indices(total: int, num: int, seed: int | str) -> list[int]:
    """`num` different numbers below `total`; more of them begin with the same."""
    generator, drawn = random.Random(seed), {}
    while len(drawn) < num:
        drawn[generator.randrange(total)] = None
    return list(drawn)


MAX_ROWS = 10_000  # texts or images; all are kept in memory and measured at every step
_BATCH_ROWS = 16  # of a data set in a batch
_NAMES = ("input_ids", "attention_mask", "token_type_ids", "pixel_values")
_EXPECTED = (
    "expected `Batches`, or a DataLoader, a data set or a list of batches: dicts with input_ids or pixel_values, "
    "tensors, or pairs (inputs, labels)"
)


class GivenBatches(Batches):
    """The batches of a DataLoader, a data set or a list, read once, so that they are the same at every checkpoint.

    A batch is a dict with `input_ids` or `pixel_values`, a tensor of token ids `(batch, tokens)` or of images `(batch,
    channels, height, width)`, or a pair of one of those and labels. Of a data set each row is one of these without its
    first dimension. Token ids without an attention mask are taken as unpadded.

    Raises:
        InputError: for anything else; on the first walk for batches that are none of these, none at all, or too many.
    """

    def __init__(self, given: Any, *, tokenizer_hash: str | None = None) -> None:
        is_rows = isinstance(given, Dataset) or callable(getattr(given, "with_format", None))  # of torch, of datasets
        if not (is_rows or isinstance(given, DataLoader | Tensor | list | tuple)):
            raise InputError(f"batches: {_EXPECTED}; got a {type(given).__name__}")
        if isinstance(getattr(given, "sampler", None), DistributedSampler):
            raise InputError("batches: every process would measure other data: leave the DistributedSampler out")
        self._given: Any = given
        self._tokenizer_hash = tokenizer_hash
        self._is_rows = is_rows
        self._read: list[dict[str, Tensor]] | None = None

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        return iter([dict(batch) for batch in self._all])

    def __len__(self) -> int:
        return len(self._all)

    def content_hash(self) -> str:
        """Sixteen hex digits over the names, shapes and values of every batch."""
        parts: list[str | memoryview] = []
        for name, values in (item for batch in self._all for item in sorted(batch.items())):
            parts += [f"{name} {values.dtype} {tuple(values.shape)}", np.ascontiguousarray(values.numpy()).data]
        return sha16(*parts)

    def tokenizer_hash(self) -> str | None:
        return self._tokenizer_hash

    @property
    def _all(self) -> list[dict[str, Tensor]]:
        if self._read is None:
            batches: list[dict[str, Tensor]] = []
            num_rows = 0
            for number, given in enumerate(self._walk()):
                batches.append(_to_batch(given, number))
                num_rows += len(next(iter(batches[-1].values())))
                refuse_many(num_rows)
            if not batches:
                raise InputError("batches: expected at least one batch, got none")
            self._read, self._given = batches, None
        return self._read

    def _walk(self) -> Iterator[Any]:
        if isinstance(self._given, Tensor):
            yield self._given
        elif self._is_rows:
            count = len(self._given)
            refuse_many(count)  # before any is made
            for start in range(0, count, _BATCH_ROWS):
                yield _collate([self._given[row] for row in range(start, min(start + _BATCH_ROWS, count))])
        else:
            yield from self._given


def refuse_many(count: int) -> None:
    """Refuse more texts or images than anybody means to measure at every step."""
    if count > MAX_ROWS:
        raise InputError(
            f"batches: expected at most {MAX_ROWS} texts or images, got more: give Subset(data, range(64))"
        )


def to_batches(given: Any) -> Batches:
    """Batches as they are, and others as `GivenBatches`."""
    return given if isinstance(given, Batches) else GivenBatches(given)


def _collate(rows: Sequence[Any]) -> Any:
    """Rows of a data set as a batch: texts filled up to the longest, everything else as torch does it."""
    first = rows[0]
    if isinstance(first, Mapping) and "input_ids" in first:
        return padded([_unpadded(row) for row in rows], 0)
    return torch.utils.data.default_collate(list(rows))


def _unpadded(row: Mapping[str, Any]) -> np.ndarray:
    """The token ids of a row without its padding."""
    ids, mask = np.asarray(row["input_ids"]), row.get("attention_mask")
    return ids if mask is None else ids[np.asarray(mask, dtype=bool)]


def _to_batch(given: Any, number: int) -> dict[str, Tensor]:
    labels = None
    if isinstance(given, list | tuple) and len(given) > 0 and isinstance(given[0], Tensor | Mapping):
        labels = given[1] if len(given) > 1 else None
        given = given[0]
    if isinstance(given, Tensor):
        given = {"pixel_values" if given.is_floating_point() else "input_ids": given}
    given = given if isinstance(given, Mapping) else {}
    values = {name: torch.as_tensor(given[name]).detach().cpu() for name in _NAMES if given.get(name) is not None}
    inputs = next((name for name in ("input_ids", "pixel_values") if name in values), None)
    dimensions = {"input_ids": 2, "pixel_values": 4}
    if inputs is None:
        raise InputError(f"batches: {_EXPECTED}; batch {number} has {', '.join(map(str, given)) or 'neither'}")
    if values[inputs].ndim != dimensions[inputs] or not values[inputs].numel():
        got = f"{tuple(values[inputs].shape)} in batch {number}"
        raise InputError(f"batches: expected {inputs} of {dimensions[inputs]} dimensions, got {got}")
    if inputs == "input_ids":
        values["input_ids"] = values["input_ids"].long()
        mask = values.setdefault("attention_mask", torch.ones_like(values["input_ids"]))
        if not mask.any(dim=-1).all():
            raise InputError(f"batches: a row of batch {number} has no 1 in its attention_mask")
    labels = given.get("labels") if labels is None else labels
    one_each = labels is not None and isinstance(labels, Tensor) and labels.shape == (len(values[inputs]),)
    if labels is not None and one_each and not labels.is_floating_point():
        values["labels"] = labels.detach().cpu().long()  # of texts or images; those of each token are the text itself
    return values


class TokenBlocks(Dataset[dict[str, Tensor]]):
    """The blocks of a split, one after the other: `{"input_ids": (num_tokens + 1,)}` of int64.

    The last token of a block is the first of the next: a model reads `input_ids[:-1]` and predicts `input_ids[1:]`, so
    that every token of the split but the first is predicted once (and the few that fill no block, never). Documents
    follow each other within a block, divided by the end of text.

    Every data-loader worker maps the file for itself.
    """

    def __init__(self, shards: TokenShards, split: str = "train", *, num_tokens: int = 1024):
        refuse_below_one(num_tokens=num_tokens)
        self.shards, self.split, self.num_tokens = shards, split, num_tokens
        self._tokens: np.ndarray | None = None
        if len(self) < 1:
            there = f"{shards.num_tokens(split)} tokens in the {split} split of {shards.folder}"
            raise InputError(f"{there} are too few for one block of {num_tokens} + 1")

    def __len__(self) -> int:
        return max(self.shards.num_tokens(self.split) - 1, 0) // self.num_tokens

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(f"block {index} of {len(self)}")
        if self._tokens is None:
            self._tokens = self.shards.tokens(self.split)
        first = index * self.num_tokens
        ids = self._tokens[first : first + self.num_tokens + 1].astype(np.int64)
        return {"input_ids": torch.from_numpy(ids)}

    def __getstate__(self) -> dict:
        return {**self.__dict__, "_tokens": None}  # a pickled memmap would carry its content


MAX_TOKENS = 100_000_000  # 0.2 GB of uint16 read once; the entropy of more differs in the fourth digit


def unigram_entropy(shards: TokenShards, split: str = "train") -> float:
    """Return the entropy of the token frequencies, in nats: the loss of a model that ignores all context.

    Over the first `MAX_TOKENS` tokens of the split.
    """
    tokens = shards.tokens(split)[:MAX_TOKENS]
    frequencies = np.bincount(tokens, minlength=shards.vocab_size) / len(tokens)
    present = frequencies[frequencies > 0]
    return float(-(present * np.log(present)).sum())
