"""The whole of a run's measurements in the W&B run that a user's own training logs to."""

import importlib.util
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lit_layers import records
from lit_layers.identity import plain_settings
from lit_layers.records import Measurement
from lit_layers.report.wandb_files import AXIS, Mirrored
from lit_layers.report.wandb_mirror import WandbMirror

logger = logging.getLogger(__name__)


def run_behind(destination: Any) -> Any:
    """The W&B run that a logger of Lightning writes to, or that the destination is; None of others, and on other ranks
    than the first.
    """
    if importlib.util.find_spec("wandb") is None:
        return None
    import wandb

    is_logger = any(kind.__name__ == "WandbLogger" for kind in type(destination).__mro__)
    run = destination.experiment if is_logger else destination
    return run if isinstance(run, wandb.Run) else None


def current_runs() -> list[Any]:
    """The run that `wandb.init` has started in this process, or none."""
    if importlib.util.find_spec("wandb") is None:
        return []
    import wandb

    return [] if wandb.run is None else [wandb.run]


class OwnWandbRun(WandbMirror):
    """Writes into a run that is somebody else's: curves as they are measured, with tokens and heat maps; at the end the
    table of all numbers, when each metric emerges, and layers by steps as pictures; what is measured, in its config.

    Rows have the run's own numbers, beside the losses; `trainer/global_step` is the axis of every curve, and the run's
    summary keeps the best value of a score. What W&B does not take is left out, with a warning.
    """

    def __init__(self, run: Any, root: Path, analyses: Mapping[str, Any]) -> None:
        super().__init__()
        import wandb

        self._wandb, self._errors, self._run, self.root = wandb, (Exception,), run, root
        self._sent, self._draws = Mirrored(), importlib.util.find_spec("vl_convert") is not None
        self._plain = plain_settings(records.read(root / "measurements.jsonl"))
        run.config.update({"lit_layers": {"root": str(root), "analyses": dict(analyses)}}, allow_val_change=True)

    def log(self, measurement: Measurement, values: Mapping[str, float]) -> None:
        """One measurement: its curves, the tokens, its heat maps."""
        if self._run is None or measurement.error is not None:
            return
        row: dict[str, Any] = {**values, **self._heat_maps(measurement, frozenset())}
        if measurement.tokens is not None:
            row["tokens"] = measurement.tokens
        self._table_is_due = True
        self._send(measurement.step, row)

    def finish(self, exit_code: int = 0) -> None:
        """The table and the pictures of all steps; the run is not closed."""
        if self._run is not None:
            self._log_table()

    def _send(self, step: int | None, row: dict[str, Any]) -> None:
        try:
            for name in row:
                self._define(name)
            self._run.log(row if step is None else {**row, AXIS: step})
        except Exception as error:  # whatever W&B's service has: no training ends for it
            logger.warning("W&B: %s is not logged at step %s: %s", ", ".join([*row][:3]), step, error)

    def _stop(self) -> None:
        self._run = None
