"""Cells of somebody else's choosing: a spreadsheet that opens our tables runs none of them."""

import csv
import io
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pytest
from pyarrow import parquet

from lit_layers import records
from lit_layers.cli.main import main
from lit_layers.data.word_pairs import _table as word_table
from lit_layers.errors import InputError
from lit_layers.files.table_files import csv_text
from lit_layers.tasks.task_files import read_columns
from tests.hostile.pages import hostile_run
from tests.hostile.test_recipes import refused

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
    assert [path.name for path in package.rglob("*.py") if writes.search(path.read_text())] == ["table_files.py"]
    header, *rows = csv.reader(io.StringIO(csv_text(["a", "=b"], [[cell, 3] for cell in FORMULAS] + [[None, None]])))
    assert header == ["a", "'=b"]
    assert rows == [*([f"'{cell}".replace("\r", "\n"), "3"] for cell in FORMULAS), ["", ""]]


def test_no_table_is_read_that_claims_more_values_than_memory_holds(tmp_path, capsys, monkeypatch):
    """Ten megabytes of Parquet can stand for 40 GB: whatever reads one whole looks at what it says of itself first."""
    monkeypatch.setattr("lit_layers.files.foreign_parquet.MOST_VALUES", 100)
    table = pa.table({"model": ["m"] * 51, "step": list(range(51)), "value": [0.5] * 51, "text": ["a"] * 51})
    path = tmp_path / "table.parquet"
    parquet.write_table(table, path)
    used = {"text": "text", "step": "label"}

    def said(reads: Callable[..., Any], *arguments: Any) -> str:
        with pytest.raises(InputError) as refusal:
            reads(*arguments)
        return str(refusal.value)

    correlate = ["correlate", str(path), "--metric", "value", "--score", "step"]
    sentences = [refused(["emerge", str(path)], capsys), refused(correlate, capsys), said(word_table, path)]
    for columns, sentence in [*((4, each) for each in sentences), (2, said(read_columns, str(path), ["x"], used))]:
        assert f"51 rows of {columns} columns are more than the 100 values that are read" in sentence
    parquet.write_table(table.slice(0, 50), path)
    assert len(read_columns(str(path), ["x"], used).values["text"]) == 50
