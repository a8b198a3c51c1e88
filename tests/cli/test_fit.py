"""`lit-layers fit`: a measured run from a recipe, how it ends, and errors for wrong input."""

import json
import shutil
from pathlib import Path

import pytest
import yaml

from lit_layers import records
from lit_layers.cli.main import main
from lit_layers.training.run_folder import saved_steps
from tests.support.forked import run_command

ROOT = Path(__file__).parents[2]
TEXT = {
    "class_path": "lit_layers.data.EvalText",
    "init_args": {"corpus": "${corpus}", "tokenizer": "${tokenizer}", "num_sequences": 4, "num_tokens": 16},
}
MODEL = {"config": {"n_layer": 3, "n_embd": 16, "n_head": 2, "n_positions": 16}, "lr": 0.01, "warmup_steps": 1}
DATA = {"corpus": "${corpus}", "tokenizer": "${tokenizer}", "num_tokens": 16, "global_batch_size": 4}
RECIPE = {
    "corpus": "CORPUS",
    "tokenizer": "bpe:300",
    "steps": {"every": 2},
    "expected": {"validation/loss": {2: 5.5, 1: 6.0, 99: 1.0}},
    "trainer": {"max_steps": 3, "accelerator": "cpu", "devices": 1, "log_every_n_steps": 1, "val_check_interval": 2},
    "model": {"class_path": "lit_layers.training.LitCausalLM", "init_args": MODEL},
    "data": {"class_path": "lit_layers.training.LitTextData", "init_args": {**DATA, "num_validation_sequences": 4}},
    "analyses": [
        {"class_path": "lit_layers.analyses.Trajectory", "init_args": {"batches": TEXT}},
        {"class_path": "lit_layers.analyses.Coupling", "init_args": {"batches": TEXT, "k": [2]}},
    ],
}


@pytest.fixture
def recipe(tmp_path, corpus) -> Path:
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump({**RECIPE, "corpus": str(corpus), "root": str(tmp_path / "run")}))
    return path


@pytest.mark.slow
def test_a_recipe_becomes_a_series_with_measurements_and_a_report(trained):
    root, shown = trained
    assert saved_steps(root) == [0, 2, 3]
    found = [(m.step, m.analysis, m.error) for m in records.read(root / "measurements.jsonl")]
    assert found == [(step, name, None) for step in (0, 2, 3) for name in ("trajectory", "coupling")]
    assert [row["step"] for row in records.rows(root / "metrics.jsonl")] == [1, 2, 3]
    assert records.rows(root / "metrics.jsonl")[1]["validation/perplexity"] > 1
    facts = json.loads((root / "run.json").read_text())
    assert facts["last_step"] == 3
    assert facts["tokens_per_step"] == 64
    assert 0 < facts["data"]["unigram_entropy"] < 6
    assert str(root / "report.html") in shown
    assert (root / "report.html").stat().st_size > 100_000
    loss = records.rows(root / "metrics.jsonl")[1]["validation/loss"]
    distance = f"validation/loss at step 2: {loss:.4g} ({loss - 5.5:+.2g}), expected 5.5"
    assert f"validation/loss at step 1: not logged, expected 6{distance}" in shown
    assert "step 99" not in shown


@pytest.mark.slow
@pytest.mark.usefixtures("no_page")
def test_a_used_folder_is_overwritten_only_with_an_option_of_the_command_line(trained, recipe, tmp_path):
    shutil.copytree(trained[0], tmp_path / "run")
    assert main(["fit", "--config", str(recipe), "--if_exists", "overwrite", "--trainer.max_steps", "1"]) == 0
    assert saved_steps(tmp_path / "run") == [0, 1]
    assert {m.step for m in records.read(tmp_path / "run" / "measurements.jsonl")} == {0, 1}


def test_a_callback_that_monitors_an_unknown_metric_is_refused_in_one_sentence(recipe, tmp_path, capsys):
    stopping = {"class_path": "lightning.pytorch.callbacks.EarlyStopping", "init_args": {"monitor": "nothing"}}
    (tmp_path / "more.yaml").write_text(yaml.safe_dump({"trainer": {"callbacks": [stopping]}, "analyses": []}))
    assert main(["fit", "--config", str(recipe), "--config", str(tmp_path / "more.yaml")]) == 2
    output = capsys.readouterr().err
    assert "fit: error: trainer: Early stopping conditioned on metric `nothing` which is not available" in output
    assert (tmp_path / "run" / "report.html").exists(), "what was trained is there"


@pytest.mark.soak
@pytest.mark.slow
def test_ctrl_c_leaves_a_readable_series_and_report(recipe, tmp_path):
    root = tmp_path / "run"
    command = ["fit", "--config", recipe, "--trainer.max_steps", "100000"]
    ended = run_command(command, when=lambda: root.exists() and len(saved_steps(root)) >= 5)
    assert ended.returncode == 130, ended.stderr
    assert "Traceback" not in ended.stderr
    assert "report.html" in ended.stdout.replace("\n", "")
    assert saved_steps(root)[:5] == [0, 2, 4, 6, 8]
    measured = {m.step for m in records.read(root / "measurements.jsonl")}
    assert {0, 2, 4, 6} <= measured
    assert "<html" in (root / "report.html").read_text()[:2000]
    assert len(records.rows(root / "metrics.jsonl")) >= 8
