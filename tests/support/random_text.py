"""Random prompts in a separate module, so that a process that unpickles them imports no training code."""

import torch

from lit_layers.data.batches import Batches

VOCABULARY, CONTEXT = 61, 12


class RandomText(Batches):
    """Fixed random prompts; in batch n, the first prompt has 2 n padding tokens on the right."""

    def __init__(self, num_batches: int = 2, batch_size: int = 4, tokens: int = CONTEXT) -> None:
        generator = torch.Generator().manual_seed(9)
        self._batches = []
        for number in range(num_batches):
            mask = torch.ones(batch_size, tokens, dtype=torch.long)
            mask[0, tokens - 2 * number :] = 0
            ids = torch.randint(VOCABULARY, (batch_size, tokens), generator=generator)
            self._batches.append({"input_ids": ids, "attention_mask": mask})

    def __iter__(self):
        return iter(self._batches)

    def __len__(self) -> int:
        return len(self._batches)

    def content_hash(self) -> str:
        return "random-text"
