"""Downstream tasks as a model reads them: their texts as token ids, and one vector per text and layer, held on disk."""

import hashlib
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from lit_layers.data.batches import BATCH_TOKENS, EncodedTexts, encode_texts, tokenizer_of
from lit_layers.errors import InputError
from lit_layers.files.durable import Scratch, naming
from lit_layers.functional.geometry import Pooling, pool
from lit_layers.models.view import Batch, LayeredModel, States, Trajectory, convert_states
from lit_layers.tasks.catalogue import find_task
from lit_layers.tasks.probe_task import ProbeTask, TaskData

Part = Literal["train", "validation", "test"]


@dataclass(frozen=True, eq=False)
class TaskRows:
    """The parts that are asked for, by name, and what is said of the whole."""

    data: TaskData
    texts: Mapping[str, EncodedTexts]
    targets: Mapping[str, Tensor]  # (rows,) int64 classes, or float64 values

    @property
    def is_classification(self) -> bool:
        return self.data.kind == "classification"

    @property
    def num_classes(self) -> int:
        return len(self.data.classes or ())

    def errors_of_mean(self, part: str) -> Tensor | None:
        """Return the squared errors (rows,) of predicting the training mean; None for a classification."""
        if self.is_classification:
            return None
        return (self.targets[part] - self.targets["train"].mean()).square()

    def where(self, kept: Mapping[str, Tensor]) -> "TaskRows":
        """Return the rows with only the targets that masks (rows,) by part select; the texts stay."""
        return replace(self, targets={part: targets[kept[part]] for part, targets in self.targets.items()})

    def counts(self) -> dict[str, int]:
        """Return as tags the counts above 0 of rows that were left out, cut or missing."""
        data = self.data
        names = ("num_duplicates", "num_empty", "num_conflicting", "num_unseen_test_rows")
        counts = {name: getattr(data, name) for name in names}
        counts["num_cut"] = sum(texts.num_cut for texts in self.texts.values())
        return {name: count for name, count in counts.items() if count}


class TaskReader:
    """Reads a task once, and its texts once for each limit of tokens."""

    def __init__(
        self,
        name: str,
        task: str | ProbeTask,
        tokenizer: str,
        *,
        corpus: str | None = None,
        folder: str | None = None,
        max_tokens: int = 512,
    ) -> None:
        self.task, self._name, self._folder = find_task(task), name, folder
        self._tokenizer = tokenizer_of(tokenizer, corpus)
        self._max_tokens = max_tokens
        self._data: TaskData | None = None
        self._texts: dict[tuple[tuple[str, ...], int], EncodedTexts] = {}

    def data(self) -> TaskData:
        if self._data is None:
            self._data = self.task.load(self._folder)
        return self._data

    def content_hash(self) -> str:
        """Return a hash of the task and of the token ids of its texts: another tokenizer makes other numbers."""
        data = self.data()
        parts = (data.train_and_validation().texts, data.test.texts)
        ids = [self._encoded(texts, self._max_tokens).content_hash() for texts in parts]
        return hashlib.sha256("/".join([data.content_hash(), *ids]).encode()).hexdigest()[:16]

    def tokenizer_hash(self) -> str:
        return self._encoded(self.data().test.texts, self._max_tokens).tokenizer_hash

    def rows(self, model: LayeredModel, *, join_validation: bool) -> TaskRows:
        """Return the parts for a model, cut at its own limit of tokens if that is lower.

        With `join_validation`, train holds the validation rows too.

        Raises:
            InputError: a model of images, or a task or tokenizer that is not there.
        """
        if model.family.sees_images:
            raise InputError(f"{self._name}: expected a model of text, got {type(model.model).__name__}")
        data, limit = self.data(), min(self._max_tokens, model.max_tokens or self._max_tokens)
        parts = {"train": data.train, "test": data.test, "validation": data.validation}
        if join_validation:
            parts = {"train": data.train_and_validation(), "test": data.test}
        texts = {part: self._encoded(split.texts, limit) for part, split in parts.items()}
        return TaskRows(data, texts, {part: split.targets for part, split in parts.items()})

    def _encoded(self, texts: tuple[str, ...], limit: int) -> EncodedTexts:
        if (texts, limit) not in self._texts:
            self._texts[texts, limit] = encode_texts(self._tokenizer, texts, max_tokens=limit)
        return self._texts[texts, limit]


def permuted(targets: Tensor, seed: int) -> Tensor:
    """Return the same targets in another order, for the control."""
    return targets[torch.randperm(len(targets), generator=torch.Generator().manual_seed(seed))]


TextPooling = Literal["last", "mean", "cls"]
_FILE = "features.npy"


class LayerFeatures:
    """Features of all layers in a file (layers + 1, rows, dim), read a layer at a time; it goes with the object."""

    def __init__(self, scratch: Scratch) -> None:
        self._values, self._scratch = np.load(scratch.folder / _FILE, mmap_mode="r"), scratch
        self.num_layers = len(self._values) - 1  # L: there are L + 1 layers
        self.num_rows, self.dim = self._values.shape[1:]

    def layer(self, layer: int, rows: np.ndarray | slice = slice(None)) -> Tensor:
        """Return the features (rows, dim) of one layer, 0 to L, in the order of the texts; or only of some rows."""
        return torch.from_numpy(np.array(self._values[layer, rows]))

    def defined(self) -> Tensor:
        """Return which texts have a vector at which layer, (layers + 1, rows)."""
        return torch.stack([self.layer(layer).isfinite().all(-1) for layer in range(self.num_layers + 1)])


def text_features(
    model: LayeredModel,
    texts: EncodedTexts,
    *,
    pooling: Pooling = "last",
    states: States = "resid",
    max_tokens: int = BATCH_TOKENS,
    undefined: Literal["raise", "nan"] = "raise",
    last_pooling: Pooling | None = None,
) -> LayerFeatures:
    """Return the features of all layers: the "last" real token of each text, the "mean" of them, or the first ("cls").

    "centered_unit_mean" is that of `pool`, with NaN for a text where it is undefined; with `undefined="nan"` so have
    texts whose states are not finite, at that layer: `LayerFeatures.defined` says which texts have a vector. `states`
    are in one of the conventions of `lit_layers.models.view`, before they are pooled. `last` is the pooling of the
    last layer, where that is another.

    One forward pass per text, without the head; each state is pooled on the device as it passes and only the vector is
    kept.

    Raises:
        InputError: a text longer than the model takes; with `undefined="raise"` states that are not finite.
    """
    scratch, shape = Scratch(), (model.num_layers + 1, len(texts), model.dim)
    with (
        _new_array(scratch, shape, _feature_dtype(model)) as features,
        torch.autocast(model.device.type, enabled=False),
    ):
        for rows, batch in texts.batches(max_tokens):

            def keep(layer: int, hidden: Tensor, mask: Tensor, rows: list[int] = rows) -> None:
                way = pooling if last_pooling is None or layer < model.num_layers else last_pooling
                vectors, finite = _vectors(model, way, states, layer, hidden, mask)
                if undefined == "raise" and not finite.all():
                    row = rows[int(finite.int().argmin())]
                    raise InputError(f"the features of text {row} at layer {layer} are not finite")
                features[layer, rows] = vectors.numpy()

            model.pass_states(batch, keep)
    return LayerFeatures(scratch)


def batches_by_length(texts: EncodedTexts) -> list[Batch]:
    """Return texts in batches of like lengths, with their numbers as the column `row`."""
    return [{**batch, "row": torch.tensor(rows)} for rows, batch in texts.batches(BATCH_TOKENS)]


def pool_texts(seen: Trajectory, batch: Batch, pooling: Pooling, states: States) -> dict[str, Tensor]:
    """Return the numbers of texts, `row`, and their vectors (layers + 1, dim, texts) as those of `text_features`."""
    layers = [
        _vectors(seen.model, pooling, states, layer, hidden, seen.mask)[0] for layer, hidden in enumerate(seen.hidden)
    ]
    return {"row": batch["row"], "vectors": torch.stack(layers).mT}


def store_features(values: dict[Any, Tensor]) -> LayerFeatures:
    """Write the features of all texts, of which `values` is emptied, into a folder of their own.

    Raises:
        InputError, OSError: the disk does not take them.
    """
    scratch, order, vectors = Scratch(), values.pop("row"), values.pop("vectors").mT.numpy()
    with _new_array(scratch, vectors.shape, vectors.dtype) as features:
        for layer, of_layer in enumerate(vectors):
            features[layer, order] = of_layer
    return LayerFeatures(scratch)


@contextmanager
def _new_array(scratch: Scratch, shape: tuple[int, ...], dtype: Any) -> Iterator[np.ndarray]:
    """Yield an array that lies in a file; a disk that is too small is refused before anything is written."""
    file = scratch.folder / _FILE
    with naming(file):
        values = np.lib.format.open_memmap(file, "w+", dtype, shape)
        if hasattr(os, "posix_fallocate"):  # elsewhere a full disk ends the process
            with file.open("r+b") as opened:
                os.posix_fallocate(opened.fileno(), 0, file.stat().st_size)
        yield values
        values.flush()


def _feature_dtype(model: LayeredModel) -> Literal["float64", "float32"]:
    return "float64" if model.dtype == torch.float64 else "float32"


def _vectors(
    model: LayeredModel, pooling: Pooling, states: States, layer: int, hidden: Tensor, mask: Tensor
) -> tuple[Tensor, Tensor]:
    """Return vectors (batch, dim) at a layer on the CPU, NaN if undefined, and which rows have finite states."""
    hidden = convert_states(model, states, layer, hidden)
    pooled = _pooled(hidden, mask, pooling)
    # what "centered_unit_mean" leaves undefined is NaN, of finite states
    finite = (_pooled(hidden, mask, "mean") if pooling == "centered_unit_mean" else pooled).isfinite().all(-1)
    pooled = pooled if finite.all() else pooled.masked_fill(~finite[:, None], torch.nan)
    return pooled.cpu().to(getattr(torch, _feature_dtype(model))), finite


def _pooled(hidden: Tensor, mask: Tensor, pooling: Pooling) -> Tensor:
    """Return pooled states (batch, dim). A token is taken as it is, a mean is computed in float64."""
    if pooling == "mean":  # without `pool`'s copy of the real tokens, which costs a third of a small model's pass
        kept = mask[..., None]
        return hidden.masked_fill(~kept, 0.0).sum(1, dtype=torch.float64) / kept.sum(1)
    if pooling not in ("last", "cls"):
        return pool(hidden, mask, pooling=pooling, undefined="nan")
    places = torch.arange(mask.shape[1], device=mask.device)
    real = torch.where(mask, places, -1 if pooling == "last" else mask.shape[1])
    chosen = real.amax(1) if pooling == "last" else real.amin(1)
    return hidden[torch.arange(len(hidden), device=hidden.device), chosen]
