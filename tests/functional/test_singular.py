"""Leading singular vectors against numpy's decomposition, and their error bounds against true errors."""

import functools
import math

import numpy as np
import pytest
import torch
from torch import Tensor

from lit_layers.functional import singular
from lit_layers.functional.coupling import miscoupling, miscoupling_of_factors
from lit_layers.functional.singular import Factors, singular_factors
from tests.support.references import normal

KINDS = ("power", "exponential", "flat", "clustered", "deficient", "tied")


def spectrum(kind: str, dim: int, seed: int = 0) -> Tensor:
    random = torch.rand(dim, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    number = torch.arange(1, dim + 1, dtype=torch.float64)
    power = number**-0.7
    pairs = torch.arange(dim) // 2 * 2
    values = {
        "power": power,
        "exponential": 10.0 ** (-4 * number / dim),
        "flat": 1 + 0.2 * random,
        "clustered": power[pairs] * (1 - 10.0 ** (-3 - 6 * random[pairs]) * (number % 2 == 0)),
        "deficient": power * (number <= 7),
        "tied": power[pairs],
        "graded": 10.0 ** (-9 * number / dim),
        "steps": (1 + torch.arange(dim) // 5).double() * (1 - 10.0 ** (-15 + 12 * random[0]) * random),
    }[kind]
    return values.sort(descending=True).values


def from_spectrum(values: Tensor, seed: int = 0) -> Tensor:
    left, right = (torch.linalg.qr(normal(len(values), len(values), seed=2 * seed + side))[0] for side in (0, 1))
    return left @ torch.diag(values) @ right.T


def example(kind: str, dim: int, seed: int = 0) -> Tensor:
    """Return a Gaussian matrix, the update of a random two-layer network, or one with a known spectrum."""
    if kind == "gaussian":
        return normal(dim, dim, seed=seed)
    if kind == "network":
        return normal(dim, 4 * dim, seed=seed) @ normal(4 * dim, dim, seed=seed + 1) / 50
    return from_spectrum(spectrum(kind, dim, seed), seed)


@functools.lru_cache(maxsize=16)
def decomposed(values: bytes, shape: tuple[int, ...]) -> tuple[np.ndarray, ...]:
    return np.linalg.svd(np.frombuffer(values).reshape(shape))


def exact(matrix: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    left, values, right = decomposed(matrix.double().numpy().tobytes(), matrix.shape)
    tensors = left[:, :count], values[:count], right[:count].T
    return tuple(torch.from_numpy(tensor.copy()) for tensor in tensors)  # pyright: ignore[reportReturnType]


def exact_miscoupling(other: Tensor, matrix: Tensor, k: int) -> float:
    left, _, right = exact(matrix, k)
    values = exact(other, k)[1]
    return float((left.T @ other.double() @ right - torch.diag(values)).norm() / values.norm())


def eigenvectors_of_a_batch(gram: Tensor, count: int) -> tuple[Tensor, Tensor]:
    values, vectors = torch.linalg.eigh(gram)
    return values[:, -count - 1 :].flip(-1), vectors[..., -count:].flip(-1)


def distances(vectors: Tensor, others: Tensor) -> Tensor:
    """Return the distances of matching columns up to their sign."""
    return torch.minimum((vectors - others).norm(dim=0), (vectors + others).norm(dim=0))


def check_trials(kind: str, seeds: range, monkeypatch: pytest.MonkeyPatch, dim: int = 36) -> int:
    """Check the bounds of m_K from eigenvectors of J'J at any width, and count the matrices within the tolerance."""
    monkeypatch.setattr(singular, "MIN_DIM", 0)
    within = 0
    for seed in seeds:
        count, tolerance = 1 + seed % (dim // 3), (1e-3, 1e-6, 1.0)[seed % 3]
        monkeypatch.setattr(singular, "NARROW", (0, 256)[seed // 4 % 2])  # decomposed like wide ones, or not
        matrix = example(kind, dim, seed)
        matrix = matrix.float() if seed % 2 else matrix  # float32 breaks ties by 1e-8
        other = normal(dim, dim, seed=seed + 10**6) if seed % 4 < 2 else matrix.double()
        factors = singular_factors(matrix, count, tolerance=tolerance)
        left, _, right = exact(matrix, count)
        values = exact(other, count)[1]
        batched = Factors(*(tensor.double()[None] for tensor in factors))
        ks = tuple(range(1, count + 1))
        ours = miscoupling_of_factors(other[None], values[None], batched, k=ks)[:, 0, 0]
        truth = Factors(left[None], values[None], right[None], values[None])
        errors = (ours - miscoupling_of_factors(other[None], values[None], truth, k=ks)[:, 0, 0]).abs()
        turns = distances(factors.left, left).square() + distances(factors.right, right).square()
        # numpy's vectors are also off, by about 1e-15 over the gap, which is at most our own error
        assert bool((turns.cumsum(0) <= 8 * factors.bounds.square()).all()), (kind, seed)
        assert bool((errors <= 2 * factors.bounds).all()), (kind, seed)
        if factors.bounds[-1] <= tolerance:
            assert float(errors.max()) <= tolerance
            within += 1
    return within


TRIAL_KINDS = (*KINDS, "gaussian", "network", "graded", "steps")


def test_no_miscoupling_is_off_by_more_than_its_bound(monkeypatch):
    least = {"clustered": 16, "tied": 8, "steps": 8, "deficient": 8}  # of 24 matrices with close or zero values
    for kind in TRIAL_KINDS:
        assert check_trials(kind, range(24), monkeypatch) >= least.get(kind, 24), kind


@pytest.mark.nightly  # a minute
def test_in_ten_thousand_trials_no_miscoupling_is_off_by_more_than_its_bound(monkeypatch):
    for kind in TRIAL_KINDS:
        check_trials(kind, range(24, 1024), monkeypatch)


@pytest.mark.parametrize("kind", ["power", "gaussian", "flat", "network"])
def test_inexact_eigenvectors_widen_the_bounds(kind, monkeypatch):
    """The eigenvectors are rotated by known angles in random directions, mostly towards their neighbours."""
    exactly = singular._leading_eigenvectors
    finite = 0
    for seed in range(60):
        size = 10.0 ** (-1 - seed % 6)

        def rotated(gram: Tensor, count: int, seed: int = seed, size: float = size) -> tuple[Tensor, Tensor]:
            squares, vectors = exactly(gram, count)
            mixed = vectors @ normal(count, count, seed=seed) + 0.3 * normal(*vectors.shape[1:], seed=seed + 1)
            return squares, torch.nn.functional.normalize(vectors + size * mixed / count, dim=-2)

        monkeypatch.setattr(singular, "_leading_eigenvectors", rotated)
        matrix = example(kind, 40, seed)
        factors = singular._top_svd(matrix[None], 6)
        left, _, right = exact(matrix, 6)
        turns = distances(factors.left[0], left).square() + distances(factors.right[0], right).square()
        assert bool((turns.cumsum(0) <= 2 * factors.bounds[0].square()).all())
        finite += int(factors.bounds[0, -1].isfinite() and turns.sum().sqrt() > 1e-9)
    assert finite >= 15


@pytest.mark.parametrize("narrow", [0, 256])
def test_if_lapack_finds_no_eigenvectors_the_whole_matrix_is_decomposed(narrow, monkeypatch):
    import scipy.linalg

    def fails(*args, **options):
        raise np.linalg.LinAlgError("Internal Error.")

    monkeypatch.setattr(singular, "MIN_DIM", 0)
    monkeypatch.setattr(singular, "NARROW", narrow)
    matrices = torch.stack([example("power", 40, seed) for seed in range(2)])
    expected = singular_factors(matrices, 6, tolerance=1e-6)
    monkeypatch.setattr(scipy.linalg if narrow == 0 else np.linalg, "eigh", fails)
    found, whole = singular_factors(matrices, 6, tolerance=1e-6), singular._full_svd(matrices, 6)
    assert torch.equal(found.right, whole.right)
    torch.testing.assert_close(found.values, expected.values)
    assert bool((found.bounds[:, -1] <= 1e-6).all())


def test_a_rotation_is_bounded_by_the_residual_over_the_gap_to_the_nearest_value():
    """Consider neighbours above and below, each off by its own residual, and values that were not computed."""
    values, residuals = torch.tensor([[5, 4.9, 3.0]]), torch.tensor([[0.01, 0.02, 0.1]])
    for further, sines in (
        (2.0, [0.01 / (0.1 - 0.02), 0.02 / (0.1 - 0.01), 0.1 / 1]),
        (2.95, [0.01 / (0.1 - 0.02), 0.02 / (0.1 - 0.01), math.inf]),
        (4.95, [0.01 / 0.05, math.inf, math.inf]),
    ):
        bounds = singular._bounds(values, residuals, torch.tensor([further]), 3)
        each_bound = 2**0.5 * torch.tensor([sines])
        torch.testing.assert_close(bounds, 2 * each_bound.square().cumsum(-1).sqrt(), rtol=1e-4, atol=0)


@pytest.mark.parametrize("kind", ["power", "gaussian", "network"])
def test_large_matrices_meet_the_tolerance_without_a_full_decomposition(kind, monkeypatch):
    monkeypatch.setattr(singular, "_full_svd", None)
    matrix = example(kind, 600).float()
    other = normal(600, 600, seed=9)
    default, fine = singular_factors(matrix, 60), singular_factors(matrix, 60, tolerance=1e-6)
    assert default.left.dtype == default.right.dtype == torch.float32
    assert default.values.dtype == torch.float64
    assert fine.left.dtype == torch.float64
    left, values, right = exact(matrix, 60)
    other_values = torch.linalg.svdvals(other)[:60]
    for factors, tolerance in ((default, 2e-6), (fine, 1e-8)):
        assert float(factors.bounds[-1]) <= tolerance
        turns = distances(factors.left.double(), left), distances(factors.right.double(), right)
        assert bool((sum(turn.square().cumsum(0).sqrt() for turn in turns) <= factors.bounds).all())
        rounding = 10 * torch.finfo(factors.left.dtype).eps
        assert float((factors.values / values - 1).abs().max()) <= tolerance**2 + rounding
        batched = Factors(*(tensor.double()[None] for tensor in factors))
        value = float(miscoupling_of_factors(other[None], other_values[None], batched, k=[60]))
        assert abs(value - exact_miscoupling(other, matrix, 60)) <= factors.bounds[-1]


def test_only_the_difficult_matrices_of_a_batch_are_fully_decomposed(monkeypatch):
    calls, whole = [], singular._full_svd
    monkeypatch.setattr(singular, "_full_svd", lambda given, count: calls.append(len(given)) or whole(given, count))
    tied, nothing = example("tied", 300), torch.zeros(300, 300, dtype=torch.float64)
    matrices = torch.stack([example("power", 300), tied, example("gaussian", 300), nothing]).reshape(2, 2, 300, 300)
    factors = singular_factors(matrices, 20)
    assert sum(calls) == 2
    vectors, numbers = (2, 2, 300, 20), (2, 2, 20)
    assert [tuple(tensor.shape) for tensor in factors] == [vectors, numbers, vectors, numbers]
    assert factors.bounds[..., -1].isinf().tolist() == [[False, True], [False, True]]
    for element in ((0, 0), (0, 1), (1, 0)):
        # Products differ in the last bits between a batch and a single matrix. So a pair of vectors may change its
        # sign, and vectors of tied values may be any basis of their space.
        single = singular_factors(matrices[element], 20)
        torch.testing.assert_close(factors.values[element], single.values, rtol=1e-12, atol=1e-12)
        if element != (0, 1):
            tensor = (factors.left[element] * factors.values[element]) @ factors.right[element].mT
            torch.testing.assert_close(tensor, (single.left * single.values) @ single.right.mT, rtol=0, atol=1e-8)
    monkeypatch.setattr(singular, "_leading_eigenvectors", lambda gram, count: eigenvectors_of_a_batch(gram, count))
    together = singular._top_svd(matrices.reshape(4, 300, 300), 20)  # as on a GPU
    assert together.bounds[:, -1].isinf().tolist() == [False, True, False, True]
    for index, element in ((0, (0, 0)), (2, (1, 0))):
        assert bool((distances(together.right[index], factors.right[element]) <= 1e-9).all())


@pytest.mark.parametrize(("dim", "count"), [(64, 21), (100, 33), (256, 12)])
def test_narrow_matrices_have_the_directions_of_their_full_decomposition(dim, count, monkeypatch):
    """Directions from the eigenvectors of J'J are within their bounds, which are at most 1e-6."""
    matrices = torch.stack([example(kind, dim, seed) for seed in range(4) for kind in ("power", "gaussian", "network")])
    monkeypatch.setattr(singular, "_full_svd", None)
    factors = singular_factors(matrices.float(), count)
    assert factors.left.dtype == factors.right.dtype == torch.float64
    assert float(factors.bounds.max()) <= 1e-6
    for element, matrix in enumerate(matrices.float().double()):
        left, values, right = exact(matrix, count)
        torch.testing.assert_close(factors.values[element], values, rtol=1e-12, atol=0)
        turns = distances(factors.left[element], left).square() + distances(factors.right[element], right).square()
        assert bool((turns.cumsum(0).sqrt() <= factors.bounds[element]).all())


def test_narrow_matrices_are_fully_decomposed_if_their_bound_exceeds_1e_6(monkeypatch):
    """This holds at any tolerance: eigenvectors of J'J do not determine the directions of values of 1e-5."""
    values = torch.cat([torch.linspace(1, 0.5, 9).double(), 1e-5 * torch.linspace(1, 0.1, 91).double()])
    matrix = from_spectrum(values)
    eigenvectors = singular._top_svd(matrix[None], 12)
    assert 1e-6 < float(eigenvectors.bounds[0, -1]) < 1
    narrow = singular_factors(matrix, 12, tolerance=1.0)
    assert torch.equal(narrow.right, singular._full_svd(matrix[None], 12).right[0])
    assert float(narrow.bounds[-1]) < float(eigenvectors.bounds[0, -1])
    monkeypatch.setattr(singular, "NARROW", 99)
    monkeypatch.setattr(singular, "_full_svd", None)
    assert singular_factors(matrix, 12, tolerance=1.0).bounds[-1] > 1e-6


def test_directions_before_a_tie_stay_determined():
    values = torch.arange(300, 0, -1, dtype=torch.float64)
    values[5] = values[4]
    bounds = singular_factors(from_spectrum(values), 20).bounds
    assert bool((bounds[:4] < 1e-9).all())
    assert bool(bounds[4:].isinf().all())


def test_the_same_input_gives_the_same_bits_and_the_global_random_state_is_kept():
    matrix = example("network", 300)
    state = torch.get_rng_state()
    factors = singular_factors(matrix, 20)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(5)
    for first, second in zip(factors, singular_factors(matrix, 20), strict=True):
        assert torch.equal(first, second)
    torch.set_rng_state(state)


def test_a_power_of_two_only_scales_the_values():
    for exponent in [-60, 60]:
        matrix = example("power", 300)
        factors, scaled = singular_factors(matrix, 20), singular_factors(2.0**exponent * matrix, 20)
        torch.testing.assert_close(scaled.values, 2.0**exponent * factors.values, rtol=1e-12, atol=0)
        for one, other in ((scaled.left, factors.left), (scaled.right, factors.right)):
            assert bool((distances(one, other) <= factors.bounds + scaled.bounds).all())


def test_any_number_of_directions_can_be_requested():
    for count in [1, 100, 101, 300, None]:
        matrix = example("gaussian", 300)
        factors = singular_factors(matrix, count, tolerance=1e-6)
        left, values, right = exact(matrix, count or 300)
        torch.testing.assert_close(factors.values, values, rtol=1e-11, atol=0)
        limits = factors.bounds + 1e-9
        assert bool((distances(factors.left, left) <= limits).all())
        assert bool((distances(factors.right, right) <= limits).all())


def test_small_matrices_are_fully_decomposed_in_float64():
    matrix = normal(9, 9).float()
    factors = singular_factors(matrix)
    assert factors.left.dtype == torch.float64
    rebuilt = factors.left @ torch.diag(factors.values) @ factors.right.T
    torch.testing.assert_close(rebuilt, matrix.double(), rtol=1e-12, atol=1e-13)
    assert miscoupling(matrix, matrix, k=9) == pytest.approx(0, abs=1e-13)
    assert singular_factors(example("tied", 24), 7).bounds[-1] == math.inf
    assert singular_factors(torch.zeros(0, 9, 9), 3).left.shape == (0, 9, 3)
    assert singular_factors(torch.zeros(0, 300, 300), 3).left.shape == (0, 300, 3)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_matrix_that_is_not_finite_is_named(value):
    matrices = normal(3, 9, 9)
    matrices[1, 4, 2] = value
    with pytest.raises(ValueError, match=r"expected finite Jacobians, got a non-finite one at index \[1\]"):
        singular_factors(matrices, 2)
