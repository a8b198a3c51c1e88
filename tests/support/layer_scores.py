"""Synthetic scores of embedding tasks at each layer, and metrics on the texts of each task."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from lit_layers.records import Record
from tests.support.written import write

DOMAINS = {
    "Banking77Classification": "classification",
    "EmotionClassification": "classification",
    "BIOSSES": "sts",
    "STS12": "sts",
    "SICK-R": "sts",
    "TwentyNewsgroupsClustering": "clustering",
}
TASKS = tuple(DOMAINS)


def tables(
    layers: int, *, tasks: Sequence[str] = TASKS, seed: int = 0, sign: float = -1.0
) -> tuple[np.ndarray, np.ndarray]:
    """Return a metric (tasks, layers + 1) and noisy scores that rise or fall with it, as `sign` says."""
    rng = np.random.default_rng(seed)
    metric = rng.normal(size=(len(tasks), layers + 1)).cumsum(1)
    return metric, 0.5 + 0.05 * (sign * metric + rng.normal(size=metric.shape))


def add(
    root: Path,
    run: str,
    step: int | None,
    *,
    scores: np.ndarray | None = None,
    metric: np.ndarray | None = None,
    tasks: Sequence[str] = TASKS,
    states: str = "normed",
    metric_states: str | None = "normed",
    name: str = "prompt_entropy",
    analysis: str = "representation",
    tags: Mapping[str, str | int | float] | None = None,
    provenance: Mapping[str, object] | None = None,
) -> Path:
    """Append the score of each task and the metric on its texts at each layer, and return the folder."""
    tokens = None if step is None else 1000 * step
    context = {"run": run, "step": step, "tokens": tokens, "provenance": dict(provenance or {})}
    for row, task in enumerate(tasks):
        if scores is not None:
            own = {"task": task, "domain": DOMAINS[task], "score": f"of_{task}", "pooling": "mean", "states": states}
            write(root, f"mteb/{task}", _layer_records("main_score", scores[row], own), **context)
        if metric is not None:
            own = dict(tags or {}) | ({} if metric_states is None else {"states": metric_states})
            write(root, f"{analysis}/{task}", _layer_records(name, metric[row], own), **context)
    return root


def _layer_records(name: str, values: np.ndarray, tags: Mapping[str, str | int | float]) -> list[Record]:
    return [
        Record(metric=name, value=float(value), layer=layer, tags=dict(tags))
        for layer, value in enumerate(values)
        if np.isfinite(value)
    ]
