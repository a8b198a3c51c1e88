"""`lit-layers fit`: a watched run from a recipe, its end, and what is said of wrong input."""

import json
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
RECIPE = {
    "corpus": "CORPUS",
    "tokenizer": "bpe:300",
    "steps": {"every": 2},
    "trainer": {"max_steps": 3, "accelerator": "cpu", "devices": 1, "log_every_n_steps": 1, "val_check_interval": 2},
    "model": {
        "class_path": "lit_layers.training.LitCausalLM",
        "init_args": {
            "config": {"n_layer": 3, "n_embd": 16, "n_head": 2, "n_positions": 16},
            "lr": 0.01,
            "warmup_steps": 1,
        },
    },
    "data": {
        "class_path": "lit_layers.training.LitTextData",
        "init_args": {
            "corpus": "${corpus}",
            "tokenizer": "${tokenizer}",
            "num_tokens": 16,
            "global_batch_size": 4,
            "num_validation_sequences": 4,
        },
    },
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
def test_a_recipe_becomes_a_series_with_measurements_and_a_report(recipe, tmp_path, capsys):
    assert main(["fit", "--config", str(recipe)]) == 0
    root = tmp_path / "run"
    assert saved_steps(root) == [0, 2, 3]
    found = [(m.step, m.analysis, m.error) for m in records.read(root / "measurements.jsonl")]
    assert found == [(step, name, None) for step in (0, 2, 3) for name in ("trajectory", "coupling")]
    assert [row["step"] for row in records.rows(root / "metrics.jsonl")] == [1, 2, 3]
    assert records.rows(root / "metrics.jsonl")[1]["validation/perplexity"] > 1
    facts = json.loads((root / "run.json").read_text())
    assert facts["last_step"] == 3
    assert facts["tokens_per_step"] == 64
    assert 0 < facts["data"]["unigram_entropy"] < 6
    shown = capsys.readouterr().out
    assert str(root / "report.html") in shown.replace("\n", "")
    assert (root / "report.html").stat().st_size > 100_000


@pytest.mark.soak
@pytest.mark.slow
@pytest.mark.usefixtures("no_page")
def test_a_run_may_begin_with_a_checkpoint_of_another_and_says_so(recipe, tmp_path, capsys):
    assert main(["fit", "--config", str(recipe)]) == 0
    start, later = tmp_path / "run" / "step-000000002", tmp_path / "later"
    begin = ["fit", "--config", str(recipe), "--root", str(later), "--model.init_from", str(start)]
    assert main([*begin, "--trainer.max_steps", "1", "--model.decay_steps", "2"]) == 0
    said = f"begins at step 2 with the weights of {start}; the optimizer starts afresh"
    shown = capsys.readouterr().out.replace("\n", "")
    assert said in shown
    assert main([*begin, "--trainer.max_steps", "2", "--model.decay_steps", "2", "--resume", "last"]) == 0
    assert "resumed at step 3 from" in capsys.readouterr().out
    assert saved_steps(later) == [2, 3, 4]
    assert [(row["step"], row["tokens"]) for row in records.rows(later / "metrics.jsonl")] == [(3, 192), (4, 256)]
    # killed after its last step: only the page may be missing
    assert main([*begin, "--trainer.max_steps", "2", "--model.decay_steps", "2", "--resume", "last"]) == 0
    assert saved_steps(later) == [2, 3, 4]
    assert f"trained up to step 4 already: the run in {later} is kept" in capsys.readouterr().out
    # a model of another size does not take these weights
    assert main([*begin, "--if_exists", "overwrite", "--model.config.n_layer", "2"]) == 2
    assert "model.config.n_layer: " in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.usefixtures("no_page")
def test_a_used_folder_is_refused_and_left_as_it_is_unless_overwriting_is_asked_for(recipe, tmp_path, capsys):
    assert main(["fit", "--config", str(recipe)]) == 0
    before = (tmp_path / "run" / "measurements.jsonl").read_bytes()
    assert main(["fit", "--config", str(recipe)]) == 2
    assert "already holds a run with checkpoints up to step 3" in capsys.readouterr().err
    recipe.write_text(recipe.read_text() + "\nif_exists: overwrite\n")  # which is not the user's word
    assert main(["fit", "--config", str(recipe)]) == 2
    assert "--resume last or --if_exists overwrite" in capsys.readouterr().err
    # Asked to overwrite, but with an option that does not fit: what was there stays.
    wrong = ["--if_exists", "overwrite", "--data.num_tokens", "400"]
    assert main(["fit", "--config", str(recipe), *wrong]) == 2
    assert (tmp_path / "run" / "measurements.jsonl").read_bytes() == before
    assert main(["fit", "--config", str(recipe), "--if_exists", "overwrite", "--trainer.max_steps", "1"]) == 0
    assert saved_steps(tmp_path / "run") == [0, 1]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--trainer.max_stepz", "3"], "unknown option --trainer.max_stepz; did you mean --trainer.max_steps?"),
        (["--steps", "[0,-5]"], "steps: expected at least 0, got [0, -5]"),
        (["--steps", "{every: 0}"], "steps.every: expected at least 1, got 0"),
        (["--steps", "pythai"], "got 'pythai'"),
        (["--if_exists", "ask"], "ask"),
        (["--trainer.max_steps", "-1"], "trainer.max_steps: expected at least 1, got -1"),
        (["--trainer.max_steps", "many"], "trainer.max_steps: Expected a int. Got value: many"),
        (["--model.lr", "-1"], "model.lr: expected more than 0, got -1"),
        (["--model.warmup_steps", "-2"], "model.warmup_steps: expected at least 0, got -2"),
        (["--model.config.n_layers", "4"], "n_layers"),
        (["--model.architecture", "gpt22"], "gpt22"),
        (["--data.global_batch_size", "0"], "data.global_batch_size: expected at least 1, got 0"),
        (["--data.num_tokens", "17"], "data.num_tokens: expected at most 16, the context of model.config, got 17"),
        (["--data.global_batch_size", "5", "--trainer.accumulate_grad_batches", "2"], "take a multiple of 2"),
        (["--tokenizer", "/nowhere/tokenizer"], "/nowhere/tokenizer"),
        (["--corpus", "/nowhere/text"], "/nowhere/text"),
        (["--config", "/nowhere/recipe.yaml"], "/nowhere/recipe.yaml"),
        (["--analyses+=lit_layers.analyses.Nothing"], "Nothing"),
        (["--analyses.k", "[99]"], "99"),
        (["--analyses.name", "trajectory"], "two are named 'trajectory'"),
        (["--root", "/proc/nowhere"], "cannot write to /proc/nowhere"),
        (["--trainer.devices", "0"], "trainer"),
        (["--model.init_from", "/nowhere/model"], "NAME@REVISION of the Hub, /nowhere/model is neither"),
        (["--wandb.mode", "sometimes"], "sometimes"),
    ],
)
def test_wrong_input_is_answered_with_one_sentence_and_nothing_is_written(
    arguments, sentence, recipe, tmp_path, capsys
):
    assert main(["fit", "--config", str(recipe), *arguments]) == 2
    said = capsys.readouterr().err.strip().splitlines()
    errors = [line for line in said if line.startswith("lit-layers fit: error: ")]
    assert len(errors) == 1, said
    assert sentence in errors[0]
    assert "Traceback" not in "".join(said)
    assert not list((tmp_path / "run").glob("*.jsonl")) if (tmp_path / "run").exists() else True


def test_a_key_that_no_recipe_has_is_named(recipe, capsys):
    content = yaml.safe_load(recipe.read_text())
    recipe.write_text(yaml.safe_dump({**content, "trainer": {**content["trainer"], "max_step": 3}}))
    assert main(["fit", "--config", str(recipe)]) == 2
    assert "unknown key trainer.max_step in the recipe; did you mean trainer.max_steps?" in capsys.readouterr().err


def test_a_reference_to_nothing_is_named(recipe, capsys):
    content = yaml.safe_load(recipe.read_text())
    recipe.write_text(yaml.safe_dump({**content, "corpus": "${nothing}"}))
    assert main(["fit", "--config", str(recipe)]) == 2
    assert "nothing" in capsys.readouterr().err


@pytest.mark.slow
def test_ctrl_c_leaves_a_series_and_a_report_that_can_be_opened(recipe, tmp_path):
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
