"""Blocks on several states of a small batch at once, against each order by itself, in float64; and what that holds."""

import gc
from dataclasses import replace
from itertools import permutations
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lit_layers.functional.block_schedules import variants
from lit_layers.models import order_walk, running_order
from lit_layers.models.order_walk import Runs, Walk, repeated
from lit_layers.models.running_order import SharedPrefixes
from lit_layers.models.view import LayeredModel
from tests.support.noted_calls import noted_calls
from tests.support.planned_runs import num_block_runs
from tests.support.tiny_models import DIM, EVERY, LAYERS, by_kind, sees_images, tiny, tiny_batch

ORDERS = [variant.schedule for variant in variants(LAYERS, seeds=(0, 1), loops=(3,), custom=["(2,3) 1", "3 (1,2,1) 3"])]


def rows_run(model, run):
    """Of each call of a block how many rows it had, and what `run` gave.

    By the first part of a block: where states are handed on in its place, a block itself is called, too.
    """
    rows = []
    parts = {next(iter(block.children())) for block in model.blocks}
    with noted_calls(parts, lambda state: rows.append(len(state))):
        found = run()
    return rows, found


def walked(schedules, trajectory):
    orders = SharedPrefixes(schedules, trajectory.num_layers)
    return {index: state for indices, state in orders.states(trajectory) for index in indices}


@pytest.mark.parametrize("padding", ["left", "right"])
@pytest.mark.parametrize("name", by_kind(EVERY, pytest.mark.nightly))
def test_each_order_of_every_family_ends_as_it_does_by_itself(name, padding, monkeypatch):
    if sees_images(name) and padding == "right":
        pytest.skip("images have no padding")
    model = LayeredModel(tiny(name, torch.float64))
    batch = tiny_batch(name, batch=4, tokens=8, padding=padding)
    trajectory = model.trajectory(batch)
    calls = []
    monkeypatch.setattr(order_walk, "repeated", lambda *args: calls.append(repeated(*args)) or calls[-1])
    found = walked(ORDERS, trajectory)
    assert len(calls) == (model.origin == "row")
    assert None not in calls
    for index, schedule in enumerate(ORDERS):
        torch.testing.assert_close(
            model.readout(found[index]), model.replay(trajectory, schedule), rtol=1e-9, atol=1e-9
        )


@pytest.mark.parametrize("name", ["gpt2", "llama", "roberta"])
@pytest.mark.parametrize("batch_size", [1, 5])  # 5: as many texts as tokens
def test_the_model_itself_in_each_order_gives_these_logits(name, batch_size):
    network = tiny(name, torch.float64)
    model, batch = LayeredModel(network), tiny_batch(name, batch=batch_size, tokens=5, padding="right")
    found = walked(ORDERS, model.trajectory(batch))
    real = batch["attention_mask"].bool()
    for index, schedule in enumerate(ORDERS):
        with torch.no_grad(), running_order.running_order(network, schedule):
            expected = network(**batch).logits
        torch.testing.assert_close(model.readout(found[index])[real], expected[real], rtol=1e-9, atol=1e-9)


@pytest.fixture(scope="module")
def deep():
    return LayeredModel(tiny("gpt2", n_layer=7))


@pytest.fixture(scope="module")
def passed(deep):
    return deep.trajectory(tiny_batch("gpt2", batch=2, tokens=4))


def test_blocks_are_called_less_often_on_the_same_number_of_rows(deep, passed, monkeypatch):
    schedules = [*permutations(range(1, 7))]
    runs = num_block_runs(SharedPrefixes(schedules, 7))
    together, _ = rows_run(deep, lambda: walked(schedules, passed))
    assert sum(together) == 2 * runs
    assert len(together) < runs / 2
    assert max(together) == 2 * 16
    assert {rows // 2 for rows in together} <= {1, 2, 4, 8, 16}
    monkeypatch.setattr(running_order, "TOKENS_TOGETHER", 4 * 8)  # four times the batch
    assert max(rows_run(deep, lambda: walked(schedules, passed))[0]) == 2 * 4
    monkeypatch.setattr(running_order, "TOKENS_TOGETHER", 8 + 7)
    assert rows_run(deep, lambda: walked(schedules, passed))[0] == [2] * runs


def test_by_hand_so_many_run_together(monkeypatch):
    monkeypatch.setattr(running_order, "takes_copies", lambda model: True)

    def together(tokens, bytes_of_token):
        state = torch.empty(1, 1, tokens, bytes_of_token, dtype=torch.int8, device="meta")
        return orders.together(SimpleNamespace(hidden=state, model=None))

    orders = SharedPrefixes([(1, 2, 3, 4, 5), (1, (2, 3), 4)], 5)
    assert orders.num_held == 5 + 2 * 2 + 3
    assert [together(tokens, 1) for tokens in (1, 64, 65, 128, 512, 513, 10**6)] == [16, 16, 8, 8, 2, 1, 1]
    # 2^28 bytes in all: 12 states of 10 MB are 120 MB, of 20 MB 240
    assert [together(1, megabytes * 10**6) for megabytes in (1, 5, 10, 20, 1000)] == [16, 4, 2, 1, 1]


def most_held(model, trajectory, states_of_orders):
    """The most bytes of states (2, 4, dim) that are there when a block begins, in states of the batch."""
    most, number = 0, 0

    def states():
        """Storages of tensors, by their places."""
        found = (each for each in gc.get_objects() if type(each) is torch.Tensor)
        return {
            each.untyped_storage().data_ptr(): each.untyped_storage().nbytes()
            for each in found
            if each.ndim == 3 and each.shape[1:] == (4, DIM)
        }

    def note(state):
        nonlocal most, number
        number += 1
        if number % 3 == 0:  # looking through all objects takes its time
            most = max(most, sum(size for place, size in states().items() if place not in before))

    gc.collect()
    before = {*states(), trajectory.hidden.untyped_storage().data_ptr()}
    with noted_calls({next(model.blocks[3].children())}, note):
        for _ in states_of_orders:
            pass
    assert most
    return most / trajectory.hidden[0].nbytes


def test_no_more_is_held_than_one_way_through_of_as_many_batches(deep, passed, monkeypatch):
    orders = SharedPrefixes([*permutations(range(1, 6))], 7)
    monkeypatch.setattr(running_order, "MOST_TOGETHER", 4)
    assert orders.num_held < most_held(deep, passed, orders.states(passed)) <= 4 * orders.num_held

    orders = SharedPrefixes([*permutations(range(1, 7))], 7)

    def held(room):
        return most_held(deep, passed, Walk(passed, Runs(passed, 4), room).ends(orders._root))

    # Where there is less room, one way is gone to its end before a block runs on several states again.
    limit = 6 + 2 * 4 + orders.num_held
    assert held(room=6) <= limit < held(room=10**9)


def test_blocks_whose_arguments_are_no_copies_take_one_state_at_a_time(deep, passed):
    schedules = [variant.schedule for variant in variants(7, seeds=(0,))]
    runs = num_block_runs(SharedPrefixes(schedules, 7))
    expected = walked(schedules, passed)

    def with_argument(value):
        calls = [replace(call, kwargs=call.kwargs | {"encoder_attention_mask": value}) for call in passed.calls]
        return replace(passed, calls=tuple(calls))

    # What came from another block, with a number for each prompt; and an object that nobody knows.
    for value in (torch.zeros(2, 1, 4, 4), object()):
        other = with_argument(value)
        assert repeated(other, 2) is None
        rows, found = rows_run(deep, lambda other=other: walked(schedules, other))
        assert rows == [2] * runs
        for index, state in found.items():
            torch.testing.assert_close(state, expected[index], rtol=1e-5, atol=1e-5)


def test_copies_of_arguments_are_known_by_their_values():
    once = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    for axis in (0, 1):
        assert order_walk._are_copies(torch.cat([once] * 3, axis), once, 3, {})
        assert not order_walk._are_copies(torch.cat([once] * 3, axis), once, 2, {})
    assert order_walk._are_copies(once.clone(), once, 3, {})
    assert not order_walk._are_copies(once.repeat_interleave(3, 0), once, 3, {})  # row by row, not copy by copy
    assert not order_walk._are_copies(once + 1, once, 3, {})
    assert not order_walk._are_copies(once.repeat(3, 3), once, 3, {})
    assert not order_walk._are_copies(once.double(), once, 3, {})
    pair = [(once, None), {"x": 3}]
    assert order_walk._are_copies([(once.repeat(2, 1), None), {"x": 3}], pair, 2, {})
    assert not order_walk._are_copies([(once.repeat(2, 1), None), {"x": 4}], pair, 2, {})
    assert not order_walk._are_copies([(once.repeat(2, 1), None), {"y": 3}], pair, 2, {})


def test_a_model_by_structure_or_with_quantized_weights_takes_one_state_at_a_time():
    for name, quantized in (("gpt2", True), ("bert", False), ("mpt", False)):
        model = LayeredModel(tiny(name))
        model.model.is_quantized = quantized
        trajectory = model.trajectory(tiny_batch(name, batch=2, tokens=4))
        rows, _ = rows_run(model, lambda trajectory=trajectory: walked(ORDERS, trajectory))
        assert set(rows) == {2}, name


def of_one_text(module, args, output):
    """A hook that takes what a part adds from the first text of a batch alone."""
    output = output.clone()
    output[0] = 0
    return output


class Centred(torch.nn.Module):
    """A part of nobody's library that looks at the whole batch."""

    def forward(self, hidden):
        return hidden - hidden.mean((0, 1))


def changed(kind):
    network = tiny("llama").eval()
    if kind == "quantized as it runs":
        return torch.ao.quantization.quantize_dynamic(network, {torch.nn.Linear})
    block: Any
    for block in LayeredModel(network).blocks:
        if kind == "a hook":
            block.mlp.register_forward_hook(of_one_text)
        else:
            norm = torch.nn.BatchNorm1d(7, track_running_stats=False)
            block.mlp = torch.nn.Sequential(block.mlp, norm if kind == "a norm" else Centred())
    return network


@pytest.mark.filterwarnings("ignore:.*quant.*")
@pytest.mark.parametrize("kind", ["quantized as it runs", "a hook", "a part", "a norm"])
def test_where_a_text_depends_on_those_beside_it_each_state_is_passed_by_itself(kind):
    model = LayeredModel(changed(kind))
    trajectory = model.trajectory(tiny_batch("llama", batch=2, tokens=7))
    for index, state in walked(ORDERS, trajectory).items():
        torch.testing.assert_close(model.readout(state), model.replay(trajectory, ORDERS[index]), rtol=0, atol=0)
