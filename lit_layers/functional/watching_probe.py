"""Probes to watch a training by: a closed form, its penalty and calibration by leave-one-out, and a few steps more."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lit_layers.functional._checks import check_features, check_finite
from lit_layers.functional.probe import (
    LogisticProbes,
    PrincipalRows,
    Softmax,
    checked_classes,
    layers_at_once,
    minimize,
    together,
)

STEPS = 5
CHOOSING_ROWS = 1000
GRID = [10 ** (exponent / 2) for exponent in range(-10, 7)]  # of c: 1e-5 to 1e3
FIRST = GRID.index(1e-2)


def fit_watching_probes(
    features: Float[Tensor, "layers n dim"],
    labellings: Sequence[Int[Tensor, " n"]],
    *,
    num_classes: int | None = None,
) -> list[LogisticProbes]:
    """Logistic probes of standardised features that are near the best c's, in seconds; for each labelling a set.

    The first Newton step of `fit_logistic_probes` from the class shares is a closed form for all classes: with m_k the
    sum of the n_k rows of class k and S the covariance of the features, weights (n_k S + I / c)^-1 m_k, which one
    decomposition of S gives for every c and labelling. As in a linear discriminant the class's bias is its log share
    minus q_k, half the product of its weights with m_k / n_k. What it says too loudly two numbers put right: the
    weights are multiplied by `t`, q_k by `b`. For each layer c, t and b are those of the lowest log-loss of up to 1,000
    evenly spread rows, each left out of all sums by closed form, too; c is sought from 0.01 along half decades. From
    there go five L-BFGS steps down the logistic objective at t c, of which t times the weights are the first step where
    c is small. Features that say nothing of the labels leave it with the class shares.

    `c` of the result is that of the steps; `converged` is True, since the number of steps is what it should be.
    Computed as in `fit_logistic_probes`: a layer at a time on a CPU, batched on a GPU.

    Raises:
        TypeError: features that are not floating-point, labels that are not integers.
        ValueError: fewer than 2 rows or 2 classes, labels outside 0..num_classes - 1, features that are not finite.
    """
    check_features(features)
    classes = [checked_classes(labels, features, num_classes) for labels in labellings]
    parts: list[list[LogisticProbes]] = [[] for _ in labellings]
    for layers in layers_at_once(features, max(len(seen) for seen, _, _ in classes)):
        group = features[layers].detach()
        check_finite(group, first_layer=layers.start)
        rows = PrincipalRows(group, standardize=True, intercept=True)
        for (seen, targets, count), fitted in zip(classes, parts, strict=True):
            fitted.append(_fit(rows, seen, targets, count))
    return [together(part) for part in parts]


def _fit(rows: PrincipalRows, seen: Tensor, targets: Tensor, num_classes: int) -> LogisticProbes:
    closed = [_ClosedForm(rows, layer, targets).calibrated() for layer in range(len(rows.inputs))]
    c = torch.tensor([each.c for each in closed], dtype=torch.float64, device=targets.device)
    softmax = Softmax(rows, targets, 1 / (c * len(targets)))
    start = torch.stack([torch.cat([each.weight, each.bias[None]]) for each in closed]).to(rows.inputs)
    says_nothing = (start[:, : rows.dim] == 0).flatten(1).all(1)

    def is_done(point: Tensor, value: Tensor, slope: Tensor, direction: Tensor) -> Tensor:
        return says_nothing

    minimum = minimize(softmax.evaluate, start, softmax.preconditioner(), is_done, STEPS)
    converged, value = torch.ones_like(minimum.done), minimum.value.double()
    return softmax.probes(minimum, seen, num_classes, converged=converged, objective=value)


class _Calibrated(NamedTuple):
    c: float
    weight: Tensor  # (dim, classes) of the principal axes
    bias: Tensor  # (classes,)


class _ClosedForm:
    """The closed form of one layer, at any c, and what it gives for rows that it has not seen."""

    def __init__(self, rows: PrincipalRows, layer: int, targets: Tensor) -> None:
        self.rows, self.targets = rows.inputs[layer, :, : rows.dim], targets
        self.total, self.spread = len(targets), rows.spread[layer]
        self.counts = torch.bincount(targets).double()
        sums = self.spread.new_zeros(len(self.counts), rows.dim)
        for values, labels in zip(self.rows.split(4096), targets.split(4096), strict=True):
            sums.index_add_(0, labels, values.double())
        self.sums = sums.T  # (dim, classes)
        repeated = (self.counts[targets] > 1).nonzero()[:, 0]  # without its only row a class is none
        every = max(1, -(-len(repeated) // CHOOSING_ROWS))
        self.chosen = repeated[::every]

    def weight(self, c: float) -> Tensor:
        return self.sums / (self.counts * self.spread[:, None] + 1 / c)

    def without(self, c: float) -> tuple[Tensor, Tensor, Tensor]:
        """Log shares, scores and q (rows, classes) of the rows to choose by, each left out of what gives them.

        By Sherman and Morrison: leaving a row x out takes N / (N - 1) x x' from the scatter about the mean, x from the
        sum of its class, and moves the mean by -x / (N - 1).
        """
        inputs = self.rows[self.chosen]
        mine, rest = self.targets[self.chosen], self.total - 1
        inverse = 1 / (self.counts * (self.total / rest) * self.spread[:, None] + 1 / c)
        weight = (inverse * self.sums).to(inputs)
        kinds, kind = self.counts.unique(return_inverse=True)
        by_kind = 1 / (kinds * (self.total / rest) * self.spread[:, None] + 1 / c)
        product, leverage = inputs @ weight, (inputs.square() @ by_kind.to(inputs))[:, kind]
        norm = (self.sums * inverse * self.sums).sum(0).to(inputs).repeat(len(inputs), 1)
        counts = self.counts.to(inputs).repeat(len(inputs), 1)
        # The row's own class has a row less, and so another inverse.
        row = torch.arange(len(inputs), device=inputs.device)
        counts[row, mine] -= 1
        own_sums = self.sums.T[mine].to(inputs)
        own = 1 / (counts[row, mine, None] * (self.total / rest) * self.spread.to(inputs) + 1 / c)
        product[row, mine] = (inputs * own * own_sums).sum(1)
        leverage[row, mine] = (inputs.square() * own).sum(1)
        norm[row, mine] = (own_sums.square() * own).sum(1)
        share, factor = counts / rest, self.total / rest
        moved = share.clone()  # by how many x the sum of each class moves
        moved[row, mine] -= 1
        along = product + moved * leverage
        outside = 1 - share * factor * leverage
        scores = factor * along / outside
        norm = norm + moved * (2 * product + moved * leverage) + share * factor * along.square() / outside
        return share.log(), scores, norm / (2 * counts)

    def calibrated(self) -> _Calibrated:
        """At the c of the lowest log-loss."""
        place, best = FIRST, (torch.inf, 0.0, 0.0)
        if len(self.chosen):
            best = self._log_loss(GRID[FIRST], (0.0, 0.0))
            for step in (-1, 1):
                while place == FIRST or 0 <= place + step < len(GRID):
                    found = self._log_loss(GRID[place + step], best[1:])
                    if found[0] >= best[0]:
                        break
                    place, best = place + step, found
                if place != FIRST:
                    break
        c, (_, loud, pull) = GRID[place], best
        weight = self.weight(c)
        q = (weight * self.sums).sum(0) / (2 * self.counts)
        return _Calibrated(c * (loud or 1), loud * weight, (self.counts / self.total).log() - pull * q)

    def _log_loss(self, c: float, start: tuple[float, float]) -> tuple[float, float, float]:
        """The lowest of the rows to choose by, with its t and b."""
        prior, scores, q = self.without(c)
        mine = self.targets[self.chosen]
        return calibration(prior, torch.stack([scores, -q]), mine, start)


def calibration(
    prior: Float[Tensor, "n classes"],
    parts: Float[Tensor, "2 n classes"],
    targets: Int[Tensor, " n"],
    start: tuple[float, float] = (0.0, 0.0),
) -> tuple[float, float, float]:
    """The lowest mean log-loss of softmax(prior + t parts[0] + b parts[1]), t and b; these are 0 where t would not be
    positive."""
    factors = torch.tensor(start, dtype=torch.float64, device=parts.device)

    def log_loss(factors: Tensor) -> tuple[Tensor, Tensor]:
        log_proba = (prior + torch.tensordot(factors.to(parts), parts, 1)).log_softmax(-1)
        return log_proba, -log_proba.gather(1, targets[:, None]).double().mean()

    right = parts.gather(2, targets.expand(2, -1)[..., None])[..., 0]
    log_proba, value = log_loss(factors)
    plain = -float(prior.log_softmax(-1).gather(1, targets[:, None]).double().mean())
    for _ in range(20):
        share = log_proba.exp()
        mean = (parts * share).sum(-1)  # (2, n)
        slope = (mean - right).double().mean(1)
        second = (parts * share).flatten(1) @ parts.flatten(1).T
        curvature = (second - mean @ mean.T).double() / len(targets)
        curvature += (1e-9 * curvature.diagonal().mean() + 1e-300) * torch.eye(2).to(curvature)
        step = torch.linalg.solve(curvature, slope)
        for _ in range(30):
            new_log_proba, new_value = log_loss(factors - step)
            if new_value <= value:
                break
            step = step / 2
        else:
            break
        gain, factors = float(value - new_value), factors - step
        log_proba, value = new_log_proba, new_value
        if gain <= 1e-4:
            break
    loud, pull = factors.tolist()
    return (float(value), loud, pull) if loud > 0 else (plain, 0.0, 0.0)
