"""Labelled texts whose classes a tiny model can separate, and tiny models saved with their own tokenizers."""

import csv
from pathlib import Path

import torch
from torch import nn

from lit_layers.data.tokenization import save_tokenizer, train_bpe
from lit_layers.models.build import causal_lm, save
from tests.support.data_mapping import write_mapping

MOODS = ("merry", "sad", "calm")
GPT2 = {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 32, "vocab_size": 300}
ENDS = ("tonight", "at home", "again", "by the sea")
VERBS = ("sang", "played", "wrote", "heard")


def labelled(num_rows: int, first: int = 0) -> list[tuple[str, str]]:
    """Return texts with the label near their beginning, so that the last token does not reveal it."""
    rows = []
    for number in range(first, first + num_rows):
        mood = MOODS[number % 3]
        end, verb = ENDS[number // 3 % 4], VERBS[number // 12 % 4]
        rows.append((f"A {mood} song they {verb} for number {number} {end}", mood))
    return rows


def write_csv(path: Path, rows: list[tuple[str, str]], columns: tuple[str, str] = ("text", "label")) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([columns, *rows])
    return path


def write_banking77(folder: Path, train: list[tuple[str, str]], test: list[tuple[str, str]]) -> Path:
    """Write the local files of the catalogue's task banking77 with these texts, and return the folder."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    write_mapping(folder)
    (folder / "banking77").mkdir()
    for split, rows in (("train", train), ("test", test)):
        texts, labels = zip(*rows, strict=True)
        numbers = [sorted(set(labels)).index(label) for label in labels]
        table = pa.table({"text": list(texts), "label": numbers, "label_text": list(labels)})
        pq.write_table(table, folder / "banking77" / f"{split}.parquet")
    return folder


def scaled(model: nn.Module, scale: float = 4.0) -> nn.Module:
    """Scale all matrices of a model so that attention is far from uniform; return it in evaluation mode."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(scale)
    return model.eval()


def saved_gpt2(folder: Path, *, dtype: torch.dtype = torch.float32, tokenizer: bool = True, **options) -> nn.Module:
    """Save a tiny random GPT-2 in `folder` with a byte-level BPE, and return the model."""
    model = scaled(causal_lm("gpt2", seed=1, **(GPT2 | options))).to(dtype)
    save(model, folder)
    if tokenizer:
        save_tokenizer(train_bpe([text for text, _ in labelled(60)] * 2, 300), folder)
    return model


def saved_bert(folder: Path) -> nn.Module:
    """Save a tiny random masked language BERT with a WordPiece tokenizer ([CLS] text [SEP]), and return the model."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
    from transformers import BertConfig, BertForMaskedLM, PreTrainedTokenizerFast

    words = {word for text, _ in labelled(60) for word in text.lower().split()}
    digits = {each for digit in "0123456789" for each in (digit, f"##{digit}")}
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *sorted(words | digits)]
    tokenizer = Tokenizer(models.WordPiece({word: n for n, word in enumerate(vocabulary)}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    names = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    config = BertConfig(
        vocab_size=len(vocabulary),
        hidden_size=32,
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=64,
        max_position_embeddings=32,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model = scaled(BertForMaskedLM(config))
    save(model, folder, PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names))
    return model
