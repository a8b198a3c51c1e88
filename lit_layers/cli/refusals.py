"""Mistakes that several commands refuse: options that do not go together, and folders that cannot be written."""

import tempfile
from collections.abc import Iterable
from pathlib import Path

from lit_layers.errors import InputError, refused


def refuse_beside(
    options: Iterable[str], cases: Iterable[tuple[Iterable[str], bool, str]], *, remedy: str = ": leave it out"
) -> None:
    """Refuses options that do not go with the others: a case says which ones, whether it applies, and why.

    Raises:
        InputError: naming the first.
    """
    for names, applies, why in cases:
        if applies and (name := next((name for name in names if name in options), None)):
            raise InputError(f"{name}: {why}{remedy}")


def refuse_unwritable(name: str, folder: Path) -> None:
    """Refuses, before anything is computed for it, a folder to be that is a file or where nothing can be written.

    Raises:
        InputError: naming the option, and the file or why.
    """
    with refused(f"{name}: cannot write to {folder}"):
        there = next((path for path in (folder, *folder.absolute().parents) if path.exists()), Path.cwd())
        if not there.is_dir():
            raise InputError(f"{name}: expected a folder, {there} is a file")
        with tempfile.TemporaryFile(dir=there):
            pass


def refuse_replacing(folder: Path, read: Iterable[str | Path | None], written: Iterable[str]) -> None:
    """Refuses a folder whose results, by their names without endings, would take the place of a file that is read.

    Raises:
        InputError: naming the file.
    """
    for path in map(Path, filter(None, read)):
        is_replaced = path.stem in written and path.resolve().parent == folder.resolve()
        if is_replaced and not path.is_dir():  # of a run, which a file of that name leaves alone
            raise InputError(f"root: {path}, which is read, would be replaced in {folder}: name another folder")
