"""Names of somebody else's choosing: what is written stays in the folder that was asked for."""

import logging
import sys
from pathlib import Path

import pytest
import yaml

from lit_layers import records
from lit_layers.cli.console import note, plainly
from lit_layers.cli.main import main
from lit_layers.cli.verbs.select import results_folder
from lit_layers.records import Measurement, Record
from tests.hostile.pages import hostile_run
from tests.support.labelled_texts import saved_gpt2
from tests.support.runs import make_run
from tests.support.undrawn import leave_undrawn

PATHS = ("../../escaped", "/escaped", "CON:|?*\\..\\escaped")
OTHERS = ("a\x00b", "..", "~/escaped", "line\nbreak", "x" * 400, "$\\frac$")


def files_of(folder: Path) -> set[Path]:
    return {path for path in folder.rglob("*") if path.is_file()}


@pytest.mark.filterwarnings("ignore:Glyph")  # that the font of pictures has not
@pytest.mark.parametrize("names", [PATHS, pytest.param(OTHERS, marks=pytest.mark.nightly)], ids=["paths", "others"])
def test_a_report_its_tables_and_its_pictures_stay_where_they_belong(names, tmp_path, capfd, monkeypatch):
    """The name of the run, of an analysis, a metric, a tag, and of a task."""
    for number, name in enumerate(names):
        if number or names is PATHS:  # one name's are drawn, in the long form: where they go is decided before
            leave_undrawn(monkeypatch)
        root = hostile_run(tmp_path / "deep" / "er" / str(number), name, analyses=("trajectory",))
        for step in (0, 8):  # enough for a heat map over steps and layers
            rows = [Record(metric="prompt_entropy", value=1.0 + layer, layer=layer) for layer in range(4)]
            drawn = Measurement(
                run=name, step=step, tokens=step, analysis=f"representation/{name}", records=rows, seconds=1.0
            )
            records.append(root / "measurements.jsonl", drawn)
        before = files_of(tmp_path)
        command = ["report", str(root), "--allow-suspect", "--export", str(root / "all.csv")]
        code = main([*command, "--pictures", str(root / "pictures")])
        errors = capfd.readouterr().err
        assert (code, "Traceback" in errors) == (0, False), (name, errors)
        written = files_of(tmp_path) - before
        assert {root / "report.html", root / "all.csv"} < written, name
        assert any(path.suffix == ".png" for path in written), name
        assert [path for path in written if not path.is_relative_to(root)] == [], name
    assert not Path("/escaped").exists()
    assert not Path("~/escaped").expanduser().exists()


def test_the_page_of_a_chosen_layer_is_no_path_of_the_tasks_choosing():
    for name in (*PATHS, *OTHERS):
        folder = results_folder("model", name)
        assert folder.parent == Path("selected"), name
        assert len(folder.name) < 200, name


def test_no_name_makes_a_terminal_do_anything(tmp_path, capsys, monkeypatch):
    """A title, a colour, a line of its own, letters that run backwards: in the words of the command line, in what was
    downloaded, in results and in refusals.
    """
    leave_undrawn(monkeypatch)
    name = "run\x1b]0;title\x07\x1b[31m\nlit-layers: all is well\u202e"
    written = r"run\x1b]0;title\x07\x1b[31m\nlit-layers: all is well\u202e"
    run = make_run(tmp_path / name, steps=(0, 1), analyses=("coupling",), layers=2)
    for words in (
        ["report", str(run)],
        ["report", str(run / "nothing")],
        ["audit", str(run), f"--json={run}"],
    ):
        main(words)
        said = "".join(capsys.readouterr())
        assert written in said, words
        assert not set(said) & set("\x1b\x07\u202e"), words
        assert not [line for line in said.splitlines() if line.startswith("lit-layers: all")], words
    series = tmp_path / "series\x1b[31m\x9b"
    for step in (0, 1):
        saved_gpt2(series / f"step-{step:09d}", n_layer=1)
    monkeypatch.chdir(series)
    main(["audit", "."])  # nobody typed its name
    said = "".join(capsys.readouterr())
    assert r"series\x1b[31m\x9b" in said
    assert not set(said) & set("\x1b\x9b")


def test_what_is_logged_and_noted_quotes_no_name_as_a_terminal_obeys_it(capsys):
    """Where Python's own handler prints what is logged, as in a command without -v, and on a line of its own."""
    name = "run\x1b]0;title\x07\nlit-layers: all is well\x9b"
    logger, capturing = logging.getLogger("lit_layers.hostile"), logging.getLogger().handlers[:]
    logging.getLogger().handlers.clear()  # of pytest
    try:
        with plainly(["report"], results=True):
            logger.warning("%s cannot be read", name)
            note(f"failed: {name}")
            assert logging.lastResort is not None
            assert logging.lastResort.formatter is not None
    finally:
        logging.getLogger().handlers[:] = capturing
    assert logging.lastResort.formatter is None, "what this process logs elsewhere is its own"
    written = r"run\x1b]0;title\x07\nlit-layers: all is well\x9b"
    assert capsys.readouterr().err.splitlines() == [f"{written} cannot be read", f"failed: {written}"]


def test_letters_of_every_script_are_printed_as_they_are(tmp_path, capsys, monkeypatch):
    """A wide blank, a joiner and its opposite, an emoji of two: who reads a path or a recipe from the output has that
    folder; a mark of direction is told in results alone.
    """
    leave_undrawn(monkeypatch)
    names = ("\u5b9f\u9a13\u30001", "\u0645\u062f\u0644\u200c\u0647\u0627", "a\xa0b", "\U0001f469\u200d\U0001f52c")
    for name in names:
        run = make_run(tmp_path / name, steps=(0, 1), analyses=("coupling",), layers=2)
        assert main(["report", str(run)]) == 0
        assert capsys.readouterr().out == f"{run / 'report.html'}\n"
    for name in (*names, "\u200f\u05d0"):
        for command in ("analyze", "fit"):
            with pytest.raises(SystemExit):
                main([command, *["quickstart/gpt2"] * (command == "fit"), f"--root={name}/run", "--print_config"])
            assert yaml.safe_load(capsys.readouterr().out)["root"] == f"{name}/run"


def test_results_are_printed_where_no_stream_is_open(tmp_path, monkeypatch):
    """As in a process without a console, or behind `>&-`."""
    leave_undrawn(monkeypatch)
    run = make_run(tmp_path / "run\x1b[31m", steps=(0, 1), analyses=("coupling",), layers=2)
    monkeypatch.setattr(sys, "stdout", None)
    monkeypatch.setattr(sys, "stderr", None)
    assert main(["report", str(run)]) == 0


def test_a_training_within_another_command_draws_itself_anew(capsys):
    """As a step of `reproduce`: its bars are what a terminal obeys, and results before and after it are not."""
    with plainly(["a\x1b"], results=True):
        stream = sys.stdout
        sys.stdout.write("\x1b[2K\n")
        with plainly(["b\x1b"], results=False):
            assert sys.stdout is stream  # of which W&B may have taken the `write`, to keep what is said
            sys.stdout.write("\x1b[2K a\x1b b\x1b\n")
        sys.stdout.write("\x1b[2K b\x1b\n")
    assert capsys.readouterr().out.splitlines() == [r"\x1b[2K", "\x1b[2K" + r" a\x1b b\x1b", r"\x1b[2K b\x1b"]
