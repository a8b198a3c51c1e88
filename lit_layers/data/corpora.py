"""Where text comes from: documents in a fixed order that can be taken up again at any of them."""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any, NamedTuple

SPLITS = ("validation", "train")  # validation first: a training document that repeats one of it can then be dropped


class Document(NamedTuple):
    id: str
    text: str


class Documents(ABC):
    """A walk over documents. `position` is plain JSON; a walk begun at it gives what follows the last document."""

    position: Any = None
    fraction: float | None = None  # share of the source read so far, where it is known

    @abstractmethod
    def __iter__(self) -> Iterator[Document]: ...


class Source(ABC):
    """A corpus that can be read in order.

    `splits` is `("validation", "train")` where the source says which document belongs where, and `(None,)` where it
    is one stream, of which the share `validation` is held out by a hash of each document's text. Equal documents then
    fall into one split, on every machine.
    """

    splits: tuple[str | None, ...] = (None,)
    validation: float | None = None
    revision: str | None = None  # the commit of a source that has one, fixed for the whole preparation

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """All that decides which documents come, as JSON: read without opening the documents or the network."""

    @abstractmethod
    def read(self, split: str | None, position: Any = None) -> Documents:
        """The documents of a split, from `position` on."""

    def size(self) -> int | None:
        """Bytes on disk, where that is known."""
        return None

    def pin(self, revision: str | None) -> None:  # noqa: B027 - most sources have nothing to fix
        """Fixes a source that may change to `revision`, or to what it is now."""


def digest(text: str) -> int:
    """64-bit content hash of a document."""
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8"), digest_size=8).digest(), "little")


def in_share(value: int, share: float) -> bool:
    """Whether a 64-bit hash falls into the first `share` of the range."""
    return value < share * 2**64
