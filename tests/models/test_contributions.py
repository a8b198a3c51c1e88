"""What attention and MLP add to the states, against hooks on the modules that transformers and timm name."""

import pytest
import torch

from lit_layers.errors import InputError
from lit_layers.models.contributions import check_contributions, contributions
from lit_layers.models.view import LayeredModel
from tests.analyses.prompt_states import first
from tests.support.tiny_models import EVERY, LAYERS, sees_images, tiny, tiny_batch

# family -> names of the modules in a block whose outputs are added to the state
NAMES = {"gpt2": "attn mlp", "llama": "self_attn mlp", "vit": "attn mlp", "picture_vit": "attention mlp"}
# side by side; Falcon adds the attention to the MLP's output in place
NAMES |= {"gpt_neox": "attention mlp", "falcon": "self_attention mlp"}
# norms or scales of the outputs
NAMES |= {"gemma2": "post_attention_layernorm post_feedforward_layernorm", "vit_average": "ls1 ls2"}


@pytest.mark.parametrize("padding", ["left", "right"])
@pytest.mark.parametrize("name", NAMES)
def test_contributions_are_the_outputs_of_attention_and_mlp_and_their_sum_is_the_change(name, padding):
    view, batch = LayeredModel(tiny(name, torch.float64)), tiny_batch(name, padding=padding)
    seen = view.trajectory(batch)
    found = [part for layer in range(1, LAYERS + 1) for part in contributions(seen, layer)]
    caught: list[torch.Tensor] = []
    for part in [block.get_submodule(part) for block in view.blocks for part in NAMES[name].split()]:
        part.register_forward_hook(lambda module, args, output: caught.append(first(output).clone()))
    for row, real in enumerate(seen.mask):  # each prompt without padding
        caught.clear()
        view.model(batch["pixel_values"][[row]].double() if sees_images(name) else batch["input_ids"][[row]][:, real])
        for part, expected in zip(found, caught, strict=True):
            torch.testing.assert_close(part[row, real], expected[0], rtol=1e-5, atol=1e-7)
    sums = torch.stack(found[::2]) + torch.stack(found[1::2])
    torch.testing.assert_close(sums[:, seen.mask], seen.hidden.diff(dim=0)[:, seen.mask])


@pytest.mark.parametrize("name", ["bert", "granite", "mamba_lm", "no attention", "changed after the first token"])
def test_other_blocks_are_refused(name):
    model = tiny(name if name in EVERY else "gpt2")
    if name == "no attention":
        model.transformer.h[1].attn.forward = lambda states, **options: (states.mean(1, True).expand_as(states), None)
    if name == "changed after the first token":
        model.transformer.h[1].register_forward_hook(lambda *call: first(call[2]) + torch.arange(10)[:, None])
    with pytest.raises(InputError, match="add the outputs of attention and MLP to the state, got block 2 of .* no two"):
        contributions(LayeredModel(model).trajectory(tiny_batch("gpt2")), 2)


def test_contributions_within_rounding_of_the_state_are_refused_and_16_bits_are_checked_in_32():
    model = tiny("vit_average")
    model.pos_embed.data *= 1e3
    check_contributions(LayeredModel(model.bfloat16()))
    model.float().pos_embed.data *= 1e5
    with pytest.raises(InputError, match="too small to tell which outputs"):
        contributions(LayeredModel(model).trajectory(tiny_batch("vit_average")), 1)
