"""Crops, flips and erasing of a batch."""

import torch

from lit_layers.training.augmentation import Augmentation

PIXELS = torch.randint(1, 256, (300, 3, 10, 10), generator=torch.Generator().manual_seed(2)).to(torch.uint8)
NUMBERS = torch.arange(300)


def windows(image: torch.Tensor, padding: int) -> list[torch.Tensor]:
    """All crops of a padded image, from the left and from the right."""
    wide = torch.zeros(3, 10 + 2 * padding, 10 + 2 * padding, dtype=image.dtype)
    wide[:, padding:-padding, padding:-padding] = image
    shifts = range(2 * padding + 1)
    crops = [wide[:, top : top + 10, left : left + 10] for top in shifts for left in shifts]
    return crops + [crop.flip(2) for crop in crops]


def test_every_crop_is_a_window_of_the_padded_image_and_all_windows_occur():
    found = Augmentation(seed=0, crop_padding=1, flip=True).on_pixels(PIXELS, NUMBERS)
    places = []
    for image, crop in zip(PIXELS, found, strict=True):
        (place,) = [index for index, window in enumerate(windows(image, 1)) if torch.equal(window, crop)]
        places.append(place)
    counts = torch.tensor(places).bincount(minlength=18)
    assert counts.min() >= 5  # 300 / 18 = 17 expected
    assert counts.max() <= 35


def test_without_a_flip_no_image_is_mirrored_and_without_anything_none_changes():
    found = Augmentation(seed=0, crop_padding=1).on_pixels(PIXELS, NUMBERS)
    for image, crop in zip(PIXELS, found, strict=True):
        assert any(torch.equal(window, crop) for window in windows(image, 1)[:9])
    assert Augmentation(seed=0).on_pixels(PIXELS, NUMBERS) is PIXELS


def test_erasing_fills_one_rectangle_of_some_images_with_noise():
    images = torch.full((2000, 3, 32, 32), 50.0)
    found = Augmentation(seed=0, erasing=0.25).erased(images.clone(), torch.arange(2000))
    changed = (found != 50).all(1)  # (images, height, width)
    assert torch.equal(changed, (found != 50).any(1))
    erased = changed.flatten(1).any(1)
    assert 0.21 < erased.float().mean() < 0.29
    for mask in changed[erased]:
        rows, columns = mask.any(1).nonzero()[:, 0], mask.any(0).nonzero()[:, 0]
        assert mask.sum() == len(rows) * len(columns)  # a rectangle
        assert rows[-1] - rows[0] + 1 == len(rows)
        assert 0.01 < mask.float().mean() < 0.36  # 0.02 to 1/3 before rounding to whole pixels
        assert 0.25 < len(rows) / len(columns) < 4
    noise = found[:, :][(found != 50)]
    assert abs(noise.mean()) < 0.02
    assert abs(noise.std() - 1) < 0.02


def test_an_image_is_treated_in_the_same_way_in_every_batch():
    augmentation = Augmentation(seed=4, crop_padding=2, flip=True, erasing=0.5)
    whole = augmentation.erased(augmentation.on_pixels(PIXELS, NUMBERS).float(), NUMBERS)
    part = torch.tensor([250, 3, 77])
    again = augmentation.erased(augmentation.on_pixels(PIXELS[part], NUMBERS[part]).float(), NUMBERS[part])
    assert torch.equal(again, whole[part])
