"""`measurements.parquet` beside `measurements.jsonl`: the same numbers by columns, for questions about many runs.

The lines stay the log; the table holds what they said when it was made, and says of how many bytes. A reader takes from
it the curves that it is asked for, and from the log what came later; without the table, or where the log is not the one
that it was made from, it reads the log. So the table can be deleted, lost or old at any time.

A row with a metric is a number of the last measurement of its identity; a row without one is a measurement, each one
that was written, with what all its numbers share. Rows are sorted by analysis, metric and layer, so that a curve lies
in one place.
"""

import functools
import hashlib
import io
import json
import logging
from collections.abc import Iterable, Sequence
from dataclasses import fields
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from pydantic_core import to_json

from lit_layers import schema
from lit_layers.errors import InputError
from lit_layers.files.durable import replace_file
from lit_layers.files.foreign_parquet import read_numbers
from lit_layers.files.parquet_process import NUMBERS
from lit_layers.identity import Measurement, latest, settings_of

logger = logging.getLogger(__name__)
NAME = "measurements.parquet"
_ROWS = 2**13  # of a group: the least that is read
_TAIL = 2**16  # bytes of the log that tell whether it is the one
_OF_RECORD = ("layer", "other_layer", "value", "stderr", "low", "high", "n")
_DAMAGED = "make it again with lit-layers compact"


class Compacted(NamedTuple):
    """What a table holds: bytes of the log, its measurements and numbers, and bytes of its own."""

    log_bytes: int
    measurements: int
    numbers: int
    table_bytes: int


def write_table(log: Path, measurements: Sequence[Measurement], offset: int) -> Compacted:
    """Writes the table of a log, whole or not at all; `measurements` are those of its first `offset` bytes.

    Raises:
        OSError: where it cannot be written.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = _rows(measurements)
    rows.sort(key=lambda row: (row["analysis"], row["metric"] or "", -1 if row["layer"] is None else row["layer"]))
    kinds = [(name, pa.string() if kind == "string" else pa.type_for_alias(kind)) for name, kind in NUMBERS.items()]
    columns = {name: pa.array([row.get(name) for row in rows], kind) for name, kind in kinds}
    texts: Any = [name for name, kind in NUMBERS.items() if kind == "string"]
    sink = io.BytesIO()
    with pq.ParquetWriter(sink, pa.schema(kinds), compression="zstd", use_dictionary=texts, store_schema=False) as file:
        table, start = pa.table(columns), 0
        for _, of_analysis in groupby(rows, key=lambda row: row["analysis"]):  # a group has rows of one alone
            length = len([*of_analysis])
            file.write_table(table.slice(start, length), row_group_size=_ROWS)
            start += length
        file.add_key_value_metadata({"log": json.dumps({"bytes": offset, "tail": _tail(log, offset)})})
    replace_file(log.with_name(NAME), sink.getvalue())
    return Compacted(offset, len(measurements), len(rows) - len(measurements), len(sink.getvalue()))


def read_tables(
    logs: Sequence[Path], *, analysis: str, metric: str | None = None, layer: int | None = None
) -> list[tuple[list[Measurement], int]]:
    """Returns of each log the measurements of an analysis as far as its table goes, and where the log goes on.

    They hold the numbers that are asked for alone. Without a table that counts nothing is known, and the log goes on at
    byte 0; a table that is damaged or of another log is told.
    """
    there = [log for log in logs if log.with_name(NAME).is_file()]
    paths = [log.with_name(NAME) for log in there]
    answers = dict(zip(there, read_numbers(paths, analysis=analysis, metric=metric, layer=layer), strict=True))
    return [_of_table(log, answers[log]) if log in answers else ([], 0) for log in logs]


def _of_table(log: Path, answer: dict[str, Any] | str) -> tuple[list[Measurement], int]:
    why = answer if isinstance(answer, str) else ""
    if not isinstance(answer, str):
        said = answer["log"] if isinstance(answer["log"], dict) else {}
        offset: Any = said.get("bytes")
        is_place = type(offset) is int and log.is_file() and 0 <= offset <= log.stat().st_size
        if is_place and said.get("tail") == _tail(log, offset):
            try:
                return _measurements(answer["rows"]), offset
            except (InputError, LookupError, RecursionError, TypeError, ValueError) as error:
                why = f"holds what no measurement is: {error}"
        else:
            why = f"is not of this {log.name}"
    logger.warning("%s %s: the log is read instead; %s", log.with_name(NAME), why, _DAMAGED)
    return [], 0


def _tail(log: Path, offset: int) -> str:
    """A hash of the bytes before `offset`; lines hold the time that each took, so that no two logs end alike."""
    with log.open("rb") as file:
        file.seek(max(offset - _TAIL, 0))
        return hashlib.sha256(file.read(min(offset, _TAIL))).hexdigest()[:32]


def _rows(measurements: Sequence[Measurement]) -> list[dict[str, Any]]:
    counts = {id(m) for m in latest(measurements)}
    rows: list[dict[str, Any]] = []
    for line, m in enumerate(measurements):
        shared = {"line": line, "run": m.run, "step": m.step, "tokens": m.tokens, "analysis": m.analysis}
        shared["settings"] = settings_of(m)
        said = {"provenance": json.dumps(m.provenance), "seconds": m.seconds, "error": m.error}
        rows.append({**shared, "metric": None, "layer": None, **said})
        for record in m.records if id(m) in counts and m.error is None else ():
            numbers = {name: getattr(record, name) for name in _OF_RECORD}
            rows.append({**shared, "metric": record.metric, **numbers, "tags": json.dumps(record.tags)})
    return rows


def _measurements(rows: Iterable[dict[str, Any]]) -> list[Measurement]:
    """Both kinds of rows as measurements in the order of their lines."""
    lines: dict[int, dict[str, Any]] = {}
    numbers: dict[int, list[dict[str, Any]]] = {}
    names, read = [item.name for item in fields(Measurement)], functools.cache(json.loads)  # tags are much alike
    for row in rows:
        if row["metric"] is None:
            shared = {name: row.get(name) for name in names}
            lines[row["line"]] = {**shared, "provenance": json.loads(row["provenance"])}
        else:
            given = {name: row[name] for name in ("metric", *_OF_RECORD) if row[name] is not None}
            numbers.setdefault(row["line"], []).append({**given, "tags": read(row["tags"])})
    whole = [{**lines[line], "records": numbers.get(line, [])} for line in sorted(lines)]
    return schema.parse(to_json(whole, inf_nan_mode="constants"), list[Measurement], NAME, _DAMAGED)
