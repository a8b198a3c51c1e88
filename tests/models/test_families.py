"""The identity that defines a layered view, held by every family."""

import copy
import dataclasses
from itertools import pairwise

import pytest
import torch
from torch import nn

from lit_layers.errors import InputError
from lit_layers.models.families import class_named, propose_blocks, row_of, trunk_of
from lit_layers.models.structure import family_of
from lit_layers.models.view import LayeredModel
from tests.support.replay import replay
from tests.support.tiny_models import (
    EVERY,
    FAMILIES,
    HEADS,
    IMAGE,
    LAYERS,
    PICTURES,
    RECURRENT,
    by_kind,
    sees_images,
    tiny,
    tiny_batch,
)

EAGER_ONLY = {"gemma2", "gpt_neo", "mpt", *RECURRENT}
IN_FLOAT32 = (
    "llama",
    "mistral",
    "qwen",
    "olmo",
    "gemma",
    "granite",
    "gpt_neox",
    "phi",
    "falcon",
    "mpt",
    "modernbert",
    "mamba",
)  # norms, rotary tables, softmax
# GPT-Neo multiplies queries with keys in float32, and MKL's product depends on how they lie in memory: the model by
# itself makes a cache of them, a prompt cut from a batch lies behind others.
PRODUCTS_IN_FLOAT32 = {"gpt_neo": 5e-6}
PADDINGS = (None, "left", "right")
TEXTS = [name for name in EVERY if not sees_images(name)]
CASES = [
    pytest.param(name, padding, attention, marks=[] if quick else pytest.mark.nightly)
    for name in EVERY
    for padding in ((None,) if sees_images(name) else PADDINGS)
    for attention in (("eager",) if name in EAGER_ONLY else ("sdpa", "eager"))
    for quick in [
        padding == {"sdpa": "left", "eager": "right"}[attention] or (sees_images(name) and attention == "sdpa")
    ]
]


def view_of(name: str, padding: str | None, attention: str) -> tuple[LayeredModel, dict, float]:
    """In float64, with the accuracy that transformers' own arithmetic leaves."""
    tolerance = 1e-6 if name.startswith(IN_FLOAT32) else PRODUCTS_IN_FLOAT32.get(name, 1e-12)
    return LayeredModel(tiny(name, torch.float64, attention=attention)), tiny_batch(name, padding=padding), tolerance


@pytest.mark.parametrize(("name", "padding", "attention"), CASES)
def test_blocks_connect_the_layers_and_the_readout_ends_in_the_logits(name, padding, attention):
    model, batch, tolerance = view_of(name, padding, attention)
    trajectory = model.trajectory(batch)
    assert trajectory.hidden.shape[0] == model.num_layers + 1 == LAYERS + 1
    assert trajectory.hidden.isfinite().all()
    for layer, (before, after) in enumerate(pairwise(trajectory.hidden), start=1):
        with torch.no_grad():
            torch.testing.assert_close(trajectory.block(layer)(before), after, rtol=0, atol=tolerance)
        assert (after - before).norm() > 0.1 * before.norm(), "a block that does nothing proves nothing"
    with torch.no_grad():
        torch.testing.assert_close(model.readout(trajectory.hidden[-1]), trajectory.logits, rtol=0, atol=tolerance)
    replayed = replay(model, trajectory, range(1, LAYERS + 1))
    torch.testing.assert_close(replayed, trajectory.logits, rtol=0, atol=tolerance)


@pytest.mark.parametrize(("name", "padding", "attention"), CASES)
def test_a_prompt_cut_from_a_batch_keeps_its_own_arguments(name, padding, attention):
    model, batch, tolerance = view_of(name, padding, attention)
    trajectory = model.trajectory(batch)
    for index in range(3):
        prompt = trajectory.rows(index, index + 1)
        assert prompt.hidden.shape[1] == prompt.logits.shape[0] == prompt.mask.shape[0] == 1
        replayed = replay(model, prompt, range(1, LAYERS + 1))
        torch.testing.assert_close(replayed, trajectory.logits[index : index + 1], rtol=0, atol=10 * tolerance)


@pytest.mark.parametrize("name", by_kind(EVERY))
def test_a_prompt_is_cut_rightly_from_as_many_prompts_as_there_are_heads(name):
    model = LayeredModel(tiny(name))
    trajectory = model.trajectory(tiny_batch(name, batch=HEADS))
    for index in range(HEADS):
        replayed = replay(model, trajectory.rows(index, index + 1), range(1, LAYERS + 1))
        torch.testing.assert_close(replayed, trajectory.logits[index : index + 1], rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", EVERY)
def test_the_logits_are_those_of_the_model_itself(name):
    model = tiny(name, torch.float64)
    batch = tiny_batch(name)
    with torch.no_grad():
        if name.startswith("vit"):
            expected = model(batch["pixel_values"].double())
        elif name in PICTURES:
            expected = own_result(name, model, batch["pixel_values"].double())
        else:
            output = model(**batch)
            expected = output.logits if hasattr(output, "logits") else output.last_hidden_state
    close = {"rtol": 0, "atol": PRODUCTS_IN_FLOAT32.get(name, 1e-12)}
    torch.testing.assert_close(LayeredModel(model).trajectory(batch).logits, expected, **close)


def own_result(name: str, model: nn.Module, pixels: torch.Tensor) -> torch.Tensor:
    """What a model of images gives out by itself; a masked autoencoder is told to mask nothing, in a copy."""
    model, options = copy.deepcopy(model), {}
    if "mae" in name:
        model.config.mask_ratio = 0.0
        options["noise"] = torch.linspace(0, 1, (IMAGE // 4) ** 2).expand(len(pixels), -1)
    output = model(pixels, **options)
    for field in ("logits", "image_embeds"):
        if hasattr(output, field):
            return getattr(output, field)
    return output.pooler_output if name == "picture_clip" else output.last_hidden_state


@pytest.mark.parametrize("name", [name for name in TEXTS if name not in RECURRENT])
def test_hidden_states_are_those_transformers_gives_out_and_the_last_is_before_the_norm(name):
    model = tiny(name, torch.float64)
    view, batch = LayeredModel(model), tiny_batch(name)
    hidden = view.trajectory(batch).hidden
    with torch.no_grad():
        given = torch.stack(model(**batch, output_hidden_states=True).hidden_states)
        norm = view.family.final_norm(model)
        last = hidden[-1] if norm is None else norm(hidden[-1])
    close = {"rtol": 0, "atol": PRODUCTS_IN_FLOAT32.get(name, 1e-12)}
    torch.testing.assert_close(hidden[:-1], given[:-1], **close)
    torch.testing.assert_close(last, given[-1], **close)


@pytest.mark.parametrize("name", RECURRENT)
def test_layer_0_of_a_state_space_is_the_embedding_that_its_own_hidden_states_leave_out(name):
    model = tiny(name, torch.float64)
    batch = tiny_batch(name)
    view = LayeredModel(model)
    hidden, norm = view.trajectory(batch).hidden, view.family.final_norm(model)
    assert norm is not None
    with torch.no_grad():
        given = model(**batch, output_hidden_states=True).hidden_states
        embedded = model.get_input_embeddings()(batch["input_ids"])
        normed = norm(hidden[-1])
    assert len(given) == LAYERS + 1
    torch.testing.assert_close(hidden[0], embedded, rtol=0, atol=0)
    torch.testing.assert_close(hidden[1:], torch.stack(given[:-1]), rtol=0, atol=1e-12)
    torch.testing.assert_close(normed, given[-1], rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", RECURRENT)
def test_padding_before_a_state_space_with_biases_does_not_reach_the_text(name):
    model = LayeredModel(tiny(name, torch.float64, use_bias=True))
    for padding in ("left", "right"):
        batch = tiny_batch(name, padding=padding)
        trajectory, mask = model.trajectory(batch), batch["attention_mask"][2].bool()
        alone = model.trajectory({"input_ids": batch["input_ids"][2:, mask]})
        torch.testing.assert_close(trajectory.hidden[:, 2, mask], alone.hidden[:, 0], rtol=0, atol=1e-9)
    batch, mask = tiny_batch(name, padding="left"), tiny_batch(name, padding="left")["attention_mask"][2].bool()
    with torch.no_grad():  # by itself the model lets it in
        given = model.model(**batch).logits if hasattr(model.model, "lm_head") else model.model(**batch)[0]
        alone = model.trajectory({"input_ids": batch["input_ids"][2:, mask]}).logits
    assert (given[2, mask] - alone[0]).abs().max() > 1e-3


def test_a_text_of_any_length_fits_a_state_space():
    model = LayeredModel(tiny("mamba_lm"))
    assert model.max_tokens is None
    assert model.trajectory(tiny_batch("mamba_lm", batch=1, tokens=100)).hidden.isfinite().all()


def test_a_state_space_in_half_precision_keeps_its_stream_in_float32_as_transformers_does():
    model, batch = LayeredModel(tiny("mamba_lm", torch.bfloat16)), tiny_batch("mamba_lm")
    trajectory = model.trajectory(batch)
    assert (model.dtype, trajectory.hidden.dtype) == (torch.bfloat16, torch.float32)
    with torch.no_grad():
        assert torch.equal(model.readout(trajectory.hidden[-1]), model.model(**batch).logits)


@pytest.mark.parametrize("name", ["roberta", "roberta_classifier"])
def test_positions_of_roberta_begin_behind_those_of_padding_even_where_a_token_looks_like_it(name):
    model = LayeredModel(tiny(name, torch.float64))
    assert model.max_tokens == 64 - 1  # position 0 belongs to padding, whose token is 0
    batch = tiny_batch(name, padding="left")
    batch["input_ids"][2, -2] = 0
    trajectory, mask = model.trajectory(batch), batch["attention_mask"][2].bool()
    alone = model.trajectory({"input_ids": batch["input_ids"][2:, mask]})
    torch.testing.assert_close(trajectory.hidden[:, 2, mask], alone.hidden[:, 0], rtol=0, atol=1e-12)
    long = torch.full((1, 64), 3)
    with pytest.raises(InputError, match="takes at most 63 tokens, got 64"):
        model.trajectory({"input_ids": long})
    assert model.trajectory({"input_ids": long[:, 1:]}).hidden.isfinite().all()


@pytest.mark.parametrize("name", PICTURES)
def test_hidden_states_of_pictures_are_those_that_the_blocks_are_given_and_leave(name):
    """By a plain loop over the blocks, from embeddings that the model itself makes."""
    model = copy.deepcopy(tiny(name, torch.float64))
    pixels, trunk = tiny_batch(name)["pixel_values"].double(), model.base_model
    if "mae" in name:
        model.config.mask_ratio = 0.0
    with torch.no_grad():
        own = own_states(name, trunk, pixels)
    hidden = LayeredModel(tiny(name, torch.float64)).trajectory(tiny_batch(name)).hidden
    torch.testing.assert_close(hidden, own, rtol=0, atol=1e-12)


def own_states(name: str, trunk: nn.Module, pixels: torch.Tensor) -> torch.Tensor:
    """`hidden_states` of transformers, of which those of pictures end before the final norm."""
    noise = {"noise": torch.linspace(0, 1, (IMAGE // 4) ** 2).expand(len(pixels), -1)} if "mae" in name else {}
    return torch.stack(trunk(pixels, **noise, output_hidden_states=True).hidden_states)


@pytest.mark.parametrize("name", ["picture_mae", "picture_mae_trunk"])
def test_a_masked_autoencoder_is_shown_every_patch_in_its_place_and_is_as_before_afterwards(name):
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
    # a change of the last patch changes layer 0 in the last place alone
    batch["pixel_values"][:, :, -4:, -4:] += 1
    moved = (view.trajectory(batch).hidden[0] - first.hidden[0]).abs().amax((0, 2)) > 0
    assert moved.tolist() == [False] * 16 + [True]


def test_a_masked_autoencoder_is_as_before_when_a_call_fails():
    model = tiny("picture_mae_trunk")
    with pytest.raises(ValueError, match="doesn't match model"):
        LayeredModel(model).trajectory({"pixel_values": torch.zeros(1, 3, 20, 20)})
    assert model.config.mask_ratio == 0.75


def test_the_norm_of_clip_is_read_out_at_the_class_token_alone():
    model = tiny("picture_clip", torch.float64)
    view, batch = LayeredModel(model), tiny_batch("picture_clip")
    trajectory = view.trajectory(batch)
    with torch.no_grad():
        output = model(batch["pixel_values"].double())
    assert torch.equal(trajectory.hidden[-1], output.last_hidden_state), "its own last state is not normed"
    assert torch.equal(trajectory.logits, model.post_layernorm(trajectory.hidden[-1][:, 0]))


@pytest.mark.parametrize(
    ("name", "image_size", "prefix", "num_classes", "has_head"),
    [
        ("vit", 16, 1, 7, True),
        ("vit_average", 16, 0, 7, True),
        ("vit_headless", 16, 1, 0, False),
        ("picture_vit", 16, 1, 7, True),
        ("picture_vit_trunk", 16, 1, 0, False),
        ("picture_dinov2", None, 1, 7, True),
        ("picture_registers", None, 5, 7, True),
        ("picture_mae", 16, 1, 0, True),
        ("picture_beit", 16, 1, 7, True),
        ("picture_clip", 16, 1, 0, False),
        ("picture_clip_projected", 16, 1, 0, True),
        ("gpt2", None, 0, 0, True),
        ("mamba_trunk", None, 0, 0, False),
    ],
)
def test_a_view_says_what_a_model_of_images_is(name, image_size, prefix, num_classes, has_head):
    model = LayeredModel(tiny(name))
    assert (model.image_size, model.num_prefix_tokens, model.num_classes) == (image_size, prefix, num_classes)
    assert (model.has_head, model.has_class_token) == (has_head, prefix > 0)
    if sees_images(name):
        assert (model.vocab_size, model.max_tokens, model.dim) == (None, None, 32)
        tokens = model.trajectory(tiny_batch(name)).hidden.shape[2]
        assert model.num_patches() == model.num_patches(IMAGE) == tokens - prefix == 16


def test_the_vision_model_is_the_trunk_also_where_transformers_does_not_call_it_the_base(monkeypatch):
    model, batch = tiny("picture_clip_projected"), tiny_batch("picture_clip_projected")
    monkeypatch.setattr(type(model), "base_model_prefix", "clip")  # as in transformers 5.17
    assert model.base_model is model
    view = LayeredModel(model)
    assert trunk_of(model) is model.vision_model
    assert view.has_head
    torch.testing.assert_close(view.trajectory(batch).logits, model(**batch).image_embeds)


@pytest.mark.parametrize("name", ["picture_dinov2", "picture_registers"])
def test_dinov2_takes_images_of_any_size(name):
    model = LayeredModel(tiny(name))
    trajectory = model.trajectory({"pixel_values": torch.randn(2, 3, 24, 24)})
    assert trajectory.hidden.shape[2] == model.num_prefix_tokens + model.num_patches(24)


def test_a_model_of_images_and_texts_is_refused_with_the_class_of_its_images():
    from transformers import CLIPConfig, CLIPModel

    with torch.device("meta"):
        model = CLIPModel(CLIPConfig())
    with pytest.raises(InputError, match=r"no layered view of CLIPModel: .* with CLIPVisionModel\.from_pretrained"):
        LayeredModel(model)


@pytest.mark.parametrize("name", [name for name in FAMILIES if name.startswith("vit")])
def test_hidden_states_of_a_vit_are_its_raw_intermediates(name):
    model = tiny(name, torch.float64)
    batch = tiny_batch(name)
    hidden = LayeredModel(model).trajectory(batch).hidden
    with torch.no_grad():
        pixels = batch["pixel_values"].double()
        given = model.forward_intermediates(
            pixels, norm=False, output_fmt="NLC", return_prefix_tokens=True, intermediates_only=True
        )
    for layer, patches in enumerate(given, start=1):
        prefix, patches = (None, patches) if torch.is_tensor(patches) else (patches[1], patches[0])
        tokens = patches if prefix is None else torch.cat([prefix, patches], dim=1)
        torch.testing.assert_close(hidden[layer], tokens, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", by_kind(TEXTS))
@pytest.mark.parametrize(
    ("attention", "dtype"),
    [
        ("sdpa", torch.float32),
        ("eager", torch.float64),
        pytest.param("sdpa", torch.float64, marks=pytest.mark.nightly),
        pytest.param("eager", torch.float32, marks=pytest.mark.nightly),
    ],
)
def test_padding_on_either_side_and_the_junk_in_it_change_no_state_of_any_kernel_or_precision(name, attention, dtype):
    """Windows of attention are shorter than the padding: eager attention in float64 then meets rows of nothing."""
    if name in EAGER_ONLY and attention == "sdpa":
        return
    model = LayeredModel(tiny(name, dtype, attention=attention))
    tolerance = {torch.float32: 1e-4, torch.float64: 1e-5}[dtype]  # some softmaxes are in float32 always
    for padding in ("left", "right"):
        batch = tiny_batch(name, padding=padding)
        trajectory = model.trajectory(batch)
        seen: list[torch.Tensor] = []
        model.pass_states(batch, lambda layer, hidden, mask, seen=seen: seen.append(hidden))
        assert torch.equal(torch.stack(seen), trajectory.hidden)
        assert torch.equal(trajectory.mask, batch["attention_mask"].bool())
        for index, mask in enumerate(trajectory.mask):
            alone = model.trajectory({"input_ids": batch["input_ids"][index : index + 1, mask]})
            close = {"rtol": tolerance, "atol": tolerance}
            torch.testing.assert_close(trajectory.hidden[:, index, mask], alone.hidden[:, 0], **close)
            logits = trajectory.logits[index]
            logits = logits[mask] if logits.ndim == 2 else logits
            torch.testing.assert_close(logits, alone.logits[0], **close)


def test_padding_on_both_sides_and_between_and_columns_of_the_callers_own_are_moved_together():
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


@pytest.mark.parametrize("name", by_kind(EVERY))
def test_families_run_in_bfloat16(name):
    model = LayeredModel(tiny(name, torch.bfloat16))
    trajectory = model.trajectory(tiny_batch(name))
    assert model.dtype == torch.bfloat16
    assert name in RECURRENT or trajectory.hidden.dtype == torch.bfloat16
    full = LayeredModel(tiny(name)).trajectory(tiny_batch(name)).hidden
    assert (trajectory.hidden.float() - full).norm() < 0.1 * full.norm()


@pytest.mark.parametrize("name", by_kind(EVERY))
def test_only_blocks_of_bert_and_its_kin_are_no_residual_branch_added_to_their_input(name):
    model = LayeredModel(tiny(name))
    with torch.no_grad():
        for parameter in model.blocks[1].parameters():
            parameter.zero_()
    hidden = model.trajectory(tiny_batch(name)).hidden
    assert torch.equal(hidden[2], hidden[1]) == (not name.startswith(("bert", "roberta", "distilbert")))


def test_a_wrong_row_would_show():
    model = LayeredModel(tiny("gpt2", torch.float64))
    model.family = dataclasses.replace(model.family, norm=None)
    trajectory = model.trajectory(tiny_batch("gpt2"))
    assert (model.readout(trajectory.hidden[-1]) - trajectory.logits).abs().max() > 0.1


def test_a_class_derived_from_a_known_one_is_known():
    from transformers import GPT2LMHeadModel

    class MyGPT2(GPT2LMHeadModel):
        pass

    assert family_of(MyGPT2(tiny("gpt2").config)).name == "gpt2"


def test_an_encoder_with_a_decoder_is_refused_with_the_reason():
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = {"vocab_size": 11, "d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 2, "num_heads": 2}
    model = T5ForConditionalGeneration(T5Config(**sizes))
    with pytest.raises(InputError, match="no layered view of T5ForConditionalGeneration: an encoder and a decoder are"):
        LayeredModel(model)


def test_a_class_is_found_in_whatever_capitals_a_config_has_it():
    from transformers import MptForCausalLM

    assert class_named("MPTForCausalLM") is class_named("MptForCausalLM") is MptForCausalLM
    assert class_named("SecretForCausalLM") is None


def test_a_model_of_the_same_name_from_elsewhere_is_not_taken_for_the_known_one():
    class VisionTransformer(nn.Module):
        pass

    assert row_of(VisionTransformer()) is None


@pytest.mark.parametrize("name", [*TEXTS, *(name for name in PICTURES if name != "picture_mae")])
def test_the_proposal_agrees_with_every_row(name):
    model = tiny(name)
    assert tuple(model.get_submodule(propose_blocks(model)).children()) == LayeredModel(model).blocks
