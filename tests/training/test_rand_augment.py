"""RandAugment on tensors: each operation against timm's on Pillow images."""

import random

import numpy as np
import pytest
import torch
from PIL import Image
from timm.data.auto_augment import LEVEL_TO_ARG, NAME_TO_OP

from lit_layers.errors import InputError
from lit_layers.training.augmentation import OPERATIONS, RandAugment

FILL = (120, 130, 140)
SMOOTH = torch.nn.functional.interpolate(
    torch.rand(12, 3, 8, 8, generator=torch.Generator().manual_seed(0)), size=(32, 32), mode="bicubic"
)
PIXELS = (SMOOTH.clamp(0, 1) * 200 + 20 * torch.arange(12).view(-1, 1, 1, 1) / 12).to(torch.uint8)


def by_timm(name: str, level: float, sign: int, monkeypatch) -> torch.Tensor:
    monkeypatch.setattr(random, "random", lambda: 0.1 if sign > 0 else 0.9)  # decides timm's sign
    function: object = LEVEL_TO_ARG[name]
    arguments = function(10 * level, {}) if callable(function) else ()
    images = []
    for image in PIXELS:
        pillow = Image.fromarray(image.permute(1, 2, 0).numpy())
        changed = NAME_TO_OP[name](pillow, *arguments, fillcolor=FILL, resample=Image.Resampling.BILINEAR)
        images.append(torch.from_numpy(np.array(changed)).permute(2, 0, 1))
    return torch.stack(images).float()


@pytest.mark.parametrize("name", OPERATIONS)
def test_an_operation_gives_what_pillow_gives(name, monkeypatch):
    count = len(PIXELS)
    for level in (0.0, 0.31, 0.9, 1.0):
        for sign in (1, -1):
            strength = torch.full((count,), level, dtype=torch.float64)
            kinds = torch.full((count,), OPERATIONS.index(name))
            augment = RandAugment(fill=tuple(map(float, FILL)))  # pyright: ignore[reportArgumentType]
            found = augment._layer(PIXELS.float(), kinds, strength, sign * strength)
            difference = (found - by_timm(name, level, sign, monkeypatch)).abs()
            assert difference.max() <= 1  # a rounding
            assert (difference > 0).float().mean() < 0.05


def test_an_image_is_augmented_in_the_same_way_in_every_batch():
    augment, numbers = RandAugment(), torch.arange(12)
    whole = augment(PIXELS, 5, numbers)
    assert torch.equal(augment(PIXELS[[8, 3]], 5, numbers[[8, 3]]), whole[[8, 3]])
    assert not torch.equal(augment(PIXELS, 6, numbers), whole)
    assert not torch.equal(augment(PIXELS, 5, numbers + 12), whole)


def test_half_of_the_operations_are_applied_and_the_whole_numbers_stay():
    many = PIXELS.repeat(100, 1, 1, 1)
    found = RandAugment(num_layers=1)(many, 0, torch.arange(1200))
    changed = (found != many).flatten(1).any(1).float().mean()
    assert 0.42 < changed < 0.54  # 1/2; now and then one leaves an image as it was
    assert torch.equal(found, found.round())
    assert 0 <= found.min() <= found.max() <= 255


def test_timms_text_is_understood_and_what_is_not_offered_refused():
    assert RandAugment.parsed("rand-m9-mstd0.5-inc1", (0.5, 0.25, 1.0)) == RandAugment(9, 0.5, 2, (128, 64, 255))
    assert RandAugment.parsed("rand-m5-n3-inc1", (0, 0, 0)) == RandAugment(5, 0, 3, (0, 0, 0))
    with pytest.raises(InputError, match="expected rand-mM.* for small images, got 'augmix-m5'"):
        RandAugment.parsed("augmix-m5", (0, 0, 0))
