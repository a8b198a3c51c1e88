"""Scores of attention patterns, and n-gram predictions from the last few tokens. All computed in float64.

Weights are (*n, heads, queries, keys) of real tokens only: each row is a distribution over the keys. With causal
attention the first token can attend only to itself, so all scores leave out its query. Compare each score with its
chance level, which is the score of `uniform_attention`.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int
from numpy.typing import NDArray
from torch import Tensor

from lit_layers.functional._checks import Undefined, checked, widened

Weights = Float[Tensor, "*n heads tokens tokens"]
PerHead = Float[Tensor, "*n heads"]


def uniform_attention(num_tokens: int, *, causal: bool) -> Float[Tensor, "1 tokens tokens"]:
    """Return the weights of one head whose queries attend equally to all tokens.

    If `causal`, each query attends equally to all tokens up to and including itself.
    """
    seen = torch.ones(1, num_tokens, num_tokens, dtype=torch.float64)
    seen = seen.tril() if causal else seen
    return seen / seen.sum(-1, keepdim=True)


def attention_entropy(weights: Weights, *, undefined: Undefined = "raise") -> PerHead:
    """Return the mean entropy of a head's attention, in nats.

    Range [0, log tokens]: 0 if each query attends to one token.

    Raises:
        ValueError: fewer than 2 tokens, weights that are not finite (NaN instead with `undefined="nan"`).
    """
    weights = widened(weights)
    return _mean_over_queries("attention_entropy", torch.special.entr(weights).sum(-1), weights, undefined)


def sink_mass(weights: Weights, *, undefined: Undefined = "raise") -> PerHead:
    """Return the mean attention to the first token.

    Range [0, 1]. Uniform causal attention gives the mean of 1 / position over the positions from 2 on.

    Source: Xiao et al., arXiv 2309.17453; the mean over queries as in Gu et al., arXiv 2410.10781, equation 7.

    Raises: the errors of `attention_entropy`.
    """
    weights = widened(weights)
    return _mean_over_queries("sink_mass", weights[..., 0], weights, undefined)


def previous_token_score(weights: Weights, *, undefined: Undefined = "raise") -> PerHead:
    """Return the mean attention to the token right before the query.

    Range [0, 1]. Uniform causal attention gives the mean of 1 / position over the positions from 2 on.

    Source: Olsson et al. 2022. They describe the previous-token head, whose output an induction head reads.

    Raises: the errors of `attention_entropy`.
    """
    weights = widened(weights)
    before = torch.nn.functional.pad(weights.diagonal(offset=-1, dim1=-2, dim2=-1), (1, 0))
    return _mean_over_queries("previous_token_score", before, weights, undefined)


def prefix_matching_score(
    weights: Weights, input_ids: Int[Tensor, "*n tokens"], *, undefined: Undefined = "raise"
) -> PerHead:
    """Return the mean attention to the tokens that followed earlier occurrences of the query's token.

    The mean is over the queries whose token has occurred before. Range [0, 1]. Uniform causal attention on tokens that
    repeat with period P gives about 1 / P.

    Source: Olsson et al. 2022, appendix "head activation evaluators", prefix matching. The targets (the tokens after
    all earlier occurrences) and the mean over queries are theirs. They repeat 25 random tokens four times, after a
    token that begins the sequence. Here the caller chooses the tokens; the analysis `Induction` draws them.

    Raises:
        ValueError: no token occurs twice, weights that are not finite (NaN instead with `undefined="nan"`).
    """
    weights = widened(weights)
    ids = input_ids.to(weights.device)
    same = (ids[..., :, None] == ids[..., None, :]).tril(-1)  # (*n, queries, earlier positions)
    follows = torch.nn.functional.pad(same[..., :-1], (1, 0))
    queries = same.any(-1)  # (*n, queries)
    attended = (weights * follows[..., None, :, :]).sum(-1)
    count = queries.sum(-1)[..., None]
    values = (attended * queries[..., None, :]).sum(-1) / count.clamp(min=1)
    problems = {
        "a weight is not finite": ~weights.isfinite().flatten(-2).all(-1),
        "no token occurs twice": count == 0,
    }
    return checked("prefix_matching_score", values, problems, undefined)


def _mean_over_queries(metric: str, values: Tensor, weights: Tensor, undefined: str) -> PerHead:
    """Return the mean of `values` (*n, heads, queries) over all queries but the first."""
    problems = {
        "a weight is not finite": ~weights.isfinite().flatten(-2).all(-1),
        "it takes 2 tokens": torch.tensor(weights.shape[-1] < 2),
    }
    return checked(metric, values[..., 1:].mean(-1), problems, undefined)


# N-gram predictions counted in a corpus, and the divergence of another prediction from them.

Distribution = tuple[Tensor, Tensor]  # token ids (n,) and their shares (n,), which sum to 1


@dataclass(frozen=True, eq=False)
class NgramTable:
    """Counts of each token after each context; a context is the `order - 1` tokens before it."""

    num_ids: int  # larger than every token id
    contexts: NDArray[np.int64]  # one integer (from `_codes`) per context, sorted
    starts: NDArray[np.int64]  # (contexts + 1,): index into `tokens` and `counts`
    tokens: NDArray[np.int64]
    counts: NDArray[np.int64]

    def shares(self, context: Sequence[int]) -> Distribution | None:
        """Return the shares of the tokens that follow a context, or None if the corpus does not contain it."""
        code = _codes(np.asarray([context], dtype=np.int64), self.num_ids)[0]
        row = int(np.searchsorted(self.contexts, code))
        if max(context, default=0) >= self.num_ids or row == len(self.contexts) or self.contexts[row] != code:
            return None
        span = slice(self.starts[row], self.starts[row + 1])
        return torch.from_numpy(self.tokens[span]), torch.from_numpy(self.counts[span] / self.counts[span].sum())


def count_ngrams(texts: Iterable[NDArray[np.int64]], order: int) -> NgramTable:
    """Count the n-grams (runs of `order` tokens) of texts, each an array (tokens,).

    No n-gram extends from one text into the next.

    Raises:
        ValueError: no text is long enough, or the order is not 1, 2 or 3.
    """
    # The codes of 4 tokens may exceed the largest int64. The codes of 3 tokens fit for ids up to 2 million.
    if order > 3:
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
    """Return the codes (n,) of n-grams (n, tokens): each code is an integer that no other n-gram of its length has."""
    return ngrams @ num_ids ** np.arange(ngrams.shape[1] - 1, -1, -1, dtype=np.int64)


def ngram_divergence(
    log_proba: Float[Tensor, "*n rows vocabulary"], distributions: Sequence[Distribution | None]
) -> Float[Tensor, "*n rows"]:
    """Return the Kullback-Leibler divergence KL(n-gram, prediction) of each row, in nats, in float64.

    `distributions` has one entry for each row: the n-gram distribution, or None if the corpus does not contain the
    row's context. For None the divergence is NaN. At least 0: 0 if prediction and n-gram distribution are equal.

    Source: Belrose et al., arXiv 2402.04362. Chang and Michaelov et al., arXiv 2510.24963, measure it over training.
    """
    log_proba = widened(log_proba)
    values = log_proba.new_full(log_proba.shape[:-1], torch.nan)
    for row, distribution in enumerate(distributions):
        if distribution is not None:
            tokens, shares = (part.to(log_proba.device) for part in distribution)
            values[..., row] = (shares * (shares.log() - log_proba[..., row, tokens])).sum(-1)
    return values.clamp(min=0)
