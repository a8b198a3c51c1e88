"""One writer a run: a lock file in the run's folder, which the system frees when its holder ends."""

import contextlib
import os
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from filelock import FileLock, Timeout

from lit_layers.errors import InputError

Part = Literal["all", "training", "measuring"]
_held: list[tuple[Path, int]] = []  # folder, and the process that holds it


@contextlib.contextmanager
def writing(root: str | Path, *, shard: tuple[int, int] = (0, 1), part: Part = "all") -> Iterator[None]:
    """Hold a run's folder for writing.

    Shards (i, n) of one n hold it together, each with a lock file of its own. So do a training that measures nothing
    and the processes that measure its steps meanwhile.

    Raises:
        InputError: if another process writes there, or the folder cannot be written.
    """
    if re.search(r"\w{2,}:/", str(root)):
        raise InputError(f"root: expected a folder, got {root}: mount the store, or copy the run (docs/clusters.md)")
    folder = Path(root).resolve()
    index, count = shard
    ours = ("" if part == "all" else f"-{part}") + ("" if count == 1 else f"-{index}-of-{count}")
    shards = rf"-\d+-of-{count}"
    together = {"training": "-measuring.*", "measuring": f"-training|-measuring{shards}", "all": shards}[part]
    with contextlib.ExitStack() as held:
        try:
            if not folder.exists():
                folder.mkdir(parents=True, exist_ok=True)
                held.callback(_remove_empty, folder)
            held.enter_context(_lock(folder / f".writer{ours}.lock"))
            for other in folder.glob(".writer*.lock"):
                if not re.fullmatch(f"{ours}|{together}", other.stem.removeprefix(".writer")):
                    held.enter_context(_lock(other))
        except OSError as error:
            raise InputError(f"root: cannot write to {folder} ({error.strerror}); choose another folder") from error
        _held.append(holder := (folder, os.getpid()))
        held.callback(_held.remove, holder)
        yield


def is_held(root: str | Path) -> bool:
    """Return whether this process, and not one that it was forked from, holds a run's folder for writing."""
    return (Path(root).resolve(), os.getpid()) in _held


def is_training(root: str | Path) -> bool:
    """Return whether a training that measures nothing itself writes in a folder."""
    path = Path(root) / ".writer-training.lock"
    try:
        with _lock(path) if path.exists() else contextlib.nullcontext():
            return False
    except (InputError, OSError):  # another user's lock cannot be opened
        return True


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    # Another process may look for a moment whether this lock is held: hence the timeout, in seconds.
    lock = FileLock(path, timeout=0.5, thread_local=False, fallback_to_soft=False)
    try:
        lock.acquire()
    except Timeout as error:
        who = path.read_text() or "another process"
        raise InputError(f"root: {path.parent} is being written by {who}: wait, or choose another folder") from error
    try:
        path.write_text(f"process {os.getpid()} on host {socket.gethostname()}")
        yield
    finally:
        path.unlink(missing_ok=True)  # while it is held: a process that waits for this file takes the next one
        lock.release()


def _remove_empty(folder: Path) -> None:
    with contextlib.suppress(OSError):
        folder.rmdir()
