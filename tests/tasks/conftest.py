"""Benchmarks of a few rows, and a tokenizer of their words."""

from pathlib import Path

import pytest

from tests.support.benchmark_rows import write_tasks, write_tokenizer


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `local` (rows of each task) and `tokenizer`, which no test may change."""
    folder = tmp_path_factory.mktemp("tasks")
    write_tasks(folder / "local" / "benchmarks")
    write_tokenizer(folder / "tokenizer")
    return folder
