"""A mean over batches of different sizes, on all ranks together."""

from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric


class WeightedMean(Metric):
    """Sum of weight x value over sum of weights, in float64; not a number where one of the values is none.

    torchmetrics' own mean leaves such values out or, told not to, the weights.
    """

    full_state_update = False

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.set_dtype(torch.float64)
        self.add_state("total", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("weight", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, value: Tensor, weight: float) -> None:
        """Adds one batch's mean."""
        self.total = self.total + weight * value.detach().double()
        self.weight = self.weight + weight

    def compute(self) -> Tensor:
        """The mean of all batches so far."""
        return self.total / self.weight
