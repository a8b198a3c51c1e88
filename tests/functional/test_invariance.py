"""InfoNCE, LiDAR and DiME against numpy and closed forms, with invariances and refusals."""

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch

from lit_layers.functional.entropy import LidarSums, dime, infonce, lidar, matrix_entropy
from lit_layers.functional.singular import eigenvalues
from tests.support.references import normal, renyi, rotation

BOTH: Any = "both"


def two_views(num_prompts=6, dim=5, seed=0, noise=0.3):
    first = normal(num_prompts, dim, seed=seed)
    return first, first + noise * normal(num_prompts, dim, seed=seed + 1)


def some_views(num_prompts=7, num_views=4, dim=5, noise=0.5):
    return normal(num_prompts, 1, dim) + noise * normal(num_prompts, num_views, dim, seed=1)


def unit(rows):
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


def matrix_renyi(matrix, alpha):
    shares = np.linalg.eigvalsh(matrix)
    return renyi(shares[shares > 1e-13 * shares.max()] / shares[shares > 0].sum(), alpha)


def written_out_infonce(view_a, view_b, temperature, scaled, form):
    a, b = (unit(view.numpy()) if scaled else view.numpy() for view in (view_a, view_b))
    losses = []
    if form == "cross":
        for i in range(len(a)):
            losses.append(-math.log(math.exp(a[i] @ b[i] / temperature) / np.exp(b @ a[i] / temperature).sum()))
        return np.mean(losses)
    rows, n = np.concatenate([a, b]), len(a)
    for i in range(2 * n):
        others = [math.exp(rows[i] @ rows[m] / temperature) for m in range(2 * n) if m != i]
        losses.append(-math.log(math.exp(rows[i] @ rows[(i + n) % (2 * n)] / temperature) / sum(others)))
    return np.mean(losses)


def written_out_lidar(views, delta):
    """Return the matrix W^(-1/2) B W^(-1/2)."""
    views = views.numpy()
    num_prompts, num_views, dim = views.shape
    means = views.mean(1)
    between = sum(np.outer(m, m) for m in means - means.mean(0)) / num_prompts
    within = sum(np.outer(e, e) for e in (views - means[:, None]).reshape(-1, dim)) / (num_prompts * num_views)
    values, vectors = np.linalg.eigh(within + delta * np.eye(dim))
    root = vectors @ np.diag(values**-0.5) @ vectors.T
    return root @ between @ root


def written_out_dime(view_a, view_b, alpha, scaled, orders, smaller=False, frobenius=False):
    a, b = (unit(view.numpy()) if scaled else view.numpy() for view in (view_a, view_b))
    if smaller and len(a) > a.shape[1]:
        a, b = a.T, b.T
    gram_a, gram_b = a @ a.T, b @ b.T

    def entropy(matrix):
        return (
            -math.log((matrix**2).sum() / len(matrix) ** 2) if frobenius and alpha == 2 else matrix_renyi(matrix, alpha)
        )

    shuffled = [entropy(gram_a * gram_b[np.ix_(order, order)]) for order in np.asarray(orders)]
    return np.mean(shuffled) - entropy(gram_a * gram_b)


def test_infonce_is_the_mean_cross_entropy_of_finding_the_partner():
    cases = [(True, "ntxent", 0.1), (True, "cross", 0.5), (False, "ntxent", 0.7), (False, "cross", 0.9)]
    for scaled, form, temperature in cases:
        pairs = [two_views(seed=seed) for seed in (0, 5)]
        expected = [written_out_infonce(*pair, temperature, scaled, form) for pair in pairs]
        stacked = [torch.stack(views).float().double() for views in zip(*pairs, strict=True)]
        found = infonce(*stacked, temperature=temperature, unit=scaled, form=form)
        np.testing.assert_allclose(found, expected, rtol=1e-6)
        one = infonce(*pairs[0], temperature=temperature, unit=scaled, form=form)
        assert one.item() == pytest.approx(expected[0], rel=1e-12)


def test_infonce_of_equal_rows_is_at_chance():
    for num_prompts in [2, 7, 1000]:
        rows = normal(1, 8).expand(num_prompts, 8)
        assert infonce(rows, rows).item() == pytest.approx(math.log(2 * num_prompts - 1), rel=1e-12)
        assert infonce(rows, rows, form="cross").item() == pytest.approx(math.log(num_prompts), rel=1e-12)


def test_infonce_does_not_change_with_rotation_order_swapped_views_and_row_lengths():
    first, second = two_views()
    value, turn, order = infonce(first, second), rotation(5), torch.tensor([3, 1, 0, 5, 4, 2])
    lengths = torch.linspace(0.2, 4, 6, dtype=torch.float64)[:, None]
    for views in ((first @ turn, second @ turn), (first[order], second[order]), (second, first)):
        torch.testing.assert_close(infonce(*views), value, rtol=1e-12, atol=0)
    torch.testing.assert_close(infonce(first * lengths, second / lengths), value, rtol=1e-12, atol=0)
    assert infonce(first * lengths, second, unit=False) != infonce(first, second, unit=False)


def test_lidar_is_the_entropy_of_the_whitened_scatter_between_prompts():
    for alpha in [1, 0.5, 2]:
        for delta in [1e-4, 0.3, 0.0]:
            views = torch.stack([some_views(), some_views(noise=0.1)])
            expected = [matrix_renyi(written_out_lidar(each, delta), alpha) for each in views]
            np.testing.assert_allclose(lidar(views, delta=delta, alpha=alpha), expected, rtol=1e-9)


def test_the_rank_of_lidar_adds_eps_to_the_share_of_each_dimension():
    for shape in [(7, 4, 5), (4, 3, 9)]:
        views = some_views(*shape)
        values = np.linalg.eigvalsh(written_out_lidar(views, 1e-4)).clip(0)
        shares = values / values.sum() + 0.01
        expected = math.exp(-(shares * np.log(shares)).sum())
        assert lidar(views, output="rank", eps=0.01).item() == pytest.approx(expected, rel=1e-9)


def test_the_frobenius_form_of_order_2_divides_by_the_dimension():
    views = some_views()
    expected = -math.log((written_out_lidar(views, 1e-4) ** 2).sum() / 25)
    assert lidar(views, alpha=2, alpha2="frobenius").item() == pytest.approx(expected, rel=1e-9)


def test_without_scatter_within_prompts_lidar_is_the_centred_entropy_of_the_means():
    for num_prompts in [4, 9]:
        for delta in [1e-4, 1.0, 100.0]:
            means = normal(num_prompts, 6)
            found = lidar(means[:, None].expand(-1, 3, -1), delta=delta)
            torch.testing.assert_close(found, matrix_entropy(means, center=True), rtol=1e-10, atol=0)


def test_lidar_is_invariant_to_linear_maps_at_delta_0_and_to_rotation_translation_and_order():
    views, skew = some_views(), normal(5, 5, seed=9)
    torch.testing.assert_close(lidar(views @ skew, delta=0), lidar(views, delta=0), rtol=1e-9, atol=0)
    value = lidar(views, delta=0.1)
    assert abs(lidar(views @ skew, delta=0.1) - value) > 1e-3
    assert abs(lidar(views * 3, delta=0.1) - value) > 1e-4
    order, turn = torch.tensor([3, 1, 0, 5, 4, 2, 6]), rotation(5)
    for same in (views @ turn, views + 5, views[order], views[:, [2, 0, 3, 1]]):
        torch.testing.assert_close(lidar(same, delta=0.1), value, rtol=1e-9, atol=0)


def test_lidar_from_batches_equals_lidar_of_the_whole():
    views = some_views(num_prompts=11) + 1000
    sums = LidarSums()
    for batch in views.float().double().split(4):
        sums.update(batch)
    every: list[dict[str, Any]] = [{}, {"output": "rank"}, {"alpha": 2, "normalization": "maxEntropy"}, {"delta": 0}]
    for options in every:
        assert lidar(sums, **options).item() == pytest.approx(lidar(views.float(), **options).item(), rel=1e-10)
    within = (views - views.mean(1, keepdim=True)).square().sum() / 44
    assert sums.scatter_over_delta(0.01) == pytest.approx(within.item() / 0.05, rel=1e-5)
    assert sums.num_prompts == 11


def test_dime_is_the_increase_of_the_joint_entropy_by_shuffling_one_view():
    cases = [(True, 1, {}), (True, 0.5, {}), (False, 1, {"side": "smaller"}), (False, 2, {"alpha2": "frobenius"})]
    for scaled, alpha, options in cases:
        smaller, frobenius = "side" in options, "alpha2" in options
        pairs = [two_views(seed=seed) for seed in (0, 3)]
        orders = [np.random.default_rng(seed).permutation(5 if smaller else 6) for seed in range(3)]
        expected = [written_out_dime(*pair, alpha, scaled, orders, smaller, frobenius) for pair in pairs]
        stacked = [torch.stack(views) for views in zip(*pairs, strict=True)]
        found = dime(*stacked, alpha=alpha, unit=scaled, permutations=torch.tensor(np.stack(orders)), **options)
        np.testing.assert_allclose(found, expected, rtol=1e-8)


def test_dime_of_two_clusters_is_solved_by_hand():
    rows = torch.eye(2, dtype=torch.float64).repeat_interleave(4, 0)
    crossing = torch.tensor([[0, 1, 4, 5, 2, 3, 6, 7]])  # half of each cluster meets the other: four equal groups
    assert dime(rows, rows, permutations=crossing).item() == pytest.approx(math.log(4) - math.log(2), rel=1e-12)
    every = dime(rows, rows, permutations=torch.tensor(list(itertools.islice(itertools.permutations(range(8)), 500))))
    assert 0 <= every <= math.log(2)


def test_dime_is_0_if_one_view_is_constant_or_the_joint_matrix_is_diagonal():
    one, other = two_views()
    constant = normal(1, 5).expand(6, 5)
    assert dime(constant, other).item() == pytest.approx(0, abs=1e-12)
    orthonormal = torch.eye(6, dtype=torch.float64)
    assert dime(orthonormal, orthonormal @ rotation(6)).item() == pytest.approx(0, abs=1e-12)
    assert dime(one, one).item() > 0.05


def test_dime_does_not_change_with_separate_rotations_and_a_joint_order():
    first, second = two_views()
    orders = torch.tensor([[1, 2, 3, 4, 5, 0], [5, 4, 3, 2, 1, 0]])
    value = dime(first, second, permutations=orders)
    turned = dime(first @ rotation(5), second @ rotation(5, seed=1), permutations=orders)
    torch.testing.assert_close(turned, value, rtol=1e-9, atol=0)
    moved = torch.tensor([2, 0, 1, 5, 3, 4])
    inverse = moved.argsort()
    joint = dime(first[moved], second[moved], permutations=inverse[orders[:, moved]])
    torch.testing.assert_close(joint, value, rtol=1e-9, atol=0)


def test_the_seed_of_dime_decides_its_permutations():
    first, second = two_views()
    assert dime(first, second, seed=1) == dime(first, second, seed=1) != dime(first, second, seed=2)


def test_normalizations_divide_by_logarithms_of_prompts_and_dim():
    views, log_n, log_d = some_views(), math.log(7), math.log(5)
    divisors = {"logN": log_n, "logD": log_d, "maxEntropy": log_d, "logNlogD": log_n * log_d}
    for normalization, divisor in divisors.items():
        for metric, given in ((lidar, [views]), (dime, [views[:, 0], views[:, 1]])):
            found = metric(*given, normalization=normalization).item()
            assert found == pytest.approx(metric(*given).item() / divisor, rel=1e-12)


def test_undefined_sets_are_named_or_only_they_are_nan():
    first, second = torch.stack([normal(4, 3)] * 3), torch.stack([normal(4, 3, seed=1)] * 3)
    first[1, 2], second[2, 0, 0] = 0, math.nan
    for metric in (infonce, dime):
        with pytest.raises(ValueError, match=r"is undefined at element \(2,\): a row is not finite"):
            metric(first, second)
        with pytest.raises(ValueError, match=r"is undefined at element \(1,\): a row is zero and has no unit length"):
            metric(first[:2], second[:2])
        found = metric(first, second, undefined="nan")
        assert found.isnan().tolist() == [False, True, True]
        torch.testing.assert_close(found[0], metric(first[0], second[0]))
    with pytest.raises(ValueError, match="dime is undefined: a view holds nothing but zeros"):
        dime(torch.zeros(4, 3), second[0], unit=False)
    views = torch.stack([some_views(4, 3, 3)] * 3)
    views[1] = normal(1, 3, 3)  # the same views for every prompt, so their sums are rounded equally
    views[2, 0, 0, 0] = math.inf
    for given, options, sentence in (
        (views[:2], {}, r"undefined at element \(1,\): all prompts have the same mean"),
        (views[[0, 0, 2]], {}, r"undefined at element \(2,\): a value is not finite"),
        (normal(4, 3, 1), {"normalization": "logD"}, "lidar is undefined: logD divides by the logarithm of one dim"),
    ):
        with pytest.raises(ValueError, match=sentence):
            lidar(given, **options)
    assert lidar(views, undefined="nan").isnan().tolist() == [False, True, True]


def test_invalid_views_and_options_are_refused():
    for call, sentence in (
        (lambda: infonce(normal(1, 3), normal(1, 3)), r"2 prompts or more, got \(1, 3\)"),
        (lambda: infonce(*two_views(), form=BOTH), "expected form to be one of 'ntxent', 'cross', got 'both'"),
        (lambda: infonce(normal(4, 3), normal(5, 3)), r"expected two views of one shape .* got \(4, 3\) and \(5, 3\)"),
        (lambda: dime(normal(1, 3), normal(1, 3)), r"2 prompts or more, got \(1, 3\)"),
        (lambda: lidar(some_views(1, 3)), "expected at least 2 prompts, got 1"),
        (lambda: lidar(some_views(4, 1)), "expected at least 2 views of each prompt, as many as before, got 1"),
        (lambda: dime(normal(4, 3) * 1e200, normal(4, 3) * 1e200), "a view holds nothing but zeros"),
        (lambda: lidar(torch.zeros(0, 3, 4)), "expected at least 2 prompts, got 0"),
        (lambda: lidar(some_views(2, 2, 9), delta=0.0), "the scatter within prompts has no inverse with delta 0.0"),
        (lambda: lidar(some_views(noise=0.0), delta=0.0), "the scatter within prompts has no inverse with delta 0.0"),
    ):
        with pytest.raises(ValueError, match=sentence):
            call()


def test_eigenvalues_of_constructed_matrices_are_recovered_at_any_scale():
    for scale in [1e-160, 1e-20, 1.0, 1e20, 1e160]:
        draws, expected = np.random.default_rng(0), np.array([[0.5, 2, 3, 7], [-1, -0.5, 1e-3, 4]]) * scale
        turns = [np.linalg.qr(draws.normal(size=(4, 4)))[0] for _ in expected]
        made = np.stack([turn * values @ turn.T for turn, values in zip(turns, expected, strict=True)])
        matrices = torch.from_numpy((made + made.swapaxes(1, 2)) / 2)
        np.testing.assert_allclose(eigenvalues(matrices), expected, rtol=0, atol=1e-14 * scale)
        np.testing.assert_allclose(eigenvalues(matrices[1]), expected[1], rtol=0, atol=1e-14 * scale)


def test_inputs_are_not_changed():
    pair, views = normal(2, 6, 4), normal(5, 3, 4)
    before = pair.clone(), views.clone()
    for unit in (True, False):
        dime(*pair, unit=unit)
    sums = LidarSums()
    sums.update(views)
    assert lidar(sums).item() == lidar(sums).item() == lidar(views).item()
    assert torch.equal(pair, before[0])
    assert torch.equal(views, before[1])
