"""Which optimizer steps are saved and measured."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from lit_layers.errors import InputError
from lit_layers.schema import MANY, Range

Steps = str | Sequence[int] | Mapping[str, int | Sequence[int]]
"""As a recipe writes it: `pythia`, `[0, 1, 2, 1000]`, `{every: 500}` or `{log: 2, until: 512, then_every: 1000}`; a
rule takes single steps besides: `{every: 500, also: [750]}`."""

PYTHIA = {"log": 2, "until": 512, "then_every": 1000}
_KEYS = ({"every"}, {"log"}, {"log", "until"}, {"log", "until", "then_every"})
_STEP = Range(0, MANY, whole=True, low_words="whole numbers of at least 0")
_EVERY = Range(1, MANY, whole=True, low_words="a whole number of at least 1")
_BASE = Range(2, MANY, whole=True, low_words="a whole number of at least 2")
_EXPECTED = "expected pythia, a list of steps, {every: N} or {log: BASE, until: N, then_every: N}, also: [STEP, ...]"


class Schedule:
    """A set of optimizer steps: step 0 always belongs to it; the last step of a run is its driver's to add.

    Raises:
        InputError: for an unknown form, a negative step, a step that is no whole number.
    """

    def __init__(self, steps: Steps) -> None:
        self.steps = steps
        if isinstance(steps, str):
            if steps != "pythia":
                raise InputError(f"steps: {_EXPECTED}, got {steps!r}")
            steps = PYTHIA
        self._rule: dict[str, int] = {}
        self._listed: frozenset[int] = frozenset()
        self._also: frozenset[int] = frozenset()
        if isinstance(steps, Mapping):
            self._rule, self._also = _checked_rule(steps)
        else:
            self._listed = frozenset(_checked_list(steps))

    def __contains__(self, step: int) -> bool:
        if step <= 0 or self._listed:
            return step == 0 or step in self._listed
        if step in self._also:
            return True
        if every := self._rule.get("every"):
            return step % every == 0
        base, until = self._rule["log"], self._rule.get("until")
        if until is None or step <= until:
            return _is_power(step, base)
        then_every = self._rule.get("then_every")
        return then_every is not None and step % then_every == 0

    def is_due(self, step: int, before: int) -> bool:
        """Return whether a scheduled step lies after `before` and not after `step`."""
        return any(each in self for each in range(step, before, -1))

    def until(self, last: int, first: int = 0) -> Iterator[int]:
        """Yield the steps of a run from `first` to `last`, both included."""
        yield from (step for step in range(first, last) if step == first or step in self)
        yield last


def _is_power(step: int, base: int) -> bool:
    while step % base == 0:
        step //= base
    return step == 1


def _checked_rule(steps: Mapping[str, Any]) -> tuple[dict[str, int], frozenset[int]]:
    """The rule, and the steps besides."""
    rule = {key: value for key, value in steps.items() if key != "also"}
    if set(rule) not in _KEYS:
        raise InputError(f"steps: {_EXPECTED}, got the keys {', '.join(map(str, steps)) or '(none)'}")
    for key, value in rule.items():
        allowed = _BASE if key == "log" else _EVERY
        if (expected := allowed.expected(value)) is not None:
            raise InputError(f"steps.{key}: expected {expected}, got {value!r}")
    return rule, frozenset(_checked_list(steps["also"], "steps.also") if "also" in steps else ())


def _checked_list(steps: Sequence[int], where: str = "steps") -> list[int]:
    if not isinstance(steps, Sequence) or isinstance(steps, str) or not len(steps):
        raise InputError(f"{where}: {_EXPECTED if where == 'steps' else 'expected a list of steps'}, got {steps!r}")
    for step in steps:
        if (expected := _STEP.expected(step)) is not None:
            raise InputError(f"{where}: expected {expected}, got {step!r}")
    return list(steps)
