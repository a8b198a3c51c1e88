"""Tables and other results as files: Parquet, CSV that no spreadsheet runs, text and JSON, each whole or not at all."""

# pyright: strict, reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportMissingTypeStubs=false, reportUnnecessaryIsInstance=false

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from lit_layers.errors import InputError, refused
from lit_layers.files.durable import replace_file, write_json


def export(frame: pd.DataFrame, path: str | Path) -> None:
    """Writes a table as Parquet or CSV, whole or not at all.

    In CSV a text that a spreadsheet would run as a formula (it begins with = + - @, a tab or a line break, and is no
    number) has an apostrophe before it.

    Raises:
        InputError: for another ending than .parquet or .csv, or where the file cannot be written.
    """
    path = Path(path)
    if path.suffix not in (".parquet", ".csv"):
        raise InputError(f"expected a file that ends in .parquet or .csv, got {path.name!r}")
    if path.suffix == ".csv":
        content = _without_formulas(frame).to_csv(index=False)
    else:
        mixed = {name: "str" for name in frame.columns if frame[name].dtype == object}  # Parquet has no mixture
        content = frame.astype(mixed).where(frame.notna(), None).to_parquet(index=False)
    with refused(f"cannot write {path}"):
        replace_file(path, content)


def write_files(folder: Path, files: Mapping[str, Any]) -> list[Path]:
    """Writes files into a folder, which is made where there is none, each whole or not at all; returns their paths.

    A table is written as its name ends (`export`), a text as it is, and anything else as JSON.

    Raises:
        InputError: where one cannot be written.
    """
    with refused(f"cannot write to {folder}"):
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            if isinstance(content, pd.DataFrame):
                export(content, folder / name)
            elif isinstance(content, str):
                replace_file(folder / name, content)
            else:
                write_json(folder / name, content)
    return [folder / name for name in files]


# What a spreadsheet takes for a formula; a negative number is none.
_FORMULA = re.compile(r"(?![+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?$)[=+\-@\t\n]")


def _without_formulas(frame: pd.DataFrame) -> pd.DataFrame:
    safe = frame.rename(columns=_no_formula)
    for name in safe.columns:
        if not pd.api.types.is_any_real_numeric_dtype(safe[name]):
            safe[name] = safe[name].map(_no_formula, na_action="ignore")
    return safe


def _no_formula(cell: Any) -> Any:
    if not isinstance(cell, str):
        return cell
    cell = cell.replace("\r\n", "\n").replace("\r", "\n")  # csv does not quote a carriage return, which ends a row
    return f"'{cell}" if _FORMULA.match(cell) else cell
