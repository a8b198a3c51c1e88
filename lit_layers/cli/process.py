"""The process of a command: how many threads it computes with, what it shows (tables, and on standard error how far a
measurement has come), and its end, by SIGTERM or with its exit code.
"""

import atexit
import contextlib
import logging
import math
import os
import select
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from lit_layers.cli import READER_GONE, TERMINATED
from lit_layers.figures.labels import listing

if TYPE_CHECKING:
    from lit_layers.series import Audit

VERBOSE = ("-v", "--verbose")
REDRAWN, LINE = 0.1, 60.0  # seconds between two drawings of a bar, in a terminal and in a log file
_is_verbose = False
Show = Callable[[int | None, int | None, str], None]  # done, of how many (None: as before), what comes next
VARIABLE = "OMP_NUM_THREADS"  # torch, numpy and scikit-learn read it when they are imported
_current: "Stopping | None" = None
_divided: str | None = None  # what this process has set the variable to


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
def stopping(*, ends_process: bool = True) -> Iterator[Stopping]:
    """Heed SIGTERM within; only the main thread can, so that elsewhere nothing changes.

    Args:
        ends_process: whether the process ends with what is within, which one more SIGTERM does not interrupt.
    """
    global _current
    state, outer = Stopping(), _current
    if threading.current_thread() is not threading.main_thread():
        yield state
        return
    before, _current = signal.signal(signal.SIGTERM, state.hear), state
    try:
        yield state
    finally:
        _current = outer
        if not (state.asked and ends_process):
            signal.signal(signal.SIGTERM, before)


def _forget() -> None:
    if _current is not None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)  # which SIGTERM ends as usual


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
    own, ranks = map(sys.modules.get, ("lit_layers.cli.options", "torch.distributed"))
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


def num_threads(ranks: int, environment: Mapping[str, str], system: Path = Path("/")) -> int:
    """Return how many threads each rank on this machine computes with: its share of the cores and of the container.

    torchrun and `srun` say how many ranks they have started here. `srun` may bind each of them to CPUs of its own.
    """
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    folders = [system / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list" for cpu in allowed]
    cores = {file.read_text() if file.is_file() else file for file in folders}
    limit = system / "sys/fs/cgroup/cpu.max"  # of a container: microseconds, and in how many
    quota, period = limit.read_text().split() if limit.is_file() else ("max", "1")
    tasks, nodes = (int(environment.get(f"SLURM_STEP_NUM_{name}", 1)) for name in ("TASKS", "NODES"))
    is_torchrun = "LOCAL_WORLD_SIZE" in environment
    ranks = max(ranks, int(environment["LOCAL_WORLD_SIZE"]) if is_torchrun else math.ceil(tasks / nodes))
    of_all = 0 if is_torchrun else int(environment.get("SLURM_CPUS_ON_NODE", 0))
    cpus = min(len(allowed), max(len(allowed), of_all) // ranks)
    share = math.inf if quota == "max" else int(quota) / int(period) / ranks
    return max(1, int(min(cpus * len(cores) / len(allowed), share)))


def settle(ranks: int = 1) -> None:
    """Set the threads of this process, and of those it starts, unless the caller did.

    Called before torch is imported, and once more where this process is to be one of several `ranks`.
    """
    global _divided
    given = os.environ.get(VARIABLE, _divided)
    if given != _divided and not (given == "1" and "TORCHELASTIC_RUN_ID" in os.environ):  # what torchrun sets by itself
        return
    threads = num_threads(ranks, os.environ)
    os.environ[VARIABLE] = _divided = str(threads)
    if "torch" in sys.modules:  # which has read the variable
        import torch
        from threadpoolctl import threadpool_limits

        torch.set_num_threads(threads)
        threadpool_limits(threads)


def tell(device: object) -> None:
    """Say on what a command computes: `8 threads, cuda`."""
    import torch

    named = str(device).replace("auto", "cuda" if torch.cuda.is_available() else "cpu")
    print(f"{torch.get_num_threads()} threads, {named}", file=sys.stderr)


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
def bar(opening: str, *, hidden: bool = False) -> Iterator[Show]:
    """Yield a function of what is done, of how much (None: as before), and what is next, which draws a bar."""
    from tqdm import tqdm

    every = REDRAWN if sys.stderr.isatty() and not _is_verbose else LINE
    looks: Any = {"leave": False, "mininterval": every, "miniters": 0, "smoothing": 0, "dynamic_ncols": True}
    looks["delay"] = every  # what is done at once draws none
    with tqdm(desc=opening, disable=hidden, **looks) as drawn:

        def show(now: int | None, of: int | None, then: str) -> None:
            if not hidden:
                drawn.total = of or drawn.total
                drawn.set_description(one_line(then) or drawn.desc, refresh=False)
                drawn.update(0 if now is None else now - drawn.n)

        yield show
