"""One writer a run: a lock on the run's folder that expires with its holder, and what was written while it was held.

The lock is a lease: its file is touched every two seconds, and who finds it untouched for a minute takes it over, so
that a holder that died on another machine does not keep the run for ever; one that died on this machine is seen at
once. A holder that was paused for so long that it lost the lease is stopped by `check` before it writes again.
"""

import contextlib
import datetime
import json
import logging
import os
import re
import shlex
import socket
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from filelock import LeaseSettingsMismatch, SoftFileLease, Timeout

from lit_layers.errors import InputError, RunLostError
from lit_layers.files.durable import write_json

logger = logging.getLogger(__name__)
LEASE, HEARTBEAT, LOOK = 60.0, 2.0, 0.2  # seconds
_NAME = ".writer"
_LISTED = 8  # names in a sentence
_held: "list[_Lock]" = []
Part = Literal["all", "training", "measuring"]


@contextlib.contextmanager
def writing(
    root: str | Path,
    *,
    shard: tuple[int, int] = (0, 1),
    part: Part = "all",
    computes: Mapping[str, str] | None = None,
) -> Iterator[None]:
    """Holds a run's folder for writing; the shards (i, n) of one n hold it together, each of them once, as do a
    training that measures nothing and whoever measures its steps meanwhile. `computes` is kept for `beside`.

    Raises:
        InputError: where another process writes there, or nobody can.
        RunLostError: at the end, where files that were written meanwhile are gone.
    """
    if re.search(r"\w{2,}:/", str(root)):
        raise InputError(f"root: expected a folder, got {root}: mount the store, or copy the run (docs/clusters.md)")
    root = Path(root).resolve()
    try:
        made = [folder for folder in (root, *root.parents) if not folder.exists()]
    except OSError as error:  # a name that is too long
        raise _unwritable(root, error) from error
    try:
        lock = _Lock(root, shard, part, computes)
        _held.append(lock)
        try:
            yield
            lock.refuse_vanished()
        finally:
            _held.remove(lock)
            lock.release()
    finally:
        with contextlib.suppress(OSError):  # what was written stays, and its folder
            for folder in made:
                folder.rmdir()


def is_training(root: str | Path) -> bool:
    """Whether a training that measures nothing itself writes in a folder, or did so a minute ago."""
    try:
        return time.time() - (Path(root) / f"{_NAME}-training.lock").stat().st_mtime < LEASE
    except OSError:
        return False


def beside(root: str | Path) -> Iterator[tuple[dict[str, str], str]]:
    """Yields what those compute by who hold a run's folder together with this process and compute by something else,
    and who they are.
    """
    for lock in _of(Path(root)):
        yield from lock.beside()


def is_held(root: str | Path) -> bool:
    """Whether this process, and not one that it was forked from, holds a run's folder for writing."""
    return any(lock.root == Path(root).resolve() and lock.process == os.getpid() for lock in _held)


def check(path: Path) -> None:
    """Called before a write.

    Raises:
        RunLostError: where `path` lies in a folder that this process held for writing and holds no more.
    """
    for lock in _of(path):
        lock.check()


def wrote(path: Path, *, start: int = 0, end: int = 0) -> None:
    """Notes a file or folder that must be there at the end; of a file that grows, from where to where it grew."""
    for lock in _of(path):
        lock.wrote(path.resolve(), start, end)


def forget(path: Path, *, keep: int | None = None) -> None:
    """Notes, before it is done, that a file or folder is removed on purpose, or a log cut to `keep` bytes."""
    for lock in _of(path):
        lock.sizes.pop(path.resolve(), None)


def _of(path: Path) -> "list[_Lock]":
    return [lock for lock in _held if path.resolve().is_relative_to(lock.root)] if _held else []


class _Lock:
    def __init__(self, root: Path, shard: tuple[int, int], part: Part, computes: Mapping[str, str] | None) -> None:
        self.root, self.process, self._computes = root, os.getpid(), computes
        self.sizes: dict[Path, int] = {}
        self._cut: set[Path] = set()
        index, count = shard
        ours = ("" if part == "all" else f"-{part}") + ("" if count == 1 else f"-{index}-of-{count}")
        shares = rf"-\d+-of-{count}"
        others = {"training": "-measuring.*", "measuring": f"-training|-measuring{shares}", "all": shares}[part]
        self._path = root / f"{_NAME}{ours}.lock"
        self._lease = _take(self._path)
        self._token = self._lease.token
        try:
            write_json(_facts(self._path), {"token": self._token, **_this_process(), "computes": computes})
            for other in root.glob(f"{_NAME}*.lock"):
                if other != self._path and not re.fullmatch(others, other.stem.removeprefix(_NAME)):
                    _take(other).release()  # refused where its holder lives
        except OSError as error:
            self.release()
            raise _unwritable(root, error) from error
        except BaseException:
            self.release()
            raise

    def check(self) -> None:
        for _ in range(3):  # who looks whether the holder lives may move the file aside for a moment
            owner = self._lease.owner
            if owner is not None and owner.token == self._token:
                return
            time.sleep(LOOK)
        self._refuse_gone()
        now = f"it is {_holder(self._path)} that writes there now" if owner else f"its {self._path.name} is gone"
        raise RunLostError(
            f"{self.root}: {now}, as this command was paused for more than a minute or its lock was removed; "
            "it stops and writes nothing more there"
        )

    def beside(self) -> Iterator[tuple[dict[str, str], str]]:
        for other in sorted(self.root.glob(f"{_NAME}*.lock")):
            theirs = _said(other).get("computes")
            if other == self._path or theirs in (None, self._computes):
                continue
            who = _holder(other)
            try:
                _take(other).release()
            except InputError:  # its holder lives
                yield theirs, who

    def wrote(self, path: Path, start: int, end: int) -> None:
        if start < self.sizes.get(path, 0):
            self._cut.add(path)
        self.sizes[path] = end

    def refuse_vanished(self) -> None:
        self._refuse_gone()
        missing = self._cut | {path for path, size in self.sizes.items() if not _is_there(path, size)}
        if missing:
            names = sorted(str(path.relative_to(self.root)) for path in missing)
            more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
            raise RunLostError(
                f"{self.root} is not whole: while this command wrote there, others removed or cut "
                f"{', '.join(names[:_LISTED])}{more}"
            )

    def _refuse_gone(self) -> None:
        if not self.root.is_dir():
            raise RunLostError(f"{self.root} was removed or moved while this command wrote there; it stops")

    def release(self) -> None:
        with contextlib.suppress(OSError):
            owner = self._lease.owner
            if owner is not None and owner.token == self._token:
                _facts(self._path).unlink(missing_ok=True)
        self._lease.release()


def _is_there(path: Path, size: int) -> bool:
    return any(path.iterdir()) if path.is_dir() else path.is_file() and path.stat().st_size >= size


def _take(path: Path) -> SoftFileLease:
    """Takes the lease of a path; waits only while its holder gives no sign of life.

    Raises:
        InputError: naming the holder, or why nobody can write there.
    """
    lease = SoftFileLease(path, lease_duration=LEASE, heartbeat_interval=HEARTBEAT, thread_local=False)
    since, seen, is_said = time.monotonic(), None, False

    def lives() -> bool:
        nonlocal seen, is_said
        with contextlib.suppress(OSError):
            owner, touched = lease.owner, path.stat().st_mtime_ns
            token = owner.token if owner is not None else None
            if seen is not None and seen[0] == token and seen[1] != touched:
                return True
            seen = token, touched
            if not is_said and time.monotonic() - since > 3 * HEARTBEAT:
                is_said = True
                logger.warning("no sign of life from %s: its lock ends %.0f s after its last one", _holder(path), LEASE)
        return False

    try:
        lease.acquire(timeout=3 * LEASE, poll_interval=LOOK, cancel_check=lives)
    except (Timeout, LeaseSettingsMismatch) as error:
        raise InputError(
            f"root: {path.parent} is being written by {_holder(path)}; wait for its end, or choose another folder"
        ) from error
    except OSError as error:
        raise _unwritable(path.parent, error) from error
    return lease


def _unwritable(root: Path, error: OSError) -> InputError:
    return InputError(f"root: cannot write to {root} ({error.strerror or error}); choose another folder")


def _facts(path: Path) -> Path:
    return path.with_suffix(".json")


def _this_process() -> dict[str, str | int]:
    name, *arguments = sys.argv or [""]
    now = datetime.datetime.now().astimezone().isoformat(timespec="seconds")
    command = shlex.join([Path(name).name, *arguments])
    return {"host": socket.gethostname(), "pid": os.getpid(), "command": command, "since": now}


def _holder(path: Path) -> str:
    """Who holds the lock of a path."""
    if facts := _said(path):
        return f"`{facts['command'][:200]}` (host {facts['host']}, process {facts['pid']}, since {facts['since']})"
    owner = SoftFileLease(path, lease_duration=LEASE, heartbeat_interval=HEARTBEAT).owner
    return "another process" if owner is None else f"another process (host {owner.hostname}, process {owner.pid})"


def _said(path: Path) -> dict[str, Any]:
    """What the holder of a lock says of itself; nothing where that is of another claim."""
    owner = SoftFileLease(path, lease_duration=LEASE, heartbeat_interval=HEARTBEAT).owner
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        facts = json.loads(_facts(path).read_text(encoding="utf-8"))
        if owner is not None and facts["token"] == owner.token:
            names = dict.fromkeys(("command", "host", "since"), str) | {"pid": int}
            if all(isinstance(facts[name], kind) for name, kind in names.items()):
                return facts
    return {}
