"""Which GPUs a worker gets."""

import stat

import pytest

from lit_layers.sweep import share_of_gpus, visible_gpus


@pytest.mark.parametrize(
    ("gpus", "workers", "expected"),
    [
        ([], 2, [[], []]),
        (["0", "1"], 2, [["0"], ["1"]]),
        (["0", "1", "2", "3"], 2, [["0", "1"], ["2", "3"]]),
        (["4", "6", "7"], 2, [["4"], ["6"]]),
        (["0", "1"], 3, [["0"], ["1"], ["0"]]),
    ],
)
def test_workers_have_gpus_of_their_own_as_far_as_they_go(gpus, workers, expected):
    assert [share_of_gpus(gpus, worker, workers) for worker in range(workers)] == expected


@pytest.mark.parametrize(("chosen", "expected"), [("", []), ("2, 5", ["2", "5"]), ("-1", []), ("1,-1,2", ["1"])])
def test_gpus_are_those_that_the_environment_leaves(chosen, expected):
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": chosen}) == expected


@pytest.mark.parametrize(
    ("script", "expected"),
    [("echo 'GPU 0: NVIDIA'; echo '  MIG 1g'; echo 'GPU 1: NVIDIA'", ["0", "1"]), ("echo 'GPU 0: no'; exit 9", [])],
)
def test_else_they_are_those_of_the_driver(script, expected, tmp_path, monkeypatch):
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\n{script}\n")
    tool.chmod(tool.stat().st_mode | stat.S_IEXEC)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert visible_gpus({}) == expected


def test_without_a_driver_there_are_none(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert visible_gpus({}) == []
