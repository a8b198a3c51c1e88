"""What a run says when it ends: how far every metric came, and what measuring cost."""

from pathlib import Path

import pandas as pd
from rich.console import Console
from rich.table import Table

from lit_layers import records
from lit_layers.identity import latest
from lit_layers.plots import change_table
from lit_layers.records import Measurement
from lit_layers.run_file import run_facts

_SHOWN = 28  # rows; the page has all of them


def print_closing(console: Console, root: Path, *, seconds: float) -> None:
    """Prints the change table, the share of the wall time by analysis, and failures."""
    file = root / "measurements.jsonl"
    measurements = latest(records.read(file))
    if measurements:
        trusted = [each for each in measurements if not records.is_suspect(each)]
        console.print(_changes(change_table(records.frame(trusted))))
        console.print(_cost(measurements, run_facts(root), seconds))
    for measurement in measurements:
        if measurement.error is not None:
            console.print(
                f"failed: {measurement.analysis} at step {measurement.step}: {measurement.error}",
                style="red",
                highlight=False,
                markup=False,
            )


def _changes(changes: pd.DataFrame) -> Table:
    table = Table(title="From the first to the last checkpoint", title_justify="left", box=None, pad_edge=False)
    table.add_column("metric", overflow="fold")
    for step in ("first_step", "last_step"):
        name = f"step {int(changes[step].iloc[0])}" if len(changes) else step
        table.add_column(name, justify="right", min_width=max(8, len(name)), no_wrap=True)
    table.add_column("change", justify="right", min_width=8, no_wrap=True)
    for row in changes.head(_SHOWN).to_dict("records"):
        name = " ".join(filter(None, [f"{row['analysis']}/{row['metric']}", row["variant"], _layer(row["layer"])]))
        table.add_row(name, _number(row["first"]), _number(row["last"]), _number(row["change"], sign=True))
    if len(changes) > _SHOWN:
        table.add_row(f"... and {len(changes) - _SHOWN} more in the report", "", "", "")
    return table


def _cost(measurements: list[Measurement], run: dict, seconds: float) -> Table:
    table = Table(title=f"\nWall time {seconds:.0f} s, of which", title_justify="left", box=None, pad_edge=False)
    for column in ("", "seconds", "share"):
        table.add_column(column, justify="right" if column else "left")
    spent: dict[str, float] = {}
    for measurement in measurements:
        spent[measurement.analysis] = spent.get(measurement.analysis, 0.0) + measurement.seconds
    spent["all analyses, as training waited"] = run.get("analysis_seconds", 0.0)
    spent["saving checkpoints"] = run.get("checkpoint_seconds", 0.0)
    for name, value in spent.items():
        table.add_row(name, f"{value:.1f}", f"{value / seconds:.1%}")
    return table


def _layer(layer: float | None) -> str:
    return "" if layer is None or pd.isna(layer) else f"layer {int(layer)}"


def _number(value: float, *, sign: bool = False) -> str:
    return "" if pd.isna(value) else f"{value:{'+' if sign else ''}.3f}"
