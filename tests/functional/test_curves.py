"""Monotonicity and intervals against definitions written out, known distributions, invariances, refusals."""

import itertools
import math

import numpy as np
import pytest
import torch
from scipy.stats import binomtest, norm

from lit_layers.functional.curves import bootstrap_interval, monotonicity, wilson_interval


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# ---------------------------------------------------------------------------------------- monotonicity


def ranks(values):
    """Average ranks, by counting."""
    return [sum(v < u for v in values) + (sum(v == u for v in values) + 1) / 2 for u in values]


@pytest.mark.parametrize("seed", range(5))
def test_monotonicity_agrees_with_its_definition(seed):
    scores = (random(9, seed=seed) * 3).round().tolist()  # with ties
    found = monotonicity(scores)
    assert found.fraction_increasing == sum(a < b for a, b in itertools.pairwise(scores)) / 8
    assert found.spearman == pytest.approx(np.corrcoef(range(9), ranks(scores))[0, 1])
    assert found.largest_drop == max(0, *(a - b for a, b in itertools.pairwise(scores)))
    assert found.max_drawdown == max(scores[i] - scores[j] for j in range(9) for i in range(j + 1))


def test_rising_falling_and_constant_curves():
    assert monotonicity([1, 2, 5]) == (1, 1, 0, 0)
    assert monotonicity([5, 2, 1]) == (0, -1, 3, 4)
    constant = monotonicity([2, 2, 2])
    assert constant._replace(spearman=None) == (0, None, 0, 0)
    assert math.isnan(constant.spearman)


def test_losses_are_judged_by_their_fall():
    losses = [3.0, 2.5, 2.6, 2.0]
    assert monotonicity(losses, higher_is_better=False) == monotonicity([-loss for loss in losses])
    assert monotonicity(losses, higher_is_better=False).fraction_increasing == pytest.approx(2 / 3)


def test_increasing_maps_change_no_share_and_no_rank_correlation():
    scores = random(12).tolist()
    shares = monotonicity(scores)
    mapped = monotonicity([math.exp(score) for score in scores])
    assert mapped[:2] == pytest.approx(shares[:2])
    assert monotonicity([2 * score + 7 for score in scores])[2:] == pytest.approx([2 * s for s in shares[2:]])


def test_curves_that_are_too_short_or_not_finite_are_refused():
    with pytest.raises(ValueError, match=r"expected the scores of at least 3 layers, got shape \(2,\)"):
        monotonicity([1, 2])
    with pytest.raises(ValueError, match="expected finite scores, got nan"):
        monotonicity([1, 2, math.nan])


# ---------------------------------------------------------------------------------------- bootstrap


def test_the_bootstrap_interval_of_a_mean_is_that_of_its_normal_approximation():
    values = random(400) * 2 + 5
    low, high = bootstrap_interval(values, resamples=4000)
    stderr = values.numpy().std() / 20
    assert low.item() == pytest.approx(values.mean().item() - 1.96 * stderr, abs=0.1 * stderr)
    assert high.item() == pytest.approx(values.mean().item() + 1.96 * stderr, abs=0.1 * stderr)
    narrow_low, narrow_high = bootstrap_interval(values, confidence=0.5)
    assert (narrow_high - narrow_low).item() == pytest.approx(2 * norm.ppf(0.75) * stderr, rel=0.1)


def test_two_values_have_the_interval_of_their_four_resamples():
    low, high = bootstrap_interval(torch.tensor([0.0, 1.0]))
    assert (low.item(), high.item()) == (0, 1)
    low, high = bootstrap_interval(torch.tensor([0.0, 1.0]), confidence=0.4)  # 0, 1/2, 1/2, 1
    assert (low.item(), high.item()) == (0.5, 0.5)


def test_the_median_has_an_interval_of_its_own():
    values = torch.cat([random(60), torch.tensor([1e6, 1e7])])
    low, high = bootstrap_interval(values, statistic="median")
    assert low.item() <= np.median(values.numpy()) <= high.item() < 1
    assert bootstrap_interval(values)[1].item() > 1e5


def test_the_interval_covers_the_true_mean_about_as_often_as_it_says():
    covered = 0
    for seed in range(200):
        low, high = bootstrap_interval(random(50, seed=seed), resamples=300)
        covered += bool(low <= 0 <= high)
    assert 0.9 <= covered / 200 <= 0.99


def test_every_column_is_resampled_alike_and_moves_with_its_values():
    values = random(30, 2, 3)
    low, high = bootstrap_interval(values)
    assert low.shape == high.shape == (2, 3)
    alone = bootstrap_interval(values[:, 1, 2])
    assert (low[1, 2].item(), high[1, 2].item()) == (alone[0].item(), alone[1].item())
    moved = bootstrap_interval(3 * values - 1)
    np.testing.assert_allclose(moved[0], 3 * low - 1, rtol=1e-10)
    np.testing.assert_allclose(moved[1], 3 * high - 1, rtol=1e-10)
    again, other = bootstrap_interval(values), bootstrap_interval(values, seed=1)
    assert torch.equal(again[0], low)
    assert not torch.equal(other[0], low)


def test_the_bootstrap_leaves_the_global_random_state_alone():
    before = torch.get_rng_state()
    bootstrap_interval(random(23))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("values", "options", "sentence"),
    [
        (torch.ones(1), {}, r"expected the values of at least 2 prompts, got shape \(1,\)"),
        (torch.tensor([1.0, math.nan]), {}, "expected finite values: leave undefined ones out first"),
        (torch.ones(3), {"confidence": 1.0}, "expected a confidence between 0 and 1, got 1.0"),
        (torch.ones(3), {"resamples": 0}, "expected at least 1 resample, got 0"),
        (torch.ones(3), {"statistic": "mode"}, "expected statistic to be one of 'mean', 'median', got 'mode'"),
    ],
)
def test_bootstraps_of_nothing_are_refused(values, options, sentence):
    with pytest.raises(ValueError, match=sentence):
        bootstrap_interval(values, **options)


# ---------------------------------------------------------------------------------------- Wilson


@pytest.mark.parametrize(("successes", "n"), [(0, 1), (1, 1), (0, 40), (7, 40), (20, 40), (40, 40), (990, 1000)])
@pytest.mark.parametrize("confidence", [0.5, 0.95, 0.999])
def test_the_wilson_interval_is_that_of_scipy(successes, n, confidence):
    expected = binomtest(successes, n).proportion_ci(confidence, method="wilson")
    assert wilson_interval(successes, n, confidence) == pytest.approx((expected.low, expected.high), abs=1e-12)


def test_the_wilson_interval_solves_its_equation_and_mirrors():
    low, high = wilson_interval(7, 40)
    for bound in (low, high):
        assert abs(7 / 40 - bound) == pytest.approx(1.959963984540054 * math.sqrt(bound * (1 - bound) / 40))
    assert wilson_interval(33, 40) == pytest.approx((1 - high, 1 - low))


@pytest.mark.parametrize(("successes", "n"), [(0, 0), (5, 4), (-1, 4)])
def test_impossible_counts_are_refused(successes, n):
    with pytest.raises(ValueError, match=f"expected 0 <= successes <= n and n >= 1, got successes={successes}, n={n}"):
        wilson_interval(successes, n)
