"""`lit-layers analyze` on one model, on a trained run, and on several models."""

import json
import shutil
from pathlib import Path

import pytest
import torch
import yaml

from lit_layers import records
from lit_layers.analyses import Trajectory
from lit_layers.cli.main import main
from lit_layers.data import EvalText
from lit_layers.data.tokenization import save_tokenizer, train_bpe
from lit_layers.models.build import causal_lm, save, vit, weights_hash
from lit_layers.series import OneModel
from tests.cli.conftest import PACKAGE
from tests.cli.test_fit import RECIPE as TRAINING
from tests.cli.test_fit import TEXT
from tests.support.measured_series import analyze as analyze_one
from tests.support.rounding import assert_same_numbers, check_records
from tests.support.saved_models import saved
from tests.support.series_hub import served

ROOT = Path(__file__).parents[2]


def analyze(*arguments) -> int:
    return main(["analyze", *map(str, arguments), "--device", "cpu"])


def measured(root: Path) -> list[records.Measurement]:
    return records.read(root / "measurements.jsonl")


# One model


@pytest.fixture(scope="module")
def model(tmp_path_factory, corpus) -> Path:
    """A model with its tokenizer, saved as training saves it."""
    folder = tmp_path_factory.mktemp("run") / "step-000000002"
    network = causal_lm("gpt2", n_layer=4, n_embd=32, n_head=2, n_positions=128, vocab_size=300)
    save(network, folder, corpus / "tokenizer")
    return folder


def test_without_a_recipe_three_analyses_run_on_the_models_own_tokenizer_offloaded(
    model, corpus, tmp_path, capsys, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    assert analyze(model, "--offload", "scratch", "--corpus", corpus) == 0
    root = tmp_path / "checkpoints" / f"{model.parent.name}-step-000000002"
    assert f"draw them with `lit-layers report checkpoints/{root.name}`" in capsys.readouterr().out
    assert [*Path("scratch").iterdir()] == []
    found = measured(root)
    assert [(m.analysis, m.step) for m in found] == [(name, 2) for name in ("trajectory", "representation", "coupling")]
    assert {(m.provenance["offloaded"], m.provenance["audit"]) for m in found} == {(True, "unaudited")}


def test_an_analysis_that_fails_is_reported_and_the_exit_code_is_1(model, corpus, tmp_path, capsys):
    failing = {"class_path": "lit_layers.analyses.Trajectory", "init_args": {"drop_first": 500, "batches": TEXT}}
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump({"analyses": [failing]}))
    words = ["--corpus", corpus, "--config", tmp_path / "recipe.yaml"]
    assert analyze(model, *words, "--root", tmp_path / "run") == 1
    output = capsys.readouterr().err
    assert "failed: trajectory: ValueError: trajectory is undefined for every prompt at every layer" in output


def test_new_weights_of_a_model_need_no_weight_file(tmp_path):
    size = {"img_size": 16, "patch_size": 4, "embed_dim": 32, "depth": 2, "num_heads": 4, "num_classes": 7}
    save(vit("vit_tiny_patch16_224", **size), tmp_path / "vit")
    expected = weights_hash(vit("vit_tiny_patch16_224", seed=5, **size))
    (tmp_path / "vit" / "model.safetensors").unlink()
    (checkpoint,) = OneModel(tmp_path / "vit", untrained=5)
    assert weights_hash(checkpoint.load()) == expected
    state = torch.get_rng_state()
    assert weights_hash(checkpoint.load(dtype=torch.float64)) != expected  # equal numbers have other bytes in float64
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.soak
@pytest.mark.slow
def test_a_model_of_the_hub_is_downloaded_and_offloaded(model, training_analyses, corpus, tmp_path, capfd, monkeypatch):
    repository = tmp_path / "hub" / "org" / "tiny"
    for revision, seed in (("step2", 0), ("main", 1)):
        saved(repository / revision, "gpt_neox", seed=seed, vocab_size=300)
        shutil.copytree(corpus / "tokenizer", repository / revision, dirs_exist_ok=True)

    def command(*arguments, root: str) -> tuple[int, str]:
        words = ["--offload", tmp_path / "scratch", "--config", training_analyses, "--corpus", corpus]
        return analyze(*arguments, *words, "--root", tmp_path / root), capfd.readouterr().err

    with served(tmp_path / "hub", tmp_path / "home" / "hub", monkeypatch) as hub:
        done = command("org/tiny", "--revision", "step2", root="run")
        assert done[0] == 0, done
        index = json.loads((repository / "step2" / "model.safetensors.index.json").read_text())
        fetched = [r for r in hub.requests if r["method"] == "GET" and "safetensors" in r["path"] and r["bytes"] > 0]
        assert len([r for r in fetched if "index" not in r["path"]]) == len(set(index["weight_map"].values()))
        missing = command("org/tiny", "--revision", "step9", root="none")
    # From here on the Hub is not reachable.
    again = command("org/tiny", "--revision", "step2", root="again")
    assert again[0] == 0, again
    assert (
        analyze(repository / "step2", "--config", training_analyses, "--corpus", corpus, "--root", tmp_path / "local")
        == 0
    )
    one, other = (measured(tmp_path / name) for name in ("run", "local"))
    assert_same_numbers(one, other)
    assert (one[0].provenance["checkpoint"], one[0].provenance["revision"], one[0].step) == ("org/tiny", "step2", 2)
    assert len(one[0].provenance["commit"]) == 40
    assert missing[0] == 2
    assert "org/tiny at revision step9 is no local folder, and config.json cannot be had from the Hub" in missing[1]


# A trained run


@pytest.fixture(scope="module")
def training_analyses(tmp_path_factory) -> Path:
    """A recipe with the analyses of the training."""
    path = tmp_path_factory.mktemp("same") / "analyses.yaml"
    path.write_text(yaml.safe_dump({"analyses": TRAINING["analyses"]}))
    return path


@pytest.mark.slow
def test_a_run_is_measured_with_its_training_analyses_and_others_stay_out_of_its_curves(trained, tmp_path, capsys):
    trained, _ = trained
    root = Path(shutil.copytree(trained, tmp_path / "run"))
    file = root / "measurements.jsonl"
    before = file.read_bytes()
    assert analyze(root) == 0
    assert "0 measured, 6 were known, not measured again" in capsys.readouterr().out
    assert file.read_bytes() == before
    file.write_bytes(b"".join(before.splitlines(keepends=True)[2:]))  # step 0 is missing
    assert analyze(root, "--steps", "0,2") == 0
    assert "2 measured, 2 were known" in capsys.readouterr().out
    table = records.frame(file)
    expected = records.frame(trained / "measurements.jsonl")
    order = ["step", "analysis", "metric", "layer", "other_layer", "k"]
    values, in_training = (each.sort_values(order)["value"].tolist() for each in (table, expected))
    assert values == pytest.approx(in_training, rel=1e-4, abs=1e-6)  # weights from a mapped file and in memory
    one = {**TRAINING["analyses"][1], "init_args": {**TRAINING["analyses"][1]["init_args"], "k": [3]}}
    (tmp_path / "other.yaml").write_text(yaml.safe_dump({"analyses": [one]}))
    assert analyze(root, "--config", tmp_path / "other.yaml", "--steps", "0") == 0
    assert records.frame(file).equals(table)
    assert set(records.frame(file, settings="last")["k"].dropna()) == {3}


def test_a_plan_measures_the_first_checkpoint_and_prints_how_long_all_checkpoints_take(trained, tmp_path, capsys):
    words = [trained[0], "--metrics", "line_shape_score,lens", "--root", tmp_path / "run"]
    assert analyze(*words, "--plan") == 0
    *_, first, second, whole = capsys.readouterr().out.splitlines()
    assert [first.split()[0], second.split()[0]] == ["trajectory", "lens"]
    assert whole.startswith("in all, 3 checkpoints ")
    found = measured(tmp_path / "run")
    assert [(m.step, m.analysis) for m in found] == [(0, "trajectory"), (0, "lens")]
    assert analyze(*words) == 0
    assert measured(tmp_path / "run")[:2] == found


# Several models


@pytest.fixture
def two_models(tmp_path) -> list[Path]:
    """Two models whose tokenizers differ, so that the same text has other token ids in each."""
    text = [path.read_text() for path in sorted(PACKAGE.glob("*.py"))]
    folders = [tmp_path / "bpe280", tmp_path / "bpe300"]
    for size, folder in zip((280, 300), folders, strict=True):
        saved(folder, "gpt2", vocab_size=300, seed=size)
        save_tokenizer(train_bpe(text, size), folder)
    return folders


@pytest.mark.soak
def test_each_of_several_models_is_measured_on_text_in_its_own_tokens(two_models, tmp_path, capsys):
    path, text = tmp_path / "recipe.yaml", tmp_path / "text.txt"
    everything = "".join(path.read_text() for path in sorted(PACKAGE.rglob("*.py")))
    documents = [everything[start : start + 300] for start in range(0, 300_000, 300)]  # enough to hold some out
    text.write_text("\n<|endoftext|>\n".join(documents))
    batches = {"class_path": "lit_layers.data.EvalText", "init_args": {**TEXT["init_args"]}}
    trajectory = {"class_path": "lit_layers.analyses.Trajectory", "init_args": {"batches": batches}}
    path.write_text(yaml.safe_dump({"corpus": str(text), "analyses": [trajectory]}))
    models = ["--series", "Models", "--series.models", f"[{', '.join(map(str, two_models))}]"]
    words = ["analyze", *models, "--config", str(path), "--root", str(tmp_path / "out"), "--device", "cpu"]
    assert main(words) == 0
    found = records.read(tmp_path / "out" / "measurements.jsonl")
    assert [m.run for m in found] == [str(model) for model in two_models]
    for model, measurement in zip(two_models, found, strict=True):
        own = EvalText(str(text), str(model), num_sequences=4, num_tokens=16)
        (single,) = analyze_one(model, [Trajectory(batches=own)], root=tmp_path / "alone" / model.name)
        check_records(measurement.records, single.records)
        assert measurement.provenance["data_hash"] == single.provenance["data_hash"]
    assert found[0].provenance["data_hash"] != found[1].provenance["data_hash"]
    assert main(words) == 0
    assert "0 measured, 2 were known" in capsys.readouterr().out
    assert main([*words, "--tokenizer", str(two_models[0])]) == 2
    assert "tokenizer: each of these models reads with its own: leave it out" in capsys.readouterr().err
