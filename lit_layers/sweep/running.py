"""Cells run to their end, several at a time, each in a process of its own."""

import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from lit_layers.sweep.cells import FAILED, CellFolder

_LOOK, _LOOK_AGAIN = 0.1, 2.0  # seconds: between two looks at our own runs, and at cells that another process has
_PATIENCE = 55.0  # seconds that runs have to end
# A cell is a run of its own on this machine: it is no rank of the job or agent that started the sweep.
_NOT_OF_A_CELL = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT"),
    *("TORCHELASTIC_RUN_ID", "SLURM_NTASKS", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS_PER_NODE"),
    *("WANDB_RUN_ID", "WANDB_SWEEP_ID", "WANDB_SWEEP_PARAM_PATH"),
    "PYTHONSAFEPATH",  # a program of the user's finds the modules beside it; lit-layers sets it for itself
)


def run_cells(
    cells: Sequence[CellFolder],
    line_of: Callable[[CellFolder], list[str]],
    *,
    gpus: Sequence[Sequence[str]],
    tell: Callable[[Sequence[CellFolder], CellFolder | None], None],
) -> int | None:
    """Runs the cells that are not finished, each once; returns the signal that cut it short, if one did.

    A cell that another process runs is waited for, and gone on with if that process was killed. SIGINT and SIGTERM are
    passed on as SIGTERM, upon which runs save and end; a second one ends them at once.

    Args:
        line_of: the words that start a cell's run.
        gpus: for each worker the GPUs that it has to itself, none: as the environment says.
        tell: is told the running cells, and the one that has just ended; none while others are waited for.
    """
    known = {cell.cell.name: cell.attempts for cell in cells}
    waiting, running = list(cells), {}
    with _Stop() as stop:
        try:
            while waiting or running:
                for worker in range(len(gpus)):
                    if worker not in running and stop.signal is None:
                        run = _next(waiting, known, line_of, gpus[worker])
                        if run is not None:
                            running[worker] = run
                            tell([each.cell for each in running.values()], None)
                if stop.signal is not None:
                    waiting.clear()
                    for run in running.values():
                        run.stop(at_once=stop.count > 1 or stop.is_late())
                for worker, run in list(running.items()):
                    if run.has_ended():
                        del running[worker]
                        tell([each.cell for each in running.values()], run.cell)
                if running:
                    time.sleep(_LOOK)
                elif waiting:
                    tell([], None)
                    time.sleep(_LOOK_AGAIN)
        except BaseException:  # e.g. a full disk: nobody would look after the others
            for run in running.values():
                run.stop(at_once=False)
            raise
    return stop.signal


def _next(
    waiting: list[CellFolder],
    known: Mapping[str, int],
    line_of: Callable[[CellFolder], list[str]],
    gpus: Sequence[str],
) -> "_Run | None":
    """Starts the first cell that is free; those that another process has finished or failed meanwhile are passed."""
    for cell in list(waiting):
        lock = cell.take()
        if lock is None:
            continue
        waiting.remove(cell)
        has_failed_elsewhere = cell.state.get("state") == FAILED and cell.attempts > known[cell.cell.name]
        if not cell.is_finished and not has_failed_elsewhere:
            return _Run(cell, line_of(cell), lock, gpus)
        lock.close()
    return None


class _Run:
    """One run of one cell, from its start on."""

    def __init__(self, cell: CellFolder, line: list[str], lock: IO[bytes], gpus: Sequence[str]) -> None:
        self.cell, self._lock, self._asked, self._since = cell, lock, False, time.monotonic()
        cell.started()
        self._log = open(cell.log, "ab")  # noqa: SIM115
        self._output_from = self._log.tell()
        # A process group of its own: Ctrl-C in a terminal reaches the sweep alone, which then asks the runs to save.
        group: dict[str, Any] = {"process_group": 0, "pass_fds": [lock.fileno()]} if os.name == "posix" else {}
        try:
            self._process = subprocess.Popen(
                line,
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=subprocess.STDOUT,
                env=_environment(gpus),
                **group,
            )
        except OSError as error:
            self._process = None
            self._log.write(f"cannot start {line[0]}: {error.strerror}\n".encode())
            self._log.flush()

    def has_ended(self) -> bool:
        """Whether it has; its end is on the disk then."""
        code = 127 if self._process is None else self._process.poll()
        if code is None:
            return False
        self._log.close()
        seconds = time.monotonic() - self._since
        self.cell.ended(code, seconds, asked=self._asked, output_from=self._output_from)
        self._lock.close()
        return True

    def stop(self, *, at_once: bool) -> None:
        """Asks it to save and end, once; or ends it with all its processes."""
        if self._process is None or self._process.poll() is not None:
            return
        if at_once and os.name == "posix":
            os.killpg(self._process.pid, signal.SIGKILL)
        elif at_once:
            self._process.kill()
        elif not self._asked:
            # Not to its whole group: W&B's process there has the last rows to write.
            self._process.terminate()
        self._asked = True


def _environment(gpus: Sequence[str]) -> dict[str, str]:
    own = {name: value for name, value in os.environ.items() if name not in _NOT_OF_A_CELL}
    own["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), own.get("PATH", os.defpath)])
    return own | ({"CUDA_VISIBLE_DEVICES": ",".join(gpus)} if gpus else {})


class _Stop:
    """Notes SIGINT and SIGTERM instead of acting on them."""

    def __init__(self) -> None:
        self.signal: int | None = None
        self.count, self._since = 0, math.inf

    def __enter__(self) -> "_Stop":
        self._before = {number: signal.signal(number, self._note) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, _: Any) -> None:
        self.signal, self.count = self.signal or number, self.count + 1
        self._since = min(self._since, time.monotonic())

    def is_late(self) -> bool:
        """Whether runs have had the time that a command takes at most to end."""
        return time.monotonic() > self._since + _PATIENCE
