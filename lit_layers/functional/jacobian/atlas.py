"""Shape of block Jacobians: how normal and symmetric they are, their rank, and their leading eigenvector."""

import math
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from torch.linalg import vector_norm

from lit_layers.functional._checks import Undefined, checked, wide_matrices, zeroed
from lit_layers.functional.singular import Factors, products

_PRODUCTS = 50  # number of products with J^2 before the Arnoldi iteration: each takes half the time of an Arnoldi step
_STEPS = 20  # steps of the Arnoldi iteration
TOLERANCE = 1e-2  # largest residual |J x - lambda x| / |lambda| of a leading eigenvector x


class JacobianShape(NamedTuple):
    """Six numbers that describe a Jacobian, and the residual of its leading eigenvector; see `jacobian_shape`."""

    non_normality: Tensor
    symmetric_share: Tensor
    effective_rank: Tensor
    leading_eigenvalue: Tensor
    eigenvector_output_cosine: Tensor
    eigenvector_input_cosine: Tensor
    residual: Tensor


def jacobian_shape(
    jacobians: Float[Tensor, "*n dim dim"], factors: Factors, *, undefined: Undefined = "raise"
) -> JacobianShape:
    """Return how normal and symmetric each Jacobian J is, its effective rank, and its leading eigenvector.

    J' is the transpose of J, and |J|_F its Frobenius norm.

    - `non_normality` = sqrt(1 - |J^2|_F^2 / |J'J|_F^2), in [0, 1]: 0 if J is normal (J'J = JJ'), 1 if J^2 = 0.
    - `symmetric_share` = |(J + J') / 2|_F^2 / |J|_F^2, in [0, 1]: 1 if J is symmetric, 0 if it is antisymmetric, and
      (1 + 1 / dim) / 2 for independent entries of mean 0.
    - `effective_rank` = |J|_F^4 / |J'J|_F^2, in [1, dim]: the participation ratio of the squared singular values. It is
      r for a projection onto r directions.
    - `leading_eigenvalue` = |lambda| / s_1, in [0, 1]: the largest modulus of an eigenvalue, divided by the largest
      singular value s_1. It is 1 if J is normal.
    - `eigenvector_output_cosine` and `eigenvector_input_cosine`, in [0, 1]: the cosines of the eigenvector x of lambda
      with the leading left singular vector (the direction of the largest output) and with the leading right one (the
      input that causes it). For a complex pair of eigenvalues, x is the plane of its eigenvectors. Both are 1 if J is
      normal.
    - `residual` = |J x - lambda x| / s_1 for |x| = 1.

    No value changes if J is rotated (Q J Q') or scaled. The first four also stay the same if J is transposed.
    Cosines are arbitrary if several eigenvalues or singular values share the largest modulus.

    Values are computed in float64 for dim <= 512 or float64 input, otherwise in float32. The error of `non_normality`
    is at most 1e-6 (in float64 1e-15) divided by its value, because it is the root of a difference. Values below 1e-3
    (in float64 3e-8) may become 0.

    The eigenvector comes from an Arnoldi iteration of 20 steps, after 50 products with J^2. It is an exact eigenvector
    of a matrix that differs from J by the residual. If J is almost defective, for example nilpotent, the eigenvalues of
    J can differ by more. The last four values are undefined if the residual is above 1e-2 |lambda|. This happens if
    many eigenvalues have almost the largest modulus, as in wide random matrices.

    Args:
        jacobians: The matrices J.
        factors: At least the first singular triple of each matrix, from `singular_factors`.
        undefined: "raise", or "nan" for NaN instead of an error.

    Source: Fernando & Guitchounts, "Dynamics of the transformer residual stream" (arXiv 2605.14258), relate
    similar numbers to depth in trained models.

    Raises:
        ValueError: a zero or non-finite matrix, or an iteration that did not converge.
    """
    matrices = wide_matrices(jacobians)
    largest = vector_norm(matrices, math.inf, dim=(-2, -1))  # not finite if an entry is not
    problems = {"a Jacobian is not finite": ~largest.isfinite(), "a Jacobian is zero": largest == 0}
    bad = problems["a Jacobian is not finite"] | problems["a Jacobian is zero"]
    # Without this scaling, fourth powers of small entries would underflow in float32.
    matrices = zeroed(matrices, bad) / largest.masked_fill(bad, 1)[..., None, None]
    squares = matrices @ matrices
    size, gram_size = _frobenius(matrices), _frobenius(products(matrices.mT))
    non_normality = (1 - (_frobenius(squares) / gram_size).square()).clamp(min=0).sqrt()
    # |(J + J') / 2|^2 = (|J|^2 + tr J^2) / 2
    trace = squares.diagonal(dim1=-2, dim2=-1).double().sum(-1)
    symmetric_share = (0.5 + 0.5 * trace / size.square()).clamp(0, 1)
    effective_rank = (size.square() / gram_size).square().clamp(min=1)
    modulus, plane, residual = _leading_planes(matrices, squares)
    modulus, residual = (each * (largest / factors.values[..., 0]).double() for each in (modulus, residual))
    lengths = vector_norm(plane, dim=-2, keepdim=True)
    plane = (plane / lengths.masked_fill(lengths == 0, 1)).mT  # orthonormal rows, or a unit row and zeros
    first = (side[..., :1].to(plane) for side in (factors.left, factors.right))
    cosines = (vector_norm(plane @ vector, dim=(-2, -1)).double().clamp(max=1) for vector in first)
    failed = {"the iteration did not converge": ~(residual <= TOLERANCE * modulus)}
    closed = non_normality, symmetric_share, effective_rank
    iterated = modulus.clamp(max=1), *cosines, residual
    return JacobianShape(
        *(checked("jacobian_shape", values, problems, undefined) for values in closed),
        *(checked("leading_eigenvector", values, problems | failed, undefined) for values in iterated),
    )


def _frobenius(matrices: Tensor) -> Tensor:
    """Return Frobenius norms in float64. Only the norms of rows are computed in the precision of the matrices."""
    return vector_norm(vector_norm(matrices, dim=-1).double(), dim=-1)


def _leading_planes(matrices: Tensor, squares: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the modulus (*n) of the largest eigenvalue of each matrix J, its plane (*n, dim, 2) and its residual (*n).

    The columns of a plane are the real and the imaginary part of the eigenvector x, which has norm 1. The phase of x
    makes them orthogonal. The imaginary part of a real eigenvector is 0. `squares` are the matrices J^2.
    """
    dim = matrices.shape[-1]
    # On a CPU, batches larger than the cache are slower, because each step reads all matrices.
    at_once = max(1, 2**17 // dim**2) if matrices.device.type == "cpu" else matrices.numel()
    pairs = (each.reshape(-1, dim, dim).split(at_once) for each in (matrices, squares))
    spaces = zip(*(_krylov_space(*pair) for pair in zip(*pairs, strict=True)), strict=True)
    basis, compressed = (torch.cat(parts).reshape(*matrices.shape[:-2], *parts[0].shape[1:]) for parts in spaces)
    # The small matrix to which a Krylov space compresses J has almost the same largest eigenvalues as J.
    values, vectors = torch.linalg.eig(compressed.double().cpu())
    index = values.abs().argmax(-1, keepdim=True)
    value = values.gather(-1, index)  # (*n, 1)
    vector = torch.take_along_dim(vectors, index[..., None, :], -1)  # (*n, steps, 1)
    # Re x and Im x are orthogonal if x'x (not conjugated) is real. For x = Q'y with orthonormal Q, x'x = y'y.
    vector = vector * torch.exp(-0.5j * vector.square().sum(-2, keepdim=True).angle())
    plane = basis.mT @ torch.view_as_real(vector[..., 0]).to(basis)
    # J x = lambda x in real numbers: J [Re x, Im x] = [Re x, Im x] [[Re l, Im l], [-Im l, Re l]].
    turn = torch.view_as_real(torch.cat([value, 1j * value], -1)).to(basis)
    residual = vector_norm(matrices @ plane - plane @ turn, dim=(-2, -1)).double()
    return value[..., 0].abs().to(residual), plane, residual


def _krylov_space(matrices: Tensor, squares: Tensor) -> tuple[Tensor, Tensor]:
    """Return the orthonormal basis Q (n, steps, dim) of a Krylov space of each matrix J (n, dim, dim), and Q J Q'.

    This is the Arnoldi iteration. Before it, products with J^2 shrink the start vector's parts of small eigenvalues.
    If a space is smaller than `steps`, the remaining rows of Q are 0. They add only eigenvalues 0 to those of Q J Q'.
    """
    number, dim, _ = matrices.shape
    steps, eps = min(_STEPS, dim), torch.finfo(matrices.dtype).eps
    # All matrices have the same start vector, so that values do not depend on the batch.
    start = torch.randn(dim, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    vector = (start / start.norm()).to(matrices).expand(number, 1, dim)
    transposed, square = matrices.mT, squares.mT  # vectors are rows, for which batched products are faster
    for _ in range(_PRODUCTS // 2):
        image = vector @ square @ square
        length = vector_norm(image, dim=-1, keepdim=True)
        vector = torch.where(length > 0, image / length, vector)  # keep a vector that J^4 maps to 0
    basis, compressed = matrices.new_zeros(number, steps, dim), matrices.new_zeros(number, steps, steps)
    for step in range(steps):
        basis[:, step : step + 1] = vector
        image, known = vector @ transposed, basis[:, : step + 1]
        smallest = 10 * eps * vector_norm(image, dim=-1, keepdim=True)
        for _ in range(2):  # rounding leaves parts along known directions in the first pass
            along = image @ known.mT
            compressed[:, : step + 1, step] += along[:, 0]
            image = image - along @ known
        length = vector_norm(image, dim=-1, keepdim=True)
        length = length.masked_fill(length <= smallest, 0)  # only rounding errors remain: the space is complete
        vector = image / length.masked_fill(length == 0, math.inf)
        if step + 1 < steps:
            compressed[:, step + 1, step] = length[:, 0, 0]
    return basis, compressed
