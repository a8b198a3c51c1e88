"""Where the beginning of a model ends and its ending begins, from how similar its layers are."""

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from lit_layers.functional._checks import widened

LEAST_MIDDLE = 2  # layers: fewer have no similarity among themselves
EQUAL = 1e-9  # relative difference of what two divisions explain, below which they are as good; of means to the largest


class LayerStages(NamedTuple):
    """Sizes of the three runs of layers, and how far the middle stands out."""

    num_beginning: int
    num_middle: int
    num_ending: int
    contrast: float  # mean similarity within the middle minus that of middle layers to all others; 0 without others


def layer_stages(similarity: Float[Tensor, "layers layers"]) -> LayerStages:
    """The beginning, middle and ending of a row of layers: the division that explains its similarities best.

    The middle is a run of at least 2 layers. Of the pairs it is part of, W lie within it (mean similarity w) and A
    across its ends (mean a); telling the two kinds apart explains the sum of squares (w - a)^2 W A / (W + A), of which
    the largest with w > a wins, of equals the larger middle, then the earlier. Where no run is more similar within than
    to the others, as in a constant matrix, all layers are the middle, at a contrast of 0. Every division is tried.

    In float64; the diagonal does not count. Unchanged by adding a constant to all similarities and, but for the
    contrast, by a positive factor; turned around with the order of the layers. Similarities of w within a run and of
    a < w everywhere else give that run, at the contrast w - a.
    Source: ours, after the blocks that Sun et al., arXiv 2407.09298, find by eye.

    Raises:
        ValueError: no symmetric, finite matrix of at least 2 layers.
    """
    matrix = widened("similarity", similarity)
    if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1] or len(matrix) < LEAST_MIDDLE:
        raise ValueError(
            f"expected similarities of shape (layers, layers) of at least {LEAST_MIDDLE} layers, got {(*matrix.shape,)}"
        )
    if not matrix.isfinite().all():
        raise ValueError("expected finite similarities, got some that are not")
    if not torch.allclose(matrix, matrix.mT, rtol=1e-6, atol=1e-9):
        raise ValueError("expected a symmetric matrix of similarities")
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
