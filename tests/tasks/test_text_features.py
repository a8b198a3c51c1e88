"""Features of texts: against trajectories taken text by text, and on disk."""

import gc
from collections.abc import Callable

import numpy as np
import pytest
import torch
from tokenizers import processors

from lit_layers.data.batches import EncodedTexts, encode_texts
from lit_layers.data.tokenization import save_tokenizer, train_bpe
from lit_layers.errors import InputError
from lit_layers.models.view import LayeredModel
from lit_layers.tasks.text_features import TextPooling, text_features
from tests.support.tiny_models import FAMILIES, LAYERS, VOCAB, tiny, tiny_batch

TEXT_FAMILIES = [name for name in FAMILIES if not name.startswith("vit")]


def encoded(num_texts: int = 9, seed: int = 0) -> EncodedTexts:
    draw = np.random.default_rng(seed)
    lengths = draw.integers(1, 12, num_texts)
    ids = [draw.integers(3, VOCAB, length).astype(np.int32) for length in lengths]
    return EncodedTexts(ids=ids, filler=0, tokenizer_hash="t", num_cut=0)


@pytest.mark.parametrize("family", TEXT_FAMILIES)
def test_features_are_those_of_each_text_alone(family):
    # in float64 the padding mask of Gemma 2 overflows in transformers
    model = LayeredModel(tiny(family, torch.float32 if family == "gemma2" else torch.float64))
    texts = encoded()
    alone = [
        model.trajectory({"input_ids": torch.tensor(ids[None].astype(np.int64))}).hidden[:, 0].double()
        for ids in texts.ids
    ]
    picks: dict[TextPooling, Callable[[torch.Tensor], torch.Tensor]] = {
        "last": lambda hidden: hidden[:, -1],
        "cls": lambda hidden: hidden[:, 0],
        "mean": lambda hidden: hidden.mean(1),
    }
    for pooling, pick in picks.items():
        found = text_features(model, texts, pooling=pooling, max_tokens=30)
        expected = torch.stack([pick(hidden) for hidden in alone], dim=1)  # (layers + 1, texts, dim)
        for layer in range(LAYERS + 1):
            torch.testing.assert_close(found.layer(layer), expected[layer].to(found.layer(layer)), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("states", ["hf", "normed"])
def test_states_are_normed_before_they_are_pooled(states):
    model = LayeredModel(tiny("gpt2", torch.float64))
    texts, norm = encoded(), model.model.transformer.ln_f
    found = text_features(model, texts, pooling="mean", states=states)
    for row, ids in enumerate(texts.ids):
        hidden = model.trajectory({"input_ids": torch.tensor(ids[None].astype(np.int64))}).hidden[:, 0]
        for layer in range(LAYERS + 1):
            state = norm(hidden[layer]) if states == "normed" or layer == LAYERS else hidden[layer]
            torch.testing.assert_close(found.layer(layer)[row], state.mean(0).detach(), rtol=1e-9, atol=1e-9)


def test_centred_unit_tokens_are_averaged_and_a_text_of_one_token_has_no_such_mean():
    model, texts = LayeredModel(tiny("gpt2", torch.float64)), encoded()
    found = text_features(model, texts, pooling="centered_unit_mean").layer(2)
    for row, ids in enumerate(texts.ids):
        state = model.trajectory({"input_ids": torch.tensor(ids[None].astype(np.int64))}).hidden[2, 0].numpy()
        state = state - state.mean(0)
        if len(ids) == 1:
            assert found[row].isnan().all()
            continue
        expected = (state / np.linalg.norm(state, axis=1, keepdims=True)).mean(0)
        np.testing.assert_allclose(found[row].numpy(), expected, rtol=1e-9, atol=1e-9)
    assert found.isnan().any(), "a text of one token is among them"


@pytest.mark.parametrize("family", FAMILIES)
def test_states_pass_as_a_trajectory_holds_them(family):
    model = LayeredModel(tiny(family))
    batch = tiny_batch(family, padding=None if family.startswith("vit") else "left")
    expected, seen = model.trajectory(batch), []
    model.pass_states(batch, lambda layer, hidden, mask: seen.append((layer, hidden.clone(), mask)))
    assert [layer for layer, _, _ in seen] == list(range(LAYERS + 1))
    for layer, hidden, mask in seen:
        assert torch.equal(hidden, expected.hidden[layer])
        assert torch.equal(mask, expected.mask)


def test_batches_hold_every_text_once_and_no_more_tokens_than_allowed():
    texts = encoded(40)
    seen: list[int] = []
    for rows, batch in texts.batches(24):
        assert batch["input_ids"].numel() <= 24 or len(rows) == 1
        for row, ids, mask in zip(rows, batch["input_ids"], batch["attention_mask"], strict=True):
            assert ids[mask.bool()].tolist() == texts.ids[row].tolist()
        seen += rows
    assert sorted(seen) == list(range(40))


def test_a_folder_of_its_own_goes_with_its_object_and_a_broken_pass_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    found = text_features(LayeredModel(tiny("gpt2")), encoded())
    assert len(list(tmp_path.iterdir())) == 1
    del found
    gc.collect()
    assert not list(tmp_path.iterdir())
    broken = tiny("gpt2")
    with torch.no_grad():
        broken.get_parameter("transformer.h.1.mlp.c_fc.weight")[0, 0] = torch.nan
    with pytest.raises(InputError, match=r"the features of text \d at layer 2 are not finite"):
        text_features(LayeredModel(broken), encoded())
    gc.collect()
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_texts_are_cut_at_the_limit_and_texts_without_a_token_are_named(tmp_path):
    tokenizer = train_bpe(["one two three four five six"] * 3, 259)
    save_tokenizer(tokenizer, tmp_path)
    texts = encode_texts(str(tmp_path), ["one two", "six"], max_tokens=4)
    whole = tokenizer.tokenizer.encode("one two").ids
    assert texts.ids[0].tolist() == whole[:4]
    assert texts.num_cut == 1
    assert texts.content_hash() != encode_texts(str(tmp_path), ["one two", "six"], max_tokens=5).content_hash()
    with pytest.raises(InputError, match="makes no token of text 1: use another, or drop the text"):
        encode_texts(str(tmp_path), ["one", ""], max_tokens=4)


def test_a_cut_text_keeps_the_tokens_that_stand_around_every_text(tmp_path):
    found = train_bpe(["one two three four five six"] * 3, 259)
    end, start = found.tokenizer.token_to_id("s"), found.tokenizer.token_to_id("o")
    found.tokenizer.post_processor = processors.TemplateProcessing(
        single="o $A s", special_tokens=[("o", start), ("s", end)]
    )
    save_tokenizer(found, tmp_path)
    plain = found.tokenizer.encode("two three", add_special_tokens=False).ids
    texts = encode_texts(str(tmp_path), ["two three", "two"], max_tokens=6)
    assert texts.ids[0].tolist() == [start, *plain[:4], end]
    assert texts.num_cut == 1
    with pytest.raises(InputError, match="max_tokens: expected more than the 2 special tokens"):
        encode_texts(str(tmp_path), ["two"], max_tokens=2)


def test_autocast_changes_nothing():
    model, texts = LayeredModel(tiny("gpt2")), encoded()
    plain = text_features(model, texts)
    with torch.autocast("cpu", torch.bfloat16):
        cast = text_features(model, texts)
    assert torch.equal(cast.layer(3), plain.layer(3))
