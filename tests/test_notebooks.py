"""The notebooks give the outputs they show, which depend on no machine."""

import importlib.util
import re
from pathlib import Path

import nbformat
import pytest

from tests.support.notebooks import FOLDER, PACKAGES, executed

NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))


def outputs(notebook) -> list:
    return [output for cell in notebook.cells for output in cell.get("outputs", [])]


def words(notebook) -> list[str]:
    """Return the text of each output without its numbers, which differ by processor."""
    texts = [
        output["text"] if "text" in output else output["data"].get("text/plain", "") for output in outputs(notebook)
    ]
    return [re.sub(r"-?\d+(?:\.\d+)?(?:e[+-]?\d+)?|\s+", "#", text) for text in texts]


@pytest.mark.nightly  # some twenty seconds of CPU each
@pytest.mark.parametrize(
    "path",
    [pytest.param(path, marks=pytest.mark.realmodel) if path.stem in PACKAGES else path for path in NOTEBOOKS],
    ids=lambda path: path.stem,
)
def test_running_a_notebook_gives_the_outputs_it_shows(path: Path, tmp_path):
    missing = [name for name in PACKAGES.get(path.stem, ()) if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"{', '.join(missing)} not installed: make real")
    shown = nbformat.read(path, as_version=4)
    assert words(executed(path, tmp_path / "empty")) == words(shown)
