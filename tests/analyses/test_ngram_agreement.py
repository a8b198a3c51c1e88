"""The readout of each layer against n-grams counted in plain Python, and a hand-built bigram model."""

import itertools
from collections import Counter, defaultdict
from typing import Any

import numpy as np
import pytest
import torch

from lit_layers.analyses import NgramAgreement
from lit_layers.errors import InputError
from lit_layers.models.view import LayeredModel
from tests.analyses.prompt_states import BATCHES, prompts_of, states_of_each_prompt
from tests.support.listed_batches import Listed
from tests.support.measured import records_of
from tests.support.tiny_models import LAYERS, tiny

CORPUS = Listed({"input_ids": torch.randint(3, 61, (60, 60), generator=torch.Generator().manual_seed(5))})


def test_layers_are_compared_at_evenly_spread_tokens_and_chance_uses_the_ngram_of_the_next_one():
    model: Any = tiny("gpt2", torch.float64)
    analysis = NgramAgreement(batches=Listed(*BATCHES[:2]), corpus=CORPUS, num_tokens=4)
    found = {(record.metric, record.layer, record.tags["order"]): record for record in records_of(analysis, model)}
    counts: dict[tuple[int, ...], Counter[int]] = defaultdict(Counter)
    for row in CORPUS.batches[0]["input_ids"].tolist():
        for order, start in itertools.product((1, 2, 3), range(len(row))):
            if start + order <= len(row):
                counts[tuple(row[start : start + order - 1])][row[start + order - 1]] += 1
    states = states_of_each_prompt(model, BATCHES[:2])
    for layer, order in itertools.product(range(LAYERS + 1), (1, 2, 3)):
        agreement, chance, missing = [], [], 0
        for ids, prompt in zip(prompts_of(BATCHES[:2]), states, strict=True):
            logits = model.lm_head(model.transformer.ln_f(torch.from_numpy(prompt[layer])))
            log_proba = logits.log_softmax(-1).detach().numpy()
            positions = [1 + round(i * (len(ids) - 2) / 3) for i in range(4)]  # every prompt has more than four tokens
            contexts = {index: tuple(ids[index + 2 - order : index + 1].tolist()) for index in positions}
            counted = [index for index in positions if contexts[index] in counts]
            missing += len(positions) - len(counted)
            pairs = list(zip(counted, counted[1:] + counted[:1], strict=True))
            if pairs:
                agreement.append(np.mean([kl(counts[contexts[index]], log_proba[index]) for index in counted]))
            if len(pairs) > 1:
                chance.append(np.mean([kl(counts[contexts[other]], log_proba[index]) for index, other in pairs]))
        record = found["ngram_divergence", layer, order]
        assert (record.value, record.n) == (pytest.approx(np.mean(agreement), rel=1e-9), len(agreement))
        assert record.tags.get("num_undefined_tokens", 0) == missing
        if order > 1:
            record = found["random_ngram_divergence", layer, order]
            assert (record.value, record.n) == (pytest.approx(np.mean(chance), rel=1e-9), len(chance))
    assert ("random_ngram_divergence", 1, 1) not in found


def kl(counts: Counter[int], log_proba: np.ndarray) -> float:
    total = sum(counts.values())
    return sum(n / total * (np.log(n / total) - log_proba[token]) for token, n in counts.items())


def test_a_prompt_with_one_counted_token_has_no_chance_value():
    """Chance needs the n-gram of another token; with its own it would equal the agreement."""
    analysis = NgramAgreement(batches=Listed({"input_ids": torch.tensor([[5, 9]])}), corpus=CORPUS, orders=(2,))
    found = [record for record in records_of(analysis, tiny("gpt2")) if record.layer == 1]
    assert [record.metric for record in found if record.value == record.value] == ["ngram_divergence"]


def test_a_bigram_model_is_near_its_bigrams_and_far_from_unigrams_and_chance():
    """The next token is always the next id of the vocabulary."""
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
    found = {(r.metric, r.tags["order"]): r.value for r in records_of(analysis, model) if r.layer == 1}
    assert found["ngram_divergence", 2] == pytest.approx(0, abs=1e-6)
    assert found["ngram_divergence", 3] == pytest.approx(0, abs=1e-6)
    assert found["ngram_divergence", 1] > 2
    assert found["random_ngram_divergence", 2] > 10


def test_a_corpus_of_unknown_tokens_or_short_texts_and_unknown_orders_are_refused():
    view, batches = LayeredModel(tiny("gpt2")), Listed(*BATCHES[:2])
    with pytest.raises(InputError, match="GPT2LMHeadModel knows 61 tokens, got token 99"):
        records_of(NgramAgreement(batches=batches, corpus=Listed({"input_ids": torch.full((1, 5), 99)})), view)
    with pytest.raises(ValueError, match="expected texts of at least 3 tokens"):
        records_of(NgramAgreement(batches=batches, corpus=Listed({"input_ids": torch.ones(1, 2).long()})), view)
    with pytest.raises(ValueError, match="expected an order from 1 to 3, got 4"):
        records_of(NgramAgreement(batches=batches, corpus=CORPUS, orders=(4,)), view)
