"""Write a few rows of five benchmarks, as local files and as the data sets of lm-eval, and a small tokenizer."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import torch
import yaml

from lit_layers.data.tokenization import save_tokenizer, train_bpe
from tests.support.data_mapping import write_mapping
from tests.support.tiny_models import tiny

TASKS = ("lambada", "arc_challenge", "hellaswag", "winogrande", "gsm8k")
_FILES = {  # the task file of lm-eval, and the split it scores
    "lambada": ("lambada/lambada_openai.yaml", "test"),
    "arc_challenge": ("arc/arc_challenge.yaml", "test"),
    "hellaswag": ("hellaswag/hellaswag.yaml", "validation"),
    "winogrande": ("winogrande/default.yaml", "validation"),
    "gsm8k": ("gsm8k/gsm8k.yaml", "test"),
}
_LAMBADA = [
    "The kettle sang on the stove. “Will you pour?” she asked, and he reached for the kettle",
    "A dog ran over the wet field.\n\nNobody could say whose it was, that dog",
    "I had kept the letter for years , unopened, and now he wanted the letter.",
    "Two boats left the harbour at dawn, and by noon there was only one boats",
    "She counted the stairs: one, two, three,  four",
]
_ARC = [
    ("Which of these is a source of light?", ["the moon", "the sun", "a mirror", "a window"], "B"),
    ("What does a plant take in?", ["oxygen", "sand", "carbon dioxide"], "3"),
    ("Ice that melts becomes", ["water", "steam", "salt", "air", "stone"], "A"),
    ("How far does a stone fall in one second?", ["about 5 m", "about 50 m", "1 m", "9.8 km"], "A"),
]
_HELLASWAG = [  # activity, first and second half, endings, label
    ("High jump", "A boy is running down a track.", "the boy", ["jumps over it.", "eats.", "sings a song.", "is."], 0),
    ("Family Life", "[header] How to rest [title] Close the door. [step] Noise wakes people.", "",
     ["[substeps] Put a sign on it. Wait.", "[title] Open it.", "Sing.", "Run  away [title] Now."], 2),
    ("Ironing", "A woman irons in a bedroom.", "then the woman from Rome",
     [", she stops.", "goes.", "sits, and she reads.", "x"], 3),
]  # fmt: skip
_CLEANED = [  # the same rows after cleaning, written by hand
    ("High jump: A boy is running down a track. The boy", _HELLASWAG[0][3]),
    ("Family Life: How to rest. Close the door. Noise wakes people.",
     [" Put a sign on it. Wait.", " Open it.", "Sing.", "Run away. Now."]),
    ("Ironing: A woman irons in a bedroom. Then the woman from rome", _HELLASWAG[2][3]),
]  # fmt: skip
_WINOGRANDE = [
    ("The cup did not fit into the bag because the _ was too big.", "cup", "bag", "1"),
    ("Ann paid Eve, so _ was thanked.", "Ann", "Eve", "1"),
    ("He chose the train over the car, as the _ is slow .", "train", "car", "2"),
]
_ASKED, _ANSWERED = "Tom has {} nuts and eats {}. How many are left?", "He has {0} - {1} = <<{0}-{1}={2}>>."
_SOLVED = [(_ASKED.format(n, n // 2), _ANSWERED.format(n, n // 2, n - n // 2)) for n in range(4, 16)]


def write_tasks(folder: Path) -> Path:
    """Write the files of the five tasks to `folder`, and `tasks.yaml` to its parent."""
    assert folder.name == "benchmarks", "the folder that the mapping names"
    write_mapping(folder.parent)
    folder.mkdir(exist_ok=True)
    _write_parquet(folder / "lambada_openai_test.parquet", [{"text": text} for text in _LAMBADA])
    arc = [(*row[:2], _choice_index(row[2])) for row in _ARC]
    _write_parquet(folder / "arc_challenge_test.parquet", _row_dicts(("question", "choices", "label"), arc))
    cleaned = [(*row, original[4]) for row, original in zip(_CLEANED, _HELLASWAG, strict=True)]
    _write_parquet(folder / "hellaswag_validation.parquet", _row_dicts(("query", "choices", "label"), cleaned))
    winogrande = [{"sentence": row[0], "choices": [*row[1:3]], "label": int(row[3]) - 1} for row in _WINOGRANDE]
    _write_parquet(folder / "winogrande_validation.parquet", winogrande)
    solved = _official("gsm8k")
    _write_parquet(folder / "gsm8k_test.parquet", solved[:4])
    _write_parquet(folder / "gsm8k_train_sample.parquet", solved[4:])
    return folder


def scored_pairs(task: str, row: dict) -> list[tuple[str, str]]:
    """Return the contexts and continuations that score a row, as lm-eval's task files define them."""
    if task == "arc_challenge":
        return [(f"Question: {row['question']}\nAnswer:", f" {choice}") for choice in row["choices"]]
    before, after = row["sentence"].split("_")
    return [(before + choice, f" {after.strip()}") for choice in row["choices"]]


def lm_eval_file(task: str, folder: Path) -> str:
    """Write lm-eval's own task file for these rows, in the columns of its data set, and return the path."""
    import lm_eval

    folder.mkdir(parents=True, exist_ok=True)
    own, split = _FILES[task]
    rows = _official(task)
    scored, others = folder / f"{task}_{split}.parquet", folder / f"{task}_train.parquet"
    _write_parquet(scored, rows[:4] if task == "gsm8k" else rows)
    _write_parquet(others, rows[4:] if task == "gsm8k" else rows)
    files = {split: str(scored), "train": str(others)}
    content = {
        "include": str(Path(lm_eval.__file__).parent / "tasks" / own),
        "task": f"{task}_of_these_rows",
        "dataset_path": "parquet",
        "dataset_name": None,
        "dataset_kwargs": {"data_files": files, "cache_dir": str(folder / "cache")},
    }
    path = folder / f"{task}.yaml"
    path.write_text(yaml.safe_dump(content))
    return str(path)


def write_tokenizer(folder: Path) -> Path:
    """Save a byte-level tokenizer of 400 tokens, trained on the rows.

    Some words have several tokens, and the end of a context can merge with its continuation.
    """
    texts = [str(value) for task in TASKS for row in _official(task) for value in row.values()]
    save_tokenizer(train_bpe(texts * 3, 400), folder)
    return folder


def tiny_causal_model(name: str = "gpt2", *, blocks: int = 5, positions: int = 600, **options) -> torch.nn.Module:
    """Return a random causal model for the 400 tokens of `write_tokenizer` and its end-of-text token."""
    depth, length = ("n_layer", "n_positions") if name == "gpt2" else ("num_hidden_layers", "max_position_embeddings")
    options = {"vocab_size": 400, depth: blocks, length: positions, "bos_token_id": 0, "eos_token_id": 0, **options}
    return tiny(name, **options)


def _official(task: str) -> list[dict]:
    if task == "lambada":
        return [{"text": text} for text in _LAMBADA]
    if task == "arc_challenge":
        labels = [list("12345" if row[2].isdigit() else "ABCDE")[: len(row[1])] for row in _ARC]
        rows = [(row[0], {"text": row[1], "label": each}, row[2]) for row, each in zip(_ARC, labels, strict=True)]
        return _row_dicts(("question", "choices", "answerKey"), rows)
    if task == "hellaswag":
        rows = [(*row[:4], str(row[4])) for row in _HELLASWAG]
        return _row_dicts(("activity_label", "ctx_a", "ctx_b", "endings", "label"), rows)
    if task == "winogrande":
        return _row_dicts(("sentence", "option1", "option2", "answer"), _WINOGRANDE)
    return [{"question": question, "answer": f"{answer}\n#### {n}"} for n, (question, answer) in enumerate(_SOLVED)]


def _row_dicts(names: tuple[str, ...], rows: list[tuple]) -> list[dict]:
    return [dict(zip(names, row, strict=True)) for row in rows]


def _choice_index(key: str) -> int:
    return int(key) - 1 if key.isdigit() else "ABCDE".index(key)


def _write_parquet(path: Path, rows: list[dict]) -> None:
    pq.write_table(pa.Table.from_pylist(rows), path)
