"""One option system for every command: options come from signatures, recipes and command lines."""

import contextlib
import re
from dataclasses import fields
from importlib import import_module
from pathlib import Path

import yaml

from lit_layers import analyses
from lit_layers.analyses import Analysis
from lit_layers.cli.command_line import COMMANDS
from lit_layers.cli.main import main
from lit_layers.cli.measuring import Checkpoints
from lit_layers.cli.options import Recipe, arguments, parser_of


def function_of(verb: str):
    return getattr(import_module(f"lit_layers.cli.verbs.{verb}"), verb)


def test_every_option_has_one_spelling_and_a_line_of_help():
    for verb in COMMANDS:
        parser = parser_of(function_of(verb))
        for action in parser._actions:
            assert len(action.help.split()) >= 2, (verb, action)
        names = re.findall(r"^  (?:-\w, )?--([\w.]+)", parser.format_help(), re.MULTILINE)
        assert len({*names}) == len(names), verb
        assert {"help", "print_config", "verbose"} <= {*names}, verb


def help_text(capsys, *words: str) -> str:
    with contextlib.suppress(SystemExit):  # the parser exits after the help
        assert main([*words]) == 0
    return capsys.readouterr().out


def test_help_lists_classes_by_the_names_that_recipes_use(capsys):
    kinds = {name: kind for name, kind in vars(analyses).items() if isinstance(kind, type)}
    for verb in ("analyze", "fit"):
        listed = re.findall(r"lit_layers\.analyses\.\w+", help_text(capsys, verb, "--help"))
        names = {f"lit_layers.analyses.{name}" for name, kind in kinds.items() if Analysis in kind.__mro__[1:]}
        assert {*listed} >= names, verb
    for words, expected in (
        ("fit --help", ["  --root ROOT", "  --trainer.max_steps MAX_STEPS"]),
        ("analyze --help", ["--series SERIES", "HubRevisions", "Models"]),
        ("analyze --series.help=HubRevisions", ["--series.repo REPO", "--series.steps STEPS"]),
    ):
        output = help_text(capsys, *words.split())
        assert [word for word in expected if word not in output] == [], words


EQUIVALENT: dict[str, tuple[dict[str, object], str]] = {
    "audit": ({"series": "run", "steps": [0, 1], "grammar": "step"}, "run --steps [0,1] --grammar step"),
    "report": (
        {"runs": ["run"], "allow_suspect": True, "settings": ["a", "b"], "root": "run/x.html"},
        "run --allow_suspect --settings a,b --root=run/x.html",
    ),
    "analyze": (
        {"model": "m", "steps": {"every": 2}, "keep_downloads": False, "root": "r", "corpus": "python"},
        "m --steps {every: 2} --keep_downloads false --root r --corpus python",
    ),
    "intervene": (
        {"model": "m", "variants": ["skip"], "schedule": ["1 2", "2 1"], "middles": [1], "speed": True},
        "m --variants skip --schedule ['1_2','2_1'] --middles 1 --speed",
    ),
}


def test_a_recipe_and_a_command_line_give_the_same_options(tmp_path: Path):
    for verb, (recipe, words) in EQUIVALENT.items():
        file, function = tmp_path / "recipe.yaml", function_of(verb)
        line = [word.replace("_", " ") if word[0] == "[" else word for word in re.findall(r"\{.*?\}|\S+", words)]
        file.write_text(yaml.safe_dump(recipe))
        recipe_options, line_options = (vars(Recipe(function, argv).read()) for argv in (["--config", str(file)], line))
        recipe_options["recipe"] = line_options["recipe"] = None
        assert arguments(function, recipe_options) == arguments(function, line_options), verb


def test_every_command_that_measures_checkpoints_takes_the_same_options(tmp_path: Path):
    given: dict[str, object] = {"offload": str(tmp_path / "scratch"), "root": str(tmp_path), "device": "cpu"}
    given |= {"allow_suspect": True, "dtype": "float64", "engine": "ray", "keep_downloads": False, "shard": "0/2"}
    given |= {"steps": [1], "revision": "r", "submodule": "s", "untrained": 7, "plan": True}
    assert given.keys() == {field.name for field in fields(Checkpoints)}
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(yaml.safe_dump(given))
    words = [f"--{name}" if value is True else f"--{name}={value}" for name, value in given.items()]
    expected = Checkpoints(**given | {"root": tmp_path, "offload": tmp_path / "scratch"})
    for verb in ("analyze", "intervene", "mteb"):
        for line in (["--config", str(recipe)], words):
            read = Recipe(function_of(verb), ["m", *line])
            assert Checkpoints(**arguments(Checkpoints, vars(read.options))) == expected, (verb, line)


def test_a_tilde_that_the_shell_does_not_expand_is_expanded(tmp_path: Path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert Recipe(function_of("report"), ["run", "--root=~/page.html"]).read().root == tmp_path / "page.html"


def test_a_separator_is_read_as_text_and_not_as_yaml():
    words = ["--source", "x", "--tokenizer", "y", "--root", "z"]
    for separator in ("---", "~", "Null", ""):
        assert Recipe(function_of("prepare"), [*words, f"--separator={separator}"]).read().separator == separator
