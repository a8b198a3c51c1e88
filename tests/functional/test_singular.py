"""Leading singular vectors against matrices built from known ones, and their bounds against what they bound."""

import math

import pytest
import torch
from torch import Tensor

from lit_layers.functional import singular
from lit_layers.functional.coupling import miscoupling, miscoupling_from_factors
from lit_layers.functional.singular import singular_factors


def gaussian(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def known(values: Tensor, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """A matrix with these singular values, and its left and right vectors."""
    left, right = (torch.linalg.qr(gaussian(len(values), len(values), seed=2 * seed + side))[0] for side in (0, 1))
    return left @ torch.diag(values) @ right.T, left, right


def spectrum(kind: str, dim: int, seed: int) -> Tensor:
    flat = torch.rand(dim, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    values = {
        "flat": 1 + 0.2 * flat,
        "power": torch.arange(1, dim + 1, dtype=torch.float64) ** -0.7,
        "steep": 10.0 ** (-6 * torch.arange(dim, dtype=torch.float64) / dim),
        "clustered": 1 + torch.arange(dim, 0, -1, dtype=torch.float64).div(4).round() + 1e-7 * flat,
        "tied": torch.arange(dim, 0, -1, dtype=torch.float64).div(3).ceil(),
    }[kind]
    return values.sort(descending=True).values


@pytest.mark.parametrize("kind", ["flat", "power", "steep", "clustered", "tied"])
def test_a_bound_is_never_violated(kind):
    """1,000 trials over five kinds of spectra: the value with the true vectors is within the bound for every K."""
    dim, count = 24, 7
    for seed in range(200):
        matrix, left, right = known(spectrum(kind, dim, seed), seed)
        other = gaussian(dim, dim, seed=seed + 10**6)
        values = torch.linalg.svdvals(other)[:count]
        factors = singular_factors(matrix, count)
        for k in range(1, count + 1):
            found = miscoupling_from_factors(
                other[None], values[None], singular.Factors(*(p[None] for p in factors)), k=k
            )
            compressed = left[:, :k].T @ other @ right[:, :k]
            expected = (compressed - torch.diag(values[:k])).norm() / values[:k].norm()
            assert abs(float(found) - float(expected)) <= factors.bounds[k - 1]


@pytest.mark.parametrize(("kind", "limit"), [("flat", 1e-8), ("power", 1e-10), ("steep", 1e-6)])
def test_separated_spectra_have_small_bounds_and_ties_infinite_ones(kind, limit):
    assert singular_factors(known(spectrum(kind, 24, 0), 0)[0], 7).bounds[-1] < limit
    assert singular_factors(known(spectrum("tied", 24, 0), 0)[0], 7).bounds[-1] == math.inf


def test_leading_triples_are_those_of_the_whole_decomposition():
    matrices = gaussian(2, 3, 30, 30)
    factors, (left, values, right) = singular_factors(matrices, 5), torch.linalg.svd(matrices)
    torch.testing.assert_close(factors.values, values[..., :5], rtol=1e-12, atol=0)
    sign = (factors.left * left[..., :5]).sum(-2, keepdim=True).sign()
    torch.testing.assert_close(sign * factors.left, left[..., :5], rtol=0, atol=1e-11)
    torch.testing.assert_close(sign * factors.right, right[..., :5, :].mT, rtol=0, atol=1e-11)
    assert factors.bounds.shape == (2, 3, 5)


def test_a_large_float32_matrix_is_decomposed_more_exactly_than_in_float32():
    matrix = known(spectrum("power", 600, 0), 0)[0].float()
    factors, exact = singular_factors(matrix, 60), torch.linalg.svd(matrix.double())
    assert factors.left.dtype == torch.float32
    assert float((factors.values - exact.S[:60]).abs().max()) < 1e-7
    sign = (factors.left * exact.U[:, :60]).sum(0).sign()
    assert float((sign * factors.left - exact.U[:, :60]).norm()) < 1e-5
    assert factors.bounds[-1] < 1e-5


def test_what_the_short_way_does_not_certify_is_decomposed_whole(monkeypatch):
    calls, whole = [], singular._whole
    monkeypatch.setattr(singular, "_whole", lambda *args: calls.append(1) or whole(*args))
    singular_factors(gaussian(24, 24), 4)
    assert not calls
    for matrix in (known(spectrum("tied", 24, 0), 0)[0], torch.zeros(24, 24)):
        singular_factors(matrix, 4)
    assert len(calls) == 2
    singular_factors(gaussian(24, 24), 12)  # half of all: no gain
    singular_factors(gaussian(24, 24))
    singular_factors(gaussian(24, 24), 4, tolerance=1e-20)
    assert len(calls) == 5


def test_every_direction_may_be_asked_for():
    matrix = gaussian(9, 9)
    factors = singular_factors(matrix)
    rebuilt = factors.left @ torch.diag(factors.values) @ factors.right.T
    torch.testing.assert_close(rebuilt, matrix, rtol=1e-12, atol=1e-13)
    assert miscoupling(matrix, matrix, k=9) == pytest.approx(0, abs=1e-13)
    with pytest.raises(ValueError, match="expected a count between 1 and the dimension 9, got 10"):
        singular_factors(matrix, 10)
