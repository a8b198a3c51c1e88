"""`truncate`: a model of the first blocks with the same hidden states; `remove_blocks`: one without some blocks."""

import copy

import pytest
import torch

from lit_layers.errors import InputError
from lit_layers.models.build import causal_lm, save, unpadded_state, vit, weights_hash
from lit_layers.models.copies import remove_blocks, truncate
from lit_layers.models.saved import load
from lit_layers.models.view import LayeredModel
from tests.support.rounding import assert_rounded
from tests.support.skipping import skipping
from tests.support.tiny_models import tiny, tiny_batch

GPT2 = {"vocab_size": 61, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 64}
VIT = {"depth": 4, "embed_dim": 32, "num_heads": 4, "img_size": 16, "patch_size": 4, "num_classes": 5}


def hidden(model, batch):
    return LayeredModel(model).trajectory(batch).hidden


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_a_truncated_trunk_ends_with_the_final_norm_of_its_last_block(name):
    """Compared with `output_hidden_states` of transformers, without `LayeredModel`."""
    model, batch = tiny(name), tiny_batch(name)
    own = model(**batch, use_cache=False, output_hidden_states=True).hidden_states
    norm = model.base_model.norm if name == "llama" else model.base_model.ln_f
    for num_layers in (1, 2):  # the last entry of `own` is after the norm
        trunk = truncate(model, num_layers, head=False)
        assert torch.equal(trunk(**batch, use_cache=False).last_hidden_state, norm(own[num_layers]))
        whole = truncate(model, num_layers)(**batch, use_cache=False)
        assert torch.equal(whole.logits, model.lm_head(norm(own[num_layers])))


def test_the_weights_are_copies_and_tied_ones_stay_tied():
    model = causal_lm("gpt2", **GPT2)
    before = weights_hash(model)
    removed, cut = remove_blocks(model, [2]), truncate(model, 2)
    assert removed.lm_head.weight is removed.transformer.wte.weight
    assert cut.lm_head.weight is cut.transformer.wte.weight
    with torch.no_grad():
        for parameter in cut.parameters():
            parameter += 1
    assert weights_hash(model) == before
    for key, tensor in truncate(model, 2).state_dict().items():
        assert torch.equal(tensor, model.state_dict()[key]), key
        assert tensor.data_ptr() != model.state_dict()[key].data_ptr()


def test_modes_precision_attention_and_frozen_weights_are_kept():
    model = tiny("qwen2", dtype=torch.bfloat16, attention="eager").train()
    model.model.layers[0].mlp.eval()
    model.model.norm.weight.requires_grad_(False)
    cut = truncate(model, 2)
    assert cut.training
    assert not cut.model.layers[0].mlp.training
    assert cut.model.layers[1].mlp.training
    assert {parameter.dtype for parameter in cut.parameters()} == {torch.bfloat16}
    assert cut.config._attn_implementation == "eager"
    frozen = [name for name, parameter in cut.named_parameters() if not parameter.requires_grad]
    assert frozen == ["model.norm.weight"]


@pytest.mark.parametrize("head", [True, False])
def test_padding_rows_of_the_vocabulary_stay_and_are_left_out_when_saved(head, tmp_path):
    model = causal_lm("gpt2", pad_vocab_to=64, **GPT2).eval()
    cut = truncate(model, 1, head=head)
    assert (cut.get_input_embeddings().weight.shape[0], cut.config.unpadded_vocab_size) == (64, 61)
    save(cut, tmp_path)
    again, batch = load(tmp_path), tiny_batch("gpt2")
    assert again.get_input_embeddings().weight.shape[0] == 61
    assert_rounded(hidden(again, batch), hidden(model, batch)[:2])
    assert weights_hash(again) == weights_hash(cut)


@pytest.mark.parametrize("head", [True, False])
def test_a_vit_keeps_what_it_was_built_with_except_its_depth(head, tmp_path):
    from timm import create_model

    model = vit("deit_tiny_patch16_224", **VIT, drop_path_rate=0.3)
    cut = truncate(model, 2, head=head)
    rates = [block.drop_path1.drop_prob for block in model.blocks[1:2]]
    assert [block.drop_path1.drop_prob for block in cut.blocks[1:2]] == rates
    assert rates[0] > 0
    save(cut, tmp_path)
    again, batch = create_model(f"local-dir:{tmp_path}", pretrained=True).eval(), tiny_batch("vit")
    assert again.num_classes == (5 if head else 0)
    assert_rounded(hidden(again, batch), hidden(model, batch)[:3])
    assert_rounded(hidden(truncate(load(tmp_path), 1), batch), hidden(model, batch)[:2])


def test_a_missing_pooler_becomes_zeros_and_an_existing_one_is_copied():
    assert tiny("bert").bert.pooler is None
    pooler = truncate(tiny("bert"), 1, head=False).pooler
    assert all(not parameter.any() for parameter in pooler.parameters())
    model = tiny("bert_classifier")
    kept = unpadded_state(truncate(model, 1, head=False).pooler)
    assert all(torch.equal(kept[name], tensor) for name, tensor in model.bert.pooler.state_dict().items())


def test_the_global_random_state_does_not_change():
    before = torch.get_rng_state()
    truncate(tiny("bert"), 1, head=False)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("num_layers", [-1, 0, 4])
def test_a_depth_out_of_range_is_refused(num_layers):
    message = rf"num_layers: GPT2LMHeadModel can be cut to 1\.\.3 blocks, got {num_layers}"
    with pytest.raises(InputError, match=message):
        truncate(tiny("gpt2"), num_layers)


def test_blocks_that_share_weights_are_refused():
    model = tiny("gpt2")
    model.transformer.h[2] = copy.deepcopy(model.transformer.h[0])
    model.transformer.h[2].ln_1 = model.transformer.h[0].ln_1
    with pytest.raises(InputError, match="the blocks of this GPT2LMHeadModel share weights, and it is not cut"):
        truncate(model, 2)


@pytest.mark.parametrize("name", ["gpt2", "llama", "gemma2", "gpt_neo", "falcon_alibi", "bert"])
def test_a_model_without_a_block_computes_what_the_other_blocks_compute(name, tmp_path):
    """Compared with hooks that return a block's input; saved, opened by transformers alone, and with a cache."""
    model, batch = tiny(name), tiny_batch(name)
    for block in (1, 2):
        with skipping(LayeredModel(model).blocks[block - 1]):
            expected = model(**batch).logits
        cut = remove_blocks(model, [block])
        save(cut, tmp_path / str(block))
        for network in (cut, type(model).from_pretrained(tmp_path / str(block))):
            torch.testing.assert_close(network(**batch).logits, expected, rtol=1e-5, atol=1e-6)
            if network.can_generate():
                ids, how = batch["input_ids"][:1, :5], {"max_new_tokens": 6, "do_sample": False}
                assert torch.equal(
                    network.generate(ids, use_cache=True, **how), network.generate(ids, use_cache=False, **how)
                )


def test_blocks_that_depend_on_their_position_and_absent_ones_are_not_removed():
    model = causal_lm("gpt2", **GPT2, scale_attn_by_inverse_layer_idx=True)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter *= 5  # so that attention is far from uniform
    with pytest.raises(InputError, match="depend on their position: removed, others would change"):
        remove_blocks(model, [1])
    assert LayeredModel(remove_blocks(model, [3])).num_layers == 2
    for blocks in ([], [0], [4], [1, 2, 3]):
        with pytest.raises(InputError, match=r"expected some of the blocks 1\.\.3, but not all, got"):
            remove_blocks(model, blocks)
