"""What an analysis is: data in, records out."""

import dataclasses
import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from lit_layers.models.view import LayeredModel
from lit_layers.records import Record


class Analysis(ABC):
    """One way to measure every layer of a model.

    Subclasses are dataclasses: their fields are the options of a recipe and, with `name`, all that decides the
    numbers. Constructors are cheap; data loads on first use. `name` is unique within a run, e.g. `probe/ag_news`.
    """

    name: str

    @abstractmethod
    def run(self, model: LayeredModel) -> Iterable[Record]:
        """Yields the records of one checkpoint. May draw random numbers and switch modes: the driver restores both."""

    def check(self, model: LayeredModel) -> None:
        """Refuses, before the first step, options that do not fit the model and data that is not there.

        Raises:
            InputError: one sentence naming the option. The default loads every field that is data.
        """
        self.data_hash()

    def config(self) -> dict[str, Any]:
        """The class and its options, ready for JSON: equal configs measure the same thing."""
        return describe(self)

    def config_hash(self) -> str:
        """Sixteen hex digits of the config: a change of any option, also of the data's, changes it."""
        return hashlib.sha256(json.dumps(self.config(), sort_keys=True).encode()).hexdigest()[:16]

    def data_hash(self) -> str | None:
        """Hash of the data measured on, over every field that has a `content_hash()`; None where there is none."""
        parts = [
            value.content_hash() for value in vars(self).values() if callable(getattr(value, "content_hash", None))
        ]
        return hashlib.sha256("/".join(parts).encode()).hexdigest()[:16] if parts else None


def describe(value: Any) -> Any:
    """`value` as plain JSON data: dataclasses and other objects become their class path and public fields."""
    if value is None or isinstance(value, str | int | float | bool):
        return value
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, dict):
        return {str(key): describe(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [describe(item) for item in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value) if field.init}
    else:
        fields = {name: item for name, item in getattr(value, "__dict__", {}).items() if not name.startswith("_")}
    kind = type(value)
    return {"class_path": f"{kind.__module__}.{kind.__qualname__}", "init_args": describe(fields)}
