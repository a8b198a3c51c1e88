"""What ends a command with one sentence."""

import os
from collections.abc import Iterator
from contextlib import contextmanager


class InputError(ValueError):
    """Raised for input that only the user can mend: a field, a file, a folder, a combination of options.

    Its message is one sentence: what was expected, what came (field and value), what to do. The command line
    prints that sentence and exits with code 2, without a traceback.
    """


class RunLostError(InputError):
    """Raised where a run's folder was taken over or removed while it was written: nothing more is written there.

    The command line prints the sentence and exits with code 1.
    """


@contextmanager
def refused(attempt: str, remedy: str = "") -> Iterator[None]:
    """An error of the operating system inside becomes `ATTEMPT: reasonREMEDY`, as `cannot write a/b: no such file`."""
    try:
        yield
    except OSError as error:
        reason = "not a directory" if isinstance(error, FileExistsError) else (error.strerror or str(error)).lower()
        raise InputError(f"{attempt}: {reason}{remedy}") from error


def refuse_pipe(name: str | os.PathLike[str], option: str = "") -> None:
    """Refuses a name that is there and neither a file nor a folder: to read a pipe, socket or device may never end.

    What a shell makes of `<(COMMAND)` is read.

    Raises:
        InputError: naming it.
    """
    name = os.fspath(name)
    if os.path.exists(name) and not os.path.isfile(name) and not os.path.isdir(name) and name[:8] != "/dev/fd/":
        raise InputError(f"{option}expected a file or folder, {name} is a pipe, a socket or a device")
