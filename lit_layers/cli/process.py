"""Process-wide helpers of commands: number of threads, progress bar, printed tables, and SIGTERM handling."""

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
REDRAWN, LINE = 0.1, 60.0  # seconds between two updates of a bar: in a terminal, in a log file
_is_verbose = False
Show = Callable[[int | None, int | None, str], None]  # arguments: finished items, total (None: unchanged), description
_current: "Stopping | None" = None


class Stopping:
    """A SIGTERM handler that records the signal in `asked`.

    The first SIGTERM also raises SystemExit, so that open files and folders are closed properly. It does not if
    `finish_first` is set.
    """

    def __init__(self) -> None:
        self.asked = self.finish_first = False

    def hear(self, number: int, _: object) -> None:
        first, self.asked = not self.asked, True
        if first and not self.finish_first:
            raise SystemExit(TERMINATED)


def finish_first() -> None:
    """Only record a SIGTERM from now on, instead of exiting.

    Call this before training, where Lightning handles SIGTERM, and before the last files of the command are written.
    """
    if _current is not None:
        _current.finish_first = True


@contextlib.contextmanager
def stopping() -> Iterator[Stopping]:
    """Handle SIGTERM inside this context; works only in the main thread."""
    global _current
    _current = state = Stopping()
    before = signal.signal(signal.SIGTERM, state.hear)
    try:
        yield state
    finally:
        signal.signal(signal.SIGTERM, before)


def reader_is_gone() -> bool:
    """Return whether standard output is a pipe whose reader has closed, as in `lit-layers ... | head`."""
    state = select.poll()
    state.register(sys.stdout, 0)
    return bool(state.poll(0))


def set_threads(device: object, ranks: int = 1) -> None:
    """Set the number of CPU threads and print it with the device, e.g. `8 threads, cuda`.

    The ranks of this machine share the cores of the container. OMP_NUM_THREADS takes precedence if it is set.
    """
    import torch
    from joblib import cpu_count

    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, cpu_count(only_physical_cores=True) // ranks))
    named = str(device).replace("auto", "cuda" if torch.cuda.is_available() else "cpu")
    print(f"{torch.get_num_threads()} threads, {named}", file=sys.stderr)


def take_verbose(words: Sequence[str]) -> list[str]:
    """Return the arguments without -v and --verbose, and configure logging accordingly.

    With -v the command also logs what it does, and the traceback of each failure.
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
    """Join the lines of a text with spaces, so that it fits into a table row or a one-line message."""
    return " ".join(text.splitlines())


def note(sentence: str) -> None:
    """Print one line to standard error."""
    print(one_line(sentence), file=sys.stderr)


def show_audit(result: "Audit") -> None:
    """Print the verdict of an audit, what it did not check, and a table of its findings."""
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
    """Draw a progress bar.

    Yields a function that takes the number of finished items, their total and a description. A number that is None
    does not change what the bar shows.
    """
    from tqdm import tqdm

    every = REDRAWN if sys.stderr.isatty() and not _is_verbose else LINE
    looks: Any = {"leave": False, "mininterval": every, "miniters": 0, "smoothing": 0, "dynamic_ncols": True}
    looks["delay"] = every  # no bar for work that takes fewer seconds
    with tqdm(desc=opening, disable=hidden, initial=initial, **looks) as drawn:

        def show(now: int | None, of: int | None, then: str) -> None:
            if not hidden:
                drawn.total = of or drawn.total
                drawn.set_description_str(one_line(then) or drawn.desc, refresh=False)
                drawn.update(0 if now is None else now - drawn.n)

        yield show
