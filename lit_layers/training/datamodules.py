"""Token blocks for training and validation."""

import lightning as L
import torch
from torch.utils.data import DataLoader, Subset

from lit_layers.data.text import prepared
from lit_layers.data.training_text import TokenBlocks
from lit_layers.errors import InputError
from lit_layers.ranges import BATCH, COUNT, SEED, WORKERS, refuse_outside
from lit_layers.training.sampler import StepSampler

_RANGES = {
    "num_tokens": COUNT,
    "global_batch_size": BATCH,
    "num_validation_sequences": COUNT,
    "validation_batch_size": BATCH,
    "seed": SEED,
    "num_workers": WORKERS,
}


class LitTextData(L.LightningDataModule):
    """Blocks of `num_tokens` + 1 token ids (inputs and targets overlap) of a prepared corpus.

    Args:
        corpus: as for `EvalText`: python, openwebtext, wikitext, a text source, or a folder made by `prepare`.
        tokenizer: a Hub name, a local tokenizer, or `bpe:SIZE`.
        num_tokens: context length, i.e. predictions per sequence.
        global_batch_size: sequences per optimizer step, over all ranks and micro-batches.
        num_validation_sequences: how many validation blocks, from the first on.
        validation_batch_size: sequences per validation batch and rank.
        seed: of the order of the training blocks.
        num_workers: loader processes; 0 is quickest for memory-mapped tokens on few cores.
    """

    def __init__(
        self,
        corpus: str,
        tokenizer: str,
        *,
        num_tokens: int = 1024,
        global_batch_size: int = 480,
        num_validation_sequences: int = 256,
        validation_batch_size: int = 16,
        seed: int = 0,
        num_workers: int = 0,
    ) -> None:
        super().__init__()
        self.corpus, self.tokenizer, self.num_tokens, self.seed = corpus, tokenizer, num_tokens, seed
        self.global_batch_size, self.num_validation_sequences = global_batch_size, num_validation_sequences
        self.validation_batch_size, self.num_workers = validation_batch_size, num_workers
        refuse_outside("data.", _RANGES, vars(self))

    @property
    def tokens_per_step(self) -> int:
        return self.global_batch_size * self.num_tokens

    def prepare_data(self) -> None:
        prepared(self.corpus, self.tokenizer)

    def setup(self, stage: str) -> None:
        self.shards = prepared(self.corpus, self.tokenizer)
        self.train = TokenBlocks(self.shards, split="train", num_tokens=self.num_tokens)
        validation = TokenBlocks(self.shards, split="validation", num_tokens=self.num_tokens)
        self.validation = Subset(validation, range(min(len(validation), self.num_validation_sequences)))

    def train_dataloader(self) -> DataLoader:
        trainer = self._trainer()
        try:
            sampler = StepSampler(
                len(self.train),
                global_batch_size=self.global_batch_size,
                num_micro_batches=trainer.accumulate_grad_batches,
                rank=trainer.global_rank,
                world_size=trainer.world_size,
                seed=self.seed,
                first_step=lambda: trainer.global_step,
            )
        except ValueError as error:
            raise InputError(f"data.global_batch_size: {error}") from error
        return self._loader(self.train, batch_sampler=sampler)

    def val_dataloader(self) -> DataLoader:
        trainer = self._trainer()
        if (
            len(self.validation) < trainer.world_size
        ):  # an empty rank would skip validation and leave the others waiting
            raise InputError(
                f"data.num_validation_sequences: expected at least one for each of {trainer.world_size} ranks, "
                f"got {len(self.validation)}"
            )
        mine = Subset(self.validation, range(trainer.global_rank, len(self.validation), trainer.world_size))
        return self._loader(mine, batch_size=self.validation_batch_size)

    def _trainer(self) -> L.Trainer:
        if self.trainer is None:
            raise RuntimeError("the loaders of LitTextData need a Trainer: call trainer.fit(module, datamodule=...)")
        return self.trainer

    def _loader(self, dataset, **options) -> DataLoader:
        return DataLoader(
            dataset,
            num_workers=self.num_workers,
            pin_memory=torch.cuda.is_available(),
            persistent_workers=self.num_workers > 0,
            **options,
        )
