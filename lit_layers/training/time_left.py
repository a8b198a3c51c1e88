"""How long the measuring of a checkpoint still takes, by how long the last one took: for bars, and lines of a log."""

import time

from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lit_layers.measuring.plan import duration
from lit_layers.records import Measurement

LONG = 10.0  # seconds: what takes longer says how far it is, at most once in so long


class TimeLeft:
    """Hears what is measured while it is measured, as a watcher of a training, and estimates what is left."""

    def __init__(self) -> None:
        self._step: int | None = None
        self._started = self._heard = 0.0
        self.expected: float | None = None  # seconds of a checkpoint, by the last one

    def measuring(self, step: int, analysis: str) -> None:
        if step != self._step:
            if self._step is not None:
                self.expected = self._heard - self._started
            self._step, self._started = step, time.perf_counter()
        self._heard = time.perf_counter()

    def measured(self, measurement: Measurement) -> None:
        self._heard = time.perf_counter()

    @property
    def elapsed(self) -> float:
        """Seconds since the measuring of this checkpoint began."""
        return self._heard - self._started

    def words(self) -> str:
        """Such as `about 40 s left`; nothing where no checkpoint was measured before, or little is left."""
        left = 0.0 if self.expected is None else self.expected - self.elapsed
        return f"about {duration(left)} left" if left >= 1 else ""


class TimeLines(TimeLeft):
    """Tells it through Lightning's own log, of measuring that takes over ten seconds, on the first rank alone."""

    def __init__(self) -> None:
        super().__init__()
        self._last_line = -LONG

    def measuring(self, step: int, analysis: str) -> None:
        super().measuring(step, analysis)
        if max(self.elapsed, self.expected or 0.0) >= LONG and self._heard - self._last_line >= LONG:
            self._last_line = self._heard
            rank_zero_info(", ".join(filter(None, [f"measuring {analysis} at step {step}", self.words()])))
