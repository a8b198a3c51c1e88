"""Each layer's readout against n-grams counted in plain Python, and a model that is a bigram table by hand."""

import itertools
from collections import Counter
from typing import Any

import pytest
import torch

from lit_layers.analyses import NgramAgreement
from lit_layers.errors import InputError
from lit_layers.models.view import LayeredModel
from tests.support.listed_batches import Listed
from tests.support.prompt_states import states_of_each_prompt
from tests.support.tiny_models import LAYERS, tiny, tiny_batch

BATCHES = [tiny_batch("gpt2", batch=3, tokens=9, padding="left", seed=1), tiny_batch("gpt2", batch=2, tokens=7, seed=2)]
CORPUS = Listed({"input_ids": torch.randint(3, 61, (60, 60), generator=torch.Generator().manual_seed(5))})


def test_every_layer_is_compared_at_tokens_evenly_spread():
    model: Any = tiny("gpt2", torch.float64)
    found = {
        (record.metric, record.layer, record.tags["order"]): record
        for record in NgramAgreement(batches=Listed(*BATCHES), corpus=CORPUS, num_tokens=4, orders=(1, 2)).run(
            LayeredModel(model)
        )
    }
    rows = [row.tolist() for row in CORPUS.batches[0]["input_ids"]]
    pairs = Counter(pair for row in rows for pair in itertools.pairwise(row))
    singles = Counter(token for row in rows for token in row)
    prompts = [ids[mask.bool()] for b in BATCHES for ids, mask in zip(b["input_ids"], b["attention_mask"], strict=True)]
    states = states_of_each_prompt(model, BATCHES)
    for layer in range(LAYERS + 1):
        means: dict[int, list[float]] = {1: [], 2: []}
        for ids, prompt in zip(prompts, states, strict=True):
            logits = model.lm_head(model.transformer.ln_f(torch.from_numpy(prompt[layer])))
            places = [1 + round(i * (len(ids) - 2) / 3) for i in range(4)]  # every prompt has more than four
            values: dict[int, list[float]] = {1: [], 2: []}
            for place in places:
                log_proba = logits[place].log_softmax(-1)
                here = {b: n for (a, b), n in pairs.items() if a == int(ids[place])}
                for order, counts in ((1, singles), (2, here)):
                    if counts:
                        share = torch.tensor([n / sum(counts.values()) for n in counts.values()], dtype=torch.float64)
                        values[order].append((share * (share.log() - log_proba[list(counts)])).sum().item())
            for order, each in values.items():
                means[order].append(sum(each) / len(each))
        for order, each in means.items():
            record = found["ngram_divergence", layer, order]
            assert record.value == pytest.approx(sum(each) / 5, rel=1e-6)
            assert record.n == 5
    assert ("random_ngram_divergence", 1, 1) not in found


def test_a_model_that_is_a_bigram_table_is_near_its_bigrams_and_far_from_unigrams_and_other_tokens():
    """Each token is followed by the next one of the vocabulary, whatever was before."""
    from transformers import GPT2Config, GPT2LMHeadModel

    ids = (torch.arange(40)[None] + torch.arange(10)[:, None]) % 12
    config = GPT2Config(vocab_size=12, n_embd=12, n_layer=1, n_head=1, n_positions=40, tie_word_embeddings=False)
    model = GPT2LMHeadModel(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.fill_(float(name.endswith("weight") and "ln_" in name))
        model.get_parameter("transformer.wte.weight").copy_(torch.eye(12))
        model.get_parameter("lm_head.weight").copy_(20 * torch.eye(12).roll(1, 0))
    batch = {"input_ids": ids}
    analysis = NgramAgreement(batches=Listed(batch), corpus=Listed(batch))
    found = {(r.metric, r.tags["order"]): r.value for r in analysis.run(LayeredModel(model)) if r.layer == 1}
    assert found["ngram_divergence", 2] == pytest.approx(0, abs=1e-6)
    assert found["ngram_divergence", 3] == pytest.approx(0, abs=1e-6)
    assert found["ngram_divergence", 1] > 2
    assert found["random_ngram_divergence", 2] > 10


def test_a_corpus_of_other_tokens_and_orders_that_are_not_counted_are_refused():
    view, batches = LayeredModel(tiny("gpt2")), Listed(*BATCHES)
    with pytest.raises(InputError, match="ngrams: the corpus has token 99, GPT2LMHeadModel knows 61"):
        list(NgramAgreement(batches=batches, corpus=Listed({"input_ids": torch.full((1, 5), 99)})).run(view))
    with pytest.raises(InputError, match="ngrams: the corpus has no text of 3 tokens"):
        list(NgramAgreement(batches=batches, corpus=Listed({"input_ids": torch.ones(1, 2).long()})).run(view))
    with pytest.raises(InputError, match="expected orders from 1 to 3"):
        list(NgramAgreement(batches=batches, corpus=CORPUS, orders=(4,)).run(view))
