"""Write the local files of two GLUE tasks, and a tiny BERT whose tokenizer takes pairs of texts."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from tokenizers import Tokenizer, processors

from tests.support.data_mapping import write_mapping
from tests.support.labelled_texts import labelled, saved_bert


def write_glue(folder: Path) -> Path:
    """Write `glue/TASK_SPLIT.parquet` of cola and mrpc with 24 training and 10 validation rows."""
    write_mapping(folder)
    (folder / "glue").mkdir()
    for split, first, count in (("train", 0, 24), ("validation", 30, 10)):
        texts, moods = zip(*labelled(count, first), strict=True)
        others = [text for text, _ in labelled(count, first + 7)]
        classes = [int(mood == "sad") for mood in moods]
        write_rows(folder, f"cola_{split}", sentence=list(texts), label=classes)
        write_rows(folder, f"mrpc_{split}", sentence1=list(texts), sentence2=others, label=classes)
    return folder


def write_rows(folder: Path, name: str, **columns: list) -> None:
    pq.write_table(pa.table(columns), folder / "glue" / f"{name}.parquet")


def saved_bert_of_pairs(folder: Path) -> None:
    """Save a masked language BERT of 3 blocks and 32 positions, whose tokenizer also takes pairs of texts."""
    saved_bert(folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
