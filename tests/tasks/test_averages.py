"""Means over tasks, computed by hand."""

import math
from dataclasses import replace

import pytest

from lit_layers import records
from lit_layers.errors import InputError
from lit_layers.records import Measurement, Record
from lit_layers.tasks.mteb_scores import averages, score_table

SCORES = {
    "STS12": ("sts", [0.9, 0.2, 0.4, 0.3]),
    "STS13": ("sts", [0.1, 0.4, 0.2, 0.5]),
    "RedditClustering": ("clustering", [0.5, 0.1, 0.3, 0.4]),
}


def measured(
    name: str, values: list[float | None], domain: str, *, step: int | None = None, versions: str = "2.1", **options
) -> Measurement:
    tags = {"task": name, "domain": domain, "score": "s", "pooling": "mean", "states": "resid", "num_texts": 7}
    tags |= options
    found = [
        Record(metric="main_score", value=value, layer=layer, n=5, tags=tags)
        for layer, value in enumerate(values)
        if value is not None
    ]
    provenance = {"config_hash": f"{name}{versions}{options}", "tokenizer_hash": "t", "versions": {"mteb": versions}}
    facts = {"run": "run", "step": step, "tokens": None, "analysis": f"mteb/{name}"}
    return Measurement(**facts, records=found, seconds=1.0, provenance=provenance)


def table(*more: Measurement, step: int | None = None):
    return records.frame(
        [*(measured(name, values, domain, step=step) for name, (domain, values) in SCORES.items()), *more]
    )


def mean_at(means, layer):
    return means.curve.set_index("layer")["average"][layer]


@pytest.mark.parametrize("step", [None, 100])
def test_the_mean_weights_tasks_equally_and_not_domains(step):
    (found,) = averages(table(step=step))
    assert found.step == step
    assert found.curve["layer"].tolist() == [0, 1, 2, 3]
    assert found.curve["average"].tolist() == pytest.approx([0.5, 0.7 / 3, 0.3, 0.4])
    assert found.curve["sts"].tolist() == pytest.approx([0.5, 0.3, 0.3, 0.4])
    assert found.curve["clustering"].tolist() == pytest.approx([0.5, 0.1, 0.3, 0.4])
    assert found.missing == ()
    # An oracle reads each task at its best layer.
    assert found.best_per_task() == pytest.approx((0.4 + 0.5 + 0.4) / 3)
    wide = score_table(table(step=step))  # one column per layer, and tasks grouped by domain
    assert wide["task"].tolist() == ["RedditClustering", "STS12", "STS13"]
    assert wide[[0, 1, 2, 3]].iloc[1].tolist() == SCORES["STS12"][1]


def test_a_task_without_a_layer_is_in_no_mean_and_without_layer_0_only_that_mean_is_nan():
    more = measured("STS14", [0.0, 0.0, None, 0.0], "sts")
    (found,) = averages(table(more), expected=["STS12", "BIOSSES"])
    assert found.missing == ("STS14", "BIOSSES")
    assert found.curve["average"].tolist() == pytest.approx([0.5, 0.7 / 3, 0.3, 0.4])
    (found,) = averages(table(measured("STS14", [None, 0.4, 0.4, 0.4], "sts")))  # no layer 0
    assert found.curve["average"].isna().tolist() == [True, False, False, False]
    assert math.isnan(found.curve["sts"][0])
    assert found.curve["clustering"][0] == pytest.approx(0.5)
    assert mean_at(found, 1) == pytest.approx((0.2 + 0.4 + 0.1 + 0.4) / 4)


def test_tasks_measured_with_different_options_have_separate_means():
    cut = measured("STS12", [0.8, 0.6], "sts", max_tokens=128, dtype="bfloat16")
    whole = [measured("STS13", [0.2, 0.4], "sts"), measured("STS14", [0.4, 0.6], "sts")]
    usual, unusual = sorted(averages(records.frame([cut, *whole])), key=lambda each: len(each.options))
    assert (usual.options, mean_at(usual, 0), mean_at(usual, 1)) == ({}, pytest.approx(0.3), pytest.approx(0.5))
    assert unusual.options == {"max_tokens": 128, "dtype": "bfloat16"}
    assert (mean_at(unusual, 0), mean_at(unusual, 1)) == (0.8, 0.6)
    assert score_table(records.frame([cut, *whole])).set_index("task").loc["STS12", "max_tokens"] == 128


def test_checkpoints_are_in_step_order():
    found = averages(records.frame([measured("STS12", [0.1, 0.2], "sts", step=step) for step in (200, 100)]))
    assert [each.step for each in found] == [100, 200]


def test_other_analyses_are_left_out_and_a_table_without_scores_is_refused():
    other = replace(measured("STS12", [1.0], "sts"), analysis="representation/STS12")
    (found,) = averages(table(other))
    assert mean_at(found, 0) == pytest.approx(0.5)
    with pytest.raises(InputError, match="expected scores of mteb"):
        averages(records.frame([other]))
