"""Files that survive a kill or a power cut."""

import contextlib
import errno
import json
import os
import re
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lit_layers.errors import InputError

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


def no_link(path: str, flags: int) -> int:
    """An opener for files that are written in place: a link that came with somebody's folder leads nowhere.

    Raises:
        InputError: for a link.
    """
    try:
        return os.open(path, flags | getattr(os, "O_NOFOLLOW", 0), 0o666)
    except OSError as error:
        if error.errno == errno.ELOOP and os.path.islink(path):
            raise InputError(f"{path} is a link, and nothing is written through links: remove it") from error
        raise


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


def _write_new(draft: Path, content: str | bytes) -> None:
    """A file of its own, whatever lay there: a link, too."""
    while True:
        draft.unlink(missing_ok=True)
        with contextlib.suppress(FileExistsError), open(draft, "xb") as file:  # by another process, just now
            file.write(content.encode("utf-8") if isinstance(content, str) else content)
            return


def write_json(path: Path, content: Any, *, sort_keys: bool = False) -> None:
    """Replaces a file as a whole: a reader sees the old content or the new."""
    draft, text = draft_of(path), json.dumps(content, indent=2, default=str, sort_keys=sort_keys) + "\n"
    with naming(path):
        _write_new(draft, text)
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
            _write_new(draft, content)
            sync(draft)
            draft.replace(path)
    finally:
        with contextlib.suppress(OSError):  # on a read-only disk that fails, too
            draft.unlink(missing_ok=True)
