"""A user's hooks on blocks (steering, ablation) take effect in states, Jacobians, replay and readouts."""

import pytest
import torch
from transformers import GemmaConfig, GemmaForCausalLM, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from lit_layers.errors import InputError
from lit_layers.functional.jacobian.block_jacobians import block_jacobian
from lit_layers.models.build import causal_lm
from lit_layers.models.running_order import running_order
from lit_layers.models.view import LayeredModel
from tests.support.replay import replay

SIZES = {"vocab_size": 60, "hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "head_dim": 8}
SIZES |= {"num_hidden_layers": 3, "num_key_value_heads": 1, "initializer_range": 0.3, "max_position_embeddings": 32}
IDS = torch.randint(3, 60, (2, 7), generator=torch.Generator().manual_seed(1))


def model(family="llama", **options):
    torch.manual_seed(0)
    if family == "gpt2":
        return GPT2LMHeadModel(GPT2Config(vocab_size=60, n_embd=16, n_layer=2, n_head=2, **options)).eval()
    if family == "gemma":  # has no row in FAMILIES: its blocks are found by structure
        return GemmaForCausalLM(GemmaConfig(**SIZES, **options)).eval()
    return LlamaForCausalLM(LlamaConfig(**SIZES, **options)).eval()


def first(output):
    return output[0] if isinstance(output, tuple) else output


def steer(module, args, kwargs):
    return (args[0] + 0.5, *args[1:]), kwargs


def scale_third_token(module, args, output):  # affects one token only
    factor = torch.ones(first(output).shape[1])
    factor[2] = 0.25
    return first(output) * factor[:, None]


def hooked(family, number):
    network = model(family)
    block = network.model.layers[number - 1]
    block.register_forward_pre_hook(steer, with_kwargs=True)
    block.register_forward_hook(scale_third_token)
    block.mlp.register_forward_hook(scale_third_token)
    return network


@pytest.mark.parametrize("family", ["llama", "gemma"])
@pytest.mark.parametrize("number", [1, 2])
def test_hooks_of_blocks_act_once_in_states_replay_readout_and_jacobians(family, number):
    network = hooked(family, number)
    view = LayeredModel(network)
    trajectory = view.trajectory({"input_ids": IDS})
    with torch.no_grad():
        logits = network(IDS).logits
    assert not torch.allclose(logits, model(family)(IDS).logits, atol=0.01)
    assert torch.allclose(trajectory.logits, logits, atol=1e-5)
    assert torch.allclose(replay(view, trajectory, range(1, 4)), logits, atol=1e-5)
    assert torch.allclose(view.readout(trajectory.hidden[-1]), logits, atol=1e-5)
    for layer in range(1, 4):
        assert torch.allclose(
            trajectory.block(layer)(trajectory.hidden[layer - 1]), trajectory.hidden[layer], atol=1e-5
        )

    def changed(state):
        whole = torch.cat(
            [trajectory.hidden[number - 1][:1, :2], state[None, None], trajectory.hidden[number - 1][:1, 3:]], 1
        )
        return trajectory.rows(0, 1).block(number)(whole)[0, 2]

    expected = torch.autograd.functional.jacobian(changed, trajectory.hidden[number - 1][0, 2].clone()) - torch.eye(16)
    found = block_jacobian(trajectory.block(number), trajectory.hidden[number - 1], out_tokens=2)[0]
    assert torch.allclose(found, expected, atol=1e-4)
    assert len(network.model.layers[number - 1]._forward_hooks) == 1, "the user's own are back"


def test_a_model_with_hooks_does_not_run_in_another_order():
    with pytest.raises(InputError, match="has hooks on its blocks"), running_order(hooked("llama", 2), [1, 3]):
        pass


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma"])
def test_a_decoder_that_sees_later_tokens_does_not_predict_the_next_one(family):
    assert LayeredModel(model(family)).predicts_next_token
    assert not LayeredModel(model(family, is_causal=False)).predicts_next_token


def test_a_decoder_with_padding_rows_predicts_the_next_token():
    padded = causal_lm("gpt2", vocab_size=61, n_layer=1, n_embd=32, n_head=2, n_positions=16, pad_vocab_to=64)
    assert LayeredModel(padded).predicts_next_token
