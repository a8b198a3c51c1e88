"""Stand-in for the model or series that a recipe builds analyses for."""

from types import SimpleNamespace
from typing import Any


def target(name: str = "model", carried: str | None = None) -> Any:
    """Return a model or series of this name with the tokenizer `carried` and without a training run."""
    series = SimpleNamespace(is_single=False)
    return SimpleNamespace(name=name, carried=carried, trained={}, config={}, series=series)
