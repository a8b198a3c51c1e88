"""The help that is replayed is the parsers' own, and no more is said than what is installed holds."""

import contextlib
import importlib.util
import subprocess
import sys
from importlib.machinery import ModuleSpec
from inspect import isabstract
from pathlib import Path

import pytest

from lit_layers import analyses
from lit_layers.analyses import Analysis
from lit_layers.cli import quick_help
from lit_layers.cli.main import main
from lit_layers.errors import InputError


def test_the_record_is_of_these_sources_and_versions():
    for verb in quick_help._OUTLINED:
        assert quick_help.recorded(verb) is not None, f"{verb}: run python -m tests.support.record_help"


@pytest.mark.soak  # ten seconds of CPU
def test_the_record_is_what_the_parsers_say_at_every_width():
    # Without garbage collection, which is a fifth of the time of its imports.
    code = "import gc, sys; gc.disable(); from tests.support import record_help; sys.exit(record_help.check() or None)"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, f"{done.stderr}: run python -m tests.support.record_help"


def test_help_and_an_unknown_option_import_nothing_heavy():
    code = "import sys; from lit_layers.cli.main import main\n"
    code += "for words in (['--help'], ['-h'], ['--root', 'x', '--trainer.max_step=3']): main(['fit', *words])\n"
    code += "main(['watch', '--help'])\n"
    code += "assert not {'torch', 'lightning', 'numpy'} & set(sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (
        done.stderr == "lit-layers fit: error: unknown option --trainer.max_step; did you mean --trainer.max_steps?\n"
    )
    assert (done.stdout.count("usage: lit-layers fit"), done.stdout.count("usage: lit-layers watch")) == (2, 1)
    assert done.stdout.count("--analyses, --analyses+ [ITEM,...]") == 3


def test_classes_are_listed_by_the_names_that_recipes_may_call_them_by(capsys):
    for verb in ("analyze", "fit", "watch"):
        assert main([verb, "--help"]) == 0
        words = " ".join(capsys.readouterr().out.split("--analyses+ [ITEM,...]")[1].split())
        listed = words.partition("(classes: ")[2].partition(")")[0].split(", ")
        kinds = {name: kind for name, kind in vars(analyses).items() if isinstance(kind, type)}
        assert {*listed} == {n for n, kind in kinds.items() if Analysis in kind.__mro__ and not isabstract(kind)}
        assert listed == sorted(listed)


@pytest.mark.parametrize("recorded", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_the_trainers_options_are_told_by_their_own_help_alone(recorded, monkeypatch, capsys):
    if not recorded:
        monkeypatch.setattr(quick_help, "recorded", lambda verb: None)
    helps = []
    for words in (["--help"], ["--help", "trainer"]):
        with contextlib.suppress(SystemExit):  # of the parser itself
            assert main(["fit", *words]) == 0
        helps.append(capsys.readouterr().out)
    own, trainers = helps
    assert "--root ROOT" in own
    assert "--trainer.max_steps" not in own
    assert "--help trainer: the options of Trainer, --trainer.OPTION" in own
    assert "--trainer.max_steps MAX_STEPS" in trainers
    assert "--root" not in trainers


@pytest.mark.parametrize(
    "changed",
    [
        lambda patch: patch.setattr(quick_help, "_options_of_trainer", lambda: "max_steps: int"),
        lambda patch: patch.setitem(quick_help._OUTLINED, "fit", ("cli/verbs/select.py",)),
        lambda patch: patch.setattr(quick_help, "_WHOLE", ()),
    ],
)
def test_what_was_recorded_from_other_sources_is_not_shown(changed, monkeypatch):
    assert quick_help.answer("fit", ["--help"]) is not None
    changed(monkeypatch)
    assert quick_help.answer("fit", ["--help"]) is None
    assert quick_help.answer("fit", ["--rot"]) is None


def test_other_versions_of_libraries_have_the_help_but_may_take_more_options(monkeypatch):
    monkeypatch.setattr(quick_help, "version", lambda name: "0")
    assert quick_help.answer("fit", ["--help"]) is not None
    assert quick_help.answer("fit", ["--rot"]) is None


def test_a_signature_of_the_trainer_is_read():
    options = quick_help._options_of_trainer()
    assert "max_steps: int = -1," in options
    assert "Customize every aspect of training" in options


def test_where_the_trainer_is_not_found_the_parser_speaks(tmp_path, monkeypatch):
    """As of a Lightning that has it in another file."""
    elsewhere = ModuleSpec("lightning", None, origin=str(tmp_path / "__init__.py"))
    for spec in (elsewhere, None):
        monkeypatch.setattr(importlib.util, "find_spec", lambda name, spec=spec: spec)
        assert quick_help.answer("fit", ["--help"]) is None
        assert quick_help.answer("watch", ["--help"]) is not None


def test_another_python_outlines_the_same():
    source = (
        'LIMIT: "int" = 3\nNAME = f"{LIMIT!r}"\nasync def f(a, *, b=None, **c): ...\nclass A(int):\n    """Words."""\n'
    )
    # Fields that 3.12 added and defaults that `ast.dump` leaves out since 3.13 are not told, where they are empty.
    assert quick_help._outline(source) == (
        "Module(body=[AnnAssign(target=Name(id='LIMIT', ctx=Store()), annotation=Constant(value='int'), "
        "value=Constant(value=3), simple=1), Assign(targets=[Name(id='NAME', ctx=Store())], "
        "value=JoinedStr(values=[FormattedValue(value=Name(id='LIMIT', ctx=Load()), conversion=114)])), "
        "AsyncFunctionDef(name='f', args=arguments(args=[arg(arg='a')], kwonlyargs=[arg(arg='b')], "
        "kw_defaults=[Constant()], kwarg=arg(arg='c')), body=[Expr(value=Constant(value=Ellipsis))]), "
        "ClassDef(name='A', bases=[Name(id='int', ctx=Load())], body=[Expr(value=Constant(value='Words.'))])])"
    )


def test_words_and_signatures_count_and_what_a_function_does_not():
    source = 'LIMIT = 3\ndef f(a: int = 1):\n    """Words."""\n    return a\n'
    outline = quick_help._outline(source)
    assert outline == quick_help._outline(source.replace("return a", "return a + 1"))
    for old, new in {"= 1": "= 2", "Words": "More words", "LIMIT = 3": "LIMIT = 4"}.items():
        assert outline != quick_help._outline(source.replace(old, new))


@pytest.mark.parametrize(
    "words",
    [
        "--root x --if-exists overwrite --analyses+=a --trainer.callbacks+=b --trainer.callbacks.dirpath c",
        "--model.width 3 --data a --wandb.project b --steps.every 3 --code c --trainer.devices 2 -- --nothing",
        "--model.help",
        "--nothing --help",
        "",
    ],
)
def test_options_that_may_be_right_are_left_to_the_parser(words):
    words = words.replace("-- --nothing", "--").split()
    assert quick_help.answer("fit", words) is None


@pytest.mark.parametrize("word", ["--rot", "--trainer.max_step", "--max_steps", "--foo.bar", "--trainer.max_steps+"])
def test_an_unknown_option_is_refused_in_the_parsers_words(word, capsys):
    with pytest.raises(InputError) as of_the_record:
        quick_help.answer("fit", [f"{word}=3", "--root=x"])
    assert str(of_the_record.value).startswith(f"unknown option {word}; ")
    assert main(["analyze", "x", word, "3"]) == 2
    assert f"unknown option {word}; " in capsys.readouterr().err
