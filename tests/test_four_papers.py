"""The tables of the study of four papers follow from its measurements."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "studies" / "four_papers.md"
NUMBER = re.compile(r"-?\d[\d,]*\.?\d*(?:e[-+]\d+)?")

PRINTED = re.compile(r"(?:^\|.*\n)+", re.MULTILINE)


def cells(table: str) -> list[list[str]]:
    """Return the cells of a printed table, beginning with the header."""
    head, _, *rows = ([cell.strip() for cell in line[1:-1].split("|")] for line in table.splitlines())
    return [head, *rows]


def written(name: str) -> str:
    """Return a table as it stands on the page."""
    return PAGE.read_text(encoding="utf-8").split(f"<!-- table: {name} -->\n")[1].split("<!-- end of table -->")[0]


def numbers(text: str) -> list[float]:
    return [float(number.replace(",", "")) for number in NUMBER.findall(text)]


def assert_same_tables(again: str, page: str) -> None:
    """Compare the numbers with a tolerance: another CPU may round a last digit differently."""
    words = [NUMBER.sub("#", text).replace("p < #", "p #") for text in (again, page)]  # around p = 0.001
    assert words[0] == words[1]
    assert numbers(again) == pytest.approx(numbers(page), rel=0.05, abs=0.02)


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_the_pages_tables_are_drawn_from_its_measurements(monkeypatch):
    monkeypatch.syspath_prepend(str(PAGE.parent))
    import four_papers as study
    import mechanism

    tables = study.tables_of(study.curves_by_group(study.unpack(study.DATA)))
    tables |= mechanism.mechanism_tables(*study.mechanism_of(study.MECHANISM_DATA))
    for script, names in (
        ("forecasts", ["forecasts"]),
        ("block_prediction", ["blocks", "blocks given depth", "over training"]),
        ("lead_lags", ["lead lags"]),
    ):
        command = [sys.executable, str(PAGE.with_name(f"{script}.py"))]
        printed = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT).stdout
        tables |= dict(zip(names, map(cells, PRINTED.findall(printed)), strict=True))
    on_page = re.findall(r"<!-- table: ([\w ]+) -->", PAGE.read_text(encoding="utf-8"))
    assert {"when", "blocks", "mechanism"} <= {*on_page} <= tables.keys()
    for name in on_page:
        again = study.shown(name, written(name), tables[name])
        assert_same_tables(study.markdown_table(again), written(name))
