"""Geometry of the token sequence inside a layer, and of layers against each other. All computed in float64.

Padding, on whichever side and whatever it holds, never enters a value. Input that is not finite is undefined like the
cases each function names.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from lit_layers.functional._checks import (
    centered,
    check_option,
    not_finite,
    real_rows,
    settled,
    unit_rows,
    widened,
    without,
)

Tokens = Float[Tensor, "*n tokens dim"]
Mask = Bool[Tensor, "*n tokens"]
PerPrompt = Float[Tensor, "*n"]
Undefined = Literal["raise", "nan"]

_EPS = torch.finfo(torch.float64).eps


def token_curvature(
    tokens: Tokens,
    mask: Mask | None = None,
    *,
    drop_first: int = 0,
    center: bool = False,
    unit: bool = False,
    fold: bool = False,
    undefined: Literal["raise", "nan", "skip", "zero"] = "raise",
) -> PerPrompt:
    """Return the mean angle, in radians, between consecutive differences of a prompt's tokens.

    Range [0, pi]: 0 on a line, pi for a zigzag a, b, a, b; pi/2 for a random walk in high dimension, 2 pi/3 for
    independent tokens. `fold` takes |cos| instead, range [0, pi/2]. Unchanged by rotation, translation (hence by
    `center`), positive scaling and reversal; not by `unit`, which first scales each token to norm 1, after `center`.

    Undefined for fewer than 3 real tokens, or where a difference is zero. `undefined="skip"` averages the angles that
    exist, `"zero"` counts the others as 0; with both, what is still undefined is NaN.

    Source: Hosseini & Fedorenko 2023; Skean et al., arXiv 2502.02013, section 3.3.2.

    Raises:
        ValueError: an undefined prompt with `undefined="raise"`.
    """
    return curvature_and_missing(
        tokens, mask, drop_first=drop_first, center=center, unit=unit, fold=fold, undefined=undefined
    )[0]


def curvature_and_missing(
    tokens: Tokens,
    mask: Mask | None = None,
    *,
    drop_first: int = 0,
    center: bool = False,
    unit: bool = False,
    fold: bool = False,
    undefined: Literal["raise", "nan", "skip", "zero"] = "raise",
) -> tuple[PerPrompt, Int[Tensor, "*n"]]:
    """Return token_curvature, and how many of each prompt's angles do not exist because a difference is zero."""
    check_option("undefined", undefined, "raise", "nan", "skip", "zero")
    rows, kept = real_rows(widened(tokens), mask, drop_first)
    broken = not_finite(rows)
    rows = without(rows, broken)
    no_direction = torch.zeros_like(kept)
    if center:
        rows = centered(rows, kept)
    if unit:
        rows, no_direction = unit_rows(rows, kept, after_centering=center)
    steps = rows[..., 1:, :] - rows[..., :-1, :]
    lengths = torch.linalg.vector_norm(steps, dim=-1)
    # unit rows of one direction differ by their rounding
    moves = (lengths > (4 * _EPS if unit else 0.0)) & ~no_direction[..., 1:] & ~no_direction[..., :-1]
    steps = steps / lengths.masked_fill(~moves, 1.0)[..., None]
    angles = _angle(steps[..., :-1, :], steps[..., 1:, :], fold=fold)
    in_prompt = kept[..., 2:]  # packed rows: a real third token makes an angle
    exists = in_prompt & moves[..., :-1] & moves[..., 1:]
    num_in_prompt, num_exists = in_prompt.sum(-1), exists.sum(-1)
    values = angles.masked_fill(~exists, 0.0).sum(-1) / (num_exists if undefined == "skip" else num_in_prompt)
    missing = num_in_prompt - num_exists
    problems = {"a token is not finite": broken, "it takes 3 real tokens": num_in_prompt == 0}
    if undefined in ("raise", "nan"):
        problems["neighbouring tokens are equal"] = missing > 0
    elif undefined == "skip":
        problems["no angle exists"] = num_exists == 0
    return settled("token_curvature", values, problems, "raise" if undefined == "raise" else "nan"), missing


def token_angle(
    tokens: Tokens,
    mask: Mask | None = None,
    *,
    lag: int = 1,
    drop_first: int = 0,
    center: bool = True,
    unit: bool = True,
    undefined: Undefined = "raise",
) -> PerPrompt:
    """Return the mean angle, in radians, between the vectors of tokens `lag` apart.

    With `center` the mean token is subtracted before.

    Range [0, pi]: two tokens, centred, are exactly pi apart; equal tokens 0 without `center`. Unchanged by rotation and
    positive scaling; with `center` by translation. `unit` scales tokens to norm 1 as released code does, which changes
    no angle. Not to be drawn on one axis with token_curvature.

    Source: released as "curvature" by Skean et al. (OFSkean/information_flow, 2024-09); their arccos gives NaN where
    rounding leaves [-1, 1], this does not.

    Raises:
        ValueError: no more than `lag` real tokens, or a token that is zero (with `center`: equal to the mean); NaN
            there with `undefined="nan"`.
    """
    rows, kept = real_rows(widened(tokens), mask, drop_first)
    broken = not_finite(rows)
    rows = without(rows, broken)
    if center:
        rows = centered(rows, kept)
    # an angle needs directions, so `unit` is taken either way
    rows, no_direction = unit_rows(rows, kept, after_centering=center)
    in_prompt = kept[..., lag:]
    angles = _angle(rows[..., : in_prompt.shape[-1], :], rows[..., lag:, :]).masked_fill(~in_prompt, 0.0)
    undirected = no_direction[..., lag:] | no_direction[..., : in_prompt.shape[-1]]
    problems = {
        "a token is not finite": broken,
        f"it takes {lag + 1} real tokens": ~in_prompt.any(-1),
        "a token is zero, or equal to the mean that is subtracted": (undirected & in_prompt).any(-1),
    }
    return settled("token_angle", angles.sum(-1) / in_prompt.sum(-1), problems, undefined)


def _angle(u: Tensor, w: Tensor, *, fold: bool = False) -> Tensor:
    """Return the angle between unit vectors; unlike arccos it is exact near 0 and pi."""
    apart, together = torch.linalg.vector_norm(u - w, dim=-1), torch.linalg.vector_norm(u + w, dim=-1)
    if fold:
        apart, together = torch.minimum(apart, together), torch.maximum(apart, together)
    return 2 * torch.atan2(apart, together)


# From the tokens of a prompt to one vector.

Pooling = Literal["mean", "last", "cls", "centered_unit_mean"]


def pool(
    tokens: Float[Tensor, "*n tokens dim"],
    mask: Bool[Tensor, "*n tokens"] | None = None,
    *,
    pooling: Pooling = "mean",
    undefined: Literal["raise", "nan"] = "raise",
) -> Float[Tensor, "*n dim"]:
    """Return one vector per prompt, in float64: the mean of its real tokens, the last one, or the first one ("cls").

    "centered_unit_mean" is what the code of Skean et al. (OFSkean/information_flow, 2024-09) pools: tokens minus their
    mean, each scaled to norm 1, averaged.

    Raises:
        ValueError: a prompt without a real token, with a value that is not finite or (centered_unit_mean) with a token
            equal to the mean; NaN there with `undefined="nan"`.
    """
    check_option("pooling", pooling, "mean", "last", "cls", "centered_unit_mean")
    rows, kept = real_rows(widened(tokens), mask)
    count = kept.sum(-1)
    broken = not_finite(rows)
    problems = {"a token is not finite": broken, "there is no real token": count == 0}
    if not rows.shape[-2]:
        pooled = rows.sum(-2)
    elif pooling == "cls":
        pooled = rows[..., 0, :]
    elif pooling == "last":
        last = (count - 1).clamp(min=0)[..., None, None].expand(*count.shape, 1, rows.shape[-1])
        pooled = rows.gather(-2, last).squeeze(-2)
    else:
        if pooling == "centered_unit_mean":
            rows, no_direction = unit_rows(centered(rows, kept), kept, after_centering=True)
            problems["a token equals the mean that is subtracted"] = no_direction.any(-1)
        pooled = rows.sum(-2) / count.clamp(min=1)[..., None]
    return settled("pooled vector", pooled, {reason: bad[..., None] for reason, bad in problems.items()}, undefined)


# How far word pairs of one relation point in one direction. All computed in float64.

Points = Float[Tensor, "*layers pairs dim"]
PerLayer = Float[Tensor, "*layers"]
JITTER = 1e-6  # of the mean variance, added to the diagonal of the covariance that whitens


@dataclass(frozen=True, eq=False)
class ConceptAlignment:
    """Cosines between the differences of word pairs; see `concept_alignment`."""

    directions: Points  # u_i, of norm 1
    mean: PerLayer
    by_pair: Float[Tensor, "*layers pairs"]  # of each pair with the others; their mean is `mean`
    leave_one_out: PerLayer
    shuffled: PerLayer

    @property
    def gram(self) -> Float[Tensor, "*layers pairs pairs"]:
        """Return <u_i, u_j>."""
        return self.directions @ self.directions.mT

    @property
    def excess(self) -> PerLayer:
        """Return `mean` minus `shuffled`: the part that belongs to the pairing."""
        return self.mean - self.shuffled


def concept_alignment(
    first: Points,
    second: Points,
    *,
    whiten: Float[Tensor, "dim dim"] | None = None,
    shuffles: int = 10,
    seed: int = 0,
    undefined: Literal["raise", "nan"] = "raise",
) -> ConceptAlignment:
    """Return how parallel the differences delta_i = second_i - first_i of the word pairs of one category are.

    With u_i = delta_i / |delta_i|: `gram` holds <u_i, u_j> and `mean` its mean over i < j, in [-1 / (pairs - 1), 1];
    `leave_one_out` is the mean of cos(delta_i, mean of the other deltas). `shuffled` is the mean of `mean` over seeded
    derangements of the second words within the category, no word staying where it was; it is not 0 where the two kinds
    of words have different means, so that `excess` = mean - shuffled is what belongs to the pairing. Within a
    derangement, two words that are the same point have no direction and are left out.

    Invariant to rotation, to a translation common to both words, to scaling, to the order of the pairs and to swapping
    all first with all second words (`shuffled` up to the draw). Independent isotropic deltas: 0 in expectation, with
    standard deviation sqrt(2 / (pairs (pairs - 1) dim)). `whiten` is the covariance M of the unembedding's rows: inner
    products are then x' M^-1 y, M with 1e-6 of its mean variance added to the diagonal, as Park et al. have them.

    Source: hierarchical analysis of monotonicity (OpenReview ZVLyyG5yS6), figure 3, which means cosines though it never
    writes the normalisation; Park et al., arXiv 2311.03658, for `whiten`.

    Raises:
        ValueError: fewer than 3 pairs, shapes that differ; a zero delta, a value that is not finite, others that cancel
            (leave_one_out): NaN there with `undefined="nan"`.
    """
    first, second = widened(first), widened(second)
    if first.shape != second.shape or first.shape[-2] < 3:
        shapes = f"{tuple(first.shape)} and {tuple(second.shape)}"
        raise ValueError(f"expected first and second of one shape (*layers, pairs, dim), 3 pairs or more, got {shapes}")
    finite = (first.isfinite() & second.isfinite()).flatten(-2).all(-1)
    problems = {"a point is not finite": ~finite, "a pair's two words are the same point": _same(first, second).any(-1)}
    bad = ~finite[..., None, None]
    first, second = first.masked_fill(bad, 0.0), second.masked_fill(bad, 0.0)
    origin = first.mean(-2, keepdim=True)
    seen = [_whitened(points - origin, whiten) for points in (first, second)]
    deltas = seen[1] - seen[0]
    directions = _directions(deltas, _same(first, second))
    by_pair = _with_others(directions)
    cosines, cancelled = _with_mean_of_others(deltas, directions)
    shuffled = torch.stack(
        [
            _mean_cosine(_directions(seen[1][..., order, :] - seen[0], same), ~same)
            for order in _derangements(first.shape[-2], shuffles, seed)
            for same in [_same(first, second[..., order, :])]
        ]
    ).mean(0)
    shuffled_problems = problems | {"no two words of a shuffled pair differ": shuffled.isnan()}
    lone = problems | {"the deltas of the other pairs cancel": cancelled.any(-1)}
    per_pair = {reason: where[..., None] for reason, where in problems.items()}
    return ConceptAlignment(
        directions=settled("concept_alignment", directions, {k: v[..., None] for k, v in per_pair.items()}, undefined),
        mean=settled("concept_alignment", by_pair.mean(-1), problems, undefined),
        by_pair=settled("concept_alignment", by_pair, per_pair, undefined),
        leave_one_out=settled("leave_one_out", cosines.mean(-1), lone, undefined),
        shuffled=settled("shuffled", shuffled, shuffled_problems, undefined),
    )


def _same(first: Points, second: Points) -> Tensor:
    """Return which pairs are one point, before any rounding."""
    return (first == second).all(-1)


def _whitened(points: Points, covariance: Tensor | None) -> Points:
    """Return points whose plain inner product is x' M^-1 y of the given points."""
    if covariance is None:
        return points
    covariance, dim = widened(covariance).to(points.device), points.shape[-1]
    jitter = JITTER * covariance.trace() / dim
    factor = torch.linalg.cholesky(covariance + jitter * torch.eye(dim).to(covariance))
    return torch.linalg.solve_triangular(factor, points.mT, upper=False).mT


def _directions(deltas: Points, same: Tensor) -> Points:
    """Return deltas of norm 1; 0 for a pair that is one point."""
    deltas = deltas.masked_fill(same[..., None], 0.0)
    norms = torch.linalg.vector_norm(deltas, dim=-1, keepdim=True)
    return deltas / norms.where(norms > 0, 1.0)


def _with_others(directions: Points) -> Tensor:
    """Return the mean cosine of each pair with the others."""
    total = directions.sum(-2, keepdim=True)
    squares = directions.square().sum(-1)
    return ((directions * total).sum(-1) - squares) / (directions.shape[-2] - 1)


def _mean_cosine(directions: Points, defined: Tensor) -> PerLayer:
    """Return the mean over two different pairs that have a direction: (|sum u|^2 - count) / (count (count - 1))."""
    count = defined.sum(-1).double()
    mean = (directions.sum(-2).square().sum(-1) - count) / (count * (count - 1))
    return mean.masked_fill(count < 2, torch.nan)


def _with_mean_of_others(deltas: Points, directions: Points) -> tuple[Tensor, Tensor]:
    """Return the cosine of each delta with the mean of the others, and where those cancel up to rounding."""
    others = deltas.sum(-2, keepdim=True) - deltas
    norms = torch.linalg.vector_norm(others, dim=-1)
    largest = torch.linalg.vector_norm(deltas, dim=-1).amax(-1, keepdim=True)
    cancelled = norms <= deltas.shape[-2] * torch.finfo(deltas.dtype).eps * largest
    return (directions * others).sum(-1) / norms.where(norms > 0, 1.0), cancelled


def _derangements(size: int, count: int, seed: int) -> Iterator[Int[Tensor, " size"]]:
    """Draw permutations without a fixed point, all equally probable. One in e of all permutations is such a one."""
    generator = torch.Generator().manual_seed(seed)
    stay = torch.arange(size)
    for _ in range(count):
        order = torch.randperm(size, generator=generator)
        while (order == stay).any():
            order = torch.randperm(size, generator=generator)
        yield order
