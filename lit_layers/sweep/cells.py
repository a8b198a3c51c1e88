"""What is known on disk of one cell: `ROOT/CELL.json` and `CELL.log`, beside its run folder `ROOT/CELL`."""

import hashlib
import re
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any, Literal, Required

from pydantic import with_config
from typing_extensions import TypedDict

from lit_layers import schema
from lit_layers.durable import write_json
from lit_layers.errors import InputError
from lit_layers.schema import Count, Seconds
from lit_layers.sweep.grid import Cell
from lit_layers.sweep.locks import take

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
        before = self.state
        attempts, seconds = before.get("attempts", 0) + 1, before.get("seconds", 0.0)
        self._write(state=STARTED, attempts=attempts, seconds=seconds)

    def ended(self, code: int, seconds: float, *, asked: bool, output_from: int) -> None:
        """Notes how it ended, after so many seconds; `asked`: it was told to stop."""
        before = self.state
        facts: dict[str, Any] = {"attempts": before["attempts"], "seconds": before["seconds"] + seconds, "code": code}
        if code == 0:
            self._write(state=FINISHED, **facts)
        elif asked:
            self._write(state=STOPPED, **facts)
        else:
            self._write(state=FAILED, error=_reason(self.log, output_from, code), **facts)

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
    refusals = [found[1] for line in lines if (found := _REFUSAL.match(line))]
    said = (refusals or [line for line in lines if line] or ["no output"])[-1]
    ended = f"ended by {signal.Signals(-code).name}: " if code < 0 else "" if refusals else f"exit code {code}: "
    text = f"{ended}{said}"
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]} ..."
