"""Requests to the Hugging Face Hub, and refusals of model files that would run code or read files elsewhere."""

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
    """Return the name of the weight file of every tensor, from the content of a `model.safetensors.index.json`.

    Raises:
        ValueError: the content is not such an index, or it names a file outside its folder.
    """
    try:
        shards = json.loads(content)["weight_map"]
        names = [PurePosixPath(shard) for shard in shards.values()]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError("is damaged") from error
    for name in names:  # only the names are checked, because in the Hub's cache every file is a link to elsewhere
        if name.is_absolute() or ".." in name.parts or "\\" in str(name):
            raise ValueError(f"names {name}, a file outside its folder")
    return shards


def refuse_foreign_code(settings: Any, name: str | Path) -> None:
    """Refuse a config.json in which a field names a repository with the code of the attention or the experts.

    transformers would download that code and run it.

    Raises:
        InputError: there is such a field, or an `attribute_map`, which could give such a field another name.
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
    """Return the InputError for a pickle of weights that torch refused to load with `weights_only`."""
    held = re.search(r"GLOBAL ([\w.]+)", str(error))
    what = f"hold {held[1]}, and loading them would run code" if held else "are more than plain tensors, or damaged"
    return InputError(f"{where}: its weights {what}; nothing was run: only tensors in safetensors or a pickle are read")


ADAPTER = "adapter_config.json"  # file of a peft adapter
MERGE_IT = "merge it into its model (merge_and_unload of peft), save that model, and name its folder"
# Errors of a failed request. HTTPError comes from the HTTP library of huggingface_hub and covers refused connections.
HUB_ERRORS = (OSError, ValueError, errors.HTTPError, errors.EntryNotFoundError)
LOG_IN = "access is refused: ask for it on the repository's page, then log in with `hf auth login` or set HF_TOKEN"
ASK_AGAIN = "check the name, the revision and the network, or run the same command again later"


def reason(error: Exception) -> str:
    """Return the class of an error and the first 200 characters of its message, to be quoted in another message."""
    return f"{type(error).__name__}: {textwrap.shorten(str(error), 200, placeholder='...')}"


@contextlib.contextmanager
def hub_errors(what: str, advice: str = "") -> Iterator[None]:
    """Turn errors of the Hub, and of libraries that read its data sets, into an InputError of one sentence.

    huggingface_hub itself retries if the network fails or the Hub is busy.

    Args:
        what: beginning of the sentence, such as `cannot list the branches of ORGANIZATION/NAME`.
        advice: end of the sentence; empty: advice to check the name, the revision and the network.

    Raises:
        InputError: the code inside failed; the message gives the reason and the advice.
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
    """A file of a checkpoint. `hash` is a sha256, or git's sha1 for small files of the Hub."""

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
        InputError: a request failed; the message gives the reason and says what to do.
    """

    def __init__(self) -> None:
        from huggingface_hub import HfApi  # this import takes 0.2 s, and a local series does not need it

        # Without this, transformers starts a thread when it loads a pickle. The thread asks the Hub for a safetensors
        # version.
        os.environ.setdefault("DISABLE_SAFETENSORS_CONVERSION", "1")
        self.api = HfApi()

    def commits(self, repo: str) -> dict[str, str]:
        """Return the commit of every branch and tag, by name, with one request.

        If a branch and a tag have the same name, the commit is that of the branch.
        """
        with hub_errors(f"cannot list the branches of {repo}"):
            refs = self.api.list_repo_refs(repo)
        return {ref.name: ref.target_commit for ref in (*refs.tags, *refs.branches)}

    def tree(self, repo: str, commit: str, name: str) -> dict[str, ListedFile]:
        """Return the files at the top level of a commit."""
        from huggingface_hub import RepoFile

        with hub_errors(f"cannot list the files of {repo} at {name}"):
            rows = list(self.api.list_repo_tree(repo, revision=commit))
        files = [row for row in rows if isinstance(row, RepoFile)]
        return {row.path: ListedFile(row.path, row.size, row.lfs.sha256 if row.lfs else row.blob_id) for row in files}

    def download(self, repo: str, revision: str | None, path: str, what: str) -> Path:
        """Download a file and return its local path.

        Raises:
            InputError: the download failed. Its `__cause__` is a FileNotFoundError if the repository has no such file.
        """
        try:
            with hub_errors(what):
                return Path(self.api.hf_hub_download(repo, path, revision=revision))
        except InputError as error:
            if isinstance(error.__cause__, errors.RemoteEntryNotFoundError):
                raise error from FileNotFoundError(path)
            raise

    def cached(self, repo: str, revision: str | None, path: str) -> str | None:
        """Return the path of a repository's file in the local cache; None if it is not cached."""
        from huggingface_hub import try_to_load_from_cache

        place = try_to_load_from_cache(repo, path, revision=revision)
        return place if isinstance(place, str) else None
