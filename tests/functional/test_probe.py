"""Logistic probes against scikit-learn, closed forms and invariances."""

import math
import subprocess
import sys

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import f1_score
from sklearn.preprocessing import StandardScaler

from lit_layers.functional.probes.logistic import fit_logistic_probes, macro_f1


def problem(num_classes=3, n=120, dim=6, layers=3, seed=0):
    """Return overlapping classes whose features differ in scale by 10,000 and are far from 0."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(num_classes, (n,), generator=generator)
    labels[:num_classes] = torch.arange(num_classes)
    centers = torch.randn(layers, num_classes, dim, generator=generator, dtype=torch.float64)
    noise = torch.randn(layers, n, dim, generator=generator, dtype=torch.float64)
    return (centers[:, labels] + 1.5 * noise) * torch.logspace(-2, 2, dim, dtype=torch.float64) + 3, labels


def scikit_learn_fits(features, labels, c):
    """Return log-probabilities, objective and coefficients of the regression of each layer."""
    found = []
    for layer in features.double().numpy():
        rows = StandardScaler().fit_transform(layer)
        model = LogisticRegression(C=c, tol=1e-12, max_iter=100_000).fit(rows, labels.numpy())
        log_proba = model.predict_log_proba(rows)
        loss = -log_proba[np.arange(len(rows)), labels].sum()
        found.append((log_proba, c * loss + np.square(model.coef_).sum() / 2, model.coef_.T))
    return found


def objective_of(probes, layer, features, labels, c):
    loss = -probes.log_proba(features)[layer].double()[torch.arange(len(labels)), labels].sum()
    return (c * loss + probes.weight[layer].double().square().sum() / 2).item()


def test_probes_equal_those_of_scikit_learn():
    for num_classes, c, shape in [
        (2, 0.01, {}),
        (2, 30.0, {"n": 40, "dim": 60, "layers": 2}),
        (3, 1.0, {}),
        (7, 30.0, {}),
        (7, 1.0, {"n": 40}),
    ]:
        features, labels = problem(num_classes, **shape)
        probes = fit_logistic_probes(features, labels, c=c, tolerance=1e-8)
        assert probes.converged.all()
        log_proba = probes.log_proba(features)
        for layer, (expected, objective, coefficients) in enumerate(scikit_learn_fits(features, labels, c)):
            np.testing.assert_allclose(log_proba[layer].exp(), np.exp(expected), atol=2e-6)
            assert objective_of(probes, layer, features, labels, c) == pytest.approx(objective, rel=1e-9)
            np.testing.assert_allclose(probes.weight[layer], coefficients, atol=2e-5)


def test_float32_at_the_default_tolerance_reaches_the_optimum():
    features, labels = problem(5, n=400, dim=12)
    probes = fit_logistic_probes(features.float(), labels)
    assert probes.converged.all()
    assert probes.weight.dtype == torch.float32
    for layer, (expected, objective, _) in enumerate(scikit_learn_fits(features.float(), labels, 1.0)):
        np.testing.assert_allclose(probes.log_proba(features.float())[layer].exp(), np.exp(expected), atol=5e-5)
        assert objective_of(probes, layer, features.float(), labels, 1.0) == pytest.approx(objective, rel=1e-6)


@pytest.mark.parametrize("num_classes", [2, 4])
def test_the_gradient_of_a_converged_probe_is_within_the_requested_tolerance(num_classes):
    features, labels = problem(num_classes, layers=1)
    tolerance, c = 1e-5, 0.5
    probes = fit_logistic_probes(features, labels, c=c, tolerance=tolerance)
    assert probes.converged.all()
    weight, bias = probes.weight[0].clone().requires_grad_(), probes.bias[0].clone().requires_grad_()
    logits = ((features[0] - probes.mean[0]) / probes.scale[0]) @ weight + bias
    if num_classes == 2:
        loss = torch.nn.functional.softplus(torch.where(labels == 1, -1.0, 1.0) * logits[:, 0]).sum()
    else:
        loss = torch.nn.functional.cross_entropy(logits, labels, reduction="sum")
    objective = c * loss + weight.square().sum() / 2
    gradients = torch.autograd.grad(objective, (weight, bias))
    assert max(gradient.abs().max().item() for gradient in gradients) <= tolerance * c * len(labels) * (1 + 1e-6)


def test_two_points_solved_by_hand():
    # x = -1 and 1 after standardising, so the objective is 2 c log(1 + e^-w) + w^2 / 2 and w (1 + e^w) = 2 c.
    probes = fit_logistic_probes(torch.tensor([[[5.0], [7.0]]], dtype=torch.float64), torch.tensor([0, 1]), c=2.0)
    weight = probes.weight.item()
    assert weight * (1 + math.exp(weight)) == pytest.approx(4, rel=1e-5)
    assert probes.bias.item() == pytest.approx(0, abs=1e-6)
    assert (probes.mean.item(), probes.scale.item()) == (6, 1)


def test_constant_features_give_the_class_frequencies():
    for counts in [(3, 7), (1, 5, 14)]:
        for c in [1e-3, 1.0, 1e3]:
            labels = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
            share = torch.tensor(counts).double() / len(labels)
            features = torch.tensor([0.1, -7.3, 1e9], dtype=torch.float64).expand(2, len(labels), 3)
            probes = fit_logistic_probes(features, labels, c=c)
            assert probes.converged.all()
            expected = share.expand(2, len(labels), -1)
            torch.testing.assert_close(probes.log_proba(features).exp(), expected, atol=1e-9, rtol=0)
            assert not probes.weight.any()
            # at any value, also other than in training
            torch.testing.assert_close(probes.log_proba(features + 5), probes.log_proba(features))


@pytest.mark.parametrize("names", [[1, 0], [2, 0, 3, 1]])
def test_affine_maps_of_features_row_order_and_class_ids_change_no_probability(names):
    features, labels = problem(len(names))
    mapped = features * torch.tensor([1, -2, 1e3, 1e-4, -5, 7], dtype=torch.float64) + 11
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(1))
    expected = fit_logistic_probes(features, labels, tolerance=1e-9).log_proba(features)
    for given, row_order, class_ids in (
        (mapped, torch.arange(len(labels)), torch.arange(len(names))),
        (features, order, torch.arange(len(names))),
        (features, torch.arange(len(labels)), torch.tensor(names)),
    ):
        probes = fit_logistic_probes(given[:, row_order], class_ids[labels[row_order]], tolerance=1e-9)
        torch.testing.assert_close(probes.log_proba(given)[..., class_ids], expected, atol=1e-5, rtol=0)


def test_only_the_layer_that_has_not_converged_is_flagged():
    features, labels = problem(4)
    features[1] = 2.5
    probes = fit_logistic_probes(features, labels, max_iterations=2)
    assert probes.converged.tolist() == [False, True, False]
    assert fit_logistic_probes(features, labels).converged.all()


def test_a_class_without_training_rows_is_never_predicted():
    for seen, num_classes in [([1, 3], 5), ([0, 2, 3], 4), ([0, 1], 3)]:
        features, labels = problem(len(seen))
        probes = fit_logistic_probes(features, torch.tensor(seen)[labels], num_classes=num_classes)
        plain = fit_logistic_probes(features, labels)
        assert probes.classes.tolist() == seen
        log_proba = probes.log_proba(features)
        assert log_proba.shape == (*features.shape[:2], num_classes)
        torch.testing.assert_close(log_proba[..., seen], plain.log_proba(features))
        unseen = [name for name in range(num_classes) if name not in seen]
        assert (log_proba[..., unseen] == -torch.inf).all()
        assert torch.equal(probes.predict(features), torch.tensor(seen)[plain.predict(features)])


def test_predictions_are_the_most_probable_classes_of_new_rows():
    features, labels = problem(4)
    probes = fit_logistic_probes(features, labels)
    others = features[:, :50] * 1.1 - 0.3
    log_proba = probes.log_proba(others)
    torch.testing.assert_close(log_proba.exp().sum(-1), torch.ones(3, 50, dtype=torch.float64))
    assert torch.equal(probes.predict(others), log_proba.argmax(-1))
    layer_predictions = [
        LogisticRegression(tol=1e-12).fit((layer - mean) / scale, labels).predict((rows - mean) / scale)
        for layer, rows, mean, scale in zip(features, others, probes.mean, probes.scale, strict=True)
    ]
    assert np.array_equal(probes.predict(others), layer_predictions)


def test_half_precision_is_widened_and_no_gradient_reaches_the_features():
    features, labels = problem(3)
    rounded = (features / 50).bfloat16()
    probes = fit_logistic_probes(rounded.clone().requires_grad_(), labels)
    assert probes.weight.dtype == torch.float32
    assert not probes.weight.requires_grad
    expected = fit_logistic_probes(rounded.float(), labels).log_proba(rounded.float())
    torch.testing.assert_close(probes.log_proba(rounded), expected)


def test_wrong_input_is_refused_in_one_sentence():
    for change, message in (
        ({"features": torch.ones(2, 4, 3).index_fill(0, torch.tensor(1), torch.nan)}, "got others at layer 1"),
        ({"labels": torch.tensor([0, 1])}, r"a label for each of 4 rows, got shape \(2,\)"),
        ({"labels": torch.tensor([0, 1, -1, 0])}, r"2 classes or more in 0\.\.1, got \[-1, 0, 1\]"),
        ({"num_classes": 2, "labels": torch.tensor([0, 1, 2, 0])}, r"2 classes or more in 0\.\.1, got \[0, 1, 2\]"),
        ({"labels": torch.tensor([3, 3, 3, 3])}, r"2 classes or more in 0\.\.3, got \[3\]"),
        ({"c": 0.0}, "expected c above 0, got 0.0"),
    ):
        given = {"features": torch.randn(2, 4, 3), "labels": torch.tensor([0, 1, 0, 1])} | change
        with pytest.raises(ValueError, match=message):
            fit_logistic_probes(**given)


def test_probes_refuse_features_of_other_layers_or_width():
    features, labels = problem(3)
    with pytest.raises(ValueError, match=r"these probes read 3 layers of width 6, got shape \(2, 120, 6\)"):
        fit_logistic_probes(features, labels).log_proba(features[:2])


def test_macro_f1_weights_the_classes_among_the_labels_equally():
    # class 0: 2 hits of 3 true and 2 predicted, 4/5; class 1: none of 1, 0; class 4 is only predicted
    labels, predictions = torch.tensor([0, 0, 0, 1]), torch.tensor([0, 0, 4, 4])
    assert macro_f1(labels, predictions) == pytest.approx((4 / 5 + 0) / 2)
    generator = torch.Generator().manual_seed(0)
    labels, predictions = torch.randint(9, (2, 60), generator=generator)
    expected = f1_score(labels, predictions, average="macro", labels=labels.unique(), zero_division=0)
    assert macro_f1(labels, predictions) == pytest.approx(expected)


def test_nearly_separable_classes_end_within_1e_5_nats_of_scikit_learn():
    # The objective is flat there, so a gradient of 1e-6 does not bound the distance to the optimum.
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(1000) % 20
    centers = torch.randn(20, 50, generator=generator)
    spectrum = torch.arange(1, 51).pow(-0.7)
    features = ((0.8 * centers[labels] + torch.randn(1000, 50, generator=generator)) * spectrum)[None]
    probes = fit_logistic_probes(features, labels, c=30)
    assert probes.converged.all()
    (_, objective, _) = scikit_learn_fits(features, labels, 30)[0]
    assert -1e-7 < (objective_of(probes, 0, features, labels, 30) - objective) / (30 * 1000) < 1e-5


@pytest.mark.soak
def test_a_fit_keeps_one_copy_of_one_memory_mapped_layer(tmp_path):
    script = """
import sys, torch
from lit_layers.functional.probes.logistic import fit_logistic_probes
from pathlib import Path
torch.set_num_threads(1)
layers, rows, dim = 4, 60_000, 512  # 123 MB each
path = sys.argv[1]
features = torch.from_file(path, shared=True, size=layers * rows * dim).view(layers, rows, dim)
labels = torch.arange(rows) % 10
fit_logistic_probes(torch.randn(1, 100, 8), labels[:100])
def peak_memory():  # of this process
    rows = Path("/proc/self/status").read_text().splitlines()
    return next(int(row.split()[1]) * 1024 for row in rows if row.startswith("VmHWM:"))
before = peak_memory()
for block in features[0].split(5000):
    block.normal_()
fit_logistic_probes(features[:1], labels, max_iterations=1)
print((peak_memory() - before) / (rows * dim * 4))
"""
    command = [sys.executable, "-c", script, str(tmp_path / "features")]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    # The layer, its copy and a constant of about 100 MB. A whole copy in float64 would add 3 more.
    assert 1 < float(done.stdout) < 3.5, done.stdout
