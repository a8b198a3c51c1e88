"""Allow one writer per run folder, by a lock file in it. The system releases the lock when the process ends."""

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
_held: list[tuple[Path, int]] = []  # (folder, id of the process that holds its lock)


@contextlib.contextmanager
def writing(root: str | Path, *, shard: tuple[int, int] = (0, 1), part: Part = "all") -> Iterator[None]:
    """Hold the lock of a run folder for writing.

    Processes that share the work as shards (i, n), with the same n, may hold the lock at the same time, each with its
    own lock file. A training run may leave the measurement of its checkpoints to other processes. The training run
    (`part="training"`) and these processes (`part="measuring"`) may then also hold the lock at the same time.

    Raises:
        InputError: another process writes to the folder, or the folder is not writable.
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
    """Return whether this process holds the folder's lock. A lock that its parent took before a fork does not count."""
    return (Path(root).resolve(), os.getpid()) in _held


def is_training(root: str | Path) -> bool:
    """Return whether a training run is writing to the folder and leaves its measurements to other processes."""
    path = Path(root) / ".writer-training.lock"
    try:
        with _lock(path) if path.exists() else contextlib.nullcontext():
            return False
    except (InputError, OSError):  # the lock is held, or belongs to another user and cannot be opened
        return True


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    # Wait half a second before refusing, because `is_training` in another process holds the lock for a moment.
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
        path.unlink(missing_ok=True)  # before the release, so that no other process locks a file and then loses it
        lock.release()


def _remove_empty(folder: Path) -> None:
    with contextlib.suppress(OSError):
        folder.rmdir()
