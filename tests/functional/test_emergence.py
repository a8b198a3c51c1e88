"""Emergence times against closed forms, brute force, and truths that are known because they were drawn."""

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
    at = [middle + width * math.log(share / (1 - share)) for share in (0.1, 0.5, 0.9)]
    for time, x in zip((times.onset, times.halfway, times.plateau), at, strict=True):
        assert time.low <= time.value <= time.high
        assert np.log2(1 + time.low) - 0.05 < x < np.log2(1 + time.high) + 0.05
        assert np.log2(1 + time.high) - np.log2(1 + time.low) < 1  # a checkpoint an octave
    assert times.peak.high == pytest.approx(143000)
    assert (times.num_checkpoints, times.num_gaps) == (19, 0)


def test_a_step_between_two_checkpoints_lies_anywhere_between_them_and_nowhere_else():
    times = emergence_times(STEPS, (STEPS >= 100) * 1.0, stderr=np.full(len(STEPS), 0.01))
    # On this axis the step is as likely here as there: the ends are quantiles of the uniform distribution.
    ends = np.log2(65) + np.array([0.5, 0.025, 0.975]) * (np.log2(129) - np.log2(65))
    for time in (times.onset, times.halfway, times.plateau):
        assert np.log2(1 + np.array(time)) == pytest.approx(ends, abs=0.08)  # of draws


def test_a_bump_has_its_peak():
    bump = np.exp(-((AXIS - 10) ** 2) / 4)
    times = emergence_times(STEPS, bump, stderr=np.full(len(STEPS), 0.01))
    assert abs(np.log2(1 + times.peak.value) - 10) < 0.4
    assert times.onset.value < times.halfway.value < times.peak.value < times.plateau.value


OTHERS = [pytest.param(name, marks=pytest.mark.soak) for name in ("replicates", "neither")]


def errors_of(errors: str, rows: np.ndarray, scale: float, error: float) -> dict:
    """The errors that are given of values that are `scale` times as large as the means of the rows."""
    if errors == "neither":
        return {}
    return {"stderr": np.full(len(AXIS), abs(scale) * error)} if errors == "stderr" else {"replicates": scale * rows}


@pytest.mark.parametrize("errors", ["stderr", *OTHERS])
def test_times_stay_under_affine_maps_and_values_without_errors_beside_gaps(errors):
    rng = np.random.default_rng(3)
    rows = sigmoid(8, 1) + rng.normal(0, 0.1, (30, len(AXIS))) + rng.normal(size=(30, 1))
    values = rows.mean(0)
    expected = emergence_times(STEPS, values, **errors_of(errors, rows, 1, 0.02))
    turned = emergence_times(STEPS, 5 - 0.01 * values, **errors_of(errors, rows + 5, -0.01, 0.02))
    assert expected.emerges
    for name in ("onset", "halfway", "peak", "plateau"):
        # Other draws: quantiles of 1,000 move by some hundredths of an octave, more where the interval is a plateau.
        after, before = (np.log2(1 + np.array(getattr(times, name))) for times in (turned, expected))
        assert after == pytest.approx(before, abs=max(0.3, 0.15 * np.ptp(before))), name
    assert emergence_times(STEPS, values, **errors_of(errors, rows, 1, 0.02)) == expected  # the same draws


def test_gaps_are_left_out_and_counted():
    values, stderr = sigmoid(8, 1), np.full(len(AXIS), 0.02)
    there = np.delete(np.arange(len(AXIS)), [3, 7])
    values[[3, 7]], stderr[7] = np.nan, np.nan
    with_gaps = emergence_times(STEPS, values, stderr=stderr)
    without = emergence_times(STEPS[there], values[there], stderr=stderr[there])
    assert (with_gaps.num_checkpoints, with_gaps.num_gaps) == (17, 2)
    assert (with_gaps.halfway, with_gaps.p_value) == (without.halfway, without.p_value)


def test_a_rise_beside_white_noise_emerges_without_errors():
    """Neither AR(1) noise of .9 nor one value far off looks like that."""
    noise = np.random.default_rng(0).normal(0, 0.02, len(AXIS))
    assert emergence_times(STEPS, sigmoid(8, 1) + noise).emerges
    assert emergence_times(STEPS, (AXIS > 8) + noise).emerges


def test_a_line_that_rises_to_the_last_checkpoint_has_no_plateau_yet():
    steps = np.array([0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024])
    values = np.log2(1 + steps) / 10 + np.random.default_rng(0).normal(0, 0.01, 12)
    times = emergence_times(steps, values, stderr=[0.01] * 12)
    assert (times.emerges, times.before, times.not_yet) == (True, False, True)
    assert (times.plateau.value, times.plateau.high, times.peak.value) == (np.inf,) * 3
    # Half of what was seen is passed at log2(1 + step) = 5; half of the whole change comes later.
    assert (times.halfway.value, times.halfway.high) == (pytest.approx(31, abs=4), np.inf)
    late = emergence_times(steps[5:], values[5:], stderr=[0.01] * 7)
    assert (late.before, late.not_yet, late.onset.low, late.halfway.low) == (True, True, 0, 0)


@pytest.mark.parametrize(("middle", "flags"), [(17.5, (False, True)), (8, (False, False)), (2, (True, False))])
def test_the_middle_of_a_sigmoid_that_is_seen_in_part_is_in_its_interval(middle, flags):
    steps, axis = STEPS[3:], AXIS[3:]
    values = 1 / (1 + np.exp(-(axis - middle)))
    error = 0.01 * np.ptp(values)
    values += np.random.default_rng(1).normal(0, error, len(axis))
    times = emergence_times(steps, values, stderr=np.full(len(axis), error))
    assert (times.before, times.not_yet) == flags
    assert times.halfway.low <= 2**middle - 1 <= times.halfway.high
    assert np.isfinite(times.plateau.value) != times.not_yet


def test_a_curve_that_dips_and_returns_changes_and_does_not_emerge():
    times = emergence_times(STEPS, -np.exp(-((AXIS - 9) ** 2) / 4), stderr=np.full(len(AXIS), 0.02))
    assert (times.emerges, times.changes) == (False, True)
    assert np.log2(1 + times.peak.value) == pytest.approx(9, abs=0.4)
    half = emergence_times(STEPS, sigmoid(5, 0.7) - 0.4 * sigmoid(12, 0.7), stderr=np.full(len(AXIS), 0.02))
    assert half.emerges  # it keeps more than half


@pytest.mark.parametrize("errors", ["stderr", *OTHERS])
def test_no_power_of_two_of_the_values_moves_a_time_or_overflows(errors):
    rng = np.random.default_rng(3)
    rows = sigmoid(8, 1) + rng.normal(0, 0.1, (5, len(AXIS)))
    expected = emergence_times(STEPS, rows.mean(0), **errors_of(errors, rows, 1, 0.05))
    for unit in (2.0**exponent for exponent in ((1020,) if errors == "stderr" else (-1000, -400, 300, 1020))):
        assert emergence_times(STEPS, rows.mean(0) * unit, **errors_of(errors, rows, unit, 0.05)) == expected


def test_errors_far_from_the_values_and_from_one_another_are_taken():
    values = sigmoid(8, 1)
    assert not emergence_times(STEPS, values, stderr=np.full(len(AXIS), 1e300)).emerges
    times = emergence_times(STEPS, values, stderr=[1e-9, 1e9, *[0.1] * (len(AXIS) - 2)])
    assert np.isfinite([times.onset, times.halfway, times.peak, times.plateau]).all()


def test_a_standard_error_of_0_beside_others_counts_as_the_smallest_of_them():
    """An accuracy of 0 or 1 has one. Taken for exact, any curve with such a value among others would emerge."""
    rng, few = np.random.default_rng(1), 0
    for number in range(30):
        rates = rng.binomial(1250, 0.001, 12) / 1250
        stderr = np.sqrt(rates * (1 - rates) / 1250)
        found = emergence_times(range(12), rates, stderr=stderr)
        few += found.emerges
        if number < 8:
            floor = np.where(stderr == 0, stderr[stderr > 0].min(), stderr)
            assert found == emergence_times(range(12), rates, stderr=floor)
    assert few <= 5  # more than 5 of 30 at 5%: 1 in 300
    assert emergence_times(range(8), [0, 0, 0, 0, 0, 0, 0.3, 0.5], stderr=[0] * 8).p_value == 0


def test_few_seeds_of_coarse_accuracies_emerge_no_more_often_than_the_level_says():
    """Two that happen to agree in a contrast have no spread there, which is not certainty."""
    rng, false = np.random.default_rng(0), 0
    for _ in range(100):
        rows = rng.binomial(10, 0.5, (2, 6)) / 10
        false += emergence_times(range(6), rows.mean(0), replicates=rows).emerges
    assert false <= 12  # more than 12 of 100 at 5%: 1 in 500
    step = np.tile([0.0, 0, 0, 1, 1, 1], (2, 1))
    assert emergence_times(range(6), step[0], replicates=step).p_value == 0


def test_the_p_value_over_replicates_is_that_of_students_tests():
    rng = np.random.default_rng(2)
    rows = rng.normal(size=(5, 7)) + np.arange(7) * 0.2 + 10 * rng.normal(size=(5, 1))
    parts = [np.arange(7) >= cut for cut in range(1, 7)] + [np.arange(7) == place for place in range(7)]
    least = min(stats.ttest_1samp(rows[:, part].mean(1) - rows[:, ~part].mean(1), 0).pvalue for part in parts)
    found = emergence_times(np.arange(7), rows.mean(0), replicates=rows).p_value
    assert found == pytest.approx(min(1, 13 * least), rel=1e-9)


def covariance_of(kernel, x, other):
    """Matern's formulas, Rasmussen & Williams 2006, equation 4.17."""
    r = np.abs(x[:, None] - other) / kernel.length
    rough, smooth = (1 + 3**0.5 * r) * np.exp(-(3**0.5) * r), (1 + 5**0.5 * r + 5 / 3 * r**2) * np.exp(-(5**0.5) * r)
    return kernel.height**2 * (rough if kernel.rough else smooth) + kernel.level**2


@pytest.mark.parametrize("batch", [1, 2**17])
def test_evidence_of_each_process_with_each_pair_is_the_density_of_the_joint_normal_distribution(batch, monkeypatch):
    """Of all processes, one or several at a time, with no step, one and two, and with some steps beside any."""
    monkeypatch.setattr(drawn_curves, "BATCH", batch)
    rng = np.random.default_rng(0)
    x, y, noises = np.sort(rng.uniform(0, 10, 7)), rng.normal(size=7), [np.diag(rng.uniform(0.1, 1, 7))] * 2
    noises[1] = 0.5 * noises[0] + 0.2
    processes, steps = drawn_curves._processes(x, y, noises), Steps.from_axis(x)
    shapes, last = steps.values(x), len(steps.shape) - 1
    assert sum(kernel.rough for kernel in processes.kernels) == len(processes.kernels) / 2 == 5 * 4 * 2
    pairs = Pairs(steps, np.array([[0, 0, 0, 1, 60, last // 2, 60, 60], [0, 60, last, 60, 1, last, 61, 0]]))
    alone = Pairs(steps, pairs.index[:, :3])
    evidence = processes.evidence(x, y, pairs)
    assert processes.evidence(x, y, alone) == pytest.approx(evidence[:, :3], rel=1e-12)
    with_any = processes.most_evidence(x, y, steps, np.array([1, 60, last // 2]))
    scale, of_pairs = np.ptp(y), []
    for number, kernel in enumerate(processes.kernels):
        covariance = covariance_of(kernel, x, x) + noises[number // 40]
        of_pairs.append([])
        for place, (one, other) in enumerate(pairs.index.T):
            design = shapes[:, [one, other]]
            joint = stats.multivariate_normal(cov=covariance + scale**2 * design @ design.T)
            two = 2 if one and other else 1  # of two steps either may be the first
            prior = steps.log_prior[one] + steps.log_prior[other] + np.log(two)
            of_pairs[-1].append(joint.logpdf(y) + 7 / 2 * np.log(2 * np.pi))
            assert evidence[number, place] == pytest.approx(of_pairs[-1][-1] + prior)
    best = np.max(of_pairs, 0)
    assert [with_any[0, 60], with_any[1, 1], with_any[2, last], with_any[1, 61]] == pytest.approx(best[3:7])


def test_means_over_processes_and_steps_are_those_of_gaussian_regression_written_out(monkeypatch):
    """Few processes and steps, each with weights by its density."""
    few = {"RARE": 0, "MOST_PAIRS": 10000, "SPLITS": 1, "MAX_DOUBLES": 12, "TRIED": 8, "BATCH": 1000}
    few |= {"LOCATIONS": 4, "WIDTHS": drawn_curves.WIDTHS[::3]}
    for name, number in few.items():
        monkeypatch.setattr(drawn_curves, name, number)
    rng = np.random.default_rng(0)
    x, noise, grid = np.arange(6.0), np.diag(rng.uniform(0.05, 0.2, 6) ** 2), np.linspace(0, 5, 11)
    sets = (x > 2) * 1.0 + rng.normal(0, 0.1, (3, 6))
    values = sets - sets.mean(1, keepdims=True)
    processes, pairs, _ = drawn_curves._candidates(x, values.mean(0), [noise], 0)
    design, on_grid, scale = pairs.steps.values(x), pairs.steps.values(grid), np.ptp(values.mean(0))
    densities, means, two = [], [], (pairs.steps.shape[pairs.index] > 0).all(0)
    assert 0 < two.sum() < len(two)
    for kernel, (number, places) in itertools.product(processes.kernels, enumerate(pairs.index.T)):
        joint = covariance_of(kernel, x, x) + noise + scale**2 * design[:, places] @ design[:, places].T
        across = covariance_of(kernel, grid, x) + scale**2 * on_grid[:, places] @ design[:, places].T
        prior = pairs.steps.log_prior[places].sum() + np.log(2) * two[number]
        densities.append(stats.multivariate_normal(cov=joint).logpdf(values) + prior)
        means.append(across @ np.linalg.solve(joint, values.T))
    power = np.exp(0.9 * (np.array(densities) - np.max(densities, 0)))  # (processes x pairs, sets)
    fewer = power * ~np.tile(two, len(processes.kernels))[:, None]
    weight = (power / power.sum(0) + fewer / fewer.sum(0)) / 2
    expected = np.einsum("ks,kgs->sg", weight, np.array(means)) + sets.mean(1, keepdims=True)
    assert mean_curves(x, sets, noise, grid) == pytest.approx(expected, abs=1e-8)


def test_curves_drawn_with_two_steps_are_those_of_gaussian_regression_written_out(monkeypatch):
    """One process and one pair of steps: mean and covariance of the draws, by 5 standard errors."""
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
    kernel, places, height = processes.kernels[process], pairs.index[:, pair], np.ptp(y)
    design, on_grid = pairs.steps.values(x)[:, places], pairs.steps.values(grid)[:, places]
    joint = covariance_of(kernel, x, x) + noise + height**2 * design @ design.T
    across = covariance_of(kernel, grid, x) + height**2 * on_grid @ design.T
    mean = across @ np.linalg.solve(joint, y - y.mean()) + y.mean()
    covariance = covariance_of(kernel, grid, grid) + height**2 * on_grid @ on_grid.T
    covariance -= across @ np.linalg.solve(joint, across.T)
    variance = np.diag(covariance)
    assert (np.abs(draws.mean(0) - mean) < 5 * (variance / 20000) ** 0.5).all()
    error = ((covariance**2 + np.outer(variance, variance)) / 20000) ** 0.5
    assert (np.abs(np.cov(draws.T) - covariance) < 5 * error).all()


def test_curves_are_drawn_through_many_values_without_errors():
    """133 of them: covariances as near to singular as they come."""
    x = np.log2(1 + np.concatenate([[0], np.unique(np.round(np.geomspace(1, 143000, 153)))]))
    grid = np.concatenate([*(np.linspace(a, b, 2, endpoint=False) for a, b in itertools.pairwise(x)), x[-1:]])
    for width in (0.3, 1.0):
        y = 1 / (1 + np.exp(-(x - 9) / width))
        curves = draw_curves(x, y, [np.zeros((len(x), len(x)))], grid, 1000, np.random.default_rng(3))
        assert np.abs(curves[:, ::2] - y).max() < 0.02


def test_what_differs_by_rounding_stands_in_the_order_of_its_numbers():
    """The best last; of those alike the last ones are taken."""
    evidence = np.array([3.0, 1, 2, 3, 2, 3, -np.inf, 2])
    for seed in range(5):
        rounded = evidence + np.random.default_rng(seed).uniform(-1e-9, 1e-9, 8)
        assert likeliest(rounded, 5).tolist() == [4, 7, 0, 3, 5]
        assert likeliest(rounded, 20).tolist() == [6, 1, 2, 4, 7, 0, 3, 5]


def test_two_steps_are_found_though_neither_is_likely_alone():
    """Up and down again by as much: a single step gains little, and both are among the pairs that are kept."""
    x = np.linspace(0, 17, 40)
    y = 1 / (1 + np.exp(-(x - 5) / 0.2)) - 1 / (1 + np.exp(-(x - 12) / 0.2))
    noise = np.eye(40) * 0.02**2
    values = y + np.random.default_rng(0).normal(0, 0.02, 40)
    _, pairs, evidence = drawn_curves._candidates(x, values - values.mean(), [noise], 2)
    best = pairs.index[:, evidence.max(0).argmax()]
    assert np.sort(pairs.steps.loc[best]) == pytest.approx([5, 12], abs=17 / 39)  # a gap
    # No pair is there twice, in either order.
    steps = np.stack([pairs.steps.shape, pairs.steps.loc, pairs.steps.width])[:, pairs.index]
    each = {tuple(sorted(map(tuple, pair))) for pair in steps.transpose(2, 1, 0)}
    assert len(each) == evidence.shape[1]


def test_half_of_the_draws_are_by_the_evidence_of_one_step_at_most():
    """In closed form: two processes, of which one is e times as likely with two steps, the other e times with one."""
    steps = Steps.from_axis(np.arange(7.0))
    pairs = Pairs(steps, np.array([[0, 0, 1], [0, 1, 2]]))  # none, one and two steps
    unit = 1 / drawn_curves.TEMPER
    evidence = np.array([[0, 0, unit], [0, unit, 0]]) + 1000  # as far from 0 as evidence lies
    weight = drawn_curves._weights(evidence.copy(), pairs)
    e = np.e
    of_all, of_fewer = np.array([[1, 1, e], [1, e, 1]]) / (4 + 2 * e), np.array([[1, 1, 0], [1, e, 0]]) / (3 + e)
    assert weight == pytest.approx((of_all + of_fewer) / 2, rel=1e-9)  # differences of numbers near 1,000
    # Where two steps are all there is, there is nothing to pool.
    two = Pairs(steps, np.array([[1, 1], [2, 3]]))
    assert drawn_curves._weights(evidence[:, 1:], two) == pytest.approx(np.array([[1, e], [e, 1]]) / (2 + 2 * e))


def test_steps_share_out_the_axis_and_stay_as_likely_when_they_are_split():
    """Those of 150 checkpoints stand for more than a gap. Of each shape the likeliest are split, and no other."""
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
        parts = steps.select(chosen).split()
        assert len(parts.loc) == 9 * 36
        assert np.exp(parts.log_prior).sum() == pytest.approx(np.exp(steps.log_prior[chosen]).sum())
        # Their cells fill those of the steps that were split, in place and in the logarithm of the width.
        for low, high in ((parts.loc - parts.cell / 2, parts.loc + parts.cell / 2),):
            assert low.min() == pytest.approx((steps.loc - steps.cell / 2)[chosen].min())
            assert high.max() == pytest.approx((steps.loc + steps.cell / 2)[chosen].max())
        assert parts.cell @ parts.ratio == pytest.approx(steps.cell[chosen] @ steps.ratio[chosen])


def test_steps_of_all_shapes_rise_from_a_tenth_to_nine_tenths_over_as_much():
    u = np.linspace(-20, 20, 40001)
    for shape in SHAPES[1:]:
        f = shape(u)
        assert f[0] < 1e-4 and f[-1] > 1 - 1e-4 and (np.diff(f) >= 0).all()  # noqa: PT018
        assert u[f > 0.9][0] - u[f > 0.1][0] == pytest.approx(2 * math.log(9), abs=2e-3)


@pytest.mark.parametrize(("everything", "share_of_spread"), [(True, 0.0), (False, 0.25)])
def test_mean_curves_are_the_means_of_what_is_drawn(everything, share_of_spread, monkeypatch):
    """Nearly so where unlikely processes and steps are left out, and steps split once less: they order draws alone."""
    rng = np.random.default_rng(0)
    x, noise = np.linspace(0, 8, 9), np.diag(rng.uniform(0.03, 0.06, 9) ** 2)
    grid = np.linspace(0, 8, 33)
    sets = 1 / (1 + np.exp(-3 * (x - 4))) + rng.normal(0, 0.03, (3, 9))
    if everything:
        for name, number in {"RARE": 0, "MOST_PAIRS": 10000, "SPLITS": 2}.items():
            monkeypatch.setattr(drawn_curves, name, number)
    # One set at a time: steps are split where the mean of all makes them likely.
    found = np.concatenate([mean_curves(x, values[None], noise, grid) for values in sets])
    if everything:
        monkeypatch.setattr(drawn_curves, "SPLITS", 1)
    for values, mean in zip(sets, found, strict=True):
        draws = draw_curves(x, values, [noise], grid, 4000, np.random.default_rng(1))
        near = (5 / 4000**0.5 + share_of_spread) * draws.std(0) + 2e-3
        assert (np.abs(draws.mean(0) - mean) < near).all()


def test_times_drawn_together_keep_their_distribution_and_share_what_resampling_moves():
    rng, draws = np.random.default_rng(0), 1000
    common = rng.normal(size=draws)
    for moved in (0.0, 0.5, 1.0, 3.0):
        first, second = (
            coupled_draws(rng.normal(size=draws), moved * common + 1e-9 * rng.normal(size=draws), rng) for _ in range(2)
        )
        assert np.sort(first) == pytest.approx(np.sort(coupled_draws(first, common, rng)))
        # Two normal numbers of which a share of the variance is common: that is their correlation.
        assert np.corrcoef(first, second)[0, 1] == pytest.approx(min(1, moved**2), abs=0.12)
    never_moves = coupled_draws(np.full(9, 2.0), np.arange(9.0), rng)
    assert (never_moves == 2.0).all()


def test_without_errors_the_noise_is_that_of_second_differences_but_for_a_few_large_ones():
    noise = np.random.default_rng(0).normal(0, 0.3, 4000)
    noise[::40] += 50
    assert _robust_noise(noise)[5, 5] == pytest.approx(0.09, rel=0.25)


def test_bootstrap_counts_are_those_of_samples_with_replacement():
    counts = bootstrap_counts(30, seed=1)
    assert counts.shape == (1000, 30)
    assert (counts.sum(1) == 30).all()
    assert counts.var() == pytest.approx(1 - 1 / 30, rel=0.05)
    assert (counts == bootstrap_counts(30, seed=1)).all()


@pytest.mark.soak
def test_of_prompts_that_lack_values_the_others_are_drawn_together():
    steps, rows = STEPS[1::3], sigmoid(9.0, 0.7)[1::3]
    rows = rows + np.random.default_rng(3).normal(0, 0.5, (40, len(steps)))
    counts = bootstrap_counts(40)
    whole = emergence_times(steps, rows[5:].mean(0), replicates=rows[5:], counts=counts[:, 5:])
    rows[:5, 3] = np.nan
    found = emergence_times(steps, rows[5:].mean(0), replicates=rows, counts=counts)
    assert found == whole
    assert len(whole.halfway_draws) == 1000
    np.testing.assert_allclose(found.halfway_draws, whole.halfway_draws)  # which `==` leaves out


def test_values_without_an_error_stand_beside_others():
    steps = [0, *(2**power for power in range(12)), *range(2560, 6000, 512)]
    values = np.where(np.arange(len(steps)) < 9, 1.0, 0.5)
    noisy = np.where(np.arange(len(steps)) < 9, 0.0, 0.01)
    times = emergence_times(steps, values + noisy * np.random.default_rng(0).standard_normal(len(steps)), stderr=noisy)
    assert times.halfway is not None
    assert steps[8] <= times.halfway.low <= times.halfway.high <= steps[9]


@pytest.mark.soak
@pytest.mark.parametrize("noise", ["normal", "t3", "0.3", "0.7", "0.9"])
def test_flat_curves_do_not_emerge_more_often_than_the_level_says(noise):
    for checkpoints in (8, 29):
        for errors in ({}, {"stderr": np.ones(checkpoints)}):
            curves = flat_noise(40, checkpoints, noise, np.random.default_rng(0))
            false = sum(emergence_times(range(checkpoints), each, **errors).changes for each in curves)
            assert false <= 7, errors  # more than 7 of 40 at 5%: 1 in 1,000
    assert emergence_times(STEPS, np.ones(19)).p_value == 1


@pytest.mark.soak
def test_intervals_hold_as_often_as_they_say():
    inside, count = np.zeros(4), 250
    for given, options, truth in drawn(count, np.random.default_rng(11), "stderr"):
        inside += covered(emergence_times(*given, **options), truth)
    # All times of a curve may miss together; 4 standard errors of the binomial below what is claimed.
    assert inside.min() >= count * (0.93 - 4 * (0.05 * 0.95 / count) ** 0.5)
    assert (inside / count).mean() < 0.995, "intervals that always hold say nothing"


def test_bad_input_is_refused_with_a_sentence():
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
