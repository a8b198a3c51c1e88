"""What ends a command with one sentence."""

import difflib
import errno
import os
import re
import stat
import sys
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
    """Returns the first line of what an error says, else its kind."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def first_sentence(error: BaseException) -> str:
    """Returns the first sentence of what an error says, on one line."""
    return " ".join(str(error).split()).split(". ")[0]


def kind_and_words(error: BaseException) -> str:
    """Returns the kind of an error and all that it says, on one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def did_you_mean(word: str, names: Iterable[str], otherwise: str, *, most: int = 3) -> str:
    """Returns `did you mean A or B?` of the names that are near, whatever their case, or what is said `otherwise`."""
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


@contextmanager
def panics_as_errors() -> Iterator[None]:
    """Inside, a library in Rust that panics over what it reads raises a ValueError: its own is no Exception."""
    try:
        yield
    except BaseException as error:
        if not is_panic(error):
            raise
        raise ValueError(str(error)) from error


def is_panic(error: BaseException) -> bool:
    """Whether a library in Rust stopped, which no class that can be imported stands for."""
    return type(error).__name__ == "PanicException"


def refuse_pipe(name: str | os.PathLike[str], option: str = "") -> None:
    """Refuses a name that is there and neither a file nor a folder: to read a pipe, socket or device may never end.

    What a shell makes of `<(COMMAND)` is read; inside of a command only where its own words name it.

    Raises:
        InputError: naming it.
    """
    name = os.fspath(name)
    if os.path.exists(name) and not os.path.isfile(name) and not os.path.isdir(name) and not _is_of_shell(name):
        raise InputError(f"{option}{_no_file(name)}")


# What somebody reads of a folder with a model, beside its weights, and the most that one of them may take.
_OF_A_MODEL = (
    *("config.json", "generation_config.json", "preprocessor_config.json", "processor_config.json"),
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja"),
    *("vocab.json", "vocab.txt", "merges.txt", "tokenizer.model", "spiece.model", "trainer_state.json"),
    *("model.safetensors.index.json", "pytorch_model.bin.index.json", "adapter_config.json"),
)
_LARGEST_OF_A_MODEL = 2**28  # bytes: the largest tokenizers take 2**25
_LARGEST_STATE = 2**31  # a trainer's, with a row for each step that it logged


def refuse_odd_files(folder: str | os.PathLike[str]) -> None:
    """Refuses a folder in which what a reader of models looks for is there and no file that can be read.

    Libraries take such a file for one that is missing, and then fall back to something else.

    Raises:
        InputError: naming the first.
    """
    for why in odd_files(folder).values():
        raise InputError(why)


def odd_files(folder: str | os.PathLike[str]) -> dict[str, str]:
    """What `refuse_odd_files` refuses of a folder: the names, each with why."""
    found: dict[str, str] = {}
    for name in _OF_A_MODEL:
        try:
            _refuse_odd_file(os.path.join(folder, name))
        except InputError as error:
            found[name] = str(error)
    return found


def _refuse_odd_file(path: str) -> None:
    if not os.path.lexists(path):
        return
    if not os.path.exists(path):
        raise InputError(f"{path} is a link to nothing: remove it, or copy the file that it stands for")
    if os.path.isdir(path):
        raise InputError(f"expected a file, {path} is a folder")
    refuse_pipe(path)
    most = _LARGEST_STATE if path.endswith("trainer_state.json") else _LARGEST_OF_A_MODEL
    if (size := os.path.getsize(path)) > most:
        raise InputError(f"{path} has {size:,} bytes, at most {most:,} are read of such a file")
    with refused(f"cannot read {path}"), open(path, "rb") as file:
        file.read(1)


def whole_path(path: str | Path) -> Path:
    """A path with the ~ at its beginning written out.

    Raises:
        InputError: it is the home of a user who is none.
    """
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise InputError(f"expected a whole path, got {str(path)!r}, and there is no such user") from error


@contextmanager
def refusing_pipes(words: Iterable[str] = ()) -> Iterator[None]:
    """Inside, no Python code opens a pipe, or a device to read from, whoever named it: a recipe, an index, a link.

    `words` are the user's own, which may name what a shell makes of `<(COMMAND)`.

    Raises:
        InputError: naming it.
    """
    global _guarded, _is_hooked, _of_shell
    if not _guarded:  # a command inside of another has the words of a recipe
        _of_shell = {part for word in words for part in (word, word.partition("=")[2])}
    if not _is_hooked:  # hooks stay for good
        sys.addaudithook(_refuse_to_open)
        _is_hooked = True
    _guarded += 1
    try:
        yield
    finally:
        _guarded -= 1


_guarded, _is_hooked = 0, False
_of_shell = set[str]()
_DESCRIPTOR = re.compile(r"/(?:dev|proc/[^/]+)/fd/(\d+)")


def _is_of_shell(name: str) -> bool:
    number = _DESCRIPTOR.fullmatch(name)
    return number is not None and (not _guarded or f"/dev/fd/{number[1]}" in _of_shell)


def _refuse_to_open(event: str, details: tuple[object, ...]) -> None:
    if event != "open" or not _guarded or not isinstance(details[0], str | bytes):
        return
    name = os.fsdecode(details[0])
    if name == os.devnull or _is_of_shell(name):
        return
    try:
        mode = os.stat(name).st_mode
    except (OSError, ValueError):
        return
    # A terminal is opened to write, too.
    if stat.S_ISFIFO(mode) or (stat.S_ISCHR(mode) and not int(str(details[2])) & (os.O_WRONLY | os.O_RDWR)):
        raise InputError(_no_file(name))


def _no_file(name: str) -> str:
    return f"expected a file or folder, {name} is a pipe, a socket or a device"
