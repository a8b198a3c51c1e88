"""The tiny model that most tests of analyses measure."""

import pytest
import torch
from torch import nn

from tests.support.tiny_models import tiny


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return tiny("gpt2", torch.float64)
