"""What models cost on this machine: parameters, bytes, memory, time, measured side by side."""

import os
import platform
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lit_layers.errors import InputError
from lit_layers.models.block_calls import hooked, now
from lit_layers.models.build import true_vocab_size
from lit_layers.models.families import trunk_of
from lit_layers.models.saved import bytes_of_weights, open_plainly
from lit_layers.models.view import Batch, LayeredModel, evaluating
from lit_layers.schema import refuse_below_one


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Where a cost was measured."""

    processor: str  # name of the CPU or GPU
    num_threads: int
    torch: str  # version
    system: str


@dataclass(frozen=True, kw_only=True)
class Cost:
    """What one saved model costs to keep and to run."""

    name: str
    parameters: int
    bytes_on_disk: int  # of the weight files
    peak_memory: int  # bytes: weights, and what torch's allocators hold at most while one batch runs
    latency: float  # seconds for one text or image: median
    latency_quartiles: tuple[float, float]
    throughput: float  # texts or images a second in batches of `batch_size`: from the median
    batch_size: int
    num_tokens: int | None  # of each text; None for images
    num_rounds: int
    machine: Machine


def measure_costs(
    variants: Mapping[str, str | Path],
    *,
    trunks: Collection[str] = (),
    inputs: Batch | None = None,
    num_tokens: int = 128,
    batch_size: int = 16,
    num_rounds: int = 20,
    num_warm_up: int = 3,
    device: str = "cpu",
    seed: int = 0,
) -> list[Cost]:
    """The costs of saved models, name -> folder, in the order given.

    A model is called as its class is: with its own head and without a cache, in the precision it is saved in. Of those
    named in `trunks` the head is left out when the folder is opened. Preparing the text is no part of the cost.

    In each round every model runs one text and then one batch, and each round begins with another model, so that
    whatever else the machine does meets all of them alike. Memory is that of a batch: 16 texts x 128 tokens x 50,257
    words x 4 B = 0.4 GB only for the scores of GPT-2 with its head.

    `inputs` is a batch that is taken instead of random tokens (or pixels); its first row is the one text.

    Raises:
        InputError: numbers below 1, a text longer than a model takes.
    """
    refuse_below_one(num_tokens=num_tokens, batch_size=batch_size, num_rounds=num_rounds)
    models = {name: open_plainly(folder, head=name not in trunks).to(device) for name, folder in variants.items()}
    batch = any_inputs(models, inputs, num_tokens, batch_size, seed)
    seconds = interleaved(
        {
            name: (call_of(model, {key: rows[:1] for key, rows in batch.items()}), call_of(model, batch))
            for name, model in models.items()
        },
        num_rounds=num_rounds,
        num_warm_up=num_warm_up,
        device=device,
    )
    with torch.inference_mode():
        memory = {name: _bytes(model) + peak_of_call(call_of(model, batch)) for name, model in models.items()}
    machine, costs = this_machine(device), []
    rows, *others = next(iter(batch.values())).shape
    for name, folder in variants.items():
        one, many = seconds[name]
        low, middle, high = np.quantile(one, [0.25, 0.5, 0.75]).tolist()
        costs.append(
            Cost(
                name=name,
                parameters=sum(parameter.numel() for parameter in models[name].parameters()),
                bytes_on_disk=bytes_of_weights(folder),
                peak_memory=memory[name],
                latency=middle,
                latency_quartiles=(low, high),
                throughput=rows / float(np.median(many)),
                batch_size=rows,
                num_tokens=None if "pixel_values" in batch else others[0],
                num_rounds=num_rounds,
                machine=machine,
            )
        )
    return costs


def _bytes(model: nn.Module) -> int:
    return sum(part.nbytes for part in (*model.parameters(), *model.buffers()))


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


def peak_of_call(call: Callable[[], Any]) -> int:
    """The most bytes that torch's allocators hold during a call above what they held before, on all devices together;
    what the call returns is counted."""
    from torch.profiler import ProfilerActivity, profile

    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # it tells of every beginning and end otherwise
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
    with profile(activities=activities, profile_memory=True) as watched:
        kept = call()
    del kept
    events: Any = watched.profiler.kineto_results.events()  # pyright: ignore[reportOptionalMemberAccess]
    changes = sorted(
        (event.start_ns(), place, event.nbytes()) for place, event in enumerate(events) if event.name() == "[memory]"
    )
    return max(0, int(np.cumsum([change for _, _, change in changes]).max(initial=0)))


def this_machine(device: str = "cpu") -> Machine:
    """The processor that `device` names, and what computes on it."""
    on_gpu = torch.device(device).type == "cuda"
    return Machine(
        processor=torch.cuda.get_device_name(device) if on_gpu else _cpu(),
        num_threads=torch.get_num_threads(),
        torch=torch.__version__,
        system=f"{platform.system()} {platform.machine()}",
    )


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _seconds(call: Callable[[], Any], device: str) -> float:
    place = torch.device(device)
    started = now(place)
    call()
    return now(place) - started


def any_inputs(
    models: Mapping[str, nn.Module], given: Batch | None, num_tokens: int, batch_size: int, seed: int
) -> dict[str, Tensor]:
    """A batch that every model takes."""
    views = {name: LayeredModel(model) for name, model in models.items()}
    if given is not None:
        columns = next(iter(views.values())).family.inputs
        return {key: rows for key, rows in given.items() if key in columns}
    generator = torch.Generator().manual_seed(seed)
    any_view = next(iter(views.values()))
    if (vision := any_view.family.vision) is not None:
        channels, side = vision.channels(any_view.model), vision.usual_side(any_view.model)
        return {"pixel_values": torch.randn(batch_size, channels, side, side, generator=generator)}
    for name, view in views.items():
        if view.max_tokens is not None and num_tokens > view.max_tokens:
            raise InputError(f"num_tokens: {name} takes at most {view.max_tokens} tokens, got {num_tokens}")
    vocabulary = min(true_vocab_size(view.model) for view in views.values())
    return {"input_ids": torch.randint(vocabulary, (batch_size, num_tokens), generator=generator)}


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

    def begin(*_: object) -> None:
        if len(times) % (model.num_layers + 2) == 1:  # the first run of a block that runs several times
            note()

    handles = [model.blocks[0].register_forward_pre_hook(begin)]
    handles += [block.register_forward_hook(note) for block in dict.fromkeys(model.blocks)]
    with hooked(handles), torch.inference_mode(), evaluating(model.model):
        for _ in range(warm_up + rounds):
            note()
            call()
    passes = torch.tensor(times, dtype=torch.float64).view(warm_up + rounds, model.num_layers + 2)[warm_up:]
    # Block by block: what interrupts a pass then counts in one block of one pass.
    return passes.diff(dim=1).median(0).values.cumsum(0)


def most_ever() -> int:
    """Return the most bytes that were resident in this process."""
    status = Path("/proc/self/status")
    if status.exists():  # the maximum of getrusage begins with that of the process that started this one
        return next(int(row.split()[1]) * 1024 for row in status.read_text().splitlines() if row.startswith("VmHWM:"))
    import resource

    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024
