"""Entropy and rank of a set of vectors, and invariance of prompts to changes of their wording. All in float64, in nats.

Rows are the tokens of one prompt, or one pooled vector per prompt. Padding on either side never changes a value,
whatever it contains. For every set of rows with the singular values sigma, p = sigma^2 / sum sigma^2 and
q = sigma / sum sigma,

    participation_ratio = exp(S_2) <= exp(S_1) <= effective_rank <= rank <= min(rows, dim),

since p majorises q and entropy is Schur-concave. (Skean et al., theorem 1, states effective_rank <= exp(S_1). Its proof
normalises sigma and sigma^2 at the same time.)
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from lit_layers.functional._checks import (
    Undefined,
    centered,
    check_option,
    checked,
    not_finite,
    real_rows,
    unit_rows,
    widened,
    zeroed,
)
from lit_layers.functional.singular import ENTROPY_MIN_SHARE, eigenvalues, products, singular_values

# Renyi entropies of shares and of positive semi-definite matrices, their normalizations, and their undefined cases.

Normalization = Literal["raw", "logN", "logD", "maxEntropy", "logNlogD"]
Side = Literal["rows", "smaller"]
Alpha2 = Literal["spectrum", "frobenius"]

EPS = torch.finfo(torch.float64).eps


def renyi(shares: Tensor, alpha: float) -> Tensor:
    """Return the Renyi entropy of shares (*n, values) that sum to 1; alpha 1 is Shannon entropy."""
    if alpha == 1:
        values = torch.special.entr(shares).sum(-1)
    elif alpha == math.inf:
        values = -shares.amax(-1).log() if shares.shape[-1] else shares.sum(-1)
    else:
        values = torch.logsumexp(alpha * shares.log(), -1) / (1 - alpha)
    return values.clamp(min=0.0)


def renyi_of_matrices(matrices: Iterable[Tensor], alpha: float, *, frobenius: bool, size: Tensor | int) -> Tensor:
    """Return the Renyi entropies (matrices, *n) of the eigenvalues of each matrix (*n, size, size).

    Negative eigenvalues are set to 0, then all are divided by their sum. With `frobenius` and alpha 2 the entropy of a
    matrix K is -log(sum K^2 / size^2) instead, which is right only if the trace of K equals its size.
    """
    if frobenius and alpha == 2:
        squares = torch.stack([matrix.square().sum((-2, -1)) for matrix in matrices])
        sizes = torch.as_tensor(size, dtype=squares.dtype, device=squares.device).clamp(min=1)
        return -(squares / sizes.square()).log()
    values = torch.stack([eigenvalues(matrix) for matrix in matrices]).clamp(min=0.0)
    values = values.masked_fill(values < values.shape[-1] * EPS * values[..., -1:], 0.0)
    return renyi(values / positive(values.sum(-1, keepdim=True)), alpha)


def normalized(
    metric: str,
    values: Tensor,
    problems: dict[str, Tensor],
    num_rows: Tensor,
    dim: int,
    normalization: str,
    undefined: str,
) -> Tensor:
    """Return the entropies divided by the logarithms that `normalization` names (see `matrix_entropy`).

    `problems` maps each reason why an entropy is undefined to a mask of these entropies. A divisor of 0 is one more
    reason. An undefined entropy becomes NaN if `undefined` is "nan", and otherwise raises ValueError.
    """
    if normalization == "raw":
        return checked(metric, values, problems, undefined)
    log_n = num_rows.clamp(min=1).double().log()
    log_d = torch.full_like(log_n, math.log(max(dim, 1)))
    divisor = {
        "logN": log_n,
        "logD": log_d,
        "maxEntropy": torch.minimum(log_n, log_d),
        "logNlogD": log_n * log_d,
    }[normalization]
    problems = {**problems, f"{normalization} divides by the logarithm of one row or one dimension": divisor == 0}
    return checked(metric, values / positive(divisor), problems, undefined)


def positive(values: Tensor) -> Tensor:
    """Return the values with each 0 replaced by 1, for use as a divisor."""
    return values.masked_fill(values == 0, 1.0)


Rows = Float[Tensor, "*n rows dim"]
Mask = Bool[Tensor, "*n rows"]
PerSet = Float[Tensor, "*n"]


def matrix_entropy(
    rows: Rows,
    mask: Mask | None = None,
    *,
    alpha: float = 1.0,
    center: bool = False,
    unit: bool = False,
    clamp: bool = False,
    side: Side = "rows",
    alpha2: Alpha2 = "spectrum",
    drop_first: int = 0,
    normalization: Normalization = "raw",
    undefined: Undefined = "raise",
) -> PerSet:
    """Return the Renyi entropy of order alpha, in nats, of the normalised eigenvalues of ZZ' (alpha 1: Shannon).

    S_alpha = log(sum_i p_i^alpha) / (1 - alpha), with Z the rows and p_i the eigenvalues of ZZ' divided by their sum.
    Range [0, log min(rows, dim)] for "raw": log N for N orthogonal rows of equal norm, 0 for rank one. Falls with
    alpha. Unchanged by rotation, scaling, row order, sign flips of rows (not with `center` or `clamp`), zero padding of
    features and stacking the rows twice. Unchanged by translation only with `center`. One token of huge norm pulls the
    value to 0, so compare it with and without `drop_first=1`.

    Args:
        rows: One set of vectors, or several in leading dimensions.
        mask: True for real rows.
        alpha: Order of the entropy.
        center: Subtract the mean row.
        unit: Scale rows to norm 1, after `center`.
        clamp: Set negative entries of the Gram matrix to 0, then drop negative eigenvalues.
        side: With `clamp`, "smaller" takes the dim x dim matrix if there are more rows than dim.
        alpha2: "frobenius" computes alpha 2 as -log(sum K^2 / n^2), with n the size of the Gram matrix K. This is right
            only if the trace of K is n.
        drop_first: Number of real rows to remove from the beginning.
        normalization: Divide by the logarithm of the number of used rows (logN), of dim (logD), or of the smaller of
            the two (maxEntropy). logNlogD divides by both logarithms.
        undefined: "raise", or "nan" for NaN instead of an error.

    Source: Giraldo et al. 2014; Skean et al., arXiv 2502.02013, eq. 1. The code of Skean et al. uses `center`, `unit`,
    `clamp`, `side="smaller"` and `alpha2="frobenius"`.

    Raises:
        ValueError: a set without a row, or with only zero rows (with `center`: only equal rows). With `unit`, also a
            set with a zero row. A normalization that divides by log 1. With `undefined="nan"` the value of such a set
            is NaN instead.
    """
    check_option("side", side, "rows", "smaller")
    check_option("alpha2", alpha2, "spectrum", "frobenius")
    if not clamp and (alpha2 == "spectrum" or alpha != 2):
        whole = spectrum(rows, mask, center=center, unit=unit, drop_first=drop_first)
        return whole.entropy(alpha=alpha, normalization=normalization, undefined=undefined)
    rows, num_rows, problems = _prepared(rows, mask, center, unit, drop_first)
    problems[_NOTHING] = ~rows.flatten(-2).any(-1)
    dim = rows.shape[-1]
    values, of_features = rows.new_zeros(num_rows.shape), (num_rows > dim) & (side == "smaller")
    for transposed in (False, True):
        chosen = of_features == transposed
        if chosen.any():
            sets = rows[chosen]  # (sets, rows, dim)
            gram = products(sets.mT if transposed else sets)
            size = dim if transposed else num_rows[chosen]
            frobenius = alpha2 == "frobenius"
            gram = gram.clamp(min=0.0) if clamp else gram
            values[chosen] = renyi_of_matrices([gram], alpha, frobenius=frobenius, size=size)[0]
    return normalized("matrix_entropy", values, problems, num_rows, dim, normalization, undefined)


def dataset_entropy(pooled: Float[Tensor, "*n prompts dim"], **options: Any) -> PerSet:
    """Return the `matrix_entropy` of pooled vectors, one for each prompt; `options` are passed on to it.

    It grows with the number of prompts, so compare only sets of equally many prompts. To follow the code of Skean et
    al., pool the tokens by `pool(..., pooling="centered_unit_mean")`, then pass `clamp=True` and `side="smaller"`.

    Source: Skean et al., arXiv 2502.02013, section 3.3.1.
    """
    return matrix_entropy(pooled, **options)


def effective_rank(rows: Rows, mask: Mask | None = None, *, undefined: Undefined = "raise", **options: Any) -> PerSet:
    """Return exp of the Shannon entropy of the singular values (not of their squares), as shares of their sum.

    Range [1, rank]: N for N orthogonal rows of equal norm, 1 for rank one. The options `center`, `unit` and
    `drop_first`, the invariances and the undefined sets are those of `matrix_entropy`.

    Source: Roy & Vetterli 2007.
    """
    return spectrum(rows, mask, **options).effective_rank(undefined=undefined)


def rankme(
    rows: Rows, mask: Mask | None = None, *, eps: float = 1e-7, undefined: Undefined = "raise", **options: Any
) -> PerSet:
    """Return `effective_rank` with `eps` added to each of the min(rows, dim) shares, which are not normalised again.

    Range, options and undefined sets are those of `effective_rank`.

    Source: Garrido et al. 2023.
    """
    return spectrum(rows, mask, **options).rankme(eps=eps, undefined=undefined)


def participation_ratio(
    rows: Rows, mask: Mask | None = None, *, undefined: Undefined = "raise", **options: Any
) -> PerSet:
    """Return (sum sigma^2)^2 / sum sigma^4 = exp(S_2): about how many directions carry the variance.

    Range [1, rank]: N for N orthogonal rows of equal norm, 1 for rank one. Options and undefined sets are those of
    `effective_rank`.
    """
    return spectrum(rows, mask, **options).participation_ratio(undefined=undefined)


@dataclass(frozen=True, eq=False)
class Spectrum:
    """Singular values of each set of rows, from which all entropies and ranks of this module follow."""

    values: Float[Tensor, "*n rank"]  # divided by the largest, descending; values of rounding size are set to 0
    num_rows: Int[Tensor, "*n"]
    dim: int
    problems: dict[str, Bool[Tensor, "*n"]] = field(default_factory=dict)

    def entropy(
        self, *, alpha: float = 1.0, normalization: Normalization = "raw", undefined: Undefined = "raise"
    ) -> PerSet:
        """Return the `matrix_entropy` of each set of rows."""
        squares = self.values.square()
        values = renyi(squares / positive(squares.sum(-1, keepdim=True)), alpha)
        return normalized("matrix_entropy", values, self.problems, self.num_rows, self.dim, normalization, undefined)

    def effective_rank(self, *, undefined: Undefined = "raise") -> PerSet:
        return checked("effective_rank", torch.special.entr(self._shares()).sum(-1).exp(), self.problems, undefined)

    def rankme(self, *, eps: float = 1e-7, undefined: Undefined = "raise") -> PerSet:
        index = torch.arange(self.values.shape[-1], device=self.values.device)
        valid = index < self.num_rows[..., None].clamp(max=self.dim)
        shares = (self._shares() + eps).masked_fill(~valid, 0.0)
        return checked("rankme", torch.special.entr(shares).sum(-1).exp(), self.problems, undefined)

    def participation_ratio(self, *, undefined: Undefined = "raise") -> PerSet:
        squares = self.values.square()
        ratio = squares.sum(-1).square() / positive(squares.square().sum(-1))
        return checked("participation_ratio", ratio, self.problems, undefined)

    def _shares(self) -> Tensor:
        return self.values / positive(self.values.sum(-1, keepdim=True))


_NOTHING = "all rows are zero, or equal to the mean that is subtracted"


def spectrum(
    rows: Rows, mask: Mask | None = None, *, center: bool = False, unit: bool = False, drop_first: int = 0
) -> Spectrum:
    """Return the singular values of each set of rows, from one decomposition."""
    rows, num_rows, problems = _prepared(rows, mask, center, unit, drop_first)
    dim = rows.shape[-1]
    values = singular_values(rows, num_rows - 1 if center else num_rows, min_share=ENTROPY_MIN_SHARE)
    largest = values[..., :1] if values.shape[-1] else values.new_zeros(*values.shape[:-1], 1)
    values = values / positive(largest)
    floor = num_rows.clamp(min=dim)[..., None] * EPS
    problems[_NOTHING] = largest.squeeze(-1) == 0
    return Spectrum(values.masked_fill(values < floor, 0.0), num_rows, dim, problems)


def _prepared(
    rows: Rows, mask: Mask | None, center: bool, unit: bool, drop_first: int
) -> tuple[Rows, Tensor, dict[str, Tensor]]:
    """Return the prepared rows of each set, the number of rows per set, and masks of sets whose metric is undefined.

    The rows that `mask` and `drop_first` keep come first, centred and scaled as the options say. Zeros fill the other
    rows. The masks (*n) are in a dict, whose keys are the reasons why the metric is undefined.
    """
    rows, real = real_rows(widened(rows), mask, drop_first)
    num_rows = real.sum(-1)
    broken = not_finite(rows)
    rows = zeroed(rows, broken)
    problems = {"a row is not finite": broken, "there is no row": num_rows == 0}
    if center:
        rows = centered(rows, real)
    if unit:
        rows, no_direction = unit_rows(rows, real, after_centering=center)
        problems["a row is zero, or equal to the mean that is subtracted, and has no unit length"] = no_direction.any(
            -1
        )
    return rows, num_rows, problems


# How well states distinguish prompts, and how invariant they are to perturbations of the text. Views of a prompt are
# pooled vectors of perturbed copies of its text. Row i of every view belongs to prompt i.

View = Float[Tensor, "*n prompts dim"]
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
    """Return the cross-entropy of identifying the other view of a prompt by its similarity; lower is more invariant.

    N is the number of prompts. With `form="ntxent"`, each of the 2N rows of both views has to pick its partner among
    the other 2N - 1 rows. Chance (all rows equal) is log(2N - 1). The range with `unit` is
    [0, log(1 + (2N - 2) e^(2 / temperature))]. With `form="cross"`, each row of `view_a` has to pick its partner among
    the N rows of `view_b`. Chance is log N, and log N minus the value is a lower bound of the mutual information of the
    views. `unit` scales rows to norm 1.

    Unchanged by a joint rotation and by the order of prompts. "ntxent" is unchanged by a swap of the views. With `unit`
    the value is unchanged by scaling of rows.

    Source: Chen et al. 2020 (NT-Xent); van den Oord et al. 2018. The code of Skean et al. uses `unit=False`, and its
    later release `form="cross"`.

    Raises:
        ValueError: fewer than 2 prompts, an option out of range; with `unit` a zero row, or a row that is not finite
            (NaN instead with `undefined="nan"`).
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
    return checked("infonce", (scores.logsumexp(-1) - partner).mean(-1).clamp(min=0.0), problems, undefined)


def dime(
    view_a: View,
    view_b: View,
    *,
    alpha: float = 1.0,
    unit: bool = True,
    permutations: int | Int[Tensor, "repeats prompts"] = 10,
    seed: int = 0,
    side: Side = "rows",
    alpha2: Alpha2 = "spectrum",
    normalization: Normalization = "raw",
    undefined: Undefined = "raise",
) -> PerSet:
    """Return how much the joint entropy of two views grows if the prompts of one are shuffled: shared information.

    With A and B the views of N prompts, this is the mean over permutations P of S_alpha(AA' o PBB'P') minus
    S_alpha(AA' o BB'). S_alpha is the Renyi entropy of the eigenvalues, o the elementwise product. Range about
    [0, log N], sometimes slightly below 0. It is 0 if one view is the same for all prompts, or if the rows of each view
    are orthogonal. It is a lower bound of the matrix mutual information if the diagonals of AA' and BB' are constant,
    which `unit` ensures. Unchanged by a rotation of either view and by a common reordering of the prompts.

    `permutations` is the number of permutations drawn with `seed`, or a tensor with one permutation per row. If there
    are more prompts than dimensions, `side="smaller"` takes the dim x dim matrices and permutes features, which is
    a different quantity. `alpha2` and `normalization` are those of `matrix_entropy`.

    Source: Skean et al. 2023 (DiME). The code of Skean et al. 2025 uses `unit=False`, `side="smaller"` and no seed.

    Raises:
        ValueError: fewer than 2 prompts, an option out of range; a view of zeros, with `unit` a zero row, or a row that
            is not finite (NaN instead with `undefined="nan"`).
    """
    check_option("side", side, "rows", "smaller")
    check_option("alpha2", alpha2, "spectrum", "frobenius")
    view_a, view_b, problems = _views(view_a, view_b, unit=unit)
    num_prompts, dim = view_a.shape[-2:]
    transposed = side == "smaller" and num_prompts > dim
    gram_a, gram_b = (products(view.mT if transposed else view) for view in (view_a, view_b))
    # With `unit`, a row has norm 1, or 0 if its norm overflowed float64. So the diagonal of a Gram matrix is enough to
    # find a view of zeros.
    if unit:
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
    return normalized("dime", values, problems, num_rows, dim, normalization, undefined)


class LidarSums:
    """Running sums for `lidar` over batches of prompts.

    They contain the scatter within prompts and the mean of each prompt, but not the views themselves.
    """

    def __init__(self, views: Float[Tensor, "prompts views dim"] | None = None) -> None:
        self.means: list[Tensor] = []
        self.scatter: Tensor | None = None  # (dim, dim), over prompts and views
        self.num_views = 0
        if views is not None:
            self.update(views)

    @property
    def num_prompts(self) -> int:
        return sum(map(len, self.means))

    def update(self, views: Float[Tensor, "prompts views dim"]) -> None:
        """Add all views of further prompts.

        Raises:
            ValueError: fewer than 2 views, or a number of views that differs from the first batch.
        """
        views = widened(views)
        if views.shape[1] < 2 or (self.means and views.shape[1] != self.num_views):
            raise ValueError(f"expected at least 2 views of each prompt, as many as before, got {views.shape[1]}")
        self.num_views = views.shape[1]
        # Differences x from the first view are exactly 0 for equal views. Differences from a rounded mean are not. With
        # t the sum of the x over n views, the scatter about the mean equals the scatter about 0 of the n - 1 rows
        # x - t (1 - n^(-1/2)) / (n - 1).
        diffs = views[:, 1:] - views[:, :1]
        total = diffs.sum(1)
        self.means.append(views[:, 0] + total / self.num_views)
        diffs -= (total * ((1 - self.num_views**-0.5) / (self.num_views - 1)))[:, None]
        rows = diffs.flatten(0, 1)
        self.scatter = rows.mT @ rows + (0.0 if self.scatter is None else self.scatter)

    def scatter_over_delta(self, delta: float = 1e-4) -> float:
        """Return the mean variance within prompts divided by delta.

        If it is below about 10, the value of `lidar` depends on delta as much as on the states.
        """
        scatter = self.mean_scatter()
        return (scatter.trace() / (len(scatter) * delta)).item()

    def mean_scatter(self) -> Tensor:
        """Return the scatter within prompts (dim, dim), averaged over prompts and views."""
        if self.scatter is None or self.num_prompts < 2:
            raise ValueError(f"expected at least 2 prompts, got {self.num_prompts}")
        return self.scatter / (self.num_prompts * self.num_views)


def lidar(
    views: Float[Tensor, "*n prompts views dim"] | LidarSums,
    *,
    delta: float = 1e-4,
    alpha: float = 1.0,
    output: Output = "entropy",
    eps: float = 1e-7,
    alpha2: Alpha2 = "spectrum",
    normalization: Normalization = "raw",
    undefined: Undefined = "raise",
) -> PerSet:
    """Return the entropy of the scatter between prompts, measured in units of the scatter between views of a prompt.

    Let B be the scatter of the prompts' means and W the scatter within prompts plus delta I. The shares are the dim
    eigenvalues of W^(-1/2) B W^(-1/2), divided by their sum. The value is the Renyi entropy S_alpha of the shares.
    Range [0, log min(N - 1, dim)] for N prompts. With `output="rank"` the value is the exponential of the Shannon
    entropy instead, after `eps` is added to each share. The shares are not normalised again.

    Without scatter within prompts, the value is `matrix_entropy` of the means with `center`, for any delta. With delta
    0 it is unchanged by any invertible linear map of the features. With delta > 0 it is unchanged by rotation,
    translation and the order of prompts and views, but not by scaling, because delta is absolute.
    `LidarSums.scatter_over_delta` shows whether delta is small enough.

    Source: Thilak et al., arXiv 2312.04000 ("rank"); Skean et al., arXiv 2502.02013 ("entropy").

    Raises:
        ValueError: fewer than 2 prompts or views, an option out of range, or delta 0 with a scatter within prompts that
            has no inverse. Equal means of all prompts, or a value that is not finite (NaN with `undefined="nan"`).
    """
    check_option("output", output, "entropy", "rank")
    check_option("alpha2", alpha2, "spectrum", "frobenius")
    if isinstance(views, LidarSums):
        shape, sets = torch.Size(), [views]
    else:
        shape = views.shape[:-3]
        sets = map(LidarSums, views.reshape(math.prod(shape), *views.shape[-3:]))
    results = [_lidar(each, delta, alpha, output, eps, alpha2, normalization) for each in sets]
    # Stack on the device. A list of Python numbers would synchronise once for each value.
    values = (torch.stack([value for value, _ in results]) if results else torch.empty(0)).double().reshape(shape)
    problems = {
        reason: torch.tensor([reason == other for _, other in results]).reshape(values.shape)
        for reason in sorted({reason for _, reason in results if reason})
    }
    return checked("lidar", values, problems, undefined)


def _lidar(
    sums: LidarSums,
    delta: float,
    alpha: float,
    output: Output,
    eps: float,
    alpha2: Alpha2,
    normalization: Normalization,
) -> tuple[Tensor, str]:
    """Return the `lidar` of one set of views, and the reason why it is undefined ("" if it is defined)."""
    scatter, means = sums.mean_scatter(), torch.cat(sums.means)
    num_prompts, dim = means.shape
    # Usually one cheap pass suffices: a non-finite view also makes the diagonal of the scatter non-finite.
    if not (scatter.trace() + means.sum()).isfinite() and (not_finite(scatter) or not_finite(means)):
        return means.new_tensor(0.0), "a value is not finite"
    between = means - means[:1]
    between -= between.mean(0)
    if between.norm() <= max(num_prompts, dim) * EPS * means.norm():
        return means.new_tensor(0.0), "all prompts have the same mean"
    factor = _factor(scatter, delta, max_rank=num_prompts * (sums.num_views - 1))
    whitened = torch.linalg.solve_triangular(factor, between.div_(math.sqrt(num_prompts)).mT, upper=False)
    values = singular_values(whitened, torch.tensor(num_prompts - 1, device=means.device))
    values = values.masked_fill(values < max(num_prompts, dim) * EPS * values[0], 0.0).square()
    shares = values / positive(values.sum())
    if output == "rank":
        # The matrix has dim eigenvalues, of which at most num_prompts - 1 differ from 0. All dim shares get eps.
        spread = torch.cat([shares, shares.new_zeros(max(dim - len(shares), 0))]) + eps
        return torch.special.entr(spread).sum().exp(), ""
    if alpha2 == "frobenius" and alpha == 2:
        entropy = -(values.square().sum() / dim**2).log()
    else:
        entropy = renyi(shares, alpha)
    # The result is NaN only if the normalization divides by log 1.
    entropy = normalized("lidar", entropy, {}, entropy.new_tensor(num_prompts), dim, normalization, "nan")
    return entropy, f"{normalization} divides by the logarithm of one dimension" if entropy.isnan() else ""


def _factor(scatter: Tensor, delta: float, *, max_rank: int) -> Tensor:
    """Return the lower Cholesky factor of `scatter` + delta I; `max_rank` is the largest possible rank of `scatter`."""
    scatter.diagonal().add_(delta)
    factor, failed = torch.linalg.cholesky_ex(scatter)
    pivots = factor.diagonal().square()
    rounded = delta == 0 and (max_rank < len(scatter) or bool(pivots.amin() <= len(scatter) * EPS * pivots.amax()))
    if failed or rounded:
        raise ValueError(
            f"the scatter within prompts has no inverse with delta {delta}: expected a larger delta, or more views"
        )
    return factor


def _views(view_a: View, view_b: View, *, unit: bool) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Return both views in float64, and masks of the sets of prompts whose metric is undefined.

    The masks (*n) are in a dict, whose keys are the reasons why the metric is undefined. With `unit`, each row of the
    views is scaled to norm 1.
    """
    view_a, view_b = widened(view_a), widened(view_b)
    if view_a.shape != view_b.shape or view_a.shape[-2] < 2:
        shapes = f"{tuple(view_a.shape)} and {tuple(view_b.shape)}"
        raise ValueError(f"expected two views of one shape (*n, prompts, dim) with 2 prompts or more, got {shapes}")
    broken = not_finite(view_a) | not_finite(view_b)
    problems, views = {"a row is not finite": broken}, []
    for view in (zeroed(view_a, broken), zeroed(view_b, broken)):
        if unit:
            view, no_direction = unit_rows(view, view.new_ones(view.shape[:-1], dtype=torch.bool))
            problems[_NO_LENGTH] = problems.get(_NO_LENGTH, broken) | no_direction.any(-1)
        views.append(view)
    return views[0], views[1], problems


def _permutations(permutations: int | Tensor, size: int, seed: int) -> Tensor:
    """Return `permutations` if it is a tensor, else that number of random permutations, (permutations, size)."""
    if isinstance(permutations, Tensor):
        return permutations
    generator = torch.Generator().manual_seed(seed)
    return torch.stack([torch.randperm(size, generator=generator) for _ in range(permutations)])
