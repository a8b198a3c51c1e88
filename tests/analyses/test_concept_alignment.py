"""Concept alignment against states of single words in the running model, pair by pair."""

import itertools
import math

import numpy as np
import pandas as pd
import pytest
import torch

from lit_layers.analyses.concept_alignment import METRICS, ConceptAlignment, _alignment_records
from lit_layers.data.tokenization import save_tokenizer, train_bpe
from lit_layers.data.word_pairs import WordPairs
from lit_layers.functional.curves import bootstrap_interval
from lit_layers.functional.geometry import _derangements
from tests.analyses.prompt_states import states_of_each_prompt
from tests.support.measured import keyed_records
from tests.support.references import cosine
from tests.support.tiny_models import LAYERS, tiny

VOCABULARY = 300  # of the tokenizer and the models
STEMS = ["cat", "dog", "tree", "stone", "layer", "state", "norm"]
CATEGORIES = {
    ("I01", "plural"): [(stem, stem + "s") for stem in STEMS] + [("sheep", "sheep")],
    ("D01", "re+verb"): [("load", "reload"), ("do", "redo"), ("place", "replace"), ("new", "renew")],
    ("L10", "opposite"): [("up", "down"), ("before", "after"), ("after", "before"), ("in", "out"), ("on", "off")],
}


@pytest.fixture(scope="module")
def words(tmp_path_factory) -> WordPairs:
    folder = tmp_path_factory.mktemp("words")
    spelled = sorted({word for pairs in CATEGORIES.values() for pair in pairs for word in pair})
    save_tokenizer(train_bpe([" " + " ".join(spelled)] * 3, VOCABULARY), folder / "tokenizer")
    rows = [
        {"group": id_[0], "category_id": id_, "category": name, "word": one, "answers": [other, "wrong"]}
        for (id_, name), pairs in CATEGORIES.items()
        for one, other in pairs
    ]
    pd.DataFrame(rows).to_parquet(folder / "pairs.parquet")
    return WordPairs(str(folder / "pairs.parquet"), str(folder / "tokenizer"), batch_size=4)


def text_model(name, dtype=torch.float64, **options):
    return tiny(name, dtype, vocab_size=VOCABULARY, **options)


def run(model, words, **options):
    return keyed_records(ConceptAlignment(words=words, **options), model, "category_id")


def mean_cosine(deltas, metric):
    return np.mean([cosine(a, b, metric) for a, b in itertools.combinations(deltas, 2)])


def expected_of(first, second, metric, shuffles, seed):
    """Return the four metrics of one category at one layer, from the states (pairs, dim) of both words."""
    if len(first) < 3:
        return [None] * 4
    deltas, size = second - first, len(first)
    rest = [np.sum(deltas, 0) - delta for delta in deltas]
    # before - after and after - before cancel in the leave-one-out mean of a third pair
    others = [cosine(*pair, metric) for pair in zip(deltas, rest, strict=True)] if np.all(np.any(rest, 1)) else [None]
    shuffled = []
    for order in _derangements(size, shuffles, seed):
        rows = second[order.numpy()] - first
        shuffled.append(mean_cosine([row for row in rows if row.any()], metric))
    mean = mean_cosine(deltas, metric)
    return mean, None if None in others else np.mean(others), np.mean(shuffled), mean - np.mean(shuffled)


def test_every_record_equals_that_of_single_words_in_the_running_model(words):
    model = text_model("gpt2")
    records = run(model, words, shuffles=3, seed=4)
    metric = np.eye(model.config.n_embd)
    tokens = [torch.tensor([word.ids]) for word in words.words()]
    states = states_of_each_prompt(model, [{"input_ids": ids} for ids in tokens])  # one word per prompt
    undefined = 0
    for category in words.category_pairs():
        for layer in range(LAYERS + 1):
            first, second = (
                np.stack([states[row][layer, -1] for row in side.tolist()])
                for side in (category.first, category.second)
            )
            kept = (first != second).any(1)  # states are equal at layer 0 if token and position are
            assert kept.all() or not layer
            expected = expected_of(first[kept], second[kept], metric, 3, 4)
            counts = {"num_dropped": int(category.id == "I01"), "num_undefined": int((~kept).sum())}
            tags = {"category": category.name, "category_id": category.id, "group": category.id[0]}
            for metric_name, value in zip(METRICS, expected, strict=True):
                if value is None:
                    assert (metric_name, layer, category.id) not in records
                    undefined += 1
                    continue
                record = records[metric_name, layer, category.id]
                assert record.value == pytest.approx(value, abs=1e-9)
                assert record.n == kept.sum()
                assert record.tags == tags | {name: count for name, count in counts.items() if count}
    assert len(records) == 4 * (LAYERS + 1) * 4 - undefined  # three categories and their mean
    assert undefined == 4  # the metrics of D01 at layer 0, where one pair remains


def test_the_mean_over_categories_has_an_interval_over_categories(words):
    records = run(text_model("gpt2"), words)
    for metric in METRICS:
        values = torch.tensor([records[metric, 2, id_].value for id_ in ("I01", "D01", "L10")], dtype=torch.float64)
        record = records[metric, 2, None]
        low, high = bootstrap_interval(values)
        assert (record.value, record.low, record.high) == pytest.approx((values.mean().item(), low.item(), high.item()))
        assert record.n == 3
        assert record.stderr == pytest.approx(values.std().item() / math.sqrt(3))
        assert record.tags == {}


def test_the_error_of_one_category_is_the_spread_over_new_samples_of_pairs():
    """Compare the standard error with the spread of mean cosines over new draws of pairs."""
    from lit_layers.functional.geometry import concept_alignment

    generator = torch.Generator().manual_seed(0)
    deltas = torch.randn(400, 40, 8, generator=generator) + torch.tensor([1.5, *[0.0] * 7])
    found = concept_alignment(torch.zeros_like(deltas), deltas, shuffles=1)
    stderr = [next(iter(_alignment_records(found, row, 0, 40, {}))).stderr for row in range(60)]
    assert np.mean(stderr) == pytest.approx(found.mean.std().item(), rel=0.15)


@pytest.mark.soak
@pytest.mark.parametrize("name", ["llama", "bert"])
def test_the_batch_size_of_words_changes_nothing_in_any_family(words, name):
    model = text_model(name)
    single = WordPairs(words.source, words.tokenizer, batch_size=1)
    one, other = run(model, words), run(model, single)
    assert list(one) == list(other)
    np.testing.assert_allclose(
        [record.value for record in one.values()], [record.value for record in other.values()], atol=1e-6
    )


def test_a_single_category_has_no_mean_over_categories(words):
    only = WordPairs(words.source, words.tokenizer, categories=("L10",))
    assert {key[2] for key in run(text_model("gpt2"), only)} == {"L10"}
