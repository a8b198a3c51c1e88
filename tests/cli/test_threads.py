"""A process computes with its share of the cores, or with as many threads as its caller says."""

import os

import pytest
import torch
from torch.utils.data import DataLoader

from lit_layers.cli import process


def test_what_the_caller_says_stays_and_what_was_settled_is_divided(monkeypatch):
    made: list[int] = []
    monkeypatch.setattr(process, "num_threads", lambda ranks, _: 12 // ranks)
    monkeypatch.setattr(torch, "set_num_threads", made.append)
    monkeypatch.setattr("threadpoolctl.threadpool_limits", made.append)
    monkeypatch.setattr(process, "_divided", None)
    monkeypatch.setenv(process.VARIABLE, "5")
    process.settle()
    assert (os.environ[process.VARIABLE], made) == ("5", [])
    monkeypatch.delenv(process.VARIABLE)
    for ranks, expected in {1: 12, 4: 3, 2: 6}.items():
        process.settle(ranks)
        assert (os.environ[process.VARIABLE], made[-2:]) == (str(expected), [expected, expected])


@pytest.mark.parametrize(("given", "expected"), [(None, "3"), ("1", "3"), ("2", "2")])
def test_the_one_thread_that_torchrun_sets_is_no_callers_wish(given, expected, monkeypatch):
    monkeypatch.setattr(process, "num_threads", lambda ranks, environment: 6 // int(environment["LOCAL_WORLD_SIZE"]))
    monkeypatch.setattr(process, "_divided", None)
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)
    monkeypatch.setattr("threadpoolctl.threadpool_limits", lambda _: None)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setenv(process.VARIABLE, given or "")
    if given is None:
        monkeypatch.delenv(process.VARIABLE)
    process.settle()
    assert os.environ[process.VARIABLE] == expected


def test_a_data_loaders_worker_has_one_thread():
    class Threads:
        def __len__(self) -> int:
            return 2

        def __getitem__(self, _: int) -> int:
            return torch.get_num_threads()

    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert [int(each) for each in DataLoader(Threads(), num_workers=1)] == [1, 1]  # pyright: ignore
    finally:
        torch.set_num_threads(before)
