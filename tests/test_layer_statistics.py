"""Statistics over layers: closed forms, scipy's rank correlation, sampled intervals, tables, the page."""

from dataclasses import replace

import numpy as np
import pytest
from scipy import stats

from lit_layers.clock.step_curves import MONOTONICITY, LayerCurve, StepCurve, layer_curves, merge_layer_seeds

STEPS = (0, 1, 4)


def curves(table, *, metric="accuracy", stderr=None, run="a", layers=None) -> list[StepCurve]:
    """Return measurements with the values of `table` (steps, layers)."""
    table = np.asarray(table, dtype=float)
    numbers = layers or range(1, table.shape[1] + 1)
    errors = None if stderr is None else np.full(len(table), float(stderr))
    at = np.array(STEPS[: len(table)], dtype=float)
    place = {"analysis": "probe", "metric": metric, "run": run, "tags": {"pooling": "mean"}, "at": at}
    return [
        StepCurve(layer=n, values=values, stderr=errors, **place) for n, values in zip(numbers, table.T, strict=True)
    ]


def statistics(found: list[LayerCurve]) -> dict[str, LayerCurve]:
    return {each.statistic.removeprefix("monotonicity_"): each for each in found}


def test_rising_falling_and_constant_layers():
    found = statistics(layer_curves(curves([[0.1, 0.2, 0.3, 0.4], [0.4, 0.3, 0.2, 0.1], [0.5] * 4])))
    assert found["spearman"].curve.values == pytest.approx([1, -1, np.nan], nan_ok=True)
    assert found["fraction_increasing"].curve.values == pytest.approx([1, 0, 0])
    assert found["largest_drop"].curve.values == pytest.approx([0, 0.1, 0])
    assert found["best_layer"].curve.values == pytest.approx([4, 1, 1])
    assert found["plateau_layer"].curve.values == pytest.approx([4, 1, 1])
    assert found["spearman"].curve.tags == {"pooling": "mean", "of": "accuracy"}
    assert found["spearman"].curve.error_unit == ""
    assert np.isnan(found["spearman"].low).all()


def test_the_rank_correlation_equals_scipy_with_ties_and_without_the_embedding():
    rng = np.random.default_rng(0)
    table = rng.integers(0, 4, (3, 9)).astype(float)
    layers = [0, 3, 1, 2, 5, 4, 7, 6, 8]
    (found, *_) = layer_curves(curves(table, layers=layers))
    assert found.num_layers == 8
    expected = [stats.spearmanr(layers[1:], row[1:]).statistic for row in table]
    assert found.curve.values == pytest.approx(expected)


def test_the_best_layer_has_the_lowest_loss_and_metrics_that_are_no_score_have_none():
    table = [[0.9, 0.5, 0.3, 0.31]]
    loss = statistics(layer_curves(curves(table, metric="log_loss")))
    expected = {"spearman": 0.8, "best_layer": 3, "plateau_layer": 3, "largest_drop": 0.01}
    assert {name: loss[name].curve.values[0] for name in expected} == pytest.approx(expected)
    entropy = statistics(layer_curves(curves(table, metric="prompt_entropy")))
    assert entropy["spearman"].curve.values == pytest.approx([-0.8])
    assert {"best_layer", "plateau_layer"}.isdisjoint(entropy)


def test_nan_layers_are_counted_and_too_few_layers_give_no_value():
    nan = np.nan
    found = statistics(layer_curves(curves([[0.1, nan, 0.2, 0.15, 0.4], [0.1, nan, nan, nan, 0.4]])))
    assert found["spearman"].num_undefined.tolist() == [1, 3]
    assert found["spearman"].curve.values == pytest.approx([0.8, nan], nan_ok=True)
    assert found["best_layer"].curve.values == pytest.approx([5, nan], nan_ok=True)
    assert layer_curves(curves([[0.1, 0.2]])) == []


def test_the_interval_comes_from_curves_sampled_with_the_errors_of_the_layers():
    table, error = np.array([[0.1, 0.16, 0.2, 0.24, 0.33]]), 0.04
    found = statistics(layer_curves(curves(table, stderr=error)))["spearman"]
    rng = np.random.default_rng(9)
    drawn = [stats.spearmanr(range(5), table[0] + error * rng.standard_normal(5)).statistic for _ in range(4000)]
    low, high = np.quantile(drawn, (0.025, 0.975))
    # 1,000 samples compared with 4,000; values are of the order of 0.1
    assert (found.low[0], found.high[0]) == (pytest.approx(low, abs=0.11), pytest.approx(high, abs=0.11))
    assert found.curve.stderr == pytest.approx([np.std(drawn)], rel=0.15)
    assert found.curve.error_unit == "prompts"
    exact = statistics(layer_curves(curves(table, stderr=0.0)))["spearman"]
    assert (exact.low[0], exact.high[0]) == (1, 1)


def test_several_seeds_give_their_mean_with_students_interval():
    rng = np.random.default_rng(1)
    tables = rng.uniform(size=(4, 3, 6))
    found = [each for n, table in enumerate(tables) for each in layer_curves(curves(table, run=f"seed {n}"))]
    merged = statistics(merge_layer_seeds(found, "4 seeds"))["spearman"]
    rho = np.array([[stats.spearmanr(range(6), row).statistic for row in table] for table in tables])
    low, high = stats.t.interval(0.95, 3, rho.mean(0), stats.sem(rho))
    assert merged.curve.values == pytest.approx(rho.mean(0))
    assert (merged.low, merged.high) == (pytest.approx(low.clip(-1)), pytest.approx(high.clip(max=1)))
    assert (merged.curve.run, merged.curve.error_unit) == ("4 seeds", "seeds")


def test_an_interval_over_seeds_stays_in_the_range_of_the_statistic():
    runs = [*layer_curves(curves([[1, 2, 3, 4]], run="a")), *layer_curves(curves([[1, 2, 4, 3]], run="b"))]
    merged = statistics(merge_layer_seeds(runs, "2 seeds"))
    low, high = merged["spearman"].low[0], merged["spearman"].high[0]
    assert (low, high) == (pytest.approx(0.9 - 0.1 * stats.t.ppf(0.975, 1)), 1)
    assert merged["largest_drop"].low[0] == 0


def test_a_statistic_that_the_analysis_measured_is_not_computed_again():
    (own, *others) = curves([[0.1, 0.2, 0.3, 0.4]])
    assert layer_curves([replace(own, metric=MONOTONICITY, layer=None), *others]) == []
    assert layer_curves(curves([[1, 2, 3]], metric="best_layer")) == []
