"""N-grams against counts in plain Python, and divergences solved by hand."""

import math
from collections import Counter

import numpy as np
import pytest
import torch

from lit_layers.functional import count_ngrams, ngram_divergence

TEXTS = [np.random.default_rng(0).integers(0, 5, 60), np.array([4]), np.array([0, 1, 2])]


def test_shares_equal_counts_and_no_ngram_crosses_texts():
    for order in [1, 2, 3]:
        table = count_ngrams(TEXTS, order)
        counts = Counter(tuple(text[i : i + order].tolist()) for text in TEXTS for i in range(len(text) - order + 1))
        contexts = {ngram[:-1] for ngram in counts}
        for context in contexts:
            followers = {ngram[-1]: count for ngram, count in counts.items() if ngram[:-1] == context}
            found = table.shares(context)
            assert found is not None
            total = sum(followers.values())
            assert dict(zip(*(column.tolist() for column in found), strict=True)) == {
                token: count / total for token, count in followers.items()
            }
        assert len(table.contexts) == len(contexts)


def test_a_context_that_the_corpus_lacks_has_no_distribution():
    table = count_ngrams([np.array([1, 2, 3])], 2)
    assert table.shares([3]) is None
    assert table.shares([8]) is None
    assert count_ngrams([np.array([1, 2, 3])], 3).shares([0, 6]) is None  # not encoded like a context of other tokens
    with pytest.raises(ValueError, match="expected texts of at least 3 tokens, got none"):
        count_ngrams([np.array([1, 2])], 3)
    with pytest.raises(ValueError, match="expected an order from 1 to 3, got 4"):
        count_ngrams(TEXTS, 4)


def test_the_divergence_of_an_ngram_from_itself_is_0_and_another_is_solved_by_hand():
    table = count_ngrams([np.array([0, 1, 0, 2, 0, 1])], 2)  # after 0: 1 twice, 2 once
    itself = torch.tensor([[1e-30, 2 / 3, 1 / 3]]).log()
    even = torch.full((1, 3), 1 / 3).log()
    both = ngram_divergence(torch.stack([itself, even]), [table.shares([0])])
    expected = 2 / 3 * math.log(2) + 1 / 3 * math.log(1)
    assert both[:, 0].tolist() == pytest.approx([0, expected], abs=1e-7)
    assert ngram_divergence(even, [None]).isnan().all()
