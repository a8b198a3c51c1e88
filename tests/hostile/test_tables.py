"""Cells of somebody else's choosing: a spreadsheet that opens our tables runs none of them."""

import csv
import re
from pathlib import Path

import pandas as pd

from lit_layers import records
from lit_layers.cli.main import main
from tests.hostile.pages import hostile_run

FORMULAS = (
    '=HYPERLINK("http://x","y")',
    "=cmd|' /C calc'!A0",
    "+1+cmd|' /C calc'!A0",
    "-2+3+cmd|' /C calc'!A0",
    "@SUM(1+1)*cmd|' /C calc'!A0",
    "\t=1+1",
    "\r=1+1",
    "=",
    "-",
    "+inf",
    "-1e5x",
    "-1\n=1",
)
BREAKS = ("x\r=1+1", "x\r\n=1+1", "x,\r=1+1,", "x\r")  # carriage returns end a row where they are not quoted
PLAIN = ("lr=-0.1", "a-b", " =", "1-2", "'=x", "", "-0.5", "+3", "-1e-5", ".5", "-12", "x\n=1")


def test_formulas_are_text_in_every_cell_and_header_and_numbers_stay_numbers(tmp_path):
    cells = [*FORMULAS, *BREAKS, *PLAIN]
    frame = pd.DataFrame({"text": cells, "=header()": [-1.5] * len(cells), "mixed": [-2, *cells[1:]]})
    frame["whole"] = pd.array([-3] * len(cells), dtype="Int64")
    frame["string"] = pd.array(cells, dtype="string")
    records.export(frame, tmp_path / "table.csv")
    with (tmp_path / "table.csv").open(newline="", encoding="utf-8") as file:
        header, *rows = csv.reader(file)
    assert header == ["text", "'=header()", "mixed", "whole", "string"]
    expected = [*(f"'{cell}" for cell in FORMULAS), *BREAKS, *PLAIN]
    expected = [cell.replace("\r\n", "\n").replace("\r", "\n") for cell in expected]
    assert not any("\r" in cell for row in rows for cell in row)
    assert [row[0] for row in rows] == [row[4] for row in rows] == expected
    assert [row[2] for row in rows] == ["-2", *expected[1:]]
    assert {tuple(row[1:4:2]) for row in rows} == {("-1.5", "-3")}
    assert list(frame.columns)[1] == "=header()", "the caller's own table is as it was"
    records.export(frame.drop(columns="mixed"), tmp_path / "table.parquet")
    assert pd.read_parquet(tmp_path / "table.parquet")["text"].tolist() == cells


def test_every_table_that_a_command_writes_goes_that_way(tmp_path, capsys):
    """A run whose names and tags are formulas: its export, and the source of the other tables."""
    root = hostile_run(tmp_path / "run", '=HYPERLINK("http://x","y")')
    assert main(["report", str(root), "--export", str(tmp_path / "all.csv")]) == 0
    with (tmp_path / "all.csv").open(newline="", encoding="utf-8") as file:
        header, *rows = csv.reader(file)
    cells = [*header, *(cell for row in rows for cell in row)]
    assert any(cell.startswith("'=HYPERLINK") for cell in cells)
    assert not any(re.match(r"[=@]", cell) for cell in cells)


def test_one_place_writes_csv():
    writes = re.compile(r"to_csv\(|csv\.writer|csv\.DictWriter|write_csv")
    package = Path(records.__file__).parent
    assert [path.name for path in package.rglob("*.py") if writes.search(path.read_text())] == ["durable.py"]
