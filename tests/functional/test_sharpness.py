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
    assert found.step == pytest.approx(root, rel=5e-3)
    assert found.num_losses < 10


@pytest.mark.parametrize("root", [0.05, 1.3, 2.6, 30.0])
@pytest.mark.parametrize("steepness", [0.5, 3.0, 8.0])
def test_a_loss_that_rises_steeply_behind_it_is_followed_to_its_place(root, steepness):
    """Behind the bracket's far end a loss may be e^24 times as high, so that a line through both ends is flat there."""
    found = critical_step(lambda step: 1 - step + root * math.expm1(steepness * step / root) / math.expm1(steepness))
    assert found.low <= root * (1 + 1e-12)
    assert found.high >= root * (1 - 1e-12)
    assert found.step == pytest.approx(root, rel=0.02)
    assert found.num_losses < 10


def test_of_a_loss_that_falls_again_it_is_one_of_the_places_where_it_is_back():
    def loss(step: float) -> float:  # up at 3, down at 3.5 and up for good at 9
        return -step + step**2 / (3 if step < 3.5 else 9)

    found = critical_step(loss)
    assert min(abs(found.step - place) for place in (3, 9)) < 1e-6


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
