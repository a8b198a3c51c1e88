"""Singular values of sets of rows from their Gram matrices in float64, and what else LAPACK does with these."""

import functools
import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from lit_layers.functional._checks import without

# An eigenvalue of a Gram matrix is off by about EPS, 2.2e-16, times the largest; so its root, at s of the largest
# singular value, by EPS / 2s of that; measured by less than 2e-13 where the spectrum falls to 1.7e-4 by and by, by up
# to 6e-12 where half of 1,000 values lie there and the others at 1.
_LEAST_SHARE = 3e-8  # of the largest eigenvalue
# An entropy or a rank weighs each singular value s by itself, or by its square: where s is off by EPS / 2s, the entropy
# of n of them is by less than n EPS / 2s log(1 / s), measured on states of language models by less than 4e-11.
LEAST_IN_ENTROPIES = 1e-12
_LEAST_TRACE = 1e-200  # below it squares lose digits at the lower end of float64


def singular_values(rows: Tensor, rank: Tensor | None = None, *, least_share: float = _LEAST_SHARE) -> Tensor:
    """Of each matrix (*n, rows, dim), the largest first: roots of the eigenvalues of its smaller Gram matrix.

    They are those of the matrix itself to 2e-13 of the largest, to 6e-12 where many lie near the bound: a matrix with
    smaller ones than its Gram matrix resolves above rounding, or than the root of `least_share`, is decomposed as it
    stands. `rank` (*n) is the most that differ from 0.
    """
    # The eigenvalues of a Gram matrix take half the time of a singular value decomposition on a CPU; on a GPU the
    # decomposition of one matrix after another takes longer still.
    wide = rows.detach() if rows.shape[-2] <= rows.shape[-1] else rows.detach().mT
    if not wide.numel():
        return wide.new_zeros(wide.shape[:-1])
    gram = products(wide)
    good = _keeps_digits(gram)
    return _roots(wide, eigenvalues_(without(gram, ~good)), good, rank, least_share)


def with_and_without_first(rows: Tensor, ranks: Sequence[Tensor]) -> list[Tensor] | None:
    """The singular values of matrices (*n, rows, dim), and of these without their first row; None where they share no
    decomposition. On a CPU the reduction of a Gram matrix to three diagonals leaves the first coordinate alone, so the
    three diagonals without it are those of the Gram matrix of the other rows."""
    size = rows.shape[-2]
    if rows.device.type != "cpu" or not rows.numel() or not _FEWEST < size <= min(_MOST, rows.shape[-1]):
        return None
    rows = rows.detach()
    gram = products(rows)
    good = _keeps_digits(gram) & _keeps_digits(gram[..., 1:, 1:])
    arrays = without(gram, ~good).numpy().reshape(-1, size, size)
    pairs = zip(*(_on_cpu(array, 2) for array in arrays), strict=True)
    whole, rest = (torch.from_numpy(np.reshape(values, (*rows.shape[:-2], -1))) for values in pairs)
    return [
        _roots(rows, whole, good, ranks[0], LEAST_IN_ENTROPIES),
        _roots(rows[..., 1:, :], rest, good, ranks[1], LEAST_IN_ENTROPIES),
    ]


def _keeps_digits(gram: Tensor) -> Tensor:
    """Whether a Gram matrix (*n, size, size) lies where squares are not cut off."""
    trace = gram.diagonal(dim1=-2, dim2=-1).sum(-1)
    return (trace > _LEAST_TRACE) & (trace < math.inf)


def _roots(wide: Tensor, values: Tensor, good: Tensor, rank: Tensor | None, least_share: float) -> Tensor:
    """Singular values from the eigenvalues (*n, size) of the Gram matrices, the smallest first; those of a matrix
    (*n, size, dim) that is not `good`, or too close to singular for that, are computed from itself."""
    values, size = values.flip(-1), values.shape[-1]
    ranks = torch.full_like(good, size, dtype=torch.long) if rank is None else rank.clamp(max=size)
    places = torch.arange(size, device=values.device) < ranks[..., None]
    good = good & (values >= least_share * values[..., :1]).logical_or(~places).all(-1)
    values = values.clamp(min=0.0).masked_fill(~places, 0.0).sqrt()
    if not good.all():
        tall = wide[~good].mT.cpu().numpy()  # to which LAPACK needs less than a third of what its transpose needs
        values[~good] = torch.from_numpy(np.linalg.svd(tall, compute_uv=False)).to(values.device)
    return values


def products(rows: Float[Tensor, "*n rows dim"]) -> Float[Tensor, "*n rows rows"]:
    """The Gram matrices of sets of rows."""
    if rows.device.type != "cpu":
        return rows @ rows.mT
    array = rows.detach().numpy()
    with np.errstate(over="ignore", invalid="ignore"):
        return torch.from_numpy(array @ array.swapaxes(-1, -2))  # numpy computes one triangle, torch both


_FEWEST, _MOST = 32, 1500  # rows: numpy is faster for fewer, and lets other threads run meanwhile, which is for seconds


def eigenvalues_(matrix: Float[Tensor, "*n size size"]) -> Float[Tensor, "*n size"]:
    """Of symmetric matrices, the smallest first, on their device; on a CPU the matrices are written over."""
    if matrix.is_cuda and matrix.ndim == 3 and len(matrix) > 1:
        return _in_streams(matrix)
    if matrix.device.type != "cpu":
        return torch.linalg.eigvalsh(matrix)
    arrays = matrix.detach().numpy()
    if arrays.dtype != np.float64 or not _FEWEST <= arrays.shape[-1] <= _MOST:
        return torch.from_numpy(np.linalg.eigvalsh(arrays))
    values = [_on_cpu(array, 1)[0] for array in arrays.reshape(-1, *arrays.shape[-2:])]
    return torch.from_numpy(np.reshape(values, arrays.shape[:-1]))


def _on_cpu(array: np.ndarray, number: int) -> list[np.ndarray]:
    """The eigenvalues of a symmetric matrix, and with a `number` of 2 those of it without its first row and column.

    What numpy's `eigvalsh` calls, without its copies, in 0.9 of its time; that is at 1,000 rows 0.6 of torch's.
    """
    from scipy.linalg.lapack import dsterf, dsytrd, dsytrd_lwork

    if not 1e-280 < np.vdot(array, array) < 1e280:  # squares leave float64, or NaN: numpy scales such, or refuses them
        return [np.linalg.eigvalsh(array[first:, first:]) for first in range(number)]
    blocked = int(dsytrd_lwork(len(array), lower=1)[0])
    _, diagonal, beside, _, _ = dsytrd(array.T, lower=1, lwork=blocked, overwrite_a=1)  # it lies as LAPACK wants it
    results = [dsterf(diagonal[first:], beside[first:]) for first in range(number)]
    if any(failed for _, failed in results):
        raise np.linalg.LinAlgError("Eigenvalues did not converge")
    return [values for values, _ in results]


_STREAMS = 4  # with 8 it takes as long


def _in_streams(matrices: Float[Tensor, "n size size"]) -> Float[Tensor, "n size"]:
    """A GPU takes one matrix after another, and the host's launches take longer than the work: 16 of 256 rows need
    30 ms on an H200, and 18 where four threads launch."""
    _load_solvers(matrices.device)
    after = torch.cuda.current_stream(matrices.device)

    def part(some: Tensor) -> Tensor:
        stream = torch.cuda.Stream(matrices.device)
        stream.wait_stream(after)
        with torch.cuda.stream(stream):
            values = torch.linalg.eigvalsh(some)
        after.wait_stream(stream)
        values.record_stream(after)
        return values

    with ThreadPoolExecutor(_STREAMS) as threads:
        return torch.cat([*threads.map(part, matrices.detach().chunk(_STREAMS))])


@functools.cache
def _load_solvers(device: torch.device) -> None:
    """torch loads its library of solvers at the first call, and threads that are the first at once get an error."""
    torch.linalg.eigvalsh(torch.eye(2, device=device, dtype=torch.float64))


def cholesky(matrix: Float[Tensor, "size size"]) -> tuple[Float[Tensor, "size size"], bool]:
    """The lower factor of a symmetric matrix, on its device, and whether it has none. On a CPU nothing is read below
    the diagonal of the matrix, and what is above that of the factor is not to be read."""
    if matrix.device.type != "cpu":
        factor, failed = torch.linalg.cholesky_ex(matrix)
        return factor, bool(failed)
    from scipy.linalg.lapack import dpotrf

    factor, failed = dpotrf(matrix.detach().numpy().T, lower=1, clean=0)  # whose transpose lies as it is wanted
    return torch.from_numpy(factor), bool(failed)


def solved(lower: Float[Tensor, "size size"], right: Float[Tensor, "size columns"]) -> Float[Tensor, "size columns"]:
    """X of L X = B, for a lower triangular matrix without a zero on its diagonal, on its device."""
    if lower.device.type != "cpu":
        return torch.linalg.solve_triangular(lower, right, upper=False)
    from scipy.linalg.blas import dtrsm  # a tenth of a second to import

    return torch.from_numpy(dtrsm(1.0, lower.detach().numpy(), right.detach().numpy(), lower=1))
