"""Every layer of a model as an embedding model: scored on the tasks of MTEB, from one pass over their texts."""

from lit_layers.embeddings.analysis import MtebTask
from lit_layers.embeddings.averages import averages, score_table
from lit_layers.embeddings.running import metric_analyses, mteb_analyses
from lit_layers.embeddings.task_list import LAYERWISE32, TaskSpec, resolve
from lit_layers.embeddings.task_sources import Sources

__all__ = [
    "LAYERWISE32",
    "MtebTask",
    "Sources",
    "TaskSpec",
    "averages",
    "metric_analyses",
    "mteb_analyses",
    "resolve",
    "score_table",
]
