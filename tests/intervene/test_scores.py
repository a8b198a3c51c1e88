"""Scores of rows solved by hand; the normalised score and its error; the median over tasks."""

import math

import numpy as np
import pytest

from lit_layers.intervene.likelihoods import Likelihood
from lit_layers.intervene.scores import (
    FLEXIBLE,
    NORMED,
    PERPLEXITY,
    SCORE,
    choice_values,
    completion_values,
    match_values,
    mean_and_error,
    normalized_error,
    normalized_score,
)
from lit_layers.intervene.task_prompts import Choice, Question


def found(*values, greedy=False):
    return [Likelihood(value, greedy) for value in values]


def test_the_longer_choice_wins_by_character():
    item = Choice((("a", " bb"), ("a", " cccccccc")), 1, (2, 8))
    assert choice_values([item], found(-3.0, -4.0), normed=True) == {SCORE: [0.0], NORMED: [1.0]}
    assert choice_values([item], found(-5.0, -4.0), normed=False) == {SCORE: [1.0]}


def test_of_equal_choices_the_first_counts():
    items = [Choice((("a", " b"), ("a", " b")), gold, (1, 1)) for gold in (0, 1)]
    assert choice_values(items, found(-1.0, -1.0, -1.0, -1.0), normed=True) == {SCORE: [1.0, 0.0], NORMED: [1.0, 0.0]}


def test_a_log_likelihood_that_is_no_number_is_refused():
    items = [Choice((("a", " b"), ("a", " c")), 0, (1, 1))] * 2
    with pytest.raises(FloatingPointError, match="1 of 2 rows have a log-likelihood that is not a number"):
        choice_values(items, found(-1.0, -2.0, math.nan, -1.0), normed=False)


def test_a_completion_is_right_if_it_is_greedy():
    items = [Choice((("a", " b"),), 0, (1,))] * 2
    values = completion_values(items, [*found(-2.0, greedy=True), *found(-4.0)])
    assert values == {SCORE: [1.0, 0.0], PERPLEXITY: [-2.0, -4.0]}
    value, error = mean_and_error(PERPLEXITY, [values[PERPLEXITY]])
    assert value == pytest.approx(math.exp(3))
    assert error == pytest.approx(math.exp(3) * 1.0)  # of the mean: sqrt(2) / sqrt(2)


@pytest.mark.parametrize(
    ("text", "strict", "flexible"),
    [
        ("He has 1,234 nuts.\n#### 1,234", 1, 1),
        ("The answer is $1234.", 0, 1),  # no mark; the last number, without the full stop
        ("#### 12 or rather #### 1234", 0, 1),  # the first mark, the last number
        ("#### 1234\nThat is 7", 1, 0),
        ("#### -1234", 0, 0),
        ("no number", 0, 0),
        ("", 0, 0),
    ],
)
def test_numbers_of_a_text(text, strict, flexible):
    values = match_values([Question("", "It is 1,200 + 34.\n#### 1,234")], [text])
    assert values == {SCORE: [strict], FLEXIBLE: [flexible]}


def test_the_error_of_a_mean():
    values = [1.0, 0.0, 0.0, 1.0, 1.0]
    assert mean_and_error(SCORE, [values]) == (pytest.approx(0.6), pytest.approx(math.sqrt(0.6 * 0.4 / 4)))
    assert mean_and_error(SCORE, [[1.0]]) == (1.0, None)


def test_guessing_is_0_and_the_full_model_1():
    assert normalized_score(0.25, 0.25, 0.75) == 0
    assert normalized_score(0.75, 0.25, 0.75) == 1
    assert normalized_score(0.5, 0.25, 0.75) == pytest.approx(0.5)
    assert normalized_score(0.15, 0.25, 0.75) == pytest.approx(-0.2)
    scaled = normalized_score(3 * 0.6 + 2, 3 * 0.25 + 2, 3 * 0.75 + 2, full_stderr=3 * 0.1)
    assert scaled == pytest.approx(normalized_score(0.6, 0.25, 0.75, full_stderr=0.1))


def test_a_full_model_that_guesses_has_no_normalised_score():
    for full, error in ((0.25, 0.0), (0.75, 0.5), (0.24, 0.02)):
        assert math.isnan(normalized_score(0.3, 0.25, full, full_stderr=error, undefined="nan"))
    with pytest.raises(ValueError, match=r"the full model's score 0.27 is within its standard error 0.03 of guessing"):
        normalized_score(0.3, 0.25, 0.27, full_stderr=0.03)
    assert normalized_score(0.3, 0.25, 0.29, full_stderr=0.03) == pytest.approx(1.25)


def test_the_error_of_a_normalised_score_is_that_of_resampled_rows():
    generator = np.random.default_rng(0)
    full = (generator.random(400) < 0.7).astype(float)
    own = np.where(generator.random(400) < 0.6, full, generator.random(400) < 0.4).astype(float)
    draws = generator.integers(0, 400, (4000, 400))
    resampled = (own[draws].mean(1) - 0.25) / (full[draws].mean(1) - 0.25)
    assert normalized_error(own, full, 0.25) == pytest.approx(resampled.std(), rel=0.05)
    assert normalized_error(full, full, 0.25) == 0
    assert normalized_error([1.0], [1.0], 0.25) is None
