"""Batches from a list."""

from collections.abc import Iterator

from torch import Tensor

from lit_layers.data.batches import Batches


class Listed(Batches):
    """Batches that yield their arguments in order."""

    def __init__(self, *batches: dict[str, Tensor]) -> None:
        self.batches = list(batches)

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        return iter(self.batches)

    def __len__(self) -> int:
        return len(self.batches)

    def content_hash(self) -> str:
        return "listed"
