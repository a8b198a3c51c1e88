"""The files of one model: in a local folder, or in a repository of the Hub, each downloaded when it is needed."""

import os
import re
from pathlib import Path
from typing import Any

from lit_layers import schema
from lit_layers.errors import InputError, refuse_odd_files
from lit_layers.files.gguf_files import no_folder
from lit_layers.files.hub import Hub

CONFIG = "config.json"


class ModelFiles:
    """A folder with config.json and weights, or a repository of the Hub, whose files are checked by their hashes.

    Raises:
        InputError: no such model.
    """

    def __init__(self, model: str | Path, *, revision: str | None = None) -> None:
        self.model = os.fspath(model)
        self.commit: str | None = None
        self._revision = revision
        self._folder = Path(self.model) if os.path.isdir(self.model) else None
        self.local = self._folder is not None
        self._paths: dict[str, Path] = {}
        if os.path.isfile(self.model):
            raise no_folder(model)
        if self._folder is None:
            name = self.model
            local = isinstance(model, Path) or not re.fullmatch(r"\w[\w.-]*(/[\w.-]+)?", name)
            if local or ("/" in name and Path(name).parent.is_dir()):
                raise InputError(f"expected a folder with a model or a name on the Hub, {name} does not exist")
            self._hub = Hub()
            self._revision = self.commit = self.fetch(CONFIG).parent.name
        elif revision is not None:
            raise InputError(f"revision: {self.model} is a local folder and has no revision {revision!r}: leave it out")
        else:
            refuse_odd_files(self._folder)
            if not (self._folder / CONFIG).is_file():
                raise InputError(f"expected a model in {self.model}, found no {CONFIG} there")
        self.config: dict[str, Any] = schema.read(
            self.fetch(CONFIG), dict[str, Any], "download or save the model again"
        )

    def fetch(self, file: str) -> Path:
        """Return the local path of a file of the model, downloaded if the model is the Hub's.

        Raises:
            InputError: it cannot be had; the cause is a FileNotFoundError where the model has no such file.
        """
        if self._folder is not None:
            if not (self._folder / file).is_file():
                raise InputError(f"{self.model} has no file {file}") from FileNotFoundError(file)
            return self._folder / file
        if file not in self._paths:
            at = f" at revision {self._revision}" if self._revision else ""
            what = f"{self.model}{at} is no local folder, and {file} cannot be had from the Hub"
            self._paths[file] = self._hub.fetch(self.model, self._revision, file, what)
        return self._paths[file]

    def has(self, file: str) -> bool:
        """Return whether the model has a file, which is downloaded; the Hub is not asked twice for a missing one."""
        if self._folder is None:
            from huggingface_hub import _CACHED_NO_EXIST, try_to_load_from_cache

            if try_to_load_from_cache(self.model, file, revision=self._revision) is _CACHED_NO_EXIST:
                return False
        try:
            self.fetch(file)
        except InputError as error:
            if isinstance(error.__cause__, FileNotFoundError):
                return False
            raise
        return True
