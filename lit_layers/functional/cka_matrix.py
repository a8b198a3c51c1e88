"""Linear CKA between all layers at once."""

from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from lit_layers.functional._checks import check_option, settled, widened
from lit_layers.functional._rows import centered, not_finite

MAX_ENTRIES = 2**24  # of the layers' Gram matrices held at a time: 128 MB


def linear_cka_matrix(
    states: Float[Tensor, "layers rows dim"],
    *,
    debiased: bool = False,
    undefined: Literal["raise", "nan"] = "raise",
) -> Float[Tensor, "layers layers"]:
    """`linear_cka` of every two layers, by their Gram matrices of rows, a band of rows at a time; in float64.

    Symmetric, unit diagonal; range and invariances as `linear_cka`. A layer's Gram matrix is taken once, not once for
    each other layer.

    Raises:
        ValueError: fewer than 2 rows (4 if debiased), a layer whose rows are all equal or hold a value that is not
            finite; with `undefined="nan"` such a layer's row and column are NaN.
    """
    check_option("undefined", undefined, "raise", "nan")
    states = widened("states", states)
    least = 4 if debiased else 2
    if states.ndim != 3 or states.shape[1] < least:
        raise ValueError(
            f"linear_cka_matrix with debiased={debiased} needs states of shape (layers, rows, dim) of at least {least} "
            f"rows, got {(*states.shape,)}"
        )
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
    plain = inner.diagonal()
    if debiased:  # HSIC_1 up to its constant factor, as centred Gram matrices have rows that sum to 0
        own = states.square().sum(-1)
        both, total = own @ own.mT, own.sum(-1)
        inner = inner - both + total[:, None] * total / ((m - 1) * (m - 2)) - 2 / (m - 2) * both
    scale = inner.diagonal()
    flat = scale <= 1e-13 * plain  # what debiasing leaves of rows at equal distances is rounding
    scale = scale.masked_fill(flat, 1.0).sqrt()
    problems = {
        "values are not finite": broken | broken[:, None],
        "a layer does not vary": flat | flat[:, None],
    }
    return settled("linear_cka_matrix", inner / (scale * scale[:, None]), problems, undefined)
