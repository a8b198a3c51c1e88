"""What `--help` of a verb shows."""

import contextlib
import importlib
import re

import pytest

from lit_layers import analyses
from lit_layers.analyses import Analysis
from lit_layers.cli.command_line import COMMANDS
from lit_layers.cli.main import main
from lit_layers.cli.options import parser_of


def help_of(capsys, *words):
    with contextlib.suppress(SystemExit):  # of the parser
        main([*words])
    return capsys.readouterr().out


@pytest.mark.parametrize("verb", ["analyze", "fit"])
def test_classes_are_listed_by_the_names_that_recipes_may_call_them_by(verb, capsys):
    listed = re.findall(r"lit_layers\.analyses\.\w+", help_of(capsys, verb, "--help"))
    kinds = {name: kind for name, kind in vars(analyses).items() if isinstance(kind, type)}
    assert {*listed} >= {f"lit_layers.analyses.{n}" for n, kind in kinds.items() if Analysis in kind.__mro__[1:]}


def test_the_help_of_fit_has_its_own_options_and_the_trainers(capsys):
    shown = help_of(capsys, "fit", "--help")
    assert all(f"  --{option}" in shown for option in ("root ROOT", "trainer.max_steps MAX_STEPS"))


@pytest.mark.parametrize(
    ("word", "near"), [("--rot", "--root"), ("--trainer.max_step", "--trainer.max_steps"), ("--foo.bar", "")]
)
def test_an_unknown_option_is_refused_with_the_nearest(word, near, capsys):
    assert main(["fit", f"{word}=3", "--root=x"]) == 2
    hint = f"did you mean {near}?" if near else "see `lit-layers fit --help`"
    assert f"unknown option {word}; {hint}" in capsys.readouterr().err


@pytest.mark.parametrize("verb", sorted(COMMANDS))
def test_each_option_has_one_spelling(verb):
    shown = parser_of(getattr(importlib.import_module(f"lit_layers.cli.verbs.{verb}"), verb)).format_help()
    names = re.findall(r"^  (?:-\w, )?--([\w.]+)", shown, re.MULTILINE)
    assert len({*names}) == len(names)
    assert {"help", "print_config", "verbose"} <= {*names}
