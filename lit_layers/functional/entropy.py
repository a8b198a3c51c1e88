"""Entropy and rank of a set of vectors, from the singular values of its matrix. All computed in float64, in nats.

Rows are the tokens of one prompt, or one pooled vector per prompt. Padding, on whichever side and whatever it holds,
never enters a value. For every set, with p = sigma^2 / sum sigma^2 and q = sigma / sum sigma,

    participation_ratio = exp(S_2) <= exp(S_1) <= effective_rank <= rank <= min(rows, dim),

since p majorises q and entropy is Schur-concave. (Skean et al., theorem 1, states effective_rank <= exp(S_1): its proof
normalises sigma and sigma^2 at once.)
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
    not_finite,
    real_rows,
    settled,
    unit_rows,
    widened,
    without,
)
from lit_layers.functional.singular import LEAST_IN_ENTROPIES, eigenvalues, products, singular_values

# Renyi entropies of shares and of positive semi-definite matrices, what they are divided by, where they are undefined.
#
# All in float64, in nats.

Normalization = Literal["raw", "logN", "logD", "maxEntropy", "logNlogD"]
Side = Literal["rows", "smaller"]
AtTwo = Literal["spectrum", "frobenius"]

EPS = torch.finfo(torch.float64).eps


def renyi(shares: Tensor, alpha: float) -> Tensor:
    """Return the Renyi entropy of shares (*n, values) that sum to 1; alpha 1 is Shannon's."""
    if alpha == 1:
        values = torch.special.entr(shares).sum(-1)
    elif alpha == math.inf:
        values = -shares.amax(-1).log() if shares.shape[-1] else shares.sum(-1)
    else:
        values = torch.logsumexp(alpha * shares.log(), -1) / (1 - alpha)
    return values.clamp(min=0.0)


def renyi_of_matrices(matrices: Iterable[Tensor], alpha: float, *, frobenius: bool, size: Tensor | int) -> Tensor:
    """Return the Renyi entropies (matrices, *n) of the positive eigenvalues of each (*n, size, size) over their sum.

    With `frobenius` and alpha 2 from the entries instead: -log(sum K^2 / size^2), right only if the trace is the size.
    """
    if frobenius and alpha == 2:
        squares = torch.stack([matrix.square().sum((-2, -1)) for matrix in matrices])
        sizes = torch.as_tensor(size, dtype=squares.dtype, device=squares.device).clamp(min=1)
        return -(squares / sizes.square()).log()
    values = torch.stack([eigenvalues(matrix) for matrix in matrices]).clamp(min=0.0)
    values = values.masked_fill(values < values.shape[-1] * EPS * values[..., -1:], 0.0)
    return renyi(values / positive(values.sum(-1, keepdim=True)), alpha)


def divided(
    metric: str,
    values: Tensor,
    problems: dict[str, Tensor],
    num_rows: Tensor,
    dim: int,
    normalization: str,
    undefined: str,
) -> Tensor:
    """Return the entropies divided as `normalization` says, and NaN or an error for those with a problem."""
    if normalization == "raw":
        return settled(metric, values, problems, undefined)
    log_n = num_rows.clamp(min=1).double().log()
    log_d = torch.full_like(log_n, math.log(max(dim, 1)))
    divisor = {
        "logN": log_n,
        "logD": log_d,
        "maxEntropy": torch.minimum(log_n, log_d),
        "logNlogD": log_n * log_d,
    }[normalization]
    problems = {**problems, f"{normalization} divides by the logarithm of one row or one dimension": divisor == 0}
    return settled(metric, values / positive(divisor), problems, undefined)


def positive(values: Tensor) -> Tensor:
    """Return the values with each 0 replaced by 1, to divide by."""
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
    alpha2: AtTwo = "spectrum",
    drop_first: int = 0,
    normalization: Normalization = "raw",
    undefined: Undefined = "raise",
) -> PerSet:
    """Return the Renyi entropy of order alpha, in nats, of the eigenvalues of ZZ' over their sum (alpha 1: Shannon's).

    Range [0, log min(rows, dim)] for "raw"; log N for N orthogonal rows of equal norm, 0 for rank one; falls with
    alpha. Unchanged by rotation, scaling, row order, sign flips of rows (not with `center` or `clamp`), zero padding of
    features and stacking the rows twice; by translation only with `center`.

    In this order: the first `drop_first` real rows go, `center` subtracts the mean row, `unit` scales rows to norm 1,
    `clamp` sets negative entries of the Gram matrix to 0 and then drops negative eigenvalues. `side="smaller"` clamps
    the dim x dim matrix where there are more rows than dim. `alpha2="frobenius"` is, for alpha 2 alone,
    -log(sum K^2 / n^2) with n the size of the Gram matrix K, right only if its trace is n. `normalization` divides by
    the logarithm of the number of rows used (logN), of dim (logD), of the smaller (maxEntropy) or by both (logNlogD).

    One token of huge norm sends the value to 0: look at it with and without `drop_first=1`.

    Source: Giraldo et al. 2014; Skean et al., arXiv 2502.02013, eq. 1. Their released code is center, unit, clamp,
    side "smaller", for alpha 2 alpha2 "frobenius".

    Raises:
        ValueError: a set without a row or with nothing but zeros (with `center`: equal rows), with `unit` a zero row,
            or a normalization by log 1; NaN there with `undefined="nan"`.
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
    return divided("matrix_entropy", values, problems, num_rows, dim, normalization, undefined)


def dataset_entropy(pooled: Float[Tensor, "*n prompts dim"], **options: Any) -> PerSet:
    """Return matrix_entropy, with its options, of one pooled vector per prompt.

    It grows with the number of prompts: compare equal numbers.

    Released code pools tokens centred and scaled to norm 1 within each prompt, and takes clamp, side "smaller".

    Source: Skean et al., arXiv 2502.02013, section 3.3.1.
    """
    return matrix_entropy(pooled, **options)


def effective_rank(rows: Rows, mask: Mask | None = None, *, undefined: Undefined = "raise", **options: Any) -> PerSet:
    """Return the exponential of the entropy of the singular values (not squared) over their sum.

    Range [1, rank]: N for N orthogonal rows of equal norm, 1 for rank one. The options `center`, `unit` and
    `drop_first`, invariances and undefined sets as in matrix_entropy.

    Source: Roy & Vetterli 2007.
    """
    return spectrum(rows, mask, **options).effective_rank(undefined=undefined)


def rankme(
    rows: Rows, mask: Mask | None = None, *, eps: float = 1e-7, undefined: Undefined = "raise", **options: Any
) -> PerSet:
    """Return effective_rank with `eps` added to each of the min(rows, dim) shares, which are not normalised again.

    Source: Garrido et al. 2023. Otherwise as effective_rank.
    """
    return spectrum(rows, mask, **options).rankme(eps=eps, undefined=undefined)


def participation_ratio(
    rows: Rows, mask: Mask | None = None, *, undefined: Undefined = "raise", **options: Any
) -> PerSet:
    """Return (sum sigma^2)^2 / sum sigma^4 = exp(S_2): about how many directions carry the variance.

    Range [1, rank]: N for N orthogonal rows of equal norm, 1 for rank one. Otherwise as effective_rank.
    """
    return spectrum(rows, mask, **options).participation_ratio(undefined=undefined)


@dataclass(frozen=True, eq=False)
class Spectrum:
    """Singular values of each set, from which every quantity of this module follows: one decomposition serves all."""

    values: Float[Tensor, "*n rank"]  # descending, largest scaled to 1, 0 at the level of rounding
    num_rows: Int[Tensor, "*n"]
    dim: int
    problems: dict[str, Bool[Tensor, "*n"]] = field(default_factory=dict)

    def entropy(
        self, *, alpha: float = 1.0, normalization: Normalization = "raw", undefined: Undefined = "raise"
    ) -> PerSet:
        """Return matrix_entropy of the sets."""
        squares = self.values.square()
        values = renyi(squares / positive(squares.sum(-1, keepdim=True)), alpha)
        return divided("matrix_entropy", values, self.problems, self.num_rows, self.dim, normalization, undefined)

    def effective_rank(self, *, undefined: Undefined = "raise") -> PerSet:
        return settled("effective_rank", torch.special.entr(self._shares()).sum(-1).exp(), self.problems, undefined)

    def rankme(self, *, eps: float = 1e-7, undefined: Undefined = "raise") -> PerSet:
        places = torch.arange(self.values.shape[-1], device=self.values.device)
        there = places < self.num_rows[..., None].clamp(max=self.dim)
        shares = (self._shares() + eps).masked_fill(~there, 0.0)
        return settled("rankme", torch.special.entr(shares).sum(-1).exp(), self.problems, undefined)

    def participation_ratio(self, *, undefined: Undefined = "raise") -> PerSet:
        squares = self.values.square()
        ratio = squares.sum(-1).square() / positive(squares.square().sum(-1))
        return settled("participation_ratio", ratio, self.problems, undefined)

    def _shares(self) -> Tensor:
        return self.values / positive(self.values.sum(-1, keepdim=True))


_NOTHING = "all rows are zero, or equal to the mean that is subtracted"


def spectrum(
    rows: Rows, mask: Mask | None = None, *, center: bool = False, unit: bool = False, drop_first: int = 0
) -> Spectrum:
    """Return the singular values of each set of rows, from one decomposition."""
    rows, num_rows, problems = _prepared(rows, mask, center, unit, drop_first)
    dim = rows.shape[-1]
    values = singular_values(rows, num_rows - 1 if center else num_rows, least_share=LEAST_IN_ENTROPIES)
    largest = values[..., :1] if values.shape[-1] else values.new_zeros(*values.shape[:-1], 1)
    values = values / positive(largest)
    floor = num_rows.clamp(min=dim)[..., None] * EPS
    problems[_NOTHING] = largest.squeeze(-1) == 0
    return Spectrum(values.masked_fill(values < floor, 0.0), num_rows, dim, problems)


def _prepared(
    rows: Rows, mask: Mask | None, center: bool, unit: bool, drop_first: int
) -> tuple[Rows, Tensor, dict[str, Tensor]]:
    """Return the real rows with zeros after them, how many there are, and which sets are undefined, by reason."""
    rows, kept = real_rows(widened(rows), mask, drop_first)
    num_rows = kept.sum(-1)
    broken = not_finite(rows)
    rows = without(rows, broken)
    problems = {"a row is not finite": broken, "there is no row": num_rows == 0}
    if center:
        rows = centered(rows, kept)
    if unit:
        rows, no_direction = unit_rows(rows, kept, after_centering=center)
        problems["a row is zero, or equal to the mean that is subtracted, and has no unit length"] = no_direction.any(
            -1
        )
    return rows, num_rows, problems
