"""Text data sets of the Hugging Face Hub, streamed: no row is kept longer than it is needed."""

import contextlib
import re
from collections.abc import Iterator
from typing import Any

from lit_layers.data.corpora import SPLITS, Document, Documents, Source
from lit_layers.downloads import HUB_ERRORS, reason
from lit_layers.errors import InputError

TITLE = re.compile(r" = [^=].* = \n")  # the first line of an article; " = = Section = = \n" is none
BY_LINE = ("Salesforce/wikitext",)  # a row is a line there, and a document many rows


class HubText(Source):
    """A data set as `ORG/NAME` or `ORG/NAME:CONFIG`. Its own validation split is used where it has one."""

    def __init__(self, name: str, *, column: str = "text", validation: float | None = None):
        self.name, _, self.config = name.partition(":")
        self.column, self.asked = column, validation

    def describe(self) -> dict[str, Any]:
        return {
            "kind": "hub",
            "name": self.name,
            "config": self.config or None,
            "column": self.column,
            "validation": self.asked,
        }

    def pin(self, revision: str | None) -> None:
        """Opens the data set at `revision`, or at its newest commit."""
        from huggingface_hub import HfApi

        with _reaching(f"the data set {self.name!r} is no local path and cannot be had from the Hub"):
            self.revision = revision or HfApi().dataset_info(self.name).sha
            splits = set(self._open(None))
        own = {"train", "validation"} <= splits
        if own and self.asked is not None:
            raise InputError(f"{self.name} brings its own validation split: leave validation out")
        if "train" not in splits:
            raise InputError(f"{self.name} has no split 'train' (it has {', '.join(sorted(splits))}): name another one")
        self.splits = SPLITS if own else (None,)
        self.validation = None if own else self.asked or 0.01

    def read(self, split: str | None, position: Any = None) -> "_Rows":
        with _reaching(f"the data set {self.name!r} cannot be had from the Hub"):
            stream = self._open(split or "train")
        kind = _Articles if self.name in BY_LINE else _Rows
        return kind(self, stream, position or {"rows": 0, "stream": None})

    def _open(self, split: str | None) -> Any:
        import datasets

        return datasets.load_dataset(
            self.name, self.config or None, split=split, revision=self.revision, streaming=True
        )


@contextlib.contextmanager
def _reaching(what: str) -> Iterator[None]:
    """Turns the many ways in which the Hub can fail into one sentence."""
    try:
        yield
    except InputError:
        raise
    except HUB_ERRORS as error:
        raise InputError(f"{what} ({reason(error)}): check the name and the network, then run again") from error


class _Rows(Documents):
    """`position` holds the number of rows read and what `datasets` needs to go on from there."""

    def __init__(self, source: HubText, stream: Any, position: dict[str, Any]):
        self.source, self.stream = source, stream
        if position["stream"] is not None:
            stream.load_state_dict(position["stream"])
        self.count = position["rows"]

    @property
    def position(self) -> dict[str, Any]:
        return {"rows": self.count, "stream": self.stream.state_dict()}

    def rows(self) -> Iterator[str]:
        name, column = self.source.name, self.source.column
        rows = iter(self.stream)
        while True:
            with _reaching(f"{name} broke off after {self.count} rows"):
                row = next(rows, None)
            if row is None:
                return
            if column not in row:
                raise InputError(
                    f"{name} has no column {column!r} (it has {', '.join(row)}): name the column of the text"
                )
            if not isinstance(row[column], str | None):
                kind = type(row[column]).__name__
                raise InputError(f"column {column!r} of {name} holds {kind}, not text: name another column")
            self.count += 1
            yield row[column] or ""

    def __iter__(self) -> Iterator[Document]:
        for text in self.rows():
            yield Document(f"{self.source.name}:{self.count - 1}", text)


class _Articles(_Rows):
    """Rows that are lines, gathered into articles; the title line that ended the last one waits in `held`."""

    def __init__(self, source: HubText, stream: Any, position: dict[str, Any]):
        super().__init__(source, stream, position)
        self.held: list[str] = list(position.get("held", []))

    @property
    def position(self) -> dict[str, Any]:
        return {**super().position, "held": self.held}

    def __iter__(self) -> Iterator[Document]:
        lines, self.held = self.held, []
        for line in self.rows():
            if TITLE.fullmatch(line) and lines:
                self.held = [line]
                yield Document(f"{self.source.name}:{self.count - 1}", "".join(lines))
                lines, self.held = self.held, []
            else:
                lines.append(line)
        if lines:
            yield Document(f"{self.source.name}:{self.count}", "".join(lines))
