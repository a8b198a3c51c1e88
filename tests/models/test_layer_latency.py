"""The latency of each layer: what is counted, in which order, and that no hook remains."""

import pytest
import torch
from torch import nn

from lit_layers.models import block_calls
from lit_layers.models.costs import layer_latencies
from lit_layers.models.view import LayeredModel
from tests.support.tiny_models import tiny, tiny_batch


def num_hooks(model: nn.Module) -> int:
    return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())


@pytest.mark.parametrize("name", ["gpt2", "bert", "vit"])
def test_every_layer_is_reached_after_the_one_before(name):
    found = layer_latencies(LayeredModel(tiny(name)), tiny_batch(name, batch=1), rounds=3, warm_up=1)
    assert found.dtype == torch.float64
    assert found.shape == (4,)
    assert found[0] > 0
    assert (found.diff() > 0).all()


def test_seconds_are_sums_of_median_times_between_layers(monkeypatch):
    # One round of warm-up and two timed rounds, each with a call and four layers. The times of the clock are invented.
    steps = [[0, 9, 9, 9, 9], [5, 1, 2, 4, 8], [7, 2, 2, 5, 99], [7, 3, 1, 6, 8]]
    ticks = iter(torch.tensor(steps).flatten().cumsum(0).tolist())
    monkeypatch.setattr(block_calls.time, "perf_counter", lambda: float(next(ticks)))
    found = layer_latencies(LayeredModel(tiny("gpt2")), tiny_batch("gpt2"), rounds=3, warm_up=1)
    assert found.tolist() == [2, 2 + 2, 2 + 2 + 5, 2 + 2 + 5 + 8]
    assert next(ticks, None) is None


def test_no_hook_and_no_mode_remains_even_if_a_block_fails():
    model = tiny("gpt2").train()
    layer_latencies(LayeredModel(model), tiny_batch("gpt2"), rounds=1)
    assert num_hooks(model) == 0
    assert all(module.training for module in model.modules())

    def fail(*_: object) -> None:
        raise RuntimeError("broken")

    handle = model.transformer.h[1].mlp.register_forward_hook(fail)
    with pytest.raises(RuntimeError, match="broken"):
        layer_latencies(LayeredModel(model), tiny_batch("gpt2"), rounds=1)
    handle.remove()
    assert num_hooks(model) == 0
    assert all(module.training for module in model.modules())
