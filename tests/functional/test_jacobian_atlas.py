"""The shape of Jacobians against full decompositions in numpy, cases solved by hand, invariances and refusals."""

import math

import numpy as np
import pytest
import torch

from lit_layers.functional.jacobian.atlas import TOLERANCE, jacobian_shape
from lit_layers.functional.singular import singular_factors
from tests.support.references import jacobian_shape_of, normal, rotation


def shape(matrices, **options):
    """Return the numbers of each matrix, without the residual, in the last dimension."""
    return torch.stack(jacobian_shape(matrices, singular_factors(matrices.nan_to_num()), **options)[:-1], -1)


def spiked(size: int, seed: int) -> torch.Tensor:
    """Return noise and a matrix of rank 2 with a complex (odd seed) or real leading eigenvalue."""
    turn = torch.tensor([[2.0, -3.0], [3.0, 2.0]] if seed % 2 else [[4.0, 1.0], [0.0, 2.0]], dtype=torch.float64)
    frame = normal(size, 2, seed=seed)
    return normal(size, size, seed=seed + 50) / size**0.5 + frame @ turn @ torch.linalg.pinv(frame)


def test_all_numbers_equal_full_decompositions():
    for size, number, tolerance in ((5, 4, 1e-9), (19, 4, 1e-9), (90, 4, 1e-6), (520, 2, 2e-5)):  # 520: in float32
        matrices = torch.stack([spiked(size, seed) for seed in range(number)]).unflatten(0, (2, -1))
        matrices = matrices.float() if size > 512 else matrices
        found = shape(matrices)
        assert found.shape == (2, number // 2, 6)
        expected = [jacobian_shape_of(matrix.double().numpy()) for matrix in matrices.flatten(0, 1)]
        np.testing.assert_allclose(found.flatten(0, 1).numpy(), expected, rtol=tolerance)


def test_cases_solved_by_hand():
    turn = torch.tensor([[0.0, -1.0], [1.0, 0.0]], dtype=torch.float64)
    jordan = torch.tensor([[0.0, 1.0], [0.0, 0.0]], dtype=torch.float64)
    shear = torch.tensor([[1.0, 1.0], [0.0, 0.5]], dtype=torch.float64)  # eigenvectors (1, 0), (-2, 1)
    projector = rotation(30)[:, :7] @ rotation(30)[:, :7].T
    symmetric = rotation(40) @ torch.diag(torch.arange(1.0, 41, dtype=torch.float64)) @ rotation(40).T
    power4, power2 = sum(i**4 for i in range(1, 41)), sum(i**2 for i in range(1, 41))
    # J'J of the shear is [[1, 1], [1, 1.25]], and J^2 is [[1, 1.5], [0, 0.25]]
    largest = ((2.25 + math.sqrt(2.25**2 - 1)) / 2) ** 0.5
    right = np.array([1, largest**2 - 1]) / math.hypot(1, largest**2 - 1)
    left = shear.numpy() @ right / largest
    for matrix, expected in (
        (turn, [0, 0, 2, 1, 1, 1]),
        (jordan, [1, 0.5, 1, 0, 1, 0]),
        (torch.block_diag(turn, turn.new_zeros(1, 1)), [0, 0, 2, 1, 1, 1]),
        (shear, [math.sqrt(1 - 3.3125 / 4.5625), 3.5 / 4.5, 2.25**2 / 4.5625, 1 / largest, abs(left[0]), right[0]]),
        (projector, [0, 1, 7, 1, math.nan, math.nan]),  # the directions are arbitrary in the range
        (symmetric, [0, 1, power2**2 / power4, 1, 1, 1]),
        (-symmetric, [0, 1, power2**2 / power4, 1, 1, 1]),
    ):
        known = ~torch.tensor(expected).isnan()
        found = shape(matrix)[known].tolist()
        # Roots of rounding errors of 1e-16: the departure of a normal matrix, and the eigenvalue 0 of a Jordan block.
        assert found[0] == pytest.approx(expected[0], abs=3e-8)
        assert found[1:] == pytest.approx([each for each in expected[1:] if each == each], rel=1e-12, abs=3e-8)


def test_rotation_and_scaling_change_nothing():
    matrices = torch.stack([spiked(24, 0), spiked(24, 1)])
    turn = rotation(24, seed=3)
    expected = shape(matrices)
    for scale in (-1.0, 1e-150, 1e150):
        torch.testing.assert_close(shape(scale * turn @ matrices @ turn.T), expected, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(shape(1e-30 * matrices.float()), shape(matrices.float()), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(shape(matrices.mT)[:, :4], expected[:, :4], rtol=1e-9, atol=1e-12)


def test_zero_non_finite_and_unconverged_matrices_are_undefined():
    matrices = torch.stack([spiked(9, 0), torch.zeros(9, 9).double(), spiked(9, 1), spiked(9, 2)])
    matrices[2, 0, 0], matrices[3, 4, 4] = math.nan, math.inf
    found = shape(matrices, undefined="nan")
    assert found.isnan().all(1).tolist() == [False, True, True, True]
    torch.testing.assert_close(found[0], shape(matrices[0]))
    for index, reason in ((1, "zero"), (2, "not finite"), (3, "not finite")):
        with pytest.raises(ValueError, match=f"jacobian_shape is undefined: a Jacobian is {reason}"):
            shape(matrices[index])
    ring = rotation(600).float()  # all eigenvalues have modulus 1
    factors = singular_factors(ring, 1)
    found = jacobian_shape(ring, factors, undefined="nan")
    assert [value.isnan().item() for value in found] == [False] * 3 + [True] * 4
    with pytest.raises(ValueError, match="leading_eigenvector is undefined: the iteration did not converge"):
        jacobian_shape(ring, factors)
    assert jacobian_shape(spiked(90, 1), singular_factors(spiked(90, 1))).residual < TOLERANCE / 1e3
