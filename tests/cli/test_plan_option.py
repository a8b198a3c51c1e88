"""`--plan` on the command line: what a command would take is printed, and nothing is kept."""

import shutil
from pathlib import Path

import pytest

from lit_layers.cli.main import main
from lit_layers.models.build import causal_lm, save
from tests.tasks.tiny_tasks import write_tiny_data


@pytest.fixture(scope="module")
def run(tmp_path_factory, corpus) -> Path:
    """A run's folder with two steps."""
    root = tmp_path_factory.mktemp("runs") / "run"
    for step in (2, 4):
        network = causal_lm("gpt2", seed=step, n_layer=2, n_embd=32, n_head=2, n_positions=128, vocab_size=300)
        save(network, root / f"step-{step:09d}", corpus / "tokenizer")
    return root


def contents(folder: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*")}


def cells(capsys) -> dict[str, list[str]]:
    return {line.split("  ")[0]: line.split() for line in capsys.readouterr().out.splitlines()}


def test_a_series_is_planned_by_its_first_checkpoint_and_its_folder_stays_as_it_is(run, corpus, capsys):
    before = contents(run)
    words = ["analyze", run, "--corpus", corpus, "--metrics", "line_shape_score,lens", "--device", "cpu", "--plan"]
    assert main([*map(str, words)]) == 0
    rows = cells(capsys)
    assert all(rows[name][1].endswith("%") for name in ("trajectory", "lens"))
    assert "in all, 2 checkpoints" in rows
    assert any(name.startswith("an extrapolation") for name in rows)
    assert contents(run) == before


def test_other_orders_and_tasks_are_planned_in_a_folder_of_their_own(run, corpus, tmp_path, capsys):
    data = write_tiny_data(tmp_path / "data")
    model = shutil.copytree(run / "step-000000004", tmp_path / "model")
    places = ["--root", tmp_path / "out", "--device", "cpu", "--plan"]
    orders = ["--corpus", corpus, "--variants", "skip", "--num_tokens", "16", "--num_sequences", "8"]
    assert main([*map(str, ["intervene", model, *orders, *places])]) == 0
    assert "in all, 1 checkpoints" in cells(capsys)
    assert main([*map(str, ["mteb", model, "--tasks", "STSBenchmark", "--folder", data, *places])]) == 0
    assert "in all, 1 checkpoints" in cells(capsys)
    assert not (tmp_path / "out").exists()
    assert main([*map(str, ["analyze", tmp_path / "nowhere", "--plan"])]) == 2
