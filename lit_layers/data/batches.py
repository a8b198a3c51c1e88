"""Fixed batches that analyses measure on: windows of a corpus, tokenized texts, or the user's own batches."""

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
    """A fixed set of batches: the same batches in the same order at every checkpoint.

    A text batch is `{"input_ids": (batch, tokens), "attention_mask": (batch, tokens)}` of int64. An image batch is
    `{"pixel_values": (batch, channels, height, width)}`. Labels, if the data has any, are under `"labels"`.
    Constructors are cheap: the data is loaded on the first iteration.
    """

    @abstractmethod
    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        """Iterate over the batches from the first one, on the CPU."""

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of batches."""

    @abstractmethod
    def content_hash(self) -> str:
        """Return a hash of the values of all batches. Objects with equal hashes give equal measurements."""

    def tokenizer_hash(self) -> str | None:
        """Return the hash of the tokenizer that made the token ids, or None if it is unknown or there is none."""
        return None

    def origins(self) -> Tensor | None:
        """Return the id of the document that each text comes from, (texts,), or None if it is unknown."""
        return None


BATCH_TOKENS = 8192  # tokens per batch when features are extracted: 8,192 x 768 x 4 B = 25 MB for one hidden state
# Texts per call of the tokenizer. This limits memory: the encodings that a call returns take 140 bytes per token. Only
# their ids are kept, which take 4.
_CHUNK = 1000


@dataclass(frozen=True, eq=False)
class EncodedTexts:
    """Token ids of texts without padding, in the order of the texts."""

    ids: Sequence[np.ndarray]  # one array (tokens,) per text
    pad_id: int  # id at padded positions, which the attention mask hides
    tokenizer_hash: str
    num_cut: int  # number of truncated texts

    def __len__(self) -> int:
        return len(self.ids)

    def content_hash(self) -> str:
        """Return a hash of the token ids, as 16 hex digits."""
        return sha16(*(len(ids).to_bytes(4, "little") + np.asarray(ids, dtype="<i4").tobytes() for ids in self.ids))

    def split(self, batch_size: int) -> Iterator[dict[str, Tensor]]:
        """Yield padded batches of `batch_size` texts in order; the last batch may be smaller."""
        for start in range(0, len(self.ids), batch_size):
            yield padded(self.ids[start : start + batch_size], self.pad_id)

    def batches(self, max_tokens: int) -> Iterator[tuple[list[int], dict[str, Tensor]]]:
        """Yield batches of texts with similar lengths, longest first, each with the indices of its texts.

        A batch has at most `max_tokens` positions, including the padding on the right. A longer text has its own batch.
        """
        order = sorted(range(len(self.ids)), key=lambda row: (-len(self.ids[row]), row))
        start = 0
        while start < len(order):
            width = len(self.ids[order[start]])
            rows = order[start : start + max(1, max_tokens // width)]
            start += len(rows)
            yield rows, padded([self.ids[row] for row in rows], self.pad_id)


def padded(texts: Sequence[Sequence[int] | np.ndarray], pad_id: int) -> dict[str, Tensor]:
    """Return a batch of texts, padded on the right to the longest."""
    longest = max(map(len, texts))
    ids = torch.full((len(texts), longest), pad_id)
    mask = torch.zeros_like(ids)
    for row, text in enumerate(texts):
        ids[row, : len(text)], mask[row, : len(text)] = torch.as_tensor(np.asarray(text, dtype=np.int64)), 1
    return {"input_ids": ids, "attention_mask": mask}  # (batch, tokens of the longest text)


def tokenizer_of(tokenizer: str, corpus: str | None) -> str:
    """Return the path or Hub name of a tokenizer.

    `bpe:SIZE` gives the path of the tokenizer that was trained on the corpus, which is prepared first if necessary. Any
    other tokenizer is returned unchanged.

    Raises:
        InputError: `tokenizer` is `bpe:SIZE` and there is no corpus to train it on.
    """
    if bpe_size(tokenizer) is None:
        return tokenizer
    if corpus is None:
        raise InputError(f"tokenizer: {tokenizer} is trained on a corpus: name that as corpus")
    return str(prepared(corpus, tokenizer).tokenizer_path)


def encode_texts(tokenizer: str | TextTokenizer, texts: Sequence[str], *, max_tokens: int) -> EncodedTexts:
    """Tokenize texts, with the tokenizer's special tokens, and truncate each to `max_tokens` tokens.

    Truncation keeps the special tokens: a final [SEP] remains the last token.

    Raises:
        InputError: The tokenizer does not exist, or `max_tokens` leaves no room for a text next to the special tokens.
            The error is also raised if a text gives no token or contains a lone surrogate.
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
    """Non-overlapping windows of a prepared corpus, drawn without replacement.

    A window lies within one document.

    Args:
        corpus: `python`, `openwebtext`, `wikitext`, a text file or folder, or a folder made by `lit-layers prepare`.
        tokenizer: A local path, a name on the Hub, or `bpe:SIZE`.
        split: `validation` or `train`.
        documents: The range of the split's documents to draw from, as fractions of their number. Sets with ranges that
            do not overlap, such as (0, 0.7) and (0.7, 1), have no document in common.
        num_sequences: Number of windows. A larger set begins with the windows of a smaller one.
        min_sequences: Smallest number of windows to accept. All windows of the corpus are drawn, whatever the seed, if
            it has fewer than `num_sequences`. A warning then reports their number. If None, a corpus with fewer than
            `num_sequences` windows is refused.
        num_tokens: Tokens per window.
        batch_size: Windows per batch; the last batch may be smaller.
        seed: Decides which windows are drawn, and their order.

    Raises:
        InputError: An option is out of range. On the first iteration: the corpus has too few windows.
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
        self.documents = (first, last)  # a tuple, because recipes pass a list
        if not 0 <= first < last <= 1:
            raise InputError(f"documents: expected a share such as (0.0, 0.5), got {self.documents}")
        refuse_below_one(num_sequences=self.num_sequences, num_tokens=self.num_tokens, batch_size=self.batch_size)

    def windows(self) -> Tensor:
        """Return all token ids, int64. The first call loads or prepares the corpus."""
        return self._loaded[0]  # (sequences, num_tokens)

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        for ids in self.windows().split(self.batch_size):
            yield {"input_ids": ids.clone(), "attention_mask": torch.ones_like(ids)}  # (batch, num_tokens)

    def __len__(self) -> int:
        count = self.num_sequences if self.min_sequences is None else len(self.windows())
        return -(-count // self.batch_size)

    def content_hash(self) -> str:
        """Return a hash of the token ids and the batch size, as 16 hex digits."""
        ids = self.windows().numpy().astype("<i8")
        return sha16(f"{ids.shape} {self.batch_size}", ids.tobytes())

    def tokenizer_hash(self) -> str | None:
        """Return the tokenizer hash of the corpus. The first call loads or prepares the corpus."""
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
        documents = np.searchsorted(before, windows, side="right") - 1
        begin = starts[documents] + (windows - before[documents]) * self.num_tokens
        tokens = shards.tokens(self.split)
        chosen = np.stack([tokens[i : i + self.num_tokens].astype(np.int64) for i in begin])
        return torch.from_numpy(chosen), shards.tokenizer_hash, torch.from_numpy(documents)

    def _check(self, total: int) -> None:
        """Raise an error if `total`, the number of windows of the corpus, is too small to accept.

        Warn if it is smaller than `num_sequences`.
        """
        name = "num_sequences" if self.min_sequences is None else "min_sequences"
        there = f"{self.corpus!r} has {total} windows of {self.num_tokens} tokens in {self.documents} of {self.split}"
        if total < (least := getattr(self, name)):
            raise InputError(f"{there}, and {name} is {least}: ask for fewer or shorter ones")
        if total < self.num_sequences:
            logger.warning("%s: all are taken, num_sequences asks for %d", there, self.num_sequences)

    def _count(self, shards: TokenShards) -> tuple[np.ndarray, np.ndarray]:
        """Return the start of each document and its number of windows, for documents in the range `documents`.

        Documents that are shorter than a window are left out. Windows do not contain the end-of-text token.
        """
        starts = shards.document_starts(self.split)
        ends = np.append(starts[1:], shards.num_tokens(self.split))
        first, last = (int(share * len(starts)) for share in self.documents)
        counts = (ends[first:last] - starts[first:last] - 1) // self.num_tokens
        long_enough = np.flatnonzero(counts)
        return np.asarray(starts[first:last])[long_enough], counts[long_enough]


def draw_indices(total: int, num: int, seed: int | str) -> list[int]:
    """Return `num` distinct random indices below `total`. A larger draw begins with the indices of a smaller one."""
    generator, drawn = random.Random(seed), {}
    while len(drawn) < num:
        drawn[generator.randrange(total)] = None
    return list(drawn)


MAX = 10_000  # largest number of texts or images: all stay in memory and are measured at every checkpoint
_BATCH_ROWS = 16  # rows per batch, if the user passes a data set that gives single rows
_NAMES = ("input_ids", "attention_mask", "token_type_ids", "pixel_values")
_EXPECTED = (
    "expected `Batches`, or a DataLoader, a data set or a list of batches: dicts with input_ids or pixel_values, "
    "tensors, or pairs (inputs, labels)"
)


class GivenBatches(Batches):
    """The batches of a DataLoader, a data set or a list, read once so that every checkpoint sees the same ones.

    A batch is a tensor of token ids `(batch, tokens)` or of images `(batch, channels, height, width)`. It may also be a
    dict with that tensor as `input_ids` or `pixel_values`, or a tuple of such inputs and labels. A row of a data set
    has the same form without the batch dimension. If there is no attention mask, all token ids are used.

    Raises:
        InputError: The data has another type. On the first iteration: a batch has another form, there is no batch, or
            there are more than 10,000 rows.
    """

    def __init__(self, data: Any, *, tokenizer_hash: str | None = None) -> None:
        # A data set of torch or of `datasets` gives single rows. All other data gives batches.
        is_rows = isinstance(data, Dataset) or callable(getattr(data, "with_format", None))
        if not (is_rows or isinstance(data, DataLoader | Tensor | list | tuple)):
            raise InputError(f"batches: {_EXPECTED}; got a {type(data).__name__}")
        if isinstance(getattr(data, "sampler", None), DistributedSampler):
            raise InputError("batches: every process would measure other data: leave the DistributedSampler out")
        self._data: Any = data
        self._tokenizer_hash = tokenizer_hash
        self._is_rows = is_rows
        self._read: list[dict[str, Tensor]] | None = None

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        return iter([dict(batch) for batch in self._all])

    def __len__(self) -> int:
        return len(self._all)

    def content_hash(self) -> str:
        """Return a hash of the names, dtypes, shapes and values of all batches, as 16 hex digits."""
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
            for index, batch in enumerate(self._walk()):
                batches.append(_to_batch(batch, index))
                num_rows += len(next(iter(batches[-1].values())))
                refuse_many(num_rows)
            if not batches:
                raise InputError("batches: expected at least one batch, got none")
            self._read, self._data = batches, None
        return self._read

    def _walk(self) -> Iterator[Any]:
        if isinstance(self._data, Tensor):
            yield self._data
        elif self._is_rows:
            count = len(self._data)
            refuse_many(count)  # raise the error before the first row is read
            for start in range(0, count, _BATCH_ROWS):
                yield _collate([self._data[row] for row in range(start, min(start + _BATCH_ROWS, count))])
        else:
            yield from self._data


def refuse_many(count: int) -> None:
    """Raise InputError if there are more than `MAX` texts or images: too many to measure at every checkpoint."""
    if count > MAX:
        raise InputError(f"batches: expected at most {MAX} texts or images, got more: give Subset(data, range(64))")


def to_batches(data: Any) -> Batches:
    """Return `Batches` unchanged, and wrap any other data in `GivenBatches`."""
    return data if isinstance(data, Batches) else GivenBatches(data)


def _collate(rows: Sequence[Any]) -> Any:
    """Combine rows of a data set into a batch.

    Token ids are padded to the longest row. Other rows are combined by torch's `default_collate`.
    """
    first = rows[0]
    if isinstance(first, Mapping) and "input_ids" in first:
        return padded([_unpadded(row) for row in rows], 0)
    return torch.utils.data.default_collate(list(rows))


def _unpadded(row: Mapping[str, Any]) -> np.ndarray:
    """Return the token ids of a row of a data set without those that its attention mask hides."""
    ids, mask = np.asarray(row["input_ids"]), row.get("attention_mask")
    return ids if mask is None else ids[np.asarray(mask, dtype=bool)]


def _to_batch(batch: Any, index: int) -> dict[str, Tensor]:
    labels = None
    if isinstance(batch, list | tuple) and len(batch) > 0 and isinstance(batch[0], Tensor | Mapping):
        labels = batch[1] if len(batch) > 1 else None
        batch = batch[0]
    if isinstance(batch, Tensor):
        batch = {"pixel_values" if batch.is_floating_point() else "input_ids": batch}
    batch = batch if isinstance(batch, Mapping) else {}
    values = {name: torch.as_tensor(batch[name]).detach().cpu() for name in _NAMES if batch.get(name) is not None}
    inputs = next((name for name in ("input_ids", "pixel_values") if name in values), None)
    dimensions = {"input_ids": 2, "pixel_values": 4}
    if inputs is None:
        raise InputError(f"batches: {_EXPECTED}; batch {index} has {', '.join(map(str, batch)) or 'neither'}")
    if values[inputs].ndim != dimensions[inputs] or not values[inputs].numel():
        got = f"{tuple(values[inputs].shape)} in batch {index}"
        raise InputError(f"batches: expected {inputs} of {dimensions[inputs]} dimensions, got {got}")
    if inputs == "input_ids":
        values["input_ids"] = values["input_ids"].long()
        mask = values.setdefault("attention_mask", torch.ones_like(values["input_ids"]))
        if not mask.any(dim=-1).all():
            raise InputError(f"batches: a row of batch {index} has no 1 in its attention_mask")
    labels = batch.get("labels") if labels is None else labels
    one_per_row = labels is not None and isinstance(labels, Tensor) and labels.shape == (len(values[inputs]),)
    if labels is not None and one_per_row and not labels.is_floating_point():
        # Keep only labels of whole texts or images. Labels per token are left out, because they only repeat the text.
        values["labels"] = labels.detach().cpu().long()
    return values


class TokenBlocks(Dataset[dict[str, Tensor]]):
    """Consecutive token blocks of a split, for training: `{"input_ids": (num_tokens + 1,)}` of int64.

    The last token of a block is the first of the next. A model reads `input_ids[:-1]` and predicts `input_ids[1:]`, so
    every token of the split except the first is predicted once. Tokens at the end that do not fill a block are dropped.
    Documents follow each other within a block, separated by the end-of-text token.

    Each worker of a DataLoader opens its own memory map of the file.
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
        return {**self.__dict__, "_tokens": None}  # do not pickle the memory map, which would copy the whole file


# `unigram_entropy` counts at most this many tokens: 0.2 GB of uint16, read once. More tokens change the entropy only in
# the fourth digit.
MAX_TOKENS = 100_000_000


def unigram_entropy(shards: TokenShards, split: str = "train") -> float:
    """Return the entropy of the token frequencies, in nats: the loss of a model that ignores all context.

    Only the first `MAX_TOKENS` tokens of the split are counted.
    """
    tokens = shards.tokens(split)[:MAX_TOKENS]
    frequencies = np.bincount(tokens, minlength=shards.vocab_size) / len(tokens)
    present = frequencies[frequencies > 0]
    return float(-(present * np.log(present)).sum())
