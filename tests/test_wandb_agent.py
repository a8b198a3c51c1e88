"""W&B sweeps with W&B's own agent code: the runs of the shell loop, each in the agent's W&B run."""

import itertools
import json
import os
from pathlib import Path

import pytest
import yaml

from lit_layers.cli.main import main
from tests.cli.conftest import corpus, no_page  # noqa: F401 - fixtures
from tests.cli.test_fit import RECIPE
from tests.support.forked import run_ranks
from tests.support.grid_loops import ROOT
from tests.support.read_wandb import read_finished
from tests.support.undrawn import leave_undrawn

wandb_agent = pytest.importorskip("wandb.wandb_agent")
GRIDS = ROOT / "wandb_configs" / "sweeps"


@pytest.fixture
def agent(tmp_path, monkeypatch):
    """Return W&B's agent without a server; it records the commands that it would start."""
    started: list[tuple[list[str], dict[str, str]]] = []

    class Process:
        def __init__(self, env, command, **_):
            started.append((command, env))

    monkeypatch.setattr(wandb_agent, "AgentProcess", Process)
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    monkeypatch.setenv("WANDB_SWEEP_ID", "sweep123")
    for name in ("WANDB_RUN_ID", "WANDB_SWEEP_PARAM_PATH"):  # the agent sets them; restored at the end
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)

    def start(file: Path, run_ids: list[str]) -> list[tuple[list[str], dict[str, str]]]:
        content = yaml.safe_load(file.read_text())
        agent = wandb_agent.Agent(api=None, queue=None, sweep_id="sweep123")
        agent._sweep_command = content.get("command") or []
        values = {name: spec["values"] for name, spec in content["parameters"].items()}
        for run_id, chosen in zip(run_ids, itertools.product(*values.values()), strict=False):
            args = {name: {"value": value} for name, value in zip(values, chosen, strict=True)}
            command = {"type": "run", "run_id": run_id, "program": content.get("program"), "args": args}
            response = agent._process_command(command)
            assert "exception" not in response, response
        return started

    return start


@pytest.mark.slow
def test_the_sweeps_name_existing_options_of_fit(agent, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    printed = {}
    for name in ("vit_grid", "gpt2_seeds"):
        line, environment = agent(GRIDS / f"{name}.yaml", [f"run{number}" for number in range(64)])[-1]
        monkeypatch.setenv("WANDB_RUN_ID", environment["WANDB_RUN_ID"])
        with pytest.raises(SystemExit) as ended:
            main([*line[line.index("fit") :], "--print_config"])
        assert ended.value.code == 0
        printed[name] = yaml.safe_load(capsys.readouterr().out)
        assert printed[name]["root"] == f"checkpoints/{name}/{environment['WANDB_RUN_ID']}"
    options = printed["vit_grid"]["model"]["init_args"]
    assert (options["drop_path_rate"], options["weight_decay"]) == (0.5, 0.5)
    seeds = printed["gpt2_seeds"]
    assert seeds["model"]["init_args"]["init_seed"] == seeds["seed_everything"] == 5
    assert seeds["wandb"]["init_args"]["group"] == "gpt2_seeds"


@pytest.mark.soak
@pytest.mark.slow
@pytest.mark.usefixtures("no_page")
def test_two_ranks_under_an_agent_write_only_the_agents_run(corpus, agent, tmp_path, monkeypatch):  # noqa: F811
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
    assert run_ranks(run) == [0, 0]  # the agent restarts a preempted run, which continues under its id
    assert json.loads((root / "run.json").read_text())["id"] == "second12"
