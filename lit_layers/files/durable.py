"""Files that survive a kill or a power cut, and temporary folders that go with their process."""

import contextlib
import json
import os
import re
import secrets
import shutil
import tempfile
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from filelock import BaseFileLock, FileLock, Timeout

_PREFIX, _LOCK = "lit_layers-", ".lock"  # of temporary folders
_NEW = 60.0  # seconds in which a folder may have no lock yet
_OF_THE_SYSTEM = re.compile(r"\(os error (\d+)\)")


def sync(path: Path) -> None:
    """Returns when a file, or the names in a folder, are on the disk."""
    if path.is_dir() and os.name != "posix":
        return  # other systems open no folders
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def on_disk(path: Path) -> list[int]:
    """What changes when a file is written or put in another's place, even by a copy that keeps its times."""
    facts = path.stat()
    return [facts.st_size, facts.st_mtime_ns, facts.st_ctime_ns, facts.st_ino]


def draft_of(path: Path) -> Path:
    """Where `write_json` prepares a file: what a kill may leave behind."""
    return path.with_name(f".{path.name}.draft")


def own_draft_of(path: Path) -> Path:
    """A name beside `path` that no other process takes: two containers on a shared folder may have one number."""
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}.draft")


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """An error of the system inside that names no file, as that of a write, or a draft, names this file or folder.

    What a library in Rust raises for one becomes one.
    """
    try:
        yield
    except Exception as error:
        if not isinstance(error, OSError):
            number = _OF_THE_SYSTEM.search(str(error))
            if number is None:
                raise
            raise OSError(int(number[1]), os.strerror(int(number[1])), str(path)) from error
        named = error.filename is not None and not os.path.basename(str(error.filename)).startswith(f".{path.name}.")
        if error.errno is not None and not named:
            error.filename = str(path)
        raise


def write_json(path: Path, content: Any, *, sort_keys: bool = False) -> None:
    """Replaces a file as a whole: a reader sees the old content or the new."""
    draft, text = draft_of(path), json.dumps(content, indent=2, default=str, sort_keys=sort_keys) + "\n"
    with naming(path):
        draft.write_text(text, encoding="utf-8")
        with contextlib.suppress(OSError):  # some network filesystems refuse chmod; the content matters more
            draft.chmod(0o644)
        sync(draft)
        draft.replace(path)
        sync(path.parent)


def replace_file(path: Path, content: str | bytes) -> None:
    """Writes a file, whole or not at all: two processes may do it at once."""
    draft = own_draft_of(path)
    try:
        with naming(path):
            draft.write_bytes(content.encode("utf-8") if isinstance(content, str) else content)
            sync(draft)
            draft.replace(path)
    finally:
        with contextlib.suppress(OSError):  # on a read-only disk that fails, too
            draft.unlink(missing_ok=True)


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
