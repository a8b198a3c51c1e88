"""A validation loss that is not finite is not hidden among those that are."""

import math

import torch

from tests.support.tiny_training import module


def test_one_batch_without_a_number_leaves_the_whole_without_one():
    lit = module()
    lit.validation_loss.update(torch.tensor(1.0), weight=8)
    lit.validation_loss.update(torch.tensor(math.nan), weight=8)
    assert math.isnan(lit.validation_loss.compute().item())


def test_batches_weigh_as_much_as_they_have_tokens():
    lit = module()
    lit.validation_loss.update(torch.tensor(1.0), weight=8)
    lit.validation_loss.update(torch.tensor(4.0), weight=4)
    assert lit.validation_loss.compute().item() == 2.0
