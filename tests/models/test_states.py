"""The precision that is measured in, and the conventions of states."""

import pytest
import torch

from lit_layers.models.build import save
from lit_layers.models.saved import load
from lit_layers.models.view import LayeredModel, at_least_float32, convert_states
from tests.support.tiny_models import tiny, tiny_batch


@pytest.mark.parametrize("family", ["gpt2", "llama", "gemma2"])
def test_a_model_cast_to_half_precision_is_measured_as_its_checkpoint_is(family, tmp_path):
    model = tiny(family).to(torch.bfloat16)
    save(model, tmp_path)
    batch = tiny_batch(family)
    found = at_least_float32(LayeredModel(model)).trajectory(batch).hidden
    loaded = LayeredModel(load(tmp_path, dtype=torch.float32)).trajectory(batch).hidden
    assert found.dtype == torch.float32
    assert torch.equal(found, loaded)
    assert model.dtype == torch.bfloat16
    whole = LayeredModel(tiny(family))
    assert at_least_float32(whole) is whole


def test_each_convention_norms_the_layers_that_it_says():
    view = LayeredModel(tiny("gpt2", torch.float64))
    hidden = view.trajectory(tiny_batch("gpt2")).hidden
    normed = [torch.nn.functional.layer_norm(state, (32,), *norm_of(view)) for state in hidden]
    for layer in range(4):
        assert torch.equal(convert_states(view, "resid", layer, hidden[layer]), hidden[layer])
        torch.testing.assert_close(convert_states(view, "normed", layer, hidden[layer]), normed[layer])
        expected = normed[3] if layer == 3 else hidden[layer]
        torch.testing.assert_close(convert_states(view, "hf", layer, hidden[layer]), expected)


def test_without_a_final_norm_all_conventions_are_one():
    view = LayeredModel(tiny("bert"))
    hidden = view.trajectory(tiny_batch("bert")).hidden[1]
    assert all(convert_states(view, states, 3, hidden) is hidden for states in ("resid", "hf", "normed"))


def norm_of(view):
    norm = view.model.transformer.ln_f
    return norm.weight, norm.bias, norm.eps
