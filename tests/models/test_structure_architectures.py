"""Twenty architectures without a row: truncation, running orders and Jacobians on what structure shows of them."""

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

from lit_layers.errors import InputError
from lit_layers.functional.jacobian.block_jacobians import block_jacobian
from lit_layers.models.build import quiet
from lit_layers.models.copies import truncate
from lit_layers.models.offload import Offload
from lit_layers.models.running_order import running_order
from lit_layers.models.saved import load
from lit_layers.models.view import LayeredModel
from tests.support.replay import replay
from tests.support.tiny_configs import tiny_model

ARCHITECTURES = {
    "opt": "OPTForCausalLM",
    "gptj": "GPTJForCausalLM",  # attention and feed-forward side by side
    "bloom": "BloomForCausalLM",  # ALiBi
    "phi3": "Phi3ForCausalLM",
    "stablelm": "StableLmForCausalLM",
    "cohere2": "Cohere2ForCausalLM",  # side by side, sliding windows
    "gemma3_text": "Gemma3ForCausalLM",
    "olmo3": "Olmo3ForCausalLM",  # norms behind attention and feed-forward
    "smollm3": "SmolLM3ForCausalLM",
    "apertus": "ApertusForCausalLM",
    "minicpm3": "MiniCPM3ForCausalLM",  # latent attention
    "electra": "ElectraForMaskedLM",
    "olmoe": "OlmoeForCausalLM",  # experts, here and below
    "mixtral": "MixtralForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "qwen3_next": "Qwen3NextForCausalLM",  # linear attention beside attention, here and below
    "falcon_h1": "FalconH1ForCausalLM",
    "jamba": "JambaForCausalLM",
    "zamba2": "Zamba2ForCausalLM",
    "falcon_mamba": "FalconMambaForCausalLM",
}
QUICK = ("bloom", "phi3", "olmoe", "qwen3_next", "minicpm3")
CASES = [pytest.param(name, marks=[] if name in QUICK else pytest.mark.nightly) for name in ARCHITECTURES]
IDS = torch.randint(3, 100, (2, 6), generator=torch.Generator().manual_seed(1))
CLOSE: dict[str, Any] = {"rtol": 2e-4, "atol": 2e-4}


def view_of(model_type: str) -> LayeredModel:
    return LayeredModel(tiny_model(ARCHITECTURES[model_type], model_type))


@pytest.mark.parametrize("model_type", CASES)
def test_the_first_blocks_are_a_model_of_the_same_states(model_type):
    view = view_of(model_type)
    refusals = {
        "zamba2": "the blocks of this Zamba2ForCausalLM share weights, and it is not cut",
        "minicpm3": "MiniCPM3ForCausalLM is not cut: .* its blocks depend on how many there are",
    }
    if model_type in refusals:
        with pytest.raises(InputError, match=refusals[model_type]):
            truncate(view.model, 2)
        return
    cut = LayeredModel(truncate(view.model, 2))
    assert (cut.num_layers, cut.model.config.num_hidden_layers) == (2, 2)
    whole, first = view.trajectory({"input_ids": IDS}), cut.trajectory({"input_ids": IDS})
    torch.testing.assert_close(first.hidden, whole.hidden[:3], **CLOSE)
    torch.testing.assert_close(first.logits, view.readout(whole.hidden[2]), **CLOSE)
    again = type(cut.model)._from_config(cut.model.config).eval()  # as its config says, so that saving it is whole
    again.load_state_dict(cut.model.state_dict())
    torch.testing.assert_close(LayeredModel(again).trajectory({"input_ids": IDS}).logits, first.logits, **CLOSE)


@pytest.mark.parametrize("model_type", CASES)
def test_any_order_run_by_the_model_is_the_replayed_one(model_type):
    view = view_of(model_type)
    trajectory = view.trajectory({"input_ids": IDS})
    for schedule in ([1, 3], [2, 1, 3], [1, (2, 3)]):
        replayed = replay(view, trajectory, schedule)
        with torch.no_grad(), running_order(view.model, schedule) as model:
            torch.testing.assert_close(model(input_ids=IDS, **dict(view.family.options)).logits, replayed, **CLOSE)
    assert (replayed - trajectory.logits).abs().max() > 1e-3


@pytest.mark.soak
@pytest.mark.parametrize("model_type", CASES)
def test_offloaded_blocks_give_the_states_of_the_whole(model_type, tmp_path):
    view = view_of(model_type)
    with quiet():
        view.model.save_pretrained(tmp_path / "model")
    offloaded = LayeredModel(load(tmp_path / "model", offload=Offload(tmp_path / "scratch", torch.device("cpu"))))
    assert all(parameter.is_meta for block in offloaded.blocks for parameter in block.parameters())
    assert dict(offloaded.family.proof) == dict(view.family.proof)
    whole, found = (each.trajectory({"input_ids": IDS}) for each in (view, offloaded))
    torch.testing.assert_close(found.hidden, whole.hidden, **CLOSE)
    torch.testing.assert_close(found.logits, whole.logits, **CLOSE)


def by_differences(view: LayeredModel, layer: int) -> tuple[Tensor, Tensor]:
    """A direction, and how the branch of a block moves along it at the last token, by central differences."""
    trajectory = view.trajectory({"input_ids": IDS})
    hidden = trajectory.hidden[layer - 1].double().float()
    direction = torch.randn(hidden.shape[-1], generator=torch.Generator().manual_seed(2))
    step = torch.zeros_like(hidden)
    step[:, -1] = 1e-3 * direction
    with torch.no_grad():
        moved = trajectory.block(layer)(hidden + step) - trajectory.block(layer)(hidden - step)
    return direction, moved[:, -1] / 2e-3 - direction


@pytest.mark.parametrize("model_type", CASES)
def test_jacobians_of_every_route_are_the_differences_of_the_block(model_type):
    view = view_of(model_type)
    trajectory = view.trajectory({"input_ids": IDS})
    direction, expected = by_differences(view, 2)
    block, hidden = trajectory.block(2), trajectory.hidden[1]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*computed by plain reverse mode")
        found = {"auto": block_jacobian(block, hidden), "plain": block_jacobian(block, hidden, route="plain")}
    for route, jacobian in found.items():
        torch.testing.assert_close(jacobian, found["plain"], rtol=1e-3, atol=1e-3, msg=route)
        torch.testing.assert_close(
            jacobian.squeeze(1).squeeze(1) @ direction, expected, rtol=2e-2, atol=2e-2, msg=route
        )
