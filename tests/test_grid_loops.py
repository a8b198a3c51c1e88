"""Grids of runs as shell loops: each run once, stopped and started again, shared out, and read by `correlate`."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest

from lit_layers import records
from lit_layers.cli.main import main
from lit_layers.correlate.model_table import read_run_models, table_of_models
from tests.support.grid_loops import LOOPS, ROOT, Loop, name_of

DIGITS = ROOT / "recipes" / "sweeps" / "digits_grid.sh"


@pytest.fixture
def loop(tmp_path) -> Loop:
    return Loop(DIGITS, tmp_path)


def test_each_run_is_started_once_with_the_options_that_its_folder_is_named_by(tmp_path):
    numbers = {"digits_grid": 4, "vit_grid": 64, "four_papers": 10, "four_papers_images": 10}
    for script in LOOPS:
        loop = Loop(script, tmp_path / script.stem)
        assert loop.run("--trainer.max_steps=7") == 0
        commands = loop.commands()
        assert len({*map(name_of, commands)}) == len(commands) == numbers.get(script.stem, 6), script
        for command in commands:
            assert command[0] == "fit"
            assert command[-4:] == ["--root", str(loop.runs / name_of(command)), "--resume", "last"]
            assert command[-5] == "--trainer.max_steps=7"
            for option in name_of(command).split(","):
                assert any(word.removeprefix("--").split(".", 1)[-1] == option for word in command[1:-4]), option
            assert all((ROOT / command[at + 1]).is_file() for at, word in enumerate(command) if word == "--config")
        assert loop.run("--trainer.max_steps=7") == 0
        assert loop.commands() == [], script


def test_shards_have_each_run_once_and_a_run_that_fails_stops_no_other_and_is_tried_again(loop):
    shards = [f"{number}/4" for number in range(4)]
    assert [loop.run(SHARD=shard, BROKEN="weight_decay=0.5") for shard in shards].count(1) == 2
    shared = [name_of(command) for command in loop.commands()]
    assert len(shared) == len({*shared}) == 4
    assert loop.run() == 0
    assert {name_of(command) for command in loop.commands()} == {name for name in shared if "weight_decay=0.5" in name}
    assert loop.run(SHARD="0/1") == 0
    assert loop.commands() == []


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 143), pytest.param(signal.SIGINT, 130, marks=pytest.mark.soak)]
)
def test_a_signal_lets_the_run_save_and_the_next_call_goes_on_with_it(number, code, loop):
    second = "drop_path_rate=0.0,weight_decay=0.5"
    assert loop.stop(number, second) == code
    assert (loop.runs / second / "saved").exists()
    assert [name_of(command) for command in loop.commands()] == ["drop_path_rate=0.0,weight_decay=0.0", second]
    assert loop.run() == 0
    assert name_of(loop.commands()[0]) == second


def test_a_task_of_a_job_array_runs_its_share_of_the_loop(tmp_path):
    loop = Loop(ROOT / "recipes" / "slurm" / "sweep.sh", tmp_path)
    srun = tmp_path / "bin" / "srun"
    srun.write_text('#!/usr/bin/env bash\nwhile [ "${1#--}" != "$1" ]; do shift; done\nexec "$@"\n')
    srun.chmod(0o755)
    job = {"SLURM_CPUS_PER_TASK": "4", "SLURM_ARRAY_TASK_ID": "3", "SLURM_ARRAY_TASK_COUNT": "8"}
    assert loop.run("--trainer.max_steps=7", **job) == 0
    commands = loop.commands()
    assert len(commands) == 8
    assert {command[-5] for command in commands} == {"--trainer.max_steps=7"}


@pytest.mark.nightly
@pytest.mark.timeout(1800)  # four trainings, a process each, and one that is stopped
def test_the_digits_grid_is_trained_through_a_stop_and_its_published_figure_is_made_of_its_folders(
    tmp_path, monkeypatch
):
    runs = tmp_path / "checkpoints" / "digits_grid"
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "ROOT": str(runs), "OMP_NUM_THREADS": "1"}
    command = ["bash", str(DIGITS)]
    with subprocess.Popen(command, env=environment, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout:
            if line.strip().endswith("drop_path_rate=0.0,weight_decay=0.5"):  # the first has finished
                process.send_signal(signal.SIGTERM)
    assert process.returncode == 143
    first = runs / "drop_path_rate=0.0,weight_decay=0.0"
    before = (first / "measurements.jsonl").read_bytes()
    assert subprocess.run(command, env=environment, cwd=ROOT, check=False).returncode == 0
    assert (first / "measurements.jsonl").read_bytes() == before
    runs_of_grid = read_run_models([runs])
    table = table_of_models(runs_of_grid, metric="coupling/coupling[k=12]", score="validation/accuracy").frame
    assert sorted(zip(table["drop_path_rate"], table["weight_decay"], strict=True)) == [
        (drop, decay) for drop in (0.0, 0.3) for decay in (0.0, 0.5)
    ]
    assert set(table["step"]) == {100}
    for folder in runs.iterdir():
        (accuracy,) = table["validation/accuracy"][table["model"].map(folder.name.endswith)]
        rows = [row for row in records.rows(folder / "metrics.jsonl") if "validation/accuracy" in row]
        assert rows[-1]["validation/accuracy"] == accuracy
    monkeypatch.chdir(tmp_path)
    recipe = str(ROOT / "recipes" / "papers" / "coupling" / "vit_grid.yaml")
    assert main(["reproduce", recipe, "--reduced", "--root", "out"]) == 0
    (row,) = pd.read_csv("out/comparison.csv").to_dict("records")
    assert (row["verdict"], -1 <= row["measured"] <= 1) == ("reduced", True)
