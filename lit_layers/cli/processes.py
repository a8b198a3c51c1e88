"""Several processes on one series: which share is whose, on which GPU, and how they end."""

import re
from collections.abc import Mapping

from lit_layers.errors import InputError

AUTO = "auto"


def shard_of(text: str, environment: Mapping[str, str]) -> tuple[int, int]:
    """Which checkpoints are this process's: (i, n) of `i/n`; `auto` is what torchrun says, alone all of them."""
    if text == AUTO:
        if not {"RANK", "WORLD_SIZE"} <= environment.keys():
            return 0, 1
        text = f"{environment['RANK']}/{environment['WORLD_SIZE']}"
    found = re.fullmatch(r"(\d+)/(\d+)", text)
    if found is None:
        raise InputError(f"shard: expected auto or i/n, such as 0/4, got {text!r}")
    return int(found[1]), int(found[2])


def take_own_gpu(device: str, environment: Mapping[str, str]) -> None:
    """Makes `cuda` mean a GPU of its own for each process of torchrun on a machine."""
    if device == "cpu" or "LOCAL_RANK" not in environment:
        return
    import torch

    if torch.cuda.is_available():  # fewer GPUs than processes are shared
        torch.cuda.set_device(int(environment["LOCAL_RANK"]) % torch.cuda.device_count())


def wait_for_the_others(environment: Mapping[str, str]) -> None:
    """Returns when every process of torchrun is done: it ends all of them once one has ended with an error."""
    if "TORCHELASTIC_RUN_ID" not in environment:
        return
    from datetime import timedelta

    from torch import distributed

    distributed.init_process_group("gloo", timeout=timedelta(days=30))
    distributed.barrier()
    distributed.destroy_process_group()
