"""Similarities of layers against plain formulas on the states of single prompts, in float64."""

import itertools
import math

import numpy as np
import pytest
import torch

from lit_layers.analyses import LayerSimilarity
from lit_layers.errors import InputError
from lit_layers.functional.geometry import layer_stages
from tests.analyses.prompt_states import BATCHES, states_of_each_prompt
from tests.support.listed_batches import Listed
from tests.support.measured import records_of
from tests.support.tiny_models import tiny, tiny_batch

BLOCKS = 4


@pytest.fixture(scope="module")
def model():
    return tiny("gpt2", torch.float64, n_layer=BLOCKS)


@pytest.fixture(scope="module")
def states(model):
    """Return the states (layers + 1, tokens, dim) of each prompt."""
    return states_of_each_prompt(model, BATCHES)


def key(record):
    tags = {name: tag for name, tag in record.tags.items() if not name.startswith("num_")}
    return (record.metric, record.layer, record.other_layer, *sorted(tags.items()))


def run(model, *batches, **options):
    records = records_of(LayerSimilarity(batches=Listed(*batches), **options), model)
    found = {key(record): record for record in records}
    assert len(found) == len(records)
    return found


@pytest.fixture(scope="module")
def records(model):
    return run(model, *BATCHES)


def cosine(x, y, mode):
    if mode == "flattened":
        return (x * y).sum() / math.sqrt((x * x).sum() * (y * y).sum())
    return np.mean([a @ b / math.sqrt((a @ a) * (b @ b)) for a, b in zip(x, y, strict=True)])


def alignment(x, y):
    """Compute the debiased CKA, with HSIC_1 of Song et al. 2012 in all three terms."""

    def hsic(k, m):
        k, m, size = k - np.diag(np.diag(k)), m - np.diag(np.diag(m)), len(k)
        sums = k.sum() * m.sum() / ((size - 1) * (size - 2)) - 2 / (size - 2) * (k.sum(0) @ m.sum(1))
        return (np.trace(k @ m) + sums) / (size * (size - 3))

    k, m = x @ x.T, y @ y.T
    return hsic(k, m) / math.sqrt(hsic(k, k) * hsic(m, m))


def spread(count, length):
    """Return at most `count` evenly spread positions of a row, with both ends."""
    if count >= length:
        return list(range(length))
    return sorted({round(index * (length - 1) / (count - 1)) for index in range(count)})


def test_cosines_are_averaged_over_prompts(records, states):
    every = range(BLOCKS + 1)
    for mode, layer, other in itertools.product(("token", "flattened"), every, every):
        values = np.array([cosine(prompt[layer], prompt[other], mode) for prompt in states])
        record = records["layer_cosine", layer, other, ("mode", mode)]
        assert record.value == pytest.approx(values.mean(), rel=1e-9, abs=1e-12), (mode, layer, other)
        assert record.n == 8
        assert record.stderr == pytest.approx(values.std(ddof=1) / math.sqrt(8), rel=1e-6, abs=1e-9)


def test_cka_uses_the_tokens_of_all_prompts_together(model, records, states):
    rows = np.concatenate(states, axis=1)
    for layer in range(BLOCKS + 1):
        for other in range(BLOCKS + 1):
            record = records["layer_cka", layer, other]
            assert record.value == pytest.approx(alignment(rows[layer], rows[other]), rel=1e-9)
            assert (record.n, record.tags) == (8, {"num_rows": rows.shape[1]})
    few = run(model, *BATCHES, num_tokens=3)
    rows = np.concatenate([prompt[:, spread(3, prompt.shape[1])] for prompt in states], axis=1)
    assert few["layer_cka", 1, 3].value == pytest.approx(alignment(rows[1], rows[3]), rel=1e-9)
    assert few["layer_cka", 1, 3].tags["num_rows"] == rows.shape[1] == 24


def test_dropped_first_tokens_enter_no_similarity_and_conventions_are_tagged(model):
    found = run(model, *BATCHES, drop_first=1, states="hf")
    states = states_of_each_prompt(model, BATCHES, final_norm=True)
    rows = np.concatenate([prompt[:, 1:] for prompt in states], axis=1)
    tags = ("drop_first", 1), ("states", "hf")
    record = found["layer_cka", 0, 4, *tags]
    assert record.value == pytest.approx(alignment(rows[0], rows[4]), rel=1e-9)
    assert record.tags["num_rows"] == rows.shape[1]
    values = [cosine(prompt[1][1:], prompt[4][1:], "flattened") for prompt in states]
    record = found["layer_cosine", 1, 4, *sorted((*tags, ("mode", "flattened")))]
    assert record.value == pytest.approx(np.mean(values), rel=1e-9)


def test_stages_are_those_of_the_layers_after_the_embedding(records):
    for metric, mode in (("layer_cosine", "token"), ("layer_cosine", "flattened"), ("layer_cka", None)):
        tags = (("mode", mode),) if mode else ()
        layers = range(1, BLOCKS + 1)
        matrix = torch.tensor([[records[metric, layer, other, *tags].value for other in layers] for layer in layers])
        expected = layer_stages(matrix)
        rest = (None, None, *sorted((*tags, ("of", metric))))
        sizes = [records[name, *rest].value for name in ("num_beginning", "num_middle", "num_ending")]
        assert sizes == list(expected[:3])
        assert sum(sizes) == BLOCKS
        assert records["block_contrast", *rest].value == pytest.approx(expected.contrast, rel=1e-6, abs=1e-9)
        assert records["num_middle", *rest].n == 8


def test_blocks_that_change_nothing_are_the_middle():
    model = tiny("gpt2", torch.float64, n_layer=7)
    for number in (3, 4, 5, 6):  # layers 2 to 6 are equal; layers 1 and 7 differ from them by large steps
        block = model.transformer.h[number - 1]
        for module in (block.attn.c_proj, block.mlp.c_proj):
            module.weight.data.zero_()
            module.bias.data.zero_()
    for number, size in ((2, 20), (7, 2000)):
        model.transformer.h[number - 1].mlp.c_proj.weight.data.mul_(size)
    found = run(model, *BATCHES)
    for tags in ((("mode", "token"), ("of", "layer_cosine")), (("of", "layer_cka"),)):
        sizes = [found[name, None, None, *tags].value for name in ("num_beginning", "num_middle", "num_ending")]
        assert sizes == [1, 5, 1]
        assert found["block_contrast", None, None, *tags].value > 0.1
    assert found["layer_cosine", 2, 6, ("mode", "token")].value == pytest.approx(1, abs=1e-12)


def test_prompts_without_remaining_tokens_change_nothing(model, states):
    lone = {"input_ids": torch.tensor([[5, 6]]), "attention_mask": torch.tensor([[1, 0]])}
    assert run(model, *BATCHES, lone, drop_first=1) == run(model, *BATCHES, drop_first=1)
    with pytest.raises(InputError, match="^layer_similarity: layer_cka needs 4 rows or more, got 0"):
        run(model, lone, drop_first=1)
    with pytest.raises(InputError, match="needs 4 rows or more, got 1: give more texts"):
        run(model, tiny_batch("gpt2", batch=1), num_tokens=1)
