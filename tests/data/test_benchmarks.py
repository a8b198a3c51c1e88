"""Prompts of six benchmarks, one from each in turn: the same rows for every model, as tokens of its tokenizer."""

import re
import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from tokenizers import Tokenizer

from lit_layers.data import BenchmarkPrompts, prompt_texts
from lit_layers.data.tokenization import save_tokenizer, train_bpe
from lit_layers.errors import InputError
from tests.support.benchmark_files import COLUMNS, NAMES, write_benchmarks


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return write_benchmarks(tmp_path_factory.mktemp("benchmarks"))


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(train_bpe([f"{name} asks for number and one more" for name in NAMES], 270), path)
    return str(path)


def test_the_prompts_come_from_the_six_benchmarks_in_turn_without_a_repeated_row(folder):
    texts = BenchmarkPrompts("unused", folder=str(folder), num_prompts=48).texts()
    assert [text.split()[0] for text in texts] == [*NAMES] * 8
    assert len(set(texts)) == 48  # all rows of all files


def test_a_smaller_set_is_the_beginning_of_a_larger_one_and_rows_depend_on_seed_and_benchmark(folder):
    def texts(num_prompts: int, seed: int = 0) -> list[str]:
        return BenchmarkPrompts("unused", folder=str(folder), num_prompts=num_prompts, seed=seed).texts()

    larger = texts(40)
    for number in (1, 4, 6, 13):
        assert texts(number) == larger[:number]
    assert texts(40, seed=1) != larger
    rows = [[text.split()[4] for text in larger[start::6]] for start in range(6)]
    assert len({tuple(row) for row in rows}) > 1, "all benchmarks draw the same rows"


def test_each_prompt_is_a_batch_of_its_own_length_with_the_tokens_of_the_tokenizer(folder, tokenizer):
    prompts = BenchmarkPrompts(tokenizer, folder=str(folder), num_prompts=12)
    encode = Tokenizer.from_file(f"{tokenizer}/tokenizer.json").encode
    batches = list(prompts)
    assert len(prompts) == len(batches) == 12
    for batch, text in zip(batches, prompts.texts(), strict=True):
        assert batch["input_ids"].tolist() == [encode(text).ids]
        assert batch["attention_mask"].tolist() == [[1] * len(encode(text).ids)]
        assert batch["input_ids"].dtype == batch["attention_mask"].dtype == torch.int64
    assert len({batch["input_ids"].shape for batch in batches}) > 1
    larger = BenchmarkPrompts(tokenizer, folder=str(folder), num_prompts=7, batch_size=3)
    assert len(larger) == len(list(larger)) == 3
    cut = BenchmarkPrompts(tokenizer, folder=str(folder), num_prompts=12, max_tokens=5)
    assert [batch["input_ids"].tolist() for batch in cut] == [batch["input_ids"][:, :5].tolist() for batch in batches]


def test_the_hash_depends_on_the_tokens_and_their_batches(folder, tokenizer):
    def digest(**options) -> str:
        return BenchmarkPrompts(tokenizer, folder=str(folder), **{"num_prompts": 12} | options).content_hash()

    assert digest() == digest() == digest(max_tokens=500)  # no prompt is cut
    others = [digest(num_prompts=11), digest(max_tokens=5), digest(seed=1), digest(batch_size=2)]
    assert len({digest(), *others}) == 5


def test_blank_rows_are_left_out(tmp_path, tokenizer):
    write_benchmarks(tmp_path, rows=2)
    mmlu = tmp_path / "benchmarks" / "mmlu_test.parquet"
    pq.write_table(pa.table({"question": ["", "one", None, " \n", "two"]}), mmlu)
    assert sorted(BenchmarkPrompts(tokenizer, folder=str(tmp_path), num_prompts=12).texts()[3::6]) == ["one", "two"]
    write_benchmarks(tmp_path / "more", rows=3)
    shutil.copy(mmlu, tmp_path / "more" / "benchmarks")
    with pytest.raises(InputError, match=r"num_prompts: .*mmlu_test.parquet has 2 prompts, 3 are needed: ask"):
        BenchmarkPrompts(tokenizer, folder=str(tmp_path / "more"), num_prompts=16).texts()


def test_a_missing_column_and_options_out_of_range_are_refused_in_one_sentence(tmp_path, tokenizer):
    path = write_benchmarks(tmp_path) / "benchmarks" / "hellaswag_validation.parquet"
    pq.write_table(pa.table({"words": ["a"]}), path)
    sentence = f"task hellaswag: text: {path} has no column 'query': it has words"
    with pytest.raises(InputError, match=re.escape(sentence)):
        list(BenchmarkPrompts(tokenizer, folder=str(tmp_path), num_prompts=6))
    none: Any = 0
    for option in ("num_prompts", "max_tokens", "batch_size"):
        with pytest.raises(InputError, match=f"{option}: expected at least 1, got 0"):
            BenchmarkPrompts("unused", **{option: none})


def test_without_a_folder_the_data_sets_of_the_hub_are_loaded(monkeypatch, tokenizer):
    import datasets

    asked = []

    def load_dataset(repo, config, *, split):
        asked.append((repo, config, split))
        column = {"Rowan/hellaswag": "ctx", "allenai/winogrande": "sentence"}.get(repo, "question")
        return datasets.Dataset.from_dict({column: [f"{repo} {row}" for row in range(3)]})

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    prompt_texts._read_prompts.cache_clear()
    texts = BenchmarkPrompts(tokenizer, num_prompts=12).texts()
    assert [text.split()[0] for text in texts[:6]] == [repo for repo, _, _ in asked[:6]]
    assert asked[:6] == [
        ("allenai/ai2_arc", "ARC-Challenge", "test"),
        ("openai/gsm8k", "main", "test"),
        ("Rowan/hellaswag", "default", "validation"),
        ("cais/mmlu", "all", "test"),
        ("truthfulqa/truthful_qa", "generation", "validation"),
        ("allenai/winogrande", "winogrande_xl", "validation"),
    ]


@pytest.mark.realdata
def test_the_real_files_give_the_1200_prompts_of_the_protocol(realdata, tokenizer):
    folder = realdata / "benchmarks"
    if not folder.is_dir():
        pytest.skip(f"no benchmarks in {realdata}")
    prompts = BenchmarkPrompts(tokenizer, folder=str(realdata))
    texts = prompts.texts()
    assert len(texts) == sum(1 for _ in prompts) == 1200
    for number, (file, column) in enumerate(COLUMNS.items()):
        rows = {*pq.read_table(folder / f"{file}.parquet")[column].to_pylist()}
        assert all(text.strip() and text in rows for text in texts[number::6]), file
