"""The embeddings of a task: what is given, what is never mixed, what a kill leaves."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lit_layers.errors import InputError
from lit_layers.models.build import weights_hash
from lit_layers.models.view import LayeredModel
from lit_layers.tasks import embeddings as stores
from lit_layers.tasks.embeddings import TaskEmbeddings
from lit_layers.tasks.text_features import text_features
from tests.support.labelled_texts import labelled
from tests.tasks.tiny_tasks import Passes, embedding_of, encoded, saved_model, spoil_

TEXTS = [text for text, _ in labelled(20)]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    saved_model(folder)
    return folder


@pytest.fixture
def passes(monkeypatch) -> Passes:
    return Passes(monkeypatch)


def asked(folder: Path, view: LayeredModel, model: Path, texts: list[str], layer: int, **options: Any) -> np.ndarray:
    return TaskEmbeddings(view, folder, **embedding_of(model, **options)).of(texts, layer)


def chunks(folder):
    return [path for path in folder.iterdir() if path.suffix == ".npy"]


def test_every_layer_is_what_a_pass_of_its_own_gives(model, tmp_path, passes):
    view = saved_model(model)
    expected = text_features(view, encoded(model, TEXTS), pooling="mean")
    passes.texts = 0
    found = TaskEmbeddings(view, tmp_path, **embedding_of(model))
    for layer in (3, 0, 2, 1):
        assert np.array_equal(found.of(TEXTS, layer), expected.layer(layer).numpy())
    assert passes.texts == len(TEXTS), "one pass gives all layers"


def test_texts_come_in_any_order_and_any_number_of_times(model, tmp_path, passes):
    view, again = saved_model(model), [*reversed(TEXTS), *TEXTS[:3], TEXTS[0]]
    plain = dict(zip(TEXTS, asked(tmp_path, view, model, TEXTS, 2), strict=True))
    passes.texts = 0
    found = TaskEmbeddings(view, tmp_path / "b", **embedding_of(model))
    first = found.of(TEXTS[:5], 2)
    rest = found.of(again, 2)
    assert found.num_texts == len(TEXTS)
    assert passes.texts == len(TEXTS)
    assert np.allclose(first, [plain[text] for text in TEXTS[:5]], atol=1e-5)
    assert np.allclose(rest, [plain[text] for text in again], atol=1e-5)


def test_chunks_are_joined_in_the_order_that_is_asked_for(model, tmp_path, monkeypatch):
    view = saved_model(model)
    whole = asked(tmp_path / "a", view, model, TEXTS, 1)
    monkeypatch.setattr(stores, "CHUNK", 6)
    assert np.allclose(asked(tmp_path / "b", view, model, TEXTS, 1), whole, atol=1e-5)
    assert len(chunks(tmp_path / "b")) == 4


@pytest.mark.parametrize(
    "other",
    [{"pooling": "last"}, {"states": "normed"}, {"max_tokens": 4}],
    ids=["pooling", "states", "max_tokens"],
)
def test_another_way_of_embedding_finds_nothing_of_the_first(model, tmp_path, passes, other):
    view, store = saved_model(model), tmp_path
    first = asked(store, view, model, TEXTS, 3)
    passes.texts = 0
    second = asked(store, view, model, TEXTS, 3, **other)
    assert passes.texts == len(TEXTS)
    assert np.abs(first - second).max() > 1e-3
    passes.texts = 0
    assert np.array_equal(asked(store, view, model, TEXTS, 3), first)
    assert passes.texts == 0, "what was there is found again"


def test_changed_weights_under_the_same_name_find_nothing(model, tmp_path, passes):
    view, store = saved_model(model), tmp_path
    first = asked(store, view, model, TEXTS, 3)
    passes.texts = 0
    next(view.blocks[1].parameters()).data.mul_(1.5)  # which leaves no trace but the values
    assert np.abs(asked(store, view, model, TEXTS, 3) - first).max() > 1e-3
    assert passes.texts == len(TEXTS)


def test_a_text_without_a_token_is_the_end_of_a_text(model, tmp_path):
    view = saved_model(model)
    found = TaskEmbeddings(view, tmp_path, **embedding_of(model))
    empty, given = found.of(["", found.tokenizer.end_of_text], 3)
    assert found.num_empty == 1
    assert np.allclose(empty, given, atol=1e-6)


def test_states_that_are_not_finite_are_refused_with_their_layer_and_the_others_given(model, tmp_path):
    whole = asked(tmp_path / "whole", saved_model(model), model, TEXTS, 1)
    view = saved_model(model)
    spoil_(view, 2)
    assert np.array_equal(asked(tmp_path, view, model, TEXTS, 1), whole)
    with pytest.raises(InputError, match=r"the features of text \d+ at layer 2 are not finite"):
        asked(tmp_path, view, model, TEXTS, 2)


def test_a_place_that_cannot_be_written_is_named(model, tmp_path):
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(InputError, match="cannot write .*file"),
        stores.opened(tmp_path / "file", saved_model(model), **embedding_of(model), task="Songs", weights_hash="x"),
    ):
        pass


def test_the_embeddings_of_a_task_go_once_it_is_scored_and_stay_where_it_broke_off(model, tmp_path, passes):
    view = saved_model(model)
    opened = {"task": "Songs", "weights_hash": weights_hash(view.model)}
    with (
        pytest.raises(IndexError),
        stores.opened(tmp_path, view, **embedding_of(model), **opened) as found,
    ):
        found.of(TEXTS, 9)
    assert passes.texts == len(TEXTS)
    passes.texts = 0
    with stores.opened(tmp_path, view, **embedding_of(model), **opened) as found:
        found.of(TEXTS, 1)
    assert passes.texts == 0
    assert not list(tmp_path.glob("Songs-*"))
