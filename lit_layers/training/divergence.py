"""A run whose loss or weights are no numbers any more ends, and says so."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning as L
import torch

from lit_layers.training.checkpoint_io import saved_steps, step_folder


class DivergedError(RuntimeError):
    """Raised on all ranks at the same batch; the message is one sentence."""


def refuse_diverged_losses(
    trainer: L.Trainer, pl_module: L.LightningModule, losses: Mapping[int, float], root: Path
) -> None:
    """Called with losses by step that are on the host already, the same on all ranks: no step waits for this.

    Raises:
        DivergedError: naming the first step whose loss is none, and what is left from before.
    """
    step = next((step for step in sorted(losses) if not math.isfinite(losses[step])), None)
    if step is None:
        return
    if "16" in str(trainer.precision) and "bf16" not in str(trainer.precision) and _are_finite(trainer, pl_module):
        return  # the scaler leaves such a step out
    raise DivergedError(_sentence(f"the loss of step {step} is {losses[step]}", step, root))


def refuse_diverged_weights(trainer: L.Trainer, pl_module: L.LightningModule, step: int, root: Path) -> None:
    """Called by all ranks before weights are saved to go on from.

    Raises:
        DivergedError: where one of them is no number.
    """
    if not _are_finite(trainer, pl_module):
        raise DivergedError(_sentence(f"weights are not finite after step {step}", step, root))


def _are_finite(trainer: L.Trainer, pl_module: L.LightningModule) -> bool:
    local: list[Any] = [getattr(p, "to_local", lambda p=p: p)() for p in pl_module.parameters()]
    finite = torch.stack([weights.detach().isfinite().all() for weights in local]).all().float()
    return bool(trainer.strategy.reduce(finite, reduce_op="min"))


def _sentence(what: str, step: int, root: Path) -> str:
    # That the weights after a step are numbers is known from the loss of the next one.
    series = [step_folder(root, saved) for saved in saved_steps(root) if saved + 1 < step][-1:]
    resume = [step_folder(root / "resume", saved) for saved in saved_steps(root / "resume")][-1:]
    healthy = " and ".join(map(str, series + resume)) or "none"
    begin = f", in another root also with --model.init_from {series[0]}" if series else ""
    return (
        f"diverged: {what}; last healthy checkpoints: {healthy}; begin anew with a lower model.lr, a longer "
        f"model.warmup_steps or trainer.gradient_clip_val{begin}"
    )
