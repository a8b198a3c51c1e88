"""A saved image model of transformers, from its folder to measured numbers."""

import json
import math
from pathlib import Path

import pytest
import torch
from torch import nn

from lit_layers.analyses import LabelProbe, Representation, Trajectory
from lit_layers.data import EvalImages
from lit_layers.errors import InputError
from lit_layers.models import LayeredModel, load
from lit_layers.models.pixels import PREPROCESSOR
from tests.support.measured import records_of
from tests.support.measured_series import analyze
from tests.support.saved_models import saved
from tests.support.tiny_models import IMAGE, LAYERS, tiny

HALF = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3, "size": {"height": IMAGE, "width": IMAGE}}


def digits(**options) -> EvalImages:
    return EvalImages("digits", **{"num_images": 24, "image_size": IMAGE, "normalisation": "half", **options})


def probe(**options) -> LabelProbe:
    train, test = digits(split="train", num_images=60), digits(num_images=20)
    usual = {"train": train, "test": test, "tolerance": 0.1, "random_labels": False, "max_iterations": 50}
    return LabelProbe(**{**usual, **options})


@pytest.fixture
def folder(tmp_path) -> Path:
    saved(tmp_path / "dinov2", "picture_dinov2_trunk")
    (tmp_path / "dinov2" / PREPROCESSOR).write_text(json.dumps(HALF))
    return tmp_path / "dinov2"


def test_numbers_equal_those_of_the_hidden_states_of_transformers(folder, tmp_path):
    (found,) = analyze(folder, [Trajectory(batches=digits(num_images=3))], root=tmp_path / "run", device="cpu")
    (batch,) = digits(num_images=3)
    with torch.no_grad():
        model = load(folder)
        states = torch.stack(model(batch["pixel_values"], output_hidden_states=True).hidden_states)[:, :, 1:]
    steps = nn.functional.normalize(states.double().diff(dim=0), dim=-1)
    expected = (LAYERS / steps.sum(0).norm(dim=-1)).mean()
    scores = {r.metric: r.value for r in found.records if r.layer is None and not r.tags.get("statistic")}
    assert scores["line_shape_score"] == pytest.approx(float(expected), rel=1e-5)


def test_images_of_another_normalisation_or_size_are_refused(folder, tmp_path):
    model = LayeredModel(load(folder))
    for analysis in (Trajectory, Representation):
        analysis(batches=digits()).check(model)
        with pytest.raises(InputError, match=r"imagenet of digits gives mean \(0.485.* trained with mean"):
            analysis(batches=digits(normalisation="imagenet")).check(model)
    saved(tmp_path / "vit", "picture_vit")
    strict = LayeredModel(load(tmp_path / "vit"))
    Trajectory(batches=digits(normalisation="imagenet")).check(strict)  # the statistics are unknown
    with pytest.raises(InputError, match="expected an image_size of 16, which the model takes, got images of 8 px"):
        Trajectory(batches=digits(image_size=8)).check(strict)


@pytest.mark.parametrize("name", ["picture_vit_trunk", "picture_mae_trunk", "picture_clip"])
def test_labels_are_probed_at_the_class_token_and_at_the_mean_patch(name):
    """At layer 0 the class token is equal in all images, so that its probe learns only the class frequencies."""
    found = records_of(probe(pooling=("cls", "mean")), LayeredModel(tiny(name)))
    values = {(r.metric, r.layer, r.tags.get("pooling")): r.value for r in found if "reference" not in r.tags}
    (majority,) = [r.value for r in found if r.metric == "log_loss" and "reference" in r.tags]
    assert {layer for _, layer, _ in values} == set(range(LAYERS + 1))
    assert all(math.isfinite(value) for value in values.values())
    assert values["log_loss", 0, "cls"] == pytest.approx(majority, abs=0.05)
    assert values["accuracy", 0, "mean"] > values["accuracy", 0, "cls"]


def test_the_mean_leaves_out_registers(monkeypatch):
    model = LayeredModel(tiny("picture_registers"))
    usual = probe(pooling="mean")
    (batch,) = digits(num_images=2)
    features = usual.update(model.trajectory(batch), batch)["mean"].mT
    hidden = model.trajectory(batch).hidden
    torch.testing.assert_close(features, hidden[:, :, 5:].mean(2), rtol=1e-5, atol=1e-5)
