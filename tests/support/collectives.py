"""What the package sends between ranks, watched: what would fail with nccl is told though all here is gloo."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import distributed

import lit_layers

PACKAGE = str(Path(lit_layers.__file__).parent)
_OF_OBJECTS = ("all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list")
_OF_TENSORS = ("all_reduce", "reduce", "broadcast", "all_gather", "gather", "scatter")


def watch_collectives() -> list[str]:
    """From here on, collects what the package's own collectives do wrong, a sentence each.

    On GPUs the default group is nccl's: it would send an object through the device, and refuses a tensor of the CPU.
    So objects, and tensors of the CPU, must go by a group that is asked for as gloo.
    """
    wrong: list[str] = []
    for name in (*_OF_OBJECTS, *_OF_TENSORS):
        setattr(distributed, name, _watched(getattr(distributed, name), wrong))
    return wrong


def _watched(collective: Callable, wrong: list[str]) -> Callable:
    def call(*args: Any, **kwargs: Any) -> Any:
        caller = sys._getframe(1).f_code.co_filename
        if caller.startswith(PACKAGE):
            group = kwargs.get("group")
            place = f"{Path(caller).name}: {collective.__name__}"
            if group is None or group is distributed.group.WORLD:
                wrong.append(f"{place} goes by training's group")
            elif distributed.get_backend(group) != "gloo":
                wrong.append(f"{place} goes by {distributed.get_backend(group)}")
            elif any(isinstance(each, torch.Tensor) and each.device.type != "cpu" for each in args):
                wrong.append(f"{place} sends a tensor of the device by gloo")
        return collective(*args, **kwargs)

    return call
