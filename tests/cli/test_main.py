import contextlib
import errno
import logging
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from lit_layers.cli.command_line import COMMANDS
from lit_layers.cli.console import verbosity, without_verbosity
from lit_layers.cli.main import main


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


def test_what_a_sentence_quotes_is_cut_and_its_control_characters_are_written_out(tmp_path, capsys):
    table = tmp_path / "models.csv"
    table.write_text("model,x\na,1\nb,2\nc,3\n")
    escapes = ("\x1b" * 3000, r"\x1b" * 20)
    for word, quoted in (("a\n\x1b[2J\u2028é b", r"a\n\x1b[2J\u2028é b"), ("x" * 3_000_000, "x" * 97), escapes):
        for argv in (["audit", word], ["correlate", str(table), "--metric=x", "--score", word], [word]):
            assert main(argv) == 2
            said = capsys.readouterr().err
            assert "error: " in said
            assert said.count("\n") == 1
            assert len(said) < 1200
            assert quoted in said


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

    def broken(*_: object, **__: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr("lit_layers.cli.threads.settle", full)
    assert main(["audit", str(tmp_path)]) == 2
    assert capsys.readouterr().err == "lit-layers audit: error: cannot write: no space left on device\n"
    monkeypatch.setattr("lit_layers.cli.threads.settle", broken)
    assert main(["audit", str(tmp_path)]) == 2
    assert capsys.readouterr().err == "lit-layers audit: error: cannot read or write: input/output error\n"
    monkeypatch.setattr("lit_layers.cli.threads.settle", full)
    monkeypatch.setattr("lit_layers.errors._FULL", ())
    with pytest.raises(OSError, match="No space left"):
        main(["audit", str(tmp_path)])


@pytest.fixture
def logs_as_before():
    yield
    without_verbosity([])
    logging.getLogger("lit_layers").handlers.clear()


@pytest.mark.parametrize(
    ("words", "left", "level"),
    [
        (["-q", "audit", "x"], ["audit", "x"], -1),
        (["audit", "x", "--verbose"], ["audit", "x"], 1),
        (["audit", "--", "-q"], ["audit", "--", "-q"], 0),
    ],
)
def test_quiet_and_verbose_are_taken_wherever_they_stand_before_a_double_dash(words, left, level, logs_as_before):
    assert without_verbosity(words) == left
    assert verbosity() == level


def test_quiet_and_verbose_together_are_refused(logs_as_before, capsys):
    assert main(["audit", "-q", "x", "--verbose"]) == 2
    assert capsys.readouterr().err == "lit-layers: error: -q and -v: one of them, expected either quiet or verbose\n"


@pytest.mark.parametrize(("option", "is_traced"), [("-v", True), ("-q", False)])
def test_verbose_tells_where_a_refusal_comes_from_and_quiet_does_not(option, is_traced, tmp_path):
    command = [sys.executable, "-P", "-m", "lit_layers.cli.main", "audit", str(tmp_path / "none"), option]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.returncode == 2
    assert ("Traceback" in ended.stderr) == is_traced
    assert ended.stderr.splitlines()[-1].startswith("lit-layers audit: error: ")


ENDING = """
import atexit, sys, time
from concurrent.futures import ThreadPoolExecutor
from lit_layers.cli.stopping import end_process

{before}
ThreadPoolExecutor(1).submit(lambda: (time.sleep(0.2), print("thread")))
atexit.register(print, "registered")
print("printed", end=" ")
end_process(3)
print("Python ends it")
"""


@pytest.mark.parametrize(
    ("before", "ends_at_once"),
    [("", True), ("sys.setprofile(lambda *_: None)", False), ("sys.settrace(lambda *_: None)", False)],
)
def test_a_command_ends_after_its_threads_and_what_is_registered_and_not_under_a_profiler(before, ends_at_once):
    ended = subprocess.run([sys.executable, "-c", ENDING.format(before=before)], capture_output=True, text=True)
    at_once, by_python = "printed thread\nregistered\n", "printed Python ends it\nthread\nregistered\n"
    assert (ended.stdout, ended.returncode) == ((at_once, 3) if ends_at_once else (by_python, 0))
    assert ended.stderr == ""


def test_a_second_ctrl_c_as_a_command_ends_is_no_traceback():
    """The first one has been told; what had been printed by then is there."""
    waits = "atexit.register(lambda: (print('ending', flush=True), time.sleep(600)))"
    command = [sys.executable, "-c", ENDING.format(before=waits)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as ending:
        said = [ending.stdout.readline() for _ in range(3)]
        ending.send_signal(signal.SIGINT)
        assert (ending.wait(), ending.stderr.read()) == (-signal.SIGINT, "")
    assert said == ["printed thread\n", "registered\n", "ending\n"]


def test_what_code_of_ones_own_left_in_an_open_file_is_written(tmp_path):
    """Python does so as it takes everything apart; the process is ended before."""
    left_open = "left = open('log.csv', 'w'); left.write('step 1'); raw = open('log.bin', 'wb'); raw.write(b'step 1')"
    ended = subprocess.run([sys.executable, "-c", ENDING.format(before=left_open)], cwd=tmp_path)
    assert ended.returncode == 3
    assert [path.read_text() for path in (tmp_path / "log.csv", tmp_path / "log.bin")] == ["step 1"] * 2


@pytest.mark.skipif(sys.platform == "win32", reason="needs a shell of POSIX")
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
    assert {"-q, --quiet", "-v, --verbose"} <= {line.strip().partition("  ")[0] for line in help.splitlines()}
