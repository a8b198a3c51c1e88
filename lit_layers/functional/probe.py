"""Linear probes of all layers at once."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from lit_layers.functional._lbfgs import minimize


@dataclass(frozen=True, eq=False)
class LogisticProbes:
    """One logistic probe per layer; see `fit_logistic_probes`.

    Two classes have one logit, that of the second against the first; more have a logit each. A class that no training
    row had is in `num_classes` but not in `classes`: it is never predicted and its log-probability is -inf.
    """

    weight: Float[Tensor, "layers dim logits"]  # of the features minus `mean`, over `scale`
    bias: Float[Tensor, "layers logits"]
    mean: Float[Tensor, "layers dim"]
    scale: Float[Tensor, "layers dim"]
    classes: Int[Tensor, " seen"]
    num_classes: int
    converged: Bool[Tensor, " layers"]
    objective: Float[Tensor, " layers"]
    num_iterations: Int[Tensor, " layers"]

    def log_proba(self, features: Float[Tensor, "layers n dim"]) -> Float[Tensor, "layers n num_classes"]:
        """Natural logarithms of the classes' probabilities. In float32 or wider."""
        _check_features(features, like=self.weight)
        seen = torch.stack([self._seen_log_proba(layer, rows) for layer, rows in enumerate(features)])
        if len(self.classes) == self.num_classes:
            return seen
        return seen.new_full((*seen.shape[:2], self.num_classes), -torch.inf).index_copy(2, self.classes, seen)

    def predict(self, features: Float[Tensor, "layers n dim"]) -> Int[Tensor, "layers n"]:
        """The most probable class of each row; the lowest of several."""
        return self.log_proba(features).argmax(-1)

    def _seen_log_proba(self, layer: int, rows: Tensor) -> Tensor:
        rows = ((rows.double() - self.mean[layer]) / self.scale[layer]).to(self.weight.dtype)
        logits = rows @ self.weight[layer] + self.bias[layer]
        if len(self.classes) == 2:
            logits = torch.cat([torch.zeros_like(logits), logits], dim=-1)
        return logits.log_softmax(-1)


def fit_logistic_probes(
    features: Float[Tensor, "layers n dim"],
    labels: Int[Tensor, " n"],
    *,
    c: float = 1.0,
    standardize: bool = True,
    intercept: bool = True,
    num_classes: int | None = None,
    tolerance: float = 1e-6,
    max_iterations: int = 1000,
) -> LogisticProbes:
    """The L2-regularised logistic regression of the labels on each layer's features: scikit-learn's, with C = c.

    Minimises c sum_i CE_i + |W|^2 / 2, natural logarithm, the intercept free; three or more classes share a softmax
    with a weight vector each, two have one logit. With `standardize`, features are first centred and divided by the
    training rows' population deviation (by 1 where that is 0), which makes the probabilities invariant to affine maps
    of each feature. They do not depend on the order of rows, nor on how classes are numbered. Constant features give
    the class frequencies. `c` multiplies a sum: regularisation fades as rows are added.

    A layer has converged when max |gradient| <= tolerance c n; one that has not is flagged in `converged`. Computed in
    float32, or in float64 where the features are: large features that are not standardised, or a tolerance far below
    1e-6, need that.

    Raises:
        TypeError: features that are not floating-point, labels that are not integers.
        ValueError: fewer than 2 rows or 2 classes, labels outside 0..num_classes - 1, features that are not finite,
            an option out of range.
    """
    _check_features(features)
    num_classes = _check_labels(labels, features.shape[1], num_classes)
    _check_options(c, tolerance, max_iterations)
    labels = labels.to(features.device)
    classes, targets = labels.unique(return_inverse=True)  # 0..seen - 1
    if len(classes) < 2:
        raise ValueError(f"expected labels of at least 2 classes, got only class {classes.item()}")
    penalty = 1 / (c * len(labels))  # of the objective divided by c n
    found = [
        _fit(group, targets, penalty, standardize, intercept, tolerance, max_iterations)
        for group in features.detach().split(_layers_at_once(features, len(classes)))
    ]
    parts = {name: torch.cat([getattr(part, name) for part in found]) for name in _Fit._fields}
    parts["objective"] = parts["objective"] / penalty
    return LogisticProbes(classes=classes, num_classes=num_classes, **parts)


def macro_f1(labels: Int[Tensor, " n"], predictions: Int[Tensor, " n"]) -> float:
    """Mean F1 over the classes among the labels, each with equal weight, in [0, 1]; 0 for a class never predicted.

    Raises:
        ValueError: no row.
    """
    if not len(labels):
        raise ValueError("expected at least one row, got none")
    classes = labels.unique()
    is_class, is_predicted = labels == classes[:, None], predictions == classes[:, None]  # (classes, n)
    hits = (is_class & is_predicted).sum(1).double()
    return (2 * hits / (is_class.sum(1) + is_predicted.sum(1))).mean().item()


class _Fit(NamedTuple):
    weight: Tensor
    bias: Tensor
    mean: Tensor
    scale: Tensor
    converged: Tensor
    objective: Tensor  # divided by c n
    num_iterations: Tensor


def _fit(
    features: Tensor,
    targets: Tensor,
    penalty: float,
    standardize: bool,
    intercept: bool,
    tolerance: float,
    max_iterations: int,
) -> _Fit:
    """The probes of a few layers, with the scaling of their features."""
    rows, mean, scale = _prepared(features, standardize, center=standardize or intercept)
    rows = rows.to(features.dtype if features.dtype == torch.float64 else torch.float32)
    shift = mean if intercept and not standardize else torch.zeros_like(mean)
    softmax = _Softmax(rows, targets, penalty, intercept, shift)
    found = minimize(
        softmax.gradient,
        softmax.start(),
        softmax.preconditioner(),
        lambda gradient: softmax.largest_gradient(gradient) <= tolerance,
        max_iterations,
    )
    weight, bias = softmax.coefficients(found.point)
    objective = torch.stack(
        [
            _cross_entropy(layer.double() @ w + b, targets) + penalty * w.square().sum() / 2
            for layer, w, b in zip(rows, weight, bias, strict=True)
        ]
    )
    if not standardize:  # weights of the features as they came
        bias = bias - (mean[:, None] @ weight)[:, 0]
        mean = torch.zeros_like(mean)
    return _Fit(weight.to(rows), bias.to(rows), mean, scale, found.converged, objective, found.num_iterations)


class _Softmax:
    """The objective mean CE + penalty |W|^2 / 2 with one weight vector per class, for a few layers.

    A point (layers, inputs, classes) holds the weights of the features' principal axes and, with an intercept, the
    biases below them. The penalty is the same there and X'X is diagonal, so that where all rows have the class shares
    p, as at the start, the Hessian is (diag(p) - p p') x X'X / n + penalty. Its diagonal, inverted among the weights
    that sum to 0 over the classes (gradients do), is the preconditioner.

    For two classes the optimum has W_0 = -W_1 = -w / 2, so |W|^2 = |w|^2 / 2: the problem of one logit w is this one
    with twice the penalty, and its gradient is that of W_1.
    """

    def __init__(self, rows: Tensor, targets: Tensor, penalty: float, intercept: bool, shift: Tensor) -> None:
        self.targets, self.intercept, self.dim = targets, intercept, rows.shape[-1]
        self.shift = shift.to(rows)  # (layers, dim) by which features were centred unasked
        self.row = torch.arange(len(targets), device=rows.device)
        self.share = torch.bincount(targets).to(rows) / len(targets)
        spread, axes = torch.linalg.eigh((rows.mT @ rows).double() / len(targets))
        self.spread, self.axes = spread.clamp(min=0).to(rows), axes.to(rows)
        self.inputs = rows @ self.axes
        self.penalties = rows.new_full((self.dim, 1), penalty * (2 if len(self.share) == 2 else 1))
        if intercept:
            self.inputs = torch.nn.functional.pad(self.inputs, (0, 1), value=1.0)
            self.spread = torch.nn.functional.pad(self.spread, (0, 1), value=1.0)
            self.penalties = torch.nn.functional.pad(self.penalties, (0, 0, 0, 1))

    def start(self) -> Tensor:
        """No weights; the biases that give the class shares."""
        point = self.inputs.new_zeros(len(self.inputs), self.inputs.shape[-1], len(self.share))
        if self.intercept:
            point[:, -1] = self.share.log() - self.share.log().mean()
        return point

    def gradient(self, point: Tensor) -> Tensor:
        residual = (self.inputs @ point).softmax(-1)
        residual[:, self.row, self.targets] -= 1
        return self.inputs.mT @ residual / len(self.targets) + self.penalties * point

    def preconditioner(self) -> Callable[[Tensor], Tensor]:
        inverse = 1 / (self.spread[..., None] * (self.share * (1 - self.share)) + self.penalties)
        inverse_share = inverse / inverse.sum(-1, keepdim=True)

        def precondition(gradient: Tensor) -> Tensor:
            scaled = inverse * gradient
            return scaled - inverse_share * scaled.sum(-1, keepdim=True)

        return precondition

    def largest_gradient(self, gradient: Tensor) -> Tensor:
        """Per layer, in the coordinates of the features the user knows."""
        by_feature, by_bias = self.axes @ gradient[:, : self.dim], gradient[:, self.dim :]
        if self.intercept:
            by_feature = by_feature + self.shift[..., None] * by_bias
        return torch.cat([by_feature, by_bias], dim=1).abs().flatten(1).amax(1)

    def coefficients(self, point: Tensor) -> tuple[Tensor, Tensor]:
        """Weights and centred biases of the rows' own features, float64; of the one logit for two classes."""
        point = point.double()
        weight = self.axes.double() @ point[:, : self.dim]
        bias = point[:, self.dim] if self.intercept else torch.zeros_like(point[:, 0])
        bias = bias - bias.mean(-1, keepdim=True)
        if len(self.share) == 2:
            return weight[..., 1:] - weight[..., :1], bias[..., 1:] - bias[..., :1]
        return weight, bias


def _prepared(features: Tensor, standardize: bool, center: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Centred and scaled rows, their mean and scale, in float64."""
    rows = features.double()
    mean = rows.mean(1) if center else torch.zeros_like(rows[:, 0])
    scale = torch.ones_like(mean)
    if standardize:
        constant = rows.amax(1) == rows.amin(1)  # rounding may give a constant a deviation
        scale = torch.where(constant, scale, rows.std(1, correction=0))
    return (rows - mean[:, None]) / scale[:, None], mean, scale


def _cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    if logits.shape[-1] == 1:
        logits = torch.cat([torch.zeros_like(logits), logits], dim=-1)
    return torch.nn.functional.cross_entropy(logits, targets)


def _layers_at_once(features: Tensor, num_classes: int) -> int:
    """One on a CPU, whose cache then holds it; on a GPU as many as keep the work below about 4 GB."""
    if features.device.type == "cpu":
        return 1
    _, num_rows, dim = features.shape
    return max(1, 2**29 // (num_rows * (2 * dim + 3 * num_classes)))


def _check_features(features: Tensor, like: Tensor | None = None) -> None:
    if not isinstance(features, Tensor) or not features.is_floating_point():
        kind = features.dtype if isinstance(features, Tensor) else type(features).__name__
        raise TypeError(f"expected features to be a floating-point tensor, got {kind}")
    if features.ndim != 3 or not len(features) or not features.shape[2]:
        raise ValueError(f"expected features of shape (layers, n, dim), got {tuple(features.shape)}")
    if like is not None and (len(features), features.shape[2]) != like.shape[:2]:
        layers, dim = like.shape[:2]
        raise ValueError(f"these probes read {layers} layers of width {dim}, got shape {tuple(features.shape)}")
    finite = features.isfinite().flatten(1).all(1)
    if not finite.all():
        raise ValueError(f"expected finite features, got others at layer {int(finite.int().argmin())}")


def _check_labels(labels: Tensor, num_rows: int, num_classes: int | None) -> int:
    """The number of classes."""
    if not isinstance(labels, Tensor) or labels.is_floating_point() or labels.is_complex():
        kind = labels.dtype if isinstance(labels, Tensor) else type(labels).__name__
        raise TypeError(f"expected labels to be an integer tensor, got {kind}")
    if labels.shape != (num_rows,):
        raise ValueError(f"expected one label for each of {num_rows} rows, got shape {tuple(labels.shape)}")
    if num_rows < 2:
        raise ValueError(f"expected at least 2 rows, got {num_rows}")
    low, high = int(labels.min()), int(labels.max())
    num_classes = high + 1 if num_classes is None else num_classes
    if low < 0 or high >= num_classes:
        raise ValueError(f"expected labels in 0..{num_classes - 1}, got {low if low < 0 else high}")
    return num_classes


def _check_options(c: float, tolerance: float, max_iterations: int) -> None:
    for name, value in (("c", c), ("tolerance", tolerance)):
        if not (value > 0 and math.isfinite(value)):
            raise ValueError(f"expected a positive {name}, got {value}")
    if max_iterations < 1:
        raise ValueError(f"expected max_iterations of at least 1, got {max_iterations}")
