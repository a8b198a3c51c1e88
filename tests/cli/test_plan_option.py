"""`--plan` on the command line: what a command would cost is printed, and nothing is measured."""

import json
import shutil
import warnings
from pathlib import Path

import pytest
import torch
from torch import distributed

from lit_layers import records
from lit_layers.analyses import Trajectory
from lit_layers.cli.main import main
from lit_layers.errors import InputError
from lit_layers.measuring import calibration
from lit_layers.measuring import plan as planning
from lit_layers.models.build import causal_lm, save
from lit_layers.training import EmergenceCallback, callbacks
from tests.support import tiny_training
from tests.support.forked import run_ranks
from tests.support.random_text import RandomText

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def model(tmp_path_factory, corpus) -> Path:
    folder = tmp_path_factory.mktemp("run") / "step-000000002"
    network = causal_lm("gpt2", n_layer=2, n_embd=32, n_head=2, n_positions=128, vocab_size=300)
    save(network, folder, corpus / "tokenizer")
    for weights in folder.glob("*.safetensors"):
        weights.unlink()  # a plan reads none
    return folder


def analyze(model, corpus, root, *more) -> int:
    words = ["analyze", model, "--corpus", corpus, "--root", root, "--device", "cpu", "--plan", *more]
    return main([*map(str, words)])


def test_a_plan_is_printed_and_nothing_is_measured(model, corpus, tmp_path, capsys):
    assert analyze(model, corpus, tmp_path / "run") == 0
    lines = capsys.readouterr().out.splitlines()
    cells = {line.split("  ")[0]: line.split() for line in lines}
    assert cells["trajectory"][1:4] == ["64", "8,192", "128"]  # texts, tokens, block runs
    assert cells["coupling"][1:4] == ["8", "512", "16"]
    assert cells["one checkpoint"][2:5] == ["136", "16,896", "144"]  # texts that two analyses look at are passed once
    assert any(line.startswith("coupling: 16 block runs on texts of 64 tokens") for line in lines)
    assert not (tmp_path / "run").exists()


def test_a_model_that_is_saved_in_bfloat16_is_planned_in_float32_in_which_it_is_measured(
    model, corpus, tmp_path, capsys, monkeypatch
):
    half = shutil.copytree(model, tmp_path / "half")
    config = json.loads((half / "config.json").read_text(encoding="utf-8"))
    (half / "config.json").write_text(json.dumps(config | {"dtype": "bfloat16"}), encoding="utf-8")
    monkeypatch.setattr(calibration, "_TIMED", {})
    assert analyze(half, corpus, tmp_path / "run") == 0
    assert "seconds" in capsys.readouterr().out
    assert {key[-1] for key in calibration._TIMED if len(key) > 2} == {torch.float32}


def test_what_cannot_be_planned_is_one_sentence_and_ends_in_two(model, corpus, tmp_path, capsys, monkeypatch):
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "config.json").write_text("{}")
    for place, words, sentence in [
        (model, ["--dtype", "float64"], "plan: it is made for models in float32, and --dtype was given"),
        (tmp_path / "empty", ["--tokenizer", corpus / "tokenizer"], "plan: "),
        (model, ["--plan=maybe"], "plan"),
        (model, ["--kept_mb", "-4"], "kept_mb: expected at least 0, got -4"),
        (None, ["--dtype", "float64"], "plan: it is made for models in float32, and --dtype was given"),
    ]:
        whole = ["--series", "lit_layers.series.StepFolders", "--series.root", model.parent] if place is None else []
        command = ["--corpus", corpus, "--root", tmp_path / "run", "--device", "cpu", "--plan", *whole, *words]
        assert main(["analyze", *map(str, command if place is None else [place, *command])]) == 2
        last = capsys.readouterr().err.strip().splitlines()[-1]
        assert last.startswith("lit-layers analyze: error: ")
        assert sentence in last
    monkeypatch.setattr(planning, "free_memory", lambda device: 1000)
    assert analyze(model, corpus, tmp_path / "run") == 2
    assert "trajectory: takes" in capsys.readouterr().err


@pytest.fixture(scope="module")
def recipe(corpus, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("recipe") / "recipe.yaml"
    options = f"{{corpus: {corpus}, tokenizer: bpe:300, num_sequences: 8}}"
    text = f"{{class_path: lit_layers.data.EvalText, init_args: {options}}}"
    path.write_text(
        f"""
corpus: {corpus}
tokenizer: bpe:300
steps: {{every: 2}}
trainer: {{max_steps: 8, devices: 1, accelerator: cpu}}
model:
  class_path: lit_layers.training.LitCausalLM
  init_args: {{config: {{n_layer: 2, n_embd: 32, n_head: 2, n_positions: 128}}, pad_vocab_to: null}}
data:
  class_path: lit_layers.training.LitTextData
  init_args: {{corpus: "${{corpus}}", tokenizer: "${{tokenizer}}", num_tokens: 128, global_batch_size: 4}}
analyses:
  - {{class_path: lit_layers.analyses.Trajectory, init_args: {{batches: {text}}}}}
"""
    )
    return path


def fit(recipe, root, *more) -> int:
    return main(["fit", "--config", str(recipe), "--root", str(root), "--plan", *map(str, more)])


def test_a_training_is_planned_without_weights_or_a_run_folder(recipe, tmp_path, capsys):
    assert fit(recipe, tmp_path / "run") == 0
    lines = capsys.readouterr().out.splitlines()
    cells = {line.split("  ")[0]: line.split("  ") for line in lines}
    whole = [cell.strip() for cell in cells["5 checkpoints"] if cell.strip()]
    assert whole[1:4] == ["40", "5,120", "80"]  # 8 texts, 128 tokens, 2 blocks
    trained = [cell.strip() for cell in cells["training, 8 steps"] if cell.strip()]
    assert trained[1:4] == ["32", "4,096", "192"]  # a backward pass counts as two
    assert any(line.startswith("measuring takes ") and line.endswith("most is trajectory") for line in lines)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (
            ["--budget", "much"],
            "budget: expected a share of the training such as 5% or 0.05, or 100% for all of it, got 'much'",
        ),
        (["--budget", "0%"], "budget: expected a share"),
        (["--budget", "200%"], "budget: expected a share"),
        (["--budget=-1"], "budget: expected a share"),
        (["--budget", "1"], "budget: expected a share of the training such as 5% or 0.05, or 100% for all of it"),
        (["--budget", "0.0001%"], "budget: measuring the first and the last step takes"),
        (["--plan=perhaps"], "plan"),
    ],
)
def test_a_budget_that_cannot_be_kept_is_one_sentence_and_ends_in_two(
    recipe, tmp_path, capsys, monkeypatch, words, sentence
):
    if sentence.startswith("budget: expected"):
        monkeypatch.setattr(planning.Bench, "seconds", None)  # before anything is timed
    assert fit(recipe, tmp_path / "run", *words) == 2
    last = capsys.readouterr().err.strip().splitlines()[-1]
    assert last.startswith("lit-layers fit: error: ")
    assert sentence in last
    assert not (tmp_path / "run").exists()


def test_a_plan_of_mteb_or_of_other_orders_measures_nothing(model, corpus, tmp_path, capsys):
    words = [str(model), "--root", str(tmp_path / "run"), "--plan"]
    assert main(["intervene", *words, "--corpus", str(corpus), "--variants", "skip", "--num_tokens", "32"]) == 0
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("interventions"))
    assert line.split()[1:3] == ["64", "2,048"]
    rounded = [*words, "--dtype", "bfloat16", "--corpus", str(corpus), "--variants", "skip", "--num_tokens", "32"]
    assert main(["intervene", *rounded]) == 0
    assert "interventions: blocks in bfloat16: " in capsys.readouterr().out
    assert main(["mteb", *words, "--tasks", "ArxivClusteringS2S", "--cache_gb", "0.1"]) == 2
    assert "cache_gb: the embeddings of ArxivClusteringS2S take 0.241 GB" in capsys.readouterr().err
    assert main(["mteb", *words, "--tasks", "STSBenchmark"]) == 0
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("mteb/STSBenchmark"))
    assert line.split()[1] == "2,593"  # 1,256 and 1,337 texts
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("verb", "task", "reads"),
    [
        ("intervene", "hellaswag", "lit_layers.tasks.benchmark_scores.LmEvalScorer.requests"),
        ("mteb", "STSBenchmark", "lit_layers.tasks.mteb_tasks.Sources.num_texts"),
    ],
)
def test_a_plan_of_a_task_whose_rows_cannot_be_had_says_why_and_ends_in_two(
    model, tmp_path, capsys, monkeypatch, verb, task, reads
):
    def nowhere(*_):
        raise InputError(f"the rows of {task} cannot be had from the Hub: name a folder of local data")

    monkeypatch.setattr(reads, nowhere)
    assert main([verb, str(model), "--root", str(tmp_path / "run"), "--tasks", task, "--plan"]) == 2
    said = capsys.readouterr()
    why = f"the rows of {task} cannot be had from the Hub: name a folder of local data"
    assert (said.out, said.err) == ("", f"lit-layers {verb}: error: {why}\n")


def test_a_run_that_begins_at_a_checkpoint_is_planned_from_its_step_on(recipe, tmp_path, capsys):
    start = tmp_path / "earlier" / "step-000000045"
    save(causal_lm("gpt2", n_layer=2, n_embd=32, n_head=2, n_positions=128, vocab_size=300), start)
    words = ["--root", str(tmp_path / "run"), "--plan", "--model.init_from", str(start), "--model.config", "null"]
    assert main(["fit", "--config", str(recipe), *words, "--steps={every: 10}", "--trainer.max_steps=20"]) == 0
    shown = capsys.readouterr().out
    assert "4 saved checkpoints" in shown  # 45, 50, 60, 65
    assert "training, 20 steps" in shown


def test_a_run_measures_at_the_steps_that_its_budget_allows_and_saves_all(recipe, tmp_path, no_page, monkeypatch):
    monkeypatch.setattr(callbacks, "stride_within", lambda budget, plan, trained: 2)
    root = tmp_path / "run"
    assert main(["fit", "--config", str(recipe), "--root", str(root), "--budget", "5%"]) == 0
    assert [int(path.name[5:]) for path in sorted(root.glob("step-*"))] == [0, 2, 4, 6, 8]
    assert [each.step for each in records.read(root / "measurements.jsonl")] == [0, 4, 8]


@pytest.mark.soak
def test_a_run_that_goes_on_keeps_the_steps_of_its_budget_and_says_so(recipe, tmp_path, no_page, monkeypatch, caplog):
    """Broken off at step 5 of 8; a plan of the rest would measure every step."""
    root, strides = tmp_path / "run", iter([2])
    monkeypatch.setattr(callbacks, "stride_within", lambda budget, plan, trained: next(strides))
    words = ["fit", "--config", str(recipe), "--root", str(root), "--steps={every: 1}", "--model.decay_steps=8"]
    assert main([*words, "--budget=5%", "--trainer.max_steps=5"]) == 0
    before = [each.step for each in records.read(root / "measurements.jsonl")]
    assert before == [0, 2, 4, 5]  # the last one always
    assert main([*words, "--budget=5%", "--resume=last", "--trainer.max_steps=6"]) == 0
    assert "changes nothing" not in caplog.text
    assert main([*words, "--resume=last"]) == 0
    assert "budget: none changes nothing, as a resumed run keeps the steps that 5% gave it: every 2-th" in caplog.text
    assert [each.step for each in records.read(root / "measurements.jsonl")] == [*before, 6, 8]


def test_ranks_measure_at_the_same_steps_and_are_refused_together(tmp_path, monkeypatch):
    """The first one decides: another would by its own clock."""

    def decided(budget, plan, trained):
        assert distributed.get_rank() == 0
        if budget == 0.01:
            raise InputError(f"budget: most is {plan.costliest().name}")
        return 2

    def run() -> int:
        warnings.simplefilter("ignore")  # of Lightning and torch among themselves
        monkeypatch.setattr(callbacks, "stride_within", decided)
        for name, budget in (("kept", 0.05), ("refused", 0.01)):
            watch = EmergenceCallback([Trajectory(batches=RandomText())], {"every": 1}, tmp_path / name, budget=budget)
            try:
                tiny_training.fit(tmp_path / name, [watch], steps=4, devices=2, strategy="ddp")
                (tmp_path / f"{name}-{distributed.get_rank()}").write_text(str([*watch.schedule.until(4)]))
            except InputError as error:
                (tmp_path / f"{name}-{distributed.get_rank()}").write_text(str(error))
        return 0

    assert run_ranks(run) == [0, 0]
    for rank in (0, 1):
        assert (tmp_path / f"kept-{rank}").read_text() == "[0, 2, 4]"
        assert (tmp_path / f"refused-{rank}").read_text() == "budget: most is trajectory"
    assert [each.step for each in records.read(tmp_path / "kept" / "measurements.jsonl")] == [0, 2, 4]
