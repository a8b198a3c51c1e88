"""The identity that defines a layered view, held by every family."""

import dataclasses
from itertools import pairwise

import pytest
import torch
from torch import nn

from lit_layers.errors import InputError
from lit_layers.models.families import FAMILIES as ROWS
from lit_layers.models.families import class_named, family_of, propose_blocks
from lit_layers.models.view import LayeredModel
from tests.support.tiny_models import FAMILIES, HEADS, LAYERS, tiny, tiny_batch

EAGER_ONLY = {"gemma2", "gpt_neo", "mpt"}
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
)  # norms, rotary tables, softmax
PADDINGS = (None, "left", "right")
CASES = [
    (name, padding, attention)
    for name in FAMILIES
    for padding in ((None,) if name.startswith("vit") else PADDINGS)
    for attention in (("eager",) if name in EAGER_ONLY else ("sdpa", "eager"))
]


def view_of(name: str, padding: str | None, attention: str) -> tuple[LayeredModel, dict, float]:
    """In float64 wherever transformers' own arithmetic allows it, with the accuracy to expect."""
    # A row of a mask with nothing to see is NaN in an eager float64 softmax of transformers that is made in float32.
    narrow = name.startswith(IN_FLOAT32)
    dtype = torch.float32 if narrow and attention == "eager" and padding else torch.float64
    tolerance = 1e-5 if dtype == torch.float32 else 1e-6 if narrow else 1e-12
    return LayeredModel(tiny(name, dtype, attention=attention)), tiny_batch(name, padding=padding), tolerance


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
    replayed = model.replay(trajectory, range(1, LAYERS + 1))
    torch.testing.assert_close(replayed, trajectory.logits, rtol=0, atol=tolerance)


@pytest.mark.parametrize(("name", "padding", "attention"), CASES)
def test_a_prompt_cut_from_a_batch_keeps_its_own_arguments(name, padding, attention):
    model, batch, tolerance = view_of(name, padding, attention)
    trajectory = model.trajectory(batch)
    for index in range(3):
        prompt = trajectory.prompt(index)
        assert prompt.hidden.shape[1] == prompt.logits.shape[0] == prompt.mask.shape[0] == 1
        replayed = model.replay(prompt, range(1, LAYERS + 1))
        torch.testing.assert_close(replayed, trajectory.logits[index : index + 1], rtol=0, atol=10 * tolerance)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_prompt_is_cut_rightly_from_as_many_prompts_as_there_are_heads(name):
    model = LayeredModel(tiny(name))
    trajectory = model.trajectory(tiny_batch(name, batch=HEADS))
    for index in range(HEADS):
        replayed = model.replay(trajectory.prompt(index), range(1, LAYERS + 1))
        torch.testing.assert_close(replayed, trajectory.logits[index : index + 1], rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", FAMILIES)
def test_the_logits_are_those_of_the_model_itself(name):
    model = tiny(name, torch.float64)
    batch = tiny_batch(name)
    with torch.no_grad():
        if name.startswith("vit"):
            expected = model(batch["pixel_values"].double())
        else:
            output = model(**batch)
            expected = output.logits if hasattr(output, "logits") else output.last_hidden_state
    torch.testing.assert_close(LayeredModel(model).trajectory(batch).logits, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", [name for name in FAMILIES if not name.startswith("vit")])
def test_hidden_states_are_those_transformers_gives_out_and_the_last_is_before_the_norm(name):
    model = tiny(name, torch.float64)
    view, batch = LayeredModel(model), tiny_batch(name)
    hidden = view.trajectory(batch).hidden
    with torch.no_grad():
        given = torch.stack(model(**batch, output_hidden_states=True).hidden_states)
        norm = view.family.norm
        last = hidden[-1] if norm is None else getattr(model, "base_model", model).get_submodule(norm)(hidden[-1])
    torch.testing.assert_close(hidden[:-1], given[:-1], rtol=0, atol=1e-12)
    torch.testing.assert_close(last, given[-1], rtol=0, atol=1e-12)


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


@pytest.mark.parametrize(
    ("name", "padding"), [(n, p) for n in FAMILIES for p in ("left", "right") if not n.startswith("vit")]
)
def test_padding_on_either_side_and_the_junk_in_it_change_no_state(name, padding):
    model = LayeredModel(tiny(name))
    batch = tiny_batch(name, padding=padding)
    trajectory = model.trajectory(batch)
    for index, mask in enumerate(batch["attention_mask"].bool()):
        alone = model.trajectory({"input_ids": batch["input_ids"][index : index + 1, mask]})
        torch.testing.assert_close(trajectory.hidden[:, index, mask], alone.hidden[:, 0], rtol=1e-4, atol=1e-4)
    assert torch.equal(trajectory.mask, batch["attention_mask"].bool())


@pytest.mark.parametrize("name", FAMILIES)
def test_families_run_in_bfloat16(name):
    model = LayeredModel(tiny(name, torch.bfloat16))
    trajectory = model.trajectory(tiny_batch(name))
    assert model.dtype == trajectory.hidden.dtype == torch.bfloat16
    full = LayeredModel(tiny(name)).trajectory(tiny_batch(name)).hidden
    assert (trajectory.hidden.float() - full).norm() < 0.1 * full.norm()


@pytest.mark.parametrize("name", FAMILIES)
def test_only_bert_blocks_are_no_residual_branch_added_to_their_input(name):
    model = LayeredModel(tiny(name))
    with torch.no_grad():
        for parameter in model.blocks[1].parameters():
            parameter.zero_()
    hidden = model.trajectory(tiny_batch(name)).hidden
    assert torch.equal(hidden[2], hidden[1]) == model.family.residual == (not name.startswith("bert"))


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


def test_an_unknown_model_is_refused_with_the_known_families_and_a_proposal():
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model("opt", hidden_size=16, num_hidden_layers=2, num_attention_heads=2, vocab_size=11)
    config.ffn_dim, config.word_embed_proj_dim, config.max_position_embeddings = 16, 16, 16
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    with pytest.raises(InputError) as refusal:
        LayeredModel(model)
    sentence = str(refusal.value)
    assert sentence.startswith("no layered view of OPTForCausalLM; known families: GPT2LMHeadModel, ")
    assert "add a row to lit_layers/models/families.py (its blocks are probably 'model.decoder.layers')" in sentence
    assert all(kind in sentence for row in ROWS for kind in row.classes)


def test_an_encoder_with_a_decoder_is_refused_with_the_reason():
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = {"vocab_size": 11, "d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 2, "num_heads": 2}
    with torch.device("meta"):
        model = T5ForConditionalGeneration(T5Config(**sizes))
    with pytest.raises(InputError, match="no layered view of T5ForConditionalGeneration: an encoder and a decoder are"):
        LayeredModel(model)


def test_a_class_is_found_in_whatever_capitals_a_config_has_it():
    from transformers import MptForCausalLM

    assert class_named("MPTForCausalLM") is class_named("MptForCausalLM") is MptForCausalLM
    assert class_named("SecretForCausalLM") is None


def test_a_model_of_the_same_name_from_elsewhere_is_refused_without_a_proposal():
    class VisionTransformer(nn.Module):
        pass

    with pytest.raises(InputError, match=r"no layered view of VisionTransformer; .*families\.py$"):
        LayeredModel(VisionTransformer())


@pytest.mark.parametrize("name", [name for name in FAMILIES if not name.startswith("vit")])
def test_the_proposal_agrees_with_every_row(name):
    model = tiny(name)
    assert tuple(model.get_submodule(propose_blocks(model)).children()) == LayeredModel(model).blocks
