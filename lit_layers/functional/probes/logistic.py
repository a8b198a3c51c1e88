"""Probes that classify: logistic probes, fast ones for use during training, and a probe with attention over tokens."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from scipy.optimize import minimize
from torch import Tensor
from torch.nn.functional import cross_entropy

from lit_layers.functional._checks import check_features, check_finite, feature_scaling, widened_chunks

RESOLVED = 1e-8  # smallest relative decrease of the objective that float32 resolves


@dataclass(frozen=True, eq=False)
class LogisticProbes:
    """One logistic probe per layer; see `fit_logistic_probes`.

    Two classes share one logit, that of the second against the first. Three or more classes have one logit each. A
    class without training rows is counted in `num_classes`, but is not in `classes`. It is never predicted, and its
    log-probability is -inf.
    """

    weight: Float[Tensor, "layers dim logits"]  # multiplies (features - mean) / scale
    bias: Float[Tensor, "layers logits"]
    mean: Float[Tensor, "layers dim"]
    scale: Float[Tensor, "layers dim"]
    classes: Int[Tensor, " seen"]
    num_classes: int
    converged: Bool[Tensor, " layers"]
    c: Float[Tensor, " layers"]

    def log_proba(self, features: Float[Tensor, "layers n dim"]) -> Float[Tensor, "layers n num_classes"]:
        """Return natural logarithms of the class probabilities, in float32 or wider."""
        check_features(features, self.weight)
        seen = torch.stack([self._seen_log_proba(layer, rows) for layer, rows in enumerate(features)])
        if len(self.classes) == self.num_classes:
            return seen
        return seen.new_full((*seen.shape[:2], self.num_classes), -torch.inf).index_copy(2, self.classes, seen)

    def predict(self, features: Float[Tensor, "layers n dim"]) -> Int[Tensor, "layers n"]:
        """Return the most probable class of each row; the lowest class if several tie."""
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

    @classmethod
    def stacked(cls, layers: Sequence["LogisticProbes"]) -> "LogisticProbes":
        """Return the probes of several layers with the same classes as one object."""
        layerwise = {field.name for field in fields(cls)} - {"classes", "num_classes"}
        return replace(layers[0], **{name: torch.cat([getattr(each, name) for each in layers]) for name in layerwise})


def fit_logistic_probes(
    features: Float[Tensor, "layers n dim"],
    labels: Int[Tensor, " n"],
    *,
    c: float = 1.0,
    num_classes: int | None = None,
    tolerance: float = 1e-6,
    max_iterations: int = 1000,
    device: torch.device | str | None = None,
) -> LogisticProbes:
    """Fit the L2-regularised logistic regression of the labels on each layer, equal to scikit-learn's with C = c.

    Minimises c sum_i CE_i + |W|^2 / 2 over n rows, with natural logarithms and an intercept without penalty. Three or
    more classes have a softmax with one weight vector each. Two classes have one logit. Features are first centred and
    divided by the training rows' population standard deviation (by 1 if it is 0). This makes the probabilities
    invariant to affine maps of each feature. They do not depend on the order of rows, nor on the numbering of classes.
    If all features are constant, the probabilities are the class frequencies. `c` multiplies a sum, so the
    regularisation weakens as rows are added.

    `converged` marks the layers with max |gradient| <= tolerance c n. The solver is scipy's L-BFGS-B. It runs in
    float32 until rounding hides the progress, then in float64. For features in float64 it only uses float64. Layers are
    fitted one at a time, so the features may be a memory-mapped tensor. `device` is where to compute, by default the
    features' device. The probes are returned on the features' device.

    Raises:
        ValueError: fewer than 2 classes, labels outside 0..num_classes - 1, features that are not finite, a `c` that is
            not above 0.
    """
    if not c > 0:
        raise ValueError(f"expected c above 0, got {c}")
    device = features.device if device is None else torch.device(device)
    classes, targets, num_classes = checked_classes(labels, features, num_classes)
    classes, targets = classes.to(device), targets.to(device)
    share = torch.bincount(targets).double() / len(targets)
    probes = []
    for layer in range(len(features)):
        rows = PrincipalRows(features[layer].detach().to(device), layer)
        point = rows.spread.new_zeros(len(rows.spread) + 1, len(classes))
        point[-1] = share.log()  # the first point predicts the class shares in every row
        is_solved = partial(rows.is_solved, tolerance=tolerance)
        found, left = Minimum(point, is_solved=False, num_iterations=0), max_iterations
        for dtype in dict.fromkeys((rows.inputs.dtype, torch.float64)):
            softmax = Softmax(rows.inputs.to(dtype), targets, rows.spread, 1 / (c * len(targets)))
            found = softmax.minimize(found.point, left, is_solved)
            left -= found.num_iterations
            if found.is_solved or left < 1:
                break
        probes.append(rows.probes(found.point, classes, num_classes, c=c, converged=found.is_solved))
    return LogisticProbes.stacked(probes).to(features.device)


class PrincipalRows:
    """The features of one layer, standardised and rotated to their principal axes in order of increasing variance."""

    def __init__(self, features: Tensor, layer: int) -> None:
        check_finite(features[None], first_layer=layer)
        self.mean, self.scale = (part[0] for part in feature_scaling(features[None]))
        dtype = torch.float64 if features.dtype == torch.float64 else torch.float32
        self.inputs = torch.empty_like(features, dtype=dtype)  # the only full copy of the features
        gram, start = torch.diag(torch.zeros_like(self.mean)), 0
        for chunk in widened_chunks(features[None]):
            rows = chunk[0].sub_(self.mean).div_(self.scale)
            gram += rows.T @ rows
            self.inputs[start : start + len(rows)] = rows
            start += len(rows)
        spread, self.axes = torch.linalg.eigh(gram / len(features))
        self.spread = spread.clamp(min=0)  # (dim,)
        for part in self.inputs.split(4096):
            part.copy_(part @ self.axes.to(dtype))

    def is_solved(self, slope: Float[Tensor, "inputs classes"], *, tolerance: float) -> bool:
        """Return whether no entry of the gradient exceeds the tolerance in magnitude.

        `slope` is the gradient with respect to the weights of the rotated features and, in its last row, the biases.
        Before the comparison, it is converted to the gradient with respect to the weights of the unrotated features.
        """
        # A rotation keeps the norm, and the largest entry is at least the root mean square. If the root mean square
        # exceeds the tolerance, the largest entry does so in any rotation.
        if slope[:-1].norm() > tolerance * slope[:-1].numel() ** 0.5:
            return False
        return max(float((self.axes @ slope[:-1]).abs().max()), float(slope[-1].abs().max())) <= tolerance

    def probes(
        self, point: Tensor, classes: Tensor, num_classes: int, *, c: float, converged: bool = True
    ) -> LogisticProbes:
        """Return the probe for the original features, from a fit to the rotated features.

        `point` (dim + 1, classes) holds the weights of the fit and, in its last row, the biases.
        """
        weight, bias = self.axes @ point[:-1], point[-1] - point[-1].mean()
        if len(classes) == 2:
            weight, bias = weight[:, 1:] - weight[:, :1], bias[1:] - bias[:1]
        weight, bias = weight.to(self.inputs)[None], bias[None]
        extra = {"converged": torch.tensor([converged], device=bias.device), "c": bias.new_tensor([c])}
        mean, scale = self.mean[None], self.scale[None]
        return LogisticProbes(weight, bias.to(weight), mean, scale, classes, num_classes, **extra)


class Softmax:
    """The objective mean CE + penalty |W|^2 / 2 with one weight vector per class.

    A point (dim + 1, classes), in float64, holds the weights and, in its last row, the biases. The logits are
    inputs W + b + `offset`. The inputs X are in their principal axes with mean squares `spread`, so that X'X is
    diagonal. If every row predicts the class shares p, the Hessian is the Kronecker product of diag(p) - p p' and
    X'X / n, plus `penalty` on the diagonal. L-BFGS-B runs in scaled coordinates, in which the Hessian's diagonal is 1.

    For two classes the optimum has W_0 = -W_1 = -w / 2, so |W|^2 = |w|^2 / 2. With twice the penalty this is therefore
    the problem with one logit w, and the gradient of w equals that of W_1.
    """

    def __init__(
        self,
        inputs: Float[Tensor, "n dim"],
        targets: Int[Tensor, " n"],
        spread: Float[Tensor, " dim"],
        penalty: float,
        offset: Float[Tensor, "n classes"] | None = None,
    ) -> None:
        self.inputs, self.targets, self.offset = inputs, targets, offset
        self.row = torch.arange(len(targets), device=targets.device)
        share = torch.bincount(targets).double() / len(targets)
        self.penalty = penalty * (2 if len(share) == 2 else 1)
        weights = (spread[:, None] * share * (1 - share) + self.penalty).rsqrt()
        biases = (share * (1 - share)).rsqrt()
        self.unit = torch.cat([weights, biases[None]])

    def evaluate(self, point: Float[Tensor, "inputs classes"]) -> tuple[float, Float[Tensor, "inputs classes"]]:
        """Return the objective and its gradient."""
        params = point.to(self.inputs)
        logits = self.inputs @ params[:-1] + params[-1] if self.offset is None else self.offset + params[-1]
        if self.offset is not None:
            logits.addmm_(self.inputs, params[:-1])
        right, top = logits[self.row, self.targets], logits.amax(-1, keepdim=True)
        share = logits.sub_(top).exp_()  # in place: memory traffic limits the speed
        total = share.sum(-1, keepdim=True)
        loss = ((top + total.log())[:, 0] - right).double().mean()
        residual = share.div_(total)
        residual[self.row, self.targets] -= 1
        pull = self.penalty * point[:-1]
        slope = (self.inputs.T @ residual).double() / len(self.targets) + pull
        return float(loss + (pull * point[:-1]).sum() / 2), torch.cat([slope, residual.mean(0)[None].double()])

    def minimize(
        self, start: Tensor, max_iterations: int, is_solved: Callable[[Tensor], bool] | None = None
    ) -> "Minimum":
        """Minimise from `start` until the gradient passes `is_solved`, iterations run out, or no step is found."""
        last: tuple[float, Tensor] | None = None
        accepted: tuple[float, Tensor] | None = None

        def to_point(flat: np.ndarray) -> Tensor:
            return self.unit * torch.from_numpy(flat).to(self.unit).view_as(self.unit)

        def evaluate(flat: np.ndarray) -> tuple[float, np.ndarray]:
            nonlocal last, accepted
            last = self.evaluate(to_point(flat))
            accepted = accepted or last
            return last[0], (self.unit * last[1]).flatten().cpu().numpy()

        def stop(xk: np.ndarray) -> None:  # scipy calls it after each step
            nonlocal accepted
            accepted = last
            if is_solved and last and is_solved(last[1]):
                raise StopIteration

        flat = (start / self.unit).flatten().cpu().numpy()
        resolved = RESOLVED if self.inputs.dtype == torch.float32 else 0.0
        options: Any = {"maxiter": max_iterations, "maxfun": 20 * max_iterations, "ftol": resolved, "gtol": 0}
        found = minimize(evaluate, flat, method="L-BFGS-B", jac=True, callback=stop, options=options)
        assert accepted is not None, "scipy evaluates the start"
        return Minimum(to_point(found.x), is_solved is not None and is_solved(accepted[1]), found.nit)


class Minimum(NamedTuple):
    """The point where L-BFGS-B stopped."""

    point: Tensor  # (dim + 1, classes)
    is_solved: bool
    num_iterations: int


def macro_f1(labels: Int[Tensor, " n"], predictions: Int[Tensor, " n"]) -> float:
    """Return the unweighted mean F1 over the classes in `labels`, in [0, 1]; F1 is 0 for a class never predicted."""
    from sklearn.metrics import f1_score  # imported here, because the import takes half a second

    truth, guessed = labels.cpu().numpy(), predictions.cpu().numpy()
    options: Any = {"average": "macro", "zero_division": 0}
    return float(f1_score(truth, guessed, labels=np.unique(truth), **options))


def checked_classes(labels: Tensor, features: Tensor, num_classes: int | None) -> tuple[Tensor, Tensor, int]:
    """Return the classes that have rows, the index of each row's class among them, and the number of all classes."""
    if labels.shape != features.shape[1:2]:
        raise ValueError(f"expected a label for each of {features.shape[1]} rows, got shape {tuple(labels.shape)}")
    classes, targets = labels.to(features.device).unique(return_inverse=True)
    num_classes = int(classes[-1]) + 1 if num_classes is None else num_classes
    if len(classes) < 2 or classes[0] < 0 or classes[-1] >= num_classes:
        raise ValueError(f"expected labels of 2 classes or more in 0..{num_classes - 1}, got {classes.tolist()}")
    return classes, targets, num_classes


# The attentive probe: the learned query of each head attends to the states of a row's tokens.


@dataclass(frozen=True)
class AttentiveProbe:
    """Parameters fitted by `fit_attentive_probe`."""

    mean: Float[Tensor, " dim"]
    scale: Float[Tensor, " dim"]
    query: Float[Tensor, "heads head_dim"]
    key: Float[Tensor, "dim dim"]
    value: Float[Tensor, "dim dim"]
    weight: Float[Tensor, "classes dim"]
    bias: Float[Tensor, " classes"]

    def log_proba(
        self, states: Float[Tensor, "rows tokens dim"], mask: Bool[Tensor, "rows tokens"]
    ) -> Float[Tensor, "rows classes"]:
        """Return class log-probabilities of rows with at least one real token each; padding gets no attention."""
        standard = (_wide(states) - self.mean) / self.scale
        heads, head_dim = self.query.shape
        keys, values = ((standard @ each.T).unflatten(-1, (heads, head_dim)) for each in (self.key, self.value))
        scores = torch.einsum("nthd,hd->nht", keys, self.query) / head_dim**0.5
        share = scores.masked_fill(~mask[:, None], -torch.inf).softmax(-1)  # (rows, heads, tokens)
        pooled = torch.einsum("nht,nthd->nhd", share, values).flatten(1)
        return (pooled @ self.weight.T + self.bias).log_softmax(-1)


def fit_attentive_probe(
    states: Float[Tensor, "rows tokens dim"],
    mask: Bool[Tensor, "rows tokens"],
    labels: Int[Tensor, " rows"],
    *,
    num_classes: int,
    num_heads: int = 4,
    steps: int = 500,
    batch_size: int = 64,
    lr: float = 3e-3,
    weight_decay: float = 0.01,
    seed: int = 0,
) -> AttentiveProbe:
    """Fit a linear classifier of attention-pooled states, with logits W concat_h(sum_t a_ht V_h x_t) + b for a row.

    Head h has the attention weights a_h = softmax_t(q_h . K_h x_t / sqrt(dim / heads)). x are the states of the row,
    standardised over the real tokens of all rows. This probe can read information that sits at another token in each
    row, which a linear probe of mean states cannot. Trained by AdamW with a cosine schedule and one seed: the same
    inputs on the same device give the same probe. Computed in float32 or wider.

    Source: El-Nouby et al., Scalable pre-training of large autoregressive image models, arXiv 2401.08541, section 4,
    after Chen et al., Context autoencoder, arXiv 2202.03026: cross-attention with a learned query, then a linear map.

    Raises:
        ValueError: rows without a real token, states that are not finite, or heads that do not divide the width.
    """
    rows, _, dim = states.shape
    if dim % num_heads:
        raise ValueError(f"expected num_heads that divides the width {dim}, got {num_heads}")
    states = _wide(states)
    real = states[mask]
    if not (mask.any(-1).all() and real.isfinite().all()):
        raise ValueError(f"expected a real token for each of {rows} rows, and finite states at all of them")
    states = states.masked_fill(~mask[..., None], 0.0)
    mean = real.mean(0)
    scale = (real - mean).square().mean(0).sqrt().clamp_min(1e-6)
    generator = torch.Generator().manual_seed(seed)

    def drawn(*shape: int, size: float) -> Tensor:
        return (torch.randn(*shape, generator=generator) * size).to(states).requires_grad_()

    learned = [
        drawn(num_heads, dim // num_heads, size=1.0),
        drawn(dim, dim, size=dim**-0.5),
        drawn(dim, dim, size=dim**-0.5),
        drawn(num_classes, dim, size=0.02),
        torch.zeros(num_classes).to(states).requires_grad_(),
    ]
    optimizer = torch.optim.AdamW(learned, lr=lr, weight_decay=weight_decay)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    with torch.enable_grad():
        for _ in range(steps):
            chosen = torch.randint(rows, (min(batch_size, rows),), generator=generator).to(labels.device)
            log_proba = AttentiveProbe(mean, scale, *learned).log_proba(states[chosen], mask[chosen])
            loss = -log_proba.gather(1, labels[chosen, None]).mean()
            for tensor, grad in zip(learned, torch.autograd.grad(loss, learned), strict=True):
                tensor.grad = grad
            optimizer.step()
            schedule.step()
    return AttentiveProbe(mean, scale, *(tensor.detach() for tensor in learned))


def _wide(states: Tensor) -> Tensor:
    return states.to(torch.promote_types(states.dtype, torch.float32))


# Fast probes during training: a shrunk linear discriminant, then a few steps towards the logistic optimum.

PENALTIES = [10 ** (exponent / 2) for exponent in range(2, -7, -1)]  # penalties to try, from 10 to 0.001
SHRINKAGES = [10.0, 30.0, 3.0, 1.0]  # shrinkages to try: numbers of rows at the overall mean, added to each class
NUM_FOLDS = 5
ENOUGH = 500  # if the first fold has at least this many rows, only this fold is held out
STEPS, COMPONENTS = 4, 128
LEAST_GAIN = 1e-3  # nats of log-loss that a discriminant must gain over the class shares


def fit_watching_probes(
    features: Float[Tensor, "layers n dim"],
    labellings: Sequence[Int[Tensor, " n"]],
    *,
    num_classes: int | None = None,
    groups: Int[Tensor, " n"] | None = None,
    device: torch.device | str | None = None,
) -> list[LogisticProbes]:
    """Fit logistic probes of standardised features in seconds, with a tuned penalty; one set for each labelling.

    **Start: a linear discriminant.** S is the covariance within classes, pooled over classes, and n_k the number of
    rows of class k. d_k is the mean of these rows minus the mean of all n rows, multiplied by n_k / (n_k + r) with a
    shrinkage r. Class k has the weights (S + l I)^-1 d_k with a penalty l, and the bias log(n_k / n) - q_k, where q_k
    is half the inner product of its weights with d_k. Weights and q_k are multiplied by a factor t, because a
    discriminant of few rows in many dimensions is too confident.

    **Choice of l, r and t.** For each layer they minimise the log-loss on held-out rows, which enter no means or
    covariances. A fifth of the rows is held out: once if that is at least 500 rows, else each fifth in turn. Rows with
    the same number in `groups`, such as those of one text, are held out together. With `groups`, the result does not
    depend on the order of rows. If no t improves on the class shares by 0.001 nats, the probe predicts the class
    shares.

    **Refinement.** States of a class are not Gaussian, so four steps of L-BFGS-B on all rows follow. They reduce the
    mean log-loss plus |W - W_0|^2 / (2 c n), with W_0 the weights of the discriminant, along the 128 largest principal
    components. Here c is t K / (l n) for K classes. With this c, the penalty of a logistic probe acts on a class of
    mean size as strongly as l does in the discriminant.

    The result's `c` is that c. `converged` is True, because the number of steps is fixed. `device` is where to compute,
    by default the features' device. The probes are returned on the features' device.

    Source: Friedman, Regularized discriminant analysis, 1989, for S + l I. The factor t and the steps are ours.

    Raises:
        ValueError: fewer than 2 classes, labels outside 0..num_classes - 1, features that are not finite.
    """
    device = features.device if device is None else torch.device(device)
    folds = fold_ids(features.shape[1], groups).to(device)
    fitted: list[list[LogisticProbes]] = [[] for _ in labellings]
    for layer in range(len(features)):
        rows = PrincipalRows(features[layer].detach().to(device), layer)
        for labels, probes in zip(labellings, fitted, strict=True):
            classes, targets, count = checked_classes(labels, features, num_classes)
            point, c = _fit(rows, targets.to(device), folds)
            probes.append(rows.probes(point, classes.to(device), count, c=c))
    return [LogisticProbes.stacked(probes).to(features.device) for probes in fitted]


def fold_ids(num_rows: int, groups: Int[Tensor, " n"] | None = None) -> Int[Tensor, " n"]:
    """Return the index of each row's fold, (n,).

    The rows of a fold are held out together. All rows of a group are in one fold.
    """
    ids = torch.arange(num_rows) if groups is None else groups.cpu().unique(return_inverse=True)[1]
    order = torch.randperm(int(ids.max()) + 1, generator=torch.Generator().manual_seed(0))
    return order[ids] % NUM_FOLDS


def held_out_rows(targets: Int[Tensor, " n"], folds: Int[Tensor, " n"]) -> list[Tensor]:
    """Return one mask (n,) of rows for each fold that is held out.

    Only the first fold is held out if it has at least 500 rows, otherwise each of the five folds in turn. A row is not
    held out if no row of its class would remain. The list is empty if no row can be held out.
    """
    masks = []
    for fold in range(NUM_FOLDS):
        held = folds == fold
        held &= torch.bincount(targets[~held], minlength=int(targets.max()) + 1)[targets] > 0
        masks.append(held)
    if masks[0].sum() >= ENOUGH:
        return masks[:1]
    return [held for held in masks if held.any()]


class _Moments(NamedTuple):
    """Sums over a set of rows of features, from which its linear discriminant follows, in float64.

    The features are in the principal axes of all rows.
    """

    counts: Tensor  # (classes,)
    sums: Tensor  # (dim, classes)
    squares: Tensor  # (dim, dim): X'X

    def minus(self, others: "_Moments") -> "_Moments":
        return _Moments(*(all_rows - theirs for all_rows, theirs in zip(self, others, strict=True)))


def _class_sums(inputs: Tensor, targets: Tensor, num_classes: int) -> tuple[Tensor, Tensor]:
    """Return the number of rows of each class, (classes,), and the sum of the rows of each class, (dim, classes)."""
    sums = inputs.new_zeros(num_classes, inputs.shape[1], dtype=torch.float64)
    for rows, labels in zip(inputs.split(4096), targets.split(4096), strict=True):
        sums.index_add_(0, labels, rows.double())
    return torch.bincount(targets, minlength=num_classes).double(), sums.T


class _Discriminant:
    """The linear discriminant of a set of rows, which has at least one row of each class.

    The symbols S, d_k, n_k, q_k, l and r are those of `fit_watching_probes`.
    """

    def __init__(self, moments: _Moments) -> None:
        self.counts, num_rows = moments.counts, moments.counts.sum()
        self.log_share, self.mean = (self.counts / num_rows).log(), moments.sums.sum(1) / num_rows
        self.delta = moments.sums / self.counts - self.mean[:, None]  # d_k before shrinkage (dim, classes)
        scaled = moments.sums / self.counts.sqrt()
        self.within = (moments.squares - scaled @ scaled.T) / num_rows

    def weight(self, penalty: float) -> Tensor:
        """Return the weights (S + l I)^-1 d_k of all classes k, (dim, classes), without shrinkage of d_k.

        S is the covariance within classes, l is `penalty`, and d_k is the mean of class k minus the mean of all rows.
        """
        cov = self.within + penalty * torch.eye(len(self.within)).to(self.within)
        return torch.cholesky_solve(self.delta, torch.linalg.cholesky(cov))

    def shrunk(self, weight: Tensor, shrinkage: float) -> tuple[Tensor, Tensor]:
        """Return the shrinkage factor n_k / (n_k + r) of each class (classes,), and q_k (classes,).

        n_k is the number of rows of class k, and r is `shrinkage`. q_k is half the inner product of the shrunk
        weights of class k with its shrunk mean deviation d_k. `weight` (dim, classes) is not shrunk.
        """
        share = self.counts / (self.counts + shrinkage)
        return share, share.square() * (weight * self.delta).sum(0) / 2


class _Choice(NamedTuple):
    """The best discriminant on held-out rows; `loss` is its log-loss on them, and `factor` multiplies its scores."""

    loss: float
    penalty: float
    shrinkage: float
    factor: float


def _fit(rows: PrincipalRows, targets: Tensor, folds: Tensor) -> tuple[Tensor, float]:
    """Fit the probe of one layer for `fit_watching_probes`.

    Return its weights and biases (dim + 1, classes) in the principal axes of the features, and its `c`.
    """
    inputs, num_rows, num_classes = rows.inputs, len(targets), int(targets.max()) + 1
    whole = _Moments(*_class_sums(inputs, targets, num_classes), torch.diag(rows.spread * num_rows))
    parts, held = [], []
    for mask in held_out_rows(targets, folds):
        fold = inputs[mask]
        out = _Moments(*_class_sums(fold, targets[mask], num_classes), fold.double().T @ fold.double())
        parts.append(_Discriminant(whole.minus(out)))
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
    """Return the penalty, shrinkage and factor with the lowest log-loss on held-out rows.

    parts[i] is the discriminant fitted without fold i, and held[i] has the rows of fold i and their classes. First the
    penalty is chosen, then the shrinkage for this penalty. The scores of each candidate are multiplied by its own best
    factor.
    """
    best, weights, scores = _Choice(math.inf, PENALTIES[0], SHRINKAGES[0], 0.0), [], []
    if not parts:
        return best
    truth = torch.cat([targets for _, targets in held])
    prior = torch.cat(
        [part.log_share.expand(len(rows), -1).to(rows) for part, (rows, _) in zip(parts, held, strict=True)]
    )

    def tune(penalty: float, shrinkage: float, weights: list[Tensor], scores: list[Tensor]) -> _Choice:
        shrunk = [part.shrunk(weight, shrinkage) for part, weight in zip(parts, weights, strict=True)]
        whole = torch.cat([each * share.to(each) - q.to(each) for each, (share, q) in zip(scores, shrunk, strict=True)])
        factor = best_factor(prior, whole, truth)
        return _Choice(float(cross_entropy(prior + factor * whole, truth)), penalty, shrinkage, factor)

    # The strongest penalty comes first. The loop stops at the first rise: it assumes a single minimum of the log-loss.
    for penalty in PENALTIES:
        new = [part.weight(penalty) for part in parts]
        logits = [(rows - part.mean.to(rows)) @ w.to(rows) for part, w, (rows, _) in zip(parts, new, held, strict=True)]
        choice = tune(penalty, SHRINKAGES[0], new, logits)
        if choice.loss >= best.loss:
            break
        best, weights, scores = choice, new, logits
    best = min(best, *(tune(best.penalty, shrinkage, weights, scores) for shrinkage in SHRINKAGES[1:]))
    gain = float(cross_entropy(prior, truth)) - best.loss
    return best if gain > LEAST_GAIN else best._replace(factor=0.0)


def best_factor(
    prior: Float[Tensor, "n classes"], scores: Float[Tensor, "n classes"], targets: Int[Tensor, " n"]
) -> float:
    """Return the factor t with the lowest mean log-loss of softmax(prior + t * scores).

    t is 0 or lies in [1/256, 16]. It is accurate to within 7%. The log-loss is convex in t, but has no minimum if all
    rows are classified correctly. One more row is therefore added. Its label is spread over the classes in proportion
    to their shares.
    """
    by_share = (prior.softmax(-1) * scores).sum(-1).mean()
    right = (scores.gather(1, targets[:, None]).sum() + by_share) / (len(targets) + 1)

    def is_below(factor: float) -> bool:
        """Return whether the log-loss of softmax(prior + factor * scores) still falls as `factor` grows."""
        return bool(((prior + factor * scores).softmax(-1) * scores).sum(-1).mean() < right)

    low, high = -8.0, 4.0  # log2 of the smallest and the largest factor t
    if not is_below(2**low):
        return 0.0
    for _ in range(6):
        middle = (low + high) / 2
        low, high = (middle, high) if is_below(2**middle) else (low, middle)
    return float(2 ** ((low + high) / 2))
