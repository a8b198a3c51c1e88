"""The run that a user's own training logs to: what is measured is added to it.

Any logger of Lightning takes curves by `log_metrics`. A run of W&B also gets heat maps and tables. None of the trackers
is imported here: a training that logs to one has done so.
"""

import logging
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from lit_layers import records
from lit_layers.identity import latest, plain_settings
from lit_layers.report.logged_numbers import as_logged, of_the_whole_run
from lit_layers.report.wandb_files import AXIS
from lit_layers.report.wandb_mirror import best_of

logger = logging.getLogger(__name__)
_PLACE = "lit_layers"  # section of everything that is not the curve of a metric
STEP, TOKENS = f"{_PLACE}/step", f"{_PLACE}/tokens"
TRANSFORMERS_AXIS = "train/global_step"  # in each row that transformers logs to W&B

Pictures = Mapping[str, bytes]


class WandbRun:
    """A guest in a run of W&B: its rows join the user's rows, which keep their numbers.

    W&B numbers the rows of a run, and drops a row whose number is below that of the row before. A row of measurements
    is therefore added to the row that is open, at most one to each. A row that finds no place waits for the end.

    Args:
        run: the run.
        axis: the name under which the user's logger writes the step into each of its rows; None: it writes none. The
            measurements of a step then join only the row that the logger writes at that step (`join`). If it writes
            none, they have a row of their own some steps later: W&B draws all rows over the axis.
    """

    # By run, the last row that measurements were added to, and their step: two networks may be measured in one run.
    _taken: ClassVar[dict[str, tuple[int, int]]] = {}

    def __init__(self, run: Any, axis: str | None = None) -> None:
        self._run, self._wandb = run, sys.modules["wandb"]
        self._axis, self._is_shared = axis or STEP, axis is not None
        self._waiting = dict[int, tuple[Mapping[str, float], Pictures]]()
        self._defined = {self._axis}

    def begin(self, about: Mapping[str, Any]) -> None:
        """Takes what is measured, the options of each analysis by its name, and where."""
        self._run.config.update({_PLACE: dict(about)}, allow_val_change=True)
        if not self._is_shared:
            self._run.define_metric(STEP)

    def row(self, step: int, values: Mapping[str, float], pictures: Pictures) -> None:
        """Takes the curves of a step of the axis, and its pictures."""
        if self._is_shared and len(self._waiting) > 1:  # one alone may be step 0, before the logger's first row
            self.flush()
        self._waiting[step] = values, pictures
        if not self._is_shared:
            self.join(step)

    def join(self, step: int) -> None:
        """Adds the row of a step to the one that is open, unless that has measurements of another step."""
        if step not in self._waiting:
            return
        number, (taken, by) = self._run.step, self._taken.get(self._run.id, (-1, -1))
        if number != taken or step == by:
            self._log(step, commit=False)
            self._taken[self._run.id] = number, step

    def end(self, root: Path) -> None:
        """Takes the tables and the pictures of all steps; the run is the user's to close."""
        self.flush()
        measurements = records.read(root / "measurements.jsonl")
        shown = [measurement for measurement in latest(measurements) if not records.is_suspect(measurement)]
        tables, pictures = of_the_whole_run(root, shown, plain_settings(measurements))
        named = {f"{_PLACE}/{name}": table for name, table in tables.items()}
        self._run.log(as_logged(self._wandb, named, pictures), commit=False)

    def flush(self) -> None:
        """Writes the rows that wait behind the user's last row."""
        if self._waiting and not self._is_shared:
            self.join(max(self._waiting))
        if not self._waiting:
            return
        number = self._run.step
        if not self._is_shared and number - self._run.summary.get("_step", -1) > 1:
            # The user numbers the rows: one that comes later would be dropped if these took its number.
            words = "W&B: %d steps are no points of its curves, as the run has fewer rows; %s/emergence has them"
            logger.warning(words, len(self._waiting), _PLACE)
            return
        if self._taken.get(self._run.id, (-1, -1))[0] == number:
            self._run.log({}, commit=True)
        for step in sorted(self._waiting):
            self._log(step, commit=True)

    def _log(self, step: int, *, commit: bool) -> None:
        values, pictures = self._waiting.pop(step)
        row = {**values, **as_logged(self._wandb, {}, pictures), self._axis: step}
        for name in row.keys() - self._defined:  # by exact name: globs are the user's
            self._run.define_metric(name, step_metric=self._axis, summary=best_of(name))
        self._defined |= row.keys()
        self._run.log(row, commit=commit)


class TensorBoardWriter:
    """Curves in a SummaryWriter."""

    def __init__(self, writer: Any) -> None:
        self._writer = writer

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()


def writer_of(destination: Any) -> Any:
    """Return what writes to a destination: a `WandbRun`, or an object with `log_metrics(values, step)`.

    A destination is a logger of Lightning, a tracker of accelerate, a SummaryWriter or a run of W&B.
    None for others.
    """
    kinds = [kind.__name__ for kind in type(destination).__mro__]
    is_logger = "WandbLogger" in kinds
    behind = destination.experiment if is_logger else destination
    names = {f"{kind.__module__.partition('.')[0]}.{kind.__name__}" for kind in type(behind).__mro__}
    if "accelerate.GeneralTracker" in names:
        return writer_of(behind.tracker)
    if "wandb.Run" in names:
        return WandbRun(behind, AXIS if is_logger else None)
    if {"torch.SummaryWriter", "tensorboardX.SummaryWriter"} & names:
        return TensorBoardWriter(behind)
    return destination if isinstance(destination, WandbRun) or hasattr(destination, "log_metrics") else None


def runs_of_trainer(reports_to: Sequence[str], callbacks: Sequence[Any]) -> list[Any]:
    """The runs that a Trainer of transformers has begun in its trackers, of the names of these and its callbacks."""
    run = sys.modules["wandb"].run if "wandb" in reports_to and "wandb" in sys.modules else None
    runs: list[Any] = [run and WandbRun(run, TRANSFORMERS_AXIS)]
    if "tensorboard" in reports_to:
        runs += [getattr(callback, "tb_writer", None) for callback in callbacks]
    return [run for run in runs if run is not None]
