"""The notebooks of the documentation: what they show is what they give, and nothing in them is of one machine."""

import html
import importlib.util
import json
import math
import re
from pathlib import Path

import nbformat
import pytest

from tests.support.notebooks import FOLDER, PACKAGES, executed

NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
TOLERANCE = 0.05  # of other processors: hundreds of steps of training lie between
NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:e[+-]?\d+)?")


def outputs(notebook) -> list:
    return [output for cell in notebook.cells for output in cell.get("outputs", [])]


def tables(notebook) -> list[list[str]]:
    """The cells of each table, and each line of text, in order."""
    read = []
    for output in outputs(notebook):
        if "text" in output:
            read.append(output["text"].split("\n"))
        elif "<table" in (text := output["data"].get("text/html", "")):
            cells = re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", text, re.DOTALL)
            read.append([html.unescape(cell).strip() for cell in cells])
        else:
            read.append(output["data"].get("text/plain", "").split("\n"))
    return read


def alike(one: str, other: str) -> bool:
    """The same words, and numbers that are as near as tables of two machines are."""
    if NUMBER.sub("#", one) != NUMBER.sub("#", other):
        return False
    pairs = zip(NUMBER.findall(one), NUMBER.findall(other), strict=True)
    return all(math.isclose(float(a), float(b), rel_tol=TOLERANCE, abs_tol=TOLERANCE) for a, b in pairs)


def test_a_notebook_is_whole_small_and_of_no_machine():
    assert NOTEBOOKS
    for path in NOTEBOOKS:
        text = path.read_text(encoding="utf-8")
        notebook = nbformat.reads(text, as_version=4)
        nbformat.validate(notebook)
        code = [cell for cell in notebook.cells if cell.cell_type == "code"]
        assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1)), path
        assert code[-1].outputs, f"{path}: the last cell shows nothing"
        assert all(output.output_type != "error" for output in outputs(notebook)), path
        assert sum("<svg" in json.dumps(output) for output in outputs(notebook)) >= 1, path
        assert not re.findall(r"(?:/home|/root|/tmp|/work|/Users|/private|[A-Z]:\\\\)/?\w+", text), path
        assert len(text) < 500_000, path


@pytest.mark.nightly  # some twenty seconds of CPU each
@pytest.mark.parametrize(
    "path",
    [pytest.param(path, marks=pytest.mark.realmodel) if path.stem in PACKAGES else path for path in NOTEBOOKS],
    ids=lambda path: path.stem,
)
def test_a_notebook_gives_what_it_shows(path: Path, tmp_path):
    missing = [name for name in PACKAGES.get(path.stem, ()) if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"{', '.join(missing)} not installed: make real")
    shown = tables(nbformat.read(path, as_version=4))
    given = tables(executed(path, tmp_path / "empty"))
    assert len(given) == len(shown)
    unlike = [
        (a, b)
        for one, other in zip(shown, given, strict=True)
        for a, b in zip(one, other, strict=True)
        if not alike(a, b)
    ]
    assert not unlike
