"""The processes that measure one checkpoint together."""

import datetime
import pickle
from collections.abc import Callable
from typing import Any

from torch import distributed

from lit_layers.errors import InputError, kind_and_words

_TIMEOUT = datetime.timedelta(hours=12)
START_TIMEOUT = datetime.timedelta(seconds=20)  # ranks that begin to watch begin together

Outcome = tuple[str | None, Any]  # why there is nothing, and what there is


class OneProcess:
    """A measurement in one process, where `Ranks` is one in several."""

    rank, size = 0, 1

    def gather(self, error: str | None, value: Any) -> list[Outcome]:
        """Return the outcomes of all ranks, on every rank."""
        return [(error, value)]

    def from_first(self, compute: Callable[[], Any]) -> Any:
        """Return what `compute` gives."""
        return compute()


def ranks_of(world_size: int, *, timeout: datetime.timedelta = _TIMEOUT) -> "OneProcess | Ranks":
    """Return the processes of a run, each of which calls.

    They have a group of their own on the CPU: results are objects, and training's collectives stay undisturbed.

    Raises:
        InputError: if not all of them call within `first`.
    """
    if world_size == 1:
        return OneProcess()
    try:
        if timeout < _TIMEOUT:  # a group of its own, which is left: ended, it could end before another rank has joined
            distributed.new_group(backend="gloo", timeout=timeout)
    except RuntimeError as error:
        raise InputError(
            f"watch: expected a call in each of the {world_size} processes, but after {timeout.seconds} s not all have "
            "called: call it, step() and close() on all ranks, not on the first alone"
        ) from error
    return Ranks(distributed.new_group(backend="gloo", timeout=_TIMEOUT))


class Ranks:
    """A measurement in several processes of a run."""

    def __init__(self, group: Any) -> None:
        self.group, self.rank, self.size = group, distributed.get_rank(group), distributed.get_world_size(group)

    def gather(self, error: str | None, value: Any) -> list[Outcome]:
        """Return the outcomes of all ranks, on every rank; a value that cannot be sent is an error of its own."""
        try:
            sent = error, pickle.dumps(value)
        except Exception as failure:
            sent = error or kind_and_words(failure), pickle.dumps(None)
        gathered: list[Any] = [None] * self.size
        distributed.all_gather_object(gathered, sent, group=self.group)
        return [(error, pickle.loads(content)) for error, content in gathered]

    def from_first(self, compute: Callable[[], Any]) -> Any:
        """Return what `compute` gives on rank 0, the only one that calls it, on all ranks.

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
