"""Leading singular vectors against numpy's decomposition, and their bounds against what they bound."""

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


def with_spectrum(values: Tensor, seed: int = 0) -> Tensor:
    left, right = (torch.linalg.qr(normal(len(values), len(values), seed=2 * seed + side))[0] for side in (0, 1))
    return left @ torch.diag(values) @ right.T


def example(kind: str, dim: int, seed: int = 0) -> Tensor:
    """A Gaussian matrix, the update of a random two-layer network, or one with a known spectrum."""
    if kind == "gaussian":
        return normal(dim, dim, seed=seed)
    if kind == "network":
        return normal(dim, 4 * dim, seed=seed) @ normal(4 * dim, dim, seed=seed + 1) / 50
    return with_spectrum(spectrum(kind, dim, seed), seed)


@functools.lru_cache(maxsize=16)
def decomposed(values: bytes, shape: tuple[int, ...]) -> tuple[np.ndarray, ...]:
    return np.linalg.svd(np.frombuffer(values).reshape(shape))


def exact(matrix: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    left, values, right = decomposed(matrix.double().numpy().tobytes(), matrix.shape)
    parts = left[:, :count], values[:count], right[:count].T
    return tuple(torch.from_numpy(part.copy()) for part in parts)  # pyright: ignore[reportReturnType]


def exact_miscoupling(other: Tensor, matrix: Tensor, k: int) -> float:
    left, _, right = exact(matrix, k)
    values = exact(other, k)[1]
    return float((left.T @ other.double() @ right - torch.diag(values)).norm() / values.norm())


def eigenvectors_of_a_batch(gram: Tensor, count: int) -> tuple[Tensor, Tensor]:
    values, vectors = torch.linalg.eigh(gram)
    return values[:, -count - 1 :].flip(-1), vectors[..., -count:].flip(-1)


def distances(vectors: Tensor, others: Tensor) -> Tensor:
    """Lengths of the differences of matching columns, of the sign that is closer."""
    return torch.minimum((vectors - others).norm(dim=0), (vectors + others).norm(dim=0))


def check_trials(kind: str, seeds: range, monkeypatch: pytest.MonkeyPatch, dim: int = 36) -> int:
    """By the eigenvectors of J'J however narrow: no m_K further off than promised; the number of matrices in reach."""
    monkeypatch.setattr(singular, "MIN_DIM", 0)
    within = 0
    for seed in seeds:
        count, tolerance = 1 + seed % (dim // 3), (1e-3, 1e-6, 1.0)[seed % 3]
        monkeypatch.setattr(singular, "NARROW", (0, 256)[seed // 4 % 2])  # as wide ones are decomposed, and not
        matrix = example(kind, dim, seed)
        matrix = matrix.float() if seed % 2 else matrix  # which breaks ties by 1e-8
        other = normal(dim, dim, seed=seed + 10**6) if seed % 4 < 2 else matrix.double()
        factors = singular_factors(matrix, count, tolerance=tolerance)
        left, _, right = exact(matrix, count)
        values = exact(other, count)[1]
        batched = Factors(*(part.double()[None] for part in factors))
        ks = tuple(range(1, count + 1))
        ours = miscoupling_of_factors(other[None], values[None], batched, k=ks)[:, 0, 0]
        truth = Factors(left[None], values[None], right[None], values[None])
        away = (ours - miscoupling_of_factors(other[None], values[None], truth, k=ks)[:, 0, 0]).abs()
        turns = distances(factors.left, left).square() + distances(factors.right, right).square()
        # numpy's vectors are themselves off by rounding, some 1e-15 over the gap: as much as ours at most
        assert bool((turns.cumsum(0) <= 8 * factors.bounds.square()).all()), (kind, seed)
        assert bool((away <= 2 * factors.bounds).all()), (kind, seed)
        if factors.bounds[-1] <= tolerance:
            assert float(away.max()) <= tolerance
            within += 1
    return within


KINDS_OF_TRIALS = (*KINDS, "gaussian", "network", "graded", "steps")


def test_no_miscoupling_is_further_off_than_its_bound(monkeypatch):
    least = {"clustered": 16, "tied": 8, "steps": 8, "deficient": 8}  # of 24 matrices, which have such values
    for kind in KINDS_OF_TRIALS:
        assert check_trials(kind, range(24), monkeypatch) >= least.get(kind, 24), kind


@pytest.mark.nightly  # a minute
def test_in_ten_thousand_trials_no_miscoupling_is_further_off_than_its_bound(monkeypatch):
    for kind in KINDS_OF_TRIALS:
        check_trials(kind, range(24, 1024), monkeypatch)


@pytest.mark.parametrize("kind", ["power", "gaussian", "flat", "network"])
def test_inexact_eigenvectors_are_seen_in_the_bounds(kind, monkeypatch):
    """Turned by known angles in random directions, above all towards their neighbours."""
    exactly = singular._leading_eigenvectors
    finite = 0
    for seed in range(60):
        size = 10.0 ** (-1 - seed % 6)

        def turned(gram: Tensor, count: int, seed: int = seed, size: float = size) -> tuple[Tensor, Tensor]:
            squares, vectors = exactly(gram, count)
            mixed = vectors @ normal(count, count, seed=seed) + 0.3 * normal(*vectors.shape[1:], seed=seed + 1)
            return squares, torch.nn.functional.normalize(vectors + size * mixed / count, dim=-2)

        monkeypatch.setattr(singular, "_leading_eigenvectors", turned)
        matrix = example(kind, 40, seed)
        factors = singular._top_svd(matrix[None], 6)
        left, _, right = exact(matrix, 6)
        turns = distances(factors.left[0], left).square() + distances(factors.right[0], right).square()
        assert bool((turns.cumsum(0) <= 2 * factors.bounds[0].square()).all())
        finite += int(factors.bounds[0, -1].isfinite() and turns.sum().sqrt() > 1e-9)
    assert finite >= 15


@pytest.mark.parametrize("narrow", [0, 256])
def test_where_lapack_finds_no_eigenvectors_the_whole_is_decomposed(narrow, monkeypatch):
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


def test_a_turn_is_bounded_by_the_residual_over_the_nearest_other_value():
    """Neighbours above and below, each as far off as its own residual, and what was not computed."""
    values, residuals = torch.tensor([[5, 4.9, 3.0]]), torch.tensor([[0.01, 0.02, 0.1]])
    for further, sines in (
        (2.0, [0.01 / (0.1 - 0.02), 0.02 / (0.1 - 0.01), 0.1 / 1]),
        (2.95, [0.01 / (0.1 - 0.02), 0.02 / (0.1 - 0.01), math.inf]),
        (4.95, [0.01 / 0.05, math.inf, math.inf]),
    ):
        bounds = singular._bounds(values, residuals, torch.tensor([further]), 3)
        of_each = 2**0.5 * torch.tensor([sines])
        torch.testing.assert_close(bounds, 2 * of_each.square().cumsum(-1).sqrt(), rtol=1e-4, atol=0)


@pytest.mark.parametrize("kind", ["power", "gaussian", "network"])
def test_large_matrices_meet_the_tolerance_without_a_whole_decomposition(kind, monkeypatch):
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
        batched = Factors(*(part.double()[None] for part in factors))
        value = float(miscoupling_of_factors(other[None], other_values[None], batched, k=[60]))
        assert abs(value - exact_miscoupling(other, matrix, 60)) <= factors.bounds[-1]


def test_only_the_hard_matrices_of_a_batch_are_decomposed_whole(monkeypatch):
    calls, whole = [], singular._full_svd
    monkeypatch.setattr(singular, "_full_svd", lambda given, count: calls.append(len(given)) or whole(given, count))
    tied, nothing = example("tied", 300), torch.zeros(300, 300, dtype=torch.float64)
    matrices = torch.stack([example("power", 300), tied, example("gaussian", 300), nothing]).reshape(2, 2, 300, 300)
    factors = singular_factors(matrices, 20)
    assert sum(calls) == 2
    vectors, numbers = (2, 2, 300, 20), (2, 2, 20)
    assert [tuple(part.shape) for part in factors] == [vectors, numbers, vectors, numbers]
    assert factors.bounds[..., -1].isinf().tolist() == [[False, True], [False, True]]
    for place in ((0, 0), (0, 1), (1, 0)):
        # Alone and in the batch its products read other addresses, so they differ in the last bits: a pair of vectors
        # may turn its sign, and those of tied values are any of their space.
        single = singular_factors(matrices[place], 20)
        torch.testing.assert_close(factors.values[place], single.values, rtol=1e-12, atol=1e-12)
        if place != (0, 1):
            part = (factors.left[place] * factors.values[place]) @ factors.right[place].mT
            torch.testing.assert_close(part, (single.left * single.values) @ single.right.mT, rtol=0, atol=1e-8)
    monkeypatch.setattr(singular, "_leading_eigenvectors", lambda gram, count: eigenvectors_of_a_batch(gram, count))
    together = singular._top_svd(matrices.reshape(4, 300, 300), 20)  # as a GPU takes them
    assert together.bounds[:, -1].isinf().tolist() == [False, True, False, True]
    for index, place in ((0, (0, 0)), (2, (1, 0))):
        assert bool((distances(together.right[index], factors.right[place]) <= 1e-9).all())


@pytest.mark.parametrize(("dim", "count"), [(64, 21), (100, 33), (256, 12)])
def test_narrow_matrices_have_the_directions_of_their_whole_decomposition(dim, count, monkeypatch):
    """From the eigenvectors of J'J, a batch in parts, each within its bound and that within a millionth."""
    matrices = torch.stack([example(kind, dim, seed) for seed in range(4) for kind in ("power", "gaussian", "network")])
    monkeypatch.setattr(singular, "_full_svd", None)
    factors = singular_factors(matrices.float(), count)
    assert factors.left.dtype == factors.right.dtype == torch.float64
    assert float(factors.bounds.max()) <= 1e-6
    for place, matrix in enumerate(matrices.float().double()):
        left, values, right = exact(matrix, count)
        torch.testing.assert_close(factors.values[place], values, rtol=1e-12, atol=0)
        turns = distances(factors.left[place], left).square() + distances(factors.right[place], right).square()
        assert bool((turns.cumsum(0).sqrt() <= factors.bounds[place]).all())


def test_narrow_matrices_are_decomposed_whole_where_the_others_bound_is_above_a_millionth(monkeypatch):
    """Whatever tolerance is given: of values of 1e-5 the eigenvectors of J'J leave the direction open by more."""
    values = torch.cat([torch.linspace(1, 0.5, 9).double(), 1e-5 * torch.linspace(1, 0.1, 91).double()])
    matrix = with_spectrum(values)
    eigenvectors = singular._top_svd(matrix[None], 12)
    assert 1e-6 < float(eigenvectors.bounds[0, -1]) < 1
    narrow = singular_factors(matrix, 12, tolerance=1.0)
    assert torch.equal(narrow.right, singular._full_svd(matrix[None], 12).right[0])
    assert float(narrow.bounds[-1]) < float(eigenvectors.bounds[0, -1])
    monkeypatch.setattr(singular, "NARROW", 99)
    monkeypatch.setattr(singular, "_full_svd", None)
    assert singular_factors(matrix, 12, tolerance=1.0).bounds[-1] > 1e-6


def test_ties_leave_what_comes_before_them_determined():
    values = torch.arange(300, 0, -1, dtype=torch.float64)
    values[5] = values[4]
    bounds = singular_factors(with_spectrum(values), 20).bounds
    assert bool((bounds[:4] < 1e-9).all())
    assert bool(bounds[4:].isinf().all())


def test_the_same_input_gives_the_same_bits_and_the_global_generator_is_left_alone():
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


def test_any_number_of_directions_may_be_asked_for():
    for count in [1, 100, 101, 300, None]:
        matrix = example("gaussian", 300)
        factors = singular_factors(matrix, count, tolerance=1e-6)
        left, values, right = exact(matrix, count or 300)
        torch.testing.assert_close(factors.values, values, rtol=1e-11, atol=0)
        limits = factors.bounds + 1e-9
        assert bool((distances(factors.left, left) <= limits).all())
        assert bool((distances(factors.right, right) <= limits).all())


def test_small_matrices_are_decomposed_whole_in_float64():
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
