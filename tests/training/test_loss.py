import pytest
import torch
from torch import Tensor
from torch._dynamo import exc
from torch.nn import functional as F

from lit_layers.training import losses as loss_module
from lit_layers.training.losses import next_token_loss, sum_into_gradient_


def _case(rows: int = 30, columns: int = 24, *, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    logits = 5 * torch.randn(2, rows // 2, columns, generator=generator).to(dtype)
    return logits.requires_grad_(), torch.randint(columns - 3, (2, rows // 2), generator=generator)


def _reference(logits: Tensor, targets: Tensor, num_words: int) -> tuple[Tensor, Tensor]:
    wide = logits.detach().double().requires_grad_()
    loss = F.cross_entropy(wide[..., :num_words].flatten(0, -2), targets.flatten())
    loss.backward()
    return loss.detach(), wide.grad


@pytest.mark.parametrize("num_words", [24, 21], ids=["no padding", "three padding columns"])
@pytest.mark.parametrize("chunk", [1, 100, 2**17], ids=["row by row", "uneven chunks", "one chunk"])
def test_loss_and_gradient_are_those_of_cross_entropy_in_float64(monkeypatch, chunk, num_words):
    monkeypatch.setitem(loss_module._CHUNK, "cpu", chunk)
    leaf, targets = _case()
    expected, gradient = _reference(leaf, targets, num_words)
    loss = next_token_loss(leaf * 1, targets, num_words)
    loss.backward()
    torch.testing.assert_close(loss.double(), expected, rtol=1e-6, atol=0)
    torch.testing.assert_close(leaf.grad.double(), gradient, rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("num_words", [24, 21], ids=["no padding", "three padding columns"])
@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.soak)])
def test_the_loss_of_a_gpu_and_of_a_compiled_graph_are_cross_entropy_in_float64(compiled, num_words):
    leaf, targets = _case()
    expected, gradient = _reference(leaf, targets, num_words)
    sum_into = torch.compile(sum_into_gradient_) if compiled else sum_into_gradient_
    overwritten = leaf.detach().clone().flatten(0, 1)
    total = sum_into(overwritten, targets.flatten(), num_words)
    torch.testing.assert_close(total.double() / targets.numel(), expected, rtol=1e-6, atol=0)
    expected_rows = gradient.flatten(0, 1) * targets.numel()
    torch.testing.assert_close(overwritten.double(), expected_rows, rtol=1e-5, atol=1e-7)
    if compiled:
        loss = torch.compile(next_token_loss)(leaf, targets, num_words)
        loss.backward()
        torch.testing.assert_close(loss.detach().double(), expected, rtol=1e-6, atol=0)
        torch.testing.assert_close(leaf.grad.double(), gradient, rtol=1e-5, atol=1e-9)


def _failing(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def fails(*_: object) -> None:
        raise error

    monkeypatch.setattr(loss_module, "_compiled_sum_into_gradient", lambda: fails)
    monkeypatch.setattr(loss_module, "_cannot_compile", [])


def test_a_machine_that_cannot_compile_says_so_once_and_has_the_same_loss(monkeypatch, caplog):
    missing = RuntimeError("Failed to find C compiler\nplease set CC")
    _failing(monkeypatch, exc.BackendCompilerFailed("inductor", missing, None))
    rows = torch.zeros(2, 3)
    assert [loss_module._fused(rows, torch.tensor([0, 1]), 3) for _ in range(2)] == [None, None]
    (said,) = caplog.messages
    assert "slower kernels" in said
    assert said.endswith("Failed to find C compiler please set CC")


@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (RuntimeError("CUDA error: device-side assert triggered"), RuntimeError),
        (torch.OutOfMemoryError("out of memory"), torch.OutOfMemoryError),
        (exc.BackendCompilerFailed("inductor", torch.OutOfMemoryError("while tuning"), None), torch.OutOfMemoryError),
        (exc.TorchRuntimeError("Size does not match at dimension 0"), exc.TorchRuntimeError),
        (IndexError("a mistake of ours"), IndexError),
    ],
)
def test_what_is_no_failure_to_compile_comes_out(monkeypatch, error, raised):
    _failing(monkeypatch, error)
    with pytest.raises(raised):
        loss_module._fused(torch.zeros(2, 3), torch.tensor([0, 1]), 3)
    assert not loss_module._cannot_compile


def test_where_torch_has_no_compiler_for_this_python_the_loss_takes_slower_kernels(monkeypatch, caplog):
    def refuses(*_: object, **__: object) -> None:
        raise RuntimeError("torch.compile is not supported on Python 3.99+")

    monkeypatch.setattr(torch, "compile", refuses)
    monkeypatch.setattr(loss_module, "_cannot_compile", [])
    loss_module._compiled_sum_into_gradient.cache_clear()
    assert loss_module._fused(torch.zeros(2, 3), torch.tensor([0, 1]), 3) is None
    assert "not supported on Python 3.99+" in caplog.text


@pytest.mark.soak
def test_a_missing_compiler_is_noticed_before_anything_ran_and_wrong_targets_are_not_taken_for_one(monkeypatch):
    monkeypatch.setattr(loss_module, "_cannot_compile", [])
    monkeypatch.setattr("torch._inductor.config.cpp.cxx", ("/nonexistent/g++",))
    monkeypatch.setattr("torch._inductor.config.fx_graph_cache", False)
    torch.compiler.reset()
    rows = torch.arange(6.0).view(2, 3)
    with pytest.raises(exc.TorchRuntimeError):
        loss_module._fused(rows, torch.tensor([0, 1, 0]), 3)
    assert loss_module._fused(rows, torch.tensor([0, 1]), 3) is None
    assert "No working C++ compiler" in loss_module._cannot_compile[0]
    assert torch.equal(rows, torch.arange(6.0).view(2, 3))


def test_the_gradient_scales_with_the_loss_as_under_gradient_accumulation():
    leaf, targets = _case()
    _, gradient = _reference(leaf, targets, 24)
    (next_token_loss(leaf * 1, targets, 24) / 4).backward()
    torch.testing.assert_close(4 * leaf.grad.double(), gradient, rtol=1e-5, atol=1e-9)


def test_padding_columns_neither_count_nor_learn():
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


def test_without_gradients_the_logits_are_left_alone():
    leaf, targets = _case()
    logits = leaf.detach().clone()
    with torch.no_grad():
        loss = next_token_loss(logits, targets, 21)
    assert torch.equal(logits, leaf)
    torch.testing.assert_close(loss.double(), _reference(leaf, targets, 21)[0], rtol=1e-6, atol=0)


def test_logits_that_somebody_saved_are_not_overwritten_in_silence():
    leaf, targets = _case()
    loss = next_token_loss(torch.tanh(leaf), targets, 24)  # the derivative of tanh is computed from its result
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_second_backward_pass_is_refused():
    leaf, targets = _case()
    loss = next_token_loss(leaf * 1, targets, 24)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
