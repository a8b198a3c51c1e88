"""Geometry of clouds of states against known spectra, known manifolds and plain numpy."""

import math

import numpy as np
import pytest
import torch
from sklearn.neighbors import NearestNeighbors

from lit_layers.functional import (
    alpha_req,
    anisotropy,
    block_influence,
    massive_activation,
    normal_massive_activation,
    step_ratio,
    two_nn_dimension,
    uniformity,
)
from lit_layers.functional.state_geometry import shuffled_features
from tests.support.references import normal, rotation


def points_with_spectrum(eigenvalues: torch.Tensor, points: int) -> torch.Tensor:
    """Return points whose covariance has exactly these eigenvalues, in random directions."""
    dim = len(eigenvalues)
    left = torch.linalg.qr(normal(points, dim) - normal(points, dim).mean(0))[0]
    return left * eigenvalues.sqrt() @ rotation(dim, 1)


def test_a_spectrum_of_i_to_the_minus_alpha_has_that_alpha():
    for alpha in [0.0, 0.5, 1.0, 2.5]:
        eigenvalues = torch.arange(1, 121, dtype=torch.float64) ** -alpha
        points = points_with_spectrum(eigenvalues, 300)
        for each in (points, 3.5 * points + 7, points[torch.randperm(300)]):
            assert alpha_req(each).item() == pytest.approx(alpha, abs=1e-9)
        assert alpha_req(points, fit_range=(2, 20)).item() == pytest.approx(alpha, abs=1e-9)
        few = points_with_spectrum(eigenvalues, 121)[:60]  # fewer points than dimensions: the other Gram matrix
        values = np.linalg.eigvalsh(np.cov(few.numpy().T))[::-1][:59]
        ranks = np.arange(1, 60)
        fitted = slice(10, 59)
        slope, _ = np.polyfit(np.log(ranks[fitted]), np.log(values[fitted]), 1, w=ranks[fitted] ** -0.5)
        assert alpha_req(few).item() == pytest.approx(-slope, rel=1e-9)


def test_alpha_is_refused_for_too_few_ranks_and_empty_ranges():
    with pytest.raises(ValueError, match=r"fewer than 3 ranks in \(11, 100\)"):
        alpha_req(normal(12, 40))
    assert not alpha_req(normal(14, 40)).isnan()
    sets = torch.stack([normal(30, 20), torch.full((30, 20), math.nan, dtype=torch.float64), torch.ones(30, 20)])
    assert alpha_req(sets, undefined="nan").isnan().tolist() == [False, True, True]
    with pytest.raises(ValueError, match=r"fewer than 3 ranks in \(10, 10\)"):
        alpha_req(normal(30, 20), fit_range=(10, 10))


def test_points_on_a_sphere_have_its_dimension_in_any_surrounding_space():
    for dim in [1, 2, 4]:
        sphere = normal(2000, dim + 1, seed=dim)
        sphere = sphere / sphere.norm(dim=1, keepdim=True)
        embedding = rotation(30)[: dim + 1]
        assert two_nn_dimension(sphere @ embedding).item() == pytest.approx(dim, rel=0.05)
        assert two_nn_dimension(5 - 2 * sphere).item() == pytest.approx(two_nn_dimension(sphere).item(), rel=1e-9)


def test_the_dimension_is_the_slope_through_the_origin_and_counts_equal_points_once():
    points = normal(80, 6)
    r1, r2 = NearestNeighbors(n_neighbors=3, algorithm="brute").fit(points.numpy()).kneighbors()[0][:, :2].T
    x = np.log(np.sort(r2 / r1))[:72]
    y = -np.log(1 - np.arange(1, 73) / 80)
    expected = np.linalg.lstsq(x[:, None], y, rcond=None)[0][0]
    assert two_nn_dimension(points).item() == pytest.approx(expected, rel=1e-9)
    assert two_nn_dimension(torch.cat([points, points[:9]])).item() == pytest.approx(expected, rel=1e-9)
    assert two_nn_dimension(torch.stack([points, 2 * points])).tolist() == pytest.approx([expected] * 2, rel=1e-9)
    with pytest.raises(ValueError, match="fewer than 3 different points"):
        two_nn_dimension(torch.cat([points[:2]] * 5))
    assert two_nn_dimension(torch.eye(5), undefined="nan").isnan()  # all distances are the same


@pytest.mark.parametrize(("dtype", "rounding", "rel"), [(torch.float32, 1e-6, 1e-4), (torch.float64, 1e-15, 1e-9)])
def test_points_that_differ_only_by_rounding_count_once(dtype, rounding, rel):
    points = 3 + normal(80, 6)
    expected = two_nn_dimension(points).item()
    again = points[:9] * (1 + rounding * normal(9, 6, seed=2))
    both = torch.cat([points, again, again.flip(0) * (1 - rounding)]).to(dtype)
    assert two_nn_dimension(both).item() == pytest.approx(expected, rel=rel)
    assert two_nn_dimension(points * (1 + 1e-3 * normal(80, 6, seed=3))).item() == pytest.approx(expected, rel=0.02)
    near = torch.cat([points, points + 1e-4])  # not rounding: each point has one neighbour much nearer than all others
    assert two_nn_dimension(near.to(dtype)).item() < expected / 4


def test_anisotropy_is_the_mean_cosine_of_two_different_points():
    points = normal(40, 7) + 0.5
    directions = (points / points.norm(dim=1, keepdim=True)).numpy()
    cosines = directions @ directions.T
    expected = cosines[~np.eye(40, dtype=bool)].mean()
    assert anisotropy(points).item() == pytest.approx(expected, rel=1e-12)
    assert anisotropy(points * torch.arange(1, 41)[:, None]).item() == pytest.approx(expected, rel=1e-12)
    assert anisotropy(torch.ones(9, 3)).item() == pytest.approx(1)
    assert anisotropy(torch.eye(9)).item() == 0
    assert anisotropy(torch.eye(3) - 1 / 3).item() == pytest.approx(-1 / 2)  # the largest angle of three directions
    points[3] = 0
    with pytest.raises(ValueError, match="a point is zero"):
        anisotropy(points)


def test_uniformity_is_the_log_of_the_mean_gaussian_potential_of_two_different_points():
    points = normal(40, 7) + 0.5
    directions = (points / points.norm(dim=1, keepdim=True)).numpy()
    potentials = np.exp(-2 * np.square(directions[:, None] - directions).sum(-1))
    expected = np.log(potentials[~np.eye(40, dtype=bool)].mean())
    assert uniformity(points).item() == pytest.approx(expected, rel=1e-12)
    turned = points @ rotation(7, 1) * torch.arange(1, 41)[:, None]
    assert uniformity(turned).item() == pytest.approx(expected, rel=1e-12)
    assert uniformity(torch.stack([points, points.flip(0)])).tolist() == pytest.approx([expected, expected])
    assert uniformity(torch.ones(9, 3)).item() == pytest.approx(0, abs=1e-6)
    assert uniformity(torch.eye(9)).item() == pytest.approx(-4)
    assert uniformity(torch.tensor([[3.0, 0.0], [-1.0, 0.0]])).item() == pytest.approx(-8)
    assert uniformity(normal(300, 2000)).item() == pytest.approx(-4, abs=0.02)
    with pytest.raises(ValueError, match="it has fewer than 2 points"):
        uniformity(points[:1])
    points[3] = 0
    with pytest.raises(ValueError, match="a point is zero"):
        uniformity(points)
    assert uniformity(points, undefined="nan").isnan()


def test_a_planted_massive_activation_is_found_and_padding_is_ignored():
    tokens = normal(3, 9, 16).clamp(-3, 3)
    tokens[1, 2, 5] = -4000.0
    tokens[2, 8] = 1e6  # padding
    mask = torch.ones(3, 9, dtype=torch.bool)
    mask[2, 8] = False
    sizes = [np.abs(prompt[real]) for prompt, real in zip(tokens.numpy(), mask.numpy(), strict=True)]
    expected = [each.max() / np.median(each) for each in sizes]
    assert massive_activation(tokens, mask).tolist() == pytest.approx(expected, rel=1e-12)
    assert expected[1] > 1000 > 100 > max(expected[0], expected[2])
    assert massive_activation(torch.ones(1, 2, 3)).item() == 1
    with pytest.raises(ValueError, match="its median is 0"):
        massive_activation(torch.zeros(1, 2, 3))


def test_the_value_of_normal_entries_is_the_median_of_many_draws():
    sizes = normal(4001, 200).abs()
    drawn = (sizes.amax(1) / sizes.median()).median().item()
    assert normal_massive_activation(torch.tensor(200)).item() == pytest.approx(drawn, rel=0.01)


def test_influence_and_step_ratio_are_known_for_blocks_that_rotate_or_stretch():
    before = normal(6, 8)
    assert block_influence(before, 3 * before).abs().max() < 1e-15
    assert step_ratio(before, 3 * before).tolist() == pytest.approx([2.0] * 6)
    assert block_influence(before, -before).tolist() == pytest.approx([2.0] * 6)
    after = normal(6, 8, seed=4)
    cosines = (before * after).sum(1) / before.norm(dim=1) / after.norm(dim=1)
    assert block_influence(before, after).tolist() == pytest.approx((1 - cosines).tolist(), rel=1e-12)
    tiny = before + 1e-9 * after  # 1 - cosine is only rounding here, so use the sine
    sine = 1e-9 * (after - cosines[:, None] * after.norm(dim=1, keepdim=True) * before / before.norm(dim=1)[:, None])
    angle = sine.norm(dim=1) / before.norm(dim=1)
    assert block_influence(before, tiny).tolist() == pytest.approx((angle**2 / 2).tolist(), rel=1e-4)
    before[0] = 0
    with pytest.raises(ValueError, match="a state is zero"):
        block_influence(before, after)
    assert step_ratio(before, after, undefined="nan").isnan().tolist() == [True] + [False] * 5


def test_shuffled_features_keep_each_feature_and_lose_their_correlations():
    points = normal(300, 1) @ torch.ones(1, 8, dtype=torch.float64) + 0.01 * normal(300, 8, seed=1)
    shuffled = shuffled_features(points)
    torch.testing.assert_close(shuffled.sort(0).values, points.sort(0).values, rtol=0, atol=0)
    assert np.abs(np.corrcoef(shuffled.T.numpy()) - np.eye(8)).max() < 0.25
    assert two_nn_dimension(shuffled) > 4 > 1.5 > two_nn_dimension(points[:, :1])
