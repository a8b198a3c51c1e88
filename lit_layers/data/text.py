"""Text to measure on and to train on: token windows within a document, blocks of a whole split."""

import hashlib
import logging
import random
from collections.abc import Iterator
from dataclasses import KW_ONLY, dataclass, field

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from lit_layers.data.batches import Batches
from lit_layers.data.preparing import prepare, prepared
from lit_layers.data.shards import TokenShards
from lit_layers.errors import InputError

logger = logging.getLogger(__name__)

__all__ = ["EvalText", "TokenShards", "duplicate_windows", "prepare", "prepared"]


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
    _windows: Tensor | None = field(default=None, init=False, repr=False, compare=False)
    _tokenizer_hash: str | None = field(default=None, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.split not in ("train", "validation"):
            raise InputError(f"expected the split train or validation, not {self.split!r}")
        first, last = self.documents
        self.documents = (first, last)  # a recipe brings a list
        if not 0 <= first < last <= 1:
            raise InputError(f"documents must be a share such as (0.0, 0.5), within 0 and 1, not {self.documents}")
        for name in ("num_sequences", "num_tokens", "batch_size"):
            if getattr(self, name) < 1:
                raise InputError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.min_sequences is not None and not 1 <= self.min_sequences <= self.num_sequences:
            limits = f"1 to num_sequences ({self.num_sequences})"
            raise InputError(f"min_sequences must be {limits}, or none, not {self.min_sequences}")

    def windows(self) -> Tensor:
        """All token ids, int64; loads or prepares the corpus on the first call."""
        if self._windows is None:
            self._windows = self._load()
        return self._windows  # (sequences, num_tokens)

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        for ids in self.windows().split(self.batch_size):
            yield {"input_ids": ids.clone(), "attention_mask": torch.ones_like(ids)}  # (batch, num_tokens)

    def __len__(self) -> int:
        number = self.num_sequences if self.min_sequences is None else len(self.windows())
        return -(-number // self.batch_size)

    def content_hash(self) -> str:
        """Sixteen hex digits over the token ids and how they are cut into batches."""
        ids = self.windows().numpy().astype("<i8")
        return hashlib.sha256(f"{ids.shape} {self.batch_size}".encode() + ids.tobytes()).hexdigest()[:16]

    def tokenizer_hash(self) -> str | None:
        """As the shards say that the windows are cut from; loads or prepares the corpus on the first call."""
        self.windows()
        return self._tokenizer_hash

    def _load(self) -> Tensor:
        shards = prepared(self.corpus, self.tokenizer)
        self._tokenizer_hash = shards.tokenizer_hash
        starts, counts = self._count(shards)
        total = int(counts.sum())
        if total < self.num_sequences:
            least = self.num_sequences if self.min_sequences is None else self.min_sequences
            there = (
                f"{self.corpus!r} has {total} windows of {self.num_tokens} tokens in the documents {self.documents} of "
                f"its {self.split} split"
            )
            if total < least:
                option = "num_sequences" if self.min_sequences is None else "min_sequences"
                raise InputError(f"{there}, and {option} is {least}: ask for fewer or shorter ones")
            logger.warning("%s: all are taken, num_sequences asks for %d", there, self.num_sequences)
        before = np.cumsum(counts) - counts
        windows = np.array(different_numbers(total, min(total, self.num_sequences), self.seed))
        document = np.searchsorted(before, windows, side="right") - 1
        begin = starts[document] + (windows - before[document]) * self.num_tokens
        tokens = shards.tokens(self.split)
        return torch.from_numpy(np.stack([tokens[i : i + self.num_tokens].astype(np.int64) for i in begin]))

    def _count(self, shards: TokenShards) -> tuple[np.ndarray, np.ndarray]:
        """Where each document of the share starts and how many windows it holds, the end of text left out."""
        starts = shards.document_starts(self.split)
        ends = np.append(starts[1:], shards.num_tokens(self.split))
        first, last = (int(share * len(starts)) for share in self.documents)
        counts = (ends[first:last] - starts[first:last] - 1) // self.num_tokens
        kept = np.flatnonzero(counts)
        return np.asarray(starts[first:last])[kept], counts[kept]


def duplicate_windows(windows: Tensor, others: Tensor) -> Tensor:
    """Which rows of `windows` also stand in `others`: a bool a row, its sum the number of duplicates."""
    rows = {row.tobytes() for row in others.numpy()}
    return torch.tensor([row.tobytes() in rows for row in windows.numpy()], dtype=torch.bool)  # (windows,)


def different_numbers(total: int, num: int, seed: int | str) -> list[int]:
    """`num` different numbers below `total`; more of them begin with the same."""
    generator, drawn = random.Random(seed), {}
    while len(drawn) < num:
        drawn[generator.randrange(total)] = None
    return list(drawn)


class TokenBlocks(Dataset[dict[str, Tensor]]):
    """The blocks of a split, one after the other: `{"input_ids": (num_tokens + 1,)}` of int64.

    The last token of a block is the first of the next: a model reads `input_ids[:-1]` and predicts `input_ids[1:]`, so
    that every token of the split but the first is predicted once (and the few that fill no block, never). Documents
    follow each other within a block, divided by the end of text.

    Every data-loader worker maps the file for itself.
    """

    def __init__(self, shards: TokenShards, split: str = "train", *, num_tokens: int = 1024):
        if num_tokens < 1:
            raise InputError(f"num_tokens must be at least 1, not {num_tokens}")
        self.shards, self.split, self.num_tokens = shards, split, num_tokens
        self._tokens: np.ndarray | None = None
        if len(self) < 1:
            raise InputError(
                f"the {split} split of {shards.folder} has {shards.num_tokens(split)} tokens, too few for one block of "
                f"{num_tokens} + 1: use shorter blocks or a larger corpus"
            )

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
    """Returns the entropy of the token frequencies, in nats: the loss of a model that ignores all context.

    Over the first `MAX_TOKENS` tokens of the split.
    """
    tokens = shards.tokens(split)[:MAX_TOKENS]
    frequencies = np.bincount(tokens, minlength=shards.vocab_size) / len(tokens)
    present = frequencies[frequencies > 0]
    return float(-(present * np.log(present)).sum())
