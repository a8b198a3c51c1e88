"""Corpora, token shards, image sets, and the batches analyses measure on."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lit_layers.data.batches import Batches as Batches
    from lit_layers.data.images import EvalImages as EvalImages
    from lit_layers.data.preparing import prepare as prepare
    from lit_layers.data.preparing import prepared as prepared
    from lit_layers.data.prompt_texts import BenchmarkPrompts as BenchmarkPrompts
    from lit_layers.data.prompt_texts import CorpusTexts as CorpusTexts
    from lit_layers.data.prompt_texts import GivenTexts as GivenTexts
    from lit_layers.data.prompt_texts import TaskTexts as TaskTexts
    from lit_layers.data.prompt_texts import TextBatches as TextBatches
    from lit_layers.data.prompt_texts import Texts as Texts
    from lit_layers.data.shards import TokenShards as TokenShards
    from lit_layers.data.text import EvalText as EvalText
    from lit_layers.data.text import TokenBlocks as TokenBlocks
    from lit_layers.data.text import duplicate_windows as duplicate_windows
    from lit_layers.data.typo_views import Views as Views
    from lit_layers.data.typo_views import make_views as make_views
    from lit_layers.data.word_pairs import WordPairs as WordPairs
    from lit_layers.tasks.catalogue import TASKS as TASKS
    from lit_layers.tasks.catalogue import find_task as find_task
    from lit_layers.tasks.probe_task import ProbeTask as ProbeTask
    from lit_layers.tasks.task_splits import TaskData as TaskData
    from lit_layers.tasks.task_splits import TaskSplit as TaskSplit

# Name -> module, imported on first use: the processes that tokenize need no torch, which takes seconds to import.
_HOMES = {
    "Batches": "batches",
    "BenchmarkPrompts": "prompt_texts",
    "CorpusTexts": "prompt_texts",
    "EvalImages": "images",
    "EvalText": "text",
    "GivenTexts": "prompt_texts",
    "ProbeTask": "lit_layers.tasks.probe_task",
    "TASKS": "lit_layers.tasks.catalogue",
    "TaskData": "lit_layers.tasks.task_splits",
    "TaskSplit": "lit_layers.tasks.task_splits",
    "TaskTexts": "prompt_texts",
    "TextBatches": "prompt_texts",
    "Texts": "prompt_texts",
    "TokenBlocks": "text",
    "TokenShards": "shards",
    "Views": "typo_views",
    "WordPairs": "word_pairs",
    "duplicate_windows": "text",
    "find_task": "lit_layers.tasks.catalogue",
    "make_views": "typo_views",
    "prepare": "preparing",
    "prepared": "preparing",
}
__all__ = [
    "TASKS",
    "Batches",
    "BenchmarkPrompts",
    "CorpusTexts",
    "EvalImages",
    "EvalText",
    "GivenTexts",
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
    "duplicate_windows",
    "find_task",
    "make_views",
    "prepare",
    "prepared",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    home = _HOMES[name]
    return getattr(import_module(home if "." in home else f"{__name__}.{home}"), name)
