"""States inside changed orders against blocks called one by one, with cosines in numpy."""

import numpy as np
import pytest
import torch

from lit_layers.analyses import OrderStates
from lit_layers.errors import InputError
from lit_layers.models.view import LayeredModel
from tests.analyses.prompt_states import BATCHES
from tests.support.listed_batches import Listed
from tests.support.measured import records_of
from tests.support.tiny_models import tiny

BLOCKS = 6
# The blocks that run before the ending blocks, and the layer whose state these normally receive.
BEFORE = {
    ("baseline", None): ([1, 2, 3, 4, 5, 6], 6),
    ("skip", 3): ([1, 2], 5),
    ("middle_repeat", 3): ([1, 2, 4, 4, 4], 5),
    ("reverse", 5): ([1, 6, 5, 4, 3, 2], 6),
    ("skip", 5): ([1], 6),
}


@pytest.fixture(scope="module")
def model():
    return tiny("gpt2", torch.float64, n_layer=BLOCKS)


def run(model, *batches, **options):
    records = [*records_of(OrderStates(batches=Listed(*batches), **options), model)]
    return {(r.metric, r.tags["variant"], r.tags.get("middle"), r.tags.get("loops")): r for r in records}


def prompt_means(model, batch, order, layer, drop_first=0):
    """Return the mean cosine and the mean ratio of norms of each prompt."""
    view = LayeredModel(model)
    trajectory = view.trajectory(batch)
    state = trajectory.hidden[0]
    with torch.no_grad():
        for number in order:
            state = trajectory.block(number)(state)
    found = []
    for x, y, real in zip(state.numpy(), trajectory.hidden[layer].numpy(), trajectory.mask.numpy(), strict=True):
        pairs = [(a, b) for a, b, is_real in zip(x, y, real, strict=True) if is_real][drop_first:]
        cosines = [a @ b / np.sqrt((a @ a) * (b @ b)) for a, b in pairs]
        ratios = [np.sqrt((a @ a) / (b @ b)) for a, b in pairs]
        found.append((np.mean(cosines), np.mean(ratios)))
    return found


def test_the_input_of_the_ending_blocks_equals_that_of_blocks_called_one_by_one(model):
    found = run(model, *BATCHES, variants=("skip", "middle_repeat", "reverse"), middles=(3, 5))
    for (variant, middle), (order, layer) in BEFORE.items():
        prompts = [pair for batch in BATCHES for pair in prompt_means(model, batch, order, layer)]
        for metric, values in zip(("cosine", "norm_ratio"), zip(*prompts, strict=True), strict=True):
            record = found[f"ending_input_{metric}", variant, middle, None]
            assert record.value == pytest.approx(np.mean(values), abs=1e-9)
            assert (record.n, record.layer) == (8, None)
    assert found["ending_input_cosine", "baseline", None, None].value == pytest.approx(1, abs=1e-12)
    assert found["ending_input_cosine", "skip", 3, None].value < 0.999


def test_random_orders_give_one_number_and_each_number_of_loops_its_own(model):
    found = run(model, *BATCHES, variants=("random", "looped_parallel"), middles=(3,), seeds=(0, 1), loops=(2, 3))
    keys = {key[1:] for key in found}
    assert keys == {("baseline", None, None), ("random", 3, None), ("looped_parallel", 3, 2), ("looped_parallel", 3, 3)}
    key = "ending_input_cosine", "random", 3, None
    single = [run(model, *BATCHES, variants=("random",), middles=(3,), seeds=(seed,))[key] for seed in (0, 1)]
    both = found[key]
    assert both.value == pytest.approx(np.mean([each.value for each in single]))
    assert both.tags == {"variant": "random", "middle": 3, "num_seeds": 2}


def test_first_tokens_are_left_out_on_request(model):
    found = run(model, *BATCHES, variants=("skip",), middles=(3,), drop_first=1)["ending_input_cosine", "skip", 3, None]
    order, layer = BEFORE["skip", 3]
    expected = [cosine for batch in BATCHES for cosine, _ in prompt_means(model, batch, order, layer, drop_first=1)]
    assert found.value == pytest.approx(np.mean(expected), abs=1e-9)
    assert found.tags["drop_first"] == 1


def test_unknown_variants_and_middles_are_refused(model):
    for options, sentence in (
        ({"variants": ("skip_one",)}, "variants: expected some of middle_repeat, skip, .*, got 'skip_one'"),
        ({"middles": (2,)}, "of 6 blocks the middle has 1, 3, 5 blocks, got 2"),
    ):
        with pytest.raises(InputError, match=sentence):
            run(model, *BATCHES, **options)
