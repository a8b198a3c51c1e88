"""What a correlation leaves on disk: its numbers, its page, its pictures."""

import json
from pathlib import Path

import pandas as pd

from lit_layers import records
from lit_layers.correlate.figures import plots_of
from lit_layers.correlate.findings import Findings
from lit_layers.correlate.page import render
from lit_layers.correlate.table import ModelTable
from lit_layers.durable import replace_file
from lit_layers.errors import InputError
from lit_layers.figures import scatter_plot
from lit_layers.figures.vega import write_charts


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
        replace_file(page, render(table, findings, plots))
        numbers = folder / "correlation.json"
        content = findings.to_dict() | {"source": table.source, "notes": table.notes}
        replace_file(numbers, json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False) + "\n")
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
    charts = {folder / f"{plot.name}.png": scatter_plot(plot.content, width=720, height=500) for plot in plots}
    pictures = write_charts(charts)
    return [page, *pictures, folder / "correlation.csv", numbers, folder / "models.csv"]
