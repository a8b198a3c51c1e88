"""Two processes on the CPU measure what one measures, and train on the same batches."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from lit_layers import records
from lit_layers.training.checkpoint_io import saved_steps, step_folder

SCRIPT = Path(__file__).parents[1] / "support" / "ranks_run.py"


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    roots = {}
    for ranks in (1, 2):
        roots[ranks] = tmp_path_factory.mktemp(f"ranks{ranks}")
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
        command = [sys.executable, str(SCRIPT), str(roots[ranks]), str(ranks)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr[-3000:]
    return roots


@pytest.mark.slow
def test_two_ranks_train_on_the_same_global_batches(runs):
    one, two = (records.rows(runs[ranks] / "metrics.jsonl") for ranks in (1, 2))
    assert [row["step"] for row in one] == [row["step"] for row in two] == [1, 2, 3]
    for first, second in zip(one, two, strict=True):
        assert first["train/loss"] == pytest.approx(second["train/loss"], abs=1e-5)


@pytest.mark.slow
def test_two_ranks_record_every_analysis_once_in_order_with_the_same_values(runs):
    one, two = (records.read(runs[ranks] / "measurements.jsonl") for ranks in (1, 2))
    assert [(m.step, m.analysis) for m in one] == [(m.step, m.analysis) for m in two]
    assert [m.error for m in two] == [None, "RuntimeError: no numbers", None, None, None] * 3
    # Before the first step the weights are the same bits, and so are the numbers.
    assert [m.records for m in one[:5]] == [m.records for m in two[:5]]
    assert all(m.records for m in one[2:5])
    for first, second in zip(one, two, strict=True):
        for a, b in zip(first.records, second.records, strict=True):
            assert (a.metric, a.layer, a.tags) == (b.metric, b.layer, b.tags)
            assert a.value == pytest.approx(b.value, rel=1e-3, abs=1e-4)


@pytest.mark.slow
def test_two_ranks_go_on_with_the_same_dropout_and_end_in_the_same_bits(tmp_path):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, str(SCRIPT.with_name("resumed_ranks_run.py")), str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert saved_steps(whole) == [0, 6]
    assert saved_steps(parts) == [0, 3, 6]
    first, second = (step_folder(root, 6) / "model.safetensors" for root in (whole, parts))
    assert first.read_bytes() == second.read_bytes()
    losses = [[row["train/loss"] for row in records.rows(root / "metrics.jsonl")] for root in (whole, parts)]
    assert losses[0] == losses[1]
    assert len(losses[0]) == 6
