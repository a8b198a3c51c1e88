"""Geometry of the token sequence inside a layer, and of layers compared with each other. All computed in float64.

Padding on either side never changes a value, whatever it contains. Metrics are undefined for non-finite input, and in
the cases that each function names.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from lit_layers.functional._checks import (
    Undefined,
    centered,
    check_option,
    checked,
    not_finite,
    real_rows,
    unit_rows,
    widened,
    zeroed,
)

Tokens = Float[Tensor, "*n tokens dim"]
Mask = Bool[Tensor, "*n tokens"]
PerPrompt = Float[Tensor, "*n"]


def token_curvature(
    tokens: Tokens,
    mask: Mask | None = None,
    *,
    drop_first: int = 0,
    undefined: Literal["raise", "nan", "skip"] = "raise",
) -> PerPrompt:
    """Return the mean angle, in radians, between consecutive differences of a prompt's tokens.

    C = 1 / (T - 2) sum_k angle(v_(k+1), v_k) with v_k = x_(k+1) - x_k, for the T tokens x_k. Range [0, pi]: 0 on a
    line, pi for a zigzag between two points. In high dimension it is about pi/2 for a random walk and 2 pi/3 for
    independent tokens. Unchanged by rotation, translation, positive scaling and reversal.

    Undefined for fewer than 3 real tokens, or if a difference is zero. `undefined="skip"` averages the angles that
    exist and gives NaN if none exists.

    Source: Hosseini & Fedorenko 2023; Skean et al., arXiv 2502.02013, section 3.3.2.

    Raises:
        ValueError: an undefined prompt with `undefined="raise"`.
    """
    return curvature_and_missing(tokens, mask, drop_first=drop_first, undefined=undefined)[0]


def curvature_and_missing(
    tokens: Tokens,
    mask: Mask | None = None,
    *,
    drop_first: int = 0,
    undefined: Literal["raise", "nan", "skip"] = "raise",
) -> tuple[PerPrompt, Int[Tensor, "*n"]]:
    """Return `token_curvature`, and how many angles of each prompt do not exist because a difference is zero."""
    check_option("undefined", undefined, "raise", "nan", "skip")
    rows, real = real_rows(widened(tokens), mask, drop_first)
    broken = not_finite(rows)
    rows = zeroed(rows, broken)
    steps = rows[..., 1:, :] - rows[..., :-1, :]
    lengths = torch.linalg.vector_norm(steps, dim=-1)
    moves = lengths > 0
    steps = steps / lengths.masked_fill(~moves, 1.0)[..., None]
    in_prompt = real[..., 2:]  # if the third token of an angle is real, so are the first two: padding comes last
    exists = in_prompt & moves[..., :-1] & moves[..., 1:]
    num_in_prompt, num_exists = in_prompt.sum(-1), exists.sum(-1)
    values = _angle(steps[..., :-1, :], steps[..., 1:, :]).masked_fill(~exists, 0.0).sum(-1) / num_exists
    missing = num_in_prompt - num_exists
    problems = {"a token is not finite": broken, "it takes 3 real tokens": num_in_prompt == 0}
    if undefined == "skip":
        problems["no angle exists"] = num_exists == 0
    else:
        problems["neighbouring tokens are equal"] = missing > 0
    return checked("token_curvature", values, problems, "raise" if undefined == "raise" else "nan"), missing


def token_angle(
    tokens: Tokens, mask: Mask | None = None, *, drop_first: int = 0, undefined: Undefined = "raise"
) -> PerPrompt:
    """Return the mean angle, in radians, between neighbouring token vectors after subtraction of their mean.

    Range [0, pi]: exactly pi for two tokens. Unchanged by rotation, translation and positive scaling. Not comparable
    with `token_curvature`, so do not draw both on one axis.

    Source: the code of Skean et al. (OFSkean/information_flow, 2024-09), which calls it "curvature". Their arccos gives
    NaN if rounding moves a cosine out of [-1, 1]. This function does not.

    Raises:
        ValueError: fewer than two real tokens, or a token that equals the mean; NaN instead with `undefined="nan"`.
    """
    rows, real = real_rows(widened(tokens), mask, drop_first)
    broken = not_finite(rows)
    rows, no_direction = unit_rows(centered(zeroed(rows, broken), real), real, after_centering=True)
    in_prompt = real[..., 1:]
    angles = _angle(rows[..., :-1, :], rows[..., 1:, :]).masked_fill(~in_prompt, 0.0)
    problems = {
        "a token is not finite": broken,
        "it takes 2 real tokens": ~in_prompt.any(-1),
        "a token is equal to the mean that is subtracted": (
            (no_direction[..., 1:] | no_direction[..., :-1]) & in_prompt
        ).any(-1),
    }
    return checked("token_angle", angles.sum(-1) / in_prompt.sum(-1), problems, undefined)


def _angle(u: Tensor, w: Tensor) -> Tensor:
    """Return the angle between unit vectors; unlike arccos this formula is exact near 0 and pi."""
    return 2 * torch.atan2(torch.linalg.vector_norm(u - w, dim=-1), torch.linalg.vector_norm(u + w, dim=-1))


# Pooling: from the tokens of a prompt to one vector.

Pooling = Literal["mean", "last", "cls", "centered_unit_mean"]


def pool(
    tokens: Float[Tensor, "*n tokens dim"],
    mask: Bool[Tensor, "*n tokens"] | None = None,
    *,
    pooling: Pooling = "mean",
    undefined: Undefined = "raise",
) -> Float[Tensor, "*n dim"]:
    """Return one vector per prompt, in float64: the mean of its real tokens, the last one, or the first one ("cls").

    "centered_unit_mean" is the pooling in the code of Skean et al. (OFSkean/information_flow, 2024-09): tokens minus
    their mean, each scaled to norm 1, then averaged.

    Raises:
        ValueError: a prompt without a real token, or with a value that is not finite. With "centered_unit_mean", also a
            prompt with a token equal to the mean. Such a prompt is NaN with `undefined="nan"`.
    """
    check_option("pooling", pooling, "mean", "last", "cls", "centered_unit_mean")
    rows, real = real_rows(widened(tokens), mask)
    count = real.sum(-1)
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
            rows, no_direction = unit_rows(centered(rows, real), real, after_centering=True)
            problems["a token equals the mean that is subtracted"] = no_direction.any(-1)
        pooled = rows.sum(-2) / count.clamp(min=1)[..., None]
    return checked("pooled vector", pooled, {reason: bad[..., None] for reason, bad in problems.items()}, undefined)


# How parallel the differences of word pairs of one relation are. All computed in float64.

Points = Float[Tensor, "*layers pairs dim"]
PerLayer = Float[Tensor, "*layers"]


@dataclass(frozen=True, eq=False)
class ConceptAlignment:
    """Cosines between the difference vectors of word pairs; see `concept_alignment`."""

    directions: Points  # u_i, of norm 1
    mean: PerLayer
    by_pair: Float[Tensor, "*layers pairs"]  # mean cosine of each pair with the other pairs; `mean` is their mean
    leave_one_out: PerLayer
    shuffled: PerLayer

    @property
    def gram(self) -> Float[Tensor, "*layers pairs pairs"]:
        """Cosines between the difference vectors of every two word pairs."""
        return self.directions @ self.directions.mT

    @property
    def excess(self) -> PerLayer:
        """`mean` minus `shuffled`: the part of the alignment that comes from the pairing."""
        return self.mean - self.shuffled


def concept_alignment(
    first: Points,
    second: Points,
    *,
    shuffles: int = 10,
    seed: int = 0,
    undefined: Undefined = "raise",
) -> ConceptAlignment:
    """Return how parallel the differences delta_i = second_i - first_i of the word pairs of one category are.

    With u_i = delta_i / |delta_i|: `gram` holds <u_i, u_j>, and `mean` is its mean over i < j, in [-1 / (pairs - 1),
    1]. `leave_one_out` is the mean of cos(delta_i, mean of the other deltas). `shuffled` is the average of `mean` over
    random derangements of the second words: permutations in which no word keeps its partner. It is not 0 if the first
    and the second words have different means. `excess` = mean - shuffled is the part that comes from the pairing.
    Shuffled pairs whose two words are the same point have no direction and are left out.

    Invariant to rotation, to a common translation of all words, to scaling, and to the order of the pairs. Also
    invariant to exchanging all first with all second words (`shuffled` up to the random draw). For independent
    isotropic deltas `mean` has expectation 0 and standard deviation sqrt(2 / (pairs (pairs - 1) dim)).

    Source: hierarchical analysis of monotonicity (OpenReview ZVLyyG5yS6), figure 3. We take its inner products as
    cosines, although the paper does not write the normalisation.

    Raises:
        ValueError: fewer than 3 pairs, or shapes that differ. A zero delta, a value that is not finite, or, for
            `leave_one_out`, other deltas that cancel (NaN instead with `undefined="nan"`).
    """
    first, second = widened(first), widened(second)
    if first.shape != second.shape or first.shape[-2] < 3:
        shapes = f"{tuple(first.shape)} and {tuple(second.shape)}"
        raise ValueError(f"expected first and second of one shape (*layers, pairs, dim), 3 pairs or more, got {shapes}")
    finite = (first.isfinite() & second.isfinite()).flatten(-2).all(-1)
    first, second = zeroed(first, ~finite), zeroed(second, ~finite)
    deltas = second - first
    problems = {"a point is not finite": ~finite, "a pair's two words are the same point": ~deltas.any(-1).all(-1)}
    directions = _directions(deltas)
    by_pair = _pair_cosines(directions)
    cosines, cancelled = _leave_one_out(deltas, directions)
    orders = _derangements(first.shape[-2], shuffles, seed)
    shuffled = torch.stack([_mean_cosine(_directions(second[..., order, :] - first)) for order in orders]).mean(0)
    shuffled_problems = problems | {"no two words of a shuffled pair differ": shuffled.isnan()}
    lone = problems | {"the deltas of the other pairs cancel": cancelled.any(-1)}
    per_pair = {reason: where[..., None] for reason, where in problems.items()}
    return ConceptAlignment(
        directions=checked("concept_alignment", directions, {k: v[..., None] for k, v in per_pair.items()}, undefined),
        mean=checked("concept_alignment", by_pair.mean(-1), problems, undefined),
        by_pair=checked("concept_alignment", by_pair, per_pair, undefined),
        leave_one_out=checked("leave_one_out", cosines.mean(-1), lone, undefined),
        shuffled=checked("shuffled", shuffled, shuffled_problems, undefined),
    )


def _directions(deltas: Points) -> Points:
    """Return the differences of word pairs scaled to norm 1; 0 for a pair whose two words are the same point."""
    norms = torch.linalg.vector_norm(deltas, dim=-1, keepdim=True)
    return deltas / norms.where(norms > 0, 1.0)


def _pair_cosines(directions: Points) -> Tensor:
    """Return the mean cosine of each pair's direction with those of the other pairs, (*layers, pairs)."""
    total = directions.sum(-2, keepdim=True)
    return ((directions * total).sum(-1) - directions.square().sum(-1)) / (directions.shape[-2] - 1)


def _mean_cosine(directions: Points) -> PerLayer:
    """Return the mean cosine over ordered pairs of different directions: (|sum u|^2 - count) / (count (count - 1)).

    Zero directions are left out.
    """
    count = directions.any(-1).sum(-1).double()
    mean = (directions.sum(-2).square().sum(-1) - count) / (count * (count - 1))
    return mean.masked_fill(count < 2, torch.nan)


def _leave_one_out(deltas: Points, directions: Points) -> tuple[Tensor, Tensor]:
    """Return the cosine of each delta (difference of a word pair) with the mean of the other deltas.

    Also return a mask of the deltas for which it is undefined, because the other deltas cancel.
    """
    others = deltas.sum(-2, keepdim=True) - deltas
    norms = torch.linalg.vector_norm(others, dim=-1)
    largest = torch.linalg.vector_norm(deltas, dim=-1).amax(-1, keepdim=True)
    cancelled = norms <= deltas.shape[-2] * torch.finfo(deltas.dtype).eps * largest
    return (directions * others).sum(-1) / norms.where(norms > 0, 1.0), cancelled


def _derangements(size: int, count: int, seed: int) -> Iterator[Tensor]:
    """Yield permutations without a fixed point, all equally probable.

    About 1/e of all permutations have no fixed point, so drawing until one appears is fast.
    """
    generator = torch.Generator().manual_seed(seed)
    stay = torch.arange(size)
    for _ in range(count):
        order = torch.randperm(size, generator=generator)
        while (order == stay).any():
            order = torch.randperm(size, generator=generator)
        yield order


# Similarity of layers, and the division of a model into beginning, middle and ending by this similarity.

MAX_ENTRIES = 2**24  # largest number of entries of the layers' Gram matrices in memory at once: 128 MB
MIN_MIDDLE = 2  # smallest number of middle layers: within a single layer there are no pairs to compare
EQUAL = 1e-9  # smaller relative differences are rounding errors: two divisions of the layers are then equally good


def cosine_similarity_matrix(
    states: Float[Tensor, "layers batch tokens dim"],
    mask: Bool[Tensor, "batch tokens"] | None = None,
    *,
    mode: Literal["token", "flattened"] = "token",
    undefined: Undefined = "raise",
) -> Float[Tensor, "layers layers"]:
    """Return the mean cosine between the states of the same token in two layers, for every pair of layers.

    The mean is over the tokens of each prompt, then over prompts. Entries in [-1, 1], symmetric, unit diagonal,
    positive semi-definite. `mode="flattened"` concatenates all tokens of a prompt and takes the cosine of these
    vectors. This is a mean weighted by norms, so an attention sink token dominates it. Unchanged by a rotation common
    to all layers and by positive scaling of a layer. In mode "token" also unchanged by positive scaling of single
    tokens.

    Source: Sun et al., arXiv 2407.09298. Their notebook uses `mode="flattened"` without a mask, in batches of 8.

    Raises:
        ValueError: a prompt without a real token (all NaN with `undefined="nan"`). A layer with a state that is zero or
            not finite (NaN in its row and column).
    """
    check_option("mode", mode, "token", "flattened")
    rows, real = real_rows(widened(states), mask)
    broken = not_finite(rows).any(-1)
    rows = zeroed(rows, broken[:, None].expand(rows.shape[:2]))
    num_prompts, num_tokens = rows.shape[1], real[0].sum(-1)
    if mode == "token":
        rows, no_direction = unit_rows(rows, real)
        zero = no_direction.any(-1).any(-1)
        rows = rows / num_tokens.clamp(min=1).double().sqrt()[:, None, None]
    else:
        norms = rows.flatten(-2).norm(dim=-1)
        zero = (norms == 0).any(-1)
        rows = rows / norms.masked_fill(norms == 0, 1.0)[..., None, None]
    vectors = rows.flatten(1)
    cosines = (vectors @ vectors.mT / num_prompts).clamp(-1.0, 1.0)
    problems = {
        "a state is not finite": broken | broken[:, None],
        "a prompt has no real token": (num_tokens == 0).any(),
        "a state is zero": zero | zero[:, None],
    }
    return checked("cosine_similarity_matrix", cosines, problems, undefined)


def linear_cka(
    x: Float[Tensor, "*n rows dim1"],
    y: Float[Tensor, "*n rows dim2"],
    *,
    debiased: bool = False,
    undefined: Undefined = "raise",
) -> Float[Tensor, "*n"]:
    """Return the similarity of two representations of the same rows: linear centred kernel alignment.

    |Y'X|_F^2 / (|X'X|_F |Y'Y|_F) with centred columns. Range [0, 1]: 1 for equal representations. All three norms
    estimate an HSIC. `debiased` replaces them by the unbiased estimate HSIC_1. The debiased value may be negative and
    is near 0 for independent data, where the biased value grows with dim / rows. Unchanged by rotation, isotropic
    scaling and translation of either representation, and by a common reordering of the rows.

    Source: Kornblith et al. 2019; HSIC_1: Song et al. 2012.

    Raises:
        ValueError: fewer than 2 rows (4 if debiased). Equal rows in x or in y, or values that are not finite (NaN
            instead with `undefined="nan"`).
    """
    x, y = widened(x), widened(y)
    broken = not_finite(x) | not_finite(y)
    x, y = (centered(side, side.new_ones(side.shape[:-1], dtype=torch.bool)) for side in (x, y))
    inner = torch.stack([(a.mT @ b).square().sum((-2, -1)) for a in (x, y) for b in (x, y)], -1)  # tr(XX'YY')
    squares = torch.stack([x.square().sum(-1), y.square().sum(-1)], -2)
    alignment, flat = _alignment(inner.unflatten(-1, (2, 2)), squares, debiased)
    problems = {"values are not finite": broken, "x does not vary": flat[..., 0], "y does not vary": flat[..., 1]}
    return checked("linear_cka", alignment[..., 0, 1], problems, undefined)


def _alignment(inner: Tensor, squares: Tensor, debiased: bool) -> tuple[Tensor, Tensor]:
    """Return the linear CKA of all pairs of layers, and a mask of the layers whose rows are all equal.

    `inner` holds the inner products of the Gram matrices of all pairs of layers, `squares` the diagonals of the Gram
    matrices. Both are computed from centred rows.

    Raises:
        ValueError: too few rows.
    """
    m, least = squares.shape[-1], 4 if debiased else 2
    if m < least:
        raise ValueError(f"linear CKA with debiased={debiased} needs at least {least} rows, got {m}")
    plain = inner.diagonal(dim1=-2, dim2=-1)
    if debiased:
        # HSIC_1(K, M) = [tr(KM) + 1'K1 1'M1 / ((m-1)(m-2)) - 2 / (m-2) 1'KM1] / (m (m-3)). K and M are the Gram
        # matrices XX' of two layers with diagonals set to 0. The constant factor cancels in the ratio. With centred
        # columns each row of XX' sums to 0. So each row of K sums to minus the diagonal entry of XX', and K need not be
        # formed.
        products, total = squares @ squares.mT, squares.sum(-1)
        totals = total[..., None] * total[..., None, :] / ((m - 1) * (m - 2))
        inner = inner - products + totals - 2 / (m - 2) * products
    scale = inner.diagonal(dim1=-2, dim2=-1)
    # Compare with `plain` and not with 0: the debiased HSIC of rows at equal distances is 0 only up to rounding.
    flat = scale <= 1e-13 * plain
    scale = scale.masked_fill(flat, 1.0).sqrt()
    return inner / (scale[..., None] * scale[..., None, :]), flat


def linear_cka_matrix(
    states: Float[Tensor, "layers rows dim"],
    *,
    debiased: bool = False,
    undefined: Undefined = "raise",
) -> Float[Tensor, "layers layers"]:
    """Return `linear_cka` of every pair of layers, from their Gram matrices of rows, in float64.

    Works on one band of rows of all Gram matrices at a time, and computes each entry of them only once. Symmetric, with
    unit diagonal. Range and invariances are those of `linear_cka`.

    Raises:
        ValueError: fewer than 2 rows (4 if debiased). A layer whose rows are all equal, or that has a value that is not
            finite (NaN in its row and column with `undefined="nan"`).
    """
    states = widened(states)
    num_layers, m, _ = states.shape
    broken = not_finite(states)
    states = centered(
        states.masked_fill(broken[:, None, None], 0.0), states.new_ones(states.shape[:2], dtype=torch.bool)
    )
    inner = states.new_zeros(num_layers, num_layers)
    size = max(1, MAX_ENTRIES // (num_layers * m))
    for start in range(0, m, size):
        band = (states[:, start : start + size] @ states.mT).flatten(1)  # (layers, rows of the band x rows)
        inner += band @ band.mT
    alignment, flat = _alignment(inner, states.square().sum(-1), debiased)
    problems = {
        "values are not finite": broken | broken[:, None],
        "a layer does not vary": flat | flat[:, None],
    }
    return checked("linear_cka_matrix", alignment, problems, undefined)


class LayerStages(NamedTuple):
    """Numbers of layers in the beginning, middle and ending of a model, and how far the middle stands out.

    `contrast` is the mean similarity within the middle minus the mean similarity of middle layers to all others. It is
    0 if all layers are in the middle.
    """

    num_beginning: int
    num_middle: int
    num_ending: int
    contrast: float


def layer_stages(similarity: Float[Tensor, "layers layers"]) -> LayerStages:
    """Return the beginning, middle and ending of the layers: the division that explains their similarities best.

    The middle is a run of at least 2 layers. Let W be the number of pairs of layers that are both in the middle, and w
    their mean similarity. Let A be the number of pairs with one layer in the middle and one outside, and a their mean
    similarity. Separating these two kinds of pairs reduces the sum of squared deviations from their common mean by
    (w - a)^2 W A / (W + A). Among all divisions with w > a, the one with the largest reduction is chosen. If several
    tie, it is the one with the larger middle, then the earlier one. If no division has w > a, as in a constant matrix,
    all layers are the middle, with a contrast of 0.

    In float64. The diagonal is ignored. Unchanged by adding a constant to all similarities and, except for the
    contrast, by a positive factor. Reversing the layers reverses the result. If all similarities are w within a run and
    a < w everywhere else, the result is that run with contrast w - a.

    Source: ours, after the groups of layers that Sun et al., arXiv 2407.09298, find by eye.

    Raises:
        ValueError: fewer than 2 layers, or a similarity that is not finite.
    """
    matrix = widened(similarity)
    if len(matrix) < MIN_MIDDLE or not matrix.isfinite().all():
        raise ValueError(f"expected finite similarities of at least {MIN_MIDDLE} layers, got {matrix.tolist()}")
    matrix = matrix - matrix.diagonal().diag()
    num_layers, size = len(matrix), matrix.abs().max().item()
    best, most = LayerStages(0, num_layers, 0, 0.0), 0.0
    for length in range(num_layers - 1, MIN_MIDDLE - 1, -1):
        for start in range(num_layers - length + 1):
            rows = matrix[start : start + length]
            within, total = rows[:, start : start + length].sum().item(), rows.sum().item()
            num_within, num_across = length * (length - 1) / 2, length * (num_layers - length)
            contrast = within / 2 / num_within - (total - within) / num_across
            explained = contrast**2 * num_within * num_across / (num_within + num_across)
            if contrast > EQUAL * size and explained > most * (1 + EQUAL):
                best = LayerStages(start, length, num_layers - start - length, contrast)
                most = explained
    return best
