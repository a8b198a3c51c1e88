"""Texts of an analysis: given, of a task, of a corpus; and as padded batches."""

import json
from typing import Any

import pytest
import torch

from lit_layers.analyses import Representation
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
from lit_layers.data.tokenization import load_tokenizer, save_tokenizer, train_bpe
from lit_layers.errors import InputError
from lit_layers.models.view import LayeredModel
from tests.support.labelled_texts import labelled, saved_bert, saved_gpt2, write_banking77
from tests.support.measured import records_of

TEXTS = [text for text, _ in labelled(12)]
DEV: Any = "dev"


def test_given_texts_are_told_by_their_hash_and_not_by_their_words():
    texts = GivenTexts(TEXTS)
    assert list(texts.texts()) == TEXTS
    told = json.dumps(describe(texts))
    assert TEXTS[0] not in told
    assert texts.content_hash() in told
    assert texts.content_hash() != GivenTexts(TEXTS[:11]).content_hash() != GivenTexts(TEXTS[1:]).content_hash()


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: GivenTexts([]), "texts: expected at least one text, got none"),
        (lambda: GivenTexts(["one", " \n"]), r"texts: expected a text with words, text 1 is ' \\n': leave it out"),
        (lambda: GivenTexts("one"), "texts: expected a list of texts, got one text"),
        (lambda: TaskTexts("banking77", num_texts=0), "num_texts: expected at least 1, got 0"),
        (lambda: CorpusTexts("python", "bpe:300", num_texts=0), "num_texts: expected at least 1, got 0"),
        (lambda: TextBatches(GivenTexts(TEXTS), "t", max_tokens=0), "max_tokens: expected at least 1, got 0"),
        (lambda: TextBatches(GivenTexts(TEXTS), "t", batch_size=0), "batch_size: expected at least 1, got 0"),
    ],
)
def test_texts_without_words_and_options_out_of_range_are_refused(make, sentence):
    with pytest.raises(InputError, match=sentence):
        make()


def test_texts_of_a_task_are_those_of_its_part_and_fewer_are_some_of_them(tmp_path):
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
    alone = TextBatches(texts, str(tmp_path / "model"), max_tokens=30, batch_size=4)
    for with_labels, without in zip(batches, alone, strict=True):
        labels = with_labels.pop("labels")
        assert labels.dtype == torch.int64
        assert labels.shape == (len(without["input_ids"]),)
        assert all(torch.equal(with_labels[name], without[name]) for name in without)
    classes = find_task("banking77").load(str(task)).classes or ()
    told = [classes[label] for batch in batches for label in batch["labels"]]
    assert told == [dict(rows)[text] for text in texts.texts()]
    # Other labels are other data, though the texts are the same.
    swapped = LabelledTexts(texts, str(tmp_path / "model"), max_tokens=30, batch_size=4)
    swapped._classes = batches._classes.flip(0)
    assert len({batches.content_hash(), swapped.content_hash(), alone.content_hash()}) == 3


@pytest.mark.parametrize("regression", [False, True])
def test_texts_without_classes_have_no_labels(regression, tmp_path):
    saved_gpt2(tmp_path / "model")
    (tmp_path / "scores.csv").write_text("text,score\n" + "".join(f"{text},{n / 7}\n" for n, text in enumerate(TEXTS)))
    task = ProbeTask("scored", str(tmp_path / "scores.csv"), label="score", kind="regression", test=None)
    texts = TaskTexts(task, folder=str(tmp_path), part="train") if regression else GivenTexts(TEXTS)
    with pytest.raises(InputError, match="labels: expected the texts of a classification task"):
        list(LabelledTexts(texts, str(tmp_path / "model")))


@pytest.mark.parametrize("saved", [saved_gpt2, saved_bert])
def test_text_batches_hold_each_text_in_its_order_padded_on_the_right(saved, tmp_path):
    saved(tmp_path)
    tokenizer = load_tokenizer(str(tmp_path)).tokenizer
    expected = [tokenizer.encode(text).ids[:30] for text in TEXTS]
    batches = TextBatches(GivenTexts(TEXTS), str(tmp_path), max_tokens=30, batch_size=5)
    assert [len(batch["input_ids"]) for batch in batches] == [5, 5, 2]
    assert len(batches) == 3
    found = [
        ids[mask.bool()].tolist()
        for batch in batches
        for ids, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True)
    ]
    assert [ids[:29] for ids in found] == [ids[:29] for ids in expected]
    assert all(mask.tolist() == sorted(mask.tolist(), reverse=True) for b in batches for mask in b["attention_mask"])
    other = TextBatches(GivenTexts(TEXTS), str(tmp_path), max_tokens=30, batch_size=4)
    assert batches.content_hash() != other.content_hash()
    assert batches.tokenizer_hash() == other.tokenizer_hash() is not None


def test_a_representation_of_texts_does_not_depend_on_who_stands_beside_whom(tmp_path):
    model = LayeredModel(saved_gpt2(tmp_path, dtype=torch.float64))
    found = []
    for size in (1, 5):
        batches = TextBatches(GivenTexts(TEXTS), str(tmp_path), max_tokens=30, batch_size=size)
        found.append(
            {(r.metric, r.layer, *r.tags.values()): r for r in records_of(Representation(batches=batches), model)}
        )
    alone, together = found
    assert alone.keys() == together.keys()
    for key, record in alone.items():
        assert record.value == pytest.approx(together[key].value, rel=1e-8), key
    assert alone["effective_rank", 1, 0].n == 12


def test_windows_of_a_corpus_are_turned_back_into_their_text(tmp_path):
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    for number in range(30):
        words = " ".join(f"{text} and {number + index}" for index, text in enumerate(TEXTS))
        (corpus / f"{number:02d}.txt").write_text(words)
    save_tokenizer(train_bpe(TEXTS * 3, 300), tmp_path / "tokenizer")
    shards = prepare(str(corpus), str(tmp_path / "tokenizer"), tmp_path / "shards", validation=0.3)
    place = (str(shards.folder), str(tmp_path / "tokenizer"))
    options = {"split": "train", "num_tokens": 20, "seed": 3}
    texts = CorpusTexts(*place, num_texts=9, **options)
    windows = EvalText(*place, num_sequences=9, **options).windows()
    tokenizer = load_tokenizer(str(tmp_path / "tokenizer")).tokenizer
    assert list(texts.texts()) == [tokenizer.decode(ids) for ids in windows.tolist()]
    all_text = " ".join(path.read_text() for path in sorted(corpus.iterdir()))
    assert all(text in all_text for text in texts.texts())
    assert texts.content_hash() == CorpusTexts(*place, num_texts=9, **options).content_hash()


def test_a_window_without_a_word_is_passed_over_and_too_many_are_refused(tmp_path):
    """Of source code some windows are indents alone, and nobody can leave out a text that is drawn."""
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    for number in range(30):
        (corpus / f"{number:02d}.txt").write_text(TEXTS[0] + 200 * "\n \t" + f"{TEXTS[1]} {number}")
    save_tokenizer(train_bpe([*TEXTS, "\n \t"], 270), tmp_path / "tokenizer")
    shards = prepare(str(corpus), str(tmp_path / "tokenizer"), tmp_path / "shards", validation=0.3)
    place = (str(shards.folder), str(tmp_path / "tokenizer"))
    options = {"split": "train", "num_tokens": 20, "seed": 3}
    texts = CorpusTexts(*place, num_texts=9, **options).texts()
    tokenizer = load_tokenizer(str(tmp_path / "tokenizer")).tokenizer
    drawn = [tokenizer.decode(ids) for ids in EvalText(*place, num_sequences=400, **options).windows().tolist()]
    words = [text for text in drawn if text.strip()]
    assert any(not text.strip() for text in drawn[:9]), "else this shows nothing"
    assert list(texts) == words[:9]
    refused = r"the train split of .* has [0-9]+ windows with words, expected 399: ask for fewer"
    with pytest.raises(InputError, match=refused):
        CorpusTexts(*place, num_texts=399, **options).texts()
