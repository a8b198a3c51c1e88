"""The mirror in a thread of its own: nothing that W&B does stops a training, or delays it for longer than a limit."""

import contextlib
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lit_layers.errors import InputError, first_line
from lit_layers.records import Measurement
from lit_layers.report.wandb_mirror import WandbMirror

_STEPS = 10_000  # that wait at most: W&B does not keep up then, and the files have them all
_LIMIT_AFTER_SIGTERM, _TERMINATED = 15.0, 143
abandoned: "list[MirrorAside]" = []  # W&B's own end may wait for ever for theirs


class CallThread:
    """Takes calls without waiting for them; whoever does not keep up, or does not answer in time, gets no more.

    Args:
        most: calls that wait at once.
    """

    def __init__(self, most: int) -> None:
        self._calls: queue.Queue[tuple[Callable[[], None], threading.Event] | None] = queue.Queue(most)
        self._is_off = False

    def _start(self, name: str) -> None:
        threading.Thread(target=self._work, name=name, daemon=True).start()

    def _later(self, call: Callable[[], None], *limit: float | None) -> None:
        """Queues a call; with a limit (None: without end) waits until it is done."""
        done = threading.Event()
        if self._is_off:
            return
        try:
            self._calls.put_nowait((call, done))
        except queue.Full:
            self._give_up("it does not keep up")
        else:
            if limit and not done.wait(limit[0]):
                self._give_up(f"no answer within {limit[0]:.0f} s")

    def _end(self) -> None:
        """Ends the thread, once it has made the calls that wait."""
        with contextlib.suppress(queue.Full):
            self._calls.put_nowait(None)

    def _work(self) -> None:
        for call, done in iter(self._calls.get, None):
            try:
                if not self._is_off:
                    call()
            except BaseException as error:  # whatever it is: no training ends for it
                if not self._is_off:
                    self._failed(error)
            finally:
                done.set()

    def _failed(self, error: BaseException) -> None:
        """What a call raised."""
        self._give_up(first_line(error))

    def _give_up(self, reason: str) -> None:
        """No call is made from here on, and what waits for one goes on."""
        self._is_off = True
        with contextlib.suppress(queue.Empty):
            while (waiting := self._calls.get_nowait()) is not None:
                waiting[1].set()
            self._end()


class MirrorAside(CallThread):
    """Hands the calls of a mirror to its thread, in order, and waits for the first and the last one alone.

    A mirror that raises, falls behind, or needs longer than its `timeout` is given up with one sentence: what it lacks
    is in the run's files. `patient` waits as long as it takes.
    """

    def __init__(self, mirror: WandbMirror, *, patient: bool = False) -> None:
        super().__init__(_STEPS)
        self.mirror, self._limit, self._is_starting = mirror, None if patient else mirror.timeout, True
        self._refused: InputError | None = None
        self._last_words = ""

    def open(self, root: str | Path, *, run_id: str, config: Mapping[str, Any], **options: bool) -> None:
        """Starts the mirror, with its own options; what W&B lacks of the run is sent meanwhile.

        Raises:
            InputError: what the mirror refuses to start with.
        """
        self.mirror.root = Path(root)
        self._start("wandb")
        self._later(lambda: self.mirror.start(root, run_id=run_id, config=config, **options), self._limit)
        self._is_starting = False
        if self._refused is not None:
            raise self._refused
        self._later(self.mirror.catch_up)

    def log_step(
        self, step: int, tokens: int | None, scalars: Mapping[str, float], measurements: Sequence[Measurement]
    ) -> None:
        """Returns at once."""
        values, measured = dict(scalars), list(measurements)
        self._later(lambda: self.mirror.log_step(step, tokens, values, measured))

    def draw(self) -> None:
        """Returns at once."""
        self._later(self.mirror.draw)

    def finish(self, exit_code: int = 0) -> None:
        """Returns when all is sent, or at the limit."""
        limit = self._limit
        if exit_code == _TERMINATED and limit is not None:
            limit = min(limit, _LIMIT_AFTER_SIGTERM)
        self._later(lambda: self.mirror.finish(exit_code), limit)
        self._end()

    def closing_line(self) -> str:
        return self._last_words or self.mirror.closing_line()

    def _failed(self, error: BaseException) -> None:
        if self._is_starting and isinstance(error, InputError):
            self._is_off, self._refused = True, error
        else:
            super()._failed(error)

    def _give_up(self, reason: str) -> None:
        self._is_off = True
        abandoned.append(self)
        try:
            self._last_words = self.mirror.give_up(reason)
        finally:
            super()._give_up(reason)  # last: who waits asks for these words
