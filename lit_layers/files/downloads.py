"""What comes from elsewhere: what files of weights may not say, and how to say in a line what the Hub refused."""

import contextlib
import json
import pickle
import re
import textwrap
from collections.abc import Iterator
from pathlib import PurePosixPath

from huggingface_hub.errors import EntryNotFoundError, GatedRepoError, HTTPError

from lit_layers.errors import InputError


def named_shards(content: str | bytes) -> dict[str, str]:
    """The file of every tensor, of the content of a `model.safetensors.index.json`.

    Raises:
        ValueError: no such index, or one that names a file outside its folder.
    """
    try:
        shards = json.loads(content)["weight_map"]
        names = [PurePosixPath(shard) for shard in shards.values()]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError("is damaged") from error
    for name in names:  # links are followed: in a cache of the Hub every file is one
        if name.is_absolute() or ".." in name.parts or "\\" in str(name):
            raise ValueError(f"names {name}, a file outside its folder")
    return shards


def would_run_code(where: str, error: pickle.UnpicklingError) -> InputError:
    """What is said of a pickle that torch refused with `weights_only`."""
    held = re.search(r"GLOBAL ([\w.]+)", str(error))
    what = f"hold {held[1]}, and loading them would run code" if held else "are more than plain tensors, or damaged"
    return InputError(f"{where}: its weights {what}; nothing was run: only tensors in safetensors or a pickle are read")


# HTTPError is that of the HTTP library the installed huggingface_hub is built on: it covers a refused connection, too.
HUB_ERRORS = (OSError, ValueError, HTTPError, EntryNotFoundError)


LOG_IN = "access is refused: ask for it on the repository's page, then log in with `hf auth login` or set HF_TOKEN"


def is_refused(error: BaseException) -> bool:
    """Whether the Hub answered that this user may not have it: a gated repository, or status 403."""
    status = getattr(getattr(error, "response", None), "status_code", None)
    return isinstance(error, GatedRepoError) or status == 403


def reason(error: Exception) -> str:
    """The kind of an error and the beginning of what it says."""
    return f"{type(error).__name__}: {textwrap.shorten(str(error), 200, placeholder='...')}"


@contextlib.contextmanager
def asking_the_hub(what: str, advice: str) -> Iterator[None]:
    """Turns the many ways in which the Hub, or what reads its data sets, can fail into one sentence.

    Raises:
        InputError: `what` cannot be had, why, and what to do.
    """
    try:
        yield
    except (*HUB_ERRORS, RuntimeError) as error:
        raise InputError(f"{what} ({reason(error)}): {LOG_IN if is_refused(error) else advice}") from error
