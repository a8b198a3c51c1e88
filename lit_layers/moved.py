"""Names under which modules were known before they moved: recipes, run folders and hashes still say them."""

import importlib
import importlib.util
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

# As recipes and hashes name it -> where it is now.
MOVED = {
    "lit_layers.data.tasks": "lit_layers.tasks.probe",
}
_FORMER = {now: former for former, now in MOVED.items()}


def public_path(kind: type) -> str:
    """How recipes, configs and their hashes call a class, wherever its file is: moving it re-measures nothing."""
    return f"{_FORMER.get(kind.__module__, kind.__module__)}.{kind.__qualname__}"


class _Moved:
    """Lets a former name of a module be imported."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        return importlib.util.spec_from_loader(name, _Moved) if name in MOVED else None  # pyright: ignore[reportArgumentType]

    @staticmethod
    def create_module(spec: ModuleSpec) -> None:
        return None

    @staticmethod
    def exec_module(module: ModuleType) -> None:
        def attribute(name: str) -> Any:
            return getattr(importlib.import_module(MOVED[module.__name__]), name)

        module.__getattr__ = attribute  # pyright: ignore[reportAttributeAccessIssue]


def install() -> None:
    sys.meta_path.append(_Moved)  # pyright: ignore[reportArgumentType]
