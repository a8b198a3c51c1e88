"""`block_correlation` against scipy, the formula of a partial correlation, all permutations by hand, and its null."""

import itertools
import math

import numpy as np
import pytest
from scipy import stats

from lit_layers.functional import UndefinedError, block_correlation

RNG = np.random.default_rng(7)


def test_the_value_is_the_mean_of_scipys_over_checkpoints_then_runs():
    x = [RNG.normal(size=(3, 8)), RNG.normal(size=(5, 6))]
    y = [np.round(RNG.normal(size=part.shape), 1) for part in x]  # ties share their mean rank
    means = [
        np.mean([stats.spearmanr(*pair).statistic for pair in zip(*both, strict=True)])
        for both in zip(x, y, strict=True)
    ]
    result = block_correlation(x, y)
    assert result.value == pytest.approx(np.mean(means), abs=1e-12)
    assert (result.num_cells, result.num_undefined) == (8, 0)


def test_a_covariate_is_held_fixed_as_in_the_formula_of_a_partial_correlation():
    x, y, z = RNG.normal(size=(3, 1, 12))
    ranks = [stats.rankdata(column[0]) for column in (x, y, z)]
    (xy, xz), (yz,) = np.corrcoef(ranks)[0, 1:], np.corrcoef(ranks)[1, 2:]
    partial = (xy - xz * yz) / math.sqrt((1 - xz**2) * (1 - yz**2))
    assert block_correlation([x], [y], [[z]]).value == pytest.approx(partial, abs=1e-12)
    monotone = block_correlation([x**3], [np.exp(y)], [[-z]])  # ranks alone count, and a covariate's sign does not
    assert monotone.value == pytest.approx(partial, abs=1e-12)


def test_p_counts_all_permutations_of_the_blocks_the_same_at_every_checkpoint():
    x, y = RNG.normal(size=(2, 4, 5))
    orders = [list(order) for order in itertools.permutations(range(5))]
    null = [np.mean([stats.spearmanr(a[order], b).statistic for a, b in zip(x, y, strict=True)]) for order in orders]
    result = block_correlation([x], [y])
    assert result.p == pytest.approx(np.mean(np.abs(null) >= abs(result.value) - 1e-9), abs=1e-12)
    assert result.null == pytest.approx(tuple(np.quantile(null, [0.025, 0.975])), abs=1e-9)
    drawn = block_correlation([x], [y], permutations=119, seed=1)  # of 120
    assert drawn.p == pytest.approx(result.p, abs=0.15)  # three errors of 119 draws


def test_the_interval_is_over_three_runs_or_more_else_over_blocks():
    x = RNG.normal(size=(4, 1, 9))
    y = x + RNG.normal(size=x.shape)
    rhos = [stats.spearmanr(a[0], b[0]).statistic for a, b in zip(x, y, strict=True)]
    of_runs = block_correlation(list(x), list(y))
    half = stats.t.ppf(0.975, 3) * np.std(rhos, ddof=1) / 2
    assert (of_runs.over, of_runs.low) == ("runs", pytest.approx(np.mean(rhos) - half))
    one = block_correlation([x[0]], [y[0]])
    half = 1.96 * math.sqrt((1 + rhos[0] ** 2 / 2) / 6)
    assert (one.over, one.high) == ("blocks", pytest.approx(math.tanh(math.atanh(rhos[0]) + half)))
    assert math.isnan(block_correlation([x[0, :, :4]], [y[0, :, :4]], [[RNG.normal(size=(1, 4))]]).low)


def test_what_has_no_coefficient_is_counted_and_nothing_at_all_is_refused():
    x, y = RNG.normal(size=(2, 4, 6))
    x[1], y[2, 3] = 1.0, np.nan
    result = block_correlation([x], [y])
    assert (result.num_cells, result.num_undefined) == (4, 2)
    assert result.value == pytest.approx(np.mean([stats.spearmanr(x[at], y[at]).statistic for at in (0, 3)]))
    with pytest.raises(UndefinedError, match="no checkpoint of 2 has a rank correlation over 6 blocks"):
        block_correlation([x[1:3]], [y[1:3]])
    with pytest.raises(UndefinedError):
        block_correlation([x[:1, :3]], [y[:1, :3]], [[RNG.normal(size=(1, 3))]])
    with pytest.raises(ValueError, match="tables of one shape"):
        block_correlation([x], [y[:, :5]])


@pytest.mark.soak
@pytest.mark.parametrize(("runs", "given"), [(1, 0), (3, 0), (3, 1)])
def test_five_percent_of_unrelated_blocks_are_called_related(runs, given):
    """Checkpoints are nearly copies of each other: counted one by one they would make nearly everything significant."""
    rng = np.random.default_rng(0)

    def tables():
        return [rng.normal(size=(1, 10)) + 0.1 * rng.normal(size=(8, 10)) for _ in range(runs)]

    p = [
        block_correlation(tables(), tables(), [tables() for _ in range(given)], permutations=199, seed=n).p
        for n in range(250)
    ]
    assert np.mean(np.array(p) <= 0.05) == pytest.approx(0.05, abs=0.041)  # three binomial errors
