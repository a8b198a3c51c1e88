"""What a training shows: how it begins, a bar or a line now and then, and what has changed when it ends."""

import contextlib
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning as L
import pandas as pd
from rich.console import Console

from lit_layers import records
from lit_layers.cli.console import Show, bar, show_table, verbosity
from lit_layers.identity import latest
from lit_layers.plots import change_table
from lit_layers.records import Measurement
from lit_layers.schema import run_facts
from lit_layers.training.checkpoints import Origin
from lit_layers.training.resuming import ResumePoint
from lit_layers.training.run_log import LONG, RunLog, TimeLeft

SHOWN = 28  # rows of the table of changes; the page has all of them
# Seconds between two drawings of the bar, and between two lines where there is no terminal.
REDRAWN, LINE = 0.1, 20.0


class StepProgress(L.Callback):
    """A live bar in a terminal; elsewhere (a log file, CI) a line now and then.

    Args:
        run_log: where the last known loss and speed are read: the bar itself never waits for the device.
    """

    def __init__(self, run_log: RunLog, *, console: Console | None = None) -> None:
        self.run_log = run_log
        self.console = console or Console()
        self._bar = contextlib.ExitStack()
        self._show: Show | None = None
        self._last_shown = 0.0
        self._now = ""
        self._time = TimeLeft()
        self._told_step: int | None = None

    def measuring(self, step: int, analysis: str) -> None:
        self._time.measuring(step, analysis)
        self._now = ", ".join(filter(None, [f"measuring {analysis} at step {step}", self._time.words()]))
        if self._show is None and (self._time.expected or 0.0) >= LONG and step != self._told_step:
            self._told_step = step
            self.console.print(self._now, highlight=False, markup=False)
        if self._show is not None:
            self._show(step, None, self._status())

    def measured(self, measurement: Measurement) -> None:
        self._time.measured(measurement)
        self._now = ""
        words: Any = {"highlight": False, "markup": False}  # an error's own brackets are text
        step, analysis = measurement.step, measurement.analysis
        if measurement.error is not None:
            self.console.print(f"{analysis} failed at step {step}: {measurement.error}", style="red", **words)
        elif self._show is None:
            self.console.print(f"step {step}: {analysis} measured in {measurement.seconds:.1f} s", **words)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.is_global_zero and self.console.is_terminal and verbosity() == 0:
            self._show = self._bar.enter_context(bar("", console=self.console, transient=True))
            self._show(0, trainer.max_steps if trainer.max_steps > 0 else None, "")

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        now = time.monotonic()
        if not trainer.is_global_zero or now - self._last_shown < (LINE if self._show is None else REDRAWN):
            return
        self._last_shown = now
        if self._show is not None:
            self._show(trainer.global_step, None, self._status())
        else:
            self.console.print(f"step {trainer.global_step}/{trainer.max_steps} {self._status()}", highlight=False)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._bar.close()
        self._show = None

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        self.on_train_end(trainer, pl_module)

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


def beginning(point: ResumePoint | None, origin: Origin, *, has_ended: bool) -> str | None:
    """What is said of a run that does not begin at its beginning, or has ended already."""
    if point is not None and has_ended:
        return f"trained up to step {point.step:,} already: the run in {point.state.parent.parent.parent} is kept"
    if point is not None:
        return f"resumed at step {point.step} from {point.state.parent}"
    if not origin.source:
        return None
    commit = f" (commit {origin.source['commit'][:12]})" if "commit" in origin.source else ""
    seen = "unknown" if origin.tokens is None else f"{origin.tokens:,}"
    place = f"step {origin.step:,}, tokens seen {seen}" if origin.step else "its step is unknown, the axis begins at 0"
    return f"begins with the weights of {origin.source['init_from']}{commit}: {place}; the optimizer starts afresh"


def show_results(root: Path) -> None:
    """Prints how far every metric came, the share of all the run's wall time by analysis, and failures."""
    measurements = latest(records.read(root / "measurements.jsonl"))
    if not measurements:
        return
    changes = change_table(records.frame([each for each in measurements if not records.is_suspect(each)]))
    rows = [_change(row) for row in changes.head(SHOWN).to_dict("records")]
    if len(changes) > SHOWN:
        rows.append({"metric": f"... and {len(changes) - SHOWN} more in the report"})
    show_table(rows, "From the first to the last checkpoint")
    spent: dict[str, float] = {}
    for measurement in measurements:
        spent[measurement.analysis] = spent.get(measurement.analysis, 0.0) + measurement.seconds
    facts, measuring = run_facts(root), sum(spent.values())
    waits = {"all analyses, as training waited": "analysis_seconds", "saving checkpoints": "checkpoint_seconds"}
    spent |= {name: facts[field] for name, field in waits.items() if field in facts}
    seconds = facts.get("seconds")  # unknown where others removed or changed what the run says of itself
    title = f"\nWall time {seconds:.0f} s, of which" if seconds else "\nWall time unknown, of which"
    rows = [{"": name, "seconds": f"{each:.1f}"} for name, each in spent.items()]
    if seconds and measuring > seconds:  # another process measured, or was killed before it wrote down its own time
        title, seconds = f"\nWall time {seconds:.0f} s, besides that of other processes", None
    show_table([row | {"share": f"{spent[row['']] / seconds:.1%}"} for row in rows] if seconds else rows, title)
    for measurement in measurements:
        if measurement.error is not None:
            print(f"failed: {measurement.analysis} at step {measurement.step}: {measurement.error}")


def _change(row: Mapping[Any, Any]) -> dict[str, str]:
    layer = "" if pd.isna(row["layer"]) else f"layer {int(row['layer'])}"
    name = " ".join(filter(None, [f"{row['analysis']}/{row['metric']}", row["variant"], layer]))
    values = {f"step {row['first_step']}": row["first"], f"step {row['last_step']}": row["last"]}
    texts = {place: "" if pd.isna(value) else f"{value:.3f}" for place, value in values.items()}
    return {"metric": name, **texts, "change": "" if pd.isna(row["change"]) else f"{row['change']:+.3f}"}
