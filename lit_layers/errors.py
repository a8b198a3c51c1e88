"""Errors that end a command with one sentence."""

import difflib
import errno
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path


class InputError(ValueError):
    """Raised for input that only the user can correct: a field, a file, a folder, a combination of options.

    Its message is one sentence: the expected input, the actual field and value, and what to do. The command line
    prints the sentence without a traceback and exits with code 2.
    """


_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)


def is_full(error: BaseException | None) -> bool:
    """Return whether this error, or one it was raised from, means that the disk is full or read-only."""
    while error is not None and not (isinstance(error, OSError) and error.errno in _FULL):
        error = error.__cause__
    return error is not None


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or the name of its class if the message is empty."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def first_sentence(error: BaseException) -> str:
    """Return the first sentence of an error's message, on one line."""
    return " ".join(str(error).split()).split(". ")[0]


def kind_and_words(error: BaseException) -> str:
    """Return the class of an error and its message, on one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def did_you_mean(word: str, names: Iterable[str], otherwise: str, *, most: int = 3) -> str:
    """Return `did you mean A or B?` with the names nearest to `word`, ignoring case, or `otherwise` if none is near."""
    spelt = {name.lower(): name for name in names}
    near = difflib.get_close_matches(word[:400].lower(), spelt, n=most, cutoff=0.6 if most == 1 else 0.5)
    return f"did you mean {' or '.join(spelt[name] for name in near)}?" if near else otherwise


@contextmanager
def refused(attempt: str, remedy: str = "") -> Iterator[None]:
    """Turn an OSError raised inside into an InputError such as `cannot write a/b: no such file`.

    The message is `attempt`, a colon, the system's reason and `remedy`.
    """
    try:
        yield
    except OSError as error:
        reason = "not a directory" if isinstance(error, FileExistsError) else (error.strerror or str(error)).lower()
        raise InputError(f"{attempt}: {reason}{remedy}") from error


_READ = (".json", ".jinja", ".txt", ".model")  # files of a model that libraries read, except the weights


def refuse_odd_files(folder: str | os.PathLike[str]) -> None:
    """Refuse a model folder with a broken link. Libraries would treat it as a missing file and use their defaults.

    Raises:
        InputError: a config, tokenizer or other text file of the model is such a link.
    """
    for name in sorted(os.listdir(folder)):
        path = os.path.join(folder, name)
        if name.endswith(_READ) and os.path.islink(path) and not os.path.exists(path):
            raise InputError(f"{path} is a link to nothing: remove it, or copy the file that it stands for")


def no_folder(name: str | Path) -> InputError:
    """Return the InputError for a user who named a file instead of the folder of a model."""
    return InputError(
        f"expected a folder with a model, {name} is a file: name its folder, with the config.json of the model in it"
    )


def root_folder(root: str | Path) -> Path:
    """Return the path of the run folder `root`.

    Raises:
        InputError: `root` is empty, which would mean the working directory.
    """
    if root == "":
        raise InputError("root: expected a folder, got ''")
    return Path(root)
