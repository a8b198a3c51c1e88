"""A downstream task as a model reads it: the texts of each part as token ids, with what a probe is to predict."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from lit_layers.data.encoded_texts import EncodedTexts, encode_texts, tokenizer_of
from lit_layers.errors import InputError
from lit_layers.models.view import LayeredModel
from lit_layers.tasks.probe import ProbeTask, TaskData, find_task

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
        """Of a regression: the squared errors (rows,) of predicting the training mean."""
        if self.is_classification:
            return None
        return (self.targets[part] - self.targets["train"].mean()).square()

    def where(self, kept: Mapping[str, Tensor]) -> "TaskRows":
        """The rows that masks (rows,) by part keep, for what is said of targets; the texts stay."""
        return replace(self, targets={part: targets[kept[part]] for part, targets in self.targets.items()})

    def counts(self) -> dict[str, int]:
        """What was left out, cut or is missing, as tags; only what there is any of."""
        data = self.data
        found = {
            "num_duplicates": data.num_duplicates,
            "num_empty": data.num_empty,
            "num_conflicting": data.num_conflicting,
            "num_unseen_test_rows": data.num_unseen_test_rows,
            "num_cut": sum(texts.num_cut for texts in self.texts.values()),
            "num_train_wanted": data.num_train_wanted or 0,
            "num_test_wanted": data.num_test_wanted or 0,
        }
        return {name: count for name, count in found.items() if count}


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
        if max_tokens < 1:
            raise InputError(f"{name}: expected max_tokens of at least 1, got {max_tokens}")
        self.task, self._name, self._folder = find_task(task), name, folder
        self._tokenizer = tokenizer_of(tokenizer, corpus)
        self._max_tokens = max_tokens
        self._data: TaskData | None = None
        self._texts: dict[tuple[str, int], EncodedTexts] = {}

    def data(self) -> TaskData:
        if self._data is None:
            self._data = self.task.load(self._folder)
        return self._data

    def content_hash(self) -> str:
        """Over the task, and the token ids of the train and test texts: another tokenizer makes other numbers."""
        data = self.data()
        parts = (data.train_and_validation().texts, data.test.texts)
        ids = [
            self._encoded(part, texts, self._max_tokens).content_hash()
            for part, texts in zip(("train+", "test"), parts, strict=True)
        ]
        return hashlib.sha256("/".join([data.content_hash(), *ids]).encode()).hexdigest()[:16]

    def tokenizer_hash(self) -> str:
        return self._encoded("test", self.data().test.texts, self._max_tokens).tokenizer_hash

    def rows(self, model: LayeredModel, *, join_validation: bool) -> TaskRows:
        """The parts for a model, whose own limit of tokens counts where it is lower.

        With `join_validation`, train holds the validation rows too.

        Raises:
            InputError: a model of images, or a task or tokenizer that is not there.
        """
        if model.family.sees_images:
            raise InputError(f"{self._name}: expected a model of text, got {type(model.model).__name__}")
        data = self.data()
        joined = data.train_and_validation()
        parts: dict[str, Any] = {"train": joined if join_validation else data.train, "test": data.test}
        if not join_validation:
            parts["validation"] = data.validation
        limit = min(self._max_tokens, model.max_tokens or self._max_tokens)
        texts = {
            part: self._encoded(f"{part}{'+' if join_validation and part == 'train' else ''}", split.texts, limit)
            for part, split in parts.items()
        }
        return TaskRows(data, texts, {part: split.targets for part, split in parts.items()})

    def _encoded(self, part: str, texts: tuple[str, ...], limit: int) -> EncodedTexts:
        if (part, limit) not in self._texts:
            self._texts[part, limit] = encode_texts(self._tokenizer, texts, max_tokens=limit)
        return self._texts[part, limit]


def permuted(targets: Tensor, seed: int) -> Tensor:
    """The same targets in another order, for the control."""
    return targets[torch.randperm(len(targets), generator=torch.Generator().manual_seed(seed))]
