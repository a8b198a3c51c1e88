"""Ridge regression and least squares of all layers at once, and the error of linear predictions of next-token ids."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from lit_layers.functional._checks import (
    check_features,
    check_finite,
    check_option,
    feature_scaling,
    widened,
    widened_chunks,
)

# Squaring halves the digits of singular values. If the smallest eigenvalue of X'X + penalty I is below this share of
# the largest, the singular values of X itself are used instead.
SMALLEST_SHARE = 1e-10
PENALTIES = [10 ** (exponent / 2) for exponent in range(10, -7, -1)]  # penalties to try, the strongest first


@dataclass(frozen=True, eq=False)
class RidgeProbes:
    """One linear regression per layer, in float64; see `fit_ridge_probes`."""

    weight: Float[Tensor, "layers dim outputs"]  # multiplies (features - mean) / scale
    bias: Float[Tensor, "layers outputs"]
    mean: Float[Tensor, "layers dim"]
    scale: Float[Tensor, "layers dim"]
    target_mean: Float[Tensor, "*q"]  # mean over training rows: the prediction without features
    penalty: Float[Tensor, " layers"]

    def predict(self, features: Float[Tensor, "layers n dim"]) -> Float[Tensor, "layers n *q"]:
        """Return predictions in float64 with the shape of the targets: one number per row, or one for each output.

        Raises:
            ValueError: another number of layers or width than in training, or features that are not finite.
        """
        check_features(features, self.weight)
        mean, scale, bias = self.mean[:, None], self.scale[:, None], self.bias[:, None]
        parts = [(chunk.sub_(mean).div_(scale)) @ self.weight + bias for chunk in widened_chunks(features)]
        predictions = torch.cat(parts, 1)
        return predictions if self.target_mean.ndim else predictions[..., 0]


def fit_ridge_probes(
    features: Float[Tensor, "layers n dim"],
    targets: Float[Tensor, "n *q"],
    *,
    penalty: float | None = 1.0,
) -> RidgeProbes:
    """Fit a linear regression of the targets on the features of each layer, by least squares with an L2 penalty.

    Minimises sum_i |y_i - W x_i - b|^2 + penalty |W|_F^2 without penalty on b, as scikit-learn's
    `Ridge(alpha=penalty)`. `penalty=0` is least squares. Among several solutions the one with the smallest |W|_F is
    taken, and singular values of rounding size count as 0. Features are first centred and divided by the training rows'
    population standard deviation (by 1 if it is 0). This makes predictions invariant to affine maps of each feature. If
    all features are constant, or there is a single row, the prediction is the mean target. `penalty` is added to a sum,
    so the regularisation weakens as rows are added.

    With `penalty=None`, each layer gets its own penalty between 1e-3 and 1e5, in half decades: the one with the lowest
    squared leave-one-out error, which is computed in closed form. If several tie, the strongest is taken. The row that
    is left out still counts in the scale of the features, but in no other sum.

    Computed in float64, one layer and one chunk of rows at a time, so features may be a memory-mapped tensor. With a
    penalty, the solution uses the eigenvalues of X'X. If some of them plus the penalty are below 1e-10 of the largest,
    it uses the singular values of X, from the R of a QR decomposition. It always does so without a penalty, or with a
    given penalty and fewer rows than features.

    Raises:
        ValueError: targets with another number of rows, a value that is not finite, a penalty below 0.
    """
    if penalty is not None and penalty < 0:
        raise ValueError(f"expected a penalty of at least 0, got {penalty}")
    outputs = _outputs(targets, features.shape[1]).to(features.device)
    probes = []
    for index in range(len(features)):  # one at a time: all layers in float64 may exceed memory
        layer = features[index : index + 1].detach()
        check_finite(layer, first_layer=index)
        probes.append(_fit(layer, outputs, penalty))
    weight, bias, mean, scale, penalties = (torch.cat(parts) for parts in zip(*probes, strict=True))
    return RidgeProbes(weight, bias, mean, scale, outputs.mean(0).reshape(targets.shape[1:]), penalties)


def _fit(layer: Tensor, outputs: Tensor, penalty: float | None) -> tuple[Tensor, ...]:
    """Return weight, bias, mean, scale and penalty of the probe of one layer (1, n, dim)."""
    mean, scale = feature_scaling(layer)
    target_mean = outputs.mean(0)
    targets = outputs - target_mean
    num_rows, dim = layer.shape[1:]
    weight = None
    if penalty is None or (penalty and num_rows >= dim):
        gram, cross = mean.new_zeros(dim, dim), mean.new_zeros(dim, targets.shape[1])
        for rows, y in _chunks(layer, mean, scale, targets):
            gram += rows.T @ rows
            cross += rows.T @ y
        values, vectors = torch.linalg.eigh(gram)
        values, cross = values.clamp(min=0), vectors.T @ cross
        if penalty is None:
            rotated = ((rows @ vectors, y) for rows, y in _chunks(layer, mean, scale, targets))
            penalty = _best_penalty(values, cross, rotated, num_rows)
        values = values + penalty
        if values.min() >= SMALLEST_SHARE * values.max():  # otherwise rounding errors would dominate the result
            weight = vectors @ (cross / values[:, None])
    if weight is None:
        weight = _from_rows(layer, mean, scale, targets, penalty)
    return weight[None], target_mean[None], mean, scale, mean.new_tensor([penalty])


def _best_penalty(values: Tensor, cross: Tensor, chunks: Iterator[tuple[Tensor, Tensor]], num_rows: int) -> float:
    """Return the penalty with the lowest squared leave-one-out error.

    The error of a left-out row is its residual in the fit of all rows, divided by 1 minus its leverage.
    """
    penalties = values.new_tensor(PENALTIES)
    inverse = 1 / (values[:, None] + penalties)  # (dim, penalties)
    errors = torch.zeros_like(penalties)
    for rows, y in chunks:
        outside = 1 - 1 / num_rows - rows.square() @ inverse  # 1 - leverage (rows, penalties)
        for column in range(len(penalties)):
            residual = y - rows @ (cross * inverse[:, column, None])
            errors[column] += (residual / outside[:, column, None]).square().sum()
    return PENALTIES[int(errors.nan_to_num(torch.inf).argmin())]


def _chunks(layer: Tensor, mean: Tensor, scale: Tensor, targets: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    start = 0
    for chunk in widened_chunks(layer):
        yield chunk.sub_(mean[:, None]).div_(scale[:, None])[0], targets[start : start + chunk.shape[1]]
        start += chunk.shape[1]


def _from_rows(layer: Tensor, mean: Tensor, scale: Tensor, targets: Tensor, penalty: float) -> Tensor:
    """Return the regression weights from the R of a QR decomposition of [features, targets], updated in chunks.

    The columns of R that belong to the features X have the same singular values as X. A decomposition of these columns
    loses fewer digits than one of X'X, where the singular values are squared.
    """
    num_rows, dim = layer.shape[1:]
    triangle = targets.new_zeros(0, dim + targets.shape[1])
    for rows, y in _chunks(layer, mean, scale, targets):
        triangle = torch.linalg.qr(torch.cat([triangle, torch.cat([rows, y], 1)]), mode="r").R
    left, values, right = torch.linalg.svd(triangle[:, :dim], full_matrices=False)
    # Directions in which the features do not vary have singular values of rounding size. These come from rounding of
    # the decomposition, and from rounding of features whose mean is large relative to their deviation.
    rounding = max(num_rows, dim) * values.max() + num_rows**0.5 * torch.linalg.vector_norm(mean / scale)
    nonzero = values > rounding * torch.finfo(values.dtype).eps
    # The weight is 0 in these directions. For least squares this is the limit of a vanishing penalty.
    factors = torch.where(nonzero, values / (values.square() + penalty).where(nonzero, torch.ones_like(values)), 0.0)
    return right.T @ (factors[:, None] * (left.T @ triangle[:, dim:]))


def _outputs(targets: Tensor, num_rows: int) -> Tensor:
    """Return targets in float64, (rows, outputs)."""
    if len(targets) != num_rows or not targets.isfinite().all():
        raise ValueError(f"expected a finite target for each of {num_rows} rows, got shape {tuple(targets.shape)}")
    return targets.detach().double().reshape(num_rows, -1)


# Prediction residual: the share of the variance of the next token's id that a linear map of the states does not
# explain. All computed in float64.

Normalize = Literal["layer_norm", "rms_norm", "none"]


@dataclass(frozen=True, eq=False)
class PredictionResidual:
    """Results of `prediction_residual` for each set of features."""

    value: Float[Tensor, "*n"]
    adjusted: Float[Tensor, "*n"]  # NaN if rank = num_rows - 1: `value` is then always 0
    held_out: Float[Tensor, "*n"] | None
    num_rows: int
    rank: Int[Tensor, "*n"]


def prediction_residual(
    features: Float[Tensor, "*n m dim"],
    token_ids: Int[Tensor, " m"] | Int[Tensor, "m q"],
    *,
    normalize: Normalize = "layer_norm",
    eps: float = 1e-5,
    split: Bool[Tensor, " m"] | None = None,
) -> PredictionResidual:
    """Return 1 - R^2 of an ordinary least-squares fit, with intercept, of next-token ids to the rows of the features.

    `value` = mean squared residual / population variance of the ids, in [0, 1], fitted and scored on all m rows. It is
    0 if the rank r of the centred features is m - 1 (generically if m <= dim + 1). Useless features give
    1 - r / (m - 1) in expectation, so compare values only at equal m and dim. `adjusted` = value (m - 1) / (m - 1 - r)
    removes this effect. With `split`, another fit uses only the rows where `split` is True. `held_out` is its mean
    squared residual on the other rows, divided by the variance of their ids. It may exceed 1. If `token_ids` has q
    columns, the values are (*n, q) from one decomposition.

    `normalize` is applied to each row. "layer_norm" and "rms_norm" do what a layer of that name does with weight 1,
    bias 0 and `eps`. The result is invariant to invertible affine maps of the normalised features and to affine maps of
    the ids. It depends on the numbering of the vocabulary, which is roughly ordered by frequency.

    Solved by a QR decomposition of a few thousand rows at a time and an SVD of its triangle. The features are never
    squared, which would lose precision. Memory in addition to the features: these rows and dim x dim numbers.

    Source: He & Su, arXiv 2408.13442.

    Raises:
        ValueError: fewer than 3 rows, equal ids (with `split` also among the scored rows), a value that is not finite,
            or an unknown `normalize`.
    """
    check_option("normalize", normalize, "layer_norm", "rms_norm", "none")
    ids, num_rows = token_ids.cpu(), features.shape[-2]
    if len(ids) != num_rows or num_rows < 3:
        raise ValueError(f"expected a token id for each of 3 rows or more, got {len(ids)} for {num_rows}")
    fitted = torch.ones(num_rows, dtype=torch.bool) if split is None else split.cpu()
    single = ids.ndim == 1
    targets = ids.reshape(len(ids), -1).double()
    for name, values in (("token ids", targets), ("scored token ids", targets if split is None else targets[~fitted])):
        if (values == values[:1]).all(0).any():
            raise ValueError(f"expected {name} that are not all equal: their variance is 0")
    flat = features.detach().reshape(-1, *features.shape[-2:])
    flat = flat.cpu() if flat.device.type == "mps" else flat  # MPS has no float64
    results = [
        _layer_residual(layer, targets.to(layer.device), fitted.to(layer.device), normalize, eps, split is not None)
        for layer in flat
    ]

    def shaped(values: list[Tensor]) -> Tensor:
        stacked = torch.stack(values).unflatten(0, features.shape[:-2]) if features.ndim > 2 else values[0]
        return stacked[..., 0] if single and stacked.ndim > features.ndim - 2 else stacked

    value, adjusted, held_out, rank = zip(*results, strict=True)
    return PredictionResidual(
        value=shaped(list(value)),
        adjusted=shaped(list(adjusted)),
        held_out=None if split is None else shaped(list(held_out)),
        num_rows=len(ids),
        rank=shaped(list(rank)),
    )


def _layer_residual(
    features: Tensor, targets: Tensor, fitted: Tensor, normalize: Normalize, eps: float, with_split: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return `value`, `adjusted`, `held_out` (q,) and `rank` of `PredictionResidual`, for one set of features."""
    num_rows = len(features)
    # The first row is subtracted from all rows, so that a large common offset costs no precision.
    origin = _normalized(features[:1], normalize, eps)
    triangle = _triangle(features[fitted] if with_split else features, targets[fitted], origin, normalize, eps)
    whole, held_out = triangle, torch.full_like(targets[0], math.nan)
    if with_split:
        others = _triangle(features[~fitted], targets[~fitted], origin, normalize, eps)
        weight, bias = _solution(triangle, targets.shape[1])
        dim = features.shape[1]
        residual = others[:, 1 + dim :] - others[:, 1 : 1 + dim] @ weight - others[:, :1] * bias
        held_out = residual.square().sum(0) / others[1:, 1 + dim :].square().sum(0)
        whole = torch.linalg.qr(torch.cat([triangle, others]), mode="r").R
    left, _, _, rank = _decomposed(whole, targets.shape[1], num_rows)
    centred_targets = whole[1:, -targets.shape[1] :]
    value = (centred_targets - left @ (left.mT @ centred_targets)).square().sum(0) / centred_targets.square().sum(0)
    freedom = num_rows - 1 - rank
    adjusted = value * (num_rows - 1) / freedom if freedom > 0 else torch.full_like(value, math.nan)
    return value, adjusted, held_out, torch.tensor(rank, device=features.device)


def _triangle(features: Tensor, targets: Tensor, origin: Tensor, normalize: Normalize, eps: float) -> Tensor:
    """Return R of the QR decomposition of [1, normalised features - origin, targets].

    The rows of R below the first one are an orthogonal transformation of the centred features and targets.
    """
    dim, num_targets = features.shape[1], targets.shape[1]
    triangle = targets.new_zeros(0, 1 + dim + num_targets)
    size = max(4096, 4 * triangle.shape[1])
    for rows, target_rows in zip(features.split(size), targets.split(size), strict=True):
        normed = _normalized(rows, normalize, eps) - origin
        block = torch.cat([torch.ones_like(target_rows[:, :1]), normed, target_rows], dim=1)
        triangle = torch.linalg.qr(torch.cat([triangle, block]), mode="r").R
    return triangle


def _normalized(rows: Tensor, normalize: Normalize, eps: float) -> Tensor:
    rows = widened(rows)
    if normalize == "rms_norm":
        rows = rows / (rows.square().mean(-1, keepdim=True) + eps).sqrt()
    elif normalize != "none":
        rows = rows - rows[:, :1]  # a constant row becomes exactly 0
        rows = rows - rows.mean(-1, keepdim=True)
        variance = rows.square().mean(-1, keepdim=True)
        rows = rows / (variance + eps).sqrt()
    if not rows.isfinite().all():
        raise ValueError(f"expected rows that are finite after normalize={normalize!r}, got others")
    return rows


def _decomposed(triangle: Tensor, num_targets: int, num_rows: int) -> tuple[Tensor, Tensor, Tensor, int]:
    """Return the singular value decomposition of the centred features, from the result of `_triangle`.

    Singular values of the size of rounding errors are left out.

    Returns:
        Left singular vectors, singular values, transposed right singular vectors, and the number of values.
    """
    features = triangle[1:, 1:-num_targets]
    left, values, right = torch.linalg.svd(features, full_matrices=False)
    if not len(values):
        return left, values, right, 0
    floor = values[0] * max(num_rows, features.shape[1]) * torch.finfo(values.dtype).eps
    rank = int((values > floor).sum())
    return left[:, :rank], values[:rank], right[:rank], rank


def _solution(triangle: Tensor, num_targets: int) -> tuple[Tensor, Tensor]:
    """Return the least-squares weights (dim, q) and intercepts (q,) from the result of `_triangle`.

    If several weights fit equally well, those of smallest norm are returned.
    """
    left, values, right, _ = _decomposed(triangle, num_targets, num_rows=len(triangle))
    weight = right.mT @ ((left.mT @ triangle[1:, -num_targets:]) / values[:, None])
    return weight, (triangle[0, -num_targets:] - triangle[0, 1:-num_targets] @ weight) / triangle[0, 0]
