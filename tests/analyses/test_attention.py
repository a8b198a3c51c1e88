"""Attention heads of hand-built models, and records of random models against eager attention weights."""

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
from tests.support.measured import keyed_records, records_of
from tests.support.tiny_models import HEADS, LAYERS, VOCAB, tiny, tiny_batch

TOKENS, POSITIONS = 16, 40
SHARP = 1e4  # factor of scores at which softmax attends to one token


def induction_model(*, sharp: float = SHARP) -> nn.Module:
    """Return a model whose block 2 attends to tokens after an earlier occurrence of the current token.

    Block 1 copies the predecessor of each token, and block 2 looks for the current token among these copies.
    Each block has one head. The state holds the token, its predecessor and the position, each one-hot. With `sharp` 0
    both heads attend uniformly.
    """
    dim = 2 * TOKENS + POSITIONS
    config = GPT2Config(
        vocab_size=TOKENS, n_embd=dim, n_layer=2, n_head=1, n_positions=POSITIONS, bos_token_id=0, eos_token_id=0
    )
    model = GPT2LMHeadModel(config).double().eval()
    token, before, position = slice(0, TOKENS), slice(TOKENS, 2 * TOKENS), slice(2 * TOKENS, dim)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.fill_(float(name.endswith("weight") and "ln_" in name))
        model.get_parameter("transformer.wte.weight")[:, token] = torch.eye(TOKENS, dtype=torch.double)
        model.get_parameter("transformer.wpe.weight")[:, position] = torch.eye(POSITIONS, dtype=torch.double)
        # c_attn holds queries, keys and values in its columns: (dim, 3 x dim)
        first, second = (
            model.get_parameter(f"transformer.h.{n}.attn.c_attn.weight").unflatten(1, (3, dim)) for n in (0, 1)
        )
        first[position, 0, position] = sharp * torch.diag(torch.ones(POSITIONS - 1, dtype=torch.double), -1)  # one back
        first[position, 1, position] = torch.eye(POSITIONS, dtype=torch.double)
        first[token, 2, before] = torch.eye(TOKENS, dtype=torch.double)
        second[token, 0, before] = sharp * torch.eye(TOKENS, dtype=torch.double)
        second[before, 1, before] = torch.eye(TOKENS, dtype=torch.double)
        second[position.start, 1, position.start] = -5.0  # the first token has no predecessor and copied itself
        model.get_parameter("transformer.h.1.attn.c_attn.bias")[position.start] = sharp  # so no query may match it
        second[token, 2, token] = torch.eye(TOKENS, dtype=torch.double)
        for number, columns in enumerate((before, token)):
            out = model.get_parameter(f"transformer.h.{number}.attn.c_proj.weight")
            out[columns, columns] = torch.eye(TOKENS, dtype=torch.double) * (1.0 if number == 0 else 5.0)
    return model


def test_a_hand_built_induction_circuit_scores_1_and_uniform_attention_one_over_the_period():
    records = keyed_records(Induction(num_prompts=3, num_tokens=10), induction_model(), "head")
    assert records["prefix_matching_score", 2, 0].value == pytest.approx(1, abs=1e-9)
    assert records["best_prefix_matching_score", None, None].value == pytest.approx(1, abs=1e-9)
    assert records["prefix_matching_score", 1, 0].value == pytest.approx(0, abs=1e-9)
    uniform_records = keyed_records(Induction(num_prompts=3, num_tokens=10), induction_model(sharp=0), "head")
    chance = sum((q // 10) / (q + 1) for q in range(10, 40)) / 30  # q // 10 targets among q + 1 tokens
    for each in (records, uniform_records):
        assert each["random_prefix_matching_score", 2, None].value == pytest.approx(chance)
    assert uniform_records["prefix_matching_score", 2, 0].value == pytest.approx(chance)
    assert chance == pytest.approx(1 / 10, rel=0.35)


def test_the_circuit_is_found_by_its_previous_token_head():
    ids = torch.stack([torch.randperm(TOKENS, generator=torch.Generator().manual_seed(n)) for n in range(3)])
    records = keyed_records(AttentionPatterns(batches=Listed({"input_ids": ids})), induction_model(), "head")
    assert records["previous_token_score", 1, 0].value == pytest.approx(1, abs=1e-9)
    assert records["attention_entropy", 1, 0].value == pytest.approx(0, abs=1e-6)
    assert records["best_previous_token_score", None, None].value == pytest.approx(1, abs=1e-9)
    assert records["best_previous_token_score", 2, None].value < 0.5


def test_records_are_means_over_prompts_for_each_head():
    eager = tiny("gpt2", torch.float64, attention="eager")
    records = keyed_records(AttentionPatterns(batches=Listed(*BATCHES[:2])), tiny("gpt2", torch.float64), "head")
    for layer in range(1, LAYERS + 1):
        scores: dict[str, list] = {"sink_mass": [], "attention_entropy": []}
        for ids in prompts_of(BATCHES[:2]):
            weights = eager(input_ids=ids[None], output_attentions=True).attentions[layer - 1]
            scores["sink_mass"].append(sink_mass(weights)[0])
            scores["attention_entropy"].append(attention_entropy(weights)[0])
        for metric, values in scores.items():
            expected = torch.stack(values)
            for head in range(HEADS):
                record = records[metric, layer, head]
                assert record.value == pytest.approx(expected[:, head].mean().item(), rel=1e-6)
                assert record.stderr == pytest.approx((expected[:, head].std() / 5**0.5).item(), rel=1e-5)
            assert records[metric, layer, None].value == pytest.approx(expected.mean().item(), rel=1e-6)
    uniform = [torch.ones(n, n).tril() / torch.arange(1, n + 1)[:, None] for n in (9, 7, 5, 7, 7)]  # token counts
    chance = records["random_sink_mass", 1, None]
    assert chance.value == pytest.approx(np.mean([sink_mass(each).item() for each in uniform]), rel=1e-6)
    assert chance.n == 5


def test_prefix_matching_equals_that_of_the_weights_of_transformers():
    model: Any = tiny("llama", torch.float64, attention="eager")
    analysis = Induction(num_prompts=3, num_tokens=7)
    records, ids = keyed_records(analysis, model, "head"), analysis.sequences(LayeredModel(model))
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


def test_the_gain_from_context_is_the_difference_of_two_losses():
    model = tiny("gpt2", torch.float64)
    batch = tiny_batch("gpt2", batch=4, tokens=12, padding="left")  # prompts of 12, 10, 8 and 6 tokens
    record = keyed_records(InContext(batches=Listed(batch), early=3, late=10), model, "head")[
        "in_context_score", None, None
    ]
    expected = []
    for ids, mask in zip(batch["input_ids"], batch["attention_mask"].bool(), strict=True):
        ids = ids[mask]
        if len(ids) >= 10:
            losses = -model(input_ids=ids[None]).logits[0].log_softmax(-1)[:-1].gather(1, ids[1:, None])[:, 0]
            expected.append((losses[8] - losses[1]).item())
    assert record.value == pytest.approx(sum(expected) / 2, rel=1e-9)
    assert (record.n, record.tags) == (2, {"early": 3, "late": 10, "num_undefined": 2})
    with pytest.raises(InputError, match="expected tokens from 2 to 64, .* late 500"):  # the model takes 64
        records_of(InContext(batches=Listed(batch)), model)


def test_models_without_attention_are_refused_by_name():
    with pytest.raises(InputError, match="MambaForCausalLM has no attention weights to read"):
        records_of(AttentionPatterns(batches=Listed(*BATCHES[:2])), tiny("mamba_lm"))


def test_special_tokens_are_not_drawn_and_sequences_fit_the_window():
    model = LayeredModel(tiny("gpt2"))
    ids = Induction(num_prompts=5).sequences(model)
    assert ids.shape == (5, 64)  # 4 periods of 16 tokens instead of the requested 25
    assert not {1, 2} & set(ids.flatten().tolist())
    assert ids.max() < VOCAB
    assert all(len(set(row[:16].tolist())) == 16 for row in ids)
    assert torch.equal(ids[:, :16], ids[:, 48:])
