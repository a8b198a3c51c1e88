"""Curve summaries and intervals against definitions and known distributions, with invariances and refusals."""

import itertools
import math

import numpy as np
import pytest
import torch
from scipy.stats import binomtest, linregress

from lit_layers.functional import curves
from lit_layers.functional.curves import (
    bootstrap_interval,
    choice_distribution,
    choice_interval,
    choose_layer,
    exponential_law,
    inflection_layer,
    monotonicity,
    monotonicity_interval,
    resampled_curves,
    wilson_interval,
)
from tests.support.references import normal, ranks

# ---------------------------------------------------------------------------------------- monotonicity


def test_monotonicity_agrees_with_its_definition():
    for seed in range(5):
        scores = (normal(9, seed=seed) * 3).round().tolist()  # with ties
        found = monotonicity(scores)
        assert found.fraction_increasing == sum(a < b for a, b in itertools.pairwise(scores)) / 8
        assert found.spearman == pytest.approx(np.corrcoef(range(9), ranks(scores))[0, 1])
        assert found.largest_drop == max(0, *(a - b for a, b in itertools.pairwise(scores)))
        assert found.max_drawdown == max(scores[i] - scores[j] for j in range(9) for i in range(j + 1))


def test_rising_falling_and_constant_curves_are_solved_by_hand():
    assert monotonicity([1, 2, 5]) == (1, 1, 0, 0)
    assert monotonicity([5, 2, 1]) == (0, -1, 3, 4)
    constant = monotonicity([2, 2, 2])
    assert constant._replace(spearman=None) == (0, None, 0, 0)
    assert math.isnan(constant.spearman)


def test_a_falling_loss_counts_as_an_increasing_score():
    losses = [3.0, 2.5, 2.6, 2.0]
    assert monotonicity(losses, higher_is_better=False) == monotonicity([-loss for loss in losses])
    assert monotonicity(losses, higher_is_better=False).fraction_increasing == pytest.approx(2 / 3)


def test_increasing_maps_do_not_change_shares_and_rank_correlations():
    scores = normal(12).tolist()
    shares = monotonicity(scores)
    mapped = monotonicity([math.exp(score) for score in scores])
    assert mapped[:2] == pytest.approx(shares[:2])
    assert monotonicity([2 * score + 7 for score in scores])[2:] == pytest.approx([2 * s for s in shares[2:]])


def test_curves_that_are_too_short_or_not_finite_are_refused():
    with pytest.raises(ValueError, match=r"scores of 3 layers or more, got \[1\.0, 2\.0\]"):
        monotonicity([1, 2])
    with pytest.raises(ValueError, match="expected finite scores of 3 layers"):
        monotonicity([1, 2, math.nan])


# ---------------------------------------------------------------------------------------- bootstrap


def test_two_values_have_the_interval_of_their_four_possible_resamples():
    low, high = bootstrap_interval(torch.tensor([0.0, 1.0]))
    assert (low.item(), high.item()) == (0, 1)


def test_every_column_has_the_same_resamples_and_its_interval_follows_affine_maps():
    values = normal(30, 2, 3)
    low, high = bootstrap_interval(values)
    assert low.shape == high.shape == (2, 3)
    single = bootstrap_interval(values[:, 1, 2])
    ends = [low[1, 2].item(), high[1, 2].item()]
    np.testing.assert_allclose(ends, [end.item() for end in single], rtol=1e-13)  # other columns change rounding
    moved = bootstrap_interval(3 * values - 1)
    np.testing.assert_allclose(moved[0], 3 * low - 1, rtol=1e-10)
    np.testing.assert_allclose(moved[1], 3 * high - 1, rtol=1e-10)
    again, other = bootstrap_interval(values), bootstrap_interval(values, seed=1)
    assert torch.equal(again[0], low)
    assert not torch.equal(other[0], low)


def test_intervals_equal_quantiles_over_resamples_gathered_one_at_a_time(monkeypatch):
    for num_rows in [2, 5, 30]:
        for statistic in ["mean", "median"]:
            values = normal(num_rows, 3).numpy()
            generator = torch.Generator().manual_seed(4)
            drawn = torch.randint(num_rows, (200, num_rows), generator=generator).numpy()
            statistics = [getattr(np, statistic)(values[rows], axis=0) for rows in drawn]
            expected = np.quantile(statistics, [0.025, 0.975], axis=0)
            for at_once in (2**22, 70):  # all resamples at once, and a few at a time
                monkeypatch.setattr(curves, "DRAWN_AT_ONCE", at_once)
                interval = bootstrap_interval(torch.from_numpy(values), statistic=statistic, resamples=200, seed=4)
                np.testing.assert_allclose(torch.stack(interval), expected, rtol=1e-12, atol=1e-15)


def test_counts_of_very_many_rows_are_exact():
    (counts,) = curves.row_counts(100_000, 3, 0)  # a count could exceed two bytes
    assert torch.equal(counts.sum(1), torch.full((3,), 1e5, dtype=torch.float64))


def test_the_bootstrap_does_not_change_the_global_random_state():
    before = torch.get_rng_state()
    bootstrap_interval(normal(23))
    assert torch.equal(torch.get_rng_state(), before)


def test_too_few_rows_non_finite_values_and_unknown_statistics_are_refused():
    for values, options, sentence in (
        (torch.ones(1), {}, r"values of at least 2 rows, got shape \(1,\)"),
        (torch.tensor([1.0, math.nan]), {}, "expected finite values of at least 2 rows"),
        (torch.ones(3), {"statistic": "mode"}, "expected statistic to be one of 'mean', 'median', got 'mode'"),
    ):
        with pytest.raises(ValueError, match=sentence):
            bootstrap_interval(values, **options)
        if not options:
            with pytest.raises(ValueError, match="expected finite values of at least 2 rows"):
                resampled_curves(values[None])


# ---------------------------------------------------------------------------------------- Wilson


def test_the_wilson_interval_equals_that_of_scipy():
    for successes, n in [(0, 1), (1, 1), (0, 40), (7, 40), (20, 40), (40, 40), (990, 1000)]:
        expected = binomtest(successes, n).proportion_ci(0.95, method="wilson")
        assert wilson_interval(successes, n) == pytest.approx((expected.low, expected.high), abs=1e-12)


# ---------------------------------------------------------------------------------------- choose_layer

RISING = [0.20, 0.50, 0.70, 0.80, 0.84, 0.85, 0.86, 0.86]
BROKEN = [0.30, 0.60, 0.88, 0.70, 0.90, 0.91]
RULES = ["within_tolerance", "fraction_of_last", "plateau", "knee", "best"]


def test_each_rule_chooses_the_layer_solved_by_hand():
    for scores, rule, tolerance, layer in [
        (RISING, "within_tolerance", 0.025, 5),
        (RISING, "fraction_of_last", 0.1, 4),
        (RISING, "plateau", 0.05, 4),
        (RISING, "knee", 0.01, 4),
        (RISING, "best", 0.01, 7),
        (BROKEN, "within_tolerance", 0.04, 3),
        (BROKEN, "plateau", 0.05, 5),
        ([0.1, 0.7, 0.8], "plateau", 0.1, 2),  # .8 - .7 exceeds .1 only by rounding
        (RISING, "within_tolerance", 0.02, 5),
        ([0.1 * layer for layer in range(1, 8)], "knee", 0.0, 1),  # a line has a knee only by rounding
        ([0.4, 0.3, 0.35], "plateau", 0.05, 1),
        ([0.4, 0.3, 0.36], "plateau", 0.05, 3),
        ([0.7], "knee", 0.0, 1),
    ]:
        assert choose_layer(scores, rule=rule, tolerance=tolerance) == layer


def test_a_constant_or_single_layer_curve_gives_the_first_layer():
    for rule in RULES:
        assert choose_layer([0.3] * 6, rule=rule) == 1
        assert choose_layer([0.9], rule=rule) == 1


def choice(scores, rule, tolerance):
    """Apply the definition of a rule layer by layer."""
    last = len(scores)
    layers, s = range(1, last + 1), dict(enumerate(scores, 1))
    if rule == "within_tolerance":
        return next(layer for layer in layers if s[layer] >= s[last] - tolerance)
    if rule == "fraction_of_last":
        return next(layer for layer in layers if s[layer] >= (1 - tolerance) * s[last])
    if rule == "plateau":
        steps = {layer: s[layer + 1] - s[layer] for layer in layers[:-1]}
        return next(layer for layer in layers if all(steps[later] <= tolerance for later in range(layer, last)))
    if rule == "knee":  # rounded: both ends lie on the chord, and the first wins
        slope = (s[last] - s[1]) / (last - 1)
        return max(layers, key=lambda layer: round(s[layer] - s[1] - slope * (layer - 1), 12))
    return max(layers, key=lambda layer: s[layer])


def test_a_resample_without_hits_at_the_last_layer_chooses_the_first():
    """The last layer hits one of 4 rows, which (3/4)^4 of the resamples lack."""
    hits = torch.tensor([[0, 0, 1, 0], [1, 0, 0, 0]]).double()  # two layers
    shares = choice_distribution(hits, rule="fraction_of_last", tolerance=0.1, resamples=20_000)
    counts = list(itertools.product(range(4), repeat=4))
    first = sum(rows.count(2) >= 0.9 * rows.count(0) for rows in counts) / len(counts)
    assert shares[0].item() == pytest.approx(first, abs=0.015)
    with pytest.raises(ValueError, match="expects positive scores .* a last score of 0.0"):
        choice_distribution(hits[[1, 0]] * torch.tensor([[1.0], [0.0]]), rule="fraction_of_last")
    with pytest.raises(ValueError, match="a last score of 0.0"):
        choose_layer([0.3, 0.0], rule="fraction_of_last")


def test_choices_agree_with_the_rules_written_out():
    for tolerance in [0.0, 0.03, 0.3]:
        for rule in RULES:
            for seed in range(40):
                scores = (normal(7, seed=seed).abs() + 0.1).tolist()
                expected = choice(scores, rule, tolerance)
                assert choose_layer(scores, rule=rule, tolerance=tolerance) == expected
                if rule != "fraction_of_last":
                    losses = [-score for score in scores]
                    assert choose_layer(losses, rule=rule, tolerance=tolerance, higher_is_better=False) == expected
                    moved = [3 * score + 5 for score in scores]
                    assert choose_layer(moved, rule=rule, tolerance=3 * tolerance) == expected


def test_invalid_scores_rules_and_tolerances_are_refused():
    for scores, options, sentence in (
        ([], {"rule": "best"}, r"scores of 1 layers or more, got \[\]"),
        ([0.1, math.nan], {"rule": "best"}, "expected finite scores"),
        ([0.1, 0.2], {"rule": "first"}, "expected rule to be one of 'within_tolerance', .*, got 'first'"),
        ([0.1, 0.2], {"rule": "plateau", "tolerance": -0.1}, "expected a tolerance of at least 0, got -0.1"),
        ([0.1, 0.2], {"rule": "fraction_of_last", "tolerance": 1.0}, "a tolerance below 1, got .*tolerance=1.0"),
        ([0.1, -0.2], {"rule": "fraction_of_last"}, "expects positive scores .* a last score of -0.2"),
        ([0.1, 0.2], {"rule": "fraction_of_last", "higher_is_better": False}, "got higher_is_better=False"),
    ):
        with pytest.raises(ValueError, match=sentence):
            choose_layer(scores, **options)


# ---------------------------------------------------------------------------------------- inflections


def test_inflections_equal_those_solved_by_hand():
    assert inflection_layer([(layer - 4) ** 3 for layer in range(1, 8)]) == 4  # second differences 6 (l - 4)
    assert inflection_layer([layer**2 for layer in range(6)]) is None  # bends in one direction
    assert inflection_layer([0.1 * layer for layer in range(9)]) is None  # rounding is no bend
    assert inflection_layer([0, 0, 1, 3, 4, 4]) == 4  # second differences 1, 1, -1, -1 at layers 2..5
    assert inflection_layer([0.0, 0.5, 0.9, 0.95, 1.0, 1.3]) == 4  # -.1, -.35, 0, .25: straight at 4, up from there
    with pytest.raises(ValueError, match="expected finite scores of 3 layers or more"):
        inflection_layer([1.0, 2.0])


def test_inflections_do_not_change_with_scale_and_added_lines():
    for seed in range(20):
        scores = normal(10, seed=seed)
        found = inflection_layer(scores.tolist())
        assert inflection_layer((7 * scores + 3 * torch.arange(10) - 2).tolist()) == found
        bends = np.diff(scores.numpy(), 2)
        flips = [index for index in range(1, 8) if bends[index - 1] * bends[index] < 0]
        assert found == (2 + flips[0] if flips else None)


# ---------------------------------------------------------------------------------------- resampled curves


def resamples_by_hand(row_scores, resamples, seed=0):
    num_rows = row_scores.shape[1]
    rows = torch.randint(num_rows, (resamples, num_rows), generator=torch.Generator().manual_seed(seed))
    return np.stack([row_scores.numpy()[:, chosen].mean(1) for chosen in rows.numpy()])


def test_resampled_curves_are_means_over_the_same_rows_for_every_layer(monkeypatch):
    for drawn_at_once in [2**22, 100, 1]:
        monkeypatch.setattr("lit_layers.functional.curves.DRAWN_AT_ONCE", drawn_at_once)
        row_scores = normal(5, 37)
        found = resampled_curves(row_scores, resamples=50, seed=3)
        np.testing.assert_allclose(found, resamples_by_hand(row_scores, 50, 3), atol=1e-12)


def test_the_choice_distribution_is_the_share_of_resamples_that_choose_each_layer():
    for rule in RULES:
        row_scores = (normal(6, 25) + torch.arange(6)[:, None] * 0.2).abs()
        found = choice_distribution(row_scores, rule=rule, tolerance=0.05, resamples=200)
        chosen = [choice(curve.tolist(), rule, 0.05) for curve in resamples_by_hand(row_scores, 200)]
        np.testing.assert_allclose(found, [chosen.count(layer) / 200 for layer in range(1, 7)])
        assert 0 < found.max() < 1
        if rule != "fraction_of_last":
            options = {"rule": rule, "tolerance": 0.05, "resamples": 200, "higher_is_better": False}
            assert torch.equal(choice_distribution(-row_scores, **options), found)


def test_the_interval_of_a_choice_has_the_quantiles_of_its_distribution():
    shares = torch.tensor([0.02, 0.01, 0.9, 0.03, 0.04])
    assert choice_interval(shares) == (2, 5)
    assert choice_interval(torch.tensor([0.0, 1.0])) == (2, 2)
    row_scores = (normal(8, 60) + torch.arange(8)[:, None] * 0.1).double()
    chosen = [choice(curve.tolist(), "plateau", 0.05) for curve in resamples_by_hand(row_scores, 2000)]
    low, high = (np.quantile(chosen, share, method="inverted_cdf") for share in (0.025, 0.975))
    assert choice_interval(choice_distribution(row_scores, rule="plateau", tolerance=0.05)) == (low, high)


def test_intervals_of_monotonicity_are_quantiles_over_resampled_rows():
    row_scores = normal(6, 30) + torch.arange(6)[:, None] * 0.1
    low, high = monotonicity_interval(row_scores, resamples=200, seed=2)
    each = np.array([monotonicity(curve.tolist()) for curve in resamples_by_hand(row_scores, 200, 2)])
    for name, index in zip(low._fields, range(4), strict=True):
        bounds = np.quantile(each[:, index], [0.025, 0.975])
        np.testing.assert_allclose([getattr(low, name), getattr(high, name)], bounds, atol=1e-12)
    assert low.spearman < high.spearman
    negated = monotonicity_interval(-row_scores, resamples=200, seed=2, higher_is_better=False)
    assert negated == (low, high)


def test_constant_resamples_have_no_rank_correlation_and_are_left_out():
    hits = torch.zeros(3, 4)
    hits[2, 0] = 1  # a resample without row 0 is constant
    low, high = monotonicity_interval(hits, resamples=300)
    assert low.spearman == high.spearman == pytest.approx(math.sqrt(3) / 2)
    assert (low.fraction_increasing, high.fraction_increasing) == (0, 0.5)
    assert math.isnan(monotonicity_interval(torch.ones(3, 4))[0].spearman)


# ---------------------------------------------------------------------------------------- exponential law


def test_the_exponential_law_is_scipys_line_through_the_logarithms():
    residuals = normal(2, 3, 9).exp()
    found = exponential_law(residuals)
    for index in np.ndindex(2, 3):
        line = linregress(range(9), np.log10(residuals[index].numpy()))
        assert found.slope[index].item() == pytest.approx(line.slope)
        assert found.intercept[index].item() == pytest.approx(line.intercept)
        assert found.pearson[index].item() == pytest.approx(line.rvalue)
        assert found.r_squared[index].item() == pytest.approx(line.rvalue**2)
        assert found.rho[index].item() == pytest.approx(10**line.slope)


def test_a_geometric_series_gives_its_ratio():
    found = exponential_law(torch.tensor([0.8 * 0.9**layer for layer in range(12)], dtype=torch.float64))
    assert found.rho.item() == pytest.approx(0.9, rel=1e-12)
    assert found.pearson.item() == pytest.approx(-1, rel=1e-12)
    assert 10 ** found.intercept.item() == pytest.approx(0.8)
    assert exponential_law(torch.tensor([1.0, 2, 4, 8])).pearson.item() == pytest.approx(1)


def test_scaling_the_residuals_changes_only_the_intercept():
    residuals = normal(8).exp()
    found, scaled = exponential_law(residuals), exponential_law(5 * residuals)
    for name in ("rho", "slope", "pearson", "r_squared"):
        assert getattr(scaled, name).item() == pytest.approx(getattr(found, name).item(), rel=1e-9)
    assert scaled.intercept.item() == pytest.approx(found.intercept.item() + math.log10(5))


def test_a_constant_curve_has_the_ratio_1_and_no_correlation():
    found = exponential_law(torch.full((5,), 0.3))
    assert (found.rho.item(), found.slope.item()) == (1, 0)
    assert found.pearson.isnan()
    assert found.r_squared.isnan()


def test_residuals_without_a_logarithm_are_refused_or_only_they_are_nan():
    curves = torch.tensor([[0.5, 0.4, 0.2], [0.5, 0.0, 0.2], [0.5, math.inf, 0.2]])
    found = exponential_law(curves, undefined="nan")
    assert found.rho.isnan().tolist() == [False, True, True]
    assert found.rho[0] == exponential_law(curves[0]).rho
    with pytest.raises(ValueError, match=r"undefined at element \(1,\): a residual is not a finite num"):
        exponential_law(curves)
    with pytest.raises(ValueError, match=r"residuals of at least 3 layers, got shape \(2,\)"):
        exponential_law(torch.tensor([0.5, 0.4]))
