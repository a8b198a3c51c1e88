"""Ridge regression and least squares of all layers at once, from rows in memory or streamed."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, Self

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from lit_layers.functional._checks import (
    check_features,
    check_finite,
    check_option,
    feature_scaling,
    settled,
    widened,
    widened_chunks,
)

# Squaring halves the digits of singular values: what a penalty leaves of X'X must stay above this share of the largest.
SMALLEST_SHARE = 1e-10


@dataclass(frozen=True, eq=False)
class RidgeProbes:
    """One linear regression per layer, in float64; see `fit_ridge_probes`."""

    weight: Float[Tensor, "layers dim outputs"]  # of the features minus `mean`, over `scale`
    bias: Float[Tensor, "layers outputs"]
    mean: Float[Tensor, "layers dim"]
    scale: Float[Tensor, "layers dim"]
    target_mean: Float[Tensor, "*q"]  # of the training rows: what to predict without features

    def predict(self, features: Float[Tensor, "layers n dim"]) -> Float[Tensor, "layers n *q"]:
        """Predictions in float64, of the targets' shape: one number a row, or one for each output.

        Raises:
            TypeError: features that are not floating-point.
            ValueError: features of other layers or width, or that are not finite.
        """
        check_features(features, like=self.weight)
        check_finite(features)
        mean, scale, bias = self.mean[:, None], self.scale[:, None], self.bias[:, None]
        parts = [(chunk.sub_(mean).div_(scale)) @ self.weight + bias for chunk in widened_chunks(features)]
        predictions = torch.cat(parts, 1)
        return predictions if self.target_mean.ndim else predictions[..., 0]


def fit_ridge_probes(
    features: Float[Tensor, "layers n dim"],
    targets: Float[Tensor, "n *q"],
    *,
    penalty: float = 1.0,
    standardize: bool = True,
    intercept: bool = True,
) -> RidgeProbes:
    """The linear regression of the targets on each layer's features that minimises squared errors plus a penalty.

    Minimises sum_i |y_i - W x_i - b|^2 + penalty |W|_F^2, b free of penalty: scikit-learn's `Ridge(alpha=penalty)`.
    With `penalty=0`, least squares, of several solutions the one of smallest |W|_F (singular values that may be
    rounding count as 0). With `standardize`, features are first centred and divided by the
    training rows' population deviation (by 1 where that is 0), which makes predictions invariant to affine maps of each
    feature. Constant features, or a single row, give the mean target. `penalty` is added to a sum: regularisation fades
    as rows are added.

    Computed in float64, one layer and a few rows at a time, so that features may be a memory-mapped tensor: with a
    penalty from the eigenvalues of X'X, unless some are below 1e-10 of the largest even so; else from the singular
    values of the R of a QR decomposition of X, which are not squared. `RidgeSums` does the first with rows that arrive
    piece by piece.

    Raises:
        TypeError: features that are not floating-point, targets that are not numbers.
        ValueError: no row, targets of another number of rows, a value that is not finite, a penalty below 0.
    """
    check_features(features)
    if not features.shape[1]:
        raise ValueError("expected at least one row, got none")
    _check_penalty(penalty)
    outputs = _outputs(targets, features.shape[1]).to(features.device)
    probes = []
    for index in range(len(features)):  # one at a time: all in float64 may be more than there is memory
        layer = features[index : index + 1].detach()
        check_finite(layer, first_layer=index)
        probes.append(_fit(layer, outputs, penalty, standardize, intercept))
    weight, bias, mean, scale = (torch.cat(parts) for parts in zip(*probes, strict=True))
    return RidgeProbes(weight, bias, mean, scale, outputs.mean(0).reshape(targets.shape[1:]))


class RidgeSums:
    """The sums that ridge regression needs, of rows that arrive piece by piece, on one process or several.

    Add pieces in any order and size, `merge` what other processes added, then `solve`. Everything is float64 and about
    the running means, so that features far from 0 lose no digits. Memory is layers x dim x (dim + outputs) x 8 bytes:
    13 layers of 768 are 61 MB, and 1,000 outputs 80 MB more.

    With `num_classes`, targets are class numbers and stand for one output per class, 1 where the row is of that class
    and else 0; that table is never made, so that a whole vocabulary may be predicted.
    """

    def __init__(self, *, num_classes: int | None = None) -> None:
        if num_classes is not None and num_classes < 1:
            raise ValueError(f"expected num_classes of at least 1, got {num_classes}")
        self.num_classes = num_classes
        self.num_rows = 0
        self._shape: torch.Size | None = None  # of one row's targets

    def add(self, features: Float[Tensor, "layers rows dim"], targets: Tensor) -> Self:
        """Takes some rows: targets are (rows) or (rows, q), or class numbers (rows). Returns itself.

        Raises:
            TypeError: features that are not floating-point, targets that are not numbers or, as classes, not integers.
            ValueError: shapes that do not fit each other or the rows before, a class outside 0..num_classes - 1, a
                value that is not finite.
        """
        check_features(features, like=self._gram if self._shape is not None else None)
        check_finite(features)
        if self.num_classes is None:
            outputs = _outputs(targets, features.shape[1])
        else:
            outputs = _classes(targets, features.shape[1], self.num_classes)
        outputs, shape = outputs.to(features.device), targets.shape[1:] if self.num_classes is None else torch.Size()
        if self._shape is not None and shape != self._shape:
            raise ValueError(f"expected targets of shape {tuple(self._shape)} a row, as before, got {tuple(shape)}")
        since = 0
        for chunk in widened_chunks(features):
            if not chunk.shape[1]:
                continue
            if self._shape is None:
                self._begin(chunk, outputs, shape)
            self._add(chunk, outputs[since : since + chunk.shape[1]])
            since += chunk.shape[1]
        return self

    def merge(self, other: "RidgeSums") -> Self:
        """Takes all rows that another one was given, of which it keeps nothing. Returns itself.

        Raises:
            ValueError: sums of other layers, width, targets or classes.
        """
        if other.num_classes != self.num_classes:
            raise ValueError(f"expected sums of {self.num_classes} classes, got {other.num_classes}")
        if other._shape is None:
            return self
        if self._shape is None:
            names = ("_shape", "num_rows", "_origin", "_mean", "_gram", "_target_mean", "_cross")
            for name in names:
                value = getattr(other, name)
                setattr(self, name, value.clone() if isinstance(value, Tensor) else value)
            return self
        if other._cross.shape != self._cross.shape or other._shape != self._shape:
            mine, its = tuple(self._cross.shape), tuple(other._cross.shape)
            raise ValueError(f"expected sums of (layers, dim, outputs) {mine}, got {its}")
        to = self._gram.device
        moved = (other._origin.to(to) - self._origin).double()
        cross = other._cross.to(to)
        if self.num_classes is not None:
            cross = cross + moved[..., None] * (other._target_mean.to(to) * other.num_rows)
        self._join(other.num_rows, other._mean.to(to) + moved, other._gram.to(to), other._target_mean.to(to), cross)
        return self

    def solve(self, penalty: float = 1.0, *, standardize: bool = True, intercept: bool = True) -> RidgeProbes:
        """The probes of all rows so far, as `fit_ridge_probes` finds them; rows may still be added afterwards.

        Raises:
            ValueError: no row, or a penalty of 0 or too small for a layer's X'X, whose eigenvalues below 1e-10 of the
                largest are rounding: `fit_ridge_probes` must see the rows then.
        """
        _check_penalty(penalty)
        if self._shape is None:
            raise ValueError("expected at least one row, got none")
        mean, gram = self._origin + self._mean, self._gram
        cross = self._cross
        if self.num_classes is not None:
            cross = cross - self.num_rows * self._mean[..., None] * self._target_mean
        variance = gram.diagonal(dim1=1, dim2=2) / self.num_rows
        scale = torch.where(variance > 0, variance.sqrt(), 1.0) if standardize else torch.ones_like(variance)
        gram, cross = gram / (scale[..., None] * scale[:, None]), cross / scale[..., None]
        center = mean if standardize or intercept else torch.zeros_like(mean)
        if not (standardize or intercept):  # about 0, not about the means
            gram = gram + self.num_rows * mean[..., None] * mean[:, None]
            cross = cross + self.num_rows * mean[..., None] * self._target_mean
        found = []
        for layer, (matrix, right) in enumerate(zip(gram, cross, strict=True)):
            weight = _from_sums(matrix, right, penalty)
            if weight is None:
                raise ValueError(
                    f"expected a penalty that outweighs the rounding of X'X at layer {layer}, got {penalty}; give all "
                    f"rows to fit_ridge_probes, which then does not square them"
                )
            found.append(weight)
        weight = torch.stack(found)
        bias = self._target_mean.expand(len(mean), -1) if intercept else weight.new_zeros(len(mean), weight.shape[-1])
        target_mean = self._target_mean.clone()
        if self.num_classes is None:
            target_mean = target_mean.reshape(self._shape)
        return RidgeProbes(weight, bias.clone(), center.clone(), scale, target_mean)

    def _begin(self, chunk: Tensor, outputs: Tensor, shape: torch.Size) -> None:
        layers, _, dim = chunk.shape
        num_outputs = self.num_classes or outputs.shape[1]
        # Near the mean, and exactly the value of a constant feature, of which then all sums are 0.
        self._origin = chunk[:, 0] + (chunk - chunk[:, :1]).mean(1)
        self._mean = torch.zeros_like(self._origin)  # minus the origin
        self._gram = chunk.new_zeros(layers, dim, dim)  # of the features minus their mean
        self._target_mean = chunk.new_zeros(num_outputs)
        # With the targets minus their mean; for classes of the features minus the origin, so that a piece touches its
        # own classes only, each a row of memory.
        self._cross = chunk.new_zeros(layers, num_outputs, dim).mT
        self._shape = shape

    def _add(self, chunk: Tensor, outputs: Tensor) -> None:
        shifted = chunk.sub_(self._origin[:, None])
        rows, mean = shifted.shape[1], shifted.mean(1)
        if self.num_classes is not None:
            for layer, values in enumerate(shifted):  # sums over the rows of each class
                self._cross[layer].T.index_add_(0, outputs, values)
            target_mean = torch.bincount(outputs, minlength=self.num_classes).to(mean) / rows
        else:
            target_mean = outputs.mean(0)
        centered = shifted.sub_(mean[:, None])
        cross = centered.mT @ (outputs - target_mean) if self.num_classes is None else None
        self._join(rows, mean, centered.mT @ centered, target_mean, cross)

    def _join(self, rows: int, mean: Tensor, gram: Tensor, target_mean: Tensor, cross: Tensor | None) -> None:
        """Sums about one mean and sums about another make sums about the common one (Chan, Golub & LeVeque 1983)."""
        total = self.num_rows + rows
        step, target_step = mean - self._mean, target_mean - self._target_mean
        weight = self.num_rows * rows / total
        self._gram += gram
        self._gram.baddbmm_(step[..., None], step[:, None], alpha=weight)
        if cross is not None:
            self._cross += cross
        if self.num_classes is None:
            self._cross += weight * step[..., None] * target_step
        self._mean += step * (rows / total)
        self._target_mean += target_step * (rows / total)
        self.num_rows = total


def r_squared(
    targets: Float[Tensor, " n"],
    predictions: Float[Tensor, "*layers n"],
    *,
    baseline: float | Tensor,
    undefined: Literal["raise", "nan"] = "raise",
) -> Float[Tensor, "*layers"]:
    """1 - mean squared error / that of predicting `baseline`, the training rows' mean target, for every row.

    In (-inf, 1]: 1 for no error, 0 for errors as large as the baseline's. scikit-learn's `r2_score` takes the mean of
    the scored targets for the baseline, and agrees where that is the training mean. In float64.

    Raises:
        TypeError: targets that are not numbers.
        ValueError: no row, shapes that do not fit, or targets that are all equal, for which it is undefined; with
            `undefined="nan"` that gives NaN.
    """
    if predictions.shape[-1:] != targets.shape or targets.ndim != 1:
        shapes = f"{tuple(predictions.shape)} of {tuple(targets.shape)}"
        raise ValueError(f"expected predictions (*layers, n) of targets (n), got {shapes}")
    if not len(targets):
        raise ValueError("expected at least one row, got none")
    truth = _outputs(targets, len(targets))[:, 0].to(predictions.device)
    values = 1 - (predictions.double() - truth).square().mean(-1) / (truth - baseline).square().mean()
    constant = (truth == truth[0]).all()
    return settled("r_squared", values, {"all targets are equal": constant}, undefined)


def _fit(layer: Tensor, outputs: Tensor, penalty: float, standardize: bool, intercept: bool) -> tuple[Tensor, ...]:
    """Weight, bias, mean and scale of the probe of one layer (1, n, dim)."""
    mean, scale = feature_scaling(layer, standardize=standardize, center=standardize or intercept)
    target_mean = outputs.mean(0) if intercept else torch.zeros_like(outputs[0])
    targets = outputs - target_mean
    num_rows, dim = layer.shape[1:]
    weight = None
    if penalty and num_rows >= dim:
        gram, cross = mean.new_zeros(dim, dim), mean.new_zeros(dim, targets.shape[1])
        for rows, y in _pieces(layer, mean, scale, targets):
            gram += rows.T @ rows
            cross += rows.T @ y
        weight = _from_sums(gram, cross, penalty)
    if weight is None:
        weight = _from_rows(layer, mean, scale, targets, penalty)
    return weight[None], target_mean[None], mean, scale


def _pieces(layer: Tensor, mean: Tensor, scale: Tensor, targets: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    since = 0
    for chunk in widened_chunks(layer):
        yield chunk.sub_(mean[:, None]).div_(scale[:, None])[0], targets[since : since + chunk.shape[1]]
        since += chunk.shape[1]


def _from_sums(gram: Tensor, cross: Tensor, penalty: float) -> Tensor | None:
    """None where the result would be rounding."""
    values, vectors = torch.linalg.eigh(gram)
    values = values.clamp(min=0) + penalty
    if not penalty or values.min() < SMALLEST_SHARE * values.max():
        return None
    return vectors @ ((vectors.T @ cross) / values[:, None])


def _from_rows(layer: Tensor, mean: Tensor, scale: Tensor, targets: Tensor, penalty: float) -> Tensor:
    """Through the R of [X Y], updated piece by piece: its part of X has the singular values of X, unsquared."""
    num_rows, dim = layer.shape[1:]
    triangle = targets.new_zeros(0, dim + targets.shape[1])
    for rows, y in _pieces(layer, mean, scale, targets):
        triangle = torch.linalg.qr(torch.cat([triangle, torch.cat([rows, y], 1)]), mode="r").R
    left, values, right = torch.linalg.svd(triangle[:, :dim], full_matrices=False)
    # Of directions without features: what the decomposition makes of them, and features large against their deviation.
    rounding = max(num_rows, dim) * values.max() + num_rows**0.5 * torch.linalg.vector_norm(mean / scale)
    kept = values > rounding * torch.finfo(values.dtype).eps
    # Least squares is a limit: in the directions left out the weight is 0.
    factors = torch.where(kept, values / (values.square() + penalty).where(kept, torch.ones_like(values)), 0.0)
    return right.T @ (factors[:, None] * (left.T @ triangle[:, dim:]))


def _outputs(targets: Tensor, num_rows: int) -> Tensor:
    """Targets in float64, (rows, outputs)."""
    if not isinstance(targets, Tensor) or targets.is_complex() or targets.dtype == torch.bool:
        kind = targets.dtype if isinstance(targets, Tensor) else type(targets).__name__
        raise TypeError(f"expected targets to be a tensor of real numbers, got {kind}")
    if targets.ndim not in (1, 2) or len(targets) != num_rows or not targets.shape[1:].numel():
        raise ValueError(f"expected targets of shape ({num_rows},) or ({num_rows}, q), got {tuple(targets.shape)}")
    outputs = targets.detach().double().reshape(num_rows, math.prod(targets.shape[1:]))
    if not outputs.isfinite().all():
        raise ValueError(
            f"expected finite targets, got another at row {int((~outputs.isfinite()).any(1).nonzero()[0])}"
        )
    return outputs


def _classes(targets: Tensor, num_rows: int, num_classes: int) -> Tensor:
    if not isinstance(targets, Tensor) or targets.is_floating_point() or targets.is_complex():
        kind = targets.dtype if isinstance(targets, Tensor) else type(targets).__name__
        raise TypeError(f"expected class numbers to be an integer tensor, got {kind}")
    if targets.shape != (num_rows,):
        raise ValueError(f"expected one class for each of {num_rows} rows, got shape {tuple(targets.shape)}")
    if num_rows and not 0 <= int(targets.min()) <= int(targets.max()) < num_classes:
        wrong = targets[(targets < 0) | (targets >= num_classes)][0]
        raise ValueError(f"expected classes in 0..{num_classes - 1}, got {int(wrong)}")
    return targets.detach().long()


def _check_penalty(penalty: float) -> None:
    if not (penalty >= 0 and math.isfinite(penalty)):
        raise ValueError(f"expected a penalty of at least 0, got {penalty}")


# How much of the next token's id a linear map of the states cannot tell. All computed in float64.

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
