"""How alike layers are, and where a model's beginning, middle and ending lie by that.

All computed in float64.
"""

from typing import Literal, NamedTuple

import torch
from jaxtyping import Bool, Float
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

Undefined = Literal["raise", "nan"]
MAX_ENTRIES = 2**24  # of the layers' Gram matrices held at a time: 128 MB
LEAST_MIDDLE = 2  # layers: fewer have no similarity among themselves
EQUAL = 1e-9  # relative difference of what two divisions explain, below which they are as good; of means to the largest


def cosine_similarity_matrix(
    states: Float[Tensor, "layers batch tokens dim"],
    mask: Bool[Tensor, "batch tokens"] | None = None,
    *,
    mode: Literal["token", "flattened"] = "token",
    undefined: Undefined = "raise",
) -> Float[Tensor, "layers layers"]:
    """Return the mean cosine between layers: of the same token in both, averaged within each prompt, then over prompts.

    Entries in [-1, 1], symmetric, unit diagonal, positive semi-definite. `mode="flattened"` takes the cosine of all of
    a prompt's tokens as one vector: a mean weighted by norms, so by the sink token. Unchanged by a rotation common to
    all layers and by positive scaling of a layer; in mode "token" also of single tokens.

    Source: Sun et al., arXiv 2407.09298, whose notebook is `mode="flattened"` without a mask, in batches of 8.

    Raises:
        ValueError: a layer with a state that is zero, or a prompt without a real token; with `undefined="nan"` that
            layer's row and column are NaN.
    """
    check_option("mode", mode, "token", "flattened")
    if states.ndim != 4:
        raise ValueError(f"expected states of shape (layers, batch, tokens, dim), got {tuple(states.shape)}")
    rows, kept = real_rows(widened(states), mask)
    broken = not_finite(rows).any(-1)
    rows = without(rows, broken[:, None].expand(rows.shape[:2]))
    num_prompts, num_tokens = rows.shape[1], kept[0].sum(-1)
    if mode == "token":
        rows, no_direction = unit_rows(rows, kept)
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
    return settled("cosine_similarity_matrix", cosines, problems, undefined)


def linear_cka(
    x: Float[Tensor, "*n rows dim1"],
    y: Float[Tensor, "*n rows dim2"],
    *,
    debiased: bool = False,
    undefined: Undefined = "raise",
) -> Float[Tensor, "*n"]:
    """Return the similarity of two representations of the same rows: linear centred kernel alignment.

    Range [0, 1], 1 for equal ones. `debiased` takes the unbiased HSIC_1 in all three places: it may be negative and
    stays near 0 for independent data, where the plain form grows with dim over rows. Unchanged by rotation, isotropic
    scaling and translation of either side, and by a joint order of the rows.

    Source: Kornblith et al. 2019; HSIC_1: Song et al. 2012.

    Raises:
        ValueError: fewer than 2 rows (4 if debiased), shapes that differ; constant x or y, or values that are not
            finite (NaN there with `undefined="nan"`).
    """
    x, y = widened(x), widened(y)
    if x.shape[:-1] != y.shape[:-1]:
        raise ValueError(f"expected shapes (*n, rows, dim1) and (*n, rows, dim2), got {(*x.shape,)} and {(*y.shape,)}")
    broken = not_finite(x) | not_finite(y)
    x, y = (centered(side, side.new_ones(side.shape[:-1], dtype=torch.bool)) for side in (x, y))
    inner = torch.stack([(a.mT @ b).square().sum((-2, -1)) for a in (x, y) for b in (x, y)], -1)  # tr(XX'YY')
    squares = torch.stack([x.square().sum(-1), y.square().sum(-1)], -2)
    alignment, flat = _alignment(inner.unflatten(-1, (2, 2)), squares, debiased)
    problems = {"values are not finite": broken, "x does not vary": flat[..., 0], "y does not vary": flat[..., 1]}
    return settled("linear_cka", alignment[..., 0, 1], problems, undefined)


def _alignment(
    inner: Float[Tensor, "*n layers layers"], squares: Float[Tensor, "*n layers rows"], debiased: bool
) -> tuple[Float[Tensor, "*n layers layers"], Bool[Tensor, "*n layers"]]:
    """Return the alignment of centred layers from products and diagonals of their Gram matrices, and who does not vary.

    Raises:
        ValueError: too few rows.
    """
    m, least = squares.shape[-1], 4 if debiased else 2
    if m < least:
        raise ValueError(f"linear CKA with debiased={debiased} needs at least {least} rows, got {m}")
    plain = inner.diagonal(dim1=-2, dim2=-1)
    if debiased:
        # HSIC_1 up to its constant factor, which the ratio loses: with centred columns the rows of XX' sum to 0, so
        # those of XX' without its diagonal to minus the diagonal
        products, total = squares @ squares.mT, squares.sum(-1)
        totals = total[..., None] * total[..., None, :] / ((m - 1) * (m - 2))
        inner = inner - products + totals - 2 / (m - 2) * products
    scale = inner.diagonal(dim1=-2, dim2=-1)
    flat = scale <= 1e-13 * plain  # what debiasing leaves of rows at equal distances is rounding
    scale = scale.masked_fill(flat, 1.0).sqrt()
    return inner / (scale[..., None] * scale[..., None, :]), flat


def linear_cka_matrix(
    states: Float[Tensor, "layers rows dim"],
    *,
    debiased: bool = False,
    undefined: Literal["raise", "nan"] = "raise",
) -> Float[Tensor, "layers layers"]:
    """Return `linear_cka` of every two layers, by their Gram matrices of rows, a band of rows at a time; in float64.

    Symmetric, unit diagonal; range and invariances as `linear_cka`. A layer's Gram matrix is taken once, not once for
    each other layer.

    Raises:
        ValueError: fewer than 2 rows (4 if debiased), a layer whose rows are all equal or hold a value that is not
            finite; with `undefined="nan"` such a layer's row and column are NaN.
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
    return settled("linear_cka_matrix", alignment, problems, undefined)


class LayerStages(NamedTuple):
    """Sizes of the three runs of layers, and how far the middle stands out."""

    num_beginning: int
    num_middle: int
    num_ending: int
    contrast: float  # mean similarity within the middle minus that of middle layers to all others; 0 without others


def layer_stages(similarity: Float[Tensor, "layers layers"]) -> LayerStages:
    """Return the beginning, middle and ending of a row of layers: the division that explains its similarities best.

    The middle is a run of at least 2 layers. Of the pairs it is part of, W lie within it (mean similarity w) and A
    across its ends (mean a); telling the two kinds apart explains the sum of squares (w - a)^2 W A / (W + A), of which
    the largest with w > a wins, of equals the larger middle, then the earlier. Where no run is more similar within than
    to the others, as in a constant matrix, all layers are the middle, at a contrast of 0. Every division is tried.

    In float64; the diagonal does not count. Unchanged by adding a constant to all similarities and, but for the
    contrast, by a positive factor; turned around with the order of the layers. Similarities of w within a run and of
    a < w everywhere else give that run, at the contrast w - a.
    Source: ours, after the blocks that Sun et al., arXiv 2407.09298, find by eye.

    Raises:
        ValueError: fewer than 2 layers, or a similarity that is not finite.
    """
    matrix = widened(similarity)
    if len(matrix) < LEAST_MIDDLE or not matrix.isfinite().all():
        raise ValueError(f"expected finite similarities of at least {LEAST_MIDDLE} layers, got {matrix.tolist()}")
    matrix = matrix - matrix.diagonal().diag()
    num_layers, size = len(matrix), matrix.abs().max().item()
    best, most = LayerStages(0, num_layers, 0, 0.0), 0.0
    for length in range(num_layers - 1, LEAST_MIDDLE - 1, -1):
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
