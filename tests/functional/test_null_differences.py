"""From which checkpoint on a curve differs from its null."""

import numpy as np
import pytest
from scipy import stats

from lit_layers.functional.emergence.null_differences import lasting_difference


def brute_force(rows: np.ndarray, alpha: float) -> int | None:
    """Return the first checkpoint after which scipy's one-sample t-test is significant everywhere, with one sign."""
    first, count = None, rows.shape[1]
    for index in reversed(range(count)):
        is_significant = stats.ttest_1samp(rows[:, index], 0).pvalue * count <= alpha
        if not is_significant or np.sign(rows[:, index].mean()) != np.sign(rows[:, -1].mean()):
            return first
        first = index
    return first


def test_the_checkpoint_is_that_of_a_t_test_at_each_checkpoint():
    rng, found = np.random.default_rng(0), []
    for trial in range(60):
        means = np.linspace(-0.5, 1, 8) * (1 if trial % 3 else 0)
        rows = means + rng.standard_normal((12, 8)) * 0.4
        expected = brute_force(rows, 0.05)
        found.append(expected)
        assert lasting_difference(rows.mean(0), replicates=rows) == expected
        scaled = -3 * rows[::-1]  # neither sign, unit nor order of the replicates matters
        assert lasting_difference(scaled.mean(0), replicates=scaled) == expected
    assert len(set(found)) > 3
    assert None in found


def test_cases_solved_by_hand():
    # 1.96 standard errors are significant for one checkpoint, and 2.24 for two (Bonferroni)
    assert lasting_difference([1.97], stderr=[1.0]) == 0
    assert lasting_difference([1.95], stderr=[1.0]) is None
    assert lasting_difference([2.2, 2.3], stderr=[1.0, 1.0]) == 1
    assert lasting_difference([2.3, -2.3], stderr=[1.0, 1.0]) == 1  # another sign is another difference
    assert lasting_difference([5, np.nan, 5, 5], stderr=[1.0] * 4) == 0  # a missing value is left out
    assert lasting_difference([5, 5, 0], stderr=[1.0] * 3) is None  # no longer at the last checkpoint
    assert lasting_difference([0.0], stderr=[0.0]) is None
    # without spread, a sign test: 2^-5 of 6 replicates is below 0.05, 2^-4 of 5 is not
    assert lasting_difference([1.0], replicates=np.ones((6, 1))) == 0
    assert lasting_difference([1.0], replicates=np.ones((5, 1))) is None
    assert lasting_difference([0.0], replicates=np.zeros((9, 1))) is None


def test_no_errors_both_kinds_and_too_few_replicates_are_refused():
    with pytest.raises(ValueError, match="either stderr or replicates"):
        lasting_difference([1.0])
    with pytest.raises(ValueError, match="either stderr or replicates"):
        lasting_difference([1.0], stderr=[1.0], replicates=np.ones((3, 1)))
    with pytest.raises(ValueError, match="expected 2 replicates or more"):
        lasting_difference([1.0], replicates=[[1.0], [np.nan]])
