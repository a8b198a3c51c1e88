"""Principal paths against the eigenvectors of a covariance, a case solved by hand, and their invariances."""

import numpy as np
import pytest
import torch

from lit_layers.functional.trajectory import principal_paths
from tests.support.references import covariance_paths, normal, rotation


def random_states(layers=4, tokens=9, dim=6, seed=0):
    return normal(layers, tokens, dim, seed=seed)


def test_points_and_shares_come_from_the_covariance_of_the_last_layer():
    for shape in [{}, {"tokens": 3}, {"tokens": 30, "dim": 2}, {"layers": 1}]:
        states = random_states(**shape) + 3
        expected_points, shares = covariance_paths(states.numpy())
        found = principal_paths(states)
        np.testing.assert_allclose(found.points.numpy(), expected_points, atol=1e-12)
        np.testing.assert_allclose(found.explained_variance.numpy(), shares, atol=1e-13)


def test_a_cross_of_four_tokens_has_its_arms_as_axes():
    last = torch.tensor([[-2.0, 0, 5], [2, 0, 5], [0, -1, 5], [0, 1, 5]])
    found = principal_paths(torch.stack([torch.zeros(4, 3), last]))
    assert found.points.dtype == torch.float64
    torch.testing.assert_close(found.points[1], last[:, :2].double())
    torch.testing.assert_close(found.points[0], torch.zeros(4, 2, dtype=torch.float64))
    torch.testing.assert_close(found.explained_variance, torch.tensor([0.8, 0.2], dtype=torch.float64))


def test_translation_changes_nothing_scaling_scales_and_rotation_only_flips_axes():
    states = random_states()
    plain = principal_paths(states)
    moved = principal_paths(states + 7)
    torch.testing.assert_close(moved.points, plain.points, atol=1e-11, rtol=0)
    torch.testing.assert_close(principal_paths(3 * states).points, 3 * plain.points)
    turned = principal_paths(states @ rotation(6))
    torch.testing.assert_close(turned.points.abs(), plain.points.abs())
    torch.testing.assert_close(turned.explained_variance, plain.explained_variance)
    order = torch.randperm(9, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(principal_paths(states[:, order]).points, plain.points[:, order])


def test_tokens_on_a_line_or_at_one_point_have_no_plane():
    for spread in [0.0, 1.0]:
        for offset in [0.0, 1000.0]:
            states = random_states()
            states[-1] = offset + spread * normal(9, 1, seed=2) * torch.arange(6)
            with pytest.raises(ValueError, match="lie on a line and have no second axis"):
                principal_paths(states)
            found = principal_paths(states, undefined="nan")
            assert found.points.shape == (4, 9, 2)
            assert found.points.isnan().all()
            assert found.explained_variance.isnan().all()


def test_two_tokens_and_non_finite_states_are_refused():
    with pytest.raises(ValueError, match="lie on a line and have no second axis"):
        principal_paths(torch.randn(4, 2, 6))
    states = random_states()
    states[1, 2, 3] = torch.inf
    with pytest.raises(ValueError, match="a state is not finite"):
        principal_paths(states)
