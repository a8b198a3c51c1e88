"""The rows of a next-token probe: which positions of which texts, and how to show them to a model."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from lit_layers.data.batches import Batches
from lit_layers.models.view import LayeredModel


@dataclass(frozen=True, eq=False)
class Rows:
    """Positions of texts, in the order of the texts."""

    texts: Sequence[Tensor]  # real tokens of every text of the split, (tokens,) each
    text: Tensor  # (n,) which text a row is of
    position: Tensor  # (n,) counted from 0 among its real tokens

    def __len__(self) -> int:
        return len(self.text)

    @property
    def targets(self) -> Tensor:
        """The next tokens (n,)."""
        where = zip(self.text.tolist(), self.position.tolist(), strict=True)
        return torch.tensor([int(self.texts[text][place + 1]) for text, place in where], dtype=torch.long)

    def where(self, kept: Tensor) -> "Rows":
        """The rows that a mask (n,) keeps."""
        return replace(self, text=self.text[kept], position=self.position[kept])


class Pass(NamedTuple):
    """Contexts of one length, so that no padding is needed, and the rows that are read off them."""

    input_ids: Tensor  # (batch, tokens)
    row: Tensor  # (k,) indices into the rows
    context: Tensor  # (k,) which context holds the row
    position: Tensor  # (k,)


def predicts_next_token(model: LayeredModel) -> bool:
    """Whether the model's own head predicts the next token, so that no state sees a later one."""
    return model.vocab_size is not None and model.model.can_generate()


def real_tokens(batches: Batches) -> list[Tensor]:
    """The texts without their padding, so that it cannot matter on which side it was."""
    texts = []
    for batch in batches:
        ids = batch["input_ids"]
        mask = batch.get("attention_mask", torch.ones_like(ids)).bool()
        texts += [row[real] for row, real in zip(ids, mask, strict=True)]
    return texts


def duplicates(texts: Sequence[Tensor], others: Sequence[Tensor]) -> set[int]:
    """Which of `texts` also stand in `others`, token for token."""
    known = {text.numpy().tobytes() for text in others}
    return {index for index, text in enumerate(texts) if text.numpy().tobytes() in known}


def draw_rows(
    texts: Sequence[Tensor],
    *,
    min_context: int,
    per_text: int = 1,
    seed: int = 0,
    left_out: frozenset[int] | set[int] = frozenset(),
) -> Rows:
    """Up to `per_text` different positions of each text, uniform over those with `min_context` tokens up to and with
    themselves and a token after them. They depend on the seed and the index of the text only."""
    chosen = []
    for index, text in enumerate(texts):
        num_allowed = len(text) - min_context
        if index in left_out or num_allowed < 1:
            continue
        drawn = np.random.default_rng([seed, index]).choice(num_allowed, min(per_text, num_allowed), replace=False)
        chosen += [(index, min_context - 1 + int(place)) for place in np.sort(drawn)]
    text, position = torch.tensor(chosen, dtype=torch.long).reshape(-1, 2).T
    return Rows(texts, text, position)


def most_frequent(targets: Tensor, num_classes: int) -> Tensor:
    """The most frequent tokens, the most frequent first; of equals the lower one."""
    tokens, counts = targets.unique(return_counts=True)
    return tokens[counts.argsort(descending=True, stable=True)[:num_classes]]


def class_of(targets: Tensor, classes: Tensor) -> Tensor:
    """Index of each target among the classes; -1 where it is none."""
    size = int(torch.cat([targets, classes]).max()) + 1
    index = torch.full((size,), -1)
    index[classes] = torch.arange(len(classes))
    return index[targets]


def passes(rows: Rows, *, max_tokens: int, together: bool) -> Iterator[Pass]:
    """All rows, in passes of at most `max_tokens` tokens (or one context).

    A context ends with its row's position: the model sees nothing of the target, whether or not it is causal, and does
    no work on what comes later. `together` reads all rows of a text off the context of its last: for causal models.
    """
    contexts: dict[tuple[int, int], list[int]] = defaultdict(list)
    for row, (text, position) in enumerate(zip(rows.text.tolist(), rows.position.tolist(), strict=True)):
        contexts[text, -1 if together else position].append(row)
    by_length: dict[int, list[list[int]]] = defaultdict(list)
    for members in contexts.values():
        by_length[int(rows.position[members].max()) + 1].append(members)
    for length, groups in sorted(by_length.items()):
        size = max(1, max_tokens // length)
        for start in range(0, len(groups), size):
            chunk = groups[start : start + size]
            row = torch.tensor([row for members in chunk for row in members])
            yield Pass(
                input_ids=torch.stack([rows.texts[int(rows.text[members[0]])][:length] for members in chunk]),
                row=row,
                context=torch.tensor([index for index, members in enumerate(chunk) for _ in members]),
                position=rows.position[row],
            )
