"""A head is the probe of one layer: it gives the same numbers alone and after loading."""

import json
import math

import numpy as np
import pytest
import torch

from lit_layers.errors import InputError
from lit_layers.functional.probes.logistic import fit_logistic_probes
from lit_layers.functional.probes.regression import RidgeProbes, fit_ridge_probes
from lit_layers.select.export import HeadFacts, ProbeHead
from tests.support.exports import head_of

REGRESSION = HeadFacts(kind="regression", task="t", layer=1, pooling="mean", max_tokens=None, classes=None)


def random(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def softmax(logits):
    shifted = np.exp(logits - logits.max(-1, keepdims=True))
    return shifted / shifted.sum(-1, keepdims=True)


@pytest.mark.parametrize("num_classes", [2, 3])
def test_probabilities_are_the_softmax_of_the_standardised_features(num_classes):
    features, labels = random(4, 30, 5), torch.arange(30) % num_classes
    probes = fit_logistic_probes(features, labels)
    new = random(7, 5, seed=1)
    for layer in range(4):
        head = head_of(probes, layer)
        rows = (new.numpy() - features[layer].numpy().mean(0)) / features[layer].numpy().std(0)
        logits = rows @ probes.weight[layer].numpy() + probes.bias[layer].numpy()
        if num_classes == 2:
            logits = np.concatenate([np.zeros_like(logits), logits], axis=1)
        np.testing.assert_allclose(head.log_proba(new).exp(), softmax(logits), rtol=1e-12)
        torch.testing.assert_close(head.log_proba(new), probes.log_proba(new.expand(4, -1, -1))[layer])


def test_a_head_solved_by_hand():
    head = ProbeHead(
        head_of(fit_logistic_probes(random(1, 9, 2), torch.arange(9) % 2), 0).facts,
        weight=torch.tensor([[math.log(3.0)], [0.0]], dtype=torch.float64),
        bias=torch.tensor([math.log(2.0)], dtype=torch.float64),
        mean=torch.tensor([1.0, 5.0], dtype=torch.float64),
        scale=torch.tensor([2.0, 4.0], dtype=torch.float64),
        seen=torch.tensor([0, 1]),
    )
    # (3 - 1) / 2 = 1, so the odds of the second class are 3^1 x 2 = 6. At (1 - 1) / 2 = 0 they are 2.
    expected = torch.tensor([[1 / 7, 6 / 7], [1 / 3, 2 / 3]], dtype=torch.float64)
    torch.testing.assert_close(head.log_proba(torch.tensor([[3.0, -8.0], [1.0, 8.0]])).exp(), expected)


def test_a_class_without_training_rows_has_probability_0():
    probes = fit_logistic_probes(random(1, 20, 4), torch.arange(20) % 2 * 2, num_classes=3)
    found = head_of(probes, 0).log_proba(random(5, 4)).exp()
    assert (found[:, 1] == 0).all()
    np.testing.assert_allclose(found.sum(1), 1)


def test_a_regression_returns_its_values():
    weight, bias, mean, scale = random(3, 5, 2), random(3, 2), random(3, 5), random(3, 5).abs() + 0.5
    probes = RidgeProbes(weight, bias, mean, scale, torch.zeros(2), torch.ones(len(weight)))
    new, head = random(6, 5, seed=1), ProbeHead.from_probes(probes, REGRESSION, 2)
    rows = (new.numpy() - mean[2].numpy()) / scale[2].numpy()
    np.testing.assert_allclose(head.outputs(new), rows @ weight[2].numpy() + bias[2].numpy(), rtol=1e-12)


def test_a_head_of_a_layer_fitted_alone_equals_that_of_all_layers():
    features = random(4, 30, 5)
    everything = fit_logistic_probes(features, torch.arange(30) % 3)
    single = fit_logistic_probes(features[2:3], torch.arange(30) % 3)
    head = ProbeHead.from_probes(single, head_of(everything, 2).facts)
    torch.testing.assert_close(head.weight, everything.weight[2])
    numbers = fit_ridge_probes(features[2:3], random(30, seed=2))
    assert torch.equal(ProbeHead.from_probes(numbers, REGRESSION).weight, numbers.weight[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_head_is_equal_after_saving_and_loading(dtype, tmp_path):
    probes = fit_logistic_probes(random(3, 30, 5, dtype=dtype), torch.arange(30) % 3)
    head = head_of(probes, 1)
    head.save(tmp_path)
    again = ProbeHead.load(tmp_path)
    assert again.facts == head.facts
    for name in ("weight", "bias", "mean", "scale", "seen"):
        one, other = getattr(head, name), getattr(again, name)
        assert one.dtype == other.dtype
        assert torch.equal(one, other)


def test_damaged_files_are_refused_in_one_sentence(tmp_path):
    with pytest.raises(InputError, match=r"expected an exported classifier in .*, found no probe\.json there"):
        ProbeHead.load(tmp_path)
    head_of(fit_logistic_probes(random(1, 30, 5), torch.arange(30) % 3), 0).save(tmp_path)
    facts = json.loads((tmp_path / "probe.json").read_text())
    for content, message in (
        ("{", "the probe in .* is damaged"),
        (json.dumps({**facts, "depth": 2}), "is damaged .*depth"),
        (json.dumps({**facts, "layer": "four"}), "probe.json: layer: .*got 'four'; export it again"),
    ):
        (tmp_path / "probe.json").write_text(content)
        with pytest.raises(InputError, match=message):
            ProbeHead.load(tmp_path)
    (tmp_path / "probe.json").write_text(json.dumps(facts))
    (tmp_path / "probe.safetensors").write_bytes(b"no tensors")
    with pytest.raises(InputError, match="the probe in .* is damaged"):
        ProbeHead.load(tmp_path)
