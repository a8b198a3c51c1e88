"""What a command shows: tables, and on standard error how far a measurement has come, unless -q or -v changes it."""

import logging
import shutil
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from lit_layers.series import Audit

VERBOSE = ("-v", "--verbose")
REDRAWN, LINE = 0.1, 60.0  # seconds between two drawings of a status, and between two lines where there is no terminal
_STEPS = 6  # of a finding, at each end
_is_verbose = False
Show = Callable[[int | None, int | None, str], None]  # done, of how many (None: as before), what comes next


def without_verbose(words: Sequence[str]) -> list[str]:
    """Return a command line without its -v, which holds from here on, for this command: lines of all that is done, and
    tracebacks of what failed.
    """
    global _is_verbose
    end = words.index("--") if "--" in words else len(words)
    _is_verbose = any(word in words[:end] for word in VERBOSE)
    package = logging.getLogger("lit_layers")
    package.setLevel(logging.DEBUG if _is_verbose else logging.NOTSET)
    if _is_verbose and not package.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(asctime)s %(name)s: %(message)s", datefmt="%H:%M:%S"))
        package.addHandler(handler)
    return [word for word in words[:end] if word not in VERBOSE] + list(words[end:])


def one_line(text: str) -> str:
    """Return a text on one line, so that a row of a table and a sentence stay one."""
    return " ".join(text.splitlines())


def note(sentence: str) -> None:
    """Print one line to standard error."""
    print(one_line(sentence), file=sys.stderr)


def show_table(rows: Iterable[Mapping[Any, Any]], title: str = "", *, text: Collection[str] = ()) -> None:
    """Print a row for each mapping, a column for each of their names: the first, and those of `text`, to the left."""
    rows = list(rows)
    names = list(dict.fromkeys(name for row in rows for name in row))
    lines = [[*map(str, names)], *([one_line(str(row.get(name, ""))) for name in names] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    aligned = [str.ljust if name in (names[0], *text) else str.rjust for name in names]
    if title:
        print(title)
    for line in lines:
        cells = (align(cell, width) for align, cell, width in zip(aligned, line, widths, strict=True))
        print("  ".join(cells).rstrip())


def show_audit(result: "Audit") -> None:
    """Print the verdict, what it does not cover, and a table of what was found."""
    from lit_layers.series.auditing import UNSEEN

    noun = "checkpoint" if result.num_checked == 1 else "checkpoints"
    verdict = "clean" if result.is_clean else f"suspect: {_some(result.suspect_steps) or 'see below'}"
    print(f"{result.series}: {result.num_checked} {noun}, {verdict} (level: {result.level})")
    print(f"not checked at this level: {UNSEEN[result.level]}")
    if unread := [name for name, level in result.levels.items() if level != "weights"]:
        print(f"not checked: weights of {_some(unread)}")
    for finding in sorted(result.findings, key=lambda finding: finding.note):
        kind = f"note: {finding.kind}" if finding.note else finding.kind
        print(kind, _some(finding.steps or finding.names), one_line(finding.message), sep="  ")


def _some(steps: Any) -> str:
    words = [str(step) for step in steps]
    if len(words) > 2 * _STEPS:
        words = [*words[:_STEPS], f"... ({len(words)} in all) ...", *words[-_STEPS:]]
    return ", ".join(words)


class Status:
    """A line of text that a terminal shows in place of the line before, and a log file once in `every` seconds."""

    def __init__(self, stream: TextIO | None, every: float = LINE) -> None:
        self.stream, self.is_live = stream, stream is not None and stream.isatty() and not _is_verbose
        self.every, self.last = (REDRAWN, 0.0) if self.is_live else (every, time.monotonic())

    @property
    def is_due(self) -> bool:
        """Whether the next text is shown."""
        return time.monotonic() - self.last >= self.every

    def show(self, text: str) -> None:
        if not self.is_due:
            return
        self.last, text = time.monotonic(), one_line(text)
        if self.is_live:
            self.clear()
            print(text[: shutil.get_terminal_size().columns - 1], end="", file=self.stream, flush=True)
        else:
            print(text, file=self.stream, flush=True)

    def say(self, sentence: str) -> None:
        """Print a line that stays."""
        self.clear()
        print(sentence, file=self.stream, flush=True)

    def clear(self) -> None:
        if self.is_live:
            print("\r\x1b[2K", end="", file=self.stream, flush=True)


@contextmanager
def bar(opening: str, *, hidden: bool = False) -> Iterator[Show]:
    """Yield a function of what is done, of how much (None: as before), and what is next, which shows it and the time.

    In a terminal it is a line at the bottom of standard error; in a log file, and with -v, a line a minute.
    """
    status, started = Status(sys.stderr), time.monotonic()
    done, total, what = 0, 0, opening

    def show(now: int | None, of: int | None, then: str) -> None:
        nonlocal done, total, what
        done, total, what = done if now is None else now, of or total, then or what
        so_far = time.monotonic() - started
        left = f", about {timedelta(seconds=int(so_far / done * (total - done)))} left" if 0 < done < total else ""
        if not hidden:
            status.show(f"{done} of {total} after {timedelta(seconds=int(so_far))}{left}: {what}")

    try:
        yield show
    finally:
        status.clear()
