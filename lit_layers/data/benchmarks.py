"""Prompts to measure on: questions and contexts of the six usual benchmarks, as each model's tokenizer reads them."""

import functools
import hashlib
import random
from collections.abc import Iterator
from dataclasses import KW_ONLY, dataclass, field
from typing import Literal

import torch
from torch import Tensor

from lit_layers.data.batches import Batches
from lit_layers.data.tokenization import load_tokenizer, one_thread, tokenizer_hash
from lit_layers.errors import InputError
from lit_layers.tasks.catalogue import Task, find, tasks_of

BENCHMARKS = tuple(tasks_of("prompts").values())


@dataclass
class BenchmarkPrompts(Batches):
    """Prompts from ARC (Challenge), GSM8K, HellaSwag, MMLU, TruthfulQA and Winogrande: 200 of each, in turn.

    Prompt i comes from benchmark i mod 6, so that the first prompts are of all six as well, and a larger set begins
    with the prompts of a smaller one. Which rows are drawn depends on `seed` and the benchmark alone: every model is
    measured on the same texts, in its own tokens, with the special tokens that its tokenizer adds to any text.
    Source of the protocol (1,200 prompts of these test sets; which rows and columns is not published): Aubry, Meng,
    Sugolov, Papyan, arXiv 2407.07810.

    Args:
        tokenizer: A local path, or a name on the Hub.
        folder: Local data, whose `tasks.yaml` says where the prompts lie; None for the data sets of the Hub.
        num_prompts: Number of prompts, over all benchmarks.
        max_tokens: A longer prompt loses its end; `num_cut()` says how many did.
        batch_size: Prompts a batch, in their order; 1 needs no padding.
        padding: The side on which shorter prompts of a batch are filled up.
        seed: Decides which rows are drawn, and their order.

    Raises:
        InputError: for options out of range, and on the first walk for a missing file or column, or too few rows.
    """

    tokenizer: str
    _: KW_ONLY
    folder: str | None = None
    num_prompts: int = 1200
    max_tokens: int = 512
    batch_size: int = 1
    padding: Literal["left", "right"] = "right"
    seed: int = 0
    _encoded: list[list[int]] | None = field(default=None, init=False, repr=False, compare=False)
    _hash: str | None = field(default=None, init=False, repr=False, compare=False)
    _filler: int = field(default=0, init=False, repr=False, compare=False)
    _num_cut: int = field(default=0, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.padding not in ("left", "right"):
            raise InputError(f"padding: expected left or right, got {self.padding!r}")
        for name in ("num_prompts", "max_tokens", "batch_size"):
            if getattr(self, name) < 1:
                raise InputError(f"{name} must be at least 1, not {getattr(self, name)}")

    def texts(self) -> list[str]:
        """The prompts as text, in their order."""
        shares = [
            _drawn(benchmark, self.folder, -(-(self.num_prompts - place) // len(BENCHMARKS)), self.seed)
            for place, benchmark in enumerate(BENCHMARKS[: self.num_prompts])
        ]
        return [shares[number % len(shares)][number // len(shares)] for number in range(self.num_prompts)]

    def num_cut(self) -> int:
        """How many prompts have lost their end to `max_tokens`."""
        self._ids()
        return self._num_cut

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        ids = self._ids()
        for start in range(0, len(ids), self.batch_size):
            yield self._batch(ids[start : start + self.batch_size])

    def __len__(self) -> int:
        return -(-self.num_prompts // self.batch_size)

    def content_hash(self) -> str:
        """Sixteen hex digits over the token ids and how they are cut into batches."""
        layout = "" if self.batch_size == 1 else f" {self.padding}"
        return hashlib.sha256(f"{self.batch_size}{layout} {self._ids()}".encode()).hexdigest()[:16]

    def tokenizer_hash(self) -> str | None:
        """Loads the prompts on the first call."""
        self._ids()
        return self._hash

    def _batch(self, prompts: list[list[int]]) -> dict[str, Tensor]:
        longest = max(map(len, prompts))
        ids = torch.full((len(prompts), longest), self._filler)
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(prompts):
            real = slice(longest - len(prompt), None) if self.padding == "left" else slice(len(prompt))
            ids[row, real], mask[row, real] = torch.tensor(prompt), 1
        return {"input_ids": ids, "attention_mask": mask}  # (batch, tokens of the longest)

    def _ids(self) -> list[list[int]]:
        """Token ids of every prompt."""
        if self._encoded is None:
            found = load_tokenizer(self.tokenizer)
            with one_thread():
                whole = [encoding.ids for encoding in found.tokenizer.encode_batch(self.texts())]
            if empty := [number for number, ids in enumerate(whole) if not ids]:
                raise InputError(f"the tokenizer {self.tokenizer!r} makes no token of prompt {empty[0]}: use another")
            self._hash, self._filler = tokenizer_hash(found.tokenizer), found.end_of_text_id
            self._num_cut = sum(len(ids) > self.max_tokens for ids in whole)
            self._encoded = [ids[: self.max_tokens] for ids in whole]
        return self._encoded


def _drawn(benchmark: Task, folder: str | None, number: int, seed: int) -> list[str]:
    """`number` different rows of a benchmark; more of them begin with the same."""
    texts, place = _texts(benchmark.name, folder)
    if len(texts) < number:
        raise InputError(
            f"num_prompts: {number} prompts of {benchmark.name} are needed, {place} has {len(texts)}: ask for fewer"
        )
    generator, rows = random.Random(f"{seed}/{benchmark.name}"), {}
    while len(rows) < number:
        rows[generator.randrange(len(texts))] = None
    return [texts[row] for row in rows]


@functools.lru_cache(maxsize=2 * len(BENCHMARKS))  # every model of a suite is measured on the same texts
def _texts(name: str, folder: str | None) -> tuple[tuple[str, ...], str]:
    """The prompts of a benchmark, those left out that hold nothing but space; and where they are from."""
    benchmark = find("prompts", name)
    (column,), split = benchmark.text, benchmark.split
    try:
        rows = benchmark.read(split, {column: "text"}, folder)
    except InputError as error:
        raise InputError(f"the prompts of {name}: {error}") from error
    strange = next((row for row in rows.values[column] if not isinstance(row, str | None)), None)
    if strange is not None:
        raise InputError(f"{rows.place}: expected text in column {column!r}, found {type(strange).__name__}")
    return tuple(text for text in rows.values[column] if text and text.strip()), rows.place
