"""Models that belong to no series of steps: one alone, or several to be compared with each other."""

import functools
import os
import re
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lit_layers.errors import InputError
from lit_layers.series.auditing import REQUESTS_AT_ONCE
from lit_layers.series.checkpoint import Checkpoint, Listing, Series
from lit_layers.series.files import ListedFile
from lit_layers.series.hub import MAIN
from lit_layers.series.retrying import Retry
from lit_layers.series.sources import TOKENIZER, FolderSource, Hub, HubSource, Source

if TYPE_CHECKING:
    from lit_layers.models.shard_files import ShardFiles


class Models(Series):
    """A set of models in the order given: folders, or repositories of the Hub, at a branch with `NAME@REVISION`.

    A repository that cannot be had is in the listing, and whoever asks for its files is told why: not for it shall the
    others wait. `tokenizers` names one, by the model's name as it stands in `models`, for those of them that carry no
    tokenizer.json.

    Raises:
        InputError: an empty list, a name that is there twice, a folder that does not exist; on first use, if none of
            the models can be had, why the first of them cannot.
    """

    def __init__(
        self,
        models: Sequence[str],
        *,
        name: str = "models",
        tokenizers: Mapping[str, str] | None = None,
        retry: Retry | None = None,
    ) -> None:
        if isinstance(models, str) or not models:
            raise InputError(f"models: expected a list of folders or names on the Hub, got {models!r}")
        if double := [model for model in models if list(models).count(model) > 1]:
            raise InputError(f"models: {double[0]} is there twice")
        self.models, self.name, self.tokenizers, self._retry = list(models), name, dict(tokenizers or {}), retry

    def find(self) -> Listing:
        for model in self.models:
            if model.startswith((".", "/", "~")) and not os.path.isdir(model):
                raise InputError(f"models: expected a folder with a model, {model} does not exist")
        hub = None if all(map(os.path.isdir, self.models)) else Hub(self._retry)
        with ThreadPoolExecutor(REQUESTS_AT_ONCE) as pool:
            sources = list(pool.map(lambda model: _source(hub, model), self.models))
        if isinstance(sources[0], NotToBeHad) and all(isinstance(source, NotToBeHad) for source in sources):
            raise InputError(sources[0].why)
        found = [Checkpoint(self.name, model, source) for model, source in zip(self.models, sources, strict=True)]
        return Listing(checkpoints=tuple(found))

    def tokenizer(self, checkpoint: Checkpoint) -> str | None:
        return super().tokenizer(checkpoint) or self.tokenizers.get(checkpoint.name)


class OneModel(Series):
    """A model alone: a folder, or a repository of the Hub, of which each file is downloaded when it is read.

    A folder or revision that is named after a step, such as step-000001000 or step1000, is that step.

    Raises:
        InputError: no such model.
    """

    is_alone = True

    def __init__(self, model: str | Path, *, revision: str | None = None) -> None:
        self.model, self.name, self.revision = model, os.fspath(model), revision

    @functools.cached_property
    def files(self) -> "ShardFiles":
        """Its files, opened on first use."""
        from lit_layers.models.shard_files import ShardFiles

        return ShardFiles(self.model, revision=self.revision)

    def find(self) -> Listing:
        source = _Alone(self.files, self.revision)
        named = re.fullmatch(r"step-?(\d+)", Path(self.revision or self.name).name)
        return Listing((_ModelAlone(self.name, self.name, source, step=int(named[1]) if named else None),))


@dataclass(frozen=True)
class _ModelAlone(Checkpoint):
    @property
    def is_of_a_series(self) -> bool:
        return False

    def load(self, *, dtype: Any = None) -> Any:
        from lit_layers.models.build import load

        assert isinstance(self.source, _Alone)
        return load(self.name, revision=self.source.shards.commit, dtype=dtype)

    def place(self) -> dict[str, Any]:
        return self.source.describe()

    def provenance(self) -> dict[str, Any]:
        return self.place()


@dataclass(frozen=True)
class _Alone(Source):
    shards: "ShardFiles"
    revision: str | None

    @property
    def files(self) -> Mapping[str, ListedFile]:
        return {}  # nobody compares them with others

    @property
    def is_here(self) -> bool:
        return self.shards.local

    def read(self, path: str) -> bytes:
        return self.shards.fetch(path).read_bytes()

    def fetch(self) -> Path:
        return self.shards.fetch("config.json").parent

    def drop(self) -> None:
        return

    def describe(self) -> dict[str, Any]:
        found = {"checkpoint": self.shards.model}
        return found if self.shards.local else found | {"revision": self.revision or MAIN, "commit": self.shards.commit}

    def tokenizer(self) -> str | None:
        return self._tokenizer_name() if self.shards.has(TOKENIZER) else None

    def _tokenizer_name(self) -> str:
        return self.shards.model if self.revision is None else f"{self.shards.model}@{self.shards.commit}"


@dataclass(frozen=True)
class NotToBeHad(Source):
    """A model whose repository cannot be listed, and why."""

    model: str
    why: str

    @property
    def files(self) -> Mapping[str, ListedFile]:
        raise InputError(self.why)

    @property
    def is_here(self) -> bool:
        return False

    def read(self, path: str) -> bytes:
        raise InputError(self.why)

    def fetch(self) -> Path:
        raise InputError(self.why)

    def drop(self) -> None:
        return

    def describe(self) -> dict[str, Any]:
        return {"checkpoint": self.model}

    def _tokenizer_name(self) -> str:
        raise InputError(self.why)


def _source(hub: Hub | None, model: str) -> Source:
    if hub is None or os.path.isdir(model):
        return FolderSource(Path(model))
    repo, _, revision = model.partition("@")
    revision = revision or MAIN
    try:
        commits = hub.commits(repo)
    except InputError as error:
        return NotToBeHad(model, str(error))
    if revision not in commits:
        return NotToBeHad(model, f"models: {repo} has no branch {revision}; it has {len(commits)}")
    return HubSource(hub, repo, revision, commits[revision])
