"""Rows of a task of GLUE as batches of token ids, for training and validation."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lit_layers.data.tokenization import TextTokenizer, load_tokenizer, one_thread, tokenizer_hash
from lit_layers.errors import InputError
from lit_layers.schema import refuse_outside
from lit_layers.tasks.catalogue import SPLITS, GlueRows, find, read_rows
from lit_layers.training.datamodules import DATA_RANGES, LitStepData


class EncodedRows:
    """Rows as token ids, with the tokenizer's special tokens; of a pair too long the longer text loses its end.

    Raises:
        InputError: a limit that leaves no room beside special tokens.
    """

    def __init__(self, tokenizer: TextTokenizer, rows: GlueRows, *, max_tokens: int) -> None:
        self.words, self.rows, self.max_tokens = tokenizer.tokenizer, rows, max_tokens
        self.is_pair = len(rows.task.text) == 2
        kind = torch.float32 if rows.task.num_classes is None else torch.int64
        self.targets = torch.tensor(rows.targets).to(kind)
        added = self.words.num_special_tokens_to_add(is_pair=self.is_pair)
        if max_tokens <= added + self.is_pair:
            raise InputError(
                f"max_tokens: expected more than {added + self.is_pair}, {added} of which are special tokens, got "
                f"{max_tokens}"
            )

    def __len__(self) -> int:
        return len(self.rows)

    def batch(self, numbers: Sequence[int], filler: int) -> dict[str, Tensor]:
        """Some rows, filled up on the right to the longest of them."""
        texts = [self.rows.texts[number] for number in numbers]
        self.words.enable_truncation(self.max_tokens, strategy="longest_first")
        self.words.enable_padding(pad_id=filler)
        try:
            with one_thread():
                encodings = self.words.encode_batch([pair if self.is_pair else pair[0] for pair in texts])
        finally:
            self.words.no_truncation()
            self.words.no_padding()
        return {
            "input_ids": torch.tensor([each.ids for each in encodings]),
            "attention_mask": torch.tensor([each.attention_mask for each in encodings]),
            "token_type_ids": torch.tensor([each.type_ids for each in encodings]),
            "labels": self.targets[torch.tensor(numbers)],
        }


class LitGlueData(LitStepData):
    """Rows of a task of GLUE: `{"input_ids": (batch, tokens), "attention_mask", "token_type_ids", "labels": (batch,)}`.

    Args:
        task: a name of `lit_layers.tasks.catalogue.GLUE`.
        tokenizer: a local path or a name of the Hub: the model's own.
        folder: of local data, whose `tasks.yaml` says where they lie; None: the Hub.
        num_tokens: of a row; a longer one is cut.
        num_train: random rows to train on; None: all.
        num_validation: random rows to judge by; None: all.
        global_batch_size: rows per optimizer step, over all ranks and micro-batches.
        validation_batch_size: rows per validation batch and rank.
        seed: of the rows that are drawn and their order.
        num_workers: loader processes.
    """

    def __init__(
        self,
        task: str,
        tokenizer: str,
        *,
        folder: str | Path | None = None,
        num_tokens: int = 128,
        num_train: int | None = None,
        num_validation: int | None = None,
        global_batch_size: int = 32,
        validation_batch_size: int = 32,
        seed: int = 0,
        num_workers: int = 0,
    ) -> None:
        super().__init__()
        self.task, self.tokenizer, self.folder, self.num_tokens = find("glue", task), tokenizer, folder, num_tokens
        self.num_train, self.num_validation, self.seed = num_train, num_validation, seed
        self.global_batch_size, self.validation_batch_size = global_batch_size, validation_batch_size
        self.num_workers = num_workers
        refuse_outside("data.", DATA_RANGES, vars(self))
        self.rows: dict[str, GlueRows] = {}

    def prepare_data(self) -> None:
        for split in () if self.rows else SPLITS:  # one process of a machine downloads
            read_rows(self.task, split, self.folder)

    def setup(self, stage: str | None = None) -> None:
        if self.rows:
            return
        self.words = load_tokenizer(self.tokenizer)
        for split, count in zip(SPLITS, (self.num_train, self.num_validation), strict=True):
            self.rows[split] = read_rows(self.task, split, self.folder).take(count, seed=self.seed)
        self.task = self.rows["train"].task  # with the options of the folder
        self.encoded = {
            split: EncodedRows(self.words, rows, max_tokens=self.num_tokens) for split, rows in self.rows.items()
        }

    def describe(self) -> dict[str, Any]:
        return {
            "task": self.task.name,
            "tokenizer": self.tokenizer,
            "tokenizer_hash": tokenizer_hash(self.words.tokenizer),
            "data_hash": {split: rows.content_hash() for split, rows in self.rows.items()},
        }

    def train_dataloader(self) -> DataLoader:
        return self._rows_loader("train", self._steps(len(self.rows["train"])))

    def val_dataloader(self) -> DataLoader:
        return self._rows_loader("validation", self._validation_batches(len(self.rows["validation"]), "num_validation"))

    def _rows_loader(self, split: str, batches: Any) -> DataLoader:
        model: Any = self._loop().lightning_module.model
        collate = partial(self.encoded[split].batch, filler=model.config.pad_token_id or 0)
        return self._loader(range(len(self.rows[split])), batches, collate_fn=collate)
