"""The scalars of training: one row per step on disk, mirrored to W&B."""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor

from lit_layers.records import Measurement, ScalarLog
from lit_layers.training.losses import mean_of_step
from lit_layers.training.resuming import refuse_diverged_losses
from lit_layers.training.run_folder import Origin, axis_step, origin_of

# Attributes of a data module that state the amount of data per step, and the name of the speed curve for each.
_SPEEDS = {"tokens_per_step": "train/tokens_per_second", "images_per_step": "train/images_per_second"}
# Columns of every row. Values that a user logs under these names are dropped.
_RESERVED = {"step", "tokens", "epoch", "train/loss", "train/learning_rate"}


@dataclass(frozen=True)
class _Step:
    number: int
    loss: Tensor
    grad_norm: Tensor | None
    learning_rate: float


class RunLog(L.Callback, Logger):
    """A callback and logger that writes `root/metrics.jsonl`: loss and learning rate of every step.

    Rows also hold the gradient norm and the speed, if known. As a logger of the Trainer, this object adds the values
    that modules and callbacks log to the row of the current step. Losses stay on the device and are copied together
    every `log_every_n_steps`, so most steps do not wait for the device. The rows are written at the start of the next
    step, and mirrored to W&B with the measurements of their steps. Callbacks that come later in the Trainer's list may
    log values from their `on_train_start` on.
    """

    name = version = property(lambda self: "")
    save_dir = property(lambda self: str(self.file.parent))

    def __init__(self, root: str | Path, mirror: Any | None = None, *, resume: bool = False) -> None:
        self.file = Path(root) / "metrics.jsonl"
        self.mirror, self.resume = mirror, resume
        # A resumed run truncates the file to this length in bytes, which it had when the resume checkpoint was saved.
        self._offset = 0
        self.shown: dict[str, float] = {}  # the latest value of each scalar, for the progress bar
        self._pending: list[_Step] = []
        self._micro_losses: list[Tensor] = []
        self._now = 0  # number of the optimizer step whose row receives logged values
        self._extra: dict[int, dict[str, float]] = {}
        self._measurements: dict[int, list[Measurement]] = {}
        self._flush_due, self.paused_seconds = False, 0.0
        self._validating = self._validation_started = 0.0
        self._tokens_per_step: int | None = None
        self._per_step: dict[str, int] = {}  # name of a throughput -> tokens or images per step
        self._origin = Origin()
        self._scalars: ScalarLog | None = None
        self._rate = 0.0

    def measuring(self, step: int, analysis: str) -> None:
        """Do nothing when an analysis starts: only its measurement is logged."""

    def measured(self, measurement: Measurement) -> None:
        self._measurements.setdefault(measurement.step or 0, []).append(measurement)

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Add values to the row of the current step, and ignore Lightning's own step count."""
        values = {name: float(value) for name, value in metrics.items() if name not in _RESERVED}
        self._extra.setdefault(self._now, {}).update(values)
        self.shown.update(values)

    def log_hyperparams(self, *_: Any, **__: Any) -> None:
        """Ignore the options, because `config.yaml` holds them."""

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        data = getattr(trainer, "datamodule", None)
        self._tokens_per_step = getattr(data, "tokens_per_step", None)
        counts = {speed: getattr(data, count, None) for count, speed in _SPEEDS.items()}
        self._per_step = {speed: count for speed, count in counts.items() if count is not None}
        self._origin = origin_of(trainer)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._scalars = ScalarLog(self.file) if trainer.is_global_zero else None
        if self._scalars is not None and self.resume:
            self._scalars.truncate(self._offset)
        # Add this logger to the Trainer only now: if it were added in `setup`, Lightning's ModelCheckpoint would take
        # its folder from it.
        if self not in trainer.loggers:
            trainer.loggers = [*trainer.loggers, self]
        self._now = axis_step(trainer)
        self._window = self._progress(trainer)

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if self._flush_due:
            # Do not wait for the disk: a resumed run drops the rows after its checkpoint, so it is enough that
            # `on_save_checkpoint` waits.
            self._flush(trainer, pl_module, durably=False)
        self._now = axis_step(trainer) + 1

    def on_before_optimizer_step(
        self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        # Read the learning rate before the step: after it, the scheduler has already set the rate of the next step.
        self._rate = optimizer.param_groups[0]["lr"]

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        # With manual optimization a module may return no loss.
        if outputs.get("loss") is not None:
            self._micro_losses.append(outputs["loss"].detach())
        if trainer.fit_loop._should_accumulate():
            return
        self._now = axis_step(trainer)
        if self._micro_losses:
            loss = mean_of_step(self._micro_losses, trainer.accumulate_grad_batches)
            self._micro_losses = []
            self._pending.append(_Step(self._now, loss, getattr(pl_module, "grad_norm", None), self._rate))
        every: int = trainer.log_every_n_steps  # pyright: ignore[reportAttributeAccessIssue]
        if trainer.global_step % every == 0:
            for step in self._pending[-1:]:
                # `item` waits for the device. Only then does the clock below count all work of these steps.
                self.shown["train/loss"] = step.loss.item()
            self._close_window(trainer)
            self._flush_due = True

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        self._flush(trainer, pl_module)
        if self._scalars is not None:
            checkpoint["metrics_offset"] = self._scalars.offset

    def on_load_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        self._offset = checkpoint.get("metrics_offset", 0)

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._validation_started = time.perf_counter()

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._validating += time.perf_counter() - self._validation_started

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._flush(trainer, pl_module)

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        # SIGTERM ends all ranks at the same batch, so they can average their losses. After other exceptions the ranks
        # may be at different points and would hang in a collective. The last rows then hold this rank's losses.
        self._flush(trainer, pl_module, reduce=isinstance(exception, SIGTERMException) and not trainer.validating)

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        # Write the measurements of an unscheduled last step: `EmergenceCallback.on_train_end` makes them only after
        # this callback's `on_train_end`.
        if self._measurements or self._extra:
            self._flush(trainer, pl_module, reduce=False)

    def _progress(self, trainer: L.Trainer) -> tuple[int, float]:
        """Return the number of optimizer steps and a clock in seconds, whose differences give the training speed.

        The clock stops during validation, and while callbacks pause the training.
        """
        callbacks: list[Any] = trainer.callbacks  # pyright: ignore[reportAttributeAccessIssue]
        paused = self._validating + sum(getattr(callback, "paused_seconds", 0.0) for callback in callbacks)
        return trainer.global_step, time.perf_counter() - paused

    def _close_window(self, trainer: L.Trainer) -> None:
        (step, clock), self._window = self._window, self._progress(trainer)
        steps, seconds = self._window[0] - step, self._window[1] - clock
        if steps:
            self.log_metrics({name: steps * count / seconds for name, count in self._per_step.items()})

    def _flush(
        self, trainer: L.Trainer, pl_module: L.LightningModule, *, reduce: bool = True, durably: bool = True
    ) -> None:
        """Write every row up to the current step, with one transfer from the device for all rows.

        Rows go to the disk first and then to W&B (`mirror`), which may fail. If this call is interrupted, the next call
        writes the rows again. Readers of the file merge the rows of a step into one.

        Args:
            reduce: whether to average losses over ranks. If so, all ranks must call this.
            durably: whether to wait until the rows are on the disk.

        Raises:
            DivergedError: on all ranks, if a loss is not finite.
        """
        self._flush_due = False
        rows, later = self._rows(trainer, reduce), {step for step in self._extra if step > axis_step(trainer)}
        if self._scalars is not None:
            for number in sorted(rows):
                if rows[number]:
                    self._scalars.log(number, {**self._tokens(number), **rows[number]})
            self._scalars.close(durably=durably)
        measurements, self._measurements, self._pending = self._measurements, {}, []
        self._extra = {step: self._extra[step] for step in later}
        if self.mirror is not None and self._scalars is not None:
            started = time.perf_counter()
            for number in sorted(rows):
                tokens = self._tokens(number).get("tokens")
                self.mirror.log_step(number, tokens, rows[number], measurements.get(number, []))
            # Leave this time out of the training speed, because drawing pictures for W&B takes seconds.
            self.paused_seconds += time.perf_counter() - started
        if reduce:
            losses = {number: row["train/loss"] for number, row in rows.items() if "train/loss" in row}
            refuse_diverged_losses(trainer, pl_module, losses, self.file.parent)

    def _rows(self, trainer: L.Trainer, reduce: bool) -> dict[int, dict[str, float]]:
        rows: dict[int, dict[str, float]] = {step: {} for step in self._measurements}
        if self._pending:
            missing = torch.full_like(self._pending[0].loss, torch.nan)
            pairs = [(step.loss, missing if step.grad_norm is None else step.grad_norm) for step in self._pending]
            values = torch.stack([torch.stack(pair) for pair in pairs]).float()  # (steps, 2): loss and gradient norm
            if reduce:
                values = trainer.strategy.reduce(values, reduce_op="mean")
            for step, (loss, norm) in zip(self._pending, values.tolist(), strict=True):
                norms = {} if step.grad_norm is None else {"train/grad_norm": norm}
                rows[step.number] = {"train/loss": loss, "train/learning_rate": step.learning_rate, **norms}
        for number, values_of_step in self._extra.items():
            if number <= axis_step(trainer):  # keep the values of the current step until its row is complete
                rows.setdefault(number, {}).update(values_of_step)
        return rows

    def _tokens(self, step: int) -> dict[str, int]:
        tokens = self._origin.tokens_at(step, self._tokens_per_step)
        return {} if tokens is None else {"tokens": tokens}


LONG = 10.0  # seconds of measuring after which `LongMeasuring` logs, and between two of its messages


class LongMeasuring:
    """A watcher that logs the progress of measuring on slow steps.

    It logs the name of an analysis that starts at least ten seconds after the first analysis of the step, and at least
    ten seconds after the previous message. Only the first rank logs.
    """

    def __init__(self) -> None:
        self._step, self._logged = -1, 0.0

    def measuring(self, step: int, analysis: str) -> None:
        now = time.perf_counter()
        if step != self._step:
            self._step, self._logged = step, now
        elif now - self._logged >= LONG:
            self._logged = now
            rank_zero_info(f"measuring {analysis} at step {step}")

    def measured(self, measurement: Measurement) -> None:
        """Do nothing when an analysis ends: only the start of an analysis is logged."""
