"""Random damage to values, text and bytes, and commands run on it in forks with limits, so that nothing can hang."""

import math
import os
import random
import resource
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.forked import run_forked

CPU_SECONDS, WALL_SECONDS = 60, 500  # of a case: a hang shows in either; a loaded machine is no hang
MEMORY, FILE = 6 * 2**30, 2**28  # bytes of data, and of one file
REFUSED = {1, 2}  # 1: some steps or analyses failed, each with its sentence

WRONG_VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 3, 2.5, -0.5, 1e20, -1e20, 10**20, 10**10, 2**63, math.nan, math.inf, -math.inf),
    *("", "text", "0", "1e20", "nan", "é\u2028\U0001f600", "../..", "/nowhere/at/all", "${nowhere}"),
    *([], {}, [[]], [1, "a", None], {"a": {"b": [1]}}, {"class_path": "nowhere.Nothing"}, [{}], {"": ""}),
)  # fmt: skip


@dataclass(frozen=True)
class Outcome:
    """How a command ended: its exit code, minus a signal's number, or 99 for an exception that left it."""

    code: int
    said: str

    @property
    def trouble(self) -> str | None:
        """What is wrong with this end, whatever was put in; None for success and for a sentence."""
        if self.code in (-9, -24):
            return "it hangs"
        if self.code not in {0, *REFUSED}:
            return f"it ends with {self.code}"
        if "Traceback (most recent call last)" in self.said:
            return "it shows a traceback"
        if self.code == 2 and "error: " not in self.said:
            return "it is refused without a sentence"
        return None


def run_limited(argv: list[str], folder: Path, call: Callable[[list[str]], int] | None = None) -> Outcome:
    """Runs a command of ours, or another `call`, in a fork, with `folder` as the working directory."""
    from lit_layers.cli.main import main

    def limited() -> int:
        os.chdir(folder)
        resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS + 5))
        resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
        resource.setrlimit(resource.RLIMIT_FSIZE, (FILE, FILE))
        try:
            return (call or main)(argv)
        except SystemExit as end:
            return end.code if isinstance(end.code, int) else 1

    with tempfile.NamedTemporaryFile() as output:
        before = os.environ.get("FORKED_OUTPUT")
        os.environ["FORKED_OUTPUT"] = output.name
        try:
            code = run_forked(limited, kill_after=WALL_SECONDS)
        finally:
            if before is None:
                del os.environ["FORKED_OUTPUT"]
            else:
                os.environ["FORKED_OUTPUT"] = before
        return Outcome(code, Path(output.name).read_text(errors="replace"))


def leaves(content: Any, path: tuple = ()) -> Iterator[tuple]:
    """The paths of all values in nested content, those of the inner ones too."""
    if path:
        yield path
    pairs = content.items() if isinstance(content, dict) else enumerate(content) if isinstance(content, list) else ()
    for name, inner in pairs:
        yield from leaves(inner, (*path, name))


def mutated(content: Any, chance: random.Random) -> Any:
    """Changes `content`, nested dicts and lists, in one place, and returns it."""
    path = chance.choice(list(leaves(content)))
    parent = content
    for name in path[:-1]:
        parent = parent[name]
    how: Callable[[], Any] = chance.choice(
        [
            *[lambda: parent.__setitem__(path[-1], chance.choice(WRONG_VALUES))] * 6,
            lambda: parent.pop(path[-1]),
            lambda: parent.__setitem__(path[-1], [parent[path[-1]]]),
            lambda: parent.__setitem__(path[-1], {"inner": parent[path[-1]]}),
            lambda: parent.__setitem__(path[-1], str(parent[path[-1]])),
            lambda: parent.update(unknown=chance.choice(WRONG_VALUES)) if isinstance(parent, dict) else parent.clear(),
        ]
    )
    how()
    return content


def damaged(data: bytes, chance: random.Random) -> bytes:
    """Changes bytes: cut, flipped, doubled, of another encoding, with zeros, or nothing left."""
    place = chance.randrange(len(data) + 1)
    text = data.decode("utf-8", "replace")
    return chance.choice(
        [
            lambda: data[:place],
            lambda: data[:place] + bytes([chance.randrange(256)]) + data[place + 1 :],
            lambda: data[:place] + data[place // 2 :],
            lambda: text.encode("utf-16"),
            lambda: ("é" + text + "é").encode("latin-1", "replace"),
            lambda: b"\xef\xbb\xbf" + data,
            lambda: data[:place] + b"\0" * 64 + data[place:],
            lambda: data[:place] + b"\xff\xfe" + data[place:],
            lambda: b"",
            lambda: data.replace(b"\n", b"\r\n"),
        ]
    )()


def with_other_columns(file: Path, chance: random.Random) -> None:
    """Changes one column of a Parquet file: gone, of another name, twice, empty, of another kind or with wrong values;
    what the file says of itself stays.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    table, said = pq.read_table(file), pq.read_metadata(file).metadata
    place = chance.randrange(table.num_columns)
    name, rows = table.column_names[place], table.num_rows
    kinds: list[Any] = [
        *(pa.array([chance.choice(["", "{}", "[[", "NaN", "text"])] * rows), pa.array([[1, 2]] * rows)),
        *(pa.array([{"a": 1}] * rows), pa.array([2**62] * rows), pa.array([-1.5] * rows), pa.array([b"\xff"] * rows)),
        *(pa.nulls(rows), pa.array([math.inf] * rows), pa.array([True] * rows)),
    ]
    how: Callable[[], Any] = chance.choice(
        [
            lambda: table.drop_columns([name]),
            lambda: table.append_column(name, table.column(place)),
            lambda: table.append_column("unknown", table.column(place)),
            lambda: table.slice(0, 0),
            *[lambda: table.set_column(place, name, chance.choice(kinds))] * 6,
        ]
    )
    pq.write_table(how().replace_schema_metadata(said), file)
