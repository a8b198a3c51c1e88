"""The end of a command: by SIGTERM wherever it is, within a minute, a second one at once; or with its exit code."""

import atexit
import contextlib
import gc
import io
import multiprocessing
import os
import select
import signal
import stat
import sys
import threading
import time
from collections.abc import Iterator

from lit_layers.cli import TERMINATED

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


def end_process(code: int) -> None:
    """Ends this process as Python does, threads, what is registered for the end and output, but for taking apart all
    that was imported: with torch and transformers that takes a second or two.

    Returns, for Python to end it, where output cannot be written or more than this command goes on here.
    """
    if _is_looked_into():
        return
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        with contextlib.suppress(OSError, ValueError):
            _flush()
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # the user's next Ctrl-C ends the process by itself
    aside = sys.modules.get("lit_layers.report.wandb_aside")
    if aside is None or not aside.abandoned:  # W&B would wait at the end for what it was given up for
        threading._shutdown()  # pyright: ignore[reportAttributeAccessIssue] - the one that also ends pools of threads
        atexit._run_exitfuncs()
    _write_out_files()
    with contextlib.suppress(OSError, ValueError):
        _flush()
        os._exit(code)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:  # None: it was closed before Python started
            stream.flush()


def _write_out_files() -> None:
    """Of files that somebody's code left open, as Python does when it takes them apart."""
    for each in gc.get_objects():
        if type(each) in (io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom):
            with contextlib.suppress(OSError, ValueError):
                if stat.S_ISREG(os.fstat(each.fileno()).st_mode):  # a pipe might be waited for
                    each.flush()


def _is_looked_into() -> bool:
    """Whether this process is more than the command: ranks may need one another until Python itself ends, and a
    debugger, a profiler or a prompt goes on behind the last line."""
    distributed = sys.modules.get("torch.distributed")
    tools = getattr(sys, "monitoring", None)
    return bool(
        (distributed is not None and distributed.is_available() and distributed.is_initialized())
        or sys.gettrace()
        or sys.getprofile()
        or (tools is not None and any(map(tools.get_tool, range(6))))
        or sys.flags.interactive
    )
