"""Critical sharpness in training: how much larger a step could have been before it raises the loss."""

import logging
import math
import time
from collections.abc import Mapping
from typing import Any

import lightning as L
import torch
from torch import Tensor

from lit_layers.errors import InputError
from lit_layers.functional.sharpness import critical_step
from lit_layers.measuring.undisturbed import kept_random_state
from lit_layers.schedule import Schedule, Steps
from lit_layers.training.checkpoints import axis_step
from lit_layers.training.run_log import RunLog
from lit_layers.training.sharding import is_sharded

logger = logging.getLogger(__name__)


class CriticalSharpness(L.Callback):
    """Logs at the steps of a schedule how far along the update just taken the loss would not have risen.

    `train/critical_step`: in units of that update; below 1 the step itself raised the loss of its batch.
    `train/critical_sharpness`: 2 / (critical_step x learning rate), which gradient descent on a quadratic has as its
    largest curvature along the update. Of the step's last micro-batch on the first rank, without dropout; at most nine
    forward passes, and a copy of the weights before and after the step while it lasts. A step for which neither is
    found between 4^-4 and 4^4 updates, or that changed no weight, has no value. Training goes on bit for bit as without
    it: weights, random state and modes are put back. Source: `lit_layers.functional.critical_step`.

    Args:
        steps: the schedule, e.g. `{every: 100}`, by the number of the step that the update makes.

    Raises:
        InputError: before the first step, for a model that is sharded over ranks.
    """

    def __init__(self, steps: Steps) -> None:
        self.schedule = Schedule(steps)
        self.paused_seconds = 0.0  # what training waited for this callback
        self._before: list[Tensor] = []
        self._rate = 0.0

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if is_sharded(pl_module):
            raise InputError(
                "CriticalSharpness: the weights are sharded over ranks, and it moves whole ones: leave it out"
            )

    def on_before_optimizer_step(
        self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        if trainer.is_global_zero and axis_step(trainer) + 1 in self.schedule:
            started = time.perf_counter()
            self._before = [parameter.detach().clone() for parameter in _trained(pl_module)]
            self._rate = optimizer.param_groups[0]["lr"]
            self.paused_seconds += time.perf_counter() - started

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if not self._before or axis_step(trainer) not in self.schedule:
            return
        started = time.perf_counter()
        before, self._before = self._before, []
        scalars = self._measured(pl_module, before, batch, batch_idx)
        self.paused_seconds += time.perf_counter() - started
        if scalars:
            self._log(trainer, axis_step(trainer), scalars)

    def _measured(
        self, pl_module: L.LightningModule, before: list[Tensor], batch: Any, batch_idx: int
    ) -> dict[str, float]:
        weights = _trained(pl_module)
        after = [parameter.detach().clone() for parameter in weights]
        if not self._rate or all(torch.equal(*pair) for pair in zip(before, after, strict=True)):
            return {}
        modes = {module: module.training for module in pl_module.modules()}
        try:
            pl_module.eval()
            critical = critical_step(lambda step: _loss(pl_module, weights, before, after, step, batch, batch_idx))
        except ValueError as error:  # a training is not ended by what watches it
            logger.warning("critical sharpness: %s", error)
            return {}
        finally:
            for module, training in modes.items():
                module.training = training
            _put_(weights, after)
        if math.isnan(critical.step):
            logger.info("critical sharpness: no critical step between %g and %g updates", critical.low, critical.high)
            return {}
        sharpness = 2 / (critical.step * self._rate)
        return {"train/critical_step": critical.step, "train/critical_sharpness": sharpness}

    @staticmethod
    def _log(trainer: L.Trainer, step: int, scalars: dict[str, float]) -> None:
        logs = [each for each in trainer.callbacks if isinstance(each, RunLog)]  # pyright: ignore[reportAttributeAccessIssue]
        for log in logs:
            log.note(step, scalars)
        if not logs:
            for each in trainer.loggers:
                each.log_metrics(scalars, step=step)


def _trained(pl_module: L.LightningModule) -> list[torch.nn.Parameter]:
    return [parameter for parameter in pl_module.parameters() if parameter.requires_grad]


@torch.no_grad()
def _put_(weights: list[torch.nn.Parameter], values: list[Tensor]) -> None:
    for weight, value in zip(weights, values, strict=True):
        weight.copy_(value)


def _loss(
    pl_module: L.LightningModule,
    weights: list[torch.nn.Parameter],
    before: list[Tensor],
    after: list[Tensor],
    step: float,
    batch: Any,
    batch_idx: int,
) -> float:
    """The loss of a batch after so much of the update; each begins with the same random state."""
    with torch.no_grad(), kept_random_state(), torch.autocast(pl_module.device.type, enabled=False):
        for weight, first, last in zip(weights, before, after, strict=True):
            weight.copy_(torch.lerp(first, last, step))
        output = pl_module.training_step(batch, batch_idx)
    loss: Any = output["loss"] if isinstance(output, Mapping) else output
    return float(loss)
