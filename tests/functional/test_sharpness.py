"""The critical step on functions whose own is known."""

import math

import pytest

from lit_layers.functional import critical_step


@pytest.mark.parametrize("ratio", [0.02, 0.3, 1.0, 1.9, 40.0, 250.0])
def test_on_a_quadratic_it_is_exact_with_fewer_than_ten_losses(ratio):
    losses = []

    def loss(step: float) -> float:
        losses.append(step)
        return 7 - step + step**2 / ratio / 1  # back at 7 after `ratio` updates

    found = critical_step(loss)
    assert found.step == pytest.approx(ratio, rel=1e-9)
    assert found.low <= ratio * (1 + 1e-9)
    assert found.high >= ratio * (1 - 1e-9)
    assert len(losses) == found.num_losses < 10


@pytest.mark.parametrize("power", [3, 6])
def test_on_other_curves_it_is_between_two_that_were_tried(power):
    found = critical_step(lambda step: 1 - step + (step / 3) ** power)
    root = 3 ** (power / (power - 1))
    assert found.low <= root <= found.high
    assert found.step == pytest.approx(root, rel=0.1)
    assert found.num_losses < 10


def test_where_the_loss_never_rises_or_always_does_there_is_none():
    assert math.isnan(critical_step(lambda step: -step).step)
    assert critical_step(lambda step: -step).high == math.inf
    assert math.isnan(critical_step(lambda step: step).step)
    assert critical_step(lambda step: step).low == 0
    with pytest.raises(ValueError, match="expected a finite loss before the update, got nan"):
        critical_step(lambda step: math.nan)


def test_a_loss_that_is_not_finite_is_a_rise():
    found = critical_step(lambda step: 1 - step if step < 2 else math.inf)
    assert 1 <= found.low <= 2 <= found.high <= 4
