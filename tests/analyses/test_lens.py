"""The lens against the model's own forward pass, prompt by prompt."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForSequenceClassification

from lit_layers.analyses import Interventions, Lens, readout_scores
from lit_layers.analyses.statistics import summarize_ratio
from lit_layers.errors import InputError
from lit_layers.functional.curves import bootstrap_interval
from lit_layers.models.view import LayeredModel
from tests.analyses.prompt_states import BATCHES, attention_of_each_prompt, prompts_of, states_of_each_prompt
from tests.support.listed_batches import Listed
from tests.support.measured import records_of
from tests.support.rounding import check_records
from tests.support.tiny_configs import scale_up_, tiny_config
from tests.support.tiny_models import LAYERS, VOCAB, tiny, tiny_batch

METRICS = {"logit_lens_loss", "logit_lens_accuracy", "logit_lens_perplexity", "kl_to_final"}


def run(model, *batches):
    records = records_of(Lens(batches=Listed(*batches)), model)
    assert len({(r.metric, r.layer) for r in records}) == len(records)
    return {(r.metric, r.layer): r for r in records}


@pytest.fixture(scope="module")
def model():
    return tiny("gpt2", torch.float64)


def softmax(logits):
    shares = np.exp(logits - logits.max(-1, keepdims=True))
    return shares / shares.sum(-1, keepdims=True)


def prompt_scores(model, of_prompts=None):
    """Return losses, hits and divergences of the tokens per prompt and layer, from the modules of the model."""
    found = []
    for ids, states in zip(prompts_of(BATCHES), of_prompts or states_of_each_prompt(model, BATCHES), strict=True):
        with torch.no_grad():
            logits = model.lm_head(model.transformer.ln_f(torch.from_numpy(states))).numpy()[:, :-1]
            own = model(input_ids=ids[None], labels=ids[None])
        np.testing.assert_allclose(logits[-1], own.logits[0, :-1], atol=1e-10)
        shares, targets = softmax(logits), ids[1:].numpy()
        losses = -np.log(shares[:, np.arange(len(targets)), targets])
        assert losses[-1].mean() == pytest.approx(own.loss.item(), rel=1e-6)  # transformers' loss is float32
        divergences = (shares[-1] * np.log(shares[-1] / shares)).sum(-1)
        found.append((losses, logits.argmax(-1) == targets, divergences))
    return found


def test_every_record_is_the_mean_of_the_models_readout_over_predicted_tokens(model):
    records = run(model, *BATCHES)
    prompts = prompt_scores(model)
    assert set(records) == {(metric, layer) for metric in METRICS for layer in range(LAYERS + 1)}
    for layer in range(LAYERS + 1):
        losses, hits, divergences = (np.concatenate([p[kind][layer] for p in prompts]) for kind in range(3))
        for metric, expected in (
            ("logit_lens_loss", losses.mean()),
            ("logit_lens_accuracy", hits.mean()),
            ("logit_lens_perplexity", math.exp(losses.mean())),
            ("kl_to_final", divergences.mean()),
        ):
            record = records[metric, layer]
            assert record.value == pytest.approx(expected, rel=1e-10, abs=1e-14)
            assert record.n == len(prompts) == 8
            assert record.tags == {"num_tokens": len(losses)}


def test_the_middle_of_a_block_is_read_out_as_its_input_plus_its_attention(model):
    lens, middle = Lens(batches=Listed(*BATCHES), states="after_attention"), states_of_each_prompt(model, BATCHES)
    for states, attention in zip(middle, attention_of_each_prompt(model, BATCHES), strict=True):
        states[:-1] += attention
    found = [record for record in records_of(lens, model) if record.metric == "logit_lens_loss"]
    losses = np.concatenate([prompt[0][:-1] for prompt in prompt_scores(model, middle)], axis=1).mean(1)
    assert [record.value for record in found] == pytest.approx(losses.tolist(), rel=1e-10)
    assert [(record.layer, record.tags["states"]) for record in found] == [(n, "after_attention") for n in (1, 2, 3)]
    with pytest.raises(InputError, match="states after_attention needs dtype float32, got bfloat16"):
        replace(lens, dtype="bfloat16").check_options(LayeredModel(model))


def test_intervals_are_over_prompts_and_not_over_tokens(model):
    records, prompts = run(model, *BATCHES), prompt_scores(model)
    losses = [p[0][1] for p in prompts]
    counts = np.array([len(row) for row in losses], dtype=float)
    mean = np.concatenate(losses).mean()
    spread = torch.tensor(mean + (np.array([row.sum() for row in losses]) - mean * counts) / counts.mean())
    record = records["logit_lens_loss", 1]
    low, high = bootstrap_interval(spread)
    assert (record.low, record.high) == pytest.approx((low.item(), high.item()), rel=1e-9)
    assert record.stderr == pytest.approx(spread.std().item() / math.sqrt(8), rel=1e-9)
    perplexity = records["logit_lens_perplexity", 1]
    assert (perplexity.low, perplexity.high) == pytest.approx((math.exp(low), math.exp(high)), rel=1e-9)
    assert perplexity.stderr == pytest.approx(record.stderr * math.exp(mean), rel=1e-9)


@pytest.mark.parametrize("kind", [Lens, Interventions])
def test_the_size_of_the_chunks_changes_nothing(model, kind, monkeypatch):
    analysis = kind(batches=Listed(*BATCHES))
    expected = records_of(analysis, model)
    monkeypatch.setattr(readout_scores, "MAX_LOGITS", 3 * VOCAB)
    sizes, readout = [], LayeredModel.readout
    monkeypatch.setattr(LayeredModel, "readout", lambda self, h: sizes.append(h.shape[:-1].numel()) or readout(self, h))
    check_records(records_of(analysis, model), expected, torch.float64)
    assert max(sizes) == 3


def test_uniform_logits_have_the_vocabulary_size_as_perplexity_and_predict_token_0():
    model = tiny("gpt2", torch.float64, tie_word_embeddings=False)
    model.lm_head.weight.data.zero_()
    records = run(model, {"input_ids": torch.tensor([[5, 0, 3, 0, 0, 8]])})
    for layer in range(LAYERS + 1):
        assert records["logit_lens_perplexity", layer].value == pytest.approx(VOCAB, rel=1e-12)
        assert records["logit_lens_loss", layer].value == pytest.approx(math.log(VOCAB), rel=1e-12)
        assert records["logit_lens_accuracy", layer].value == pytest.approx(0.6), "three of five are token 0"
        assert records["kl_to_final", layer].value == 0


@pytest.mark.parametrize("kind", [Lens, Interventions])
def test_a_prompt_without_a_predicted_token_is_left_out_and_counted(model, kind):
    lone = {"input_ids": torch.tensor([[5, 6]]), "attention_mask": torch.tensor([[1, 0]])}
    whole, more = (records_of(kind(batches=Listed(*BATCHES, *added)), model) for added in ((), (lone,)))
    counted = [replace(each, tags={**each.tags, "num_undefined": 1}) for each in whole]
    assert more == [
        one if each.metric == "kendall_distance" else each for one, each in zip(whole, counted, strict=True)
    ]
    with pytest.raises(InputError, match=r"^\w+: no text has a next token to predict"):
        records_of(kind(batches=Listed(lone)), model)


def test_half_precision_logits_are_widened_before_the_softmax():
    model = tiny("gpt2", torch.bfloat16)
    batch = tiny_batch("gpt2", batch=2)
    with torch.no_grad():
        logits = model(**batch).logits[:, :-1].double()
    expected = -logits.log_softmax(-1).gather(2, batch["input_ids"][:, 1:, None]).mean().item()
    assert run(model, batch)["logit_lens_loss", LAYERS].value == pytest.approx(expected, rel=1e-6)


CLASSIFIERS = {
    "vit": lambda model, hidden: model.forward_head(model.norm(hidden)),
    "bert_classifier": lambda model, hidden: model.classifier(model.bert.pooler(hidden)),
    "bert_tagger": lambda model, hidden: model.classifier(hidden),
}


@pytest.mark.parametrize("name", CLASSIFIERS)
def test_a_classifier_is_compared_over_prompts_or_real_tokens_and_with_available_labels(name):
    model, per_token = tiny(name, torch.float64), name == "bert_tagger"
    bare, batch = tiny_batch(name, batch=5), tiny_batch(name, batch=30, padding="right", seed=9)
    without = run(model, bare)
    assert set(without) == {("kl_to_final", layer) for layer in range(LAYERS + 1)}
    real = batch["attention_mask"].bool() if per_token else torch.ones(30, dtype=torch.bool)
    labels = (torch.arange(real.numel()) * 7 % 5).reshape(real.shape)
    labels[..., ::2] = -100
    labelled, others, num_bare = labels[real] != -100, 5 if per_token else 20, 50 if per_token else 5
    records = run(model, bare, batch | {"labels": labels})
    with torch.no_grad():
        hidden = LayeredModel(model).trajectory(batch).hidden
        layer_scores = [CLASSIFIERS[name](model, state)[real].log_softmax(-1) for state in hidden]
    final = layer_scores[-1]
    assert (final.argmax(-1)[~labelled] == 0).any(), "which is no hit without a label"
    for layer, log_proba in enumerate(layer_scores):
        loss = records["logit_lens_loss", layer]
        expected = torch.nn.functional.nll_loss(log_proba, labels[real]).item()
        assert loss.value == pytest.approx(expected, rel=1e-10)
        assert (loss.n, loss.tags) == (35 - others, {"num_tokens": int(labelled.sum()), "num_undefined": others})
        accuracy = (log_proba.argmax(-1) == labels[real])[labelled].double().mean().item()
        assert records["logit_lens_accuracy", layer].value == pytest.approx(accuracy)
        both, rows = records["kl_to_final", layer], num_bare + int(real.sum())
        divergence = (final.exp() * (final - log_proba)).sum().item()
        divergence += without["kl_to_final", layer].value * num_bare
        assert both.value == pytest.approx(divergence / rows, rel=1e-10, abs=1e-14)
        assert (both.n, both.tags) == (35, {"num_tokens": rows})
    assert ("logit_lens_perplexity", 0) not in records


@pytest.mark.parametrize(("name", "padding"), [("gpt2", "left"), ("llama", "right")])
def test_a_head_on_the_last_token_reads_every_layer_there_for_any_padding(name, padding):
    """Compare with the head of transformers' decoder classifiers on each single text; 0 is its padding token."""
    torch.manual_seed(3)
    sizes = {"num_hidden_layers": LAYERS, "hidden_size": 16, "num_attention_heads": 2, "vocab_size": VOCAB}
    config = AutoConfig.for_model(name, **sizes, num_labels=5, pad_token_id=0, bos_token_id=1, eos_token_id=2)
    config.intermediate_size = 32
    model = AutoModelForSequenceClassification.from_config(config).double().eval()
    for weight in model.parameters():
        weight.data.mul_(6 if weight.ndim > 1 else 1)
    batch = tiny_batch("gpt2", batch=6, tokens=9, padding=padding, seed=5)
    assert not batch["attention_mask"].bool().all()
    labels = torch.arange(6) % 5
    view = LayeredModel(model)
    records = run(model, batch | {"labels": labels})
    orders = records_of(Interventions(batches=Listed(batch | {"labels": labels}), variants=("skip_one",)), view)
    skipped = {(r.metric, r.layer): r.value for r in orders if r.tags.get("variant") == "skip_one"}
    norm = model.transformer.ln_f if name == "gpt2" else model.model.norm
    losses, lost = torch.zeros(LAYERS + 1), torch.zeros(LAYERS)
    for ids, mask, label in zip(batch["input_ids"], batch["attention_mask"].bool(), labels, strict=True):
        single = view.trajectory({"input_ids": ids[mask][None]})
        with torch.no_grad():
            scores = model.score(norm(single.hidden[:, 0, -1])).log_softmax(-1)
            own = model(input_ids=ids[mask][None]).logits[0].log_softmax(-1)
            np.testing.assert_allclose(scores[-1], own, atol=1e-6)  # rotary tables are float32
            losses -= scores[:, label] / 6
            for block in range(1, LAYERS + 1):
                state = single.hidden[0]
                for layer in range(1, LAYERS + 1):
                    state = state if layer == block else single.block(layer)(state)
                lost[block - 1] -= model.score(norm(state[0, -1])).log_softmax(-1)[label] / 6
    for layer in range(LAYERS + 1):
        assert records["logit_lens_loss", layer].value == pytest.approx(losses[layer].item(), abs=2e-6)
    for block in range(1, LAYERS + 1):
        assert skipped["variant_loss", block] == pytest.approx(lost[block - 1].item(), abs=2e-6)


@pytest.mark.parametrize("name", ["gpt2", "gemma3"])
def test_a_text_that_ends_in_the_padding_id_is_read_at_one_token_at_all_layers(name):
    """The head reads the last token with another id, as the model's own call does.

    Only the text config holds that id in models of images and texts.
    """
    config: Any = tiny_config(name, num_labels=3)
    getattr(config, "text_config", config).pad_token_id = 0
    model = AutoModelForSequenceClassification.from_config(config).double().eval()
    scale_up_(model)
    ids = torch.tensor([[5, 6, 7, 0], [8, 9, 10, 11]])
    records = run(model, {"input_ids": ids, "labels": torch.tensor([1, 2])})
    hidden = LayeredModel(model).trajectory({"input_ids": ids}).hidden
    norm = model.transformer.ln_f if name == "gpt2" else model.model.language_model.norm
    with torch.no_grad():
        scores = model.score(norm(hidden[:, [0, 1], [2, 3]])).log_softmax(-1)
    for layer in range(LAYERS + 1):
        loss = -(scores[layer, 0, 1] + scores[layer, 1, 2]).item() / 2
        assert records["logit_lens_loss", layer].value == pytest.approx(loss, rel=1e-10 if name == "gpt2" else 1e-5)


def test_models_without_a_head_and_invalid_labels_are_refused():
    for name, labels, message in (
        ("gpt2_trunk", None, "GPT2Model has no head to read its layers with"),
        ("vit_headless", None, "VisionTransformer has no head to read its layers with"),
        ("vit", torch.tensor([1]), r"expected integer labels of shape \(3,\), got torch.int64 of shape \(1,\)"),
        ("vit", torch.rand(3), r"expected integer labels of shape \(3,\), got torch.float32"),
        ("vit", torch.tensor([0, 7, 1]), "expected labels of 7 classes, got 7"),
    ):
        batch = tiny_batch(name) | ({} if labels is None else {"labels": labels})
        with pytest.raises(InputError, match=f"^lens: {message}"):
            run(tiny(name), batch)


def test_a_ratio_weights_tokens_equally_and_has_the_error_of_resampled_prompts():
    generator = torch.Generator().manual_seed(0)
    counts = torch.randint(1, 30, (300,), generator=generator)
    sums = counts * (2 + torch.randn(300, generator=generator, dtype=torch.float64))
    (record,) = summarize_ratio("m", sums, counts)
    assert record.value == pytest.approx((sums.sum() / counts.sum()).item())
    rows = torch.randint(300, (4000, 300), generator=generator)
    resampled = sums[rows].sum(1) / counts[rows].sum(1)
    assert record.stderr == pytest.approx(resampled.std().item(), rel=0.05)
    expected = torch.quantile(resampled, torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    assert [record.low, record.high] == pytest.approx(expected, abs=0.1 * record.stderr)
    (equal,) = summarize_ratio("m", sums[:9], torch.full((9,), 4))
    assert equal.stderr == pytest.approx(((sums[:9] / 4).std() / 3).item())
    broken = sums[:10].clone()
    broken[9] = math.nan
    (without,) = summarize_ratio("m", broken, torch.full((10,), 4), counted="num_tokens")
    assert replace(without, tags={}) == equal
    assert without.tags == {"num_tokens": 36, "num_undefined": 1}
    assert summarize_ratio("m", broken[9:], torch.ones(1), layer=2) == []
    (nowhere,) = summarize_ratio("m", sums[:9], torch.zeros(9))
    assert math.isnan(nowhere.value)
    assert nowhere.n == 0
