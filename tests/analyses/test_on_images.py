"""Analyses of a distilled DeiT with drop-path and two tokens before its patches, against formulas in float64.

The file of each analysis tests it on texts. These tests check the states, tokens and labels of images.
"""

import itertools

import numpy as np
import pytest
import torch

from lit_layers.analyses import Coupling, Lens
from lit_layers.errors import InputError
from lit_layers.models.view import LayeredModel
from tests.analyses.whole_jacobians import coupling_by_loops, whole_jacobians
from tests.support.distilled import CLASSES, DIM, LAYERS, distilled, states_of_each_image
from tests.support.listed_batches import Listed
from tests.support.measured import keyed_records, records_of
from tests.support.tiny_models import tiny, tiny_batch


@pytest.fixture(scope="module")
def model():
    return distilled()


@pytest.fixture(scope="module")
def batch():
    return tiny_batch("vit", batch=3) | {"labels": torch.tensor([4, 0, 6])}


@pytest.fixture(scope="module")
def states(model, batch):
    return states_of_each_image(model, batch["pixel_values"])


def test_the_lens_reads_every_layer_with_both_heads_and_compares_with_labels(model, batch, states):
    records = keyed_records(Lens(batches=Listed(batch)), model)
    labels = batch["labels"]

    def log_proba(hidden):
        """Average the logits of both heads on their own tokens, as timm does."""
        normed = torch.nn.functional.layer_norm(hidden, (DIM,), model.norm.weight, model.norm.bias, model.norm.eps)
        logits = (model.head(normed[:, 0]) + model.head_dist(normed[:, 1])) / 2
        return logits.log_softmax(-1)

    with torch.no_grad():
        own = torch.nn.functional.cross_entropy(model.eval()(batch["pixel_values"].double()), labels).item()
        layer_scores = [log_proba(torch.tensor(np.stack(layer))) for layer in zip(*states, strict=True)]
    model.train()
    assert records["logit_lens_loss", LAYERS].value == pytest.approx(own, rel=1e-10)
    for layer, scores in enumerate(layer_scores):
        assert scores.shape == (3, CLASSES)
        loss, accuracy = records["logit_lens_loss", layer], records["logit_lens_accuracy", layer]
        assert loss.value == pytest.approx(-scores[range(3), labels].mean().item(), rel=1e-9)
        assert accuracy.value == (scores.argmax(1) == labels).double().mean()
        divergence = (layer_scores[-1].exp() * (layer_scores[-1] - scores)).sum(1).mean().item()
        assert records["kl_to_final", layer].value == pytest.approx(divergence, rel=1e-9, abs=1e-12)


def test_the_released_preset_uses_the_last_patch_of_the_first_image_without_the_final_norm(batch):
    wide = distilled(embed_dim=DIM * 2, depth=2)
    given = Coupling(batches=Listed(batch), preset="released_code")
    given.check(LayeredModel(wide))
    records = {(r.metric, r.layer, r.other_layer, r.tags.get("k")): r for r in records_of(given, LayeredModel(wide))}
    image = {"pixel_values": batch["pixel_values"][:1].double()}
    jacobians, _ = whole_jacobians(wide.eval(), wide.blocks, image, outputs=[-1])
    for k in (10, 30, 50):
        pairs = {
            (one, two): coupling_by_loops(jacobians[one, -1, -1], jacobians[two, -1, -1], k, absolute=True)[0]
            for one, two in itertools.product(range(2), range(2))
        }
        record = records["coupling_with_diagonal", None, None, k]
        assert record.value == pytest.approx(np.mean([*pairs.values()]), abs=1e-9)
        assert record.n == 1
        for (one, two), value in pairs.items():
            assert records["coupling_pair", one + 1, two + 1, k].value == pytest.approx(value, abs=1e-9)
    with pytest.raises(InputError, match="released_code sets token to last_patch, got token cls as well: leave one"):
        Coupling(batches=Listed(batch), preset="released_code", token="cls").check(LayeredModel(wide))


def test_an_image_model_without_a_class_token_refuses_coupling_at_it(batch):
    view = LayeredModel(tiny("vit_average"))
    given = Coupling(batches=Listed(batch), k=(5,), token="cls")
    for call in (given.check, lambda view: records_of(given, view)):
        with pytest.raises(InputError, match="VisionTransformer has no cls: choose another token"):
            call(view)
