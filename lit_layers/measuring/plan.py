"""What a command will take: its analyses run on a first share of their data, and their seconds are multiplied.

Everything that a plan says is an extrapolation from that share, on this machine.
"""

import contextlib
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from lit_layers.analyses.base import Analysis
from lit_layers.errors import InputError
from lit_layers.models.costs import most_ever
from lit_layers.records import Measurement

ROWS, GROWTH = 4, 2  # of data in the first round, and how many times more in each next one
LONGEST = 60.0  # seconds of all rounds together; half as much again for analyses that were not measured twice by then


@dataclass
class Plan:
    """What a command takes: the seconds of each analysis by the share of its data that was measured.

    `around`: the least seconds of a round beside its analyses, which opens, hashes and checks a checkpoint.
    """

    seconds: dict[str, dict[float, float]]
    around: float = math.inf
    num_bytes: dict[str, int] = field(default_factory=dict)  # that an analysis writes for a checkpoint
    reasons: dict[str, str] = field(default_factory=dict)  # why an analysis was not measured

    def of_analysis(self, name: str) -> float:
        """Return the seconds of an analysis on all of its data, in proportion to what the last rows added."""
        shares = sorted(self.seconds[name])
        if len(shares) < 2:
            return sum(self.seconds[name][share] / share for share in shares)
        earlier, last = (self.seconds[name][share] for share in shares[-2:])
        return last + max(0.0, last - earlier) / (shares[-1] - shares[-2]) * (1 - shares[-1])

    def lacks_rows(self, name: str, left: float) -> bool:
        """Return whether an analysis should be measured on more rows, with so many seconds left.

        Two shares are needed to tell what a row adds. After these it has its part of the time.
        """
        if len(self.seconds[name]) < 2:
            return left > -LONGEST / 2
        return GROWTH * self.seconds[name][max(self.seconds[name])] <= (left - self.around) / len(self.seconds)

    @property
    def of_checkpoint(self) -> float:
        """The seconds of one checkpoint."""
        return self.around + sum(map(self.of_analysis, self.seconds))

    def table(self, number: int, others: Mapping[str, tuple[float, float]] | None = None) -> list[dict[str, str]]:
        """Return the rows for a number of checkpoints; `others` are seconds and bytes of what else is done."""
        parts: dict[str, tuple[float, float]] = {
            each: (number * self.of_analysis(each), number * self.num_bytes.get(each, 0)) for each in self.seconds
        }
        parts |= {"opening and hashing": (number * self.around, 0), **(others or {})}
        parts[f"in all, {number} checkpoints"] = sum(s for s, _ in parts.values()), sum(b for _, b in parts.values())
        shares = {name: f"{max(shares, default=0):.0%}" for name, shares in self.seconds.items()}
        return [
            {"": name, "measured": shares.get(name, ""), "time": duration(seconds), "disk": size(written)}
            for name, (seconds, written) in parts.items()
        ]

    def notes(self) -> list[str]:
        """Return what the numbers are, a sentence each."""
        return [
            "an extrapolation: analyses ran on that share of their data, and their time was multiplied",
            f"memory: {size(most_ever())} in this process so far; more data can take more",
            *(f"{name}: not in these numbers: {why}" for name, why in self.reasons.items() if not self.seconds[name]),
        ]


def sampled(analyses: Sequence[Analysis], measure: Callable[[Sequence[Analysis]], Sequence[Measurement]]) -> Plan:
    """Measure each analysis on more and more rows of its data, until all of them or its part of the time is used up."""
    plan, began = Plan({each.name: {} for each in analyses}), time.perf_counter()
    tried = {each.name: 0.0 for each in analyses}  # the largest share, measured or refused
    rows = {each.name: ROWS for each in analyses}

    def measured(cuts: dict[str, Analysis]) -> Sequence[Measurement]:
        """Measure; an analysis that refuses so few rows is given more."""
        while True:
            try:
                return measure([*cuts.values()]) if cuts else ()
            except InputError as error:
                refusing = [each for each in analyses if each.name in cuts and f"{each.name}: " in str(error)]
                if not refusing or tried[refusing[0].name] == 1:
                    raise
                cuts |= cut(refusing[0])

    def cut(analysis: Analysis) -> dict[str, Analysis]:
        found = analysis.first_share(rows[analysis.name])
        rows[analysis.name] *= GROWTH
        tried[analysis.name] = 1.0 if found is None else found[1]
        if found is None:
            plan.reasons[analysis.name] = "a share takes as long as the whole"
        return {} if found is None else {analysis.name: found[0]}

    while True:
        left = LONGEST - (time.perf_counter() - began)
        due = [each for each in analyses if tried[each.name] < 1 and plan.lacks_rows(each.name, left)]
        if not due:
            return plan
        cuts = {name: part for each in due for name, part in cut(each).items()}
        started = time.perf_counter()
        found = measured(cuts)
        took = time.perf_counter() - started
        if found:
            plan.around = min(plan.around, took - sum(each.seconds for each in found))
        for each in found:
            if each.error is not None:
                plan.reasons[each.analysis] = each.error
                continue
            plan.seconds[each.analysis][tried[each.analysis]] = each.seconds
            plan.num_bytes[each.analysis] = sum(len(repr(record)) for record in each.records)


def share_of(budget: str | float) -> float:
    """Return a budget such as 5% or 0.05 as a share.

    Raises:
        InputError: it is not between 0 and 100%, or it is 1, which may mean 1%.
    """
    text = str(budget).strip()
    with contextlib.suppress(ValueError):
        share = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
        if 0 < share < 1 or (share == 1 and text.endswith("%")):
            return share
    raise InputError(f"budget: expected a share of the training such as 5% or 0.05, or 100% for all, got {budget!r}")


def stride_within(budget: str | float, training: float, seconds: float, count: Callable[[int], int]) -> int:
    """Return the least stride, a power of two, with which all measured checkpoints keep within their budget.

    Args:
        training: seconds that training takes without measuring.
        seconds: of one checkpoint.
        count: the number of checkpoints of a stride.

    Raises:
        InputError: the fewest checkpoints take longer.
    """
    stride = 1
    while (number := count(stride)) * seconds > share_of(budget) * training:
        if count(2 * stride) == number:
            whole = f"{100 * share_of(budget):.3g}% of the {duration(training)} of training"
            took = f"{number} checkpoints take {duration(number * seconds)}, more than {whole}"
            raise InputError(f"budget: {took}: give the analyses fewer texts, or train longer")
        stride *= 2
    return stride


def size(number: float) -> str:
    """Return bytes in words."""
    for unit, factor in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if number >= factor:
            return f"{number / factor:.3g} {unit}"
    return f"{number / 1e3:.0f} kB" if number else "-"


def duration(seconds: float) -> str:
    """Return seconds in words."""
    for unit, factor in (("days", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * factor:
            return f"{seconds / factor:.1f} {unit}"
    return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.2g} s"
