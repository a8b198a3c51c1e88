"""Properties of single families: positions, padding, images, heads and refusals."""

import copy

import pytest
import torch
from torch import nn

from lit_layers.errors import InputError
from lit_layers.functional.jacobian import block_jacobians
from lit_layers.functional.jacobian.block_jacobians import block_jacobian
from lit_layers.models.families import class_named, row_of, trunk_of
from lit_layers.models.view import LayeredModel
from tests.support.tiny_models import IMAGE, RECURRENT, sees_images, tiny, tiny_batch


@pytest.mark.parametrize("name", [RECURRENT[0], pytest.param(RECURRENT[2], marks=pytest.mark.soak)])
def test_padding_before_a_state_space_with_biases_does_not_reach_the_text(name):
    model = LayeredModel(tiny(name, torch.float64, use_bias=True))
    for padding in ("left", "right"):
        batch = tiny_batch(name, padding=padding)
        trajectory, mask = model.trajectory(batch), batch["attention_mask"][2].bool()
        alone = model.trajectory({"input_ids": batch["input_ids"][2:, mask]})
        torch.testing.assert_close(trajectory.hidden[:, 2, mask], alone.hidden[:, 0], rtol=0, atol=1e-9)
    batch, mask = tiny_batch(name, padding="left"), tiny_batch(name, padding="left")["attention_mask"][2].bool()
    with torch.no_grad():  # the model itself lets padding change the text
        given = model.model(**batch).logits
        alone = model.trajectory({"input_ids": batch["input_ids"][2:, mask]}).logits
    assert (given[2, mask] - alone[0]).abs().max() > 1e-3


def test_a_text_of_any_length_fits_a_state_space():
    model = LayeredModel(tiny("mamba_lm"))
    assert model.max_tokens is None
    assert model.trajectory(tiny_batch("mamba_lm", batch=1, tokens=100)).hidden.isfinite().all()


def test_states_of_a_state_space_in_half_precision_are_float32_as_in_transformers():
    model, batch = LayeredModel(tiny("mamba_lm", torch.bfloat16)), tiny_batch("mamba_lm")
    trajectory = model.trajectory(batch)
    assert (model.dtype, trajectory.hidden.dtype) == (torch.bfloat16, torch.float32)
    with torch.no_grad():
        assert torch.equal(model.readout(trajectory.hidden[-1]), model.model(**batch).logits)


def test_jacobians_of_a_state_space_warn_that_they_are_slower(monkeypatch):
    monkeypatch.setattr(block_jacobians, "_warned", set())
    for name in RECURRENT[::2]:
        trajectory = LayeredModel(tiny(name)).trajectory(tiny_batch(name, batch=1, tokens=3))
        block, hidden = trajectory.block(2), trajectory.hidden[1]
        with pytest.warns(RuntimeWarning, match=r"Jacobians of Mamba2?Block are computed by plain reverse mode, exac"):
            found = block_jacobian(block, hidden)
        assert torch.equal(found, block_jacobian(block, hidden, route="plain"))
        with pytest.raises(ValueError, match="no route 'cut' for Mamba"):
            block_jacobian(block, hidden, route="cut")


@pytest.mark.parametrize("name", ["roberta", "roberta_classifier"])
def test_roberta_positions_start_after_padding_even_if_a_token_has_the_padding_id(name):
    model = LayeredModel(tiny(name, torch.float64))
    assert model.max_tokens == 64 - 1  # position 0 belongs to padding, whose id is 0
    batch = tiny_batch(name, padding="left")
    batch["input_ids"][2, -2] = 0
    trajectory, mask = model.trajectory(batch), batch["attention_mask"][2].bool()
    alone = model.trajectory({"input_ids": batch["input_ids"][2:, mask]})
    torch.testing.assert_close(trajectory.hidden[:, 2, mask], alone.hidden[:, 0], rtol=0, atol=1e-12)
    long = torch.full((1, 64), 3)
    with pytest.raises(InputError, match="takes at most 63 tokens, got 64"):
        model.trajectory({"input_ids": long})
    assert model.trajectory({"input_ids": long[:, 1:]}).hidden.isfinite().all()


def test_padding_anywhere_and_the_callers_own_columns_are_moved_together():
    model = LayeredModel(tiny("bert", torch.float64))
    ids = torch.arange(3, 18).reshape(1, 15).repeat(2, 1)
    mask = torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0, 0, 0], [1, 1, 1, 0, 0, 1, 1, 1, 1, 0, 0, 0, 0, 0, 0]])
    types = torch.tensor([[0, 1, 0, 1, 1, 0, 1, 0, 1, 1, 0, 0, 1, 0, 1]]).repeat(2, 1)
    positions = torch.arange(20, 35).repeat(2, 1)
    batch = {"input_ids": ids, "attention_mask": mask, "token_type_ids": types, "position_ids": positions}
    trajectory = model.trajectory(batch)
    assert torch.equal(trajectory.mask, mask.bool())
    for index, real in enumerate(mask.bool()):
        own = {name: column[index : index + 1, real] for name, column in batch.items()}
        alone = model.trajectory(own)
        torch.testing.assert_close(trajectory.hidden[:, index, real], alone.hidden[:, 0], rtol=0, atol=1e-12)
    prompt = trajectory.rows(1, 2)
    torch.testing.assert_close(prompt.block(2)(prompt.hidden[1]), prompt.hidden[2], rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", ["picture_mae", "picture_mae_trunk"])
def test_a_masked_autoencoder_sees_every_patch_in_order_and_is_restored(name):
    model = tiny(name, torch.float64).train()
    view, batch = LayeredModel(model), tiny_batch(name)
    kept, state = copy.deepcopy(model.config.to_dict()), torch.get_rng_state()
    first, again = view.trajectory(batch), view.trajectory(batch)
    assert model.config.to_dict() == kept
    assert model.config.mask_ratio == 0.75
    assert torch.equal(torch.get_rng_state(), state), "nothing was drawn"
    assert torch.equal(first.hidden, again.hidden)
    seen = model.base_model(batch["pixel_values"].double()).last_hidden_state
    assert (first.hidden.shape[2], seen.shape[1]) == (1 + 16, 1 + 4), "in training three of four patches are masked"
    # A change of the last patch changes layer 0 only at the last position.
    batch["pixel_values"][:, :, -4:, -4:] += 1
    moved = (view.trajectory(batch).hidden[0] - first.hidden[0]).abs().amax((0, 2)) > 0
    assert moved.tolist() == [False] * 16 + [True]
    with pytest.raises(ValueError, match="doesn't match model"):
        view.trajectory({"pixel_values": torch.zeros(1, 3, 20, 20)})
    assert model.config.mask_ratio == 0.75, "also when a call fails"


# For each model: side of the images, number of prefix tokens, number of classes, and whether it has a head.
FACTS = {
    "vit": (16, 1, 7, True),
    "vit_average": (16, 0, 7, True),
    "vit_headless": (16, 1, 0, False),
    "picture_vit": (16, 1, 7, True),
    "picture_vit_trunk": (16, 1, 0, False),
    "picture_dinov2": (None, 1, 7, True),
    "picture_registers": (None, 5, 7, True),
    "picture_mae": (16, 1, 0, True),
    "picture_beit": (16, 1, 7, True),
    "picture_clip": (16, 1, 0, False),
    "picture_clip_projected": (16, 1, 0, True),
    "gpt2": (None, 0, 0, True),
    "mamba_trunk": (None, 0, 0, False),
}


def test_a_view_reports_the_properties_of_an_image_model():
    for name, (image_size, prefix, num_classes, has_head) in FACTS.items():
        model = LayeredModel(tiny(name))
        facts = (model.image_size, model.num_prefix_tokens, model.num_classes)
        assert facts == (image_size, prefix, num_classes), name
        assert (model.has_head, model.has_class_token) == (has_head, prefix > 0), name
        if sees_images(name):
            assert (model.vocab_size, model.max_tokens, model.dim) == (None, None, 32), name
            batch = tiny_batch(name)
            trajectory = model.trajectory(batch)
            assert model.num_patches() == model.num_patches(IMAGE) == trajectory.hidden.shape[2] - prefix == 16, name
            call = model.model(batch["pixel_values"]) if name.startswith("vit") else None
            logits = call if call is not None else getattr(model.model(**batch), "logits", None)
            if logits is not None and "mae" not in name:  # MAE itself masks patches
                torch.testing.assert_close(trajectory.logits, logits, rtol=0, atol=1e-5, msg=name)


def test_the_vision_model_is_the_trunk_even_if_it_is_not_the_base_model(monkeypatch):
    model, batch = tiny("picture_clip_projected"), tiny_batch("picture_clip_projected")
    monkeypatch.setattr(type(model), "base_model_prefix", "clip")  # as in transformers 5.17
    assert model.base_model is model
    view = LayeredModel(model)
    assert trunk_of(model) is model.vision_model
    assert view.has_head
    torch.testing.assert_close(view.trajectory(batch).logits, model(**batch).image_embeds)


def test_dinov2_takes_images_of_any_size():
    for name in ["picture_dinov2", "picture_registers"]:
        model = LayeredModel(tiny(name))
        trajectory = model.trajectory({"pixel_values": torch.randn(2, 3, 24, 24)})
        assert trajectory.hidden.shape[2] == model.num_prefix_tokens + model.num_patches(24)


def test_clip_is_refused_with_the_class_of_its_vision_model():
    from transformers import CLIPConfig, CLIPModel

    with torch.device("meta"):
        model = CLIPModel(CLIPConfig())
    with pytest.raises(InputError, match=r"no layered view of CLIPModel: .* with CLIPVisionModel\.from_pretrained"):
        LayeredModel(model)


def test_a_class_is_found_regardless_of_case():
    from transformers import MptForCausalLM

    assert class_named("MPTForCausalLM") is class_named("MptForCausalLM") is MptForCausalLM
    assert class_named("SecretForCausalLM") is None


def test_a_class_of_the_same_name_from_another_package_has_no_row():
    class VisionTransformer(nn.Module):
        pass

    assert row_of(VisionTransformer()) is None
