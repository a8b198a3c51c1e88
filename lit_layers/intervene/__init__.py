"""Models whose blocks run in another order: what tasks, speed and training make of them."""

from lit_layers.intervene.benchmark_scores import BenchmarkScores
from lit_layers.intervene.scores import normalized_score
from lit_layers.intervene.task_prompts import LOCAL_TASKS, PAINTED, LocalTask

__all__ = ["LOCAL_TASKS", "PAINTED", "BenchmarkScores", "LocalTask", "normalized_score"]
