"""A small corpus of generated prose, and its token shards."""

import json
import random
from pathlib import Path

import pytest

from lit_layers.data.preparing import TokenShards, prepare

WORDS = ["layer", "state", "block", "the", "of", "a", "to", "norm", "depth", "token", "model", "rises", "falls", "with"]
WORDS += ["each", "step", "and", "then", "ünder", "層"]


def prose(seed: int, num_words: int) -> str:
    rng = random.Random(seed)
    return " ".join(rng.choice(WORDS) for _ in range(num_words)) + ".\n"


@pytest.fixture(scope="session")
def texts() -> list[str]:
    return [prose(seed, 5 + seed % 60) for seed in range(200)]


@pytest.fixture(scope="session")
def jsonl(texts: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("corpus") / "corpus.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def made(jsonl: Path, tmp_path_factory: pytest.TempPathFactory) -> TokenShards:
    """Shards of the small corpus, which no test may change."""
    return prepare(str(jsonl), "bpe:300", tmp_path_factory.mktemp("made") / "shards", validation=0.2)
