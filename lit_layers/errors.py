"""What ends a command with one sentence."""

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
