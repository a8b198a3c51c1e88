"""How much of the next token's id a linear map of the states cannot tell. All computed in float64."""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from lit_layers.functional._checks import check_option, widened

Normalize = Literal["layer_norm", "rms_norm", "standardize", "none"]


@dataclass(frozen=True, eq=False)
class PredictionResidual:
    """What the least squares of `prediction_residual` leave over, per set of features."""

    value: Float[Tensor, "*n"]
    adjusted: Float[Tensor, "*n"]  # NaN where value is 0 for want of rows: rank = num_rows - 1
    held_out: Float[Tensor, "*n"] | None
    num_rows: int
    rank: Int[Tensor, "*n"]


def prediction_residual(
    features: Float[Tensor, "*n m dim"],
    token_ids: Int[Tensor, " m"] | Int[Tensor, "m q"],
    *,
    normalize: Normalize = "layer_norm",
    eps: float = 1e-5,
    split: float | Bool[Tensor, " m"] | None = None,
    seed: int = 0,
) -> PredictionResidual:
    """1 - R^2 of the ordinary least squares, with intercept, of next-token ids on the rows of the features.

    `value` = mean squared residual / population variance of the ids, in sample, in [0, 1]: 0 where the rank r of the
    centred features is m - 1 (generically m <= dim + 1). Useless features give 1 - r / (m - 1) in expectation, so that
    values compare at equal m and dim only; `adjusted` = value (m - 1) / (m - 1 - r) takes that away. `held_out`, with
    `split`: fitted on a random share of the rows (or on those where a mask is True), scored on the others over their
    own variance; it may exceed 1. Several labellings at once, (m, q), give values (*n, q) from one decomposition.

    `normalize` acts on each row: "layer_norm" and "rms_norm" as a fresh norm with `eps` would, weight 1 and bias 0;
    "standardize" subtracts its mean and divides by its deviation. Then: invariant to invertible affine maps of the
    features and affine maps of the ids, not to relabelling the vocabulary, whose order is about that of frequency.

    Solved by a QR decomposition of a few thousand rows at a time and an SVD of its triangle, so that squares of the
    features, with their loss of digits, never appear; memory beside the features: those rows and dim x dim numbers.

    Source: He & Su, arXiv 2408.13442.

    Raises:
        TypeError: features that are not floating-point, ids that are not integers.
        ValueError: fewer than 3 rows, equal ids (with `split` also among the scored rows), a value that is not finite,
            a row without deviation ("standardize"), an option out of range.
    """
    check_option("normalize", normalize, "layer_norm", "rms_norm", "standardize", "none")
    ids = _checked_ids(features, token_ids, eps)
    fitted = _fitted_rows(len(ids), split, seed)
    single = ids.ndim == 1
    targets = ids.reshape(len(ids), -1).double()
    scored = torch.ones_like(fitted) if split is None else ~fitted
    for name, rows in (("token ids", torch.ones_like(fitted)), ("scored token ids", scored)):
        if (targets[rows] == targets[rows][:1]).all(0).any():
            raise ValueError(f"expected {name} that are not all equal: their variance is 0")
    flat = features.detach().reshape(-1, *features.shape[-2:])
    flat = flat.cpu() if flat.device.type == "mps" else flat  # which has no float64
    found = [
        _of_layer(layer, targets.to(layer.device), fitted.to(layer.device), normalize, eps, split is not None)
        for layer in flat
    ]

    def shaped(values: list[Tensor]) -> Tensor:
        stacked = torch.stack(values).unflatten(0, features.shape[:-2]) if features.ndim > 2 else values[0]
        return stacked[..., 0] if single and stacked.ndim > features.ndim - 2 else stacked

    value, adjusted, held_out, rank = zip(*found, strict=True)
    return PredictionResidual(
        value=shaped(list(value)),
        adjusted=shaped(list(adjusted)),
        held_out=None if split is None else shaped(list(held_out)),
        num_rows=len(ids),
        rank=shaped(list(rank)),
    )


def _of_layer(
    features: Tensor, targets: Tensor, fitted: Tensor, normalize: Normalize, eps: float, with_split: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Value, adjusted and held-out value (q,) and the rank of one set of features (m, dim)."""
    num_rows = len(features)
    origin = _normalized(features[:1], normalize, eps)  # of all rows: what they share costs no digits
    mine = _triangle(features[fitted] if with_split else features, targets[fitted], origin, normalize, eps)
    whole, held_out = mine, torch.full_like(targets[0], math.nan)
    if with_split:
        others = _triangle(features[~fitted], targets[~fitted], origin, normalize, eps)
        weight, bias = _solution(mine, targets.shape[1])
        dim = features.shape[1]
        residual = others[:, 1 + dim :] - others[:, 1 : 1 + dim] @ weight - others[:, :1] * bias
        held_out = residual.square().sum(0) / others[1:, 1 + dim :].square().sum(0)
        whole = torch.linalg.qr(torch.cat([mine, others]), mode="r").R
    left, _, _, rank = _decomposed(whole, targets.shape[1], num_rows)
    wanted = whole[1:, -targets.shape[1] :]
    value = (wanted - left @ (left.mT @ wanted)).square().sum(0) / wanted.square().sum(0)
    freedom = num_rows - 1 - rank
    adjusted = value * (num_rows - 1) / freedom if freedom > 0 else torch.full_like(value, math.nan)
    return value, adjusted, held_out, torch.tensor(rank, device=features.device)


def _triangle(features: Tensor, targets: Tensor, origin: Tensor, normalize: Normalize, eps: float) -> Tensor:
    """R of the QR decomposition of [1, features, targets]: its rows but the first are the centred data, rotated."""
    dim, num_targets = features.shape[1], targets.shape[1]
    found = targets.new_zeros(0, 1 + dim + num_targets)
    size = max(4096, 4 * found.shape[1])
    for rows, wanted in zip(features.split(size), targets.split(size), strict=True):
        normed = _normalized(rows, normalize, eps) - origin
        block = torch.cat([torch.ones_like(wanted[:, :1]), normed, wanted], dim=1)
        found = torch.linalg.qr(torch.cat([found, block]), mode="r").R
    return found


def _normalized(rows: Tensor, normalize: Normalize, eps: float) -> Tensor:
    rows = widened("features", rows)
    if normalize == "rms_norm":
        rows = rows / (rows.square().mean(-1, keepdim=True) + eps).sqrt()
    elif normalize != "none":
        rows = rows - rows[:, :1]  # a constant row becomes exactly 0
        rows = rows - rows.mean(-1, keepdim=True)
        variance = rows.square().mean(-1, keepdim=True)
        rows = rows / (variance + (eps if normalize == "layer_norm" else 0.0)).sqrt()
    if not rows.isfinite().all():
        raise ValueError(f"expected rows that are finite after normalize={normalize!r}, got others")
    return rows


def _decomposed(triangle: Tensor, num_targets: int, num_rows: int) -> tuple[Tensor, Tensor, Tensor, int]:
    """Singular vectors and values of the centred features, those of rounding left out, and how many are left."""
    features = triangle[1:, 1:-num_targets]
    left, values, right = torch.linalg.svd(features, full_matrices=False)
    if not len(values):
        return left, values, right, 0
    floor = values[0] * max(num_rows, features.shape[1]) * torch.finfo(values.dtype).eps
    rank = int((values > floor).sum())
    return left[:, :rank], values[:rank], right[:rank], rank


def _solution(triangle: Tensor, num_targets: int) -> tuple[Tensor, Tensor]:
    """Weights (dim, q) of smallest norm and intercepts (q,) of the rows that the triangle is of."""
    left, values, right, _ = _decomposed(triangle, num_targets, num_rows=len(triangle))
    weight = right.mT @ ((left.mT @ triangle[1:, -num_targets:]) / values[:, None])
    return weight, (triangle[0, -num_targets:] - triangle[0, 1:-num_targets] @ weight) / triangle[0, 0]


def _fitted_rows(num_rows: int, split: float | Tensor | None, seed: int) -> Tensor:
    if split is None:
        return torch.ones(num_rows, dtype=torch.bool)
    if isinstance(split, Tensor):
        if split.dtype != torch.bool or split.shape != (num_rows,):
            raise ValueError(
                f"expected split to be a share or a boolean mask of {num_rows} rows, got {split.dtype} of shape "
                f"{tuple(split.shape)}"
            )
        fitted = split.cpu()
    elif 0 < split < 1:
        order = torch.randperm(num_rows, generator=torch.Generator().manual_seed(seed))
        fitted = torch.zeros(num_rows, dtype=torch.bool)
        fitted[order[: round(split * num_rows)]] = True
    else:
        raise ValueError(f"expected split between 0 and 1, got {split}")
    count = int(fitted.sum())
    if count < 3 or num_rows - count < 2:
        raise ValueError(
            f"expected a split into at least 3 rows to fit and 2 to score, got {count} and {num_rows - count}"
        )
    return fitted


def _checked_ids(features: Tensor, token_ids: Tensor, eps: float) -> Tensor:
    if not isinstance(features, Tensor) or not features.is_floating_point():
        kind = features.dtype if isinstance(features, Tensor) else type(features).__name__
        raise TypeError(f"expected features to be a floating-point tensor, got {kind}")
    if not isinstance(token_ids, Tensor) or token_ids.is_floating_point() or token_ids.dtype == torch.bool:
        kind = token_ids.dtype if isinstance(token_ids, Tensor) else type(token_ids).__name__
        raise TypeError(f"expected token_ids to be an integer tensor, got {kind}")
    if features.ndim < 2 or not features.shape[-1] or not math.prod(features.shape[:-2]):
        raise ValueError(f"expected features of shape (*n, m, dim), got {tuple(features.shape)}")
    num_rows = features.shape[-2]
    if token_ids.ndim not in (1, 2) or len(token_ids) != num_rows or not token_ids[:1].numel():
        raise ValueError(f"expected one token id for each of {num_rows} rows, got shape {tuple(token_ids.shape)}")
    if num_rows < 3:
        raise ValueError(f"expected at least 3 rows, got {num_rows}")
    if not 0 <= eps < math.inf:
        raise ValueError(f"expected eps of at least 0, got {eps}")
    return token_ids.cpu()
