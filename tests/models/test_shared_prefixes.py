"""`SharedPrefixes` compared with each schedule composed block by block, and how often a block runs."""

import inspect
import sys

import pytest
import torch

from lit_layers.functional.block_schedules import members, variants
from lit_layers.models.running_order import SharedPrefixes, running_order
from lit_layers.models.view import LayeredModel
from tests.support.replay import replay
from tests.support.tiny_models import LAYERS, tiny, tiny_batch


def num_block_runs(shared: SharedPrefixes) -> int:
    """Return the number of block runs for one batch, without those of the trajectory."""
    beginnings = {order[:end] for order in shared.indices for end in range(1, len(order) + 1)}
    passed = {tuple(range(1, end + 1)) for end in range(1, shared.num_blocks + 1)}
    return sum(len(members(beginning[-1])) for beginning in beginnings - passed)


def walked(schedules, trajectory):
    found = {}
    for indices, state in SharedPrefixes(schedules, trajectory.num_layers).states(trajectory):
        for index in indices:
            assert index not in found
            found[index] = state.clone()
    return found


def runs_of(model, schedules, trajectory):
    """Return (block number, input state) of every block call."""
    calls, handles = [], []
    for number, block in enumerate(model.blocks, 1):

        def note(module, args, kwargs, number=number):
            calls.append((number, args[0].clone()))

        handles.append(block.register_forward_pre_hook(note, with_kwargs=True))
    walked(schedules, trajectory)
    for handle in handles:
        handle.remove()
    return calls


@pytest.fixture(scope="module")
def deep():
    return LayeredModel(tiny("gpt2", n_layer=7))


@pytest.fixture(scope="module")
def passed(deep):
    return deep.trajectory(tiny_batch("gpt2", batch=1, tokens=4))


def test_block_runs_are_those_counted_by_hand(deep, passed):
    def runs(*schedules):
        calls = runs_of(deep, schedules, passed)
        assert num_block_runs(SharedPrefixes(schedules, 7)) == len(calls)
        return [number for number, _ in calls]

    assert runs((1, 2, 3, 4, 5, 6, 7), (1, 2), ()) == []
    assert runs((1, 3), (1, 3)) == [3]
    assert runs((1, 4, 5), (1, (2, 3)), (1, (2, 3), 6)) == [2, 3, 6, 4, 5]
    assert runs((2,), (2, 3), (2, 3, 4)) == [2, 3, 4]
    assert num_block_runs(SharedPrefixes([], 7)) == 0
    assert walked([], passed) == {}


def test_a_schedule_longer_than_the_recursion_limit_runs(passed):
    long, limit = (1, 2) * 120, sys.getrecursionlimit()
    sys.setrecursionlimit(len(inspect.stack(0)) + 200)
    try:
        (found,) = walked([long], passed).values()
    finally:
        sys.setrecursionlimit(limit)
    torch.testing.assert_close(passed.model.readout(found), replay(passed.model, passed, long))


def test_schedules_of_another_model_are_refused():
    with pytest.raises(ValueError, match=r"block: expected 1\.\.3, got 4"):
        SharedPrefixes([(1, 2), (4,)], 3)
    with pytest.raises(TypeError, match="a step is a block number or a tuple of them, got '1'"):
        SharedPrefixes([("1",)], 3)


ORDERS = [variant.schedule for variant in variants(LAYERS, seeds=(0, 1), loops=(3,), custom=["(2,3) 1", "3 (1,2,1) 3"])]


@pytest.mark.parametrize(("name", "batch_size"), [("roberta", 1), ("llama", 5)])  # 5: as many texts as tokens
def test_logits_equal_those_of_the_model_in_each_order(name, batch_size):
    network = tiny(name, torch.float64)
    model, batch = LayeredModel(network), tiny_batch(name, batch=batch_size, tokens=5, padding="right")
    found = walked(ORDERS, model.trajectory(batch))
    real = batch["attention_mask"].bool()
    for index, schedule in enumerate(ORDERS):
        with torch.no_grad(), running_order(network, schedule):
            expected = network(**batch).logits
        torch.testing.assert_close(model.readout(found[index])[real], expected[real], rtol=1e-9, atol=1e-9)
