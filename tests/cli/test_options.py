"""Every verb: one option system, whose options come from signatures, recipes and command lines."""

import re
from dataclasses import fields
from importlib import import_module
from pathlib import Path

import pytest
import yaml

from lit_layers.cli.command_line import COMMANDS
from lit_layers.cli.main import main
from lit_layers.cli.measuring import Checkpoints
from lit_layers.cli.options import Recipe, arguments, parser_of

# Of each class of options one that is wrong, with what is said of it.
WRONG = {
    "audit": {
        "steps: {every: often}": (
            "steps: expected one of list[int], dict[str, int | list[int]], str, got {'every': 'often'}"
        ),
        "json: [a]": "json: expected one of Path, NoneType, got ['a']",
        "gramar: step": "unknown key gramar in the recipe; did you mean grammar?",
        "grammar: '${nothing}'": "config: Interpolation key 'nothing' not found full_key: grammar",
        "grammar: '${oc.env:WANDB_API_KEY}'": "config: InputError raised while resolving interpolation: a recipe",
        "series: {class_path: subprocess.Popen, init_args: {args: id}}": "series: Expected a str. Got value: {'class",
        "- series": "expected a recipe of KEY: VALUE lines, got - series",
        "": "expected a recipe of KEY: VALUE lines, got",
        "series: [": "Problems parsing config",
    },
    "report": {
        "wandb: maybe": "wandb: expected true or false, got 'maybe'",
        "settings: {a: b}": "settings: expected one of Names, NoneType, got {'a': 'b'}",
    },
    "prepare": {
        "validation: much": "validation: expected one of float, NoneType, got much",
    },
    "select": {
        "rule: luck": "rule: Expected a typing.Literal['within_tolerance', 'fraction_of_last', 'plateau', 'knee'",
        "pooling: max": "pooling: expected one of typing.Literal['last', 'mean', 'cls'], NoneType, got max",
        "tolerance: [1]": "tolerance: Expected a float. Got value: [1]",
    },
    "correlate": {
        "given: ''": "given: expected one of Names, NoneType, got",
        "layer: first": "layer: expected one of int, typing.Literal['last'], NoneType, got first",
    },
    "analyze": {
        "analyses: 3": "analyses: Expected a list. Got value: 3",
        "analyses: Lens": "analyses: Expected a list. Got value: Lens",
        "analyses: [{class_path: lit_layers.analyses.Trajectory, init_args: {batches: 3}}]": "analyses: batches: "
        "Not a valid subclass of Batches. Got value: 3 Subclass types expect one of: - a class path (str)",
        "dtype: int8": "dtype: Expected a typing.Literal['float32', 'float64', 'bfloat16']. Got value: int8",
        "keep_downloads: maybe": "keep_downloads: Expected a bool. Got value: maybe",
    },
    "mteb": {
        "layers: first": "layers: expected one of Numbers, typing.Literal['all'], got first",
        "layers: [-1]": "layers: expected one of Numbers, typing.Literal['all'], got [-1]",
    },
    "intervene": {
        "tasks: [evil.yaml]": "tasks: a recipe names no task file, which is code, got evil.yaml: say --tasks evil.yaml",
        "schedule: {a: b}": "schedule: expected one of list[str], str, NoneType, got {'a': 'b'}",
        "loops: [0]": "loops: expected at least 1, got 0",
        "loops: []": "loops: expected one of Numbers, NoneType, got []",
    },
}
GIVEN = {"audit": ["x"], "report": ["x"], "prepare": ["--source=x", "--tokenizer=x", "--root=x"]}
GIVEN |= {
    "analyze": ["x"],
    "mteb": ["x"],
    "intervene": ["x"],
    "select": ["x"],
    "correlate": [],
}


def function_of(verb: str):
    return getattr(import_module(f"lit_layers.cli.verbs.{verb}"), verb)


@pytest.mark.parametrize("verb", COMMANDS)
def test_every_option_has_a_line_of_help(verb, capsys):
    parser = parser_of(function_of(verb))
    for action in parser._actions:
        assert len(action.help.split()) >= 2, action


@pytest.mark.parametrize(
    ("verb", "recipe", "words"),
    [
        (
            "audit",
            {"series": "run", "steps": [0, 1], "grammar": "step"},
            "run --steps [0,1] --grammar step",
        ),
        (
            "report",
            {"runs": ["run"], "allow_suspect": True, "settings": ["a", "b"], "root": "run/x.html"},
            "run --allow_suspect --settings a,b --root=run/x.html",
        ),
        (
            "prepare",
            {"source": "python", "tokenizer": "gpt2", "root": "x", "max_documents": 3, "validation": 0.5},
            "--source python --tokenizer gpt2 --root x --max_documents 3 --validation 0.5",
        ),
        (
            "select",
            {"model": "m", "task": "a.csv", "regression": True, "rule": "knee", "tolerance": 2, "root": "x"},
            "m --task a.csv --regression --rule knee --tolerance 2.0 --root x",
        ),
        (
            "correlate",
            {"models": ["a", "b"], "metric": "c/c", "given": ["width", "depth"], "layer": 3, "score": "s"},
            "a b --metric c/c --given width,depth --layer 3 --score s",
        ),
        (
            "analyze",
            {"model": "m", "steps": {"every": 2}, "keep_downloads": False, "root": "r", "corpus": "python"},
            "m --steps {every: 2} --keep_downloads false --root r --corpus python",
        ),
        (
            "mteb",
            {"model": "m", "tasks": ["a", "b"], "layers": [0, 3], "allow_suspect": True},
            "m --tasks a,b --layers 0,3 --allow_suspect",
        ),
        (
            "intervene",
            {"model": "m", "variants": ["skip"], "schedule": ["1 2", "2 1"], "middles": [1], "speed": True},
            "m --variants skip --schedule ['1_2','2_1'] --middles 1 --speed",
        ),
    ],
)
def test_a_recipe_says_what_a_command_line_says(verb, recipe, words, tmp_path: Path):
    file, function = tmp_path / "recipe.yaml", function_of(verb)
    spoken = [word.replace("_", " ") if word[0] == "[" else word for word in re.findall(r"\{.*?\}|\S+", words)]
    file.write_text(yaml.safe_dump(recipe))
    of_recipe, of_words = (vars(Recipe(function, argv).read()) for argv in (["--config", str(file)], spoken))
    of_recipe["recipe"] = of_words["recipe"] = None
    assert arguments(function, of_recipe) == arguments(function, of_words)


@pytest.mark.parametrize("verb", ["analyze", "intervene", "mteb"])
def test_whatever_measures_checkpoints_takes_the_same_options(verb, tmp_path: Path):
    given: dict[str, object] = {
        "allow_suspect": True,
        "offload": str(tmp_path / "scratch"),
        "root": str(tmp_path),
        "device": "cpu",
    }
    given |= {"dtype": "float64", "engine": "ray"}
    given |= {"keep_downloads": False, "shard": "0/2"}
    given |= {"steps": [1], "revision": "r", "submodule": "s", "untrained": 7, "plan": True}
    assert given.keys() == {field.name for field in fields(Checkpoints)}
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(yaml.safe_dump(given))
    words = [f"--{name}" if value is True else f"--{name}={value}" for name, value in given.items()]
    for line in (["--config", str(recipe)], words):
        read = Recipe(function_of(verb), ["m", *line])
        expected = Checkpoints(**given | {"root": tmp_path, "offload": tmp_path / "scratch"})
        assert Checkpoints(**arguments(Checkpoints, vars(read.options))) == expected


def test_a_wrong_value_is_one_sentence(tmp_path: Path, capsys):
    for verb, cases in WRONG.items():
        for text, sentence in cases.items():
            file = tmp_path / "recipe.yaml"
            file.write_text(text)
            assert main([verb, *GIVEN[verb], "--config", str(file)]) == 2, text
            said = capsys.readouterr().err
            assert said.startswith(f"lit-layers {verb}: error: {sentence}"), said
            assert said.count("\n") == 1


def test_the_home_that_a_shell_leaves_unwritten_is_written_out(tmp_path: Path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert Recipe(function_of("report"), ["run", "--root=~/page.html"]).read().root == tmp_path / "page.html"


def test_code_is_what_the_command_line_says_and_no_recipe_adds_to_it(tmp_path: Path, capsys):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("code: [evil]")
    for words in (["--config", str(recipe), "--code", "json"], ["--code=json", "--config", str(recipe)]):
        assert main(["analyze", "model", *words]) == 2
        assert "unknown key code in the recipe" in capsys.readouterr().err
    itself = tmp_path / "evil.yaml"
    itself.write_text(f"tasks: [{itself}]")
    assert main(["intervene", "m", "--config", str(itself)]) == 2
    assert "tasks: a recipe names no task file, which is code" in capsys.readouterr().err


def test_a_separator_is_a_word_as_it_stands():
    words = ["--source", "x", "--tokenizer", "y", "--root", "z"]
    for separator in ("---", "~", "Null", ""):
        assert Recipe(function_of("prepare"), [*words, f"--separator={separator}"]).read().separator == separator
