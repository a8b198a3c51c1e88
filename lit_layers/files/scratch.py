"""Temporary folders that go with their process, and with the next one where it was killed."""

import contextlib
import os
import shutil
import tempfile
import time
import weakref
from pathlib import Path

from filelock import BaseFileLock, FileLock, Timeout

_PREFIX, _LOCK = "lit_layers-", ".lock"
_NEW = 60.0  # seconds in which a folder may have no lock yet
_locks: dict[Path, BaseFileLock] = {}


class Scratch:
    """A new temporary folder, removed by `remove`, when nothing holds this any more, or when the process ends.

    Its process holds a lock in it. A killed one leaves the folder without: the next that needs one removes it.
    """

    def __init__(self) -> None:
        _remove_abandoned(Path(tempfile.gettempdir()))
        self.folder = Path(tempfile.mkdtemp(prefix=_PREFIX))
        lock = FileLock(self.folder / _LOCK, timeout=0, thread_local=False)
        lock.acquire()
        self.remove = weakref.finalize(self, _remove, self.folder, lock, os.getpid())


def _remove(folder: Path, lock: BaseFileLock, owner: int) -> None:
    if os.getpid() == owner:  # not a fork of it
        shutil.rmtree(folder, ignore_errors=True)
        lock.release()


def _remove_abandoned(place: Path) -> None:
    for lock in place.glob(f"{_PREFIX}*/{_LOCK}"):
        folder = lock.parent
        with contextlib.suppress(OSError, Timeout):
            if time.time() - folder.stat().st_mtime > _NEW:
                with FileLock(lock, timeout=0):
                    shutil.rmtree(folder, ignore_errors=True)
