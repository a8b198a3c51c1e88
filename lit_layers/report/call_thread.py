"""Calls that a thread makes one after the other, for what may raise, hang or not keep up."""

import contextlib
import queue
import threading
from collections.abc import Callable

from lit_layers.errors import first_line


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
