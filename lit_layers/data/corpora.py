"""Where text comes from: documents in a fixed order that can be taken up again at any of them."""

import hashlib
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from lit_layers.errors import InputError

ALIASES = {"openwebtext": "Skylion007/openwebtext", "wikitext": "Salesforce/wikitext:wikitext-103-raw-v1"}
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


def open_source(
    spec: str, *, column: str | None = None, separator: str | None = None, validation: float | None = None
) -> Source:
    """The source named by `spec`: `python`, `openwebtext`, `wikitext`, a path, or a Hub data set `ORG/NAME[:CONFIG]`.

    Raises:
        InputError: for a path that does not exist, or an option that this source has no use for.
    """
    # One file a kind of source, imported where it is used: `datasets` alone takes a second.
    if validation is not None and not 0 < validation < 1:
        raise InputError(f"validation must lie between 0 and 1 (a share of the documents), not {validation}")
    if spec == "python":
        from lit_layers.data.python_corpus import PythonSources

        _refuse(spec, column=column, separator=separator)
        return PythonSources(validation=validation or 0.1)
    if Path(spec).exists():
        from lit_layers.data.local_text import LocalText

        return LocalText.open(Path(spec), column=column, separator=separator, validation=validation)
    name = ALIASES.get(spec, spec)
    if not re.fullmatch(r"[\w.-]+/[\w.-]+(:[\w.-]+)?", name) or Path(name).suffix in (".txt", ".parquet", ".jsonl"):
        known = ", ".join(["python", *ALIASES])
        raise InputError(
            f"no corpus {spec!r}: expected {known}, an existing path, or a Hub data set as ORG/NAME[:CONFIG]"
        )
    from lit_layers.data.hub_text import HubText

    _refuse(spec, separator=separator)
    return HubText(name, column=column or "text", validation=validation)


def _refuse(spec: str, **options: str | None) -> None:
    for option, value in options.items():
        if value is not None:
            raise InputError(f"{option} ({value!r}) means nothing for the corpus {spec!r}: leave it out")
