import contextlib
import errno
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from lit_layers.cli.command_line import COMMANDS
from lit_layers.cli.main import main
from lit_layers.cli.process import without_verbose
from tests.support.runs import make_run


def test_help_names_every_command(capsys):
    assert main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in COMMANDS)
    assert main([]) == 0


def test_a_misspelt_command_is_answered_with_the_nearest(capsys):
    assert main(["fti"]) == 2
    assert capsys.readouterr().err == "lit-layers: error: unknown command 'fti'; did you mean fit?\n"


def test_a_strange_command_is_answered_with_all(capsys):
    assert main(["xyz"]) == 2
    assert f"expected one of {', '.join(sorted(COMMANDS))}" in capsys.readouterr().err


def test_a_refusal_is_one_line_whatever_it_quotes(capsys):
    assert main(["audit", "a\nb"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_the_version_is_the_packages(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("lit-layers 0.")


@pytest.mark.slow
def test_the_installed_console_script_answers():
    script = Path(sys.executable).with_name("lit-layers")
    done = subprocess.run([script, "--help"], capture_output=True, text=True, check=True)
    assert "usage: lit-layers COMMAND" in done.stdout


def test_a_full_disk_is_a_sentence_though_the_error_names_no_file(monkeypatch, tmp_path, capsys):
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("lit_layers.cli.options.Recipe", full)
    assert main(["audit", str(tmp_path)]) == 2
    assert capsys.readouterr().err == "lit-layers audit: error: cannot write: no space left on device\n"
    monkeypatch.setattr("lit_layers.errors._FULL", ())
    with pytest.raises(OSError, match="No space left"):
        main(["audit", str(tmp_path)])


@pytest.fixture
def logs_as_before():
    yield
    without_verbose([])
    logging.getLogger("lit_layers").handlers.clear()


@pytest.mark.parametrize("words", [["-v", "audit", "x"], ["audit", "x", "--verbose"]])
def test_verbose_is_taken_wherever_it_stands(words, logs_as_before):
    assert without_verbose(words) == ["audit", "x"]
    assert logging.getLogger("lit_layers").level == logging.DEBUG


@pytest.mark.parametrize(("option", "is_traced"), [("-v", True), ("--steps=all", False)])
def test_verbose_tells_where_a_refusal_comes_from(option, is_traced, tmp_path):
    command = [sys.executable, "-P", "-m", "lit_layers.cli.main", "audit", str(tmp_path / "none"), option]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.returncode == 2
    assert ("Traceback" in ended.stderr) == is_traced
    assert ended.stderr.splitlines()[-1].startswith("lit-layers audit: error: ")


@pytest.mark.parametrize("unbuffered", ["1", ""])
def test_a_command_whose_reader_has_gone_ends_quietly(unbuffered, tmp_path):
    make_run(tmp_path / "run", steps=(0, 1), layers=2)
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-P", "-m", "lit_layers.cli.main", "report", "run"]
    environment = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    ended = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, cwd=tmp_path, env=environment)
    os.close(writer)
    assert (ended.returncode, ended.stderr) == (141, b"")


def test_what_a_lost_wandb_does_as_python_ends_is_no_traceback():
    """It registers a function for the end, which fails where its service has died."""
    lines = [
        "import atexit, sys, types",
        "from lit_layers.cli import main",
        "main.main = lambda: 3",
        "sys.modules['lit_layers.report.wandb_mirror'] = types.SimpleNamespace(abandoned=[None])",
        "atexit.register(lambda: 1 / 0)",
        "main.run_and_end()",
    ]
    ended = subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True)
    assert (ended.stderr, ended.returncode) == ("", 3)


@pytest.mark.parametrize("closed", [">&-", "2>&-"])
def test_a_command_whose_stream_is_closed_ends_as_it_would(closed):
    line = f"{sys.executable} -P -m lit_layers.cli.main --version {closed}"
    ended = subprocess.run(line, shell=True, capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (0, "")


@pytest.mark.parametrize("verb", sorted(COMMANDS))
def test_the_help_of_every_command_has_them(verb, capsys):
    with contextlib.suppress(SystemExit):
        main([verb, "--help"])
    help = capsys.readouterr().out
    assert "-v, --verbose" in {line.strip().partition("  ")[0] for line in help.splitlines()}
