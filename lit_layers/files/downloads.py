"""What comes from elsewhere: what models may not say, and how to say in a line what the Hub refused."""

import contextlib
import json
import pickle
import re
import textwrap
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path, PurePosixPath
from typing import Any

from huggingface_hub.errors import EntryNotFoundError, GatedRepoError, HTTPError

from lit_layers.errors import InputError

_OF_TORCH = {  # what these fields of a config.json may choose where the package `kernels` is installed
    "attn_implementation": ("sdpa", "eager", "flex_attention"),
    "experts_implementation": ("grouped_mm", "eager", "batched_mm"),
}
_FETCHING = ("mra", "rwkv", "yoso")  # types of models that fetch a kernel whatever their config.json says
_UNINSTALL = "a kernel of the Hub, which is code: uninstall the package kernels"


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


def refuse_foreign_code(settings: Any, name: str | Path) -> None:
    """Refuses a config.json by which transformers would fetch a kernel from the Hub, which is code, and run it.

    One that is named is refused everywhere. Where the package `kernels` is installed, which fetches them, so is what
    would be fetched in place of a package (`flash_attention_2`), for quantized weights, or for some types of models.

    Raises:
        InputError: naming the field.
    """
    for part in settings if isinstance(settings, list) else ():
        refuse_foreign_code(part, name)
    for key, value in settings.items() if isinstance(settings, dict) else ():
        pair = next((names for field, names in _OF_TORCH.items() if key.lstrip("_").startswith(field)), None)
        chosen = [str(part) for part in (value.values() if isinstance(value, dict) else [value]) if part and pair]
        if pair and any("/" in part or (has_kernels() and part.removeprefix("paged|") not in pair) for part in chosen):
            raise InputError(
                f"{name}: expected {key} {pair[0]} or {pair[1]} in its config.json, got {value}, which is code of "
                "the Hub"
            )
        if key == "attribute_map":
            raise InputError(f"{name}: expected no attribute_map in its config.json, which renames its other fields")
        if has_kernels() and value and (key == "quantization_config" or (key == "model_type" and value in _FETCHING)):
            raise InputError(f"{name}: {key} in its config.json may fetch {_UNINSTALL}")
        refuse_foreign_code(value, name)


def has_kernels() -> bool:
    """Whether the package is installed by which transformers fetches kernels from the Hub."""
    return find_spec("kernels") is not None


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
