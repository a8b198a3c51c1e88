"""The cells of a grid: what is on disk of each, running them, several at a time, and one table of all."""

import hashlib
import math
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Literal, Required

import pandas as pd
from filelock import FileLock
from pydantic import with_config
from typing_extensions import TypedDict

from lit_layers import records, schema
from lit_layers.errors import InputError
from lit_layers.files.durable import no_link, write_json
from lit_layers.schema import Count, Seconds
from lit_layers.sweep.grid import Cell, Grid

try:
    import fcntl
except ImportError:  # Windows: two sweeps of one folder at once are the user's care there
    fcntl = None


def take(path: Path) -> IO[bytes] | None:
    """Returns the lock, held until it is closed; None where another process has it."""
    lock = open(path, "ab", opener=no_link)  # noqa: SIM115
    if fcntl is not None:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.close()
            return None
    return lock


STARTED, FINISHED, FAILED, STOPPED = "started", "finished", "failed", "stopped"
_STYLE = re.compile(r"\x1b\[[0-9;]*m")
_REFUSAL = re.compile(r"^lit-layers \w+: error: (.*)$")
_TAIL = 64 * 1024  # bytes of output in which the reason of a failure is looked for
_LONGEST = 400  # characters of it that are kept


@with_config(schema.OPEN)
class _State(TypedDict, total=False):
    state: Required[Literal["started", "finished", "failed", "stopped"]]
    attempts: Required[Count]
    seconds: Required[Seconds]
    command: Any
    parameters: Any
    recipes: Any
    code: int
    error: str


class CellFolder:
    """One cell's files under the sweep's root.

    The state is written before the run starts and after it has ended, each time as a whole: what it calls finished has
    ended with code 0, with this command, these parameters and these recipes.
    """

    def __init__(self, root: Path, cell: Cell, command: Sequence[str]) -> None:
        self.cell, self.folder = cell, root / cell.name
        self._state, self.log = root / f"{cell.name}.json", root / f"{cell.name}.log"
        self._lock = root / f".{cell.name}.lock"
        self._made = {"command": list(command), "parameters": cell.parameters, "recipes": _recipes(command)}

    @property
    def state(self) -> dict[str, Any]:
        """What was last written of it; empty before its first start.

        Raises:
            InputError: for a file that is none of ours.
        """
        if not self._state.is_file():
            return {}
        facts: Any = schema.read(self._state, _State, "choose another root, or delete it to run this cell again")
        return facts

    @property
    def is_finished(self) -> bool:
        return self.state.get("state") == FINISHED

    @property
    def attempts(self) -> int:
        """How often it was started."""
        return self.state.get("attempts", 0)

    def refuse_another(self) -> None:
        """Refuses to mix runs.

        Raises:
            InputError: where the run folder was made with another command or other parameters, or by nobody known.
        """
        before = self.state
        if not before:
            if self.folder.exists():
                raise InputError(f"root: {self.folder} is there and of no sweep; choose another root")
            return
        for what, new in self._made.items():
            old = before.get(what, new)
            if old != new and (before["state"] == FINISHED or self.folder.exists()):
                raise InputError(
                    f"{what}: {self.folder} was made with {_difference(old, new)}; choose another root, or delete that "
                    f"folder and {self._state.name}"
                )

    def take(self) -> IO[bytes] | None:
        """A lock on the cell, None while another process runs it.

        The run inherits it: where the sweep alone is killed, the cell stays taken as long as its run goes on.
        """
        return take(self._lock)

    def started(self) -> None:
        """Notes that a run begins."""
        self._write(state=STARTED, attempts=self.attempts + 1, seconds=self.state.get("seconds", 0.0))

    def ended(self, code: int, seconds: float, *, asked: bool, output_from: int) -> None:
        """Notes how it ended, after so many seconds; `asked`: it was told to stop."""
        state = FINISHED if code == 0 else STOPPED if asked else FAILED
        error = {"error": _reason(self.log, output_from, code)} if state == FAILED else {}
        seconds += self.state["seconds"]
        self._write(state=state, **error, attempts=self.attempts, seconds=seconds, code=code)

    def _write(self, **facts: Any) -> None:
        at = time.strftime("%Y-%m-%dT%H:%M:%S%z")
        write_json(self._state, {**facts, "at": at, **self._made})


def _recipes(command: Sequence[str]) -> dict[str, str]:
    """The files a command names, each with a hash of its content: an edited recipe makes another run."""
    files = [Path(word.rpartition("=")[2]) for word in command if word.endswith((".yaml", ".yml"))]
    return {str(file): hashlib.sha256(file.read_bytes()).hexdigest()[:16] for file in files if file.is_file()}


def _difference(old: Any, new: Any) -> str:
    """The first option that differs, or both commands."""
    if isinstance(old, dict) and isinstance(new, dict):
        name = next(name for name in [*new, *old] if old.get(name) != new.get(name))
        return f"{name} = {old.get(name)}, got {new.get(name)}"
    return f"{' '.join(map(str, old or []))!r}, got {' '.join(map(str, new))!r}"


def _reason(log: Path, output_from: int, code: int) -> str:
    """The sentence that the run was refused with, else the last line that it said."""
    with open(log, "rb") as file:
        file.seek(max(output_from, log.stat().st_size - _TAIL))
        lines = [_STYLE.sub("", line).strip() for line in file.read().decode(errors="replace").splitlines()]
    refusals = [match[1] for line in lines if (match := _REFUSAL.match(line))]
    reason = (refusals or [line for line in lines if line] or ["no output"])[-1]
    ended = f"ended by {signal.Signals(-code).name}: " if code < 0 else "" if refusals else f"exit code {code}: "
    text = f"{ended}{reason}"
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]} ..."


TABLE = "sweep.csv"


def write_table(root: Path, grid: Grid, cells: Sequence[CellFolder]) -> pd.DataFrame:
    """Writes `root/sweep.csv`, a row for every cell of the grid, and returns it.

    The columns: run, the varied parameters, the metric's last value under its own name, best, step, seconds (of all
    attempts that ended), error.
    """
    with FileLock(root / ".sweep.lock"):  # the last of several shards writes what all have done
        frame = pd.DataFrame([_row(cell, grid) for cell in cells]).astype({"step": "Int64", "error": "object"})
        records.export(frame, root / TABLE)
    return frame


def _row(cell: CellFolder, grid: Grid) -> dict[str, Any]:
    """What a cell's state and its scalars of training say: of the metric the last and best value and its step."""
    state, metric = cell.state, grid.metric
    unfinished = f"not {'finished' if state.get('attempts') else 'started'} yet"
    error = {FINISHED: None, FAILED: state.get("error")}.get(state.get("state", ""), unfinished)
    rows: list[dict[str, Any]] = []
    try:
        rows = records.rows(cell.folder / "metrics.jsonl")
    except InputError as corrupt:
        error = error or str(corrupt)
    scored = [row for row in rows if metric in row]
    if metric is not None and not scored and error is None:
        names = ", ".join(name for name in dict.fromkeys(name for row in rows for name in row) if name != "step")
        error = f"no {metric} in {cell.folder / 'metrics.jsonl'}; there is: {names or 'nothing'}"
    row: dict[str, Any] = {"run": cell.cell.name}
    row |= {short: cell.cell.parameters[name] for name, short in grid.short_names.items()}
    if metric is not None:
        finite = [each[metric] for each in scored if not math.isnan(each[metric])]
        best = (max if grid.goal == "maximize" else min)(finite, default=None)
        row |= {metric: scored[-1][metric] if scored else None, "best": best}
    last = (scored or rows)[-1:]
    seconds = round(state["seconds"], 1) if state.get("seconds") else None
    return {**row, "step": int(last[0]["step"]) if last else None, "seconds": seconds, "error": error}


def visible_gpus(environment: Mapping[str, str]) -> list[str]:
    """The GPUs that torch would see: those of CUDA_VISIBLE_DEVICES, else all that the driver lists."""
    chosen = environment.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        names = [name.strip() for name in chosen.split(",") if name.strip()]
        return names[: names.index("-1")] if "-1" in names else names  # CUDA stops at the first that is none
    try:
        listed = subprocess.run(["nvidia-smi", "--list-gpus"], capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    lines = [line for line in listed.stdout.splitlines() if line.startswith("GPU ")]
    return [str(number) for number in range(len(lines))] if listed.returncode == 0 else []


def share_of_gpus(gpus: Sequence[str], worker: int, workers: int) -> list[str]:
    """The GPUs of one worker: a block of its own, or one shared with others where there are fewer than workers."""
    if not gpus:
        return []
    each = len(gpus) // workers
    return list(gpus[worker * each : (worker + 1) * each]) or [gpus[worker % len(gpus)]]


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
    attempts = {cell.cell.name: cell.attempts for cell in cells}
    waiting, running = list(cells), {}
    with _Stop() as stop:
        try:
            while waiting or running:
                for worker in range(len(gpus)):
                    if worker not in running and stop.signal is None:
                        run = _next(waiting, attempts, line_of, gpus[worker])
                        if run is not None:
                            running[worker] = run
                            tell([each.cell for each in running.values()], None)
                if stop.signal is not None:
                    waiting.clear()
                    for run in running.values():
                        run.stop(at_once=stop.count > 1 or stop.is_late())
                ended = [worker for worker, run in running.items() if run.has_ended()]
                for worker in ended:
                    run = running.pop(worker)
                    tell([each.cell for each in running.values()], run.cell)
                if running:
                    time.sleep(_LOOK)
                elif waiting and not ended:  # what is left is another process's
                    tell([], None)
                    time.sleep(_LOOK_AGAIN)
        except BaseException:  # e.g. a full disk: nobody would look after the others
            for run in running.values():
                run.stop(at_once=False)
            raise
    return stop.signal


def _next(
    waiting: list[CellFolder],
    attempts_before: Mapping[str, int],
    line_of: Callable[[CellFolder], list[str]],
    gpus: Sequence[str],
) -> "_Run | None":
    """Starts the first cell that is free; those that another process has finished or failed meanwhile are passed."""
    for cell in list(waiting):
        lock = cell.take()
        if lock is None:
            continue
        waiting.remove(cell)
        has_failed_elsewhere = cell.state.get("state") == FAILED and cell.attempts > attempts_before[cell.cell.name]
        if not cell.is_finished and not has_failed_elsewhere:
            try:
                return _Run(cell, line_of(cell), lock, gpus)
            except BaseException:
                lock.close()
                raise
        lock.close()
    return None


class _Run:
    """One run of one cell, from its start on."""

    def __init__(self, cell: CellFolder, line: list[str], lock: IO[bytes], gpus: Sequence[str]) -> None:
        self.cell, self._lock, self._asked, self._since = cell, lock, False, time.monotonic()
        cell.started()
        self._log = open(cell.log, "ab", opener=no_link)  # noqa: SIM115
        self._output_from = self._log.tell()
        # A process group of its own: Ctrl-C in a terminal reaches the sweep alone, which then asks the runs to save.
        group: dict[str, Any] = {"process_group": 0, "pass_fds": [lock.fileno()]} if os.name == "posix" else {}
        try:
            self._process = subprocess.Popen(
                line,
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=subprocess.STDOUT,
                env=environment_of(gpus),
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
        with self._lock:
            self.cell.ended(code, seconds, asked=self._asked, output_from=self._output_from)
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


def environment_of(gpus: Sequence[str]) -> dict[str, str]:
    """The variables that a cell's run gets, with these GPUs to itself; none: as the environment says."""
    variables = {name: value for name, value in os.environ.items() if name not in _NOT_OF_A_CELL}
    variables["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), variables.get("PATH", os.defpath)])
    return variables | ({"CUDA_VISIBLE_DEVICES": ",".join(gpus)} if gpus else {})


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
