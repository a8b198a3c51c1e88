"""Images for analyses: a fixed set, normalised and identified by its hash."""

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.datasets import load_digits

from lit_layers.data import EvalImages
from lit_layers.data.images import image_source, resized
from lit_layers.errors import InputError
from tests.data.test_image_sources import write_folders


def test_batches_hold_normalised_images_of_the_test_split_with_their_labels():
    images = EvalImages("digits", num_images=10, batch_size=4)
    batches = list(images)
    assert [len(batch["labels"]) for batch in batches] == [4, 4, 2]
    assert len(images) == 3
    together = torch.cat([batch["pixel_values"] for batch in batches])
    assert together.shape == (10, 3, 8, 8)
    assert together.dtype == torch.float32
    # Find each image among the test digits of scikit-learn by its pixels, and compare its label.
    digits = load_digits()
    pictures = image_source("digits").train
    train = pictures.pixels[:, 0].numpy().astype(np.float64) / 255
    levels = np.rint(digits.images * 255 / 16) / 255
    expected = (levels - train.mean()) / train.std()
    for image, label in zip(together[:, 0].double().numpy(), torch.cat([b["labels"] for b in batches]), strict=True):
        (found,) = np.flatnonzero(np.abs(expected - image).max((1, 2)) < 1e-5)
        assert digits.target[found] == label


def test_imagenet_normalisation_equals_its_formula():
    pixels = image_source("digits").test.pixels.double() / 255
    order = torch.randperm(len(pixels), generator=torch.Generator().manual_seed(0))[:5]
    found = EvalImages("digits", num_images=5, normalisation="imagenet").images()[0]
    for channel, (mean, std) in enumerate(zip((0.485, 0.456, 0.406), (0.229, 0.224, 0.225), strict=True)):
        torch.testing.assert_close(found[:, channel].double(), (pixels[order, channel] - mean) / std, atol=1e-6, rtol=0)


def test_a_larger_set_begins_with_a_smaller_one_and_sets_have_different_hashes():
    small, large = EvalImages("digits", num_images=7), EvalImages("digits", num_images=20)
    assert torch.equal(large.images()[0][:7], small.images()[0])
    before = small.content_hash()
    for batch in small:
        batch["pixel_values"].zero_()  # must not change the set
    assert small.content_hash() == before
    options = [{}, {"seed": 1}, {"split": "train"}, {"batch_size": 3}, {"normalisation": "half"}]
    hashes = [EvalImages("digits", num_images=7, **each).content_hash() for each in options]
    assert hashes[0] == before
    assert len(set(hashes)) == 5


def test_large_images_keep_the_centre_of_their_shorter_side(tmp_path):
    write_folders(tmp_path, size=128)
    images = EvalImages(str(tmp_path), num_images=4, image_size=112, normalisation="half")
    found, labels = images.images()
    pictures = image_source(str(tmp_path)).test
    order = torch.randperm(4, generator=torch.Generator().manual_seed(0))
    assert labels.tolist() == pictures.labels[order].tolist()
    # 112 / 0.875 = 128, so nothing is resized and the central 112 of 128 pixels remain.
    expected = np.asarray(Image.open(pictures.rows(int(order[0]))))[8:120, 8:120].astype(np.float64) / 127.5 - 1
    torch.testing.assert_close(found[0].double(), torch.from_numpy(expected).permute(2, 0, 1), atol=1e-6, rtol=0)


def test_resizing_keeps_a_constant_image_constant():
    image = torch.full((1, 3, 8, 8), 37, dtype=torch.uint8)
    torch.testing.assert_close(resized(image, 12), torch.full((1, 3, 12, 12), 37.0))
    assert resized(image, 8) is image


def test_too_many_images_no_images_and_unknown_statistics_are_refused(tmp_path):
    with pytest.raises(InputError, match="num_images: expected at least 1, got 0"):
        EvalImages("digits", num_images=0)
    write_folders(tmp_path)
    with pytest.raises(InputError, match="are large: take imagenet or half"):
        EvalImages(str(tmp_path), num_images=2).images()
