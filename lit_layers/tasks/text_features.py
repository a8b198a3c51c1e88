"""Tokenized downstream tasks, and features of their texts: one vector per text and layer, stored on disk."""

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
    """The tokenized texts and targets of a task, by `train`, `validation` and `test`."""

    data: TaskData
    texts: Mapping[str, EncodedTexts]
    targets: Mapping[str, Tensor]  # (rows,) int64 class indices, or float64 values of a regression

    @property
    def is_classification(self) -> bool:
        return self.data.kind == "classification"

    @property
    def num_classes(self) -> int:
        return len(self.data.classes or ())

    def errors_of_mean(self, part: str) -> Tensor | None:
        """Return the squared errors, (rows,), of predicting the mean training target for each row of a split.

        Return None for a classification.
        """
        if self.is_classification:
            return None
        return (self.targets[part] - self.targets["train"].mean()).square()

    def where(self, masks: Mapping[str, Tensor]) -> "TaskRows":
        """Return the same texts with only the targets that the mask (rows,) of each split selects."""
        return replace(self, targets={part: targets[masks[part]] for part, targets in self.targets.items()})

    def counts(self) -> dict[str, int]:
        """Return the counts that records have as tags, without counts of 0.

        These are the numbers of dropped duplicates, dropped blank rows, rows whose text also occurs with another
        target, test rows of a class that is missing in train, and truncated texts.
        """
        data = self.data
        names = ("num_duplicates", "num_empty", "num_conflicting", "num_unseen_test_rows")
        counts = {name: getattr(data, name) for name in names}
        counts["num_cut"] = sum(texts.num_cut for texts in self.texts.values())
        return {name: count for name, count in counts.items() if count}


class TaskReader:
    """A reader of a task. It loads the task once, and tokenizes the texts once for each token limit."""

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
        """Return a hash of the task and of the token ids of its texts, as 16 hex digits."""
        data = self.data()
        parts = (data.train_and_validation().texts, data.test.texts)
        ids = [self._encoded(texts, self._max_tokens).content_hash() for texts in parts]
        return hashlib.sha256("/".join([data.content_hash(), *ids]).encode()).hexdigest()[:16]

    def tokenizer_hash(self) -> str:
        return self._encoded(self.data().test.texts, self._max_tokens).tokenizer_hash

    def rows(self, model: LayeredModel, *, join_validation: bool) -> TaskRows:
        """Return the tokenized rows of the task for a model.

        Texts are truncated to `max_tokens` tokens, or to the model's own limit if that is lower.

        With `join_validation`, train also contains the validation rows.

        Raises:
            InputError: The model reads images, or the task or tokenizer cannot be loaded.
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
    """Return the targets in random order, for a control: a probe that is fitted to unrelated targets."""
    return targets[torch.randperm(len(targets), generator=torch.Generator().manual_seed(seed))]


TextPooling = Literal["last", "mean", "cls"]
_FILE = "features.npy"


class LayerFeatures:
    """Features of all layers, read from a temporary file one layer at a time.

    The file, an array (layers + 1, rows, dim), is deleted together with the object.
    """

    def __init__(self, scratch: Scratch) -> None:
        self._values, self._scratch = np.load(scratch.folder / _FILE, mmap_mode="r"), scratch
        self.num_layers = len(self._values) - 1  # L, because the file has L + 1 layers
        self.num_rows, self.dim = self._values.shape[1:]

    def layer(self, layer: int, rows: np.ndarray | slice = slice(None)) -> Tensor:
        """Return the features (rows, dim) of all or some texts at one layer, 0 to L, in the order of the texts."""
        return torch.from_numpy(np.array(self._values[layer, rows]))

    def defined(self) -> Tensor:
        """Return a mask (layers + 1, rows) of the texts with a finite vector at each layer."""
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
    """Return one vector per text at every layer, pooled over the text's real tokens (those that are not padding).

    Each text passes through the model once, without the head. Hidden states are pooled on the device, and only the
    vectors are stored.

    Args:
        model: The model.
        texts: The texts.
        pooling: The "last" real token, the "mean" over real tokens, the first token ("cls"), or "centered_unit_mean" as
            in `pool`. The vector of "centered_unit_mean" is NaN for a text where it is undefined.
        states: The hidden states to pool. "resid": every layer before the final norm. "hf": only the last layer after
            the final norm, all others before it. "normed": every layer after the final norm.
        max_tokens: Maximum number of tokens per batch.
        undefined: With "nan", a text with non-finite hidden states at a layer has a NaN vector there.
            `LayerFeatures.defined` shows which texts have a vector.
        last_pooling: The pooling of the last layer. None means `pooling`, as at the other layers.

    Raises:
        InputError: A text is longer than the model allows, or with `undefined="raise"` hidden states are not finite.
    """
    scratch, shape = Scratch(), (model.num_layers + 1, len(texts), model.dim)
    with _new_array(scratch, shape, _dtype(model)) as features, torch.autocast(model.device.type, enabled=False):
        for rows, batch in texts.batches(max_tokens):

            def store(layer: int, hidden: Tensor, mask: Tensor, rows: list[int] = rows) -> None:
                how = pooling if last_pooling is None or layer < model.num_layers else last_pooling
                vectors, finite = _vectors(model, how, states, layer, hidden, mask)
                if undefined == "raise" and not finite.all():
                    row = rows[int(finite.int().argmin())]
                    raise InputError(f"the features of text {row} at layer {layer} are not finite")
                features[layer, rows] = vectors.numpy()

            model.pass_states(batch, store)
    return LayerFeatures(scratch)


def length_batches(texts: EncodedTexts) -> list[Batch]:
    """Return batches of texts with similar lengths. The entry `row` of a batch has the indices of its texts."""
    return [{**batch, "row": torch.tensor(rows)} for rows, batch in texts.batches(BATCH_TOKENS)]


def pool_texts(traj: Trajectory, batch: Batch, pooling: Pooling, states: States) -> dict[str, Tensor]:
    """Return the features of a batch's texts as `vectors`, (layers + 1, dim, texts), and their indices as `row`.

    `traj` are the hidden states of the batch at all layers.
    """
    layers = [
        _vectors(traj.model, pooling, states, layer, hidden, traj.mask)[0] for layer, hidden in enumerate(traj.hidden)
    ]
    return {"row": batch["row"], "vectors": torch.stack(layers).mT}


def store_features(values: dict[Any, Tensor]) -> LayerFeatures:
    """Write the features of all texts to a temporary file and remove them from `values`.

    `values` has the keys of `pool_texts`. Each tensor is concatenated over the batches.

    Raises:
        InputError, OSError: The features cannot be written, for example because the disk is full.
    """
    scratch, order, vectors = Scratch(), values.pop("row"), values.pop("vectors").mT.numpy()
    with _new_array(scratch, vectors.shape, vectors.dtype) as features:
        for layer, each in enumerate(vectors):
            features[layer, order] = each
    return LayerFeatures(scratch)


@contextmanager
def _new_array(scratch: Scratch, shape: tuple[int, ...], dtype: Any) -> Iterator[np.ndarray]:
    """Yield a new memory-mapped array in a temporary folder, for the features of a task.

    If the disk lacks space for the array, raise an error before anything is written.
    """
    file = scratch.folder / _FILE
    with naming(file):
        values = np.lib.format.open_memmap(file, "w+", dtype, shape)
        # Reserve the space of the whole file. Otherwise a write to the array on a full disk kills the process (SIGBUS).
        if hasattr(os, "posix_fallocate"):
            with file.open("r+b") as opened:
                os.posix_fallocate(opened.fileno(), 0, file.stat().st_size)
        yield values
        values.flush()


def _dtype(model: LayeredModel) -> Literal["float64", "float32"]:
    return "float64" if model.dtype == torch.float64 else "float32"


def _vectors(
    model: LayeredModel, pooling: Pooling, states: States, layer: int, hidden: Tensor, mask: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the pooled hidden states of a batch at one layer, (batch, dim), on the CPU, with NaN if undefined.

    Also return a mask, (batch,), of the texts whose hidden states are all finite.
    """
    hidden = convert_states(model, states, layer, hidden)
    pooled = _pooled(hidden, mask, pooling)
    # "centered_unit_mean" can be NaN even if all states are finite, so check the plain mean instead.
    finite = (_pooled(hidden, mask, "mean") if pooling == "centered_unit_mean" else pooled).isfinite().all(-1)
    pooled = pooled if finite.all() else pooled.masked_fill(~finite[:, None], torch.nan)
    return pooled.cpu().to(getattr(torch, _dtype(model))), finite


def _pooled(hidden: Tensor, mask: Tensor, pooling: Pooling) -> Tensor:
    """Return the hidden states of a batch, pooled over tokens, (batch, dim). The mean is computed in float64."""
    # The common poolings are computed here, because `pool` would copy the states of all tokens that are not padding.
    # The copy takes a third of a small model's forward pass.
    if pooling == "mean":
        real = mask[..., None]
        return hidden.masked_fill(~real, 0.0).sum(1, dtype=torch.float64) / real.sum(1)
    if pooling not in ("last", "cls"):
        return pool(hidden, mask, pooling=pooling, undefined="nan")
    positions = torch.arange(mask.shape[1], device=mask.device)
    candidates = torch.where(mask, positions, -1 if pooling == "last" else mask.shape[1])
    chosen = candidates.amax(1) if pooling == "last" else candidates.amin(1)
    return hidden[torch.arange(len(hidden), device=hidden.device), chosen]
