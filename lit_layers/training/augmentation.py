"""Augmentation of small images, a batch at a time, on the device that trains.

What happens to an image is a function of (seed, sample number): of neither its batch, nor a worker, nor the rank.
"""

import math
import re
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from lit_layers.errors import InputError

_GOLDEN = 0x9E3779B97F4A7C15
_MULTIPLIERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)


def uniforms(seed: int, stream: str, numbers: Tensor, count: int) -> Tensor:
    """`count` numbers in [0, 1) for each sample number, float64: (samples, count). Each stream has its own."""
    return _shifted(_cells(seed, stream, numbers, count), 11).double() * 2.0**-53


def normals(seed: int, stream: str, numbers: Tensor, count: int) -> Tensor:
    """`count` standard normal numbers for each sample number, float32: (samples, count)."""
    bits = _cells(seed, stream, numbers, -(-count // 2))
    radius = (-2 * torch.log((_shifted(bits, 40).float() + 0.5) * 2.0**-24)).sqrt()
    angle = (bits & 0xFFFFFF).float() * (2 * math.pi * 2.0**-24)
    return torch.cat([radius * angle.cos(), radius * angle.sin()], dim=1)[:, :count]


def _cells(seed: int, stream: str, numbers: Tensor, count: int) -> Tensor:
    """64 random bits a cell, by SplitMix64 (Steele et al. 2014), in integers that wrap around."""
    key = _mixed(torch.tensor([_wrapped(seed), _wrapped(int.from_bytes(stream.encode()[:8], "big"))]))
    start = _mixed(numbers.long() ^ int(_mixed(key[:1] * 3 + key[1:])))
    steps = torch.arange(1, count + 1, device=numbers.device) * _wrapped(_GOLDEN)
    return _mixed(start[:, None] + steps)  # (samples, count)


def _mixed(bits: Tensor) -> Tensor:
    for shift, multiplier in zip((30, 27), _MULTIPLIERS, strict=True):
        bits = (bits ^ _shifted(bits, shift)) * _wrapped(multiplier)
    return bits ^ _shifted(bits, 31)


def _shifted(bits: Tensor, by: int) -> Tensor:
    """Shift to the right that fills with zeros, where torch fills with the sign."""
    return (bits >> by) & ((1 << (64 - by)) - 1)


def _wrapped(number: int) -> int:
    """The int64 of the same bits."""
    return (number + 2**63) % 2**64 - 2**63


_DENOMINATOR = 10.0
_FORM = re.compile(r"rand-m(\d+)(?:-n(\d+))?(?:-mstd(\d+(?:\.\d+)?))?-inc1")
_NUM_MOVES = 5  # operations that move pixels: the first of them
_NUM_DRAWS = 5  # a layer: which operation, whether, two for the strength, sign


@dataclass(frozen=True)
class RandAugment:
    """`num_layers` operations an image, each applied with probability 1/2; the strength varies by `deviation`."""

    magnitude: float = 9.0
    deviation: float = 0.5
    num_layers: int = 2
    fill: tuple[float, float, float] = (128.0, 128.0, 128.0)

    @classmethod
    def parsed(cls, text: str, mean: tuple[float, ...]) -> "RandAugment":
        """From timm's way to write it; what a moved image uncovers gets the mean colour.

        Raises:
            InputError: a text that says anything else.
        """
        match = _FORM.fullmatch(text)
        if match is None:
            raise InputError(f"data.rand_augment: expected rand-mM[-nN][-mstdS]-inc1 for small images, got {text!r}")
        fill = tuple(min(255.0, float(round(255 * share))) for share in mean)
        return cls(float(match[1]), float(match[3] or 0), int(match[2] or 2), fill)  # pyright: ignore[reportArgumentType]

    def __call__(self, pixels: Tensor, seed: int, numbers: Tensor) -> Tensor:
        """Of (images, 3, height, width) in 0..255 as float; `numbers` are on the CPU: which operation goes where must
        be known there, or a GPU would have to be waited for."""
        draws = uniforms(seed, "randaug", numbers, self.num_layers * _NUM_DRAWS)
        pixels = pixels.float()
        for layer in range(self.num_layers):
            choice, applied, first, second, sign = draws[:, layer * _NUM_DRAWS : (layer + 1) * _NUM_DRAWS].T
            gauss = (-2 * torch.log1p(-first)).sqrt() * torch.cos(2 * math.pi * second)
            level = (self.magnitude + self.deviation * gauss).clamp(0, _DENOMINATOR) / _DENOMINATOR
            signed = torch.where(sign < 0.5, level, -level)
            kind = (choice * len(OPERATIONS)).long()
            pixels = self._layer(pixels, torch.where(applied < 0.5, kind, -1), level, signed)
        return pixels

    def _layer(self, pixels: Tensor, kind: Tensor, level: Tensor, signed: Tensor) -> Tensor:
        """The images sorted by what is done with them: each operation has a slice, and one transfer brings all that
        they need."""
        group = (kind - _NUM_MOVES).clamp(min=-1) + 2 - (kind < 0).long()  # 0: nothing, 1: moved, then one a change
        order = group.argsort(stable=True)
        fills = torch.tensor(self.fill, dtype=torch.float64).expand(len(kind), 3)
        columns = (level, signed, *_matrices(kind, signed).flatten(1).T, *fills.T)
        table = torch.stack([order, order.argsort(), *(column[order] for column in columns)], dim=1)
        values = sent(table, pixels.device)
        sizes = torch.bincount(group, minlength=2 + len(_CHANGES)).tolist()
        parts = list(pixels[values[:, 0].long()].split(sizes))
        for number, options in enumerate(values[:, 2:].to(pixels).split(sizes)):
            if number == 1 and len(options):
                parts[number] = _affine(parts[number], options[:, 2:8].view(-1, 2, 3), options[:, 8:])
            elif number and len(options):
                parts[number] = _CHANGES[number - 2](parts[number], *options[:, :2].T)
        return torch.cat(parts)[values[:, 1].long()]


def sent(values: Tensor, device: torch.device) -> Tensor:
    """On the device, without the host's waiting: a GPU takes from pinned memory alone when it comes to it."""
    return values.pin_memory().to(device, non_blocking=True) if device.type != "cpu" else values


# ------------------------------------------------------------------------------------------------ moving pixels


def _matrices(kind: Tensor, level: Tensor) -> Tensor:
    """Where the pixels of an output are taken from, (images, 2, 3), in units of half a square image from its centre."""
    turn = torch.deg2rad(torch.where(kind == 0, -30 * level, 0))
    shear = [torch.where(kind == number, 0.3 * level, 0) for number in (1, 2)]
    shift = [torch.where(kind == number, 0.9 * level, 0) for number in (3, 4)]  # 0.45 of the width
    # Shears of timm leave the first row (column) in its place, half an image from the centre.
    rows = (
        torch.stack([turn.cos(), turn.sin() + shear[0], shear[0] + shift[0]], dim=1),
        torch.stack([shear[1] - turn.sin(), turn.cos(), shear[1] + shift[1]], dim=1),
    )
    return torch.stack(rows, dim=1)


def _affine(pixels: Tensor, matrices: Tensor, fill: Tensor) -> Tensor:
    grid = F.affine_grid(matrices, list(pixels.shape), align_corners=False)  # (images, height, width, 2)
    taken = F.grid_sample(pixels, grid, mode="bilinear", padding_mode="border", align_corners=False)
    inside = (grid.abs() <= 1).all(-1)[:, None]
    return torch.where(inside, taken.floor(), fill[:, :, None, None])


# ------------------------------------------------------------------------------------------------ changing values


def _auto_contrast(pixels: Tensor, level: Tensor, signed: Tensor) -> Tensor:
    low, high = pixels.amin((2, 3), keepdim=True).double(), pixels.amax((2, 3), keepdim=True).double()
    scale = 255 / (high - low).clamp(min=1)
    stretched = (pixels * scale - low * scale).floor().clamp(0, 255).to(pixels)
    return torch.where(high > low, stretched, pixels)


def _equalize(pixels: Tensor, level: Tensor, signed: Tensor) -> Tensor:
    values = pixels.long().flatten(2)  # (images, 3, height x width)
    counts = torch.zeros(*values.shape[:2], 256, dtype=torch.long, device=pixels.device)
    counts.scatter_add_(2, values, torch.ones_like(values))
    last = counts.gather(2, values.amax(2, keepdim=True))
    step = (values.shape[2] - last) // 255
    table = ((step // 2 + counts.cumsum(2) - counts) // step.clamp(min=1)).clamp(max=255)
    return torch.where(step > 0, table.gather(2, values), values).view_as(pixels).to(pixels)


def _invert(pixels: Tensor, level: Tensor, signed: Tensor) -> Tensor:
    return 255 - pixels


def _posterize(pixels: Tensor, level: Tensor, signed: Tensor) -> Tensor:
    size = _column(2.0 ** (4 + (4 * level).floor()))  # 4 to 0 bits are kept
    return (pixels / size).floor() * size


def _solarize(pixels: Tensor, level: Tensor, signed: Tensor) -> Tensor:
    return torch.where(pixels < _column(256 - (256 * level).floor()), pixels, 255 - pixels)


def _solarize_add(pixels: Tensor, level: Tensor, signed: Tensor) -> Tensor:
    return torch.where(pixels < 128, (pixels + _column((110 * level).floor())).clamp(max=255), pixels)


def _color(pixels: Tensor, level: Tensor, signed: Tensor) -> Tensor:
    return _blended(_grey(pixels), pixels, signed)


def _contrast(pixels: Tensor, level: Tensor, signed: Tensor) -> Tensor:
    return _blended((_grey(pixels).mean((2, 3), keepdim=True) + 0.5).floor(), pixels, signed)


def _brightness(pixels: Tensor, level: Tensor, signed: Tensor) -> Tensor:
    return _blended(torch.zeros_like(pixels), pixels, signed)


def _sharpness(pixels: Tensor, level: Tensor, signed: Tensor) -> Tensor:
    kernel = pixels.new_ones(3, 1, 3, 3)
    kernel[:, :, 1, 1] = 5
    smooth = pixels.clone()  # Pillow leaves the border as it is
    smooth[:, :, 1:-1, 1:-1] = (F.conv2d(pixels, kernel, groups=3) / 13 + 0.5).floor()
    return _blended(smooth, pixels, signed)


def _blended(degenerate: Tensor, pixels: Tensor, signed: Tensor) -> Tensor:
    factor = _column((1 + 0.9 * signed).clamp(min=0.1))
    return (degenerate + factor * (pixels - degenerate)).clamp(0, 255).floor()


def _grey(pixels: Tensor) -> Tensor:
    red, green, blue = pixels.split(1, dim=1)
    return ((19595 * red + 38470 * green + 7471 * blue + 32768) / 65536).floor()


def _column(values: Tensor) -> Tensor:
    return values.view(-1, 1, 1, 1)


_CHANGES = (
    *(_auto_contrast, _equalize, _invert, _posterize, _solarize),
    *(_solarize_add, _color, _contrast, _brightness, _sharpness),
)
OPERATIONS = (
    *("Rotate", "ShearX", "ShearY", "TranslateXRel", "TranslateYRel"),
    *("AutoContrast", "Equalize", "Invert", "PosterizeIncreasing", "SolarizeIncreasing"),
    *("SolarizeAdd", "ColorIncreasing", "ContrastIncreasing", "BrightnessIncreasing", "SharpnessIncreasing"),
)


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
        places = sent(torch.cat([top[:, None] + torch.arange(height), left[:, None] + across], dim=1), device)
        rows, columns = places[:, None, :height, None], places[:, None, None, height:]
        image = torch.arange(len(pixels), device=device).view(-1, 1, 1, 1)
        channel = torch.arange(3, device=device).view(1, 3, 1, 1)
        return torch.nn.functional.pad(pixels, [padding] * 4)[image, channel, rows, columns]

    def erased(self, images: Tensor, numbers: Tensor) -> Tensor:
        """Fill a rectangle of some of the normalised images with noise; in place."""
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
        corners = [each[:, 0].long() for each in (top, left, top + tall, left + wide)]
        chosen = sent(torch.stack([rows, numbers[rows], *corners], dim=1), images.device)
        top, left, bottom, right = chosen[:, 2:, None].unbind(1)  # (rows, 1) each
        down, across = (torch.arange(size, device=images.device) for size in (height, width))
        inside = ((down >= top) & (down < bottom))[:, None, :, None]
        inside = inside & ((across >= left) & (across < right))[:, None, None, :]  # (rows, 1, height, width)
        noise = normals(self.seed, "noise", chosen[:, 1], 3 * height * width).view(-1, 3, height, width)
        images[chosen[:, 0]] = torch.where(inside, noise.to(images), images[chosen[:, 0]])
        return images
