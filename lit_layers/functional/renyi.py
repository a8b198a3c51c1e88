"""Renyi entropies of shares and of positive semi-definite matrices, what they are divided by, where they are undefined.

All in float64, in nats.
"""

import math
from typing import Literal

import torch
from torch import Tensor

from lit_layers.functional._checks import check_option, settled

Normalization = Literal["raw", "logN", "logD", "maxEntropy", "logNlogD"]
Side = Literal["rows", "smaller"]
AtTwo = Literal["spectrum", "frobenius"]
Undefined = Literal["raise", "nan"]

EPS = torch.finfo(torch.float64).eps


def renyi(shares: Tensor, alpha: float) -> Tensor:
    """Of shares (*n, values) that sum to 1; alpha 1 is Shannon's."""
    if alpha == 1:
        values = torch.special.entr(shares).sum(-1)
    elif alpha == math.inf:
        values = -shares.amax(-1).log() if shares.shape[-1] else shares.sum(-1)
    else:
        values = torch.logsumexp(alpha * shares.log(), -1) / (1 - alpha)
    return values.clamp(min=0.0)


def renyi_of_matrix(matrix: Tensor, alpha: float, *, frobenius: bool, size: Tensor | int) -> Tensor:
    """Of the eigenvalues of (*n, size, size) over their sum, negative ones left out.

    With `frobenius` and alpha 2 from the entries instead: -log(sum K^2 / size^2), right only if the trace is the size.
    """
    if frobenius and alpha == 2:
        sizes = torch.as_tensor(size, dtype=matrix.dtype, device=matrix.device).clamp(min=1)
        return -(matrix.square().sum((-2, -1)) / sizes.square()).log()
    eigenvalues = torch.linalg.eigvalsh(matrix).clamp(min=0.0)
    floor = matrix.shape[-1] * EPS * eigenvalues[..., -1:]
    eigenvalues = eigenvalues.masked_fill(eigenvalues < floor, 0.0)
    return renyi(eigenvalues / positive(eigenvalues.sum(-1, keepdim=True)), alpha)


def divided(
    metric: str,
    values: Tensor,
    problems: dict[str, Tensor],
    *,
    num_rows: Tensor,
    dim: int,
    normalization: str,
    undefined: str,
) -> Tensor:
    """The entropies as `normalization` has them, and NaN or an error for those with a problem."""
    check_option("normalization", normalization, "raw", "logN", "logD", "maxEntropy", "logNlogD")
    check_option("undefined", undefined, "raise", "nan")
    log_n = num_rows.clamp(min=1).double().log()
    log_d = torch.full_like(log_n, math.log(max(dim, 1)))
    divisor = {
        "raw": torch.ones_like(log_n),
        "logN": log_n,
        "logD": log_d,
        "maxEntropy": torch.minimum(log_n, log_d),
        "logNlogD": log_n * log_d,
    }[normalization]
    problems = {**problems, f"{normalization} divides by the logarithm of one row or one dimension": divisor == 0}
    return settled(metric, values / positive(divisor), problems, undefined)


def check_alpha(alpha: float) -> None:
    """Refuses an order that no entropy has."""
    if not alpha > 0:
        raise ValueError(f"expected alpha above 0, got {alpha}")


def positive(values: Tensor) -> Tensor:
    """The values with 1 for each 0, to divide by."""
    return values.masked_fill(values == 0, 1.0)
