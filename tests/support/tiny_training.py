"""Train a tiny GPT-2 on random tokens for seconds, with the real callbacks."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import torch
from torch.utils.data import DataLoader, Dataset

from lit_layers.training import LitCausalLM
from lit_layers.training.trainer import StepSampler
from tests.support.random_text import CONTEXT, VOCABULARY

CONFIG = {"n_layer": 2, "n_embd": 16, "n_head": 2, "n_positions": CONTEXT}


class RandomBlocks(Dataset):
    def __init__(self, count: int = 40) -> None:
        generator = torch.Generator().manual_seed(5)
        self.tokens = torch.randint(VOCABULARY, (count, CONTEXT + 1), generator=generator)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.tokens[index]}


class RandomTokens(L.LightningDataModule):
    """Stand-in for LitTextData in tests where the text does not matter."""

    num_tokens, global_batch_size = CONTEXT, 8
    tokens_per_step = CONTEXT * 8

    def __init__(self) -> None:
        super().__init__()
        self.shards = SimpleNamespace(vocab_size=VOCABULARY, tokenizer_path=None)
        self.blocks = RandomBlocks()

    def train_dataloader(self) -> DataLoader:
        trainer: Any = self.trainer
        sampler = StepSampler(
            len(self.blocks),
            global_batch_size=self.global_batch_size,
            num_micro_batches=trainer.accumulate_grad_batches,
            rank=trainer.global_rank,
            world_size=trainer.world_size,
            first_step=lambda: trainer.global_step,
        )
        return DataLoader(self.blocks, batch_sampler=sampler)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(self.blocks, batch_size=8)


def module(*, dropout: float = 0.2, **options: Any) -> LitCausalLM:
    """Return a GPT-2 with dropout, so that an extra random draw changes the result of a run."""
    settings: dict[str, Any] = {"lr": 1e-2, "warmup_steps": 2, "pad_vocab_to": 64, **options}
    rates = {"resid_pdrop": dropout, "embd_pdrop": dropout, "attn_pdrop": dropout}
    return LitCausalLM("gpt2", {**CONFIG, **rates}, **settings)


def fit(root: Path, callbacks: list[L.Callback], *, steps: int = 5, **options: Any) -> tuple[L.Trainer, LitCausalLM]:
    """Train a new tiny model for a few steps, and return the trainer and the module."""
    torch.manual_seed(11)
    lit = options.pop("module", None) or module()
    state = options.pop("resume_from", None)
    trainer = L.Trainer(
        max_steps=steps,
        max_epochs=-1,
        accelerator=options.pop("accelerator", "cpu"),
        devices=options.pop("devices", 1),
        logger=options.pop("logger", False),
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        num_sanity_val_steps=0,
        limit_val_batches=options.pop("limit_val_batches", 0),
        gradient_clip_val=options.pop("gradient_clip_val", 1.0),
        default_root_dir=root,
        callbacks=callbacks,
        **options,
    )
    trainer.fit(lit, datamodule=RandomTokens(), ckpt_path=state, weights_only=True)
    return trainer, lit
