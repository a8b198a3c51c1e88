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
    "lit_layers.functional.block_call": "lit_layers.functional.attention",
    "lit_layers.functional.cka_matrix": "lit_layers.functional.geometry",
    "lit_layers.functional.class_scores": "lit_layers.functional.layer_selection",
    "lit_layers.functional.concepts": "lit_layers.functional.geometry",
    "lit_layers.functional.exponential": "lit_layers.functional.curves",
    "lit_layers.functional.layer_choice": "lit_layers.functional.curves",
    "lit_layers.functional.layer_stages": "lit_layers.functional.trajectory",
    "lit_layers.functional.linear_cut": "lit_layers.functional.one_token",
    "lit_layers.functional.pooling": "lit_layers.functional.geometry",
    "lit_layers.functional.prediction_residual": "lit_layers.functional.regression",
    "lit_layers.functional.principal_paths": "lit_layers.functional.trajectory",
    "lit_layers.functional.renyi": "lit_layers.functional.entropy",
    "lit_layers.functional.reverse_mode": "lit_layers.functional.attention",
    "lit_layers.functional.ridge": "lit_layers.functional.regression",
    "lit_layers.functional.singular": "lit_layers.functional.coupling",
    "lit_layers.functional.variants": "lit_layers.functional.block_schedules",
}
# No recipe and no hash names a class of `functional`, where two files became one.
_FORMER = {now: former for former, now in MOVED.items() if not now.startswith("lit_layers.functional.")}


def public_path(kind: type) -> str:
    """How recipes, configs and their hashes call a class, wherever its file is: moving it re-measures nothing."""
    return f"{_FORMER.get(kind.__module__, kind.__module__)}.{kind.__qualname__}"


class _Former(ModuleType):
    """A module whose function of the same name (`functional.variants`) can be called where the module hides it."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return getattr(self, self.__name__.rpartition(".")[2])(*args, **kwargs)


class _Moved:
    """Lets a former name of a module be imported."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        return importlib.util.spec_from_loader(name, _Moved) if name in MOVED else None  # pyright: ignore[reportArgumentType]

    @staticmethod
    def create_module(spec: ModuleSpec) -> ModuleType:
        return _Former(spec.name)

    @staticmethod
    def exec_module(module: ModuleType) -> None:
        def attribute(name: str) -> Any:
            return getattr(importlib.import_module(MOVED[module.__name__]), name)

        module.__getattr__ = attribute  # pyright: ignore[reportAttributeAccessIssue]


def install() -> None:
    sys.meta_path.append(_Moved)  # pyright: ignore[reportArgumentType]
