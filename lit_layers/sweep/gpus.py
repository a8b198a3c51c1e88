"""Which GPUs a worker has to itself, without importing torch for it."""

import subprocess
from collections.abc import Mapping, Sequence


def visible_gpus(environment: Mapping[str, str]) -> list[str]:
    """The GPUs that torch would see: those of CUDA_VISIBLE_DEVICES, else all that the driver lists."""
    chosen = environment.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        names = [name.strip() for name in chosen.split(",") if name.strip()]
        return names[: names.index("-1")] if "-1" in names else names  # CUDA stops at the first that is none
    try:
        listed = subprocess.run(["nvidia-smi", "--list-gpus"], capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    lines = [line for line in listed.stdout.splitlines() if line.startswith("GPU ")]
    return [str(number) for number in range(len(lines))] if listed.returncode == 0 else []


def share_of_gpus(gpus: Sequence[str], worker: int, workers: int) -> list[str]:
    """The GPUs of one worker: a block of its own, or one shared with others where there are fewer than workers."""
    if not gpus:
        return []
    each = len(gpus) // workers
    return list(gpus[worker * each : (worker + 1) * each]) or [gpus[worker % len(gpus)]]
