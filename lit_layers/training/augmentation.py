"""Augmentation of small images, a batch at a time, on the device that trains.

What happens to an image is a function of (seed, sample number): of neither its batch, nor a worker, nor the rank.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from lit_layers.training.draws import normals, uniforms
from lit_layers.training.rand_augment import RandAugment

# Of timm's random erasing: share of the image, height over width, attempts to place the rectangle.
_AREA, _ASPECT, _ATTEMPTS = (0.02, 1 / 3), (0.3, 1 / 0.3), 10


@dataclass(frozen=True)
class Augmentation:
    """Padded crop, horizontal flip and RandAugment on pixels of 0..255; erasing afterwards, on normalised ones."""

    seed: int
    crop_padding: int = 0
    flip: bool = False
    rand_augment: RandAugment | None = None
    erasing: float = 0.0

    def on_pixels(self, pixels: Tensor, numbers: Tensor) -> Tensor:
        """Of uint8 (images, 3, height, width); `numbers` (images,) are on the CPU."""
        if self.crop_padding or self.flip:
            pixels = self._cropped(pixels, numbers)
        return pixels if self.rand_augment is None else self.rand_augment(pixels, self.seed, numbers)

    def _cropped(self, pixels: Tensor, numbers: Tensor) -> Tensor:
        """Zeros all around, a window of the old size, from the left or from the right."""
        device, padding = pixels.device, self.crop_padding
        height, width = pixels.shape[2:]
        draws = uniforms(self.seed, "crop", numbers, 3)
        top, left = (draws[:, :2] * (2 * padding + 1)).long().T
        across = torch.arange(width).expand(len(numbers), width)
        if self.flip:
            across = torch.where(draws[:, 2:] < 0.5, across.flip(1), across)
        rows = (top[:, None] + torch.arange(height)).to(device, non_blocking=True)[:, None, :, None]
        columns = (left[:, None] + across).to(device, non_blocking=True)[:, None, None, :]
        image = torch.arange(len(pixels), device=device).view(-1, 1, 1, 1)
        channel = torch.arange(3, device=device).view(1, 3, 1, 1)
        return torch.nn.functional.pad(pixels, [padding] * 4)[image, channel, rows, columns]

    def erased(self, images: Tensor, numbers: Tensor) -> Tensor:
        """Fills a rectangle of some of the normalised images with noise; in place."""
        if not self.erasing:
            return images
        height, width = images.shape[2:]
        draws = uniforms(self.seed, "erase", numbers, 3 + 2 * _ATTEMPTS)
        area = (_AREA[0] + (_AREA[1] - _AREA[0]) * draws[:, 3 : 3 + _ATTEMPTS]) * height * width
        low, high = math.log(_ASPECT[0]), math.log(_ASPECT[1])
        aspect = torch.exp(low + (high - low) * draws[:, 3 + _ATTEMPTS :])
        tall, wide = (area * aspect).sqrt().round(), (area / aspect).sqrt().round()  # (images, attempts)
        fits = (tall < height) & (wide < width)
        rows = torch.nonzero((draws[:, 0] < self.erasing) & fits.any(1))[:, 0]
        if not len(rows):
            return images
        attempt = fits[rows].int().argmax(1, keepdim=True)  # the first that fits
        tall, wide = tall[rows].gather(1, attempt), wide[rows].gather(1, attempt)
        top, left = ((draws[rows, 1:2] * (height - tall + 1)).floor(), (draws[rows, 2:3] * (width - wide + 1)).floor())
        down, across = torch.arange(height), torch.arange(width)
        inside = ((down >= top) & (down < top + tall))[:, None, :, None]
        inside = inside & ((across >= left) & (across < left + wide))[:, None, None, :]  # (rows, 1, height, width)
        device = images.device
        noise = normals(self.seed, "noise", numbers[rows].to(device, non_blocking=True), 3 * height * width).view(
            -1, 3, height, width
        )
        rows = rows.to(device, non_blocking=True)
        images[rows] = torch.where(inside.to(device, non_blocking=True), noise.to(images), images[rows])
        return images
