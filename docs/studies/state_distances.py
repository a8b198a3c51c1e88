"""Distances between the states of two models on the same rows: steps of a run, or seeds at equal steps.

All computations are in float64.
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
    """Return the squared distance between two representations after the best rotation of one onto the other.

    Both are centred and scaled to Frobenius norm 1. The distance is the minimum of |X Q - Y|^2 over rotations and
    reflections Q, which is 2 - 2 |X'Y|_* (nuclear norm). Range [0, 2]: 0 if they are equal up to rotation. Invariant to
    rotation, isotropic scaling and translation of either side, and to a joint permutation of the rows. The narrower
    side is padded with zeros. With as many dimensions as rows even independent data have a small distance: use more
    rows than dimensions, or compare with the distance for permuted rows.

    Source: Ding, Denain & Steinhardt 2021, section 2.2.

    Raises:
        ValueError: if shapes differ, if x or y is constant, or if values are not finite. With `undefined="nan"` the
        last
            two give NaN.
    """
    x, y, problems = _pairs(x, y)
    return checked("procrustes_distance", _distance(_reduced(x), _reduced(y)), problems, undefined)


def procrustes_distance_matrix(
    states: Float[Tensor, "models rows dim"], *, undefined: Undefined = "raise"
) -> Float[Tensor, "models models"]:
    """Return `procrustes_distance` for every two representations, symmetric with 0 on the diagonal.

    Raises:
        ValueError: if a representation is constant or has a value that is not finite. With `undefined="nan"` its row
        and
            column are NaN.
    """
    states, problems = _several("procrustes_distance_matrix", states)
    reduced = _reduced(states)
    distances = states.new_zeros(len(states), len(states))
    for index in range(len(states) - 1):
        others = reduced[index + 1 :]
        distances[index, index + 1 :] = _distance(reduced[index].expand_as(others), others)
    return checked("procrustes_distance_matrix", distances + distances.mT, problems, undefined)


def subspace_overlap(
    x: Float[Tensor, "*n rows dim1"],
    y: Float[Tensor, "*n rows dim2"],
    *,
    k: int,
    of: Literal["features", "rows"] = "features",
    undefined: Undefined = "raise",
) -> Float[Tensor, "*n"]:
    """Return the overlap of the subspaces spanned by the `k` leading principal directions of two representations.

    The overlap is |U'V|_F^2 / k for the orthonormal directions U and V of the centred rows: the mean squared cosine of
    the principal angles. Range [0, 1]: 1 for equal subspaces, k / dim in expectation for independent ones. Invariant to
    a common rotation of both sides, and to scaling and translation of either. A rotation of one side changes it, so use
    it for steps of one run: the features of different seeds do not correspond.

    With `of="rows"` the subspaces are spanned by the scores of the rows along these directions. These are subspaces of
    the space of rows, so they are invariant to a rotation of one side. Expected value for independent ones:
    k / (rows - 1).

    Source: Krzanowski 1979. For rows: Raghu et al., arXiv 1706.05806, whose SVCCA compares the same subspaces by the
    mean of the cosines instead of their squares.

    Raises:
        ValueError: if shapes differ, if `k` is out of range, if a side has fewer directions or is constant, or if
        values
            are not finite. With `undefined="nan"` the last three give NaN.
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
    states: Float[Tensor, "models rows dim"],
    *,
    k: int,
    of: Literal["features", "rows"] = "features",
    undefined: Undefined = "raise",
) -> Float[Tensor, "models models"]:
    """Return `subspace_overlap` for every two representations of the same features or rows, with 1 on the diagonal.

    Raises:
        ValueError: if `k` is out of range, or if a representation has fewer directions or a value that is not finite.
            With `undefined="nan"` the row and column of that representation are NaN.
    """
    states, problems = _several("subspace_overlap_matrix", states)
    bases, fewer = _principal(states, k, of)
    problems[f"one has fewer than {k} directions"] = fewer | fewer[:, None]
    return checked("subspace_overlap_matrix", _overlap(bases[:, None], bases), problems, undefined)


def _reduced(rows: Tensor) -> Tensor:
    """Return centred rows scaled to Frobenius norm 1, in at most as many dimensions as rows.

    From X' = Q R it takes R', which equals X up to a rotation of the features.
    """
    norm = torch.linalg.matrix_norm(rows, keepdim=True)
    rows = rows / norm.where(norm > 0, 1.0)
    return torch.linalg.qr(rows.mT, mode="r").R.mT if rows.shape[-2] < rows.shape[-1] else rows


def _distance(x: Tensor, y: Tensor) -> Tensor:
    return (2 - 2 * torch.linalg.svdvals(x.mT @ y).sum(-1)).clamp(min=0.0)


def _principal(rows: Tensor, k: int, of: str) -> tuple[Tensor, Tensor]:
    """Return the k leading directions of centred rows, (*n, k, dim) or for rows (*n, k, rows), and which have fewer.

    Raises:
        ValueError: if `k` is not between 1 and the smaller of rows - 1 and dim.
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
    """Return the centred rows of each representation, and which pairs are undefined."""
    if states.ndim != 3:
        raise ValueError(f"{metric} needs states of shape (models, rows, dim), got {(*states.shape,)}")
    states, _, problems = _pairs(states, states)
    return states, {reason: bad | bad[:, None] for reason, bad in problems.items()}


def _pairs(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Return both sides centred, and where they are undefined."""
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
