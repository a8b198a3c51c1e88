"""EffectiveDepth on a small GPT-2, against the model itself with hooks that skip a block."""

import numpy as np
import pytest
import torch

from lit_layers.analyses import EffectiveDepth
from tests.analyses.prompt_states import BATCHES, states_of_each_prompt
from tests.support.listed_batches import Listed
from tests.support.measured import records_of
from tests.support.skipping import skipping
from tests.support.tiny_models import LAYERS, tiny


def run(model) -> dict:
    records = records_of(EffectiveDepth(batches=Listed(*BATCHES)), model)
    return {(record.metric, record.layer, record.other_layer): record for record in records}


def median_ratio(vectors: np.ndarray, usual: np.ndarray) -> float:
    return float(np.median(np.linalg.norm(vectors, axis=-1) / np.linalg.norm(usual, axis=-1)))


def test_every_value_is_that_of_the_model_with_hooks_that_skip_a_block():
    model = tiny("gpt2", torch.float64)
    full, effects, expected = states_of_each_prompt(model, BATCHES), [], {}
    usual = [np.diff(states, axis=0) for states in full]  # what each block adds
    for block in range(LAYERS - 1):
        with skipping(model.transformer.h[block]):
            added = [np.diff(states, axis=0) for states in states_of_each_prompt(model, BATCHES)]
        later = range(block + 1, LAYERS)
        pairs = [[median_ratio(a[m] - u[m], u[m]) for a, u in zip(added, usual, strict=True)] for m in later]
        expected |= {("later_effect_pair", block + 1, m + 1): np.mean(pairs[m - block - 1]) for m in later}
        effects.append(np.mean(pairs, axis=0))
    effects.append([median_ratio(states[-1] - states[-2], states[-1]) for states in full])
    expected |= {("later_effect", layer, None): np.mean(values) for layer, values in enumerate(effects, start=1)}
    expected["later_effect", None, None] = np.mean(effects)
    expected["effective_depth", None, None] = np.mean(np.sum(effects, 0) ** 2 / np.square(effects).sum(0))
    assert {key: record.value for key, record in run(model).items()} == pytest.approx(expected, rel=1e-9)


def test_a_model_whose_blocks_add_constants_has_depth_one():
    model = tiny("gpt2", torch.float64)
    for block in model.transformer.h:
        block.forward = lambda states, *args, **options: states + torch.arange(32) / 7
    found = run(model)
    assert max(record.value for key, record in found.items() if key[0] == "later_effect_pair") < 1e-13
    assert found["effective_depth", None, None].value == pytest.approx(1, abs=1e-10)


def test_a_token_to_which_a_block_adds_nothing_leaves_its_prompt_out():
    model = tiny("gpt2", torch.float64)
    model.transformer.h[2].forward = lambda states, *args, **options: states + states * (states[..., :1] > -0.5)
    undefined = [(states[2] == states[3]).all(-1).any() for states in states_of_each_prompt(model, BATCHES)]
    assert 0 < sum(undefined) < len(undefined)
    assert run(model)["effective_depth", None, None].tags == {"num_undefined": sum(undefined)}
