"""Names under which modules were known before they moved: recipes, run folders and hashes say them (`moved.txt`)."""

import importlib
import importlib.util
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

MOVED: dict[str, list[str]] = {}  # former name -> modules of today
_FORMER: dict[tuple[str, str], str] = {}  # module of today and class, * for all of them -> former name
for _line in Path(__file__).with_suffix(".txt").read_text(encoding="utf-8").splitlines():
    if not _line.startswith("#"):
        _name, _modules, *_classes = _line.split()
        _former = f"lit_layers.{_name}"
        MOVED[_former] = [f"lit_layers.{module}" for module in _modules.split(",")]
        _FORMER |= {(module, kind): _former for module in MOVED[_former] for kind in _classes}


def public_path(kind: type) -> str:
    """How recipes, configs and their hashes call a class, wherever its file is: moving it re-measures nothing."""
    module = kind.__module__
    former = _FORMER.get((module, kind.__name__)) or _FORMER.get((module, "*")) or module
    return f"{former}.{kind.__qualname__}"


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
            for now in map(importlib.import_module, MOVED[module.__name__]):
                if hasattr(now, name):
                    return getattr(now, name)
            raise AttributeError(f"module {module.__name__!r} has no attribute {name!r}")

        module.__path__ = []  # some were folders
        module.__getattr__ = attribute  # pyright: ignore[reportAttributeAccessIssue]


def install() -> None:
    """First, as a folder that has moved may still be there with a cache in it."""
    sys.meta_path.insert(0, _Moved)  # pyright: ignore[reportArgumentType]
