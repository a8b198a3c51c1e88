"""Relations between words as directions: how far the differences of word pairs point the same way at each layer."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lit_layers.analyses.base import Analysis, Rows, Values
from lit_layers.analyses.statistics import TagDict, summarize
from lit_layers.data.word_pairs import MIN_PAIRS, Category, WordPairs
from lit_layers.functional import geometry
from lit_layers.models.view import Batch, LayeredModel, Trajectory
from lit_layers.records import Record

METRICS = ("concept_alignment", "leave_one_out", "shuffled", "excess")


@dataclass(kw_only=True)
class ConceptAlignment(Analysis):
    """Cosines between the differences of word pairs, per layer 0..L and category, and their means over categories.

    Each word is a text of its own, read at its last sub-token. Per layer, with the tag `category` (and `category_id`
    and `group` if the file has them):

    - `concept_alignment`, the mean cosine over pairs of differences;
    - `leave_one_out`, the mean cosine of each difference with the mean of the others;
    - `shuffled`, the mean cosine after the second words of the pairs are shuffled within the category;
    - `excess` = concept_alignment - shuffled, the part due to the pairing.

    `n` counts word pairs. The tag `num_dropped` counts pairs whose words have the same token ids. `num_undefined`
    counts pairs whose two states are equal or not finite at this layer. At layer 0, for example, the states of words
    that end in the same sub-token are equal. A category with fewer than 3 pairs left has no value at that layer.

    Records without a category are means over categories, with a bootstrap interval over categories. The interval of one
    category's `concept_alignment` is over its word pairs. Each cosine involves two word pairs, so cosines are not
    independent. The bootstrap therefore resamples one value per word pair i: m + 2 (m_i - m). Here m is the mean of all
    cosines, and m_i the mean cosine of pair i with the other pairs. The values are the first-order terms of m, which is
    a U-statistic of order two.

    The model runs in float32 or wider. Memory: layers x words x width (25 x 3,000 x 1,024 x 4 B = 0.3 GB).

    Source: hierarchical analysis of monotonicity (OpenReview ZVLyyG5yS6), figure 3.
    """

    SEES = "text"
    words: WordPairs
    name: str = "concept_alignment"
    shuffles: int = 10
    seed: int = 0

    def reads(self, model: LayeredModel) -> dict[str, Rows]:
        return {"words": Rows(self.words)}

    def update(self, seen: Trajectory, batch: Batch) -> Values:
        """Return the states (layers + 1, dim, words) at the words' last sub-tokens."""
        hidden = seen.hidden
        rows = torch.arange(hidden.shape[1], device=hidden.device)
        return {"states": hidden[:, rows, batch["positions"].to(hidden.device)].mT.cpu()}

    def compute(self, model: LayeredModel, words: Values) -> Iterator[Record]:
        states = words["states"].mT.contiguous()  # (layers + 1, words, dim)
        categories = self.words.category_pairs()
        values = torch.full((len(METRICS), len(states), len(categories)), math.nan, dtype=torch.float64)
        for column, category in enumerate(categories):
            for record in self._category_records(states, category):
                values[METRICS.index(record.metric), record.layer, column] = record.value
                yield record
        for metric, by_layer in zip(METRICS, values, strict=True):
            for layer, row in enumerate(by_layer):
                yield from summarize(metric, row, layer=layer) if len(row) > 1 else []

    def _category_records(self, states: Tensor, category: Category) -> Iterator[Record]:
        distinct = _distinct_pairs(states, category)  # (layers + 1, pairs)
        patterns, pattern = distinct.unique(dim=0, return_inverse=True)
        for i, used in enumerate(patterns):
            layers = (pattern == i).nonzero()[:, 0]
            if int(used.sum()) < MIN_PAIRS:
                continue
            first, second = (states[layers][:, side[used]] for side in (category.first, category.second))
            how: Any = {"shuffles": self.shuffles, "seed": self.seed, "undefined": "nan"}
            alignment = geometry.concept_alignment(first, second, **how)
            counts = {"num_dropped": category.num_dropped, "num_undefined": int((~used).sum())}
            named = {"category_id": category.id, "group": category.group, **counts}
            tags: TagDict = {"category": category.name, **{name: tag for name, tag in named.items() if tag}}
            for row, layer in enumerate(layers.tolist()):
                yield from _alignment_records(alignment, row, layer, int(used.sum()), tags)


def _distinct_pairs(states: Tensor, category: Category) -> Tensor:
    """Return a mask (*layers, pairs) of the pairs whose two states are finite and different.

    `states` is (*layers, words, dim).
    """
    first, second = states[..., category.first, :], states[..., category.second, :]
    return (first != second).any(-1) & first.isfinite().all(-1) & second.isfinite().all(-1)


def _alignment_records(
    alignment: geometry.ConceptAlignment, row: int, layer: int, num_pairs: int, tags: TagDict
) -> Iterator[Record]:
    """Yield the records of one layer and category; an undefined value has no record."""
    mean = alignment.mean[row]
    if mean.isfinite():
        yield from summarize("concept_alignment", mean + 2 * (alignment.by_pair[row] - mean), layer=layer, tags=tags)
    for metric in METRICS[1:]:
        if (value := getattr(alignment, metric)[row]).isfinite():
            yield Record(metric=metric, value=value.item(), layer=layer, n=num_pairs, tags=tags)
