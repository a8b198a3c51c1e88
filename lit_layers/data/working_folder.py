"""The folder of a preparation: who may write to it, and what an interrupted run left there."""

import contextlib
import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from lit_layers.data.shards import PROGRESS, TOKENIZER
from lit_layers.durable import draft_of, write_json
from lit_layers.errors import InputError

LOCK = ".lock"


def begin(folder: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """The state to go on from: that of the interrupted run, or a new one, noted at once."""
    if (folder / PROGRESS).exists():
        try:
            state = json.loads((folder / PROGRESS).read_text(encoding="utf-8"))
        except ValueError as error:
            raise InputError(f"{folder / PROGRESS} is damaged ({error}): remove {folder} and start again") from error
        expect_settings(folder, state["settings"], settings, "holds an unfinished preparation")
        return state
    others = sorted(path.name for path in folder.iterdir() if path not in (folder / LOCK, draft_of(folder / PROGRESS)))
    if others:
        raise InputError(f"{folder} is not empty (it holds {others[0]}) and no token shards: choose another folder")
    state = {
        "settings": settings,
        "revision": None,
        "tokenizer": None,
        "stage": 0,  # index into the source's splits
        "position": None,  # in that split
        "read": 0,  # documents of that split
        "left_out": {"empty": 0, "duplicate": 0},
        "bytes": {"train": 0, "validation": 0},
        "hashes": {"train": "", "validation": ""},
        "sizes": {},
    }
    write_json(folder / PROGRESS, state, sort_keys=True)
    return state


def expect_settings(folder: Path, there: dict[str, Any], asked: dict[str, Any], what: str) -> None:
    old, new = _flat(there), _flat(asked)
    for key in sorted(old.keys() | new.keys()):
        if old.get(key) != new.get(key):
            raise InputError(
                f"{folder} {what} with {key} {old.get(key)!r}, and {new.get(key)!r} was asked for: "
                "choose another folder, or remove that one"
            )


def _flat(settings: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat = {}
    for key, value in settings.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat


def discard(folder: Path) -> None:
    """Removes what an unfinished preparation left, so that it does not stand in the way of another."""
    shutil.rmtree(folder / TOKENIZER, ignore_errors=True)
    for path in [*folder.glob("*.partial"), folder / PROGRESS]:
        path.unlink(missing_ok=True)


@contextlib.contextmanager
def discarding(folder: Path) -> Iterator[None]:
    """Where the input is at fault from the start, leaves nothing that would bind the next attempt to it."""
    try:
        yield
    except InputError:
        noted = folder / PROGRESS
        if noted.exists() and not json.loads(noted.read_text(encoding="utf-8"))["sizes"]:
            discard(folder)
        raise


@contextlib.contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Makes the folder, and turns a failing disk into a sentence."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        raise InputError(
            f"cannot prepare {folder} ({error}): choose another folder, or mend the cause and run again to continue"
        ) from error


@contextlib.contextmanager
def locked(folder: Path, progress: bool) -> Iterator[None]:
    """Only one process prepares a folder; another waits and finds it done."""
    lock = FileLock(folder / LOCK)
    try:
        lock.acquire(timeout=0.1)
    except Timeout:
        if progress:
            sys.stderr.write(f"waiting for another process that prepares {folder}\n")
        lock.acquire()
    try:
        yield
    finally:
        lock.release()
