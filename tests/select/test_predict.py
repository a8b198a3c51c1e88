"""An exported classifier gives the predictions of the probe on the states of the full model."""

import shutil

import pytest
import torch
from safetensors.torch import load_file

from lit_layers.errors import InputError
from lit_layers.functional.probes.regression import RidgeProbes
from lit_layers.models.build import save, vit
from lit_layers.select import load_classifier
from lit_layers.select.export import HeadFacts, ProbeHead, export
from tests.support.exports import CLASSES, TEXTS, card, features, head_of, probes_of, saved_tokenizer, token_batch
from tests.support.tiny_models import tiny, tiny_batch

VIT = {"depth": 3, "embed_dim": 32, "num_heads": 4, "img_size": 16, "patch_size": 4, "num_classes": 5}


def exported(model, head, folder, tokenizer, batch, **options):
    layer = head.facts.layer
    return export(model, layer, head, folder, tokenizer=tokenizer, card=card(), batches=[batch], **options)


def exported_gpt2(folder, layer):
    model, spec = tiny("gpt2", vocab_size=270), saved_tokenizer(folder / "tokenizer")
    head = head_of(probes_of(features(model, [token_batch(text) for text in TEXTS])), layer)
    return model, exported(model, head, folder / "out", spec, token_batch(TEXTS[0]))


@pytest.mark.parametrize(
    ("name", "pooling"), [("gpt2", "last"), ("llama", "mean"), ("bert", "cls"), ("gpt2_trunk", "last")]
)
def test_probabilities_equal_those_of_the_probe_on_the_features_of_the_full_model(name, pooling, tmp_path):
    model, spec = tiny(name, vocab_size=270), saved_tokenizer(tmp_path / "tokenizer")
    found = features(model, [token_batch(text, max_tokens=12) for text in TEXTS], pooling)
    probes = probes_of(found)
    expected = probes.log_proba(found).exp()
    head = head_of(probes, 2, pooling, max_tokens=12)
    folder = exported(model, head, tmp_path / "out", spec, token_batch(TEXTS[0]))
    classifier = load_classifier(folder, batch_size=4)
    assert (classifier.model.num_layers, classifier.model.vocab_size) == (2, None)
    assert max(len(token_batch(text)["input_ids"][0]) for text in TEXTS) > 12
    torch.testing.assert_close(classifier.features(TEXTS), found[2], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(classifier.probabilities(TEXTS), expected[2], rtol=1e-4, atol=1e-5)
    assert classifier.predict(TEXTS) == [CLASSES[number] for number in expected[2].argmax(-1)]
    assert (expected[2] - expected[1]).abs().max() > 0.01


def test_predictions_of_a_text_do_not_depend_on_the_other_texts_and_their_order(tmp_path):
    classifier = load_classifier(exported_gpt2(tmp_path, 1)[1], batch_size=3)
    together = classifier.probabilities(TEXTS)
    separate = torch.cat([classifier.probabilities([text]) for text in TEXTS])
    torch.testing.assert_close(together, separate, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(classifier.probabilities(TEXTS[::-1]), together.flip(0), rtol=1e-4, atol=1e-6)
    assert classifier.predict([]) == []
    assert classifier.probabilities([]).shape == (0, 3)


@pytest.mark.parametrize("pooling", ["mean", "cls"])
def test_images_are_classified_by_their_pixels(pooling, tmp_path):
    model, batch = vit("deit_tiny_patch16_224", **VIT).eval(), tiny_batch("vit", batch=12)
    found = features(model, [{"pixel_values": row[None]} for row in batch["pixel_values"]], pooling)
    found = found + 1e-3 * torch.randn(found.shape, generator=torch.Generator().manual_seed(3))
    probes = probes_of(found)
    head = head_of(probes, 2, pooling, max_tokens=None)
    clean = features(model, [{"pixel_values": row[None]} for row in batch["pixel_values"]], pooling)
    classifier = load_classifier(exported(model, head, tmp_path / "out", None, batch), batch_size=5)
    expected = probes.log_proba(clean)[2].exp()
    torch.testing.assert_close(classifier.probabilities(batch["pixel_values"]), expected, rtol=1e-3, atol=1e-4)
    assert classifier.predict(batch["pixel_values"]) == [CLASSES[number] for number in expected.argmax(-1)]
    assert classifier.tokenizer is None


def test_a_regression_predicts_numbers(tmp_path):
    model, spec = tiny("gpt2", vocab_size=270), saved_tokenizer(tmp_path / "tokenizer")
    found = features(model, [token_batch(text) for text in TEXTS])
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(4, 32, 1, generator=generator, dtype=torch.float64)
    bias = torch.randn(4, 1, generator=generator, dtype=torch.float64)
    mean, scale = found.double().mean(1), found.double().std(1)
    probes = RidgeProbes(weight, bias, mean, scale, torch.tensor(0.0), torch.ones(len(weight)))
    facts = HeadFacts(kind="regression", task="stars", layer=3, pooling="last", max_tokens=30, classes=None)
    head = ProbeHead.from_probes(probes, facts, 3)
    classifier = load_classifier(exported(model, head, tmp_path / "out", spec, token_batch(TEXTS[0])))
    rows = (found[3].double() - mean[3]) / scale[3]
    expected = (rows @ weight[3])[:, 0] + bias[3]
    assert classifier.predict(TEXTS) == pytest.approx(expected.tolist(), rel=1e-3, abs=1e-3)
    with pytest.raises(InputError, match="stars is a regression and has no probabilities: use predict"):
        classifier.probabilities(TEXTS)


def test_half_precision_is_computed_in_float32(tmp_path):
    model = tiny("gpt2", vocab_size=270, dtype=torch.bfloat16)
    spec, wide = saved_tokenizer(tmp_path / "tokenizer"), tiny("gpt2", vocab_size=270, dtype=torch.bfloat16).float()
    found = features(wide, [token_batch(text) for text in TEXTS])
    head = head_of(probes_of(found), 2)
    folder = exported(model, head, tmp_path / "out", spec, token_batch(TEXTS[0]))
    assert {tensor.dtype for tensor in load_file(folder / "model.safetensors").values()} == {torch.bfloat16}
    classifier = load_classifier(folder)
    assert classifier.model.dtype == torch.float32
    torch.testing.assert_close(classifier.features(TEXTS), found[2], rtol=1e-4, atol=1e-4)


def test_inputs_of_another_kind_are_refused(tmp_path):
    of_texts = load_classifier(exported_gpt2(tmp_path, 1)[1])
    images, batch = vit("deit_tiny_patch16_224", **VIT).eval(), tiny_batch("vit", batch=12)
    found = features(images, [{"pixel_values": row[None]} for row in batch["pixel_values"]])
    head = head_of(probes_of(found), 1, max_tokens=None)
    of_images = load_classifier(exported(images, head, tmp_path / "images", None, batch))
    for classifier, inputs, message in (
        (of_texts, "one text", "inputs: expected a list of texts, got str"),
        (of_texts, [1], "inputs: expected a list of texts, got list"),
        (of_texts, torch.zeros(2, 3), "inputs: expected a list of texts, got Tensor"),
        (of_texts, ["a", ""], "the tokenizer makes no token of text 1: use another, or drop the text"),
        (of_images, ["a text"], r"expected pixel values \(n, channels, 16, 16\), got list"),
        (of_images, torch.zeros(3, 16, 16), r"got shape \(3, 16, 16\)"),
        (of_images, torch.zeros(1, 3, 8, 8), r"got shape \(1, 3, 8, 8\)"),
    ):
        with pytest.raises(InputError, match=message):
            classifier.predict(inputs)


class Canary:
    def __reduce__(self):
        return pytest.fail, ("code was run",)


def test_a_probe_of_another_model_and_pickled_weights_are_refused(tmp_path):
    model, folder = exported_gpt2(tmp_path, 2)
    save(model, folder)
    with pytest.raises(InputError, match="its probe reads layer 2 of width 32, its model ends at layer 3 of width 32"):
        load_classifier(folder)
    shutil.move(folder / "model.safetensors", folder / "kept")
    (folder / "probe.safetensors").rename(folder / "moved")
    with pytest.raises(InputError, match=r"found no probe\.safetensors there"):
        load_classifier(folder)
    (folder / "moved").rename(folder / "probe.safetensors")
    torch.save({"wte.weight": Canary()}, folder / "pytorch_model.bin")
    with pytest.raises(InputError, match="its weights hold .*, and loading them would run code"):
        load_classifier(folder)
