"""The files of grids, run by W&B's own agent code: the same command lines, and one W&B run a cell, the agent's."""

import json
import os
import sys
from pathlib import Path

import pytest
import yaml

from lit_layers.cli.main import main
from lit_layers.sweep import read_grid
from lit_layers.training.run_folder import RunFolder
from tests.cli.conftest import corpus, no_page  # noqa: F401 - fixtures
from tests.cli.test_fit import RECIPE
from tests.support.forked import run_ranks
from tests.support.read_wandb import read_finished
from tests.support.undrawn import leave_undrawn

wandb_agent = pytest.importorskip("wandb.wandb_agent")
ROOT = Path(__file__).parents[2]
FILES = [ROOT / "recipes" / "sweeps" / "vit_grid.yaml", ROOT / "wandb_configs" / "sweeps" / "vit_grid.yaml"]


@pytest.fixture
def agent(tmp_path, monkeypatch):
    """W&B's agent without its server: what it would start is kept."""
    started: list[tuple[list[str], dict[str, str]]] = []

    class Process:
        def __init__(self, env, command, **_):
            started.append((command, env))

    monkeypatch.setattr(wandb_agent, "AgentProcess", Process)
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    monkeypatch.setenv("WANDB_SWEEP_ID", "sweep123")
    for name in ("WANDB_RUN_ID", "WANDB_SWEEP_PARAM_PATH"):  # the agent sets them: put back at the end
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)

    def start(file: Path, run_ids: list[str]) -> list[tuple[list[str], dict[str, str]]]:
        content = yaml.safe_load(file.read_text())
        agent = wandb_agent.Agent(api=None, queue=None, sweep_id="sweep123")
        agent._sweep_command = content.get("command") or []
        for run_id, cell in zip(run_ids, read_grid(file).cells(), strict=False):
            args = {name: {"value": value} for name, value in cell.parameters.items()}
            command = {"type": "run", "run_id": run_id, "program": content.get("program"), "args": args}
            response = agent._process_command(command)
            assert "exception" not in response, response
        return started

    return start


@pytest.mark.parametrize(
    "file", [pytest.param(FILES[0], marks=pytest.mark.soak), FILES[1]], ids=lambda file: file.parts[-3]
)
def test_wandbs_agent_starts_the_same_command_lines(file, agent):
    grid = read_grid(file)
    cells = grid.cells()
    started = agent(file, [f"run{number}" for number in range(len(cells))])
    assert len(started) == 64
    assert [command for command, _ in started] == [grid.command_line(cell) for cell in cells]


@pytest.mark.parametrize(
    ("command", "program"),
    [
        (None, "x.py"),
        (["${interpreter}", "${program}", "${args_no_hyphens}"], "x.py"),
        (["x", "--data=${envvar:HOME}/data", "${envvar:HOME}", "${args}", "a ${args} b"], None),
    ],
)
def test_macros_are_those_of_wandbs_agent(command, program, agent, tmp_path):
    content = {"method": "grid", "program": program, "command": command}
    content = {name: value for name, value in content.items() if value is not None}
    parameters = {"a.b": {"values": [1, 0.5, 1e-5]}, "c": {"values": ["text with spaces"]}, "d": {"value": True}}
    file = tmp_path / "grid.yaml"
    file.write_text(yaml.safe_dump({**content, "parameters": parameters}, sort_keys=False))
    grid = read_grid(file)
    started = agent(file, ["one", "two", "three"])
    assert [found for found, _ in started] == [grid.command_line(cell) for cell in grid.cells()]


def test_both_files_have_the_same_eight_by_eight_cells():
    here, there = map(read_grid, FILES)
    assert here.cells() == there.cells()
    assert sorted(map(len, here.values.values())) == [8, 8]
    assert (here.metric, here.goal) == (there.metric, there.goal) == ("validation/accuracy", "maximize")
    rest = ["--config", "wandb_configs/default.yaml", "--resume=last"]
    rest.append("--root=checkpoints/vit_grid/${oc.env:WANDB_RUN_ID}")
    assert sorted(there.command) == sorted([*here.command, *rest])


@pytest.mark.slow
@pytest.mark.parametrize("file", FILES, ids=lambda file: file.parts[-3])
def test_the_grids_name_options_that_fit_has(file, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("WANDB_RUN_ID", "a1b2c3d4")
    grid = read_grid(file)
    line = grid.command_line(grid.cells()[-1])
    with pytest.raises(SystemExit) as ended:
        main([*line[line.index("fit") :], *(["--root", "runs"] if "recipes" in file.parts else []), "--print_config"])
    assert ended.value.code == 0
    printed = yaml.safe_load(capsys.readouterr().out)
    options = printed["model"]["init_args"]
    assert (options["drop_path_rate"], options["weight_decay"]) == (0.5, 0.5)
    assert str(printed["trainer"]["devices"]) == "1"
    assert printed["root"] == ("runs" if "recipes" in file.parts else "checkpoints/vit_grid/a1b2c3d4")


@pytest.mark.slow
def test_the_seeds_name_options_that_fit_has_and_are_one_group(capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("WANDB_RUN_ID", "a1b2c3d4")
    grid = read_grid(ROOT / "wandb_configs" / "sweeps" / "gpt2_seeds.yaml")
    assert len(grid.cells()) == 5
    line = grid.command_line(grid.cells()[-1])
    with pytest.raises(SystemExit) as ended:
        main([*line[line.index("fit") :], "--print_config"])
    assert ended.value.code == 0
    printed = yaml.safe_load(capsys.readouterr().out)
    assert printed["model"]["init_args"]["init_seed"] == printed["seed_everything"] == 5
    assert printed["wandb"]["init_args"]["group"] == "gpt2_seeds"
    assert printed["root"] == "checkpoints/gpt2_seeds/a1b2c3d4"


@pytest.mark.soak
@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="needs fork")
@pytest.mark.usefixtures("no_page")
def test_two_ranks_under_an_agent_are_one_wandb_run_and_that_is_the_agents(corpus, agent, tmp_path, monkeypatch):  # noqa: F811
    leave_undrawn(monkeypatch)
    mirror = {"class_path": "lit_layers.report.WandbMirror", "init_args": {"mode": "offline", "project": "mine"}}
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(yaml.safe_dump({**RECIPE, "corpus": str(corpus), "wandb": mirror}))
    command = ["${env}", "lit-layers", "fit", "--config", str(recipe), "--resume=last", "${args}"]
    command.append(f"--root={tmp_path}/runs/${{oc.env:WANDB_RUN_ID}}")
    file = tmp_path / "grid.yaml"
    parameters = {"model.lr": {"values": [0.01, 0.02]}}
    file.write_text(yaml.safe_dump({"method": "grid", "command": command, "parameters": parameters}))
    (_, _), (line, environment) = agent(file, ["first123", "second12"])

    go_on, writers = RunFolder.go_on, tmp_path / "writers"

    def noted(folder: RunFolder, step: int, **options: bool) -> None:
        with writers.open("a") as file:
            file.write(os.environ["RANK"])
        go_on(folder, step, **options)

    monkeypatch.setattr(RunFolder, "go_on", noted)

    def run() -> int:
        os.environ.update(environment | {name: os.environ[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE")})
        return main([*line[line.index("fit") :], "--trainer.devices", "2", "--trainer.strategy", "ddp"])

    assert run_ranks(run) == [0, 0]
    root = tmp_path / "runs" / "second12"
    assert json.loads((root / "run.json").read_text())["id"] == "second12"
    assert len(list((root / "wandb").glob("offline-run-*-second12"))) == 1
    assert len(list(tmp_path.rglob("offline-run-*"))) == 1
    found = read_finished(root)["second12"]
    assert [step for step, _ in found.curve("train/loss")] == [1, 2, 3]
    assert found.config["model.lr"] == 0.02
    assert run_ranks(run) == [0, 0]  # the agent starts a preempted run again: it goes on under its id
    assert writers.read_text() == "0"  # the first rank alone writes run.json and opens W&B's run
    assert json.loads((root / "run.json").read_text())["id"] == "second12"
