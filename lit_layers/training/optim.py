"""The optimizer and learning-rate schedule of GPT-style pretraining."""

import math
from collections.abc import Callable
from typing import Any

import lightning as L
import torch
from torch import nn


def adamw(
    model: nn.Module,
    *,
    lr: float,
    weight_decay: float,
    betas: tuple[float, float],
    eps: float = 1e-8,
    fused: bool = True,
) -> torch.optim.AdamW:
    """Returns AdamW that decays matrices and embeddings, but neither biases nor norm weights.

    Source: Brown et al. 2020 (GPT-3), appendix B; the split by number of axes is nanoGPT's.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [parameter for parameter in trained if parameter.ndim >= 2], "weight_decay": weight_decay},
        {"params": [parameter for parameter in trained if parameter.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW([group for group in groups if group["params"]], lr=lr, betas=betas, eps=eps, fused=fused)


def may_fuse(trainer: L.Trainer) -> bool:
    """Returns whether the optimizer's step may be one kernel: not in `16-mixed`, where gradients are scaled.

    A fused step divides them by the scale itself, which is after they have been clipped and their norm was taken.
    """
    return trainer.scaler is None


def scheduled(optimizer: torch.optim.Optimizer, factor: Callable[[int], float]) -> dict[str, Any]:
    """Returns what Lightning wants of an optimizer whose learning rate is multiplied by `factor` of the step."""
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def warmup_linear(*, warmup_steps: int, steps: int) -> Callable[[int], float]:
    """Step -> factor of the peak learning rate: up on a straight line, then down on one, to zero after the last."""

    def factor(step: int) -> float:
        if step < warmup_steps:
            return (step + 1) / warmup_steps
        return max(0.0, (steps - step) / max(1, steps - warmup_steps))

    return factor


def warmup_cosine(*, warmup_steps: int, decay_steps: int, min_ratio: float) -> Callable[[int], float]:
    """Returns step -> factor of the peak learning rate: linear warm-up, then a cosine down to `min_ratio`.

    The first step already moves (factor 1 / warmup_steps); from `decay_steps` on the factor stays at `min_ratio`.
    """

    def factor(step: int) -> float:
        if step < warmup_steps:
            return (step + 1) / warmup_steps
        progress = min(1.0, (step - warmup_steps) / max(1, decay_steps - warmup_steps))
        return min_ratio + (1 - min_ratio) * 0.5 * (1 + math.cos(math.pi * progress))

    return factor
