"""The mirror in a thread of its own: nothing that W&B does stops a training, or delays it for longer than a limit."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lit_layers.errors import InputError
from lit_layers.records import Measurement
from lit_layers.report.trackers import CallThread
from lit_layers.report.wandb_mirror import WandbMirror

_STEPS = 10_000  # that wait at most: W&B does not keep up then, and the files have them all
_LIMIT_AFTER_SIGTERM, _TERMINATED = 15.0, 143
abandoned: "list[MirrorAside]" = []  # W&B's own end may wait for ever for theirs


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
