"""How far the states of one model are from those of another on the same rows: steps of a run, seeds at equal steps.

All computed in float64.
"""

from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from lit_layers.functional._checks import centered, check_option, checked, not_finite, widened, zeroed

Undefined = Literal["raise", "nan"]
_EPS = torch.finfo(torch.float64).eps


def procrustes_distance(
    x: Float[Tensor, "*n rows dim1"], y: Float[Tensor, "*n rows dim2"], *, undefined: Undefined = "raise"
) -> Float[Tensor, "*n"]:
    """What is left between two representations when one is turned onto the other as well as it can be.

    With both centred and scaled to Frobenius norm 1 the least |X Q - Y|^2 over rotations and reflections Q, which is
    2 - 2 |X'Y|_* (nuclear norm). Range [0, 2]: 0 where they are the same up to rotation. Unchanged by rotation,
    isotropic scaling and translation of either side, and by a joint order of the rows. The narrower side is taken to be
    filled up with zeros. For as many dimensions as rows even independent data come near: use more rows than dimensions,
    or compare with what rows in another order give.

    Source: Ding, Denain & Steinhardt 2021, section 2.2.

    Raises:
        ValueError: shapes that differ; constant x or y, or values that are not finite (NaN there with
            `undefined="nan"`).
    """
    x, y, problems = _pairs(x, y)
    return checked("procrustes_distance", _apart(_turnable(x), _turnable(y)), problems, undefined)


def procrustes_distance_matrix(
    states: Float[Tensor, "places rows dim"], *, undefined: Undefined = "raise"
) -> Float[Tensor, "places places"]:
    """`procrustes_distance` of every two representations; symmetric, 0 on the diagonal.

    Raises:
        ValueError: one whose rows are all equal or hold a value that is not finite; with `undefined="nan"` its row and
            column are NaN.
    """
    states, problems = _several("procrustes_distance_matrix", states)
    turnable = _turnable(states)
    distances = states.new_zeros(len(states), len(states))
    for place in range(len(states) - 1):
        others = turnable[place + 1 :]
        distances[place, place + 1 :] = _apart(turnable[place].expand_as(others), others)
    return checked("procrustes_distance_matrix", distances + distances.mT, problems, undefined)


def subspace_overlap(
    x: Float[Tensor, "*n rows dim1"],
    y: Float[Tensor, "*n rows dim2"],
    *,
    k: int,
    of: Literal["features", "rows"] = "features",
    undefined: Undefined = "raise",
) -> Float[Tensor, "*n"]:
    """How far the `k` leading principal directions of two representations span the same subspace of their features.

    |U'V|_F^2 / k of the orthonormal directions U and V of the centred rows: the mean squared cosine of the principal
    angles. Range [0, 1]: 1 for the same subspace; k / dim in expectation for independent ones. Unchanged by a rotation
    common to both, by scaling and translation of either; not by a rotation of one, so it is for steps of one run: the
    features of different seeds have no order in common.

    `of="rows"`: of what the rows score along these directions, which is a subspace of their own space, whatever the
    features are: unchanged by a rotation of one side, k / (rows - 1) in expectation for independent ones.

    Source: Krzanowski 1979; of rows Raghu et al., arXiv 1706.05806, whose SVCCA compares the same subspaces by the mean
    of the cosines instead of their squares.

    Raises:
        ValueError: shapes that differ, `k` that is none; a side with fewer directions, constant or with values that are
            not finite (NaN there with `undefined="nan"`).
    """
    if of == "features" and x.shape[-1:] != y.shape[-1:]:
        raise ValueError(f"expected x and y of one width, got {x.shape[-1]} and {y.shape[-1]}")
    x, y, problems = _pairs(x, y)
    bases = []
    for name, side in (("x", x), ("y", y)):
        basis, fewer = _principal(side, k, of)
        problems[f"{name} has fewer than {k} directions"] = fewer
        bases.append(basis)
    return checked("subspace_overlap", _overlap(*bases), problems, undefined)


def subspace_overlap_matrix(
    states: Float[Tensor, "places rows dim"],
    *,
    k: int,
    of: Literal["features", "rows"] = "features",
    undefined: Undefined = "raise",
) -> Float[Tensor, "places places"]:
    """`subspace_overlap` of every two representations of the same features, or rows; symmetric, 1 on the diagonal.

    Raises:
        ValueError: `k` that is none; one with fewer directions, or with a value that is not finite; with
            `undefined="nan"` its row and column are NaN.
    """
    states, problems = _several("subspace_overlap_matrix", states)
    bases, fewer = _principal(states, k, of)
    problems[f"one has fewer than {k} directions"] = fewer | fewer[:, None]
    return checked("subspace_overlap_matrix", _overlap(bases[:, None], bases), problems, undefined)


def _turnable(rows: Tensor) -> Tensor:
    """Centred rows at Frobenius norm 1, turned into as few dimensions as they have: X = (R Q)' has the norms of R'."""
    norm = torch.linalg.matrix_norm(rows, keepdim=True)
    rows = rows / norm.where(norm > 0, 1.0)
    return torch.linalg.qr(rows.mT, mode="r").R.mT if rows.shape[-2] < rows.shape[-1] else rows


def _apart(x: Tensor, y: Tensor) -> Tensor:
    return (2 - 2 * torch.linalg.svdvals(x.mT @ y).sum(-1)).clamp(min=0.0)


def _principal(rows: Tensor, k: int, of: str) -> tuple[Tensor, Tensor]:
    """The k leading directions of centred rows, (*n, k, dim) or of rows (*n, k, rows), and which have fewer.

    Raises:
        ValueError: `k` that is none of 1 to the smaller of rows - 1 and dim.
    """
    if not 1 <= k <= min(rows.shape[-2] - 1, rows.shape[-1]):
        raise ValueError(f"expected k from 1 to the smaller of rows - 1 and dim, got {k} of {tuple(rows.shape[-2:])}")
    check_option("of", of, "features", "rows")
    scores, values, directions = torch.linalg.svd(rows, full_matrices=False)
    directions = directions if of == "features" else scores.mT
    floor = max(rows.shape[-2:]) * _EPS * values[..., 0]
    return directions[..., :k, :], values[..., k - 1] <= floor


def _overlap(one: Tensor, other: Tensor) -> Tensor:
    return (one @ other.mT).square().sum((-2, -1)) / one.shape[-2]


def _several(metric: str, states: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Each place's rows centred, and which pairs are undefined."""
    if states.ndim != 3:
        raise ValueError(f"{metric} needs states of shape (places, rows, dim), got {(*states.shape,)}")
    states, _, problems = _pairs(states, states)
    return states, {reason: bad | bad[:, None] for reason, bad in problems.items()}


def _pairs(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Both centred, and what is undefined."""
    x, y = widened(x), widened(y)
    if x.ndim < 2 or x.shape[:-1] != y.shape[:-1]:
        raise ValueError(f"expected x and y of the same rows, got {(*x.shape,)} and {(*y.shape,)}")
    problems: dict[str, Tensor] = {"values are not finite": not_finite(x) | not_finite(y)}
    sides = []
    for name, side in (("x", x), ("y", y)):
        side = centered(zeroed(side, not_finite(side)), side.new_ones(side.shape[:-1], dtype=torch.bool))
        problems[f"{name} does not vary"] = (side == 0).flatten(-2).all(-1)
        sides.append(side)
    return sides[0], sides[1], problems
