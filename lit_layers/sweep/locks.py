"""Locks between processes, which the system frees when the last process that holds one has ended."""

from pathlib import Path
from typing import IO

try:
    import fcntl
except ImportError:  # Windows: two sweeps of one folder at once are the user's care there
    fcntl = None


def take(path: Path, *, wait: bool = False) -> IO[bytes] | None:
    """Returns the lock, held until it is closed; None where another process has it, unless that is waited for."""
    lock = open(path, "wb")  # noqa: SIM115
    if fcntl is not None:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.close()
            return None
    return lock
