"""Coupling against explicit loops in numpy, cases solved by hand, invariances and refusals."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import halfnorm
from torch import Tensor

from lit_layers.functional.coupling import (
    cross_token_influence,
    excess_coupling,
    inverse_norm_line,
    jacobian_spectrum,
    linearized_rollout,
    mean_by_distance,
    mean_off_diagonal,
    min_gap,
    miscoupling,
    miscoupling_matrix,
    miscoupling_of_factors,
    num_directions,
    random_miscoupling,
    singular_factors,
)
from tests.support.references import normal, rotation


def from_spectrum(values: Tensor, seed: int = 0) -> Tensor:
    return rotation(len(values), seed) @ torch.diag(values) @ rotation(len(values), seed + 10_000).T


def loop_miscoupling(j1: np.ndarray, j2: np.ndarray, k: int, p: float, sign: str) -> float:
    """Compute the definition entry by entry."""
    u, _, vt = np.linalg.svd(j2)
    left, right = (u[:, :k], vt[:k].T)
    s1 = np.linalg.svd(j1, compute_uv=False)[:k]
    total = 0.0
    for i in range(k):
        for j in range(k):
            entry = left[:, i] @ j1 @ right[:, j]
            entry = abs(entry) if sign == "absolute" else entry
            total += (entry - (s1[i] if i == j else 0)) ** 2
    norm = s1.max() if p == math.inf else (s1**p).sum() ** (1 / p)
    return math.sqrt(total) / norm


def test_the_matrix_equals_the_definition_for_every_pair_and_k():
    for p in [1.0, 2.0, 3.5, math.inf]:
        for sign in ["signed", "absolute"]:
            jacobians, others = normal(3, 9, 9), normal(2, 9, 9, seed=1)
            ks = [1, 0.5, 9]
            options = {"p": p, "sign": sign}
            found = miscoupling_matrix(jacobians, others, k=ks, **options)
            own = miscoupling_matrix(jacobians, k=0.5, **options)
            assert found.shape == (3, 3, 2)
            for i in range(3):
                for j in range(3):
                    expected = loop_miscoupling(jacobians[i].numpy(), jacobians[j].numpy(), 4, p, sign)
                    assert own[i, j] == pytest.approx(expected, rel=1e-11, abs=1e-12)
                for j in range(2):
                    for position, count in enumerate([1, 4, 9]):
                        expected = loop_miscoupling(jacobians[i].numpy(), others[j].numpy(), count, p, sign)
                        assert found[position, i, j] == pytest.approx(expected, rel=1e-11)
                        single = miscoupling(jacobians[i], others[j], k=ks[position], **options)
                        assert single == pytest.approx(expected, rel=1e-11)


def test_leading_dimensions_are_batches():
    jacobians = normal(2, 4, 3, 8, 8)
    found = miscoupling_matrix(jacobians, k=[2, 5])
    assert found.shape == (2, 2, 4, 3, 3)
    torch.testing.assert_close(found[1, 1, 2], miscoupling_matrix(jacobians[1, 2], k=5), rtol=1e-12, atol=1e-13)


def test_a_sign_reversed_block_has_miscoupling_2_unless_signs_are_ignored():
    block = normal(8, 8)
    assert miscoupling(-block, block, k=5) == pytest.approx(2, rel=1e-13)
    assert miscoupling(block, -block, k=5) == pytest.approx(2, rel=1e-13)
    assert miscoupling(-block, block, k=5, sign="absolute") == pytest.approx(0, abs=1e-13)


def test_disjoint_output_spaces_give_1_and_with_p_1_a_ratio_of_norms_of_the_spectrum():
    values = torch.tensor([4.0, 3, 0, 0]).double()
    first = torch.diag(values)
    second = torch.zeros(4, 4, dtype=torch.float64)
    second[2, 0], second[3, 1] = 2, 1  # same inputs, other outputs
    assert miscoupling(first, second, k=2) == pytest.approx(1, rel=1e-13)
    assert miscoupling(first, second, k=2, p=1) == pytest.approx(5 / 7, rel=1e-13)


def test_a_rotated_basis_gives_twice_the_sine_of_half_the_angle():
    for angle in [0.3, 1.5, 3.0, -2.0]:
        sine, cosine = math.sin(angle), math.cos(angle)
        turn = torch.tensor([[cosine, -sine], [sine, cosine]], dtype=torch.float64)
        first = torch.diag(torch.tensor([5.0, 0.7]).double())
        second = turn @ torch.diag(torch.tensor([2.0, 1.9]).double())
        assert miscoupling(first, second, k=2) == pytest.approx(2 * abs(math.sin(angle / 2)), rel=1e-12)


def test_common_rotations_transposition_and_positive_scaling_change_nothing():
    for sign in ["signed", "absolute"]:
        first, second = normal(9, 9), normal(9, 9, seed=1)
        p, q = rotation(9, 2), rotation(9, 3)
        expected = float(miscoupling(first, second, k=4, sign=sign))
        for pair in [(p @ first @ q, p @ second @ q), (first.T, second.T), (3 * first, second), (first, 0.2 * second)]:
            assert miscoupling(*pair, k=4, sign=sign) == pytest.approx(expected, rel=1e-11)
        assert abs(float(miscoupling(second, first, k=4, sign=sign)) - expected) > 1e-3  # not symmetric
        for size in (1e38, 1e-38):  # near the limits of float32
            for pair in [(size * first, second), (first, size * second), (size * first, size * second)]:
                assert miscoupling(*pair, k=4, sign=sign) == pytest.approx(expected, rel=1e-11)


def test_float32_input_is_decomposed_in_float64_up_to_dimension_512():
    jacobians = normal(3, 16, 16).float()
    found = miscoupling_matrix(jacobians, k=4)
    assert found.dtype == torch.float64
    assert torch.equal(found, miscoupling_matrix(jacobians.double(), k=4))


def test_a_small_tolerance_gives_exact_float64_factors_of_large_float32_jacobians():
    jacobians = normal(2, 520, 520).float()
    factors = singular_factors(jacobians, 10, tolerance=1e-6)
    found = miscoupling_of_factors(jacobians, factors.values, factors, k=[10])[0]
    for i, j in ((0, 1), (1, 0)):
        expected = loop_miscoupling(jacobians[i].double().numpy(), jacobians[j].double().numpy(), 10, 2.0, "signed")
        assert float(found[i, j]) == pytest.approx(expected, abs=1e-6)


def test_k_is_a_count_if_int_and_a_share_if_float():
    assert num_directions(1, 10) == 1
    assert num_directions(1.0, 10) == 10
    assert num_directions(0.1, 768) == 76
    assert num_directions(0.3, 10) == 3
    assert num_directions(0.7, 10) == 7
    assert num_directions(0.29, 100) == 29  # 0.29 x 100 is 28.999999999999996 in floating point


@pytest.mark.parametrize("k", [11, 0, 1.5, 0.05, math.nan])
def test_a_k_out_of_range_is_refused_and_never_clipped(k):
    with pytest.raises(ValueError, match="expected k between 1 and the dimension 10, got|NaN"):
        num_directions(k, 10)
    with pytest.raises(ValueError):
        miscoupling(normal(10, 10), normal(10, 10), k=k)


def test_undefined_blocks_are_named_in_the_error_or_only_they_are_nan():
    jacobians = normal(4, 6, 6)
    expected = miscoupling_matrix(jacobians, k=2)
    jacobians[1] = 0
    jacobians[2, 0, 0] = math.inf
    with pytest.raises(ValueError, match=r"expected finite Jacobians, got a non-finite one at index \[2\]"):
        miscoupling_matrix(jacobians, k=2)
    with pytest.raises(ValueError, match=r"miscoupling is undefined at element \(0, 1\): a Jacobian is zero"):
        miscoupling_matrix(jacobians[:2], k=2)
    found = miscoupling_matrix(jacobians, k=2, undefined="nan")
    known = ~found.isnan()
    assert known.tolist() == [[True, True, False, True], [False] * 4, [False] * 4, [True, True, False, True]]
    torch.testing.assert_close(found[0, 3], expected[0, 3])


def test_min_gap_is_the_smallest_gap_of_the_leading_spectrum():
    values = torch.tensor([10.0, 8, 7.5, 2, 2])
    assert [round(float(min_gap(values, k=k)), 6) for k in (1, 2, 3, 4, 5)] == [0.2, 0.05, 0.05, 0.0, 0.0]
    assert float(min_gap(torch.tensor([4.0, 1]), k=2)) == 0.25  # the gap of the last value is the value itself
    assert float(min_gap(torch.zeros(3), k=1)) == 0


def test_the_random_baseline_is_the_root_mean_square_over_haar_bases():
    for k in [12, 48]:
        for sign in ["signed", "absolute"]:
            values = torch.arange(1, 49, dtype=torch.float64) ** -0.7
            first = torch.diag(values)
            others = torch.stack([from_spectrum(values, seed) for seed in range(400)])
            squares = miscoupling(first.expand(400, -1, -1), others, k=k, sign=sign).square()
            found = random_miscoupling(values, k=k, sign=sign)
            assert found == pytest.approx(math.sqrt(squares.mean()), abs=0.006)


def test_the_absolute_baseline_equals_the_moments_of_half_normal_entries():
    """Sum E (|a| - s)^2 on the diagonal and E a^2 off it, for normal a of variance |s|^2 / dim^2."""
    for dim, k in [(48, 12), (48, 48), (400, 5)]:
        values = normal(dim, seed=3).abs().sort(descending=True).values
        size = halfnorm(scale=float(values.norm()) / dim)
        diagonal = sum(size.moment(2) - 2 * s * size.mean() + s**2 for s in values[:k].tolist())
        expected = math.sqrt((diagonal + (k * k - k) * size.moment(2)) / float(values[:k].square().sum()))
        assert float(random_miscoupling(values, k=k, sign="absolute")) == pytest.approx(expected, rel=1e-9)


def test_zero_spectra_unknown_signs_and_non_square_matrices_are_refused():
    plain: Any = "plain"
    for call, sentence in (
        (lambda: random_miscoupling(torch.zeros(4), k=2), "random_miscoupling is undefined: a spectrum is zero"),
        (lambda: random_miscoupling(torch.ones(4), k=2, sign=plain), "expected sign"),
        (lambda: miscoupling_matrix(normal(2, 4, 4), k=2, sign=plain), "'signed', 'absolute', got 'plain'"),
        (lambda: miscoupling_matrix(normal(2, 4, 5), k=2), r"expected square matrices .* got \(2, 4, 5\)"),
    ):
        with pytest.raises(ValueError, match=sentence):
            call()


def test_excess_coupling_is_0_for_random_and_1_for_shared_bases_at_every_p():
    jacobians = normal(3, 12, 12)
    spectra = torch.linalg.svdvals(jacobians)
    excess = [
        excess_coupling(miscoupling_matrix(jacobians, k=4, p=p), random_miscoupling(spectra, k=4, p=p)) for p in (1, 2)
    ]
    torch.testing.assert_close(excess[0], excess[1])
    torch.testing.assert_close(excess[0].diagonal(), torch.ones(3, dtype=torch.float64))
    hand = excess_coupling(torch.tensor([[0.5, 1.0], [2.0, 0.0]]), torch.tensor([1.0, 4.0]))
    assert hand.tolist() == [[0.5, 0.0], [0.5, 1.0]]


def test_means_over_pairs_leave_out_the_diagonal_and_group_by_distance():
    pairs = torch.tensor([[1.0, 0.2, 0.4], [0.6, 1.0, 0.0], [0.8, math.nan, 1.0]])
    assert mean_off_diagonal(pairs) == pytest.approx((0.2 + 0.4 + 0.6 + 0.0 + 0.8) / 5)
    assert mean_by_distance(pairs).tolist() == pytest.approx([1.0, (0.2 + 0.6 + 0.0) / 3, 0.6])
    whole = normal(2, 4, 4).clamp(-1, 1)
    whole.diagonal(dim1=-2, dim2=-1).fill_(1)
    coupling = mean_off_diagonal(whole)
    torch.testing.assert_close(whole.mean((-2, -1)), coupling + (1 - coupling) / 4)


def test_the_spectrum_equals_that_of_numpy_and_its_line_equals_a_polynomial_fit():
    jacobians = normal(2, 6, 7, 7)
    found = jacobian_spectrum(jacobians, top=3, fit_from=2)
    for prompt in range(2):
        values = np.stack([np.linalg.svd(block, compute_uv=False) for block in jacobians[prompt].numpy()])
        np.testing.assert_allclose(found.values[prompt], values[:, :3], rtol=1e-11)
        number, inverse = np.arange(2, 7), 1 / values[1:, 0]
        slope, intercept = np.polyfit(number, inverse, 1)
        assert found.slope[prompt] == pytest.approx(slope, rel=1e-9)
        assert found.intercept[prompt] == pytest.approx(intercept, rel=1e-9)
        r_squared = np.corrcoef(number, inverse)[0, 1] ** 2
        assert found.r_squared[prompt] == pytest.approx(r_squared, rel=1e-9)
    assert jacobian_spectrum(jacobians, top=None).values.shape == (2, 6, 7)


def test_an_inverse_norm_that_grows_linearly_has_r_squared_one():
    blocks = torch.stack([from_spectrum(torch.tensor([1 / (0.5 + 0.25 * b), 0.1, 0.01]).double()) for b in range(1, 6)])
    found = jacobian_spectrum(blocks, top=2)
    assert (float(found.slope), float(found.intercept)) == pytest.approx((0.25, 0.5))
    assert float(found.r_squared) == pytest.approx(1, abs=1e-12)


def test_rotations_do_not_change_the_spectrum():
    jacobians = normal(4, 6, 6)
    turned = rotation(6) @ jacobians @ rotation(6, 1)
    for found, expected in zip(jacobian_spectrum(turned, top=6), jacobian_spectrum(jacobians, top=6), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-12)


def test_an_undefined_line_raises_or_is_nan():
    constant = torch.full((4,), 3.0).double()
    with pytest.raises(ValueError, match="r_squared is undefined: 1 / s_1 is constant"):
        inverse_norm_line(constant)
    slope, intercept, r_squared = inverse_norm_line(constant, undefined="nan")
    assert (float(slope), float(intercept)) == (0, pytest.approx(1 / 3))
    assert r_squared.isnan()
    with pytest.raises(ValueError, match="r_squared is undefined: a Jacobian is zero"):
        jacobian_spectrum(torch.zeros(3, 4, 4), top=2)
    with pytest.raises(ValueError, match="at least three blocks to fit a line to, got blocks 3 to 4"):
        jacobian_spectrum(normal(4, 5, 5), top=2, fit_from=3)


def test_the_rollout_equals_its_recursion_and_skips_the_last_factor_on_request():
    jacobians, states = normal(3, 2, 5, 5), normal(4, 2, 5, seed=1)
    found = linearized_rollout(jacobians, states)
    skipped = linearized_rollout(jacobians, states, skip_last=True)
    for prompt in range(2):
        before = carried = states[0, prompt].numpy()
        for block in range(3):
            before = carried
            carried = carried + jacobians[block, prompt].numpy() @ carried
            state = states[block + 1, prompt].numpy()
            cosine = carried @ state / np.linalg.norm(carried) / np.linalg.norm(state)
            assert found[block, prompt] == pytest.approx(cosine, rel=1e-11)
        last = before @ state / np.linalg.norm(before) / np.linalg.norm(state)
        assert skipped[2, prompt] == pytest.approx(last, rel=1e-11)
        # two calls may round differently, because their operands have other memory addresses
        torch.testing.assert_close(skipped[:2, prompt], found[:2, prompt], rtol=1e-11, atol=1e-14)


def test_the_rollout_of_linear_tokenwise_blocks_is_exact():
    jacobians, states = normal(4, 6, 6), [normal(6, seed=1)]
    for block in jacobians:
        states.append(states[-1] + block @ states[-1])
    torch.testing.assert_close(linearized_rollout(jacobians, torch.stack(states)), torch.ones(4, dtype=torch.float64))
    turn = rotation(6, 3)
    moved = linearized_rollout(turn @ jacobians @ turn.T, 2 * torch.stack(states) @ turn.T)
    torch.testing.assert_close(moved, torch.ones(4, dtype=torch.float64))


def test_a_rollout_through_zero_raises_or_is_nan():
    jacobians, states = normal(2, 3, 3), normal(3, 3, seed=1)
    states[2] = 0
    with pytest.raises(ValueError, match=r"linearized_rollout is undefined at element \(1,\)"):
        linearized_rollout(jacobians, states)
    assert linearized_rollout(jacobians, states, undefined="nan").isnan().tolist() == [False, True]
    with pytest.raises(ValueError, match=r"expected states of shape \(3, 3\)"):
        linearized_rollout(jacobians, states[:2])


def test_influence_equals_its_definition():
    jacobians = normal(3, 6, 6)
    found = cross_token_influence(jacobians)
    for item in range(3):
        values = np.linalg.svd(jacobians[item].numpy(), compute_uv=False)
        share = values / values.sum()
        expected = [np.linalg.norm(jacobians[item]), values[0], values.sum() ** 2 / (values**2).sum(),
                    math.exp(-sum(s * math.log(s) for s in share))]  # fmt: skip
        assert [float(quantity[item]) for quantity in found] == pytest.approx(expected, rel=1e-11)
        assert 1 <= found.participation_ratio[item] <= found.entropy_rank[item] <= 6


def test_a_partial_isometry_has_its_rank_as_both_ranks():
    for rank in [1, 3, 5]:
        isometry = rotation(5)[:, :rank] @ rotation(5, 1)[:, :rank].T
        expected = [math.sqrt(rank), 1, rank, rank]
        assert [float(quantity) for quantity in cross_token_influence(isometry)] == pytest.approx(expected, rel=1e-10)


def test_rotations_do_not_change_influence_and_scaling_changes_only_the_norms():
    block = normal(6, 6)
    expected = cross_token_influence(block)
    for found in (cross_token_influence(rotation(6) @ block @ rotation(6, 1)), cross_token_influence(-7 * block)):
        factor = float(found.spectral / expected.spectral)
        assert factor == pytest.approx(1) or factor == pytest.approx(7)
        torch.testing.assert_close(found.frobenius, factor * expected.frobenius)
        torch.testing.assert_close(found.participation_ratio, expected.participation_ratio)
        torch.testing.assert_close(found.entropy_rank, expected.entropy_rank)


def test_the_rank_of_a_zero_jacobian_raises_or_is_nan():
    blocks = torch.stack([normal(4, 4), torch.zeros(4, 4, dtype=torch.float64)])
    with pytest.raises(ValueError, match=r"rank is undefined at element \(1,\): a Jacobian is zero"):
        cross_token_influence(blocks)
    found = cross_token_influence(blocks, undefined="nan")
    assert [float(found.frobenius[1]), float(found.spectral[1])] == [0, 0]
    assert found.entropy_rank.isnan().tolist() == found.participation_ratio.isnan().tolist() == [False, True]
