"""Saved models: unused weights, heads, ties, and folders that do not exist."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import BertConfig, BertForPreTraining, BertModel, LlamaConfig, LlamaForCausalLM, LlamaModel

from lit_layers.data.tokenization import load_tokenizer
from lit_layers.errors import InputError
from lit_layers.models.build import causal_lm, has_tied_head, weights_hash
from lit_layers.models.offload import Offload
from lit_layers.models.saved import describe, load, rebuild, sequence_classifier
from lit_layers.series.checkpoint_sources import FolderSource, ModelFiles

SIZES = {"vocab_size": 60, "hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2}


def llama(kind=LlamaForCausalLM, **options):
    torch.manual_seed(0)
    return kind(LlamaConfig(num_hidden_layers=3, initializer_range=0.3, **SIZES, **options)).eval()


def add(folder: Path, **tensors: torch.Tensor) -> None:
    file = folder / "model.safetensors"
    save_file(load_file(file) | tensors, file, metadata={"format": "pt"})


def configure(folder: Path, **fields) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


@pytest.mark.parametrize(
    ("fields", "tensors", "named"),
    [
        ({"attention_bias": False}, {}, "q_proj.bias"),
        ({"num_hidden_layers": 2}, {}, r"model\.layers\.2\."),
        ({}, {"model.layers.0.mlp.up_proj.weight_scale_inv": torch.ones(1, 1)}, "weight_scale_inv"),
        ({}, {"model.embed_positions.weight": torch.ones(8, 16)}, "embed_positions"),
        ({}, {"model.layers.1.post_attention_head.weight": torch.ones(3)}, "post_attention_head"),
        ({}, {"lm_head.bias": torch.ones(60)}, r"lm_head\.bias"),
    ],
    ids=["biases", "blocks", "scales", "positions", "part of a block", "bias of the head"],
)
def test_weights_that_the_class_does_not_use_are_refused_by_name(tmp_path, fields, tensors, named):
    llama(attention_bias="attention_bias" in fields).save_pretrained(tmp_path)
    configure(tmp_path, **fields)
    add(tmp_path, **tensors)
    with pytest.raises(InputError, match=f"no place for .*{named}"):
        load(tmp_path)


def test_a_saved_trunk_has_no_unused_weights(tmp_path):
    llama(LlamaModel).save_pretrained(tmp_path)
    load(tmp_path)
    add(tmp_path, **{"embed_positions.weight": torch.ones(8, 16)})
    with pytest.raises(InputError, match="embed_positions"):
        load(tmp_path)


def test_a_head_on_top_of_the_trunk_is_left_out(tmp_path):
    model = BertForPreTraining(BertConfig(num_hidden_layers=2, max_position_embeddings=32, **SIZES)).eval()
    model.save_pretrained(tmp_path / "bert")
    ids = torch.arange(1, 13).reshape(2, 6)
    for architecture in ("BertModel", "BertForMaskedLM"):  # drops both heads; drops one head and the pooler
        configure(tmp_path / "bert", architectures=[architecture])
        opened = load(tmp_path / "bert")
        states = opened(ids, output_hidden_states=True).hidden_states
        assert torch.equal(states[-1], BertModel.from_pretrained(tmp_path / "bert").eval()(ids).last_hidden_state)
    sequence_classifier(tmp_path / "bert", 3)
    llama().save_pretrained(tmp_path / "llama")
    add(tmp_path / "llama", **{"v_head.summary.weight": torch.ones(1, 16)})  # value head that trl saves with the model
    load(tmp_path / "llama")
    configure(tmp_path / "llama", architectures=["LlamaModel"])
    load(tmp_path / "llama")


def test_an_encoder_for_fine_tuning_has_no_unused_weights(tmp_path):
    BertForPreTraining(BertConfig(num_hidden_layers=3, **SIZES)).save_pretrained(tmp_path)
    configure(tmp_path, num_hidden_layers=2)
    with pytest.raises(InputError, match=r"encoder\.layer\.2"):
        sequence_classifier(tmp_path, 3)


def test_weights_of_another_model_in_the_folder_are_refused(tmp_path):
    llama().save_pretrained(tmp_path, max_shard_size="10KB")
    load(tmp_path)
    llama().save_pretrained(tmp_path / "whole")
    shutil.copy(tmp_path / "whole" / "model.safetensors", tmp_path)  # transformers would read this one
    with pytest.raises(InputError, match="does not name model.safetensors"):
        load(tmp_path)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("differ", [True, False])
def test_ties_are_those_of_the_weights_in_memory_not_of_the_config(tmp_path, tied, differ):
    model = llama(tie_word_embeddings=False)
    if not differ:
        model.lm_head.weight.data.copy_(model.model.embed_tokens.weight.data)
    model.save_pretrained(tmp_path)
    configure(tmp_path, tie_word_embeddings=tied)
    whole = load(tmp_path)
    again = rebuild(describe(whole))  # as when training resumes
    again.load_state_dict(whole.state_dict())
    started = causal_lm(str(tmp_path), weights=whole)
    offloaded = load(tmp_path, offload=Offload(tmp_path / "offloaded", torch.device("cpu")))
    for other in (again, started):
        for name, weight in whole.state_dict().items():
            assert torch.equal(other.state_dict()[name], weight), name
        assert has_tied_head(other) == has_tied_head(whole)
    assert len({weights_hash(each) for each in (whole, again, started, offloaded)}) == 1


def test_a_missing_folder_is_not_looked_up_on_the_hub(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    llama().save_pretrained("out/checkpoint-2")
    Path("out/checkpoint-2/tokenizer.json").write_text("{}")
    source, files = FolderSource(Path("out/checkpoint-2")), ModelFiles("out/checkpoint-2")
    tokenizer, folder = source.tokenizer(), source.fetch()
    shutil.rmtree("out")
    assert tokenizer is not None
    for opened in (lambda: source.load(folder, torch.float32), lambda: load(files.location)):
        with pytest.raises(InputError, match="does not exist"):
            opened()
    with pytest.raises(InputError, match="expected an existing path"):
        load_tokenizer(tokenizer)


@pytest.mark.parametrize("name", ["model.pt", "epoch=3-step=1200.ckpt", "run/model.safetensors", "notes.md"])
def test_a_file_instead_of_a_folder_is_refused_with_advice(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run").mkdir()
    for place in ("run/config.json", name):
        (tmp_path / place).write_text("{}")
    for opened in (load, ModelFiles):
        with pytest.raises(InputError, match=f"expected a folder with a model, {name} is a file: name its folder"):
            opened(name)
