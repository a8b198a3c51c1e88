"""What a command shows: tables, and on standard error how far a measurement has come, unless -q or -v changes it."""

import io
import logging
import math
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from lit_layers.errors import InputError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Task

    from lit_layers.series import Audit

QUIET, VERBOSE = ("-q", "--quiet"), ("-v", "--verbose")
LINE = 60.0  # seconds between two lines where no bar can be seen
_STEPS = 6  # of a finding, at each end
_verbosity = 0
Show = Callable[[int | None, int | None, str], None]  # done, of how many (None: as before), what comes next


def without_verbosity(words: Sequence[str]) -> list[str]:
    """A command line without its -q or -v, which hold from here on, for this command.

    Raises:
        InputError: both are there.
    """
    global _verbosity
    end = words.index("--") if "--" in words else len(words)
    is_quiet, is_verbose = (any(word in words[:end] for word in names) for names in (QUIET, VERBOSE))
    if is_quiet and is_verbose:
        raise InputError("-q and -v: one of them, expected either quiet or verbose")
    _verbosity = int(is_verbose) - int(is_quiet)
    package = logging.getLogger("lit_layers")
    package.setLevel(logging.DEBUG if is_verbose else logging.NOTSET)
    if is_verbose and not package.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(asctime)s %(name)s: %(message)s", datefmt="%H:%M:%S"))
        package.addHandler(handler)
    return [word for word in words[:end] if word not in QUIET + VERBOSE] + list(words[end:])


def verbosity() -> int:
    """-1: results, warnings and refusals alone. 0: also bars, or lines now and then. 1: lines of all that is done, and
    tracebacks of what failed.
    """
    return _verbosity


def one_line(text: str) -> str:
    """Return a text on one line, so that a row of a table and a sentence stay one."""
    return " ".join(text.splitlines())


def note(sentence: str) -> None:
    """Print one line to standard error."""
    print(one_line(sentence), file=sys.stderr)


def show_table(rows: Iterable[Mapping[Any, Any]], title: str = "", *, text: Collection[str] = ()) -> None:
    """Prints a row for each mapping, a column for each of their names: the first, and those of `text`, to the left."""
    from rich.console import Console
    from rich.table import Table

    if title:
        print(title)
    table = Table(box=None, pad_edge=False)
    rows = list(rows)
    columns = list(dict.fromkeys(name for row in rows for name in row))
    for name in columns:
        is_text = name in (columns[0], *text)
        table.add_column(name, justify="left" if is_text else "right", overflow="fold", no_wrap=not is_text)
    for row in rows:
        table.add_row(*(one_line(str(row.get(name, ""))) for name in columns))  # of a name: a row is a line
    shown = io.StringIO()  # rich ends the process itself where its own stream is no longer read
    console = Console(file=shown, highlight=False, markup=False, color_system=None)  # names may look like markup
    # What is not read on a terminal has whole lines; a narrow terminal wraps them itself: no number is cut.
    width, console.width = console.width, 10_000
    if sys.stdout is not None and sys.stdout.isatty():
        console.width = max(width, console.measure(table).minimum)
    console.print(table)
    print(*(line.rstrip() for line in shown.getvalue().splitlines()), sep="\n")


def show_audit(result: "Audit") -> None:
    """Prints the verdict, what it does not cover, and a table of what was found."""
    from lit_layers.series.auditing import UNSEEN

    noun = "checkpoint" if result.num_checked == 1 else "checkpoints"
    verdict = "clean" if result.is_clean else f"suspect: {_some(result.suspect_steps) or 'see below'}"
    print(f"{result.series}: {result.num_checked} {noun}, {verdict} (level: {result.level})")
    print(f"not checked at this level: {UNSEEN[result.level]}")
    if unread := [name for name, level in result.levels.items() if level != "weights"]:
        print(f"not checked: weights of {_some(unread)}")
    rows = [
        {
            "finding": f"note: {finding.kind}" if finding.note else finding.kind,
            "steps": _some(finding.steps or finding.names),
            "what it means": finding.message,
        }
        for finding in sorted(result.findings, key=lambda finding: finding.note)
    ]
    if rows:
        show_table(rows, text=("steps", "what it means"))


def _some(steps: Any) -> str:
    words = [str(step) for step in steps]
    if len(words) > 2 * _STEPS:
        words = [*words[:_STEPS], f"... ({len(words)} in all) ...", *words[-_STEPS:]]
    return ", ".join(words)


@contextmanager
def bar(
    opening: str, *, hidden: bool = False, console: "Console | None" = None, transient: bool = False
) -> Iterator[Show]:
    """A function of what is done, of how much (None: as before), and what is next, which draws it.

    Drawn on standard error where no console is given; a transient bar leaves nothing.
    Where no bar can be seen (a log file, -v), a line a minute says the same.
    """
    from rich import progress
    from rich.console import Console

    columns = (
        progress.TextColumn("{task.description}", markup=False),
        progress.BarColumn(),
        progress.MofNCompleteColumn(),
    )
    times, console = (progress.TimeElapsedColumn(), progress.TimeRemainingColumn()), console or Console(stderr=True)
    says_lines = not hidden and (verbosity() > 0 or (verbosity() == 0 and not console.is_terminal))
    # A bar would be written over by lines; of one that is to leave nothing, rich leaves an empty line in a log.
    hidden, last = hidden or verbosity() != 0 or (transient and not console.is_terminal), console.get_time()
    # Drawn after each block and not by a thread of its own.
    options: Any = {"console": console, "auto_refresh": False, "disable": hidden, "transient": transient}
    # Of the last 30 s, checkpoints that take longer tell no time that is left.
    options["speed_estimate_period"] = math.inf
    with progress.Progress(*columns, *times, **options) as drawn:
        task = drawn.add_task(opening, total=None)

        def show(done: int | None, total: int | None, what: str) -> None:
            nonlocal last
            changes: dict[str, Any] = {"description": one_line(what)} if what else {}
            drawn.update(task, total=total, completed=done, refresh=True, **changes)
            if says_lines and console.get_time() - last >= LINE:
                last = console.get_time()
                console.print(_line(drawn.tasks[0]), highlight=False, markup=False, soft_wrap=True)

        yield show


def _line(task: "Task") -> str:
    so_far, left = (timedelta(seconds=int(each or 0)) for each in (task.elapsed, task.time_remaining))
    ends = f", about {left} left" if task.time_remaining else ""
    return f"{task.completed:.0f} of {task.total or 0:.0f} after {so_far}{ends}: {task.description}"
