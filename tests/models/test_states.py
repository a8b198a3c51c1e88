"""The conventions of states."""

import torch

from lit_layers.models.view import LayeredModel, convert_states
from tests.support.tiny_models import tiny, tiny_batch


def test_each_convention_norms_the_layers_that_it_says():
    view = LayeredModel(tiny("gpt2", torch.float64))
    hidden, norm = view.trajectory(tiny_batch("gpt2")).hidden, view.model.transformer.ln_f
    normed = [torch.nn.functional.layer_norm(state, (32,), norm.weight, norm.bias, norm.eps) for state in hidden]
    for layer in range(4):
        assert torch.equal(convert_states(view, "resid", layer, hidden[layer]), hidden[layer])
        torch.testing.assert_close(convert_states(view, "normed", layer, hidden[layer]), normed[layer])
        expected = normed[3] if layer == 3 else hidden[layer]
        torch.testing.assert_close(convert_states(view, "hf", layer, hidden[layer]), expected)


def test_without_a_final_norm_all_conventions_are_one():
    view = LayeredModel(tiny("bert"))
    hidden = view.trajectory(tiny_batch("bert")).hidden[1]
    assert all(convert_states(view, states, 3, hidden) is hidden for states in ("resid", "hf", "normed"))
