"""Whether a curve over layers falls by one factor per block."""

from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from lit_layers.functional._checks import check_option, settled, widened

PerCurve = Float[Tensor, "*n"]


@dataclass(frozen=True, eq=False)
class ExponentialLaw:
    """The line through log10 of a curve; see `exponential_law`. Two of these values are NaN for a constant curve."""

    rho: PerCurve
    slope: PerCurve
    intercept: PerCurve
    pearson: PerCurve
    r_squared: PerCurve


def exponential_law(
    residuals: Float[Tensor, "*n layers"], *, undefined: Literal["raise", "nan"] = "raise"
) -> ExponentialLaw:
    """Least squares of log10 PR_l on l - 1 for layers 1..L (no embedding): PR_l = rho^(l - 1) PR_1 about. In float64.

    `rho` = 10^slope: below 1, the residual shrinks by one factor per block. `pearson`, in [-1, 1], is the correlation
    of log10 PR with depth, -1 for an exact falling geometric series, and `r_squared` its square: how well the law
    holds. Both are NaN for a constant curve, whose rho is 1. Scaling the curve moves the intercept alone.

    Source: He & Su, arXiv 2408.13442.

    Raises:
        TypeError: residuals that are not floating-point.
        ValueError: fewer than 3 layers; a residual that is not finite or not above 0: NaN there with `undefined="nan"`.
    """
    check_option("undefined", undefined, "raise", "nan")
    residuals = widened("residuals", residuals)
    if residuals.ndim < 1 or residuals.shape[-1] < 3:
        raise ValueError(f"expected the residuals of at least 3 layers, got shape {tuple(residuals.shape)}")
    allowed = residuals.isfinite() & (residuals > 0)
    logs = residuals.where(allowed, 1.0).log10()
    constant = (residuals == residuals[..., :1]).all(-1)
    depth = torch.arange(residuals.shape[-1], dtype=logs.dtype, device=logs.device)
    centered = depth - depth.mean()
    shifted = (logs - logs[..., :1]).masked_fill(constant[..., None], 0.0)
    shifted = shifted - shifted.mean(-1, keepdim=True)
    products, squares = (shifted * centered).sum(-1), shifted.square().sum(-1)
    slope = products / centered.square().sum()
    pearson = (products / (squares * centered.square().sum()).sqrt()).clamp(-1, 1)
    values = {
        "rho": 10**slope,
        "slope": slope,
        "intercept": logs.mean(-1) - slope * depth.mean(),
        "pearson": pearson,
        "r_squared": pearson.square(),
    }
    problems = {"a residual is not a finite number above 0": ~allowed.all(-1)}
    return ExponentialLaw(
        **{name: settled("exponential_law", value, problems, undefined) for name, value in values.items()}
    )
