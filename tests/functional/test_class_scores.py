"""The bootstrap interval of macro F1 against a loop over resamples, scored by scikit-learn."""

import numpy as np
import pytest
import torch
from sklearn.metrics import f1_score

from lit_layers.functional.curves import macro_f1_interval, row_counts
from lit_layers.functional.probes.logistic import macro_f1


def interval_from_loop(labels: torch.Tensor, predictions: torch.Tensor, resamples: int, seed: int):
    scores = []
    for block in row_counts(len(labels), resamples, seed):
        for counts in block.long().numpy():
            truth, predicted = np.repeat(labels.numpy(), counts), np.repeat(predictions.numpy(), counts)
            scores.append(f1_score(truth, predicted, labels=np.unique(truth), average="macro", zero_division=0))
    assert len(scores) == resamples
    return np.quantile(scores, [0.025, 0.975])


def rows(num_rows: int = 60, num_classes: int = 4, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    random = np.random.default_rng(seed)
    labels = random.integers(num_classes, size=num_rows)
    predictions = np.where(random.random(num_rows) < 0.6, labels, random.integers(num_classes, size=num_rows))
    return torch.from_numpy(labels), torch.from_numpy(predictions)


def test_the_interval_equals_that_of_a_loop_also_for_rare_and_only_predicted_classes():
    labels, predictions = rows(30)
    labels[:] = torch.where(labels == 3, 7, labels)  # class ids with gaps
    predictions[:4] = torch.tensor([9, 5, 12, 25])  # classes without a row, between and above the others
    labels[0] = 20  # a class with one row, which many resamples lack
    for given, seed in (((labels, predictions), 0), (rows(), 3)):
        found = macro_f1_interval(*given, resamples=200, seed=seed)
        np.testing.assert_allclose(found, interval_from_loop(*given, 200, seed), rtol=0, atol=1e-12)


def test_two_rows_are_solved_by_hand():
    # Row 1 is a hit of class 0, row 2 a miss of class 1. Two hits give F1 = 1 and two misses 0. One of each gives
    # 2/3 for class 0 and 0 for class 1, on average 1/3.
    labels, predictions = torch.tensor([0, 1]), torch.tensor([0, 0])
    assert macro_f1(labels, predictions) == pytest.approx(1 / 3)
    assert macro_f1_interval(labels, predictions, resamples=400) == (0.0, 1.0)


def test_a_perfect_score_has_an_interval_of_width_0_and_class_ids_do_not_matter():
    labels, predictions = rows()
    assert macro_f1_interval(labels, labels) == (1.0, 1.0)
    found = macro_f1_interval(labels, predictions, resamples=100)
    renamed = macro_f1_interval(50 - 3 * labels, 50 - 3 * predictions, resamples=100)
    assert renamed == pytest.approx(found, abs=1e-12)
    low, high = found
    assert low <= macro_f1(labels, predictions) <= high
