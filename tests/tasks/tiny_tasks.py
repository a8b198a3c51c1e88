"""Tiny local data of each domain, in the layout of the real data, and a tiny model to score on it."""

import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch

from lit_layers.data.batches import encode_texts
from lit_layers.data.tokenization import load_tokenizer
from lit_layers.models.saved import load
from lit_layers.models.view import LayeredModel
from lit_layers.tasks.catalogue import resolve
from lit_layers.tasks.mteb_scores import MtebTask
from tests.support.data_mapping import write_mapping
from tests.support.labelled_texts import MOODS, labelled, saved_gpt2

NAMES = ["Banking77Classification", "TwitterURLCorpus", "STSBenchmark", "AskUbuntuDupQuestions"]
NAMES += ["TwentyNewsgroupsClustering"]
ENTRIES = """
  TwitterURLCorpus: {files: glue/mrpc_test.parquet, columns: {labels: label}}
  AskUbuntuDupQuestions: reranking/test.parquet
  TwentyNewsgroupsClustering: {files: twenty_newsgroups/sets.parquet, difference: another draw}
"""


def write(path: Path, **columns: list[Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), path)


def write_tiny_data(folder: Path) -> Path:
    """Write songs with their moods as intents, clusters, pairs and answers."""
    with (write_mapping(folder) / "tasks.yaml").open("a") as mapping:  # the file ends with the mteb section
        mapping.write(ENTRIES.lstrip("\n"))
    draw = random.Random(0)
    for split, first, count in (("train", 0, 60), ("test", 60, 30)):
        texts, moods = zip(*labelled(count, first=first), strict=True)
        write(folder / "banking77" / f"{split}.parquet", text=list(texts), label=[*map(MOODS.index, moods)])
    songs = labelled(40)
    pairs = [(draw.choice(songs), draw.choice(songs)) for _ in range(40)]
    firsts, seconds = [first for (first, _), _ in pairs], [second for _, (second, _) in pairs]
    same = [int(mood == other) for (_, mood), (_, other) in pairs]
    write(folder / "glue" / "mrpc_test.parquet", sentence1=firsts, sentence2=seconds, label=same)
    scores = [float(draw.randrange(4) + alike) for alike in same]  # with ties
    write(folder / "glue" / "stsb_test.parquet", sentence1=firsts, sentence2=seconds, score=scores)
    candidates = [(number, draw.choice(songs)) for number in range(8) for _ in range(6)]
    columns: dict[str, list[Any]] = {"query_id": [number for number, _ in candidates]}
    columns["query"] = [f"Who sang a {MOODS[number % 3]} song?" for number, _ in candidates]
    columns["candidate"] = [text for _, (text, _) in candidates]
    # The last question has no correct answer and is left out.
    columns["relevant"] = [int(mood == MOODS[number % 3] and number < 7) for number, (_, mood) in candidates]
    write(folder / "reranking" / "test.parquet", **columns)
    titles = labelled(50)
    sets = [draw.sample(titles, len(titles)) for _ in range(10)]
    sentences = [[text for text, _ in each] for each in sets]
    labels = [[MOODS.index(mood) for _, mood in each] for each in sets]
    write(folder / "twenty_newsgroups" / "sets.parquet", sentences=sentences, labels=labels)
    return folder


def saved_model(folder: Path) -> LayeredModel:
    """Return a GPT-2 of 3 blocks, which is saved in the folder with its tokenizer."""
    if not (folder / "config.json").is_file():
        saved_gpt2(folder)
    return LayeredModel(load(folder))


def embedding_of(folder: Path, **options: Any) -> dict[str, Any]:
    settings: dict[str, Any] = {"max_tokens": 32, "pooling": "mean", "states": "resid"}
    return {"tokenizer": load_tokenizer(str(folder))} | settings | options


def task(name: str, data: Path | None, model: Path, root: Path, **options: Any) -> MtebTask:
    (spec,) = resolve([name], data)
    return MtebTask(task=spec, tokenizer=str(model), results=root / "mteb", **options)


def encoded(model: Path, texts: list[str]) -> Any:
    return encode_texts(str(model), texts, max_tokens=32)


class Passes:
    """Count the texts that pass through a model."""

    def __init__(self, monkeypatch: Any) -> None:
        self.texts = 0
        plain = LayeredModel.pass_states

        def counted(view: LayeredModel, batch: Any, look: Any) -> None:
            self.texts += len(batch["input_ids"])
            plain(view, batch, look)

        monkeypatch.setattr(LayeredModel, "pass_states", counted)


def spoil_(model: LayeredModel, layer: int) -> None:
    """Make the states from one layer on not finite."""
    with torch.no_grad():
        next(model.blocks[layer - 1].parameters()).fill_(float("nan"))
