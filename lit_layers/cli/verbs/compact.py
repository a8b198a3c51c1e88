"""`lit-layers compact`: the numbers of runs as tables beside their lines, from which single curves are read at once."""

from pathlib import Path

from lit_layers.cli.console import show_table
from lit_layers.errors import InputError
from lit_layers.files.remote_runs import addressed


def compact(roots: list[Path]) -> int:
    """Write measurements.parquet beside measurements.jsonl, which stays the record.

    Single curves of many runs are read from the tables much faster, by `lit_layers.records.frame`, DuckDB or polars.
    What a run measures afterwards is read from its lines until the command is run again.

    Args:
        roots: folders of runs
    """
    from lit_layers import records

    if not roots:
        raise InputError("missing: roots: expected a run's folder, or several")
    rows = []
    for root in roots:
        made = records.compact(root)
        rows.append(
            {
                "run": addressed(str(root)),
                "measurements": f"{made.measurements:,}",
                "numbers": f"{made.numbers:,}",
                "lines, MB": f"{made.log_bytes / 1e6:.2f}",
                "table, MB": f"{made.table_bytes / 1e6:.2f}",
            }
        )
    show_table(rows)
    return 0
