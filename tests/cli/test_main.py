import errno
import io
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from lit_layers.cli.command_line import COMMANDS
from lit_layers.cli.main import main
from lit_layers.cli.process import take_verbose
from tests.support.runs import make_run
from tests.support.undrawn import leave_undrawn


def test_help_names_every_command_and_the_version_is_the_packages(capsys):
    assert main(["--help"]) == main([]) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in COMMANDS)
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("lit-layers 0.")


@pytest.mark.slow
def test_the_installed_console_script_answers():
    script = Path(sys.executable).with_name("lit-layers")
    done = subprocess.run([script, "--help"], capture_output=True, text=True, check=True)
    assert "usage: lit-layers COMMAND" in done.stdout


def test_a_full_disk_is_one_sentence_although_the_error_names_no_file(monkeypatch, tmp_path, capsys):
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("lit_layers.cli.options.Recipe", full)
    assert main(["audit", str(tmp_path)]) == 2
    assert capsys.readouterr().err == "lit-layers audit: error: cannot write: no space left on device\n"
    monkeypatch.setattr("lit_layers.errors._FULL", ())
    with pytest.raises(OSError, match="No space left"):
        main(["audit", str(tmp_path)])


@pytest.fixture
def restore_logging():
    yield
    take_verbose([])
    logging.getLogger("lit_layers").handlers.clear()


def test_verbose_shows_the_traceback_of_a_refusal_at_any_position(restore_logging, tmp_path, capsys):
    none = str(tmp_path / "none")
    for words, is_traced in (
        (["-v", "audit", none], True),
        (["audit", none, "--verbose"], True),
        (["audit", none, "--steps=all"], False),
    ):
        assert main(words) == 2
        output = capsys.readouterr().err
        assert ("Traceback" in output) == is_traced, words
        assert output.splitlines()[-1].startswith("lit-layers audit: error: "), words


@pytest.mark.parametrize("buffering", [0, -1], ids=["unbuffered", "buffered"])
def test_a_command_whose_reader_has_closed_the_pipe_ends_quietly(buffering, tmp_path, monkeypatch, capsys):
    leave_undrawn(monkeypatch)
    run = make_run(tmp_path / "run", steps=(0, 1), layers=2)
    reader, writer = os.pipe()
    os.close(reader)
    with io.TextIOWrapper(os.fdopen(writer, "wb", buffering), write_through=not buffering) as printed:
        monkeypatch.setattr("sys.stdout", printed)
        code = main(["report", str(run)])
        monkeypatch.undo()
    assert (code, capsys.readouterr().err) == (141, "")


def test_a_failing_exit_function_of_wandb_prints_no_traceback():
    """W&B registers a function with `atexit`, which fails if its service has ended."""
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


def test_a_command_with_a_closed_stream_ends_normally():
    for closed in (">&-", "2>&-"):
        line = f"{sys.executable} -P -m lit_layers.cli.main --version {closed}"
        ended = subprocess.run(line, shell=True, capture_output=True, text=True)
        assert (ended.returncode, ended.stderr) == (0, ""), closed
