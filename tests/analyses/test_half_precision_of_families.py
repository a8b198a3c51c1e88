"""A model in half precision is widened with its own weights, whatever its family's own code would begin anew."""

import pytest
import torch

from lit_layers.models.view import LayeredModel, at_least_float32
from tests.support.tiny_models import EVERY, tiny


@pytest.mark.parametrize("name", EVERY)
def test_a_widened_model_has_the_weights_of_the_model(name):
    model = tiny(name, torch.bfloat16)
    wide = at_least_float32(LayeredModel(model)).model.state_dict()
    assert all(torch.equal(value.float(), wide[key]) for key, value in model.state_dict().items())
