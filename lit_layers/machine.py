"""What the machine, its scheduler and the control groups leave to this process: processors and memory."""

import contextlib
import os
from collections.abc import Iterator
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
    """What the scheduler's affinity and the control groups leave to this process."""
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    cores = set()
    for cpu in allowed:
        siblings = system / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"
        cores.add(siblings.read_text() if siblings.is_file() else str(cpu))
    return Processors(len(allowed), len(cores), min(_quotas(system), default=float("inf")))


def free_memory(device: "torch.device") -> int | None:
    """Bytes that could be taken on a device now; None where the system does not say."""
    if device.type == "cuda":
        import torch

        reusable = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + reusable
    return host_memory()


def host_memory(system: Path = _ROOT) -> int | None:
    """Bytes that this process could still take, of the machine's and of what each control group around it allows."""
    try:
        available = _fields(system / "proc/meminfo")["MemAvailable:"] * 1024
    except (OSError, LookupError, ValueError):
        return None
    return max(0, min([available, *_allowances(system)]))


def _quotas(system: Path) -> Iterator[float]:
    """Yields the CPUs that each control group around this process may keep busy."""
    for group, is_first in _groups(system, "cpu"):
        files = ["cpu.cfs_quota_us", "cpu.cfs_period_us"] if is_first else ["cpu.max"]
        with contextlib.suppress(OSError, ValueError):  # "max" where there is no limit
            quota, period = map(int, " ".join((group / file).read_text() for file in files).split())
            if quota > 0:
                yield quota / period


def _allowances(system: Path) -> Iterator[int]:
    """Yields the bytes that each control group around this process could still take.

    What a group takes counts the files that were read, which the system drops where memory is wanted.
    """
    for group, is_first in _groups(system, "memory"):
        files = ("memory.limit_in_bytes", "memory.usage_in_bytes") if is_first else ("memory.max", "memory.current")
        with contextlib.suppress(OSError, ValueError):  # "max" where there is no limit
            limit, taken = (int((group / file).read_text()) for file in files)
            fields, of_all = _fields(group / "memory.stat"), "total_" if is_first else ""
            yield limit - taken + sum(fields.get(f"{of_all}{kind}_file", 0) for kind in ("active", "inactive"))


def _groups(system: Path, kind: str) -> Iterator[tuple[Path, bool]]:
    """Yields the folders of the control groups around this process that limit a kind of resource, the innermost first,
    and whether they are of the first version."""
    with contextlib.suppress(OSError):
        for line in (system / "proc/self/cgroup").read_text().splitlines():
            _, kinds, path = line.split(":", 2)
            if not kinds or kind in kinds.split(","):
                folder = system / "sys/fs/cgroup" / (kind if kinds else "") / path.lstrip("/")
                for place in (folder, *folder.parents):  # a container sees its own group at the top
                    yield place, bool(kinds)


def _fields(file: Path) -> dict[str, int]:
    """The numbers of a file of the system that has a name and a number in each line."""
    lines = (line.split() for line in file.read_text().splitlines())
    return {line[0]: int(line[1]) for line in lines if len(line) > 1}
