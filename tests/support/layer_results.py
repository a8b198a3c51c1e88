"""Synthetic measurements of probes, sample sizes, word pairs and prediction residuals, as the analyses write them."""

from collections.abc import Iterator
from pathlib import Path

from lit_layers import records
from lit_layers.records import Measurement, Record
from tests.support.written import measured

LAYERS = 4
SIZES = (25, 50, 100)
CATEGORIES = {
    **{f"I{number:02}": ("Inflectional_morphology", f"noun - form_{number}") for number in range(1, 21)},
    **{f"E{number:02}": ("Encyclopedic_semantics", f"thing - fact_{number}") for number in range(1, 21)},
}
RHO = 0.8


def layer_results(analysis: str, *, step: int | None, run: str = "r", layers: int = LAYERS) -> Measurement:
    """Return the measurement of one analysis at a step; scores improve by 0.001 per step."""
    tokens = None if step is None else 100 * step
    found = RECORDS[analysis]((step or 0) / 1000, range(layers + 1))
    return measured(analysis, found, run=run, step=step, tokens=tokens, seconds=1.0)


def write_layer_results(
    root: Path, *, steps: tuple[int | None, ...] = (0, 8, 64), run: str = "r", layers: int = LAYERS
) -> Path:
    """Append the measurements of all these analyses to those of a run, and return its folder."""
    for step in steps:
        for analysis in ANALYSES:
            records.append(root / "measurements.jsonl", layer_results(analysis, step=step, run=run, layers=layers))
    return root


def record(metric: str, value: float, layer: int | None = None, *, below=None, above=None, **tags) -> Record:
    """Return a record whose interval is from `value - below` to `value + above`."""
    ends = {} if below is None else {"low": value - below, "high": value + above}
    return Record(metric=metric, value=value, layer=layer, n=200, tags=tags, **ends)


def _probe(shift: float, layers: range) -> Iterator[Record]:
    test = {"task": "topics", "split": "test"}
    for metric, level in (("accuracy", 0.4), ("macro_f1", 0.1), ("log_loss", 1.4)):
        yield record(metric, level, below=0.05, above=0.05, **test, reference="majority")
        for layer in layers:
            value = 0.5 + layer / 20 + shift
            yield record(metric, value + 0.2, layer, task="topics", split="train")
            for split, own in (("validation", value + 0.01), ("test", value)):
                yield record(metric, own, layer, below=0.04, above=0.03, task="topics", split=split)
            yield record(metric, 0.38 + layer / 1000, layer, **test, control="random_labels")
    for metric in ("accuracy", "log_loss"):
        for name, value in (("spearman", 0.9 + shift / 10), ("fraction_increasing", 0.7), ("largest_drop", 0.01)):
            yield record(f"monotonicity_{name}", value, below=0.1, above=0.01, **test, of=metric)
        yield record("plateau_layer", 3, below=1, above=layers[-1] - 3, **test, of=metric)
        yield record("best_layer", layers[-1], below=layers[-1] - 3, above=0, **test, of=metric)
        yield record("inflection_layer", 2, **test, of=metric)


def _regression(shift: float, layers: range) -> Iterator[Record]:
    tags = {"task": "stars", "split": "test"}
    for metric, level in (("mean_squared_error", 1.9), ("r_squared", 0.0)):
        yield record(metric, level, **tags, reference="mean")
        for layer in layers:
            yield record(metric, level + 0.1 - layer / 10 - shift, layer, **tags)


def _sizes(shift: float, layers: range) -> Iterator[Record]:
    for metric in ("accuracy", "log_loss"):
        for layer in layers:
            for number, size in enumerate(SIZES):
                value, tags = 0.3 + number / 10 + layer / 100 + shift, {"train_rows": size, "num_classes_seen": 4}
                ends = {} if size == SIZES[-1] else {"below": 0.02, "above": 0.01}
                yield record(metric, value, layer, task="topics", split="test", **tags, **ends)


def _concepts(shift: float, layers: range) -> Iterator[Record]:
    for metric in ("concept_alignment", "leave_one_out", "shuffled", "excess"):
        for layer in layers:
            mean = layer / 100 + shift
            for number, (own, (group, name)) in enumerate(CATEGORIES.items()):
                yield record(metric, (number - 20) / 50 + mean, layer, category=name, category_id=own, group=group)
            yield record(metric, mean, layer, below=0.1, above=0.2)


def _residual(shift: float, layers: range) -> Iterator[Record]:
    for layer in layers:
        value = (0.9 - shift) * RHO ** (layer - 1) if layer else 0.95
        for metric in ("prediction_residual", "adjusted", "held_out"):
            yield record(metric, value, layer, below=0.02 * value, above=0.01 * value, num_texts=20)
            yield record(metric, 0.99, layer, num_texts=20, control="relabelled_vocabulary")
        yield record("prediction_residual_of_half", 0.5, layer, num_texts=20)
        yield record("rank", 16, layer, num_texts=20)
    yield record("residual_ratio", RHO, below=0.01, above=0.02, num_texts=20)
    for metric, value in (("residual_ratio_of_half", RHO), ("r_squared", 1.0), ("pearson", -1.0)):
        yield record(metric, value, num_texts=20)


RECORDS = {
    "probe/topics": _probe,
    "probe/stars": _regression,
    "sample_sizes/topics": _sizes,
    "concept_alignment": _concepts,
    "prediction_residual": _residual,
}
ANALYSES = tuple(RECORDS)
