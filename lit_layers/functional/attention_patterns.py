"""Scores of what attention heads attend to and of what they write. All computed in float64.

Weights are (*n, heads, queries, keys), each row of a real query a distribution over the keys. Real tokens come first,
padding, which never enters a score, behind them. A first token can attend to itself alone where attention is causal, so
the query of the first token enters no score. `uniform_attention` gives the weights of chance, of which every score of
weights is to be taken, too.
"""

from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from lit_layers.functional._checks import settled, widened

Weights = Float[Tensor, "*n heads tokens tokens"]
Mask = Bool[Tensor, "*n tokens"]
PerHead = Float[Tensor, "*n heads"]
Undefined = Literal["raise", "nan"]


def uniform_attention(mask: Mask, *, causal: bool) -> Float[Tensor, "*n 1 tokens tokens"]:
    """The weights of one head that attends to all real tokens alike, or with `causal` to those up to the query."""
    seen = mask[..., None, :].expand(*mask.shape, mask.shape[-1])
    if causal:
        seen = seen.tril()
    counts = seen.sum(-1, keepdim=True).clamp(min=1)
    return (seen.double() / counts)[..., None, :, :]


def attention_entropy(weights: Weights, mask: Mask | None = None, *, undefined: Undefined = "raise") -> PerHead:
    """Mean entropy of a head's attention, in nats.

    Range [0, log tokens]: 0 where each query attends to one token.

    Raises:
        ValueError: fewer than 2 real tokens, weights that are not finite (NaN there with `undefined="nan"`).
    """
    weights = widened("weights", weights)
    return _over_queries("attention_entropy", torch.special.entr(weights).sum(-1), weights, mask, undefined)


def sink_mass(weights: Weights, mask: Mask | None = None, *, undefined: Undefined = "raise") -> PerHead:
    """Mean attention that goes to the first token.

    Range [0, 1]; of uniform causal attention the mean of 1 / place over the places from 2 on.

    Source: Xiao et al., arXiv 2309.17453; the mean over queries as in Gu et al., arXiv 2410.10781, equation 7.

    Raises: as `attention_entropy`.
    """
    weights = widened("weights", weights)
    return _over_queries("sink_mass", weights[..., 0], weights, mask, undefined)


def previous_token_score(weights: Weights, mask: Mask | None = None, *, undefined: Undefined = "raise") -> PerHead:
    """Mean attention that goes to the token right before the query.

    Range [0, 1]; of uniform causal attention the mean of 1 / place over the places from 2 on.

    Source: Olsson et al. 2022 (induction heads), of the head that an induction head reads.

    Raises: as `attention_entropy`.
    """
    weights = widened("weights", weights)
    before = weights.diagonal(offset=-1, dim1=-2, dim2=-1)
    values = torch.cat([before.new_zeros(*before.shape[:-1], 1), before], -1)
    return _over_queries("previous_token_score", values, weights, mask, undefined)


def prefix_matching_score(
    weights: Weights, input_ids: Int[Tensor, "*n tokens"], *, undefined: Undefined = "raise"
) -> PerHead:
    """Mean attention that goes to the tokens that followed earlier occurrences of the query's token.

    Over the queries whose token has occurred before. Range [0, 1]; of uniform causal attention on tokens that repeat
    with period P about 1 / P.

    Source: Olsson et al. 2022, appendix "head activation evaluators", prefix matching: from them are the targets, the
    tokens behind all earlier occurrences, and the mean over queries. Theirs is of 25 random tokens four times in a row
    behind a token that begins the sequence; which tokens these are is the caller's here (`Induction`).

    Raises:
        ValueError: no token occurs twice, weights that are not finite (NaN there with `undefined="nan"`).
    """
    weights = widened("weights", weights)
    ids = input_ids.to(weights.device)
    if ids.shape != (*weights.shape[:-3], weights.shape[-1]):
        raise ValueError(f"expected input_ids that fit weights of {tuple(weights.shape)}, got {tuple(ids.shape)}")
    same = (ids[..., :, None] == ids[..., None, :]).tril(-1)  # (*n, queries, earlier places)
    follows = torch.cat([torch.zeros_like(same[..., :1]), same[..., :-1]], -1)
    queries = same.any(-1)  # (*n, queries)
    attended = (weights * follows[..., None, :, :]).sum(-1)
    count = queries.sum(-1)[..., None]
    values = (attended * queries[..., None, :]).sum(-1) / count.clamp(min=1)
    broken = ~weights.isfinite().flatten(-2).all(-1)
    problems = {"a weight is not finite": broken, "no token occurs twice": count == 0}
    return settled("prefix_matching_score", values, problems, undefined)


def copying_score(
    logits: Float[Tensor, "*n tokens vocabulary"],
    input_ids: Int[Tensor, "*n tokens"],
    *,
    mean: Float[Tensor, "*n tokens"] | None = None,
    undefined: Undefined = "raise",
) -> Float[Tensor, "*n"]:
    """How far a head that attends to a token makes the same token likelier than the others of the sequence.

    `logits` (one row a token) are what the head adds to the logits when it attends to that token alone. Less their mean
    over the vocabulary and where they are above it, the share that goes to the token itself of what goes to the
    sequence's different tokens; the mean over tokens. Range [0, 1]: 1 raises nothing but the token attended to, chance
    is 1 over the number of different tokens. Unchanged by a positive factor of each row. Where `logits` are of some
    tokens of the vocabulary, those of the sequence among them, `mean` is that of each row over all of it.

    Source: Olsson et al. 2022, appendix "head activation evaluators", copying: from them are the random tokens, logits
    less their mean and cut at 0, and the share of the token attended to among those of the sequence. Not from them:
    they stretch the share to [-1, 1], and take what the head writes as it attends, where here each token is attended
    to alone, and one for which nothing is raised scores 0. Not the score of weights after Elhage et al. 2021 that
    demonstrations of TransformerLens show: sum over sum of sizes of the eigenvalues of a head's OV matrix.

    Raises:
        ValueError: no token, logits that are not finite (NaN there with `undefined="nan"`).
    """
    logits = widened("logits", logits)
    ids = input_ids.to(logits.device).expand(logits.shape[:-1])
    means = logits.mean(-1) if mean is None else widened("mean", mean)
    raised = (logits - means[..., None]).clamp(min=0)
    among = raised.gather(-1, ids[..., None, :].expand(*ids.shape, ids.shape[-1]))  # (*n, tokens, tokens)
    first = ~(ids[..., :, None] == ids[..., None, :]).tril(-1).any(-1)  # each different token once
    total = (among * first[..., None, :]).sum(-1)
    of_token = among.diagonal(dim1=-2, dim2=-1)
    values = torch.where(total > 0, of_token / total.where(total > 0, 1.0), 0.0).mean(-1)
    problems = {
        "a logit is not finite": ~(logits.isfinite().all(-1) & means.isfinite()).all(-1),
        "there is no token": torch.tensor(not ids.shape[-1], device=logits.device),
    }
    return settled("copying_score", values, problems, undefined)


def in_context_score(
    losses: Float[Tensor, "*n tokens"], *, early: int = 50, late: int = 500, undefined: Undefined = "raise"
) -> Float[Tensor, "*n"]:
    """Loss at token `late` less that at token `early`, in nats: how much is gained by what stands between.

    `losses[..., i]` is the loss of token i + 2, which i + 1 tokens come before; tokens count from 1. Negative where
    context helps.

    Source: Olsson et al. 2022, "in-context learning score", at tokens 50 and 500.

    Raises:
        ValueError: places that are none, a text that ends before `late`, a loss that is not finite (NaN there with
            `undefined="nan"`).
    """
    if not 2 <= early < late:
        raise ValueError(f"expected early to be at least 2 and late above it, got {early} and {late}")
    losses = widened("losses", losses)
    if losses.shape[-1] < late - 1:
        values = losses.new_full(losses.shape[:-1], torch.nan)
    else:
        values = losses[..., late - 2] - losses[..., early - 2]
    return settled("in_context_score", values, {f"there is no loss at token {late}": ~values.isfinite()}, undefined)


def _over_queries(metric: str, values: Tensor, weights: Tensor, mask: Mask | None, undefined: str) -> PerHead:
    """The mean of (*n, heads, queries) over the real queries behind the first."""
    if weights.ndim < 3 or weights.shape[-1] != weights.shape[-2]:
        raise ValueError(f"expected weights of shape (*n, heads, tokens, tokens), got {tuple(weights.shape)}")
    shape = (*weights.shape[:-3], weights.shape[-1])
    mask = torch.ones(shape, dtype=torch.bool) if mask is None else mask
    if mask.dtype != torch.bool or mask.shape != shape:
        raise ValueError(f"expected a boolean mask of shape {shape}, got {mask.dtype} of {tuple(mask.shape)}")
    if (mask[..., 1:] & ~mask[..., :-1]).any():
        raise ValueError("expected real tokens in front of the padding, got some behind it")
    mask = mask.to(weights.device)
    counted = torch.cat([torch.zeros_like(mask[..., :1]), mask[..., 1:]], -1)[..., None, :]
    real = (mask[..., :, None] & mask[..., None, :])[..., None, :, :]
    count = counted.sum(-1)
    means = values.masked_fill(~counted, 0.0).sum(-1) / count.clamp(min=1)
    problems = {
        "a weight is not finite": (~weights.isfinite() & real).flatten(-2).any(-1),
        "it takes 2 real tokens": count == 0,
    }
    return settled(metric, means, problems, undefined)
