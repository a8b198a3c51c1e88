"""The lens against the model's own forward pass, prompt by prompt."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForSequenceClassification, BertConfig, BertForSequenceClassification

from lit_layers.analyses import Interventions, Lens, readout_scores
from lit_layers.analyses.statistics import summarize_ratio
from lit_layers.errors import InputError
from lit_layers.functional.curves import bootstrap_interval
from lit_layers.models.view import LayeredModel
from tests.support.listed_batches import Listed
from tests.support.measured import records_of
from tests.support.prompt_states import states_of_each_prompt
from tests.support.tiny_configs import scale_up_, tiny_config
from tests.support.tiny_models import LAYERS, VOCAB, tiny, tiny_batch

METRICS = {"logit_lens_loss", "logit_lens_accuracy", "logit_lens_perplexity", "kl_to_final"}
BERT = {"vocab_size": VOCAB, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
BATCHES = [
    tiny_batch("gpt2", batch=3, tokens=9, padding="left", seed=1),
    tiny_batch("gpt2", batch=2, tokens=7, seed=2),
    tiny_batch("gpt2", batch=3, tokens=10, padding="right", seed=3),
]


def run(model, *batches):
    records = list(records_of(Lens(batches=Listed(*batches)), LayeredModel(model)))
    assert len({(r.metric, r.layer) for r in records}) == len(records)
    return {(r.metric, r.layer): r for r in records}


@pytest.fixture(scope="module")
def model():
    return tiny("gpt2", torch.float64)


def softmax(logits):
    shares = np.exp(logits - logits.max(-1, keepdims=True))
    return shares / shares.sum(-1, keepdims=True)


def by_prompt(model):
    """Per layer and prompt the losses, hits and divergences of its tokens, read with the model's own modules."""
    prompts = [ids[mask.bool()] for b in BATCHES for ids, mask in zip(b["input_ids"], b["attention_mask"], strict=True)]
    found = []
    for ids, states in zip(prompts, states_of_each_prompt(model, BATCHES), strict=True):
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


def test_every_record_is_the_mean_over_the_predicted_tokens_of_the_model_s_own_readout(model):
    records = run(model, *BATCHES)
    prompts = by_prompt(model)
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


def test_intervals_are_over_prompts_not_tokens(model):
    records, prompts = run(model, *BATCHES), by_prompt(model)
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


def test_the_size_of_the_chunks_changes_nothing(model, monkeypatch):
    expected = run(model, *BATCHES)
    monkeypatch.setattr(readout_scores, "MAX_LOGITS", 3 * VOCAB)
    shapes = []
    readout = LayeredModel.readout
    monkeypatch.setattr(LayeredModel, "readout", lambda self, h: shapes.append(h.shape[:-1]) or readout(self, h))
    for key, record in run(model, *BATCHES).items():
        assert record.value == pytest.approx(expected[key].value, rel=1e-12, abs=1e-14)
    assert max(rows.numel() for rows in shapes) == 3


def test_uniform_logits_have_a_perplexity_of_the_vocabulary_s_size():
    model = tiny("gpt2", torch.float64, tie_word_embeddings=False)
    model.lm_head.weight.data.zero_()
    records = run(model, *BATCHES)
    for layer in range(LAYERS + 1):
        assert records["logit_lens_perplexity", layer].value == pytest.approx(VOCAB, rel=1e-12)
        assert records["logit_lens_loss", layer].value == pytest.approx(math.log(VOCAB), rel=1e-12)
        assert records["kl_to_final", layer].value == 0


def test_a_prompt_without_a_predicted_token_is_left_out_and_counted(model):
    lone = {"input_ids": torch.tensor([[5, 6]]), "attention_mask": torch.tensor([[1, 0]])}
    without = {key: replace(each, tags={**each.tags, "num_undefined": 1}) for key, each in run(model, *BATCHES).items()}
    assert run(model, *BATCHES, lone) == without
    with pytest.raises(InputError, match="^lens: no text has a next token to predict"):
        run(model, lone)


def test_soft_capped_logits_and_padded_vocabularies_are_read_as_the_model_reads_them():
    batch = tiny_batch("gemma2", batch=2)
    model = tiny("gemma2")
    with torch.no_grad():
        loss = model(**batch, labels=batch["input_ids"]).loss.item()
    assert run(model, batch)["logit_lens_loss", LAYERS].value == pytest.approx(loss, rel=1e-5)


def test_half_precision_logits_are_widened_before_the_softmax():
    model = tiny("gpt2", torch.bfloat16)
    batch = tiny_batch("gpt2", batch=2)
    with torch.no_grad():
        logits = model(**batch).logits[:, :-1].double()
    expected = -logits.log_softmax(-1).gather(2, batch["input_ids"][:, 1:, None]).mean().item()
    assert run(model, batch)["logit_lens_loss", LAYERS].value == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("name", ["vit", "bert_classifier"])
def test_a_pooling_head_is_compared_prompt_by_prompt_and_with_the_labels_there_are(name):
    model = tiny(name, torch.float64)
    view, batch = LayeredModel(model), tiny_batch(name, batch=5)
    bare = run(model, batch)
    assert set(bare) == {("kl_to_final", layer) for layer in range(LAYERS + 1)}
    other = tiny_batch(name, batch=30, seed=9)
    labels = (torch.arange(30) % 5).index_fill(0, torch.arange(0, 30, 2), -100)
    records = run(model, batch, other | {"labels": labels})
    hidden = view.trajectory(other).hidden
    with torch.no_grad():
        final = view.readout(hidden[-1]).log_softmax(-1)
        for layer in range(LAYERS + 1):
            log_proba = view.readout(hidden[layer]).log_softmax(-1)
            loss = records["logit_lens_loss", layer]
            assert loss.value == pytest.approx(torch.nn.functional.nll_loss(log_proba, labels).item(), rel=1e-10)
            assert (loss.n, loss.tags) == (15, {"num_tokens": 15, "num_undefined": 20})
            accuracy = (log_proba.argmax(-1) == labels)[labels != -100].double().mean()
            assert records["logit_lens_accuracy", layer].value == pytest.approx(accuracy.item())
            divergence = (final.exp() * (final - log_proba)).sum(-1).mean().item()
            both = records["kl_to_final", layer]
            assert both.n == 35
            assert both.value == pytest.approx((bare["kl_to_final", layer].value * 5 + divergence * 30) / 35, rel=1e-10)
    assert ("logit_lens_perplexity", 0) not in records


@pytest.mark.parametrize(("name", "padding"), [("gpt2", "left"), ("llama", "right")])
def test_a_head_on_the_last_token_of_a_text_reads_every_layer_there_whatever_the_padding(name, padding):
    """The head of transformers' decoders that classify, applied by hand to each text alone; 0 is its padding token."""
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
        alone = view.trajectory({"input_ids": ids[mask][None]})
        with torch.no_grad():
            scores = model.score(norm(alone.hidden[:, 0, -1])).log_softmax(-1)
            own = model(input_ids=ids[mask][None]).logits[0].log_softmax(-1)
            np.testing.assert_allclose(scores[-1], own, atol=1e-6)  # of rotary tables in float32
            losses -= scores[:, label] / 6
            for block in range(1, LAYERS + 1):
                state = alone.hidden[0]
                for layer in range(1, LAYERS + 1):
                    state = state if layer == block else alone.block(layer)(state)
                lost[block - 1] -= model.score(norm(state[0, -1])).log_softmax(-1)[label] / 6
    for layer in range(LAYERS + 1):
        assert records["logit_lens_loss", layer].value == pytest.approx(losses[layer].item(), abs=2e-6)
    for block in range(1, LAYERS + 1):
        assert skipped["variant_loss", block] == pytest.approx(lost[block - 1].item(), abs=2e-6)


def test_a_text_that_ends_in_the_number_of_padding_is_read_at_one_token_at_all_layers():
    """The head takes the last token of another number, as the model's own call does."""
    config = AutoConfig.for_model(
        "gpt2", n_layer=2, n_embd=16, n_head=2, vocab_size=VOCAB, num_labels=3, pad_token_id=0, bos_token_id=1
    )
    model = AutoModelForSequenceClassification.from_config(config).double().eval()
    ids = torch.tensor([[5, 6, 7, 0], [8, 9, 10, 11]])
    records = run(model, {"input_ids": ids, "labels": torch.tensor([1, 2])})
    hidden = LayeredModel(model).trajectory({"input_ids": ids}).hidden
    with torch.no_grad():
        scores = model.score(model.transformer.ln_f(hidden[:, [0, 1], [2, 3]])).log_softmax(-1)
    for layer in range(3):
        loss = -(scores[layer, 0, 1] + scores[layer, 1, 2]).item() / 2
        assert records["logit_lens_loss", layer].value == pytest.approx(loss, rel=1e-10)


def test_a_text_that_ends_in_the_number_of_padding_is_read_at_one_token_where_a_part_of_the_config_says_that_number():
    """Of models of images and texts the part for texts does, and nothing else."""
    config: Any = tiny_config("gemma3", num_labels=3)
    config.text_config.pad_token_id = 0
    model = AutoModelForSequenceClassification.from_config(config).double().eval()
    scale_up_(model)
    ids = torch.tensor([[5, 6, 7, 0], [8, 9, 10, 11]])
    records = run(model, {"input_ids": ids, "labels": torch.tensor([1, 2])})
    hidden = LayeredModel(model).trajectory({"input_ids": ids}).hidden
    with torch.no_grad():
        scores = model.score(model.model.language_model.norm(hidden[:, [0, 1], [2, 3]])).log_softmax(-1)
    for layer in range(LAYERS + 1):
        loss = -(scores[layer, 0, 1] + scores[layer, 1, 2]).item() / 2
        assert records["logit_lens_loss", layer].value == pytest.approx(loss, rel=1e-5)


def test_a_head_on_tokens_is_compared_over_real_tokens_and_labels():
    model = tiny("bert_tagger", torch.float64)
    batch = tiny_batch("bert_tagger", batch=6, tokens=14, padding="right")
    real = batch["attention_mask"].bool()
    chosen = torch.rand(real.shape, generator=torch.Generator().manual_seed(0)) < 0.4
    labels = (batch["input_ids"] % 5).where(chosen, -100)
    records = run(model, batch | {"labels": labels})
    hidden = LayeredModel(model).trajectory(batch).hidden
    read = model.get_submodule("classifier")
    labelled = labels[real] != -100
    with torch.no_grad():
        final = read(hidden[-1]).log_softmax(-1)[real]
        assert (final.argmax(-1)[~labelled] == 0).any()  # no hit: there is no label
        for layer in range(LAYERS + 1):
            log_proba = read(hidden[layer]).log_softmax(-1)[real]
            loss = torch.nn.functional.nll_loss(log_proba, labels[real]).item()
            assert records["logit_lens_loss", layer].value == pytest.approx(loss, rel=1e-10)
            accuracy = (log_proba.argmax(-1) == labels[real])[labelled].double().mean().item()
            assert records["logit_lens_accuracy", layer].value == pytest.approx(accuracy)
            divergence = (final.exp() * (final - log_proba)).sum(-1).mean().item()
            assert records["kl_to_final", layer].value == pytest.approx(divergence, rel=1e-10, abs=1e-14)
    assert records["kl_to_final", 0].tags == {"num_tokens": int(real.sum())}
    assert records["logit_lens_loss", 0].tags == {"num_tokens": int(labelled.sum())}


@pytest.mark.parametrize("name", ["gpt2_trunk", "vit_headless"])
def test_a_model_without_a_head_is_refused(name):
    model = tiny(name)
    given = Lens(batches=Listed(tiny_batch(name)))
    with pytest.raises(InputError, match=f"^lens: {type(model).__name__} has no head to read its layers with"):
        given.check(LayeredModel(model))


@pytest.mark.parametrize(
    ("labels", "got"), [(torch.tensor([1]), r"torch.int64 of shape \(1,\)"), (torch.rand(3), "torch.float32")]
)
def test_labels_of_another_shape_or_kind_are_refused(labels, got):
    with pytest.raises(InputError, match=rf"expected integer labels of shape \(3,\), got {got}"):
        run(tiny("vit"), tiny_batch("vit") | {"labels": labels})


def test_a_head_with_one_output_has_no_shares_to_compare_and_is_refused():
    model = BertForSequenceClassification(BertConfig(num_labels=1, **BERT))
    with pytest.raises(
        InputError, match="lens: BertForSequenceClassification gives one number, a regression, and no cla"
    ):
        run(model, tiny_batch("bert_classifier", batch=2))


def test_a_ratio_weighs_every_token_alike_and_its_error_is_that_of_resampled_prompts():
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
