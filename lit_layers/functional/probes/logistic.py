"""Logistic probes of all layers at once; ridge probes are in `regression.py`."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Self, TypeVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import cross_entropy

from lit_layers.functional._checks import CHUNK, check_features, check_finite, feature_scaling, widened_chunks
from lit_layers.functional.probes.lbfgs import Minimum, minimize, remaining_decrease


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
    c: Float[Tensor, " layers"]

    def log_proba(self, features: Float[Tensor, "layers n dim"]) -> Float[Tensor, "layers n num_classes"]:
        """Natural logarithms of the classes' probabilities. In float32 or wider."""
        check_features(features, like=self.weight)
        check_finite(features)
        seen = torch.stack([self._seen_log_proba(layer, rows) for layer, rows in enumerate(features)])
        if len(self.classes) == self.num_classes:
            return seen
        return seen.new_full((*seen.shape[:2], self.num_classes), -torch.inf).index_copy(2, self.classes, seen)

    def predict(self, features: Float[Tensor, "layers n dim"]) -> Int[Tensor, "layers n"]:
        """The most probable class of each row; the lowest of several."""
        return self.log_proba(features).argmax(-1)

    def to(self, device: torch.device) -> Self:
        return replace(self, **{name: part.to(device) for name, part in vars(self).items() if isinstance(part, Tensor)})

    def _seen_log_proba(self, layer: int, rows: Tensor) -> Tensor:
        dtype = self.weight.dtype
        scaled = (((chunk[0] - self.mean[layer]) / self.scale[layer]).to(dtype) for chunk in widened_chunks(rows[None]))
        logits = torch.cat([chunk @ self.weight[layer] + self.bias[layer] for chunk in scaled])
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
    device: torch.device | str | None = None,
) -> LogisticProbes:
    """The L2-regularised logistic regression of the labels on each layer's features: scikit-learn's, with C = c.

    Minimises c sum_i CE_i + |W|^2 / 2, natural logarithm, the intercept free; three or more classes share a softmax
    with a weight vector each, two have one logit. With `standardize`, features are first centred and divided by the
    training rows' population deviation (by 1 where that is 0), which makes the probabilities invariant to affine maps
    of each feature. They do not depend on the order of rows, nor on how classes are numbered. Constant features give
    the class frequencies. `c` multiplies a sum: regularisation fades as rows are added.

    A layer has converged when max |gradient| <= tolerance c n; one that has not is flagged in `converged`. The solver
    goes on from there until what is left to gain is about the same share of the objective, which a nearly separable
    problem's gradient does not show. Computed in float32, or in float64 where the features are: large features that are
    not standardised, or a tolerance far below 1e-6, need that.

    On a CPU layers are read one after another, a few rows at a time, and besides the probes about one layer's features
    are held in memory: the features may be a memory-mapped tensor. `device` says where to compute, if not where the
    features are; these are moved as they are needed, and the probes come back to where the features were.

    Raises:
        TypeError: features that are not floating-point, labels that are not integers.
        ValueError: fewer than 2 rows or 2 classes, labels outside 0..num_classes - 1, features that are not finite,
            an option out of range.
    """
    check_features(features)
    _check_options(c, tolerance, max_iterations)
    classes, targets, num_classes = checked_classes(labels, features, num_classes)
    device = features.device if device is None else torch.device(device)
    classes, targets = classes.to(device), targets.to(device)
    parts: list[LogisticProbes] = []
    for layers in layers_at_once(features, len(classes), device):
        group = features[layers].detach().to(device)
        check_finite(group, first_layer=layers.start)
        rows = PrincipalRows(group, standardize=standardize, intercept=intercept)
        softmax = Softmax(rows, targets, torch.full_like(rows.mean[:, 0], 1 / (c * len(targets))))
        minimum = _minimum(softmax, tolerance, max_iterations)
        converged = softmax.largest_gradient(minimum.slope) <= tolerance
        parts.append(softmax.probes(minimum, classes, num_classes, converged=converged))
    return together(parts).to(features.device)


def macro_f1(labels: Int[Tensor, " n"], predictions: Int[Tensor, " n"]) -> float:
    """Mean F1 over the classes among the labels, each with equal weight, in [0, 1]; 0 for a class never predicted.

    Raises:
        ValueError: no row.
    """
    if not len(labels):
        raise ValueError("expected at least one row, got none")
    classes, numbers, num_labelled = labels.unique(return_inverse=True, return_counts=True)
    guessed = torch.searchsorted(classes, predictions).clamp(max=len(classes) - 1)
    num_predicted = guessed[classes[guessed] == predictions].bincount(minlength=len(classes))
    hits = numbers[labels == predictions].bincount(minlength=len(classes)).double()
    return (2 * hits / (num_labelled + num_predicted)).mean().item()


def _minimum(softmax: "Softmax", tolerance: float, max_iterations: int) -> "Minimum":
    start = softmax.start()

    def is_done(point: Tensor, value: Tensor, slope: Tensor, direction: Tensor) -> Tensor:
        near = remaining_decrease(slope, direction) <= 0.03 * tolerance * value.abs()
        # where classes are nearly separable the estimate is 20 times too low; telling the gradient may cost much more
        return near & (softmax.largest_gradient(slope) <= tolerance) if near.any() else near

    return minimize(softmax.evaluate, start, softmax.preconditioner(), is_done, max_iterations)


class PrincipalRows:
    """Features of a few layers, scaled and turned to their principal axes, with a column of ones for the intercept."""

    def __init__(self, features: Tensor, *, standardize: bool, intercept: bool) -> None:
        self.features, self.standardize, self.intercept = features, standardize, intercept
        self.mean, self.scale = feature_scaling(features, standardize=standardize, center=standardize or intercept)
        layers, num_rows, self.dim = features.shape
        # The one copy of the features, filled and turned a few rows at a time.
        dtype = torch.float64 if features.dtype == torch.float64 else torch.float32
        self.inputs = features.new_ones((layers, num_rows, self.dim + intercept), dtype=dtype)
        rows = self.inputs[..., : self.dim]
        gram, since = self.mean.new_zeros(layers, self.dim, self.dim), 0
        for chunk in widened_chunks(features):
            here = rows[:, since : since + chunk.shape[1]]
            here.copy_(chunk.sub_(self.mean[:, None]).div_(self.scale[:, None]))
            gram += here.mT @ here
            since += chunk.shape[1]
        spread, axes = torch.linalg.eigh(gram / num_rows)
        self.spread, self.axes = spread.clamp(min=0), axes.to(dtype)  # (layers, dim), (layers, dim, dim)
        for here in rows.split(max(1, CHUNK // (layers * self.dim)), dim=1):
            here.copy_(here @ self.axes)
        shift = self.mean if intercept and not standardize else torch.zeros_like(self.mean)
        self.shift = shift.to(dtype)  # (layers, dim) by which features were centred unasked


class Softmax:
    """The objective mean CE + penalty |W|^2 / 2 with one weight vector per class, for a few layers.

    A point (layers, inputs, classes) holds the weights of the features' principal axes and, with an intercept, the
    biases below them. The penalty is the same there and X'X is diagonal, so that where all rows have the class shares
    p, as at the start, the Hessian is (diag(p) - p p') x X'X / n + penalty. Its diagonal, inverted among the weights
    that sum to 0 over the classes (gradients do), is the preconditioner.

    For two classes the optimum has W_0 = -W_1 = -w / 2, so |W|^2 = |w|^2 / 2: the problem of one logit w is this one
    with twice the penalty, and its gradient is that of W_1.
    """

    def __init__(self, rows: PrincipalRows, targets: Tensor, penalty: Float[Tensor, " layers"]) -> None:
        self.rows, self.targets, self.penalty = rows, targets, penalty  # of the objective divided by c n
        self.inputs, self.axes, self.dim, self.intercept = rows.inputs, rows.axes, rows.dim, rows.intercept
        self.row = torch.arange(len(targets), device=targets.device)
        self.share = torch.bincount(targets).to(self.inputs.dtype) / len(targets)
        self.spread = rows.spread.to(self.inputs.dtype)
        penalties = (penalty * (2 if len(self.share) == 2 else 1)).to(self.inputs.dtype)
        self.penalties = penalties[:, None, None].expand(-1, self.dim, 1)  # (layers, inputs, 1)
        if self.intercept:
            self.spread = torch.nn.functional.pad(self.spread, (0, 1), value=1.0)
            self.penalties = torch.nn.functional.pad(self.penalties, (0, 0, 0, 1))

    def start(self) -> Tensor:
        """No weights; the biases that give the class shares."""
        point = self.inputs.new_zeros(len(self.inputs), self.inputs.shape[-1], len(self.share))
        if self.intercept:
            point[:, -1] = self.share.log() - self.share.log().mean()
        return point

    def evaluate(self, point: Tensor) -> tuple[Tensor, Tensor]:
        """Objective and gradient; the objective is infinite where a probability underflows."""
        residual = (self.inputs @ point).softmax(-1)
        right = residual[:, self.row, self.targets]
        residual[:, self.row, self.targets] = right - 1
        pull = self.penalties * point
        value = (pull * point).sum((1, 2)) / 2 - right.log().mean(1)
        return value, (self.inputs.mT @ residual).div_(len(self.targets)).add_(pull)

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
            by_feature = by_feature + self.rows.shift[..., None] * by_bias
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

    def probes(
        self,
        minimum: "Minimum",
        classes: Tensor,
        num_classes: int,
        *,
        converged: Tensor,
        objective: Tensor | None = None,
    ) -> LogisticProbes:
        """Of the features as they came. The objective, divided by c n, is computed in float64 unless it is given."""
        rows, dtype = self.rows, self.inputs.dtype
        weight, bias = self.coefficients(minimum.point)
        if objective is None:
            objective = _cross_entropy(rows.features, rows.mean, rows.scale, weight, bias, self.targets)
            objective = objective + self.penalty * weight.square().sum((1, 2)) / 2
        mean = rows.mean
        if not rows.standardize:
            bias = bias - (mean[:, None] @ weight)[:, 0]
            mean = torch.zeros_like(mean)
        return LogisticProbes(
            weight.to(dtype),
            bias.to(dtype),
            mean,
            rows.scale,
            classes,
            num_classes,
            converged,
            objective / self.penalty,
            minimum.num_iterations,
            1 / (self.penalty * len(self.targets)),
        )


_Probes = TypeVar("_Probes", bound=LogisticProbes)


def together(parts: Sequence[_Probes]) -> _Probes:
    """The probes of several groups of layers, of the same classes."""
    layerwise = {field.name for field in fields(parts[0])} - {"classes", "num_classes"}
    return replace(parts[0], **{name: torch.cat([getattr(part, name) for part in parts]) for name in layerwise})


def _cross_entropy(
    features: Tensor, mean: Tensor, scale: Tensor, weight: Tensor, bias: Tensor, targets: Tensor
) -> Tensor:
    """The mean over the rows for each layer, in float64."""
    total, since = torch.zeros_like(mean[:, 0]), 0
    for chunk in widened_chunks(features):
        logits = (chunk.sub_(mean[:, None]).div_(scale[:, None])) @ weight + bias[:, None]
        if logits.shape[-1] == 1:
            logits = torch.cat([torch.zeros_like(logits), logits], dim=-1)
        here = targets[since : since + chunk.shape[1]].expand(len(logits), -1)
        total += cross_entropy(logits.mT, here, reduction="none").sum(1)
        since += chunk.shape[1]
    return total / len(targets)


def layers_at_once(features: Tensor, num_classes: int, device: torch.device | None = None) -> Iterator[slice]:
    """One after another on a CPU, whose cache then holds it; on a GPU as many as keep the work below about 4 GB."""
    layers, num_rows, dim = features.shape
    size = 1
    if (device or features.device).type != "cpu":
        size = max(1, 2**32 // (num_rows * (dim + 4 * num_classes) * max(4, features.element_size())))
    yield from (slice(first, min(layers, first + size)) for first in range(0, layers, size))


def checked_classes(labels: Tensor, features: Tensor, num_classes: int | None) -> tuple[Tensor, Tensor, int]:
    """The classes that there are rows of, the rows' places among these, and how many classes there are in all."""
    num_rows = features.shape[1]
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
    classes, targets = labels.to(features.device).unique(return_inverse=True)
    if len(classes) < 2:
        raise ValueError(f"expected labels of at least 2 classes, got only class {classes.item()}")
    return classes, targets, num_classes


def _check_options(c: float, tolerance: float, max_iterations: int) -> None:
    for name, value in (("c", c), ("tolerance", tolerance)):
        if not (value > 0 and math.isfinite(value)):
            raise ValueError(f"expected a positive {name}, got {value}")
    if max_iterations < 1:
        raise ValueError(f"expected max_iterations of at least 1, got {max_iterations}")
