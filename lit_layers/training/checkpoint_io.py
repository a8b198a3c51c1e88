"""Folders that are complete or not there."""

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

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
    """Fills a hidden temporary folder, makes it durable and renames it: a kill leaves all of `folder` or nothing."""
    temporary = folder.with_name(f".tmp-{folder.name}")
    if temporary.exists():
        shutil.rmtree(temporary)
    temporary.mkdir(parents=True)
    fill(temporary)
    for path in [*temporary.rglob("*"), temporary]:
        sync(path)
    if folder.exists():
        shutil.rmtree(folder)
    temporary.rename(folder)
    sync(folder.parent)


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
