"""Emergence times against closed forms, brute force and simulated curves with known times."""

import itertools
import math

import numpy as np
import pytest
from scipy import stats

from benchmarks.drawn_emergence import covered, drawn, flat_noise
from lit_layers.functional import emergence_times
from lit_layers.functional.emergence import drawn_curves
from lit_layers.functional.emergence.curve_times import _robust_noise, bootstrap_counts, coupled_draws
from lit_layers.functional.emergence.drawn_curves import SHAPES, Pairs, Steps, draw_curves, likeliest, mean_curves

STEPS = np.array([0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1000, 2000, 4000, 8000, 16000, 32000, 64000, 143000])
AXIS = np.log2(1 + STEPS)


def sigmoid(middle: float, width: float) -> np.ndarray:
    return 1 / (1 + np.exp(-(AXIS - middle) / width))


def test_a_curve_with_small_errors_has_the_times_of_its_formula():
    middle, width, error = 9.0, 0.7, 0.002
    noise = np.random.default_rng(0).normal(0, error, len(AXIS))
    times = emergence_times(STEPS, 3 + 2 * sigmoid(middle, width) + noise, stderr=np.full(len(AXIS), error))
    assert times.emerges
    positions = [middle + width * math.log(share / (1 - share)) for share in (0.1, 0.5, 0.9)]
    for time, x in zip((times.onset, times.halfway, times.plateau), positions, strict=True):
        assert time.low <= time.value <= time.high
        assert np.log2(1 + time.low) - 0.05 < x < np.log2(1 + time.high) + 0.05
        assert np.log2(1 + time.high) - np.log2(1 + time.low) < 1  # one checkpoint per octave
    assert times.peak.high == pytest.approx(143000)
    assert (times.num_checkpoints, times.num_gaps) == (19, 0)


def test_a_step_between_two_checkpoints_is_equally_likely_anywhere_between_them():
    times = emergence_times(STEPS, (STEPS >= 100) * 1.0, stderr=np.full(len(STEPS), 0.01))
    # The step is uniform on this axis, so the ends are quantiles of the uniform distribution.
    ends = np.log2(65) + np.array([0.5, 0.025, 0.975]) * (np.log2(129) - np.log2(65))
    for time in (times.onset, times.halfway, times.plateau):
        assert np.log2(1 + np.array(time)) == pytest.approx(ends, abs=0.08)  # sampling error of the draws


def test_the_peak_of_a_bump_is_found():
    bump = np.exp(-((AXIS - 10) ** 2) / 4)
    times = emergence_times(STEPS, bump, stderr=np.full(len(STEPS), 0.01))
    assert abs(np.log2(1 + times.peak.value) - 10) < 0.4
    assert times.onset.value < times.halfway.value < times.peak.value < times.plateau.value


OTHER_ERRORS = [pytest.param(name, marks=pytest.mark.soak) for name in ("replicates", "neither")]


def errors_of(errors: str, rows: np.ndarray, scale: float, error: float) -> dict:
    """Return the error options for values that are `scale` times the means of the rows."""
    if errors == "neither":
        return {}
    return {"stderr": np.full(len(AXIS), abs(scale) * error)} if errors == "stderr" else {"replicates": scale * rows}


@pytest.mark.parametrize("errors", ["stderr", *OTHER_ERRORS])
def test_times_do_not_change_under_affine_maps(errors):
    rng = np.random.default_rng(3)
    rows = sigmoid(8, 1) + rng.normal(0, 0.1, (30, len(AXIS))) + rng.normal(size=(30, 1))
    values = rows.mean(0)
    expected = emergence_times(STEPS, values, **errors_of(errors, rows, 1, 0.02))
    turned = emergence_times(STEPS, 5 - 0.01 * values, **errors_of(errors, rows + 5, -0.01, 0.02))
    assert expected.emerges
    for name in ("onset", "halfway", "peak", "plateau"):
        # The draws differ: quantiles of 1,000 vary by hundredths of an octave, and by more in wide intervals.
        after, before = (np.log2(1 + np.array(getattr(times, name))) for times in (turned, expected))
        assert after == pytest.approx(before, abs=max(0.3, 0.15 * np.ptp(before))), name
    assert emergence_times(STEPS, values, **errors_of(errors, rows, 1, 0.02)) == expected  # the same draws


def test_nan_values_are_left_out_and_counted():
    values, stderr = sigmoid(8, 1), np.full(len(AXIS), 0.02)
    present = np.delete(np.arange(len(AXIS)), [3, 7])
    values[[3, 7]], stderr[7] = np.nan, np.nan
    with_gaps = emergence_times(STEPS, values, stderr=stderr)
    without = emergence_times(STEPS[present], values[present], stderr=stderr[present])
    assert (with_gaps.num_checkpoints, with_gaps.num_gaps) == (17, 2)
    assert (with_gaps.halfway, with_gaps.p_value) == (without.halfway, without.p_value)


def test_a_rise_in_white_noise_emerges_without_given_errors():
    """AR(1) noise of 0.9 or one outlier does not explain this rise."""
    noise = np.random.default_rng(0).normal(0, 0.02, len(AXIS))
    assert emergence_times(STEPS, sigmoid(8, 1) + noise).emerges
    assert emergence_times(STEPS, (AXIS > 8) + noise).emerges


def test_a_line_that_rises_to_the_last_checkpoint_has_no_plateau_yet():
    steps = np.array([0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024])
    values = np.log2(1 + steps) / 10 + np.random.default_rng(0).normal(0, 0.01, 12)
    times = emergence_times(steps, values, stderr=[0.01] * 12)
    assert (times.emerges, times.before, times.not_yet) == (True, False, True)
    assert (times.plateau.value, times.plateau.high, times.peak.value) == (np.inf,) * 3
    # Half of the observed change is reached at log2(1 + step) = 5, half of the whole change later.
    assert (times.halfway.value, times.halfway.high) == (pytest.approx(31, abs=4), np.inf)
    late = emergence_times(steps[5:], values[5:], stderr=[0.01] * 7)
    assert (late.before, late.not_yet, late.onset.low, late.halfway.low) == (True, True, 0, 0)


@pytest.mark.parametrize(("middle", "flags"), [(17.5, (False, True)), (8, (False, False)), (2, (True, False))])
def test_the_middle_of_a_partly_observed_sigmoid_is_in_its_interval(middle, flags):
    steps, axis = STEPS[3:], AXIS[3:]
    values = 1 / (1 + np.exp(-(axis - middle)))
    error = 0.01 * np.ptp(values)
    values += np.random.default_rng(1).normal(0, error, len(axis))
    times = emergence_times(steps, values, stderr=np.full(len(axis), error))
    assert (times.before, times.not_yet) == flags
    assert times.halfway.low <= 2**middle - 1 <= times.halfway.high
    assert np.isfinite(times.plateau.value) != times.not_yet


def test_a_curve_that_dips_and_returns_changes_but_does_not_emerge():
    times = emergence_times(STEPS, -np.exp(-((AXIS - 9) ** 2) / 4), stderr=np.full(len(AXIS), 0.02))
    assert (times.emerges, times.changes) == (False, True)
    assert np.log2(1 + times.peak.value) == pytest.approx(9, abs=0.4)
    half = emergence_times(STEPS, sigmoid(5, 0.7) - 0.4 * sigmoid(12, 0.7), stderr=np.full(len(AXIS), 0.02))
    assert half.emerges  # more than half of the rise remains


@pytest.mark.parametrize("errors", ["stderr", *OTHER_ERRORS])
def test_scaling_by_a_power_of_two_changes_no_time_and_does_not_overflow(errors):
    rng = np.random.default_rng(3)
    rows = sigmoid(8, 1) + rng.normal(0, 0.1, (5, len(AXIS)))
    expected = emergence_times(STEPS, rows.mean(0), **errors_of(errors, rows, 1, 0.05))
    for unit in (2.0**exponent for exponent in ((1020,) if errors == "stderr" else (-1000, -400, 300, 1020))):
        assert emergence_times(STEPS, rows.mean(0) * unit, **errors_of(errors, rows, unit, 0.05)) == expected


def test_very_large_and_very_unequal_errors_are_accepted():
    values = sigmoid(8, 1)
    assert not emergence_times(STEPS, values, stderr=np.full(len(AXIS), 1e300)).emerges
    times = emergence_times(STEPS, values, stderr=[1e-9, 1e9, *[0.1] * (len(AXIS) - 2)])
    assert np.isfinite([times.onset, times.halfway, times.peak, times.plateau]).all()


def test_a_standard_error_of_0_counts_as_the_smallest_positive_one():
    """An accuracy of 0 or 1 has standard error 0. If it counted as exact, any curve with one of them would emerge."""
    rng, few = np.random.default_rng(1), 0
    for number in range(30):
        rates = rng.binomial(1250, 0.001, 12) / 1250
        stderr = np.sqrt(rates * (1 - rates) / 1250)
        found = emergence_times(range(12), rates, stderr=stderr)
        few += found.emerges
        if number < 8:
            floor = np.where(stderr == 0, stderr[stderr > 0].min(), stderr)
            assert found == emergence_times(range(12), rates, stderr=floor)
    assert few <= 5  # probability of more than 5 of 30 at 5%: 1 in 300
    assert emergence_times(range(8), [0, 0, 0, 0, 0, 0, 0.3, 0.5], stderr=[0] * 8).p_value == 0


def test_few_seeds_of_coarse_accuracies_emerge_no_more_often_than_the_level():
    """Two seeds may agree in a contrast by chance, so a spread of 0 is no certainty."""
    rng, false = np.random.default_rng(0), 0
    for _ in range(100):
        rows = rng.binomial(10, 0.5, (2, 6)) / 10
        false += emergence_times(range(6), rows.mean(0), replicates=rows).emerges
    assert false <= 12  # probability of more than 12 of 100 at 5%: 1 in 500
    step = np.tile([0.0, 0, 0, 1, 1, 1], (2, 1))
    assert emergence_times(range(6), step[0], replicates=step).p_value == 0


def test_the_p_value_over_replicates_is_the_smallest_of_t_tests_times_their_number():
    rng = np.random.default_rng(2)
    rows = rng.normal(size=(5, 7)) + np.arange(7) * 0.2 + 10 * rng.normal(size=(5, 1))
    splits = [np.arange(7) >= cut for cut in range(1, 7)] + [np.arange(7) == column for column in range(7)]
    least = min(stats.ttest_1samp(rows[:, split].mean(1) - rows[:, ~split].mean(1), 0).pvalue for split in splits)
    found = emergence_times(np.arange(7), rows.mean(0), replicates=rows).p_value
    assert found == pytest.approx(min(1, 13 * least), rel=1e-9)


def covariance_of(kernel, x, other):
    """Compute the Matern covariance (Rasmussen & Williams 2006, equation 4.17)."""
    r = np.abs(x[:, None] - other) / kernel.length
    rough, smooth = (1 + 3**0.5 * r) * np.exp(-(3**0.5) * r), (1 + 5**0.5 * r + 5 / 3 * r**2) * np.exp(-(5**0.5) * r)
    return kernel.height**2 * (rough if kernel.rough else smooth) + kernel.level**2


@pytest.mark.parametrize("batch", [1, 2**17])
def test_the_evidence_of_each_process_and_pair_is_the_joint_normal_density(batch, monkeypatch):
    """Compare all processes, singly and in batches, with no, one or two steps, and some steps paired with any other."""
    monkeypatch.setattr(drawn_curves, "BATCH", batch)
    rng = np.random.default_rng(0)
    x, y, noises = np.sort(rng.uniform(0, 10, 7)), rng.normal(size=7), [np.diag(rng.uniform(0.1, 1, 7))] * 2
    noises[1] = 0.5 * noises[0] + 0.2
    processes, steps = drawn_curves._processes(x, y, noises), Steps.from_axis(x)
    shapes, last = steps.values(x), len(steps.shape) - 1
    assert sum(kernel.rough for kernel in processes.kernels) == len(processes.kernels) / 2 == 5 * 4 * 2
    pairs = Pairs(steps, np.array([[0, 0, 0, 1, 60, last // 2, 60, 60], [0, 60, last, 60, 1, last, 61, 0]]))
    first_pairs = Pairs(steps, pairs.index[:, :3])
    evidence = processes.evidence(x, y, pairs)
    assert processes.evidence(x, y, first_pairs) == pytest.approx(evidence[:, :3], rel=1e-12)
    most = processes.most_evidence(x, y, steps, np.array([1, 60, last // 2]))
    scale, densities = np.ptp(y), []
    for number, kernel in enumerate(processes.kernels):
        covariance = covariance_of(kernel, x, x) + noises[number // 40]
        densities.append([])
        for column, (one, other) in enumerate(pairs.index.T):
            design = shapes[:, [one, other]]
            joint = stats.multivariate_normal(cov=covariance + scale**2 * design @ design.T)
            two = 2 if one and other else 1  # two different steps come in two orders
            prior = steps.log_prior[one] + steps.log_prior[other] + np.log(two)
            densities[-1].append(joint.logpdf(y) + 7 / 2 * np.log(2 * np.pi))
            assert evidence[number, column] == pytest.approx(densities[-1][-1] + prior)
    best = np.max(densities, 0)
    assert [most[0, 60], most[1, 1], most[2, last], most[1, 61]] == pytest.approx(best[3:7])


def test_means_over_processes_and_steps_equal_written_out_gaussian_regression(monkeypatch):
    """Use few processes and steps, weighted by their densities."""
    few = {"RARE": 0, "MOST_PAIRS": 10000, "SPLITS": 1, "MAX_DOUBLES": 12, "TRIED": 8, "BATCH": 1000}
    few |= {"LOCATIONS": 4, "WIDTHS": drawn_curves.WIDTHS[::3]}
    for name, number in few.items():
        monkeypatch.setattr(drawn_curves, name, number)
    rng = np.random.default_rng(0)
    x, noise, grid = np.arange(6.0), np.diag(rng.uniform(0.05, 0.2, 6) ** 2), np.linspace(0, 5, 11)
    sets = (x > 2) * 1.0 + rng.normal(0, 0.1, (3, 6))
    values = sets - sets.mean(1, keepdims=True)
    processes, pairs, _ = drawn_curves._candidates(x, values.mean(0), [noise], 0)
    design, grid_design, scale = pairs.steps.values(x), pairs.steps.values(grid), np.ptp(values.mean(0))
    densities, means, two = [], [], (pairs.steps.shape[pairs.index] > 0).all(0)
    assert 0 < two.sum() < len(two)
    for kernel, (number, step_indices) in itertools.product(processes.kernels, enumerate(pairs.index.T)):
        joint = covariance_of(kernel, x, x) + noise + scale**2 * design[:, step_indices] @ design[:, step_indices].T
        across = covariance_of(kernel, grid, x) + scale**2 * grid_design[:, step_indices] @ design[:, step_indices].T
        prior = pairs.steps.log_prior[step_indices].sum() + np.log(2) * two[number]
        densities.append(stats.multivariate_normal(cov=joint).logpdf(values) + prior)
        means.append(across @ np.linalg.solve(joint, values.T))
    power = np.exp(0.9 * (np.array(densities) - np.max(densities, 0)))  # (processes x pairs, sets)
    fewer = power * ~np.tile(two, len(processes.kernels))[:, None]
    weight = (power / power.sum(0) + fewer / fewer.sum(0)) / 2
    expected = np.einsum("ks,kgs->sg", weight, np.array(means)) + sets.mean(1, keepdims=True)
    assert mean_curves(x, sets, noise, grid) == pytest.approx(expected, abs=1e-8)


def test_curves_drawn_with_two_steps_follow_written_out_gaussian_regression(monkeypatch):
    """Check mean and covariance of draws from one process and one pair of steps to 5 standard errors."""
    rng = np.random.default_rng(0)
    x, noise, grid = np.arange(6.0), np.diag(rng.uniform(0.05, 0.2, 6) ** 2), np.linspace(0, 5, 9)
    y = (x > 2) - 0.5 * (x > 3) + rng.normal(0, 0.1, 6)
    processes, pairs, evidence = drawn_curves._candidates(x, y - y.mean(), [noise], 1)
    process, pair = 70, np.flatnonzero(pairs.are_two)[3]
    certain = np.full(evidence.shape, -np.inf)
    certain[process, pair] = 0
    monkeypatch.setattr(drawn_curves, "_candidates", lambda *_: (processes, pairs, certain))
    monkeypatch.setattr(drawn_curves, "_weights", lambda evidence, _: np.exp(evidence))
    draws = draw_curves(x, y, [noise], grid, 20000, np.random.default_rng(1))
    kernel, step_indices, height = processes.kernels[process], pairs.index[:, pair], np.ptp(y)
    design, grid_design = pairs.steps.values(x)[:, step_indices], pairs.steps.values(grid)[:, step_indices]
    joint = covariance_of(kernel, x, x) + noise + height**2 * design @ design.T
    across = covariance_of(kernel, grid, x) + height**2 * grid_design @ design.T
    mean = across @ np.linalg.solve(joint, y - y.mean()) + y.mean()
    covariance = covariance_of(kernel, grid, grid) + height**2 * grid_design @ grid_design.T
    covariance -= across @ np.linalg.solve(joint, across.T)
    variance = np.diag(covariance)
    assert (np.abs(draws.mean(0) - mean) < 5 * (variance / 20000) ** 0.5).all()
    error = ((covariance**2 + np.outer(variance, variance)) / 20000) ** 0.5
    assert (np.abs(np.cov(draws.T) - covariance) < 5 * error).all()


def test_curves_are_drawn_through_many_values_without_errors():
    """133 values have nearly singular covariances."""
    x = np.log2(1 + np.concatenate([[0], np.unique(np.round(np.geomspace(1, 143000, 153)))]))
    grid = np.concatenate([*(np.linspace(a, b, 2, endpoint=False) for a, b in itertools.pairwise(x)), x[-1:]])
    for width in (0.3, 1.0):
        y = 1 / (1 + np.exp(-(x - 9) / width))
        curves = draw_curves(x, y, [np.zeros((len(x), len(x)))], grid, 1000, np.random.default_rng(3))
        assert np.abs(curves[:, ::2] - y).max() < 0.02


def test_evidence_that_differs_by_rounding_is_ordered_by_index():
    """The best come last, and among equals the last indices are chosen."""
    evidence = np.array([3.0, 1, 2, 3, 2, 3, -np.inf, 2])
    for seed in range(5):
        rounded = evidence + np.random.default_rng(seed).uniform(-1e-9, 1e-9, 8)
        assert likeliest(rounded, 5).tolist() == [4, 7, 0, 3, 5]
        assert likeliest(rounded, 20).tolist() == [6, 1, 2, 4, 7, 0, 3, 5]


def test_two_steps_are_found_although_each_alone_is_unlikely():
    """The curve rises and falls by the same amount, so a single step explains little."""
    x = np.linspace(0, 17, 40)
    y = 1 / (1 + np.exp(-(x - 5) / 0.2)) - 1 / (1 + np.exp(-(x - 12) / 0.2))
    noise = np.eye(40) * 0.02**2
    values = y + np.random.default_rng(0).normal(0, 0.02, 40)
    _, pairs, evidence = drawn_curves._candidates(x, values - values.mean(), [noise], 2)
    best = pairs.index[:, evidence.max(0).argmax()]
    assert np.sort(pairs.steps.loc[best]) == pytest.approx([5, 12], abs=17 / 39)  # one distance between points
    # No pair occurs twice, in either order.
    steps = np.stack([pairs.steps.shape, pairs.steps.loc, pairs.steps.width])[:, pairs.index]
    each = {tuple(sorted(map(tuple, pair))) for pair in steps.transpose(2, 1, 0)}
    assert len(each) == evidence.shape[1]


def test_half_of_the_draws_follow_the_evidence_of_at_most_one_step():
    """One process is e times as likely with two steps, the other e times with one."""
    steps = Steps.from_axis(np.arange(7.0))
    pairs = Pairs(steps, np.array([[0, 0, 1], [0, 1, 2]]))  # none, one and two steps
    unit = 1 / drawn_curves.TEMPER
    evidence = np.array([[0, 0, unit], [0, unit, 0]]) + 1000  # as far from 0 as real evidence
    weight = drawn_curves._weights(evidence.copy(), pairs)
    e = np.e
    any_steps, one_step = np.array([[1, 1, e], [1, e, 1]]) / (4 + 2 * e), np.array([[1, 1, 0], [1, e, 0]]) / (3 + e)
    assert weight == pytest.approx((any_steps + one_step) / 2, rel=1e-9)  # differences of numbers near 1,000
    # Pairs of only two steps are not pooled.
    two = Pairs(steps, np.array([[1, 1], [2, 3]]))
    assert drawn_curves._weights(evidence[:, 1:], two) == pytest.approx(np.array([[1, e], [e, 1]]) / (2 + 2 * e))


def test_steps_cover_the_axis_and_keep_their_probability_when_split():
    """A step covers more than one gap with 150 checkpoints. Only the likeliest steps of each shape are split."""
    rng = np.random.default_rng(0)
    for x in (np.sort(rng.uniform(0, 10, 7)), np.arange(150.0)):
        steps = Steps.from_axis(x)
        pairs = Pairs(steps, np.stack([np.zeros(len(steps.loc), dtype=int), np.arange(len(steps.loc))]))
        chosen = np.isin(pairs.index[1], pairs.likeliest(evidence := rng.normal(size=len(steps.loc))))
        for number in (1, 2, 3):
            mine = steps.shape == number
            assert np.exp(steps.log_prior[mine]).sum() == pytest.approx(1 / 3)
            assert evidence[mine & chosen].min() > evidence[mine & ~chosen].max()
        assert (steps.shape[0], steps.log_prior[0], chosen[0]) == (0, 0, False)
        splits = steps.select(chosen).split()
        assert len(splits.loc) == 9 * 36
        assert np.exp(splits.log_prior).sum() == pytest.approx(np.exp(steps.log_prior[chosen]).sum())
        # Their cells fill those of the split steps, in position and in the logarithm of the width.
        for low, high in ((splits.loc - splits.cell / 2, splits.loc + splits.cell / 2),):
            assert low.min() == pytest.approx((steps.loc - steps.cell / 2)[chosen].min())
            assert high.max() == pytest.approx((steps.loc + steps.cell / 2)[chosen].max())
        assert splits.cell @ splits.ratio == pytest.approx(steps.cell[chosen] @ steps.ratio[chosen])


def test_steps_of_all_shapes_rise_from_a_tenth_to_nine_tenths_over_the_same_width():
    u = np.linspace(-20, 20, 40001)
    for shape in SHAPES[1:]:
        f = shape(u)
        assert f[0] < 1e-4 and f[-1] > 1 - 1e-4 and (np.diff(f) >= 0).all()  # noqa: PT018
        assert u[f > 0.9][0] - u[f > 0.1][0] == pytest.approx(2 * math.log(9), abs=2e-3)


@pytest.mark.parametrize(("everything", "share_of_spread"), [(True, 0.0), (False, 0.25)])
def test_mean_curves_are_the_means_of_drawn_curves(everything, share_of_spread, monkeypatch):
    """They are only near if unlikely processes and steps are left out and steps are split once less."""
    rng = np.random.default_rng(0)
    x, noise = np.linspace(0, 8, 9), np.diag(rng.uniform(0.03, 0.06, 9) ** 2)
    grid = np.linspace(0, 8, 33)
    sets = 1 / (1 + np.exp(-3 * (x - 4))) + rng.normal(0, 0.03, (3, 9))
    if everything:
        for name, number in {"RARE": 0, "MOST_PAIRS": 10000, "SPLITS": 2}.items():
            monkeypatch.setattr(drawn_curves, name, number)
    # One set at a time, because steps are split where the mean of all sets makes them likely.
    found = np.concatenate([mean_curves(x, values[None], noise, grid) for values in sets])
    if everything:
        monkeypatch.setattr(drawn_curves, "SPLITS", 1)
    for values, mean in zip(sets, found, strict=True):
        draws = draw_curves(x, values, [noise], grid, 4000, np.random.default_rng(1))
        near = (5 / 4000**0.5 + share_of_spread) * draws.std(0) + 2e-3
        assert (np.abs(draws.mean(0) - mean) < near).all()


def test_coupled_draws_keep_their_distribution_and_correlate_by_their_common_resamples():
    rng, draws = np.random.default_rng(0), 1000
    common = rng.normal(size=draws)
    for moved in (0.0, 0.5, 1.0, 3.0):
        first, second = (
            coupled_draws(rng.normal(size=draws), moved * common + 1e-9 * rng.normal(size=draws), rng) for _ in range(2)
        )
        assert np.sort(first) == pytest.approx(np.sort(coupled_draws(first, common, rng)))
        # The correlation of two normal numbers is the share of variance that they have in common.
        assert np.corrcoef(first, second)[0, 1] == pytest.approx(min(1, moved**2), abs=0.12)
    never_moves = coupled_draws(np.full(9, 2.0), np.arange(9.0), rng)
    assert (never_moves == 2.0).all()


def test_without_errors_the_noise_comes_from_second_differences_without_outliers():
    noise = np.random.default_rng(0).normal(0, 0.3, 4000)
    noise[::40] += 50
    assert _robust_noise(noise)[5, 5] == pytest.approx(0.09, rel=0.25)


def test_bootstrap_counts_are_those_of_sampling_with_replacement():
    counts = bootstrap_counts(30, seed=1)
    assert counts.shape == (1000, 30)
    assert (counts.sum(1) == 30).all()
    assert counts.var() == pytest.approx(1 - 1 / 30, rel=0.05)
    assert (counts == bootstrap_counts(30, seed=1)).all()


@pytest.mark.soak
def test_prompts_with_missing_values_do_not_change_the_draws_of_the_others():
    steps, rows = STEPS[1::3], sigmoid(9.0, 0.7)[1::3]
    rows = rows + np.random.default_rng(3).normal(0, 0.5, (40, len(steps)))
    counts = bootstrap_counts(40)
    whole = emergence_times(steps, rows[5:].mean(0), replicates=rows[5:], counts=counts[:, 5:])
    rows[:5, 3] = np.nan
    found = emergence_times(steps, rows[5:].mean(0), replicates=rows, counts=counts)
    assert found == whole
    assert len(whole.halfway_draws) == 1000
    np.testing.assert_allclose(found.halfway_draws, whole.halfway_draws)  # `==` ignores these draws


def test_values_without_an_error_are_accepted_among_others():
    steps = [0, *(2**power for power in range(12)), *range(2560, 6000, 512)]
    values = np.where(np.arange(len(steps)) < 9, 1.0, 0.5)
    noisy = np.where(np.arange(len(steps)) < 9, 0.0, 0.01)
    times = emergence_times(steps, values + noisy * np.random.default_rng(0).standard_normal(len(steps)), stderr=noisy)
    assert times.halfway is not None
    assert steps[8] <= times.halfway.low <= times.halfway.high <= steps[9]


@pytest.mark.soak
@pytest.mark.parametrize("noise", ["normal", "t3", "0.3", "0.7", "0.9"])
def test_flat_curves_do_not_emerge_more_often_than_the_level(noise):
    for checkpoints in (8, 29):
        for errors in ({}, {"stderr": np.ones(checkpoints)}):
            curves = flat_noise(40, checkpoints, noise, np.random.default_rng(0))
            false = sum(emergence_times(range(checkpoints), each, **errors).changes for each in curves)
            assert false <= 7, errors  # probability of more than 7 of 40 at 5%: 1 in 1,000
    assert emergence_times(STEPS, np.ones(19)).p_value == 1


@pytest.mark.soak
def test_intervals_cover_the_truth_as_often_as_claimed():
    inside, count = np.zeros(4), 250
    for given, options, truth in drawn(count, np.random.default_rng(11), "stderr"):
        inside += covered(emergence_times(*given, **options), truth)
    # All times of a curve may miss together, so allow 4 binomial standard errors below the claim.
    assert inside.min() >= count * (0.93 - 4 * (0.05 * 0.95 / count) ** 0.5)
    assert (inside / count).mean() < 0.995, "intervals that always hold say nothing"


def test_invalid_input_is_refused_in_one_sentence():
    flat, stderr = np.arange(8.0), np.ones(8)
    for sentence, steps, values, options in (
        ("at no more than 1,000 checkpoints (some of them, or means of", range(1001), range(1001), {}),
        ("at 6 checkpoints or more, got 5", np.arange(8), [1, 2, 3, 4, 5, *[np.nan] * 3], {}),
        ("steps of 0 or more that increase, got 1 after 1", [0, 1, 1, 2, 3, 4, 5, 6], flat, {}),
        ("steps of 0 or more that increase, got -1", range(-1, 7), flat, {}),
        ("steps of 0 or more that increase, got nan after 6", [*range(7), np.nan], flat, {}),
        ("steps of 0 or more that increase, got 1e-300 after 0", [0, 1e-300, *range(1, 7)], flat, {}),
        ("finite values, or NaN for a gap", np.arange(8), [*flat[:7], np.inf], {}),
        ("standard errors of 0 or more wherever there is a value, got -1", np.arange(8), flat, {"stderr": -stderr}),
        ("2 replicates or more", np.arange(8), flat, {"replicates": [flat, flat * np.nan]}),
        ("between 0 and 1, got 95", np.arange(8), flat, {"confidence": 95}),
    ):
        with pytest.raises(ValueError, match="expected") as raised:
            emergence_times(steps, values, **options)
        assert sentence in str(raised.value)
