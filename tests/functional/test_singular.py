"""Leading singular vectors against numpy's decomposition, and their bounds against what they bound."""

import functools
import math

import numpy as np
import pytest
import torch
from torch import Tensor

from lit_layers.functional import singular
from lit_layers.functional._certificate import ceiling, miscoupling_bounds, nothing_missed, rayleigh_ritz, vector_errors
from lit_layers.functional._chebyshev import Leading, leading_vectors, starting_block
from lit_layers.functional.coupling import error_estimate, miscoupling, miscoupling_from_factors
from lit_layers.functional.singular import Factors, singular_factors

KINDS = ("power", "exponential", "flat", "clustered", "deficient", "tied")


def gaussian(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


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
    }[kind]
    return values.sort(descending=True).values


def with_spectrum(values: Tensor, seed: int = 0) -> Tensor:
    left, right = (torch.linalg.qr(gaussian(len(values), len(values), seed=2 * seed + side))[0] for side in (0, 1))
    return left @ torch.diag(values) @ right.T


def example(kind: str, dim: int, seed: int = 0) -> Tensor:
    """A Gaussian matrix, the update of a random two-layer network, or one with a known spectrum."""
    if kind == "gaussian":
        return gaussian(dim, dim, seed=seed)
    if kind == "network":
        return gaussian(dim, 4 * dim, seed=seed) @ gaussian(4 * dim, dim, seed=seed + 1) / 50
    return with_spectrum(spectrum(kind, dim, seed), seed)


def iterate(matrices: Tensor, count: int, tolerance: float, start: Tensor | None = None) -> tuple[Leading, Tensor]:
    """By the iteration alone, however small the matrices, and the left vectors."""
    grams = matrices.mT @ matrices / matrices.square().sum((-2, -1), keepdim=True)
    found = leading_vectors(grams, count, tolerance, starting_block(start, len(matrices), matrices.shape[-1], count))
    images = matrices @ found.right
    return found, images / torch.linalg.vector_norm(images, dim=-2, keepdim=True)


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


def distances(vectors: Tensor, others: Tensor) -> Tensor:
    """Lengths of the differences of matching columns, of the sign that is closer."""
    return torch.minimum((vectors - others).norm(dim=0), (vectors + others).norm(dim=0))


@pytest.mark.parametrize("tolerance", [1.0, 1e-3, 1e-6])
@pytest.mark.parametrize("kind", KINDS)
def test_no_vector_and_no_miscoupling_is_further_off_than_its_bound(kind, tolerance):
    """1,080 matrices, of which all that can be are proven."""
    dim, count, number = 40, 6, 60
    seeds = [1000 * KINDS.index(kind) + seed for seed in range(number)]
    matrices = torch.stack([example(kind, dim, seed) for seed in seeds])
    found, left = iterate(matrices, count, tolerance)
    bounds = miscoupling_bounds(found.left_errors, found.right_errors)
    proven = (bounds[:, -1] <= tolerance).tolist()
    assert sum(proven) >= number * {"tied": 0, "clustered": 0.9 if tolerance > 1e-6 else 0.05}.get(kind, 0.9)
    assert not (kind == "tied" and any(proven))
    for index in range(number):
        if not proven[index]:
            assert bool(bounds[index].isinf().all())
            continue
        matrix, right = matrices[index], found.right[index]
        exact_left, values, exact_right = exact(matrix, count)
        assert bool((distances(right, exact_right) <= found.right_errors[index]).all())
        assert bool((distances(left[index], exact_left) <= found.left_errors[index]).all())
        other = gaussian(dim, dim, seed=seeds[index] + 10**6) if index % 2 else matrix
        values = exact(other, count)[1]
        factors = Factors(left[index][None], values[None], right[None], bounds[index][None], bounds[index][None])
        for k in range(1, count + 1):
            value = float(miscoupling_from_factors(other[None], values[None], factors, k=k))
            assert abs(value - exact_miscoupling(other, matrix, k)) <= bounds[index, k - 1]


@pytest.mark.parametrize("kind", ["power", "gaussian", "network"])
def test_large_matrices_meet_the_tolerance_by_iteration_alone(kind, monkeypatch):
    monkeypatch.setattr(singular, "_whole", None)
    matrix = example(kind, 600).float()
    other = gaussian(600, 600, seed=9)
    default, fine = singular_factors(matrix, 60), singular_factors(matrix, 60, tolerance=1e-6)
    assert default.left.dtype == default.values.dtype == default.right.dtype == torch.float32
    assert fine.left.dtype == torch.float64
    left, values, right = exact(matrix, 60)
    other_values = torch.linalg.svdvals(other)[:60]
    for factors, tolerance in ((default, 1e-3), (fine, 1e-6)):
        assert float(factors.bounds[-1]) <= tolerance
        turns = distances(factors.left.double(), left), distances(factors.right.double(), right)
        assert bool((sum(turn.square().cumsum(0).sqrt() for turn in turns) <= factors.bounds).all())
        assert float((factors.values / values - 1).abs().max()) <= tolerance**2 + torch.finfo(factors.left.dtype).eps
        batched = Factors(*(part.double()[None] for part in factors))
        value = float(miscoupling_from_factors(other[None], other_values[None], batched, k=60))
        assert abs(value - exact_miscoupling(other, matrix, 60)) <= factors.bounds[-1]


def likely_and_real_errors(matrices: Tensor, counts: tuple[int, ...]) -> list[tuple[float, float]]:
    """Per K the largest estimate, and how far the worst pair is from that of numpy's singular vectors."""
    found = singular_factors(matrices, counts[-1] + 1)
    ours = miscoupling_from_factors(matrices, found.values, found, k=counts)
    norms, errors = torch.linalg.matrix_norm(matrices), []
    for place, k in enumerate(counts):
        turns, dim = found.turns[:, k - 1], matrices.shape[-1]
        estimate = float(error_estimate(found.values[:, :k], norms, turns, dim=dim, dtype=found.left.dtype).max())
        pairs = [(one, other) for one in range(len(matrices)) for other in range(len(matrices)) if one != other]
        real = [abs(float(ours[place, i, j]) - exact_miscoupling(matrices[i], matrices[j], k)) for i, j in pairs]
        errors.append((estimate, max(real)))
    return errors


@pytest.mark.parametrize("kind", ["gaussian", "network", "power", "exponential", "flat", "related"])
def test_the_estimate_of_a_pairs_error_is_within_ten_times_the_worst_real_one(kind):
    """At the default tolerance, where what is left of the error is far above rounding."""
    parts = [example("power" if kind == "related" else kind, 288, 10 * seed) for seed in range(3)]
    if kind == "related":
        parts = [parts[0] + 0.5 * part for part in parts]
    for estimate, real in likely_and_real_errors(torch.stack(parts), (14, 72)):
        assert real / 5 <= estimate <= 10 * real


def test_close_directions_that_mix_through_the_rest_stay_within_their_bounds():
    """Ritz vectors that a single direction outside couples, just below the split: the case the bounds are made for."""
    count, mixed = 3, 0
    for seed in range(1000):
        generator = torch.Generator().manual_seed(seed)
        gap, size = 10.0 ** (torch.tensor([-1, -0.7]) - 2.5 * torch.rand(2, generator=generator, dtype=torch.float64))
        gram = torch.diag(torch.tensor([1, 1 - float(gap), 0.8, 0.8 - float(gap), 0.5, 0.4, 0.55], dtype=torch.float64))
        gram[6, :4] = gram[:4, 6] = size * torch.rand(4, generator=generator, dtype=torch.float64)
        ritz = rayleigh_ritz(gram[None], torch.eye(7, 6, dtype=torch.float64)[None])
        split = ceiling(ritz, count)
        assert bool(nothing_missed(gram[None], ritz, split))
        left_errors, right_errors = (errors[0] for errors in vector_errors(ritz, split, count))
        squares, vectors = (torch.from_numpy(part[..., ::-1].copy()) for part in np.linalg.eigh(gram.numpy()))
        root = vectors @ torch.diag(squares.sqrt()) @ vectors.T  # J with J'J = G, and left vectors like the right ones
        found, vectors = ritz.vectors[0, :, :count], vectors[:, :count]
        images = root @ found
        turns = distances(found, vectors)
        assert bool((turns <= right_errors).all())
        assert bool((distances(images / images.norm(dim=0), vectors) <= left_errors).all())
        mixed += int(((turns > 2 * vectors[6].abs()) & right_errors.isfinite()).sum())
    assert mixed > 50  # that turned towards each other rather than outside


def test_what_was_missed_is_seen():
    values = torch.arange(40, 0, -1, dtype=torch.float64)
    gram = torch.diag(values).square()[None]
    axes = torch.eye(40, dtype=torch.float64)[None]
    for basis, complete in (
        (axes[..., :12], True),
        (axes[..., 1:13], False),
        (axes[..., [0, 1, 2, *range(4, 12)]], False),
    ):
        ritz = rayleigh_ritz(gram, basis)
        assert bool((ritz.residuals == 0).all())  # nothing in them tells
        assert nothing_missed(gram, ritz, ceiling(ritz, 4)).tolist() == [complete]


def test_a_start_that_misses_the_first_direction_does_not_lose_it():
    values = torch.arange(40, 0, -1, dtype=torch.float64)
    matrix = torch.diag(values)[None]
    start = torch.eye(40)[None, :, 1:16]  # exact arithmetic on zeros: no filter brings the first axis in
    found, _ = iterate(matrix, 4, 1e-6, start)
    torch.testing.assert_close(found.right[0].abs(), torch.eye(40, 4, dtype=torch.float64), rtol=0, atol=1e-7)
    assert bool((found.right_errors < 1e-6).all())


def test_a_spectrum_too_flat_to_iterate_on_is_taken_from_the_whole_of_it(monkeypatch):
    monkeypatch.setattr(singular, "_whole", None)
    matrix = with_spectrum(1 + 1e-3 * torch.arange(300, 0, -1, dtype=torch.float64) / 300)
    factors = singular_factors(matrix, 30)
    assert factors.bounds[-1] < 1e-6
    assert float(distances(factors.right, exact(matrix, 30)[2]).max()) <= factors.bounds[-1]


def test_an_earlier_checkpoint_saves_products_and_changes_nothing_else():
    before = example("network", 300, 3)
    matrix = before + 1e-3 * before.std() * gaussian(300, 300, seed=8)
    start = singular_factors(before, 30).right
    for columns in (30, 12):
        cold, _ = iterate(matrix[None], 30, 1e-3)
        warm, _ = iterate(matrix[None], 30, 1e-3, start[None, :, :columns])
        assert warm.products < cold.products if columns == 30 else warm.products <= cold.products
        cold_factors, factors = singular_factors(matrix, 30), singular_factors(matrix, 30, start=start[:, :columns])
        assert factors.bounds[-1] <= 1e-3
        limits = cold_factors.bounds + factors.bounds
        assert bool((distances(cold_factors.right, factors.right) <= limits).all())


def test_only_the_hard_matrices_of_a_batch_are_decomposed_whole(monkeypatch):
    calls, whole = [], singular._whole
    monkeypatch.setattr(
        singular, "_whole", lambda matrices, count: calls.append(len(matrices)) or whole(matrices, count)
    )
    tied, nothing = example("tied", 300), torch.zeros(300, 300, dtype=torch.float64)
    matrices = torch.stack([example("power", 300), tied, example("gaussian", 300), nothing]).reshape(2, 2, 300, 300)
    factors = singular_factors(matrices, 20)
    assert sum(calls) == 2
    vectors, numbers = (2, 2, 300, 20), (2, 2, 20)
    assert [tuple(part.shape) for part in factors] == [vectors, numbers, vectors, numbers, numbers]
    assert factors.bounds[..., -1].isinf().tolist() == [[False, True], [False, True]]
    for place in ((0, 0), (0, 1), (1, 0)):
        for part, single in zip(factors, singular_factors(matrices[place], 20), strict=True):
            assert torch.equal(part[place], single)
    together, _ = iterate(matrices.reshape(4, 300, 300)[:3], 20, 1e-3)  # as a GPU takes them
    assert miscoupling_bounds(together.left_errors, together.right_errors)[:, -1].isfinite().tolist() == [
        True,
        False,
        True,
    ]
    for index, place in ((0, (0, 0)), (2, (1, 0))):
        assert bool((distances(together.right[index], factors.right[place]) <= 2e-3).all())


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


@pytest.mark.parametrize("exponent", [-400, -60, 60, 400])
def test_a_power_of_two_only_scales_the_values(exponent):
    matrix = example("power", 300)
    factors, scaled = singular_factors(matrix, 20), singular_factors(2.0**exponent * matrix, 20)
    assert torch.equal(scaled.values, 2.0**exponent * factors.values)
    assert torch.equal(scaled.left, factors.left)
    assert torch.equal(scaled.right, factors.right)


def test_a_matrix_whose_norm_overflows_is_decomposed_whole():
    matrix = example("power", 300)
    factors, scaled = singular_factors(matrix, 20), singular_factors(2.0**700 * matrix, 20)
    assert bool((distances(scaled.right, factors.right) <= factors.bounds + scaled.bounds).all())


@pytest.mark.parametrize("count", [1, 100, 101, 300, None])
def test_any_number_of_directions_may_be_asked_for(count):
    matrix = example("gaussian", 300)
    factors = singular_factors(matrix, count, tolerance=1e-6)
    left, values, right = exact(matrix, count or 300)
    torch.testing.assert_close(factors.values, values, rtol=1e-11, atol=0)
    limits = factors.bounds + 1e-9
    assert bool((distances(factors.left, left) <= limits).all())
    assert bool((distances(factors.right, right) <= limits).all())


def test_small_matrices_are_decomposed_whole_in_float64():
    matrix = gaussian(9, 9).float()
    factors = singular_factors(matrix)
    assert factors.left.dtype == torch.float64
    rebuilt = factors.left @ torch.diag(factors.values) @ factors.right.T
    torch.testing.assert_close(rebuilt, matrix.double(), rtol=1e-12, atol=1e-13)
    assert miscoupling(matrix, matrix, k=9) == pytest.approx(0, abs=1e-13)
    assert singular_factors(example("tied", 24), 7).bounds[-1] == math.inf
    assert singular_factors(torch.zeros(0, 9, 9), 3).left.shape == (0, 9, 3)
    assert singular_factors(torch.zeros(0, 300, 300), 3).left.shape == (0, 300, 3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"count": 10}, "expected a count between 1 and the dimension 9, got 10"),
        ({"count": 0}, "expected a count between 1 and the dimension 9, got 0"),
        ({"tolerance": 0.0}, "expected a tolerance above 0, got 0.0"),
        ({"tolerance": math.nan}, "expected a tolerance above 0, got nan"),
        ({"start": torch.ones(8, 3)}, r"expected a start \(\*n, dim, any\) for \(9, 9\), got \(8, 3\)"),
        ({"start": torch.ones(2, 9, 3)}, r"expected a start .* got \(2, 9, 3\)"),
        ({"start": torch.full((9, 3), math.nan)}, "expected finite vectors as a start"),
    ],
)
def test_wrong_options_are_refused_with_a_sentence(options, message):
    with pytest.raises(ValueError, match=message):
        singular_factors(gaussian(9, 9), **options)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_gives_the_same_within_the_bounds():
    matrices = torch.stack([example(kind, 300) for kind in ("power", "gaussian", "network", "tied")])
    factors, there = singular_factors(matrices, 20), singular_factors(matrices.cuda(), 20)
    assert there.right.device.type == "cuda"
    for index in range(3):
        limits = factors.bounds[index] + there.bounds[index].cpu()
        assert bool((distances(factors.right[index], there.right[index].cpu()) <= limits).all())
    assert there.bounds[3, -1] == math.inf
