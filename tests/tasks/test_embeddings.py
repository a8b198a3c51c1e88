"""Embeddings of a task: their values, their order, and empty and truncated texts."""

from pathlib import Path

import numpy as np
import pytest

from lit_layers.tasks import embeddings as stores
from lit_layers.tasks.embeddings import TaskEmbeddings
from lit_layers.tasks.text_features import text_features
from tests.support.labelled_texts import labelled
from tests.tasks.tiny_tasks import Passes, embedding_of, encoded, saved_model

TEXTS = [text for text, _ in labelled(20)]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    saved_model(folder)
    return folder


def test_embeddings_of_texts_in_any_order_equal_those_of_one_pass(model, monkeypatch):
    view, again = saved_model(model), [*reversed(TEXTS), *TEXTS[:3], TEXTS[0]]
    expected = text_features(view, encoded(model, TEXTS), pooling="mean")
    passes, found = Passes(monkeypatch), TaskEmbeddings(view, **embedding_of(model))
    for layer in (3, 0, 2, 1):
        assert np.array_equal(found.embed(TEXTS, layer), expected.layer(layer).numpy())
    rows = [TEXTS.index(text) for text in again]
    assert np.array_equal(found.embed(again, 2), expected.layer(2).numpy()[rows])
    assert (passes.texts, found.num_texts) == (len(TEXTS), len(TEXTS)), "one pass gives all layers"
    monkeypatch.setattr(stores, "CHUNK", 6)
    parts = TaskEmbeddings(view, **embedding_of(model))
    for given in (TEXTS[:5], again):
        rows = [TEXTS.index(text) for text in given]
        assert np.allclose(parts.embed(given, 2), expected.layer(2).numpy()[rows], atol=1e-5)


def test_an_empty_text_is_read_as_the_end_of_text(model):
    view = saved_model(model)
    found = TaskEmbeddings(view, **embedding_of(model))
    empty, given = found.embed(["", found.tokenizer.end_of_text], 3)
    assert (found.num_empty, found.num_cut) == (1, 0)
    short = TaskEmbeddings(view, **embedding_of(model, max_tokens=4))
    short.embed(["a", *TEXTS[:3]], 3)
    assert short.num_cut == 3
    assert np.allclose(empty, given, atol=1e-6)
