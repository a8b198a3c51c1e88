"""Labelled rows of a task as features of every layer: texts of the catalogue, images of a labelled set."""

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from lit_layers.analyses.encoded_task import TaskReader
from lit_layers.analyses.features import TextPooling, text_features
from lit_layers.data.image_sources import Split, image_source
from lit_layers.data.images import Normalise, eval_pixels, image_size, statistics
from lit_layers.data.pictures import Pictures
from lit_layers.errors import InputError
from lit_layers.functional.geometry import pool
from lit_layers.models.pixel_statistics import pixel_statistics
from lit_layers.models.view import Batch, LayeredModel
from lit_layers.select.choosing import Features, Part
from lit_layers.tasks.probe import ProbeTask
from lit_layers.tasks.splits import hold_out

IMAGES_AT_ONCE = 64
ROWS_TO_CHECK = 8  # an export with
PARTS: tuple[Part, ...] = ("train", "validation", "test")
NOTES = {
    "num_duplicates": "Rows of train and validation left out, as test has their text: {}.",
    "num_empty": "Rows without text, left out: {}.",
    "num_conflicting": "Rows of train and validation whose text stands there with another label, too (kept): {}.",
    "num_unseen_test_rows": "Test rows of a class that train lacks (kept, all of them errors): {}.",
    "num_cut": "Texts that lost their end to the limit of tokens: {}.",
    "num_train_wanted": "The local copy has fewer training rows than the task asks for: {}.",
    "num_test_wanted": "The local copy has fewer test rows than the task asks for: {}.",
}


@dataclass(frozen=True, eq=False)
class TaskFeatures:
    """What `choose` needs of a task, and what an export needs to be checked."""

    name: str
    kind: str
    classes: tuple[str, ...] | None
    targets: Mapping[Part, Tensor]
    features: Callable[[Part], Features]
    pooling: TextPooling
    batch: Batch  # a few validation rows as the model takes them
    max_tokens: int | None  # a longer text lost its end; None for images
    notes: tuple[str, ...] = ()

    @property
    def num_classes(self) -> int | None:
        return None if self.classes is None else len(self.classes)


def of_texts(
    model: LayeredModel,
    task: str | ProbeTask,
    *,
    tokenizer: str,
    folder: str | None = None,
    pooling: TextPooling = "last",
    max_tokens: int = 512,
    cache: str | Path | None = None,
) -> TaskFeatures:
    """A task of texts, one of the catalogue or another; each text is passed once, when its part is asked for.

    Raises:
        InputError: a model of images, a task, tokenizer or file that is not there.
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
        features=lambda part: text_features(model, rows.texts[part], pooling=pooling, cache=cache),
        pooling=pooling,
        batch=batch,
        max_tokens=limit,
        notes=tuple(NOTES[name].format(count) for name, count in rows.counts().items()),
    )


def of_images(
    model: LayeredModel,
    source: str,
    *,
    pooling: TextPooling = "cls",
    num_train: int | None = None,
    num_test: int | None = None,
    validation_share: float = 0.2,
    seed: int = 0,
) -> TaskFeatures:
    """A labelled image set (`digits`, `cifar10`, a path, ...), normalised as the model saw images in training.

    Features lie in memory: layers x images x width.

    Raises:
        InputError: a model of texts, or one without a class token for the pooling "cls"; a source that is not there.
    """
    if not model.family.sees_images:
        raise InputError(f"images: expected a vision model, got {type(model.model).__name__}: name a --task of texts")
    if pooling == "cls" and not model.has_class_token:
        raise InputError(f"pooling: this {type(model.model).__name__} has no class token: choose mean")
    found = image_source(source)
    found.check()
    known = pixel_statistics(model.model)
    normalise = Normalise(*(known or statistics(found, "source")))
    size = model.image_size or image_size(found, None)
    wanted: dict[Split, int | None] = {"train": num_train, "test": num_test}
    drawn = {split: _drawn(len(found.split(split)), number, seed, split) for split, number in wanted.items()}
    splits: dict[Split, Pictures] = {"train": found.train, "test": found.test}
    keys = {split: _keys(pictures, drawn[split], size) for split, pictures in splits.items()}
    known_keys = set(keys["test"])
    alone = [place for place, key in enumerate(keys["train"]) if key not in known_keys]
    train = [drawn["train"][place] for place in alone]
    if not train:
        raise InputError(f"images: every training image of {source} is a test image, too: give other images")
    out = hold_out(
        [keys["train"][place] for place in alone],
        found.train.labels[train].tolist(),
        validation_share,
        seed=seed,
        purpose="validation",
    )
    chosen: dict[Part, list[int]] = {
        "train": [number for number, held in zip(train, out, strict=True) if not held],
        "validation": [number for number, held in zip(train, out, strict=True) if held],
        "test": drawn["test"],
    }
    notes = [] if known else [f"Nobody says how the model's images were normalised: by {source}'s own pixels here."]
    if len(alone) < len(drawn["train"]):
        notes.append(f"Training images left out, as test has them: {len(drawn['train']) - len(alone)}.")
    if not chosen["validation"]:
        raise InputError(f"images: all {len(alone)} training images of {source} are alike: give other images")

    def pixels(part: Part, numbers: list[int]) -> Tensor:
        return normalise(eval_pixels(found.split("test" if part == "test" else "train"), numbers, size))

    return TaskFeatures(
        name=Path(source).name,
        kind="classification",
        classes=found.classes,
        targets={part: found.split("test" if part == "test" else "train").labels[chosen[part]] for part in chosen},
        features=lambda part: _image_features(model, chosen[part], pooling, lambda numbers: pixels(part, numbers)),
        pooling=pooling,
        batch={"pixel_values": pixels("validation", chosen["validation"][:ROWS_TO_CHECK])},
        max_tokens=None,
        notes=tuple(notes),
    )


class _InMemory:
    def __init__(self, states: Tensor) -> None:
        self._states = states  # (layers + 1, rows, dim)

    @property
    def num_layers(self) -> int:
        return len(self._states) - 1

    def layer(self, layer: int) -> Tensor:
        return self._states[layer]


def _image_features(
    model: LayeredModel, numbers: list[int], pooling: TextPooling, pixels: Callable[[list[int]], Tensor]
) -> Features:
    first = model.num_prefix_tokens if pooling == "mean" else 0
    found: list[list[Tensor]] = [[] for _ in range(model.num_layers + 1)]

    def keep(layer: int, hidden: Tensor, mask: Tensor) -> None:
        vectors = pool(hidden[:, first:], mask[:, first:], pooling=pooling, undefined="nan")
        if not vectors.isfinite().all():
            raise InputError(f"the features of an image at layer {layer} are not finite")
        found[layer].append(vectors.to(model.dtype).cpu())

    for start in range(0, len(numbers), IMAGES_AT_ONCE):
        model.pass_states({"pixel_values": pixels(numbers[start : start + IMAGES_AT_ONCE])}, keep)
    return _InMemory(torch.stack([torch.cat(parts) for parts in found]))


def _keys(pictures: Pictures, numbers: list[int], size: int) -> list[str]:
    """Equal for equal images."""
    found = []
    for start in range(0, len(numbers), IMAGES_AT_ONCE):
        images = eval_pixels(pictures, numbers[start : start + IMAGES_AT_ONCE], size)
        found += [hashlib.blake2b(image.numpy().tobytes(), digest_size=16).hexdigest() for image in images]
    return found


def _drawn(total: int, number: int | None, seed: int, split: str) -> list[int]:
    if number is not None and not 2 <= number <= total:
        raise InputError(f"num_{split}: expected 2 to {total} images, got {number}")
    order = torch.randperm(total, generator=torch.Generator().manual_seed(seed))
    return order[:number].tolist()
