"""What the last few tokens alone predict, counted in a corpus, and how far another prediction is from it."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor

from lit_layers.functional._checks import widened

Distribution = tuple[Tensor, Tensor]  # tokens (n,) and their shares (n,), which add up to 1


@dataclass(frozen=True, eq=False)
class NgramTable:
    """Counts of each token after each context: the tokens before it."""

    num_ids: int  # larger than every token
    contexts: NDArray[np.int64]  # sorted: one number each
    starts: NDArray[np.int64]  # (contexts + 1,): where the tokens of each begin
    tokens: NDArray[np.int64]
    counts: NDArray[np.int64]

    def after(self, context: Sequence[int]) -> Distribution | None:
        """Return the shares of the tokens that follow, or None if the corpus does not have the context."""
        code = _codes(np.asarray([context], dtype=np.int64), self.num_ids)[0]
        at = int(np.searchsorted(self.contexts, code))
        if max(context, default=0) >= self.num_ids or at == len(self.contexts) or self.contexts[at] != code:
            return None
        some = slice(self.starts[at], self.starts[at + 1])
        return torch.from_numpy(self.tokens[some]), torch.from_numpy(self.counts[some] / self.counts[some].sum())


def count_ngrams(texts: Iterable[NDArray[np.int64]], order: int) -> NgramTable:
    """Count the n-grams of texts (tokens,), each within its text; `order` is 1 for single tokens.

    Raises:
        ValueError: no text is that long, or the order is not 1, 2 or 3.
    """
    if order > 3:  # three tokens of up to 2 million have a number below 2^63
        raise ValueError(f"expected an order from 1 to 3, got {order}")
    windows = [np.lib.stride_tricks.sliding_window_view(text, order) for text in texts if len(text) >= order]
    if not windows:
        raise ValueError(f"expected texts of at least {order} tokens, got none")
    ngrams = np.concatenate(windows)
    num_ids = int(ngrams.max()) + 1
    codes, counts = np.unique(_codes(ngrams, num_ids), return_counts=True)
    contexts, starts = np.unique(codes // num_ids, return_index=True)
    return NgramTable(num_ids, contexts, np.append(starts, len(codes)), codes % num_ids, counts)


def _codes(ngrams: NDArray[np.int64], num_ids: int) -> NDArray[np.int64]:
    """Return (n, tokens) as one number each."""
    return ngrams @ num_ids ** np.arange(ngrams.shape[1] - 1, -1, -1, dtype=np.int64)


def ngram_divergence(
    log_proba: Float[Tensor, "*n rows vocabulary"], distributions: Sequence[Distribution | None]
) -> Float[Tensor, "*n rows"]:
    """Return KL(n-gram, prediction) of each row, in nats, in float64.

    At least 0: 0 if the prediction is that of the n-gram. NaN if the corpus does not have the context.

    Source: Belrose et al., arXiv 2402.04362; over training Chang and Michaelov et al., arXiv 2510.24963.
    """
    log_proba = widened(log_proba)
    values = log_proba.new_full(log_proba.shape[:-1], torch.nan)
    for row, distribution in enumerate(distributions):
        if distribution is not None:
            tokens, shares = (part.to(log_proba.device) for part in distribution)
            values[..., row] = (shares * (shares.log() - log_proba[..., row, tokens])).sum(-1)
    return values.clamp(min=0)
