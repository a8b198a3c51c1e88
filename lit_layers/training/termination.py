"""Hearing SIGTERM, as a scheduler sends it before it takes the machine, without acting on it at once."""

from typing import Any

import lightning as L
import torch
from torch import distributed


class Termination:
    """Whether any rank was asked to stop.

    Takes the place of Lightning's own handler, which runs a collective wherever the signal finds the process: ranks
    that are inside another collective, or are signalled one after the other, then wait for each other for ever.
    """

    def __init__(self) -> None:
        self._asked = False
        self._group: Any = None

    def listen(self, trainer: L.Trainer) -> None:
        """Has Lightning install a handler that only notes the signal: before it installs its own, in `setup`."""
        self._asked = False
        connector: Any = trainer._signal_connector
        connector._sigterm_notifier_fn = self._note

    def connect(self, trainer: L.Trainer) -> None:
        """Lets the ranks agree; called by every rank."""
        if trainer.world_size > 1:
            self._group = distributed.new_group(backend="gloo")

    def asked(self) -> bool:
        """The same on all ranks, all of which ask: some tenths of a millisecond between CPUs of one machine."""
        if self._group is None:
            return self._asked
        flag = torch.tensor([int(self._asked)])
        distributed.all_reduce(flag, op=distributed.ReduceOp.MAX, group=self._group)
        return bool(flag)

    def _note(self, *_: Any) -> None:
        self._asked = True
