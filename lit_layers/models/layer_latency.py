"""How long a text or image takes to reach each layer."""

import time

import torch
from torch import Tensor

from lit_layers.errors import InputError
from lit_layers.models.costs import call_of
from lit_layers.models.families import trunk_of
from lit_layers.models.view import Batch, LayeredModel, evaluating


def layer_latencies(model: LayeredModel, batch: Batch, *, rounds: int = 20, warm_up: int = 3) -> Tensor:
    """Seconds from the call to the output of each layer, 0 to L: (layers + 1), sums of the blocks' medians
    over rounds.

    The cost of a model cut there, without a head, all from the same passes; layer 0 is reached when the first block is
    called. On a GPU the device is waited for at every layer.

    Raises:
        InputError: no round.
    """
    if rounds < 1 or warm_up < 0:
        raise InputError(f"rounds: expected at least 1, and warm_up of at least 0, got {rounds} and {warm_up}")
    call, device, times = call_of(trunk_of(model.model), batch), model.device, []

    def note(*_: object) -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter())

    handles = [model.blocks[0].register_forward_pre_hook(note)]
    handles += [block.register_forward_hook(note) for block in model.blocks]
    try:
        with torch.inference_mode(), evaluating(model.model):
            for _ in range(warm_up + rounds):
                note()
                call()
    finally:
        for handle in handles:
            handle.remove()
    passes = torch.tensor(times, dtype=torch.float64).view(warm_up + rounds, model.num_layers + 2)[warm_up:]
    # Block by block: what interrupts a pass then counts in one block of one pass.
    return passes.diff(dim=1).median(0).values.cumsum(0)
