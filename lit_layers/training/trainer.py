"""The trainer of a run: its defaults, its randomness, which samples a step has, how it is stopped, its machines."""

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

RANGES = {  # of the options of all modules, data and recipes of fine-tuning, by name
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

# What a recipe does not decide: all that is logged, shown and written is this package's own.
DEFAULTS: dict[str, Any] = {
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "use_distributed_sampler": False,
    "num_sanity_val_steps": 0,
    "max_epochs": -1,
    "min_epochs": 0,  # else Lightning makes it 1 beside min_steps, and endless data never end an epoch
    "check_val_every_n_epoch": None,
    "log_every_n_steps": 10,
}


def new_trainer(**options: Any) -> L.Trainer:
    """A Trainer as `lit-layers fit` makes it, from Python: the same defaults, and as quiet."""
    quieten()
    return L.Trainer(**{**DEFAULTS, **options})


def quieten() -> None:
    """Hides Lightning's hints on what a recipe already decides."""
    for name in ("lightning.pytorch.utilities.rank_zero", "lightning.fabric.utilities.seed"):
        logging.getLogger(name).setLevel(logging.WARNING)
    noise = (
        ".*treespec, LeafSpec",
        "The '.*_dataloader' does not have many workers",
        "You defined a `validation_step`",
        "It is recommended to use `self.log",  # over ranks: the metric has been reduced already
        "Be aware that when using `ckpt_path`, callbacks",
    )
    for message in noise:
        warnings.filterwarnings("ignore", message=message)


def best_precision(accelerator: str) -> str:
    """The precision where a recipe names none: bf16 on a GPU that has it."""
    if accelerator in ("auto", "gpu", "cuda") and torch.cuda.is_available():
        torch.set_float32_matmul_precision("high")
        return "bf16-mixed" if torch.cuda.is_bf16_supported(including_emulation=False) else "32-true"
    return "32-true"


def is_first_rank() -> bool:
    """Whether this process will be rank 0, by what its starter says, before Lightning asks it."""
    if "RANK" in os.environ:
        return int(os.environ["RANK"]) == 0
    names = ("NODE_RANK", "SLURM_PROCID", "LOCAL_RANK", "JSM_NAMESPACE_RANK")
    return all(int(os.environ.get(name) or 0) == 0 for name in names)


def cluster_plugins(given: Any) -> Any:
    """The Trainer's plugins, under SLURM with its environment.

    Lightning would requeue a job by itself, from a checkpoint of its own that then overrules the one to resume from:
    here the job script does it, on exit code 143.

    Raises:
        InputError: options of the job that Lightning cannot use.
    """
    plugins = list(given) if isinstance(given, list | tuple) else [] if given is None else [given]
    if not SLURMEnvironment.detect() or any(isinstance(each, SLURMEnvironment) for each in plugins):
        return given
    try:
        return [*plugins, SLURMEnvironment(auto_requeue=False)]
    except RuntimeError as error:  # its account of options of the job that do not fit
        raise InputError(f"SLURM: {' '.join(str(error).split())}") from error


def refuse_another_order(trainer: Any, *, also: Sequence[type] = ()) -> None:
    """Refuse options that mean something else than Lightning says where a step's samples follow from its number.

    The data have no end: only `limit_train_batches` makes epochs, and the next one goes on where the last ended.

    Args:
        also: more callbacks to refuse.

    Raises:
        InputError: naming the option and what to do.
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
    """Makes the randomness of a micro-batch a function of (seed, step, micro-batch, rank).

    Dropout then neither depends on what was drawn before, nor needs a generator's state to be stored.
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
        np.random.seed(number % 2**32)  # noqa: NPY002 - what others draw from


def _seed_torch(seed: int, device: str) -> None:
    """As `torch.manual_seed`, but of this process's device alone: for each kind of device that is not there torch takes
    down where it was asked, which is a tenth of the step of a small model."""
    if device not in ("cpu", "cuda"):
        torch.manual_seed(seed)
        return
    torch.default_generator.manual_seed(seed)
    if device == "cuda":
        torch.cuda.manual_seed(seed)


class StepSampler(Sampler[list[int]]):
    """Yields micro-batches of one rank, without end, from the current step on.

    The global batch of a step is a slice of one endless sequence of seeded permutations of the data. It depends on
    neither the world size nor the accumulation: those only cut it into micro-batches. There is no `__len__` on
    purpose: Lightning would end an epoch by it, and a resumed run would differ from an uninterrupted one.
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
        """Return the indices that step number `step` (from 0) trains on, on all ranks together."""
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
        """Return which sample stands at a place of the endless sequence."""
        epoch, offset = divmod(index, self.num_samples)
        if epoch != self._epoch:
            generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
            # As an array: one number of a tensor takes ten times as long, and is taken for each image of a batch.
            self._epoch, self._permutation = epoch, torch.randperm(self.num_samples, generator=generator).numpy()
        return int(self._permutation[offset])
