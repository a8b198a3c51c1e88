"""Leading singular vectors of square matrices, each with a bound on what is left of error."""

import math
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from lit_layers.functional._certificate import miscoupling_bounds
from lit_layers.functional._chebyshev import leading_vectors, starting_block


class Factors(NamedTuple):
    """Leading singular triples (*n): `left` and `right` (.., dim, count), `values` (.., count) descending.

    `bounds` (.., count): how far `miscoupling` in the leading K = 1, 2, .. directions (p = 2) may be from its value
    with exact singular vectors of these very matrices, whatever the other matrix is; infinite where a tie leaves them
    undetermined. `turns` (.., count): how far the leading K vectors on both sides may be turned, as a root mean square.
    """

    left: Tensor
    values: Tensor
    right: Tensor
    bounds: Tensor
    turns: Tensor


def singular_factors(
    matrices: Float[Tensor, "*n dim dim"],
    count: int | None = None,
    *,
    tolerance: float = 1e-3,
    start: Float[Tensor, "*n dim any"] | None = None,
) -> Factors:
    """Leading `count` singular triples (all for None), with `bounds` of at most `tolerance` wherever float64 allows.

    For dim > 256 and count up to a third of dim, from J'J formed in float64, by filtered subspace iteration with a
    proof that nothing was missed. Otherwise, and for matrices whose bound that does not bring to `tolerance` (ties,
    tiny singular values), by the whole decomposition in float64. `start` are right singular vectors of similar ones,
    such as an earlier checkpoint's, any number of them: they save time and change the result within its bounds only.
    The same input gives the same output; no global random state is used.

    `values` are off by less than `tolerance`^2 of themselves, which is not in `bounds`. Results are in float64 for dim
    <= 512, float64 input or a tolerance below 1e-5, which float32 vectors cannot hold; else in float32.

    The steps are the same on every device; the whole decomposition is `torch.linalg.svd` with its default driver (no
    drivers were compared on a GPU).

    Raises:
        ValueError: count outside 1..dim, a tolerance that is not positive, a start that does not fit or is not finite.
    """
    matrices = widen(matrices)
    dim = matrices.shape[-1]
    if count is not None and not 1 <= count <= dim:
        raise ValueError(f"expected a count between 1 and the dimension {dim}, got {count}")
    if not tolerance > 0:
        raise ValueError(f"expected a tolerance above 0, got {tolerance}")
    _check_start(start, matrices)
    dtype = torch.float64 if tolerance < 1e-5 else matrices.dtype
    count = count or dim
    flat = matrices.reshape(-1, dim, dim)
    at_once = max(1, 2**31 // (60 * dim**2))  # some 2 GB
    if dim <= 256 or 3 * count > dim:
        parts = [_whole(piece.double(), count) for piece in flat.split(at_once)]
    else:
        known = None if start is None else start.reshape(len(flat), dim, start.shape[-1])
        size = 1 if flat.device.type == "cpu" else at_once  # a CPU gains nothing by more
        pieces = zip(flat.split(size), starting_block(known, len(flat), dim, count).split(size), strict=True)
        parts = [_leading(piece, count, tolerance, first, dtype) for piece, first in pieces]
    left, values, right, bounds, turns = (
        torch.cat(part).reshape(*matrices.shape[:-2], *part[0].shape[1:]) for part in zip(*parts, strict=True)
    )
    bounds = bounds + _output_rounding(dtype, bounds)
    return Factors(left.to(dtype), values.to(dtype), right.to(dtype), bounds, turns)


def widen(matrices: Tensor) -> Tensor:
    """Float64 where the decomposition is small or float64 came in, else float32."""
    if matrices.ndim < 2 or matrices.shape[-1] != matrices.shape[-2]:
        raise ValueError(f"expected square matrices (*n, dim, dim), got {tuple(matrices.shape)}")
    if not matrices.is_floating_point():
        raise TypeError(f"expected floating-point Jacobians, got {matrices.dtype}")
    wide = matrices.dtype == torch.float64 or matrices.shape[-1] <= 512
    return matrices.detach().to(torch.float64 if wide else torch.float32)


def _check_start(start: Tensor | None, matrices: Tensor) -> None:
    if start is None:
        return
    if start.ndim != matrices.ndim or start.shape[:-1] != matrices.shape[:-1]:
        raise ValueError(f"expected a start (*n, dim, any) for {tuple(matrices.shape)}, got {tuple(start.shape)}")
    if not bool(start.isfinite().all()):
        raise ValueError("expected finite vectors as a start, got NaN or infinity among them")


def _leading(matrices: Tensor, count: int, tolerance: float, start: Tensor, dtype: torch.dtype) -> Factors:
    """Of matrices (n, dim, dim), in float64, by iteration where that meets the tolerance, else whole."""
    allowed = tolerance - float(_output_rounding(dtype, matrices.new_empty(count))[-1])
    found = leading_vectors(_scaled_gram(matrices), count, allowed, start)
    images = matrices.double() @ found.right
    values = torch.linalg.vector_norm(images, dim=-2)
    bounds = miscoupling_bounds(found.left_errors, found.right_errors)
    turns = _mean_turns(found.left_errors, found.right_errors)
    factors = Factors(images / values[:, None], values, found.right, bounds, turns)
    failed = ~(bounds[:, -1] <= allowed)
    if bool(failed.any()):
        for part, whole in zip(factors, _whole(matrices[failed].double(), count), strict=True):
            part[failed] = whole
    return factors


def _scaled_gram(matrices: Tensor) -> Tensor:
    """J'J in float64, of J scaled to a norm of about 1; zero where the norm is none, for the whole decomposition.

    A function of its own, so that no copy of the matrices is there while their vectors are sought: at dim 8,192 each
    float64 copy of one is 0.5 GB.
    """
    matrices = matrices.double()
    sizes = torch.linalg.matrix_norm(matrices, keepdim=True)
    known = sizes.isfinite() & (sizes > 0)
    matrices = matrices / torch.where(known, sizes, 1).log2().floor().exp2()  # by a power of two: exact
    if not bool(known.all()):
        matrices = torch.where(known, matrices, 0)
    return matrices.mT @ matrices


def _output_rounding(dtype: torch.dtype, bounds: Tensor) -> Tensor:
    """What rounding both bases and the values of a result to `dtype` adds to the bound of each K."""
    number = torch.arange(1, bounds.shape[-1] + 1, dtype=torch.float64, device=bounds.device)
    return torch.finfo(dtype).eps * (number.sqrt() + 2)


def _whole(matrices: Tensor, count: int) -> Factors:
    left, values, right = torch.linalg.svd(matrices)
    # LAPACK's backward error, as a residual
    residual = math.sqrt(matrices.shape[-1]) * torch.finfo(matrices.dtype).eps * values[..., :1]
    turns = _turns(residual.expand_as(values), torch.nn.functional.pad(values, (0, 1)))
    # copies: a view would keep the whole of both bases
    bounds = miscoupling_bounds(turns, turns)[..., :count]
    mean = _mean_turns(turns, turns)[..., :count]
    return Factors(left[..., :count].clone(), values[..., :count], right[..., :count, :].mT.clone(), bounds, mean)


def _mean_turns(left_errors: Tensor, right_errors: Tensor) -> Tensor:
    """Over the first 1, 2, .. directions, of both sides together."""
    number = torch.arange(1, left_errors.shape[-1] + 1, dtype=left_errors.dtype, device=left_errors.device)
    return ((left_errors.square() + right_errors.square()).cumsum(-1) / number).sqrt()


def _turns(residuals: Tensor, spectrum: Tensor) -> Tensor:
    """Most that each vector may be off, from its residual and the gaps of a spectrum with one value more."""
    steps = spectrum[..., :-1] - spectrum[..., 1:]
    before = torch.nn.functional.pad(steps[..., :-1], (1, 0), value=math.inf)
    gaps = torch.minimum(steps, before) - residuals  # the neighbours, too, are known up to a residual
    sines = torch.where(gaps > residuals, residuals / gaps, math.inf)
    return math.sqrt(2) * sines  # |v - v'| <= sqrt(2) sin for unit vectors of matching sign
