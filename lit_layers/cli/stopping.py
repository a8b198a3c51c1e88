"""The end of a command: by SIGTERM wherever it is, within a minute, a second one at once; or with its exit code."""

import atexit
import contextlib
import multiprocessing
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Iterator
from typing import NoReturn

from lit_layers.cli import READER_GONE, TERMINATED

LIMIT = 50.0  # seconds
_ONE = 1.0  # torchrun passes on what SLURM sends to all processes, too: two signals within this time are one
_current: "Stopping | None" = None


class Stopping:
    """What becomes of a SIGTERM: it raises SystemExit, so that folders are left in order; once `finish_first`, it is
    noted alone, for what listens by itself and is to be finished.
    """

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
def stopping(*, ends_process: bool = True) -> Iterator[Stopping]:
    """Heeds SIGTERM within; only the main thread can, so that elsewhere nothing changes.

    Args:
        ends_process: whether the process ends with what is within, and then has the same limit for its own end.
    """
    global _current
    state = Stopping()
    if threading.current_thread() is not threading.main_thread() or os.name != "posix":
        yield state
        return
    ear, mouth = os.pipe()
    os.set_blocking(mouth, False)
    # Python's own handlers wait while the main thread is in foreign code, such as a long SVD; this is written at once.
    wakeup, before = signal.set_wakeup_fd(mouth, warn_on_full_buffer=False), signal.signal(signal.SIGTERM, state.hear)
    threading.Thread(target=_watch, args=(ear,), name="sigterm", daemon=True).start()
    outer, _current = _current, state
    try:
        yield state
    finally:
        _current = outer
        if not (state.asked and ends_process):  # the interpreter's own end may wait for threads
            signal.signal(signal.SIGTERM, before)
            signal.set_wakeup_fd(wakeup)
            os.close(mouth)


def _watch(ear: int) -> None:
    first: float | None = None
    while True:
        left = None if first is None else max(0.0, first + LIMIT - time.monotonic())
        if not select.select([ear], [], [], left)[0]:
            _end(f"SIGTERM came {LIMIT:.0f} s ago")
        heard = os.read(ear, 64)
        if not heard:
            os.close(ear)
            return
        if signal.SIGTERM in heard:
            if first is not None and time.monotonic() > first + _ONE:
                _end("a second SIGTERM")
            first = first or time.monotonic()


def _end(why: str) -> None:
    with contextlib.suppress(OSError):
        os.write(2, f"\nlit-layers: {why}: ended at once; what was saved before is whole\n".encode())
    for child in multiprocessing.active_children():
        child.kill()
    os._exit(TERMINATED)


def _hold() -> None:
    """Before a fork: a signal that the child gets at once must not be heard as its parent's."""
    if _current is not None:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})


def _release() -> None:
    if _current is not None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})


def _forget() -> None:
    """In a forked child, which SIGTERM ends as usual."""
    global _current
    if _current is not None:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        _release()
        _current = None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_hold, after_in_parent=_release, after_in_child=_forget)


def end_process(code: int) -> NoReturn:
    """End this process as Python does, but without taking apart all that was imported, which takes seconds.

    Python itself ends a process with the user's own code or with other ranks, and tells of a full disk.
    """
    try:
        print(end="", flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else the next write would fail again
        code = READER_GONE
    except OSError:
        sys.exit(code)
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # a Ctrl-C from here on ends the process without a traceback
    own, ranks = map(sys.modules.get, ("lit_layers.cli.own_code", "torch.distributed"))
    aside = sys.modules.get("lit_layers.report.wandb_mirror")
    if aside is not None and aside.abandoned:
        sys.unraisablehook = lambda _: None  # what W&B does at the end of Python fails again, as was said
    if (own is not None and own.own_code) or (ranks is not None and ranks.is_available() and ranks.is_initialized()):
        sys.exit(code)
    if aside is None or not aside.abandoned:  # an abandoned W&B would be waited for
        threading._shutdown()  # pyright: ignore[reportAttributeAccessIssue] - it also ends pools of threads
        atexit._run_exitfuncs()
    with contextlib.suppress(OSError):
        print(end="", flush=True)
    os._exit(code)


def reader_is_gone() -> bool:
    """Return whether standard output is a pipe that is no longer read, as behind `head`."""
    state = select.poll()
    state.register(sys.stdout, 0)
    return bool(state.poll(0))
