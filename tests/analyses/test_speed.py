"""Speed of variants: exact counts, results of a simulated clock, and properties on any machine."""

import pytest
import torch

from lit_layers.analyses.speed import Speed, measure_speed, weight_bytes
from lit_layers.errors import InputError
from lit_layers.functional.block_schedules import variants
from lit_layers.measuring.one_model import measure
from lit_layers.models.costs import peak_bytes
from lit_layers.models.view import LayeredModel
from tests.support.tiny_models import tiny, tiny_batch

ROUNDS = {"num_rounds": 2, "num_warm_up": 1}


def speeds(model, compared, batch, **options):
    """Return the values of each variant by metric."""
    values = {}
    for record in measure_speed(model, compared, batch, **options):
        values.setdefault(tuple({**record.tags, "block": record.layer}.items()), {})[record.metric] = record.value
    return list(values.values())


def deep(name="gpt2", **options):
    return tiny(name, **{{"gpt2": "n_layer", "vit": "depth"}.get(name, "num_hidden_layers"): 5}, **options)


@pytest.fixture
def seconds(monkeypatch):
    """Return a model with a simulated clock: one second for each block that runs, and one for the rest."""
    model, ran = deep(), [0]
    for block in model.transformer.h:
        block.mlp.c_fc.register_forward_hook(lambda *_: ran.__setitem__(0, ran[0] + 1))

    def timed(call, device):
        ran[0] = 0
        call()
        return 1.0 + ran[0]

    monkeypatch.setattr("lit_layers.models.costs._seconds", timed)
    return model


def test_latency_ratio_and_throughput_follow_from_the_seconds(seconds):
    compared = variants(5, ["skip", "looped_parallel", "skip_one"], middles=[2], loops=[3])
    found = dict(zip(map(str, compared), speeds(seconds, compared, tiny_batch("gpt2", 4, 7), **ROUNDS), strict=True))
    blocks = {"baseline": 5, "skip M=2": 3, "looped_parallel M=2 k=3": 9, "skip_one block=2": 4}
    for name, count in blocks.items():
        each = found[name]
        assert each["latency"] == each["latency_first_quartile"] == each["latency_third_quartile"] == 1 + count
        assert each["relative_latency"] == (1 + count) / 6
        assert each["throughput"] == 4 / (1 + count)
    assert len(found) == 1 + 1 + 1 + 5


def test_quartiles_are_taken_over_rounds(monkeypatch):
    ticks = iter([0, 4, 40, 0, 0, 1, 10, 0, 0, 2, 20, 0, 0, 3, 30, 0, 0, 8, 80, 0])
    monkeypatch.setattr("lit_layers.models.costs._seconds", lambda call, device: float(next(ticks)))
    (full,) = speeds(deep(), variants(5, []), tiny_batch("gpt2", 2, 7), num_rounds=5, num_warm_up=0)
    assert full["latency"] == 3
    assert (full["latency_first_quartile"], full["latency_third_quartile"]) == (2, 4)
    assert full["throughput"] == pytest.approx(2 / 30)


def test_bytes_of_weights_are_those_of_the_blocks_that_run():
    blocks = LayeredModel(deep()).blocks
    one_block = sum(parameter.numel() for parameter in blocks[0].parameters()) * 4
    assert weight_bytes(blocks, (1, 2, 3, 4, 5)) == 5 * one_block
    assert weight_bytes(blocks, (1, 2, 2, 2, 5)) == 3 * one_block
    assert weight_bytes(blocks, (1, (2, 3, 4), (2, 3, 4), 5)) == 5 * one_block
    assert weight_bytes([block.half() for block in blocks], (1, 2)) == one_block


def test_the_peak_is_the_largest_memory_in_use_at_one_time():
    start = torch.zeros(1000)

    def call():
        one = start + 1  # 4,000 bytes
        two = one * 2  # 8,000
        del one
        return two + 1  # 8,000: the first is freed

    assert peak_bytes(call) == pytest.approx(8000, abs=128)
    assert peak_bytes(lambda: None) == 0
    assert peak_bytes(lambda: [start + number for number in range(5)]) == pytest.approx(20000, abs=512)


@pytest.mark.parametrize("name", ["gpt2", "vit"])
def test_the_analysis_yields_every_number_of_every_variant(name):
    options = {"variants": ["parallel", "random", "switch"], "middles": [2], "num_tokens": 8, "batch_size": 2}
    found = measure(deep(name), Speed(**options, **ROUNDS), run="r", step=None)
    assert (found.error, found.analysis) == (None, "intervene/speed")
    values_by_tags = {}
    for record in found.records:
        key = record.tags["variant"], record.tags.get("middle"), record.layer
        values_by_tags.setdefault(key, {})[record.metric] = record.value
    expected = {("baseline", None, None), ("parallel", 2, None), ("random", 2, None)}
    expected |= {("switch", None, block) for block in range(1, 5)}
    assert values_by_tags.keys() == expected
    metrics = {"latency", "latency_first_quartile", "latency_third_quartile", "relative_latency"}
    for values in values_by_tags.values():
        assert values.keys() == metrics | {"throughput", "peak_memory", "weight_bytes"}
        assert all(value > 0 for value in values.values())
    assert values_by_tags["baseline", None, None]["relative_latency"] == 1


def test_a_failing_variant_leaves_the_model_in_its_original_order(monkeypatch):
    model, asked = deep(), []

    def failing(call, device):
        asked.append(call())
        if len(asked) == 7:  # within the second variant
            raise OSError("gone")
        return 1.0

    monkeypatch.setattr("lit_layers.models.costs._seconds", failing)
    with pytest.raises(OSError, match="gone"):
        speeds(model, variants(5, ["skip"], middles=[2]), tiny_batch("gpt2", 2, 7), **ROUNDS)
    assert "_running_order" not in model.__dict__
    assert all("forward" not in block.__dict__ for block in model.transformer.h)


def test_invalid_options_are_refused_before_the_measurement():
    for options, sentence in (
        ({"num_tokens": 65}, "num_tokens: the model takes at most 64 tokens, got 65"),
        ({"middles": [3]}, ": of 5 blocks the middle has 2, 4 blocks, got 3"),
    ):
        with pytest.raises(InputError) as refused:
            Speed(**options).check(LayeredModel(deep()))
        assert sentence in str(refused.value)
