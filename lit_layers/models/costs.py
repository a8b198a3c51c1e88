"""Measure what models cost on this machine: time of calls, latency of layers, peak memory."""

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
    """Time named groups of calls in interleaved rounds, so that slow phases of the machine affect all groups alike.

    Each round runs all calls of all groups. The first group of a round changes from round to round.

    Args:
        calls: name of a group -> the calls to time.
        num_rounds: number of timed rounds.
        num_warm_up: number of untimed rounds before the timed ones.
        device: device on which the calls compute.

    Returns:
        For each name of a group, a list with one entry per call: the seconds that the call took in each timed round.
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
    """Return a function that calls a model on a batch, which is moved to the device of the model.

    The function calls the model itself, not its layered view.
    """
    view = LayeredModel(model)
    dtype = view.dtype if view.family.sees_images else None
    columns = {key: rows.to(view.device, dtype) for key, rows in batch.items() if key in view.family.inputs}
    return lambda: view.family.call(view.model, columns, dict(view.family.options))


def peak_bytes(call: Callable[[], Any]) -> int:
    """Return the peak memory that torch allocates during a call, in bytes, summed over devices.

    The memory of the returned value is included, but not memory that torch held before the call.
    """
    from torch.profiler import ProfilerActivity, profile

    # Keep the profiler from logging the start and the end of every profile.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
    # `acc_events` is set only to avoid a warning of torch 2.12.
    with profile(activities=activities, profile_memory=True, acc_events=True) as watched:
        result = call()
    # The result is freed only after the profile, so that its memory counts.
    del result
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
    """Return a batch of random token ids, or of random images of the size that a model was built for.

    Raises:
        InputError: if the model takes fewer than `num_tokens` tokens.
    """
    view, generator = LayeredModel(model), torch.Generator().manual_seed(seed)
    if (vision := view.family.vision) is not None:
        channels, side = vision.channels(view.model), vision.usual_side(view.model)
        return {"pixel_values": torch.randn(batch_size, channels, side, side, generator=generator)}
    if view.max_tokens is not None and num_tokens > view.max_tokens:
        raise InputError(f"num_tokens: the model takes at most {view.max_tokens} tokens, got {num_tokens}")
    return {"input_ids": torch.randint(true_vocab_size(view.model), (batch_size, num_tokens), generator=generator)}


def layer_latencies(model: LayeredModel, batch: Batch, *, rounds: int = 20, warm_up: int = 3) -> Tensor:
    """Return the seconds from the start of a call to each layer, 0 to L, (layers + 1).

    The value of layer l is the cost of a model that is truncated to l blocks, without final norm and head. It is
    the sum of the times of the embedding and of these blocks, each the median over rounds. All layers are timed in the
    same passes. On a GPU, the device is synchronized at every layer.

    Args:
        rounds: number of timed passes.
        warm_up: number of untimed passes before the timed ones.
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
    # The median is per block, not per pass, so that an interruption affects only one block of its pass.
    return passes.diff(dim=1).median(0).values.cumsum(0)
