"""Leading singular vectors of square matrices, each with a bound on what is left of error."""

import math
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor


class Factors(NamedTuple):
    """Leading singular triples (*n): `left` and `right` (.., dim, count), `values` (.., count) descending.

    `bounds` (.., count): how far `miscoupling` in the leading K = 1, 2, .. directions (p = 2) may be from its value
    with exact singular vectors of these very matrices; infinite where a tie leaves them undetermined.
    """

    left: Tensor
    values: Tensor
    right: Tensor
    bounds: Tensor


def singular_factors(
    matrices: Float[Tensor, "*n dim dim"], count: int | None = None, *, tolerance: float = 1e-3
) -> Factors:
    """Leading `count` singular triples (all for None).

    On a CPU, where `count` is under a third of dim, they come from the leading eigenvectors of J'J formed in float64:
    half the time of a whole decomposition, and more exact than one in float32. Wherever the bound of a matrix does not
    meet `tolerance` (ties, small singular values), and otherwise, it is the whole decomposition: in float64 for dim <=
    512, float64 input, and such matrices, else in float32. Results in float64 for dim <= 512 or float64 input.

    Bounds: a singular vector turns by at most its residual over the gap to its neighbours (Davis and Kahan), and
    `|A - A'|_F <= s_1(J1) (|U - U'|_F + |V - V'|_F)`, with `s_1(J1) <= |s_1,K|_2`.
    """
    matrices = widen(matrices)
    dim = matrices.shape[-1]
    if count is not None and not 1 <= count <= dim:
        raise ValueError(f"expected a count between 1 and the dimension {dim}, got {count}")
    if count is None or 3 * (count + 1) > dim or matrices.device.type != "cpu":
        return _whole(matrices, count or dim)
    found = [_leading(matrix, count, tolerance) for matrix in matrices.reshape(-1, dim, dim)]
    parts = [torch.stack(part) for part in zip(*found, strict=True)]
    return Factors(*(part.reshape(*matrices.shape[:-2], *part.shape[1:]) for part in parts))


def widen(matrices: Tensor) -> Tensor:
    """Float64 where the decomposition is small or float64 came in, else float32."""
    if matrices.ndim < 2 or matrices.shape[-1] != matrices.shape[-2]:
        raise ValueError(f"expected square matrices (*n, dim, dim), got {tuple(matrices.shape)}")
    if not matrices.is_floating_point():
        raise TypeError(f"expected floating-point Jacobians, got {matrices.dtype}")
    wide = matrices.dtype == torch.float64 or matrices.shape[-1] <= 512
    return matrices.detach().to(torch.float64 if wide else torch.float32)


def _whole(matrices: Tensor, count: int) -> Factors:
    left, values, right = torch.linalg.svd(matrices)
    # LAPACK's backward error, as a residual
    residual = math.sqrt(matrices.shape[-1]) * torch.finfo(matrices.dtype).eps * values[..., :1]
    turns = _turns(residual.expand_as(values), torch.nn.functional.pad(values, (0, 1)))
    # copies: a view would keep the whole of both bases
    bounds = _bounds(turns, turns)[..., :count]
    return Factors(left[..., :count].clone(), values[..., :count], right[..., :count, :].mT.clone(), bounds)


def _leading(matrix: Tensor, count: int, tolerance: float) -> Factors:
    """Of one matrix (dim, dim) on the CPU."""
    import scipy.linalg

    wide = matrix.double()
    dim = len(wide)
    gram = (wide.T @ wide).numpy()
    squares, vectors = scipy.linalg.eigh(
        gram, subset_by_index=[dim - count - 1, dim - 1], driver="evr", overwrite_a=True, check_finite=False
    )
    squares = torch.from_numpy(squares).flip(0).clamp(min=0)
    right = torch.from_numpy(vectors).flip(1)[:, :count]
    images = wide @ right
    values = torch.linalg.vector_norm(images, dim=0)
    if values[-1] > 1e-6 * values[0]:
        left = images / values
        residual = torch.linalg.vector_norm(wide.T @ left - right * values, dim=0) * values
        residual = residual + 4 * torch.finfo(torch.float64).eps * squares[0]
        turns = _turns(residual, squares)
        # u = J v / s: what v misses, J may enlarge by s_1 / s
        bounds = _bounds(turns * values[0] / values, turns) + 4 * torch.finfo(matrix.dtype).eps
        if bounds[-1] <= tolerance:
            return Factors(left.to(matrix.dtype), values.to(matrix.dtype), right.to(matrix.dtype), bounds)
    left, values, right, bounds = _whole(wide, count)
    return Factors(left.to(matrix.dtype), values.to(matrix.dtype), right.to(matrix.dtype), bounds)


def _turns(residuals: Tensor, spectrum: Tensor) -> Tensor:
    """Most that each vector may be off, from its residual and the gaps of a spectrum with one value more."""
    steps = spectrum[..., :-1] - spectrum[..., 1:]
    before = torch.nn.functional.pad(steps[..., :-1], (1, 0), value=math.inf)
    gaps = torch.minimum(steps, before) - residuals  # the neighbours, too, are known up to a residual
    sines = torch.where(gaps > residuals, residuals / gaps, math.inf)
    return math.sqrt(2) * sines  # |v - v'| <= sqrt(2) sin for unit vectors of matching sign


def _bounds(left: Tensor, right: Tensor) -> Tensor:
    """Bound of the miscoupling for each number of leading directions."""
    return left.square().cumsum(-1).sqrt() + right.square().cumsum(-1).sqrt()
