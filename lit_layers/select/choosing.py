"""Choice of the first sufficient layer: probes are fitted on train rows, and their validation scores decide."""

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from lit_layers.analyses.probes.probe_fits import (
    Fitted,
    ProbeOptions,
    RowScores,
    fit_layer,
    score_log_proba,
    score_rows,
)
from lit_layers.data.images import Normalise, Pictures, eval_pixels, image_size, image_source, statistics
from lit_layers.errors import InputError
from lit_layers.functional.curves import Rule, bootstrap_interval, choice_distribution, choose_layer, wilson_interval
from lit_layers.functional.geometry import pool
from lit_layers.functional.probes.logistic import LogisticProbes
from lit_layers.metrics import look_up
from lit_layers.models.pixels import pixel_statistics
from lit_layers.models.view import Batch, LayeredModel
from lit_layers.tasks.probe_task import ProbeTask, hold_out
from lit_layers.tasks.text_features import LayerFeatures, TaskReader, TextPooling, store_features, text_features

# Metrics that can judge the probe of a layer, by kind of task. Each is a mean over rows. The first one is the default.
METRICS: dict[str, tuple[str, ...]] = {
    "classification": ("accuracy", "log_loss"),
    "regression": ("mean_squared_error",),
}
BASELINES = {"accuracy": "majority class", "log_loss": "shares of the classes", "mean_squared_error": "training mean"}
Part = Literal["train", "validation", "test"]
Progress = Callable[[int, int, str], None]


@dataclass(frozen=True)
class Score:
    """The score of a probe: a mean over the rows of a split, with its 95% interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, eq=False)
class Choice:
    """The layer that `choose` chose, with the rule and the scores that led to it."""

    layer: int
    num_layers: int
    metric: str
    rule: Rule
    tolerance: float
    validation: Mapping[int, Score]  # scores of layers 0 to L on the validation rows
    baseline: float  # validation score of a prediction that ignores the input
    shares: Mapping[int, float]  # share of the bootstrap resamples of validation rows that choose each layer, 1 to L
    test: Mapping[int, Score]  # test scores of the chosen layer and the last layer
    difference: Score  # test score of the chosen layer minus that of the last layer, paired over rows
    probe: Fitted  # probe of the chosen layer, fitted on train

    @property
    def baseline_name(self) -> str:
        """Name of the baseline, a prediction that ignores the input."""
        return BASELINES[self.metric]


def choose(
    features: Callable[[Part], LayerFeatures],
    targets: Mapping[Part, Tensor],
    *,
    num_classes: int | None,
    rule: Rule = "within_tolerance",
    tolerance: float = 0.01,
    by: str | None = None,
    options: ProbeOptions | None = None,
    progress: Progress = lambda done, total, what: None,
) -> Choice:
    """Choose the first layer whose probe scores well enough on validation rows, by a rule.

    A probe is fitted on the training rows at each layer, 0 to L. The rule chooses among layers 1 to L.

    Args:
        features: Returns the features of "train", "validation" or "test". It is called for "test" only after the layer
            has been chosen.
        targets: Class indices of the "train", "validation" and "test" rows, or their values for a regression.
        num_classes: Number of classes, or None for a regression.
        rule: The rule that chooses a layer from the scores.
        tolerance: The tolerance of the rule.
        by: The metric that judges a probe, one of `METRICS`. If it is None, the first one for the task is used.
        options: Options of the probes.
        progress: Callback that receives the number of finished probes, the number of all probes, and what runs now.

    Returns:
        The choice, with test scores only of the chosen layer and the last layer.

    Raises:
        InputError: The rule or metric does not fit the task, there are too few rows or classes, a probe has not
            converged, or no layer beats the baseline.
    """
    options = options or ProbeOptions()
    metrics = METRICS["regression" if num_classes is None else "classification"]
    metric = by or metrics[0]
    if metric not in metrics:
        raise InputError(f"by: expected {' or '.join(metrics)} of this task's probes, got {metric}")
    for part, labels in targets.items():
        if len(labels) < 2:
            raise InputError(f"{part}: expected at least 2 rows, got {len(labels)}: give more")
    if num_classes is not None and len(targets["train"].unique()) < 2:
        raise InputError("train: all rows have one class, and a probe needs two: give other rows")
    how: Any = {"rule": rule, "tolerance": tolerance, "higher_is_better": look_up(metric).higher_is_better}
    _apply_rule([1.0], how)  # called only to raise an error for a bad rule before probes are fitted
    train, held_out = features("train"), features("validation")
    num_layers, probes, rows = train.num_layers, list[Fitted](), list[Tensor]()
    for layer in range(num_layers + 1):
        progress(layer, num_layers + 1, f"probe of layer {layer}")
        probe = fit_layer(train.layer(layer), targets["train"], options, num_classes=num_classes)
        if isinstance(probe, LogisticProbes) and not probe.converged.all():
            raise InputError(f"max_iterations: the probe of layer {layer} has not converged: allow more, or lower c")
        probes.append(probe)
        rows.append(score_rows(probe, held_out.layer(layer), targets["validation"]).row_values(metric))
    scores = _defined(torch.stack(rows))
    baseline = float(_defined(_baseline(targets, num_classes).row_values(metric)[None]).mean())
    values, higher = scores[1:].mean(1).tolist(), how["higher_is_better"]
    best = max(values) if higher else min(values)
    if (best <= baseline) if higher else (best >= baseline):
        raise InputError(
            f"rule: no layer can be chosen: the best validation {metric} of a probe is {best:.4f}, and the "
            f"{BASELINES[metric]} alone gives {baseline:.4f}"
        )
    layer, by_layer = _apply_rule(values, how), choice_distribution(scores[1:], **how)
    progress(num_layers + 1, num_layers + 1, "")
    test = features("test")
    on_test = {
        each: _defined(score_rows(probes[each], test.layer(each), targets["test"]).row_values(metric)[None])[0]
        for each in {layer, num_layers}
    }
    return Choice(
        layer=layer,
        num_layers=num_layers,
        metric=metric,
        rule=rule,
        tolerance=tolerance,
        validation={each: _score(values, metric) for each, values in enumerate(scores)},
        baseline=baseline,
        shares=dict(enumerate(by_layer.tolist(), start=1)),
        test={each: _score(values, metric) for each, values in on_test.items()},
        difference=_score(on_test[layer] - on_test[num_layers], None),
        probe=probes[layer],
    )


def _defined(rows: Tensor) -> Tensor:
    """Return the scores, (layers, rows), of the rows with a finite score at every layer.

    For example, the log-loss of a row is infinite if its class has no training rows.
    """
    return rows[:, rows.isfinite().all(0)]


def _apply_rule(values: list[float], how: Any) -> int:
    try:
        return choose_layer(values, **how)
    except ValueError as error:
        given = f"{how['rule']} with tolerance {how['tolerance']:g}"
        raise InputError(f"rule: {given} chooses no layer here: {error}") from error


def _baseline(targets: Mapping[Part, Tensor], num_classes: int | None) -> RowScores:
    """Return the scores of the baseline on the validation rows. It ignores the input and uses only training labels."""
    train, held_out = targets["train"], targets["validation"]
    if num_classes is None:
        return RowScores((held_out - train.mean()).square())
    share = torch.bincount(train, minlength=num_classes).double() / len(train)
    return score_log_proba(share.log().expand(len(held_out), -1), held_out)


def _score(values: Tensor, metric: str | None) -> Score:
    if metric == "accuracy":
        return Score(float(values.mean()), *wilson_interval(int(values.sum()), len(values)))
    low, high = bootstrap_interval(values)
    return Score(float(values.mean()), float(low), float(high))


IMAGE_BATCH = 64
ROWS_TO_CHECK = 8  # number of validation rows that an export is checked with
PARTS: tuple[Part, ...] = ("train", "validation", "test")
NOTES = {
    "num_duplicates": "Train and validation rows dropped because test has their text: {}.",
    "num_empty": "Blank rows dropped: {}.",
    "num_conflicting": "Train and validation rows whose text also has another label (not dropped): {}.",
    "num_unseen_test_rows": "Test rows of a class that train lacks (all count as errors): {}.",
    "num_cut": "Texts truncated to the limit of tokens: {}.",
}


@dataclass(frozen=True, eq=False)
class TaskFeatures:
    """The input of `choose` for one task, with a batch for checking an export."""

    name: str
    kind: str
    classes: tuple[str, ...] | None
    targets: Mapping[Part, Tensor]
    features: Callable[[Part], LayerFeatures]
    pooling: TextPooling
    batch: Batch  # model input of a few validation rows
    max_tokens: int | None  # longer texts are truncated; None for images
    notes: tuple[str, ...] = ()

    @property
    def num_classes(self) -> int | None:
        return None if self.classes is None else len(self.classes)


def text_task(
    model: LayeredModel,
    task: str | ProbeTask,
    *,
    tokenizer: str,
    folder: str | None = None,
    pooling: TextPooling = "last",
    max_tokens: int = 512,
) -> TaskFeatures:
    """Return the input of `choose` for a text task, which is in the catalogue of tasks or defined by the user.

    The texts of train, validation and test are passed through the model when their features are requested.

    Raises:
        InputError: The model reads images, or the task, the tokenizer or a file does not exist.
    """
    rows = TaskReader("task", task, tokenizer, folder=folder, max_tokens=max_tokens).rows(model, join_validation=False)
    limit = min(max_tokens, model.max_tokens or max_tokens)
    _, batch = next(iter(rows.texts["validation"].batches(ROWS_TO_CHECK * limit)))
    batch = {name: column[:ROWS_TO_CHECK] for name, column in batch.items()}
    return TaskFeatures(
        name=rows.data.name,
        kind=rows.data.kind,
        classes=rows.data.classes,
        targets={part: rows.targets[part] for part in PARTS},
        features=lambda part: text_features(model, rows.texts[part], pooling=pooling),
        pooling=pooling,
        batch=batch,
        max_tokens=limit,
        notes=tuple(NOTES[name].format(count) for name, count in rows.counts().items()),
    )


def image_task(
    model: LayeredModel,
    source: str,
    *,
    pooling: TextPooling = "cls",
    num_train: int | None = None,
    num_test: int | None = None,
    validation_share: float = 0.2,
    seed: int = 0,
) -> TaskFeatures:
    """Return the input of `choose` for a labelled image set: `digits`, `cifar10`, a path, ...

    Pixels are normalised as in the model's training, or by the statistics of the image set if that is unknown.

    Raises:
        InputError: The model reads text, it has no class token for the pooling "cls", or the source does not exist.
    """
    if not model.family.sees_images:
        raise InputError(f"images: expected a vision model, got {type(model.model).__name__}: name a --task of texts")
    if pooling == "cls" and not model.has_class_token:
        raise InputError(f"pooling: this {type(model.model).__name__} has no class token: choose mean")
    images = image_source(source)
    images.check()
    trained = pixel_statistics(model.model)
    normalise = Normalise(*(trained or statistics(images, "source")))
    size = model.image_size or image_size(images, None)
    pictures: dict[Part, Pictures] = {"train": images.train, "validation": images.train, "test": images.test}
    train = _image_keys(images.train, _drawn(len(images.train), num_train, seed, "train"), size)
    test = _image_keys(images.test, _drawn(len(images.test), num_test, seed, "test"), size)
    in_test = {*test.values()}
    unique = {index: key for index, key in train.items() if key not in in_test}
    if not unique:
        raise InputError(f"images: every training image of {source} is a test image, too: give other images")
    strata = images.train.labels[[*unique]].tolist()
    held_out = hold_out([*unique.values()], strata, validation_share, seed=seed, purpose="validation")
    chosen: dict[Part, list[int]] = {"train": [], "validation": [], "test": [*test]}
    for index, is_held_out in zip(unique, held_out, strict=True):
        chosen["validation" if is_held_out else "train"].append(index)
    notes = [] if trained else [f"Normalisation in training is unknown: pixel statistics of {source} are used."]
    if len(unique) < len(train):
        notes.append(f"Training images dropped because test has them: {len(train) - len(unique)}.")

    def pixels(part: Part, indices: list[int]) -> Tensor:
        return normalise(eval_pixels(pictures[part], indices, size))

    return TaskFeatures(
        name=Path(source).name,
        kind="classification",
        classes=images.classes,
        targets={part: pictures[part].labels[indices] for part, indices in chosen.items()},
        features=lambda part: _image_features(model, chosen[part], pooling, lambda indices: pixels(part, indices)),
        pooling=pooling,
        batch={"pixel_values": pixels("validation", chosen["validation"][:ROWS_TO_CHECK])},
        max_tokens=None,
        notes=tuple(notes),
    )


def _image_features(
    model: LayeredModel, indices: list[int], pooling: TextPooling, pixels: Callable[[list[int]], Tensor]
) -> LayerFeatures:
    first = model.num_prefix_tokens if pooling == "mean" else 0
    layers: list[list[Tensor]] = [[] for _ in range(model.num_layers + 1)]

    def store(layer: int, hidden: Tensor, mask: Tensor) -> None:
        vectors = pool(hidden[:, first:], mask[:, first:], pooling=pooling, undefined="nan")
        if not vectors.isfinite().all():
            raise InputError(f"the features of an image at layer {layer} are not finite")
        layers[layer].append(vectors.to(model.dtype).cpu())

    for chunk in torch.tensor(indices).split(IMAGE_BATCH):
        model.pass_states({"pixel_values": pixels(chunk.tolist())}, store)
    vectors = torch.stack([torch.cat(chunks) for chunks in layers]).mT
    return store_features({"row": torch.arange(len(indices)), "vectors": vectors})


def _image_keys(pictures: Pictures, indices: list[int], size: int) -> dict[int, str]:
    """Return a hash of the pixels of each image, by index, so that equal images stay in the same split."""
    keys = {}
    for chunk in torch.tensor(indices).split(IMAGE_BATCH):
        for index, image in zip(chunk.tolist(), eval_pixels(pictures, chunk.tolist(), size), strict=True):
            keys[index] = hashlib.blake2b(image.numpy().tobytes(), digest_size=16).hexdigest()
    return keys


def _drawn(total: int, num: int | None, seed: int, split: str) -> list[int]:
    if num is not None and not 2 <= num <= total:
        raise InputError(f"num_{split}: expected 2 to {total} images, got {num}")
    order = torch.randperm(total, generator=torch.Generator().manual_seed(seed))
    return order[:num].tolist()
