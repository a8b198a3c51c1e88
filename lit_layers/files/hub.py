"""Requests to the Hugging Face Hub: tried again where the network failed; downloads are compared by hash."""

import functools
import hashlib
import os
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from huggingface_hub.errors import (
    EntryNotFoundError,
    HTTPError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RevisionNotFoundError,
)

from lit_layers.errors import InputError
from lit_layers.files.downloads import HUB_ERRORS, LOG_IN, is_refused, reason

Result = TypeVar("Result")
_HASH = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
WORTH_ANOTHER_TRY = {408, 425, 429, *range(500, 600)}


class DamagedDownload(OSError):
    """What arrived is not what the Hub lists."""


class MovedCommit(OSError):
    """A commit that the Hub listed is no longer there."""


@dataclass(frozen=True)
class Retry:
    """How often and how patiently: waits of 1, 2, 4, ... seconds, or what the server asks for."""

    attempts: int = 5
    first_wait: float = 1.0
    longest_wait: float = 60.0
    sleep: Callable[[float], None] = time.sleep

    def call(self, what: str, action: Callable[[], Result]) -> Result:
        """Returns what `action` does in the end.

        Raises:
            InputError: `what`, the last reason and the number of attempts, in one sentence.
        """
        for attempt in range(self.attempts):
            try:
                return action()
            except InputError:
                raise
            except HUB_ERRORS as error:
                if not is_transient(error):
                    raise InputError(f"{what} ({reason(error)}): {_advice(error)}") from error
                if attempt == self.attempts - 1:
                    raise InputError(
                        f"{what} after {self.attempts} attempts ({reason(error)}): run the same command again later"
                    ) from error
                wait = min(self.longest_wait, self.first_wait * 2**attempt)
                self.sleep(max(wait, min(_asked_for(error), self.longest_wait)))
        raise AssertionError("unreachable: attempts is at least 1")


def is_transient(error: BaseException | None) -> bool:
    """Whether the same request may succeed later: timeouts, cut connections, 429, 5xx, damaged or moved content."""
    while error is not None:
        if isinstance(error, OfflineModeIsEnabled):
            return False
        if isinstance(error, DamagedDownload | MovedCommit | TimeoutError | ConnectionError):
            return True
        if isinstance(error, HTTPError):
            status = getattr(getattr(error, "response", None), "status_code", None)
            return status is None or status in WORTH_ANOTHER_TRY
        if isinstance(error, OSError) and "Consistency check failed" in str(error):
            return True
        error = error.__cause__
    return False


def _advice(error: BaseException) -> str:
    if is_refused(error):
        return LOG_IN
    if isinstance(error, OfflineModeIsEnabled) or isinstance(error.__cause__, OfflineModeIsEnabled):
        return "unset HF_HUB_OFFLINE"
    if isinstance(error, HTTPError | ValueError):
        return "check the name, the revision and your access to it"
    return "check the disk of the cache (HF_HOME)"


def _asked_for(error: BaseException) -> float:
    """Seconds that the server asks us to wait."""
    headers = getattr(getattr(error, "response", None), "headers", {})
    text = headers.get("Retry-After", "")
    return float(text) if text.isdigit() else 0.0


@dataclass(frozen=True)
class ListedFile:
    """A file by its name in the checkpoint. `hash` is a sha256, or git's sha1 where the Hub knows no other."""

    path: str
    size: int
    hash: str


def content_hash(path: Path, like: str = "sha256") -> str:
    """The hash of a file's content: sha256, or git's sha1 where `like` is as short as one."""
    begin = hashlib.sha256
    if len(like) == 40:
        begin = functools.partial(hashlib.sha1, f"blob {path.stat().st_size}\0".encode())
    with path.open("rb") as file:
        return hashlib.file_digest(file, begin).hexdigest()


class Hub:
    """Requests to the Hugging Face Hub, each tried again where the network failed.

    Raises:
        InputError: what cannot be had, why, and after how many attempts.
    """

    def __init__(self, retry: Retry | None = None) -> None:
        from huggingface_hub import HfApi  # 0.2 s, which a series on this machine need not wait for

        os.environ.setdefault("DISABLE_SAFETENSORS_CONVERSION", "1")  # else a pickle starts a thread that asks the Hub
        self.api, self.retry = HfApi(), retry or Retry()

    def commits(self, repo: str) -> dict[str, str]:
        """The commit of every branch, and of every tag that no branch is named like: one request."""
        refs = self.retry.call(f"cannot list the branches of {repo}", lambda: self.api.list_repo_refs(repo))
        return {ref.name: ref.target_commit for ref in (*refs.tags, *refs.branches)}

    def tree(self, repo: str, commit: str, name: str, *, below: bool = False) -> dict[str, ListedFile]:
        """The files of a commit at its top; with `below` those in folders, too."""
        from huggingface_hub import RepoFile

        rows = self._at(
            (repo, commit, name),
            f"cannot list the files of {repo} at {name}",
            lambda: list(self.api.list_repo_tree(repo, revision=commit, recursive=below)),
        )
        files = [row for row in rows if isinstance(row, RepoFile)]
        return {row.path: ListedFile(row.path, row.size, row.lfs.sha256 if row.lfs else row.blob_id) for row in files}

    def download(self, repo: str, commit: str, name: str, file: ListedFile) -> tuple[Path, bool]:
        """Where a file lies now, and whether it was downloaded for this: then its hash has been compared."""
        return self._at(
            (repo, commit, name),
            f"cannot download {file.path} of {repo} at {name}",
            lambda: self._download(repo, commit, file.path, file.hash),
        )

    def fetch(self, repo: str, revision: str | None, path: str, what: str) -> Path:
        """Where a file lies now; if it had to be downloaded, its hash has been compared with what the Hub says of it.

        Raises:
            InputError: `what`, and why; from a FileNotFoundError where the repository has no such file.
        """
        try:
            return self.retry.call(what, lambda: self._download(repo, revision, path, None)[0])
        except InputError as error:
            cause = error.__cause__
            if isinstance(cause, EntryNotFoundError) and not isinstance(cause, LocalEntryNotFoundError):
                raise error from FileNotFoundError(path)
            raise

    def _download(self, repo: str, revision: str | None, path: str, listed: str | None) -> tuple[Path, bool]:
        is_new = self.cached(repo, revision, path) is None
        place = Path(self.api.hf_hub_download(repo, path, revision=revision))
        blob = place.resolve()  # which the cache names by the hash that the Hub sent
        expected = listed or blob.name
        if is_new and _HASH.fullmatch(expected) and content_hash(place, expected) != expected:
            place.unlink()
            blob.unlink(missing_ok=True)
            raise DamagedDownload(f"{path} arrived with another hash than the Hub lists")
        return place, is_new

    def cached(self, repo: str, revision: str | None, path: str) -> str | None:
        """Where a file lies in the cache, if it does."""
        from huggingface_hub import try_to_load_from_cache

        place = try_to_load_from_cache(repo, path, revision=revision)
        return place if isinstance(place, str) else None

    def _at(self, place: tuple[str, str, str], what: str, action: Callable[[], Result]) -> Result:
        """Does something at a commit; one that is gone means that the branch was rewritten since it was listed."""
        repo, commit, name = place

        def once() -> Result:
            try:
                return action()
            except RevisionNotFoundError as error:
                now = {ref.name: ref.target_commit for ref in self.api.list_repo_refs(repo).branches}.get(name)
                there = f"now {now[:12]}" if now else "now gone"
                raise MovedCommit(f"{name} was moved: listed at {commit[:12]}, {there}") from error

        return self.retry.call(what, once)
