"""Sentence encoders: reading their files, and vectors and scores compared with sentence-transformers."""

import functools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lit_layers.cli.main import main
from lit_layers.errors import InputError
from lit_layers.records import read
from lit_layers.series import OneModel
from lit_layers.series.checkpoint_sources import FolderSource
from lit_layers.tasks.embeddings import LayerEncoder, SentenceEncoder, TaskEmbeddings, sentence_encoder
from lit_layers.tasks.mteb_tasks import open_task
from tests.support.labelled_texts import labelled, saved_bert, saved_gpt2
from tests.support.measured import records_of
from tests.support.series_hub import served
from tests.tasks.tiny_tasks import embedding_of, saved_model, task, write_tiny_data

TEXTS = [text for text, _ in labelled(12)] + ["a merry song"]
PROMPTS = {"query": "Who sang ", "document": "they heard ", "Banking77Classification": "a song "}
CLS = {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}
ST = "sentence_transformers.models."


def write_encoder(folder: Path, *, pooling: Any = CLS, normalize: bool = True, **files: Any) -> Path:
    """Write the files of sentence-transformers next to a model. Other files are named without .json."""
    kinds = ["Transformer", "Pooling", "Normalize"][: 3 if normalize else 2]
    folders = ["", "1_Pooling", "2_Normalize"]
    modules = [
        {"idx": n, "name": str(n), "path": path, "type": ST + kind}
        for n, (kind, path) in enumerate(zip(kinds, folders, strict=False))
    ]
    (folder / "1_Pooling").mkdir(parents=True, exist_ok=True)
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": 32, **pooling}))
    (folder / "2_Normalize").mkdir(exist_ok=True)
    for name, content in {"modules": modules, **files}.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


def read_encoder(folder: Path) -> SentenceEncoder | None:
    return sentence_encoder(FolderSource(folder).read)


@pytest.fixture(scope="module")
def bert(tmp_path_factory) -> Path:
    """An encoder with [CLS] pooling, unit length, prompts and at most 8 tokens."""
    folder = tmp_path_factory.mktemp("bert")
    saved_bert(folder)
    about = {"prompts": PROMPTS, "default_prompt_name": None}
    return write_encoder(folder, config_sentence_transformers=about, sentence_bert_config={"max_seq_length": 8})


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory) -> Path:
    """An encoder with last-token pooling and without normalisation."""
    folder = tmp_path_factory.mktemp("gpt2")
    saved_gpt2(folder)
    return write_encoder(folder, pooling={"pooling_mode": "lasttoken"}, normalize=False)


def test_the_files_of_a_model_define_how_it_encodes(tmp_path):
    assert read_encoder(tmp_path) is None, "a model without modules says nothing"
    lower = {"max_seq_length": 9, "do_lower_case": True}
    dot = {"prompts": {"query": "q: ", "document": ""}, "similarity_fn_name": "dot"}
    cls = SentenceEncoder("cls", normalizes=True)
    cases: list[tuple[dict[str, Any], SentenceEncoder]] = [
        ({"pooling": {"pooling_mode_mean_tokens": True}}, SentenceEncoder("mean", normalizes=True)),
        ({"pooling": {}, "normalize": False}, SentenceEncoder("mean")),
        ({"pooling": {"pooling_mode": "cls", "pooling_mode_mean_tokens": True}}, cls),
        ({"pooling": {"pooling_mode": ["lasttoken"]}}, SentenceEncoder("last", True)),
        ({"pooling": {"pooling_mode_lasttoken": True}}, SentenceEncoder("last", True)),
        ({"tokenizer_config": {"model_max_length": 11}}, replace(cls, max_tokens=11)),
        (
            {"sentence_bert_config": lower, "tokenizer_config": {"model_max_length": 11}},
            replace(cls, max_tokens=9, lowercases=True),
        ),
        ({"tokenizer_config": {"model_max_length": int(1e30)}}, cls),
        ({"config_sentence_transformers": dot}, replace(cls, similarity="dot", prompts=(("query", "q: "),))),
    ]
    for number, (files, expected) in enumerate(cases):
        assert read_encoder(write_encoder(tmp_path / str(number), **files)) == expected, files


def test_a_file_that_is_not_cached_is_treated_as_missing_without_the_hub(tmp_path, monkeypatch):
    from huggingface_hub import constants

    model = tmp_path / "hub" / "org" / "tiny" / "main"
    model.mkdir(parents=True)
    (model / "config.json").write_text("{}")
    with served(tmp_path / "hub", tmp_path / "home" / "hub", monkeypatch):
        OneModel("org/tiny").checkpoints[0].source.read("config.json")
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
        with pytest.warns(UserWarning, match=r"modules.json is not in the cache, and the Hub is not asked"):
            assert sentence_encoder(OneModel("org/tiny").checkpoints[0].source.read) is None
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        assert sentence_encoder(OneModel("org/tiny").checkpoints[0].source.read) is None
        write_encoder(model)
        assert sentence_encoder(OneModel("org/tiny").checkpoints[0].source.read) == SentenceEncoder("cls", True)


NORMALIZE = {"type": ST + "Normalize", "path": "2_Normalize"}
FIRST = [{"type": ST + "Transformer", "path": ""}, {"type": ST + "Pooling", "path": "1_Pooling"}]


def test_unsupported_modules_are_refused_in_one_sentence(tmp_path):
    cases: list[tuple[dict[str, Any], str]] = [
        ({"modules": [*FIRST, {"type": ST + "Dense", "path": "x"}]}, f"got {ST}Transformer, {ST}Pooling, {ST}Dense"),
        ({"modules": [{"type": "custom_st.Transformer", "path": ""}, FIRST[1]]}, "got custom_st.Transformer, sentence"),
        ({"modules": []}, "Pooling, and perhaps Normalize, got nothing"),
        ({"modules": [FIRST[1]]}, f"and perhaps Normalize, got {ST}Pooling: with"),
        ({"modules": [*FIRST, NORMALIZE, NORMALIZE]}, f"{ST}Normalize, sentence_transformers"),
        ({"modules": [FIRST[0], {**FIRST[1], "path": "7"}]}, "modules.json names 7/config.json, which is not there"),
        ({"modules": {"0": 1}}, "modules.json: Input should be a valid array, got {'0': 1}; download or"),
        ({"modules": [{"path": ""}]}, "modules.json: 0.type: Field required"),
        ({"pooling": {"pooling_mode_max_tokens": True}}, "one of mean, cls, lasttoken, got pooling_mode_max_tokens"),
        ({"pooling": {"pooling_mode": ["cls", "mean"]}}, "lasttoken, got cls and mean"),
        ({"pooling": {"pooling_mode": ""}}, "lasttoken, got nothing"),
        ({"pooling": {"include_prompt": False}}, "includes the prompt, got include_prompt: false"),
        ({"config_sentence_transformers": {"similarity_fn_name": "manhattan"}}, "expected cosine or dot, got manh"),
    ]
    for number, (files, sentence) in enumerate(cases):
        with pytest.raises(InputError) as refusal:
            read_encoder(write_encoder(tmp_path / str(number), **files))
        assert sentence in str(refusal.value)
        assert "with --modules none pooled states are taken as they are" in str(refusal.value)
    (tmp_path / "0" / "modules.json").write_text("[{")
    with pytest.raises(InputError, match=r"modules.json: not valid JSON \(.*\); download or save the model again"):
        read_encoder(tmp_path / "0")


@functools.cache
def reference(folder: Path) -> tuple[Any, Any]:
    from transformers import AutoModel, AutoTokenizer

    return AutoModel.from_pretrained(folder, dtype=torch.float64), AutoTokenizer.from_pretrained(folder)


def text_states(folder: Path, text: str, most: int) -> list[np.ndarray]:
    """Return states (tokens, dim) of every layer in float64 for a single text. The last is after the final norm."""
    model, tokenizer = reference(folder)
    ids = tokenizer(text, truncation=True, max_length=most, return_tensors="pt")
    with torch.no_grad():
        return [layer[0].numpy() for layer in model(**ids, output_hidden_states=True).hidden_states]


class Meta:
    """Metadata of a task that mteb gives to an encoder."""

    name, type = "STSBenchmark", "STS"


def vectors(folder: Path, root: Path, layer: int, *, meta: Any = Meta, modules: Any = "last", **asked: Any) -> Any:
    """Return the vectors of a layer that mteb receives."""
    own: Any = read_encoder(folder)
    one, view = task("STSBenchmark", None, folder, root, encoder=own, modules=modules), saved_model(folder)
    settings = embedding_of(
        folder, max_tokens=one.max_tokens, pooling=one.pooling, states=one.states, last_pooling=own.pooling
    )
    embeddings = TaskEmbeddings(view, **settings)
    encoder = LayerEncoder(embeddings, layer, own, follows=one._follows(layer, view))
    return encoder.encode([{"text": TEXTS}], task_metadata=meta, **asked)


def test_vectors_are_pooled_and_normalised_as_the_model_defines(bert, tmp_path):
    for modules, layer in (("last", 3), ("last", 1), ("all", 1)):
        states = [text_states(bert, text, 8)[layer] for text in TEXTS]
        follows = modules == "all" or layer == 3
        expected = np.stack([each[0] / np.linalg.norm(each[0]) if follows else each.mean(0) for each in states])
        np.testing.assert_allclose(vectors(bert, tmp_path, layer, modules=modules), expected, rtol=1e-4, atol=1e-5)


def test_the_last_layer_is_read_after_the_final_norm_and_others_as_block_outputs(gpt2, tmp_path):
    states = [text_states(gpt2, text, 32) for text in TEXTS]
    last = np.stack([each[3][-1] for each in states])
    np.testing.assert_allclose(vectors(gpt2, tmp_path, 3), last, rtol=1e-3, atol=1e-3)
    second = np.stack([each[2].mean(0) for each in states])
    np.testing.assert_allclose(vectors(gpt2, tmp_path, 2), second, rtol=1e-3, atol=1e-3)


def test_prompts_that_mteb_selects_come_before_the_texts(bert, tmp_path):
    from mteb.types import PromptType

    class Intents:
        name, type = "Banking77Classification", "Classification"

    cases = [(Meta, PromptType.query, "query"), (Meta, PromptType.document, "document"), (Intents, None, Intents.name)]
    for meta, kind, prompt in cases:
        given = vectors(bert, tmp_path, 3, meta=meta, prompt_type=kind)
        first = text_states(bert, PROMPTS[prompt] + TEXTS[0], 8)[3][0]
        np.testing.assert_allclose(given[0], first / np.linalg.norm(first), rtol=1e-4, atol=1e-5)
    assert read_encoder(bert).text("Song", None) == "Song"  # pyright: ignore[reportOptionalMemberAccess]
    lower = SentenceEncoder("mean", lowercases=True, prompts=(("a", "To "),), default_prompt="a")
    assert [lower.text("Song", None), lower.text("Song", "query")] == ["to song", "song"]


def mteb(model: Path, root: Path, *more: str, tasks: str = "STSBenchmark") -> int:
    command = ["mteb", model, "--tasks", tasks, "--folder", model.parent / "data", "--root", root, *more]
    return main([str(part) for part in command])


@pytest.fixture(scope="module")
def home(gpt2) -> Path:
    write_tiny_data(gpt2.parent / "data")
    return gpt2


def test_the_command_uses_the_modules_at_the_last_layer_and_reports_it(home, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "140")
    assert mteb(home, tmp_path, "--layers", "2,3") == 0
    assert "(mean, hf, modules last at the last layer), mean of 1: " in capsys.readouterr().out
    (found,) = read(tmp_path / "measurements.jsonl")
    tags = {"pooling": "mean", "states": "hf", "modules": "last at the last layer"}
    assert all(record.tags.items() >= tags.items() for record in found.records)
    stored = [json.loads(file.read_text()) for file in sorted((tmp_path / "mteb").rglob("layer-*.json"))]
    assert [each["pooling"] for each in stored] == ["mean", "last"]
    assert mteb(home, tmp_path / "named", "--pooling", "mean", "--layers", "2,3") == 0
    (plain,) = read(tmp_path / "named" / "measurements.jsonl")
    assert all(record.tags.keys().isdisjoint({"modules"}) for record in plain.records)
    assert plain.records[0].value == found.records[0].value, "layer 2 is pooled by the mean in both"
    assert plain.records[1].value != found.records[1].value
    assert plain.provenance["config_hash"] != found.provenance["config_hash"]


@pytest.mark.soak
@pytest.mark.filterwarnings("ignore:The fill_missing parameter is deprecated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:The `get_sentence_embedding_dimension` method:FutureWarning")
@pytest.mark.parametrize("name", ["bert", "gpt2"])
def test_vectors_and_scores_equal_those_of_sentence_transformers(name, tmp_path, request):
    """Compare with its model, wrapped by mteb, on tasks with and without prompts for queries."""
    from mteb.models import SentenceTransformerEncoderWrapper
    from sentence_transformers import SentenceTransformer

    folder = request.getfixturevalue(name)
    data = write_tiny_data(tmp_path / "data")
    theirs: Any = SentenceTransformer(str(folder), device="cpu")
    theirs.tokenizer.pad_token = theirs.tokenizer.pad_token or theirs.tokenizer.eos_token
    np.testing.assert_allclose(vectors(folder, tmp_path, 3), theirs.encode(TEXTS), rtol=1e-4, atol=1e-4)
    view = saved_model(folder)
    for each in ("Banking77Classification", "AskUbuntuDupQuestions", "TwitterURLCorpus"):
        one = task(each, data, folder, tmp_path, encoder=read_encoder(folder), layers=(3,))
        (record,) = records_of(one, view)
        official = open_task(one.task, seed=42)
        wrapped: Any = SentenceTransformerEncoderWrapper(theirs)
        scores = official.evaluate(wrapped, "test", encode_kwargs={"batch_size": 4, "show_progress_bar": False})
        assert record.value == pytest.approx(scores["default"]["main_score"], abs=1e-6)
