"""Batches as other projects have them: a DataLoader, a data set, a list of tuples, of dicts or of tensors."""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from lit_layers.data.batches import Batches, padded
from lit_layers.errors import InputError

MOST = 10_000  # texts or images; all are kept in memory and measured at every step
_ROWS = 16  # of a data set in a batch
_NAMES = ("input_ids", "attention_mask", "token_type_ids", "pixel_values")
_EXPECTED = (
    "expected `Batches`, or a DataLoader, a data set or a list of batches: dicts with input_ids or pixel_values, "
    "tensors, or pairs (inputs, labels)"
)


class GivenBatches(Batches):
    """The batches of a DataLoader, a data set or a list, read once, so that they are the same at every checkpoint.

    A batch is a dict with `input_ids` or `pixel_values`, a tensor of token ids `(batch, tokens)` or of images `(batch,
    channels, height, width)`, or a pair of one of those and labels. Of a data set each row is one of these without its
    first dimension. Token ids without an attention mask are taken as unpadded.

    Raises:
        InputError: for anything else; on the first walk for batches that are none of these, none at all, or too many.
    """

    def __init__(self, given: Any, *, tokenizer_hash: str | None = None) -> None:
        is_rows = isinstance(given, Dataset) or callable(getattr(given, "with_format", None))  # of torch, of datasets
        if not (is_rows or isinstance(given, DataLoader | Tensor | list | tuple)):
            raise InputError(f"batches: {_EXPECTED}; got {_called(given)}")
        if isinstance(getattr(given, "sampler", None), DistributedSampler):
            raise InputError("batches: every process would measure other data: leave the DistributedSampler out")
        if is_rows and not (hasattr(given, "__len__") and hasattr(given, "__getitem__")):
            raise InputError(f"batches: {_called(given)} has no known length: give a list of its first batches")
        self._given: Any = given
        self._tokenizer_hash = tokenizer_hash
        self._is_rows = is_rows
        self._read: list[dict[str, Tensor]] | None = None

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        return iter([dict(batch) for batch in self._all])

    def __len__(self) -> int:
        return len(self._all)

    def content_hash(self) -> str:
        """Sixteen hex digits over the names, shapes and values of every batch."""
        digest = hashlib.sha256()
        for batch in self._all:
            for name, values in sorted(batch.items()):
                digest.update(f"{name} {values.dtype} {tuple(values.shape)}".encode())
                digest.update(np.ascontiguousarray(values.numpy()).tobytes())
        return digest.hexdigest()[:16]

    def tokenizer_hash(self) -> str | None:
        return self._tokenizer_hash

    @property
    def _all(self) -> list[dict[str, Tensor]]:
        if self._read is None:
            batches: list[dict[str, Tensor]] = []
            num_rows = 0
            for number, given in enumerate(self._walk()):
                batches.append(_batch(given, number))
                num_rows += len(next(iter(batches[-1].values())))
                refuse_many(num_rows)
            if not batches:
                raise InputError("batches: expected at least one batch, got none")
            self._read, self._given = batches, None
        return self._read

    def _walk(self) -> Iterator[Any]:
        if isinstance(self._given, Tensor):
            yield self._given
        elif self._is_rows:
            count = len(self._given)
            refuse_many(count)  # before any is made
            for start in range(0, count, _ROWS):
                yield _collated([self._given[row] for row in range(start, min(start + _ROWS, count))])
        else:
            yield from self._given


def refuse_many(count: int) -> None:
    """Refuses more texts or images than anybody means to measure at every step."""
    if count > MOST:
        raise InputError(
            f"batches: expected at most {MOST} texts or images, as each is measured at every step, got {count} or "
            "more: give a part of them, such as torch.utils.data.Subset(data, range(64))"
        )


def as_batches(given: Any) -> Batches:
    """Batches as they are, and others as `GivenBatches`."""
    return given if isinstance(given, Batches) else GivenBatches(given)


def _collated(rows: Sequence[Any]) -> Any:
    """Rows of a data set as a batch: texts filled up to the longest, everything else as torch does it."""
    first = rows[0]
    if isinstance(first, Mapping) and "input_ids" in first:
        texts = [torch.as_tensor(row["input_ids"])[_kept(row)] for row in rows]
        return padded([text.numpy() for text in texts], 0)
    try:
        return torch.utils.data.default_collate(list(rows))
    except (TypeError, RuntimeError) as error:
        raise InputError(f"batches: rows of a data set do not make a batch ({error}): give a DataLoader") from error


def _kept(row: Mapping[str, Any]) -> Tensor:
    """Which tokens of a row are no padding."""
    mask = row.get("attention_mask")
    return torch.ones(len(row["input_ids"]), dtype=torch.bool) if mask is None else torch.as_tensor(mask).bool()


def _batch(given: Any, number: int) -> dict[str, Tensor]:
    labels = None
    if isinstance(given, list | tuple) and len(given) > 0 and isinstance(given[0], Tensor | Mapping):
        labels = given[1] if len(given) > 1 else None
        given = given[0]
    if isinstance(given, Tensor):
        given = {"pixel_values" if given.is_floating_point() else "input_ids": given}
    if not isinstance(given, Mapping):
        raise InputError(f"batches: {_EXPECTED}; batch {number} is {_called(given)}")
    values = {name: _tensor(given[name], name, number) for name in _NAMES if given.get(name) is not None}
    inputs = next((name for name in ("input_ids", "pixel_values") if name in values), None)
    dimensions = {"input_ids": 2, "pixel_values": 4}
    if inputs is None:
        raise InputError(
            f"batches: expected input_ids or pixel_values, batch {number} has {', '.join(map(str, given)) or 'nothing'}"
        )
    if values[inputs].ndim != dimensions[inputs] or not values[inputs].numel():
        shapes = {"input_ids": "(batch, tokens)", "pixel_values": "(batch, channels, height, width)"}
        raise InputError(
            f"batches: expected {inputs} of shape {shapes[inputs]}, got {tuple(values[inputs].shape)} in batch {number}"
        )
    if inputs == "input_ids":
        if (kind := values["input_ids"].dtype) in (torch.bool, torch.float16, torch.float32, torch.float64):
            raise InputError(f"batches: expected input_ids to be whole numbers, got {kind} in batch {number}")
        values["input_ids"] = values["input_ids"].long()
        mask = values.setdefault("attention_mask", torch.ones_like(values["input_ids"]))
        if mask.shape != values["input_ids"].shape or not ((mask == 0) | (mask == 1)).all():
            raise InputError(
                "batches: expected attention_mask to have a 1 for each token and a 0 for padding, got shape "
                f"{tuple(mask.shape)} with values from {mask.min()} to {mask.max()} beside input_ids of shape "
                f"{tuple(values['input_ids'].shape)} in batch {number}"
            )
        if not mask.any(dim=-1).all():
            raise InputError(
                f"batches: expected a real token in each text, attention_mask has a row of 0 in batch {number}"
            )
    labels = given.get("labels") if labels is None else labels
    one_each = labels is not None and isinstance(labels, Tensor) and labels.shape == (len(values[inputs]),)
    if labels is not None and one_each and not labels.is_floating_point():
        values["labels"] = labels.detach().cpu().long()  # of texts or images; those of each token are the text itself
    return values


def _tensor(value: Any, name: str, number: int) -> Tensor:
    try:
        return torch.as_tensor(value).detach().cpu()
    except (TypeError, ValueError, RuntimeError) as error:
        raise InputError(f"batches: expected {name} of batch {number} to be a tensor, got {_called(value)}") from error


def _called(value: Any) -> str:
    return f"a {type(value).__name__}" if not isinstance(value, str) else repr(value)
