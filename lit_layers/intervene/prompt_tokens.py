"""Prompts and their continuations as tokens, split where lm-eval splits them."""

import json
from collections.abc import Sequence
from dataclasses import dataclass

from lit_layers.data.tokenization import TextTokenizer, one_thread, tokenizer_hash
from lit_layers.errors import InputError

Pair = tuple[list[int], list[int]]  # of a context and of its continuation
_NAMING = ("tokenizer_config.json", "special_tokens_map.json")


@dataclass(frozen=True)
class PromptTokenizer:
    """Tokens as lm-eval's `HFLM` makes them: with the special tokens that the tokenizer adds to any text."""

    found: TextTokenizer
    prefix: str  # stands before a continuation without a context

    @classmethod
    def of(cls, found: TextTokenizer) -> "PromptTokenizer":
        """Its prefix is the token that begins a text, or else the one that ends it."""
        begin = _begin_of_text(found)
        known = begin is not None and found.tokenizer.token_to_id(begin) is not None
        return cls(found, begin if known and begin is not None else found.end_of_text)

    @property
    def prefix_id(self) -> int:
        number = self.found.tokenizer.token_to_id(self.prefix)
        assert number is not None, "it is one of the tokenizer's own"
        return number

    @property
    def end_id(self) -> int:
        return self.found.end_of_text_id

    @property
    def hash(self) -> str:
        return f"{tokenizer_hash(self.found.tokenizer)}/{self.prefix}/{self.found.end_of_text}"

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Each text's tokens; one that begins with the prefix itself gets no further special tokens."""
        with one_thread():
            whole = self.found.tokenizer.encode_batch(list(texts))
            bare = {text: self._bare(text) for text in texts if text.startswith(self.prefix)}
        return [bare.get(text, encoding.ids) for text, encoding in zip(texts, whole, strict=True)]

    def pairs(self, texts: Sequence[tuple[str, str]]) -> list[Pair]:
        """Each context and continuation: encoded as one text, which is split where the context alone would end.

        Spaces at the end of a context go to its continuation.

        Raises:
            InputError: a continuation of no token.
        """
        moved = [_spaces_moved(context, continuation) for context, continuation in texts]
        contexts = self.encode([context for context, _ in moved])
        wholes = self.encode([context + continuation for context, continuation in moved])
        found: list[Pair] = []
        for number, (context, continuation) in enumerate(texts):
            if context == "":
                whole, split = self._bare(continuation), 1
                if whole[:1] != [self.prefix_id]:
                    whole = [self.prefix_id, *whole]
            else:
                whole, split = wholes[number], len(contexts[number])
            if not whole[:split] or not whole[split:]:
                raise InputError(
                    f"the tokenizer makes no token of its own of the continuation {continuation!r} of {context[-40:]!r}"
                )
            found.append((contexts[number] if context else whole[:split], whole[split:]))
        return found

    def decode(self, ids: Sequence[int]) -> str:
        """The text, without special tokens."""
        return self.found.tokenizer.decode(list(ids), skip_special_tokens=True)

    def _bare(self, text: str) -> list[int]:
        return self.found.tokenizer.encode(text, add_special_tokens=False).ids


def _spaces_moved(context: str, continuation: str) -> tuple[str, str]:
    kept = context.rstrip()
    return kept, context[len(kept) :] + continuation


def _begin_of_text(found: TextTokenizer) -> str | None:
    for name in _NAMING:
        if name in found.companions:
            token = json.loads(found.companions[name].read_text(encoding="utf-8")).get("bos_token")
            token = token.get("content") if isinstance(token, dict) else token
            if token is not None:
                return token
    return None
