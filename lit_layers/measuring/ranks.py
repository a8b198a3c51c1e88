"""The processes that measure a checkpoint together."""

import datetime
import pickle
from collections.abc import Callable
from typing import Any

from torch import distributed

from lit_layers.errors import InputError, kind_and_words

_TIMEOUT = datetime.timedelta(hours=12)
START_TIMEOUT = datetime.timedelta(seconds=20)  # time within which all ranks must call `watch`

Outcome = tuple[str | None, Any]  # error (None if there is none), value


class OneProcess:
    """The same interface as `Ranks`, for a single process."""

    rank, size = 0, 1

    def gather(self, error: str | None, value: Any) -> list[Outcome]:
        """Return the error and the value of each rank; here, those of the only rank."""
        return [(error, value)]

    def from_first(self, compute: Callable[[], Any]) -> Any:
        """Call `compute` and return its result, as this process is the first rank."""
        return compute()


def ranks_of(world_size: int, *, timeout: datetime.timedelta = _TIMEOUT) -> "OneProcess | Ranks":
    """Return the processes of a run. Each of them must call this function.

    They communicate in a separate process group on the CPU, because results are Python objects, and because the
    collective operations of training must not be disturbed.

    Raises:
        InputError: if not all processes call within `timeout`.
    """
    if world_size == 1:
        return OneProcess()
    try:
        # Creating a group fails if not all processes do so in time. This group is not destroyed, because the missing
        # processes may still join it later.
        if timeout < _TIMEOUT:
            distributed.new_group(backend="gloo", timeout=timeout)
    except RuntimeError as error:
        raise InputError(
            f"watch: expected a call in each of the {world_size} processes, but after {timeout.seconds} s not all have "
            "called: call it, step() and close() on all ranks, not on the first alone"
        ) from error
    return Ranks(distributed.new_group(backend="gloo", timeout=_TIMEOUT))


class Ranks:
    """Several processes of a run that measure together."""

    def __init__(self, group: Any) -> None:
        self.group, self.rank, self.size = group, distributed.get_rank(group), distributed.get_world_size(group)

    def gather(self, error: str | None, value: Any) -> list[Outcome]:
        """Return the error and the value of each rank, on every rank. A value that cannot be pickled gives an error."""
        try:
            sent = error, pickle.dumps(value)
        except Exception as failure:
            sent = error or kind_and_words(failure), pickle.dumps(None)
        gathered: list[Any] = [None] * self.size
        distributed.all_gather_object(gathered, sent, group=self.group)
        return [(error, pickle.loads(content)) for error, content in gathered]

    def from_first(self, compute: Callable[[], Any]) -> Any:
        """Call `compute` on rank 0 only, and return its result on all ranks.

        Raises:
            InputError: on all ranks, if rank 0 raised it.
            RuntimeError: on the other ranks, if rank 0 raised anything else; rank 0 raises the original exception.
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
