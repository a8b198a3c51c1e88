"""What a task's requests score in many orders of a model's blocks, kept in a file batch by batch."""

import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from lit_layers.errors import refused
from lit_layers.functional.block_schedules import Schedule, format_schedule

Likelihood = tuple[float, bool]  # of a continuation in nats, and whether the model would say it
Request = tuple[object, Sequence[int], Sequence[int]]  # as lm-eval has it: texts, and the tokens of both


class OrderLikelihoods:
    """The likelihoods of requests in orders, as far as they are known: those of an interrupted run are there again.

    Args:
        path: of the file, a line for each batch; its last may be cut off.
        schedules: the orders.
        requests: in any order; equal ones are one.

    Raises:
        InputError: the file cannot be read.
    """

    def __init__(self, path: Path, schedules: Sequence[Schedule], requests: Sequence[Request]) -> None:
        self.path, self.schedules = path, [*schedules]
        self.requests = {_key(request): request for request in requests}
        self._rows = {key: row for row, key in enumerate(self.requests)}
        self._orders = {format_schedule(schedule): row for row, schedule in enumerate(self.schedules)}
        self._others: set[str] = set()  # orders in the file that are not asked for
        self._values = np.full((len(self._orders), len(self._rows), 2), np.nan)  # a missing one has no second value
        if path.exists():
            with refused(f"results: cannot read {path}"), path.open(encoding="utf-8", errors="replace") as lines:
                for line in lines:
                    self._read(line)

    def waiting(self) -> list[Request]:
        """The requests that some order lacks."""
        lacking = np.isnan(self._values[..., 1])
        return [request for key, request in self.requests.items() if lacking[:, self._rows[key]].any()]

    def orders_of(self, requests: Sequence[Request]) -> list[Schedule]:
        """The orders that lack one of these requests."""
        rows = [self._rows[_key(request)] for request in requests]
        lacking = np.isnan(self._values[:, rows, 1])
        return [schedule for schedule, lacks in zip(self.schedules, lacking, strict=True) if lacks.any()]

    def add(self, requests: Sequence[Request], likelihoods: Mapping[Schedule, Sequence[Likelihood]]) -> None:
        """Returns when a batch is on the disk.

        Raises:
            InputError: it cannot be written.
        """
        orders = {format_schedule(schedule): [list(pair) for pair in pairs] for schedule, pairs in likelihoods.items()}
        line = json.dumps({"requests": [_key(request) for request in requests], "orders": orders})
        with refused(f"results: cannot write {self.path}"):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a", encoding="utf-8") as file:
                file.write(f"\n{line}\n")  # a line that was cut off ends before it
                file.flush()
                os.fsync(file.fileno())
        self._read(line)

    def of(self, schedule: Schedule) -> Callable[[Request], Likelihood | None]:
        """What is known of a request in one order."""
        values = self._values[self._orders[format_schedule(schedule)]]

        def likelihood(request: Request) -> Likelihood | None:
            row = self._rows.get(_key(request))
            if row is None or np.isnan(values[row, 1]):
                return None
            return float(values[row, 0]), bool(values[row, 1])

        return likelihood

    def close(self, finished: Callable[[Schedule], bool]) -> None:
        """Removes the file, if no order is in it that is not finished."""
        if not self._others and all(map(finished, self.schedules)):
            self.path.unlink(missing_ok=True)

    def _read(self, line: str) -> None:
        try:
            batch = json.loads(line)
            keys, orders = batch["requests"], batch["orders"]
            orders = {name: np.array(pairs, dtype=float).reshape(len(keys), 2) for name, pairs in orders.items()}
        except (ValueError, KeyError, TypeError, AttributeError):
            return  # cut off when a run was interrupted: its batch is computed again
        asked = [place for place, key in enumerate(keys) if key in self._rows]
        rows = [self._rows[keys[place]] for place in asked]
        for name, pairs in orders.items():
            if name in self._orders:
                self._values[self._orders[name], rows] = pairs[asked]
            else:
                self._others.add(name)


def _key(request: Request) -> str:
    _, context, continuation = request
    return hashlib.sha256(f"{[*context]} {[*continuation]}".encode()).hexdigest()[:24]
