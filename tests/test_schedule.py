from pathlib import Path

import pytest
import yaml

from lit_layers.errors import InputError
from lit_layers.schedule import Schedule

ROOT = Path(__file__).parents[1]


def test_pythia_has_its_154_published_checkpoints():
    published = [0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512, *range(1000, 144000, 1000)]
    assert list(Schedule("pythia").steps_to(143000)) == published
    assert len(published) == 154


def test_a_rule_has_the_first_the_last_and_the_additional_steps_once():
    for rule, last, expected in (
        ([5, 3, 3, 90], 12, [0, 3, 5, 12]),
        ({"every": 4}, 10, [0, 4, 8, 10]),
        ({"every": 5}, 10, [0, 5, 10]),
        ({"log": 3}, 30, [0, 1, 3, 9, 27, 30]),
        ({"log": 2, "until": 4}, 9, [0, 1, 2, 4, 9]),
        ({"log": 2, "until": 4, "then_every": 3}, 11, [0, 1, 2, 4, 6, 9, 11]),
        ({"every": 4, "also": [4, 5]}, 10, [0, 4, 5, 8, 10]),
        ({"log": 2, "until": 4, "then_every": 3, "also": [5]}, 9, [0, 1, 2, 4, 5, 6, 9]),
    ):
        assert list(Schedule(rule).steps_to(last)) == expected, rule
    assert list(Schedule({"every": 4}).steps_to(10, 3)) == [3, 4, 8, 10]


def test_the_gpt2_recipe_has_the_four_steps_at_which_the_paper_on_monotonicity_probes():
    recipe = yaml.safe_load((ROOT / "recipes" / "gpt2" / "124m_openwebtext.yaml").read_text())
    assert {0, 1_500, 5_000, 165_000} <= {*Schedule(recipe["steps"]).steps_to(recipe["trainer"]["max_steps"])}


WRONG = (
    ([0, -1], r"at least 0, got \[0, -1\]"),
    ([1.5], r"expected a whole number, got \[1.5\]"),
    ([], r"got \[\]"),
    ({"every": 0}, "steps.every: expected at least 1, got 0"),
    ({"log": 1}, "steps.log: expected at least 2, got 1"),
    ({"every": [8]}, r"steps: expected numbers, got {'every': \[8\]}"),
    ({"log": 2, "until": None}, "steps: expected numbers, got {'log': 2, 'until': None}"),
    ({"evry": 5}, "got {'evry': 5}"),
    ({"until": 5}, "got {'until': 5}"),
    ({}, "got {}"),
    ({"also": [5]}, r"got {'also': \[5\]}"),
    ({"every": 5, "also": "7"}, "steps.also: expected a whole number, got 7"),
    ({"every": 5, "also": [-7]}, r"steps.also: expected at least 0, got \[-7\]"),
)


def test_wrong_steps_are_refused_with_the_value():
    for steps, message in WRONG:
        with pytest.raises(InputError, match=message):
            Schedule(steps)
