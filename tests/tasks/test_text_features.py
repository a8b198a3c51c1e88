"""Features of texts equal those of trajectories of single texts, and are stored on disk."""

import gc
from collections.abc import Callable

import numpy as np
import pytest
import torch

from lit_layers.data.batches import EncodedTexts
from lit_layers.errors import InputError
from lit_layers.models.view import LayeredModel
from lit_layers.tasks.text_features import TextPooling, text_features
from tests.support.tiny_models import LAYERS, VOCAB, tiny, tiny_batch

# Attention to both sides, rotated and added positions, windows. The padding mask of Gemma 2 overflows in float64.
DTYPES = {"bert": torch.float64, "llama": torch.float64, "gemma2": torch.float32, "mpt": torch.float64}


def encoded(num_texts: int = 9, seed: int = 0) -> EncodedTexts:
    draw = np.random.default_rng(seed)
    lengths = draw.integers(1, 12, num_texts)
    ids = [draw.integers(3, VOCAB, length).astype(np.int32) for length in lengths]
    return EncodedTexts(ids=ids, pad_id=0, tokenizer_hash="t", num_cut=0)


def single_states(model: LayeredModel, texts: EncodedTexts) -> list[torch.Tensor]:
    """Return the states (layers + 1, tokens, dim) of each text from its own pass."""
    batches = [{"input_ids": torch.tensor(ids[None].astype(np.int64))} for ids in texts.ids]
    return [model.trajectory(batch).hidden[:, 0] for batch in batches]


@pytest.mark.parametrize("family", DTYPES)
def test_features_equal_those_of_each_text_alone(family):
    model = LayeredModel(tiny(family, DTYPES[family]))
    texts = encoded()
    states = single_states(model, texts)
    picks: dict[TextPooling, Callable[[torch.Tensor], torch.Tensor]] = {
        "last": lambda hidden: hidden[:, -1],
        "cls": lambda hidden: hidden[:, 0],
        "mean": lambda hidden: hidden.mean(1),
    }
    for pooling, pick in picks.items():
        found = text_features(model, texts, pooling=pooling, max_tokens=30)
        expected = torch.stack([pick(hidden.double()) for hidden in states], dim=1)  # (layers + 1, texts, dim)
        for layer in range(LAYERS + 1):
            torch.testing.assert_close(found.layer(layer), expected[layer].to(found.layer(layer)), rtol=1e-5, atol=1e-5)


def test_states_are_normalised_before_pooling():
    model = LayeredModel(tiny("gpt2", torch.float64))
    texts, norm = encoded(), model.model.transformer.ln_f
    for states in ("hf", "normed"):
        found = text_features(model, texts, pooling="mean", states=states)
        for row, hidden in enumerate(single_states(model, texts)):
            for layer in range(LAYERS + 1):
                state = norm(hidden[layer]) if states == "normed" or layer == LAYERS else hidden[layer]
                torch.testing.assert_close(found.layer(layer)[row], state.mean(0).detach(), rtol=1e-9, atol=1e-9)


def test_centred_unit_tokens_are_averaged_and_a_text_of_one_token_gives_nan():
    model, texts = LayeredModel(tiny("gpt2", torch.float64)), encoded()
    found = text_features(model, texts, pooling="centered_unit_mean").layer(2)
    for row, hidden in enumerate(single_states(model, texts)):
        state = hidden[2].numpy() - hidden[2].numpy().mean(0)
        if len(state) == 1:
            assert found[row].isnan().all()
            continue
        expected = (state / np.linalg.norm(state, axis=1, keepdims=True)).mean(0)
        np.testing.assert_allclose(found[row].numpy(), expected, rtol=1e-9, atol=1e-9)
    assert found.isnan().any(), "a text of one token is among them"


def test_pass_states_gives_the_states_of_a_trajectory():
    for family, padding in (("gpt2", "left"), ("bert", "right"), ("vit", None)):
        model, batch = LayeredModel(tiny(family)), tiny_batch(family, padding=padding)
        expected, seen = model.trajectory(batch), []
        model.pass_states(batch, lambda *passed, seen=seen: seen.append(passed))
        assert [layer for layer, _, _ in seen] == list(range(LAYERS + 1))
        for layer, hidden, mask in seen:
            assert torch.equal(hidden, expected.hidden[layer])
            assert torch.equal(mask, expected.mask)


def test_the_temporary_folder_is_removed_with_its_object_and_after_a_failed_pass(tmp_path, monkeypatch):
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


def test_autocast_has_no_effect():
    model, texts = LayeredModel(tiny("gpt2")), encoded()
    plain = text_features(model, texts)
    with torch.autocast("cpu", torch.bfloat16):
        cast = text_features(model, texts)
    assert torch.equal(cast.layer(3), plain.layer(3))
