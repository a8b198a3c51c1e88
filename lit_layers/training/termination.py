"""Hearing SIGTERM, as a scheduler sends it before it takes the machine, without acting on it at once."""

import signal
import threading
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
        self._before: Any = None
        self._group: Any = None

    def listen(self, trainer: L.Trainer) -> None:
        """From here on the signal is only noted; called by every rank."""
        self._asked = False
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGTERM, self._note)
        if trainer.world_size > 1:
            self._group = distributed.new_group(backend="gloo")

    def stop_listening(self) -> None:
        """What was in force before is so again."""
        if self._before is not None:
            signal.signal(signal.SIGTERM, self._before)
            self._before = None

    def asked(self) -> bool:
        """The same on all ranks, all of which ask: one number between CPUs, some tenths of a millisecond on one machine."""
        if self._group is None:
            return self._asked
        flag = torch.tensor([int(self._asked)])
        distributed.all_reduce(flag, op=distributed.ReduceOp.MAX, group=self._group)
        return bool(flag)

    def _note(self, *_: Any) -> None:
        self._asked = True
