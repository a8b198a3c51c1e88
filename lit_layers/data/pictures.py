"""One split of a labelled image set: small images as one tensor, large ones decoded when they are asked for."""

import hashlib
import io
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from lit_layers.errors import InputError

SMALL = 64  # px; images up to this size are kept decoded (CIFAR-10: 50,000 x 3 x 32 x 32 B = 0.15 GB)
_BROKEN = (OSError, ValueError, SyntaxError, Image.DecompressionBombError)  # what Pillow says of a file it cannot read


class Pictures(ABC):
    """Labelled images in a fixed order."""

    labels: Tensor  # (images,) int64

    def __len__(self) -> int:
        return len(self.labels)

    @abstractmethod
    def picture(self, index: int) -> Image.Image:
        """One image in RGB.

        Raises:
            InputError: one that cannot be decoded, naming its file or row.
        """

    @abstractmethod
    def content_hash(self) -> str:
        """Sixteen hex digits over the images and their labels."""


class SmallPictures(Pictures):
    """Images of one size, held as uint8."""

    def __init__(self, pixels: Tensor, labels: Tensor) -> None:
        self.pixels, self.labels = pixels, labels  # (images, 3, height, width), (images,)

    def picture(self, index: int) -> Image.Image:
        return Image.fromarray(self.pixels[index].permute(1, 2, 0).numpy())

    def content_hash(self) -> str:
        """Over every pixel."""
        digest = hashlib.sha256(f"{tuple(self.pixels.shape)}".encode())
        digest.update(self.pixels.contiguous().numpy().data)
        digest.update(self.labels.numpy().astype("<i8").tobytes())
        return digest.hexdigest()[:16]


class FilePictures(Pictures):
    """Image files, opened when they are asked for."""

    def __init__(self, files: Sequence[Path], labels: Tensor, root: Path) -> None:
        self.files, self.labels, self.root = files, labels, root

    def picture(self, index: int) -> Image.Image:
        return decoded(self.files[index], str(self.files[index]))

    def content_hash(self) -> str:
        """Over names, sizes and labels, as reading 150 GB would take hours."""
        digest = hashlib.sha256()
        for file, label in zip(self.files, self.labels.tolist(), strict=True):
            digest.update(f"{file.relative_to(self.root)} {file.stat().st_size} {label}\n".encode())
        return digest.hexdigest()[:16]


class EncodedPictures(Pictures):
    """Rows of encoded bytes (a parquet file, a data set of the Hub), decoded when they are asked for."""

    def __init__(self, rows: Any, labels: Tensor, name: str, fingerprint: str) -> None:
        self.rows, self.labels, self.name, self.fingerprint = rows, labels, name, fingerprint

    def picture(self, index: int) -> Image.Image:
        return decoded(self.rows(index), f"row {index} of {self.name}")

    def content_hash(self) -> str:
        """Over the name of the data, its fingerprint and the labels."""
        facts = f"{self.name} {self.fingerprint} ".encode()
        return hashlib.sha256(facts + self.labels.numpy().astype("<i8").tobytes()).hexdigest()[:16]


def decoded(source: Path | bytes | None, name: str) -> Image.Image:
    """An image in RGB from a file or its bytes.

    Raises:
        InputError: what cannot be decoded, by its name.
    """
    try:
        with Image.open(io.BytesIO(source or b"") if not isinstance(source, Path) else source) as image:
            return image.convert("RGB")
    except _BROKEN as error:
        raise InputError(
            f"{name} is no image that can be read ({' '.join(str(error).split())}): repair or remove it"
        ) from error


def kept_small(pictures: Pictures, name: str) -> Pictures:
    """The same images as one tensor where they are small, which is judged by the first.

    Raises:
        InputError: a small image of another size than the first, by its row.
    """
    width, height = pictures.picture(0).size
    if max(width, height) > SMALL:
        return pictures
    pixels = np.empty((len(pictures), height, width, 3), dtype=np.uint8)
    for index in range(len(pictures)):
        image = pictures.picture(index)
        if image.size != (width, height):
            found = f"{image.size[0]} x {image.size[1]}"
            raise InputError(
                f"row {index} of {name} is {found} px where the first image is {width} x {height}: images of up to "
                f"{SMALL} px must be of one size"
            )
        pixels[index] = np.asarray(image)
    return SmallPictures(torch.from_numpy(pixels).permute(0, 3, 1, 2).contiguous(), pictures.labels)


def from_array(images: Any, labels: Any, name: str) -> SmallPictures | EncodedPictures:
    """Images in an array (images, height, width) or (images, height, width, channels) of uint8.

    Raises:
        InputError: another shape or type, or labels that do not go with the images.
    """
    pixels, numbers = np.asarray(images), np.asarray(labels).reshape(-1)
    if pixels.dtype != np.uint8 or pixels.ndim not in (3, 4) or (pixels.ndim == 4 and pixels.shape[3] not in (1, 3)):
        raise InputError(
            f"{name}: expected images as uint8 of shape (images, height, width[, 1 or 3]), got {pixels.dtype} of "
            f"shape {pixels.shape}"
        )
    if len(numbers) != len(pixels) or not np.issubdtype(numbers.dtype, np.integer):
        raise InputError(
            f"{name}: expected a whole number as label of each of {len(pixels)} images, got {numbers.dtype} of shape "
            f"{numbers.shape}"
        )
    grey = pixels[..., None] if pixels.ndim == 3 else pixels
    colour = np.ascontiguousarray(np.broadcast_to(grey, (*grey.shape[:3], 3)).transpose(0, 3, 1, 2))
    return SmallPictures(torch.from_numpy(colour), torch.from_numpy(numbers.astype(np.int64)))
