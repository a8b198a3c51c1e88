"""Two processes on the CPU measure what one measures, and train on the same batches."""

import numpy as np
import pytest

from lit_layers import records
from lit_layers.training.run_folder import saved_steps, step_folder
from tests.support import ranks_run, resumed_ranks_run
from tests.support.forked import run_ranks

pytestmark = [pytest.mark.soak, pytest.mark.slow]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    roots = {}
    for ranks in (1, 2):
        roots[ranks] = tmp_path_factory.mktemp(f"ranks{ranks}")
        assert run_ranks(lambda ranks=ranks: ranks_run.run(roots[ranks], ranks), ranks) == [0] * ranks
    return roots


def test_two_ranks_train_on_the_same_global_batches(runs):
    one, two = (records.rows(runs[ranks] / "metrics.jsonl") for ranks in (1, 2))
    assert [row["step"] for row in one] == [row["step"] for row in two] == [1, 2, 3]
    for first, second in zip(one, two, strict=True):
        assert first["train/loss"] == pytest.approx(second["train/loss"], abs=1e-5)


def test_two_ranks_record_every_analysis_once_in_order_with_the_same_values(runs):
    one, two = (records.read(runs[ranks] / "measurements.jsonl") for ranks in (1, 2))
    assert [(m.step, m.analysis) for m in one] == [(m.step, m.analysis) for m in two]
    assert [m.error for m in two] == [None, "RuntimeError: no numbers", None, None, None, None] * 3
    # Before the first step the weights are the same bits, and so are the numbers.
    assert [m.records for m in one[:6]] == [m.records for m in two[:6]]
    assert all(m.records for m in one[2:6])
    for first, second in zip(one, two, strict=True):
        for a, b in zip(first.records, second.records, strict=True):
            assert (a.metric, a.layer, a.tags) == (b.metric, b.layer, b.tags)
            assert a.value == pytest.approx(b.value, rel=1e-3, abs=1e-4)


def test_two_ranks_keep_the_values_of_all_prompts_in_the_order_of_one(runs):
    one, two = (
        [records.read_values(runs[ranks], m) for m in records.read(runs[ranks] / "measurements.jsonl")]
        for ranks in (1, 2)
    )
    assert sum(map(bool, one)) == 4 * 3  # the analyses that have some, at each step
    for place, (first, second) in enumerate(zip(one, two, strict=True)):
        assert first.keys() == second.keys()
        for key, values in first.items():
            tolerance = {} if place < 6 else {"rtol": 0.05, "atol": 0.01}  # training differs by rounding from there on
            np.testing.assert_allclose(second[key], values, **tolerance or {"rtol": 0, "atol": 0})


def test_two_ranks_go_on_with_the_same_dropout_and_end_in_the_same_bits(tmp_path):
    assert run_ranks(lambda: resumed_ranks_run.run(tmp_path)) == [0, 0]
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert saved_steps(whole) == [0, 6]
    assert saved_steps(parts) == [0, 3, 6]
    first, second = (step_folder(root, 6) / "model.safetensors" for root in (whole, parts))
    assert first.read_bytes() == second.read_bytes()
    losses = [[row["train/loss"] for row in records.rows(root / "metrics.jsonl")] for root in (whole, parts)]
    assert losses[0] == losses[1]
    assert len(losses[0]) == 6
