"""Train a tiny vision transformer on the digits for seconds, with the real data module."""

from pathlib import Path
from typing import Any

import lightning as L

from lit_layers.training import LitImageClassifier, LitImageData
from lit_layers.training.trainer import StepSeed

CONFIG = {"embed_dim": 16, "depth": 2, "num_heads": 2}


def module(**options: Any) -> LitImageClassifier:
    """Return a module with stochastic depth, so that an extra random draw changes the result of a run."""
    settings: dict[str, Any] = {"patch_size": 4, "drop_path_rate": 0.3, "lr": 5e-3, "warmup_steps": 2, **options}
    return LitImageClassifier("vit_tiny_patch16_224", CONFIG, **settings)


def data(**options: Any) -> LitImageData:
    return LitImageData("digits", **{"global_batch_size": 8, "num_validation_images": 40, **options})


def trainer(root: Path, *callbacks: L.Callback, steps: int = 5, **options: Any) -> L.Trainer:
    settings: dict[str, Any] = {"limit_val_batches": 0, "devices": 1, **options}
    return L.Trainer(
        max_steps=steps,
        max_epochs=-1,
        accelerator=settings.pop("accelerator", "cpu"),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        num_sanity_val_steps=0,
        default_root_dir=root,
        callbacks=[StepSeed(0), *callbacks],
        **settings,
    )


def fit(
    root: Path,
    *callbacks: L.Callback,
    lit: LitImageClassifier | None = None,
    images: LitImageData | None = None,
    resume_from: Path | None = None,
    **options: Any,
) -> tuple[L.Trainer, LitImageClassifier]:
    """Train a new tiny model for a few steps, and return the trainer and the module."""
    lit, run = lit or module(), trainer(root, *callbacks, **options)
    run.fit(lit, datamodule=images or data(), ckpt_path=resume_from, weights_only=True)
    return run, lit
