"""What models cost on this machine: memory and time, measured in turns."""

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lit_layers.errors import InputError
from lit_layers.models.block_calls import hooked, now
from lit_layers.models.build import true_vocab_size
from lit_layers.models.families import trunk_of
from lit_layers.models.view import Batch, LayeredModel, evaluating


def interleaved(
    calls: Mapping[str, Sequence[Callable[[], Any]]], *, num_rounds: int, num_warm_up: int, device: str = "cpu"
) -> dict[str, list[list[float]]]:
    """Seconds of each call of each name, a list of `num_rounds` for each call; rounds before those are not counted.

    Each round begins with the next name.
    """
    names, seconds = list(calls), {name: [[] for _ in calls[name]] for name in calls}
    with torch.inference_mode():
        for number in range(-num_warm_up, num_rounds):
            first = number % len(names)
            for name in names[first:] + names[:first]:
                for times, call in zip(seconds[name], calls[name], strict=True):
                    took = _seconds(call, device)
                    if number >= 0:
                        times.append(took)
    return seconds


def call_of(model: nn.Module, batch: Batch) -> Callable[[], Any]:
    """The model's own call on a batch, on its device, as its class is called: no view, no hooks."""
    view = LayeredModel(model)
    dtype = view.dtype if view.family.sees_images else None
    columns = {key: rows.to(view.device, dtype) for key, rows in batch.items() if key in view.family.inputs}
    return lambda: view.family.call(view.model, columns, dict(view.family.options))


def peak_bytes(call: Callable[[], Any]) -> int:
    """The most bytes that torch's allocators hold during a call above what they held before, on all devices together;
    what the call returns is counted."""
    from torch.profiler import ProfilerActivity, profile

    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # it tells of every beginning and end otherwise
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
    with profile(activities=activities, profile_memory=True, acc_events=True) as watched:  # or torch 2.12 warns
        kept = call()
    del kept
    events: Any = watched.profiler.kineto_results.events()  # pyright: ignore[reportOptionalMemberAccess]
    changes = sorted(
        (event.start_ns(), index, event.nbytes()) for index, event in enumerate(events) if event.name() == "[memory]"
    )
    return max(0, int(np.cumsum([change for _, _, change in changes]).max(initial=0)))


def _seconds(call: Callable[[], Any], device: str) -> float:
    target = torch.device(device)
    started = now(target)
    call()
    return now(target) - started


def random_inputs(model: nn.Module, num_tokens: int, batch_size: int, seed: int) -> dict[str, Tensor]:
    """Return a batch of random tokens or pixels that a model takes."""
    view, generator = LayeredModel(model), torch.Generator().manual_seed(seed)
    if (vision := view.family.vision) is not None:
        channels, side = vision.channels(view.model), vision.usual_side(view.model)
        return {"pixel_values": torch.randn(batch_size, channels, side, side, generator=generator)}
    if view.max_tokens is not None and num_tokens > view.max_tokens:
        raise InputError(f"num_tokens: the model takes at most {view.max_tokens} tokens, got {num_tokens}")
    return {"input_ids": torch.randint(true_vocab_size(view.model), (batch_size, num_tokens), generator=generator)}


# How long a text or image takes to reach each layer.


def layer_latencies(model: LayeredModel, batch: Batch, *, rounds: int = 20, warm_up: int = 3) -> Tensor:
    """Seconds from the call to the output of each layer, 0 to L: (layers + 1), sums of the blocks' medians
    over rounds.

    The cost of a model cut there, without a head, all from the same passes; layer 0 is reached when the first block is
    called. On a GPU the device is waited for at every layer.
    """
    call, device, times = call_of(trunk_of(model.model), batch), model.device, []

    def note(*_: object) -> None:
        times.append(now(device))

    handles = [model.blocks[0].register_forward_pre_hook(note)]
    handles += [block.register_forward_hook(note) for block in model.blocks]
    with hooked(handles), torch.inference_mode(), evaluating(model.model):
        for _ in range(warm_up + rounds):
            note()
            call()
    passes = torch.tensor(times, dtype=torch.float64).view(warm_up + rounds, model.num_layers + 2)[warm_up:]
    # Block by block: what interrupts a pass then counts in one block of one pass.
    return passes.diff(dim=1).median(0).values.cumsum(0)
