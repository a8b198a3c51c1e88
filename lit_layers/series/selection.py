"""Which of the steps that are there belong to a series."""

import math
from collections.abc import Mapping, Sequence

from lit_layers.errors import InputError
from lit_layers.schedule import Schedule, Steps

ALL = "all"


def choose(listed: Sequence[int], steps: Steps, where: str) -> list[int]:
    """The steps that were asked for, in order.

    `all`; a list; `{log_spaced: N}` for the first, the last and those nearest to N on a logarithmic axis; or a schedule
    of training (`pythia`, `{every: 1000}`, ...), which takes what is there of it, and the last step.

    Raises:
        InputError: a step that is not there, an unknown form, nothing left.
    """
    if steps == ALL:
        return sorted(listed)
    if isinstance(steps, Mapping) and "log_spaced" in steps:
        return _log_spaced(sorted(listed), steps)
    if not isinstance(steps, str | Mapping | Sequence):
        raise InputError(f"steps: expected all, {{log_spaced: N}}, a list or a schedule, got {steps!r}")
    try:
        schedule = Schedule(steps)
    except InputError as error:
        raise InputError(f"{error}; of a series also all and {{log_spaced: N}}") from error
    if not isinstance(steps, str | Mapping):
        _refuse_missing(listed, steps, where)
        return sorted(set(steps))
    last = max(listed)
    return [step for step in sorted(listed) if step in schedule or step == last]


def _refuse_missing(listed: Sequence[int], steps: Sequence[int], where: str) -> None:
    for step in steps:
        if step not in listed:
            near = sorted(sorted(listed, key=lambda other: abs(other - step))[:2])
            raise InputError(
                f"steps: {where} has no step {step}; it has {len(listed)} steps from {min(listed)} to {max(listed)}, "
                f"the nearest {' and '.join(map(str, near))}"
            )


def _log_spaced(listed: list[int], steps: Mapping[str, int]) -> list[int]:
    count = steps["log_spaced"]
    if set(steps) != {"log_spaced"}:
        other = next(key for key in steps if key != "log_spaced")
        raise InputError(f"steps: log_spaced stands alone, got also {other}")
    if not isinstance(count, int) or isinstance(count, bool) or count < 2:
        raise InputError(f"steps.log_spaced: expected a whole number of at least 2, got {count!r}")
    if count >= len(listed):
        return listed
    places = [math.log1p(step) for step in listed]
    width = (places[-1] - places[0]) / (count - 1)
    wanted = [places[0] + index * width for index in range(count)]
    return sorted({min(zip(places, listed, strict=True), key=lambda pair: abs(pair[0] - goal))[1] for goal in wanted})
