"""Models whose blocks run in another order: what tasks, speed and training make of them."""

from lit_layers.intervene.benchmark_scores import BenchmarkScores
from lit_layers.intervene.scores import normalized_score
from lit_layers.tasks.catalogue import tasks_of

LOCAL_TASKS = tasks_of("benchmark")
PAINTED = tuple(LOCAL_TASKS)[:5]  # whose normalised scores have a median, in the published figures

__all__ = ["LOCAL_TASKS", "PAINTED", "BenchmarkScores", "normalized_score"]
