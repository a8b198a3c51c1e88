"""`lit-layers mteb`: its output and files, its state after a failure, and errors for wrong input."""

import contextlib
import io
import os
import shutil
from pathlib import Path

import pandas as pd
import pytest

from lit_layers import records
from lit_layers.cli.main import main
from lit_layers.cli.measuring import length_limit
from lit_layers.tasks.mteb_tasks import MtebScorer
from tests.support.labelled_texts import saved_gpt2
from tests.tasks.tiny_tasks import Passes, write_tiny_data

TASKS = "STSBenchmark,TwitterURLCorpus,AskUbuntuDupQuestions"


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("mteb")
    saved_gpt2(root / "model")
    saved_gpt2(root / "bare", tokenizer=False)
    for step in (0, 100):
        saved_gpt2(root / "run" / f"step-{step:09d}", n_layer=2)
    write_tiny_data(root / "data")
    return root


@pytest.fixture(autouse=True)
def wide(monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "140")


def run(home: Path, root: Path, *more: object, model: str = "model", tasks: str = TASKS) -> int:
    command = ["mteb", home / model, "--tasks", tasks, "--folder", home / "data", "--root", root, *more]
    return main([str(word) for word in command])


@pytest.fixture(scope="module")
def scored(home, tmp_path_factory) -> tuple[Path, str]:
    """The root of the scores of all layers on three tasks, and the printed output."""
    root = tmp_path_factory.mktemp("scored")
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        assert run(home, root) == 0
    return root, printed.getvalue()


def test_all_layers_are_scored_printed_and_written(scored):
    root, output = scored
    assert "(mean, resid), mean of 3: " in output
    scores = pd.read_csv(root / "mteb" / "scores.csv")
    assert [name for name in scores.columns if name.startswith("layer")] == [f"layer_{n:03d}" for n in range(4)]
    assert scores["task"].tolist() == ["TwitterURLCorpus", "AskUbuntuDupQuestions", "STSBenchmark"]
    means = pd.read_csv(root / "mteb" / "averages.csv")
    assert means["average"].tolist() == pytest.approx([scores[f"layer_{n:03d}"].mean() for n in range(4)])
    names = [each.analysis for each in records.read(root / "measurements.jsonl")]
    assert names == [f"mteb/{name}" for name in TASKS.split(",")]


def test_a_second_run_measures_nothing_from_any_working_directory(home, scored, tmp_path, monkeypatch):
    root = tmp_path / scored[0].name  # the folder names the run
    shutil.copytree(scored[0], root)
    before = (root / "measurements.jsonl").read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(MtebScorer, "evaluate", None)
        assert run(home, root) == 0
        for folder in (home, home / "data"):  # the same model under another path
            patch.chdir(folder)
            assert run(Path(os.path.relpath(home)), root) == 0
    assert (root / "measurements.jsonl").read_bytes() == before
    assert run(home, root, "--seed", "7", tasks="STSBenchmark") == 0
    assert len(records.read(root / "measurements.jsonl")) == 4, "other options are other numbers"


@pytest.mark.soak
def test_more_layers_are_added_to_the_stored_ones_with_a_named_tokenizer(home, tmp_path, monkeypatch):
    words = [home, tmp_path, "--tokenizer", home / "model"]
    for layers in (["--layers", "1,3"], []):
        assert run(*words, *layers, model="bare", tasks="STSBenchmark") == 0
    passes = Passes(monkeypatch)
    assert run(*words, "--layers", "2", model="bare", tasks="STSBenchmark") == 0
    assert passes.texts == 0
    for measurement in records.read(tmp_path / "measurements.jsonl")[1:]:
        assert [record.layer for record in measurement.records] == [0, 1, 2, 3]


@pytest.mark.soak
def test_a_series_is_scored_step_by_step(home, tmp_path, capsys):
    assert run(home, tmp_path, "--allow_suspect", model="run", tasks="STSBenchmark") == 0
    found = records.read(tmp_path / "measurements.jsonl")
    assert [(each.step, each.error) for each in found] == [(0, None), (100, None)]
    assert "step 100 (mean, resid), mean of 1: " in capsys.readouterr().out
    assert run(home, tmp_path / "one", "--allow_suspect", "--steps", "100", model="run", tasks="STSBenchmark") == 0
    assert [each.step for each in records.read(tmp_path / "one" / "measurements.jsonl")] == [100]


@pytest.mark.soak
def test_metrics_use_the_same_texts_states_and_pooling_as_the_scores(home, tmp_path):
    words = ["--metrics", "--states", "normed", "--pooling", "last"]
    assert run(home, tmp_path, *words, tasks="STSBenchmark,TwitterURLCorpus") == 0
    found = {each.analysis: each for each in records.read(tmp_path / "measurements.jsonl")}
    measured = {"representation/STSBenchmark", "invariance/STSBenchmark"}
    # A task of pairs with binary labels has no column of texts.
    assert found.keys() == {"mteb/STSBenchmark", "mteb/TwitterURLCorpus", *measured}
    per_layer = [record for each in found.values() for record in each.records if record.layer is not None]
    assert {record.tags["states"] for record in per_layer} == {"normed"}
    pooled = ("infonce", "dataset_entropy", "main_score")
    assert {record.tags["pooling"] for record in per_layer if record.metric in pooled} == {"last"}


def test_length_limit_leaves_out_the_padding_positions_of_roberta():
    positions = {"max_position_embeddings": 514, "pad_token_id": 1}
    assert length_limit({"model_type": "roberta", **positions}) == 512
    assert length_limit({"model_type": "bert", **positions}) == 514
    assert length_limit({"model_type": "mamba"}) is None
    assert length_limit({"model_type": "gpt2", "n_positions": -1}) is None  # loading refuses this value


@pytest.mark.soak
def test_the_files_keep_scores_of_earlier_commands_except_of_a_task_that_failed_since(home, tmp_path, capsys):
    scores, names = tmp_path / "mteb" / "scores.csv", ["AskUbuntuDupQuestions", "STSBenchmark"]
    assert run(home, tmp_path, tasks="STSBenchmark") == 0
    assert run(home, tmp_path, "--layers", "0,1", tasks="AskUbuntuDupQuestions") == 0
    assert pd.read_csv(scores)["task"].tolist() == names
    shutil.copytree(home / "data", tmp_path / "data")
    shutil.rmtree(tmp_path / "data" / "reranking")
    assert run(home, tmp_path, "--folder", tmp_path / "data", "--max_tokens", "5", tasks=",".join(names)) == 1
    output = capsys.readouterr()
    assert "failed: mteb/AskUbuntuDupQuestions: InputError: " in output.err
    assert "not in the mean, because scores are missing: AskUbuntuDupQuestions" in output.out
    assert pd.read_csv(scores)["task"].tolist() == ["STSBenchmark"]


@pytest.mark.soak
def test_texts_with_equal_views_are_not_measured_and_reported(home, tmp_path, monkeypatch):
    monkeypatch.setattr(MtebScorer, "texts", lambda prepared: ["a to b", "of it", "so I am"] * 4)
    with pytest.warns(UserWarning, match="invariance/STSBenchmark is not measured: views: 12 of 12 texts have two"):
        assert run(home, tmp_path, "--metrics", tasks="STSBenchmark") == 0
    errors = {each.analysis: each.error for each in records.read(tmp_path / "measurements.jsonl")}
    assert errors["mteb/STSBenchmark"] is None
    assert errors["representation/STSBenchmark"] is None


def test_without_mteb_the_error_names_what_to_install(home, tmp_path, capsys, monkeypatch):
    from importlib.metadata import PackageNotFoundError

    def not_installed(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr("lit_layers.tasks.task_files.version", not_installed)
    assert run(home, tmp_path) == 2
    assert "error: mteb is needed to score tasks: pip install 'lit_layers[eval]'\n" in capsys.readouterr().err
