"""The cells of a sweep over the workers of a Ray cluster: a task a cell, which all machines find in one folder."""

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from lit_layers.files.durable import no_link
from lit_layers.measuring import ray_workers
from lit_layers.sweep import CellFolder
from lit_layers.sweep.cells import environment_of

_DIES_WITH_PARENT = 1  # of prctl


@dataclass(frozen=True)
class CellTask:
    """A command line, and the file for what it says."""

    name: str
    line: list[str]
    log: Path


@dataclass(frozen=True)
class CellEnd:
    """How a cell's run ended, and where in its log it began."""

    code: int
    seconds: float
    output_from: int


class CellWorker:
    """What a worker does: it runs a cell's command in the folder that the sweep was started in."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __call__(self, task: CellTask, following: CellTask | None) -> CellEnd:
        since = time.monotonic()
        with open(task.log, "ab", opener=no_link) as log:
            output_from = log.tell()
            try:
                code = subprocess.run(
                    task.line,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env=environment_of([]),
                    cwd=self.folder,
                    check=False,
                    preexec_fn=_die_with_parent if sys.platform == "linux" else None,
                ).returncode
            except OSError as error:
                log.write(f"cannot start {task.line[0]} in {self.folder}: {error.strerror}\n".encode())
                code = 127
        return CellEnd(code, time.monotonic() - since, output_from)


def _die_with_parent() -> None:
    """A run whose worker is gone would hold its folder against the one that goes on with it."""
    ctypes.CDLL(None).prctl(_DIES_WITH_PARENT, signal.SIGKILL)


def _lost(task: CellTask) -> CellEnd:
    with open(task.log, "ab", opener=no_link) as log:
        output_from = log.tell()
        log.write(f"{ray_workers.ATTEMPTS} workers were lost that ran it: it may need more memory\n".encode())
    return CellEnd(128 + signal.SIGKILL, 0.0, output_from)


def run_cells_over_workers(
    cells: Sequence[CellFolder],
    line_of: Callable[[CellFolder], list[str]],
    tell: Callable[[Sequence[CellFolder], CellFolder | None], None],
) -> int | None:
    """Runs the cells that are not finished, each once; returns SIGINT where Ctrl-C cut it short.

    A cell whose worker is lost goes on, from its last checkpoint, on another one, as does one that was under way when
    this process ended, with the next call. This process alone writes what became of the cells.

    Raises:
        InputError: an engine that is not there, workers that cannot be started.
    """
    locks = {cell.cell.name: lock for cell in cells if not cell.is_finished and (lock := cell.take()) is not None}
    mine = {cell.cell.name: cell for cell in cells if cell.cell.name in locks and not cell.is_finished}
    jobs = [ray_workers.Job(name, CellTask(name, line_of(cell), cell.log.resolve())) for name, cell in mine.items()]
    begun: set[str] = set()

    def show(done: int, under_way: Sequence[CellTask]) -> None:
        for task in under_way:
            if task.name not in begun:
                begun.add(task.name)
                mine[task.name].started()
        tell([mine[task.name] for task in under_way], None)

    carried, threads = CellWorker(Path.cwd()), int(os.environ.get("OMP_NUM_THREADS") or 1)
    try:
        with ray_workers.RayWorkers(carried, threads=threads, gpu="auto") as workers:
            for task, end in ray_workers.hand_out(jobs, workers, show):
                end = end or _lost(task)
                mine[task.name].ended(end.code, end.seconds, asked=False, output_from=end.output_from)
                tell([], mine[task.name])
    except KeyboardInterrupt:
        return signal.SIGINT
    finally:
        for lock in locks.values():
            lock.close()
    return None
