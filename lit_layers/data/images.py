"""Images to measure on: a fixed set of one split, as the model wants to see them."""

import hashlib
from collections.abc import Iterator
from dataclasses import KW_ONLY, dataclass, field
from typing import Literal

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional as F

from lit_layers.data.batches import Batches
from lit_layers.data.image_sources import ImageSource, Split, image_source
from lit_layers.data.pictures import Pictures, SmallPictures
from lit_layers.errors import InputError

Normalisation = Literal["imagenet", "half", "source"]
STATISTICS = {
    "imagenet": ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
    "half": ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5)),
}
USUAL_SIZE = 224
CROP = 0.875  # share of the shorter side that a large image keeps: 224 of 256


@dataclass
class EvalImages(Batches):
    """Images of a labelled set, drawn without replacement, in the model's normalisation, without any augmentation.

    `{"pixel_values": (batch, 3, image_size, image_size), "labels": (batch,)}`, float32 and int64. Images of up to 64 px
    are resized as a whole, larger ones to `image_size` / 0.875 by their shorter side and then cropped in the centre.

    Args:
        source: As for `LitImageData`: `digits`, `cifar10`, `cifar100`, a local path, or `ORG/NAME` of the Hub.
        split: `test` or `train`.
        num_images: Number of images. A larger set begins with the images of a smaller one.
        image_size: Of the model's input, in px; None: the source's, or 224 where its images are large.
        batch_size: Images a batch; the last batch may be smaller.
        seed: Decides which images are drawn, and their order.
        normalisation: `imagenet` or `half` (0.5, 0.5): fixed means and deviations of the channels; `source`: those of
            the source's training images, where they are small.

    Raises:
        InputError: for options out of range, and on the first walk for a source that cannot be read or has too few
            images.
    """

    source: str
    _: KW_ONLY
    split: Split = "test"
    num_images: int = 256
    image_size: int | None = None
    batch_size: int = 32
    seed: int = 0
    normalisation: Normalisation = "source"
    _pixels: Tensor | None = field(default=None, init=False, repr=False, compare=False)
    _labels: Tensor | None = field(default=None, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.split not in ("train", "test"):
            raise InputError(f"expected the split train or test, not {self.split!r}")
        if self.normalisation not in (*STATISTICS, "source"):
            raise InputError(f"expected the normalisation imagenet, half or source, not {self.normalisation!r}")
        for name in ("num_images", "image_size", "batch_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InputError(f"{name} must be at least 1, not {value}")

    def images(self) -> tuple[Tensor, Tensor]:
        """All images and their labels; reads the source on the first call."""
        if self._pixels is None or self._labels is None:
            self._pixels, self._labels = self._load()
        return self._pixels, self._labels  # (num_images, 3, image_size, image_size), (num_images,)

    def mean_and_std(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """What each channel is normalised by, as shares of full brightness."""
        return statistics(image_source(self.source), self.normalisation)

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        pixels, labels = self.images()
        for images, classes in zip(pixels.split(self.batch_size), labels.split(self.batch_size), strict=True):
            yield {"pixel_values": images.clone(), "labels": classes.clone()}

    def __len__(self) -> int:
        return -(-self.num_images // self.batch_size)

    def content_hash(self) -> str:
        """Sixteen hex digits over pixels, labels and how they are cut into batches."""
        pixels, labels = self.images()
        digest = hashlib.sha256(f"{tuple(pixels.shape)} {self.batch_size}".encode())
        digest.update(pixels.numpy().astype("<f4").tobytes())
        digest.update(labels.numpy().astype("<i8").tobytes())
        return digest.hexdigest()[:16]

    def _load(self) -> tuple[Tensor, Tensor]:
        source = image_source(self.source)
        pictures = source.split(self.split)
        if len(pictures) < self.num_images:
            raise InputError(
                f"{self.source!r} has {len(pictures)} images in its {self.split} split, and num_images is "
                f"{self.num_images}: ask for fewer"
            )
        order = torch.randperm(len(pictures), generator=torch.Generator().manual_seed(self.seed))
        chosen = order[: self.num_images]
        size = image_size(source, self.image_size)
        normalise = Normalise(*statistics(source, self.normalisation))
        return normalise(eval_pixels(pictures, chosen.tolist(), size)), pictures.labels[chosen]


class Normalise:
    """uint8 (or float 0..255) pixels of (images, 3, height, width) to float32, by channel."""

    def __init__(self, mean: tuple[float, ...], std: tuple[float, ...]) -> None:
        self.mean, self.std = mean, std
        self._shift = torch.tensor(mean).mul(255).view(3, 1, 1)
        self._scale = torch.tensor(std).mul(255).reciprocal().view(3, 1, 1)

    def __call__(self, pixels: Tensor) -> Tensor:
        if self._shift.device != pixels.device:
            self._shift, self._scale = self._shift.to(pixels.device), self._scale.to(pixels.device)
        return (pixels.float() - self._shift) * self._scale


def statistics(source: ImageSource, normalisation: Normalisation) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation of each channel, as shares of full brightness.

    Raises:
        InputError: those of a source of large images.
    """
    if normalisation in STATISTICS:
        return STATISTICS[normalisation]
    pictures = source.train
    if not isinstance(pictures, SmallPictures):
        raise InputError(
            f"normalisation: expected imagenet or half, got source, which is known for small images only and "
            f"{source.name} has large ones"
        )
    means, deviations = [], []
    levels = torch.arange(256, dtype=torch.float64) / 255
    for channel in range(3):
        counts = pictures.pixels[:, channel].flatten().bincount(minlength=256).double()
        mean = (counts * levels).sum() / counts.sum()
        means.append(float(mean))
        deviations.append(float(((counts * (levels - mean) ** 2).sum() / counts.sum()).sqrt()))
    if min(deviations) == 0:
        raise InputError(
            f"normalisation: expected imagenet or half, got source, and a channel of {source.name} is constant"
        )
    return tuple(means), tuple(deviations)


def image_size(source: ImageSource, asked: int | None) -> int:
    """The size of the model's input: where nobody says it, that of small images, and 224 for large ones.

    Raises:
        InputError: small images that are not square.
    """
    if asked is not None:
        return asked
    pictures = source.train
    if not isinstance(pictures, SmallPictures):
        return USUAL_SIZE
    height, width = pictures.pixels.shape[2:]
    if height != width:
        raise InputError(
            f"image_size: expected a number of pixels, as the images of {source.name} are {width} x {height} px"
        )
    return height


def eval_pixels(pictures: Pictures, chosen: list[int], size: int) -> Tensor:
    """Images as a model is tested on them, in 0..255: (images, 3, size, size)."""
    if isinstance(pictures, SmallPictures):
        return resized(pictures.pixels[chosen], size)
    return torch.stack([_centre(pictures.picture(index), size) for index in chosen])


def resized(pixels: Tensor, size: int) -> Tensor:
    """The same images in another size (bicubic); as they are where it is theirs."""
    if pixels.shape[2:] == (size, size):
        return pixels
    large = F.interpolate(pixels.float(), (size, size), mode="bicubic", antialias=True, align_corners=False)
    return large.clamp(0, 255)


def _centre(image: Image.Image, size: int) -> Tensor:
    shorter = round(size / CROP)
    scale = shorter / min(image.size)
    image = image.resize((round(image.width * scale), round(image.height * scale)), Image.Resampling.BICUBIC)
    left, top = (image.width - size) // 2, (image.height - size) // 2
    pixels = np.asarray(image.crop((left, top, left + size, top + size)))
    return torch.from_numpy(pixels.copy()).permute(2, 0, 1)
