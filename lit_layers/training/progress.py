"""A progress bar over optimizer steps that also says what is being measured."""

import time
from typing import Any

import lightning as L
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn

from lit_layers.records import Measurement
from lit_layers.training.run_log import RunLog


class StepProgress(L.Callback):
    """A live bar in a terminal; elsewhere (a log file, CI) a line now and then.

    Args:
        run_log: where the last known loss and speed are read: the bar itself never waits for the device.
        line_every: seconds between two lines where there is no terminal.
    """

    def __init__(self, run_log: RunLog, *, line_every: float = 20.0, console: Console | None = None) -> None:
        self.run_log, self.line_every = run_log, line_every
        self.console = console or Console()
        self._bar: Progress | None = None
        self._last_line = 0.0
        self._now = ""

    def measuring(self, step: int, analysis: str) -> None:
        self._now = f"measuring {analysis} at step {step}"
        if self._bar is not None:
            self._bar.update(self._task, completed=step, description=self._status(), refresh=True)

    def measured(self, measurement: Measurement) -> None:
        self._now = ""
        if measurement.error is not None:
            self.console.print(
                f"{measurement.analysis} failed at step {measurement.step}: {measurement.error}",
                style="red",
                highlight=False,
                markup=False,  # an error's own brackets are text
            )
        elif not self.console.is_terminal:
            self.console.print(
                f"step {measurement.step}: {measurement.analysis} measured in {measurement.seconds:.1f} s",
                highlight=False,
                markup=False,
            )

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if not trainer.is_global_zero or not self.console.is_terminal:
            return
        self._bar = Progress(
            SpinnerColumn(),
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.description}", markup=False),
            console=self.console,
            transient=True,
        )
        self._task = self._bar.add_task("", total=trainer.max_steps if trainer.max_steps > 0 else None)
        self._bar.start()

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        if self._bar is not None:
            self._bar.update(self._task, completed=trainer.global_step, description=self._status())
        elif trainer.is_global_zero and time.monotonic() - self._last_line > self.line_every:
            self._last_line = time.monotonic()
            self.console.print(f"step {trainer.global_step}/{trainer.max_steps} {self._status()}", highlight=False)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._stop()

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        self._stop()

    def _stop(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def _status(self) -> str:
        shown = self.run_log.shown
        parts = [self._now]
        if "train/loss" in shown:
            parts.append(f"loss {shown['train/loss']:.3f}")
        if "validation/loss" in shown:
            parts.append(f"validation {shown['validation/loss']:.3f}")
        for unit in ("tokens", "images"):
            if (speed := shown.get(f"train/{unit}_per_second")) is not None:
                parts.append(f"{speed:,.0f} {unit}/s")
        if "train/mfu" in shown:
            parts.append(f"MFU {shown['train/mfu']:.1%}")
        return "  ".join(part for part in parts if part)
