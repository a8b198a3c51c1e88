"""The file of a grid: its cells, their names and command lines, and what is refused."""

import re

import pytest
import yaml

from lit_layers.errors import InputError
from lit_layers.sweep import read_grid
from lit_layers.sweep.grid import Cell

SWEEP = {
    "method": "grid",
    "command": ["${env}", "lit-layers", "fit", "--data.source=${envvar:DATA_FOLDER}/cifar10", "${args}"],
    "parameters": {
        "model.weight_decay": {"values": [0.0, 0.05]},
        "model.drop_path_rate": {"values": [0, 0.1, 0.2]},
        "trainer.max_steps": {"value": 100},
    },
    "metric": {"name": "validation/accuracy", "goal": "maximize"},
}

ONE = "{values: [...]} of different numbers or texts, or {value: ...}, alone: W&B's agent runs what is more"


def write(tmp_path, **changes):
    path = tmp_path / "grid.yaml"
    content = {name: value for name, value in {**SWEEP, **changes}.items() if value is not ...}
    path.write_text(yaml.safe_dump(content, sort_keys=False))
    return path


def test_a_grid_is_every_combination_with_the_last_parameter_fastest(tmp_path):
    cells = read_grid(write(tmp_path)).cells()
    assert [cell.name for cell in cells] == [
        "weight_decay=0.0,drop_path_rate=0",
        "weight_decay=0.0,drop_path_rate=0.1",
        "weight_decay=0.0,drop_path_rate=0.2",
        "weight_decay=0.05,drop_path_rate=0",
        "weight_decay=0.05,drop_path_rate=0.1",
        "weight_decay=0.05,drop_path_rate=0.2",
    ]
    expected = {"model.weight_decay": 0.05, "model.drop_path_rate": 0.2, "trainer.max_steps": 100}
    assert cells[-1].parameters == expected


def test_macros_and_variables_are_filled_in(tmp_path):
    cell = Cell("x", {"model.lr": 0.1, "model.compile": True})
    grid = read_grid(write(tmp_path))
    source = "--data.source=/there/cifar10"
    expected = ["/usr/bin/env", "lit-layers", "fit", source, "--model.lr=0.1", "--model.compile=True"]
    assert grid.command_line(cell, {"DATA_FOLDER": "/there"}) == expected
    grid = read_grid(write(tmp_path, command=["${interpreter}", "${program}", "${args_no_hyphens}"], program="x.py"))
    assert grid.command_line(cell) == ["python", "x.py", "model.lr=0.1", "model.compile=True"]
    grid = read_grid(write(tmp_path, command=..., program="x.py"))
    assert grid.command_line(cell)[:3] == ["/usr/bin/env", "python", "x.py"]


def test_another_macro_inside_a_word_is_left_to_the_command(tmp_path):
    word = "--root=runs/${oc.env:WANDB_RUN_ID}"
    assert read_grid(write(tmp_path, command=["x", word, "${args}"])).command_line(Cell("x", {})) == ["x", word]


@pytest.mark.parametrize(
    ("parameters", "names"),
    [
        ({"model.lr": {"values": [1]}, "data.lr": {"values": [2]}}, ["model.lr=1,data.lr=2"]),
        ({"data.step": {"values": [1]}, "model.error": {"values": [2]}}, ["data.step=1,model.error=2"]),
        ({"a.b": {"values": ["x/y", "x y"]}}, ["b=x_y-HASH", "b=x_y-HASH"]),
        ({"b": {"values": ["c" * 300]}}, [f"b={'c' * 118}-HASH"]),
        ({"b": {"value": 3}}, ["all"]),
    ],
)
def test_folders_have_short_names_that_are_names(parameters, names, tmp_path):
    found = [cell.name for cell in read_grid(write(tmp_path, parameters=parameters)).cells()]
    assert [re.sub("-[0-9a-f]{8}$", "-HASH", name) for name in found] == names
    assert len(set(found)) == len(names)


def test_what_is_empty_is_not_there_and_values_stay_what_they_are(tmp_path):
    large = 10**25
    empty = {"metric": None, "command": None, "program": "a.py", "project": 3, "name": None}
    grid = read_grid(write(tmp_path, parameters={1: {"values": [large, True, "1e-3"]}}, **empty))
    assert grid.metric is None
    assert grid.values == {"1": [large, True, "1e-3"]}
    assert [cell.name for cell in grid.cells()] == [f"1={large}", "1=True", "1=1e-3"]


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"parameters": {}}, "parameters: expected at least 1, got {}; see docs/sweeps.md"),
        ({"command": []}, "command: expected at least 1, got []; see docs/sweeps.md"),
        ({"method": "bayes"}, "method: expected grid: W&B runs the other methods, got 'bayes'; see docs/sweeps.md"),
        ({"method": ...}, "method: this field is missing"),
        ({"parameters": ...}, "parameters: this field is missing"),
        ({"parameters": {"lr": {"min": 0, "max": 1}}}, f"parameters.lr: expected {ONE}, got {{'min': 0, 'max': 1}}"),
        ({"parameters": {"model": {"parameters": {"lr": {"values": [1]}}}}}, f"parameters.model: expected {ONE}"),
        ({"parameters": {"lr": {"values": [1], "distribution": "categorical"}}}, f"lr: expected {ONE}, got {{'values'"),
        ({"parameters": {"lr": {"values": [1], "value": 1}}}, f"lr: expected {ONE}, got {{'values'"),
        ({"parameters": {"lr": 3}}, f"parameters.lr: expected {ONE}, got 3"),
        ({"parameters": {"lr": {}}}, f"parameters.lr: expected {ONE}, got {{}}"),
        ({"parameters": {"lr": {"values": []}}}, f"lr: expected {ONE}, got {{'values': []}}"),
        ({"parameters": {"lr": {"values": 3}}}, f"lr: expected {ONE}, got {{'values': 3}}"),
        ({"parameters": {"lr": {"values": [1, 1]}}}, f"lr: expected {ONE}, got {{'values': [1, 1]}}"),
        ({"parameters": {"lr": {"values": [None]}}}, f"lr: expected {ONE}, got {{'values': [None]}}"),
        ({"parameters": {"lr": {"value": [1]}}}, f"lr: expected {ONE}, got {{'value': [1]}}"),
        ({"metric": "loss"}, "metric: expected an object, got 'loss'"),
        ({"metric": {"name": "a", "goal": "max"}}, "metric.goal: expected 'maximize' or 'minimize', got 'max'"),
        ({"metric": {"name": "a", "gaol": "max"}}, "metric.gaol: there is no such field"),
        ({"parametrs": {}}, "parametrs: there is no such field"),
        ({"early_terminate": {"type": "hyperband"}}, "early_terminate: there is no such field; see docs/sweeps.md"),
        ({"command": "lit-layers fit"}, "command: expected a list, got 'lit-layers fit'"),
        ({"command": []}, "command: "),
        ({"command": ["lit-layers", "fit"]}, "command: expected the word ${args}, where the parameters go"),
        ({"command": ["x", "${args_json}", "${args}"]}, "command: unknown macro ${args_json}; known: ${env}"),
        ({"command": ...}, "program: expected the program that ${program} stands for, got none"),
        ({"program": 3}, "program: expected text, got 3"),
    ],
)
def test_what_only_the_server_can_do_and_what_is_wrong_is_refused(changes, sentence, tmp_path):
    with pytest.raises(InputError) as refused:
        read_grid(write(tmp_path, **changes))
    assert sentence in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [(b"- a", "expected an object"), (b"a: [", "not valid YAML"), (b"\xff\xfe\xfa", "not valid YAML")],
)
def test_a_file_that_is_no_sweep_is_refused(content, sentence, tmp_path):
    (tmp_path / "grid.yaml").write_bytes(content)
    with pytest.raises(InputError, match=sentence):
        read_grid(tmp_path / "grid.yaml")


def test_a_variable_that_is_not_set_is_refused(tmp_path):
    grid = read_grid(write(tmp_path))
    with pytest.raises(InputError, match=r"command: the variable DATA_FOLDER of \$\{envvar:DATA_FOLDER\} is not set"):
        grid.command_line(grid.cells()[0], {})
