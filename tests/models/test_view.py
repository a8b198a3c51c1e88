"""Properties of a layered view that test_families does not check for every family."""

import pytest
import torch
from torch.func import vjp

from lit_layers.errors import InputError
from lit_layers.models.view import LayeredModel, convert_states
from tests.support.tiny_models import DIM, LAYERS, POSITIONS, VOCAB, tiny, tiny_batch


@pytest.fixture
def model() -> LayeredModel:
    return LayeredModel(tiny("gpt2", torch.float64))


def test_a_view_knows_the_size_of_its_model(model):
    assert (model.num_layers, model.dim, model.vocab_size, model.max_tokens) == (LAYERS, DIM, VOCAB, POSITIONS)
    assert (model.device.type, model.dtype, model.attention) == ("cpu", torch.float64, "sdpa")
    assert repr(model) == "LayeredModel(GPT2LMHeadModel, num_layers=3, dim=32, origin='row')"


def test_blocks_have_exact_derivatives(model):
    trajectory = model.trajectory(tiny_batch("gpt2", padding="left"))
    generator = torch.Generator().manual_seed(3)
    hidden = trajectory.hidden[1]
    step, weights = (torch.randn(hidden.shape, generator=generator, dtype=torch.float64) for _ in range(2))
    block, epsilon = trajectory.block(2), 1e-5
    ahead, back = block(hidden + epsilon * step), block(hidden - epsilon * step)
    expected = ((ahead - back) / (2 * epsilon) * weights).sum()
    point = hidden.clone().requires_grad_(True)
    (by_autograd,) = torch.autograd.grad((block(point) * weights).sum(), point)
    by_transform = vjp(block, hidden)[1](weights)[0]
    torch.testing.assert_close((by_autograd * step).sum(), expected, rtol=1e-7, atol=0)
    torch.testing.assert_close(by_transform, by_autograd)


def test_a_trajectory_taken_in_inference_mode_can_be_differentiated(model):
    with torch.inference_mode():
        trajectory = model.trajectory(tiny_batch("gpt2"))
    assert not trajectory.hidden.is_inference()
    assert not trajectory.hidden.requires_grad
    point = trajectory.hidden[0].clone().requires_grad_(True)
    trajectory.block(1)(point).sum().backward()
    assert point.grad.isfinite().all()


def test_dropout_is_off_in_every_mode_and_the_mode_does_not_change():
    network = tiny("gpt2", resid_pdrop=0.5, embd_pdrop=0.5, attn_pdrop=0.5)
    model, batch = LayeredModel(network), tiny_batch("gpt2")
    expected = model.trajectory(batch).hidden
    network.train()
    network.transformer.h[1].eval()
    modes = [part.training for part in network.modules()]
    trajectory = model.trajectory(batch)
    assert torch.equal(trajectory.hidden, expected)
    assert torch.equal(trajectory.block(1)(expected[0]), expected[1])
    assert torch.equal(model.readout(expected[-1]), trajectory.logits)
    assert [part.training for part in network.modules()] == modes


def test_a_view_runs_without_gradient_checkpointing():
    network, batch = tiny("gpt2"), tiny_batch("gpt2")
    expected = LayeredModel(network).trajectory(batch).hidden
    for block in network.train().transformer.h:
        block.gradient_checkpointing = True
        block._gradient_checkpointing_func = lambda *inputs: pytest.fail("a block was checkpointed")
    trajectory = LayeredModel(network).trajectory(batch)
    assert torch.equal(trajectory.hidden, expected)
    assert torch.equal(trajectory.block(1)(expected[0]), expected[1])


def test_a_model_that_skips_a_block_is_refused(model, monkeypatch):
    monkeypatch.setattr(model.model.transformer, "h", model.model.transformer.h[:2])
    with pytest.raises(RuntimeError, match="expected 3 blocks to run once each, in order, saw 2 calls"):
        model.trajectory(tiny_batch("gpt2"))


def test_no_hook_remains_even_after_a_failing_forward(model):
    model.trajectory(tiny_batch("gpt2"))
    with pytest.raises(RuntimeError):
        model.trajectory({"input_ids": torch.zeros(1, 4, dtype=torch.long), "position_ids": torch.zeros(3, 3).long()})
    assert not any(part._forward_hooks for part in model.model.modules())


def test_readout_takes_any_leading_dimensions(model):
    trajectory = model.trajectory(tiny_batch("gpt2"))
    with torch.no_grad():
        lens = model.readout(trajectory.hidden)
        one = model.readout(trajectory.hidden[2, 1])
    assert lens.shape == (LAYERS + 1, 3, 10, VOCAB)
    torch.testing.assert_close(lens[-1], trajectory.logits)
    torch.testing.assert_close(lens[2, 1], one)


def test_layers_out_of_range_are_refused(model):
    trajectory = model.trajectory(tiny_batch("gpt2"))
    for layer in (0, 4, -1):
        with pytest.raises(IndexError, match=r"blocks are numbered 1\.\.3"):
            trajectory.block(layer)


def test_arguments_of_one_attention_are_not_used_under_another(model):
    trajectory = model.trajectory(tiny_batch("gpt2"))
    model.model.set_attn_implementation("eager")
    with pytest.raises(RuntimeError, match="taken under 'sdpa' attention and the model now uses 'eager'"):
        trajectory.block(1)
    eager = model.trajectory(tiny_batch("gpt2"))
    torch.testing.assert_close(eager.hidden, trajectory.hidden, rtol=0, atol=1e-10)


def test_texts_the_model_cannot_take_are_refused(model):
    with pytest.raises(InputError, match="GPT2LMHeadModel takes at most 64 tokens, got 65"):
        model.trajectory(tiny_batch("gpt2", tokens=65))
    with pytest.raises(InputError, match="GPT2LMHeadModel knows 61 tokens, got token 61: use the tokenizer"):
        model.trajectory({"input_ids": torch.full((1, 3), VOCAB)})
    with pytest.raises(ValueError, match=r"input_ids are \(batch, tokens\), got shape \(3,\)"):
        model.trajectory({"input_ids": torch.ones(3, dtype=torch.long)})
    with pytest.raises(ValueError, match="a batch for GPT2LMHeadModel needs 'input_ids', got \\['pixel_values'\\]"):
        model.trajectory(tiny_batch("vit"))
    empty = {"input_ids": torch.ones(2, 3).long(), "attention_mask": torch.tensor([[1, 1, 1], [0, 0, 0]])}
    with pytest.raises(ValueError, match="every text needs a real token"):
        model.trajectory(empty)


def test_columns_that_are_no_input_are_left_out(model):
    batch = tiny_batch("gpt2")
    expected = model.trajectory(batch).logits
    assert torch.equal(model.trajectory({**batch, "labels": batch["input_ids"], "document": 3}).logits, expected)


def test_logits_include_what_the_models_forward_does_after_its_head():
    network = tiny("gpt2", torch.float64)

    class Halved(type(network)):
        def forward(self, *args, **kwargs):
            output = super().forward(*args, **kwargs)
            output.logits = output.logits / 2 + 1
            return output

    batch = tiny_batch("gpt2")
    plain = LayeredModel(network).trajectory(batch).logits
    network.__class__ = Halved
    trajectory, index = LayeredModel(network).trajectory(batch), (torch.tensor([0, 2]), torch.tensor([9, 1]))
    torch.testing.assert_close(trajectory.logits, plain / 2 + 1, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(trajectory.logits_of(index), (plain / 2 + 1)[index], rtol=1e-12, atol=1e-12)
    assert trajectory.logits is trajectory.logits, "they are computed once"


def test_each_convention_normalizes_its_layers():
    view = LayeredModel(tiny("gpt2", torch.float64))
    hidden, norm = view.trajectory(tiny_batch("gpt2")).hidden, view.model.transformer.ln_f
    normed = [torch.nn.functional.layer_norm(state, (32,), norm.weight, norm.bias, norm.eps) for state in hidden]
    for layer in range(4):
        assert torch.equal(convert_states(view, "resid", layer, hidden[layer]), hidden[layer])
        torch.testing.assert_close(convert_states(view, "normed", layer, hidden[layer]), normed[layer])
        expected = normed[3] if layer == 3 else hidden[layer]
        torch.testing.assert_close(convert_states(view, "hf", layer, hidden[layer]), expected)


def test_without_a_final_norm_all_conventions_are_equal():
    view = LayeredModel(tiny("bert"))
    hidden = view.trajectory(tiny_batch("bert")).hidden[1]
    assert all(convert_states(view, states, 3, hidden) is hidden for states in ("resid", "hf", "normed"))


@pytest.mark.soak  # the first use of torch.compile in a process takes three seconds
def test_a_compiled_model_is_measured_through_its_eager_module(model):
    assert LayeredModel(torch.compile(model.model)).model is model.model
