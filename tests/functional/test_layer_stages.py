"""Layer stages against a search over all divisions and planted stages, and CKA of all layers at once."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lit_layers.functional import geometry
from lit_layers.functional.geometry import LayerStages, layer_stages, linear_cka_matrix
from tests.support.references import cka


def symmetric(size, seed):
    values = np.random.default_rng(seed).normal(size=(size, size))
    return values + values.T


def brute_force_stages(matrix):
    """Try every run of two or more layers as the middle, pair by pair."""
    size = len(matrix)
    best, most = (0, size, 0, 0.0), 0.0
    for first in range(size):
        for last in range(first + 1, size):
            run = set(range(first, last + 1))
            if len(run) == size:
                continue
            within = [matrix[i, j] for i in run for j in run if i < j]
            across = [matrix[i, j] for i in run for j in range(size) if j not in run]
            contrast = np.mean(within) - np.mean(across)
            pooled = np.array(within + across)
            fitted = np.array([np.mean(within)] * len(within) + [np.mean(across)] * len(across))
            # what two means explain: the drop of the residual sum of squares over pairs
            explained = ((pooled - pooled.mean()) ** 2).sum() - ((pooled - fitted) ** 2).sum()
            if contrast > 0 and explained > most:
                best, most = (first, len(run), size - last - 1, contrast), explained
    return best


def test_the_stages_are_the_best_of_all_divisions():
    for seed in range(25):
        size = 2 + seed % 8
        matrix = symmetric(size, seed)
        found = layer_stages(torch.from_numpy(matrix))
        expected = brute_force_stages(matrix)
        assert found[:3] == expected[:3]
        assert found.contrast == pytest.approx(expected[3], rel=1e-9)


@given(st.integers(0, 5), st.integers(2, 9), st.integers(0, 5), st.floats(-0.9, 0.5), st.floats(0.01, 0.5))
def test_a_planted_middle_is_found_with_its_contrast(beginning, middle, ending, across, more):
    size = beginning + middle + ending
    matrix = torch.full((size, size), across, dtype=torch.float64)
    run = slice(beginning, beginning + middle)
    matrix[run, run] = across + more
    matrix.fill_diagonal_(1)
    found = layer_stages(matrix)
    if middle == size:
        assert found == LayerStages(0, size, 0, 0.0)
    else:
        assert found[:3] == (beginning, middle, ending)
        assert found.contrast == pytest.approx(more, rel=1e-9)
    turned = layer_stages(matrix.flip(0, 1))
    assert turned[:3] == (found.num_ending, found.num_middle, found.num_beginning)


def test_equally_similar_layers_are_all_in_the_middle():
    for size in [2, 5, 12]:
        for value in [0.0, 0.3, 1 / 3, 1.0]:
            matrix = torch.full((size, size), value, dtype=torch.float64).fill_diagonal_(1)
            assert layer_stages(matrix) == LayerStages(0, size, 0, 0.0)
            if value:  # the same up to rounding
                assert layer_stages(matrix + 1e-15 * torch.from_numpy(symmetric(size, 0)))[:3] == (0, size, 0)


def test_the_larger_and_then_the_earlier_of_equally_good_middles_wins():
    matrix = torch.zeros(6, 6)
    matrix[0:2, 0:2] = matrix[3:5, 3:5] = 1.0
    assert layer_stages(matrix)[:3] == (0, 2, 4)


def test_the_diagonal_and_a_common_constant_do_not_matter():
    matrix = torch.from_numpy(symmetric(9, 3))
    found = layer_stages(matrix)
    changed = (matrix + 5).fill_diagonal_(100)
    assert layer_stages(changed)[:3] == found[:3]
    assert layer_stages(changed).contrast == pytest.approx(found.contrast, rel=1e-9)
    assert layer_stages(3 * matrix).contrast == pytest.approx(3 * found.contrast, rel=1e-9)


def test_too_small_and_non_finite_matrices_are_refused():
    for matrix, message in (
        (torch.ones(1, 1), "of at least 2 layers"),
        (torch.full((3, 3), torch.nan), "expected finite similarities"),
    ):
        with pytest.raises(ValueError, match=message):
            layer_stages(matrix)


# ---------------------------------------------------------------------------------------- linear_cka_matrix


def test_cka_of_all_layers_equals_that_of_each_pair(monkeypatch):
    for rows_at_a_time in [1, 4, 100]:
        for debiased in (False, True):
            monkeypatch.setattr(geometry, "MAX_ENTRIES", rows_at_a_time * 4 * 11)
            generator = np.random.default_rng(5)
            states = generator.normal(size=(4, 11, 6)) + 3
            states[2] = (
                states[1] @ np.linalg.qr(generator.normal(size=(6, 6)))[0] * 7 - 2
            )  # rotated, scaled and moved: CKA is 1 up to rounding
            found = linear_cka_matrix(torch.from_numpy(states), debiased=debiased)
            expected = [[cka(x, y, debiased=debiased) for y in states] for x in states]
            np.testing.assert_allclose(found, expected, rtol=1e-10, atol=1e-12)
            assert found[1, 2].item() == pytest.approx(1, rel=1e-12)
            assert found[0, 1].item() < 0.9


def test_only_a_constant_layer_is_undefined():
    states = torch.from_numpy(np.random.default_rng(0).normal(size=(3, 6, 4)))
    states[1] = 2.5
    with pytest.raises(ValueError, match=r"linear_cka_matrix is undefined at element \(0, 1\): a layer does not vary"):
        linear_cka_matrix(states)
    found = linear_cka_matrix(states, undefined="nan")
    assert found.isnan().tolist() == [[False, True, False], [True, True, True], [False, True, False]]
    states[1, 0, 0] = torch.inf
    with pytest.raises(ValueError, match="values are not finite"):
        linear_cka_matrix(states)
    with pytest.raises(ValueError, match="with debiased=True needs at least 4 rows, got 3"):
        linear_cka_matrix(torch.ones(3, 3, 4), debiased=True)
