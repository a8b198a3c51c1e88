"""Corpora, token shards, image sets, and the fixed batches that analyses measure on."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lit_layers.data.batches import Batches, EvalText, TokenBlocks
    from lit_layers.data.images import EvalImages
    from lit_layers.data.preparing import TokenShards, prepare, prepared
    from lit_layers.data.prompt_texts import (
        BenchmarkPrompts,
        CorpusTexts,
        GivenTexts,
        LabelledTexts,
        TaskTexts,
        TextBatches,
        Texts,
        Views,
        make_views,
    )
    from lit_layers.data.word_pairs import WordPairs
    from lit_layers.tasks.catalogue import TASKS, find_task
    from lit_layers.tasks.probe_task import ProbeTask, TaskData, TaskSplit

# The modules below are imported on first use, because importing torch takes seconds and code that only reads names,
# files and tokens does not need it.
_HOMES = ["preparing", "batches", "images", "word_pairs", "prompt_texts"]
_TASKS = ["probe_task", "catalogue"]
__all__ = [
    "TASKS",
    "Batches",
    "BenchmarkPrompts",
    "CorpusTexts",
    "EvalImages",
    "EvalText",
    "GivenTexts",
    "LabelledTexts",
    "ProbeTask",
    "TaskData",
    "TaskSplit",
    "TaskTexts",
    "TextBatches",
    "Texts",
    "TokenBlocks",
    "TokenShards",
    "Views",
    "WordPairs",
    "find_task",
    "make_views",
    "prepare",
    "prepared",
]


def __getattr__(name: str) -> Any:
    if name in __all__:
        for module in [*(f"{__name__}.{home}" for home in _HOMES), *(f"lit_layers.tasks.{home}" for home in _TASKS)]:
            if hasattr(content := import_module(module), name):
                return getattr(content, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
