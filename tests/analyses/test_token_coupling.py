"""Coupling over tokens against its definition, pair by pair, on Jacobians of the running model."""

import itertools

import numpy as np
import pytest
import torch

from lit_layers.analyses.token_jacobians import TokenCoupling
from lit_layers.errors import InputError
from tests.analyses.whole_jacobians import copy_without_block_2, coupling_by_loops, whole_jacobians
from tests.support.listed_batches import Listed
from tests.support.measured import records_of
from tests.support.tiny_models import tiny, tiny_batch


def run(model, *batches, **options):
    """Return the records by (metric, layer, other_layer, tags)."""
    records = records_of(TokenCoupling(batches=Listed(*batches), **options), model)
    keys = [(r.metric, r.layer, r.other_layer, *sorted(r.tags.items())) for r in records]
    assert len(set(keys)) == len(keys)
    return dict(zip(keys, records, strict=True))


def tables_by_loops(first, second, tokens, k, **options):
    """Return (coupling, random, t, t') of all pairs of tokens per table, including t = t'."""
    tables = {"token": [], "input_context": [], "output_context": []}
    for t, u in itertools.product(tokens, tokens):
        tables["token"].append((*coupling_by_loops(first[t, t], second[u, u], k, **options), t, u))
    for fixed in tokens:
        after, before = [t for t in tokens if t >= fixed], [t for t in tokens if t <= fixed]
        for t, u in itertools.product(after, after) if len(after) > 1 else ():
            pair = coupling_by_loops(first[t, fixed], second[u, fixed], k, **options)
            tables["input_context"].append((*pair, t, u))
        for s, u in itertools.product(before, before) if len(before) > 1 else ():
            pair = coupling_by_loops(first[fixed, s], second[fixed, u], k, **options)
            tables["output_context"].append((*pair, s, u))
    return tables


@pytest.fixture(scope="module")
def model():
    return tiny("gpt2", torch.float64)


def jacobians_of(model, batch, index):
    """Return the Jacobians of one prompt without its padding."""
    real = batch["attention_mask"][index].bool()
    return whole_jacobians(model, model.transformer.h, {"input_ids": batch["input_ids"][index, real][None]})[0]


def means(table):
    """Return the mean coupling, random and excess coupling over the pairs of different tokens."""
    pairs = np.array([(coupling, random) for coupling, random, t, u in table if t != u])
    excess = 1 - (1 - pairs[:, 0]) / (1 - pairs[:, 1])
    return (*pairs.mean(0), excess.mean())


@pytest.mark.parametrize("options", [{}, pytest.param({"sign": "absolute"}, marks=pytest.mark.soak)])
def test_every_record_equals_the_definition_on_the_running_model(model, options):
    batch = tiny_batch("gpt2", batch=2, tokens=9)
    tokens = [0, 3, 5, 8]  # 4 evenly spread of 9 tokens: 0, 2.67, 5.33, 8
    absolute = options.get("sign") == "absolute"
    prompts = [jacobians_of(model, batch, index) for index in range(2)]
    records = run(model, batch, k=(4, 0.25), num_tokens=4, pairs=[(2, 2), (3, 1)], **options)
    gaps = {4: [], 8: []}
    for k, (layer, other) in itertools.product((4, 8), ((2, 2), (3, 1))):
        blocks = (layer, None if layer == other else other)
        prompt_tables = [
            tables_by_loops(jacobians[layer - 1], jacobians[other - 1], tokens, k, absolute=absolute)
            for jacobians in prompts
        ]
        for table in ("token", "input_context", "output_context"):
            expected = np.array([means(tables[table]) for tables in prompt_tables])
            for name, values in zip(("", "random_", "excess_"), expected.T, strict=True):
                record = records.pop((f"{name}{table}_coupling", *blocks, ("k", k)))
                assert record.value == pytest.approx(values.mean(), abs=1e-9)
                assert record.stderr == pytest.approx(values.std(ddof=1) / 2**0.5, abs=1e-9)
                assert record.n == 2
                assert record.low <= record.value <= record.high
            for t, u in itertools.product(range(4), range(4)):
                pair_values = [
                    np.mean([pair[0] for pair in tables[table] if pair[2:] == (tokens[t], tokens[u])])
                    for tables in prompt_tables
                    if any(pair[2:] == (tokens[t], tokens[u]) for pair in tables[table])
                ]
                percent = (0, 33, 67, 100)
                key = (f"{table}_coupling_pair", *blocks, ("k", k), ("other_token", percent[u]), ("token", percent[t]))
                assert records.pop(key).value == pytest.approx(np.mean(pair_values), abs=1e-9)
        for jacobians in prompts:
            for t, s in itertools.product(tokens, tokens):
                if s <= t:
                    spectrum = np.linalg.svd(jacobians[other - 1, t, s], compute_uv=False)
                    gaps[k].append(((spectrum[:k] - spectrum[1 : k + 1]) / spectrum[0]).min())
    for k in (4, 8):
        assert records.pop(("min_gap", None, None, ("k", k))).value == pytest.approx(min(gaps[k]), abs=1e-9)
        assert records.pop(("num_tied", None, None, ("k", k))).value == sum(gap < 1e-4 for gap in gaps[k])
    assert not records


def test_all_pairs_of_blocks_are_measured_on_request(model):
    records = run(model, tiny_batch("gpt2", batch=1, tokens=4), k=(2,), num_tokens=2, tables=("token",), pairs="all")
    pairs = {(layer, other or layer) for metric, layer, other, *_ in records if metric == "token_coupling"}
    assert pairs == {*itertools.product((1, 2, 3), (1, 2, 3))}


def test_a_block_is_fully_coupled_with_itself_at_the_same_token(model):
    records = run(model, tiny_batch("gpt2", batch=1, tokens=6), k=(4,), num_tokens=3)
    for table, layer, token in itertools.product(("token", "input_context", "output_context"), (1, 2, 3), (0, 50, 100)):
        key = (f"{table}_coupling_pair", layer, None, ("k", 4), ("other_token", token), ("token", token))
        assert records[key].value == pytest.approx(1, abs=1e-9)


@pytest.mark.soak
def test_a_short_prompt_enters_only_the_means_and_a_prompt_of_one_token_is_counted(model):
    padded = tiny_batch("gpt2", batch=3, tokens=8, padding="right")
    padded["attention_mask"] = torch.tensor([[1] * 8, [1] * 3 + [0] * 5, [1] + [0] * 7])
    records = run(model, padded, k=(4,), num_tokens=4, tables=("token",), pairs=[(1, 1)])
    record = records["token_coupling", 1, None, ("k", 4), ("num_undefined", 1)]
    assert record.n == 2
    tables = [tables_by_loops(jacobians_of(model, padded, index)[0], jacobians_of(model, padded, index)[0], tokens, 4)
              for index, tokens in ((0, [0, 2, 5, 7]), (1, [0, 1, 2]))]  # fmt: skip
    assert record.value == pytest.approx(np.mean([means(table["token"])[0] for table in tables]), abs=1e-9)
    maps = [record for key, record in records.items() if key[0] == "token_coupling_pair"]
    assert len(maps) == 16
    assert all(record.n == 1 for record in maps)
    one = {"input_ids": padded["input_ids"][:, :1]}
    with pytest.raises(InputError, match="needs prompts of at least two tokens, all have one"):
        run(model, one, k=(4,))


def test_a_dead_block_has_no_record_and_cannot_be_measured_by_itself(model):
    model = copy_without_block_2(model)
    records = run(model, tiny_batch("gpt2", batch=2, tokens=6), k=(4,), num_tokens=3)
    assert {key[1] for key in records if key[0] == "token_coupling"} == {1, 3}
    with pytest.raises(ValueError, match="token_coupling is undefined for every prompt"):
        run(model, tiny_batch("gpt2", batch=2, tokens=6), k=(4,), num_tokens=3, pairs=[(2, 2)])


@pytest.mark.soak
def test_pairs_with_a_token_outside_the_window_are_left_out_and_counted():
    model = tiny("mistral", torch.float64)  # a window of 4 tokens: farther Jacobians are exactly zero
    batch = tiny_batch("mistral", batch=1, tokens=7)
    records = run(model, batch, k=(4,), num_tokens=3, tables=("output_context",), pairs=[(1, 1)])
    # positions 0, 3, 6; outputs with two or more inputs: 3 (of 0, 3) and 6 (of 0, 3, 6), but 0 is outside its window
    (key,) = [key for key in records if key[0] == "output_context_coupling"]
    assert dict(key[3:])["num_undefined_pairs"] == 4
    assert records[key].n == 1
    (jacobians, *_), _ = whole_jacobians(model, model.model.layers, {"input_ids": batch["input_ids"]})
    assert not jacobians[6, 0].any()
    left = [coupling_by_loops(jacobians[t, s], jacobians[t, u], 4)[0] for t, s, u in
            ((3, 0, 3), (3, 3, 0), (6, 3, 6), (6, 6, 3))]  # fmt: skip
    assert records[key].value == pytest.approx(np.mean(left), abs=1e-6)
