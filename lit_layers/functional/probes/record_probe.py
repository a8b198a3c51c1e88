"""Logistic probes for the record: each layer's c by rows held out, along a path from strong to weak regularisation."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass

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
    check_start,
    checked_classes,
    layers_at_once,
    together,
)

C_GRID = [10 ** (exponent / 2) for exponent in range(-10, 7)]  # 1e-5 to 1e3
NUM_FOLDS = 5
ENOUGH = 1000  # rows held out: with as many in one fold, that one is enough
STILL = 0.1  # standard errors of the held-out log-loss
LOOK_BACK = 3  # steps
EQUAL = 1e-6  # nats of held-out log-loss: where features say nothing every c is as good, but for rounding


@dataclass(frozen=True, eq=False)
class RecordProbes(LogisticProbes):
    """Beside the probes what a similar problem begins with; see `fit_record_probes`.

    `without`: weights and, below them, biases of the fits without the rows held out, the mean over folds, at the c
    before that of the layer, at this c, and at the c after it. A c that was not tried has those of the layer's c.
    """

    without: Float[Tensor, "layers 3 dim_and_bias logits"]


def fit_record_probes(
    features: Float[Tensor, "layers n dim"],
    labels: Int[Tensor, " n"],
    *,
    num_classes: int | None = None,
    groups: Int[Tensor, " n"] | None = None,
    max_iterations: int = 1000,
    start: RecordProbes | None = None,
    device: torch.device | str | None = None,
) -> RecordProbes:
    """`fit_logistic_probes` of standardised features, at the c of each layer that has the lowest held-out log-loss.

    A fifth of the rows is held out, once where that makes 1,000 rows, else each fifth in turn; a row stays where its
    class would have none. The others are fitted at c = 1e-5, 10^-4.5, 1e-4, ..., each from the one before, until the
    held-out log-loss lies above the lowest of the path by more than the standard error of the difference over rows.
    At the c of the lowest the probe is fitted to all rows. A fit ends when neither its last three steps nor the
    step ahead move the held-out log-loss by more than a tenth of its standard error over rows (for all rows, that of
    the rows that were held out), and `converged` says that it did within `max_iterations`.

    Rows of one number in `groups`, such as those of one text, are held out together. Which they are depends on these
    numbers alone: with numbers for groups the order of rows changes nothing.

    `start` are the probes of a similar problem, such as those of the checkpoint before. Then c begins at theirs: the
    next weaker and the next stronger one are tried, and those beyond for as long as the held-out log-loss falls. Where
    that has one valley, as it all but always has, this gives the c of the whole path; of several valleys, the one that
    `start` lies in. A fit begins where the earlier one at the same c ended that did not see these rows either (of five
    folds their mean), and so differs as far as the end of a fit allows. Of a layer whose earlier fit predicts held-out
    rows worse than the class shares do, its c alone is used.

    Computed as in `fit_logistic_probes`: a layer at a time on a CPU, batched on a GPU; the rows that are not held out
    are a second copy of a layer's features. `device` says where, if not where the features are; these are moved as
    they are needed, and the probes come back to where the features were.

    Raises:
        TypeError: features that are not floating-point, labels that are not integers.
        ValueError: fewer than 2 rows or 2 classes, labels outside 0..num_classes - 1, features that are not finite, a
            `start` of other layers, width or classes.
    """
    check_features(features)
    seen, targets, count = checked_classes(labels, features, num_classes)
    if start is not None:
        check_start(start, features, seen, count)
    device = features.device if device is None else torch.device(device)
    folds = [fold.to(device) for fold in held_out_rows(targets, groups)]
    seen, targets = seen.to(device), targets.to(device)
    parts = []
    for layers in layers_at_once(features, len(seen), device):
        group = features[layers].detach().to(device)
        check_finite(group, first_layer=layers.start)
        rows = PrincipalRows(group, standardize=True, intercept=True)
        path = _Path(rows, targets, folds, max_iterations)
        if start is None:
            c, around, point = path.chosen()
        else:
            whole = torch.cat([start.weight[layers], start.bias[layers, None]], 1)
            earlier = [each.to(device) for each in (*start.without[layers].unbind(1), whole)]
            c, around, point = path.chosen(start.c[layers].to(device), earlier)
        softmax = Softmax(rows, targets, 1 / (c * len(targets)))
        held = torch.stack(folds).any(0) if folds else torch.ones_like(targets, dtype=torch.bool)
        minimum = path.fitted(softmax, point, rows.inputs[:, held], targets[held])
        probes = softmax.probes(minimum, seen, count, converged=minimum.done)
        weights, biases = zip(*(softmax.coefficients(each) for each in around), strict=True)
        kept = torch.cat([torch.stack(weights, 1), torch.stack(biases, 1)[:, :, None]], 2).to(probes.weight.dtype)
        parts.append(RecordProbes(**vars(probes), without=kept))
    return together(parts).to(features.device)


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


class _Path:
    """Fits of a few layers to the rows that are not held out, at one c after another."""

    def __init__(self, rows: PrincipalRows, targets: Tensor, folds: Sequence[Tensor], max_iterations: int) -> None:
        self.rows, self.targets, self.folds, self.max_iterations = rows, targets, folds, max_iterations
        self.grid = torch.tensor(C_GRID, dtype=torch.float64, device=targets.device)

    def chosen(self, c: Tensor | None = None, kept: Sequence[Tensor] = ()) -> tuple[Tensor, list[Tensor], Tensor]:
        """The best c of each layer (layers,); the fits before it, at it and after it, each the mean over folds; and
        where the fit to all rows begins.

        From the strongest c on, or from the given one in both directions, with the coefficients of earlier fits:
        without the rows held out at the c before, at it and after it, and to all rows.
        """
        layers = range(len(self.rows.inputs))
        first = torch.zeros(len(layers), dtype=torch.long, device=self.targets.device)
        if c is not None:
            first = (self.grid.log() - c.double().log()[:, None]).abs().argmin(1)
        whole = self._softmax(torch.zeros_like(self.targets, dtype=torch.bool), first)
        if not self.folds:
            return self.grid[first], [whole.start()] * 3, whole.start()
        starts = [self._softmax(held, first).start() for held in self.folds]
        earlier = [whole.point(each[:, :-1], each[:, -1]) for each in kept]
        if earlier:
            is_useful = self._losses([earlier[1] for _ in starts]).mean(1) < self._losses(starts).mean(1)
            earlier = [each.where(is_useful[:, None, None], torch.nan) for each in earlier]
            starts = [_where_finite(earlier[1], start) for start in starts]
        fits: dict[tuple[int, int], Tensor] = {}  # by layer and place

        def fitted(place: Tensor, starts: list[Tensor], on_path: Tensor) -> tuple[list[Tensor], Tensor]:
            points = self._points(place.clamp(0, len(self.grid) - 1), starts, ~on_path)
            mean = torch.stack(points).mean(0)
            fits.update({(layer, int(place[layer])): mean[layer] for layer in layers if on_path[layer]})
            return points, self._losses(points)

        at_first, losses = fitted(first, starts, torch.ones_like(first, dtype=torch.bool))
        best_place, best_losses = first, losses
        for way in (1, -1):
            place, points, on_path = first + way, at_first, best_place == first
            if earlier:
                points = [_where_finite(earlier[1 + way], point) for point in points]
            while (on_path := on_path & (place >= 0) & (place < len(self.grid))).any():
                points, losses = fitted(place, points, on_path)
                above = losses - best_losses  # (layers, held-out rows)
                better = on_path & (above.mean(1) < -EQUAL)
                best_place = torch.where(better, place, best_place)
                best_losses = torch.where(better[:, None], losses, best_losses)
                is_far = above.mean(1) > above.std(1) / above.shape[1] ** 0.5
                on_path = better if earlier else on_path & ~is_far
                place = place + way
        best = list(enumerate(best_place.tolist()))
        around = [
            torch.stack([fits.get((layer, place + way), fits[layer, place]) for layer, place in best])
            for way in (-1, 0, 1)
        ]
        begin = around[1]
        if earlier:  # what the rows held out moved the earlier fit by
            begin = _where_finite(begin + earlier[3] - earlier[1], begin)
        return self.grid[best_place], around, begin

    def _softmax(self, held: Tensor, place: Tensor) -> Softmax:
        """The problem of the rows that are not held out, at one c for each layer."""
        fewer = copy.copy(self.rows)
        fewer.inputs, targets = self.rows.inputs[:, ~held], self.targets[~held]
        return Softmax(fewer, targets, 1 / (self.grid[place] * len(targets)))

    def _points(self, place: Tensor, starts: list[Tensor], closed: Tensor | None = None) -> list[Tensor]:
        """The fit of each fold; layers that are `closed` stay where they start."""
        return [
            self.fitted(self._softmax(held, place), start, self.rows.inputs[:, held], self.targets[held], closed).point
            for held, start in zip(self.folds, starts, strict=True)
        ]

    def _losses(self, points: list[Tensor]) -> Tensor:
        """Of the held-out rows (layers, rows)."""
        parts = zip(self.folds, points, strict=True)
        return torch.cat([_losses(self.rows.inputs[:, held], self.targets[held], point) for held, point in parts], 1)

    def fitted(
        self, softmax: Softmax, point: Tensor, inputs: Tensor, targets: Tensor, closed: Tensor | None = None
    ) -> Minimum:
        """From `point` on, until the log-loss of the rows `inputs` stands still."""
        path: list[Tensor] = []

        def is_done(point: Tensor, value: Tensor, slope: Tensor, direction: Tensor) -> Tensor:
            losses = _losses(inputs, targets, point)
            path.append(losses.mean(1))
            if len(path) <= LOOK_BACK:
                return torch.zeros_like(value, dtype=torch.bool) if closed is None else closed
            stderr = losses.std(1) / losses.shape[1] ** 0.5 if losses.shape[1] > 1 else torch.ones_like(path[-1])
            moved = (torch.stack(path[-1 - LOOK_BACK : -1]) - path[-1]).abs().amax(0)
            near = moved <= STILL * stderr
            if near.any():
                near &= (_losses(inputs, targets, point + direction).mean(1) - path[-1]).abs() <= STILL * stderr
            return near if closed is None else near | closed

        return minimize(softmax.evaluate, point, softmax.preconditioner(), is_done, self.max_iterations)


def _losses(inputs: Tensor, targets: Tensor, point: Tensor) -> Tensor:
    """The log-losses (layers, rows) of rows in principal axes."""
    return torch.stack(
        [cross_entropy(rows @ at, targets, reduction="none").double() for rows, at in zip(inputs, point, strict=True)]
    )


def _where_finite(values: Tensor, others: Tensor) -> Tensor:
    """The others for layers whose earlier fits are left aside."""
    return values.where(values.isfinite(), others)
