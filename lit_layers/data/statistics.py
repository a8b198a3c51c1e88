"""What a corpus says about the losses that are possible on it."""

import numpy as np

from lit_layers.data.shards import TokenShards

MAX_TOKENS = 100_000_000  # 0.2 GB of uint16 read once; the entropy of more differs in the fourth digit


def unigram_entropy(shards: TokenShards, split: str = "train") -> float:
    """Returns the entropy of the token frequencies, in nats: the loss of a model that ignores all context.

    Over the first `MAX_TOKENS` tokens of the split.
    """
    tokens = shards.tokens(split)[:MAX_TOKENS]
    frequencies = np.bincount(tokens, minlength=shards.vocab_size) / len(tokens)
    present = frequencies[frequencies > 0]
    return float(-(present * np.log(present)).sum())
