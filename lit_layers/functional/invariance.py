"""How far states tell prompts apart, and how little they mind a perturbed wording. All in float64, in nats.

Views of a prompt are pooled vectors of perturbed copies of its text; row i of every view belongs to prompt i.
"""

import math
from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lit_layers.functional._checks import check_option, not_finite, settled, unit_rows, widened, without
from lit_layers.functional.entropy import (
    EPS,
    AtTwo,
    Normalization,
    Side,
    Undefined,
    divided,
    positive,
    renyi,
    renyi_of_matrices,
)
from lit_layers.functional.singular import products, singular_values

View = Float[Tensor, "*n prompts dim"]
PerSet = Float[Tensor, "*n"]
Output = Literal["entropy", "rank"]
_NO_LENGTH = "a row is zero and has no unit length"


def infonce(
    view_a: View,
    view_b: View,
    *,
    temperature: float = 0.1,
    unit: bool = True,
    form: Literal["ntxent", "cross"] = "ntxent",
    undefined: Undefined = "raise",
) -> PerSet:
    """Return the cross-entropy of finding a prompt's other view among all; lower is more invariant.

    "ntxent": each of the 2N rows of both views seeks its partner among the other 2N - 1. Chance (all rows equal) is
    log(2N - 1), range with `unit` [0, log(1 + (2N - 2) e^(2 / temperature))]. "cross": each row of A seeks its partner
    among the N rows of B; chance is log N, and log N minus the value bounds the views' mutual information from below.
    `unit` scales rows to norm 1.

    Unchanged by a joint rotation, the order of prompts, for "ntxent" a swap of the views, with `unit` row scaling.

    Source: Chen et al. 2020 (NT-Xent); van den Oord et al. 2018. Released code of Skean et al.: unit False, and in its
    later release form "cross".

    Raises:
        ValueError: fewer than 2 prompts, an option out of range; with `unit` a zero row, or a row that is not finite
            (NaN there with `undefined="nan"`).
    """
    check_option("form", form, "ntxent", "cross")
    view_a, view_b, problems = _views(view_a, view_b, unit=unit)
    if form == "cross":
        scores = view_a @ view_b.mT / temperature
        partner = scores.diagonal(dim1=-2, dim2=-1)
    else:
        rows = torch.cat([view_a, view_b], dim=-2)  # (*n, 2 prompts, dim)
        scores = rows @ rows.mT / temperature
        partner = torch.cat([(view_a * view_b).sum(-1)] * 2, dim=-1) / temperature
        scores.diagonal(dim1=-2, dim2=-1).fill_(-math.inf)
    return settled("infonce", (scores.logsumexp(-1) - partner).mean(-1).clamp(min=0.0), problems, undefined)


def dime(
    view_a: View,
    view_b: View,
    *,
    alpha: float = 1.0,
    unit: bool = True,
    permutations: int | Int[Tensor, "repeats prompts"] = 10,
    seed: int = 0,
    side: Side = "rows",
    alpha2: AtTwo = "spectrum",
    normalization: Normalization = "raw",
    undefined: Undefined = "raise",
) -> PerSet:
    """Return how much more entropy two views have together once one's prompts are shuffled: their shared information.

    Mean over permutations P of S_alpha(AA' o PBB'P') minus S_alpha(AA' o BB'), o entry by entry. Range about
    [0, log N], slightly below 0 at times. 0 where one view is the same for all prompts, and where the rows of each view
    are orthogonal. A lower bound of the matrix mutual information where diagonals are constant, hence `unit`. Unchanged
    by a rotation of either view and by a joint order of the prompts.

    `permutations` counts those drawn with `seed`, or gives them row by row. `side="smaller"` takes, of more prompts
    than dimensions, the dim x dim matrices and permutes features: another quantity. `alpha2` and `normalization` as in
    matrix_entropy.

    Source: Skean et al. 2023 (DiME). Released code of Skean et al. 2025: unit False, side "smaller", unseeded.

    Raises:
        ValueError: fewer than 2 prompts, an option out of range; a view of zeros, with `unit` a zero row, or a row that
            is not finite (NaN there with `undefined="nan"`).
    """
    check_option("side", side, "rows", "smaller")
    check_option("alpha2", alpha2, "spectrum", "frobenius")
    view_a, view_b, problems = _views(view_a, view_b, unit=unit)
    num_prompts, dim = view_a.shape[-2:]
    transposed = side == "smaller" and num_prompts > dim
    gram_a, gram_b = (products(view.mT if transposed else view) for view in (view_a, view_b))
    if unit:  # rows are of norm 1 or, where theirs was beyond float64, zeros
        empty = [gram.diagonal(dim1=-2, dim2=-1).sum(-1) == 0 for gram in (gram_a, gram_b)]
    else:
        empty = [torch.count_nonzero(view, (-2, -1)) == 0 for view in (view_a, view_b)]
    problems["a view holds nothing but zeros"] = empty[0] | empty[1]
    size = dim if transposed else num_prompts
    orders = _permutations(permutations, size, seed).to(gram_a.device)
    joint = (gram_a * gram_b[..., order, :][..., order] for order in [torch.arange(size), *orders])
    entropies = renyi_of_matrices(joint, alpha, frobenius=alpha2 == "frobenius", size=size)
    values = entropies[1:].mean(0) - entropies[0]
    num_rows = torch.full_like(values, num_prompts)
    return divided("dime", values, problems, num_rows, dim, normalization, undefined)


def lidar(
    views: Float[Tensor, "*n prompts views dim"],
    *,
    delta: float = 1e-4,
    alpha: float = 1.0,
    output: Output = "entropy",
    eps: float = 1e-7,
    alpha2: AtTwo = "spectrum",
    normalization: Normalization = "raw",
    undefined: Undefined = "raise",
) -> PerSet:
    """Return the entropy of the directions that tell prompts apart, measured by the scatter within a prompt's views.

    With the scatter between prompts' means, B, and that within prompts plus delta I, W: S_alpha of the eigenvalues of
    W^(-1/2) B W^(-1/2) over their sum, range [0, log min(N - 1, dim)]. "rank" is exp of their Shannon entropy with
    `eps` added to each of the dim shares, not normalised again.

    Without scatter within it is matrix_entropy of the means with `center`, whatever delta. With delta 0 unchanged by
    any invertible linear map of the features; else by rotation, translation and the order of prompts and views, but not
    by scaling: delta is absolute (`LidarSums.within_over_delta` tells how much it weighs).

    Source: Thilak et al., arXiv 2312.04000 ("rank"); Skean et al., arXiv 2502.02013 ("entropy").

    Raises:
        ValueError: fewer than 2 prompts or views, delta 0 with a scatter within that has no inverse, an option out of
            range; or all means equal, or a value that is not finite (NaN there with `undefined="nan"`).
    """
    options: Any = {"delta": delta, "alpha": alpha, "output": output, "eps": eps}
    options |= {"alpha2": alpha2, "normalization": normalization}
    results = []
    for element in views.reshape(math.prod(views.shape[:-3]), *views.shape[-3:]):
        sums = LidarSums()
        sums.update(element)
        results.append(sums.value_or_reason(**options))
    values = torch.tensor([value for value, _ in results], dtype=torch.float64).reshape(views.shape[:-3])
    problems = {
        reason: torch.tensor([reason == other for _, other in results]).reshape(values.shape)
        for reason in sorted({reason for _, reason in results if reason})
    }
    return settled("lidar", values.to(results[0][0].device if results else values.device), problems, undefined)


class LidarSums:
    """`lidar` of views that come in parts: memory holds the scatter within prompts and their means."""

    def __init__(self) -> None:
        self.means: list[Tensor] = []
        self.scatter: Tensor | None = None  # (dim, dim), over prompts and views
        self.num_views = 0

    @property
    def num_prompts(self) -> int:
        return sum(map(len, self.means))

    def update(self, views: Float[Tensor, "prompts views dim"]) -> None:
        """Add all views of further prompts.

        Raises:
            ValueError: fewer than 2 views, or another number than before.
        """
        views = widened(views)
        if views.shape[1] < 2 or (self.means and views.shape[1] != self.num_views):
            raise ValueError(f"expected at least 2 views of each prompt, as many as before, got {views.shape[1]}")
        self.num_views = views.shape[1]
        # A mean of equal views is off by rounding, one of zeros is not. With t the sum of the differences x from the
        # first of n views, the scatter about the mean is that of x - t (1 - n^(-1/2)) / (n - 1) about 0: one row less.
        apart = views[:, 1:] - views[:, :1]
        total = apart.sum(1)
        self.means.append(views[:, 0] + total / self.num_views)
        apart -= (total * ((1 - self.num_views**-0.5) / (self.num_views - 1)))[:, None]
        rows = apart.flatten(0, 1)
        self.scatter = rows.mT @ rows + (0.0 if self.scatter is None else self.scatter)

    def value(self, *, undefined: Undefined = "raise", **options: Any) -> Tensor:
        """Return `lidar`, with its options, of all prompts so far."""
        value, reason = self.value_or_reason(**options)
        return settled("lidar", value, {reason: torch.tensor(True)} if reason else {}, undefined)

    def within_over_delta(self, delta: float = 1e-4) -> float:
        """Return the mean variance within prompts over delta; below about 10, delta decides along with the states."""
        scatter = self._scatter()
        return (scatter.trace() / (len(scatter) * delta)).item()

    def _scatter(self) -> Tensor:
        if self.scatter is None or self.num_prompts < 2:
            raise ValueError(f"expected at least 2 prompts, got {self.num_prompts}")
        return self.scatter / (self.num_prompts * self.num_views)

    def value_or_reason(
        self,
        *,
        delta: float = 1e-4,
        alpha: float = 1.0,
        output: Output = "entropy",
        eps: float = 1e-7,
        alpha2: AtTwo = "spectrum",
        normalization: Normalization = "raw",
    ) -> tuple[Tensor, str]:
        """Return the value, and why there is none."""
        check_option("output", output, "entropy", "rank")
        check_option("alpha2", alpha2, "spectrum", "frobenius")
        scatter, means = self._scatter(), torch.cat(self.means)
        num_prompts, dim = means.shape
        # one pass for the usual case: what is not finite is so on the diagonal too
        if not (scatter.trace() + means.sum()).isfinite() and (not_finite(scatter) or not_finite(means)):
            return means.new_tensor(0.0), "a value is not finite"
        between = means - means[:1]
        between -= between.mean(0)
        if between.norm() <= max(num_prompts, dim) * EPS * means.norm():
            return means.new_tensor(0.0), "all prompts have the same mean"
        factor = _factor(scatter, delta, most=num_prompts * (self.num_views - 1))
        whitened = torch.linalg.solve_triangular(factor, between.div_(math.sqrt(num_prompts)).mT, upper=False)
        values = singular_values(whitened, torch.tensor(num_prompts - 1, device=means.device))
        values = values.masked_fill(values < max(num_prompts, dim) * EPS * values[0], 0.0).square()
        shares = values / positive(values.sum())
        if output == "rank":
            # the matrix has dim eigenvalues, of which at most as many as there are prompts differ from 0
            spread = torch.cat([shares, shares.new_zeros(max(dim - len(shares), 0))]) + eps
            return torch.special.entr(spread).sum().exp(), ""
        if alpha2 == "frobenius" and alpha == 2:
            entropy = -(values.square().sum() / dim**2).log()
        else:
            entropy = renyi(shares, alpha)
        # NaN where it is divided by log 1
        entropy = divided("lidar", entropy, {}, entropy.new_tensor(num_prompts), dim, normalization, "nan")
        return entropy, f"{normalization} divides by the logarithm of one dimension" if entropy.isnan() else ""


def _factor(scatter: Tensor, delta: float, *, most: int) -> Tensor:
    """Return the lower factor of the scatter within prompts, of rank `most` or less, plus delta on its diagonal."""
    scatter.diagonal().add_(delta)
    factor, failed = torch.linalg.cholesky_ex(scatter)
    pivots = factor.diagonal().square()
    rounded = delta == 0 and (most < len(scatter) or bool(pivots.amin() <= len(scatter) * EPS * pivots.amax()))
    if failed or rounded:
        raise ValueError(
            f"the scatter within prompts has no inverse with delta {delta}: expected a larger delta, or more views"
        )
    return factor


def _views(view_a: View, view_b: View, *, unit: bool) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Return both views as they are compared, and which sets are undefined."""
    view_a, view_b = widened(view_a), widened(view_b)
    if view_a.shape != view_b.shape or view_a.shape[-2] < 2:
        shapes = f"{tuple(view_a.shape)} and {tuple(view_b.shape)}"
        raise ValueError(f"expected two views of one shape (*n, prompts, dim) with 2 prompts or more, got {shapes}")
    broken = not_finite(view_a) | not_finite(view_b)
    problems, views = {"a row is not finite": broken}, []
    for view in (without(view_a, broken), without(view_b, broken)):
        if unit:
            view, no_direction = unit_rows(view, view.new_ones(view.shape[:-1], dtype=torch.bool))
            problems[_NO_LENGTH] = problems.get(_NO_LENGTH, broken) | no_direction.any(-1)
        views.append(view)
    return views[0], views[1], problems


def _permutations(permutations: int | Tensor, size: int, seed: int) -> Tensor:
    """Return permutations (repeats, size)."""
    if isinstance(permutations, Tensor):
        if not (permutations.sort(-1).values == torch.arange(size, device=permutations.device)).all():
            raise ValueError(f"expected each row of permutations to hold every number below {size} once")
        return permutations
    generator = torch.Generator().manual_seed(seed)
    return torch.stack([torch.randperm(size, generator=generator) for _ in range(permutations)])
