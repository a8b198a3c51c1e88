"""What analyses are made for, without a model."""

from types import SimpleNamespace
from typing import Any


def target(name: str = "model", carried: str | None = None) -> Any:
    """A model or series of that name, which carries this tokenizer and comes from no training."""
    series = SimpleNamespace(is_single=False)
    return SimpleNamespace(name=name, carried=carried, trained={}, config={}, series=series)
