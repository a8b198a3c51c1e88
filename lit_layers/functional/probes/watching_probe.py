"""Probes to watch a training by: a closed form, calibrated on rows held out, and as much of a few steps as helps."""

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import cross_entropy

from lit_layers.functional._checks import check_features, check_finite
from lit_layers.functional.probes.lbfgs import Minimum, minimize
from lit_layers.functional.probes.logistic import (
    LogisticProbes,
    PrincipalRows,
    Softmax,
    checked_classes,
    layers_at_once,
    together,
)

C_GRID = [10 ** (exponent / 2) for exponent in range(-10, 7)]  # 1e-5 to 1e3
NUM_FOLDS = 5
ENOUGH = 1000  # rows held out: with as many in one fold, that one is enough
STEPS = 12
SHARES_OF_STEPS = (0.25, 0.5, 0.75, 1.0)
LEAST_GAIN = 1e-3  # nats
# What the steps move: along so many principal components the weights of so many classes at least, and of those that
# have this share of the rows.
COMPONENTS, LEAST_MOVED, COVERED = 128, 100, 0.8
FIRST = C_GRID.index(1e-2)


def fit_watching_probes(
    features: Float[Tensor, "layers n dim"],
    labellings: Sequence[Int[Tensor, " n"]],
    *,
    num_classes: int | None = None,
    groups: Int[Tensor, " n"] | None = None,
    device: torch.device | str | None = None,
) -> list[LogisticProbes]:
    """Logistic probes of standardised features that are near the best c's, in seconds; for each labelling a set.

    The first Newton step of `fit_logistic_probes` from the class shares is a closed form for all classes: with m_k the
    sum of the n_k rows of class k and S the covariance of the features, weights (n_k S + I / c)^-1 m_k, which one
    decomposition of S gives for every c and labelling. As in a linear discriminant the class's bias is its log share
    minus q_k, half the product of its weights with m_k / n_k. What it says too loudly two numbers put right: the
    weights are multiplied by `t`, q_k by `b`. For each layer c, t and b are those of the lowest log-loss of rows held
    out of all of this, mean and covariance included; c is sought from 0.01 along half decades. Held out is a fifth,
    once where that makes 1,000 rows, else each fifth in turn; and those of one number in `groups`, such as those of one
    text, together.

    From there twelve L-BFGS steps, or fewer, go down the logistic objective at t c, of which t times the weights
    are the first step where c is small. They move the weights of the most frequent classes, at least 100 and those
    that have 80% of the rows, along the 128 largest principal components. Steps help where classes are not
    Gaussian, and spoil what few rows in many dimensions determine. So they are first made without the first fifth,
    and on its rows it is chosen how many they are, and how much of their change counts: none, a quarter, a half,
    three quarters or all. They end with the first step after which no share helps these rows, and are not made
    where the closed form is better than the class shares by less than 0.001 nats or two standard errors, as of
    permuted labels. Then so many are made on all rows, and so much of their change counts.

    `c` of the result is that of the steps; `converged` is True, since the number of steps is what it should be;
    `objective` is NaN, since it would cost a pass over the rows and is not the lowest.
    Computed as in `fit_logistic_probes`: a layer at a time on a CPU, batched on a GPU. `device` says where, if not
    where the features are; these are moved as they are needed, and the probes come back to where the features were.

    Raises:
        TypeError: features that are not floating-point, labels that are not integers.
        ValueError: fewer than 2 rows or 2 classes, labels outside 0..num_classes - 1, features that are not finite,
            groups of another number of rows.
    """
    check_features(features)
    device = features.device if device is None else torch.device(device)
    problems = []
    for labels in labellings:
        seen, targets, count = checked_classes(labels, features, num_classes)
        masks = [mask.to(device) for mask in held_out_rows(targets, groups)]
        problems.append(_Problem(seen.to(device), targets.to(device), count, masks))
    if not problems:
        return []
    fold, num_folds = fold_numbers(features.shape[1], groups).to(device), max(len(each.held_out) for each in problems)
    parts: list[list[LogisticProbes]] = [[] for _ in problems]
    for layers in layers_at_once(features, max(len(each.seen) for each in problems), device):
        group = features[layers].detach().to(device)
        check_finite(group, first_layer=layers.start)
        rows = PrincipalRows(group, standardize=True, intercept=True)
        # What is decomposed serves all labellings.
        spaces = [[_space(rows, layer, fold == number) for number in range(num_folds)] for layer in range(len(group))]
        for problem, fitted in zip(problems, parts, strict=True):
            fitted.append(_fit(rows, spaces, problem))
    return [together(part).to(features.device) for part in parts]


def fold_numbers(num_rows: int, groups: Int[Tensor, " n"] | None = None) -> Int[Tensor, " n"]:
    """The fold of each row, the same for all rows of a group."""
    if groups is not None and groups.shape != (num_rows,):
        raise ValueError(f"expected a group for each of {num_rows} rows, got shape {tuple(groups.shape)}")
    numbers = torch.arange(num_rows) if groups is None else groups.cpu().unique(return_inverse=True)[1]
    order = torch.randperm(int(numbers.max()) + 1, generator=torch.Generator().manual_seed(0))
    return order[numbers] % NUM_FOLDS


def held_out_rows(targets: Int[Tensor, " n"], groups: Int[Tensor, " n"] | None = None) -> list[Tensor]:
    """Masks (n,) of the rows of each fold: one fold of at least 1,000, or five; none where no row can be spared."""
    fold = fold_numbers(len(targets), groups).to(targets.device)
    masks = []
    for number in range(NUM_FOLDS):
        held = fold == number
        held &= torch.bincount(targets[~held], minlength=int(targets.max()) + 1)[targets] > 0
        masks.append(held)
    if masks[0].sum() >= ENOUGH:
        return masks[:1]
    return masks if sum(int(held.sum()) for held in masks) >= 2 else []


class _Problem(NamedTuple):
    """A labelling of the rows."""

    seen: Tensor  # (classes,) labels that there are rows of
    targets: Tensor  # (n,) places among them
    num_classes: int
    held_out: list[Tensor]  # (n,) of each fold the rows of whose class others are left


class _Space(NamedTuple):
    """Where the rows of a layer lie, in the principal axes of all of them."""

    mean: Tensor  # (dim,)
    axes: Tensor | None  # (dim, dim) of their covariance; None: those of all rows
    spread: Tensor  # (dim,)


def _space(rows: PrincipalRows, layer: int, out: Tensor) -> _Space:
    """Of the rows that are not `out`."""
    fold, total = rows.inputs[layer, out, : rows.dim].double(), rows.inputs.shape[1]
    rest = total - len(fold)
    mean = -fold.sum(0) / rest
    scatter = torch.diag(total * rows.spread[layer]) - fold.T @ fold
    spread, axes = torch.linalg.eigh(scatter / rest - torch.outer(mean, mean))
    return _Space(mean, axes, spread.clamp(min=0))


class _Calibrated(NamedTuple):
    """The best c, t and b of a layer, and what the rows held out have there."""

    c: float
    loud: float
    pull: float
    prior: Tensor  # (rows, classes)
    logits: Tensor  # (rows, classes)

    def beats_class_shares(self, targets: Tensor) -> bool:
        """Whether the rows gain over the class shares, by more than 0.001 nats and two standard errors."""
        gain = cross_entropy(self.prior, targets, reduction="none")
        gain = gain - cross_entropy(self.logits, targets, reduction="none")
        return bool(gain.mean() > max(LEAST_GAIN, 2 * float(gain.std()) / len(targets) ** 0.5))


class _ClosedForm:
    """The closed form of some rows of a layer, at any c, and the rows that are held out of it."""

    def __init__(self, space: _Space, sums: Tensor, counts: Tensor, held_out: Tensor) -> None:
        """`sums` (dim, classes) of the classes' rows and the held-out rows lie in the principal axes of all rows."""
        self.space, self.counts, self.log_share = space, counts, (counts / counts.sum()).log()
        self.sums = sums - counts * space.mean[:, None]
        self.held_out = held_out - space.mean.to(held_out)
        if space.axes is not None:
            self.sums, self.held_out = space.axes.T @ self.sums, self.held_out @ space.axes.to(held_out)

    def at(self, c: float) -> tuple[Tensor, Tensor]:
        """Weights (dim, classes) in the axes of the space, and q (classes,)."""
        weight = self.sums / (self.counts * self.space.spread[:, None] + 1 / c)
        return weight, (weight * self.sums).sum(0) / (2 * self.counts)

    def parts(self, c: float) -> tuple[Tensor, Tensor, Tensor]:
        """Log shares, scores and q of the held-out rows (rows, classes)."""
        weight, q = self.at(c)
        scores = self.held_out @ weight.to(self.held_out)
        return self.log_share.to(scores).expand_as(scores), scores, q.to(scores).expand_as(scores)

    def point(self, calibrated: _Calibrated) -> Tensor:
        """Weights and biases below them (dim + 1, classes), in the principal axes of all rows."""
        weight, q = self.at(calibrated.c)
        weight = calibrated.loud * (weight if self.space.axes is None else self.space.axes @ weight)
        bias = self.log_share - calibrated.pull * q - self.space.mean @ weight
        return torch.cat([weight, bias[None]]).to(self.held_out)


def _fit(rows: PrincipalRows, spaces: Sequence[Sequence[_Space]], problem: _Problem) -> LogisticProbes:
    targets, masks = problem.targets, problem.held_out
    truth = torch.cat([targets[mask] for mask in masks]) if masks else targets[:0]
    points, starts, closed = [], [], []
    for layer in range(len(rows.inputs)):
        inputs, counts = rows.inputs[layer, :, : rows.dim], torch.bincount(targets).double()
        sums = _class_sums(inputs, targets, len(counts))
        whole = _ClosedForm(_Space(torch.zeros_like(sums[:, 0]), None, rows.spread[layer]), sums, counts, inputs[:0])
        forms = []
        for mask, space in zip(masks, spaces[layer], strict=False):
            out, labels = inputs[mask], targets[mask]
            fewer = counts - torch.bincount(labels, minlength=len(counts))
            forms.append(_ClosedForm(space, sums - _class_sums(out, labels, len(counts)), fewer, out))
        closed.append(_calibrated(forms or [whole], truth))
        points.append(whole.point(closed[-1]))
        starts.append((forms or [whole])[0].point(closed[-1]))
    point = torch.stack(points)
    c = torch.tensor([each.c * (each.loud or 1) for each in closed], dtype=torch.float64, device=targets.device)
    num_iterations = torch.zeros_like(c, dtype=torch.long)
    done = torch.tensor([not (masks and each.beats_class_shares(truth)) for each in closed], device=targets.device)
    if not done.all() and masks[0].any():
        tried = _TriedSteps(rows, targets, masks[0], c, torch.stack(starts), closed, done)
        minimum = minimize(tried.evaluate, tried.none, tried.precondition, tried.look, STEPS)
        tried.look(minimum.point)
        num_iterations, number, share = minimum.num_iterations, tried.number, tried.share_of_change
        del tried
        if number.any():
            steps = _Steps(rows, targets, torch.ones_like(masks[0]), c, point)
            point[:, steps.first :, steps.moved] += share * steps.after(number)[..., 1:]
    unknown, done = torch.full_like(c, torch.nan), torch.ones_like(c, dtype=torch.bool)
    result = Minimum(point, unknown, point, done, num_iterations)
    softmax = Softmax(rows, targets, 1 / (c * len(targets)))
    return softmax.probes(result, problem.seen, problem.num_classes, converged=done, objective=unknown)


def _class_sums(inputs: Tensor, targets: Tensor, num_classes: int) -> Tensor:
    """(dim, classes), float64."""
    sums = inputs.new_zeros(num_classes, inputs.shape[1], dtype=torch.float64)
    for values, labels in zip(inputs.split(4096), targets.split(4096), strict=True):
        sums.index_add_(0, labels, values.double())
    return sums.T


def _calibrated(forms: Sequence[_ClosedForm], targets: Tensor) -> _Calibrated:
    """At the c of the lowest log-loss of the held-out rows of all forms."""

    def at(c: float, start: tuple[float, float]) -> tuple[float, _Calibrated]:
        prior, scores, q = (torch.cat(parts) for parts in zip(*(form.parts(c) for form in forms), strict=True))
        value, loud, pull = calibration(prior, torch.stack([scores, -q]), targets, start)
        return value, _Calibrated(c, loud, pull, prior, prior + loud * scores - pull * q)

    place, (lowest, best) = FIRST, at(C_GRID[FIRST], (0.0, 0.0))
    for step in (-1, 1) if len(targets) else ():
        while place == FIRST or 0 <= place + step < len(C_GRID):
            loss, here = at(C_GRID[place + step], (best.loud, best.pull))
            if loss >= lowest:
                break
            place, lowest, best = place + step, loss, here
        if place != FIRST:
            break
    return best


class _Steps:
    """L-BFGS on the rows `kept` of a few layers.

    Beside the classes whose weights move, all others are one, column 0, that stays: what they say of a row, the
    logarithm of their summed exponentials, is computed once.
    """

    def __init__(self, rows: PrincipalRows, targets: Tensor, kept: Tensor, c: Tensor, start: Tensor) -> None:
        self.first = max(0, rows.dim - COMPONENTS)
        order = torch.bincount(targets).argsort(descending=True, stable=True)
        counts = torch.bincount(targets[kept])[order]
        is_moved = counts.cumsum(0) - counts < COVERED * counts.sum()
        is_moved[:LEAST_MOVED] = True
        self.moved, self.others = order[is_moved], order[~is_moved]
        self.places = torch.zeros_like(order)
        self.places[self.moved] = torch.arange(1, len(self.moved) + 1, device=order.device)
        inputs = rows.inputs[:, kept]
        self.base, self.targets = self._merged(inputs @ start), self.places[targets[kept]]
        self.inputs, self.row = inputs[..., self.first :].contiguous(), torch.arange(len(self.targets)).to(targets)
        self.share = torch.bincount(self.targets, minlength=len(self.moved) + 1).to(start) / len(self.targets)
        self.start = torch.nn.functional.pad(start[:, self.first :, self.moved], (1, 0))
        penalty = ((2 if len(order) == 2 else 1) / (c * len(self.targets))).to(start)  # of two classes as in `Softmax`
        self.penalties = penalty[:, None, None].repeat(1, self.start.shape[1], 1)
        self.penalties[:, -1] = 0
        self.spread = torch.nn.functional.pad(rows.spread[:, self.first :], (0, 1), value=1.0).to(start)[..., None]
        self.none = torch.zeros_like(self.start)  # (layers, inputs, the others and moved classes)

    def _merged(self, logits: Tensor) -> Tensor:
        others = logits[..., self.others].logsumexp(-1, keepdim=True)
        return torch.cat([others, logits[..., self.moved]], -1)

    def evaluate(self, change: Tensor) -> tuple[Tensor, Tensor]:
        """Objective, but for what the others tell of one another, and gradient."""
        residual = torch.baddbmm(self.base, self.inputs, change).softmax(-1)
        right = residual[:, self.row, self.targets]
        residual[:, self.row, self.targets] = right - 1
        pull = self.penalties * (self.start + change)
        value = (pull * (self.start + change)).sum((1, 2)) / 2 - right.log().mean(1)
        return value, (self.inputs.mT @ residual).div_(len(self.targets)).add_(pull)

    def precondition(self, gradient: Tensor) -> Tensor:
        """The inverse Hessian where all rows have the class shares, among the weights that move."""
        share = self.share[1:]
        inverse = 1 / (self.spread * share + self.penalties)
        scaled = inverse * gradient[..., 1:]
        left = (1 - self.spread * (share.square() * inverse).sum(-1, keepdim=True)).clamp(min=1e-3)
        sums = (share * scaled).sum(-1, keepdim=True)
        return torch.nn.functional.pad(scaled + self.spread * share * inverse * sums / left, (1, 0))

    def after(self, number: Tensor) -> Tensor:
        """The change after so many steps (layers,)."""
        made = itertools.count()

        def is_done(*_: Tensor) -> Tensor:
            return number <= next(made)

        return minimize(self.evaluate, self.none, self.precondition, is_done, int(number.max())).point


class _TriedSteps(_Steps):
    """Steps on the rows that are not `out`: how many of them, and what share of their change, help those that are."""

    def __init__(
        self,
        rows: PrincipalRows,
        targets: Tensor,
        out: Tensor,
        c: Tensor,
        start: Tensor,
        closed: Sequence[_Calibrated],
        done: Tensor,
    ) -> None:
        super().__init__(rows, targets, ~out, c, start)
        self.closed, self.done, self.made = closed, done, 0
        self.out, self.truth = rows.inputs[:, out, self.first :], targets[out]
        self.out_targets = self.places[self.truth]
        self.lowest = [cross_entropy(each.logits[: len(self.truth)], self.truth) for each in closed]
        self.number = torch.zeros_like(c, dtype=torch.long)
        self.share_of_change = torch.zeros_like(self.none[:, :1, :1])

    def look(self, change: Tensor, *_: Tensor) -> Tensor:
        """Notes what helps the held-out rows most; done is a layer at the first change of which no share helps."""
        if change is self.none:
            return self.done
        self.made += 1
        for layer, each in enumerate(self.closed):
            if self.done[layer]:
                continue
            logits = each.logits[: len(self.truth)]
            merged = self._merged(logits)
            rest = cross_entropy(logits, self.truth) - cross_entropy(merged, self.out_targets)
            loss, share = best_share(merged, self.out[layer] @ change[layer], self.out_targets)
            self.done[layer] = loss + rest >= cross_entropy(logits, self.truth)
            if loss + rest < self.lowest[layer]:
                self.lowest[layer], self.number[layer] = loss + rest, self.made
                self.share_of_change[layer] = share
        return self.done


def best_share(
    logits: Float[Tensor, "n classes"], gain: Float[Tensor, "n classes"], targets: Int[Tensor, " n"]
) -> tuple[Tensor, float]:
    """The lowest log-loss of the logits and a share of what they gain, and that share."""
    losses = [cross_entropy(logits + share * gain, targets) for share in SHARES_OF_STEPS]
    best = min(range(len(losses)), key=lambda place: float(losses[place]))
    return losses[best], SHARES_OF_STEPS[best]


def calibration(
    prior: Float[Tensor, "n classes"],
    parts: Float[Tensor, "2 n classes"],
    targets: Int[Tensor, " n"],
    start: tuple[float, float] = (0.0, 0.0),
) -> tuple[float, float, float]:
    """The lowest mean log-loss of softmax(prior + t parts[0] + b parts[1]), t and b >= 0; t = b = 0 if t were negative.

    A negative b only picks up how q changed as rows were left out. Where all rows are classified correctly, t would
    have no bound: beside the n rows the log-loss counts one of which each class is the label by its share.
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
            break  # all rows are classified with certainty
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
