"""Folders that are complete or not there."""

import contextlib
import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from safetensors import SafetensorError

from lit_layers import run_lock
from lit_layers.durable import sync
from lit_layers.errors import InputError

_NAME = re.compile(r"step-(\d{9,})")


def step_folder(root: Path, step: int) -> Path:
    """Returns `<root>/step-000001000`: names sort as steps do."""
    return root / f"step-{step:09d}"


def saved_steps(root: Path) -> list[int]:
    """Returns the steps whose folders are complete, in order."""
    return sorted(int(match[1]) for path in root.glob("step-*") if (match := _NAME.fullmatch(path.name)))


def write_folder(folder: Path, fill: Callable[[Path], None]) -> None:
    """Fills a hidden temporary folder, makes it durable and renames it: a kill leaves all of `folder` or nothing.

    Raises:
        InputError: where it cannot be written, as on a full disk.
    """
    run_lock.check(folder)
    temporary = folder.with_name(f".tmp-{folder.name}")
    with explained(folder):
        try:
            if temporary.exists():
                shutil.rmtree(temporary)
            temporary.mkdir(parents=True)
            fill(temporary)
            for path in [*temporary.rglob("*"), temporary]:
                sync(path)
            if folder.exists():
                shutil.rmtree(folder)
            temporary.rename(folder)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)  # on a full disk its place is wanted
            raise
        sync(folder.parent)
    run_lock.wrote(folder)


def remove_folder(folder: Path) -> None:
    """Removes what `write_folder` wrote."""
    run_lock.forget(folder)
    shutil.rmtree(folder)


@contextlib.contextmanager
def explained(path: Path) -> Iterator[None]:
    """Turns the operating system's refusal to write a checkpoint into the user's sentence."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        reason = (getattr(error, "strerror", None) or str(error)).lower()
        raise InputError(
            f"cannot write {path}: {reason}; what was saved before is whole: mend it and go on with --resume last"
        ) from error


def writable_folder(folder: Path, field: str) -> Path:
    """Makes `folder`, or says in one sentence why it cannot be written.

    Raises:
        InputError: naming the field, the folder and the operating system's reason.
    """
    probe = folder / f".writable-{os.getpid()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise InputError(f"{field}: cannot write to {folder} ({error.strerror}); choose another folder") from error
    return folder
