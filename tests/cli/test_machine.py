"""What a process may take of its machine: the least of what machine, scheduler and container leave to it."""

import os
from pathlib import Path

import pytest
import torch

from lit_layers.cli.process import num_threads
from lit_layers.models.offload import free_memory

MEMINFO = "MemTotal:  100 kB\nMemFree:  50 kB\nMemAvailable:  90 kB\nHugePages_Total:  0\n"
CPU = torch.device("cpu")


def machine_of(files: dict[str, str], folder: Path) -> Path:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


SRUN = {"SLURM_STEP_NUM_TASKS": "16", "SLURM_STEP_NUM_NODES": "2", "SLURM_CPUS_ON_NODE": "64"}


@pytest.mark.parametrize(
    ("cpus", "quota", "ranks", "environment", "expected"),
    [
        (8, "max", 1, {}, 8),
        (8, "max", 2, {}, 4),
        (8, "max", 3, {}, 2),
        (2, "max", 8, {}, 1),
        (8, "max", 1, {"LOCAL_WORLD_SIZE": "4", "WORLD_SIZE": "8"}, 2),
        (64, "650000", 1, {}, 6),  # a container with a share of the processors
        (64, "650000", 2, {}, 3),
        (64, "50000", 1, {}, 1),
        (64, "max", 1, SRUN, 8),  # tasks of SLURM that may use each other's CPUs
        (8, "max", 8, SRUN, 8),  # and that may not
        (64, "max", 1, {"SLURM_NTASKS": "8", "SLURM_CPUS_ON_NODE": "64"}, 64),  # a batch script alone
    ],
)
def test_threads_are_the_cores_over_the_ranks(cpus, quota, ranks, environment, expected, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {*range(cpus)}, raising=False)
    system = machine_of({"sys/fs/cgroup/cpu.max": f"{quota} 100000\n"}, tmp_path)
    assert num_threads(ranks, environment, system) == expected


def test_two_hardware_num_threads_a_core_count_once(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 4, 5}, raising=False)
    siblings = {
        f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list": f"{cpu % 4},{cpu % 4 + 4}\n"
        for cpu in (0, 1, 4, 5)
    }
    assert [num_threads(ranks, {}, machine_of(siblings, tmp_path)) for ranks in (1, 2)] == [2, 1]


def test_free_memory_is_what_the_system_calls_available(tmp_path):
    assert free_memory(CPU, machine_of({"proc/meminfo": MEMINFO}, tmp_path)) == 90 * 1024


def test_nothing_is_said_of_memory_where_the_system_says_nothing(tmp_path):
    assert free_memory(CPU, tmp_path) is None
    assert free_memory(CPU, machine_of({"proc/meminfo": "MemTotal: 100 kB\n"}, tmp_path)) is None
