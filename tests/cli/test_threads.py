"""A process computes with its share of the cores, or with the number of threads that its caller sets."""

import pytest
import torch

from lit_layers.cli import process


@pytest.mark.parametrize(("given", "ranks", "expected"), [(None, 1, 12), (None, 5, 2), (None, 20, 1), ("7", 1, None)])
def test_the_ranks_share_the_cores_unless_the_caller_sets_a_number(given, ranks, expected, monkeypatch, capsys):
    made: list[int] = []
    monkeypatch.setattr("joblib.cpu_count", lambda only_physical_cores: 12)
    monkeypatch.setattr(torch, "set_num_threads", made.append)
    monkeypatch.setattr(torch, "get_num_threads", lambda: (made or [7])[-1])
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if given is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", given)
    process.set_threads("cpu", ranks)
    assert made == [each for each in [expected] if each]
    assert capsys.readouterr().err == f"{expected or 7} threads, cpu\n"
