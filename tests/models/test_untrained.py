"""`untrained`: the same architecture with new weights."""

import pytest
import torch

from lit_layers.errors import InputError
from lit_layers.models.build import causal_lm, save, untrained, vit, weights_hash
from lit_layers.models.copies import truncate
from lit_layers.models.saved import load
from lit_layers.models.view import LayeredModel
from tests.support.tiny_models import tiny

SMALL = {"vocab_size": 61, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 64}
VIT = {"depth": 3, "embed_dim": 32, "num_heads": 4, "img_size": 16, "patch_size": 4, "num_classes": 5}


def test_the_weights_equal_a_build_with_that_seed_and_the_random_state_does_not_change():
    model = causal_lm("gpt2", seed=1, **SMALL)
    torch.manual_seed(7)
    state = torch.get_rng_state()
    for seed in (1, 2):
        assert weights_hash(untrained(model, seed=seed)) == weights_hash(causal_lm("gpt2", seed=seed, **SMALL))
    assert torch.equal(torch.get_rng_state(), state)
    images = vit("deit_tiny_patch16_224", seed=1, **VIT)
    assert weights_hash(untrained(images, seed=2)) == weights_hash(vit("deit_tiny_patch16_224", seed=2, **VIT))


@pytest.mark.parametrize("tied", [True, False])
def test_embeddings_are_tied_as_in_the_model(tied):
    model = tiny("llama", tie_word_embeddings=tied)
    fresh = untrained(model)
    same = fresh.get_input_embeddings().weight is fresh.get_output_embeddings().weight
    assert same is tied


def test_dtype_and_padding_rows_are_those_of_the_model():
    model = causal_lm("gpt2", pad_vocab_to=64, **SMALL).to(torch.bfloat16)
    fresh = untrained(model)
    assert {parameter.dtype for parameter in fresh.parameters()} == {torch.bfloat16}
    assert LayeredModel(fresh).vocab_size == 61
    assert fresh.get_input_embeddings().weight.shape[0] == 64


def test_a_loaded_or_truncated_vision_transformer_gets_new_weights(tmp_path):
    model = vit("deit_tiny_patch16_224", seed=1, **VIT)
    save(model, tmp_path)
    for given, blocks, classes in ((load(tmp_path), 3, 5), (truncate(model, 2, head=False), 2, 0)):
        fresh = untrained(given)
        assert LayeredModel(fresh).num_layers == blocks
        assert fresh.num_classes == classes
        assert weights_hash(fresh) != weights_hash(given)


def test_a_vision_transformer_of_unknown_options_is_refused():
    with pytest.raises(InputError, match=r"cannot build this VisionTransformer anew: build it with vit\(name, "):
        untrained(tiny("vit"))
