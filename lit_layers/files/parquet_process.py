"""The process in which Parquet files of somebody else are read: run by `foreign_parquet`, and nothing of the package is
imported here.
"""

import contextlib
import json
import struct
import sys
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

COLUMNS = {"metric": "string", "layer": "int32", "tags": "string", "values": "list<element: float>"}
NUMBERS = {  # the columns of `lit_layers.compacted`
    "run": "string",
    **dict.fromkeys(("step", "tokens"), "int64"),
    **dict.fromkeys(("analysis", "metric"), "string"),
    **dict.fromkeys(("layer", "other_layer"), "int64"),
    **dict.fromkeys(("value", "stderr", "low", "high"), "double"),
    "n": "int64",
    **dict.fromkeys(("tags", "settings"), "string"),
    "line": "int64",
    "seconds": "double",
    **dict.fromkeys(("error", "provenance"), "string"),
}
_OF_NUMBERS = ("metric", "layer", "other_layer", "value", "stderr", "low", "high", "n", "tags", "line")
_OF_LINES = ("run", "step", "tokens", "analysis", "settings", "line", "seconds", "error", "provenance")
MAX_BYTES = 2**26  # of one file, which is read whole
MAX_VALUES = 2**25
MAX_ROWS = 2**20  # of numbers: each is sent as text
_MEMORY = 2**33


def serve(requests: BinaryIO, answers: BinaryIO) -> None:
    """Answers each line, which names a file and what is wanted of it, by a line and what that says follows."""
    import pyarrow as pa

    for line in requests:
        asked, flat = json.loads(line), b""
        path = Path(asked.pop("path"))
        try:
            if "max_rows" in asked:
                keys, lengths, flat = _rows_of(path, asked["max_rows"])
                said: dict[str, Any] = {"keys": keys, "lengths": lengths}
            else:
                said = _numbers_of(path, **asked)
        except _RefusedError as refusal:
            said, flat = {"error": str(refusal)}, b""
        except (pa.ArrowException, OSError, MemoryError, ValueError) as error:
            said, flat = {"error": f"is damaged ({type(error).__name__})"}, b""
        answers.write(json.dumps(said).encode() + b"\n" + flat)
        answers.flush()


def _numbers_of(path: Path, analysis: str, metric: str | None, layer: int | None) -> dict[str, Any]:
    """The rows of an analysis that say what its numbers share, and those of the metric and layer."""
    import pyarrow as pa
    import pyarrow.compute as compute
    import pyarrow.parquet as pq  # not its `read_table`: that of a filter imports pandas, half a second

    pc: Any = compute  # whose functions are made as it is imported
    asked = {name: value for name, value in (("metric", metric), ("layer", layer)) if value is not None}
    # Texts are much alike: each is unpacked once.
    options: Any = {"read_dictionary": [name for name, kind in NUMBERS.items() if kind == "string"]}
    options |= {"thrift_string_size_limit": 2**26, "thrift_container_size_limit": 2**20}
    with pq.ParquetFile(path, **options) as file:
        said, schema = file.metadata.metadata or {}, file.schema.to_arrow_schema()
        if {field.name: str(field.type) for field in schema} != NUMBERS or b"log" not in said:
            raise _RefusedError("is no table of numbers")
        if b"ARROW:schema" in said:
            raise _RefusedError("is no table of numbers")
        groups = [file.metadata.row_group(number) for number in range(file.num_row_groups)]
        places = {name: schema.names.index(name) for name in ("analysis", "metric", "layer")}
        of_analysis = [n for n, group in enumerate(groups) if _may_hold(group, places, {"analysis": analysis})]
        of_numbers = [n for n in of_analysis if _may_hold(groups[n], places, asked)]
        of_lines = [n for n in of_analysis if _may_hold(groups[n], places, {}, shared=True)]
        chosen = {*of_numbers, *of_lines}
        number, size = (sum(getattr(groups[n], name) for n in chosen) for name in ("num_rows", "total_byte_size"))
        if number > MAX_ROWS or size > 8 * MAX_BYTES:
            raise _RefusedError(f"is too large: {number:,} rows are to be read, at most {MAX_ROWS:,} are")
        lines = file.read_row_groups(of_lines, ["metric", *_OF_LINES], use_threads=False)
        numbers = file.read_row_groups(of_numbers, ["analysis", *_OF_NUMBERS], use_threads=False)
    parts = []
    for table in (lines, numbers):
        table.validate(full=True)
        rows, shared = pc.equal(table["analysis"], _scalar(analysis)), pc.is_null(table["metric"])
        rows = pc.and_(rows, shared if table is lines else pc.invert(shared))
        for name, value in asked.items() if table is numbers else ():
            rows = pc.and_(rows, pc.equal(table[name], _scalar(value)))
        kinds = pa.schema([schema.field(name) for name in table.column_names])
        parts.append(table.filter(rows).cast(kinds).to_pydict())  # where it is null the row is left out
    return {"rows": parts, "log": json.loads(said[b"log"])}


def _scalar(value: str | int) -> Any:
    """The value as Arrow has it, whose own ways to it import pandas: a quarter of a second."""
    import pyarrow as pa

    if isinstance(value, int):
        return pa.Array.from_buffers(pa.int64(), 1, [None, pa.py_buffer(struct.pack("q", value))])[0]
    text = value.encode()
    return pa.Array.from_buffers(
        pa.string(), 1, [None, pa.py_buffer(struct.pack("2i", 0, len(text))), pa.py_buffer(text)]
    )[0]


def _may_hold(group: Any, places: dict[str, int], asked: dict[str, Any], *, shared: bool = False) -> bool:
    """Whether a row of the group may have these values; with `shared`, one without a metric.

    `places` are those of the columns: of many groups few of their claims are looked at.
    """
    for name, value in asked.items():
        bounds = group.column(places[name]).statistics
        if bounds is None or not bounds.has_min_max:
            continue
        if not bounds.min <= value <= bounds.max:
            return False
    of_metric = group.column(places["metric"]).statistics if shared else None
    return of_metric is None or of_metric.null_count != 0


class _RefusedError(Exception):
    """A file that is whole, and not what is read here."""


def _rows_of(path: Path, max_rows: int) -> tuple[list[Any], list[int], bytes]:
    """The rows of a file, whose claims are looked at before its content is unpacked."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    if (size := path.stat().st_size) > MAX_BYTES:
        raise _RefusedError(f"is too large: {size:,} bytes, at most {MAX_BYTES:,} are read")
    limits: Any = {"thrift_string_size_limit": 2**20, "thrift_container_size_limit": 2**16}
    file = pq.ParquetFile(pa.BufferReader(path.read_bytes()), **limits)
    claims = file.metadata
    # A schema of Arrow's own, which we do not write, could name types that are more than data.
    if b"ARROW:schema" in (claims.metadata or {}) or claims.num_rows > max_rows:
        raise _RefusedError("is no file of this measurement's values")
    groups = [claims.row_group(number) for number in range(claims.num_row_groups)]
    number = sum(group.column(index).num_values for group in groups for index in range(group.num_columns))
    if number > MAX_VALUES or sum(group.total_byte_size for group in groups) > 8 * MAX_BYTES:
        raise _RefusedError(f"is too large: {number:,} values, at most {MAX_VALUES:,} are read")
    if {field.name: str(field.type) for field in file.schema_arrow} != COLUMNS:
        raise _RefusedError(f"has other columns than {', '.join(COLUMNS)}")
    table = file.read(use_threads=False).combine_chunks()
    table.validate(full=True)
    keys = [list(key) for key in zip(*(table[name].to_pylist() for name in [*COLUMNS][:3]), strict=True)]
    lists = [chunk for chunk in table["values"].chunks if len(chunk)]
    lengths = [len(each) for chunk in lists for each in chunk.to_numpy(zero_copy_only=False)]
    flat = [chunk.flatten().to_numpy(zero_copy_only=False).astype(np.float32) for chunk in lists]
    return keys, lengths, b"".join(each.tobytes() for each in flat)


if __name__ == "__main__":
    with contextlib.suppress(ImportError, ValueError, OSError):  # not on every system
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
    serve(sys.stdin.buffer, sys.stdout.buffer)
