"""Fixed batches that can be walked again and again: what an analysis measures on."""

from abc import ABC, abstractmethod
from collections.abc import Iterator

from torch import Tensor


class Batches(ABC):
    """The same batches in the same order at every checkpoint.

    A text batch is `{"input_ids": (batch, tokens), "attention_mask": (batch, tokens)}` of int64, an image batch
    `{"pixel_values": (batch, channels, height, width)}`; labels, where there are any, stand under `"labels"`.
    Constructors are cheap; data loads on the first walk.
    """

    @abstractmethod
    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        """Walks the batches from the first, on the CPU."""

    @abstractmethod
    def __len__(self) -> int:
        """Number of batches."""

    @abstractmethod
    def content_hash(self) -> str:
        """Hash of the values of every batch: two objects of equal hash give equal numbers."""

    def tokenizer_hash(self) -> str | None:
        """Hash of the tokenizer that made the token ids; None where there is none, or nobody knows it."""
        return None
