"""Each checkpoint with its download, while that of the next one is under way."""

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from queue import SimpleQueue

from lit_layers.series.checkpoint import Checkpoint

THREAD = "prefetch"


def fetched_ahead(checkpoints: Sequence[Checkpoint]) -> Iterator[tuple[Checkpoint, "Future[Path]"]]:
    """Yields each checkpoint and its download; the next download begins when this one is complete.

    Whoever stops early need not wait: a download under way is left to a daemon, which ends with the process.
    """
    orders: SimpleQueue[tuple[Checkpoint, Future[Path]] | None] = SimpleQueue()
    everything = [(checkpoint, Future[Path]()) for checkpoint in checkpoints]
    # A ThreadPoolExecutor would be waited for, here and once more when the interpreter ends.
    threading.Thread(target=_work, args=(orders,), name=THREAD, daemon=True).start()
    try:
        for ordered in everything[:1]:
            orders.put(ordered)
        for number, mine in enumerate(everything):
            for ordered in everything[number + 1 : number + 2]:
                orders.put(ordered)
            yield mine
    finally:
        for _, waiting in everything:
            waiting.cancel()
        orders.put(None)


def _work(orders: "SimpleQueue[tuple[Checkpoint, Future[Path]] | None]") -> None:
    while (order := orders.get()) is not None:
        checkpoint, fetched = order
        if not fetched.set_running_or_notify_cancel():
            continue
        try:
            fetched.set_result(checkpoint.fetch())
        except BaseException as error:  # whatever it is belongs to whoever asks for the result
            fetched.set_exception(error)
