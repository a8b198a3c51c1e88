"""Line shape score, growth and step lengths against numpy and hand-solved cases, with invariances and refusals."""

import itertools
import math

import numpy as np
import pytest
import torch

from lit_layers.functional.trajectory import (
    PathStats,
    effective_depth,
    equidistance,
    expodistance,
    growth_rates,
    line_shape_score,
    running_line_shape_score,
    state_norms,
    step_norms,
)
from tests.support.references import rotation

PER_TOKEN = (line_shape_score, expodistance, equidistance)


def random_states(seed=0, layers=6, tokens=(3, 4), dim=7):
    generator = torch.Generator().manual_seed(seed)
    steps = torch.randn(layers, *tokens, dim, generator=generator, dtype=torch.float64)
    return steps.cumsum(0) * torch.linspace(1, 3, layers, dtype=torch.float64)[:, None, None, None]


def path(*points):
    return torch.tensor(points, dtype=torch.float64)


def path_of_steps(steps):
    steps = torch.as_tensor(steps, dtype=torch.float64)
    return torch.cat([torch.ones(1, steps.shape[-1], dtype=torch.float64), 1 + steps.cumsum(0)])


def walked_score(points):
    """Compute the published recursion: walk the unit steps, then measure the distance from the start."""
    walker = points[0].copy()
    for before, after in itertools.pairwise(points):
        walker += (after - before) / math.sqrt(sum((after - before) ** 2))
    return (len(points) - 1) / math.dist(walker, points[0])


def test_the_line_shape_score_is_the_number_of_unit_steps_over_the_distance_covered():
    states = random_states()
    expected = [[walked_score(states[:, i, j].numpy()) for j in range(4)] for i in range(3)]
    np.testing.assert_allclose(line_shape_score(states), expected, rtol=1e-13)


def test_the_running_score_of_each_layer_is_the_score_of_the_path_up_to_it():
    states = random_states()
    running = running_line_shape_score(states)
    for layer in range(1, len(states)):
        np.testing.assert_allclose(running[layer - 1], line_shape_score(states[: layer + 1]), rtol=1e-14)
    np.testing.assert_allclose(running[0], 1, rtol=1e-14)


def test_growth_rates_and_the_deviations_of_growth_and_steps_agree_with_numpy():
    states = random_states()
    norms = np.sqrt((states.numpy() ** 2).sum(-1))
    rates = np.log(norms[1:]) - np.log(norms[:-1])
    lengths = np.sqrt((np.diff(states.numpy(), axis=0) ** 2).sum(-1))
    np.testing.assert_allclose(growth_rates(states), rates, rtol=1e-12)
    np.testing.assert_allclose(state_norms(states), norms, rtol=1e-14)
    np.testing.assert_allclose(step_norms(states), lengths, rtol=1e-14)
    np.testing.assert_allclose(expodistance(states), rates.std(0) / abs(rates.mean(0)), rtol=1e-11)
    np.testing.assert_allclose(equidistance(states), lengths.std(0) / lengths.mean(0), rtol=1e-12)


def test_collinear_steps_with_b_backward_ones_score_L_over_L_minus_2b():
    for back in [0, 1, 2]:
        signs = torch.tensor([-1.0] * back + [1.0] * (5 - back), dtype=torch.float64)
        steps = signs[:, None] * torch.tensor([0.1, 7, 2, 0.5, 30])[:, None] * torch.tensor([3.0, 4.0])
        assert line_shape_score(path_of_steps(steps)).item() == pytest.approx(5 / abs(5 - 2 * back), rel=1e-14)


def test_orthogonal_steps_of_any_length_score_the_root_of_their_number():
    steps = torch.diag(torch.tensor([1.0, 5, 0.01, 300]))
    assert line_shape_score(path_of_steps(steps)).item() == pytest.approx(2, rel=1e-14)


@pytest.mark.parametrize(
    "steps",
    [[[1.0, 2.0], [-3.0, -6.0]], [[math.cos(turn), math.sin(turn)] for turn in (0, 2 * math.pi / 3, 4 * math.pi / 3)]],
    ids=["there and back", "a triangle"],
)
def test_unit_steps_that_cancel_score_infinity(steps):
    assert line_shape_score(path_of_steps(steps)).item() == math.inf


def test_growth_or_movement_in_only_one_of_L_blocks_gives_the_root_of_L_minus_1():
    for block in [0, 2, 4]:
        norms = torch.tensor([1.0 if layer <= block else 4.0 for layer in range(6)], dtype=torch.float64)
        states = norms[:, None] * torch.tensor([0.6, 0.8], dtype=torch.float64)
        assert growth_rates(states).tolist() == pytest.approx([math.log(4) * (step == block) for step in range(5)])
        assert expodistance(states).item() == pytest.approx(2, rel=1e-13)
        assert equidistance(states).item() == pytest.approx(2, rel=1e-13)


def test_rotation_scaling_and_reversed_layers_change_no_score():
    for seed in range(5):
        states = random_states(seed)
        for metric in PER_TOKEN:
            for changed in (states @ rotation(7, seed), states * 1e-3, states.flip(0)):
                np.testing.assert_allclose(metric(changed), metric(states), rtol=1e-10)


def test_translation_changes_the_score_of_growth_and_no_score_of_steps():
    states = random_states()
    for metric in (line_shape_score, equidistance):
        np.testing.assert_allclose(metric(states + 5), metric(states), rtol=1e-10)
    assert not np.allclose(expodistance(states + 5), expodistance(states), rtol=1e-2)


def test_the_order_and_length_of_steps_do_not_change_the_line_shape_score():
    steps = random_states(layers=5, tokens=(1, 1))[:, 0, 0]
    straightness = line_shape_score(path_of_steps(steps)).item()
    assert line_shape_score(path_of_steps(steps[[3, 1, 4, 0, 2]])).item() == pytest.approx(straightness, rel=1e-12)
    lengths = torch.tensor([1, 20, 0.3, 5, 7.0])[:, None]
    assert line_shape_score(path_of_steps(steps * lengths)).item() == pytest.approx(straightness, rel=1e-12)


def test_a_power_of_all_norms_does_not_change_expodistance():
    states = random_states()
    cubed = states * states.norm(dim=-1, keepdim=True) ** 2
    np.testing.assert_allclose(expodistance(cubed), expodistance(states), rtol=1e-12)


def test_low_precision_states_are_first_widened_to_float64():
    for dtype in [torch.float32, torch.bfloat16, torch.float16]:
        states = random_states().to(dtype)
        for metric in (*PER_TOKEN, growth_rates, running_line_shape_score, state_norms, step_norms):
            assert metric(states).dtype == torch.float64
            assert torch.equal(metric(states), metric(states.double()))


def test_a_step_of_length_zero_is_refused_by_name_or_only_it_is_nan():
    states = random_states()
    states[4, 1, 2] = states[3, 1, 2]
    with pytest.raises(ValueError, match=r"line_shape_score is undefined at element \(1, 2\): a step has length zero"):
        line_shape_score(states)
    with pytest.raises(ValueError, match=r"undefined at element \(3, 1, 2\): a step has length zero"):
        running_line_shape_score(states)
    values, expected = line_shape_score(states, undefined="nan"), line_shape_score(random_states())
    assert values[1, 2].isnan()
    values[1, 2] = expected[1, 2] = 0
    assert torch.equal(values, expected)
    running = running_line_shape_score(states, undefined="nan")
    assert running[:, 1, 2].isnan().tolist() == [False] * 3 + [True] * 2, "it is defined until that step"
    assert running.isnan().sum() == 2


def test_a_state_of_norm_zero_has_no_growth_on_either_side():
    states = random_states()
    states[2, 0, 0] = 0
    with pytest.raises(ValueError, match=r"growth_rates is undefined at element \(1, 0, 0\): a state has norm zero"):
        growth_rates(states)
    with pytest.raises(ValueError, match=r"expodistance is undefined at element \(0, 0\): a state has norm zero"):
        expodistance(states)
    missing = growth_rates(states, undefined="nan").isnan()
    assert missing.nonzero().tolist() == [[1, 0, 0], [2, 0, 0]]
    assert expodistance(states, undefined="nan").isnan().nonzero().tolist() == [[0, 0]]


def test_a_norm_that_returns_to_its_start_has_no_expodistance():
    there_and_back = path([3.0, 4.0], [30.0, 40.0], [4.0, 3.0])
    with pytest.raises(ValueError, match="expodistance is undefined: the norm returns to its start"):
        expodistance(there_and_back)
    assert expodistance(there_and_back @ rotation(2), undefined="nan").isnan()


def test_a_path_that_never_moves_has_no_equidistance():
    with pytest.raises(ValueError, match="equidistance is undefined: all steps have length zero"):
        equidistance(torch.ones(4, 3))
    assert equidistance(torch.ones(4, 3), undefined="nan").isnan()


def test_non_finite_values_are_undefined_only_at_their_token():
    for layer in [0, 3, 5]:
        for value in [math.nan, math.inf]:
            states = random_states()
            states[layer, 0, 1, 3] = value
            for metric in (*PER_TOKEN, growth_rates, running_line_shape_score):
                with pytest.raises(ValueError, match="a state is not finite"):
                    metric(states)
                missing = metric(states, undefined="nan").isnan().reshape(-1, 3, 4)
                assert missing.any(0).nonzero().tolist() == [[0, 1]]
                # running metrics are defined for the steps before
                first = max(0, layer - 1) if len(missing) > 1 else 0
                assert missing[:, 0, 1].tolist() == [False] * first + [True] * (len(missing) - first)


def test_a_state_is_broken_by_one_non_finite_entry_and_not_by_large_entries():
    for dtype in [torch.float64, torch.float32, torch.bfloat16, torch.float16]:
        largest = torch.finfo(dtype).max
        for value in (largest, -largest, math.nan, math.inf, -math.inf):
            finite = abs(value) <= largest
            states = torch.ones(3, 2, 5, dtype=dtype)
            states[1, 0] = value if finite else 1.0
            states[1, 0, 3] = value
            assert PathStats(states).broken.tolist() == [[False, False]] + [[not finite, False]] * 2
            assert PathStats(states[1:]).broken.tolist() == [[not finite, False]] * 2


def test_too_few_layers_are_undefined():
    for metric, layers, sentence in (
        (line_shape_score, 1, "line_shape_score is undefined at element .*: it takes a step"),
        (expodistance, 2, "expodistance is undefined .*: it takes more steps"),
        (equidistance, 1, "equidistance is undefined .*: it takes a step"),
    ):
        with pytest.raises(ValueError, match=sentence):
            metric(torch.ones(layers, 2, 3))
        assert metric(torch.ones(layers, 2, 3), undefined="nan").isnan().tolist() == [True, True]


def test_a_path_read_layer_by_layer_gives_every_metric():
    for dtype in [torch.float32, torch.float64]:
        states = random_states(layers=5, tokens=(1, 4))[:, 0].to(dtype)
        states[2, 1] = states[1, 1]  # a step of length zero
        states[3, 2, 0] = math.nan
        path = PathStats(iter(states))
        points = states.double().numpy()
        lengths = np.linalg.norm(np.diff(points, axis=0), axis=-1)
        rates = np.diff(np.log(np.linalg.norm(points, axis=-1)), axis=0)

        def expected(values, undefined):
            return np.where(np.isin(np.arange(4), undefined), math.nan, values)

        np.testing.assert_allclose(path.norms, np.linalg.norm(points, axis=-1), rtol=1e-12)
        np.testing.assert_allclose(path.lengths, lengths, rtol=1e-12)
        for metric, values, undefined in (
            (path.expodistance, rates.std(0) / abs(rates.mean(0)), [2]),
            (path.equidistance, lengths.std(0) / lengths.mean(0), [2]),
        ):
            np.testing.assert_allclose(metric("nan").numpy(), expected(values, undefined), rtol=1e-9)
        for count, scores in enumerate(path.running_line_shape_score("nan"), start=1):
            for token in (0, 3):
                assert scores[token].item() == pytest.approx(walked_score(points[: count + 1, token]), rel=1e-9)
            assert scores[1].isnan() == (count >= 2)  # undefined from the step of length zero on
            assert scores[2].isnan() == (count >= 3)
        broken = np.array([[token == 2 and step >= 2 for token in range(4)] for step in range(4)])
        np.testing.assert_allclose(path.growth_rates("nan"), np.where(broken, math.nan, rates), rtol=1e-9)
        with pytest.raises(ValueError, match=r"undefined at element \(1,\): a step has length zero"):
            PathStats(states[:, :2]).line_shape_score()


def test_effective_depth_counts_the_blocks_that_matter():
    effects = torch.tensor([[1e-200, 0.0, 2.0, 0.0, -1.0], [1e-200, 0.3, 1.0, 0.0, 1.0]], dtype=torch.float64)
    found = effective_depth(effects, undefined="nan").tolist()
    assert found == pytest.approx([2, 1, 9 / 5, math.nan, math.nan], nan_ok=True)
    with pytest.raises(ValueError, match=r"element \(4,\): an effect is negative or not finite"):
        effective_depth(effects)
