import pytest

from lit_layers.errors import InputError
from lit_layers.schedule import Schedule


def test_pythia_has_its_154_published_checkpoints():
    published = [0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512, *range(1000, 144000, 1000)]
    assert list(Schedule("pythia").until(143000)) == published
    assert len(published) == 154


def test_a_list_is_kept_and_gains_the_first_and_the_last_step():
    assert list(Schedule([5, 3, 3, 90]).until(12)) == [0, 3, 5, 12]


def test_every_counts_from_zero():
    assert list(Schedule({"every": 4}).until(10)) == [0, 4, 8, 10]


def test_a_logarithmic_rule_may_end_or_go_on_evenly():
    assert list(Schedule({"log": 3}).until(30)) == [0, 1, 3, 9, 27, 30]
    assert list(Schedule({"log": 2, "until": 4}).until(9)) == [0, 1, 2, 4, 9]
    assert list(Schedule({"log": 2, "until": 4, "then_every": 3}).until(11)) == [0, 1, 2, 4, 6, 9, 11]


def test_a_last_step_on_the_schedule_is_not_repeated():
    assert list(Schedule({"every": 5}).until(10)) == [0, 5, 10]


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        ("pythai", "got 'pythai'"),
        ([0, -1], "at least 0, got -1"),
        ([1.5], "got 1.5"),
        ([], r"got \[\]"),
        ({"every": 0}, "steps.every: expected a whole number of at least 1, got 0"),
        ({"log": 1}, "steps.log: expected a whole number of at least 2, got 1"),
        ({"evry": 5}, "got the keys evry"),
        ({"until": 5}, "got the keys until"),
        ({}, r"got the keys \(none\)"),
    ],
)
def test_wrong_steps_are_refused_with_the_value(steps, message):
    with pytest.raises(InputError, match=message):
        Schedule(steps)
