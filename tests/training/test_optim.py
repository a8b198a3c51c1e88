import pytest
import torch
from torch import nn

from lit_layers.training.modules import adamw, warmup_cosine


def test_matrices_decay_and_vectors_do_not():
    model = nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 3), nn.LayerNorm(3))
    model[1].weight.requires_grad_(False)
    optimizer = adamw(model, lr=1e-3, weight_decay=0.1, betas=(0.9, 0.95))
    decayed, free = optimizer.param_groups
    assert (decayed["weight_decay"], free["weight_decay"]) == (0.1, 0.0)
    assert [p.shape for p in decayed["params"]] == [(7, 4)]
    assert [tuple(p.shape) for p in free["params"]] == [(3,), (3,), (3,)]


def test_one_step_is_adamw_by_hand():
    weight = nn.Parameter(torch.tensor([[2.0, -1.0]], dtype=torch.float64))
    model = nn.ParameterList([weight])
    optimizer = adamw(model, lr=0.1, weight_decay=0.5, betas=(0.9, 0.99), eps=1e-8)
    weight.grad = torch.tensor([[0.3, -4.0]], dtype=torch.float64)
    optimizer.step()
    # After one step both bias-corrected moments equal the gradient and its square: the update is the sign.
    expected = torch.tensor([[2.0 * (1 - 0.05) - 0.1, -1.0 * (1 - 0.05) + 0.1]], dtype=torch.float64)
    torch.testing.assert_close(weight.detach(), expected, atol=1e-7, rtol=0)


def test_the_schedule_has_its_closed_form():
    factor = warmup_cosine(warmup_steps=10, decay_steps=110, min_ratio=0.1)
    assert [factor(0), factor(4), factor(9)] == pytest.approx([0.1, 0.5, 1.0])
    assert factor(10) == pytest.approx(1.0)
    assert factor(60) == pytest.approx(0.55)
    assert [factor(110), factor(5000)] == pytest.approx([0.1, 0.1])


def test_no_warm_up_starts_at_the_peak():
    assert warmup_cosine(warmup_steps=0, decay_steps=10, min_ratio=0.0)(0) == 1.0
