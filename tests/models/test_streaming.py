"""A model of which one block is in memory: the states of the whole one, and what is said where it cannot be.

States are compared up to rounding, as weights read block by block lie elsewhere in memory (`tests.support.rounding`).
"""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from lit_layers.errors import InputError
from lit_layers.models import load, streaming, weights_hash
from lit_layers.models.shard_files import INDEX, ShardFiles
from lit_layers.models.streaming import StreamedModel
from lit_layers.models.view import LayeredModel
from tests.support.rounding import assert_rounded, move_, moved_batch
from tests.support.saved_models import saved, saved_vit
from tests.support.tiny_models import LAYERS, PICTURES, RECURRENT, VOCAB, tiny_batch

CPU = torch.device("cpu")


@pytest.fixture
def streamed():
    """Opens models and closes them again."""
    opened = []

    def opening(folder, **options) -> StreamedModel:
        opened.append(StreamedModel(ShardFiles(folder), device=CPU, **options))
        return opened[-1]

    yield opening
    for model in opened:
        model.close()


def states(model: StreamedModel, batch) -> list[torch.Tensor]:
    entered = model.enter(batch)
    found = [entered.hidden]
    for layer in range(1, model.num_layers + 1):
        with model.resident(layer), torch.no_grad():
            found.append(entered.calls[layer - 1](found[-1]))
    return found


def assert_whole(found: list[torch.Tensor], folder: Path, batch, dtype=torch.float32) -> None:
    """States are those of the whole model, whose weights and batch lie at odd offsets."""
    whole = LayeredModel(move_(load(folder, dtype=dtype))).trajectory(moved_batch(batch)).hidden
    assert whole.dtype == dtype
    assert_rounded(torch.stack(found), whole)


def resident_bytes(model: StreamedModel) -> int:
    tensors = model.model.state_dict().values()
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors if tensor.device == CPU)


def rewrite(folder: Path, change) -> None:
    """Puts the weights of a folder into one file, under the names and with the values that `change` gives."""
    tensors = {}
    for shard in folder.glob("*.safetensors"):
        tensors |= load_file(shard)
        shard.unlink()
    (folder / INDEX).unlink(missing_ok=True)
    save_file(change(tensors), folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize(
    "name", ["gpt2", "gpt_neox", "gemma2", "bert", "roberta", "distilbert", "modernbert", *RECURRENT]
)
@pytest.mark.parametrize("padding", [pytest.param(None, marks=pytest.mark.soak), "left"])
def test_the_states_are_those_of_the_whole_model(tmp_path, streamed, name, padding):
    saved(tmp_path, name)
    batch = tiny_batch(name, padding=padding)
    model = streamed(tmp_path)
    assert_whole(states(model, batch), tmp_path, batch)
    assert torch.equal(model.enter(batch).mask, LayeredModel(load(tmp_path)).trajectory(batch).mask)


def test_images_are_streamed_as_well(tmp_path, streamed):
    saved_vit(tmp_path)
    batch = tiny_batch("vit")
    assert_whole(states(streamed(tmp_path), batch), tmp_path, batch)


@pytest.mark.parametrize("name", PICTURES)
def test_images_are_streamed_through_models_of_transformers(tmp_path, streamed, name):
    saved(tmp_path, name)
    whole, batch, model = load(tmp_path), tiny_batch(name), streamed(tmp_path)
    assert_whole(states(model, batch), tmp_path, batch)
    assert model.weights_hash() == weights_hash(whole)
    assert (model.dim, model.image_size) == (LayeredModel(whole).dim, LayeredModel(whole).image_size)


def test_one_block_is_in_memory_and_none_when_it_is_left(tmp_path, streamed):
    saved(tmp_path, "llama")
    model = streamed(tmp_path)
    assert resident_bytes(model) == model.dim * 4  # the final norm
    model.enter(tiny_batch("llama"))
    assert resident_bytes(model) == model.dim * 4  # no row of the embedding stays
    for layer in (2, 1):
        with model.resident(layer, following=3 - layer):
            assert resident_bytes(model) == model.dim * 4 + model.block_bytes(layer)
        assert resident_bytes(model) == model.dim * 4
    assert model.num_loads == 2


def test_of_an_embedding_the_rows_that_are_looked_up_are_read(tmp_path, streamed):
    network = saved(tmp_path, "llama")
    model = streamed(tmp_path)
    rows, places = model.rows(model.model.model.embed_tokens.weight, torch.tensor([[9, 4], [4, 9]]))
    assert torch.equal(rows, network.model.embed_tokens.weight[[4, 9]])
    assert places.tolist() == [[1, 0], [0, 1]]


def test_a_view_says_of_itself_what_the_whole_one_says(tmp_path, streamed):
    saved(tmp_path, "gpt2")
    model, whole = streamed(tmp_path), LayeredModel(load(tmp_path))
    for name in ("num_layers", "dim", "vocab_size", "max_tokens", "device", "dtype", "attention"):
        assert getattr(model, name) == getattr(whole, name), name


@pytest.mark.parametrize("name", ["gpt2", "gpt_neox", "bert"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_hash_of_the_weights_is_that_of_the_whole_model(tmp_path, streamed, name, dtype):
    saved(tmp_path, name)
    assert streamed(tmp_path, dtype=dtype).weights_hash() == weights_hash(load(tmp_path, dtype=dtype))


def test_weights_stored_in_bfloat16_are_converted(tmp_path, streamed):
    saved(tmp_path, "llama", dtype=torch.bfloat16)
    batch = tiny_batch("llama")
    assert next(iter(load_file(next(tmp_path.glob("*.safetensors"))).values())).dtype == torch.bfloat16
    for dtype in (torch.float32, torch.float64):
        assert_whole(states(streamed(tmp_path, dtype=dtype), batch), tmp_path, batch, dtype)


@pytest.mark.parametrize("name", ["gpt2", "bert"])
def test_names_may_lack_the_trunk_s_and_be_of_an_old_release(tmp_path, streamed, name):
    """As the files of `gpt2` and `bert-base-uncased` do; GPT-2's hold masks besides, which no model of today has."""
    saved(tmp_path, name)
    batch = tiny_batch(name)
    expected = LayeredModel(load(tmp_path)).trajectory(batch).hidden

    def change(tensors):
        old = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
        found = {}
        for key, tensor in tensors.items():
            for new, former in old.items():
                key = key.replace(new, former)
            found[key.removeprefix("transformer.") if name == "gpt2" else key] = tensor
        return found | ({"h.0.attn.bias": torch.ones(1, 1, 8, 8)} if name == "gpt2" else {})

    rewrite(tmp_path, change)
    assert any("gamma" in key or key.startswith("h.") for key in ShardFiles(tmp_path).shard_of)
    assert_rounded(torch.stack(states(streamed(tmp_path), batch)), expected)


def test_a_trunk_reads_the_file_of_a_model_with_a_head(tmp_path, streamed):
    saved(tmp_path, "gpt2")
    batch = tiny_batch("gpt2")
    expected = LayeredModel(load(tmp_path)).trajectory(batch).hidden
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"architectures": ["GPT2Model"]}))
    assert_rounded(torch.stack(states(streamed(tmp_path), batch)), expected)


def test_a_tensor_that_is_missing_or_of_another_shape_is_named(tmp_path, streamed):
    saved(tmp_path, "gpt2")
    key = "transformer.h.1.mlp.c_fc.weight"
    kept: dict = {}
    rewrite(tmp_path, lambda tensors: kept.update(tensors) or {k: t for k, t in tensors.items() if k != key})
    with pytest.raises(InputError, match=f"^the weights of {tmp_path} do not fill GPT2LMHeadModel: no tensor {key}$"):
        streamed(tmp_path)
    rewrite(tmp_path, lambda tensors: kept | {key: kept[key][:, :5].contiguous()})
    with pytest.raises(InputError, match=rf"{key} has the shape \(32, 5\), its config.json asks for \(32, 128\)$"):
        streamed(tmp_path)


def test_a_block_too_large_for_the_device_is_refused_before_it_is_read(tmp_path, streamed, monkeypatch):
    saved(tmp_path, "gpt2")
    model = streamed(tmp_path)
    monkeypatch.setattr(streaming, "free_memory", lambda device: model.block_bytes(2) - 1)
    with pytest.raises(
        InputError, match=r"^block 2 of .* takes 0\.00 GB in float32, and 0\.00 GB are free on cpu: use"
    ):
        model.resident(2).__enter__()
    assert model.num_loads == 0


def test_the_free_memory_of_this_machine_is_known():
    assert 2**20 < streaming.free_memory(CPU) < 2**50


def test_what_no_streamed_model_can_be_is_refused(tmp_path, streamed):
    saved(tmp_path, "gpt2")
    config = json.loads((tmp_path / "config.json").read_text())
    for change, sentence in (
        ({"architectures": ["SecretForCausalLM"]}, "has no SecretForCausalLM, which"),
        ({"quantization_config": {"bits": 4}}, "is quantized, and only plain weights are read"),
        ({"model_type": None}, "names neither a model_type"),
    ):
        (tmp_path / "config.json").write_text(json.dumps(config | change))
        with pytest.raises(InputError, match=sentence):
            streamed(tmp_path)


def test_texts_the_model_cannot_take_are_refused(tmp_path, streamed):
    saved(tmp_path, "gpt2")
    model = streamed(tmp_path)
    with pytest.raises(InputError, match="GPT2LMHeadModel takes at most 64 tokens, got 65"):
        model.enter(tiny_batch("gpt2", tokens=65))
    with pytest.raises(InputError, match=f"GPT2LMHeadModel knows {VOCAB} tokens, got token {VOCAB}"):
        model.enter({"input_ids": torch.full((1, 3), VOCAB)})


def test_a_batch_that_was_refused_leaves_the_blocks_as_they_are(tmp_path, streamed):
    saved(tmp_path, "gpt2")
    model, batch = streamed(tmp_path), tiny_batch("gpt2")
    with pytest.raises(RuntimeError):
        model.enter({"input_ids": torch.ones(1, 4).long(), "position_ids": torch.zeros(3, 3).long()})
    assert not any("forward" in vars(block) or block._forward_pre_hooks for block in model.blocks)
    assert len(states(model, batch)) == LAYERS + 1
