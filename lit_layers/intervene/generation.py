"""Texts that a model goes on with, greedily, until one of some stops."""

from collections.abc import Sequence

import torch
from torch import Tensor

from lit_layers.errors import InputError
from lit_layers.intervene.prompt_tokens import PromptTokenizer
from lit_layers.models.families import Network


def generate_until(
    model: Network,
    prompts: Sequence[str],
    stops: Sequence[str],
    tokenizer: PromptTokenizer,
    *,
    max_length: int,
    max_new_tokens: int,
    batch_size: int,
    vocab_size: int | None = None,
) -> list[str]:
    """What the model writes after each prompt, up to the first stop, the end of text or `max_new_tokens`.

    Through the model's own `generate` with its cache. A prompt too long for what is to be written loses its beginning.
    (lm-eval does the same; of a batch whose model names no end of text, it keeps what is written after that end.)

    Raises:
        InputError: a model that takes no more than `max_new_tokens`.
    """
    room = max_length - max_new_tokens
    if room < 1:
        raise InputError(
            f"max_new_tokens: {max_new_tokens} leave no room for a prompt in a model of {max_length} tokens: ask for "
            "fewer"
        )
    encoded = [tokens[-room:] for tokens in tokenizer.encode(prompts)]
    order = sorted(range(len(encoded)), key=lambda number: (-len(encoded[number]), number))
    found: dict[int, str] = {}
    for start in range(0, len(order), batch_size):
        batch = order[start : start + batch_size]
        written = _generate(model, [encoded[number] for number in batch], stops, tokenizer, max_new_tokens, vocab_size)
        for number, tokens in zip(batch, written, strict=True):
            found[number] = _cut(tokens, _ends(model, stops, tokenizer), stops, tokenizer)
    return [found[number] for number in range(len(prompts))]


def num_cut(prompts: Sequence[str], tokenizer: PromptTokenizer, max_length: int, max_new_tokens: int) -> int:
    """How many prompts lose their beginning."""
    return sum(len(tokens) > max_length - max_new_tokens for tokens in tokenizer.encode(prompts))


def _generate(
    model: Network,
    batch: list[list[int]],
    stops: Sequence[str],
    tokenizer: PromptTokenizer,
    max_new_tokens: int,
    vocab_size: int | None,
) -> list[list[int]]:
    device = next(model.parameters()).device
    width = max(map(len, batch))
    ids = torch.full((len(batch), width), tokenizer.end_id)
    mask = torch.zeros_like(ids)
    for row, tokens in enumerate(batch):  # filled up on the left: every row goes on at the same place
        ids[row, width - len(tokens) :], mask[row, width - len(tokens) :] = torch.tensor(tokens), 1
    rows = model.config.vocab_size
    padding = list(range(vocab_size, rows)) if vocab_size is not None and vocab_size < rows else None
    with torch.no_grad():
        written = model.generate(
            input_ids=ids.to(device),
            attention_mask=mask.to(device),
            max_length=width + max_new_tokens,
            do_sample=False,
            use_cache=True,
            eos_token_id=_ends(model, stops, tokenizer),
            pad_token_id=tokenizer.end_id,
            suppress_tokens=padding,
            stopping_criteria=[_Stops(stops, tokenizer, width)],
        )
    return written[:, width:].tolist()


class _Stops:
    """Says which rows of a batch have written a stop."""

    def __init__(self, stops: Sequence[str], tokenizer: PromptTokenizer, width: int) -> None:
        self.stops, self.tokenizer, self.width = stops, tokenizer, width
        # a stop takes at most a token a byte, and may begin inside one
        self.look_back = max((len(stop.encode()) for stop in stops), default=0) + 1

    def __call__(self, ids: Tensor, scores: Tensor, **_: object) -> Tensor:
        tails = ids[:, self.width :][:, -self.look_back :].tolist()
        texts = [self.tokenizer.decode(tail) for tail in tails]
        return torch.tensor([any(stop in text for stop in self.stops) for text in texts], device=ids.device)


def _ends(model: Network, stops: Sequence[str], tokenizer: PromptTokenizer) -> list[int]:
    """The tokenizer's end of text, those that the model itself names, and the stops that are one token."""
    own = model.generation_config.eos_token_id
    own = [] if own is None else own if isinstance(own, list) else [own]
    single = [tokenizer.found.tokenizer.token_to_id(stop) for stop in stops]
    return list(dict.fromkeys([tokenizer.end_id, *own, *(number for number in single if number is not None)]))


def _cut(tokens: list[int], ends: list[int], stops: Sequence[str], tokenizer: PromptTokenizer) -> str:
    end = next((place for place, token in enumerate(tokens) if token in ends), None)
    text = tokenizer.decode(tokens[:end])
    for stop in (*stops, tokenizer.found.end_of_text):
        text = text.split(stop)[0]
    return text
