"""GGUF files against the models that they were written from by gguf's own writer, and what is refused."""

import hashlib
import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lit_layers import records
from lit_layers.cli.main import main
from lit_layers.data.tokenization import load_tokenizer, tokenizer_hash
from lit_layers.errors import InputError
from lit_layers.files import gguf_files
from lit_layers.files.gguf_files import GgufFile
from lit_layers.models.build import causal_lm, save
from lit_layers.models.saved import load
from lit_layers.series import OneModel
from lit_layers.series.checkpoint_sources import ModelFiles
from tests.support.labelled_texts import labelled, saved_gpt2, scaled
from tests.support.measured_series import write_texts
from tests.support.rounding import assert_rounded
from tests.support.same_times import exchange

pytest.importorskip("gguf")
from tests.support.gguf_files import Type, write_gguf

LLAMA: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "max_position_embeddings": 64,
    "vocab_size": 300,
    "tie_word_embeddings": False,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
IDS = torch.arange(1, 25).reshape(2, 12)


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory) -> Path:
    """A folder with a GPT-2, its tokenizer, and the same as gpt2.gguf."""
    folder = tmp_path_factory.mktemp("gguf")
    write_gguf(saved_gpt2(folder), folder, folder / "gpt2.gguf")
    return folder


def llama(**options: Any) -> Any:
    return scaled(causal_lm("llama", seed=2, **LLAMA | options))


def states_of(model: Any) -> list[np.ndarray]:
    with torch.no_grad():
        found = model(IDS, output_hidden_states=True)
    return [layer.numpy() for layer in (*found.hidden_states, found.logits)]


def expect_equal(model: Any, file: Path, rtol: float = 1e-4) -> None:
    read = load(file)
    assert not read.training
    assert {tensor.dtype for tensor in read.parameters()} == {torch.float32}
    for found, expected in zip(states_of(read), states_of(model), strict=True):
        np.testing.assert_allclose(found, expected, rtol=rtol, atol=rtol * np.abs(expected).max())


def test_hidden_states_are_those_of_the_model_that_was_written(gpt2, tmp_path):
    expect_equal(load(gpt2), gpt2 / "gpt2.gguf")
    other_base = {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}
    for options in ({}, {"tie_word_embeddings": True}, other_base):
        model = llama(**options)
        expect_equal(model, write_gguf(model, gpt2, tmp_path / "llama.gguf"))


@pytest.mark.parametrize(
    ("key", "value", "is_read"),
    [
        ("attention.scale", 0.5, False),
        ("attention.causal", False, False),
        ("attention.causal", True, True),
        ("attention.sliding_window", 8, False),
        ("attention.key_length", 8, True),
        ("logit_scale", 2.0, False),
        ("use_parallel_residual", False, True),
    ],
)
def test_a_key_that_decides_numbers_and_is_not_read_is_refused_by_name(gpt2, tmp_path, key, value, is_read):
    model = llama()
    file = write_gguf(model, gpt2, tmp_path / "llama.gguf", keys={f"llama.{key}": value})
    if is_read:
        expect_equal(model, file)
    else:
        with pytest.raises(InputError, match=f"llama.{key} is {value}, which is not read"):
            load(file)


def test_a_rotary_part_of_a_head_is_refused(gpt2, tmp_path):
    model = llama()
    config, head_dim = model.config, model.config.head_dim
    config.head_dim = head_dim // 2  # what the writer says of it
    file = write_gguf(model, gpt2, tmp_path / "llama.gguf")
    config.head_dim = head_dim
    with pytest.raises(InputError):
        load(file)


def test_a_split_of_texts_that_is_not_known_is_refused(gpt2, tmp_path):
    model = llama()
    merges = json.loads((gpt2 / "tokenizer.json").read_text())["model"]["merges"]
    assert not any(re.search(r"\d \d", " ".join(merge)) for merge in merges)  # so that digits apart change nothing
    for split in ("falcon", "default", "some-name"):
        file = write_gguf(model, gpt2, tmp_path / f"{split}.gguf", split=split)
        with pytest.raises(InputError, match=f"splits texts by the rule '{split}'"):
            load_tokenizer(str(file))
    text = "In 1969, 12 345 of them didn't."
    expected = load_tokenizer(str(gpt2)).tokenizer.encode(text).ids
    for split in ("gpt-2", "smollm"):
        read = load_tokenizer(str(write_gguf(model, gpt2, tmp_path / f"{split}.gguf", split=split)))
        assert read.tokenizer.encode(text).ids == expected


@pytest.mark.parametrize("kind", ["Q8_0", *(pytest.param(kind, marks=pytest.mark.soak) for kind in ("F16", "BF16"))])
def test_weights_are_the_quantized_ones_rounded(gpt2, tmp_path, kind):
    import gguf

    model = llama()
    file = write_gguf(model, gpt2, tmp_path / "llama.gguf", quantization=Type[kind])
    name = "model.layers.1.mlp.up_proj.weight"
    weights = model.state_dict()[name].numpy()
    rounded = gguf.dequantize(gguf.quantize(weights, Type[kind]), Type[kind])
    read = load(file).state_dict()[name].numpy()
    assert np.array_equal(read, rounded.reshape(read.shape))
    assert not np.array_equal(read, weights)
    assert GgufFile(file).quantization == kind


def test_factors_of_rotary_frequencies_are_the_scaling_of_llama_3(gpt2, tmp_path):
    model = llama(rope_parameters=LLAMA3, head_dim=16, max_position_embeddings=512)
    plain = 5e5 ** (-np.arange(0, 16, 2) / 16)
    factors = plain / model.model.rotary_emb.inv_freq.numpy()
    assert factors.max() == pytest.approx(8)
    file = write_gguf(model, gpt2, tmp_path / "llama.gguf", factors=factors.astype(np.float32))
    expect_equal(model, file)
    with pytest.raises(InputError, match=r"its rotary frequencies are scaled \(rope_freqs.weight\) in no way"):
        load(write_gguf(model, gpt2, tmp_path / "other.gguf", factors=np.linspace(1, 5, 8, dtype=np.float32)))


def test_a_scaling_that_transformers_leaves_out_is_refused(gpt2, tmp_path):
    file = write_gguf(llama(), gpt2, tmp_path / "llama.gguf", scaling="yarn")
    with pytest.raises(InputError, match=r"its rotary frequencies are scaled \(yarn\), which is not read from a GGUF"):
        load(file)


def test_a_file_that_holds_more_than_the_model_is_refused(gpt2, tmp_path):
    with_bias = llama(attention_bias=True)  # for which transformers finds no place in a Llama
    with pytest.raises(
        InputError, match=r"holds 47,360 weights, and LlamaForCausalLM as transformers reads it 47,072: "
    ):
        load(write_gguf(with_bias, gpt2, tmp_path / "llama.gguf"))


def test_the_tokenizer_is_read_from_the_file(gpt2):
    named = load_tokenizer(str(gpt2 / "gpt2.gguf"))
    expected = load_tokenizer(str(gpt2))
    assert named.end_of_text == expected.end_of_text == "<|endoftext|>"
    for text, _ in labelled(20):
        assert named.tokenizer.encode(text).ids == expected.tokenizer.encode(text).ids
    named.tokenizer.enable_truncation(2)
    again = load_tokenizer(str(gpt2 / "gpt2.gguf"))
    assert again.tokenizer.truncation is None, "each reader has one of its own"
    assert tokenizer_hash(again.tokenizer) == tokenizer_hash(named.tokenizer)


def test_the_tokenizer_is_that_of_the_file_that_lies_there_now(gpt2, tmp_path):
    content, file = (gpt2 / "gpt2.gguf").read_bytes(), tmp_path / "gpt2.gguf"
    file.write_bytes(content)
    assert load_tokenizer(str(file)).end_of_text == "<|endoftext|>"
    exchange(file, content.replace(b"<|endoftext|>", b"<|endoftale|>"))
    assert load_tokenizer(str(file)).end_of_text == "<|endoftale|>"


def test_a_model_that_was_quantized_is_saved_as_any_other(gpt2, tmp_path):
    model = load(gpt2 / "gpt2.gguf")
    save(model, tmp_path)
    for found, expected in zip(states_of(load(tmp_path)), states_of(model), strict=True):
        assert_rounded(*map(torch.from_numpy, (found, expected)))  # of a mapped file, and of weights in memory


def test_it_is_measured_from_the_command_line_and_known_by_its_hash(gpt2, tmp_path, capsys):
    file = gpt2 / "gpt2.gguf"
    corpus, recipe = tmp_path / "corpus.jsonl", tmp_path / "recipe.yaml"
    corpus.write_text("\n".join(json.dumps({"text": text}) for text, _ in labelled(1500)))
    data = {"corpus": "${corpus}", "tokenizer": "${tokenizer}", "num_sequences": 4, "num_tokens": 16}
    batches = {"class_path": "lit_layers.data.EvalText", "init_args": data}
    lens = {"class_path": "lit_layers.analyses.Lens", "init_args": {"batches": batches}}
    recipe.write_text(json.dumps({"analyses": [lens]}))
    found = {}
    for model in (file, gpt2):
        root = tmp_path / model.name
        command = ["analyze", model, "--config", recipe, "--corpus", corpus, "--root", root, "--device", "cpu"]
        assert main([str(part) for part in command]) == 0, capsys.readouterr().err
        found[model] = records.read(root / "measurements.jsonl")
    of_file, of_folder = found.values()
    place = of_file[0].provenance
    assert place["weight_files"] == {"gpt2.gguf": hashlib.sha256(file.read_bytes()).hexdigest()}
    assert (place["checkpoint"], place["quantization"]) == (str(file), "F32")
    assert [each.analysis for each in of_file] == [each.analysis for each in of_folder]
    for one, other in zip(of_file, of_folder, strict=True):
        assert one.provenance["data_hash"] == other.provenance["data_hash"]
        values = [[record.value for record in each.records] for each in (one, other)]
        np.testing.assert_allclose(values[0], values[1], rtol=1e-3, atol=1e-4)


def test_config_and_names_of_a_file(gpt2):
    series = OneModel(gpt2 / "gpt2.gguf")
    (checkpoint,) = series.checkpoints
    settings = json.loads(checkpoint.source.read("config.json"))
    expected = json.loads((gpt2 / "config.json").read_text())
    assert {name: settings[name] for name in ("n_embd", "n_layer", "n_head", "n_positions", "vocab_size")} == {
        name: expected[name] for name in ("n_embd", "n_layer", "n_head", "n_positions", "vocab_size")
    }
    with pytest.raises(FileNotFoundError):
        checkpoint.source.read("modules.json")


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["none.gguf"], "expected a GGUF file, none.gguf does not exist"),
        (["cut.gguf"], "cut.gguf cannot be read as a GGUF file: "),
        (["text.gguf"], "text.gguf cannot be read as a GGUF file: "),
        (["FILE", "--revision", "main"], "is a file and has no revision 'main': leave it out"),
        (["FILE", "--offload", "scratch"], "is a GGUF file, which is only read whole: leave --offload out"),
        (["FILE", "--untrained", "1"], "and mteb without --offload or --untrained"),
    ],
)
def test_what_is_no_such_file_is_refused_in_a_sentence(gpt2, tmp_path, monkeypatch, capsys, options, sentence):
    monkeypatch.chdir(tmp_path)
    content = (gpt2 / "gpt2.gguf").read_bytes()
    (tmp_path / "cut.gguf").write_bytes(content[: len(content) // 2])
    (tmp_path / "text.gguf").write_text("no such file")
    words = [str(gpt2 / "gpt2.gguf") if each == "FILE" else each for each in options]
    command = ["analyze", *words, "--corpus", write_texts(tmp_path / "texts", 3000), "--root", "out"]
    assert main(command) == 2
    assert sentence in capsys.readouterr().err.strip().splitlines()[-1]


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("model.pt", "a file of weights alone is loaded in Python, into the network that it is of"),
        ("epoch=3-step=1200.ckpt", "name its folder, with the config.json of the model in it"),
        ("run/model.safetensors", "name its folder, run"),
        ("notes.md", "a GGUF file is read as a whole"),
    ],
)
def test_a_file_in_the_place_of_a_folder_is_refused_with_what_to_name_instead(tmp_path, monkeypatch, name, advice):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run").mkdir()
    for place in ("run/config.json", name):
        (tmp_path / place).write_text("{}")
    for opened in (load, ModelFiles):
        with pytest.raises(InputError, match=f"expected a folder with a model, {name} is a file: {advice}"):
            opened(name)


def test_an_architecture_that_cannot_be_read_is_named(gpt2, tmp_path):
    content = (gpt2 / "gpt2.gguf").read_bytes()
    (tmp_path / "other.gguf").write_bytes(content.replace(b"gpt2", b"ogre"))
    with pytest.raises(InputError, match="GGUF model with architecture ogre is not supported yet"):
        load(tmp_path / "other.gguf")


def test_without_the_package_it_says_what_to_install(gpt2, monkeypatch):
    plain = importlib.util.find_spec
    monkeypatch.setattr(gguf_files.importlib.util, "find_spec", lambda name: None if name == "gguf" else plain(name))
    with pytest.raises(InputError, match=r"gguf, which reads it, is not installed: pip install lit_layers"):
        load(gpt2 / "gpt2.gguf")


@pytest.mark.soak
def test_lm_eval_reads_its_tokenizer_and_gives_the_same_likelihoods(tmp_path):
    from lit_layers.tasks.benchmark_rows import local_rows
    from lit_layers.tasks.lm_eval_scorer import LmEvalScorer
    from tests.support.benchmark_rows import tiny_speaker, write_tasks, write_tokenizer

    rows = local_rows("lambada", write_tasks(tmp_path / "local" / "benchmarks").parent)
    folder, model = write_tokenizer(tmp_path / "model"), tiny_speaker(positions=400)
    file = write_gguf(model, folder, tmp_path / "model.gguf")
    likelihoods = []
    for tokenizer, scored in ((folder, model), (file, load(file))):
        scorer = LmEvalScorer(rows, str(tokenizer), batch_size=3, max_new_tokens=4, max_length=400)
        likelihoods.append(np.concatenate(scorer.score(scored).log_likelihoods))
    np.testing.assert_allclose(likelihoods[1], likelihoods[0], atol=1e-4, rtol=1e-4)
