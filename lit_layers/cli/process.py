"""The process of a command: how many threads it computes with, what it shows (tables, and on standard error how far a
measurement has come), and its end by SIGTERM.
"""

import contextlib
import logging
import os
import select
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from lit_layers.cli import TERMINATED
from lit_layers.figures.labels import listing

if TYPE_CHECKING:
    from lit_layers.series import Audit

VERBOSE = ("-v", "--verbose")
REDRAWN, LINE = 0.1, 60.0  # seconds between two drawings of a bar, in a terminal and in a log file
_is_verbose = False
Show = Callable[[int | None, int | None, str], None]  # done, of how many (None: as before), what comes next
_current: "Stopping | None" = None


class Stopping:
    """Note a SIGTERM, and let the first raise SystemExit, so that folders are left in order, unless `finish_first`."""

    def __init__(self) -> None:
        self.asked = self.finish_first = False

    def hear(self, number: int, _: object) -> None:
        first, self.asked = not self.asked, True
        if first and not self.finish_first:
            raise SystemExit(TERMINATED)


def finish_first() -> None:
    """From here to the end of the command SIGTERM interrupts nothing: what is under way heeds it, or is short."""
    if _current is not None:
        _current.finish_first = True


@contextlib.contextmanager
def stopping() -> Iterator[Stopping]:
    """Heed SIGTERM within, in the main thread."""
    global _current
    _current = state = Stopping()
    before = signal.signal(signal.SIGTERM, state.hear)
    try:
        yield state
    finally:
        signal.signal(signal.SIGTERM, before)


def reader_is_gone() -> bool:
    """Return whether standard output is a pipe that is no longer read, as behind `head`."""
    state = select.poll()
    state.register(sys.stdout, 0)
    return bool(state.poll(0))


def set_threads(device: object, ranks: int = 1) -> None:
    """Compute with the cores of the container, shared by the ranks on this machine, unless OMP_NUM_THREADS says how
    many; print `8 threads, cuda`.
    """
    import torch
    from joblib import cpu_count

    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, cpu_count(only_physical_cores=True) // ranks))
    named = str(device).replace("auto", "cuda" if torch.cuda.is_available() else "cpu")
    print(f"{torch.get_num_threads()} threads, {named}", file=sys.stderr)


def take_verbose(words: Sequence[str]) -> list[str]:
    """Return a command line without its -v, which holds from here on, for this command: lines of all that is done, and
    tracebacks of what failed.
    """
    global _is_verbose
    others = [word for word in words if word not in VERBOSE]
    _is_verbose = len(others) < len(words)
    package = logging.getLogger("lit_layers")
    package.setLevel(logging.DEBUG if _is_verbose else logging.NOTSET)
    if _is_verbose and not package.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(asctime)s %(name)s: %(message)s", datefmt="%H:%M:%S"))
        package.addHandler(handler)
    return others


def one_line(text: str) -> str:
    """Return a text on one line, so that a row of a table and a sentence stay one."""
    return " ".join(text.splitlines())


def note(sentence: str) -> None:
    """Print one line to standard error."""
    print(one_line(sentence), file=sys.stderr)


def show_audit(result: "Audit") -> None:
    """Print the verdict, what it does not cover, and a table of what was found."""
    from lit_layers.series.auditing import UNSEEN

    steps = listing("step", result.suspect_steps) if result.suspect_steps else "see below"
    verdict = "clean" if result.is_clean else f"suspect: {steps}"
    print(f"{result.series}: {result.num_checked} checkpoints, {verdict} (level: {result.level})")
    print(f"not checked at this level: {UNSEEN[result.level]}")
    if unread := [name for name, level in result.levels.items() if level != "weights"]:
        print(f"not checked: weights of {listing('checkpoint', unread)}")
    for finding in sorted(result.findings, key=lambda finding: finding.note):
        kind = f"note: {finding.kind}" if finding.note else finding.kind
        places = listing("step", finding.steps) if finding.steps else listing("checkpoint", finding.names)
        print(kind, places, one_line(finding.message), sep="  ")


@contextlib.contextmanager
def bar(opening: str, *, hidden: bool = False, initial: int = 0) -> Iterator[Show]:
    """Yield a function of what is done, of how much (None: as before), and what is next, which draws a bar."""
    from tqdm import tqdm

    every = REDRAWN if sys.stderr.isatty() and not _is_verbose else LINE
    looks: Any = {"leave": False, "mininterval": every, "miniters": 0, "smoothing": 0, "dynamic_ncols": True}
    looks["delay"] = every  # what is done at once draws none
    with tqdm(desc=opening, disable=hidden, initial=initial, **looks) as drawn:

        def show(now: int | None, of: int | None, then: str) -> None:
            if not hidden:
                drawn.total = of or drawn.total
                drawn.set_description_str(one_line(then) or drawn.desc, refresh=False)
                drawn.update(0 if now is None else now - drawn.n)

        yield show
