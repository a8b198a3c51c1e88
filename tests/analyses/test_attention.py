"""Heads of models that were built by hand, and the records of random ones against weights of eager attention."""

import math
from typing import Any

import numpy as np
import pytest
import torch

from lit_layers.analyses import AttentionPatterns, InContext, Induction
from lit_layers.analyses.attention import _Added
from lit_layers.errors import InputError
from lit_layers.functional import attention_entropy, sink_mass
from lit_layers.models.view import LayeredModel
from tests.support.induction_model import TOKENS, induction_model
from tests.support.listed_batches import Listed
from tests.support.tiny_models import HEADS, LAYERS, VOCAB, tiny, tiny_batch

BATCHES = [
    tiny_batch("gpt2", batch=3, tokens=9, padding="left", seed=1),
    tiny_batch("gpt2", batch=2, tokens=7, seed=2),
]


def found(analysis, model) -> dict[Any, Any]:
    records = list(analysis.run(LayeredModel(model)))
    keyed = {(record.metric, record.layer, record.tags.get("head")): record for record in records}
    assert len(keyed) == len(records)
    return keyed


@pytest.mark.parametrize("attention", ["eager", None])
def test_a_hand_built_induction_circuit_scores_1_and_uniform_attention_one_over_the_period(attention):
    model: Any = induction_model()
    if attention:
        model.set_attn_implementation(attention)
    records = found(Induction(num_prompts=3, num_tokens=10), model)
    assert records["prefix_matching_score", 2, 0].value == pytest.approx(1, abs=1e-9)
    assert records["best_prefix_matching_score", None, None].value == pytest.approx(1, abs=1e-9)
    assert records["copying_score", 2, 0].value == pytest.approx(1, abs=1e-9)
    assert records["prefix_matching_score", 1, 0].value == pytest.approx(0, abs=1e-9)
    blind = found(Induction(num_prompts=3, num_tokens=10), induction_model(sharp=0))
    chance = sum((q // 10) / (q + 1) for q in range(10, 40)) / 30  # as many targets among q + 1 tokens
    for each in (records, blind):
        assert each["random_prefix_matching_score", 2, None].value == pytest.approx(chance)
        assert each["random_copying_score", 2, None].value == pytest.approx(1 / 10)
    assert blind["prefix_matching_score", 2, 0].value == pytest.approx(chance)
    assert chance == pytest.approx(1 / 10, rel=0.35)


def test_the_circuit_is_found_by_its_previous_token_head():
    ids = torch.stack([torch.randperm(TOKENS, generator=torch.Generator().manual_seed(n)) for n in range(3)])
    records = found(AttentionPatterns(batches=Listed({"input_ids": ids})), induction_model())
    assert records["previous_token_score", 1, 0].value == pytest.approx(1, abs=1e-9)
    assert records["attention_entropy", 1, 0].value == pytest.approx(0, abs=1e-6)
    assert records["best_previous_token_score", None, None].value == pytest.approx(1, abs=1e-9)
    assert records["best_previous_token_score", 2, None].value < 0.5


def test_a_planted_sink_is_found():
    model = induction_model()
    with torch.no_grad():  # every place asks for the first instead of the last
        part = model.get_parameter("transformer.h.0.attn.c_attn.weight").unflatten(1, (3, -1))
        place = slice(2 * TOKENS, None)
        part[place, 0, place] = 0
        model.get_parameter("transformer.h.0.attn.c_attn.bias")[2 * TOKENS] = 1e4
    ids = torch.stack([torch.randperm(TOKENS, generator=torch.Generator().manual_seed(n)) for n in range(3)])
    records = found(AttentionPatterns(batches=Listed({"input_ids": ids})), model)
    assert records["sink_mass", 1, 0].value == pytest.approx(1, abs=1e-9)
    assert records["sink_mass", 1, 0].value > 5 * records["random_sink_mass", 1, None].value


def test_records_are_means_over_the_prompts_of_each_head():
    eager = tiny("gpt2", torch.float64, attention="eager")
    records = found(AttentionPatterns(batches=Listed(*BATCHES)), tiny("gpt2", torch.float64))
    for layer in range(1, LAYERS + 1):
        by_prompt: dict[str, list] = {"sink_mass": [], "attention_entropy": []}
        for batch in BATCHES:
            for ids, mask in zip(batch["input_ids"], batch["attention_mask"].bool(), strict=True):
                weights = eager(input_ids=ids[mask][None], output_attentions=True).attentions[layer - 1]
                by_prompt["sink_mass"].append(sink_mass(weights)[0])
                by_prompt["attention_entropy"].append(attention_entropy(weights)[0])
        for metric, values in by_prompt.items():
            expected = torch.stack(values)
            for head in range(HEADS):
                record = records[metric, layer, head]
                assert record.value == pytest.approx(expected[:, head].mean().item(), rel=1e-6)
                assert record.stderr == pytest.approx((expected[:, head].std() / 5**0.5).item(), rel=1e-5)
            assert records[metric, layer, None].value == pytest.approx(expected.mean().item(), rel=1e-6)
    assert records["random_sink_mass", 1, None].n == 5


@pytest.mark.parametrize(("name", "is_plain"), [("gpt2", True), ("llama", True), ("llama", False)])
def test_the_scores_of_induction_are_those_of_weights_in_numpy(name, is_plain):
    """Prefix matching by the weights that transformers gives, copying by products with the weights of the model."""
    model: Any = tiny(name, torch.float64, attention="eager")
    if not is_plain:  # something may be done to its logits
        model.lm_head.register_forward_hook(lambda module, args, output: None)
    analysis = Induction(num_prompts=3, num_copied=2, num_tokens=7)
    records, ids = found(analysis, model), analysis.sequences(LayeredModel(model))
    with torch.no_grad():
        output = model(input_ids=ids, output_attentions=True, output_hidden_states=True)
    weight = {name: value.detach().numpy() for name, value in model.named_parameters()}
    final, head = (model.transformer.ln_f, model.lm_head) if name == "gpt2" else (model.model.norm, model.lm_head)
    for layer in range(1, LAYERS + 1):
        state = output.hidden_states[layer - 1]
        if name == "gpt2":
            block, path = model.transformer.h[layer - 1], f"transformer.h.{layer - 1}.attn."
            value = block.ln_1(state).detach().numpy() @ weight[path + "c_attn.weight"] + weight[path + "c_attn.bias"]
            value, out = np.split(value, 3, -1)[2], weight[path + "c_proj.weight"].T
        else:
            block, path = model.model.layers[layer - 1], f"model.layers.{layer - 1}.self_attn."
            value = block.input_layernorm(state).detach().numpy() @ weight[path + "v_proj.weight"].T
            out = weight[path + "o_proj.weight"]
        size, per_group = out.shape[1] // HEADS, out.shape[1] // value.shape[-1]
        for number in range(HEADS):
            columns = slice(number * size, (number + 1) * size)
            group = slice(number // per_group * size, (number // per_group + 1) * size)
            copying, matching = [], []
            for prompt in range(3):
                row, attended = ids[prompt].tolist(), output.attentions[layer - 1][prompt, number].numpy()
                after = [[k + 1 for k in range(q) if row[k] == row[q]] for q in range(28)]
                matching.append(np.mean([attended[q, after[q]].sum() for q in range(7, 28)]))
                written = value[prompt, :7, group] @ out[:, columns].T
                nothing = torch.zeros(len(written), written.shape[1], dtype=torch.float64)
                logits = head(final(torch.from_numpy(written))) - head(final(nothing))
                raised = np.maximum(logits.detach().numpy() - logits.detach().numpy().mean(-1, keepdims=True), 0)
                totals = [raised[t, row[:7]].sum() for t in range(7)]  # 0: it raises none of them
                copying.append(np.mean([raised[t, row[t]] / (totals[t] or 1) for t in range(7)]))
            assert records["prefix_matching_score", layer, number].value == pytest.approx(np.mean(matching), rel=1e-6)
            assert records["copying_score", layer, number].value == pytest.approx(np.mean(copying[:2]), rel=1e-6)


def test_what_heads_add_is_capped_as_the_models_logits_are():
    """Gemma 2 has no row: what its own call does behind the head is part of the readout."""
    model: Any = tiny("gemma2", torch.float64)
    generator = torch.Generator().manual_seed(0)
    written = torch.randn(2, 3, model.config.hidden_size, generator=generator, dtype=torch.float64)
    cap, ids = model.config.final_logit_softcapping, [3, 9, 5]
    ((logits, places, mean),) = _Added(LayeredModel(model))(written, torch.tensor(ids))
    with torch.no_grad():
        expected = cap * torch.tanh(model.lm_head(model.model.norm(written)) / cap)
    assert mean is None
    torch.testing.assert_close(logits[..., places], expected[..., ids])


def test_the_mean_over_the_vocabulary_is_not_rounded_in_half_precision():
    """In float64 from the same half-precision weights: 1/256 is what bfloat16 may be off by."""
    model: Any = tiny("gpt2", torch.bfloat16)
    with torch.no_grad():
        model.lm_head.weight.add_(1.7)
    view, ids = LayeredModel(model), torch.arange(3, 10)
    written = torch.randn(2, 7, view.dim, generator=torch.Generator().manual_seed(2)).bfloat16()
    ((logits, _, mean),) = _Added(view)(written, ids)
    norm = model.transformer.ln_f
    added = (norm(written) - norm(torch.zeros_like(written[:1, :1]))).detach().double()
    expected = added @ model.lm_head.weight.detach().double().T
    torch.testing.assert_close(mean.double(), expected.mean(-1), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(logits.double(), expected[..., ids], rtol=1e-4, atol=1e-4)


def test_the_gain_by_context_is_the_difference_of_two_losses_and_short_windows_say_so():
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
    assert InContext(batches=Listed(batch)).places(LayeredModel(model)) == (6, 64)  # it takes 64 tokens


def test_models_without_attention_or_next_token_are_refused_by_name():
    with pytest.raises(InputError, match="MambaForCausalLM has no attention weights to read"):
        list(AttentionPatterns(batches=Listed(*BATCHES)).run(LayeredModel(tiny("mamba_lm"))))
    for analysis in (Induction(), InContext(batches=Listed(*BATCHES))):
        with pytest.raises(InputError, match="expected a model that predicts the next token, got BertForMaskedLM"):
            list(analysis.run(LayeredModel(tiny("bert"))))
    with pytest.raises(InputError, match="too few to repeat two of them 40 times"):
        list(Induction(repeats=40).run(LayeredModel(tiny("gpt2"))))


def test_tokens_with_a_meaning_are_not_drawn_and_sequences_fit_the_window():
    model = LayeredModel(tiny("gpt2"))
    ids = Induction(num_prompts=5).sequences(model)
    assert ids.shape == (5, 64)  # 4 times 16 of the 25 that were asked for
    assert not {1, 2} & set(ids.flatten().tolist())
    assert ids.max() < VOCAB
    assert all(len(set(row[:16].tolist())) == 16 for row in ids)
    assert torch.equal(ids[:, :16], ids[:, 48:])
    assert math.isclose(found(Induction(num_prompts=2), tiny("gpt2"))["random_copying_score", None, None].value, 1 / 16)
