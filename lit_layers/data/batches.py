"""Fixed batches that an analysis measures on, and texts as token ids in batches that waste little on padding."""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from lit_layers.data.preparing import prepared
from lit_layers.data.tokenization import TextTokenizer, bpe_size, load_tokenizer, one_thread, tokenizer_hash
from lit_layers.errors import InputError


class Batches(ABC):
    """The same batches in the same order at every checkpoint.

    A text batch is `{"input_ids": (batch, tokens), "attention_mask": (batch, tokens)}` of int64, an image batch
    `{"pixel_values": (batch, channels, height, width)}`; labels, where there are any, stand under `"labels"`.
    Constructors are cheap; data loads on the first walk.
    """

    @abstractmethod
    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        """Walks the batches from the first, on the CPU."""

    @abstractmethod
    def __len__(self) -> int:
        """Number of batches."""

    @abstractmethod
    def content_hash(self) -> str:
        """Hash of the values of every batch: two objects of equal hash give equal numbers."""

    def tokenizer_hash(self) -> str | None:
        """Hash of the tokenizer that made the token ids; None where there is none, or nobody knows it."""
        return None


_AT_ONCE = 1000  # texts: the tokenizer's own account of a token takes 140 bytes, ours 4


@dataclass(frozen=True, eq=False)
class EncodedTexts:
    """Token ids of texts, in their order, each without padding."""

    ids: Sequence[np.ndarray]  # (tokens,) int32 each
    filler: int  # stands in padded places, where no model looks
    tokenizer_hash: str
    num_cut: int  # texts that lost their end to the limit

    def __len__(self) -> int:
        return len(self.ids)

    def content_hash(self) -> str:
        """Sixteen hex digits over the token ids."""
        digest = hashlib.sha256()
        for ids in self.ids:
            digest.update(len(ids).to_bytes(4, "little"))
            digest.update(np.asarray(ids, dtype="<i4").tobytes())
        return digest.hexdigest()[:16]

    def batches(self, max_tokens: int) -> Iterator[tuple[list[int], dict[str, Tensor]]]:
        """The longest texts first, so that texts of a batch are of about one length; with the numbers of its rows.

        A batch has at most `max_tokens` places, padding (on the right) included, and at least one text. Which texts
        come together depends on the texts alone.
        """
        order = sorted(range(len(self.ids)), key=lambda row: (-len(self.ids[row]), row))
        start = 0
        while start < len(order):
            width = len(self.ids[order[start]])
            rows = order[start : start + max(1, max_tokens // width)]
            start += len(rows)
            yield rows, padded([self.ids[row] for row in rows], self.filler)


def padded(
    texts: Sequence[Sequence[int] | np.ndarray], filler: int, *, side: Literal["left", "right"] = "right"
) -> dict[str, Tensor]:
    """A batch of texts, filled up to the longest."""
    longest = max(map(len, texts))
    ids = torch.full((len(texts), longest), filler)
    mask = torch.zeros_like(ids)
    for row, text in enumerate(texts):
        real = slice(longest - len(text), None) if side == "left" else slice(len(text))
        ids[row, real], mask[row, real] = torch.as_tensor(np.asarray(text, dtype=np.int64)), 1
    return {"input_ids": ids, "attention_mask": mask}  # (batch, tokens of the longest)


def tokenizer_of(tokenizer: str, corpus: str | None) -> str:
    """Where a tokenizer is found: as it is named, or, of `bpe:SIZE`, where the tokens of its corpus are kept.

    Raises:
        InputError: `bpe:SIZE` without the corpus that it is trained on.
    """
    if bpe_size(tokenizer) is None:
        return tokenizer
    if corpus is None:
        raise InputError(
            f"tokenizer: {tokenizer} is trained on a corpus: name that as corpus, or a folder that holds the tokenizer"
        )
    return str(prepared(corpus, tokenizer).tokenizer_path)


def encode_texts(tokenizer: str | TextTokenizer, texts: Sequence[str], *, max_tokens: int) -> EncodedTexts:
    """The first `max_tokens` tokens of each text, the special tokens included that the tokenizer adds to any text.

    A text that is cut keeps those: a [SEP] stays its last token.

    Raises:
        InputError: no such tokenizer, a limit that leaves no room beside special tokens, or a text of which it makes
            no token.
    """
    loaded = load_tokenizer(tokenizer) if isinstance(tokenizer, str) else tokenizer
    added = loaded.tokenizer.num_special_tokens_to_add(is_pair=False)
    if max_tokens <= added:
        raise InputError(
            f"max_tokens: expected more than the {added} special tokens that the tokenizer adds to a text, got "
            f"{max_tokens}"
        )
    ids, num_cut = [], 0
    loaded.tokenizer.enable_truncation(max_tokens)
    try:
        with one_thread():
            for start in range(0, len(texts), _AT_ONCE):
                encodings = loaded.tokenizer.encode_batch(list(texts[start : start + _AT_ONCE]))
                ids += [np.array(encoding.ids, dtype=np.int32) for encoding in encodings]
                num_cut += sum(bool(encoding.overflowing) for encoding in encodings)
    finally:
        loaded.tokenizer.no_truncation()
    if empty := [row for row, each in enumerate(ids) if not len(each)]:
        name = f" {tokenizer!r}" if isinstance(tokenizer, str) else ""
        raise InputError(f"the tokenizer{name} makes no token of text {empty[0]}: use another, or drop the text")
    return EncodedTexts(ids, loaded.end_of_text_id, tokenizer_hash(loaded.tokenizer), num_cut)
