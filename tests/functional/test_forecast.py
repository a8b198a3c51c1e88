"""Forecasts of held-out models against refits one by one, cases solved by hand, and simulated coverage."""

import numpy as np
import pytest

from lit_layers.functional import fewest_groups, forecast_held_out
from lit_layers.functional.emergence.forecast import PENALTIES


def drawn(models: int = 12, dim: int = 2, seed: int = 0, noise: float = 0.5):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(models, dim)) * 10.0 ** np.arange(dim) + 3
    return x, x @ (2.0 / 10.0 ** np.arange(dim)) + noise * rng.standard_t(4, size=models)


def ridge(z, y, at, penalty):
    """By the normal equations, the intercept free of the penalty."""
    mean, level = z.mean(0), y.mean()
    return level + (at - mean) @ np.linalg.solve(
        (z - mean).T @ (z - mean) + penalty * np.eye(2), (z - mean).T @ (y - level)
    )


def refitted(x, y, at):
    """Of standardised features, with the penalty of the lowest error of rows that are left out one by one."""
    z, new = ((each - x.mean(0)) / x.std(0) for each in (x, at))
    rests = [np.delete(np.arange(len(y)), row) for row in range(len(y))]

    def error(penalty):
        return sum((ridge(z[rest], y[rest], z[row], penalty) - y[row]) ** 2 for row, rest in enumerate(rests))

    return ridge(z, y, new, min(PENALTIES, key=error))


@pytest.mark.parametrize("groups", [None, [0] * 4 + [*range(1, 8)]], ids=["models", "groups"])
def test_forecasts_and_intervals_are_those_of_refits_one_by_one(groups):
    names = np.arange(9) if groups is None else np.array(groups)
    x, y = drawn(len(names))
    found = forecast_held_out(x, y, groups=groups)
    for i in range(len(names)):
        training = names != names[i]
        near = refitted(x[training], y[training], x[[i]])[0]
        assert found.values[i] == pytest.approx(near, rel=1e-9)
        low, high, weights = [], [], []
        for j in np.flatnonzero(training):
            rest = training & (names != names[j])
            of_i, of_j = refitted(x[rest], y[rest], x[[i, j]])
            low.append(of_i - abs(y[j] - of_j))
            high.append(of_i + abs(y[j] - of_j))
            weights.append(1 / (names == names[j]).sum())
        share = len(set(names)) / (len(set(names)) - 1) * 0.8  # (1 + 1 / groups in training) 0.8
        ends = [-weighted(-np.array(low), weights, share), weighted(np.array(high), weights, share)]
        assert [found.low[i], found.high[i]] == pytest.approx(ends, rel=1e-9)


def weighted(values, weights, share):
    total = 0.0
    for value, weight in sorted(zip(values, weights, strict=True)):
        total += weight / sum(weights)
        if total > share - 1e-12:
            return value
    raise AssertionError


def test_where_features_are_constant_the_others_mean_is_the_forecast():
    y = np.array([0.0, 1, 2, 3, 10])
    found = forecast_held_out(np.ones((5, 2)), y)
    assert found.values == pytest.approx([(16 - each) / 4 for each in y])
    # Of model 0 without model j the mean of three is 5, 14/3, 13/3, 2 (j = 1 ... 4), and j is off by 4, 8/3, 4/3, 8:
    # of four training models 0.8 x 5 = 4 must be within, the farthest.
    assert (found.low[0], found.high[0]) == pytest.approx((2 - 8, 2 + 8))
    # Of model 4: 2, 5/3, 4/3, 1, off by 2, 2/3, 2/3, 2.
    assert (found.low[4], found.high[4]) == pytest.approx((1 - 2, 2 + 2))


def test_what_is_linear_in_the_features_is_forecast_exactly():
    x, _ = drawn(8)
    y = 3 + x @ [2.0, -0.5]
    found = forecast_held_out(x, y)
    for each in found:
        assert each == pytest.approx(y, abs=1e-7)


@pytest.mark.parametrize("groups", [None, [0, 0, 1, 2, 2, 2, 3, 4, 5, 5, 6, 6]], ids=["models", "groups"])
def test_nothing_of_a_held_out_model_or_its_group_is_in_its_forecast(groups):
    x, y = drawn(12)
    names = np.arange(12) if groups is None else np.array(groups)
    expected = forecast_held_out(x, y, groups=groups)
    for name in set(names):
        changed = np.where(names == name, -1e3 * y + 17, y)
        found = forecast_held_out(x, changed, groups=groups)
        for before, after in zip(expected, found, strict=True):
            assert (before == after)[names == name].all()
            assert not (before == after)[names != name].all()


def test_units_and_the_order_of_models_do_not_matter():
    x, y = drawn(9)
    expected = forecast_held_out(x, y)
    turned = forecast_held_out(x * [1e-3, -7] + [5, 1e2], 100 - 4 * y)
    assert 100 - 4 * expected.values == pytest.approx(turned.values)
    assert 100 - 4 * expected.high == pytest.approx(turned.low)
    order = np.random.default_rng(0).permutation(9)
    for before, after in zip(expected, forecast_held_out(x[order], y[order]), strict=True):
        assert before[order] == pytest.approx(after)


@pytest.mark.soak
@pytest.mark.parametrize(("models", "wanted"), [(15, 0.8), (8, 7 / 8)])
def test_of_exchangeable_models_four_fifths_of_the_intervals_hold(models, wanted):
    """Of K models the residual of rank ceil(0.8 K) is the end: 12 / 15, but 7 / 8. To 0.02, of 300 sets of models."""
    inside = []
    for seed in range(300):
        x, y = drawn(models, seed=seed, noise=2.0)
        found = forecast_held_out(x, y)
        inside.append(((found.low <= y) & (y <= found.high)).mean())
    assert np.mean(inside) == pytest.approx(wanted, abs=0.02)


def test_what_cannot_be_forecast_is_refused():
    x, y = drawn(5)
    for message, arguments, options in (
        ("at least 5 groups of models for 0.8 intervals, got 4", (x[:4], y[:4]), {}),
        ("at least 5 groups of models for 0.8 intervals, got 2", (x, y), {"groups": [1, 1, 1, 2, 2]}),
        ("at least 10 groups", (x, y), {"confidence": 0.9}),
        ("a confidence between 0 and 1, got 80", (x, y), {"confidence": 80}),
        ("a group for each of 5 models, got 2", (x, y), {"groups": "ab"}),
        (r"got \(5, 2\) of \(4,\)", (x, y[:4]), {}),
        (r"got \(5, 0\) of \(5,\)", (x[:, :0], y), {}),
        ("finite features and targets", (x, y * np.nan), {}),
    ):
        with pytest.raises(ValueError, match=message):
            forecast_held_out(*arguments, **options)
    assert [fewest_groups(level) for level in (0.5, 0.8, 0.9, 0.95)] == [4, 5, 10, 20]
