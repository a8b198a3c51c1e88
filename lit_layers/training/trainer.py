"""The Trainer of a run: its defaults and plugins, the random seeds, and the samples of each step."""

import hashlib
import itertools
import logging
import os
import random
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import lightning as L
import numpy as np
import torch
from lightning.pytorch.callbacks import BatchSizeFinder, GradientAccumulationScheduler, StochasticWeightAveraging
from lightning.pytorch.plugins.environments import SLURMEnvironment
from torch.utils.data import Sampler

from lit_layers.errors import InputError
from lit_layers.schema import (
    BATCH,
    COUNT,
    COUNT_OR_NONE,
    LEARNING_RATE,
    MANY,
    SEED,
    SHARE,
    SHARE_BELOW_1,
    WEIGHT_DECAY,
    WORKERS,
    Range,
)

# Allowed values of options by name, for all modules, data modules and fine-tuning recipes.
RANGES = {
    **dict.fromkeys(("num_tokens", "decay_steps", "patch_size", "num_epochs", "max_steps"), COUNT),
    **dict.fromkeys(("limit", "num_train", "num_validation", "num_repeats"), COUNT),
    **dict.fromkeys(("num_validation_sequences", "num_validation_images"), COUNT),
    **dict.fromkeys(("global_batch_size", "validation_batch_size", "batch_size"), BATCH),
    **dict.fromkeys(("lr", "learning_rate", "frozen_learning_rate"), LEARNING_RATE),
    **dict.fromkeys(("seed", "init_seed"), SEED),
    **dict.fromkeys(("min_lr_ratio", "erasing"), SHARE),
    **dict.fromkeys(("drop_path_rate", "label_smoothing", "betas"), SHARE_BELOW_1),
    **dict.fromkeys(("mixup", "cutmix"), Range(0, 1000)),
    "pad_vocab_to": Range(1, 2**16, whole=True),
    "image_size": Range(1, 10_000, whole=True),
    "crop_padding": Range(0, 10_000, whole=True),
    "weight_decay": WEIGHT_DECAY,
    "warmup_steps": COUNT_OR_NONE,
    "gradient_clip": Range(0, MANY, above=True),
    "num_workers": WORKERS,
}

# Trainer options that a recipe may override. Lightning's own logger, progress bar and checkpoints are off, because this
# package replaces them.
DEFAULTS: dict[str, Any] = {
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "use_distributed_sampler": False,
    "num_sanity_val_steps": 0,
    "max_epochs": -1,
    # Require no complete epoch, because endless data never complete one. Lightning's default is 1 if a recipe sets
    # `min_steps`.
    "min_epochs": 0,
    "check_val_every_n_epoch": None,
    "log_every_n_steps": 10,
}


def new_trainer(**options: Any) -> L.Trainer:
    """Return a Trainer with the defaults of `lit-layers fit`, and hide Lightning's hints."""
    quieten()
    return L.Trainer(**{**DEFAULTS, **options})


def quieten() -> None:
    """Hide Lightning's hints about choices that a recipe already makes."""
    for name in ("lightning.pytorch.utilities.rank_zero", "lightning.fabric.utilities.seed"):
        logging.getLogger(name).setLevel(logging.WARNING)
    noise = (
        ".*treespec, LeafSpec",
        "The '.*_dataloader' does not have many workers",
        "You defined a `validation_step`",
        # Hide the recommendation to log with `sync_dist`: the metric is already reduced over ranks.
        "It is recommended to use `self.log",
        "Be aware that when using `ckpt_path`, callbacks",
    )
    for message in noise:
        warnings.filterwarnings("ignore", message=message)


def best_precision(accelerator: str) -> str:
    """Return the default precision: bf16-mixed on a GPU that supports it natively, otherwise 32-true.

    On a GPU, the function also lets float32 matrix products use TF32.
    """
    if accelerator in ("auto", "gpu", "cuda") and torch.cuda.is_available():
        torch.set_float32_matmul_precision("high")
        return "bf16-mixed" if torch.cuda.is_bf16_supported(including_emulation=False) else "32-true"
    return "32-true"


def is_first_rank() -> bool:
    """Return whether this process will be rank 0, according to the launcher's environment variables."""
    if "RANK" in os.environ:
        return int(os.environ["RANK"]) == 0
    names = ("NODE_RANK", "SLURM_PROCID", "LOCAL_RANK", "JSM_NAMESPACE_RANK")
    return all(int(os.environ.get(name) or 0) == 0 for name in names)


def cluster_plugins(given: Any) -> Any:
    """Return the Trainer's plugins. Under SLURM, add a SLURM environment without automatic requeueing.

    Lightning would requeue a job with its own checkpoint, which would override the checkpoint to resume from. Instead,
    the job script requeues the job on exit code 143.

    Raises:
        InputError: if Lightning cannot use the options of the job.
    """
    plugins = list(given) if isinstance(given, list | tuple) else [] if given is None else [given]
    if not SLURMEnvironment.detect() or any(isinstance(each, SLURMEnvironment) for each in plugins):
        return given
    try:
        return [*plugins, SLURMEnvironment(auto_requeue=False)]
    # Pass on Lightning's message, which explains which options of the job do not fit.
    except RuntimeError as error:
        raise InputError(f"SLURM: {' '.join(str(error).split())}") from error


def refuse_another_order(trainer: Any, *, also: Sequence[type] = ()) -> None:
    """Refuse Trainer options that would change the samples of a step.

    Which samples a step gets depends only on the number of the step, because the data are endless. Only the option
    `limit_train_batches` divides them into epochs, and each epoch continues where the last one ended.

    Args:
        also: further callback classes to refuse.

    Raises:
        InputError: if such an option is set. The message names the option and what to do instead.
    """
    refused = BatchSizeFinder, GradientAccumulationScheduler, StochasticWeightAveraging, *also
    if trainer.overfit_batches:
        _refuse("overfit_batches", "0, as each step takes the samples that follow", trainer.overfit_batches)
    if trainer.world_size > 1 and trainer._accelerator_connector.use_distributed_sampler:
        _refuse("use_distributed_sampler", "false, as the data divide a step over the processes", True)
    limit, accumulate = trainer.limit_train_batches, trainer.accumulate_grad_batches
    if isinstance(limit, int) and limit % accumulate:
        name = "fast_dev_run" if trainer.fast_dev_run else "limit_train_batches"
        _refuse(name, f"a multiple of {accumulate}, as so many batches make a step", limit)
    for each in trainer.callbacks:
        name = f"callbacks.{type(each).__name__}"
        if isinstance(each, refused):
            _refuse(name, "none, as it changes the batches, the weights or the rate that a step should have", "one")
    for name, least in {"max_epochs": 1, "min_epochs": 1, "check_val_every_n_epoch": 2}.items():
        if isinstance(limit, float) and (given := getattr(trainer, name) or 0) >= least:
            _refuse(name, "none without trainer.limit_train_batches, as the data have no end", given)


def _refuse(option: str, expected: str, given: Any) -> None:
    raise InputError(f"trainer.{option}: expected {expected}, got {given}")


class StepSeed(L.Callback):
    """A callback that seeds the random generators before each micro-batch from (seed, step, micro-batch, rank).

    Dropout then does not depend on earlier draws, and a resumed run needs no stored generator state.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        micro = batch_idx % trainer.accumulate_grad_batches
        key = f"{self.seed}/{trainer.global_step}/{micro}/{trainer.global_rank}".encode()
        number = int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "big")
        _seed_torch(number, trainer.strategy.root_device.type)
        random.seed(number)
        np.random.seed(number % 2**32)  # noqa: NPY002 - other libraries draw from it


def _seed_torch(seed: int, device: str) -> None:
    """Seed the generators of the CPU and of this process's device.

    `torch.manual_seed` also records a stack trace for each device type that this machine lacks. In training a small
    model, that takes a tenth of the time of each optimizer step.
    """
    if device not in ("cpu", "cuda"):
        torch.manual_seed(seed)
        return
    torch.default_generator.manual_seed(seed)
    if device == "cuda":
        torch.cuda.manual_seed(seed)


class StepSampler(Sampler[list[int]]):
    """An endless sampler of one rank's micro-batches, starting at the current step.

    The global batch of a step is a slice of one endless sequence of seeded permutations of the data. World size and
    accumulation only split it into micro-batches. There is deliberately no `__len__`: Lightning would use it to end
    epochs, and a resumed run would differ from an uninterrupted one.
    """

    def __init__(
        self,
        num_samples: int,
        *,
        global_batch_size: int,
        num_micro_batches: int = 1,
        rank: int = 0,
        world_size: int = 1,
        seed: int = 0,
        first_step: Callable[[], int] = lambda: 0,
    ) -> None:
        if global_batch_size % (world_size * num_micro_batches):
            raise ValueError(
                f"{global_batch_size} does not split over {world_size} ranks x {num_micro_batches} micro-batches: take "
                f"a multiple of {world_size * num_micro_batches}"
            )
        self.num_samples, self.global_batch_size, self.seed = num_samples, global_batch_size, seed
        self.num_micro_batches, self.rank, self.world_size = num_micro_batches, rank, world_size
        self.first_step = first_step
        self._epoch, self._permutation = -1, np.empty(0, dtype=np.int64)

    def global_batch(self, step: int) -> list[int]:
        """Return the sample indices of a step over all ranks. Steps count from 0."""
        start = step * self.global_batch_size
        return [self.sample(index) for index in range(start, start + self.global_batch_size)]

    def __iter__(self) -> Iterator[list[int]]:
        size = self.global_batch_size // (self.world_size * self.num_micro_batches)
        for step in itertools.count(self.first_step()):
            batch = self.global_batch(step)
            for micro in range(self.num_micro_batches):
                start = (micro * self.world_size + self.rank) * size
                yield batch[start : start + size]

    def sample(self, index: int) -> int:
        """Return the sample index at a position in the endless sequence."""
        epoch, offset = divmod(index, self.num_samples)
        if epoch != self._epoch:
            generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
            # Keep the permutation as a NumPy array, because reading one element of a tensor takes ten times as long.
            self._epoch, self._permutation = epoch, torch.randperm(self.num_samples, generator=generator).numpy()
        return int(self._permutation[offset])
