"""Commands on a run that another process writes, whose files vanish, or that is not writable."""

import random
import signal
from pathlib import Path

import pytest
import yaml

from lit_layers import records
from lit_layers.cli.main import main
from lit_layers.files.run_lock import writing
from lit_layers.training.run_folder import saved_steps, step_folder
from tests.cli.test_fit import RECIPE
from tests.support.forked import _fork, _wait, run_forked
from tests.support.labelled_texts import saved_gpt2
from tests.tasks.tiny_tasks import write_tiny_data


@pytest.fixture(scope="module")
def recipe(tmp_path_factory, corpus) -> Path:
    path = tmp_path_factory.mktemp("recipe") / "recipe.yaml"
    path.write_text(yaml.safe_dump({**RECIPE, "corpus": str(corpus), "resume_every": 1}))
    return path


def fit(recipe: Path, root: Path, *arguments: str) -> int:
    return main(["fit", "--config", str(recipe), "--root", str(root), *arguments])


def error_lines(output: str, command: str) -> list[str]:
    return [line for line in output.splitlines() if line.startswith(f"lit-layers {command}: error: ")]


@pytest.mark.soak
@pytest.mark.slow
def test_every_command_that_writes_is_refused_while_another_process_writes(recipe, corpus, tmp_path, capfd):
    saved_gpt2(tmp_path / "run" / "step-000000000", n_layer=2)
    write_tiny_data(tmp_path / "data")
    root, model = tmp_path / "root", str(tmp_path / "run" / "step-000000000")
    tasks = ["--tasks", "STSBenchmark", "--folder", str(tmp_path / "data")]
    texts = ["--corpus", str(corpus), "--tokenizer", str(corpus / "tokenizer")]
    commands = [
        ["fit", "--config", str(recipe), "--resume", "last"],
        ["analyze", model, *texts],
        ["analyze", str(tmp_path / "run"), *texts],
        ["analyze", str(tmp_path / "run"), *texts, "--shard", "0/2"],
        ["intervene", model, "--speed"],
        ["mteb", model, *tasks],
    ]
    for command in commands:
        with writing(root):
            assert main([*command, "--root", str(root)]) == 2, command
            (error,) = error_lines(capfd.readouterr().err, command[0])
            assert f"root: {root} is being written by process " in error
            assert sorted(path.name for path in root.iterdir()) == [".writer.lock"]
        assert not root.exists()


@pytest.mark.nightly
def test_two_trainings_that_compete_and_are_killed_repeatedly_leave_one_complete_run(recipe, tmp_path):
    longer = ["--trainer.max_steps", "12", "--resume", "last"]
    assert run_forked(lambda: fit(recipe, tmp_path / "whole", *longer)) == 0
    root, draw, seconds, ended = tmp_path / "raced", random.Random(0), 4.0, []
    while 0 not in ended:
        racing = [_fork(lambda: fit(recipe, root, *longer)) for _ in range(2)]
        ended = _wait(racing, draw.uniform(0.2, 1.0) * seconds, lambda: False, signal.SIGKILL, only=None)
        assert set(ended) <= {0, 2, -signal.SIGKILL}
        seconds *= 1.15  # other processes change how long a run takes
    left = []
    for folder in (tmp_path / "whole", root):
        losses = [(row["step"], row["train/loss"]) for row in records.rows(folder / "metrics.jsonl")]
        measured = [(m.step, m.analysis, m.records) for m in records.read(folder / "measurements.jsonl")]
        weights = [(step_folder(folder, step) / "model.safetensors").read_bytes() for step in saved_steps(folder)]
        left.append((losses, measured, weights))
    assert left[0] == left[1]
