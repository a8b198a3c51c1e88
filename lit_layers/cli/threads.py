"""How many threads a process computes with: the cores that it may use, divided by the ranks on its machine."""

import contextlib
import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path

from lit_layers.cli.console import verbosity
from lit_layers.machine import processors

VARIABLE = "OMP_NUM_THREADS"  # torch, numpy and scikit-learn read it when they are imported
_divided: str | None = None  # what this process has set the variable to


def settle(ranks: int = 1) -> None:
    """Sets the threads of this process, and of those it starts, unless the caller did.

    Called before torch is imported, and once more where this process is to be one of several `ranks`.
    """
    global _divided
    if _is_asked(os.environ):
        return
    started, allocated = ranks_here(os.environ)
    threads = processors().threads(max(started, ranks), allocated)
    os.environ[VARIABLE] = _divided = str(threads)
    if "torch" in sys.modules:  # which has read the variable
        import torch
        from threadpoolctl import threadpool_limits

        torch.set_num_threads(threads)
        threadpool_limits(threads)


def _is_asked(environment: Mapping[str, str]) -> bool:
    if VARIABLE not in environment or environment[VARIABLE] == _divided:
        return False
    if environment[VARIABLE] == "1" and "TORCHELASTIC_RUN_ID" in environment:
        # torchrun sets it to 1 where its caller did not: the variables that torchrun itself was started with tell.
        with contextlib.suppress(OSError):
            return f"{VARIABLE}=".encode() in Path(f"/proc/{os.getppid()}/environ").read_bytes()
    return True


def ranks_here(environment: Mapping[str, str]) -> tuple[int, int | None]:
    """The ranks on this machine, by torchrun or `srun`, and how many CPUs SLURM gave to all of them together."""
    if "LOCAL_WORLD_SIZE" in environment:
        return int(environment["LOCAL_WORLD_SIZE"]), None
    # Such as 4(x2),1: of a step, which a batch script alone is none of.
    groups = re.findall(r"(\d+)(?:\(x(\d+)\))?", environment.get("SLURM_STEP_TASKS_PER_NODE", ""))
    tasks = [int(number) for number, times in groups for _ in range(int(times or 1))]
    node = int(environment.get("SLURM_NODEID", 0))
    return (tasks[node] if node < len(tasks) else 1), int(environment.get("SLURM_CPUS_ON_NODE", 0)) or None


def tell(device: object, then: str = "") -> None:
    """Says on what a command computes, unless it is to be quiet."""
    if verbosity() >= 0:
        print(f"{description(device)}{then}", file=sys.stderr)


def description(device: object) -> str:
    """What a command computes on, in a line: `8 threads, cuda:0`."""
    import torch

    number = torch.get_num_threads()
    named = "cuda" if device == "auto" and torch.cuda.is_available() else str(device).replace("auto", "cpu")
    where = f"cuda:{torch.cuda.current_device()}" if named == "cuda" and torch.cuda.is_available() else named
    return f"{number} thread{'s' if number > 1 else ''}, {where}"
