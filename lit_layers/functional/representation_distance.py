"""How far the states of one model are from those of another on the same rows: steps of a run, seeds at equal steps.

Beside `linear_cka`. All computed in float64.
"""

from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from lit_layers.functional._checks import centered, not_finite, settled, widened, without

Undefined = Literal["raise", "nan"]
_EPS = torch.finfo(torch.float64).eps


def procrustes_distance(
    x: Float[Tensor, "*n rows dim1"], y: Float[Tensor, "*n rows dim2"], *, undefined: Undefined = "raise"
) -> Float[Tensor, "*n"]:
    """What is left between two representations when one is turned onto the other as well as it can be.

    With both centred and scaled to Frobenius norm 1 the least |X Q - Y|^2 over rotations and reflections Q, which is
    2 - 2 |X'Y|_* (nuclear norm). Range [0, 2]: 0 where they are the same up to rotation. Unchanged by rotation,
    isotropic scaling and translation of either side, and by a joint order of the rows. The narrower side is taken to be
    filled up with zeros. For as many dimensions as rows even independent data come near: use more rows than dimensions.

    Source: Ding, Denain & Steinhardt 2021, section 2.2.

    Raises:
        ValueError: shapes that differ; constant x or y, or values that are not finite (NaN there with
            `undefined="nan"`).
    """
    x, y, problems = _pairs(x, y)
    norms = [torch.linalg.matrix_norm(side, keepdim=True) for side in (x, y)]
    x, y = (side / norm.where(norm > 0, 1.0) for side, norm in zip((x, y), norms, strict=True))
    shared = torch.linalg.svdvals(x.mT @ y).sum(-1)
    return settled("procrustes_distance", (2 - 2 * shared).clamp(min=0.0), problems, undefined)


def subspace_overlap(
    x: Float[Tensor, "*n rows dim"], y: Float[Tensor, "*n rows dim"], *, k: int, undefined: Undefined = "raise"
) -> Float[Tensor, "*n"]:
    """How far the `k` leading principal directions of two representations span the same subspace of their features.

    |U'V|_F^2 / k of the orthonormal directions U and V of the centred rows: the mean squared cosine of the principal
    angles. Range [0, 1]: 1 for the same subspace; k / dim in expectation for independent ones. Unchanged by a rotation
    common to both, by scaling and translation of either; not by a rotation of one, so it is for steps of one run: the
    features of different seeds have no order in common.

    Source: Krzanowski 1979.

    Raises:
        ValueError: shapes that differ, `k` that is none; a side with fewer directions, constant or with values that are
            not finite (NaN there with `undefined="nan"`).
    """
    if x.shape[-1:] != y.shape[-1:]:
        raise ValueError(f"expected x and y of one width, got {x.shape[-1]} and {y.shape[-1]}")
    x, y, problems = _pairs(x, y)
    if not 1 <= k <= min(x.shape[-2] - 1, x.shape[-1]):
        raise ValueError(f"expected k from 1 to the smaller of rows - 1 and dim, got {k} of {tuple(x.shape[-2:])}")
    bases = []
    for name, side in (("x", x), ("y", y)):
        _, values, directions = torch.linalg.svd(side, full_matrices=False)
        floor = max(side.shape[-2:]) * _EPS * values[..., 0]
        problems[f"{name} has fewer than {k} directions"] = values[..., k - 1] <= floor
        bases.append(directions[..., :k, :])
    overlap = (bases[0] @ bases[1].mT).square().sum((-2, -1)) / k
    return settled("subspace_overlap", overlap, problems, undefined)


def _pairs(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Both centred, and what is undefined."""
    x, y = widened("x", x), widened("y", y)
    if x.ndim < 2 or x.shape[:-1] != y.shape[:-1]:
        raise ValueError(f"expected x and y of the same rows, got {(*x.shape,)} and {(*y.shape,)}")
    problems: dict[str, Tensor] = {"values are not finite": not_finite(x) | not_finite(y)}
    sides = []
    for name, side in (("x", x), ("y", y)):
        side = centered(without(side, not_finite(side)), side.new_ones(side.shape[:-1], dtype=torch.bool))
        problems[f"{name} does not vary"] = (side == 0).flatten(-2).all(-1)
        sides.append(side)
    return sides[0], sides[1], problems
