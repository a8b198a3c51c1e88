"""Schedules: the optimizer steps at which a run is saved and measured."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from lit_layers.errors import InputError
from lit_layers.schema import COUNT, COUNT_OR_NONE, MANY, Range, refuse_outside

Steps = str | Sequence[int] | Mapping[str, int | Sequence[int]]
"""A schedule as a recipe writes it: `pythia`, `[0, 1, 2, 1000]`, `{every: 500}` or `{log: 2, until: 512, then_every:
1000}`. `also` adds single steps to a rule: `{every: 500, also: [750]}`."""

PYTHIA = {"log": 2, "until": 512, "then_every": 1000}
_KEYS = ({"every"}, {"log"}, {"log", "until"}, {"log", "until", "then_every"})
_RANGES = {"log": Range(2, MANY, whole=True), "also": COUNT_OR_NONE}
_RANGES |= dict.fromkeys(("every", "until", "then_every"), COUNT)
_EXPECTED = "expected pythia, a list, {every: N} or {log: BASE, until: N, then_every: N}, also: [STEP, ...]"


class Schedule:
    """The set of optimizer steps that `steps` describes, and step 0. The training loop adds the last step of the run.

    Raises:
        InputError: `steps` has an unknown form, or a step is negative or not a whole number.
    """

    def __init__(self, steps: Steps) -> None:
        self.steps = steps
        steps = PYTHIA if steps == "pythia" else steps
        self._rule: dict[str, Any] = {}
        self._listed = self._also = frozenset[int]()
        if isinstance(steps, Mapping) and {*steps} - {"also"} in _KEYS:
            refuse_outside("steps.", _RANGES, steps)
            self._rule, also = dict(steps), steps.get("also", [])
            self._also = frozenset([also] if isinstance(also, int) else also)
            if any(map(COUNT.expected, {**steps, "also": 1}.values())):
                raise InputError(f"steps: expected numbers, got {steps}")
        elif isinstance(steps, Sequence) and not isinstance(steps, str) and len(steps):
            refuse_outside("", {"steps": COUNT_OR_NONE}, {"steps": steps})
            self._listed = frozenset(steps)
        else:
            raise InputError(f"steps: {_EXPECTED}, got {steps!r}")

    def __contains__(self, step: int) -> bool:
        if step <= 0 or self._listed:
            return step == 0 or step in self._listed
        if step in self._also:
            return True
        rule = self._rule
        if "every" in rule:
            return step % rule["every"] == 0
        if step <= rule.get("until", step):
            return _is_power(step, rule["log"])
        return "then_every" in rule and step % rule["then_every"] == 0

    def is_due(self, step: int, before: int) -> bool:
        """Return whether one of the steps before + 1, ..., step is in the schedule."""
        return any(each in self for each in range(step, before, -1))

    def steps_to(self, last: int, first: int = 0) -> Iterator[int]:
        """Yield the scheduled steps of a run that begins at `first` and ends at `last`, including both."""
        yield from (step for step in range(first, last) if step == first or step in self)
        yield last


def _is_power(step: int, base: int) -> bool:
    while step % base == 0:
        step //= base
    return step == 1
