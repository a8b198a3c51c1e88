"""Corpora, token shards, image sets, and batches to measure on. Each can be imported from here by its name."""

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lit_layers.data.batches import *
    from lit_layers.data.images import *
    from lit_layers.data.preparing import *
    from lit_layers.data.prompt_texts import *
    from lit_layers.data.shards import *
    from lit_layers.data.word_pairs import *
    from lit_layers.tasks.catalogue import *
    from lit_layers.tasks.probe_task import *
    from lit_layers.tasks.task_splits import *

# Imported on first use: what reads names, files and tokens needs no torch, which takes seconds.
_DATA = ("shards", "preparing", "batches", "images", "word_pairs", "prompt_texts")
_FILES = (*(f"data.{name}" for name in _DATA), "tasks.task_splits", "tasks.probe_task", "tasks.catalogue")


def __getattr__(name: str) -> Any:
    if not name.startswith("_") and not Path(__file__).with_name(f"{name}.py").is_file():
        for file in _FILES:
            module = import_module(f"lit_layers.{file}")
            found = getattr(module, name, None)
            if getattr(found, "__module__", None) == module.__name__ or (found is not None and name.isupper()):
                return found
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
