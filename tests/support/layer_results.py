"""Synthetic results of probes, sample sizes, word pairs and prediction residuals, as the analyses leave them."""

from collections.abc import Iterator
from pathlib import Path

from lit_layers import records
from lit_layers.records import Measurement, Record

Tags = dict[str, str | int | float]
LAYERS = 4
SIZES = (25, 50, 100)
CATEGORIES = {
    **{f"I{number:02}": ("Inflectional_morphology", f"noun - form_{number}") for number in range(1, 21)},
    **{f"E{number:02}": ("Encyclopedic_semantics", f"thing - fact_{number}") for number in range(1, 21)},
}
RHO = 0.8
ANALYSES = ("probe/topics", "probe/stars", "sample_sizes/topics", "concept_alignment", "prediction_residual")


def layer_results(analysis: str, *, step: int | None, run: str = "r", layers: int = LAYERS) -> Measurement:
    """What one analysis finds at a step, better by a thousandth for each."""
    shift = (step or 0) / 1000
    make = {
        "probe/topics": lambda: _probe("topics", shift, layers),
        "probe/stars": lambda: _regression("stars", shift, layers),
        "sample_sizes/topics": lambda: _sizes("topics", shift, layers),
        "concept_alignment": lambda: _concepts(shift, layers),
        "prediction_residual": lambda: _residual(shift, layers),
    }[analysis]
    tokens = None if step is None else 100 * step
    return Measurement(run=run, step=step, tokens=tokens, analysis=analysis, records=[*make()], seconds=1.0)


def write_layer_results(
    root: Path, *, steps: tuple[int | None, ...] = (0, 8, 64), run: str = "r", layers: int = LAYERS
) -> Path:
    """Adds them to the measurements of a run."""
    root.mkdir(parents=True, exist_ok=True)
    for step in steps:
        for analysis in ANALYSES:
            records.append(root / "measurements.jsonl", layer_results(analysis, step=step, run=run, layers=layers))
    return root


def _probe(task: str, shift: float, layers: int) -> Iterator[Record]:
    tags: Tags = {"task": task, "split": "test"}
    for metric, level in (("accuracy", 0.4), ("macro_f1", 0.1), ("log_loss", 1.4)):
        yield Record(
            metric=metric,
            value=level,
            low=level - 0.05,
            high=level + 0.05,
            n=200,
            tags=tags | {"reference": "majority"},
        )
        for layer in range(layers + 1):
            value = 0.5 + layer / 20 + shift
            for split, more in (("train", 0.2), ("validation", 0.01), ("test", 0.0)):
                own = value + more
                bounds = {} if split == "train" else {"low": own - 0.04, "high": own + 0.03}
                yield Record(
                    metric=metric, value=own, layer=layer, n=200, tags={"task": task, "split": split}, **bounds
                )
            control = tags | {"control": "random_labels"}
            yield Record(metric=metric, value=0.38 + layer / 1000, layer=layer, n=200, tags=control)
    for of in ("accuracy", "log_loss"):
        own = tags | {"of": of}
        for name, value in (("spearman", 0.9 + shift / 10), ("fraction_increasing", 0.7), ("largest_drop", 0.01)):
            yield Record(
                metric=f"monotonicity_{name}", value=value, low=value - 0.1, high=value + 0.01, n=200, tags=own
            )
        yield Record(metric="plateau_layer", value=3, low=2, high=layers, n=200, tags=own)
        yield Record(metric="best_layer", value=layers, low=3, high=layers, n=200, tags=own)
        yield Record(metric="inflection_layer", value=2, n=200, tags=own)


def _regression(task: str, shift: float, layers: int) -> Iterator[Record]:
    tags: Tags = {"task": task, "split": "test"}
    for metric, level in (("mean_squared_error", 1.9), ("r_squared", 0.0)):
        yield Record(metric=metric, value=level, n=100, tags=tags | {"reference": "mean"})
        for layer in range(layers + 1):
            yield Record(metric=metric, value=level + 0.1 - layer / 10 - shift, layer=layer, n=100, tags=tags)


def _sizes(task: str, shift: float, layers: int) -> Iterator[Record]:
    for metric in ("accuracy", "log_loss"):
        for layer in range(layers + 1):
            for number, size in enumerate(SIZES):
                value = 0.3 + number / 10 + layer / 100 + shift
                bounds = {} if size == SIZES[-1] else {"low": value - 0.02, "high": value + 0.01}
                tags = {"task": task, "split": "test", "train_rows": size, "num_classes_seen": 4}
                yield Record(metric=metric, value=value, layer=layer, n=3, tags=tags, **bounds)


def _concepts(shift: float, layers: int) -> Iterator[Record]:
    for metric in ("concept_alignment", "leave_one_out", "shuffled", "excess"):
        for layer in range(layers + 1):
            for number, (own, (group, name)) in enumerate(CATEGORIES.items()):
                tags = {"category": name, "category_id": own, "group": group}
                value = (number - 20) / 50 + layer / 100 + shift
                yield Record(metric=metric, value=value, layer=layer, n=50, tags=tags)
            yield Record(metric=metric, value=layer / 100 + shift, low=-0.1, high=0.2, layer=layer, n=len(CATEGORIES))


def _residual(shift: float, layers: int) -> Iterator[Record]:
    tags: Tags = {"num_texts": 20}
    for layer in range(layers + 1):
        for metric in ("prediction_residual", "adjusted", "held_out"):
            value = (0.9 - shift) * RHO ** (layer - 1) if layer else 0.95
            yield Record(metric=metric, value=value, low=0.98 * value, high=1.01 * value, layer=layer, n=900, tags=tags)
            yield Record(
                metric=metric, value=0.99, layer=layer, n=900, tags=tags | {"control": "relabelled_vocabulary"}
            )
        yield Record(metric="prediction_residual_of_half", value=0.5, layer=layer, tags=tags)
        yield Record(metric="rank", value=16, layer=layer, n=900, tags=tags)
    yield Record(metric="residual_ratio", value=RHO, low=0.79, high=0.82, n=20, tags=tags)
    yield Record(metric="residual_ratio_of_half", value=RHO, n=20, tags=tags)
    yield Record(metric="r_squared", value=1.0, n=20, tags=tags)
    yield Record(metric="pearson", value=-1.0, n=20, tags=tags)
