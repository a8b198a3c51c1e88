"""What ends a command with one sentence."""

import difflib
import errno
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path


class InputError(ValueError):
    """Raised for input that only the user can mend: a field, a file, a folder, a combination of options.

    Its message is one sentence: what was expected, what came (field and value), what to do. The command line
    prints that sentence and exits with code 2, without a traceback.
    """


_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)


def is_full(error: BaseException | None) -> bool:
    """Whether a disk takes no more, as this error or what it was raised from says: nothing that follows is kept."""
    while error is not None and not (isinstance(error, OSError) and error.errno in _FULL):
        error = error.__cause__
    return error is not None


def first_line(error: BaseException) -> str:
    """Return the first line of what an error says, else its kind."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def first_sentence(error: BaseException) -> str:
    """Return the first sentence of what an error says, on one line."""
    return " ".join(str(error).split()).split(". ")[0]


def kind_and_words(error: BaseException) -> str:
    """Return the kind of an error and all that it says, on one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def did_you_mean(word: str, names: Iterable[str], otherwise: str, *, most: int = 3) -> str:
    """Return `did you mean A or B?` of the names that are near, whatever their case, or what is said `otherwise`."""
    spelt = {name.lower(): name for name in names}
    near = difflib.get_close_matches(word[:400].lower(), spelt, n=most, cutoff=0.6 if most == 1 else 0.5)
    return f"did you mean {' or '.join(spelt[name] for name in near)}?" if near else otherwise


@contextmanager
def refused(attempt: str, remedy: str = "") -> Iterator[None]:
    """An error of the operating system inside becomes `ATTEMPT: reasonREMEDY`, as `cannot write a/b: no such file`."""
    try:
        yield
    except OSError as error:
        reason = "not a directory" if isinstance(error, FileExistsError) else (error.strerror or str(error)).lower()
        raise InputError(f"{attempt}: {reason}{remedy}") from error


_READ = (".json", ".jinja", ".txt", ".model")  # what a reader of models looks for beside the weights


def refuse_odd_files(folder: str | os.PathLike[str]) -> None:
    """Refuse a folder with a link to nothing, which libraries take for a missing file and fall back to something else.

    Raises:
        InputError: naming the first.
    """
    for name in sorted(os.listdir(folder)):
        path = os.path.join(folder, name)
        if name.endswith(_READ) and os.path.islink(path) and not os.path.exists(path):
            raise InputError(f"{path} is a link to nothing: remove it, or copy the file that it stands for")


def no_folder(name: str | Path) -> InputError:
    """Return what is said of a file in the place of a folder with a model: what to name instead."""
    return InputError(
        f"expected a folder with a model, {name} is a file: name its folder, with the config.json of the model in it"
    )


def root_folder(root: str | Path) -> Path:
    """Return the folder that a caller names for a run.

    Raises:
        InputError: an empty name, which would be the working directory.
    """
    if root == "":
        raise InputError("root: expected a folder, got ''")
    return Path(root)
