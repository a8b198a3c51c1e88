"""Layer selection without labels: coefficients over layers, their null, and the scores of chosen layers."""

import numpy as np
import pytest
import torch
from scipy import stats

from lit_layers.functional.correlation import (
    UndefinedError,
    better_rule,
    distance_null_over_layers,
    extreme_layers,
    layer_correlations,
    scores_at,
    selection,
)
from tests.support.references import dcor


def curves(tasks: int = 7, layers: int = 9, seed: int = 0, digits: int = 1) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    metric = rng.normal(size=(tasks, layers)).cumsum(1)
    scores = np.round(0.3 * metric + rng.normal(size=metric.shape), digits)  # one digit: with ties
    return metric, scores


REFERENCES = {
    "distance_correlation": dcor,
    "spearman": lambda x, y: stats.spearmanr(x, y).statistic,
    "kendall": lambda x, y: stats.kendalltau(x, y).statistic,
}


def row_of(found, form: str, coefficient: str):
    (one,) = [row for row in found if (row.form, row.coefficient) == (form, coefficient)]
    return one


def test_both_forms_agree_with_scipy_and_the_definition():
    for name in REFERENCES:
        metric, scores = curves()
        found = layer_correlations(metric, scores, resamples=100)
        within = np.mean([REFERENCES[name](x, y) for x, y in zip(metric, scores, strict=True)])
        assert row_of(found, "per_task_mean", name).estimate.value == pytest.approx(within, abs=1e-12)
        whole = REFERENCES[name](metric.mean(0), scores.mean(0))
        assert row_of(found, "of_task_means", name).estimate.value == pytest.approx(whole, abs=1e-12)


@pytest.mark.parametrize("name", REFERENCES)
def test_intervals_are_percentiles_over_tasks_resampled_equally_in_both_tables(name):
    metric, scores = curves(digits=9)
    found = layer_correlations(metric, scores, resamples=150, seed=3)
    rows = torch.randint(7, (150, 7), generator=torch.Generator().manual_seed(3)).numpy()
    own = np.array([REFERENCES[name](x, y) for x, y in zip(metric, scores, strict=True)])
    drawn = {
        "per_task_mean": [own[draw].mean() for draw in rows],
        "of_task_means": [REFERENCES[name](metric[draw].mean(0), scores[draw].mean(0)) for draw in rows],
    }
    for form, values in drawn.items():
        estimate = row_of(found, form, name).estimate
        assert [estimate.low, estimate.high] == pytest.approx(np.quantile(values, [0.025, 0.975]), abs=1e-10)


def test_the_two_forms_differ_if_tasks_disagree():
    up, down = np.arange(6.0), np.arange(6.0)[::-1]
    metric, scores = np.stack([up, up]), np.stack([up, 3 * down])
    found = layer_correlations(metric, scores)
    # coefficients 1 and -1; two tasks have no interval
    assert row_of(found, "per_task_mean", "kendall").estimate == (0.0, None, None)
    assert row_of(found, "of_task_means", "kendall").estimate.value == -1.0


def test_a_task_with_a_constant_curve_is_left_out_of_the_mean_per_task_and_named():
    metric, scores = curves()
    scores[2] = 0.5
    found = row_of(layer_correlations(metric, scores, resamples=100), "per_task_mean", "spearman")
    assert (found.num_tasks, found.undefined) == (6, (2,))
    others = [stats.spearmanr(x, y).statistic for n, (x, y) in enumerate(zip(metric, scores, strict=True)) if n != 2]
    assert found.estimate.value == pytest.approx(np.mean(others), abs=1e-12)


def test_increasing_maps_keep_rank_correlations_and_affine_maps_distance_correlations():
    metric, scores = curves()
    first = layer_correlations(metric, scores, resamples=100)
    bent = layer_correlations(np.exp(metric), scores, resamples=100)
    moved = layer_correlations(5 - 2 * metric, scores, resamples=100)
    for name in ("spearman", "kendall"):
        assert row_of(bent, "per_task_mean", name).estimate == pytest.approx(
            row_of(first, "per_task_mean", name).estimate, abs=1e-12
        )
    for form in ("per_task_mean", "of_task_means"):
        assert row_of(moved, form, "distance_correlation").estimate == pytest.approx(
            row_of(first, form, "distance_correlation").estimate, abs=1e-9
        )


def test_unrelated_layers_have_the_known_distance_correlation():
    for layers, noise in [(7, 0.59), (13, 0.45), (25, 0.34), (37, 0.28)]:
        null = distance_null_over_layers(layers)
        assert null.noise == pytest.approx(noise, abs=0.01)
        if layers == 25:
            assert null.walk == pytest.approx(0.54, abs=0.015)
            assert null.walk_95 == pytest.approx(0.85, abs=0.02)


def test_a_selection_is_solved_by_hand():
    metric = np.array([[3.0, 1.0, 2.0, 4.0], [1.0, 5.0, 5.0, 2.0]])
    scores = np.array([[0.1, 0.6, 0.3, 0.2], [0.4, 0.5, 0.9, 0.7]])
    assert extreme_layers(metric, "min").tolist() == [1, 0]
    assert extreme_layers(metric, "max").tolist() == [3, 1], "the earliest of equal layers"
    low, high = (selection(metric, scores, direction) for direction in ("min", "max"))
    assert low.chosen == (2, 1)
    assert low.score.value == pytest.approx(0.5)
    assert high.score.value == pytest.approx(0.35)
    assert low.last.value == pytest.approx(0.45)
    assert (low.best_layer, low.best.value) == (3, pytest.approx(0.6)), "means 0.25, 0.55, 0.6, 0.45"
    assert low.oracle.value == pytest.approx(0.75)
    assert (low.middle_layer, low.middle.value) == (2, pytest.approx(0.55))
    assert low.random.value == pytest.approx(scores.mean())
    assert low.minus_last.value == pytest.approx(0.05)
    assert low.minus_best.value == pytest.approx(-0.1)
    assert low.score.low is None
    assert low.best_share is None


def test_the_first_layer_only_shifts_the_layer_ids():
    metric, scores = curves(tasks=6, layers=9)
    found = selection(metric, scores, "min", first_layer=0, resamples=100)
    later = selection(metric, scores, "min", first_layer=1, resamples=100)
    assert [layer + 1 for layer in found.chosen] == list(later.chosen)
    assert (found.middle_layer, later.middle_layer) == (4, 5), "of 8 and of 9 layers"
    assert found.score == later.score


def test_intervals_of_differences_are_paired():
    metric, scores = curves(tasks=8, layers=6, digits=9)
    scores = scores + 100 * np.arange(8)[:, None]  # tasks of very different difficulty
    found = selection(metric, scores, "max", resamples=400, seed=1)
    rows = torch.randint(8, (400, 8), generator=torch.Generator().manual_seed(1)).numpy()
    gain = scores_at(metric, scores, "max") - scores[:, -1]
    ends = np.quantile([gain[draw].mean() for draw in rows], [0.025, 0.975])
    assert [found.minus_last.low, found.minus_last.high] == pytest.approx(ends, abs=1e-9)
    assert found.score.high - found.score.low > 100 > found.minus_last.high - found.minus_last.low
    best = [scores[draw].mean(0).argmax() for draw in rows]
    assert found.best_share == pytest.approx(np.mean(np.array(best) == found.best_layer - 1))


def test_the_direction_is_the_one_with_higher_scores_on_other_models():
    metric, scores = curves(tasks=5)
    following, opposing = ({"good": metric}, metric), ({"good": metric}, -metric)
    assert better_rule([following]) == ("good", "max")
    assert better_rule([opposing]) == ("good", "min")
    assert better_rule([following, opposing, opposing]) == ("good", "min"), "each model has equal weight"
    rule = better_rule([({"noise": scores[::-1], "good": metric}, -metric)])
    assert rule == ("good", "min")


def test_tables_of_unequal_shapes_or_with_nan_are_refused():
    for metric, scores, message in (
        (np.zeros((2, 5)), np.zeros((2, 4)), r"finite tables \(tasks, layers\) alike, got \(2, 5\) and \(2, 4\)"),
        (np.full((2, 5), np.nan), np.zeros((2, 5)), "finite tables"),
    ):
        for refuse in (layer_correlations, lambda *tables: selection(*tables, "min")):
            with pytest.raises(ValueError, match=message):
                refuse(metric, scores)


def test_too_few_layers_and_constant_curves_are_refused():
    with pytest.raises(UndefinedError, match="at least 4 layers, got 3"):
        layer_correlations(*(table[:, :3] for table in curves()))
    with pytest.raises(UndefinedError, match="constant over the layers of every task"):
        layer_correlations(np.ones((3, 5)), curves(3, 5)[1])
