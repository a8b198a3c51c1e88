"""Rows of benchmark tasks in local files: parquet, JSON lines or CSV."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lit_layers import schema
from lit_layers.errors import InputError

Row = dict[str, Any]
SUFFIXES = (".parquet", ".jsonl", ".csv")


def read_rows(path: Path, columns: Sequence[str], limit: int | None = None) -> list[Row]:
    """The first `limit` rows of a file, of these columns; None: all rows.

    Raises:
        InputError: a file that is missing or damaged, a column that is not there, an empty field, or no row.
    """
    if path.suffix not in SUFFIXES:
        raise InputError(f"task: expected a file that ends in {', '.join(SUFFIXES)}, got {path}")
    if not path.is_file():
        raise InputError(f"folder: expected rows in {path}, there is no such file")
    rows = {".parquet": _parquet, ".jsonl": _json_lines, ".csv": _csv}[path.suffix](path, columns)[:limit]
    if not rows:
        raise InputError(f"{path} has no row: a score needs at least one")
    for number, row in enumerate(rows):
        if empty := [column for column in columns if row.get(column) is None]:
            raise InputError(f"{path}: row {number} has nothing in column {empty[0]!r}")
    return rows


def _parquet(path: Path, columns: Sequence[str]) -> list[Row]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        _check_columns(path, columns, pq.read_schema(path).names)
        return pq.read_table(path, columns=list(columns)).to_pylist()
    except (pa.ArrowInvalid, OSError) as error:
        raise InputError(f"{path} is no parquet file, or only a part of one ({error}): copy it again") from error


def _json_lines(path: Path, columns: Sequence[str]) -> list[Row]:
    rows = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        rows.append(schema.parse(line, dict[str, Any], f"{path}: line {number}", "mend or remove it"))
    if rows:
        _check_columns(path, columns, list(rows[0]))
    return rows


def _csv(path: Path, columns: Sequence[str]) -> list[Row]:
    import csv

    with path.open(encoding="utf-8", newline="") as file:
        reader = csv.DictReader(file)
        _check_columns(path, columns, list(reader.fieldnames or ()))
        return list(reader)


def _check_columns(path: Path, columns: Sequence[str], found: Sequence[str]) -> None:
    if missing := [column for column in columns if column not in found]:
        raise InputError(f"{path}: expected a column {missing[0]!r}, it has {', '.join(found) or 'none'}")
