"""Measure a model at steps of its training, in any training loop."""

import contextlib
import functools
import logging
import os
import shlex
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol, Self, get_args

from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import distributed, nn

from lit_layers import records
from lit_layers.analyses.base import Analysis
from lit_layers.errors import InputError, first_line, first_sentence, root_folder
from lit_layers.files import run_lock
from lit_layers.identity import Lineage, plain_settings, warn_of_other_versions
from lit_layers.measuring import one_model, undisturbed
from lit_layers.measuring.nulls import check_null, measure_null
from lit_layers.measuring.one_model import Opened, Visit, measure_unless_done
from lit_layers.measuring.ranks import START_TIMEOUT, OneProcess, Ranks, ranks_of
from lit_layers.models.build import plain_model, weights_hash
from lit_layers.models.null import Null
from lit_layers.models.view import LayeredModel
from lit_layers.records import Measurement, Store
from lit_layers.report.logged_numbers import (
    STEP,
    TOKENS,
    Scalars,
    WandbRun,
    are_maps_due,
    curves_of,
    layer_maps,
    null_curves_of,
    writer_of,
)
from lit_layers.schedule import Schedule, Steps
from lit_layers.schema import MANY, Range, refuse_outside
from lit_layers.training.run_folder import IfExists, begin_training, save_step
from lit_layers.training.run_log import LongMeasuring
from lit_layers.training.sharding import is_sharded

logger = logging.getLogger(__name__)


class Watcher(Protocol):
    """An object that is notified when an analysis starts and ends, such as a progress bar."""

    def measuring(self, step: int, analysis: str) -> None: ...

    def measured(self, measurement: Measurement) -> None: ...


class MetricsLogger(Protocol):
    """A logger that accepts the scalars of a step, as every Lightning logger does."""

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None: ...


class StepMeasurer:
    """A measurer that writes `root/measurements.jsonl` step by step and does not change the training.

    A measurement that the file already contains for the same options, data and weights is not repeated.
    `EmergenceCallback` explains the arguments.

    Raises:
        InputError: if two analyses have the same name, or data have a type that an analysis cannot read.
    """

    def __init__(
        self,
        analyses: Sequence[Analysis],
        root: str | Path,
        *,
        run: str | None = None,
        watchers: Sequence[Watcher] = (),
        scalars: Scalars = "plotted",
        null: Null | None = None,
    ) -> None:
        if null not in (None, *(kinds := get_args(Null))):
            raise InputError(f"null: expected one of {', '.join(kinds)}, got {null!r}")
        self.null: Null | None = null
        if scalars not in (choices := get_args(Scalars)):
            raise InputError(f"scalars: expected one of {', '.join(choices)}, got {scalars!r}")
        self.scalars: Scalars = scalars
        self._writers: dict[int, Any] = {}  # `id` of a logger -> the writer for it
        # Optimizer step -> the step under which the loggers log it, if the two differ.
        self.log_steps: dict[int, int] = {}
        self._measured, self._failed = set[int](), set[int]()  # sets of optimizer steps
        # The measurements of the current step, and the loggers that receive them as one row.
        self._row, self._loggers = list[Measurement](), tuple[Any, ...]()
        if strange := [type(each).__name__ for each in analyses if not isinstance(each, Analysis)]:
            raise InputError(f"analyses: expected a list of them, such as [Lens(batches=data)], got a {strange[0]}")
        one_model.refuse_same_names(analyses)
        for analysis in analyses:
            analysis.adopt_batches_()
        self.root = root_folder(root)
        self.analyses, self.run = list(analyses), run
        self.training: str | None = None  # id of the training, once it has begun
        self.watchers: list[Watcher] = [LongMeasuring(), *watchers]
        self.ranks: OneProcess | Ranks = OneProcess()
        self._store = Store(self.file, [])
        # (run, analysis) -> the settings (options and data, as a hash) whose curves have no hash in their names.
        self._plain: dict[tuple[str, str], str] = {}

    @property
    def file(self) -> Path:
        return self.root / "measurements.jsonl"

    def check(self, model: nn.Module) -> None:
        """Check before the first step that the model can be measured.

        Raises:
            InputError: if the model's family is unknown, data are missing, or options do not fit the model.
        """
        view = LayeredModel(model)
        # Restore the random state, because a check may read a data loader that shuffles and so draws random numbers.
        with undisturbed.restore_random_state():
            for analysis in self.analyses:
                analysis.check(view)
        if self.null is not None:
            check_null(self.null, self.analyses, model)

    def begin(self, steps: Steps) -> None:
        """Read the measurements that the run's folder already holds, and log which analyses will run."""
        lineage, measurements = self.ranks.from_first(self._read_root)
        self.run, self.training = self.run or lineage.run, lineage.training
        self._store = Store(self.file, measurements, lineage=lineage._replace(run=self.run))
        self._plain = plain_settings(measurements)
        if self.analyses:
            names, schedule = ", ".join(each.name for each in self.analyses), str(steps).strip("[{}]").replace("'", "")
            rank_zero_info(f"measures {names} at the first step, the last and {schedule}, into {self.root}")

    def _read_root(self) -> tuple[Lineage, list[Measurement]]:
        lineage: Any = records.lineage_in(self.root)
        measurements = records.read(self.file)
        warn_of_other_versions(measurements, self.run or lineage.run)
        return lineage, measurements

    def measure(
        self,
        model: nn.Module,
        step: int,
        tokens: int | None,
        *,
        provenance: dict[str, Any] | None = None,
        loggers: Sequence[Any] = (),
        is_first: bool = False,
    ) -> None:
        """Run the analyses that have no measurement of this step yet. Every rank must call this.

        Raises:
            InputError: at the first step (`is_first`), if options or data of an analysis do not fit the model. At other
                steps the measurement records the error.
        """
        refusals: list[str] = []

        def on_start(visit: Visit, analysis: Analysis) -> None:
            for watcher in self.watchers:
                watcher.measuring(step, analysis.name)

        if not is_first and (reason := self.ranks.from_first(functools.partial(_refusal, model))) is not None:
            self.ranks.from_first(functools.partial(self.fail, step, tokens, reason, loggers=loggers))
            return
        # All ranks use the hash of the first one, so that they agree on which measurements exist already.
        fingerprint = self.ranks.from_first(functools.partial(weights_hash, model))
        opened = functools.partial(contextlib.nullcontext, Opened(model, fingerprint, provenance or {}))
        visit = Visit(run=str(self.run), step=step, tokens=tokens, analyses=self.analyses, opened=opened)
        for measurement in measure_unless_done([visit], self._store, ranks=self.ranks, on_start=on_start):
            self.publish(measurement, loggers)
            kind, _, sentence = (measurement.error or "").partition(": ")
            if kind == InputError.__name__:
                refusals.append(sentence)
        self._measured.add(step)
        self.log_row()
        if is_first:
            self.ranks.from_first(functools.partial(_refuse, refusals))

    def measure_null(self, model: nn.Module, step: int, tokens: int | None, *, loggers: Sequence[Any] = ()) -> None:
        """Measure the null of the run on its last model, and log its values at the first and the last measured step.

        Every rank must call this. If the null cannot be measured, a warning is logged.
        """
        if self.null is None or not self.analyses:
            return
        rank_zero_info(f"measures the null of the run ({self.null})")
        fingerprint = self.ranks.from_first(functools.partial(weights_hash, model))
        about: dict[str, Any] = {"run": str(self.run), "step": step, "tokens": tokens, "ranks": self.ranks}
        try:
            measure_null(self.null, Opened(model, fingerprint), self.analyses, self.root, **about)
        except Exception as error:  # a null that cannot be measured must not end the training
            if self.ranks.size > 1:  # but other ranks may wait for this one
                raise
            logger.warning("the null is not measured: %s", first_line(error))
            return
        values = null_curves_of(records.read_nulls(self.root), self._plain, self.scalars)
        for at in {min(self._measured, default=step), step} if values and self.ranks.rank == 0 else ():
            self._write(at, values, loggers)

    def fail(self, step: int, tokens: int | None, reason: str, *, loggers: Sequence[Any] = ()) -> None:
        """Record for every analysis the reason why it could not run at a step."""
        for analysis in self.analyses:
            failed = Measurement(
                run=str(self.run),
                step=step,
                tokens=tokens,
                analysis=analysis.name,
                records=[],
                seconds=0.0,
                error=reason,
                provenance={"config_hash": analysis.config_hash(), "data_hash": analysis.data_hash()},
            )
            self._store.add(failed)
            self.publish(failed, loggers)

    def publish(self, measurement: Measurement, loggers: Sequence[Any]) -> None:
        """Pass a measurement to the watchers; unless it failed, add it to the row of its step for the loggers."""
        if measurement.error is not None:
            logger.warning("%s failed at step %s: %s", measurement.analysis, measurement.step, measurement.error)
            self._failed |= {measurement.step or 0}
        else:
            self._row.append(measurement)
        self._loggers = tuple(loggers)
        for watcher in self.watchers:
            watcher.measured(measurement)

    def log_row(self) -> None:
        """Write the measurements of a step to the loggers as one row.

        The row is logged at the step at which the loggers log the loss of the measured weights.
        """
        measured, self._row = self._row, []
        if not measured or (step := measured[0].step) is None:
            return
        curves = curves_of(measured, self._plain, self.scalars)
        row: dict[str, Any] = {name: record.value for name, record in curves.items()}
        tokens = next((each.tokens for each in measured if each.tokens is not None), None)
        row |= {} if tokens is None else {TOKENS: tokens}
        self._write(step, row, self._loggers, with_maps=are_maps_due(len(self._measured)))

    def _write(self, step: int, row: dict[str, Any], loggers: Sequence[Any], *, with_maps: bool = False) -> None:
        log_step = self.log_steps.get(step, step)
        row = row | ({} if log_step == step else {STEP: step})
        # Leave out loggers that are also watchers: they receive the measurements themselves.
        for destination in [each for each in loggers if not hasattr(type(each), "measured")]:
            try:
                writer = self._writer_of(destination)
                if isinstance(writer, WandbRun):
                    writer.row(log_step, row | (layer_maps(self.root) if with_maps else {}))
                elif writer is not None:
                    writer.log_metrics(dict(row), step=log_step)
            except Exception as error:  # a failing logger must not end the training
                logger.warning("%s: step %s is not logged: %s", type(destination).__name__, step, first_line(error))

    def join(self, log_step: int) -> None:
        """Merge pending W&B rows into the row that the user's loggers write next, at `log_step`."""
        self._call_wandb(lambda run: run.join(log_step))

    def _call_wandb(self, call: Callable[[WandbRun], None]) -> None:
        for writer in self._writers.values():
            if isinstance(writer, WandbRun):
                try:
                    call(writer)
                except Exception as error:  # a failing logger must not end the training
                    logger.warning("W&B: measurements are not logged: %s", first_line(error))

    def log_summary(self, scheduled: Iterable[int]) -> None:
        """Log how many scheduled steps were measured, which are missing, and the command that plots the results."""
        due = {*scheduled}
        missing = sorted(due - (self._measured - self._failed))
        rest = f", not {', '.join(map(str, missing[:5]))}{', ...' if len(missing) > 5 else ''}" if missing else ""
        rank_zero_info(
            f"measured {len(due) - len(missing)} of {len(due)} scheduled steps{rest}: "
            f"lit-layers report {shlex.quote(str(self.root))} draws them"
        )

    def finish(self, *, whole: bool = True) -> None:
        """Write the last row, and all queued rows of W&B runs, to the loggers.

        Args:
            whole: whether the training succeeded. Only then does a W&B run get the table of all measurements.
        """
        self.log_row()
        self._call_wandb((lambda run: run.end(self.root)) if whole else WandbRun.flush)
        self._writers = {}

    def _writer_of(self, destination: Any) -> Any:
        """Return the object that writes to a logger, or None if the logger is not supported or fails.

        Each logger is tried only once.
        """
        if id(destination) not in self._writers:
            self._writers[id(destination)] = None
            writer = writer_of(destination)
            if isinstance(writer, WandbRun):
                configs = {analysis.name: analysis.config() for analysis in self.analyses}
                writer.begin({"root": str(self.root), "analyses": configs})
            self._writers[id(destination)] = writer
        return self._writers[id(destination)]


def _refusal(model: nn.Module) -> str | None:
    """Return why the model is not a sequence of blocks, or None if it is one.

    The answer can change during training: a learned skip connection may have weight 0 only at the first step.
    """
    try:
        LayeredModel(model)
    except InputError as refusal:
        return first_sentence(refusal)


def _refuse(refusals: Sequence[str]) -> None:
    if refusals:
        raise InputError(refusals[0])


class Watch:
    """A watch over your own training loop that measures the model at each scheduled step.

        with lit_layers.watch(model, [Lens(batches=text)], steps={"every": 100}, root="checkpoints/mine") as watched:
            for batch in loader:
                ...
                optimizer.step()
                watched.step()

    Training gives the same bits with and without a watch: weights, gradients and random generators do not change. A
    `with` block closes the watch. After an exception, the current step is not measured.

    Args:
        model: the network, of a known family. Wrappers of torch.compile and DistributedDataParallel are removed. Under
            torch.distributed, every process must make the same calls, and the processes divide the work. They must
            make the first call within 20 s of each other.
        analyses: the analyses to run; their names must be unique. Their `batches` may be a DataLoader, a data set or a
            list of batches.
        steps: the schedule, e.g. `pythia` or `{"every": 500}`. Step 0 and the last step are always included.
        root: the run's folder, for `measurements.jsonl` and the files that `lit-layers report` writes.
        if_exists: what to do if root already holds a run. "refuse" raises an error. "overwrite" removes the files that
            runs have written there. "resume" continues the run in root, which must have measured or saved the same
            weights at `first_step`. The run's measurements after `first_step` no longer appear in the curves.
        save: whether to save the model at each measured step as a Hugging Face folder, `root/step-000001000`.
        tokenizer: a local tokenizer folder whose files are copied into each saved folder.
        run: the run's name in the records. With None, it is the folder's name.
        tokens_per_step: tokens per optimizer step, from which the number of tokens up to each step is recorded.
        first_step: optimizer steps of the model before this call, if training continues.
        max_steps: the step at which training ends, if known; it is measured when it is reached.
        loggers: Lightning loggers, other objects with `log_metrics(values, step=...)`, or W&B runs. W&B runs also get
            pictures and a table.
        watchers: objects that are called when each analysis starts and ends.
        scalars: which numbers the loggers get as curves over steps, `plotted` or `all`, as `EmergenceCallback`
            explains.
        null: the kind of null to measure once, when the watch is closed, as `EmergenceCallback` explains.

    Raises:
        InputError: before the first step, if two analyses have the same name, the model's family is unknown, data are
            missing, or options do not fit the model. Also if root holds another run, is not writable, or another
            process writes there.
    """

    def __init__(
        self,
        model: nn.Module,
        analyses: Sequence[Analysis],
        *,
        steps: Steps,
        root: str | Path,
        if_exists: IfExists = "refuse",
        save: bool = False,
        tokenizer: str | Path | None = None,
        run: str | None = None,
        tokens_per_step: int | None = None,
        first_step: int = 0,
        max_steps: int | None = None,
        loggers: Sequence[MetricsLogger] = (),
        watchers: Sequence[Watcher] = (),
        scalars: Scalars = "plotted",
        null: Null | None = None,
        _saved_by: str | None = None,
    ) -> None:
        for each in loggers:
            if not hasattr(each, "log_metrics") and writer_of(each) is None:
                raise InputError(f"loggers: expected loggers of Lightning or runs of W&B, got {each!r}")
        self.measurer = StepMeasurer(analyses, root, run=run, watchers=watchers, scalars=scalars, null=null)
        self.model, self.schedule = plain_model(model), Schedule(steps)
        self.save, self.tokenizer, self.tokens_per_step = save, tokenizer, tokens_per_step
        self.loggers, self.now, self.paused_seconds = list(loggers), first_step, 0.0
        self._first, self._last, self._final, self._closed = first_step, -1, max_steps, False
        if is_sharded(self.model):
            raise InputError(
                "model: expected every process to hold all weights, got sharded ones: train with EmergenceCallback, or "
                "measure saved checkpoints by `lit-layers analyze`"
            )
        several = distributed.is_available() and distributed.is_initialized()
        self.measurer.ranks = ranks_of(distributed.get_world_size() if several else 1, timeout=START_TIMEOUT)
        self.measurer.ranks.from_first(functools.partial(self.measurer.check, self.model))
        self._key, self._lock = (os.getpid(), self.measurer.root.resolve()), contextlib.ExitStack()
        try:
            self.measurer.ranks.from_first(functools.partial(self._claim, if_exists, _saved_by))
            self.measurer.begin(steps)
            self._act(due=first_step in self.schedule)
        except BaseException:
            self.give_up()
            raise

    def _claim(self, if_exists: IfExists, saved_by: str | None) -> None:
        """Lock the run's folder, and start or resume a run in it.

        Several `Watch` objects with the same model and folder share one run if none of them has counted a step yet.
        """
        others = self._others()
        if not run_lock.is_held(self._key[1]):
            self._lock.enter_context(run_lock.writing(self._key[1]))
        begins = not others or any((each.model, each.now) != (self.model, each._first) for each in others)
        if begins:
            weights = functools.partial(weights_hash, self.model)
            begin_training(self.measurer.root, if_exists, self.measurer.run, self.now, weights, saved_by)
        _open.add(self)
        for each in others if begins else ():  # close the `Watch` objects that a failed training left open
            each.give_up()

    def _others(self) -> "list[Watch]":
        return [each for each in _open if each is not self and each._key == self._key]

    def step(self, number: int | None = None) -> None:
        """Count an optimizer step, and measure the model if the step is scheduled.

        Args:
            number: optimizer steps made so far. With None, it is one more than before. If `number` skips a scheduled
                step, the model is measured at `number`.

        Raises:
            InputError: if `number` is below the previous one, whose measurements it would replace, or the watch is
                closed.
        """
        if number is not None:
            refuse_outside("", {"step": Range(self.now, MANY, whole=True)}, {"step": number})
        if self._closed:
            raise InputError("step: this watch is closed: make another one to go on")
        before, self.now = self.now, self.now + 1 if number is None else int(number)
        self._act(due=self.schedule.is_due(self.now, before) or self.now == self._final)

    def close(self, *, is_last: bool = True) -> None:
        """Measure the last step unless it was measured, and unlock the run's folder.

        Args:
            is_last: whether the model still has the weights of the last step. If not, it is not measured.
        """
        try:
            self._act(due=is_last)
            if is_last and not self._closed:
                self.measurer.measure_null(self.model, self.now, self._tokens, loggers=self.loggers)
            self.measurer.finish()
            if self.measurer.analyses and not self._closed:
                self.measurer.log_summary(self.schedule.steps_to(self.now, self._first))
        except BaseException:
            self.give_up()
            raise
        self._release()

    @property
    def is_open(self) -> bool:
        return self in _open

    def give_up(self) -> None:
        """Unlock the run's folder after an exception, and measure nothing more."""
        self.measurer.finish(whole=False)
        self._release()

    def _release(self) -> None:
        _open.discard(self)
        self._closed = True
        for other in self._others()[:1]:  # pass the folder's lock to another `Watch` of this folder, if one is open
            other._lock.push(self._lock.pop_all())
        self._lock.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if kind is None:
            self.close()
        else:
            self.give_up()

    @property
    def _tokens(self) -> int | None:
        return None if self.tokens_per_step is None else self.now * self.tokens_per_step

    def _act(self, due: bool) -> None:
        if not due or self.now == self._last:
            return
        self._last, started = self.now, time.perf_counter()
        if self.save:
            write = functools.partial(save_step, self.model, self.measurer.root, self.now, self.tokenizer)
            self.measurer.ranks.from_first(write)
        is_first = self.now == self._first
        self.measurer.measure(self.model, self.now, self._tokens, loggers=self.loggers, is_first=is_first)
        self.paused_seconds += time.perf_counter() - started


# The open `Watch` objects of this process. The references are weak, because a notebook cell that runs again drops its
# old `Watch` without closing it.
_open = weakref.WeakSet[Watch]()
watch = Watch  # the public name
