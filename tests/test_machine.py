"""What a process may take of its machine: the least of what machine, scheduler and control groups leave to it."""

import os
from pathlib import Path

import pytest

from lit_layers.machine import Processors, host_memory, processors

INFINITE = float("inf")
MEMINFO = "MemTotal:  100 kB\nMemFree:  50 kB\nMemAvailable:  90 kB\nHugePages_Total:  0\n"
UNLIMITED = str(2**63 - 4096)


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
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "150000 100000\n"}, 1.5),
        (
            {
                "proc/self/cgroup": "0::/a/b\n",
                "sys/fs/cgroup/a/cpu.max": "400000 100000",
                "sys/fs/cgroup/a/b/cpu.max": "max 100000",
            },
            4,
        ),
        (
            {
                "proc/self/cgroup": "5:memory:/x\n4:cpu,cpuacct:/docker/y\n",
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "300000\n",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
            },
            3,
        ),
        (
            {
                "proc/self/cgroup": "4:cpu,cpuacct:/\n",
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
            },
            INFINITE,
        ),
        ({}, INFINITE),
    ],
)
def test_the_share_of_the_processors_is_the_least_that_a_control_group_allows(files, quota, tmp_path):
    assert processors(machine_of(files, tmp_path)).quota == quota


def test_two_hardware_threads_of_a_core_count_once(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 4, 5}, raising=False)
    for cpu in (0, 1, 4, 5):
        folder = tmp_path / f"sys/devices/system/cpu/cpu{cpu}/topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(f"{cpu % 4},{cpu % 4 + 4}\n")
    assert processors(tmp_path) == Processors(4, 2)


def group(folder: str, limit: str, taken: int, active: int = 0, inactive: int = 0) -> dict[str, str]:
    stat = f"anon 5\nactive_file {active}\ninactive_file {inactive}\n"
    files = {"max": f"{limit}\n", "current": f"{taken}\n", "stat": stat}
    return {f"sys/fs/cgroup/{folder}memory.{name}": text for name, text in files.items()}


def first_group(folder: str, limit: str, taken: int, active: int = 0, inactive: int = 0) -> dict[str, str]:
    stat = f"active_file 0\ninactive_file 0\ntotal_active_file {active}\ntotal_inactive_file {inactive}\n"
    files = {"limit_in_bytes": f"{limit}\n", "usage_in_bytes": f"{taken}\n", "stat": stat}
    return {f"sys/fs/cgroup/memory/{folder}memory.{name}": text for name, text in files.items()}


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, 90 * 1024),
        ({"proc/self/cgroup": "0::/\n"}, 90 * 1024),  # of the whole machine: no limit is there
        ({"proc/self/cgroup": "0::/\n", **group("", "10000", 6000, 700, 50)}, 4750),  # in a container
        ({"proc/self/cgroup": "0::/\n", **group("", "max", 6000)}, 90 * 1024),
        ({"proc/self/cgroup": "0::/\n", **group("", "1000000", 6000)}, 90 * 1024),  # more than the machine has
        ({"proc/self/cgroup": "0::/\n", **group("", "6000", 6500)}, 0),
        (
            {"proc/self/cgroup": "0::/job/step\n", **group("job/", "9000", 8000), **group("job/step/", "max", 1000)},
            1000,  # of its job, in which other steps took 7,000
        ),
        ({"proc/self/cgroup": "0::/job\n", **group("job/", "9000", 500), **group("", "max", 5000)}, 8500),
        (
            {"proc/self/cgroup": "4:memory:/slurm/job\n0::/\n", **first_group("slurm/job/", "9000", 8000, 30, 4)}
            | first_group("", UNLIMITED, 50_000),
            1034,
        ),
        (
            {"proc/self/cgroup": "4:memory:/docker/x\n", **first_group("", "7000", 1000)},
            6000,
        ),  # at the top
        ({"proc/self/cgroup": "4:cpu:/\n", **first_group("", "7000", 1000)}, 90 * 1024),  # of others, as it seems
    ],
)
def test_free_memory_is_the_least_that_machine_and_control_groups_leave(files, expected, tmp_path):
    assert host_memory(machine_of({"proc/meminfo": MEMINFO, **files}, tmp_path)) == expected


def test_nothing_is_said_of_memory_where_the_system_says_nothing(tmp_path):
    assert host_memory(tmp_path) is None
    assert host_memory(machine_of({"proc/meminfo": "MemTotal: 100 kB\n"}, tmp_path)) is None
