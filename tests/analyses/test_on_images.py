"""The analyses on a distilled DeiT, two tokens before its patches and drop-path, against float64 by plain formulas.

What each of them does with the states of text is tested where it is at home; here that images give the states, tokens
and labels that they should.
"""

import numpy as np
import pytest
import torch

from lit_layers.analyses import Coupling, Lens, Trajectory
from lit_layers.errors import InputError
from lit_layers.models.view import LayeredModel
from tests.support.distilled import CLASSES, DIM, LAYERS, PATCHES, PREFIX, distilled, states_of_each_image
from tests.support.listed_batches import Listed
from tests.support.measured import records_of
from tests.support.tiny_models import tiny, tiny_batch

TOKENS = PREFIX + PATCHES
OFF = ~np.eye(LAYERS, dtype=bool)


@pytest.fixture(scope="module")
def model():
    return distilled()


@pytest.fixture(scope="module")
def batch():
    return tiny_batch("vit", batch=3) | {"labels": torch.tensor([4, 0, 6])}


@pytest.fixture(scope="module")
def states(model, batch):
    return states_of_each_image(model, batch["pixel_values"])


def found(analysis, model):
    """The records by metric, layer and what their tags say."""
    return {
        (r.metric, r.layer, *(v for k, v in sorted(r.tags.items()) if not k.startswith("num_"))): r
        for r in records_of(analysis, LayeredModel(model))
    }


def test_trajectories_are_those_of_every_token_but_the_class_token(model, batch, states):
    records = found(Trajectory(batches=Listed(batch)), model)
    scores, norms = [], []
    for image in states:
        kept = image[:, 1:]
        steps = np.diff(kept, axis=0)
        units = steps / np.linalg.norm(steps, axis=-1, keepdims=True)
        scores.append((LAYERS / np.linalg.norm(units.sum(0), axis=-1)).mean())
        norms.append(np.linalg.norm(kept, axis=-1).mean(1))
    assert records["line_shape_score", None].value == pytest.approx(np.mean(scores), rel=1e-9)
    assert records["line_shape_score", None].n == 3
    for layer in range(LAYERS + 1):
        assert records["state_norm", layer].value == pytest.approx(np.mean(norms, axis=0)[layer], rel=1e-9)
    patches = found(Trajectory(batches=Listed(batch), drop_first=PREFIX), model)
    expected = np.mean([np.linalg.norm(image[:, PREFIX:], axis=-1).mean(1) for image in states], axis=0)
    assert patches["state_norm", 1].value == pytest.approx(expected[1], rel=1e-9)


def test_the_lens_reads_every_layer_with_both_heads_against_the_labels(model, batch, states):
    records = found(Lens(batches=Listed(batch)), model)
    scale, shift = model.norm.weight.detach().numpy(), model.norm.bias.detach().numpy()
    heads = [[p.detach().numpy() for p in (head.weight, head.bias)] for head in (model.head, model.head_dist)]

    def log_proba(hidden):
        own = hidden[:2]
        own = (own - own.mean(-1, keepdims=True)) / np.sqrt(own.var(-1, keepdims=True) + model.norm.eps)
        own = own * scale + shift
        logits = np.mean([weight @ token + bias for token, (weight, bias) in zip(own, heads, strict=True)], axis=0)
        return logits - np.log(np.exp(logits).sum())

    labels = batch["labels"].numpy()
    model.eval()
    with torch.no_grad():
        own = torch.nn.functional.cross_entropy(model(batch["pixel_values"].double()), batch["labels"]).item()
    model.train()
    assert records["logit_lens_loss", LAYERS].value == pytest.approx(own, rel=1e-10)
    for layer in range(LAYERS + 1):
        scores = np.stack([log_proba(image[layer]) for image in states])
        final = np.stack([log_proba(image[-1]) for image in states])
        assert scores.shape == (3, CLASSES)
        loss, accuracy = records["logit_lens_loss", layer], records["logit_lens_accuracy", layer]
        assert loss.value == pytest.approx(-scores[range(3), labels].mean(), rel=1e-9)
        assert accuracy.value == (scores.argmax(1) == labels).mean()
        divergence = (np.exp(final) * (final - scores)).sum(1).mean()
        assert records["kl_to_final", layer].value == pytest.approx(divergence, rel=1e-9, abs=1e-12)


def own_jacobians(model, image, token):
    """d f_l(X)[token] / d X[token] of every block (layers, dim, dim), and the blocks' states, without drop-path."""
    model.eval()
    (states,) = (torch.tensor(s) for s in states_of_each_image(model, image[None]))
    whole = [
        torch.autograd.functional.jacobian(lambda x, block=block: block(x)[0, token], before[None])[:, 0, token]
        for block, before in zip(model.blocks, states[:-1], strict=True)
    ]
    model.train()
    return torch.stack(whole).numpy() - np.eye(DIM)


def coupling_by_loops(jacobians, k, *, absolute=False):
    """Pairs (layers, layers)."""
    found = np.zeros((len(jacobians), len(jacobians)))
    for i, first in enumerate(jacobians):
        kept = np.linalg.svd(first, compute_uv=False)[:k]
        for j, second in enumerate(jacobians):
            u, _, vt = np.linalg.svd(second)
            seen = u[:, :k].T @ first @ vt[:k].T
            seen = np.abs(seen) if absolute else seen
            found[i, j] = 1 - np.linalg.norm(seen - np.diag(kept)) / np.linalg.norm(kept)
    return found


@pytest.mark.parametrize(
    ("token", "places"),
    [("cls", [0]), ("last_patch", [TOKENS - 1]), (1, [1])],
)
def test_coupling_is_at_the_class_token_the_last_patch_or_averaged_over_patches(model, batch, token, places):
    records = found(Coupling(batches=Listed(batch), k=(5,), token=token, num_prompts=2, num_patches=3), model)
    images = batch["pixel_values"][:2]
    per_image = [
        np.mean([coupling_by_loops(own_jacobians(model, image, place), 5)[OFF].mean() for place in places])
        for image in images
    ]
    record = records["coupling", None, 5]
    assert record.value == pytest.approx(np.mean(per_image), abs=1e-9)
    assert record.n == 2
    assert model.training


def test_the_preset_for_images_is_the_last_patch_of_the_first_image_without_the_final_norm(batch):
    wide = distilled(embed_dim=DIM * 2, depth=2)
    given = Coupling(batches=Listed(batch), preset="released_code")
    given.check(LayeredModel(wide))
    records = {(r.metric, r.layer, r.other_layer, r.tags.get("k")): r for r in records_of(given, LayeredModel(wide))}
    (states,) = (torch.tensor(s) for s in states_of_each_image(wide, batch["pixel_values"][:1]))
    wide.eval()
    jacobians = np.stack(
        [
            torch.autograd.functional.jacobian(lambda x, block=block: block(x)[0, -1], before[None])[:, 0, -1].numpy()
            - np.eye(2 * DIM)
            for block, before in zip(wide.blocks, states[:-1], strict=True)
        ]
    )
    for k in (10, 30, 50):
        pairs = coupling_by_loops(jacobians, k, absolute=True)
        record = records["coupling_with_diagonal", None, None, k]
        assert record.value == pytest.approx(pairs.mean(), abs=1e-9)
        assert record.n == 1
        for one in (1, 2):
            for two in (1, 2):
                assert records["coupling_pair", one, two, k].value == pytest.approx(pairs[one - 1, two - 1], abs=1e-9)
    with pytest.raises(InputError, match="released_code sets token to last_patch, got token cls as well: leave one"):
        Coupling(batches=Listed(batch), preset="released_code", token="cls").check(LayeredModel(wide))


def test_an_image_model_without_a_class_token_has_no_coupling_there(batch):
    view = LayeredModel(tiny("vit_average"))
    given = Coupling(batches=Listed(batch), k=(5,), token="cls")
    for call in (given.check, lambda view: list(records_of(given, view))):
        with pytest.raises(InputError, match="VisionTransformer has no cls: choose another token"):
            call(view)
