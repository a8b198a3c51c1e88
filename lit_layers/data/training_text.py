"""Text to train on: a prepared split cut into blocks."""

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from lit_layers.data.shards import TokenShards
from lit_layers.errors import InputError


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
