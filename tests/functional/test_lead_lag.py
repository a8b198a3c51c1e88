"""`lead_lags` against correlations computed apart, curves whose lag is planted, and pairs that are unrelated."""

import itertools

import numpy as np
import pytest

from lit_layers.functional import lead_lags, num_moves, octave_increments, octave_range
from tests.support.drawn_lead_lags import STEPS, UNRELATED, driven, following, found, unrelated


def correlations(a, b, given=None, most: int = 4) -> dict[float, float]:
    """At each lag in octaves tanh of the mean Fisher z over runs, (runs, increments); by loops and least squares."""
    series = [np.array(each, dtype=float) for each in (a, b, *([given] if given is not None else []))]
    for each in series:
        for run in each:
            run -= run.mean()
        if len(each) > 1:
            each -= each.mean(0)
    if given is not None:
        known = series[2].reshape(-1, 1)
        for each in series[:2]:
            flat = each.reshape(-1)
            each[:] = (flat - known @ np.linalg.lstsq(known, flat, rcond=None)[0]).reshape(each.shape)
    n, told = series[0].shape[1], {}
    for lag in range(-most, most + 1):
        pairs = [[(x[t], y[t + lag]) for t in range(n) if 0 <= t + lag < n] for x, y in zip(*series[:2], strict=True)]
        told[lag / 2] = np.tanh(np.mean([np.arctanh(np.corrcoef(np.array(pair).T)[0, 1]) for pair in pairs]))
    return told


@pytest.mark.parametrize("runs", [1, 3])
@pytest.mark.parametrize("partial", [False, True])
def test_the_correlation_is_the_greatest_of_those_computed_apart(runs, partial):
    rng = np.random.default_rng(runs)
    first, second, given = rng.standard_normal((3, runs, 20)).cumsum(-1)
    rest = given if partial else None
    (result,) = lead_lags(first[None], second, rest)
    told = correlations(first, second, rest)
    lag = max(told, key=lambda each: abs(told[each]))
    assert result.lag == lag
    assert result.correlation == pytest.approx(told[lag], abs=1e-10)
    assert (result.num_increments, result.num_runs) == (20, runs)


def test_what_moves_first_leads_by_so_many_octaves():
    first = [0, 2, -1, 0, 3, 0, 0, -2, 1, 0, 0, 0, 0]
    second = [0, 0, 0, 0, -4, 2, 0, -6, 0, 0, 4, -2, 0]  # -2 of the first, three half octaves later
    (result,) = lead_lags([first], second)
    assert (result.lag, result.correlation) == (1.5, pytest.approx(-1))
    (back,) = lead_lags([second], first)
    assert (back.lag, back.correlation) == (-1.5, pytest.approx(-1))


def test_neither_units_nor_the_order_of_runs_matter():
    rng = np.random.default_rng(5)
    first, second, loss = rng.standard_normal((3, 4, 18))
    one = lead_lags(first[None], second, loss)[0]
    other = lead_lags(3 * first[None] + 1, 2 - 7 * second, 9 * loss + 2)[0]
    order = [2, 0, 3, 1]
    turned = lead_lags(first[None, order], second[order], loss[order])[0]
    assert other.correlation == pytest.approx(-one.correlation)
    assert turned.correlation == pytest.approx(one.correlation)
    assert one.lag == other.lag == turned.lag
    assert other.p_value == one.p_value
    assert one.moves == pytest.approx(other.moves)


def test_increments_are_those_of_straight_lines_between_checkpoints_within_the_curve_alone():
    steps, values = np.array([0, 1, 3, 15, 31, 40]), np.array([5.0, 7, np.nan, 1, 4, 9])
    assert octave_range(steps, values) == (0, 10)  # log2(41) = 5.36
    there = np.isfinite(values)
    grid = np.arange(2, 11) / 2
    expected = np.diff(np.interp(grid, np.log2(1 + steps[there]), values[there]))
    assert octave_increments(steps, values, 2, 10) == pytest.approx(expected)
    tokens = np.array([0, 2**16, 2**17, 2**20])  # nothing is known between token 0 and the first checkpoint
    assert octave_range(tokens, np.ones(4)) == (33, 40)
    assert octave_range([5, 6], [np.nan, np.nan]) == (0, -1)


def test_one_rise_is_one_move_however_wide_and_noise_is_many():
    at = np.arange(200.0)
    for width in (3, 8, 20):
        bump = np.exp(-(((at - 90) / width) ** 2) / 2)
        assert num_moves(bump) == pytest.approx(1, abs=0.3)  # centred, the rest is not quite still
    assert num_moves(np.random.default_rng(0).standard_normal(200)) > 20
    assert np.isnan(num_moves(np.ones(20)))


def test_what_moves_once_or_not_at_all_has_no_p_value():
    at = np.arange(20.0)
    rise = np.exp(-((at - 9) ** 2) / 4)
    noise = np.random.default_rng(0).standard_normal(20)
    once, flat, line, same = lead_lags([rise, 0 * at, 0 * at + 3, noise], noise, noise)[:3] + lead_lags([noise], noise)
    assert np.isnan([once.p_value, once.correlation, flat.correlation, line.lag, line.p_value]).all()  # given itself
    assert lead_lags([rise], np.roll(rise, 2))[0].lag == 1
    assert np.isnan(lead_lags([rise], np.roll(rise, 2))[0].p_value)
    assert (same.lag, same.correlation) == (0, pytest.approx(1))
    assert same.p_value < 0.02


def test_fewer_increments_have_fewer_lags():
    rng = np.random.default_rng(2)
    a, b = rng.standard_normal((2, 9))
    (result,) = lead_lags([a], b)
    told = correlations(a[None], b[None], most=1)  # 8 overlap
    assert abs(result.correlation) == pytest.approx(max(map(abs, told.values())))


def redrawn(kind: str, b: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """b (runs, increments) once more, with other phases or other signs of blocks."""
    if kind == "signs":
        length, start = (8 if len(b) > 2 else 3), rng.integers(8)
        return np.stack([b_run * rng.choice([-1, 1], 40)[(np.arange(len(b_run)) + start) // length] for b_run in b])
    others = np.fft.rfft(rng.standard_normal(b.shape))
    return np.fft.irfft(np.abs(np.fft.rfft(b)) * others / np.abs(others), b.shape[1])


@pytest.mark.parametrize(("runs", "rho", "seed"), [(1, 0.9, 36), (1, 0.0, 9), (3, 0.9, 35)])
def test_p_is_the_larger_share_of_curves_redrawn_in_two_ways_that_go_together_as_well(runs, rho, seed):
    rng = np.random.default_rng(seed)
    first, second = rng.standard_normal((2, runs, 21))
    for t in range(1, 21):
        first[:, t], second[:, t] = (each[:, t] + rho * each[:, t - 1] for each in (first, second))
    if not rho:
        first[:, :14], second[:, :14] = first[:, :14] / 10, second[:, :14] / 10
    second[:, 2:] += 0.2 * first[:, :-2]
    (result,) = lead_lags(first[None], second)
    freed = second - second.mean(1, keepdims=True)
    freed = freed - (freed.mean(0) if runs > 1 else 0)
    shares = []
    for kind in ("phases", "signs"):
        drawn = [correlations(first, redrawn(kind, freed, rng)) for _ in range(300)]
        shares.append(np.mean([max(map(abs, told.values())) >= abs(result.correlation) for told in drawn]))
    assert abs(shares[0] - shares[1]) > 0.15  # either alone would not do
    assert result.p_value == pytest.approx(max(shares), abs=0.1)


def test_of_six_runs_p_is_the_share_of_pairings_that_go_together_as_well():
    rng = np.random.default_rng(3)
    first, second = rng.standard_normal((2, 6, 12))
    second[:, 1:] += 0.45 * first[:, :-1]
    (result,) = lead_lags(first[None], second)
    largest = [
        max(abs(each) for each in correlations(first, second[list(order)]).values())
        for order in itertools.islice(itertools.permutations(range(6)), 0, None, 3)
    ]
    assert result.p_value == pytest.approx(np.mean(np.array(largest) >= abs(result.correlation) - 1e-9), abs=0.04)


def test_the_interval_of_a_lag_is_over_copies_with_other_errors_or_over_runs():
    rng = np.random.default_rng(4)
    first, noise = rng.standard_normal((2, 20))
    second = np.roll(first, 1) + 0.1 * noise
    copies = [np.repeat(each[None], 50, 0) for each in (first, second)]
    (sure,) = lead_lags([first], second, drawn=(copies[0][None], copies[1], None))
    assert (sure.lag, sure.low, sure.high) == (0.5, 0.5, 0.5)
    blurred = [each + 2 * rng.standard_normal(each.shape) for each in copies]
    (unsure,) = lead_lags([first], second, drawn=(blurred[0][None], blurred[1], None))
    assert unsure.low < 0.5 < unsure.high
    assert np.isnan([lead_lags([first], second)[0].low, lead_lags([first], second)[0].high]).all()
    several = first + rng.standard_normal((5, 20))
    (over,) = lead_lags(several[None], np.roll(several, 1, axis=1))
    assert (over.low, over.high) == (0.5, 0.5)


def test_what_does_not_fit_is_refused():
    noise = np.random.default_rng(0).standard_normal(12)
    for message, arguments in (
        (r"expected \(curves, runs, increments\), .*, got \(1, 11\), \(12,\)", ([noise[:11]], noise)),
        ("given alike", ([noise], noise, noise[:5])),
        ("expected 8 increments or more, got 7", ([noise[:7]], noise[:7])),
        ("expected finite increments", ([noise], np.where(noise > 1, np.nan, noise))),
    ):
        with pytest.raises(ValueError, match=message):
            lead_lags(*arguments)
    with pytest.raises(ValueError, match=r"expected half octaves within the curve's, \(0, 6\), got \(0, 8\)"):
        octave_increments([0, 1, 3, 7], np.ones(4), 0, 8)
    with pytest.raises(ValueError, match="steps of 0 or more that increase"):
        octave_range([3, 1], [1, 2])
    with pytest.raises(ValueError, match="a value for each step"):
        octave_range([3, 5], [1, 2, 3])


# Small versions of the table of docs/emergence_accuracy.md.
@pytest.mark.soak
@pytest.mark.parametrize("runs", [1, 4])
@pytest.mark.parametrize("kind", UNRELATED)
def test_unrelated_curves_are_seldom_said_to_go_together(kind, runs):
    rng = np.random.default_rng(7)
    said = [found(unrelated(kind, rng, runs), unrelated(kind, rng, runs)).p_value <= 0.05 for _ in range(40)]
    assert sum(said) <= 6  # of tests at 5%, 7 of 40 or more are 0.3%


@pytest.mark.soak
def test_a_copy_of_a_curve_an_octave_later_is_found_to_follow_it():
    rng = np.random.default_rng(8)
    alone = [found(*following(rng, 0.1, 1)) for _ in range(30)]
    of_seeds = [found(*following(rng, 0.2, 4)) for _ in range(15)]
    assert sum(each.p_value <= 0.05 for each in alone) >= 18
    assert all(each.p_value <= 0.05 for each in of_seeds)
    assert np.mean([each.lag == 1 for each in alone]) > 0.7
    assert all(0.5 <= each.lag <= 1.5 for each in of_seeds)
    first, second = following(rng, 0.1, 4)
    assert found(second, first).lag == -1


def test_given_the_loss_that_drives_both_nothing_is_left():
    rng = np.random.default_rng(9)
    alone, given = 0, 0
    for _ in range(20):
        loss, first, second = driven(rng, 4)
        alone += found(first, second).p_value <= 0.05
        given += found(first, second, loss).p_value <= 0.05
    assert alone >= 16
    assert given <= 4  # 5 of 20 or more are 0.3%


def test_the_drawn_checkpoints_are_those_of_a_run():
    assert (len(STEPS), octave_range(STEPS, STEPS)) == (20, (0, 22))
