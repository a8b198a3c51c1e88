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
    """Counts of a token after the `order - 1` tokens before it, by those tokens."""

    order: int
    vocab_size: int
    contexts: NDArray[np.int64]  # sorted: one number each
    starts: NDArray[np.int64]  # (contexts + 1,): where the tokens of each begin
    tokens: NDArray[np.int64]
    counts: NDArray[np.int64]

    def after(self, context: Sequence[int]) -> Distribution | None:
        """The shares of the tokens that follow; None where the corpus does not have it.

        Raises:
            ValueError: not `order - 1` tokens.
        """
        if len(context) != self.order - 1:
            raise ValueError(f"expected {self.order - 1} tokens before the next, got {len(context)}")
        code = _code(np.asarray([context], dtype=np.int64), self.vocab_size)[0]
        place = int(np.searchsorted(self.contexts, code))
        if place == len(self.contexts) or self.contexts[place] != code:
            return None
        some = slice(self.starts[place], self.starts[place + 1])
        shares = torch.from_numpy(self.counts[some] / self.counts[some].sum())
        return torch.from_numpy(self.tokens[some]), shares


def count_ngrams(texts: Iterable[NDArray[np.int64]], order: int, vocab_size: int) -> NgramTable:
    """The n-grams of texts (tokens,), none of which goes from one text to the next.

    Raises:
        ValueError: an order below 1 or whose n-grams have no number of 63 bits, or texts without any.
    """
    if order < 1 or vocab_size**order >= 2**63:
        raise ValueError(f"expected an order of at least 1 whose n-grams 63 bits can number, got {order}")
    windows = [np.lib.stride_tricks.sliding_window_view(text, order) for text in texts if len(text) >= order]
    if not windows:
        raise ValueError(f"expected texts of at least {order} tokens, got none")
    codes, counts = np.unique(np.concatenate([_code(each, vocab_size) for each in windows]), return_counts=True)
    contexts, starts = np.unique(codes // vocab_size, return_index=True)
    return NgramTable(order, vocab_size, contexts, np.append(starts, len(codes)), codes % vocab_size, counts)


def _code(ngrams: NDArray[np.int64], vocab_size: int) -> NDArray[np.int64]:
    """(n, tokens) as a number each."""
    codes = np.zeros(len(ngrams), dtype=np.int64)
    for column in ngrams.T:
        codes = codes * vocab_size + column
    return codes


def ngram_divergence(
    log_proba: Float[Tensor, "*n rows vocabulary"], distributions: Sequence[Distribution | None]
) -> Float[Tensor, "*n rows"]:
    """KL(n-gram, prediction) of each row, in nats, in float64.

    At least 0: 0 where the prediction is that of the n-gram. NaN where the corpus does not have the context.

    Source: Belrose et al., arXiv 2402.04362; over training Chang and Michaelov et al., arXiv 2510.24963.

    Raises:
        ValueError: not a distribution a row.
    """
    log_proba = widened("log_proba", log_proba)
    if log_proba.ndim < 2 or log_proba.shape[-2] != len(distributions):
        raise ValueError(f"expected a distribution for each row of {tuple(log_proba.shape)}, got {len(distributions)}")
    values = log_proba.new_full(log_proba.shape[:-1], torch.nan)
    for row, distribution in enumerate(distributions):
        if distribution is not None:
            tokens, shares = (part.to(log_proba.device) for part in distribution)
            values[..., row] = (shares * (shares.log() - log_proba[..., row, tokens])).sum(-1)
    return values.clamp(min=0)
