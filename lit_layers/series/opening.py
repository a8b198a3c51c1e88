"""A series from the words of a command line."""

import os
import re
from pathlib import Path
from typing import Any

from lit_layers.errors import InputError
from lit_layers.series.checkpoint import Series
from lit_layers.series.hub import HubRevisions
from lit_layers.series.lightning_files import LightningCheckpoints
from lit_layers.series.local import StepFolders
from lit_layers.series.manifests import Manifest

_REPOSITORY = re.compile(r"[\w.-]+/[\w.-]+")


def open_series(
    name: str,
    steps: Any = "all",
    *,
    grammar: str = "auto",
    stage: int = 1,
    ingredient: int | None = None,
    model: str | None = None,
) -> list[Series]:
    """The series that a folder, a repository of the Hub or a manifest holds: of a manifest one for each repository.

    Raises:
        InputError: a name that is none of these, options that do not fit it.
    """
    staged: dict[str, Any] = {"stage": stage, "ingredient": ingredient}
    if os.path.isdir(name):
        if stage != 1 or ingredient is not None:
            raise InputError(f"{name} is a folder and has no stages: leave --stage and --ingredient out")
        if any(Path(name).glob("*.ckpt")):
            if grammar != "auto":
                raise InputError("grammar: *.ckpt files record their own step: leave --grammar out")
            return [LightningCheckpoints(name, steps, model=model)]
        _refuse_submodule(name, model)
        return [StepFolders(name, steps, grammar=grammar)]
    _refuse_submodule(name, model)
    if name.endswith((".yaml", ".yml")):
        repos = Manifest(name).names()
        if not repos:
            raise InputError(f"{name} names no repository in full: give one, such as ORGANIZATION/NAME")
        return [HubRevisions(repo, steps, grammar=grammar, manifest=name, **staged) for repo in repos]
    # checkpoints/first is spelled like a repository: where its parent is a folder here, a folder was meant.
    if not _REPOSITORY.fullmatch(name) or Path(name).parent.is_dir():
        raise InputError(f"expected a folder, ORGANIZATION/NAME on the Hub or a manifest, {name} does not exist")
    return [HubRevisions(name, steps, grammar=grammar, **staged)]


def _refuse_submodule(name: str, model: str | None) -> None:
    if model is not None:
        raise InputError(f"submodule: {name} holds plain models, and *.ckpt files have submodules: leave {model!r} out")


def read_steps(text: str) -> Any:
    """Steps as a recipe would write them; a bare list needs no brackets.

    Raises:
        InputError: what is no YAML.
    """
    import yaml

    try:
        value = yaml.safe_load(text)
        if isinstance(value, int):
            return [value]
        if isinstance(value, str) and "," in value:
            return yaml.safe_load(f"[{value}]")
    except yaml.YAMLError as error:
        raise InputError(f"steps: expected all, a list or a schedule, got {text!r}") from error
    return value
