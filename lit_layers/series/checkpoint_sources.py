"""Where a checkpoint lies: a folder, or one commit of a repository of the Hub, asked again where the network failed."""

import functools
import json
import os
import pickle
import threading
import time
import zipfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from huggingface_hub.errors import HTTPError, OfflineModeIsEnabled, RevisionNotFoundError

from lit_layers.errors import InputError
from lit_layers.files.downloads import HUB_ERRORS, LOG_IN, is_refused, reason
from lit_layers.series.weight_files import STEMS, ListedFile, Memory, content_hash, formats, on_disk

if TYPE_CHECKING:  # inside functions, torch: it takes seconds to import, and what only lists files needs none of it
    import torch
    from torch import Tensor, nn


Item = TypeVar("Item")
Result = TypeVar("Result")
_REQUESTS_AT_ONCE = 8  # the Hub allows some hundred a minute
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


def at_once(ask: Callable[[Item], Result], items: Iterable[Item]) -> list[Result]:
    """What is asked of each item, several at a time where it takes requests to the Hub; in their order."""
    with ThreadPoolExecutor(_REQUESTS_AT_ONCE) as pool:
        return list(pool.map(ask, items))


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


TOKENIZER, TOKENIZER_CONFIG = "tokenizer.json", "tokenizer_config.json"
COMPANIONS = (".json", ".txt", ".model", ".tiktoken", ".jinja")  # config and tokenizer: data, never code
_LARGEST_COMPANION = 2**26
_TRAINER_STATE = "trainer_state.json"  # of the Trainer of transformers
_dropping = threading.Lock()


class Source(ABC):
    """The files of one checkpoint."""

    @property
    @abstractmethod
    def files(self) -> Mapping[str, ListedFile]:
        """Names, sizes and hashes of the files at the top, without downloading any."""

    @abstractmethod
    def read(self, path: str) -> bytes:
        """The content of a small file."""

    @abstractmethod
    def fetch(self) -> Path:
        """A local folder with config, tokenizer and weights, downloaded now if need be."""

    def drop(self) -> None:  # noqa: B027 - what lies on this machine stays
        """Removes from this machine the weights that `fetch` downloaded; what was there before stays."""

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """Where the checkpoint comes from, for provenance."""

    @abstractmethod
    def tokenizer(self) -> str | None:
        """The tokenizer as recipes name it, downloaded now if need be; None where the checkpoint carries none."""

    def load(self, folder: Path, dtype: "torch.dtype") -> "nn.Module":
        """The model in the folder that `fetch` gave, on the CPU in evaluation mode; no code of the checkpoint runs."""
        from lit_layers.models.saved import load  # torch, which names and steps do not need

        return load(folder, dtype=dtype)

    @property
    def is_here(self) -> bool:
        """Whether the weights are on this machine."""
        return True

    def identity(self) -> Any:
        """What changes when the weights are others, without reading them: the listed hashes."""
        return self.weights()

    def tensors(self) -> Iterator[tuple[str, "Tensor"]]:
        """The tensors of the weight files, one at a time, mapped: a value is read when it is touched.

        Raises:
            InputError: a file that is damaged, a pickle that is more than tensors.
        """
        folder = self.fetch()
        for path in sorted(self.weights()):
            yield from tensors_in(folder / path)

    def recorded_step(self) -> int | None:
        """The optimizer step that the checkpoint itself says it is of, where it does."""
        return None

    def weights(self) -> dict[str, str]:
        """The hash of every weight file that is loaded: safetensors, or else the pickle."""
        loaded = next(iter(formats(self.files).values()), {})
        return {path: file.hash for path, file in loaded.items()}


@dataclass(frozen=True)
class FolderSource(Source):
    """A folder with config.json and weights; `memory` keeps the hashes of its files."""

    folder: Path
    memory: Memory | None = field(default=None, compare=False, repr=False)

    @functools.cached_property
    def files(self) -> Mapping[str, ListedFile]:
        return companions(self.folder, self.memory, weights=True)

    def identity(self) -> Any:
        return {path: on_disk(self.folder / path) for path in self.weights()}

    def recorded_step(self) -> int | None:
        try:
            state = json.loads((self.folder / _TRAINER_STATE).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        step = state.get("global_step") if isinstance(state, dict) else None
        return step if isinstance(step, int) else None

    def read(self, path: str) -> bytes:
        return (self.folder / path).read_bytes()

    def fetch(self) -> Path:
        return self.folder

    def describe(self) -> dict[str, Any]:
        return {"checkpoint": str(self.folder)}

    def tokenizer(self) -> str | None:
        return str(self.folder) if TOKENIZER in self.files else None


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

        def once() -> tuple[Path, bool]:
            is_new = self.cached(repo, commit, file.path) is None
            path = Path(self.api.hf_hub_download(repo, file.path, revision=commit))
            if is_new and content_hash(path, file.hash) != file.hash:
                blob = path.resolve()
                path.unlink()
                blob.unlink(missing_ok=True)
                raise DamagedDownload(f"{file.path} arrived with another hash than the Hub lists")
            return path, is_new

        return self._at((repo, commit, name), f"cannot download {file.path} of {repo} at {name}", once)

    def cached(self, repo: str, commit: str, path: str) -> str | None:
        """Where a file lies in the cache, if it does."""
        from huggingface_hub import try_to_load_from_cache

        place = try_to_load_from_cache(repo, path, revision=commit)
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


@dataclass(frozen=True)
class HubSource(Source):
    """One commit of a repository; `revision` is the branch that pointed to it when it was listed."""

    hub: Hub = field(compare=False, repr=False)
    repo: str
    revision: str
    commit: str
    why: str | None = None  # it cannot be had
    _downloaded: list[Path] = field(default_factory=list, compare=False, repr=False)

    @functools.cached_property
    def files(self) -> Mapping[str, ListedFile]:
        if self.why is not None:
            raise InputError(self.why)
        return self.hub.tree(self.repo, self.commit, self.revision)

    @functools.cached_property
    def _below(self) -> Mapping[str, ListedFile]:
        return self.hub.tree(self.repo, self.commit, self.revision, below=True)

    def read(self, path: str) -> bytes:
        return self._download(path).read_bytes()

    def fetch(self) -> Path:
        beside = [path for path, file in self.files.items() if _is_companion(path, file.size)]
        if "config.json" not in beside:
            raise InputError(f"expected a model in {self.repo} at {self.revision}, found no config.json there")
        weights = self.weights()
        if not weights:
            raise InputError(
                f"{self.repo} at {self.revision} holds no weights: expected {' or '.join(map(''.join, STEMS.values()))}"
            )
        paths = [self._download(path) for path in (*beside, *weights)]
        return paths[0].parent

    @property
    def is_here(self) -> bool:
        return self.why is None and all(
            self.hub.cached(self.repo, self.commit, path) is not None for path in self.weights()
        )

    def drop(self) -> None:
        with _dropping:
            while self._downloaded:
                link = self._downloaded.pop()
                blob = link.resolve()
                link.unlink(missing_ok=True)
                others = (other for other in link.parents[1].glob(f"*/{link.name}") if other.resolve() == blob)
                if blob != link and not any(others):
                    blob.unlink(missing_ok=True)

    def describe(self) -> dict[str, Any]:
        return {"checkpoint": self.repo, "revision": self.revision, "commit": self.commit}

    def tokenizer(self) -> str | None:
        if TOKENIZER not in self.files:
            return None
        for path in (TOKENIZER_CONFIG, TOKENIZER):  # the first names the end of text
            if path in self.files:
                self._download(path)
        return f"{self.repo}@{self.commit}"  # and not where the cache of this machine has it

    def _download(self, path: str) -> Path:
        files = self._below if "/" in path else self.files
        place, is_new = self.hub.download(self.repo, self.commit, self.revision, files[path])
        if is_new and path in self.weights():
            self._downloaded.append(place)
        return place


def companions(folder: Path, memory: Memory | None = None, *, weights: bool = False) -> dict[str, ListedFile]:
    """Config and tokenizer of a folder, and with `weights` these, too; what else lies there is not hashed."""
    names = tuple(stem for stem, _ in STEMS.values())
    listed: dict[str, ListedFile] = {}
    for path in sorted(each for each in folder.iterdir() if each.is_file()):
        is_weights = path.name.startswith(names) and path.suffix in (".safetensors", ".bin")
        if (weights and is_weights) or _is_companion(path.name, path.stat().st_size):
            hash_ = content_hash(path) if memory is None else memory.hash_of(path, lambda path=path: content_hash(path))
            listed[path.name] = ListedFile(path.name, path.stat().st_size, hash_)
    return listed


def _is_companion(path: str, size: int) -> bool:
    return "/" not in path and path.endswith(COMPANIONS) and size <= _LARGEST_COMPANION


def tensors_in(path: Path) -> Iterator[tuple[str, "Tensor"]]:
    """The tensors of one file, mapped anew for each, so that what was read of one leaves memory with it.

    Raises:
        InputError: it is damaged, or a pickle that is more than tensors.
    """
    import torch
    from safetensors import SafetensorError, safe_open

    try:
        if path.suffix == ".safetensors":
            with safe_open(path, framework="pt") as file:
                names = list(file.keys())
            for name in names:
                with safe_open(path, framework="pt") as file:
                    yield name, file.get_tensor(name)
            return
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
        if not isinstance(state, dict) or not all(isinstance(value, torch.Tensor) for value in state.values()):
            raise InputError(f"{path} holds more than tensors by name: no weights of a model")
        yield from state.items()
    except (OSError, SafetensorError, RuntimeError, EOFError, LookupError, ValueError, pickle.UnpicklingError) as error:
        raise InputError(f"{path.name} cannot be read ({' '.join(str(error).split())[:150]})") from error
