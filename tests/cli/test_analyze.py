"""`lit-layers analyze`: from a folder or the Hub to measurements, and what is said of wrong input."""

import json
import shutil
from pathlib import Path

import pytest

import lit_layers
from lit_layers import records
from lit_layers.cli.main import main
from lit_layers.models.build import causal_lm, quiet, save
from tests.support.rounding import assert_same_numbers
from tests.support.saved_models import saved, saved_vit
from tests.support.series_hub import served
from tests.support.tiny_configs import tiny_model

ROOT = Path(__file__).parents[2]
RECIPE = """
analyses:
  - class_path: lit_layers.analyses.Trajectory
    init_args:
      batches: &text
        class_path: lit_layers.data.EvalText
        init_args: {corpus: "${corpus}", tokenizer: "${tokenizer}", num_sequences: 8, num_tokens: 32}
  - class_path: lit_layers.analyses.Representation
    init_args: {batches: *text}
  - class_path: lit_layers.analyses.Coupling
    init_args:
      batches:
        class_path: lit_layers.data.EvalText
        init_args: {corpus: "${corpus}", tokenizer: "${tokenizer}", num_sequences: 2, num_tokens: 16}
      k: [4]
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory, corpus) -> Path:
    """A model with its tokenizer, as training leaves it."""
    folder = tmp_path_factory.mktemp("run") / "step-000000002"
    network = causal_lm("gpt2", n_layer=4, n_embd=32, n_head=2, n_positions=128, vocab_size=300)
    save(network, folder, corpus / "tokenizer")
    return folder


@pytest.fixture(scope="module")
def recipe(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("recipe") / "recipe.yaml"
    path.write_text(RECIPE)
    return path


@pytest.fixture(scope="module")
def without_row(tmp_path_factory, corpus) -> Path:
    """A model that is taken apart by structure, as others save theirs."""
    folder = tmp_path_factory.mktemp("hub") / "opt"
    network = tiny_model("OPTForCausalLM", "opt", vocab_size=300, max_position_embeddings=128)
    with quiet():
        network.save_pretrained(folder, max_shard_size="20KB")
    for file in (corpus / "tokenizer").iterdir():
        shutil.copy(file, folder)
    return folder


def analyze(*arguments) -> int:
    return main(["analyze", *map(str, arguments), "--device", "cpu"])


def test_names_of_analyses_and_metrics_choose_what_is_measured(model, corpus, tmp_path, capsys):
    root = tmp_path / "named"
    assert analyze(model, "--corpus", corpus, "--metrics", "line_shape_score,lens", "--root", root) == 0
    assert [m.analysis for m in records.read(root / "measurements.jsonl")] == ["trajectory", "lens"]
    assert analyze(model, "--metrics", "lenss", "--root", root) == 2
    assert "metrics: unknown name 'lenss'; did you mean lens" in capsys.readouterr().err


def test_a_model_is_measured_offloaded_or_whole_with_the_same_numbers(
    model, recipe, corpus, tmp_path, capsys, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    assert analyze(model, "--offload", "scratch", "--corpus", corpus, "--config", recipe) == 0
    said = capsys.readouterr()
    offloaded = tmp_path / "checkpoints" / f"{model.parent.name}-step-000000002"
    assert f"draw them with `lit-layers report checkpoints/{offloaded.name}`" in said.out
    assert [*Path("scratch").iterdir()] == []
    assert analyze(model, "--corpus", corpus, "--config", recipe, "--root", tmp_path / "whole") == 0
    one, other = (records.read(root / "measurements.jsonl") for root in (offloaded, tmp_path / "whole"))
    assert [m.analysis for m in one] == ["trajectory", "representation", "coupling"]
    assert_same_numbers(one, other)
    assert {m.step for m in one} == {2}
    assert all(m.provenance["offloaded"] for m in one)


@pytest.mark.soak
def test_a_folder_of_a_model_without_a_row_is_measured_offloaded_or_whole_with_the_same_numbers(
    without_row, recipe, corpus, tmp_path
):
    found = []
    for root, options in (("offloaded", ["--offload", tmp_path / "scratch"]), ("whole", [])):
        assert analyze(without_row, *options, "--corpus", corpus, "--config", recipe, "--root", tmp_path / root) == 0
        found.append(records.read(tmp_path / root / "measurements.jsonl"))
    assert_same_numbers(*found)
    offloaded, whole = (measurements[0].provenance for measurements in found)
    assert offloaded["origin"] == whole["origin"] == "structure"
    assert offloaded["proof"] == pytest.approx(whole["proof"], abs=1e-5)  # two proofs: rounding errors are in it
    numbers = lit_layers.layers(without_row, ["prompt_entropy"], texts=["one two three four"] * 3)
    assert numbers.frame["value"].notna().all()


def test_without_a_recipe_three_analyses_run_on_the_models_own_tokenizer(model, corpus, tmp_path):
    assert analyze(model, "--corpus", corpus, "--root", tmp_path / "run") == 0
    found = records.read(tmp_path / "run" / "measurements.jsonl")
    assert [m.analysis for m in found] == ["trajectory", "representation", "coupling"]
    assert {m.provenance["audit"] for m in found} == {"unaudited"}, "one model alone is compared with nothing"


def test_texts_longer_than_the_model_reads_are_refused(model, tmp_path, capsys):
    """As the windows of 256 tokens of the recipe of text, for the model of the quickstart."""
    recipe = tmp_path / "recipe.yaml"
    text = (ROOT / "recipes" / "analyses" / "text.yaml").read_text()
    recipe.write_text(text.replace("corpus: wikitext", "corpus: python"))
    assert analyze(model, "--config", recipe, "--root", tmp_path / "root") == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert "takes at most 128 tokens, got 256" in said
    assert not (tmp_path / "root" / "measurements.jsonl").exists()


def test_an_analysis_that_fails_is_told_and_ends_in_one(model, corpus, tmp_path, capsys):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        """
analyses:
  - class_path: lit_layers.analyses.Trajectory
    init_args:
      drop_first: 500
      batches:
        class_path: lit_layers.data.EvalText
        init_args: {corpus: "${corpus}", tokenizer: "${tokenizer}", num_sequences: 2, num_tokens: 16}
"""
    )
    assert analyze(model, "--corpus", corpus, "--config", recipe, "--root", tmp_path / "run") == 1
    assert (
        "failed: trajectory: ValueError: trajectory is undefined for every prompt at every layer"
        in capsys.readouterr().err
    )


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["nowhere/at/all"], "expected a folder with a model or a name on the Hub, nowhere/at/all does not exist"),
        (["MODEL", "--ofload", "x"], "unknown option --ofload; did you mean --offload?"),
        (["MODEL", "--revision", "step1"], "is a local folder and has no revision 'step1': leave it out"),
        (["MODEL", "--dtype", "bfloat16"], "float32"),
        (["MODEL", "--tokenizer", "no/such/thing"], "no tokenizer 'no/such/thing'"),
        (["MODEL", "--metrics", "lens", "--offload", "x", "--dtype", "bfloat16"], "offload: --dtype bfloat16 needs"),
        (["MODEL", "--analyses+=Coupling"], "batches"),
        ([], "model: expected a model"),
    ],
)
def test_wrong_input_is_one_sentence_and_ends_in_two(model, recipe, corpus, tmp_path, capsys, arguments, sentence):
    arguments = [str(model) if word == "MODEL" else word for word in arguments]
    assert analyze(*arguments, "--corpus", corpus, "--root", tmp_path / "run") == 2
    said = capsys.readouterr().err.strip().splitlines()
    assert said[-1].startswith("lit-layers analyze: error: ")
    assert sentence in said[-1]
    assert not (tmp_path / "run").exists()


def test_a_model_without_a_tokenizer_asks_for_one(recipe, tmp_path, corpus, capsys):
    saved(tmp_path / "model", "gpt2")
    assert analyze(tmp_path / "model", "--corpus", corpus, "--config", recipe) == 2
    assert f"tokenizer: {tmp_path / 'model'} carries none; name one with --tokenizer" in capsys.readouterr().err


def test_a_model_of_images_asks_for_analyses_and_for_no_tokenizer(tmp_path, capsys):
    saved_vit(folder := tmp_path / "run" / "step-000000007")
    for named, name in ((tmp_path / "run", "run"), (folder, str(folder))):
        for words in ([], ["--metrics", "lens"]):
            assert analyze(named, *words) == 2
            assert f"analyses: {name} is a model of images: name what to measure" in capsys.readouterr().err


@pytest.mark.soak
@pytest.mark.slow
def test_a_model_of_the_hub_is_fetched_and_offloaded(model, recipe, corpus, tmp_path, capfd, monkeypatch):
    repository = tmp_path / "hub" / "org" / "tiny"
    for revision, seed in (("step2", 0), ("main", 1)):
        saved(repository / revision, "gpt_neox", seed=seed, vocab_size=300)
        for file in (corpus / "tokenizer").iterdir():
            shutil.copy(file, repository / revision)

    def command(*arguments, root: str) -> tuple[int, str]:
        words = [
            *arguments,
            "--offload",
            tmp_path / "scratch",
            "--config",
            recipe,
            "--corpus",
            corpus,
            "--root",
            tmp_path / root,
        ]
        return analyze(*words), capfd.readouterr().err

    with served(tmp_path / "hub", tmp_path / "home" / "hub", monkeypatch) as hub:
        done = command("org/tiny", "--revision", "step2", root="run")
        assert done[0] == 0, done
        index = json.loads((repository / "step2" / "model.safetensors.index.json").read_text())
        fetched = [r for r in hub.requests if r["method"] == "GET" and "safetensors" in r["path"] and r["bytes"] > 0]
        assert len([r for r in fetched if "index" not in r["path"]]) == len(set(index["weight_map"].values()))
        missing = command("org/tiny", "--revision", "step9", root="none")
        nobody = command("org/nobody", root="none")
    # the Hub is gone
    again = command("org/tiny", "--revision", "step2", root="again")
    assert again[0] == 0, again
    assert analyze(repository / "step2", "--config", recipe, "--corpus", corpus, "--root", tmp_path / "local") == 0
    one, other = (records.read(tmp_path / name / "measurements.jsonl") for name in ("run", "local"))
    assert_same_numbers(one, other)
    assert one[0].provenance["checkpoint"] == "org/tiny"
    assert one[0].provenance["revision"] == "step2"
    assert len(one[0].provenance["commit"]) == 40
    assert one[0].step == 2
    for refused, sentence in (
        (missing, "org/tiny at revision step9 is no local folder, and config.json cannot be had from the Hub"),
        (nobody, "org/nobody is no local folder, and config.json cannot be had from the Hub"),
    ):
        assert refused[0] == 2, refused
        assert sentence in refused[1].strip().splitlines()[-1]
