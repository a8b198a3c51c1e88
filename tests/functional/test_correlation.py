"""Correlations over models against float64 definitions and closed forms, with invariances and refusals."""

import itertools
import math

import numpy as np
import pytest
from scipy import stats
from scipy.integrate import quad
from scipy.stats import norm

from lit_layers.functional.correlation import (
    UndefinedError,
    bootstrap_rows,
    distance_correlation,
    distance_null,
    fit_line,
    groupwise_correlation,
    kendall,
    line_band,
    p_value,
    partial_correlation,
    pearson,
    spearman,
)
from tests.support.references import dcor, ranks

SEEDS = range(4)


def pair(seed: int, n: int = 17, *, ties: bool = False) -> tuple[list[float], list[float]]:
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(n)
    y = 0.6 * x + rng.standard_normal(n)
    return ((3 * x).round().tolist(), (3 * y).round().tolist()) if ties else (x.tolist(), y.tolist())


def pearson_from_sums(x: list[float], y: list[float]) -> float:
    """Pearson's r from raw sums, exactly rounded."""
    n = len(x)
    sx, sy = math.fsum(x), math.fsum(y)
    sxy = math.fsum(a * b for a, b in zip(x, y, strict=True))
    sxx, syy = math.fsum(a * a for a in x), math.fsum(b * b for b in y)
    return (n * sxy - sx * sy) / math.sqrt((n * sxx - sx * sx) * (n * syy - sy * sy))


def tau_b(x: list[float], y: list[float]) -> float:
    """Kendall's tau-b by counting all pairs."""
    pairs = list(itertools.combinations(range(len(x)), 2))
    products = [np.sign(x[i] - x[j]) * np.sign(y[i] - y[j]) for i, j in pairs]
    untied = [sum(side[i] != side[j] for i, j in pairs) for side in (x, y)]
    return sum(products) / math.sqrt(untied[0] * untied[1])


def test_the_coefficients_agree_with_their_definitions():
    for ties in [False, True]:
        for seed in SEEDS:
            x, y = pair(seed, ties=ties)
            assert pearson(x, y).value == pytest.approx(pearson_from_sums(x, y), rel=1e-12)
            assert spearman(x, y).value == pytest.approx(pearson_from_sums(ranks(x), ranks(y)), rel=1e-12)
            assert kendall(x, y).value == pytest.approx(tau_b(x, y), rel=1e-12)
            assert distance_correlation(x, y) == pytest.approx(dcor(x, y), rel=1e-10)


def test_three_points_solved_by_hand():
    # x = -1, 0, 1 and y = 1, 0, 3: r = 2 / sqrt(2 * 14/3); one inversion in three pairs
    found = pearson([-1, 0, 1], [1, 0, 3])
    assert found.value == pytest.approx(2 / math.sqrt(2 * 14 / 3))
    assert (found.n, found.df) == (3, 1)
    assert found.p == pytest.approx(1 - 2 / math.pi * math.asin(found.value)), "t with one df is Cauchy"
    assert spearman([-1, 0, 1], [1, 0, 3]).value == pytest.approx(0.5)
    assert kendall([-1, 0, 1], [1, 0, 3]).value == pytest.approx(1 / 3)


def test_the_p_value_of_perfect_ranks_is_the_share_of_permutations_with_equal_agreement():
    for sign in (1, -1):
        rows = np.arange(5) ** 3
        extreme = [abs(stats.spearmanr(rows, order).statistic) > 1 - 1e-9 for order in itertools.permutations(range(5))]
        found = spearman(rows, sign * rows)
        assert (found.value, found.p) == (pytest.approx(sign), pytest.approx(np.mean(extreme)))


def test_p_is_the_share_of_the_null_density_beyond_r():
    for r, df in [(0.3, 4), (-0.7, 9), (0.568, 25), (0.05, 2)]:
        # under independence r has the density (1 - r²)^(df/2 - 1) / B(1/2, df/2)
        beta = math.gamma(0.5) * math.gamma(df / 2) / math.gamma(0.5 + df / 2)
        tail = quad(lambda t, df: (1 - t * t) ** (df / 2 - 1), abs(r), 1, args=(df,))[0] / beta
        assert p_value(r, df) == pytest.approx(2 * tail, rel=1e-6)


def test_the_p_value_of_kendall_is_the_share_of_permutations_with_at_least_its_tau():
    x, y = list(range(6)), [1, 0, 2, 3, 5, 4]
    reached = [abs(tau_b(x, list(order))) >= tau_b(x, y) - 1e-12 for order in itertools.permutations(range(6))]
    assert kendall(x, y).p == pytest.approx(np.mean(reached))


def test_perfect_lines_correlate_at_plus_or_minus_1():
    x = [0.1, 0.2, 0.7, 3.0, 3.1]
    for slope, sign in ((2.0, 1), (-0.5, -1)):
        y = [slope * v + 4 for v in x]
        for coefficient in (pearson, spearman, kendall):
            assert coefficient(x, y).value == pytest.approx(sign)
        assert pearson(x, y).p == pytest.approx(0, abs=1e-12)
        assert distance_correlation(x, y) == pytest.approx(1)


def test_affine_maps_and_the_order_of_the_rows_change_nothing():
    for seed in SEEDS:
        x, y = map(np.array, pair(seed))
        order = np.random.default_rng(seed).permutation(len(x))
        for coefficient in (lambda a, b: pearson(a, b).value, lambda a, b: kendall(a, b).value, distance_correlation):
            expected = coefficient(x, y)
            assert coefficient(x[order], y[order]) == pytest.approx(expected, rel=1e-12)
            assert coefficient(3 * x - 7, 0.1 * y + 2) == pytest.approx(expected, rel=1e-10)
            assert coefficient(x, y) == pytest.approx(coefficient(y, x), rel=1e-12)
        assert distance_correlation(-x, y) == pytest.approx(distance_correlation(x, y), rel=1e-10)
        assert pearson(-x, y).value == pytest.approx(-pearson(x, y).value, rel=1e-12)
        assert spearman(np.exp(x), y**3).value == pytest.approx(spearman(x, y).value, rel=1e-12)
        assert pearson(x + 1e9, y).value == pytest.approx(pearson(x, y).value, rel=1e-5), "also far from 0"


def test_distance_correlation_detects_a_parabola_that_pearson_misses():
    x = np.linspace(-1, 1, 61)
    assert pearson(x, x**2).value == pytest.approx(0, abs=1e-12)
    assert distance_correlation(x, x**2) > 0.4
    assert distance_null(x, x**2)[1] < 0.01


def test_the_null_of_distance_correlation_is_far_from_0_and_falls_with_the_number_of_rows():
    for n, expected in [(7, 0.59), (13, 0.45), (25, 0.34), (37, 0.28)]:
        rng = np.random.default_rng(n)
        found = [distance_null(rng.standard_normal(n), rng.standard_normal(n), permutations=40)[0] for _ in range(12)]
        assert np.mean(found) == pytest.approx(expected, abs=0.025)


# ---------------------------------------------------------------------------------------- partial correlations


def test_the_partial_correlation_given_one_column_follows_from_the_three_coefficients():
    for seed in SEEDS:
        x, y = pair(seed)
        z = (np.array(pair(seed + 50)[0]) + 0.8 * np.array(x)).tolist()
        xy, xz, yz = pearson_from_sums(x, y), pearson_from_sums(x, z), pearson_from_sums(y, z)
        expected = (xy - xz * yz) / math.sqrt((1 - xz**2) * (1 - yz**2))
        found = partial_correlation(x, y, [z])
        assert found.value == pytest.approx(expected, rel=1e-10)
        assert found.df == len(x) - 3
        assert found.p == p_value(found.value, found.df)


def test_the_partial_correlation_given_several_columns_follows_from_the_inverse_covariance():
    for seed in SEEDS:
        rng = np.random.default_rng(seed)
        table = rng.standard_normal((20, 5)) @ rng.standard_normal((5, 5))
        inverse = np.linalg.inv(np.cov(table.T))
        expected = -inverse[0, 1] / math.sqrt(inverse[0, 0] * inverse[1, 1])
        x, y, *given = table.T
        found = partial_correlation(x, y, given)
        assert found.value == pytest.approx(expected, rel=1e-9)
        assert found.df == 20 - 2 - 3
        mixed = [given[0] + given[1] - 3, 2 * given[1], given[2] - given[0]]
        assert partial_correlation(4 * x + 1, y, mixed).value == pytest.approx(expected, rel=1e-9), "affine maps"
        again = partial_correlation(x, y, [*given, given[0] - 2 * given[2], np.full(20, 3.0)])
        assert again.value == pytest.approx(expected, rel=1e-9)
        assert again.df == found.df, "redundant covariates cost no degrees of freedom"
        assert partial_correlation(x, y, []) == pearson(x, y)


def test_the_correlation_within_groups_is_the_partial_correlation_given_group_indicators():
    for seed in SEEDS:
        x, y = map(np.array, pair(seed, 18))
        groups = ["a", "b", "b", "c", "a", "c"] * 3
        x = x + 5 * np.array([ord(group) for group in groups])
        given = [[float(group == name) for group in groups] for name in "abc"]
        found, expected = groupwise_correlation(x, y, groups), partial_correlation(x, y, given)
        assert found.value == pytest.approx(expected.value, rel=1e-9)
        assert (found.df, found.n) == (18 - 3 - 1, 18)
        assert found.p == pytest.approx(expected.p, rel=1e-8)
        shifted = y + 7 * np.array([ord(group) for group in groups])
        assert groupwise_correlation(x, shifted, groups).value == pytest.approx(found.value, rel=1e-9)


def test_groups_can_reverse_a_correlation():
    x, y = [0, 1, 2, 10, 11, 12], [2, 1, 0, 12, 11, 10]
    assert pearson(x, y).value > 0.9
    assert groupwise_correlation(x, y, [0, 0, 0, 1, 1, 1]).value == pytest.approx(-1)
    with_single = groupwise_correlation([*x, 99], [*y, -99], [0, 0, 0, 1, 1, 1, 2])
    assert with_single.value == pytest.approx(-1), "a group of one row has no effect"
    assert with_single.df == 3


# ---------------------------------------------------------------------------------------- lines, rows, resamples


def test_the_line_solves_the_normal_equations_and_its_band_covers_the_mean():
    x, y = map(np.array, pair(3))
    line = fit_line(x, y)
    design = np.stack([np.ones_like(x), x], 1)
    expected = np.linalg.solve(design.T @ design, design.T @ y)
    assert (line.intercept, line.slope) == pytest.approx(tuple(expected))
    rng, hits = np.random.default_rng(0), 0
    for _ in range(400):
        fitted = fit_line(x, 2 * x + 1 + rng.standard_normal(len(x)))
        low, high = line_band(fitted, [0.7])
        hits += low[0] <= 2.4 <= high[0]
    assert 0.92 <= hits / 400 <= 0.98


def test_the_interval_of_a_correlation_is_near_fishers_for_many_rows():
    rng = np.random.default_rng(5)
    x = rng.standard_normal(400)
    y = 0.5 * x + rng.standard_normal(400)
    r = pearson_from_sums(x.tolist(), y.tolist())
    found = bootstrap_rows(lambda rows: pearson(x[rows], y[rows]).value, 400)
    half = norm.ppf(0.975) / math.sqrt(397)
    assert found.low == pytest.approx(math.tanh(math.atanh(r) - half), abs=0.02)
    assert found.high == pytest.approx(math.tanh(math.atanh(r) + half), abs=0.02)
    assert found == bootstrap_rows(lambda rows: pearson(x[rows], y[rows]).value, 400), "the same seed, the same rows"
    assert found != bootstrap_rows(lambda rows: pearson(x[rows], y[rows]).value, 400, seed=1)


def test_undefined_resamples_are_left_out_and_counted():
    x, y = np.array([0.0, 1, 2]), np.array([0.0, 2, 1])
    found = bootstrap_rows(lambda rows: pearson(x[rows], y[rows]).value, 3, resamples=900)
    assert found.num_undefined / 900 == pytest.approx(1 / 9, abs=0.03), "three equal rows: 3 of 27"
    with pytest.raises(UndefinedError, match="undefined in 900 of 900 resamples of 3 rows"):
        bootstrap_rows(lambda rows: pearson(x[rows] * 0, y[rows]).value, 3, resamples=900)


@pytest.mark.parametrize("coefficient", [pearson, spearman, kendall, distance_correlation, fit_line])
def test_undefined_coefficients_and_invalid_columns_are_refused(coefficient):
    with pytest.raises(UndefinedError, match="expected at least [34] rows, got 2"):
        coefficient([1, 2], [1, 2])
    with pytest.raises(UndefinedError, match="x is 2 in every row"):
        coefficient([2, 2, 2, 2], [1, 2, 3, 5])
    with pytest.raises(ValueError, match="equal length"):
        coefficient([1, 2, 3, 4], [1, 2, 3])
    with pytest.raises(ValueError, match="finite"):
        coefficient([1, 2, 3, math.nan], [1, 2, 3, 4])


def test_correlations_without_remaining_variation_are_refused():
    x, y = pair(0, 5)
    with pytest.raises(UndefinedError, match="x is determined by the covariates"):
        partial_correlation(x, y, [[3 * v - 1 for v in x]])
    with pytest.raises(UndefinedError, match="5 rows are too few for 3 covariates"):
        partial_correlation(x, y, [pair(seed, 5)[0] for seed in (7, 8, 9)])
    with pytest.raises(UndefinedError, match="y is constant within every group"):
        groupwise_correlation(x, [1, 1, 2, 2, 2], "aabbb")
    with pytest.raises(UndefinedError, match="leave nothing to compare"):
        groupwise_correlation(x, y, "abcde")
