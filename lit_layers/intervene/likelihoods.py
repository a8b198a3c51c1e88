"""Log-likelihoods of continuations: how probable a model finds each, given its context."""

import inspect
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lit_layers.errors import InputError
from lit_layers.intervene.prompt_tokens import Pair
from lit_layers.models.families import Network

DEFAULT_MAX_LENGTH = 2048  # of a model that takes any length: lm-eval's own


@dataclass(frozen=True)
class Likelihood:
    """Sum of the log-probabilities of a continuation's tokens in nats, and whether each was the most probable."""

    value: float
    greedy: bool


@dataclass(frozen=True)
class _Place:
    pair: int  # its number
    continuation: list[int]


def log_likelihoods(
    model: Network, pairs: Sequence[Pair], *, max_length: int, batch_size: int, vocab_size: int | None = None
) -> list[Likelihood]:
    """Of each continuation given its context, by one pass over both: float32 or wider, summed in float64.

    Equal inputs are passed once, however many continuations end in them. Batches are of similar lengths, filled up on
    the right, where a causal model does not look; only a continuation's own logits are widened.

    Args:
        model: causal; in evaluation mode.
        pairs: tokens of context and continuation.
        max_length: of the model; a longer context loses its beginning.
        batch_size: inputs at once.
        vocab_size: of the real tokens, where the model scores more.

    Raises:
        InputError: a continuation that is longer than the model takes.
    """
    inputs: dict[tuple[int, ...], list[_Place]] = {}
    for number, (context, continuation) in enumerate(pairs):
        if len(continuation) > max_length:
            raise InputError(f"a continuation has {len(continuation)} tokens, the model takes {max_length} at most")
        whole = (context + continuation)[-(max_length + 1) :]
        inputs.setdefault(tuple(whole[:-1]), []).append(_Place(number, continuation))
    order = sorted(inputs, key=lambda tokens: (-len(tokens), tokens))
    found: dict[int, Likelihood] = {}
    with torch.no_grad():
        for start in range(0, len(order), batch_size):
            batch = order[start : start + batch_size]
            _score_batch(model, batch, [inputs[tokens] for tokens in batch], vocab_size, found)
    return [found[number] for number in range(len(pairs))]


def num_cut(pairs: Sequence[Pair], max_length: int) -> int:
    """How many contexts lose their beginning."""
    return sum(len(context) + len(continuation) > max_length + 1 for context, continuation in pairs)


def _score_batch(
    model: Network,
    batch: list[tuple[int, ...]],
    places: list[list[_Place]],
    vocab_size: int | None,
    found: dict[int, Likelihood],
) -> None:
    device = next(model.parameters()).device
    lengths = [len(tokens) for tokens in batch]
    longest = [max(len(place.continuation) for place in row) for row in places]
    ids = torch.zeros(len(batch), max(lengths), dtype=torch.long)
    for row, tokens in enumerate(batch):
        ids[row, : len(tokens)] = torch.tensor(tokens)
    first = min(length - most for length, most in zip(lengths, longest, strict=True))
    logits = _logits(model, ids.to(device), first, max(lengths))[..., :vocab_size]  # (batch, positions, vocabulary)
    for row, (length, most) in enumerate(zip(lengths, longest, strict=True)):
        own = logits[row, length - most - first : length - first]
        own = own.to(torch.promote_types(own.dtype, torch.float32)).log_softmax(-1)  # (most, vocabulary)
        likeliest = own.argmax(-1)
        for place in places[row]:
            tokens = torch.tensor(place.continuation, device=device)
            scored = own[-len(tokens) :].gather(-1, tokens[:, None])
            greedy = bool((likeliest[-len(tokens) :] == tokens).all())
            found[place.pair] = Likelihood(float(scored.double().sum()), greedy)


def _logits(model: Network, ids: Tensor, first: int, last: int) -> Tensor:
    """The logits of positions `first` to `last - 1`, the others not computed where the model can leave them out."""
    if "logits_to_keep" in inspect.signature(model.forward).parameters:
        kept = torch.arange(first, last, device=ids.device)
        return model(input_ids=ids, use_cache=False, logits_to_keep=kept).logits
    return model(input_ids=ids, use_cache=False).logits[:, first:last]
