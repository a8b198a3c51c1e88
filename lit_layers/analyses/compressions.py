"""What one block's Jacobian looks like in the leading singular directions of another's."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from lit_layers.analyses.base import DividedAnalysis
from lit_layers.analyses.token_jacobians import (
    check_counts,
    check_directions,
    check_pairs,
    finite_or_zero,
    first_prompts,
    own_jacobians,
)
from lit_layers.data.batches import Batches
from lit_layers.functional.coupling import Factors, compressions, singular_factors
from lit_layers.models.view import LayeredModel, Trajectory
from lit_layers.records import Record


@dataclass(kw_only=True)
class CouplingMatrices(DividedAnalysis):
    """The matrices behind coupling: A = U' J1 V in the K leading directions of J2, at the last token.

    `compression`, one record an entry, with layer (block of J1), other_layer (block that gives the bases U, V) and the
    tags `row`, `column` (1..K, in the order of J2's singular values), `k` and `prompt` (1..). A diagonal matrix of J1's
    singular values is full coupling, a matrix of noise none. Of each u its largest entry is made positive, so that the
    same weights give the same signs. Signs of prompts have nothing to do with each other: matrices are not averaged.
    A pair with a zero or non-finite Jacobian has no records.

    `k` counts directions where it is an int and is a share of the width where it is a float. K^2 records for each pair
    and prompt. Source: Aubry et al., "Transformer block coupling and its correlation with generalization in LLMs",
    eq. 6 and the figures of its section 4.
    """

    batches: Batches
    pairs: list[tuple[int, int]]
    name: str = "coupling_matrices"
    k: int | float = 30
    num_prompts: int = 1

    def check(self, model: LayeredModel) -> None:
        super().check(model)
        self._check_options(model)

    def _check_options(self, model: LayeredModel) -> int:
        """The number of directions, once every option fits."""
        check_pairs(self.name, self.pairs, model.num_layers)
        check_counts(self.name, num_prompts=self.num_prompts)
        return check_directions(self.name, self.k, model.dim)

    def parts(self, model: LayeredModel) -> Iterable[Trajectory]:
        self._check_options(model)
        return first_prompts(model, self.batches, self.num_prompts)

    def of_part(self, model: LayeredModel, part: Trajectory) -> dict[tuple[int, int], Tensor]:
        return self._matrices(part, self._check_options(model))

    def combine(self, model: LayeredModel, found: list[dict[tuple[int, int], Tensor]]) -> Iterable[Record]:
        count = self._check_options(model)
        if not any(found):
            raise ValueError(f"{self.name} is undefined: each pair has a Jacobian that is zero or not finite")
        for prompt, matrices in enumerate(found, start=1):
            for (layer, other), matrix in matrices.items():
                for row, entries in enumerate(matrix.tolist(), start=1):
                    for column, value in enumerate(entries, start=1):
                        tags: dict[str, str | int | float] = {
                            "row": row,
                            "column": column,
                            "k": count,
                            "prompt": prompt,
                        }
                        yield Record(metric="compression", value=value, layer=layer, other_layer=other, tags=tags)

    def _matrices(self, trajectory: Trajectory, count: int) -> dict[tuple[int, int], Tensor]:
        """The defined ones of one prompt."""
        blocks = sorted({block for pair in self.pairs for block in pair})
        jacobians = torch.cat([own_jacobians(trajectory, block, [-1]) for block in blocks])  # (blocks, dim, dim)
        jacobians, undefined = finite_or_zero(jacobians)
        factors = singular_factors(jacobians, count)
        jacobians = jacobians.to(factors.left.dtype)
        largest = factors.left.gather(-2, factors.left.abs().argmax(-2, keepdim=True)).sign()
        factors = factors._replace(left=factors.left * largest, right=factors.right * largest)
        place = {block: index for index, block in enumerate(blocks)}
        found = {}
        for layer, other in self.pairs:
            first, second = place[layer], place[other]
            if not undefined[first] and not undefined[second]:
                bases = Factors(*(part[[second]] for part in factors))
                (matrix,) = compressions(jacobians[[first]], bases, count=count)
                found[layer, other] = matrix[0].double().cpu()
        return found
