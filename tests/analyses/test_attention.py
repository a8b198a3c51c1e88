"""Heads of models that were built by hand, and the records of random ones against weights of eager attention."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

from lit_layers.analyses import AttentionPatterns, InContext, Induction
from lit_layers.errors import InputError
from lit_layers.functional import attention_entropy, sink_mass
from lit_layers.models.view import LayeredModel
from tests.analyses.prompt_states import BATCHES, prompts_of
from tests.support.listed_batches import Listed
from tests.support.measured import records_of
from tests.support.tiny_models import HEADS, LAYERS, VOCAB, tiny, tiny_batch

TOKENS, PLACES = 16, 40
SHARP = 1e4  # of scores: softmax then attends to one token


def induction_model(*, sharp: float = SHARP) -> nn.Module:
    """Block 1 writes each token's predecessor beside it; block 2 attends where the predecessor is its own token.

    One head a block; the state has a part for the token, for its predecessor and for the place, each one-hot. With
    `sharp` 0 both heads attend uniformly.
    """
    dim = 2 * TOKENS + PLACES
    config = GPT2Config(
        vocab_size=TOKENS, n_embd=dim, n_layer=2, n_head=1, n_positions=PLACES, bos_token_id=0, eos_token_id=0
    )
    model = GPT2LMHeadModel(config).double().eval()
    token, before, place = slice(0, TOKENS), slice(TOKENS, 2 * TOKENS), slice(2 * TOKENS, dim)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.fill_(float(name.endswith("weight") and "ln_" in name))
        model.get_parameter("transformer.wte.weight")[:, token] = torch.eye(TOKENS, dtype=torch.double)
        model.get_parameter("transformer.wpe.weight")[:, place] = torch.eye(PLACES, dtype=torch.double)
        # queries, keys and values stand side by side in the columns of c_attn: (dim, 3 x dim)
        first, second = (
            model.get_parameter(f"transformer.h.{n}.attn.c_attn.weight").unflatten(1, (3, dim)) for n in (0, 1)
        )
        first[place, 0, place] = sharp * torch.diag(torch.ones(PLACES - 1, dtype=torch.double), -1)  # asks for the last
        first[place, 1, place] = torch.eye(PLACES, dtype=torch.double)
        first[token, 2, before] = torch.eye(TOKENS, dtype=torch.double)
        second[token, 0, before] = sharp * torch.eye(TOKENS, dtype=torch.double)
        second[before, 1, before] = torch.eye(TOKENS, dtype=torch.double)
        second[place.start, 1, place.start] = -5.0  # the first token has no predecessor and found itself:
        model.get_parameter("transformer.h.1.attn.c_attn.bias")[place.start] = sharp  # no query wants it
        second[token, 2, token] = torch.eye(TOKENS, dtype=torch.double)
        for number, part in enumerate((before, token)):
            out = model.get_parameter(f"transformer.h.{number}.attn.c_proj.weight")
            out[part, part] = torch.eye(TOKENS, dtype=torch.double) * (1.0 if number == 0 else 5.0)
    return model


def found(analysis, model) -> dict[Any, Any]:
    records = records_of(analysis, model)
    keyed = {(record.metric, record.layer, record.tags.get("head")): record for record in records}
    assert len(keyed) == len(records)
    return keyed


def test_a_hand_built_induction_circuit_scores_1_and_uniform_attention_one_over_the_period():
    records = found(Induction(num_prompts=3, num_tokens=10), induction_model())
    assert records["prefix_matching_score", 2, 0].value == pytest.approx(1, abs=1e-9)
    assert records["best_prefix_matching_score", None, None].value == pytest.approx(1, abs=1e-9)
    assert records["prefix_matching_score", 1, 0].value == pytest.approx(0, abs=1e-9)
    blind = found(Induction(num_prompts=3, num_tokens=10), induction_model(sharp=0))
    chance = sum((q // 10) / (q + 1) for q in range(10, 40)) / 30  # as many targets among q + 1 tokens
    for each in (records, blind):
        assert each["random_prefix_matching_score", 2, None].value == pytest.approx(chance)
    assert blind["prefix_matching_score", 2, 0].value == pytest.approx(chance)
    assert chance == pytest.approx(1 / 10, rel=0.35)


def test_the_circuit_is_found_by_its_previous_token_head():
    ids = torch.stack([torch.randperm(TOKENS, generator=torch.Generator().manual_seed(n)) for n in range(3)])
    records = found(AttentionPatterns(batches=Listed({"input_ids": ids})), induction_model())
    assert records["previous_token_score", 1, 0].value == pytest.approx(1, abs=1e-9)
    assert records["attention_entropy", 1, 0].value == pytest.approx(0, abs=1e-6)
    assert records["best_previous_token_score", None, None].value == pytest.approx(1, abs=1e-9)
    assert records["best_previous_token_score", 2, None].value < 0.5


def test_records_are_means_over_the_prompts_of_each_head():
    eager = tiny("gpt2", torch.float64, attention="eager")
    records = found(AttentionPatterns(batches=Listed(*BATCHES[:2])), tiny("gpt2", torch.float64))
    for layer in range(1, LAYERS + 1):
        by_prompt: dict[str, list] = {"sink_mass": [], "attention_entropy": []}
        for ids in prompts_of(BATCHES[:2]):
            weights = eager(input_ids=ids[None], output_attentions=True).attentions[layer - 1]
            by_prompt["sink_mass"].append(sink_mass(weights)[0])
            by_prompt["attention_entropy"].append(attention_entropy(weights)[0])
        for metric, values in by_prompt.items():
            expected = torch.stack(values)
            for head in range(HEADS):
                record = records[metric, layer, head]
                assert record.value == pytest.approx(expected[:, head].mean().item(), rel=1e-6)
                assert record.stderr == pytest.approx((expected[:, head].std() / 5**0.5).item(), rel=1e-5)
            assert records[metric, layer, None].value == pytest.approx(expected.mean().item(), rel=1e-6)
    uniform = [torch.ones(n, n).tril() / torch.arange(1, n + 1)[:, None] for n in (9, 7, 5, 7, 7)]  # real tokens
    by_chance = records["random_sink_mass", 1, None]
    assert by_chance.value == pytest.approx(np.mean([sink_mass(each).item() for each in uniform]), rel=1e-6)
    assert by_chance.n == 5


def test_prefix_matching_is_that_of_the_weights_that_transformers_gives():
    model: Any = tiny("llama", torch.float64, attention="eager")
    analysis = Induction(num_prompts=3, num_tokens=7)
    records, ids = found(analysis, model), analysis.sequences(LayeredModel(model))
    with torch.no_grad():
        output = model(input_ids=ids, output_attentions=True)
    for layer in range(1, LAYERS + 1):
        for number in range(HEADS):
            matching = []
            for prompt in range(3):
                row, attended = ids[prompt].tolist(), output.attentions[layer - 1][prompt, number].numpy()
                after = [[k + 1 for k in range(q) if row[k] == row[q]] for q in range(28)]
                matching.append(np.mean([attended[q, after[q]].sum() for q in range(7, 28)]))
            assert records["prefix_matching_score", layer, number].value == pytest.approx(np.mean(matching), rel=1e-6)


def test_the_gain_by_context_is_the_difference_of_two_losses():
    model = tiny("gpt2", torch.float64)
    batch = tiny_batch("gpt2", batch=4, tokens=12, padding="left")  # of 12, 10, 8 and 6 tokens
    record = found(InContext(batches=Listed(batch), early=3, late=10), model)["in_context_score", None, None]
    expected = []
    for ids, mask in zip(batch["input_ids"], batch["attention_mask"].bool(), strict=True):
        ids = ids[mask]
        if len(ids) >= 10:
            losses = -model(input_ids=ids[None]).logits[0].log_softmax(-1)[:-1].gather(1, ids[1:, None])[:, 0]
            expected.append((losses[8] - losses[1]).item())
    assert record.value == pytest.approx(sum(expected) / 2, rel=1e-9)
    assert (record.n, record.tags) == (2, {"early": 3, "late": 10, "num_undefined": 2})
    with pytest.raises(InputError, match="expected tokens from 2 to 64, .* late 500"):  # it takes 64 tokens
        records_of(InContext(batches=Listed(batch)), model)


def test_models_without_attention_are_refused_by_name():
    with pytest.raises(InputError, match="MambaForCausalLM has no attention weights to read"):
        records_of(AttentionPatterns(batches=Listed(*BATCHES[:2])), tiny("mamba_lm"))


def test_tokens_with_a_meaning_are_not_drawn_and_sequences_fit_the_window():
    model = LayeredModel(tiny("gpt2"))
    ids = Induction(num_prompts=5).sequences(model)
    assert ids.shape == (5, 64)  # 4 times 16 of the 25 that were asked for
    assert not {1, 2} & set(ids.flatten().tolist())
    assert ids.max() < VOCAB
    assert all(len(set(row[:16].tolist())) == 16 for row in ids)
    assert torch.equal(ids[:, :16], ids[:, 48:])
