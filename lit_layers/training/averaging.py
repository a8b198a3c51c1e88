"""The exponential moving average of the weights, kept beside the trained ones."""

import warnings
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import WeightAveraging
from torch import nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from lit_layers.errors import InputError
from lit_layers.training.sharding import are_sharded


class ExponentialAverage(WeightAveraging):
    """Lightning's averaging, except that the trained weights stay in their place.

    Lightning validates the average alone and leaves it in the model when training ends; the last step of the series
    would then hold other weights than all before it, and a resumed run would go on from them.

    Args:
        decay: share of the average that stays at each step; the first step's weights begin it.
    """

    def __init__(self, decay: float) -> None:
        super().__init__(multi_avg_fn=get_ema_multi_avg_fn(decay))
        self.decay = decay

    @property
    def model(self) -> nn.Module:
        """The averaged network."""
        averaged: Any = self._average_model
        return averaged.module.model

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if are_sharded(trainer.strategy):
            raise InputError("model.ema_decay: expected null with sharded weights, which cannot be averaged yet")
        self._device = trainer.strategy.root_device  # where the weights will be, not where they are now
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="You're using the WeightAveraging callback")  # on sharding
            super().setup(trainer, pl_module, stage)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Leaves the trained weights."""

    def on_validation_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Leaves the trained weights: the module validates both."""

    def on_validation_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Leaves the trained weights."""
