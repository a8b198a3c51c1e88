"""What a correlation leaves on disk: its numbers, its page, its pictures."""

import json
import os
from pathlib import Path

import pandas as pd

from lit_layers import records
from lit_layers.correlate.figures import plots_of
from lit_layers.correlate.findings import Findings
from lit_layers.correlate.page import render
from lit_layers.correlate.table import ModelTable
from lit_layers.errors import InputError
from lit_layers.figures import scatter_plot


def write(table: ModelTable, findings: Findings, folder: Path) -> list[Path]:
    """Writes correlation.json, correlation.csv (a row a coefficient), models.csv, correlation.html and the pictures.

    Returns their paths, the page first. Files of these names are replaced.

    Raises:
        InputError: where the folder cannot be written.
    """
    plots = plots_of(table, findings)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        page = folder / "correlation.html"
        _replace(page, render(table, findings, plots))
        numbers = folder / "correlation.json"
        content = findings.to_dict() | {"source": table.source, "notes": table.notes}
        _replace(numbers, json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False) + "\n")
    except OSError as error:
        raise InputError(f"cannot write to {folder}: {(error.strerror or str(error)).lower()}") from error
    rows = [
        {"of": of, **vars(row)}
        for of, part in ((table.metric, findings.rows), (table.metric, findings.groups))
        for row in part
    ]
    rows += [{"of": table.corrected, **vars(row)} for row in findings.corrected]
    records.export(pd.DataFrame(rows), folder / "correlation.csv")
    records.export(table.frame, folder / "models.csv")
    pictures = []
    for plot in plots:
        pictures.append(folder / f"{plot.name}.png")
        scatter_plot(plot.content, width=720, height=500).write(pictures[-1])
    return [page, *pictures, folder / "correlation.csv", numbers, folder / "models.csv"]


def _replace(path: Path, text: str) -> None:
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        partial.write_text(text, encoding="utf-8")
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
