"""The ranks of a run measure a checkpoint together: who measures which part of which analysis."""

import datetime
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any, NamedTuple

from torch import distributed, nn

from lit_layers import undisturbed
from lit_layers.analyses.base import ALL, Analysis
from lit_layers.models.shared_pass import SharedPass
from lit_layers.models.view import LayeredModel
from lit_layers.models.workload import flop
from lit_layers.records import Measurement
from lit_layers.undisturbed import Attempt, Shares

_PATIENCE = datetime.timedelta(hours=12)
_FLOP_A_SECOND = 3e10  # of what was not measured yet; only what parts take in proportion to each other matters


def new_group() -> Any:
    """A group of its own on the CPU: results are objects, and training's collectives stay undisturbed."""
    return distributed.new_group(backend="gloo", timeout=_PATIENCE)


class Part(NamedTuple):
    """A part of an analysis; an analysis that is not divided is one part."""

    analysis: str
    number: int


def deal(seconds: Mapping[Part, float], texts: Mapping[Part, Sequence[Any]], num_ranks: int) -> list[set[Part]]:
    """Which parts each rank measures, so that the slowest is done soon.

    The longest goes first, each to the rank that has least to do: no rank has more than a fair share of all seconds and
    the longest part. Parts that read a common text stay together, so that it goes through the blocks once, unless that
    would break this bound.
    """
    units = _with_common_texts(texts)
    bound = sum(seconds.values()) / num_ranks + max(seconds.values(), default=0.0)

    def length(unit: list[Part]) -> float:
        return sum(seconds[part] for part in unit)

    while True:
        dealt: list[set[Part]] = [set() for _ in range(num_ranks)]
        totals = [0.0] * num_ranks
        for unit in sorted(units, key=length, reverse=True):
            rank = totals.index(min(totals))
            dealt[rank].update(unit)
            totals[rank] += length(unit)
        several = [unit for unit in units if len(unit) > 1]
        if max(totals) <= bound or not several:
            return dealt
        longest = max(several, key=length)
        units = [unit for unit in units if unit is not longest] + [[part] for part in longest]


def _with_common_texts(texts: Mapping[Part, Sequence[Any]]) -> list[list[Part]]:
    above: dict[Any, Any] = {}  # a forest of parts and texts, a tree for each set that hangs together

    def root(node: Any) -> Any:
        while above.setdefault(node, node) != node:
            above[node] = node = above[above[node]]
        return node

    for part, its_texts in texts.items():
        for text in its_texts:
            above[root(text)] = root(part)
    units: dict[Any, list[Part]] = {}
    for part in texts:
        units.setdefault(root(part), []).append(part)
    return [*units.values()]


class Ranks:
    """The processes of a run as they measure its checkpoints.

    Rank 0 deals the parts of all analyses by the seconds that each took at the last checkpoint, on whichever rank; at
    the first by what it has to compute, as far as somebody knows. What the parts gave is put together in their order,
    so that the numbers depend neither on this nor on the number of ranks.

    No collective runs inside an analysis, so that one that fails hangs no rank; nor does a slow one: all ranks leave
    together, and none waits for another in training's own collectives, which have less patience.
    """

    def __init__(self, group: Any) -> None:
        self.group, self.rank, self.size = group, distributed.get_rank(group), distributed.get_world_size(group)
        self._seconds: dict[Part, float] = {}  # on rank 0, of the last checkpoint

    def from_first(self, value: Any) -> Any:
        """What rank 0 has, on all ranks."""
        values = [value]
        distributed.broadcast_object_list(values, src=0, group=self.group)
        return values[0]

    def measure(
        self,
        model: nn.Module,
        analyses: Sequence[Analysis],
        starting: Callable[[Analysis], None],
        *,
        kept_mb: int,
        **facts: Any,
    ) -> list[Measurement]:
        """On rank 0 the measurements, in the order of the analyses, equal to those of one process; elsewhere none.

        `facts` are those of `undisturbed.measure`.
        """
        view = SharedPass.of(LayeredModel(model), kept_mb=kept_mb)
        dealt = self.from_first(self._dealt(view, analyses) if self.rank == 0 else None)
        # Rank 0 has a share of each that is divided, though it be of no part: it says what came of an analysis.
        mine = [a for a in analyses if dealt[self.rank][a.name] or (self.rank == 0 and undisturbed.is_divided(a))]
        shares = Shares(view, mine, starting, numbers=dealt[self.rank], weights_hash=facts["weights_hash"])
        results: dict[str, Any] = {}
        for analysis in mine:
            if undisturbed.is_divided(analysis):
                results[analysis.name] = undisturbed.sendable(shares.of(analysis))
            else:
                starting(analysis)
                results[analysis.name] = undisturbed.measure(view, analysis, **facts)
        of_ranks: list[Any] | None = [None] * self.size if self.rank == 0 else None
        distributed.gather_object(results, of_ranks, dst=0, group=self.group)
        measurements = []
        for analysis in analyses if of_ranks else ():
            shares_of_it = [results[analysis.name] for results in of_ranks or () if analysis.name in results]
            measurements.append(self._joined(view, analysis, shares_of_it, facts))
        distributed.barrier(group=self.group)
        return measurements

    def _joined(self, view: SharedPass, analysis: Analysis, shares: list[Any], facts: dict[str, Any]) -> Measurement:
        if not undisturbed.is_divided(analysis):
            (measurement,) = shares
            self._seconds[Part(analysis.name, 0)] = measurement.seconds
            return measurement
        for share in shares:
            self._seconds |= {Part(analysis.name, number): each for number, each in share.of_parts.items()}
        return undisturbed.join_shares(view, analysis, shares, **facts)

    def _dealt(self, view: SharedPass, analyses: Sequence[Analysis]) -> list[dict[str, Container[int]]]:
        """For each rank the numbers of its parts of each analysis."""
        texts: dict[Part, list[bytes]] = {}
        seconds: dict[Part, float] = {}
        unknown: list[Part] = []
        unreadable: list[str] = []
        for analysis in analyses:
            each: Any = analysis
            of_parts = [[]]
            if undisturbed.is_divided(each):
                of_parts = Attempt().make(view, each, each.texts_of_parts)
            if of_parts is None:  # measuring it says why
                unreadable.append(each.name)
                continue
            parts = {Part(each.name, number): rows for number, rows in enumerate(of_parts)}
            texts |= parts
            if all(part in self._seconds for part in parts):
                seconds |= {part: self._seconds[part] for part in parts}
            elif (flops := _flop(view, each)) is None:
                unknown += parts
            else:
                num_rows = {part: max(1, len(rows)) for part, rows in parts.items()}
                a_row = flops / _FLOP_A_SECOND / sum(num_rows.values())
                seconds |= {part: a_row * count for part, count in num_rows.items()}
        mean = sum(seconds.values()) / len(seconds) if seconds else 1.0
        seconds |= dict.fromkeys(unknown, mean)
        numbers: list[dict[str, Any]] = []
        for rank, parts in enumerate(deal(seconds, texts, self.size)):
            of_rank: dict[str, Any] = {each.name: set() for each in analyses}
            for part in parts:
                of_rank[part.analysis].add(part.number)
            numbers.append(of_rank | (dict.fromkeys(unreadable, ALL) if rank == 0 else {}))
        return numbers


def _flop(view: SharedPass, analysis: Analysis) -> float | None:
    """What an analysis has to compute; None where nobody knows."""
    try:
        work = analysis.work(view)
    except Exception:  # measuring it says why
        return None
    return None if work is None else sum(flop(view, part) for part in work.parts)
