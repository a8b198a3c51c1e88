"""What the recipes of published figures ask for, as the Hub has it, with tiny weights: every repository by its own
name, family and number of blocks, its branches, and every data set with as many rows as the published split has."""

import random
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import yaml
from filelock import FileLock

from lit_layers.data.tokenization import save_tokenizer, train_bpe
from tests.support.data_mapping import with_mapping
from tests.support.saved_models import saved
from tests.support.series_hub import make_series

POSITIONS = 512
PYTHIAS = {"14m": 6, "70m": 6, "160m": 12, "410m": 24, "1b": 16, "1.4b": 24, "2.8b": 32, "6.9b": 32, "12b": 36}
STEPS = (0, 1, 64, 128, 256, 512, 1000, 2000, 4000, 8000, 16000, 32000, 64000, 128000, 143000)
SERIES = ("70m", "160m", "410m", "6.9b", "12b")  # of which branches are asked for
MODELS = {  # repository: family and blocks
    "gpt2": ("gpt2", 12),
    "gpt2-medium": ("gpt2", 24),
    "gpt2-large": ("gpt2", 36),
    "gpt2-xl": ("gpt2", 48),
    "Qwen/Qwen1.5-0.5B": ("qwen2", 24),
    "Qwen/Qwen1.5-1.8B": ("qwen2", 24),
    "Qwen/Qwen1.5-4B": ("qwen2", 40),
    "Qwen/Qwen1.5-7B": ("qwen2", 32),
    "Qwen/Qwen1.5-14B": ("qwen2", 40),
    "Qwen/Qwen2-7B": ("qwen2", 28),
    "Qwen/Qwen2.5-0.5B": ("qwen2", 24),
    "Qwen/Qwen2.5-7B": ("qwen2", 28),
    "Qwen/Qwen2.5-Math-7B": ("qwen2", 28),
    "allenai/OLMo-1B-hf": ("olmo", 16),
    "allenai/OLMo-1.7-7B-hf": ("olmo", 32),
    "microsoft/phi-1": ("phi", 24),
    "microsoft/phi-1_5": ("phi", 24),
    "microsoft/phi-2": ("phi", 32),
    "microsoft/Phi-3.5-mini-instruct": ("phi3", 32),
    "google/gemma-2b": ("gemma", 18),
    "google/gemma-7b": ("gemma", 28),
    "meta-llama/Llama-2-7b-hf": ("llama", 32),
    "meta-llama/Llama-2-13b-hf": ("llama", 40),
    "meta-llama/Meta-Llama-3-8B": ("llama", 32),
    "meta-llama/Llama-3.1-8B-Instruct": ("llama", 32),
    "lmsys/vicuna-7b-v1.5": ("llama", 32),
    "microsoft/Orca-2-7b": ("llama", 32),
    "mistralai/Mistral-7B-v0.1": ("mistral", 32),
    "mistralai/Mistral-7B-v0.3": ("mistral", 32),
    "mistralai/Mistral-7B-Instruct-v0.1": ("mistral", 32),
    "mistralai/Mistral-7B-Instruct-v0.2": ("mistral", 32),
    "tiiuae/falcon-11B": ("falcon", 60),
    "EleutherAI/gpt-neo-1.3B": ("gpt_neo", 24),
    "state-spaces/mamba-370m-hf": ("mamba_lm", 48),
    "bert-base-uncased": ("bert", 12),
    "bert-large-uncased": ("bert", 24),
    **{f"EleutherAI/pythia-{size}": ("gpt_neox", blocks) for size, blocks in PYTHIAS.items()},
}
# Without a tokenizer.json of their own: the recipes name another repository's.
BORROWED = dict.fromkeys(("lmsys/vicuna-7b-v1.5", "microsoft/Orca-2-7b"), "hf-internal-testing/llama-tokenizer")
WORDS = (
    *("between", "another", "country", "through", "government", "children", "against", "without", "during", "national"),
    *("general", "several", "important", "company", "question", "including", "political", "possible", "interest"),
    *("business", "service", "community", "research", "history", "program"),
)


def words(chance: random.Random, least: int = 10, most: int = 18) -> str:
    """A sentence of words that are no two times the same."""
    return " ".join([*chance.choices(WORDS, k=chance.randint(least, most)), str(chance.randrange(10**6))])


def once(folder: Path, write: Callable[[Path], object]) -> Path:
    """A folder that the first process of the tests to ask for it writes; the others read it, and none changes it."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(folder.with_name(f"{folder.name}.lock")):
        if not folder.exists():
            draft = folder.with_name(f"{folder.name}.draft")
            shutil.rmtree(draft, ignore_errors=True)
            write(draft)
            draft.rename(folder)
    return folder


def write_hub(root: Path, names: Iterable[str] = MODELS, *, series: tuple[str, ...] = SERIES) -> Path:
    """The repositories, each with weights of its own; those of a series with a branch for each step."""
    chance = random.Random(0)
    tokenizer = train_bpe([words(chance) for _ in range(300)], 300)
    for number, name in enumerate(sorted(names)):
        family, blocks = MODELS[name]
        folder = root / name / "main"
        counts = {"n_layer": blocks} if family in ("gpt2", "mpt") else {"num_hidden_layers": blocks}
        if family == "gpt_neo":
            counts |= {"num_layers": blocks, "attention_types": [[["global", "local"], blocks // 2]]}
        longest = "n_positions" if family == "gpt2" else "max_position_embeddings"
        longer = {} if family == "mamba_lm" else {longest: POSITIONS}
        saved(folder, family, shard="1GB", vocab_size=300, seed=number, **counts, **longer)
        save_tokenizer(tokenizer, folder)
        if name in BORROWED:
            (folder / "tokenizer.json").unlink()
            (root / BORROWED[name] / "main").mkdir(parents=True, exist_ok=True)
            save_tokenizer(tokenizer, root / BORROWED[name] / "main")
        if name.rpartition("pythia-")[2] in series and "pythia" in name:
            folder.rename(root / name / "made")
            # far from the model a block's derivative in float32 is too rough to be held against
            values = {step: number / 64 for number, step in enumerate(STEPS)}
            make_series(root / name / "made", root / name, STEPS, values=values)
            for file in (root / name / "made").iterdir():
                file.unlink()
            (root / name / "made").rmdir()
    return root


ROWS = {  # of the published splits
    "banking77": {"train": 10_003, "test": 3_080},
    "ag_news": {"train": 120_000, "test": 7_600},
    "tweet_sentiment": {"train": 27_481, "test": 3_534},
    "yelp_reviews": {"validation": 5_000, "test": 5_000},
    "benchmarks": {
        "arc_challenge_test": 1_172,
        "arc_challenge_train": 1_119,
        "gsm8k_test": 1_319,
        "gsm8k_train_sample": 7_473,
        "hellaswag_validation": 10_042,
        "lambada_openai_test": 5_153,
        "mmlu_test": 14_042,
        "truthfulqa_generation": 817,
        "winogrande_validation": 1_267,
    },
    "glue": {
        "cola_train": 8_551,
        "cola_validation": 1_043,
        "mrpc_train": 3_668,
        "mrpc_validation": 408,
        "mrpc_test": 1_725,
        "rte_train": 2_490,
        "rte_validation": 277,
        "sst2_train": 67_349,
        "sst2_validation": 872,
        "stsb_train": 5_749,
        "stsb_validation": 1_500,
        "stsb_test": 1_379,
    },
    "sts": {"sick_train": 4_500, "sick_validation": 500, "sick_test": 4_927},
    "analogies": {"bats3": 2_000},
}
HUMANITIES = ("philosophy", "prehistory", "world_religions", "college_physics")


def with_arc_to_train_on(root: Path) -> None:
    """Adds ARC's training rows to the `tasks.yaml` of a folder."""
    content = yaml.safe_load((root / "tasks.yaml").read_text())
    files = {split: f"benchmarks/arc_challenge_{split}.parquet" for split in ("train", "test")}
    content["benchmark"]["arc_challenge"] = {"files": files}
    content["probe"]["yelp"]["options"]["balance"] = None  # all rows of a small copy
    (root / "tasks.yaml").write_text(yaml.safe_dump(content))


def write_data(root: Path, *, most: int | None = None) -> Path:
    """A folder of local data with a `tasks.yaml`, each file with as many rows as the published split; but for
    the benchmarks, of which prompts are drawn, `most` at the most."""
    with_mapping(root)
    with_arc_to_train_on(root)
    for folder, files in ROWS.items():
        (root / folder).mkdir(exist_ok=True)
        for name, published in files.items():
            number = published if most is None or folder == "benchmarks" else min(published, most)
            chance = random.Random(f"{folder}/{name}")
            rows = [_row(folder, name, n, chance) for n in range(number)]
            pq.write_table(pa.Table.from_pylist(rows), root / folder / f"{name}.parquet")
    return root


def _row(folder: str, name: str, n: int, chance: random.Random) -> dict:
    text, other, task = words(chance), words(chance), name.partition("_")[0]
    match folder:
        case "banking77":
            return {"text": text, "label_text": f"intent {n % 77}", "label": n % 77}
        case "ag_news":
            return {"text": text, "label": n % 4}
        case "tweet_sentiment":
            return {"text": text, "label_text": ("negative", "neutral", "positive")[n % 3], "label": n % 3}
        case "yelp_reviews":
            return {"text": text, "label": n % 5, "stars": 1 + n % 5}
        case "glue":
            pair = {"sentence": text} if task in ("cola", "sst2") else {"sentence1": text, "sentence2": other}
            return pair | ({"score": 5 * chance.random()} if task == "stsb" else {"label": n % 2})
        case "sts":
            return {"sentence1": text, "sentence2": other, "score": 1 + chance.random() * 4}
        case "analogies":
            category = n // 50
            return {
                "category_id": f"I{category:02d}",
                "category": f"category {category}",
                "group": "Inflectional_morphology",
                "word": f"{WORDS[n % len(WORDS)]}{n}",
                "answers": [f"{WORDS[n % len(WORDS)]}{n}s"],
            }
    choices = [words(chance, 2, 4) for _ in range(4)]
    return {
        "arc": {"question": text, "choices": choices, "label": n % 4},
        "gsm8k": {"question": text, "answer": f"{other}\n#### {n % 100}"},
        "hellaswag": {"query": text, "choices": choices, "label": n % 4},
        "lambada": {"text": f"{text} {other}"},
        "mmlu": {"question": text, "choices": choices, "label": n % 4, "subject": HUMANITIES[n % 4]},
        "truthfulqa": {"question": text},
        "winogrande": {"sentence": f"{text} _ {other}", "choices": choices[:2], "label": n % 2},
    }[task]


def wikitext_files(folder: Path) -> dict[str, str]:
    """Lines of WikiText as the Hub has them: 60 articles of validation, a few of training."""
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
