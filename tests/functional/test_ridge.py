"""Ridge probes against scikit-learn and least squares by hand."""

import numpy as np
import pytest
import torch
from sklearn.linear_model import Ridge
from sklearn.preprocessing import StandardScaler

from lit_layers.functional import _checks
from lit_layers.functional.probes.regression import fit_ridge_probes


def problem(n=90, dim=6, layers=3, outputs=(), seed=0):
    """Return features with scales that differ by 10,000, far from 0, and targets that they partly explain."""
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(layers, n, dim, generator=generator, dtype=torch.float64)
    weight = torch.randn(dim, *outputs, generator=generator, dtype=torch.float64)
    noise = torch.randn(n, *outputs, generator=generator, dtype=torch.float64)
    return features * torch.logspace(-2, 2, dim, dtype=torch.float64) + 3, features[0] @ weight + noise + 5


def scikit_learn_fits(features, targets, penalty, others):
    found = []
    for rows, new in zip(features.double().numpy(), others.double().numpy(), strict=True):
        scaler = StandardScaler().fit(rows)
        rows, new = scaler.transform(rows), scaler.transform(new)
        model = Ridge(alpha=penalty, solver="svd").fit(rows, targets.numpy())
        found.append((model.predict(new).reshape(-1, *targets.shape[1:]), model.coef_.T.reshape(rows.shape[1], -1)))
    return found


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(_checks, "CHUNK", 150)  # every test then joins several chunks


def test_ridge_probes_equal_those_of_scikit_learn():
    for shape in [{}, {"n": 12, "dim": 30, "layers": 2}]:
        for penalty in [1e-3, 1.0, 1e4]:
            for outputs in [(), (1,), (4,)]:
                features, targets = problem(outputs=outputs, **shape)
                others = features[:, :10] * 1.1 - 0.3
                probes = fit_ridge_probes(features, targets, penalty=penalty)
                predictions = probes.predict(others)
                assert predictions.shape == (len(features), 10, *outputs)
                for layer, (expected, coefficients) in enumerate(scikit_learn_fits(features, targets, penalty, others)):
                    np.testing.assert_allclose(predictions[layer], expected, rtol=1e-8)
                    np.testing.assert_allclose(probes.weight[layer], coefficients, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("shape", [{"n": 12, "dim": 30}, {"n": 90, "dim": 6}])
def test_without_a_penalty_the_smallest_of_many_solutions_is_found(shape):
    features, targets = problem(**shape)
    features = torch.cat([features, features[..., :2], features[..., :1] - features[..., 1:2]], -1)  # collinear
    probes = fit_ridge_probes(features, targets, penalty=0)
    for layer, rows in enumerate(features.numpy()):
        scaled = (rows - rows.mean(0)) / rows.std(0)
        expected = np.linalg.pinv(scaled, rcond=1e-12) @ (targets.numpy() - targets.numpy().mean())
        np.testing.assert_allclose(probes.weight[layer, :, 0], expected, rtol=1e-6, atol=1e-9)


def test_nearly_collinear_features_keep_their_digits_without_a_penalty_or_with_a_tiny_one():
    # Singular values 1 and 1e-7: squared, the smaller one is below the rounding of the larger.
    generator = torch.Generator().manual_seed(0)
    basis = torch.randn(40, 2, generator=generator, dtype=torch.float64)
    basis = torch.linalg.qr(basis - basis.mean(0)).Q
    first, second = basis[:, 0] + basis[:, 1] * 1e-7, basis[:, 0] - basis[:, 1] * 1e-7
    features = torch.stack([first, second], 1)[None]
    targets = 3 * basis[:, 0] + 2 * basis[:, 1]
    for penalty in (0.0, 1e-25):
        probes = fit_ridge_probes(features, targets, penalty=penalty)
        # first + second = 2 b_1, first - second = 2e-7 b_2
        expected = [1.5 + 1e7, 1.5 - 1e7]
        np.testing.assert_allclose(probes.weight[0, :, 0] / probes.scale[0], expected, rtol=1e-7)


def test_three_points_solved_by_hand():
    # x = 1, 2, 3 standardised is -s, 0, s with s^2 = 3 / 2, y - 4 = -2, 0, 2: w = 4 s / (2 s^2 + penalty) = 4 s / 6.
    probes = fit_ridge_probes(torch.tensor([[[1.0], [2.0], [3.0]]]), torch.tensor([2, 4, 6]), penalty=3.0)
    s = 1.5**0.5
    assert probes.weight.item() == pytest.approx(4 * s / 6)
    assert probes.bias.item() == 4
    assert probes.target_mean.item() == 4
    assert probes.predict(torch.tensor([[[3.0]]])).item() == pytest.approx(4 + 4 * 1.5 / 6)


@pytest.mark.parametrize("penalty", [0.0, 2.0])
def test_predictions_do_not_change_under_affine_maps_of_a_feature(penalty):
    features, targets = problem()
    mapped = features * torch.tensor([1, -2, 1e3, 1e-4, -5, 7], dtype=torch.float64) + 11
    expected = fit_ridge_probes(features, targets, penalty=penalty).predict(features)
    found = fit_ridge_probes(mapped, targets, penalty=penalty).predict(mapped)
    torch.testing.assert_close(found, expected, rtol=1e-8, atol=0)


@pytest.mark.parametrize("penalty", [0.0, 1.0])
def test_constant_features_or_a_single_row_give_the_mean_target(penalty):
    constant = torch.tensor([0.1, -7.3, 1e9], dtype=torch.float64).expand(2, 70, 3)
    targets = torch.arange(70) * 0.1
    probes = fit_ridge_probes(constant, targets, penalty=penalty)
    assert not probes.weight.any()
    torch.testing.assert_close(probes.predict(constant + 5), torch.full((2, 70), 3.45, dtype=torch.float64))
    one = fit_ridge_probes(constant[:, :1], targets[3:4], penalty=penalty)
    torch.testing.assert_close(one.predict(constant[:, :2] * 3), torch.full((2, 2), 0.3).double(), rtol=1e-6, atol=0)


def test_features_far_from_0_lose_no_digits():
    # Without centring the squares would be 1e18, which float64 rounds to about 100.
    features, targets = problem()
    moved = features / features.std(1, keepdim=True) + 1e9
    exact = moved - 1e9  # as rounded by the addition
    expected = fit_ridge_probes(exact, targets).predict(exact)
    torch.testing.assert_close(fit_ridge_probes(moved, targets).predict(moved), expected, rtol=1e-6, atol=0)


def test_half_precision_is_widened_and_features_are_not_changed():
    features, targets = problem()
    rounded = features.bfloat16()
    expected = fit_ridge_probes(rounded.double(), targets)
    torch.testing.assert_close(fit_ridge_probes(rounded, targets).weight, expected.weight)
    before = features.clone()
    probes = fit_ridge_probes(features.requires_grad_(), targets)
    probes.predict(features)
    assert torch.equal(features, before)
    assert not probes.weight.requires_grad


def test_wrong_input_is_refused_in_one_sentence():
    for change, message in (
        ({"features": torch.ones(2, 4, 3).index_fill(0, torch.tensor(1), torch.inf)}, "got others at layer 1"),
        ({"targets": torch.ones(3)}, r"a finite target for each of 4 rows, got shape \(3,\)"),
        ({"targets": torch.tensor([0, 1, torch.nan, 0])}, "a finite target for each of 4 rows"),
        ({"penalty": -1.0}, "penalty of at least 0, got -1"),
    ):
        with pytest.raises(ValueError, match=message):
            fit_ridge_probes(**({"features": torch.randn(2, 4, 3), "targets": torch.randn(4)} | change))


def leave_one_out_errors(features, targets, penalties):
    """Return the sum of squared leave-one-out errors for each penalty, from n refits to n - 1 rows."""
    n = len(features)
    others = np.array([np.delete(np.arange(n), row) for row in range(n)])
    kept, aims = features[others], targets[others]
    center, mean = kept.mean(1, keepdims=True), aims.mean(1, keepdims=True)
    left, values, right = np.linalg.svd(kept - center, full_matrices=False)
    errors = []
    for penalty in penalties:
        shrunk = (values / (values**2 + penalty))[:, :, None] * (left.swapaxes(1, 2) @ (aims - mean))
        predictions = (features[:, None] - center) @ right.swapaxes(1, 2) @ shrunk + mean
        errors.append(np.square(predictions[:, 0] - targets).sum())
    return errors


def test_the_penalty_has_the_lowest_leave_one_out_error():
    for shape in [{}, {"n": 12, "dim": 30, "layers": 2}, {"outputs": (2,)}]:
        features, targets = problem(**shape)
        targets = targets + 5 * torch.randn(targets.shape, generator=torch.Generator().manual_seed(1))
        probes = fit_ridge_probes(features, targets, penalty=None)
        grid = np.logspace(5, -3, 17)
        for layer, rows in enumerate(features.numpy()):
            scaled = StandardScaler().fit_transform(rows)
            errors = leave_one_out_errors(scaled, targets.numpy().reshape(len(rows), -1), grid)
            assert probes.penalty[layer].item() == pytest.approx(grid[int(np.argmin(errors))])
            expected = fit_ridge_probes(features[[layer]], targets, penalty=probes.penalty[layer].item())
            assert torch.equal(probes.weight[layer], expected.weight[0]) or shape.get("n") == 12  # by another route
        assert len(set(probes.penalty.tolist())) > 1 or shape


def test_a_single_row_or_equal_targets_get_the_strongest_penalty():
    features, targets = problem()
    for rows, values in ((features[:, :1], targets[:1]), (features, torch.ones(90))):
        probes = fit_ridge_probes(rows, values, penalty=None)
        assert probes.penalty.tolist() == pytest.approx([1e5] * 3)
        assert probes.predict(features).isfinite().all()
