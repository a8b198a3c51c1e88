"""From values per prompt to records: against numpy, cases solved by hand, refusals."""

import math

import numpy as np
import pytest
import torch

from lit_layers.analyses.summary import mean_of_defined, median_of_defined, summarize, summarize_median
from lit_layers.functional.curves import bootstrap_interval

NAN = math.nan


def test_a_mean_over_prompts_comes_with_count_error_and_interval():
    values = torch.tensor([1.0, 4.0, 2.0, 9.0])
    (record,) = summarize("length", values, layer=3, other_layer=1, tags={"k": 4})
    assert (record.metric, record.layer, record.other_layer, record.tags) == ("length", 3, 1, {"k": 4})
    assert (record.value, record.n) == (4, 4)
    assert record.stderr == pytest.approx(np.std([1, 4, 2, 9], ddof=1) / 2)
    low, high = bootstrap_interval(values)
    assert (record.low, record.high) == (low.item(), high.item())
    assert record.low < record.value < record.high


def test_undefined_prompts_are_left_out_and_counted():
    (record,) = summarize("length", torch.tensor([NAN, 1, 3, NAN, 5]), tags={"k": 4})
    assert (record.value, record.n, record.tags) == (3, 3, {"k": 4, "num_undefined": 2})
    (same,) = summarize("length", torch.tensor([1.0, 3, 5]))
    assert (record.stderr, record.low, record.high) == (same.stderr, same.low, same.high)


def test_the_median_is_a_record_of_its_own():
    mean, median = summarize("length", torch.tensor([1.0, 2, 30, NAN, 4]), layer=2, median=True)
    assert mean.tags == {"num_undefined": 1}
    assert median.tags == {"num_undefined": 1, "statistic": "median"}
    assert (mean.value, median.value, median.n, median.layer) == (9.25, 3, 4, 2)
    assert median.stderr is None
    assert median.low <= 3 <= median.high
    assert summarize_median("length", torch.tensor([1.0, 2, 30, NAN, 4]), layer=2) == [median]


def test_infinity_is_a_value_without_an_interval():
    mean, median = summarize("score", torch.tensor([1.0, math.inf, 2.0]), median=True)
    assert (mean.value, mean.n, mean.stderr, mean.low) == (math.inf, 3, None, None)
    assert (median.value, median.low) == (2, None)


def test_one_prompt_has_no_interval():
    (record,) = summarize("length", torch.tensor([7.0]))
    assert (record.value, record.n, record.stderr, record.low, record.high) == (7, 1, None, None, None)


def test_a_metric_that_is_defined_nowhere_is_an_error_not_a_number():
    with pytest.raises(ValueError, match="length at layer 2 is undefined for every one of 3 prompts"):
        summarize("length", torch.full((3,), NAN), layer=2)
    with pytest.raises(ValueError, match="length is undefined for every one of 0 prompts"):
        summarize("length", torch.zeros(0))
    with pytest.raises(ValueError, match=r"expected one value per prompt of length, got shape \(2, 2\)"):
        summarize("length", torch.zeros(2, 2))


def test_means_and_medians_of_rows_pass_over_what_is_undefined():
    rows = torch.tensor([[1.0, NAN, 5, 2], [3, 1, NAN, 2], [NAN, NAN, NAN, NAN], [1, math.inf, 2, math.inf]])
    np.testing.assert_allclose(mean_of_defined(rows), [8 / 3, 2, NAN, math.inf], rtol=1e-6)
    np.testing.assert_allclose(median_of_defined(rows), [2, 2, NAN, math.inf])
    even = torch.tensor([[4.0, 1.0, 3.0, 2.0], [math.inf, 1, math.inf, math.inf]])
    np.testing.assert_allclose(median_of_defined(even), [2.5, math.inf])
    assert median_of_defined(rows.T, dim=0).tolist()[:2] == [2, 2]
