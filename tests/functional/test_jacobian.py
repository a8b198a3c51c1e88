"""Block Jacobians against central differences and blocks whose Jacobian is known."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lit_layers.functional.jacobian import block_call
from lit_layers.functional.jacobian.block_jacobians import block_jacobian


class TinyBlock(nn.Module):
    """A pre-norm block with attention and a non-linear MLP, strongly non-linear at random weights."""

    def __init__(self, dim: int = 6, heads: int = 2, *, causal: bool = True, fused: bool = True) -> None:
        super().__init__()
        self.heads, self.causal, self.fused = heads, causal, fused
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.up, self.down = nn.Linear(dim, 2 * dim), nn.Linear(2 * dim, dim)
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.7)

    def forward(self, hidden: Tensor, mask: Tensor | None = None) -> Tensor:
        split = self.qkv(self.norm1(hidden)).unflatten(-1, (3, self.heads, -1))  # (batch, tokens, 3, heads, head_dim)
        query, key, value = split.permute(2, 0, 3, 1, 4)
        allowed = torch.ones(hidden.shape[1], hidden.shape[1], dtype=torch.bool)
        allowed = allowed.tril() if self.causal else allowed
        allowed = allowed if mask is None else allowed & mask[:, None, None] | torch.eye(len(allowed), dtype=torch.bool)
        if self.fused:
            mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=allowed)
        else:
            scores = query @ key.mT / math.sqrt(query.shape[-1])
            mixed = scores.masked_fill(~allowed, -math.inf).softmax(-1) @ value
        hidden = hidden + self.out(mixed.transpose(1, 2).flatten(2))
        return hidden + self.down(F.gelu(self.up(self.norm2(hidden))))


@pytest.fixture
def block() -> TinyBlock:
    torch.manual_seed(0)
    return TinyBlock().double().eval()


@pytest.fixture
def hidden() -> Tensor:
    return torch.randn(2, 5, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def differences(block, hidden: Tensor, prompt: int, out: int, into: int, step: float = 1e-5) -> Tensor:
    """Estimate d block(X)[out] / d X[into] of one prompt by central differences, one input coordinate at a time."""
    columns = []
    for coordinate in range(hidden.shape[-1]):
        ends = []
        for sign in (1, -1):
            moved = hidden.clone()
            moved[prompt, into, coordinate] += sign * step
            ends.append(block(moved)[prompt, out])
        columns.append((ends[0] - ends[1]) / (2 * step))
    return torch.stack(columns, dim=1)


def test_jacobians_equal_central_differences(hidden):
    for causal in [True, False]:
        for fused in [True, False]:
            torch.manual_seed(0)
            block = TinyBlock(fused=fused, causal=causal).double().requires_grad_(False)
            found = block_jacobian(block, hidden, out_tokens=[0, 3], in_tokens=[0, 2, 3])
            for prompt in range(2):
                for i, out in enumerate([0, 3]):
                    for j, into in enumerate([0, 2, 3]):
                        expected = differences(block, hidden, prompt, out, into) - torch.eye(6) * (out == into)
                        torch.testing.assert_close(found[prompt, i, j], expected, rtol=1e-6, atol=1e-8)


def test_mixing_tokens_gives_the_coefficient_times_the_weight_in_the_right_orientation(hidden):
    weight, mix = torch.randn(6, 6, dtype=torch.float64), torch.randn(5, 5, dtype=torch.float64)
    found = block_jacobian(
        lambda x: mix @ x @ weight.T, hidden, out_tokens=range(5), in_tokens=range(5), residual=False
    )
    expected = (mix[:, :, None, None] * weight).expand(2, -1, -1, -1, -1)
    torch.testing.assert_close(found, expected, rtol=1e-13, atol=1e-14)


def test_the_identity_is_subtracted_only_if_input_and_output_are_the_same_token(block, hidden):
    pairs = {"out_tokens": [2, 4], "in_tokens": [2, 0, 4]}
    whole = block_jacobian(block, hidden, residual=False, **pairs)
    identity = torch.eye(6, dtype=torch.float64)
    same = torch.tensor([[1, 0, 0], [0, 0, 1]])[:, :, None, None] * identity
    close = {"rtol": 0, "atol": 1e-14}  # two calls may round differently
    torch.testing.assert_close(block_jacobian(block, hidden, **pairs), whole - same, **close)
    branch = block_jacobian(lambda x: block(x) - x, hidden, residual=False)
    torch.testing.assert_close(block_jacobian(block, hidden), branch, rtol=1e-12, atol=1e-13)


def test_shapes_follow_the_requested_tokens(block, hidden):
    def shape(out, into):
        return tuple(block_jacobian(block, hidden, out_tokens=out, in_tokens=into).shape)

    assert shape(-1, "same") == shape(-1, 0) == (2, 6, 6)
    assert shape([0, 1, 2], "same") == (2, 3, 6, 6)
    assert shape([0], "same") == (2, 1, 6, 6)
    assert shape([3, 4], 0) == (2, 2, 1, 6, 6)
    assert shape(4, [0, 1, 2]) == (2, 1, 3, 6, 6)


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_and_junk_in_it_change_nothing(block, side):
    short = torch.randn(1, 3, 6, dtype=torch.float64)
    junk = 50 * torch.randn(1, 2, 6, dtype=torch.float64)
    padded = torch.cat([junk, short] if side == "left" else [short, junk], dim=1)
    mask = torch.tensor([[0, 0, 1, 1, 1]] if side == "left" else [[1, 1, 1, 0, 0]])
    call = {"out_tokens": [0, -1], "in_tokens": range(3)}
    found = block_jacobian(lambda x: block(x, mask.bool()), padded, mask=mask, **call)
    torch.testing.assert_close(found, block_jacobian(block, short, **call), rtol=1e-10, atol=1e-12)


def test_tokens_are_counted_among_the_real_tokens_of_each_prompt(block, hidden):
    mask = torch.tensor([[False, True, True, True, False], [True, True, True, True, True]])
    for token, positions in {-1: (3, 4), 0: (1, 0), -3: (1, 2)}.items():
        found = block_jacobian(block, hidden, out_tokens=token, mask=mask)
        for prompt, position in enumerate(positions):
            expected = block_jacobian(block, hidden[prompt : prompt + 1], out_tokens=position)[0]
            torch.testing.assert_close(found[prompt], expected, rtol=1e-12, atol=1e-13)


def test_the_chunk_size_changes_nothing(block, hidden, monkeypatch):
    for rows in [1, 40, 1000]:
        expected = block_jacobian(block, hidden)
        monkeypatch.setattr(block_call, "ROWS", rows)
        torch.testing.assert_close(block_jacobian(block, hidden), expected, rtol=1e-12, atol=1e-14)


def test_no_gradient_or_graph_remains_in_any_gradient_mode(block, hidden):
    for mode in [torch.no_grad, torch.inference_mode, torch.enable_grad]:
        expected = block_jacobian(block, hidden)
        with mode():
            found = block_jacobian(block, hidden.clone(), mask=torch.ones(2, 5))
        assert torch.equal(found, expected)
        assert not found.requires_grad
        assert not found.is_inference()
        assert all(parameter.grad is None for parameter in block.parameters())


def test_an_outer_autocast_does_not_lower_the_precision(hidden):
    torch.manual_seed(0)
    block, hidden = TinyBlock(), hidden.float()
    expected = block_jacobian(block, hidden)
    with torch.autocast("cpu", dtype=torch.bfloat16):  # bfloat16 would be off by a hundredth
        torch.testing.assert_close(block_jacobian(block, hidden), expected, rtol=1e-5, atol=1e-6)


class Cube(torch.autograd.Function):
    """A function with a custom derivative that vmap cannot batch, as some models have."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return 3 * x**2 * grad


def test_a_block_that_vmap_cannot_batch_is_differentiated_row_by_row(hidden):
    found = block_jacobian(lambda x: x + Cube.apply(x), hidden)
    torch.testing.assert_close(found, torch.diag_embed(3 * hidden[:, -1] ** 2), rtol=1e-13, atol=0)


def test_the_jacobian_of_a_constant_block_is_minus_the_identity(hidden):
    found = block_jacobian(lambda x: torch.ones_like(x), hidden)
    assert torch.equal(found, -torch.eye(6, dtype=torch.float64).expand(2, 6, 6))


def test_wrong_options_are_refused_in_one_sentence(block, hidden):
    for options, kind, message in (
        ({"out_tokens": 5}, ValueError, "expected out_tokens among real tokens, got 5 for prompt 0 of 5 tokens"),
        ({"in_tokens": -4, "mask": torch.ones(2, 5).tril(2)}, ValueError, "got -4 for prompt 0 of 3 tokens"),
        ({"mask": torch.tensor([[1] * 5, [0] * 5])}, ValueError, "got -1 for prompt 1 of 0 tokens"),
    ):
        with pytest.raises(kind, match=message):
            block_jacobian(block, hidden, **options)


def test_wrong_states_and_blocks_are_refused_in_one_sentence(block, hidden):
    with pytest.raises(ValueError, match=r"convert the model with \.float\(\)"):
        block_jacobian(block, hidden.bfloat16())
    with pytest.raises(ValueError, match="block to return a tensor of shape"):
        block_jacobian(lambda x: x[:, :1], hidden)
