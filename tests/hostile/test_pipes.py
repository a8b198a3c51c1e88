"""A pipe, socket or device in place of a file: to read it may never end."""

import os
import socket
from pathlib import Path

import pytest
import yaml

from lit_layers.cli.main import COMMANDS
from tests.hostile.test_recipes import refused


@pytest.fixture
def names(tmp_path: Path) -> list[str]:
    os.mkfifo(tmp_path / "pipe.yaml")
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(tmp_path / "socket.yaml"))
    return [str(tmp_path / "pipe.yaml"), str(tmp_path / "socket.yaml"), "/dev/zero"]


def test_every_command_refuses_them(names, capsys):
    for command in COMMANDS:
        for name in names:
            for words in ([name], ["--config", name], [f"--config={name}"]):
                said = refused([command, *words], capsys)
                assert said == f"expected a file or folder, {name} is a pipe, a socket or a device"


def test_a_recipe_names_none(names, tmp_path, capsys):
    recipe = tmp_path / "recipe.yaml"
    for name in names:
        recipe.write_text(yaml.safe_dump({"corpus": name, "root": str(tmp_path / "run")}))
        said = refused(["analyze", str(tmp_path), "--config", str(recipe)], capsys)
        assert said == f"corpus: expected a file or folder, {name} is a pipe, a socket or a device"


def test_a_run_has_none_among_its_files(tmp_path, capsys):
    os.mkfifo(tmp_path / "measurements.jsonl")
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "train/loss": 2.0}\n')
    said = refused(["report", str(tmp_path)], capsys)
    assert said.endswith("measurements.jsonl is a pipe, a socket or a device")
