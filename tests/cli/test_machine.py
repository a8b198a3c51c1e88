"""What a process may take of its machine: the least of what machine, scheduler and container leave to it."""

import os
from pathlib import Path

import pytest
import torch

from lit_layers.cli.process import Processors, processors
from lit_layers.models.offload import free_memory

INFINITE = float("inf")
MEMINFO = "MemTotal:  100 kB\nMemFree:  50 kB\nMemAvailable:  90 kB\nHugePages_Total:  0\n"
CPU = torch.device("cpu")


def machine_of(files: dict[str, str], folder: Path) -> Path:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


@pytest.mark.parametrize(
    ("machine", "ranks", "allocated", "expected"),
    [
        (Processors(8, 8), 1, None, 8),
        (Processors(8, 8), 2, None, 4),
        (Processors(8, 8), 3, None, 2),
        (Processors(2, 2), 8, None, 1),
        (Processors(16, 8), 1, None, 8),  # two hardware threads a core
        (Processors(16, 8), 4, None, 2),
        (Processors(64, 64, 6.5), 1, None, 6),
        (Processors(64, 64, 6.5), 2, None, 3),
        (Processors(64, 64, 0.5), 1, None, 1),
        (Processors(64, 64), 8, 64, 8),  # tasks of SLURM that may use each other's CPUs
        (Processors(8, 8), 8, 64, 8),  # and that may not
    ],
)
def test_threads_are_the_cores_over_the_ranks(machine, ranks, allocated, expected):
    assert machine.threads(ranks, allocated) == expected


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({"sys/fs/cgroup/cpu.max": "150000 100000\n"}, 1.5),
        ({"sys/fs/cgroup/cpu.max": "max 100000\n"}, INFINITE),
        ({}, INFINITE),
    ],
)
def test_a_container_may_have_a_share_of_the_processors(files, quota, tmp_path):
    assert processors(machine_of(files, tmp_path)).quota == quota


def test_two_hardware_threads_of_a_core_count_once(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 4, 5}, raising=False)
    for cpu in (0, 1, 4, 5):
        folder = tmp_path / f"sys/devices/system/cpu/cpu{cpu}/topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(f"{cpu % 4},{cpu % 4 + 4}\n")
    assert processors(tmp_path) == Processors(4, 2)


def test_free_memory_is_what_the_system_calls_available(tmp_path):
    assert free_memory(CPU, machine_of({"proc/meminfo": MEMINFO}, tmp_path)) == 90 * 1024


def test_nothing_is_said_of_memory_where_the_system_says_nothing(tmp_path):
    assert free_memory(CPU, tmp_path) is None
    assert free_memory(CPU, machine_of({"proc/meminfo": "MemTotal: 100 kB\n"}, tmp_path)) is None
