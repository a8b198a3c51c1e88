"""The prediction residual against least squares and hand-solved cases, with invariances and refusals."""

import numpy as np
import pytest
import torch
from sklearn.linear_model import LinearRegression

from lit_layers.functional.probes.regression import prediction_residual
from tests.support.references import normal


def first_half(ids):
    return torch.arange(len(ids)) < len(ids) // 2


def random_ids(count, seed=0):
    return torch.randint(0, 5000, (count,), generator=torch.Generator().manual_seed(seed))


def normed(rows, normalize, eps=1e-5):
    rows = rows.numpy()
    mean, var = rows.mean(-1, keepdims=True), rows.var(-1, keepdims=True)
    return {
        "layer_norm": (rows - mean) / np.sqrt(var + eps),
        "rms_norm": rows / np.sqrt((rows**2).mean(-1, keepdims=True) + eps),
        "none": rows,
    }[normalize]


def least_squares(rows, ids):
    """Return residual and rank of a least-squares fit with a column of ones."""
    ids = ids.numpy().astype(float)
    design = np.hstack([rows, np.ones((len(rows), 1))])
    weights = np.linalg.lstsq(design, ids, rcond=None)[0]
    rank = np.linalg.matrix_rank(rows - rows.mean(0))
    return ((ids - design @ weights) ** 2).mean() / ids.var(), rank


def test_values_agree_with_numpys_least_squares():
    for normalize, eps in [("layer_norm", 1e-5), ("layer_norm", 0.1), ("rms_norm", 0.1), ("none", 1e-5)]:
        features, ids = normal(2, 3, 200, 12) * 3 + 1, random_ids(200)
        features[..., 4] += 0.02 * ids  # a signal to find
        found = prediction_residual(features, ids, normalize=normalize, eps=eps)
        assert found.value.shape == found.adjusted.shape == found.rank.shape == (2, 3)
        assert found.num_rows == 200
        assert found.held_out is None
        for index in np.ndindex(2, 3):
            value, rank = least_squares(normed(features[index], normalize, eps), ids)
            assert found.rank[index] == rank == (12 if normalize in ("none", "rms_norm") else 11)
            assert found.value[index].item() == pytest.approx(value, rel=1e-9)
            assert found.adjusted[index].item() == pytest.approx(value * 199 / (199 - rank), rel=1e-9)
        assert found.value.max() < 0.9


def test_more_rows_than_one_chunk_give_one_fit():
    features, ids = normal(9000, 5), random_ids(9000)
    features[:, 2] += 0.001 * ids
    found = prediction_residual(features.float(), ids, split=first_half(ids), normalize="none")
    reference = LinearRegression().fit(features.float().double(), ids)
    assert found.value.item() == pytest.approx(1 - reference.score(features.float().double(), ids), rel=1e-10)


def test_the_held_out_value_is_scikit_learns_score_on_rows_outside_the_fit():
    features, ids = normal(2, 120, 6), random_ids(120)
    features[..., 1] += 0.002 * ids
    mask = torch.arange(120) % 3 > 0
    found = prediction_residual(features, ids, normalize="layer_norm", split=mask)
    whole = prediction_residual(features, ids, normalize="layer_norm")
    torch.testing.assert_close(found.value, whole.value, rtol=1e-10, atol=0)
    for index in range(2):
        rows = normed(features[index], "layer_norm")
        fit = LinearRegression().fit(rows[mask], ids[mask])
        assert found.held_out[index].item() == pytest.approx(1 - fit.score(rows[~mask], ids[~mask]), rel=1e-9)


def test_a_line_and_two_bends_are_solved_by_hand():
    feature = torch.tensor([[-1.5], [-0.5], [0.5], [1.5]])
    assert prediction_residual(feature, torch.tensor([3, 5, 7, 9]), normalize="none").value.item() == pytest.approx(0)
    found = prediction_residual(feature, torch.tensor([0, 2, 2, 0]), normalize="none")  # no slope at all
    assert found.value.item() == pytest.approx(1)
    assert found.adjusted.item() == pytest.approx(3 / 2)
    # ids 0, 0, 0, 4: slope 1.2, centred sums of squares 12 and 1.44 x 5 of it explained
    assert prediction_residual(feature, torch.tensor([0, 0, 0, 4]), normalize="none").value.item() == pytest.approx(0.4)


def test_as_many_directions_as_rows_leave_no_residual():
    found = prediction_residual(normal(6, 9), random_ids(6), normalize="none")
    assert found.rank == 5
    assert found.value.item() == pytest.approx(0, abs=1e-20)
    assert found.adjusted.isnan()


def test_invertible_maps_of_features_and_ids_change_nothing_and_relabelling_does():
    features, ids = normal(90, 7), random_ids(90)
    features[:, 3] += 0.001 * ids
    found = prediction_residual(features, ids, normalize="none", split=first_half(ids))
    turned = features @ normal(7, 7, seed=4) + 1e3 * normal(7, seed=5)
    mapped = prediction_residual(turned, 50000 - 3 * ids, normalize="none", split=first_half(ids))
    torch.testing.assert_close(mapped.value, found.value, rtol=1e-8, atol=0)
    torch.testing.assert_close(mapped.held_out, found.held_out, rtol=1e-8, atol=0)
    relabelled = torch.randperm(5000, generator=torch.Generator().manual_seed(0))[ids]
    assert prediction_residual(features, relabelled, normalize="none").value > 1.2 * found.value


def test_copied_and_constant_features_add_no_rank_and_no_fit():
    features, ids = normal(80, 5), random_ids(80)
    more = torch.cat([features, features[:, :2], torch.full((80, 1), 1234.5678), 2 * features.sum(1, True)], dim=1)
    options = {"normalize": "none", "split": first_half(ids)}
    expected, found = (prediction_residual(given, ids, **options) for given in (features, more.double()))
    assert found.rank == expected.rank == 5
    torch.testing.assert_close(found.value, expected.value, rtol=1e-9, atol=0)
    torch.testing.assert_close(found.held_out, expected.held_out, rtol=1e-9, atol=0)


def test_digits_that_a_gram_matrix_would_lose_are_kept():
    ids = random_ids(100)
    centred = (ids - ids.double().mean()) / ids.double().std()
    noise = normal(100, 2)
    features = torch.stack([noise[:, 0] * 1e5, noise[:, 0] * 1e5 + 1e-4 * centred], dim=1)  # 1e-9 apart
    assert prediction_residual(features, ids, normalize="none").value.item() < 1e-6
    gram = np.cov(features.T.numpy())
    assert np.linalg.eigvalsh(gram)[0] < 0 or np.linalg.cond(gram) > 1e15


def test_several_labellings_at_once_equal_separate_fits():
    features, ids = normal(3, 70, 6), torch.stack([random_ids(70), random_ids(70, seed=1)], dim=1)
    both = prediction_residual(features, ids, split=first_half(ids))
    assert both.value.shape == both.held_out.shape == (3, 2)
    assert both.rank.shape == (3,)
    for column in range(2):
        separate = prediction_residual(features, ids[:, column], split=first_half(ids))
        torch.testing.assert_close(both.value[:, column], separate.value, rtol=1e-10, atol=0)
        torch.testing.assert_close(both.adjusted[:, column], separate.adjusted, rtol=1e-10, atol=0)
        torch.testing.assert_close(both.held_out[:, column], separate.held_out, rtol=1e-10, atol=0)


EQUAL = "expected scored token ids that are not all equal"


def test_invalid_rows_ids_and_options_are_refused():
    for features, ids, options, sentence in (
        (torch.ones(5, 3), torch.arange(4), {}, "a token id for each of 3 rows or more, got 4 for 5"),
        (torch.ones(2, 3), torch.arange(2), {}, "a token id for each of 3 rows or more, got 2 for 2"),
        (normal(5, 3), torch.full((5,), 9), {}, "token ids that are not all equal: their variance is 0"),
        (normal(6, 3), torch.tensor([1, 2, 3, 4, 7, 7]), {"split": torch.arange(6) < 4}, EQUAL),
        (torch.full((5, 3), torch.nan), torch.arange(5), {"normalize": "none"}, "expected rows that are fin"),
        (normal(5, 3), torch.arange(5), {"normalize": "unit"}, "normalize to be one of 'layer_norm', 'rms"),
        (normal(5, 3), torch.arange(5), {"split": torch.ones(5) > 0}, EQUAL),
    ):
        with pytest.raises(ValueError, match=sentence):
            prediction_residual(features, ids, **options)
