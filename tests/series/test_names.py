"""Steps and tokens are read from names of branches, and steps are selected."""

from typing import Any

import pytest

from lit_layers.errors import InputError
from lit_layers.series.checkpoint import Grammar, StepName, choose, recognize

PYTHIA = [0, *(2**power for power in range(10)), *range(1000, 143001, 1000)]


NAMES = [  # grammar, name, step, billions of tokens
    ("step", "step143000", 143000, None),
    ("step", "step-000001000", 1000, None),
    ("stages", "step9000-tokens38B", 9000, 38),
    ("stages", "stage1-step150-tokens1B", 150, 1),
    ("stages", "stage2-ingredient3-step11931-tokens50B", None, None),
    ("stage2-ingredient3-step{step}-*", "stage2-ingredient3-step11931-tokens50B", 11931, None),
    ("stage2-ingredient3-step{step}-*", "stage2-ingredient1-step11931-tokens50B", None, None),
    ("checkpoint", "checkpoint-400000", 400000, None),
    ("iter_{step}.0", "iter_0500.0", 500, None),
    ("iter_{step}.0", "iter_0500x0", None, None),
    ("step", "step12x", None, None),
    ("step", "main", None, None),
]


def test_a_name_gives_its_step():
    for grammar, name, step, billions in NAMES:
        expected = None if step is None else StepName(name, step, billions=billions)
        assert Grammar(grammar).parse(name) == expected, (grammar, name)


def test_tokens_come_from_the_step_or_from_the_rounded_name():
    name = Grammar("stages").parse("stage1-step150-tokens1B")
    assert name is not None
    assert name.tokens(4_194_304) == 629_145_600
    assert name.tokens(None) == 1_000_000_000
    assert StepName("step7", 7).tokens(None) is None


def test_a_grammar_is_recognized_from_its_names():
    for spelling, names in (
        ("step", ["main", "step0", "step1"]),
        ("stages", ["step1-tokens0B", "stage1-step2-tokens0B", "step3"]),
        ("checkpoint", ["checkpoint-10", "main"]),
        ("checkpoint", ["iter_0500", "iter_1000", "v2"]),
        ("checkpoint", ["global_step500", "latest"]),
    ):
        found = recognize(names)
        assert found is not None, names
        assert found.spelling == spelling, names
    for names in (["main", "v1.0", "fix"], ["llama-7", "llama-13"], ["step-1e3", "step-1e4"], []):
        assert recognize(names) is None, names


def test_a_grammar_that_is_neither_known_nor_a_template_is_refused():
    with pytest.raises(InputError, match=r"grammar: expected auto, step, .* as iter_\{step\}, got 'pythia'"):
        Grammar("pythia")


def test_steps_are_selected_from_the_available_ones():
    chosen: list[tuple[Any, list[int]]] = [
        ("all", PYTHIA),
        ([1000, 0], [0, 1000]),
        ("pythia", PYTHIA),
        ({"every": 50000}, [0, 50000, 100000, 143000]),
        ({"log": 10}, [0, 1, 1000, 10000, 100000, 143000]),
        ({"log_spaced": 2}, [0, 143000]),
        # log(1 + 143000) / 4 is 2.97: e^2.97 - 1 = 18.4, e^5.94 - 1 = 377, e^8.90 - 1 = 7,352
        ({"log_spaced": 5}, [0, 16, 512, 7000, 143000]),
        ({"log_spaced": 500}, PYTHIA),
    ]
    for steps, expected in chosen:
        assert choose(PYTHIA[::-1], steps, "org/name") == expected, steps
    assert choose([10, 100, 300, 1000], {"log_spaced": 3}, "org/name") == [10, 100, 1000]


def test_steps_that_cannot_be_selected_are_refused():
    """Other refusals of --steps are tested in tests/cli/test_refusals.py."""
    refused: list[tuple[Any, str]] = [
        ([0, 3], "steps: org/name has no step 3; it has 154 steps from 0 to 143000, the nearest 2 and 4"),
        ({"log_spaced": 5, "every": 2}, "steps: expected .* got {'log_spaced': 5, 'every': 2}"),
        (7, "steps: expected pythia, a list, .* got 7"),
    ]
    for steps, sentence in refused:
        with pytest.raises(InputError, match=sentence):
            choose(PYTHIA, steps, "org/name")
