"""The fast route of block Jacobians against plain reverse mode, and its fallback for unsupported blocks."""

import math
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lit_layers.functional.jacobian import block_jacobians
from lit_layers.functional.jacobian.block_call import Call
from lit_layers.functional.jacobian.block_jacobians import block_jacobian
from lit_layers.models.view import LayeredModel
from tests.support.tiny_models import tiny, tiny_batch

EAGER_ONLY = ("gemma2", "gpt_neo", "mpt")
TOKENS = {
    "same": {"out_tokens": -1},
    "first": {"out_tokens": 0},
    "off_diagonal": {"out_tokens": [-1, 1], "in_tokens": [0, 1, -1]},
}


def relative_error(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


@pytest.mark.parametrize(
    ("name", "kind"),
    [("gpt2", "sdpa"), ("gemma2", "eager"), ("gpt_neo", "eager"), ("mpt", "eager"), ("falcon_alibi", "sdpa"),
     ("bert", "eager"), ("modernbert", "sdpa"), ("vit", "eager")],
)  # fmt: skip
def test_every_family_and_route_agrees_with_reverse_mode_through_the_block_in_float64(name, kind):
    padding = None if name == "vit" else "left"
    batch = tiny_batch(name, tokens=8, padding=padding)
    trajectory = LayeredModel(tiny(name, attention=kind)).trajectory(batch)
    # fused, because transformers' eager masks overflow in float64; Gemma 2 and MPT have only eager attention
    exact = torch.float32 if name in ("gemma2", "mpt") and padding else torch.float64
    reference = LayeredModel(tiny(name, exact, attention=None if name in EAGER_ONLY else "sdpa")).trajectory(batch)
    # every other block of these attends in a window
    for layer in (2, 3) if name in ("gemma2", "gpt_neo") else (3,):
        hidden = trajectory.hidden[layer - 1]
        for tokens in TOKENS.values():
            call = {"mask": trajectory.mask, **tokens}
            expected = block_jacobian(reference.block(layer), hidden.to(exact), route="plain", **call)
            for route in ("auto", "cut"):
                found = block_jacobian(trajectory.block(layer), hidden, route=route, **call)
                assert relative_error(found.to(exact), expected) < 1e-5, route


def test_in_float64_the_routes_agree_to_rounding(monkeypatch):
    for name in ["gpt2", "llama", "bert", "vit"]:
        trajectory = LayeredModel(tiny(name, torch.float64)).trajectory(tiny_batch(name))
        for tokens in TOKENS.values():
            block, hidden = trajectory.block(2), trajectory.hidden[1]
            expected = block_jacobian(block, hidden, route="plain", **tokens)
            for rows in (2048, 10):
                monkeypatch.setattr(block_jacobians, "_ROWS", rows)
                found = block_jacobian(block, hidden, route="cut", **tokens)
                # Llama's norm and rotary tables are float32 in any model
                assert relative_error(found, expected) < (1e-7 if name == "llama" else 1e-13)


class Attending(nn.Module):
    """A residual block with the given attention function."""

    def __init__(self, attend, dim: int = 8, heads: int = 2) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.attend, self.heads = attend, heads
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, hidden: Tensor) -> Tensor:
        query, key, value = self.qkv(hidden).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = self.attend(2 * query, 2 * key, value)
        return hidden + self.out(mixed.transpose(1, 2).flatten(2)).tanh()


def soft_capped_with_bias(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    scores = 3 * torch.tanh(query @ key.transpose(-2, -1) / 3 / math.sqrt(query.shape[-1]))
    distance = torch.arange(key.shape[-2], dtype=query.dtype)
    scores += 0.3 * distance[None, None, None]  # in place, as masks often are
    return F.dropout(F.softmax(scores, dim=-1), 0.5, training=False) @ value


def causal_inside(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    scores = query @ key.mT
    later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    return scores.masked_fill(later, -math.inf).softmax(-1) @ value


def fused(**options):
    return lambda query, key, value: F.scaled_dot_product_attention(query, key, value, **options)


def grouped(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(query, key[:, :1], value[:, 1:], enable_gqa=True, is_causal=True)


def windowed(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    near = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool).tril().triu(-2)
    return F.scaled_dot_product_attention(query, key, value, attn_mask=near, scale=0.7)


def linear_biases(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attend with ALiBi, a slope for each head."""
    position = torch.arange(key.shape[2], dtype=query.dtype)
    bias = torch.tensor([0.5, 0.0625], dtype=query.dtype)[:, None, None] * (position - position[:, None])
    causal = torch.ones(key.shape[2], key.shape[2], dtype=torch.bool).triu(1)
    return F.scaled_dot_product_attention(query, key, value, attn_mask=bias.masked_fill(causal, -math.inf)[None])


def test_every_kind_of_attention_is_expanded_exactly():
    for attend in [
        fused(),
        fused(is_causal=True, scale=0.3),
        grouped,
        windowed,
        linear_biases,
        soft_capped_with_bias,
        causal_inside,
    ]:
        block, hidden = Attending(attend).double(), torch.randn(2, 6, 8, dtype=torch.float64)
        for tokens in (*TOKENS.values(), {"out_tokens": range(6)}):
            found = block_jacobian(block, hidden, route="cut", **tokens)
            assert relative_error(found, block_jacobian(block, hidden, route="plain", **tokens)) < 1e-12


class Tangled(nn.Module):
    """Linear maps in a row before and after the attention, one of them used in both places, and none at the end."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.low, self.wide, self.value = nn.Linear(8, 4), nn.Linear(4, 24), nn.Linear(8, 8)
        self.out, self.gate = nn.Linear(8, 8, bias=False), nn.Linear(8, 8)

    def forward(self, hidden: Tensor) -> Tensor:
        fused_map = self.wide(self.low(hidden.tanh()).sin())
        query, key, rest = fused_map.chunk(3, -1)
        gating = self.gate(rest.exp())  # computed before the attention, from the map that feeds it
        qkv = (each.unflatten(-1, (2, 4)).transpose(1, 2) for each in (query, 3 * key, self.value(hidden) * 0.5))
        mixed = F.scaled_dot_product_attention(*qkv, is_causal=True).transpose(1, 2).flatten(2)
        return (hidden * 2 + self.out(mixed) * gating.sigmoid() + mixed).tanh()


def test_tangled_linear_maps_are_differentiated_exactly():
    block, hidden = Tangled().double(), torch.randn(2, 6, 8, dtype=torch.float64)
    for tokens in TOKENS.values():
        found = block_jacobian(block, hidden, route="cut", **tokens)
        assert relative_error(found, block_jacobian(block, hidden, route="plain", **tokens)) < 1e-12


class Unmapped(Attending):
    def forward(self, hidden: Tensor) -> Tensor:
        heads = hidden.unflatten(-1, (2, 4)).transpose(1, 2)
        return hidden + self.out(fused()(heads, heads, heads).transpose(1, 2).flatten(2))


def twice(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return fused()(query, key, value) + fused()(value, key, query)


def einsum_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return torch.einsum("bhqd,bhkd->bhqk", query, key).softmax(-1) @ value


def sink_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    scores = torch.cat([query @ key.mT, torch.zeros(*query.shape[:3], 1, dtype=query.dtype)], -1)
    return scores.softmax(-1)[..., :-1] @ value


def merged_heads(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    mixed = fused()(query.flatten(0, 1), key.flatten(0, 1), value.flatten(0, 1))
    return mixed.unflatten(0, query.shape[:2])


class Convolving(Attending):
    """A block that reads the previous token before it attends, so a single token gives other values."""

    def forward(self, hidden: Tensor) -> Tensor:
        return super().forward(hidden + F.pad(hidden, (0, 0, 1, 0))[:, :-1])


class Averaging(Attending):
    """A block that averages over all tokens after its attention."""

    def forward(self, hidden: Tensor) -> Tensor:
        output = super().forward(hidden)
        return output + output.mean(1, keepdim=True) ** 2


def test_an_unsupported_block_falls_back_with_one_warning_and_is_exact(monkeypatch):
    for block, reason in (
        (Attending(twice), "it attends more than once"),
        (Attending(merged_heads), "its attention has no heads"),
        (Attending(einsum_attention), "no attention of a known kind"),
        (Attending(sink_attention), "no attention of a known kind"),
        (Convolving(fused()), "does not treat a token alone as within its prompt"),
        (Averaging(fused()), "it differs from the block's own derivative by"),
        (nn.Sequential(nn.Linear(8, 8)), "no attention of a known kind"),
        (Unmapped(None), "its attention is fed otherwise than by linear"),
    ):
        monkeypatch.setattr(block_jacobians, "_warned", set())
        block, hidden = block.double(), torch.randn(2, 5, 8, dtype=torch.float64)
        expected = block_jacobian(block, hidden, route="plain")
        with pytest.raises(ValueError, match=f"no route 'cut' for .*: .*{reason}"):
            block_jacobian(block, hidden, route="cut")
        with pytest.warns(RuntimeWarning, match=f"by plain reverse mode, exactly but slowly: .*{reason}"):
            found = block_jacobian(block, hidden)
        assert torch.equal(found, expected)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert torch.equal(block_jacobian(block, hidden), expected)


def test_the_check_runs_once_for_each_set_of_weights_and_layout_of_inputs(monkeypatch):
    block, seen = Attending(fused()), []
    check = block_jacobians._disagreement
    monkeypatch.setattr(block_jacobians, "_disagreement", lambda *args: seen.append(1) or check(*args))
    first, inputs, outputs = {}, {"in_tokens": range(5)}, {"out_tokens": 0}
    calls = [(5, first, 1), (5, first, 1), (6, first, 2), (5, inputs, 3), (5, outputs, 4), (5, outputs, 4)]
    for tokens, options, checks in calls:
        block_jacobian(block, torch.randn(2, tokens, 8), **options)
        assert len(seen) == checks, (tokens, options)
    with torch.no_grad():
        block.out.weight.mul_(2)
    for _ in range(2):
        block_jacobian(block, torch.randn(2, 5, 8))
        assert len(seen) == 5


class Scaled(nn.Module):
    """A branch of adjustable size that breaks one assumption of a fast route."""

    def __init__(self, kind: str, size: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.kind, self.attending = kind, Attending(fused(is_causal=True))
        self.size, self.map, self.positions = nn.Parameter(torch.tensor(size)), nn.Linear(8, 8), torch.rand(1, 5, 8)

    def forward(self, hidden: Tensor) -> Tensor:
        branch = self.attending(hidden) - hidden
        if self.kind == "mixes tokens":
            branch = branch + branch.mean(1, keepdim=True).sin()
        elif self.kind == "moves its bias":
            flat = torch.addmm(hidden.flatten(0, 1).sin(), branch.flatten(0, 1), self.map.weight)
            branch = flat.view_as(hidden)
        elif self.kind == "moves its weight":
            branch = F.linear(branch, self.map.weight * hidden.mean().exp())
        elif self.kind == "stops gradients":
            with torch.no_grad():
                gate = self.map(hidden).sigmoid()
            branch = branch * gate
        elif self.kind == "has a table of positions":
            branch = branch * self.positions[:, : hidden.shape[1]]
        elif self.kind == "has a table of all positions":
            branch = branch * self.positions.to(hidden)
        return hidden + self.size * branch


KINDS = ["mixes tokens", "moves its bias", "moves its weight", "stops gradients", "has a table of positions",
         "has a table of all positions"]  # fmt: skip


@pytest.mark.filterwarnings("ignore:the Jacobians of Scaled")
def test_the_jacobian_of_a_small_branch_is_also_exact():
    for size in [1.0, 1e-3]:
        for kind in KINDS:
            block, hidden = Scaled(kind, size), torch.randn(2, 5, 8)
            for tokens in (0, -1):  # the result may be right at one token and wrong at another
                expected = block_jacobian(block, hidden, route="plain", out_tokens=tokens)
                # added to the skip, a branch of 1e-3 has four digits in float32
                allowed = 1e-5 if size == 1.0 else 2e-3
                assert relative_error(block_jacobian(block, hidden, out_tokens=tokens), expected) < allowed


@pytest.mark.filterwarnings("ignore:the Jacobians of Scaled")
def test_a_branch_that_starts_at_zero_is_checked_again_after_it_has_grown():
    for kind in KINDS:
        block, hidden = Scaled(kind, 0.0), torch.randn(2, 5, 8)
        block_jacobian(block, hidden)
        with torch.no_grad():
            block.size.fill_(1.0)
        assert relative_error(block_jacobian(block, hidden), block_jacobian(block, hidden, route="plain")) < 1e-5


def test_a_diverged_block_gives_nan_and_is_not_rejected_for_it():
    block = Attending(fused())
    assert block_jacobian(block, torch.full((1, 4, 8), math.nan), route="cut").isnan().any()
    found = block_jacobian(block, torch.randn(1, 4, 8), route="cut")
    assert found.isfinite().all()


def test_single_tokens_receive_no_cache_under_any_of_its_names():
    """Single tokens are run as separate prompts, to which the cache does not belong."""
    for name in ["cache", "past_key_values", "layer_past"]:
        from transformers import DynamicCache

        call = Call(nn.Identity(), (DynamicCache(), 1), {name: DynamicCache(), "use_cache": False})
        single = call.select(torch.tensor([0]), torch.tensor([1]), (1, 3))
        assert (single.args, single.kwargs) == ((None, 1), {name: None, "use_cache": False})


class Adding(nn.Module):
    """A block whose argument `cache` holds the embeddings, which it adds after its attention."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.attended, self.back = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.wide, self.narrow = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)
        self.first, self.second = nn.LayerNorm(dim), nn.LayerNorm(dim)

    def forward(self, x: Tensor, cache: Tensor | None = None) -> Tensor:
        qkv = (each.unflatten(-1, (2, -1)).transpose(1, 2) for each in self.attended(self.first(x)).chunk(3, -1))
        heads = F.scaled_dot_product_attention(*qkv, is_causal=x.shape[1] > 1)
        x = x + self.back(heads.transpose(1, 2).flatten(2))
        normed = self.second(x) if cache is None else self.second(x) + cache
        return x + self.narrow(F.gelu(self.wide(normed)))


class AddingModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(40, 16), nn.Embedding(6, 16)
        self.blocks = nn.ModuleList(Adding(16) for _ in range(3))
        self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, 40, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        embedded = self.tokens(ids)
        x = embedded + self.positions(torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = block(x, cache=embedded)
        return self.head(self.norm(x))


def test_states_in_an_argument_called_cache_are_an_ordinary_input():
    torch.manual_seed(0)
    view = LayeredModel(AddingModel().double().eval())
    steps = view.trajectory({"input_ids": torch.randint(40, (2, 6))})
    given = steps.block(2), steps.hidden[1]
    expected = block_jacobian(*given, out_tokens=-1, mask=steps.mask, route="plain")
    found = block_jacobian(*given, out_tokens=-1, mask=steps.mask)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


def test_modes_and_gradients_of_the_module_are_not_changed():
    model = tiny("gpt2").train()
    trajectory = LayeredModel(model).trajectory(tiny_batch("gpt2"))
    expected = block_jacobian(trajectory.block(1), trajectory.hidden[0], route="plain")
    with torch.inference_mode():
        found = block_jacobian(trajectory.block(1), trajectory.hidden[0].clone(), route="cut")
    assert relative_error(found, expected) < 1e-5
    assert all(module.training for module in model.modules())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_plain_functions_use_reverse_mode_without_a_warning():
    hidden = torch.randn(1, 4, 8)
    block_jacobian(lambda x: x**2, hidden)
