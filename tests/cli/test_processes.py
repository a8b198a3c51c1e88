"""Several processes on one series: shares, GPUs, and how they end together."""

import multiprocessing
import os
import time

import pytest
import torch

from lit_layers.cli.measuring import take_own_gpu, wait_for_the_others
from lit_layers.errors import InputError
from lit_layers.measuring import shard_of
from tests.support.forked import meeting_place


@pytest.mark.parametrize(
    ("text", "environment", "expected"),
    [
        ("auto", {}, (0, 1)),
        ("auto", {"RANK": "2"}, (0, 1)),
        ("auto", {"RANK": "2", "WORLD_SIZE": "4", "LOCAL_RANK": "0"}, (2, 4)),
        ("1/3", {"RANK": "2", "WORLD_SIZE": "4"}, (1, 3)),
    ],
)
def test_a_share_is_said_or_torchruns(text, environment, expected):
    assert shard_of(text, environment) == expected


@pytest.mark.parametrize("text", ["all", "3", "-1/2", "1/2/3", "a/b"])
def test_a_share_that_is_none_is_refused(text):
    with pytest.raises(InputError, match=f"shard: expected auto or i/n, such as 0/4, got '{text}'"):
        shard_of(text, {})


@pytest.mark.parametrize(
    ("device", "environment", "gpus", "expected"),
    [
        ("auto", {"LOCAL_RANK": "3"}, 4, [3]),
        ("cuda", {"LOCAL_RANK": "1"}, 4, [1]),
        ("cuda", {"LOCAL_RANK": "3"}, 2, [1]),
        ("cuda", {}, 4, []),
        ("cpu", {"LOCAL_RANK": "3"}, 4, []),
        ("auto", {"LOCAL_RANK": "3"}, 0, []),
    ],
)
def test_each_process_of_a_machine_takes_a_gpu_of_its_own(device, environment, gpus, expected, monkeypatch):
    taken: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    take_own_gpu(device, environment)
    assert taken == expected


@pytest.mark.slow
def test_the_first_to_be_done_waits_for_the_last(tmp_path):
    def end(rank: int, seconds: float) -> None:
        os.environ.update({**place, "RANK": str(rank), "WORLD_SIZE": "2"})
        time.sleep(seconds)
        (tmp_path / f"{rank} done").touch()
        wait_for_the_others({"TORCHELASTIC_RUN_ID": "x"})
        assert len(list(tmp_path.iterdir())) == 2

    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=end, args=(rank, 0.5 * rank)) for rank in range(2)]
    with meeting_place() as place:
        for process in processes:
            process.start()
        for process in processes:
            process.join(300)
    assert [process.exitcode for process in processes] == [0, 0]


def test_alone_nobody_is_waited_for(monkeypatch):
    monkeypatch.setattr("torch.distributed.init_process_group", lambda *_, **__: pytest.fail("it waits"))
    wait_for_the_others({"RANK": "0", "WORLD_SIZE": "2"})
