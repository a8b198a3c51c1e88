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
    words = " ".join(help_of(capsys, verb, "--help").split("--analyses [ITEM,...]")[1].split())
    listed = words.partition("(classes: ")[2].partition(")")[0].split(", ")
    kinds = {name: kind for name, kind in vars(analyses).items() if isinstance(kind, type)}
    assert {*listed} >= {n for n, kind in kinds.items() if Analysis in kind.__mro__[1:]}
    assert listed == sorted(listed)


def test_the_trainers_options_are_told_by_their_own_help_alone(capsys):
    own, trainers = help_of(capsys, "fit", "--help"), help_of(capsys, "fit", "--help", "trainer")
    assert "--root ROOT" in own
    assert "--trainer.max_steps" not in own
    assert "--help trainer: the options of Trainer, --trainer.OPTION" in own
    assert "--trainer.max_steps MAX_STEPS" in trainers
    assert "--root" not in trainers


@pytest.mark.parametrize(
    ("word", "near"), [("--rot", "--root"), ("--trainer.max_step", "--trainer.max_steps"), ("--foo.bar", "")]
)
def test_an_unknown_option_is_refused_with_the_nearest(word, near, capsys):
    assert main(["fit", f"{word}=3", "--root=x"]) == 2
    assert f"unknown option {word}; {f'did you mean {near}?' if near else ''}" in capsys.readouterr().err


@pytest.mark.parametrize("verb", sorted(COMMANDS))
def test_each_option_has_one_spelling(verb):
    shown = parser_of(getattr(importlib.import_module(f"lit_layers.cli.verbs.{verb}"), verb)).format_help()
    names = re.findall(r"^  (?:-\w, )?--([\w.]+)", shown, re.MULTILINE)
    assert len({*names}) == len(names)
    assert {"help", "print_config", "quiet", "verbose"} <= {*names}


def test_the_usage_names_what_a_command_needs(capsys):
    usage = "usage: lit-layers prepare --source SOURCE --tokenizer TOKENIZER --root ROOT [options]"
    assert " ".join(help_of(capsys, "prepare", "--help").split()).startswith(usage)
    assert help_of(capsys, "audit", "--help").startswith("usage: lit-layers audit series [options]")
