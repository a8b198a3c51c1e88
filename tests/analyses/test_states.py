"""The precision that is measured in."""

import pytest
import torch

from lit_layers.analyses.states import at_least_float32
from lit_layers.models.build import load, save
from lit_layers.models.view import LayeredModel
from tests.support.tiny_models import tiny, tiny_batch


@pytest.mark.parametrize("family", ["gpt2", "llama", "gpt_neox", "gemma2", "phi", "falcon", "bert"])
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
