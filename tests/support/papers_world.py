"""Write a small copy of the models and data sets that the reduced recipes of published figures read.

Each model has tiny weights, but its own name, family, number of blocks and branches, as on the Hub.
"""

import random
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from filelock import FileLock

from lit_layers.data.tokenization import save_tokenizer, train_bpe
from tests.support.data_mapping import write_mapping
from tests.support.saved_models import saved
from tests.support.series_hub import make_series

POSITIONS = 512
STEPS = (0, 1, 64, 128, 256, 512, 1000, 2000, 4000, 8000, 16000, 32000, 64000, 128000, 143000)
SERIES = ("70m", "160m")  # models whose branches the recipes read
MODELS = {  # repository: family and blocks
    "gpt2": ("gpt2", 12),
    "gpt2-medium": ("gpt2", 24),
    "Qwen/Qwen1.5-0.5B": ("qwen2", 24),
    "Qwen/Qwen2.5-0.5B": ("qwen2", 24),
    "state-spaces/mamba-370m-hf": ("mamba_lm", 48),
    "bert-base-uncased": ("bert", 12),
    "EleutherAI/pythia-14m": ("gpt_neox", 6),
    "EleutherAI/pythia-70m": ("gpt_neox", 6),
    "EleutherAI/pythia-160m": ("gpt_neox", 12),
    "EleutherAI/pythia-410m": ("gpt_neox", 24),
    "EleutherAI/pythia-1.4b": ("gpt_neox", 24),
}
WORDS = (
    *("between", "another", "country", "through", "government", "children", "against", "without", "during", "national"),
    *("general", "several", "important", "company", "question", "including", "political", "possible", "interest"),
    *("business", "service", "community", "research", "history", "program"),
)


def words(chance: random.Random, least: int = 10, most: int = 18) -> str:
    """Return a random sentence that ends with a random number, so that no two are equal."""
    return " ".join([*chance.choices(WORDS, k=chance.randint(least, most)), str(chance.randrange(10**6))])


def cached(folder: Path, write: Callable[[Path], object]) -> Path:
    """Return a folder that all test processes share: the first one writes it, and no test changes it."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(folder.with_name(f"{folder.name}.lock")):
        if not folder.exists():
            draft = folder.with_name(f"{folder.name}.draft")
            shutil.rmtree(draft, ignore_errors=True)
            write(draft)
            draft.rename(folder)
    return folder


def write_hub(root: Path, names: Iterable[str] = MODELS, *, series: tuple[str, ...] = SERIES) -> Path:
    """Write the model repositories, each with different weights; those of a series have a branch per step."""
    chance = random.Random(0)
    tokenizer = train_bpe([words(chance) for _ in range(300)], 300)
    for number, name in enumerate(sorted(names)):
        family, blocks = MODELS[name]
        folder = root / name / "main"
        counts = {"n_layer" if family == "gpt2" else "num_hidden_layers": blocks}
        longest = "n_positions" if family == "gpt2" else "max_position_embeddings"
        longer = {} if family == "mamba_lm" else {longest: POSITIONS}
        saved(folder, family, shard="1GB", vocab_size=300, seed=number, **counts, **longer)
        save_tokenizer(tokenizer, folder)
        if name.rpartition("pythia-")[2] in series and "pythia" in name:
            folder.rename(root / name / "made")
            # Small shifts: far from the model, float32 derivatives of a block are too inexact to compare.
            values = {step: number / 64 for number, step in enumerate(STEPS)}
            make_series(root / name / "made", root / name, STEPS, values=values)
            for file in (root / name / "made").iterdir():
                file.unlink()
            (root / name / "made").rmdir()
    return root


SPLITS = ("train", "validation", "test")
FILES = {
    "banking77": SPLITS,
    "ag_news": SPLITS,
    "tweet_sentiment": SPLITS,
    "yelp_reviews": SPLITS,
    "benchmarks": (
        *("arc_challenge_test", "arc_challenge_train", "gsm8k_test", "gsm8k_train_sample", "hellaswag_validation"),
        *("lambada_openai_test", "mmlu_test", "truthfulqa_generation", "winogrande_validation"),
    ),
    "glue": [f"{task}_{split}" for task in ("cola", "mrpc", "rte", "sst2", "stsb") for split in SPLITS],
    "sts": [f"sick_{split}" for split in SPLITS],
    "analogies": ["bats3"],
}
CLASSES = {"banking77": 77, "ag_news": 4, "tweet_sentiment": 3, "yelp_reviews": 5}
MOODS = ("negative", "neutral", "positive")
HUMANITIES = ("philosophy", "prehistory", "world_religions", "college_physics")


def add_arc_training_rows(root: Path) -> None:
    """Add ARC's training rows to the `tasks.yaml` of a folder."""
    content = yaml.safe_load((root / "tasks.yaml").read_text())
    files = {split: f"benchmarks/arc_challenge_{split}.parquet" for split in ("train", "test")}
    content["benchmark"]["arc_challenge"] = {"files": files}
    content["probe"]["yelp"]["options"]["balance"] = None  # all rows of a small copy
    (root / "tasks.yaml").write_text(yaml.safe_dump(content))


def write_data(root: Path, *, rows: int = 10_100) -> Path:
    """Write a folder of local data with a `tasks.yaml`, in which each file has `rows` rows."""
    write_mapping(root)
    add_arc_training_rows(root)
    for folder, names in FILES.items():
        (root / folder).mkdir(exist_ok=True)
        for name in names:
            chance = random.Random(f"{folder}/{name}")
            made = [_row(folder, name, number, chance) for number in range(rows)]
            pq.write_table(pa.Table.from_pylist(made), root / folder / f"{name}.parquet")
    return root


def _row(folder: str, name: str, n: int, chance: random.Random) -> dict:
    """Return a row with the columns that the tasks of this folder read, and more."""
    text, other = words(chance), words(chance)
    row = dict.fromkeys(("text", "sentence", "sentence1", "question", "query"), text)
    row |= {"sentence2": other, "label": n % CLASSES.get(folder, 2), "stars": 1 + n % 5, "score": 1 + n % 97 / 24}
    row["label_text"] = MOODS[n % 3] if folder == "tweet_sentiment" else f"intent {n % 77}"
    if folder == "analogies":
        row |= {"category_id": f"I{n // 50:02d}", "category": f"category {n // 50}", "group": "Inflectional_morphology"}
        row |= {"word": f"{WORDS[n % len(WORDS)]}{n}", "answers": [f"{WORDS[n % len(WORDS)]}{n}s"]}
    if folder == "benchmarks":
        number = 2 if name.startswith("winogrande") else 4
        row |= {"choices": [words(chance, 2, 4) for _ in range(number)], "label": n % number}
        row |= {"sentence": f"{text} _ {other}", "answer": f"{other}\n#### {n % 100}", "subject": HUMANITIES[n % 4]}
    return row


def wikitext_files(folder: Path) -> dict[str, str]:
    """Write lines in the format of WikiText, 4 training and 60 validation articles, and return the files."""
    folder.mkdir(parents=True, exist_ok=True)
    files = {}
    for split, articles in (("train", 4), ("validation", 60)):
        chance = random.Random(split)
        rows = [
            line
            for number in range(articles)
            for line in (f" = Article {number} = \n", *(f" {words(chance, 20, 60)} . \n" for _ in range(20)))
        ]
        files[split] = str(folder / f"{split}.parquet")
        pq.write_table(pa.table({"text": rows}), files[split])
    return files


def replace_wikitext(patch: pytest.MonkeyPatch, files: dict[str, str]) -> None:
    """Load WikiText from these files, and every other data set as before."""
    import datasets
    import huggingface_hub

    load = datasets.load_dataset

    def loaded(path: str, *config: str | None, **options: Any) -> Any:
        if path != "Salesforce/wikitext":  # lm-eval also reads files with this function
            return load(path, *config, **options)
        assert (options["name"], options["revision"]) == ("wikitext-103-raw-v1", "abc")
        return load("parquet", data_files=files, split=options["split"], streaming=options["streaming"])

    patch.setattr(datasets, "load_dataset", loaded)
    patch.setattr(huggingface_hub.HfApi, "dataset_info", lambda *_, **__: SimpleNamespace(sha="abc", siblings=[]))
