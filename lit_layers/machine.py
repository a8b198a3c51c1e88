"""What the machine, its scheduler and the container leave to this process: processors and memory."""

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_ROOT = Path("/")


@dataclass(frozen=True)
class Processors:
    """What this process may use: CPUs, the cores that they are threads of, and a share of their time in CPUs."""

    cpus: int
    cores: int
    quota: float = float("inf")

    def threads(self, ranks: int, allocated: int | None = None) -> int:
        """Threads of each of so many ranks; where each is bound to CPUs of its own, of those `allocated` to all."""
        cpus = min(self.cpus, max(self.cpus, allocated or 0) // ranks)
        return max(1, int(min(cpus * self.cores / self.cpus, self.quota / ranks)))


def processors(system: Path = _ROOT) -> Processors:
    """Return what the scheduler's affinity and the container leave to this process."""
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    cores = set()
    for cpu in allowed:
        siblings = system / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"
        cores.add(siblings.read_text() if siblings.is_file() else str(cpu))
    limit = system / "sys/fs/cgroup/cpu.max"  # of a container: microseconds, and in how many
    quota, period = limit.read_text().split() if limit.is_file() else ("max", "1")
    return Processors(len(allowed), len(cores), float("inf") if quota == "max" else int(quota) / int(period))


def free_memory(device: "torch.device", system: Path = _ROOT) -> int | None:
    """Return the bytes that could be taken on a device now; None if the system does not say."""
    if device.type == "cuda":
        import torch

        reusable = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + reusable
    with contextlib.suppress(OSError):
        for line in (system / "proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return None
