"""Entropies and ranks against written-out sums and hand-solved cases, with invariances and refusals."""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lit_layers.functional import singular as module
from lit_layers.functional.entropy import (
    dataset_entropy,
    effective_rank,
    matrix_entropy,
    participation_ratio,
    rankme,
    spectrum,
)
from tests.support.references import normal, renyi, rotation

METRICS = (matrix_entropy, effective_rank, rankme, participation_ratio)


def eigenvalues(rows):
    """Return the positive eigenvalues of the Gram matrix over its trace."""
    gram = rows.numpy() @ rows.numpy().T
    shares = np.linalg.eigvalsh(gram / np.trace(gram))
    return shares[shares > 1e-15]


def released(rows, alpha):
    """Repeat the 2024-09 code of Skean et al.: centred unit rows, the smaller Gram matrix, negatives clamped."""
    rows = rows.numpy() - rows.numpy().mean(0)
    rows = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    gram = np.maximum(rows.T @ rows if len(rows) > rows.shape[1] else rows @ rows.T, 0)
    if alpha == 2:
        return -math.log((gram**2).sum() / len(gram) ** 2)
    shares = np.linalg.eigvalsh(gram)
    shares = shares[shares > 0]
    return renyi(shares / shares.sum(), alpha)


def test_matrix_entropy_is_the_renyi_entropy_of_the_eigenvalues():
    for shape in [(2, 6, 4), (2, 4, 9)]:
        for alpha in [0.5, 1, 1.5, 2, 7, math.inf]:
            rows = normal(*shape)
            expected = [renyi(eigenvalues(element), alpha) for element in rows]
            np.testing.assert_allclose(matrix_entropy(rows, alpha=alpha), expected, rtol=1e-9)


def test_the_ranks_are_exponentials_of_entropies_of_the_singular_values():
    rows = normal(2, 6, 9)
    for element in range(2):
        shares = np.sqrt(eigenvalues(rows[element]))
        shares /= shares.sum()
        assert effective_rank(rows)[element].item() == pytest.approx(math.exp(renyi(shares, 1)), rel=1e-10)
        assert rankme(rows)[element].item() == pytest.approx(math.exp(renyi(shares + 1e-7, 1)), rel=1e-10)
        assert rankme(rows, eps=0.0)[element].item() == pytest.approx(math.exp(renyi(shares, 1)), rel=1e-10)
        exp_entropy = math.exp(renyi(eigenvalues(rows[element]), 2))
        assert participation_ratio(rows)[element].item() == pytest.approx(exp_entropy, rel=1e-10)


def test_rankme_adds_eps_to_every_singular_value_also_beyond_the_rank():
    rows = torch.outer(torch.ones(5), torch.arange(1.0, 8.0))  # rank 1, min(rows, dim) = 5
    eps = 0.01
    expected = math.exp(renyi([1 + eps] + 4 * [eps], 1))
    assert rankme(rows, eps=eps).item() == pytest.approx(expected, rel=1e-12)
    mask = torch.tensor([True, True, True, False, False])
    assert rankme(rows, mask, eps=eps).item() == pytest.approx(math.exp(renyi([1 + eps, eps, eps], 1)), rel=1e-12)


def test_orthogonal_rows_of_equal_norm_have_their_number_as_rank():
    rows = 5 * rotation(8)[:6]
    for alpha in (0.5, 1, 2, math.inf):
        assert matrix_entropy(rows, alpha=alpha).item() == pytest.approx(math.log(6), rel=1e-13)
    for rank in (effective_rank, participation_ratio):
        assert rank(rows).item() == pytest.approx(6, rel=1e-13)
    assert rankme(rows).item() == pytest.approx(6, rel=1e-5)


def test_the_entropy_of_a_small_order_counts_directions_and_not_rounding_errors():
    rows = normal(3, 9).repeat(3, 1) @ rotation(9)
    assert matrix_entropy(rows, alpha=1e-6).item() == pytest.approx(math.log(3), abs=1e-4)


def test_one_row_has_entropy_zero_and_rank_one():
    assert [metric(normal(1, 4)).item() for metric in METRICS] == pytest.approx([0, 1, 1, 1], abs=1e-5)


def test_two_centred_unit_rows_are_opposite():
    rows = normal(2, 5)
    assert matrix_entropy(rows, center=True, unit=True).item() == pytest.approx(0, abs=1e-13)
    clamped = matrix_entropy(rows, center=True, unit=True, clamp=True).item()
    assert clamped == pytest.approx(math.log(2), rel=1e-13)


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 7),
    dim=st.integers(1, 7),
    powers=st.floats(0, 8),
    copies=st.integers(1, 3),
    seed=st.integers(0, 2**20),
)
def test_the_four_measures_of_rank_are_ordered_for_any_spectrum(rows, dim, powers, copies, seed):
    matrix = normal(rows, dim, seed=seed) * 10.0 ** -torch.linspace(0, powers, dim, dtype=torch.float64)
    matrix = matrix.repeat(copies, 1)
    rank = np.linalg.matrix_rank(matrix.numpy())
    exponential = math.exp(matrix_entropy(matrix).item())
    chain = [participation_ratio(matrix).item(), exponential, effective_rank(matrix).item(), rank, min(rows, dim)]
    assert all(low <= high * (1 + 1e-9) for low, high in itertools.pairwise(chain)), chain


def test_rotation_scaling_order_signs_and_empty_features_change_no_rank():
    for metric in METRICS:
        rows = normal(6, 4)
        signs = torch.tensor([1.0, -1, -1, 1, 1, -1])[:, None]
        zeros = torch.nn.functional.pad(rows, (0, 3))
        for changed in (rows @ rotation(4), 1e-8 * rows, rows[[4, 2, 0, 5, 1, 3]], signs * rows, zeros):
            assert metric(changed).item() == pytest.approx(metric(rows).item(), rel=1e-5 if metric is rankme else 1e-11)


def test_repeating_rows_changes_no_entropy_and_translation_does_unless_centred():
    rows = normal(6, 4)
    for alpha in (1, 2):
        value = matrix_entropy(rows, alpha=alpha).item()
        assert matrix_entropy(torch.cat([rows, rows]), alpha=alpha).item() == pytest.approx(value, rel=1e-12)
    assert matrix_entropy(rows + 3).item() != pytest.approx(matrix_entropy(rows).item(), rel=1e-2)
    for metric in METRICS:
        moved = metric(rows + 3, center=True).item()
        assert moved == pytest.approx(metric(rows, center=True).item(), rel=1e-10)
        assert moved == pytest.approx(metric(rows - rows.mean(0)).item(), rel=1e-10)


def test_the_released_options_give_the_released_numbers():
    for shape in [(5, 9), (9, 5)]:
        for alpha in [1, 2]:
            rows = normal(*shape)
            options = {"center": True, "unit": True, "clamp": True, "side": "smaller", "alpha2": "frobenius"}
            found = matrix_entropy(rows, alpha=alpha, **options).item()
            assert found == pytest.approx(released(rows, alpha), rel=1e-10)


def test_each_prompt_uses_its_own_smaller_gram_matrix():
    prompts, mask = normal(2, 9, 5), torch.ones(2, 9, dtype=torch.bool)
    mask[1, :6] = False  # 3 rows of dim 5: the other Gram matrix
    options = {"center": True, "unit": True, "clamp": True, "side": "smaller", "alpha2": "frobenius"}
    for alpha in (1, 2):
        expected = [released(prompts[0], alpha), released(prompts[1, 6:], alpha)]
        np.testing.assert_allclose(matrix_entropy(prompts, mask, alpha=alpha, **options), expected, rtol=1e-10)


def test_the_choice_of_gram_matrix_matters_only_if_entries_are_clamped():
    rows = normal(9, 4)
    assert matrix_entropy(rows, side="smaller").item() == matrix_entropy(rows).item()
    clamped = [matrix_entropy(rows, clamp=True, side=side).item() for side in ("rows", "smaller")]
    assert clamped[0] != pytest.approx(clamped[1], rel=1e-3)
    unclamped = matrix_entropy(rows, alpha=2, alpha2="frobenius", unit=True).item()
    assert unclamped == pytest.approx(matrix_entropy(rows, alpha=2, unit=True).item(), rel=1e-12)  # its trace is n


def test_normalizations_divide_by_logarithms_of_rows_and_dim():
    for shape in [(6, 4), (4, 6)]:
        rows = normal(*shape)
        log_n, log_d, raw = math.log(shape[0]), math.log(shape[1]), matrix_entropy(rows).item()
        divisors = {"raw": 1, "logN": log_n, "logD": log_d, "maxEntropy": min(log_n, log_d), "logNlogD": log_n * log_d}
        for normalization, divisor in divisors.items():
            for options in ({}, {"clamp": True}):
                value = matrix_entropy(rows, normalization=normalization, **options).item()
                assert value == pytest.approx(matrix_entropy(rows, **options).item() / divisor, rel=1e-13)
        assert raw > 0


def test_padding_on_any_side_and_junk_in_it_change_nothing():
    mask = torch.ones(5, 11, dtype=torch.bool)
    mask[1, :7], mask[2, 5:], mask[3, ::2], mask[4, [0, 4, 10]] = False, False, False, False
    rows = normal(5, 11, 7).masked_fill(~mask[..., None], math.nan)
    released_options = {"clamp": True, "side": "smaller", "normalization": "maxEntropy"}
    for options in ({}, {"drop_first": 1}, {"center": True}, {"center": True, "unit": True}):
        calls = [(metric, options) for metric in METRICS] + [(matrix_entropy, options | released_options)]
        for metric, chosen in calls:
            expected = [metric(element[kept], **chosen).item() for element, kept in zip(rows, mask, strict=True)]
            both = metric(torch.stack([rows, -rows]), mask, **chosen)
            for found in (metric(rows, mask, **chosen), *both):
                np.testing.assert_allclose(found, expected, rtol=1e-12, err_msg=f"{metric.__name__}, {chosen}")


def test_a_sink_token_hides_the_others_unless_it_is_dropped():
    rows = normal(12, 8)
    rows[0] *= 1e4
    assert matrix_entropy(rows).item() < 1e-4
    assert matrix_entropy(rows, drop_first=1).item() == pytest.approx(matrix_entropy(rows[1:]).item(), rel=1e-13)
    assert matrix_entropy(rows, drop_first=1).item() > 1


def test_small_singular_values_keep_their_digits():
    """The smaller value would be 1e-18 of the larger in the Gram matrix, below the rounding of float64."""
    rows = torch.diag(torch.tensor([1.0, 1e-9], dtype=torch.float64)) @ rotation(2)
    shares = np.array([1, 1e-9]) / (1 + 1e-9)
    assert effective_rank(rows).item() - 1 == pytest.approx(math.expm1(renyi(shares, 1)), rel=1e-5)


def test_dataset_entropy_is_the_matrix_entropy_of_the_pooled_vectors():
    pooled = normal(3, 20, 6)
    for options in ({}, {"alpha": 2.0, "center": True}, {"clamp": True, "side": "smaller", "normalization": "logN"}):
        assert torch.equal(dataset_entropy(pooled, **options), matrix_entropy(pooled, **options))


def test_bfloat16_rows_are_first_widened_to_float64():
    rows = normal(6, 4).bfloat16()
    for metric in METRICS:
        assert metric(rows).dtype == torch.float64
        assert torch.equal(metric(rows), metric(rows.double()))


def test_sets_without_a_direction_are_refused_or_only_they_are_nan():
    for metric in METRICS:
        rows = normal(5, 3, 4)
        rows[1], rows[2], rows[3, 2, 1] = 0, 0.1, math.inf  # three rows of 0.1, whose sum over 3 is not 0.1
        mask = torch.ones(5, 3, dtype=torch.bool)
        mask[4] = False
        healthy = metric(rows[:1], center=True)
        for element, options, reason in (
            (1, {}, "all rows are zero"),
            (2, {"center": True}, "or equal to the mean that is subtracted"),
            (3, {}, "a row is not finite"),
            (4, {}, "there is no row"),
        ):
            chosen = [0, element]
            with pytest.raises(ValueError, match=rf"is undefined at element \(1,\): .*{reason}"):
                metric(rows[chosen], mask[chosen], **options)
        values = metric(rows, mask, center=True, undefined="nan")
        assert values.isnan().tolist() == [False, True, True, True, True]
        assert values[0].item() == healthy.item()
        with pytest.raises(ValueError, match="a row is zero, or equal to the mean .*, and has no unit length"):
            metric(torch.tensor([[1.0, 2.0], [0.0, 0.0]]), unit=True)
        with pytest.raises(ValueError, match="is undefined: all rows are zero, or equal to the mean"):
            metric(normal(1, 3), center=True)
        if metric is matrix_entropy:
            clamped = metric(rows, mask, center=True, clamp=True, undefined="nan")
            assert clamped.isnan().tolist() == [False, True, True, True, True]


def test_normalizing_by_the_logarithm_of_one_is_undefined():
    with pytest.raises(ValueError, match=r"matrix_entropy is undefined: logN divides by the logarithm of one row or"):
        matrix_entropy(normal(1, 4), normalization="logN")
    assert matrix_entropy(normal(4, 1), normalization="logD", undefined="nan").isnan()
    assert matrix_entropy(normal(1, 4), normalization="maxEntropy", undefined="nan").isnan()
    assert matrix_entropy(normal(1, 4), normalization="logD").item() == pytest.approx(0, abs=1e-14)


def test_options_out_of_range_are_refused():
    for options, sentence in (
        ({"side": "columns"}, "expected side to be one of 'rows', 'smaller', got 'columns'"),
        ({"alpha2": "fast"}, "expected alpha2 to be one of"),
        ({"drop_first": -1}, "expected drop_first of at least 0, got -1"),
    ):
        with pytest.raises(ValueError, match=sentence):
            matrix_entropy(normal(4, 3), **options)


def falling(num, tokens, dim, least, seed=0):
    """Return sets of rows and their singular values, a geometric series from 1 to `least`."""
    size = min(tokens, dim)
    values = torch.logspace(0, math.log10(least), size, dtype=torch.float64)
    draws = np.random.default_rng(seed)
    rows = [np.linalg.qr(draws.normal(size=(tokens, size)))[0] * values.numpy() for _ in range(num)]
    axes = [np.linalg.qr(draws.normal(size=(dim, size)))[0] for _ in range(num)]
    return torch.from_numpy(np.stack([left @ right.T for left, right in zip(rows, axes, strict=True)])), values


def test_singular_values_of_constructed_rows_are_recovered():
    for shape in [(40, 60), (60, 40), (40, 40)]:
        for least in [1e-2, 2e-4, 1e-4, 1e-9]:
            rows, expected = falling(3, *shape, least)
            for scale in (1, 1e170, 1e-170):
                values = module.singular_values(scale * rows) / scale
                np.testing.assert_allclose(values, expected.expand(3, -1), rtol=0 if scale == 1 else 1e-7, atol=2e-13)
            shares = (expected / expected.sum()).numpy()
            assert effective_rank(rows).tolist() == pytest.approx([math.exp(renyi(shares, 1))] * 3, rel=1e-12)
            for alpha in (0.5, 1, 2):
                shares = (expected.square() / expected.square().sum()).numpy()
                entropies = matrix_entropy(rows, alpha=alpha).tolist()
                assert entropies == pytest.approx([renyi(shares, alpha)] * 3, rel=1e-12)


def test_only_ill_conditioned_sets_are_decomposed_directly(monkeypatch):
    decomposed, svd = [], np.linalg.svd
    monkeypatch.setattr(
        module.np.linalg, "svd", lambda rows, **options: decomposed.append(rows) or svd(rows, **options)
    )
    plain, poor = falling(2, 12, 20, 1e-2)[0], falling(1, 12, 20, 1e-7)[0]
    repeated = plain[:1].clone()
    repeated[:, 5] = repeated[:, 3]
    module.singular_values(torch.cat([plain, poor, repeated]))
    assert [len(rows) for rows in decomposed] == [2]
    decomposed.clear()
    mask = torch.arange(12) < torch.tensor([[7], [12]])
    for options in ({}, {"center": True}, {"center": True, "unit": True}, {"drop_first": 3}):
        spectrum(plain, mask, **options)
    spectrum(plain.mT, center=True)
    assert not decomposed


def test_entropies_and_ranks_need_no_direct_decomposition_although_singular_values_would(monkeypatch):
    """States of language models have these spectra, for example 128 tokens of 128 dimensions."""
    rows, values = falling(2, 40, 40, 2e-6)
    shares, squares = values / values.sum(), values.square() / values.square().sum()
    monkeypatch.setattr(module.np.linalg, "svd", None)
    whole = spectrum(rows)
    ranks = [math.exp(renyi(shares.numpy(), 1)), math.exp(renyi((shares + 1e-7).numpy(), 1))]
    assert whole.effective_rank().tolist() == pytest.approx([ranks[0]] * 2, rel=1e-9)
    assert whole.rankme().tolist() == pytest.approx([ranks[1]] * 2, rel=1e-9)
    for alpha in (0.5, 1, 2):
        expected = renyi(squares.numpy(), alpha)
        assert whole.entropy(alpha=alpha).tolist() == pytest.approx([expected] * 2, rel=1e-9)
    with pytest.raises(TypeError, match="not callable"):
        spectrum(falling(1, 40, 40, 2e-7)[0])


def test_the_value_of_a_set_does_not_depend_on_the_rest_of_the_batch():
    rows = torch.cat([falling(3, 30, 24, least)[0] for least in (1e-1, 1e-4, 1e-6)]).float()
    counts = torch.tensor([30, 9, 24, 25, 1, 2, 30, 17, 23])
    mask = torch.arange(30) < counts[:, None]
    for options in ({}, {"center": True}, {"drop_first": 1}):
        together = spectrum(rows, mask, **options)
        for index, count in enumerate(counts.tolist()):
            single = spectrum(rows[index, None, :count], **options)
            for metric in ("entropy", "effective_rank", "participation_ratio", "rankme"):
                value = getattr(single, metric)(undefined="nan").item()
                found = getattr(together, metric)(undefined="nan")[index].item()
                # the rounding of Gram matrices depends on their memory layout
                assert found == pytest.approx(value, rel=1e-10, abs=1e-15, nan_ok=True), metric


def test_sets_with_an_undefined_first_row_have_a_spectrum_without_it():
    rows = falling(4, 40, 60, 1e-2)[0]
    rows[0, 0], rows[1, 0], rows[2, 7] = torch.nan, 0.0, torch.inf
    for options in ({}, {"unit": True}):
        whole, rest = (spectrum(rows, drop_first=first, **options) for first in (0, 1))
        undefined = [True, "unit" in options, True, False]
        assert whole.effective_rank(undefined="nan").isnan().tolist() == undefined
        assert rest.effective_rank(undefined="nan").isnan().tolist() == [False, False, True, False]


def test_nearly_singular_sets_are_decomposed_directly_with_and_without_the_first_row():
    rows = torch.cat([falling(1, 40, 60, least)[0] for least in (1e-1, 1e-9)])
    rows[0, 5] = rows[0, 3]
    for first in (0, 1):
        found = spectrum(rows.clone().requires_grad_(), drop_first=first)
        expected = np.linalg.svd(rows[:, first:].numpy(), compute_uv=False)
        np.testing.assert_allclose(found.values, expected / expected[:, :1], rtol=0, atol=1e-12)
        assert found.num_rows.tolist() == [40 - first] * 2
