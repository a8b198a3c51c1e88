"""Models that belong to no series of steps: to be compared with each other."""

import os
from collections.abc import Sequence
from pathlib import Path

from lit_layers.errors import InputError
from lit_layers.series.checkpoint import Checkpoint, Listing, Series
from lit_layers.series.hub import MAIN
from lit_layers.series.retrying import Retry
from lit_layers.series.sources import FolderSource, Hub, HubSource, Source


class Models(Series):
    """A set of models in the order given: folders, or repositories of the Hub, at a branch with `NAME@REVISION`."""

    def __init__(self, models: Sequence[str], *, name: str = "models", retry: Retry | None = None) -> None:
        if isinstance(models, str) or not models:
            raise InputError(f"models: expected a list of folders or names on the Hub, got {models!r}")
        if double := [model for model in models if list(models).count(model) > 1]:
            raise InputError(f"models: {double[0]} is there twice")
        self.models, self.name, self._retry = list(models), name, retry

    def find(self) -> Listing:
        hub: Hub | None = None
        found: list[Checkpoint] = []
        for model in self.models:
            source: Source
            if os.path.isdir(model):
                source = FolderSource(Path(model))
            elif model.startswith((".", "/", "~")):
                raise InputError(f"models: expected a folder with a model, {model} does not exist")
            else:
                hub = hub or Hub(self._retry)
                source = _on_the_hub(hub, model)
            found.append(Checkpoint(self.name, model, source))
        return Listing(checkpoints=tuple(found))


def _on_the_hub(hub: Hub, model: str) -> HubSource:
    repo, _, revision = model.partition("@")
    commits = hub.commits(repo)
    revision = revision or MAIN
    if revision not in commits:
        raise InputError(f"models: {repo} has no branch {revision}; it has {len(commits)}")
    return HubSource(hub, repo, revision, commits[revision])
