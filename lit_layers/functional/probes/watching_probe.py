"""Probes to watch a training by: a shrunk linear discriminant and a few steps from there to the logistic optimum."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import cross_entropy

from lit_layers.functional.probes.logistic import LogisticProbes, PrincipalRows, Softmax, checked_classes

PENALTIES = [10 ** (exponent / 2) for exponent in range(2, -7, -1)]  # from 10 to 0.001, the strongest first
SHRINKAGES = [10.0, 30.0, 3.0, 1.0]  # rows at the mean of all that each class has besides its own
NUM_FOLDS = 5
ENOUGH = 500  # rows held out: if one fold has as many, the others are not used
STEPS, COMPONENTS = 4, 128
LEAST_GAIN = 1e-3  # nats


def fit_watching_probes(
    features: Float[Tensor, "layers n dim"],
    labellings: Sequence[Int[Tensor, " n"]],
    *,
    num_classes: int | None = None,
    groups: Int[Tensor, " n"] | None = None,
    device: torch.device | str | None = None,
) -> list[LogisticProbes]:
    """Fit logistic probes of standardised features that are near the best c's, in seconds; one set for each labelling.

    They begin with a linear discriminant. With W the mean covariance within classes, n_k the rows of class k and d_k
    their mean less that of all rows, shrunk by n_k / (n_k + r), class k has the weights (W + l)^-1 d_k and the bias
    log(n_k / n) - q_k, q_k half the product of its weights with d_k. The weights and q_k are multiplied by a factor t,
    as few rows in many dimensions make a discriminant too confident.

    For each layer l, r and t have the lowest log-loss on rows that are held out of all moments. A fifth is held out,
    once if that makes 500 rows, else each fifth in turn. Rows of one number in `groups`, such as those of one text, are
    held out together; the result then does not depend on the order of rows. If no t gains 0.001 nats over the class
    shares, the probe gives those.

    Classes of states are not Gaussian, so four steps of L-BFGS-B on all rows follow. They minimise the mean log-loss
    plus |W - W_0|^2 / (2 c n), W_0 the weights of the discriminant, along the 128 largest principal components. Here c
    is t K / (l n) for K classes: the c at which a logistic probe holds the weights of a class of mean size as strongly
    as the discriminant does.

    `c` of the result is that c. `converged` is True, and `objective` is NaN, as the number of steps is fixed. `device`
    says where to compute, if not where the features are; the probes come back to where the features were.

    Source: Friedman, Regularized discriminant analysis, 1989, for W + l. The factor and the steps are ours.

    Raises:
        ValueError: fewer than 2 classes, labels outside 0..num_classes - 1, features that are not finite.
    """
    device = features.device if device is None else torch.device(device)
    folds = fold_numbers(features.shape[1], groups).to(device)
    fitted: list[list[LogisticProbes]] = [[] for _ in labellings]
    for layer in range(len(features)):
        rows = PrincipalRows(features[layer].detach().to(device), layer)  # serves all labellings
        for labels, probes in zip(labellings, fitted, strict=True):
            classes, targets, count = checked_classes(labels, features, num_classes)
            point, c = _fit(rows, targets.to(device), folds)
            numbers = {"converged": True, "objective": math.nan, "c": c}
            probes.append(rows.probes(point, classes.to(device), count, numbers))
    return [LogisticProbes.stacked(probes).to(features.device) for probes in fitted]


def fold_numbers(num_rows: int, groups: Int[Tensor, " n"] | None = None) -> Int[Tensor, " n"]:
    """Return the fold of each row, the same for all rows of a group."""
    numbers = torch.arange(num_rows) if groups is None else groups.cpu().unique(return_inverse=True)[1]
    order = torch.randperm(int(numbers.max()) + 1, generator=torch.Generator().manual_seed(0))
    return order[numbers] % NUM_FOLDS


def held_out_rows(targets: Int[Tensor, " n"], folds: Int[Tensor, " n"]) -> list[Tensor]:
    """Return the mask (n,) of each fold that is used: one of at least 500 rows, or all five.

    A row stays in if its class would have none. The list is empty if no row can be spared.
    """
    masks = []
    for number in range(NUM_FOLDS):
        held = folds == number
        held &= torch.bincount(targets[~held], minlength=int(targets.max()) + 1)[targets] > 0
        masks.append(held)
    if masks[0].sum() >= ENOUGH:
        return masks[:1]
    return [held for held in masks if held.any()]


class _Moments(NamedTuple):
    """Sums over rows in the principal axes of all rows, in float64."""

    counts: Tensor  # (classes,)
    sums: Tensor  # (dim, classes)
    squares: Tensor  # (dim, dim): of the products of two inputs

    def without(self, others: "_Moments") -> "_Moments":
        return _Moments(*(all_rows - theirs for all_rows, theirs in zip(self, others, strict=True)))


def _class_sums(inputs: Tensor, targets: Tensor, num_classes: int) -> tuple[Tensor, Tensor]:
    """Return the rows (classes,) of each class and their sums (dim, classes)."""
    sums = inputs.new_zeros(num_classes, inputs.shape[1], dtype=torch.float64)
    for rows, labels in zip(inputs.split(4096), targets.split(4096), strict=True):
        sums.index_add_(0, labels, rows.double())
    return torch.bincount(targets, minlength=num_classes).double(), sums.T


class _Discriminant:
    """The linear discriminant of some rows, among them one of each class at least."""

    def __init__(self, moments: _Moments) -> None:
        self.counts, num_rows = moments.counts, moments.counts.sum()
        self.log_share, self.mean = (self.counts / num_rows).log(), moments.sums.sum(1) / num_rows
        self.apart = moments.sums / self.counts - self.mean[:, None]  # d_k (dim, classes)
        of_classes = moments.sums / self.counts.sqrt()
        self.within = (moments.squares - of_classes @ of_classes.T) / num_rows

    def weight(self, penalty: float) -> Tensor:
        """Return the weights (dim, classes) of d_k that is not shrunk."""
        held = self.within + penalty * torch.eye(len(self.within)).to(self.within)
        return torch.cholesky_solve(self.apart, torch.linalg.cholesky(held))

    def shrunk(self, weight: Tensor, shrinkage: float) -> tuple[Tensor, Tensor]:
        """Return what is left of the weights as a share (classes,), and q (classes,)."""
        share = self.counts / (self.counts + shrinkage)
        return share, share.square() * (weight * self.apart).sum(0) / 2


class _Choice(NamedTuple):
    """What rows that are held out say of a discriminant: their log-loss, and where it is the lowest."""

    loss: float
    penalty: float
    shrinkage: float
    factor: float


def _fit(rows: PrincipalRows, targets: Tensor, folds: Tensor) -> tuple[Tensor, float]:
    """Return weights and biases (dim + 1, classes) in the principal axes, and c."""
    inputs, num_rows, num_classes = rows.inputs, len(targets), int(targets.max()) + 1
    whole = _Moments(*_class_sums(inputs, targets, num_classes), torch.diag(rows.spread * num_rows))
    parts, held = [], []
    for mask in held_out_rows(targets, folds):
        fold = inputs[mask]
        out = _Moments(*_class_sums(fold, targets[mask], num_classes), fold.double().T @ fold.double())
        parts.append(_Discriminant(whole.without(out)))
        held.append((fold, targets[mask]))
    choice = _best_choice(parts, held)
    c = (choice.factor or 1) * num_classes / (choice.penalty * num_rows)
    discriminant = _Discriminant(whole)
    weight = discriminant.weight(choice.penalty)
    share, q = discriminant.shrunk(weight, choice.shrinkage)
    weight, bias = choice.factor * share * weight, discriminant.log_share - choice.factor * q
    point = torch.cat([weight, bias[None]])
    if choice.factor:
        first = max(0, inputs.shape[1] - COMPONENTS)
        offset = inputs @ weight.to(inputs) + bias.to(inputs)
        moved, spread = inputs[:, first:].contiguous(), rows.spread[first:]
        softmax = Softmax(moved, targets, spread, 1 / (c * num_rows), offset=offset)
        point[first:] += softmax.minimize(torch.zeros_like(point[first:]), STEPS).point
    return point, c


def _best_choice(parts: Sequence[_Discriminant], held: Sequence[tuple[Tensor, Tensor]]) -> _Choice:
    """Return the penalty, then the shrinkage at it, then the factor of the lowest log-loss of the held-out rows."""
    best, weights, scores = _Choice(math.inf, PENALTIES[0], SHRINKAGES[0], 0.0), [], []
    if not parts:
        return best
    truth = torch.cat([targets for _, targets in held])
    prior = torch.cat(
        [part.log_share.expand(len(rows), -1).to(rows) for part, (rows, _) in zip(parts, held, strict=True)]
    )

    def at(penalty: float, shrinkage: float, weights: list[Tensor], scores: list[Tensor]) -> _Choice:
        shrunk = [part.shrunk(weight, shrinkage) for part, weight in zip(parts, weights, strict=True)]
        whole = torch.cat([each * share.to(each) - q.to(each) for each, (share, q) in zip(scores, shrunk, strict=True)])
        factor = best_factor(prior, whole, truth)
        return _Choice(float(cross_entropy(prior + factor * whole, truth)), penalty, shrinkage, factor)

    for penalty in PENALTIES:  # from strong to weak: the log-loss is taken to have one valley
        new = [part.weight(penalty) for part in parts]
        told = [(rows - part.mean.to(rows)) @ w.to(rows) for part, w, (rows, _) in zip(parts, new, held, strict=True)]
        choice = at(penalty, SHRINKAGES[0], new, told)
        if choice.loss >= best.loss:
            break
        best, weights, scores = choice, new, told
    best = min(best, *(at(best.penalty, shrinkage, weights, scores) for shrinkage in SHRINKAGES[1:]))
    gain = float(cross_entropy(prior, truth)) - best.loss
    return best if gain > LEAST_GAIN else best._replace(factor=0.0)


def best_factor(
    prior: Float[Tensor, "n classes"], scores: Float[Tensor, "n classes"], targets: Int[Tensor, " n"]
) -> float:
    """Return the t with the lowest mean log-loss of softmax(prior + t scores), to 7%: from 1/256 to 16, or 0.

    The log-loss is convex in t. It would have no minimum if all rows were classified correctly. So one row is counted
    besides the n rows, of which each class is the label by its share.
    """
    by_share = (prior.softmax(-1) * scores).sum(-1).mean()
    right = (scores.gather(1, targets[:, None]).sum() + by_share) / (len(targets) + 1)

    def is_below(factor: float) -> bool:
        """Whether the log-loss falls here as the factor rises."""
        return bool(((prior + factor * scores).softmax(-1) * scores).sum(-1).mean() < right)

    low, high = -8.0, 4.0  # of its logarithm with base 2
    if not is_below(2**low):
        return 0.0
    for _ in range(6):
        middle = (low + high) / 2
        low, high = (middle, high) if is_below(2**middle) else (low, middle)
    return float(2 ** ((low + high) / 2))
