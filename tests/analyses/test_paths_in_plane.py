"""The paths of tokens against the covariance of hooked states, prompt by prompt."""

import numpy as np
import pytest
import torch

from lit_layers.analyses import PathsInPlane
from lit_layers.records import AXES
from tests.analyses.prompt_states import states_of_each_prompt
from tests.support.distilled import PATCHES, PREFIX, distilled, states_of_each_image
from tests.support.listed_batches import Listed
from tests.support.measured import keyed_records
from tests.support.references import covariance_paths
from tests.support.tiny_models import tiny, tiny_batch

BATCHES = [tiny_batch("gpt2", batch=2, tokens=9, padding="left"), tiny_batch("gpt2", batch=2, tokens=8, seed=2)]


def run(model, *batches, **options):
    return keyed_records(PathsInPlane(batches=Listed(*batches), **options), model)


def check(records, prompts, drop_first=1):
    expected = [covariance_paths(states[:, drop_first:]) for states in prompts]
    for prompt, (points, shares) in enumerate(expected, start=1):
        for axis in (1, 2):
            assert records.pop(("path_variance", None, prompt, axis)).value == pytest.approx(shares[axis - 1])
            for layer, row in enumerate(points):
                for token, point in enumerate(row, start=drop_first):
                    value = records.pop(("path", layer, prompt, token, axis)).value
                    assert value == pytest.approx(point[axis - 1], abs=1e-9)
    whole = records.pop(("plane_variance", None))
    assert whole.value == pytest.approx(np.mean([shares.sum() for _, shares in expected]))
    assert whole.n == len(prompts)
    assert not records


@pytest.mark.parametrize("options", [{}, {"drop_first": 0}])
def test_every_record_is_computed_from_the_real_tokens_of_its_prompt(model, options):
    check(run(model, *BATCHES, num_prompts=3, **options), states_of_each_prompt(model, BATCHES)[:3], **options)


def test_paths_end_after_the_final_norm_on_request(model):
    found = run(model, BATCHES[1], states="hf")
    assert all(record.tags["states"] == "hf" for record in found.values())
    plain = {(key[0], *(value for value in key[1:] if value != "hf")): record for key, record in found.items()}
    check(plain, states_of_each_prompt(model, BATCHES[1:], final_norm=True))


def test_images_have_paths_of_only_their_patches():
    model, batch = distilled(), tiny_batch("vit", batch=3)
    records = run(model, batch, num_prompts=2, drop_first=PREFIX)
    assert {record.tags["token"] for record in records.values() if record.metric == "path"} == {
        *range(PREFIX, PREFIX + PATCHES)
    }
    check(records, states_of_each_image(model, batch["pixel_values"])[:2], drop_first=PREFIX)
    assert model.training


def test_fewer_tokens_are_spread_evenly_and_the_plane_still_uses_all_tokens(model):
    every, some = run(model, BATCHES[1]), run(model, BATCHES[1], num_tokens=3)
    assert {record.tags["token"] for record in some.values() if record.metric == "path"} == {1, 4, 7}
    assert all(record == every[key] for key, record in some.items())


def test_values_of_paths_have_their_own_table(model):
    for record in run(model, BATCHES[1]).values():
        assert record.tags.keys().isdisjoint(AXES) == (record.metric == "plane_variance")


def test_a_prompt_without_a_plane_is_left_out_and_counted(model):
    short = {"input_ids": torch.tensor([[5, 6, 7]])}
    repeated = {"input_ids": torch.full((1, 8), 5)}
    records = run(model, short, BATCHES[1], num_prompts=3)
    assert {r.tags["prompt"] for r in records.values() if r.metric == "path"} == {2, 3}
    whole = records["plane_variance", None]
    assert (whole.n, whole.tags) == (2, {"num_undefined": 1})
    same = tiny("llama", torch.float64)  # positions enter only attention: equal tokens stay equal
    for view, prompt in ((same, repeated), (model, short)):
        with pytest.raises(ValueError, match="paths_in_plane is undefined for every prompt.* or of too few tokens"):
            run(view, prompt)
