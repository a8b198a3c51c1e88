import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from lit_layers.training import losses as loss_module
from lit_layers.training.losses import next_token_loss


def _case(rows: int = 30, columns: int = 24, *, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    logits = 5 * torch.randn(2, rows // 2, columns, generator=generator).to(dtype)
    return logits.requires_grad_(), torch.randint(columns - 3, (2, rows // 2), generator=generator)


def _reference(logits: Tensor, targets: Tensor, num_words: int) -> tuple[Tensor, Tensor]:
    wide = logits.detach().double().requires_grad_()
    loss = F.cross_entropy(wide[..., :num_words].flatten(0, -2), targets.flatten())
    loss.backward()
    return loss.detach(), wide.grad


# Chunks of one row, of uneven size, and one chunk; without padding and with three padding columns.
@pytest.mark.parametrize(("chunk", "num_words"), [(1, 24), (100, 21), (2**17, 21)])
def test_loss_and_gradient_equal_cross_entropy_in_float64(monkeypatch, chunk, num_words):
    monkeypatch.setattr(loss_module, "_CHUNK", chunk)
    leaf, targets = _case()
    expected, gradient = _reference(leaf, targets, num_words)
    loss = next_token_loss(leaf * 1, targets, num_words)
    loss.backward()
    torch.testing.assert_close(loss.double(), expected, rtol=1e-6, atol=0)
    torch.testing.assert_close(leaf.grad.double(), gradient, rtol=1e-5, atol=1e-9)


@pytest.mark.soak
def test_the_loss_of_a_compiled_graph_equals_cross_entropy_in_float64():
    (leaf, targets), num_words = _case(), 21
    expected, gradient = _reference(leaf, targets, num_words)
    loss = torch.compile(next_token_loss)(leaf, targets, num_words)
    loss.backward()
    torch.testing.assert_close(loss.detach().double(), expected, rtol=1e-6, atol=0)
    torch.testing.assert_close(leaf.grad.double(), gradient, rtol=1e-5, atol=1e-9)


def test_the_gradient_scales_with_the_loss_as_under_gradient_accumulation():
    leaf, targets = _case()
    _, gradient = _reference(leaf, targets, 24)
    (next_token_loss(leaf * 1, targets, 24) / 4).backward()
    torch.testing.assert_close(4 * leaf.grad.double(), gradient, rtol=1e-5, atol=1e-9)


def test_padding_columns_have_no_effect_and_no_gradient():
    leaf, targets = _case()
    with torch.no_grad():
        leaf[..., 21:] = 1e4
    next_token_loss(leaf * 1, targets, 21).backward()
    assert torch.all(leaf.grad[..., 21:] == 0)


def test_equal_logits_cost_the_logarithm_of_the_vocabulary():
    logits = torch.full((1, 4, 8), 3.0, requires_grad=True)
    loss = next_token_loss(logits * 1, torch.zeros(1, 4, dtype=torch.long), 8)
    assert loss.item() == pytest.approx(torch.log(torch.tensor(8.0)).item())


def test_bfloat16_logits_give_a_float32_loss_and_a_bfloat16_gradient():
    leaf, targets = _case(dtype=torch.bfloat16)
    expected, gradient = _reference(leaf, targets, 24)
    loss = next_token_loss(leaf * 1, targets, 24)
    loss.backward()
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss.double(), expected, rtol=1e-6, atol=0)
    torch.testing.assert_close(leaf.grad.double(), gradient, rtol=2**-7, atol=1e-9)


def test_huge_logits_do_not_overflow():
    leaf, targets = _case()
    next_token_loss(leaf * 1e30, targets, 24).backward()
    assert torch.isfinite(leaf.grad).all()


def test_without_gradients_the_logits_do_not_change():
    leaf, targets = _case()
    logits = leaf.detach().clone()
    with torch.no_grad():
        loss = next_token_loss(logits, targets, 21)
    assert torch.equal(logits, leaf)
    torch.testing.assert_close(loss.double(), _reference(leaf, targets, 21)[0], rtol=1e-6, atol=0)


def test_overwriting_logits_that_another_operation_saved_raises():
    leaf, targets = _case()
    loss = next_token_loss(torch.tanh(leaf), targets, 24)  # the derivative of tanh is computed from its result
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
