"""Pixel statistics of image models, from a preprocessor_config.json or a timm config.json."""

import json

import pytest
import torch

from lit_layers.models import load, save, truncate
from lit_layers.models.build import untrained, vit
from lit_layers.models.pixels import PREPROCESSOR, keep_preprocessor_, pixel_statistics, set_pixel_statistics_
from lit_layers.models.saved import describe, initialise
from tests.support.saved_models import saved
from tests.support.tiny_models import tiny

SETTINGS = {"image_processor_type": "BitImageProcessor", "image_mean": [0.5, 0.4, 0.3], "image_std": [0.2, 0.2, 0.25]}
KNOWN = ((0.5, 0.4, 0.3), (0.2, 0.2, 0.25))


@pytest.fixture
def folder(tmp_path):
    saved(tmp_path / "whole", "picture_dinov2")
    (tmp_path / "whole" / PREPROCESSOR).write_text(json.dumps(SETTINGS))
    return tmp_path / "whole"


def test_loaded_truncated_saved_and_untrained_models_have_pixel_statistics(folder, tmp_path):
    model = load(folder)
    assert pixel_statistics(model) == KNOWN
    cut = truncate(model, 2, head=False)
    save(cut, tmp_path / "cut")
    assert json.loads((tmp_path / "cut" / PREPROCESSOR).read_text()) == SETTINGS
    config = json.loads((folder / "config.json").read_text())
    fresh = initialise(config, "whole", seed=0, dtype=torch.float32, preprocessor=SETTINGS)
    for other in (cut, load(tmp_path / "cut"), untrained(model), fresh):
        assert pixel_statistics(other) == KNOWN


def test_pixel_statistics_are_unknown_without_a_file(tmp_path):
    saved(tmp_path, "picture_vit")
    assert pixel_statistics(load(tmp_path)) is None
    save(load(tmp_path), tmp_path / "again")
    assert not (tmp_path / "again" / PREPROCESSOR).exists()
    for settings in ({"size": {"height": 16, "width": 16}}, {"image_mean": 0.5}, {"image_std": 0.5}):
        (tmp_path / PREPROCESSOR).write_text(json.dumps(settings))
        assert pixel_statistics(load(tmp_path)) is None, settings


def test_pixel_statistics_are_for_pixels_in_0_to_1_for_every_scaling():
    """By hand: a pixel of 255 becomes (1 - 0.5) / 0.25 = 2, one of 0 becomes -2."""
    for settings in (
        {"image_mean": 0.5, "image_std": 0.25},
        {"do_rescale": True, "rescale_factor": 1 / 127.5, "image_mean": [1.0] * 3, "image_std": [0.5] * 3},
        {"do_rescale": False, "image_mean": [127.5] * 3, "image_std": [63.75] * 3},
    ):
        model = tiny("picture_vit")
        keep_preprocessor_(model, settings)
        mean, std = pixel_statistics(model)
        assert mean == pytest.approx([0.5] * 3)
        assert std == pytest.approx([0.25] * 3)


def test_pixels_without_normalization_have_mean_0_and_deviation_1():
    model = tiny("picture_vit")
    keep_preprocessor_(model, {"do_normalize": False, "image_mean": [0.5] * 3, "image_std": [0.5] * 3})
    assert pixel_statistics(model) == ((0.0,) * 3, (1.0,) * 3)


def test_pixel_statistics_agree_with_the_image_processor_of_transformers():
    from transformers import ViTImageProcessor

    own = ViTImageProcessor(image_mean=[0.1, 0.2, 0.3], image_std=[0.4, 0.5, 0.6], size={"height": 16, "width": 16})
    model = tiny("picture_vit")
    keep_preprocessor_(model, own.to_dict())
    mean, std = (torch.tensor(each)[:, None, None] for each in pixel_statistics(model))
    picture = torch.randint(0, 256, (3, 16, 16), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    expected = torch.as_tensor(own(picture, return_tensors="pt")["pixel_values"][0])
    torch.testing.assert_close((picture / 255 - mean) / std, expected, rtol=0, atol=1e-5)


def test_timm_models_describe_and_save_known_pixel_statistics(tmp_path):
    model = vit("vit_tiny_patch16_224", img_size=16, patch_size=4, depth=1, embed_dim=8, num_heads=2)
    save(model, tmp_path / "unknown")
    assert pixel_statistics(load(tmp_path / "unknown")) is None
    set_pixel_statistics_(model, *KNOWN)
    save(model, tmp_path / "known")
    assert pixel_statistics(load(tmp_path / "known")) == KNOWN
    assert pixel_statistics(initialise(describe(model), "described", seed=0, dtype=torch.float32)) == KNOWN
