"""Which rank of a distributed run measures which part of which analysis."""

import datetime
import functools
import pickle
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from torch import distributed, nn

from lit_layers.analyses.base import ALL, Analysis, DividedAnalysis, StagedAnalysis
from lit_layers.errors import InputError
from lit_layers.measuring import one_model
from lit_layers.measuring.one_model import Attempt, Shares
from lit_layers.models.shared_pass import SharedPass
from lit_layers.models.view import LayeredModel
from lit_layers.records import Measurement
from lit_layers.tasks.task_splits import connected

_PATIENCE = datetime.timedelta(hours=12)
RENDEZVOUS = datetime.timedelta(seconds=20)  # ranks that begin to watch begin together
_NO_WORSE = 1.1  # times the seconds of the slowest rank: then parts stay where they were


class Part(NamedTuple):
    """A part of an analysis; an analysis that is not divided is one part."""

    analysis: str
    number: int
    stage: int = 0  # of an analysis that goes on where all parts are done


def assign_parts(
    seconds: Mapping[Part, float],
    texts: Mapping[Part, Sequence[Any]],
    num_ranks: int,
    before: list[set[Part]] | None = None,
) -> list[set[Part]]:
    """Which parts each rank measures, so that the slowest is done soon.

    The same as `before` where that takes at most a tenth longer: what a rank keeps of a part, such as the probes that
    the next ones begin with, is then of use.

    The longest goes first, each to the rank that has least to do: no rank has more than a fair share of all seconds and
    the longest part. Parts that read a common text stay together, so that it goes through the blocks once, unless that
    would break this bound.
    """
    in_order = [*texts]
    units = [[in_order[number] for number in unit] for unit in connected(texts.values())]
    bound = sum(seconds.values()) / num_ranks + max(seconds.values(), default=0.0)

    def length(unit: list[Part]) -> float:
        return sum(seconds[part] for part in unit)

    while True:
        assigned: list[set[Part]] = [set() for _ in range(num_ranks)]
        totals = [0.0] * num_ranks
        for unit in sorted(units, key=length, reverse=True):
            rank = totals.index(min(totals))
            assigned[rank].update(unit)
            totals[rank] += length(unit)
        several = [unit for unit in units if len(unit) > 1]
        if max(totals) <= bound or not several:
            stays = before and max(sum(seconds[part] for part in parts) for parts in before) <= _NO_WORSE * max(totals)
            return before if before and stays else assigned
        longest = max(several, key=length)
        units = [unit for unit in units if unit is not longest] + [[part] for part in longest]


class OneProcess:
    """A run in one process, where `Ranks` is a run in several."""

    measure = staticmethod(one_model.in_one_pass)

    def from_first(self, compute: Callable[[], Any]) -> Any:
        """What `compute` gives."""
        return compute()


def ranks_of(world_size: int, *, first: datetime.timedelta = _PATIENCE) -> "OneProcess | Ranks":
    """Return the processes of a run, each of which calls. They have a group of their own on the CPU: results are
    objects, and training's collectives stay undisturbed.

    Raises:
        InputError: if not all of them call within `first`.
    """
    if world_size == 1:
        return OneProcess()
    try:
        if first < _PATIENCE:  # a group of its own, which is left: ended, it could end before another rank has joined
            distributed.new_group(backend="gloo", timeout=first)
    except RuntimeError as error:
        raise InputError(
            f"watch: expected a call in each of the {world_size} processes, but after {first.seconds} s not all have "
            "called: call it, step() and close() on all ranks, not on the first alone"
        ) from error
    return Ranks(distributed.new_group(backend="gloo", timeout=_PATIENCE))


class Ranks:
    """The processes of a run as they measure its checkpoints.

    Rank 0 assigns the parts of all analyses by the seconds that each took at the last checkpoint, on whichever rank; at
    the first as if all took equally long. The same parts stay with their ranks as long as that
    is hardly slower, since a warm start needs what was kept there. What the parts gave is put together in their order,
    so that the numbers depend neither on this nor on the number of ranks. Where an analysis goes on when all its parts
    are done, every rank is sent their results, and what follows is assigned in turn.

    No collective runs inside an analysis, so that one that fails hangs no rank; nor does a slow one: all ranks leave
    together, and none waits for another in training's own collectives, which have less patience.
    """

    def __init__(self, group: Any) -> None:
        self.group, self.rank, self.size = group, distributed.get_rank(group), distributed.get_world_size(group)
        self._seconds: dict[Part, float] = {}  # on rank 0, of the last checkpoint
        self._owners: dict[frozenset[Part], list[set[Part]]] = {}  # on rank 0: how these parts were assigned last

    def from_first(self, compute: Callable[[], Any]) -> Any:
        """What `compute` gives on rank 0, the only one that calls it, on all ranks.

        Raises:
            InputError: on all ranks, what rank 0 raised.
            RuntimeError: on the others, where rank 0 failed with anything else, which it raises as it is.
        """
        value = failure = error = None
        if self.rank == 0:
            try:
                value = compute()
            except InputError as refusal:
                error, failure = refusal, (type(refusal), str(refusal))
            except Exception as unforeseen:
                error, failure = unforeseen, (RuntimeError, f"rank 0: {type(unforeseen).__name__}: {unforeseen}")
        values = [value, failure]
        distributed.broadcast_object_list(values, src=0, group=self.group)
        if error is not None:
            raise error
        value, failure = values
        if failure is not None:
            kind, sentence = failure
            raise kind(sentence)
        return value

    def measure(
        self,
        model: nn.Module,
        analyses: Sequence[Analysis],
        starting: Callable[[Analysis], None],
        *,
        kept_mb: int,
        folder: Path | None = None,
        **facts: Any,
    ) -> list[Measurement]:
        """On rank 0 the measurements, in the order of the analyses, equal to those of one process; elsewhere none.

        `facts` are those of `one_model.measure`.
        """
        view = SharedPass.of(LayeredModel(model), kept_mb=kept_mb, folder=folder)
        due: dict[str, Any] = {each.name: each for each in analyses}
        measurements: dict[str, Measurement] = {}
        seconds = dict.fromkeys(due, 0.0)  # of the stages so far
        failed: dict[str, Attempt] = {}  # what this rank could not go on with
        stage = 0
        while due:
            numbers, staged = self.from_first(functools.partial(self._assigned, view, due, failed.keys(), stage))
            mine = {name: analysis for name, analysis in due.items() if name not in failed}
            results = failed | self._results(view, mine, numbers[self.rank], starting, facts)
            of_ranks: list[Any] = [None] * self.size
            last = {name: results.pop(name) for name in [*results] if name not in staged}
            distributed.gather_object(last, of_ranks if self.rank == 0 else None, dst=0, group=self.group)
            ended = due.keys() - staged if self.rank == 0 else set()
            shares = {name: [each[name] for each in of_ranks if name in each] for name in ended}
            following, failed = {}, {}
            for name in staged:  # one at a time, as what is sent may be large
                distributed.all_gather_object(of_ranks, results.pop(name, None), group=self.group)
                sent = [share for share in of_ranks if share is not None]
                of_ranks[:] = [None] * self.size
                self._note({name: sent}, stage)
                if any(share.error is not None for share in sent):
                    shares[name] = sent
                    ended.add(name)
                    continue
                attempt = Attempt()
                following[name] = attempt.make(view, due[name], functools.partial(_following, due[name], sent))
                seconds[name] += max(share.seconds for share in sent) + attempt.seconds
                sent.clear()
                if attempt.error is not None:
                    following[name], failed[name] = due[name], attempt
            self._note(shares, stage)
            for name in due.keys() - following.keys():
                view.leave(name)  # what is kept for parts that another rank has
            for name in ended if self.rank == 0 else ():
                measured = _joined(view, due[name], shares[name], facts)
                measurements[name] = replace(measured, seconds=measured.seconds + seconds[name])
            due, stage, starting = following, stage + 1, lambda analysis: None
        distributed.barrier(group=self.group)
        return [measurements[each.name] for each in analyses] if self.rank == 0 else []

    def _results(
        self,
        view: SharedPass,
        analyses: Mapping[str, Any],
        numbers: Mapping[str, Container[int]],
        starting: Callable[[Analysis], None],
        facts: Mapping[str, Any],
    ) -> dict[str, Any]:
        """What this rank's parts of each analysis give, or the measurement of one that is not divided."""
        # Rank 0 has a share of each that is divided, though it be of no part: it says the result of an analysis.
        mine = [
            analysis
            for name, analysis in analyses.items()
            if numbers[name] or (self.rank == 0 and one_model.is_divided(analysis))
        ]
        shares = Shares(view, mine, starting, numbers=numbers, weights_hash=facts["weights_hash"])
        results: dict[str, Any] = {}
        for analysis in mine:
            if one_model.is_divided(analysis):
                results[analysis.name] = one_model.sendable(shares.of(analysis))
            else:
                starting(analysis)
                results[analysis.name] = one_model.measure(view, analysis, **facts)
        return results

    def _note(self, shares: Mapping[str, Sequence[Any]], stage: int) -> None:
        for name, of_ranks in shares.items():
            for share in of_ranks:
                of_parts = {0: share.seconds} if isinstance(share, Measurement) else share.of_parts
                self._seconds |= {Part(name, number, stage): seconds for number, seconds in of_parts.items()}

    def _assigned(
        self, view: SharedPass, due: Mapping[str, Any], failed: Container[str], stage: int
    ) -> tuple[list[dict[str, Container[int]]], list[str]]:
        """For each rank the numbers of its parts of each analysis; and which analyses go on after this stage."""
        texts: dict[Part, list[bytes]] = {}
        seconds: dict[Part, float] = {}
        unknown: list[Part] = []
        unreadable: list[str] = []
        for name, analysis in due.items():
            of_parts: list[list[bytes]] | None = [[]]
            if name in failed:
                continue
            if one_model.is_divided(analysis):
                of_parts = Attempt().make(view, analysis, analysis.texts_of_parts)
            if of_parts is None:  # measuring it says why
                unreadable.append(name)
                continue
            parts = {Part(name, number, stage): rows for number, rows in enumerate(of_parts)}
            texts |= parts
            if all(part in self._seconds for part in parts):
                seconds |= {part: self._seconds[part] for part in parts}
            else:
                unknown += parts
        mean = sum(seconds.values()) / len(seconds) if seconds else 1.0
        seconds |= dict.fromkeys(unknown, mean)
        numbers: list[dict[str, Any]] = []
        due_parts = frozenset(seconds)
        self._owners[due_parts] = assign_parts(seconds, texts, self.size, self._owners.get(due_parts))
        for rank, parts in enumerate(self._owners[due_parts]):
            of_rank: dict[str, Any] = {name: set() for name in due}
            for part in parts:
                of_rank[part.analysis].add(part.number)
            numbers.append(of_rank | (dict.fromkeys(unreadable, ALL) if rank == 0 else {}))
        return numbers, [n for n, each in due.items() if isinstance(each, StagedAnalysis) and n not in failed]


def _following(analysis: StagedAnalysis, shares: Sequence[Attempt], view: LayeredModel) -> DividedAnalysis:
    results = analysis.in_order(_read(share) for share in shares)
    return analysis.then(analysis.prepared(view), results)


def _read(share: Attempt) -> dict[int, Any]:
    """What a share holds, which gives it up."""
    sent, share.result = share.result, None
    return pickle.loads(sent)


def _joined(view: SharedPass, analysis: Analysis, shares: Sequence[Any], facts: dict[str, Any]) -> Measurement:
    return shares[0] if isinstance(shares[0], Measurement) else one_model.join_shares(view, analysis, shares, **facts)
