"""Curvature, angles, cosines and CKA against numpy and hand-solved cases, with invariances and refusals."""

import itertools
import math

import numpy as np
import pytest
import torch

from lit_layers.functional.geometry import (
    cosine_similarity_matrix,
    curvature_and_missing,
    linear_cka,
    token_angle,
    token_curvature,
)
from tests.support.references import cka, normal, rotation

PI = math.pi


def padded(prompts, sides):
    """Return the prompts in one tensor, with NaN as padding, and the mask."""
    longest = max(len(prompt) for prompt in prompts)
    tokens = torch.full((len(prompts), longest, prompts[0].shape[-1]), math.nan, dtype=torch.float64)
    mask = torch.zeros(len(prompts), longest, dtype=torch.bool)
    for row, (prompt, side) in enumerate(zip(prompts, sides, strict=True)):
        positions = torch.arange(longest)[:: 2 if side == "holes" else 1]
        first = {"left": longest - len(prompt), "both": 1}.get(side, 0)
        positions = positions[first : first + len(prompt)]
        tokens[row, positions], mask[row, positions] = prompt, True
    return tokens, mask


def angle(a, b):
    return math.acos(np.clip(a @ b / math.sqrt((a @ a) * (b @ b)), -1, 1))


def curvature_of(tokens):
    steps = [after - before for before, after in itertools.pairwise(tokens.numpy())]
    angles = [angle(a, b) for a, b in itertools.pairwise(steps)]
    return sum(angles) / len(angles)


# ---------------------------------------------------------------------------------------- token_curvature


def test_token_curvature_is_the_mean_angle_between_consecutive_differences():
    tokens = normal(2, 3, 9, 5)
    expected = [[curvature_of(prompt) for prompt in row] for row in tokens]
    np.testing.assert_allclose(token_curvature(tokens), expected, rtol=1e-12)


def test_the_curvature_of_simple_figures_is_solved_by_hand():
    for points, expected in [
        ([[0, 0], [1, 2], [3, 6], [3.5, 7]], 0),
        ([[0, 1], [5, 5], [0, 1], [5, 5], [0, 1]], PI),
        ([[0, 0], [1, 0], [1, 1], [0, 1], [0, 0]], PI / 2),
        ([[0, 0], [1, 0], [0.5, math.sqrt(3) / 2]], 2 * PI / 3),
    ]:
        assert token_curvature(torch.tensor(points, dtype=torch.float64)).item() == pytest.approx(expected, abs=1e-12)


def test_a_tiny_turn_is_measured_to_the_last_digits():
    turn = 1e-9
    points = torch.tensor([[0, 0], [1, 0], [1 + math.cos(turn), math.sin(turn)]], dtype=torch.float64)
    assert token_curvature(points).item() == pytest.approx(turn, rel=1e-6)


def test_rotation_translation_scaling_and_reversal_do_not_change_curvature():
    for seed in range(4):
        tokens = normal(9, 5, seed=seed)
        expected = token_curvature(tokens).item()
        for changed in (tokens @ rotation(5, seed), tokens - 7, tokens * 1e-4, tokens.flip(0)):
            assert token_curvature(changed).item() == pytest.approx(expected, rel=1e-10)


def test_padding_on_any_side_and_junk_in_it_change_nothing():
    for options in [{}, {"drop_first": 1}]:
        for metric in [token_curvature, token_angle]:
            prompts = [normal(count, 5, seed=count) for count in (11, 6, 8, 5, 6)]
            tokens, mask = padded(prompts, ["left", "left", "right", "both", "holes"])
            expected = [metric(prompt, **options).item() for prompt in prompts]
            np.testing.assert_allclose(metric(tokens, mask, **options), expected, rtol=1e-13)
            over_layers = metric(torch.stack([tokens, 2 * tokens]), mask, **options)
            np.testing.assert_allclose(over_layers, [expected, expected], rtol=1e-12)


def test_drop_first_counts_only_real_tokens():
    prompt = normal(8, 5)
    tokens, mask = padded([prompt, normal(12, 5, seed=1)], ["left", "left"])
    assert token_curvature(tokens, mask, drop_first=3)[0].item() == pytest.approx(curvature_of(prompt[3:]), rel=1e-12)


def test_a_repeated_token_is_refused_nan_or_skipped_as_requested():
    tokens = normal(2, 6, 4)
    tokens[1, 3] = tokens[1, 2]
    with pytest.raises(ValueError, match=r"undefined at element \(1,\): neighbouring tokens are equ"):
        token_curvature(tokens)
    untouched = curvature_of(tokens[0])
    with_nan = token_curvature(tokens, undefined="nan")
    assert with_nan[0].item() == pytest.approx(untouched, rel=1e-12)
    assert with_nan[1].isnan()
    steps = tokens[1].diff(dim=0).numpy()
    angles = [angle(steps[0], steps[1]), angle(steps[3], steps[4])]  # two of the four angles need the zero step
    values, missing = curvature_and_missing(tokens, undefined="skip")
    np.testing.assert_allclose(values, [untouched, np.mean(angles)], rtol=1e-12)
    assert missing.tolist() == [0, 2]


def test_curvature_needs_three_real_tokens_for_every_treatment_of_equal_ones():
    tokens, mask = padded([normal(2, 4), normal(3, 4)], ["left", "right"])
    with pytest.raises(ValueError, match=r"undefined at element \(0,\): it takes 3 real tokens"):
        token_curvature(tokens, mask)
    for undefined in ("nan", "skip"):
        assert token_curvature(tokens, mask, undefined=undefined).isnan().tolist() == [True, False]
    assert token_curvature(torch.ones(5, 3), undefined="skip").isnan()
    assert token_curvature(torch.ones(0, 3), undefined="nan").isnan()


# ---------------------------------------------------------------------------------------- token_angle


def test_token_angle_is_the_mean_angle_of_centred_neighbours():
    tokens = normal(9, 5) + 1
    centered = tokens.numpy() - tokens.numpy().mean(0)
    expected = np.mean([angle(a, b) for a, b in itertools.pairwise(centered)])
    assert token_angle(tokens).item() == pytest.approx(expected, rel=1e-12)


def test_two_centred_tokens_are_opposite_and_equal_tokens_have_no_angle():
    assert token_angle(normal(2, 5)).item() == PI
    equal = torch.full((3, 3), 0.1, dtype=torch.float64)  # the mean of three 0.1 is not 0.1 in floating point
    with pytest.raises(ValueError, match="token_angle is undefined: a token is equal to the mean"):
        token_angle(equal)
    assert token_angle(equal, undefined="nan").isnan()


def test_a_token_at_the_mean_up_to_rounding_has_no_angle():
    a, b = normal(2, 3)
    assert token_angle(torch.stack([a, (a + b) / 2, b]), undefined="nan").isnan()


def test_token_angle_is_not_nan_if_rounded_cosines_leave_the_range_of_arccos():
    tokens = normal(1, 64).float().expand(50, 64) * torch.linspace(1, 2, 50)[:, None]
    # tokens on a line, half of them on each side of their mean
    assert token_angle(tokens).item() == pytest.approx(PI / 49, abs=1e-5)


def test_rotation_scaling_and_translation_do_not_change_token_angle():
    tokens = normal(9, 5)
    for changed in (tokens @ rotation(5), tokens * 50, tokens + 4):
        assert token_angle(changed).item() == pytest.approx(token_angle(tokens).item(), rel=1e-10)


def test_token_angle_needs_two_tokens():
    with pytest.raises(ValueError, match="it takes 2 real tokens"):
        token_angle(normal(1, 5))
    assert token_angle(normal(1, 5), undefined="nan").isnan()


# ---------------------------------------------------------------------------------------- cosines between layers


def cosine(a, b):
    return a @ b / math.sqrt((a @ a) * (b @ b))


@pytest.mark.parametrize("mode", ["token", "flattened"])
def test_cosines_of_layers_are_averaged_in_each_prompt_then_over_prompts(mode):
    lengths = (7, 3, 5)
    prompts = [normal(4, count, 6, seed=count) for count in lengths]  # (layers, tokens, dim)
    packed = [padded([p[layer] for p in prompts], ["left", "right", "both"]) for layer in range(4)]
    states, mask = torch.stack([tokens for tokens, _ in packed]), packed[0][1]
    expected = np.zeros((4, 4))
    for i, j, prompt in itertools.product(range(4), range(4), prompts):
        a, b = prompt[i].numpy(), prompt[j].numpy()
        token_mean = np.mean([cosine(x, y) for x, y in zip(a, b, strict=True)])
        expected[i, j] += (token_mean if mode == "token" else cosine(a.ravel(), b.ravel())) / 3
    np.testing.assert_allclose(cosine_similarity_matrix(states, mask, mode=mode), expected, atol=1e-13)


def test_scaled_flipped_and_orthogonal_layers_have_cosines_1_minus_1_and_0():
    state = normal(2, 5, 4)
    scaled = torch.stack([state, 3 * state, 0.1 * state, -state])
    expected = np.ones((4, 4))
    expected[3, :3] = expected[:3, 3] = -1
    np.testing.assert_allclose(cosine_similarity_matrix(scaled), expected, atol=1e-14)
    orthogonal = torch.eye(4, dtype=torch.float64)[:, None, None, :].expand(4, 2, 3, 4)
    np.testing.assert_allclose(cosine_similarity_matrix(orthogonal), np.eye(4), atol=1e-15)


def test_scaling_single_tokens_changes_only_the_flattened_cosine():
    states = normal(3, 2, 5, 4)
    weighted = states * torch.tensor([100.0, 1, 1, 1, 1])[:, None]
    same = cosine_similarity_matrix(states)
    np.testing.assert_allclose(cosine_similarity_matrix(weighted), same, atol=1e-13)
    flattened = cosine_similarity_matrix(states, mode="flattened")
    assert not np.allclose(cosine_similarity_matrix(weighted, mode="flattened"), flattened, atol=1e-2)
    np.testing.assert_allclose(cosine_similarity_matrix(states @ rotation(4)), same, atol=1e-13)


@pytest.mark.parametrize("mode", ["token", "flattened"])
def test_a_layer_with_a_zero_or_nan_state_has_no_cosines(mode):
    states = normal(4, 2, 3, 5)
    states[1, 1, slice(None) if mode == "flattened" else 2] = 0
    with pytest.raises(ValueError, match=r"cosine_similarity_matrix is undefined at element \(0, 1\): a state is zero"):
        cosine_similarity_matrix(states, mode=mode)
    states[2, 0, 1, 0] = math.nan
    matrix = cosine_similarity_matrix(states, mode=mode, undefined="nan")
    expected = torch.zeros(4, 4, dtype=torch.bool)
    expected[[1, 2]] = expected[:, [1, 2]] = True
    assert torch.equal(matrix.isnan(), expected)
    rest = cosine_similarity_matrix(states[[0, 3]], mode=mode)
    np.testing.assert_allclose(matrix[[0, 3]][:, [0, 3]], rest, atol=1e-14)


def test_prompts_without_a_real_token_are_refused():
    mask = torch.tensor([[True, True], [False, False]])
    with pytest.raises(ValueError, match="a prompt has no real token"):
        cosine_similarity_matrix(normal(3, 2, 2, 4), mask)


# ---------------------------------------------------------------------------------------- linear_cka


def test_cka_agrees_with_its_definition_by_kernels():
    for rows, dims in [(12, (5, 7)), (6, (20, 30)), (30, (3, 60))]:
        x, y = normal(2, rows, dims[0]) + 2, normal(2, rows, dims[1], seed=1) - 1
        for debiased in (False, True):
            expected = [cka(a, b, debiased=debiased) for a, b in zip(x.numpy(), y.numpy(), strict=True)]
            np.testing.assert_allclose(linear_cka(x, y, debiased=debiased), expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("debiased", [False, True])
def test_cka_does_not_change_with_translation_rotation_scale_and_row_order(debiased):
    x, y = normal(15, 6), normal(15, 8, seed=1)
    assert linear_cka(x, x, debiased=debiased).item() == pytest.approx(1, rel=1e-13)
    assert linear_cka(x, 3 * x @ rotation(6) + 5, debiased=debiased).item() == pytest.approx(1, rel=1e-12)
    expected = linear_cka(x, y, debiased=debiased).item()
    order = torch.randperm(15, generator=torch.Generator().manual_seed(0))
    for a, b in ((x @ rotation(6), y), (x, 0.01 * y), (x + 9, y - 4), (x[order], y[order]), (y, x)):
        assert linear_cka(a, b, debiased=debiased).item() == pytest.approx(expected, rel=1e-9, abs=1e-12)
    assert linear_cka(x, y[order], debiased=debiased).item() != pytest.approx(expected, rel=1e-3)


def test_cka_refuses_constant_data_too_few_rows_and_other_shapes():
    x = normal(5, 3)
    equidistant, ones = torch.eye(5), torch.ones(5, 3).double()  # the debiased HSIC of equidistant rows is 0
    for a, b, options, sentence in (
        (torch.full((5, 3), 0.7).double(), x, {}, "linear_cka is undefined: x does not vary"),
        (torch.stack([x, x]), torch.stack([x, ones]), {}, r"undefined at element \(1,\): y does not vary"),
        (x, equidistant, {"debiased": True}, "y does not vary"),
        (x[:3], x[:3], {"debiased": True}, "debiased=True needs at least 4 rows, got 3"),
        (x[:1], x[:1], {}, "debiased=False needs at least 2 rows, got 1"),
        (x, x.where(x < x.max(), math.inf), {}, "values are not finite"),
    ):
        with pytest.raises(ValueError, match=sentence):
            linear_cka(a, b, **options)


# ---------------------------------------------------------------------------------------- common refusals


@pytest.mark.parametrize("metric", [token_curvature, token_angle])
def test_wrong_masks_and_options_are_refused(metric):
    tokens = normal(2, 5, 3)
    with pytest.raises(TypeError, match=r"expected a boolean mask, True on real tokens, got torch.int64"):
        metric(tokens, torch.ones(2, 5, dtype=torch.long))
    with pytest.raises(ValueError, match="expected drop_first of at least 0, got -1"):
        metric(tokens, drop_first=-1)
    with pytest.raises(ValueError, match="a token is not finite"):
        metric(tokens.where(tokens < tokens.max(), math.nan))
