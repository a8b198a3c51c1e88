"""Grids of runs as shell loops: each run starts once, resumes, can be sharded, and is read by `correlate`."""

import signal

import pytest

from tests.support.grid_loops import LOOPS, ROOT, Loop, name_of

DIGITS = ROOT / "recipes" / "sweeps" / "digits_grid.sh"


@pytest.fixture
def loop(tmp_path) -> Loop:
    return Loop(DIGITS, tmp_path)


def test_each_run_is_started_once_with_the_options_in_its_folder_name(tmp_path):
    numbers = {"digits_grid": 4, "vit_grid": 64, "four_papers": 10, "four_papers_images": 10, "what_comes_first": 12}
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


def test_shards_start_each_run_once_and_a_failed_run_stops_no_other_and_is_retried(loop):
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
def test_a_signal_lets_the_run_save_and_the_next_call_resumes_it(number, code, loop):
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
