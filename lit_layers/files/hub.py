"""The Hugging Face Hub: requests, and what a download may not say or run."""

import contextlib
import hashlib
import json
import os
import pickle
import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from huggingface_hub import errors

from lit_layers.errors import InputError, refused


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
    """Refuse a config.json that names a repository of the Hub as its attention or experts: transformers would run it.

    Raises:
        InputError: naming the field.
    """
    for part in settings if isinstance(settings, list) else ():
        refuse_foreign_code(part, name)
    for key, value in settings.items() if isinstance(settings, dict) else ():
        if "_implementation" in key and "/" in str(value):
            why = f"got {value}, which is code of the Hub"
            raise InputError(f"{name}: expected {key} sdpa or eager in its config.json, {why}")
        if key == "attribute_map":
            raise InputError(f"{name}: expected no attribute_map in its config.json, which renames its other fields")
        refuse_foreign_code(value, name)


def would_run_code(where: str, error: pickle.UnpicklingError) -> InputError:
    """What is said of a pickle that torch refused with `weights_only`."""
    held = re.search(r"GLOBAL ([\w.]+)", str(error))
    what = f"hold {held[1]}, and loading them would run code" if held else "are more than plain tensors, or damaged"
    return InputError(f"{where}: its weights {what}; nothing was run: only tensors in safetensors or a pickle are read")


# HTTPError is that of the HTTP library the installed huggingface_hub is built on: it covers a refused connection, too.
ADAPTER = "adapter_config.json"  # of peft
MERGE_IT = "merge it into its model (merge_and_unload of peft), save that model, and name its folder"
HUB_ERRORS = (OSError, ValueError, errors.HTTPError, errors.EntryNotFoundError)
LOG_IN = "access is refused: ask for it on the repository's page, then log in with `hf auth login` or set HF_TOKEN"
ASK_AGAIN = "check the name, the revision and the network, or run the same command again later"


def reason(error: Exception) -> str:
    """The kind of an error and the beginning of what it says."""
    return f"{type(error).__name__}: {textwrap.shorten(str(error), 200, placeholder='...')}"


@contextlib.contextmanager
def hub_errors(what: str, advice: str = "") -> Iterator[None]:
    """Turn the many ways in which the Hub, or what reads its data sets, can fail into one sentence.

    Where the network fails or the Hub is busy, huggingface_hub itself asks again several times.

    Raises:
        InputError: `what` cannot be had, why, and what to do.
    """
    try:
        yield
    except InputError:
        raise
    except (*HUB_ERRORS, RuntimeError) as error:
        status = getattr(getattr(error, "response", None), "status_code", None)
        is_refused = isinstance(error, errors.GatedRepoError) or status == 403
        remedy = LOG_IN if is_refused else advice or ASK_AGAIN
        raise InputError(f"{what} ({reason(error)}): {remedy}") from error


@dataclass(frozen=True)
class ListedFile:
    """A file by its name in the checkpoint. `hash` is a sha256, or git's sha1 where the Hub knows no other."""

    path: str
    size: int
    hash: str


def content_hash(path: Path) -> str:
    """Return the sha256 of a file's content."""
    with refused(f"cannot read {path}"), path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class Hub:
    """Requests to the Hugging Face Hub.

    Raises:
        InputError: what cannot be had, why, and what to do.
    """

    def __init__(self) -> None:
        from huggingface_hub import HfApi  # 0.2 s, which a series on this machine need not wait for

        os.environ.setdefault("DISABLE_SAFETENSORS_CONVERSION", "1")  # else a pickle starts a thread that asks the Hub
        self.api = HfApi()

    def commits(self, repo: str) -> dict[str, str]:
        """The commit of every branch, and of every tag that no branch is named like: one request."""
        with hub_errors(f"cannot list the branches of {repo}"):
            refs = self.api.list_repo_refs(repo)
        return {ref.name: ref.target_commit for ref in (*refs.tags, *refs.branches)}

    def tree(self, repo: str, commit: str, name: str) -> dict[str, ListedFile]:
        """The files of a commit at its top."""
        from huggingface_hub import RepoFile

        with hub_errors(f"cannot list the files of {repo} at {name}"):
            rows = list(self.api.list_repo_tree(repo, revision=commit))
        files = [row for row in rows if isinstance(row, RepoFile)]
        return {row.path: ListedFile(row.path, row.size, row.lfs.sha256 if row.lfs else row.blob_id) for row in files}

    def download(self, repo: str, revision: str | None, path: str, what: str) -> Path:
        """Return where a file lies now.

        Raises:
            InputError: `what`, and why; from a FileNotFoundError where the repository has no such file.
        """
        try:
            with hub_errors(what):
                return Path(self.api.hf_hub_download(repo, path, revision=revision))
        except InputError as error:
            if isinstance(error.__cause__, errors.RemoteEntryNotFoundError):
                raise error from FileNotFoundError(path)
            raise

    def cached(self, repo: str, revision: str | None, path: str) -> str | None:
        """Where a file lies in the cache, if it does."""
        from huggingface_hub import try_to_load_from_cache

        place = try_to_load_from_cache(repo, path, revision=revision)
        return place if isinstance(place, str) else None
