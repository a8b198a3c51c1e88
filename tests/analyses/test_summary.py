"""Records from values per prompt, against numpy and hand-solved cases, and refusals."""

import math

import numpy as np
import pytest
import torch

from lit_layers.analyses.statistics import (
    comparable,
    mean_of_defined,
    median_of_defined,
    require_values,
    summarize,
    summarize_layers,
)
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


def mean_and_median(values, **options):
    return [record for kind in ("mean", "median") for record in summarize("length", values, statistic=kind, **options)]


def test_the_median_is_a_separate_record():
    mean, median = mean_and_median(torch.tensor([1.0, 2, 30, NAN, 4]), layer=2)
    assert mean.tags == {"num_undefined": 1}
    assert median.tags == {"num_undefined": 1, "statistic": "median"}
    assert (mean.value, median.value, median.n, median.layer) == (9.25, 3, 4, 2)
    assert median.stderr is None
    assert median.low <= 3 <= median.high


def test_infinity_is_a_value_without_an_interval():
    mean, median = mean_and_median(torch.tensor([1.0, math.inf, 2.0]))
    assert (mean.value, mean.n, mean.stderr, mean.low) == (math.inf, 3, None, None)
    assert (median.value, median.low) == (2, None)


def test_one_prompt_has_no_interval():
    (record,) = summarize("length", torch.tensor([7.0]))
    assert (record.value, record.n, record.stderr, record.low, record.high) == (7, 1, None, None, None)


def test_a_metric_without_values_has_no_record_at_a_layer_and_a_nan_record_of_the_model():
    assert mean_and_median(torch.full((3,), NAN), layer=2) == []
    for record in mean_and_median(torch.full((3,), NAN)):
        assert math.isnan(record.value)
        assert (record.n, record.tags["num_undefined"], record.stderr, record.low) == (0, 3, None, None)
    with pytest.raises(ValueError, match="length is undefined for every prompt at every layer"):
        require_values("length", summarize("length", torch.zeros(0)))


def test_a_mean_over_layers_uses_only_prompts_with_all_layers():
    values = torch.tensor([[1.0, 2, NAN], [3.0, 6, 7], [5.0, 1, 2]])
    *layers, record = summarize_layers("length", torch.cat([values[:1], values]), tags={"k": 4})
    assert [one.layer for one in layers] == [0, 1, 2, 3]
    assert (record.value, record.n, record.tags) == (3, 2, {"k": 4, "num_undefined": 1})
    values[1] = NAN
    *layers, record = summarize_layers("length", torch.cat([values[:1], values]))
    assert [one.layer for one in layers] == [0, 1, 3]
    assert math.isnan(record.value)
    assert (record.n, record.tags) == (0, {"num_undefined": 3, "num_undefined_layers": 1})


def test_comparisons_leave_out_undefined_layers_before_undefined_prompts():
    defined = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 1], [1, 0, 0, 0], [0, 0, 0, 0]]).bool()
    layers, prompts = comparable(defined)
    assert layers.tolist() == [True, True, False, False]
    assert prompts.tolist() == [True, True, False, True]
    layers, prompts = comparable(defined[3:])
    assert not layers.any()
    assert not prompts.any()


def test_means_and_medians_of_rows_ignore_undefined_values():
    rows = torch.tensor([[1.0, NAN, 5, 2], [3, 1, NAN, 2], [NAN, NAN, NAN, NAN], [1, math.inf, 2, math.inf]])
    np.testing.assert_allclose(mean_of_defined(rows), [8 / 3, 2, NAN, math.inf], rtol=1e-6)
    np.testing.assert_allclose(median_of_defined(rows), [2, 2, NAN, math.inf])
    even = torch.tensor([[4.0, 1.0, 3.0, 2.0], [math.inf, 1, math.inf, math.inf]])
    np.testing.assert_allclose(median_of_defined(even), [2.5, math.inf])
    assert median_of_defined(rows.T, dim=0).tolist()[:2] == [2, 2]
