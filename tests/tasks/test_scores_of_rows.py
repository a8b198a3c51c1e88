"""Means and their errors, the normalised score and its error."""

import math

import numpy as np
import pytest
from scipy import stats

from lit_layers.tasks.benchmark_scores import interval, mean_and_error, normalized_error, normalized_score
from lit_layers.tasks.lm_eval_scorer import PERPLEXITY, SCORE


def test_the_error_of_a_mean_is_its_standard_error_and_none_for_one_row():
    values = [1.0, 0.0, 0.0, 1.0, 1.0]
    assert mean_and_error(SCORE, [values]) == (pytest.approx(0.6), pytest.approx(math.sqrt(0.6 * 0.4 / 4)))
    assert mean_and_error(SCORE, [[1.0]]) == (1.0, None)


def test_the_interval_of_a_share_is_wilsons_even_if_all_rows_are_equal():
    for right in (0, 3, 20):
        rows = [1.0] * right + [0.0] * (20 - right)
        wilson = stats.binomtest(right, 20).proportion_ci(method="wilson")
        ends = {"low": pytest.approx(wilson.low, abs=1e-9), "high": pytest.approx(wilson.high, abs=1e-9)}
        assert interval(SCORE, *mean_and_error(SCORE, [rows]), 20) == ends
        halves = [rows, rows[::-1]]  # two orders of blocks: a row counts with its mean over them
        several = interval(SCORE, *mean_and_error(SCORE, halves), 20)
        assert several["high"] - several["low"] <= wilson.high - wilson.low + 1e-9
    assert interval(SCORE, 0.5, None, 1) == {}
    assert interval("variant_loss", 0.5, 0.1, 20) == pytest.approx({"low": 0.304, "high": 0.696})


def test_the_interval_of_a_perplexity_is_symmetric_on_the_log_scale():
    value, error = mean_and_error(PERPLEXITY, [[-1.0, -3.0]])  # the loss is 2 with an error of 1
    ends = {"low": pytest.approx(math.exp(2 - 1.96)), "high": pytest.approx(math.exp(2 + 1.96))}
    assert interval(PERPLEXITY, value, error, 2) == ends
    assert mean_and_error(PERPLEXITY, [[-1.0, -3.0], [-900.0, -900.0]]) == (math.inf, None)
    broken = interval(PERPLEXITY, *mean_and_error(PERPLEXITY, [[0.0, -600.0]]), 2)
    assert broken["low"] >= 0
    assert broken["high"] == math.inf


def test_guessing_scores_0_and_the_full_model_1():
    scores = [0.25, 0.75, 0.5, 0.15]
    assert [normalized_score(score, 0.25, 0.75) for score in scores] == pytest.approx([0, 1, 0.5, -0.2])


def test_the_error_of_a_normalised_score_equals_that_of_resampled_rows():
    generator = np.random.default_rng(0)
    full = (generator.random(400) < 0.7).astype(float)
    own = np.where(generator.random(400) < 0.6, full, generator.random(400) < 0.4).astype(float)
    draws = generator.integers(0, 400, (4000, 400))
    resampled = (own[draws].mean(1) - 0.25) / (full[draws].mean(1) - 0.25)
    assert normalized_error(own, full, 0.25) == pytest.approx(resampled.std(), rel=0.05)
    assert normalized_error(full, full, 0.25) == 0
    assert normalized_error([1.0], [1.0], 0.25) is None
