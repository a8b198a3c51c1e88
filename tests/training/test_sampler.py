import itertools

import lightning as L
import pytest
import torch
from lightning.pytorch import callbacks
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lit_layers.errors import InputError
from lit_layers.training.datamodules import LitStepData
from lit_layers.training.trainer import StepSampler, new_trainer
from tests.support.tiny_training import RandomBlocks, module


def test_a_sample_follows_the_permutation_of_its_epoch():
    def permutation(epoch):
        return torch.randperm(13, generator=torch.Generator().manual_seed(5 * 1_000_003 + epoch)).tolist()

    sampler = StepSampler(13, global_batch_size=30, seed=5)
    assert sampler.global_batch(2) == [permutation(place // 13)[place % 13] for place in range(60, 90)]


def test_a_step_is_the_same_from_any_first_step():
    def walk(first):
        return itertools.islice(StepSampler(50, global_batch_size=8, seed=1, first_step=lambda: first), 9 - first)

    assert list(walk(0))[6:] == list(walk(6))


@pytest.mark.parametrize(("world_size", "num_micro_batches"), [(1, 4), (4, 2)])
def test_ranks_and_micro_batches_only_split_the_global_batch(world_size, num_micro_batches):
    split = {"world_size": world_size, "num_micro_batches": num_micro_batches}
    whole = StepSampler(40, global_batch_size=8, seed=7)
    walks = [iter(StepSampler(40, global_batch_size=8, seed=7, rank=r, **split)) for r in range(world_size)]
    for step in range(12):
        pieces = [next(walk) for _ in range(num_micro_batches) for walk in walks]
        assert [i for piece in pieces for i in piece] == whole.global_batch(step)


def test_the_sampler_has_no_length_that_could_end_an_epoch():
    assert not hasattr(StepSampler(5, global_batch_size=1), "__len__")


def test_a_batch_that_cannot_be_split_evenly_is_refused():
    with pytest.raises(ValueError, match="10 does not split over 2 ranks x 2 micro-batches"):
        StepSampler(40, global_batch_size=10, world_size=2, num_micro_batches=2)


class Blocks(LitStepData):
    global_batch_size = validation_batch_size = 8
    num_workers = seed = 0
    blocks = RandomBlocks()

    def describe(self):
        return {}

    def train_dataloader(self):
        return self._loader(self.blocks, self._sampler(len(self.blocks)))

    def val_dataloader(self):
        return self._loader(self.blocks, self._validation_batches(8, "blocks"))


class Trained(L.Callback):
    """A callback that records the samples of each optimizer step, and counts validations."""

    def __init__(self):
        self.steps, self.num_validations = {}, 0

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.steps.setdefault(trainer.global_step, []).extend(batch["input_ids"].tolist())

    def on_validation_end(self, trainer, pl_module):
        self.num_validations += 1


def train(folder, **options):
    seen = Trained()
    given = {"accelerator": "cpu", "devices": 1, "max_steps": 4, "default_root_dir": folder, **options}
    given["callbacks"] = [seen, *given.get("callbacks", [])]
    trainer = new_trainer(**given)
    trainer.fit(module(dropout=0.0), datamodule=Blocks())
    whole = StepSampler(len(Blocks.blocks), global_batch_size=8)
    for step, rows in seen.steps.items():
        assert rows == Blocks.blocks.tokens[whole.global_batch(step)].tolist()
    return len(seen.steps), seen.num_validations


# Trainer options -> their effect with data whose order depends on the step: (number of steps, number of validations).
# Every step has its whole batch. A string is part of the error that refuses the options.
MEANT = (
    ({}, (4, 1)),
    ({"fast_dev_run": 2}, (2, 1)),
    ({"fast_dev_run": 3, "accumulate_grad_batches": 2}, "fast_dev_run: expected a multiple of 2"),
    ({"max_epochs": 2}, "max_epochs: expected none without trainer.limit_train_batches"),
    ({"max_epochs": 2, "limit_train_batches": 1}, (2, 2)),
    ({"min_epochs": 1}, "min_epochs: expected none without trainer.limit_train_batches"),
    ({"min_epochs": 1, "limit_train_batches": 2}, (4, 2)),
    ({"min_steps": 3}, (4, 1)),
    ({"max_time": {"hours": 1}}, (4, 1)),
    ({"limit_train_batches": 3, "accumulate_grad_batches": 2}, "limit_train_batches: expected a multiple of 2"),
    ({"limit_train_batches": 2, "accumulate_grad_batches": 2}, (4, 4)),
    ({"limit_train_batches": 0.5}, "must be `1.0` or an int"),
    ({"limit_val_batches": 0}, (4, 0)),
    ({"overfit_batches": 1}, "overfit_batches: expected 0"),
    ({"overfit_batches": 0.5}, "overfit_batches: expected 0"),
    ({"val_check_interval": 2}, (4, 2)),
    ({"val_check_interval": 0.5}, "should be an integer or a time-based duration"),
    ({"check_val_every_n_epoch": 2}, "check_val_every_n_epoch: expected none without trainer.limit_train_batches"),
    ({"check_val_every_n_epoch": 2, "limit_train_batches": 1}, (4, 2)),
    ({"num_sanity_val_steps": 1}, (4, 2)),
    ({"reload_dataloaders_every_n_epochs": 1, "limit_train_batches": 2}, (4, 2)),
    ({"use_distributed_sampler": True}, (4, 1)),
)
REFUSED = "expected none, as it changes the batches, the weights or the rate"
LOSS = "validation/loss"
CALLBACKS = (
    ("BatchSizeFinder", {"batch_arg_name": "global_batch_size", "max_trials": 2, "steps_per_trial": 1}, REFUSED),
    ("EarlyStopping", {"monitor": LOSS}, (4, 1)),
    ("GradientAccumulationScheduler", {"scheduling": {0: 1, 1: 2}}, REFUSED),
    ("LearningRateFinder", {"num_training_steps": 2}, (4, 1)),
    ("StochasticWeightAveraging", {"swa_lrs": 0.01, "swa_epoch_start": 1}, REFUSED),
    ("Timer", {"duration": {"hours": 1}}, (4, 1)),
)
DECIDED = [*MEANT, *(({"callbacks": (name, arguments)}, meant) for name, arguments, meant in CALLBACKS)]


@pytest.mark.parametrize("part", [0, 1, *(pytest.param(part, marks=pytest.mark.soak) for part in (2, 3))])
@pytest.mark.filterwarnings("ignore")  # warnings of Lightning on few batches
def test_an_option_means_what_lightning_says_or_is_refused(part, tmp_path):
    for options, meant in DECIDED[part::4]:
        if "callbacks" in options:
            name, arguments = options["callbacks"]
            options = {"callbacks": [getattr(callbacks, name)(**arguments)]}
        if isinstance(meant, str):
            with pytest.raises((InputError, MisconfigurationException), match=meant):
                train(tmp_path, **options)
        else:
            assert train(tmp_path, **options) == meant, options
