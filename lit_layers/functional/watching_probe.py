"""Probes to watch a training by: a closed form, calibrated by leave-one-out, and as much of a few steps as helps."""

import copy
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import cross_entropy

from lit_layers.functional._checks import check_features, check_finite
from lit_layers.functional.probe import (
    LogisticProbes,
    Minimum,
    PrincipalRows,
    Softmax,
    checked_classes,
    layers_at_once,
    minimize,
    together,
)

STEPS = 8
SHARES_OF_STEPS = (0.0, 0.25, 0.5, 0.75, 1.0)
CHOOSING_ROWS = 1000
LEAST_GAIN = 1e-3  # nats
GRID = [10 ** (exponent / 2) for exponent in range(-10, 7)]  # of c: 1e-5 to 1e3
FIRST = GRID.index(1e-2)


def fit_watching_probes(
    features: Float[Tensor, "layers n dim"],
    labellings: Sequence[Int[Tensor, " n"]],
    *,
    num_classes: int | None = None,
    device: torch.device | str | None = None,
) -> list[LogisticProbes]:
    """Logistic probes of standardised features that are near the best c's, in seconds; for each labelling a set.

    The first Newton step of `fit_logistic_probes` from the class shares is a closed form for all classes: with m_k the
    sum of the n_k rows of class k and S the covariance of the features, weights (n_k S + I / c)^-1 m_k, which one
    decomposition of S gives for every c and labelling. As in a linear discriminant the class's bias is its log share
    minus q_k, half the product of its weights with m_k / n_k. What it says too loudly two numbers put right: the
    weights are multiplied by `t`, q_k by `b`. For each layer c, t and b are those of the lowest log-loss of up to 1,000
    rows, drawn once, each left out of all sums by closed form, too; c is sought from 0.01 along half decades.

    From there eight L-BFGS steps, or fewer, go down the logistic objective at t c, of which t times the weights are the
    first step where c is small. They help where classes are not Gaussian, and spoil what few rows in many dimensions
    determine. So they are made without up to 1,000 of those rows, at most a fifth of all, and on these it is chosen
    after how many steps, and how much of their change counts: none, a quarter, a half, three quarters or all; or the
    class shares, where these are better. They end with the first step after which no share helps these rows, and are
    not made where the closed form is better than the class shares by less than 0.001 nats or two standard errors, as of
    permuted labels.

    `c` of the result is that of the steps; `converged` is True, since the number of steps is what it should be;
    `objective` is NaN, since it would cost a pass over the rows and is not the lowest.
    Computed as in `fit_logistic_probes`: a layer at a time on a CPU, batched on a GPU; the rows that the steps are made
    on are a second copy of a layer's features. `device` says where, if not where the features are; these are moved as
    they are needed, and the probes come back to where the features were.

    Raises:
        TypeError: features that are not floating-point, labels that are not integers.
        ValueError: fewer than 2 rows or 2 classes, labels outside 0..num_classes - 1, features that are not finite.
    """
    check_features(features)
    classes = [checked_classes(labels, features, num_classes) for labels in labellings]
    device = features.device if device is None else torch.device(device)
    parts: list[list[LogisticProbes]] = [[] for _ in labellings]
    most_classes = max((len(seen) for seen, _, _ in classes), default=0)
    for layers in layers_at_once(features, most_classes, device) if classes else ():
        group = features[layers].detach().to(device)
        check_finite(group, first_layer=layers.start)
        rows = PrincipalRows(group, standardize=True, intercept=True)
        for (seen, targets, count), fitted in zip(classes, parts, strict=True):
            fitted.append(_fit(rows, seen.to(device), targets.to(device), count))
    return [together(part).to(features.device) for part in parts]


def _fit(rows: PrincipalRows, seen: Tensor, targets: Tensor, num_classes: int) -> LogisticProbes:
    chosen, held_out = _rows_to_choose_by(targets)
    forms = [_ClosedForm(rows, layer, targets, chosen) for layer in range(len(rows.inputs))]
    closed = [form.calibrated() for form in forms]
    point = torch.stack([form.point(each) for form, each in zip(forms, closed, strict=True)])
    c = torch.tensor([each.c * (each.loud or 1) for each in closed], dtype=torch.float64, device=targets.device)
    num_iterations = torch.zeros_like(c, dtype=torch.long)
    if held_out:
        out = chosen[:held_out]
        start = torch.stack([form.point(each, without=out) for form, each in zip(forms, closed, strict=True)])
        change, num_iterations = _steps(rows, targets, chosen, held_out, c, start, closed)
        for layer, each in enumerate(change):
            if each is None:
                point[layer, :-1], point[layer, -1] = 0, forms[layer].counts.div(len(targets)).log()
            else:
                point[layer] += each
    softmax = Softmax(rows, targets, 1 / (c * len(targets)))
    unknown, done = torch.full_like(c, torch.nan), torch.ones_like(c, dtype=torch.bool)
    result = Minimum(point, unknown, point, done, num_iterations)
    return softmax.probes(result, seen, num_classes, converged=done, objective=unknown)


def _rows_to_choose_by(targets: Tensor) -> tuple[Tensor, int]:
    """Rows whose class has others, in random order, and how many of the first to make the steps without."""
    order = torch.randperm(len(targets), generator=torch.Generator().manual_seed(0)).to(targets.device)
    counts = torch.bincount(targets)
    chosen = order[counts[targets[order]] > 1][:CHOOSING_ROWS]
    # The steps need a row of each class: its last one stays.
    last = torch.zeros_like(counts).scatter_reduce(0, targets, torch.arange(len(targets)).to(targets), "amax")
    stays = chosen == last[targets[chosen]]
    return torch.cat([chosen[~stays], chosen[stays]]), min(int((~stays).sum()), max(1, len(targets) // 5))


def _steps(
    rows: PrincipalRows,
    targets: Tensor,
    chosen: Tensor,
    held_out: int,
    c: Tensor,
    start: Tensor,
    closed: Sequence["_Calibrated"],
) -> tuple[list[Tensor | None], Tensor]:
    """What L-BFGS on the rows that are not held out changes of `start`, as far as it helps these; and its steps.

    For each layer; None where the class shares do better.
    """
    out = chosen[:held_out]
    inputs, truth = rows.inputs[:, out], targets[out]
    done = [not each.says_something(targets[chosen]) for each in closed]
    lowest = [math.inf] * len(closed)
    change: list[Tensor | None] = [None] * len(closed)

    def look(point: Tensor) -> None:
        moved = point - start
        for layer, each in enumerate(closed):
            loss, share = _best_share(each, inputs[layer] @ moved[layer], truth)
            done[layer] |= point is not start and not share
            if loss < lowest[layer]:
                lowest[layer], change[layer] = loss, None if share is None else share * moved[layer]

    def is_done(point: Tensor, value: Tensor, slope: Tensor, direction: Tensor) -> Tensor:
        if point is not start:
            look(point)
        return torch.tensor(done, device=point.device)

    look(start)
    if all(done):
        return change, torch.zeros_like(c, dtype=torch.long)
    stays = torch.ones_like(targets, dtype=torch.bool)
    stays[out] = False
    fewer = copy.copy(rows)
    fewer.inputs, targets = rows.inputs[:, stays], targets[stays]
    softmax = Softmax(fewer, targets, 1 / (c * len(targets)))
    minimum = minimize(softmax.evaluate, start, softmax.preconditioner(), is_done, STEPS)
    if not all(done):
        look(minimum.point)
    return change, minimum.num_iterations


def _best_share(closed: "_Calibrated", gain: Tensor, targets: Tensor) -> tuple[float, float | None]:
    """The lowest log-loss of the held-out rows and the share of the steps it has; None: the class shares do better."""
    prior, logits = closed.prior[: len(targets)], closed.logits[: len(targets)]
    shares = SHARES_OF_STEPS if gain.any() else (0.0,)
    candidates = {share: logits + share * gain for share in shares} | {None: prior}
    losses = {share: float(cross_entropy(candidate, targets)) for share, candidate in candidates.items()}
    share = min(losses, key=lambda share: losses[share])
    return losses[share], share


class _Calibrated(NamedTuple):
    """The best c, t and b of a layer, and what the rows to choose by have there, each left out."""

    c: float
    loud: float
    pull: float
    prior: Tensor  # (rows, classes)
    logits: Tensor  # (rows, classes)

    def says_something(self, targets: Tensor) -> bool:
        """Whether the rows gain over the class shares, by more than 0.001 nats and two standard errors."""
        gain = cross_entropy(self.prior, targets, reduction="none")
        gain = gain - cross_entropy(self.logits, targets, reduction="none")
        return bool(gain.mean() > max(LEAST_GAIN, 2 * float(gain.std()) / len(targets) ** 0.5))


class _ClosedForm:
    """The closed form of one layer, at any c, and what it gives for rows that it has not seen."""

    def __init__(self, rows: PrincipalRows, layer: int, targets: Tensor, chosen: Tensor) -> None:
        self.rows, self.targets, self.chosen = rows.inputs[layer, :, : rows.dim], targets, chosen
        self.total, self.spread = len(targets), rows.spread[layer]
        self.counts = torch.bincount(targets).double()
        self.sums = self._class_sums(self.rows, targets)  # (dim, classes)

    def _class_sums(self, rows: Tensor, targets: Tensor) -> Tensor:
        sums = self.spread.new_zeros(len(self.counts), rows.shape[1])
        for values, labels in zip(rows.split(4096), targets.split(4096), strict=True):
            sums.index_add_(0, labels, values.double())
        return sums.T

    def point(self, calibrated: _Calibrated, without: Tensor | None = None) -> Tensor:
        """Weights and biases below them (dim + 1, classes), of all rows or of those that are not `without`."""
        c, loud, pull = calibrated[:3]
        sums, counts, mean = self.sums, self.counts, torch.zeros_like(self.spread)
        if without is not None:
            counts = counts - torch.bincount(self.targets[without], minlength=len(counts))
            sums = sums - self._class_sums(self.rows[without], self.targets[without])
            mean = sums.sum(1) / counts.sum()
            sums = sums - counts * mean[:, None]
        weight = sums / (counts * self.spread[:, None] + 1 / c)
        q = (weight * sums).sum(0) / (2 * counts)
        bias = (counts / counts.sum()).log() - pull * q - loud * (mean @ weight)
        return torch.cat([loud * weight, bias[None]]).to(self.rows)

    def without(self, c: float) -> tuple[Tensor, Tensor, Tensor]:
        """Log shares, scores and q (rows, classes) of the rows to choose by, each left out of what gives them.

        By Sherman and Morrison: leaving a row x out takes N / (N - 1) x x' from the scatter about the mean, x from the
        sum of its class, and moves the mean by -x / (N - 1).
        """
        inputs = self.rows[self.chosen].double()  # few rows, of whose numbers most digits cancel at a large c
        mine, rest = self.targets[self.chosen], self.total - 1
        inverse = 1 / (self.counts * (self.total / rest) * self.spread[:, None] + 1 / c)
        weight = inverse * self.sums
        kinds, kind = self.counts.unique(return_inverse=True)
        by_kind = 1 / (kinds * (self.total / rest) * self.spread[:, None] + 1 / c)
        product, leverage = inputs @ weight, (inputs.square() @ by_kind)[:, kind]
        norm = (self.sums * inverse * self.sums).sum(0).repeat(len(inputs), 1)
        counts = self.counts.repeat(len(inputs), 1)
        # The row's own class has a row less, and so another inverse.
        row = torch.arange(len(inputs), device=inputs.device)
        counts[row, mine] -= 1
        own_sums = self.sums.T[mine]
        own = 1 / (counts[row, mine, None] * (self.total / rest) * self.spread + 1 / c)
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
        return share.log().to(self.rows), scores.to(self.rows), (norm / (2 * counts)).to(self.rows)

    def calibrated(self) -> _Calibrated:
        """At the c of the lowest log-loss."""
        place, (lowest, best) = FIRST, self._at(GRID[FIRST], (0.0, 0.0))
        for step in (-1, 1) if len(self.chosen) else ():
            while place == FIRST or 0 <= place + step < len(GRID):
                loss, here = self._at(GRID[place + step], (best.loud, best.pull))
                if loss >= lowest:
                    break
                place, lowest, best = place + step, loss, here
            if place != FIRST:
                break
        return best

    def _at(self, c: float, start: tuple[float, float]) -> tuple[float, _Calibrated]:
        """The lowest log-loss of the rows to choose by, with its t and b."""
        prior, scores, q = self.without(c)
        parts = torch.stack([scores, -q])
        value, loud, pull = calibration(prior, parts, self.targets[self.chosen], start)
        return value, _Calibrated(c, loud, pull, prior, prior + loud * scores - pull * q)


def calibration(
    prior: Float[Tensor, "n classes"],
    parts: Float[Tensor, "2 n classes"],
    targets: Int[Tensor, " n"],
    start: tuple[float, float] = (0.0, 0.0),
) -> tuple[float, float, float]:
    """The lowest mean log-loss of softmax(prior + t parts[0] + b parts[1]), t and b >= 0; t = b = 0 if t were negative.

    A negative b is of no use but to tell rows by how q changed as they were left out. Where all rows are told right, t
    would have no bound: beside the n rows the log-loss counts one of which each class is the label by its share.
    """
    factors = torch.tensor(start, dtype=torch.float64, device=parts.device)

    log_share = prior.log_softmax(-1)
    target = log_share.exp() / (len(targets) + 1)
    target.scatter_add_(1, targets[:, None], target.new_full((len(targets), 1), len(targets) / (len(targets) + 1)))

    def log_loss(factors: Tensor) -> tuple[Tensor, Tensor]:
        log_proba = (prior + torch.tensordot(factors.to(parts), parts, 1)).log_softmax(-1)
        return log_proba, -(target * log_proba).sum(1).double().mean()

    size = float(parts.double().square().mean()) if len(targets) else 0.0
    right = (parts * target).sum(-1)
    log_proba, value = log_loss(factors)
    plain = -float((target * log_share).sum(1).double().mean())
    for _ in range(20):
        share = log_proba.exp()
        mean = (parts * share).sum(-1, keepdim=True)  # (2, n, 1)
        slope = (mean[..., 0] - right).double().mean(1)
        apart = ((parts - mean) * share.sqrt()).double().flatten(1)
        curvature = apart @ apart.T / len(targets)
        if not curvature.diagonal().mean() > 1e-12 * size:
            break  # all rows are told for certain
        curvature += 1e-9 * curvature.diagonal().mean() * torch.eye(2).to(curvature)
        step = torch.linalg.solve(curvature, slope)
        if step[1] > factors[1]:  # b stays at least 0
            step[0] = (slope[0] - curvature[0, 1] * factors[1]) / curvature[0, 0]
            step[1] = factors[1]
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
