"""Prompts to measure on: questions and contexts of the six usual benchmarks, as each model's tokenizer reads them."""

import functools
import hashlib
import random
from collections.abc import Iterator
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from lit_layers.data.batches import Batches
from lit_layers.data.tokenization import load_tokenizer, one_thread, tokenizer_hash
from lit_layers.errors import InputError


@dataclass(frozen=True)
class Benchmark:
    """Where the prompts of one benchmark stand: a column of a parquet file, and of a data set of the Hub."""

    name: str
    file: str
    column: str
    repo: str
    config: str
    split: str
    hub_column: str


# The prompt is the question or the context alone, without choices and examples. HellaSwag, Winogrande and TruthfulQA:
# the split that everybody tests on (of the first two the test split's answers are secret, the last has one split).
# HellaSwag's file holds its contexts cleaned, with the activity in front; the Hub's column holds them as published.
BENCHMARKS = (
    Benchmark("arc", "arc_challenge_test.parquet", "question", "allenai/ai2_arc", "ARC-Challenge", "test", "question"),
    Benchmark("gsm8k", "gsm8k_test.parquet", "question", "openai/gsm8k", "main", "test", "question"),
    Benchmark("hellaswag", "hellaswag_validation.parquet", "query", "Rowan/hellaswag", "default", "validation", "ctx"),
    Benchmark("mmlu", "mmlu_test.parquet", "question", "cais/mmlu", "all", "test", "question"),
    Benchmark(
        "truthfulqa",
        "truthfulqa_generation.parquet",
        "question",
        "truthfulqa/truthful_qa",
        "generation",
        "validation",
        "question",
    ),
    Benchmark(
        "winogrande",
        "winogrande_validation.parquet",
        "sentence",
        "allenai/winogrande",
        "winogrande_xl",
        "validation",
        "sentence",
    ),
)


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
        folder: Parquet files named as in `BENCHMARKS`, such as `mmlu_test.parquet`; None for the data sets of the Hub.
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


def _drawn(benchmark: Benchmark, folder: str | None, number: int, seed: int) -> list[str]:
    """`number` different rows of a benchmark; more of them begin with the same."""
    texts = _texts(benchmark, folder)
    if len(texts) < number:
        where = benchmark.repo if folder is None else Path(folder) / benchmark.file
        raise InputError(
            f"num_prompts: {number} prompts of {benchmark.name} are needed, {where} has {len(texts)}: ask for fewer"
        )
    generator, rows = random.Random(f"{seed}/{benchmark.name}"), {}
    while len(rows) < number:
        rows[generator.randrange(len(texts))] = None
    return [texts[row] for row in rows]


@functools.lru_cache(maxsize=2 * len(BENCHMARKS))  # every model of a suite is measured on the same texts
def _texts(benchmark: Benchmark, folder: str | None) -> tuple[str, ...]:
    """The prompts of a benchmark, those left out that hold nothing but space."""
    rows = _of_the_hub(benchmark) if folder is None else _of_a_file(benchmark, Path(folder))
    return tuple(text for text in rows if text and text.strip())


def _of_a_file(benchmark: Benchmark, folder: Path) -> list[str]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    if not folder.is_dir():
        raise InputError(f"folder: expected a folder of parquet files with prompts, {folder} does not exist")
    path = folder / benchmark.file
    if not path.is_file():
        raise InputError(f"folder: expected {benchmark.file} with prompts of {benchmark.name} in {folder}, found none")
    try:
        names = pq.read_schema(path).names
        if benchmark.column not in names:
            raise _no_column(str(path), benchmark.column, names)
        rows = pq.read_table(path, columns=[benchmark.column]).column(0).to_pylist()
    except (pa.ArrowInvalid, OSError) as error:
        raise InputError(f"{path} is no parquet file, or only a part of one ({error}): copy it again") from error
    return _all_text(rows, str(path), benchmark.column)


def _of_the_hub(benchmark: Benchmark) -> list[str]:
    import datasets

    from lit_layers.data.hub_errors import HUB_ERRORS, reason

    try:
        rows = datasets.load_dataset(benchmark.repo, benchmark.config, split=benchmark.split)
    except (*HUB_ERRORS, RuntimeError) as error:
        raise InputError(
            f"the prompts of {benchmark.name} cannot be had from {benchmark.repo} on the Hub ({reason(error)}): check "
            f"the network, or name a folder with {benchmark.file}"
        ) from error
    if benchmark.hub_column not in rows.column_names:
        raise _no_column(benchmark.repo, benchmark.hub_column, rows.column_names)
    return _all_text(list(rows[benchmark.hub_column]), benchmark.repo, benchmark.hub_column)


def _no_column(where: str, column: str, names: list[str]) -> InputError:
    return InputError(f"{where}: expected a column {column!r} of prompts, it has {', '.join(names)}")


def _all_text(rows: list, where: str, column: str) -> list[str]:
    strange = next((row for row in rows if not isinstance(row, str | None)), None)
    if strange is not None:
        raise InputError(f"{where}: expected text in column {column!r}, found {type(strange).__name__}")
    return rows
