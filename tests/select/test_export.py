"""The folder of a model up to a layer: other programs open it, it is verified before it appears, and never partial."""

import functools
import importlib
import json
import stat

import pytest
import torch
from safetensors.torch import load_file, save_file

from lit_layers.data.tokenization import load_tokenizer, tokenizer_hash
from lit_layers.errors import InputError
from lit_layers.models.build import causal_lm, save, vit, weights_hash
from lit_layers.select.export import export
from tests.support.exports import TEXTS, card, features, head_of, probes_of, saved_tokenizer, token_batch
from tests.support.rounding import assert_rounded
from tests.support.tiny_models import tiny, tiny_batch

module = importlib.import_module("lit_layers.select.export")  # the name `export` of the package is the function
VIT = {"depth": 3, "embed_dim": 32, "num_heads": 4, "img_size": 16, "patch_size": 4, "num_classes": 5}
PADDED = {
    "input_ids": torch.tensor([[0, 0, 5, 6, 7], [9, 8, 7, 6, 5]]),
    "attention_mask": torch.tensor([[0, 0, 1, 1, 1], [1] * 5]),
}
BATCHES = [*(token_batch(text) for text in TEXTS[:2]), PADDED]


@pytest.fixture(scope="module")
def spec(tmp_path_factory):
    return saved_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def head(model, layer):
    return head_of(probes_of(features(model, [token_batch(text) for text in TEXTS])), layer)


def exported(model, layer, folder, spec, **options):
    options = {"card": card(), "batches": BATCHES} | options
    return export(model, layer, head(model, layer), folder, tokenizer=spec, **options)


@pytest.mark.parametrize("name", ["gpt2", "llama", "gemma2", "mpt", "bert", "bert_classifier"])
def test_transformers_opens_the_folder_and_gives_the_states_of_the_full_model(name, spec, tmp_path):
    from transformers import AutoModel, AutoTokenizer

    model = tiny(name, vocab_size=270)
    folder = exported(model, 2, tmp_path / "out", spec)
    opened = AutoModel.from_pretrained(folder, attn_implementation=model.config._attn_implementation)
    assert opened.config.num_hidden_layers == 2
    ids = AutoTokenizer.from_pretrained(folder)(TEXTS[0], return_tensors="pt")["input_ids"]
    assert torch.equal(ids, token_batch(TEXTS[0])["input_ids"])
    # Entry 1 of the list of transformers is the output of block 1, in both models.
    states = [part(ids, output_hidden_states=True).hidden_states[1] for part in (opened, model)]
    assert_rounded(*states)
    weights = load_file(folder / "model.safetensors")
    assert not any("lm_head" in key or "cls." in key or "classifier" in key for key in weights)


def test_timm_opens_an_exported_vit(tmp_path):
    from timm import create_model

    model, batch = vit("deit_tiny_patch16_224", **VIT).eval(), tiny_batch("vit", batch=12)
    found = features(model, [{"pixel_values": row[None]} for row in batch["pixel_values"]])
    probe = head_of(probes_of(found), 2, max_tokens=None)
    export(model, 2, probe, tmp_path / "out", tokenizer=None, card=card(), batches=[batch])
    opened = create_model(f"local-dir:{tmp_path / 'out'}", pretrained=True)
    assert (len(opened.blocks), opened.num_classes) == (2, 0)


def test_the_folder_has_all_files_and_everyone_may_read_them(spec, tmp_path):
    picture = tmp_path / "curve.png"
    picture.write_bytes(b"a picture")
    folder = exported(tiny("gpt2", vocab_size=270), 2, tmp_path / "out", spec, card=card(picture=picture))
    names = {file.name for file in folder.iterdir()}
    assert names == {
        *("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"),
        *("probe.safetensors", "probe.json", "README.md", "validation.png"),
    }
    assert all(stat.S_IMODE(file.stat().st_mode) & 0o444 == 0o444 for file in folder.iterdir())
    assert (folder / "validation.png").read_bytes() == b"a picture"
    assert json.loads((folder / "config.json").read_text())["n_layer"] == 2
    assert tokenizer_hash(load_tokenizer(str(folder)).tokenizer) == tokenizer_hash(load_tokenizer(str(spec)).tokenizer)
    assert {path.name for path in tmp_path.iterdir()} == {"out", "curve.png"}


def test_the_check_uses_the_attention_implementation_of_the_model(spec, tmp_path):
    model = tiny("gpt2", vocab_size=270)
    model.set_attn_implementation("eager")
    exported(model, 2, tmp_path / "out", spec)
    assert model.config._attn_implementation == "eager"


def test_a_padded_model_in_training_is_exported_unpadded_and_not_changed(spec, tmp_path):
    sizes = {"vocab_size": 270, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 64}
    model = causal_lm("gpt2", pad_vocab_to=64, **sizes)
    before, random = weights_hash(model), torch.get_rng_state()
    probe = head(model, 1)
    folder = export(model, 1, probe, tmp_path / "out", tokenizer=spec, card=card(), batches=BATCHES)
    assert load_file(folder / "model.safetensors")["wte.weight"].shape == (270, 32)
    assert (weights_hash(model), model.training, model.config.n_layer) == (before, True, 3)
    assert torch.equal(torch.get_rng_state(), random)
    assert before in (folder / "README.md").read_text()


def damaged(damage, model, folder, *rest):
    save(model, folder, *rest)
    weights = load_file(folder / "model.safetensors")
    weights["h.1.mlp.c_fc.weight"][0, 0] += damage
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def test_a_folder_with_other_states_is_removed_and_an_earlier_export_stays(spec, tmp_path, monkeypatch):
    model, folder = tiny("gpt2", vocab_size=270), tmp_path / "out"
    with monkeypatch.context() as patch:
        for damage, sentence in ((1, "model differs at layer 2, by up to"), (1e-6, "weights differ")):
            patch.setattr(module, "save", functools.partial(damaged, damage))
            with pytest.raises(RuntimeError, match=f"the exported {sentence}"):
                exported(model, 2, folder, spec)
            assert list(tmp_path.iterdir()) == []
    exported(model, 1, folder, spec)
    before = {file.name: file.read_bytes() for file in folder.iterdir()}
    monkeypatch.setattr(module, "save", functools.partial(damaged, 1))
    with pytest.raises(RuntimeError):
        exported(model, 2, folder, spec, overwrite=True)
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == before
    assert list(tmp_path.iterdir()) == [folder]


def test_an_earlier_export_is_replaced_only_on_request_and_other_folders_never(spec, tmp_path):
    model, folder = tiny("gpt2", vocab_size=270), tmp_path / "out"
    exported(model, 1, folder, spec)
    with pytest.raises(InputError, match="out is there already: choose another folder, or allow to overwrite it"):
        exported(model, 2, folder, spec)
    exported(model, 2, folder, spec, overwrite=True)
    assert json.loads((folder / "config.json").read_text())["n_layer"] == 2
    assert list(tmp_path.iterdir()) == [folder]
    (folder / "probe.json").unlink()
    (folder / "thesis.txt").write_text("a year's work")
    with pytest.raises(InputError, match=r"is no earlier export \(it has no probe\.json\) and is not overwritten"):
        exported(model, 2, folder, spec, overwrite=True)
    assert (folder / "thesis.txt").read_text() == "a year's work"


def test_invalid_arguments_are_refused_and_leave_no_files(spec, tmp_path):
    model = tiny("gpt2", vocab_size=270)
    probe, folder = head(model, 2), tmp_path / "out"
    options = {"tokenizer": spec, "card": card(), "batches": BATCHES}
    with pytest.raises(FileNotFoundError, match=r"none\.png"):
        export(model, 2, probe, folder, **(options | {"card": card(picture=tmp_path / "none.png")}))
    assert list(tmp_path.iterdir()) == []
    for layer in (0, 4):
        with pytest.raises(
            InputError, match=rf"layer: GPT2LMHeadModel is exported up to one of its blocks 1\.\.3, got {layer}"
        ):
            export(model, layer, probe, folder, **options)
    assert list(tmp_path.iterdir()) == []
