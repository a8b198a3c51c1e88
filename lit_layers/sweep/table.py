"""One table of a sweep: a row a cell, with its score or the reason why it has none."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from lit_layers import records
from lit_layers.errors import InputError
from lit_layers.sweep.cells import FAILED, FINISHED, CellFolder
from lit_layers.sweep.grid import Grid
from lit_layers.sweep.locks import take

FILE, LOCK = "sweep.csv", ".sweep.lock"


@dataclass(frozen=True, kw_only=True)
class Score:
    """What came out of one cell: the metric's last and best value, or an error."""

    last: float | None
    best: float | None
    step: int | None
    seconds: float | None
    error: str | None


def score_of(cell: CellFolder, grid: Grid) -> Score:
    """Returns what a cell's state and its scalars of training say."""
    state = cell.state
    ended = state.get("state")
    error = None if ended == FINISHED else state.get("error") if ended == FAILED else _unfinished(state.get("attempts"))
    try:
        rows = records.rows(cell.folder / "metrics.jsonl")
    except InputError as corrupt:
        rows, error = [], error or str(corrupt)
    values = [row[grid.metric] for row in rows if grid.metric in row] if grid.metric is not None else []
    if grid.metric is not None and not values and error is None:
        names = ", ".join(name for name in dict.fromkeys(name for row in rows for name in row) if name != "step")
        error = f"no {grid.metric} in {cell.folder / 'metrics.jsonl'}; there is: {names or 'nothing'}"
    finite = [value for value in values if not math.isnan(value)]
    best = max if grid.goal == "maximize" else min
    return Score(
        last=values[-1] if values else None,
        best=best(finite, default=None),
        step=_last_step(rows, grid.metric),
        seconds=round(state["seconds"], 1) if state.get("seconds") else None,
        error=error,
    )


def _last_step(rows: list[dict[str, float]], metric: str | None) -> int | None:
    """The step of the last value of the metric; without one the last step."""
    scored = [row for row in rows if metric in row] or rows
    return int(scored[-1]["step"]) if scored else None


def write_table(root: Path, grid: Grid, cells: Sequence[CellFolder]) -> pd.DataFrame:
    """Writes `root/sweep.csv`, a row for every cell of the grid, and returns it.

    The columns: run, the varied parameters, the metric's last value under its own name, best, step, seconds (of all
    attempts that ended), error.
    """
    lock = take(root / LOCK, wait=True)  # the last of several shards writes what all have done
    try:
        frame = pd.DataFrame([_row(cell, grid) for cell in cells]).astype({"step": "Int64", "error": "object"})
        records.export(frame, root / FILE)
    finally:
        if lock is not None:
            lock.close()
    return frame


def _row(cell: CellFolder, grid: Grid) -> dict[str, Any]:
    score = score_of(cell, grid)
    row: dict[str, Any] = {"run": cell.cell.name}
    row |= {short: cell.cell.parameters[name] for name, short in grid.short_names.items()}
    row |= {} if grid.metric is None else {grid.metric: score.last, "best": score.best}
    return {**row, "step": score.step, "seconds": score.seconds, "error": score.error}


def _unfinished(attempts: int | None) -> str:
    return "not finished yet" if attempts else "not started yet"
