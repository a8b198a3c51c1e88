"""Names chosen by an attacker: files are written only in the requested folder."""

import sys
from pathlib import Path

import pytest

from lit_layers import records
from lit_layers.cli.main import main
from lit_layers.cli.verbs.select import results_folder
from lit_layers.records import Measurement, Record
from tests.hostile.pages import hostile_run
from tests.support.runs import make_run
from tests.support.undrawn import leave_undrawn

PATHS = ("../../escaped", "/escaped", "CON:|?*\\..\\escaped")
OTHERS = ("a\x00b", "..", "~/escaped", "line\nbreak", "x" * 400, "$\\frac$")


def list_files(folder: Path) -> set[Path]:
    return {path for path in folder.rglob("*") if path.is_file()}


@pytest.mark.filterwarnings("ignore:Glyph")  # glyphs that the font of the pictures lacks
@pytest.mark.parametrize("names", [PATHS, pytest.param(OTHERS, marks=pytest.mark.nightly)], ids=["paths", "others"])
def test_reports_tables_and_pictures_stay_in_their_folder(names, tmp_path, capfd, monkeypatch):
    """The hostile name is used for the run, an analysis, a metric, a tag and a task."""
    for number, name in enumerate(names):
        if number or names is PATHS:  # draw pictures of one name only: their paths do not depend on it
            leave_undrawn(monkeypatch)
        root = hostile_run(tmp_path / "deep" / "er" / str(number), name, analyses=("trajectory",))
        for step in (0, 8):  # two steps are enough for a heat map over steps and layers
            rows = [Record(metric="prompt_entropy", value=1.0 + layer, layer=layer) for layer in range(4)]
            facts = {"run": name, "step": step, "tokens": step, "analysis": f"representation/{name}", "seconds": 1.0}
            records.append(root / "measurements.jsonl", Measurement(records=rows, **facts))
        before = list_files(tmp_path)
        command = ["report", str(root), "--allow_suspect", "--export", str(root / "all.csv")]
        code = main([*command, "--pictures", str(root / "pictures")])
        errors = capfd.readouterr().err
        assert (code, "Traceback" in errors) == (0, False), (name, errors)
        written = list_files(tmp_path) - before
        assert {root / "report.html", root / "all.csv"} < written, name
        assert any(path.suffix == ".png" for path in written), name
        assert [path for path in written if not path.is_relative_to(root)] == [], name
    assert not Path("/escaped").exists()
    assert not Path("~/escaped").expanduser().exists()


def test_the_folder_of_a_selected_layer_cannot_be_chosen_by_a_task_name():
    for name in (*PATHS, *OTHERS):
        folder = results_folder("model", name)
        assert folder.parent == Path("selected"), name
        assert len(folder.name) < 200, name


def test_commands_run_without_standard_output_and_standard_error(tmp_path, monkeypatch):
    """A process without a console has no streams, nor has one started with `>&-`."""
    leave_undrawn(monkeypatch)
    run = make_run(tmp_path / "run", steps=(0, 1), analyses=("coupling",), layers=2)
    monkeypatch.setattr(sys, "stdout", None)
    monkeypatch.setattr(sys, "stderr", None)
    assert main(["report", str(run)]) == 0
