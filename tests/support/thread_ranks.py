"""Run analyses on several ranks without a process group: the ranks are threads, and one runs at a time."""

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
    """Shared state of all ranks, through which they gather as with `torch.distributed`."""

    def __init__(self, size: int) -> None:
        self.turn, self.barrier = threading.Lock(), threading.Barrier(size, timeout=300)
        self.sent: dict[tuple[int, int], tuple[str | None, bytes]] = {}
        self.num_gathers = 0


class Rank:
    """One rank; it holds the lock between two gathers while the others wait."""

    def __init__(self, exchange: Exchange, rank: int, size: int) -> None:
        self.exchange, self.rank, self.size, self.number = exchange, rank, size, 0

    def gather(self, error: str | None, value: Any) -> list[tuple[str | None, Any]]:
        self.number += 1
        try:
            self.exchange.sent[self.number, self.rank] = error, pickle.dumps(value)
        except Exception as failure:  # as `Ranks` handles it
            self.exchange.sent[self.number, self.rank] = error or kind_and_words(failure), pickle.dumps(None)
        self.exchange.turn.release()
        self.exchange.barrier.wait()
        self.exchange.turn.acquire()
        everyone = [self.exchange.sent[self.number, rank] for rank in range(self.size)]
        self.exchange.num_gathers = self.number
        return [(error, pickle.loads(content)) for error, content in everyone]


def outcomes_on_ranks(model: nn.Module, analyses: Sequence[Analysis], size: int) -> tuple[list[Outcome], Exchange]:
    """Return the outcomes on rank 0 of `size` ranks, each with its own copy of the model, and their exchange."""
    exchange, found, failures = Exchange(size), dict[int, list[Outcome]](), list[BaseException]()

    def run(rank: int) -> None:
        try:
            with exchange.turn:
                own = copy.deepcopy(model)
                found[rank] = list(outcomes(own, analyses, Rank(exchange, rank, size), weights_hash="x"))
        except BaseException as failure:
            failures.append(failure)
            exchange.barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    assert all(not found[rank] for rank in range(1, size)), "only rank 0 yields outcomes"
    return found[0], exchange
