"""Texts of an analysis, from the user, a task or a corpus, and as padded batches."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from lit_layers.analyses.base import describe
from lit_layers.data import (
    CorpusTexts,
    EvalText,
    GivenTexts,
    LabelledTexts,
    ProbeTask,
    TaskTexts,
    TextBatches,
    find_task,
    prepare,
)
from lit_layers.data.tokenization import TextTokenizer, load_tokenizer, save_tokenizer, train_bpe
from lit_layers.errors import InputError
from tests.support.labelled_texts import labelled, saved_bert, saved_gpt2, write_banking77

TEXTS = [text for text, _ in labelled(12)]
DEV: Any = "dev"


def test_the_description_of_given_texts_has_their_hash_and_not_their_words():
    texts = GivenTexts(TEXTS)
    assert list(texts.texts()) == TEXTS
    described = json.dumps(describe(texts))
    assert TEXTS[0] not in described
    assert texts.content_hash() in described
    assert texts.content_hash() != GivenTexts(TEXTS[:11]).content_hash() != GivenTexts(TEXTS[1:]).content_hash()


def test_empty_texts_unlabelled_texts_and_options_out_of_range_are_refused(tmp_path):
    cases = [
        (lambda: GivenTexts([]), "texts: expected at least one text, got none"),
        (lambda: GivenTexts(["one", " \n"]), r"texts: expected a text with words, text 1 is ' \\n': leave it out"),
        (lambda: GivenTexts("one"), "texts: expected a list of texts, got one text"),
        (lambda: TaskTexts("banking77", num_texts=0), "num_texts: expected at least 1, got 0"),
        (lambda: CorpusTexts("python", "bpe:300", num_texts=0), "num_texts: expected at least 1, got 0"),
        (lambda: TextBatches(GivenTexts(TEXTS), "t", max_tokens=0), "max_tokens: expected at least 1, got 0"),
        (lambda: TextBatches(GivenTexts(TEXTS), "t", batch_size=0), "batch_size: expected at least 1, got 0"),
    ]
    for make, sentence in cases:
        with pytest.raises(InputError, match=sentence):
            make()
    saved_gpt2(tmp_path / "model")
    (tmp_path / "scores.csv").write_text("text,score\n" + "".join(f"{text},{n / 7}\n" for n, text in enumerate(TEXTS)))
    task = ProbeTask("scored", str(tmp_path / "scores.csv"), label="score", kind="regression", test=None)
    for texts in (TaskTexts(task, folder=str(tmp_path), part="train"), GivenTexts(TEXTS)):
        with pytest.raises(InputError, match="labels: expected the texts of a classification task"):
            list(LabelledTexts(texts, str(tmp_path / "model")))


def test_texts_of_a_task_come_from_its_split_and_a_smaller_number_is_a_subset(tmp_path):
    folder = str(write_banking77(tmp_path, labelled(60), labelled(30, first=60)))
    whole = TaskTexts("banking77", folder=folder)
    assert list(whole.texts()) == [text for text, _ in labelled(30, first=60)]
    some = TaskTexts("banking77", folder=folder, num_texts=7)
    assert len(some.texts()) == len(set(some.texts()) & set(whole.texts())) == 7
    assert set(TaskTexts("banking77", folder=folder, num_texts=5).texts()) < set(some.texts())
    assert set(TaskTexts("banking77", folder=folder, num_texts=7, seed=1).texts()) != set(some.texts())
    train = TaskTexts("banking77", folder=folder, part="train").texts()
    assert set(train) <= {text for text, _ in labelled(60)}


def test_labelled_texts_are_text_batches_with_the_class_of_each_text(tmp_path):
    saved_gpt2(tmp_path / "model")
    rows = labelled(30, first=60)
    task = write_banking77(tmp_path, labelled(60), rows)
    texts = TaskTexts("banking77", folder=str(task), num_texts=11)
    batches = LabelledTexts(texts, str(tmp_path / "model"), max_tokens=30, batch_size=4)
    unlabelled = TextBatches(texts, str(tmp_path / "model"), max_tokens=30, batch_size=4)
    for with_labels, without in zip(batches, unlabelled, strict=True):
        labels = with_labels.pop("labels")
        assert labels.dtype == torch.int64
        assert labels.shape == (len(without["input_ids"]),)
        assert all(torch.equal(with_labels[name], without[name]) for name in without)
    classes = find_task("banking77").load(str(task)).classes or ()
    described = [classes[label] for batch in batches for label in batch["labels"]]
    assert described == [dict(rows)[text] for text in texts.texts()]
    # Other labels are other data, although the texts are the same.
    swapped = LabelledTexts(texts, str(tmp_path / "model"), max_tokens=30, batch_size=4)
    swapped._classes = batches._classes.flip(0)
    assert len({batches.content_hash(), swapped.content_hash(), unlabelled.content_hash()}) == 3


def test_text_batches_hold_each_text_in_order_padded_on_the_right(tmp_path):
    saved_bert(tmp_path)
    tokenizer = load_tokenizer(str(tmp_path)).tokenizer
    batches = TextBatches(GivenTexts(TEXTS), str(tmp_path), max_tokens=30, batch_size=5)
    assert [len(batch["input_ids"]) for batch in batches] == [5, 5, 2]
    assert len(batches) == 3
    found = [
        ids[mask.bool()].tolist()
        for batch in batches
        for ids, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True)
    ]
    assert found == [tokenizer.encode(text).ids for text in TEXTS]
    assert all(mask.tolist() == sorted(mask.tolist(), reverse=True) for b in batches for mask in b["attention_mask"])
    other = TextBatches(GivenTexts(TEXTS), str(tmp_path), max_tokens=30, batch_size=4)
    assert batches.content_hash() != other.content_hash()
    assert batches.tokenizer_hash() == other.tokenizer_hash() is not None


def write_shards(folder: Path, documents: list[str], tokenizer: TextTokenizer) -> tuple[str, str]:
    """Prepare a corpus of these documents and return the paths of its shards and its tokenizer."""
    for number, text in enumerate(documents):
        (folder / "corpus").mkdir(exist_ok=True)
        (folder / "corpus" / f"{number:02d}.txt").write_text(text)
    save_tokenizer(tokenizer, folder / "tokenizer")
    shards = prepare(str(folder / "corpus"), str(folder / "tokenizer"), folder / "shards", validation=0.3)
    return str(shards.folder), str(folder / "tokenizer")


WINDOWS: dict[str, Any] = {"split": "train", "num_tokens": 20, "seed": 3}


def test_windows_of_a_corpus_are_decoded_to_their_text(tmp_path):
    documents = [" ".join(f"{text} and {number + index}" for index, text in enumerate(TEXTS)) for number in range(30)]
    tokenizer = train_bpe(TEXTS * 3, 300)
    paths = write_shards(tmp_path, documents, tokenizer)
    texts = CorpusTexts(*paths, num_texts=9, **WINDOWS)
    windows = EvalText(*paths, num_sequences=9, **WINDOWS).windows()
    assert list(texts.texts()) == [tokenizer.tokenizer.decode(ids) for ids in windows.tolist()]
    assert all(any(text in document for document in documents) for text in texts.texts())
    assert texts.content_hash() == CorpusTexts(*paths, num_texts=9, **WINDOWS).content_hash()


def test_a_window_without_words_is_skipped_and_too_many_windows_are_refused(tmp_path):
    """Some windows of source code have only indentation, and the user cannot leave out a text that is drawn."""
    tokenizer = train_bpe([*TEXTS, "\n \t"], 270)
    documents = [TEXTS[0] + 200 * "\n \t" + f"{TEXTS[1]} {number}" for number in range(30)]
    paths = write_shards(tmp_path, documents, tokenizer)
    windows = EvalText(*paths, num_sequences=400, **WINDOWS).windows()
    drawn = [tokenizer.tokenizer.decode(ids) for ids in windows.tolist()]
    assert any(not text.strip() for text in drawn[:9]), "else this shows nothing"
    texts = CorpusTexts(*paths, num_texts=9, **WINDOWS).texts()
    assert list(texts) == [text for text in drawn if text.strip()][:9]
    refused = r"the train split of .* has [0-9]+ windows with words, expected 399: ask for fewer"
    with pytest.raises(InputError, match=refused):
        CorpusTexts(*paths, num_texts=399, **WINDOWS).texts()
