"""What `lit-layers intervene` prints and writes: scores by variant and number of middle blocks."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd
from rich.console import Console
from rich.table import Table

from lit_layers import records
from lit_layers.figures.labels import tag_text
from lit_layers.figures.task_means import MEDIAN
from lit_layers.functional.block_schedules import CUSTOM, OF_BLOCKS, OF_MIDDLES
from lit_layers.metrics import headlines, look_up, sentence
from lit_layers.records import COLUMNS, FAILED

CSV = "variants.csv"
BESIDE = ("when", "training", "execution")  # tags that make a table each
LOOPS = 3  # the published number
WITH_ERRORS = 4  # columns at most that have room for standard errors


def show_results(table: pd.DataFrame, console: Console) -> None:
    """Prints a table for each score: variants by the number of middle blocks that they change.

    Of several steps the last one is shown. Single seeds and single blocks are in the file alone.
    """
    for title, rows in _parts(table):
        console.print(title, style="bold", markup=False, highlight=False)  # of a table it would wrap at its width
        console.print(_table(rows))


def notes(table: pd.DataFrame) -> Iterator[str]:
    """Yields which tasks have no normalised score, and which variants failed: a sentence each."""
    rows: Any = table
    if "undefined" in rows:
        for analysis in dict.fromkeys(rows[rows["undefined"].notna()]["analysis"]):
            yield f"{sentence(analysis)}: no normalised score, as the full model does not beat guessing"
    for _, row in rows[rows["metric"] == FAILED].iterrows():
        place = "" if pd.isna(row.get("middle")) else f" of {int(row['middle'])} blocks"
        yield f"{sentence(row['analysis'])}: {row['variant']}{place} failed ({row['error']})"


def write_results(folder: Path, table: pd.DataFrame) -> Path:
    """Writes every number of every variant to a file in the folder, and returns its path."""
    rows: Any = _of_variants(table)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / CSV
    tags = [name for name in rows if name not in COLUMNS]
    kept = [name for name in rows if rows[name].notna().any()]
    columns = ("run", "step", "analysis", "metric", *tags, "layer", "value", "stderr", "low", "high", "n")
    records.export(rows[[name for name in columns if name in kept]], path)
    return path


def _of_variants(table: pd.DataFrame) -> pd.DataFrame:
    whole: Any = table
    return whole[whole["variant"].notna()] if "variant" in whole else whole.iloc[:0]


def _parts(table: pd.DataFrame) -> Iterator[tuple[str, Any]]:
    rows: Any = _of_variants(table)
    if rows.empty:
        return
    if rows["step"].notna().any():
        rows = rows[rows["step"] == rows["step"].max()]
    rows = rows[~rows["variant"].isin(OF_BLOCKS)]
    rows = rows[rows["seed"].isna()] if "seed" in rows else rows
    has_median = (rows["analysis"] == MEDIAN).any()
    for analysis in dict.fromkeys(rows["analysis"]):
        for metric in headlines():
            part = rows[(rows["analysis"] == analysis) & (rows["metric"] == metric)]
            if part.empty or (has_median and metric == "normalized_score" and analysis != MEDIAN):
                continue
            beside = [name for name in BESIDE if name in part and part[name].nunique() > 1]
            groups = part.groupby(beside, dropna=False) if beside else [((), part)]
            for values, group in groups:
                told = tag_text(dict(zip(beside, values, strict=True))) if beside else ""
                yield ", ".join(filter(None, [sentence(analysis), look_up(metric).with_unit, told])), group


def _table(rows: Any) -> Table:
    middles = sorted({int(number) for number in rows["middle"].dropna()}) if "middle" in rows else []
    found = Table()
    found.add_column("blocks changed", no_wrap=True)
    told = len(middles) <= WITH_ERRORS
    for middle in middles:
        found.add_column(str(middle), justify="right")
    if not middles:
        found.add_column("score", justify="right")
    levels = rows[rows["middle"].isna()] if "middle" in rows else rows
    for _, row in levels.iterrows():
        name = f"{CUSTOM} {row['schedule']}" if row["variant"] == CUSTOM else "full model"
        found.add_row(name, *[_number(row, told)] * max(1, len(middles)))
    for variant in OF_MIDDLES:
        own = rows[rows["variant"] == variant]
        if variant != "looped_parallel":
            lines = {variant.replace("_", " "): own}
        else:
            known = sorted({int(loops) for loops in own["loops"].dropna()}) if len(own) else []
            at = LOOPS if LOOPS in known else next(iter(known), None)
            lines = {f"looped parallel, {at} times": own[own["loops"] == at]} if at else {}
        for name, part in lines.items():
            by_middle = {int(row["middle"]): _number(row, told) for _, row in part.iterrows()}
            if by_middle:
                found.add_row(name, *(by_middle.get(middle, "") for middle in middles))
    return found


def _number(row: Any, with_error: bool) -> str:
    value, error = float(row["value"]), float(row["stderr"]) if row["stderr"] is not None else math.nan
    return f"{value:.3f}" if math.isnan(error) or not with_error else f"{value:.3f} ± {error:.3f}"
