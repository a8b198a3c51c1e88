"""The store of embeddings: what it gives, what it never mixes, what a kill leaves, what stays."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lit_layers.analyses.probes.task_features import text_features
from lit_layers.errors import InputError
from lit_layers.models.build import weights_hash
from lit_layers.models.view import LayeredModel
from lit_layers.tasks import embeddings as stores
from lit_layers.tasks.embeddings import Store
from tests.support.labelled_texts import labelled
from tests.tasks.tiny_tasks import Passes, embedding_of, encoded, saved_model, spoil_, store_in

TEXTS = [text for text, _ in labelled(20)]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    saved_model(folder)
    return folder


@pytest.fixture
def passes(monkeypatch) -> Passes:
    return Passes(monkeypatch)


def asked(store: Store, view: LayeredModel, model: Path, texts: list[str], layer: int, **options: Any) -> np.ndarray:
    task = options.pop("task", "Songs")
    hashed = weights_hash(view.model)
    with store.opened(view, embedding_of(model, **options), task=task, weights_hash=hashed) as found:
        return found.of(texts, layer)


def chunks(folder):
    return [path for path in folder.iterdir() if path.is_dir()]


def test_every_layer_is_what_a_pass_of_its_own_gives(model, tmp_path, passes):
    view = saved_model(model)
    expected = text_features(view, encoded(model, TEXTS), pooling="mean")
    passes.texts = 0
    hashed = weights_hash(view.model)
    with store_in(tmp_path).opened(view, embedding_of(model), task="Songs", weights_hash=hashed) as found:
        for layer in (3, 0, 2, 1):
            assert np.array_equal(found.of(TEXTS, layer), expected.layer(layer).numpy())
    assert passes.texts == len(TEXTS), "one pass gives all layers"


def test_texts_come_in_any_order_and_any_number_of_times(model, tmp_path, passes):
    view, again = saved_model(model), [*reversed(TEXTS), *TEXTS[:3], TEXTS[0]]
    plain = dict(zip(TEXTS, asked(store_in(tmp_path), view, model, TEXTS, 2), strict=True))
    passes.texts = 0
    hashed = weights_hash(view.model)
    with store_in(tmp_path / "b").opened(view, embedding_of(model), task="Songs", weights_hash=hashed) as found:
        first = found.of(TEXTS[:5], 2)
        rest = found.of(again, 2)
        assert found.num_texts == len(TEXTS)
    assert passes.texts == len(TEXTS)
    assert np.allclose(first, [plain[text] for text in TEXTS[:5]], atol=1e-5)
    assert np.allclose(rest, [plain[text] for text in again], atol=1e-5)


def test_chunks_are_joined_in_the_order_that_is_asked_for(model, tmp_path, monkeypatch):
    view = saved_model(model)
    whole = asked(store_in(tmp_path / "a"), view, model, TEXTS, 1)
    monkeypatch.setattr(stores, "CHUNK", 6)
    assert np.allclose(asked(store_in(tmp_path / "b"), view, model, TEXTS, 1), whole, atol=1e-5)
    assert len(chunks(next((tmp_path / "b").glob("Songs-*")))) == 4


@pytest.mark.parametrize(
    "other",
    [{"pooling": "last"}, {"states": "normed"}, {"max_tokens": 4}],
    ids=["pooling", "states", "max_tokens"],
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_another_way_of_embedding_finds_nothing_of_the_first(model, tmp_path, passes, other, dtype):
    view, store = saved_model(model), store_in(tmp_path, dtype=dtype)
    first = asked(store, view, model, TEXTS, 3)
    passes.texts = 0
    second = asked(store, view, model, TEXTS, 3, **other)
    assert passes.texts == len(TEXTS)
    assert np.abs(first - second).max() > 1e-3
    passes.texts = 0
    assert np.array_equal(asked(store, view, model, TEXTS, 3), first)
    assert passes.texts == 0, "what was there is found again"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_changed_weights_under_the_same_name_find_nothing(model, tmp_path, passes, dtype):
    view, store = saved_model(model), store_in(tmp_path, dtype=dtype)
    first = asked(store, view, model, TEXTS, 3)
    passes.texts = 0
    next(view.blocks[1].parameters()).data.mul_(1.5)  # which leaves no trace but the values
    assert np.abs(asked(store, view, model, TEXTS, 3) - first).max() > 1e-3
    assert passes.texts == len(TEXTS)


def test_one_text_in_two_tasks_has_one_embedding(model, tmp_path):
    view, store = saved_model(model), store_in(tmp_path)
    songs = asked(store, view, model, TEXTS, 2)
    other = asked(store, view, model, ["Another text", *TEXTS[:4]], 2, task="Others")
    assert np.allclose(other[1:], songs[:4], atol=1e-5)


def test_a_text_without_a_token_is_the_end_of_a_text(model, tmp_path):
    view = saved_model(model)
    hashed, end = weights_hash(view.model), embedding_of(model).tokenizer.end_of_text
    with store_in(tmp_path).opened(view, embedding_of(model), task="Songs", weights_hash=hashed) as found:
        empty, given = found.of(["", end], 3)
        assert found.num_empty == 1
    assert np.allclose(empty, given, atol=1e-6)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_states_that_are_not_finite_are_refused_with_their_layer_and_the_others_given(model, tmp_path, dtype):
    whole = asked(store_in(tmp_path / "whole", dtype=dtype), saved_model(model), model, TEXTS, 1)
    view = saved_model(model)
    spoil_(view, 2)
    assert np.array_equal(asked(store_in(tmp_path, dtype=dtype), view, model, TEXTS, 1), whole)
    with pytest.raises(InputError, match=r"the features of text \d+ at layer 2 are not finite"):
        asked(store_in(tmp_path, dtype=dtype), view, model, TEXTS, 2)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_halves_take_half_the_room_and_are_off_by_half_a_unit_in_the_last_place(model, tmp_path, passes, dtype):
    view = saved_model(model)
    exact = asked(store_in(tmp_path / "exact"), view, model, TEXTS, 2)
    halves = store_in(tmp_path / "halves", dtype=dtype)
    rounded = asked(halves, view, model, TEXTS, 2)
    bound = {"bfloat16": 2.0**-8, "float16": 2.0**-11}[dtype]
    assert rounded.dtype == np.float32
    assert np.abs(rounded - exact).max() > 0
    assert (np.abs(rounded - exact) <= bound * np.abs(exact) + 2.0**-24).all()
    sizes = [sum(file.stat().st_size for file in (tmp_path / name).rglob("layer-*")) for name in ("exact", "halves")]
    assert sizes[0] == 2 * sizes[1]
    passes.texts = 0
    assert np.array_equal(asked(halves, view, model, TEXTS, 2), rounded)
    assert passes.texts == 0


def test_a_value_beyond_float16_is_refused(model, tmp_path):
    view = saved_model(model)
    with torch.no_grad():
        view.model.get_input_embeddings().weight.mul_(1e6)
    with pytest.raises(InputError, match="store_dtype: layer 0 has a value of .*which float16 cannot hold"):
        asked(store_in(tmp_path, dtype="float16"), view, model, TEXTS, 0)


def test_a_place_that_cannot_be_written_is_named(model, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="cannot write .*file"):
        asked(store_in(tmp_path / "file"), saved_model(model), model, TEXTS, 0)


def test_the_embeddings_of_a_task_go_once_it_is_scored_and_stay_where_it_broke_off(model, tmp_path, passes):
    view, store = saved_model(model), Store(tmp_path)
    opened = {"task": "Songs", "weights_hash": weights_hash(view.model)}
    with (
        pytest.raises(IndexError),
        store.opened(view, embedding_of(model), **opened) as found,
    ):
        found.of(TEXTS, 9)
    assert passes.texts == len(TEXTS)
    passes.texts = 0
    with store.opened(view, embedding_of(model), **opened) as found:
        found.of(TEXTS, 1)
    assert passes.texts == 0
    assert not list(tmp_path.glob("Songs-*"))
