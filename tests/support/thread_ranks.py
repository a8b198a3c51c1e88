"""Several ranks as threads of one process, of which one at a time runs: what they find, without a process group."""

import copy
import pickle
import threading
from collections.abc import Sequence
from typing import Any

from torch import nn

from lit_layers.analyses.base import Analysis
from lit_layers.errors import kind_and_words
from lit_layers.measuring.one_model import Outcome, outcomes


class Exchange:
    """Where all ranks exchange what they have, as `torch.distributed` would."""

    def __init__(self, size: int) -> None:
        self.turn, self.barrier = threading.Lock(), threading.Barrier(size, timeout=300)
        self.sent: dict[tuple[int, int], tuple[str | None, bytes]] = {}
        self.num_gathers = 0


class Rank:
    """One of the ranks; it runs between two gathers while the others wait."""

    def __init__(self, meeting: Exchange, rank: int, size: int) -> None:
        self.meeting, self.rank, self.size, self.number = meeting, rank, size, 0

    def gather(self, error: str | None, value: Any) -> list[tuple[str | None, Any]]:
        self.number += 1
        try:
            self.meeting.sent[self.number, self.rank] = error, pickle.dumps(value)
        except Exception as failure:  # as `Ranks` does
            self.meeting.sent[self.number, self.rank] = error or kind_and_words(failure), pickle.dumps(None)
        self.meeting.turn.release()
        self.meeting.barrier.wait()
        self.meeting.turn.acquire()
        everyone = [self.meeting.sent[self.number, rank] for rank in range(self.size)]
        self.meeting.num_gathers = self.number
        return [(error, pickle.loads(content)) for error, content in everyone]


def outcomes_on_ranks(model: nn.Module, analyses: Sequence[Analysis], size: int) -> tuple[list[Outcome], Exchange]:
    """Return what the first of so many ranks yields, each with a model of its own, and where they met."""
    meeting, found, failures = Exchange(size), dict[int, list[Outcome]](), list[BaseException]()

    def run(rank: int) -> None:
        try:
            with meeting.turn:
                own = copy.deepcopy(model)
                found[rank] = list(outcomes(own, analyses, Rank(meeting, rank, size), weights_hash="x"))
        except BaseException as failure:
            failures.append(failure)
            meeting.barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    assert all(not found[rank] for rank in range(1, size)), "the first rank alone says what was found"
    return found[0], meeting
