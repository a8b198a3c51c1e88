"""Which tokens or prompts of a batch a readout is judged on, with their targets, and the sums over each prompt's."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from lit_layers.errors import InputError
from lit_layers.models.view import Batch, LayeredModel, Trajectory

NO_LABEL = -100


class Rows(NamedTuple):
    """What is judged: tokens, or whole prompts where the head pools (`place` is 0 then)."""

    prompt: Tensor  # (rows,)
    place: Tensor  # (rows,)
    target: Tensor  # (rows,) NO_LABEL where there is none
    per_token: bool

    @property
    def index(self) -> tuple[Tensor, ...]:
        """Where the rows are in logits, or in states whose readout they are."""
        return (self.prompt, self.place) if self.per_token else (self.prompt,)

    @property
    def labelled(self) -> Tensor:
        return self.target != NO_LABEL

    def chunks(self, size: int) -> "Iterator[Rows]":
        """The rows in order, at most `size` at a time; none where there are none."""
        for start in range(0, len(self.prompt), size):
            yield Rows(*(column[start : start + size] for column in self[:3]), per_token=self.per_token)


class Sums(NamedTuple):
    """Over each prompt's rows, in float64 on the CPU."""

    loss: Tensor  # (*n, prompts)
    hits: Tensor  # (*n, prompts)
    divergence: Tensor  # (*n, prompts)
    num_rows: Tensor  # (prompts,)
    num_labels: Tensor  # (prompts,)

    @classmethod
    def of(cls, values: Tensor, rows: Rows, num_prompts: int) -> "Sums":
        """Of loss, hit and divergence (3, *n, rows), as `FullModel.compared` gives them for all rows of a batch."""
        prompt = rows.prompt.cpu()
        values = values.double().cpu()
        loss, hits, divergence = values.new_zeros(*values.shape[:-1], num_prompts).index_add_(-1, prompt, values)
        num_rows, num_labels = (each.bincount(minlength=num_prompts) for each in (prompt, prompt[rows.labelled.cpu()]))
        return cls(loss, hits, divergence, num_rows, num_labels)


def rows_of(name: str, trajectory: Trajectory, batch: Batch) -> Rows:
    """Of a model that generates, every real token that a real one follows, which is its target; of others every real
    token, or every prompt where the head pools, with the batch's `labels`.

    Raises:
        InputError: labels that do not fit, or a head with one output, of the analysis `name`.
    """
    mask, model = trajectory.mask, trajectory.model
    if model.predicts_next_token:
        prompt, place = (mask[:, :-1] & mask[:, 1:]).nonzero().T
        return Rows(prompt, place, batch["input_ids"].to(prompt.device)[prompt, place + 1], True)
    per_token, num_classes = trajectory.logits.ndim == 3, trajectory.logits.shape[-1]
    if num_classes == 1:  # whose log-softmax is 0 whatever it says
        raise InputError(
            f"{name}: {type(model.model).__name__} gives one number, a regression, and no classes to compare"
        )
    if per_token:
        prompt, place = mask.nonzero().T
    else:
        prompt = torch.arange(len(mask), device=mask.device)
        place = torch.zeros_like(prompt)
    target = torch.full_like(prompt, NO_LABEL)
    if "labels" in batch:
        labels = batch["labels"].to(prompt.device)
        expected = mask.shape if per_token else mask.shape[:1]
        if labels.is_floating_point() or labels.shape != expected:
            kind = type(model.model).__name__
            raise InputError(
                f"{name}: expected integer labels of shape {tuple(expected)} for {kind}, "
                f"got {labels.dtype} of shape {tuple(labels.shape)}"
            )
        target = labels[prompt, place] if per_token else labels
        if len(target) and (target.max() >= num_classes or (target[target != NO_LABEL] < 0).any()):
            raise InputError(
                f"{name}: {type(model.model).__name__} has {num_classes} classes, labels from {int(target.min())} to "
                f"{int(target.max())} do not fit it"
            )
    return Rows(prompt, place, target, per_token)


def check_head(name: str, model: LayeredModel) -> None:
    """Refuses a model whose states nothing reads.

    Raises:
        InputError: naming the analysis and the model.
    """
    scores_texts = model.has_head and "logits" in model.family.results  # what CLIP's text model projects is a state
    bare = model.num_classes == 0 if model.family.sees_images else not scores_texts
    if bare:
        raise InputError(f"{name}: {type(model.model).__name__} has no head to read its layers with")
