"""Influence of earlier tokens against its definition on Jacobians of the running model."""

import numpy as np
import pytest
import torch

from lit_layers.analyses.token_jacobians import CrossTokenInfluence
from tests.analyses.whole_jacobians import whole_jacobians
from tests.support.listed_batches import Listed
from tests.support.measured import keyed_records
from tests.support.tiny_models import LAYERS, tiny, tiny_batch

NAMES = ("frobenius", "spectral", "participation_ratio", "entropy_rank")


def run(model, *batches, **options):
    """Return the records by (metric, layer, distance), None for the mean over all earlier tokens."""
    return keyed_records(CrossTokenInfluence(batches=Listed(*batches), **options), model, "token_distance")


def influence_by_hand(jacobian):
    values = np.linalg.svd(jacobian, compute_uv=False)
    shares = values / values.sum()
    shares = shares[shares > 0]
    rank = np.exp(-(shares * np.log(shares)).sum())
    return np.sqrt((values**2).sum()), values[0], values.sum() ** 2 / (values**2).sum(), rank


def test_every_record_equals_the_definition_on_the_running_model(model):
    batch = tiny_batch("gpt2", batch=2, tokens=14)
    records = run(model, batch)
    groups = {distance: [distance] for distance in range(8)} | {8: [8, 9, 10, 11], 12: [12, 13], None: range(1, 14)}
    jacobians = [whole_jacobians(model, model.transformer.h, {"input_ids": ids[None]})[0] for ids in batch["input_ids"]]
    for layer in range(LAYERS):
        # (prompts, distances, names)
        values = np.array([[influence_by_hand(each[layer, 13, 13 - d]) for d in range(14)] for each in jacobians])
        for group, distances in groups.items():
            for number, name in enumerate(NAMES):
                record = records.pop((f"influence_{name}", layer + 1, group))
                means = values[:, list(distances), number].mean(1)
                assert record.value == pytest.approx(means.mean(), rel=1e-9)
                assert record.stderr == pytest.approx(means.std(ddof=1) / 2**0.5, rel=1e-7)
    assert not records


def test_fewer_inputs_are_spread_over_the_distances(model):
    batch = tiny_batch("gpt2", batch=1, tokens=8)
    every = run(model, batch)
    assert {key[2] for key in every} == {None, *range(8)}
    some = run(model, batch, num_inputs=4)
    distances = sorted(key[2] for key in some if key[0] == "influence_spectral" and key[1] == 1 and key[2] is not None)
    assert distances == [0, 1, 3, 7]  # 8 ** (i / 3) - 1
    long = run(model, tiny_batch("gpt2", batch=1, tokens=40), num_inputs=6)
    assert {key[2] for key in long} == {None, 0, 1, 3, 8, 16, 32}  # groups of distances 0, 1, 3, 8, 18 and 39
    for key, record in some.items():
        if key[2] is not None:
            assert record.value == pytest.approx(every[key].value, rel=1e-9)
    crowded = run(model, tiny_batch("gpt2", batch=1, tokens=6), num_inputs=5)
    assert {key[2] for key in crowded} == {None, 0, 1, 2, 3, 5}


def test_tokens_outside_the_window_are_counted_and_their_ranks_never_enter_a_mean():
    model = tiny("mistral", torch.float64)  # a window of 4 tokens
    records = run(model, tiny_batch("mistral", batch=1, tokens=7))
    assert records["influence_entropy_rank", 1, None].tags == {"num_undefined_tokens": 3}
    near = np.mean([records["influence_entropy_rank", 1, distance].value for distance in (1, 2, 3)])
    assert records["influence_entropy_rank", 1, None].value == pytest.approx(near, rel=1e-9)
    assert records["influence_frobenius", 1, 5].value == 0
    assert records["influence_frobenius", 1, None].tags == {}


def test_a_prompt_of_one_token_has_only_its_own_influence(model):
    records = run(model, tiny_batch("gpt2", batch=1, tokens=1))
    assert {key[2] for key in records} == {0}
