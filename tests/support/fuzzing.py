"""Damage values, text and bytes at random, and run commands on them in forks with limits, so that none can hang."""

import math
import os
import random
import resource
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.forked import _run_captured

CPU_SECONDS, WALL_SECONDS = 60, 500  # per case; a command that hangs reaches one of them, also on a loaded machine
MEMORY, FILE = 6 * 2**30, 2**28  # bytes of data and of one file
REFUSED = {1, 2}  # 1: some steps or analyses failed, each with an error sentence

WRONG_VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 3, 2.5, -0.5, 1e20, -1e20, 10**20, 10**10, 2**63, math.nan, math.inf, -math.inf),
    *("", "text", "0", "1e20", "nan", "é\u2028\U0001f600", "../..", "/nowhere/at/all", "${nowhere}"),
    *([], {}, [[]], [1, "a", None], {"a": {"b": [1]}}, {"class_path": "nowhere.Nothing"}, [{}], {"": ""}),
)  # fmt: skip


@dataclass(frozen=True)
class Outcome:
    """The end of a command.

    Args:
        code: Its exit code, or minus the number of the signal that ended it, or 99 after an uncaught exception.
        output: Its stdout and stderr.
    """

    code: int
    output: str

    @property
    def trouble(self) -> str | None:
        """Return what is wrong for any input, or None after success or a refusal in one sentence."""
        if self.code in (-9, -24):
            return "it hangs"
        if self.code not in {0, *REFUSED}:
            return f"it ends with {self.code}"
        if "Traceback (most recent call last)" in self.output:
            return "it shows a traceback"
        if self.code == 2 and "error: " not in self.output:
            return "it is refused without a sentence"
        return None


def run_limited(argv: list[str], folder: Path) -> Outcome:
    """Run `lit-layers ARGV` in a fork with `folder` as the working directory."""
    from lit_layers.cli.main import main

    def limited() -> int:
        os.chdir(folder)
        resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS + 5))
        resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
        resource.setrlimit(resource.RLIMIT_FSIZE, (FILE, FILE))
        try:
            return main(argv)
        except SystemExit as end:
            return end.code if isinstance(end.code, int) else 1

    deadline = time.monotonic() + WALL_SECONDS
    ended = _run_captured(limited, argv, when=lambda: time.monotonic() > deadline, signal_number=signal.SIGKILL)
    return Outcome(ended.returncode, ended.stdout + ended.stderr)


def leaves(content: Any, path: tuple = ()) -> Iterator[tuple]:
    """Yield the paths of all values in nested content, including nested lists and dicts."""
    if path:
        yield path
    pairs = content.items() if isinstance(content, dict) else enumerate(content) if isinstance(content, list) else ()
    for name, inner in pairs:
        yield from leaves(inner, (*path, name))


def mutated(content: Any, chance: random.Random) -> Any:
    """Change one value in `content`, nested dicts and lists, and return it."""
    path = chance.choice(list(leaves(content)))
    parent = content
    for name in path[:-1]:
        parent = parent[name]
    value, wrong = parent[path[-1]], chance.choice(WRONG_VALUES)
    parent[path[-1]] = chance.choice([*[wrong] * 6, [value], {"inner": value}, str(value)])
    if isinstance(parent, dict) and chance.random() < 0.2:
        parent["unknown"] = wrong
        del parent[path[-1]]
    return content


def damaged(data: bytes, chance: random.Random) -> bytes:
    """Return bytes that are cut, changed, repeated, filled with zeros, in another encoding, or empty."""
    index = chance.randrange(len(data) + 1)
    first, rest, text = data[:index], data[index:], data.decode("utf-8", "replace")
    return chance.choice(
        [
            first,
            first + bytes([chance.randrange(256)]) + rest[1:],
            first + data[index // 2 :],
            first + b"\0" * 64 + rest,
            first + b"\xff\xfe" + rest,
            text.encode("utf-16"),
            ("é" + text + "é").encode("latin-1", "replace"),
            b"",
        ]
    )
