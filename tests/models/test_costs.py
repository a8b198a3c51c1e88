"""Calls are timed in interleaved rounds, and are those of the model itself."""

import torch

from lit_layers.models.costs import call_of, interleaved
from tests.support.tiny_models import tiny, tiny_batch


def test_models_are_timed_in_turn_and_each_round_begins_with_the_next():
    calls = []
    named = {name: [lambda name=name, part=part: calls.append(name + part) for part in "12"] for name in "abc"}
    seconds = interleaved(named, num_rounds=3, num_warm_up=2)
    assert {name: [len(found) for found in both] for name, both in seconds.items()} == {name: [3, 3] for name in "abc"}
    order = ["b1b2c1c2a1a2", "c1c2a1a2b1b2", "a1a2b1b2c1c2", "b1b2c1c2a1a2", "c1c2a1a2b1b2"]
    assert "".join(calls) == "".join(order)


def test_a_call_returns_the_output_of_the_model_itself():
    for name in ("gpt2", "bert_trunk", "vit"):
        model, batch = tiny(name), tiny_batch(name, padding="right")
        expected = model(batch["pixel_values"]) if name == "vit" else model(**batch)[0]
        with torch.no_grad():
            found = call_of(model, batch)()
        assert torch.equal(found if name == "vit" else found[0], expected)
