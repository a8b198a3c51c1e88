"""The matrices of the Jacobian lens: means of prompts' Jacobians from each layer to the last one, made in parts."""

import copy
import functools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from lit_layers.analyses.states import at_least_float32, first_rows, real_tokens
from lit_layers.errors import InputError
from lit_layers.functional.jacobian.through_blocks import jacobians_to_last_layer
from lit_layers.models.view import Batch, LayeredModel, Trajectory


class FittedLens(NamedTuple):
    """A lens and those of both halves of its prompts, in float64; NaN where no prompt has a finite Jacobian."""

    jacobians: Tensor  # (layers, dim, dim), of layers 0 to L - 1
    halves: Tensor  # (2, layers, dim, dim)
    num_prompts: int
    num_undefined: Tensor  # (layers,) prompts that are left out: too short, or without a finite Jacobian

    @classmethod
    def of(cls, halves: "Sequence[JacobianSum | None]", num_prompts: int, num_short: int) -> "FittedLens":
        """Of the sums over both halves of so many prompts, of which the second may have none.

        Raises:
            ValueError: neither has one.
        """
        some = next((each for each in halves if each is not None), None)
        if some is None:
            raise ValueError("expected Jacobians of at least one prompt, got none")
        nothing = JacobianSum(torch.zeros_like(some.matrices), torch.zeros_like(some.counts))
        sums = [nothing if each is None else each for each in halves]
        counts = torch.stack([each.counts for each in sums])
        stacked = torch.stack([each.matrices.double() for each in sums])
        whole = stacked.sum(0).div_(counts.sum(0)[:, None, None])
        stacked /= counts[..., None, None]  # in place: 2 x 24 x 1,024² x 8 B = 0.4 GB
        return cls(whole, stacked, num_prompts, num_short + num_prompts - counts.sum(0).long())


def fit_jacobian_lens(
    model: LayeredModel, batches: Iterable[Batch], *, num_prompts: int = 8, skip_first: int = 16
) -> FittedLens:
    """Fits the Jacobian lens of a model that predicts the next token, exactly, on the first prompts.

    Per prompt over its places from `skip_first` on, but the last; then the mean over prompts. All directions of few
    prompts are worth more than random directions of many at the same cost.

    Raises:
        InputError: no prompt is longer than `skip_first` + 1.
    """
    fit = LensFit("jacobian", at_least_float32(model), skip_first)
    number = num_short = 0
    for prompt in one_by_one(first_rows(batches, num_prompts)):
        if is_long(prompt, skip_first):
            fit.of_part(FitPart(fit, number % 2, number // 2, [prompt]))
            number += 1
        else:
            num_short += 1
    if not number:
        raise InputError(
            f"skip_first: no prompt has a place from {skip_first} on that another token follows: give longer texts"
        )
    return FittedLens.of(fit.sums, number, num_short)


@dataclass
class JacobianSum:
    """The sum of some prompts' Jacobians where they are finite; of one prompt in its dtype, of several in float64."""

    matrices: Tensor  # (layers, dim, dim), on the CPU
    counts: Tensor  # (layers,) prompts whose Jacobian is finite

    @classmethod
    def of_prompt(cls, view: LayeredModel, prompt: Batch, skip_first: int) -> "JacobianSum":
        """Of one prompt that is long enough, passed alone."""
        trajectory = view.trajectory(prompt)
        blocks = [trajectory.block(layer) for layer in range(1, view.num_layers + 1)]
        jacobians = jacobians_to_last_layer(blocks, trajectory.hidden[0], places_of(trajectory, skip_first))
        defined = jacobians.isfinite().flatten(1).all(-1)
        jacobians[~defined] = 0
        return cls(jacobians.cpu(), defined.cpu().long())

    def add_(self, other: "JacobianSum") -> None:
        if self.matrices.dtype != torch.float64:
            self.matrices = self.matrices.double()
        for own, matrix in zip(self.matrices, other.matrices, strict=True):  # no copy of all in float64: 0.2 GB
            own += matrix
        self.counts = self.counts + other.counts


def added_up(sums: "Iterable[tuple[int, JacobianSum | None]]") -> "list[JacobianSum | None]":
    """The sums over both halves, of those of parts in their order, each with the number of its half."""
    halves: list[JacobianSum | None] = [None, None]
    for half, part in sums:
        whole = halves[half]
        if whole is None:
            halves[half] = part
        elif part is not None:
            whole.add_(part)
    return halves


class FitPart(NamedTuple):
    """Prompts of one half that follow one another in it, whose Jacobians are added up in this order."""

    fit: "LensFit"
    half: int
    place: int  # among the parts of the half
    prompts: list[Batch]


class LensFit:
    """One process's share of a fit.

    Every second prompt is of one half, and the sum over a half is made in the order of its prompts. As long as parts
    come without a gap from the first on, they are added up here as they come, and the result of the first is the sum of
    them all: a process that does all parts holds two sums and one prompt's Jacobians (8 prompts x 24 x 1,024² x 4 B are
    0.8 GB). The additions are the same whoever does which part.

    Args:
        seed: of the order of the weights, where they are to be shuffled.
    """

    def __init__(self, name: str, view: LayeredModel, skip_first: int, seed: int | None = None) -> None:
        self.name, self._view, self._skip_first, self._seed = name, view, skip_first, seed
        self.sums: list[JacobianSum | None] = [None, None]
        self._num_added = [0, 0]

    @property
    def reads_model(self) -> bool:
        """Whether the Jacobians are the model's own, and so are the states that they are taken at."""
        return self._seed is None

    @functools.cached_property
    def _model(self) -> LayeredModel:
        """A copy with shuffled weights is made when it is first needed."""
        return self._view if self._seed is None else LayeredModel(with_shuffled_weights(self._view, self._seed))

    def parts(self, prompts: Sequence[Batch], size: int) -> Iterator[FitPart]:
        """All prompts, up to `size` of a half in a part."""
        halves = prompts[::2], prompts[1::2]
        for place in range(-(-len(halves[0]) // size)):
            for half, members in enumerate(halves):
                if some := [*members[place * size : (place + 1) * size]]:
                    yield FitPart(self, half, place, some)

    def of_part(self, part: FitPart) -> JacobianSum | None:
        """The sum over its prompts; None where it is in the result of an earlier part of this process."""
        first, *others = part.prompts
        total = JacobianSum.of_prompt(self._model, first, self._skip_first)
        for prompt in others:
            total.add_(JacobianSum.of_prompt(self._model, prompt, self._skip_first))
        if part.place != self._num_added[part.half]:
            return total
        self._num_added[part.half] += 1
        before = self.sums[part.half]
        if before is None:
            self.sums[part.half] = total
            return total
        before.add_(total)
        return None

    def let_go(self) -> None:
        """Of the copy with shuffled weights."""
        self.__dict__.pop("_model", None)


def with_shuffled_weights(view: LayeredModel, seed: int) -> torch.nn.Module:
    """A copy of a model in which the entries of each weight matrix of its blocks stand in another order."""
    model = copy.deepcopy(view.model)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for block in dict.fromkeys(LayeredModel(model).blocks):
            for weight in block.parameters():
                if weight.ndim > 1:
                    order = torch.randperm(weight.numel(), generator=generator).to(weight.device)
                    weight.copy_(weight.flatten()[order].view_as(weight))
    return model


def one_by_one(batches: Iterable[Batch], *, after: int = 0) -> Iterator[Batch]:
    """Prompts, each in a batch of its own; without the first `after`."""
    number = 0
    for batch in batches:
        for row in range(len(next(iter(batch.values())))):
            number += 1
            if number > after:
                yield {name: column[row : row + 1] for name, column in batch.items()}


def is_long(prompt: Batch, skip_first: int) -> bool:
    """Whether a batch of one prompt has a place from the given one on that another token follows."""
    return len(real_tokens(prompt)[0]) > skip_first + 1


def places_of(trajectory: Trajectory, skip_first: int) -> Tensor:
    """Places of a prompt's real tokens from the given one on, but the last: no token follows it."""
    return trajectory.mask[0].nonzero()[:, 0][skip_first:-1]
