"""Which rank of a distributed run measures which part of which analysis."""

import datetime
import functools
import pickle
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import distributed, nn

from lit_layers.analyses.base import ALL, Analysis, DividedAnalysis, StagedAnalysis
from lit_layers.errors import InputError
from lit_layers.measuring import one_model
from lit_layers.measuring.one_model import Attempt, Shares
from lit_layers.models.shared_pass import SharedPass
from lit_layers.models.view import LayeredModel
from lit_layers.records import Measurement

_PATIENCE = datetime.timedelta(hours=12)
RENDEZVOUS = datetime.timedelta(seconds=20)  # ranks that begin to watch begin together


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

    Part n of an analysis is measured by rank n % size. What the parts gave is put together in their order, so that the
    numbers do not depend on the number of ranks. Where an analysis goes on when all its parts are done, every rank is
    sent their results, and what follows is divided in turn.

    No collective runs inside an analysis, so that one that fails hangs no rank; nor does a slow one: all ranks leave
    together, and none waits for another in training's own collectives, which have less patience.
    """

    def __init__(self, group: Any) -> None:
        self.group, self.rank, self.size = group, distributed.get_rank(group), distributed.get_world_size(group)

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
        **facts: Any,
    ) -> list[Measurement]:
        """On rank 0 the measurements, in the order of the analyses, equal to those of one process; elsewhere none.

        `facts` are those of `one_model.measure`.
        """
        view = SharedPass.of(LayeredModel(model))
        due: dict[str, Any] = {each.name: each for each in analyses}
        measurements: dict[str, Measurement] = {}
        seconds = dict.fromkeys(due, 0.0)  # of the stages so far
        failed: dict[str, Attempt] = {}  # what this rank could not go on with
        while due:
            numbers, staged = self.from_first(functools.partial(self._assigned, view, due, failed.keys()))
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
            for name in due.keys() - following.keys():
                view.leave(name)  # what is kept for parts that another rank has
            for name in ended if self.rank == 0 else ():
                measured = _joined(view, due[name], shares[name], facts)
                measurements[name] = replace(measured, seconds=measured.seconds + seconds[name])
            due, starting = following, lambda analysis: None
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

    def _assigned(
        self, view: SharedPass, due: Mapping[str, Any], failed: Container[str]
    ) -> tuple[list[dict[str, Container[int]]], list[str]]:
        """Return for each rank the numbers of its parts of each analysis, and which analyses go on after this stage."""
        numbers: list[dict[str, Container[int]]] = [{} for _ in range(self.size)]
        for place, (name, analysis) in enumerate(due.items()):
            count: int | None = 0 if name in failed else 1
            if count and one_model.is_divided(analysis):
                count = Attempt().make(view, analysis, analysis.num_parts)
            for rank, of_rank in enumerate(numbers):
                first = rank if one_model.is_divided(analysis) else (rank - place) % self.size
                of_rank[name] = range(first, count or 0, self.size)
            if count is None:  # of data that cannot be read, which measuring says
                numbers[0][name] = ALL
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
