"""Parquet files of somebody else, read in a process of its own: a damaged one can end the process that parses it."""

import json
import os
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lit_layers.files import parquet_process
from lit_layers.files.isolated_python import isolated_command

PATIENCE = 300.0  # seconds for all files
MOST_VALUES = 2**28  # of a table that is read whole into this process
_MOST_ENDED = 3  # processes that files have ended, before the rest is left unread


class Lists(NamedTuple):
    """The rows of a file: (metric, layer, tags) of each, and its values."""

    keys: list[tuple[str, int | None, str]]
    values: list[NDArray[np.float32]]


def read_lists(paths: Sequence[Path], max_rows: Sequence[int]) -> Iterator[Lists | str]:
    """Yields the rows of each file, or why they are not to be had, in the words behind a file's name.

    `max_rows`: how many rows each file may have.
    """
    return _answered([{"path": str(path), "max_rows": rows} for path, rows in zip(paths, max_rows, strict=True)])


def read_numbers(
    paths: Sequence[Path], *, analysis: str, metric: str | None, layer: int | None
) -> Iterator[dict[str, Any] | str]:
    """Yields of each table the rows that are asked for and what it says of its log, or why they are not to be had."""
    where = {"analysis": analysis, "metric": metric, "layer": None if layer is None else int(layer)}  # of NumPy, too
    return _answered([{"path": str(path), **where} for path in paths])


def _answered(requests: Sequence[dict[str, Any]]) -> Iterator[Any]:
    """Yields the answer to each, whatever process gives it."""
    asked = [json.dumps(request) for request in requests]
    for _ in range(_MOST_ENDED):
        if not asked:
            return
        answers = list(_answers(_ask("\n".join(asked).encode())))
        yield from answers
        asked = asked[len(answers) :]
        if asked:
            yield "is damaged (reading it ends the process)"
            asked = asked[1:]
    yield from ("was not read, as others ended the process that reads them" for _ in asked)


def _ask(request: bytes) -> bytes:
    environment = {**os.environ, "ARROW_DEFAULT_MEMORY_POOL": "system", "OMP_NUM_THREADS": "1"}
    command = isolated_command(Path(parquet_process.__file__), ("numpy", "pyarrow"))
    try:
        done = subprocess.run(command, input=request, capture_output=True, timeout=PATIENCE, env=environment)
    except subprocess.TimeoutExpired as late:
        return late.output or b""
    return done.stdout


def _answers(content: bytes) -> Iterator[Lists | dict[str, Any] | str]:
    while content:
        line, newline, content = content.partition(b"\n")
        if not newline:
            return
        said = json.loads(line)
        if "error" in said:
            yield said["error"]
            continue
        if "rows" in said:
            parts = [(part, zip(*part.values(), strict=True)) for part in said["rows"]]
            yield {**said, "rows": [dict(zip(part, row, strict=True)) for part, rows in parts for row in rows]}
            continue
        size = 4 * sum(said["lengths"])
        if len(content) < size:
            return
        flat = np.frombuffer(content[:size], np.float32)
        content = content[size:]
        ends = np.cumsum(said["lengths"], dtype=np.intp)
        yield Lists([tuple(key) for key in said["keys"]], np.split(flat, ends)[:-1])  # behind the last end is nothing


def whole_table(path: Path) -> Any:
    """Returns a table (a pandas frame) that fits into memory.

    Raises:
        pyarrow.ArrowInvalid, OSError: another one, or a file that is none.
    """
    import pandas as pd

    refuse_vast(path)
    return pd.read_parquet(path)


def refuse_vast(path: Path, num_columns: int | None = None) -> None:
    """Refuses a table that would not fit into memory: some megabytes can claim any number of rows.

    Raises:
        pyarrow.ArrowInvalid: so many values, in so many columns or in all; a file that is no table, as on reading it.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    with pq.ParquetFile(path) as file:
        rows, columns = file.metadata.num_rows, num_columns or file.metadata.num_columns
    if rows * columns > MOST_VALUES:
        raise pa.ArrowInvalid(
            f"{rows:,} rows of {columns} columns are more than the {MOST_VALUES:,} values that are read"
        )
