"""The whole of a run's measurements in the run that a user's own training logs to: W&B, TensorBoard, MLflow, trackio.

What is shown is one thing for all of them (`TrackedRun`); what differs is how a row, a picture and a table are handed
over (`Tracker`). None of the four is imported here: who logs to one has done so.
"""

import contextlib
import json
import logging
import queue
import re
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from lit_layers import records
from lit_layers.errors import first_line
from lit_layers.files.table_files import csv_text
from lit_layers.identity import latest, plain_settings
from lit_layers.report.logged_numbers import TIMES, Table, as_logged, image, of_the_whole_run
from lit_layers.report.wandb_files import AXIS
from lit_layers.report.wandb_mirror import best_of


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


logger = logging.getLogger(__name__)
PATIENCE = 30.0  # seconds that a training waits for a tracker, once, at its end
_WAITING = 1000  # rows
_TEXT_ROWS = 1000  # of a table that is text
_PARAMETER = 500  # characters, the least that a server of MLflow takes
_BATCH = 1000  # metrics that it takes at once
_PLACE = "lit_layers"  # section of everything that is not the curve of a metric
STEP, TOKENS = f"{_PLACE}/step", f"{_PLACE}/tokens"
TRANSFORMERS_AXIS = "train/global_step"  # in each row that transformers logs to W&B or trackio

Pictures = Mapping[str, bytes]


class Tracker(ABC):
    """A run of the user's own; each call may raise or wait, as the tracker does."""

    name: str
    is_prompt = False  # whether a row is handed over in the thread that trains

    @abstractmethod
    def begin(self, about: Mapping[str, Any]) -> None:
        """Takes what is measured, the options of each analysis by its name, and where."""

    @abstractmethod
    def row(self, step: int, values: Mapping[str, float], pictures: Pictures) -> None:
        """Takes the curves of a step of the axis, and its pictures."""

    @abstractmethod
    def end(self, step: int, tables: Mapping[str, Table], pictures: Pictures) -> None:
        """Takes the tables, and the pictures of all steps; the run is the user's to close."""


class WandbRun(Tracker):
    """A guest in a run of W&B: its rows join the user's rows, which keep their numbers.

    W&B numbers the rows of a run, and drops a row whose number is below that of the row before. A row of measurements
    is therefore added to the row that is open, at most one to each. A row that finds no place waits for the end.

    Args:
        run: the run.
        axis: the name under which the user's logger writes the step into each of its rows; None: it writes none. The
            measurements of a step then join only the row that the logger writes at that step (`join`).
    """

    name, is_prompt = "W&B", True
    _taken: ClassVar[dict[str, int]] = {}  # by run, the last row that measurements were added to

    def __init__(self, run: Any, axis: str | None = None) -> None:
        self._run, self._wandb = run, sys.modules["wandb"]
        self._axis, self._is_shared = axis or STEP, axis is not None
        self._waiting = dict[int, tuple[Mapping[str, float], Pictures]]()
        self._defined = {self._axis}

    def begin(self, about: Mapping[str, Any]) -> None:
        self._run.config.update({_PLACE: dict(about)}, allow_val_change=True)
        if not self._is_shared:
            self._run.define_metric(STEP)

    def row(self, step: int, values: Mapping[str, float], pictures: Pictures) -> None:
        self._waiting[step] = values, pictures
        if not self._is_shared:
            self.join(step)

    def join(self, step: int) -> None:
        """Adds the row of a step to the one that is open, unless that has measurements of another step."""
        if step in self._waiting and self._taken.get(self._run.id) != (number := self._run.step):
            self._log(step, commit=False)
            self._taken[self._run.id] = number

    def end(self, step: int, tables: Mapping[str, Table], pictures: Pictures) -> None:
        self.flush()
        if tables:
            logged = as_logged(self._wandb, {f"{_PLACE}/{name}": table for name, table in tables.items()}, pictures)
            self._run.log(logged, commit=False)

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
        if self._taken.get(self._run.id) == number:
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


class TensorBoardWriter(Tracker):
    """Pictures have a slider over the steps; tables and options are texts."""

    name = "TensorBoard"

    def __init__(self, writer: Any) -> None:
        self._writer = writer

    def begin(self, about: Mapping[str, Any]) -> None:
        lines = json.dumps(about, indent=1, default=str).splitlines()
        self._writer.add_text(f"{_PLACE}/about", "\n".join(f"    {line}" for line in lines))

    def row(self, step: int, values: Mapping[str, float], pictures: Pictures) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        for name, png in pictures.items():
            self._writer.add_image(name, np.asarray(image(png)), step, dataformats="HWC")
        self._writer.flush()

    def end(self, step: int, tables: Mapping[str, Table], pictures: Pictures) -> None:
        for name, (columns, rows) in tables.items():
            at = 0 if name == TIMES else columns.index("step")
            shown = rows if name == TIMES else [row for row in rows if row[at] == max(each[at] for each in rows)]
            self._writer.add_text(f"{_PLACE}/{name}", _markdown(columns, shown), step)
        self.row(step, {}, pictures)


class MLflowRun(Tracker):
    """Options are parameters, pictures have a slider over the steps, tables are artefacts (CSV)."""

    name = "MLflow"

    def __init__(self, client: Any, run_id: str) -> None:
        self._client, self._id = client, run_id

    def begin(self, about: Mapping[str, Any]) -> None:
        self._client.log_dict(self._id, json.loads(json.dumps(about, default=str)), f"{_PLACE}/about.json")
        for name, options in about["analyses"].items():
            value = json.dumps(options, sort_keys=True, default=str)
            value = value if len(value) <= _PARAMETER else f"{value[: _PARAMETER - 4]} ..."
            try:
                self._client.log_param(self._id, _allowed(f"{_PLACE}/{name}"), value)
            except Exception as error:  # a run that goes on with others: MLflow keeps the first
                logger.warning("MLflow: parameter %s/%s is not set: %s", _PLACE, name, first_line(error))

    def row(self, step: int, values: Mapping[str, float], pictures: Pictures) -> None:
        Metric, now = sys.modules["mlflow"].entities.Metric, int(time.time() * 1000)
        # A store of files cannot have a curve that is the folder of others.
        folders = {"/".join(parts[:end]) for parts in (name.split("/") for name in values) for end in range(len(parts))}
        named = ((f"{name}/whole" if name in folders else name, value) for name, value in values.items())
        metrics = [Metric(_allowed(name), float(value), now, step) for name, value in named]
        for start in range(0, len(metrics), _BATCH):
            self._client.log_batch(self._id, metrics=metrics[start : start + _BATCH])
        for name, png in pictures.items():
            self._client.log_image(self._id, image(png), key=_allowed(name), step=step)

    def end(self, step: int, tables: Mapping[str, Table], pictures: Pictures) -> None:
        for name, (columns, rows) in tables.items():
            self._client.log_text(self._id, csv_text(columns, rows), f"{_PLACE}/{name}.csv")
        self.row(step, {}, pictures)


class TrackioRun(Tracker):
    """Rows have the number of the user's last row; their step is `train/global_step`, as in those of transformers."""

    name, axis = "trackio", TRANSFORMERS_AXIS

    def __init__(self, run: Any) -> None:
        self._run, self._trackio = run, sys.modules["trackio"]

    def begin(self, about: Mapping[str, Any]) -> None:
        self._run.config[_PLACE] = json.loads(json.dumps(about, default=str))  # sent with the run's first row

    def row(self, step: int, values: Mapping[str, float], pictures: Pictures) -> None:
        self._log({**values, **as_logged(self._trackio, {}, pictures), self.axis: step})

    def end(self, step: int, tables: Mapping[str, Table], pictures: Pictures) -> None:
        tables = {f"{_PLACE}/{name}": table for name, table in tables.items()}
        self._log({**as_logged(self._trackio, tables, pictures), self.axis: step})

    def _log(self, row: dict[str, Any]) -> None:
        self._run.log(row, step=self._run._next_step - 1)  # another number would move those of the rows to come


def tracker_of(destination: Any) -> Tracker | None:
    """The tracker that a logger of Lightning or accelerate writes to, or that the destination is: a run of W&B, MLflow
    or trackio, a SummaryWriter of TensorBoard. None of others, and on other ranks than the first.
    """
    if isinstance(destination, Tracker):
        return destination
    kinds = [kind.__name__ for kind in type(destination).__mro__]
    is_logger = not {"WandbLogger", "TensorBoardLogger", "MLFlowLogger"}.isdisjoint(kinds)
    behind = destination.experiment if is_logger else destination
    names = {f"{kind.__module__.partition('.')[0]}.{kind.__name__}" for kind in type(behind).__mro__}
    if "accelerate.GeneralTracker" in names:
        return tracker_of(behind.tracker)
    if "wandb.Run" in names:
        return WandbRun(behind, AXIS if is_logger else None)
    if {"torch.SummaryWriter", "tensorboardX.SummaryWriter"} & names:
        return TensorBoardWriter(behind)
    if "mlflow.MlflowClient" in names:
        return MLflowRun(behind, destination.run_id) if is_logger else None
    if "mlflow.Run" in names:
        return MLflowRun(sys.modules["mlflow"].MlflowClient(), behind.info.run_id)
    return TrackioRun(behind) if "trackio.Run" in names else None


def runs_of_trainer(reports_to: Sequence[str], callbacks: Sequence[Any]) -> list[Any]:
    """The runs that a Trainer of transformers has begun in its trackers, of the names of these and its callbacks."""
    open_runs: dict[str, Callable[[Any], Any]] = {
        "wandb": lambda module: module.run and WandbRun(module.run, TRANSFORMERS_AXIS),
        "mlflow": lambda module: module.active_run(),
        "trackio": lambda module: module.context_vars.current_run.get(),
    }
    runs = [open_runs[name](sys.modules[name]) for name in open_runs if name in reports_to and name in sys.modules]
    if "tensorboard" in reports_to:
        runs += [getattr(callback, "tb_writer", None) for callback in callbacks]
    return [run for run in runs if run is not None]


class TrackedRun(CallThread):
    """Hands what is measured to a tracker: a row a step as it is measured, at the end the table of all numbers, when
    each metric emerges, and layers by steps as pictures.

    A tracker that raises loses that row, with a warning. All but W&B, whose rows join the user's, are served by a
    thread. Training waits for it only at its end, for `PATIENCE` seconds; a tracker that needs longer, or keeps too
    much waiting, is given up. The run's files have what it lacks.
    """

    def __init__(self, tracker: Tracker, root: Path, analyses: Mapping[str, Any]) -> None:
        super().__init__(_WAITING)
        self.tracker, self.root, self._last = tracker, root, 0
        self._start(f"lit_layers to {tracker.name}")
        about = {"root": str(root), "analyses": dict(analyses)}
        self._tell("its config", lambda: tracker.begin(about))

    def log(self, step: int, values: Mapping[str, float], draw: Callable[[], Pictures]) -> None:
        """Hands over the curves of one step of the axis, and its heat maps."""
        self._last = max(self._last, step)
        self._tell(f"step {step}", lambda: self.tracker.row(step, values, draw()))

    def join(self, step: int) -> None:
        """Has a row that waits join the one that the user's logger is about to write."""
        tracker = self.tracker
        if isinstance(tracker, WandbRun):
            self._tell(f"step {step}", lambda: tracker.join(step))

    def finish(self, *, whole: bool) -> None:
        """Returns when all is handed over, the tables, too, if it is `whole`, or when the tracker is given up."""
        if whole:
            self._tell("the table of measurements", self._send_tables, PATIENCE)
        elif isinstance(self.tracker, WandbRun):
            self._tell("what waits", self.tracker.flush, PATIENCE)
        self._end()

    def _send_tables(self) -> None:
        measurements = records.read(self.root / "measurements.jsonl")
        shown = [measurement for measurement in latest(measurements) if not records.is_suspect(measurement)]
        tables, pictures = of_the_whole_run(self.root, shown, plain_settings(measurements))
        if tables:
            self.tracker.end(self._last, tables, pictures)

    def _tell(self, what: str, call: Callable[[], None], *limit: float) -> None:
        def guarded() -> None:
            try:
                call()
            except Exception as error:  # whatever a tracker has
                logger.warning("%s: %s is not logged: %s", self.tracker.name, what, first_line(error))

        if self.tracker.is_prompt and not limit:
            guarded()
        else:
            self._later(guarded, *limit)

    def _give_up(self, reason: str) -> None:
        super()._give_up(reason)
        logger.warning("%s: gets nothing more (%s): %s has it", self.tracker.name, reason, self.root)


def _markdown(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    def line(cells: Sequence[Any]) -> str:
        shown = ("" if cell is None else f"{cell:.5g}" if isinstance(cell, float) else str(cell) for cell in cells)
        return f"| {' | '.join(text.replace('|', '/') for text in shown)} |"

    more = [f"\n{len(rows) - _TEXT_ROWS:,} more rows are in the run's folder"] if len(rows) > _TEXT_ROWS else []
    return "\n".join([line(columns), line(["---"] * len(columns)), *map(line, rows[:_TEXT_ROWS]), *more])


def _allowed(name: str) -> str:
    """A name that every server of MLflow takes."""
    return re.sub(r"[^\w./ -]", "_", name, flags=re.ASCII)
