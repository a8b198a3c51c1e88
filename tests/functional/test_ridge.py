"""Ridge probes against scikit-learn and least squares by hand, whole and streamed."""

import numpy as np
import pytest
import torch
from sklearn.linear_model import LinearRegression, Ridge
from sklearn.metrics import r2_score
from sklearn.preprocessing import StandardScaler

from lit_layers.functional import _checks
from lit_layers.functional.regression import RidgeSums, fit_ridge_probes, r_squared


def problem(n=90, dim=6, layers=3, outputs=(), seed=0):
    """Features whose scales differ by 10,000, far from 0, and targets that they partly explain."""
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(layers, n, dim, generator=generator, dtype=torch.float64)
    weight = torch.randn(dim, *outputs, generator=generator, dtype=torch.float64)
    noise = torch.randn(n, *outputs, generator=generator, dtype=torch.float64)
    return features * torch.logspace(-2, 2, dim, dtype=torch.float64) + 3, features[0] @ weight + noise + 5


def by_scikit_learn(features, targets, penalty, others, standardize=True, intercept=True):
    found = []
    for rows, new in zip(features.double().numpy(), others.double().numpy(), strict=True):
        if standardize:
            scaler = StandardScaler().fit(rows)
            rows, new = scaler.transform(rows), scaler.transform(new)
        model = Ridge(alpha=penalty, fit_intercept=intercept, solver="svd").fit(rows, targets.numpy())
        found.append((model.predict(new).reshape(-1, *targets.shape[1:]), model.coef_.T.reshape(rows.shape[1], -1)))
    return found


def streamed(features, targets, pieces, **options):
    sums, since = RidgeSums(**options), 0
    for size in pieces:
        sums.add(features[:, since : since + size], targets[since : since + size])
        since += size
    assert since == len(targets)
    return sums


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(_checks, "CHUNK", 150)  # so that every test joins several


@pytest.mark.parametrize("outputs", [(), (1,), (4,)])
@pytest.mark.parametrize("penalty", [1e-3, 1.0, 1e4])
@pytest.mark.parametrize("shape", [{}, {"n": 12, "dim": 30, "layers": 2}])
def test_ridge_probes_are_those_of_scikit_learn(outputs, penalty, shape):
    features, targets = problem(outputs=outputs, **shape)
    others = features[:, :10] * 1.1 - 0.3
    probes = fit_ridge_probes(features, targets, penalty=penalty)
    predictions = probes.predict(others)
    assert predictions.shape == (len(features), 10, *outputs)
    for layer, (expected, coefficients) in enumerate(by_scikit_learn(features, targets, penalty, others)):
        np.testing.assert_allclose(predictions[layer], expected, rtol=1e-8)
        np.testing.assert_allclose(probes.weight[layer], coefficients, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize(("standardize", "intercept"), [(False, True), (True, False), (False, False)])
@pytest.mark.parametrize("way", ["whole", "streamed"])
def test_ridge_probes_without_standardising_or_intercept_are_those_of_scikit_learn(standardize, intercept, way):
    features, targets = problem()
    options = {"standardize": standardize, "intercept": intercept}
    if way == "whole":
        probes = fit_ridge_probes(features, targets, penalty=2.0, **options)
    else:
        probes = streamed(features, targets, [40, 50]).solve(2.0, **options)
    predictions = probes.predict(features)
    for layer, (expected, _) in enumerate(by_scikit_learn(features, targets, 2.0, features, **options)):
        np.testing.assert_allclose(predictions[layer], expected, rtol=1e-8)


def test_without_a_penalty_they_are_least_squares():
    features, targets = problem(outputs=(2,))
    predictions = fit_ridge_probes(features, targets, penalty=0).predict(features)
    for layer, rows in enumerate(features.numpy()):
        expected = LinearRegression().fit(rows, targets.numpy()).predict(rows)
        np.testing.assert_allclose(predictions[layer], expected, rtol=1e-10)


@pytest.mark.parametrize("shape", [{"n": 12, "dim": 30}, {"n": 90, "dim": 6}])
def test_without_a_penalty_and_with_many_solutions_the_smallest_is_found(shape):
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
    basis = torch.linalg.qr(torch.randn(40, 2, generator=generator, dtype=torch.float64) - 0).Q
    first, second = basis[:, 0] + basis[:, 1] * 1e-7, basis[:, 0] - basis[:, 1] * 1e-7
    features = torch.stack([first, second], 1)[None]
    targets = 3 * basis[:, 0] + 2 * basis[:, 1]
    for penalty in (0.0, 1e-25):
        probes = fit_ridge_probes(features, targets, penalty=penalty, standardize=False, intercept=False)
        # first + second = 2 b_1, first - second = 2e-7 b_2
        expected = [1.5 + 1e7, 1.5 - 1e7]
        np.testing.assert_allclose(probes.weight[0, :, 0], expected, rtol=1e-7)


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
    if penalty:
        sums = streamed(constant, targets, [1, 29, 40])
        assert not sums.solve(penalty).weight.any()


@pytest.mark.parametrize("pieces", [[90], [1, 2, 87], [30, 30, 30], [0, 80, 10]])
@pytest.mark.parametrize("outputs", [(), (3,)])
def test_streamed_rows_give_the_probes_of_all_rows(pieces, outputs):
    features, targets = problem(outputs=outputs)
    expected = fit_ridge_probes(features, targets, penalty=0.7)
    probes = streamed(features, targets, pieces).solve(0.7)
    for name in ("weight", "bias", "mean", "scale", "target_mean"):
        torch.testing.assert_close(getattr(probes, name), getattr(expected, name), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("num_classes", [None, 4])
def test_merged_sums_are_those_of_all_rows_whoever_merges(num_classes):
    features, targets = problem()
    features[:, 60:] += 1000  # the processes' means differ
    if num_classes:
        targets = torch.randint(num_classes, (90,), generator=torch.Generator().manual_seed(1))

    def part(rows):
        return RidgeSums(num_classes=num_classes).add(features[:, rows], targets[rows])

    expected = streamed(features, targets, [90], num_classes=num_classes).solve(0.7)
    first, second, third = (lambda: part(slice(0, 5))), (lambda: part(slice(5, 60))), (lambda: part(slice(60, 90)))
    none = RidgeSums(num_classes=num_classes)
    for merged in (
        first().merge(second()).merge(third()).merge(none),
        third().merge(first().merge(second())),
        RidgeSums(num_classes=num_classes).merge(second()).merge(third()).merge(first()),
    ):
        assert merged.num_rows == 90
        torch.testing.assert_close(merged.solve(0.7).weight, expected.weight, rtol=1e-8, atol=1e-11)
        torch.testing.assert_close(merged.solve(0.7).bias, expected.bias)


def test_merging_leaves_the_other_as_it_was_and_rows_may_follow():
    features, targets = problem()
    half = RidgeSums().add(features[:, :45], targets[:45])
    taken = RidgeSums().merge(half).add(features[:, 45:], targets[45:])
    assert (half.num_rows, taken.num_rows) == (45, 90)
    torch.testing.assert_close(half.solve().weight, fit_ridge_probes(features[:, :45], targets[:45]).weight)
    torch.testing.assert_close(taken.solve().weight, fit_ridge_probes(features, targets).weight)


def test_features_far_from_0_lose_no_digits():
    # Squares about 0 would be 1e18, of which float64 keeps no more than 100.
    features, targets = problem()
    moved = features / features.std(1, keepdim=True) + 1e9
    exact = moved - 1e9  # as rounded by the addition
    expected = fit_ridge_probes(exact, targets).predict(exact)
    for probes in (fit_ridge_probes(moved, targets), streamed(moved, targets, [1, 2, 30, 57]).solve()):
        torch.testing.assert_close(probes.predict(moved), expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("pieces", [[90], [1, 2, 87]])
@pytest.mark.parametrize(("standardize", "intercept"), [(True, True), (False, False), (False, True)])
def test_class_numbers_stand_for_a_column_of_ones_and_zeros_each(pieces, standardize, intercept):
    features, _ = problem()
    classes = torch.randint(5, (90,), generator=torch.Generator().manual_seed(1))
    options = {"standardize": standardize, "intercept": intercept}
    table = torch.nn.functional.one_hot(classes, 7).double()  # two classes have no row
    expected = fit_ridge_probes(features, table, penalty=0.5, **options)
    probes = streamed(features, classes, pieces, num_classes=7).solve(0.5, **options)
    torch.testing.assert_close(probes.predict(features), expected.predict(features), rtol=1e-7, atol=1e-10)
    torch.testing.assert_close(probes.target_mean, expected.target_mean)
    assert not probes.weight[..., 5:].abs().gt(1e-12).any()


def test_half_precision_is_widened_and_features_are_left_as_they_were():
    features, targets = problem()
    rounded = features.bfloat16()
    expected = fit_ridge_probes(rounded.double(), targets)
    torch.testing.assert_close(fit_ridge_probes(rounded, targets).weight, expected.weight)
    before = features.clone()
    probes = fit_ridge_probes(features.requires_grad_(), targets)
    RidgeSums().add(features, targets)
    probes.predict(features)
    assert torch.equal(features, before)
    assert not probes.weight.requires_grad


def test_r_squared_is_that_of_scikit_learn_where_the_baseline_is_the_mean_of_the_scored():
    features, targets = problem()
    probes = fit_ridge_probes(features, targets)
    predictions = probes.predict(features)
    found = r_squared(targets, predictions, baseline=probes.target_mean)
    assert found.tolist() == pytest.approx([r2_score(targets, layer) for layer in predictions])
    # by hand: errors 0, 1, 1 against 1, 4, 9 from a training mean of 0
    targets, predictions = torch.tensor([1, 2, 3]), torch.tensor([1.0, 1.0, 4.0])
    assert r_squared(targets, predictions, baseline=0.0).item() == pytest.approx(1 - 2 / 14)
    assert r_squared(targets, torch.zeros(2, 3), baseline=0.0).tolist() == [0, 0]


def test_r_squared_of_equal_targets_is_undefined():
    targets, predictions = torch.full((5,), 0.1), torch.zeros(2, 5)
    with pytest.raises(ValueError, match="all targets are equal"):
        r_squared(targets, predictions, baseline=1.0)
    assert r_squared(targets, predictions, baseline=1.0, undefined="nan").isnan().all()
    with pytest.raises(ValueError, match=r"got \(2, 5\) of \(4,\)"):
        r_squared(targets[:4], predictions, baseline=1.0)


@pytest.mark.parametrize("give", [fit_ridge_probes, lambda **given: RidgeSums().add(**given)])
@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"features": torch.ones(2, 4, 3, dtype=torch.long)}, TypeError, "floating-point tensor, got torch.int64"),
        ({"features": torch.ones(4, 3)}, ValueError, r"shape \(layers, n, dim\), got \(4, 3\)"),
        (
            {"features": torch.ones(2, 4, 3).index_fill(0, torch.tensor(1), torch.inf)},
            ValueError,
            "finite features, got others at layer 1",
        ),
        ({"targets": torch.ones(3)}, ValueError, r"shape \(4,\) or \(4, q\), got \(3,\)"),
        ({"targets": torch.ones(4, 2, 2)}, ValueError, r"got \(4, 2, 2\)"),
        ({"targets": torch.tensor([0, 1, torch.nan, 0])}, ValueError, "finite targets, got another at row 2"),
        ({"targets": [1.0, 2.0, 3.0, 4.0]}, TypeError, "tensor of real numbers, got list"),
    ],
)
def test_wrong_rows_are_refused_with_a_sentence(give, change, error, message):
    with pytest.raises(error, match=message):
        give(**({"features": torch.randn(2, 4, 3), "targets": torch.randn(4)} | change))


def test_wrong_options_are_refused_with_a_sentence():
    features, targets = problem()
    sums = RidgeSums().add(features, targets)
    for fit in (lambda penalty: fit_ridge_probes(features, targets, penalty=penalty), sums.solve):
        for penalty in (-1.0, torch.nan, torch.inf):
            with pytest.raises(ValueError, match="penalty of at least 0, got"):
                fit(penalty)
    with pytest.raises(ValueError, match="at least one row"):
        fit_ridge_probes(features[:, :0], targets[:0])
    with pytest.raises(ValueError, match="at least one row"):
        RidgeSums().solve()
    with pytest.raises(ValueError, match=r"outweighs the rounding of X'X at layer 0, got 0.0; .*fit_ridge_probes"):
        sums.solve(0.0)
    with pytest.raises(ValueError, match="at layer 0, got 1e-12"):
        RidgeSums().add(features[:, :4], targets[:4]).solve(1e-12)
    with pytest.raises(ValueError, match="these probes read 3 layers of width 6"):
        sums.add(features[:2], targets)
    with pytest.raises(ValueError, match=r"targets of shape \(\) a row, as before, got \(1,\)"):
        sums.add(features, targets[:, None])
    with pytest.raises(ValueError, match=r"sums of \(layers, dim, outputs\) \(3, 6, 1\), got \(2, 6, 1\)"):
        sums.merge(RidgeSums().add(features[:2], targets))
    with pytest.raises(ValueError, match="sums of None classes, got 3"):
        sums.merge(RidgeSums(num_classes=3))
    with pytest.raises(ValueError, match="num_classes of at least 1, got 0"):
        RidgeSums(num_classes=0)
    classes = RidgeSums(num_classes=3)
    with pytest.raises(ValueError, match=r"classes in 0..2, got 3"):
        classes.add(features, torch.full((90,), 3))
    with pytest.raises(TypeError, match="integer tensor, got torch.float64"):
        classes.add(features, targets)
    with pytest.raises(ValueError, match=r"one class for each of 90 rows, got shape \(4,\)"):
        classes.add(features, torch.zeros(4, dtype=torch.long))
