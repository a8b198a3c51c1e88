"""What the user asks for: `ANALYSIS/METRIC[tag=value,...]`."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from lit_layers.errors import InputError

TEXTS = ("task", "common")
_FORM = re.compile(r"\s*([^\[\],]+?)\s*(?:\[([^\[\]]*)\])?\s*")


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """A metric by its name, with its analysis and tags where they are given.

    `texts` is "task" or "common" where it is to be decided whether the metric was measured on each task's own texts.
    """

    text: str
    name: str
    analysis: str | None = None
    tags: Mapping[str, str] = field(default_factory=dict)
    texts: str | None = None

    @classmethod
    def of(cls, text: str, option: str = "metrics") -> "Wanted":
        """Reads `NAME`, `ANALYSIS/NAME` or either with `[tag=value,...]`.

        Raises:
            InputError: for a text of another form.
        """
        form = _FORM.fullmatch(text)
        if form is None:
            raise InputError(f"{option}: expected NAME, ANALYSIS/NAME or NAME[tag=value,...], got {text!r}")
        analysis, _, name = form[1].rpartition("/")
        tags = {}
        for part in filter(None, (part.strip() for part in (form[2] or "").split(","))):
            tag, equals, value = (side.strip() for side in part.partition("="))
            if not (tag and equals and value):
                raise InputError(f"{option}: expected tag=value between the brackets of {text!r}, got {part!r}")
            tags[tag] = value
        texts = tags.pop("texts", None)
        if texts not in (None, *TEXTS):
            raise InputError(f"{option}: expected texts=task or texts=common in {text!r}, got {texts!r}")
        return cls(text=text.strip(), name=name, analysis=analysis or None, tags=tags, texts=texts)

    def fits(self, tags: Mapping[str, Any]) -> bool:
        """Whether a record with these tags is meant; numbers may be written in any way, `drop_first=1`, `k=0.10`."""
        return all(name in tags and _alike(tags[name], value) for name, value in self.tags.items())


def split(text: str) -> list[str]:
    """Returns the parts between the commas that stand outside brackets."""
    parts = [part.strip() for part in re.split(r",(?![^\[\]]*\])", text)]
    return [part for part in parts if part]


def _alike(own: Any, wanted: str) -> bool:
    try:
        return float(own) == float(wanted)
    except ValueError:
        return str(own) == wanted
